from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from accel_trainer.tree import honor_type, is_namedtuple, leaves, map_leaves

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Record:
    inner: Any
    label: int = 0
    derived: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True)
class Scaled:
    rows: list[int]
    factor: dataclasses.InitVar[int]
    later: int = dataclasses.field(init=False)

    def __post_init__(self, factor: int) -> None:
        object.__setattr__(self, "rows", [row * factor for row in self.rows])


class Refuses(UserDict):
    def __init__(self) -> None:
        super().__init__()
        self.data = {"a": 1}


NESTINGS = (
    [1, 2], (1, (2, 3)), {"a": 1, "b": [2]}, Point(1, 2), OrderedDict(b=1, a=2), Record(inner={"x": [1]}, label=4),
    UserDict({"k": 1}), {}, [], 5,
)  # fmt: skip


@pytest.mark.parametrize("data", NESTINGS)
def test_classes_and_order_survive_a_mapping(data: Any) -> None:
    mapped = map_leaves(lambda leaf: leaf * 10, data)

    assert type(mapped) is type(data)
    assert list(leaves(mapped)) == [leaf * 10 for leaf in leaves(data)]


def test_model_outputs_and_batch_encodings_keep_their_class() -> None:
    output = SequenceClassifierOutput(loss=torch.tensor(1.0), logits=torch.ones(2, 3))
    encoding = BatchEncoding({"input_ids": torch.ones(2, 3)})

    for data, name in ((output, "logits"), (encoding, "input_ids")):
        doubled = map_leaves(lambda leaf: leaf * 2, data, is_leaf=lambda node: isinstance(node, Tensor))

        assert type(doubled) is type(data)
        assert doubled[name].sum() == 12


def test_a_mapping_that_cannot_be_rebuilt_becomes_a_dict() -> None:
    assert map_leaves(lambda leaf: leaf + 1, Refuses()) == {"a": 2}


def test_fields_of_a_dataclass_are_mapped_and_its_constructor_is_not_called_again() -> None:
    record = Record(inner=1)
    record.derived = 99

    mapped = map_leaves(lambda leaf: leaf + 1, record)

    assert (mapped.inner, mapped.label, mapped.derived) == (2, 1, 100)
    assert list(leaves(record)) == [1, 0, 99]
    assert (record.inner, record.derived) == (1, 99)

    scaled = Scaled([3], 2)
    assert map_leaves(lambda leaf: leaf + 1, scaled).rows == [7]
    assert list(leaves(scaled)) == [6]


def test_is_leaf_stops_the_descent() -> None:
    data = {"rows": [[1, 2], [3]]}

    assert list(leaves(data, is_leaf=lambda node: node == [1, 2])) == [[1, 2], 3]
    assert map_leaves(len, data, is_leaf=lambda node: isinstance(node, list)) == {"rows": 2}


def test_leaves_builds_no_containers() -> None:
    class Fragile(dict):
        def __init__(self) -> None:
            super().__init__(a=1)
            self.builds = getattr(type(self), "builds", 0)
            type(self).builds = self.builds + 1

    data = Fragile()
    assert list(leaves([data, data])) == [1, 1]
    assert Fragile.builds == 1


def test_honor_type_builds_lists_tuples_and_namedtuples() -> None:
    assert honor_type([0], iter([1, 2])) == [1, 2]
    assert honor_type((0,), iter([1, 2])) == (1, 2)
    assert honor_type(Point(0, 0), iter([1, 2])) == Point(1, 2)
    assert is_namedtuple(Point(0, 0))
    assert not is_namedtuple((0, 0))
