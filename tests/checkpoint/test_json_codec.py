"""State goes through JSON and tensors and comes back the same."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_trainer.checkpoint.run_state import decode, encode
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.frozensets(st.integers()).map(set)
    ),
    max_leaves=12,
)


def round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, tensors))), tensors)


@given(NESTED)
def test_plain_structures_come_back_equal_and_of_the_same_classes(value: Any):
    restored = round_trip(value)
    assert restored == value
    assert type(restored) is type(value)


def test_tensors_arrays_and_nan_come_back():
    value = {"t": [torch.arange(3), (torch.tensor(1.5),)], "a": np.arange(2), "n": float("nan"), "s": np.float32(2)}
    restored = round_trip(value)
    assert torch.equal(restored["t"][0], torch.arange(3))
    assert restored["t"][1][0] == 1.5
    assert isinstance(restored["a"], np.ndarray)
    assert restored["n"] != restored["n"]
    assert restored["s"] == 2.0


def test_an_optimizer_state_comes_back():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    restored = round_trip(optimizer.state_dict())
    assert restored["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(restored["state"][0]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_something_else_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"state\.a\.0 is a random\.Random, which a checkpoint cannot hold"):
        encode({"a": [random.Random(0)]}, {})


def test_mapping_subclasses_come_back_as_dicts():
    assert round_trip(defaultdict(list, a=[1])) == {"a": [1]}


def test_a_missing_tensor_is_named():
    with pytest.raises(IncompatibleCheckpointError, match=r"'state\.x' is named in the JSON and missing"):
        decode({"$tensor": "state.x"}, {})
