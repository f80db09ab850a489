"""The tree itself: frozen, documented, addressed by dotted paths."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest

from accel_trainer.config import FSDPConfig, MixedPrecision, RunConfig, field_specs
from accel_trainer.config.schema import FrozenDict, get_value


def test_the_tree_cannot_be_changed():
    config = RunConfig()

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mixed_precision = MixedPrecision.BF16
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.fsdp.offload_params = True


def test_paths_reach_every_value():
    config = RunConfig(fsdp=FSDPConfig(wrap_classes=("A",)))

    assert get_value(config, "fsdp.wrap_classes") == ("A",)
    assert all(get_value(RunConfig(), path) == spec.default for path, spec in field_specs().items())


def test_a_frozen_dict_is_a_value():
    content = FrozenDict({"a": {"b": [1, {"c": 2}]}})

    assert content == {"a": {"b": (1, {"c": 2})}}
    assert hash(content) == hash(FrozenDict({"a": {"b": [1, {"c": 2}]}}))
    assert copy.deepcopy(content) == pickle.loads(pickle.dumps(content)) == content
    assert json.loads(json.dumps(content)) == {"a": {"b": [1, {"c": 2}]}}
    assert dataclasses.asdict(RunConfig(deepspeed=content))["deepspeed"] == content


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(b=1),
        lambda content: content.pop("a"),
        lambda content: content.clear(),
        lambda content: content.setdefault("b", 1),
        lambda content: content["a"].__setitem__("b", 1),
        lambda content: content.__delitem__("a"),
        lambda content: content.__ior__({"b": 1}),
    ],
)
def test_a_frozen_dict_refuses_every_change(change):
    with pytest.raises(TypeError, match="part of a frozen configuration; copy it with"):
        change(FrozenDict({"a": {}}))
