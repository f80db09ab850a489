"""Whole tensors in a file without a name: one is in memory at a time, and a writer gets all of them."""

from __future__ import annotations

import resource
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from accel_trainer.checkpoint.weights.weight_files import gather_to_file
from accel_trainer.errors import DiskFullError

made: list[weakref.ref[Tensor]] = []


class Made:
    """A tensor that is made when it is called; none of those before it may be left then, or as many as said."""

    def __init__(self, value: Tensor, may_be_left: int = 0) -> None:
        self.may_be_left = may_be_left
        self.dtype, self.shape = value.dtype, tuple(value.shape)
        self._value = value

    def __call__(self) -> Tensor:
        assert sum(before() is not None for before in made) <= self.may_be_left
        tensor = self._value.clone()
        made.append(weakref.ref(tensor))
        return tensor


@pytest.fixture(autouse=True)
def none_made() -> None:
    made.clear()


VALUES = {
    "weight": torch.randn(5, 3),
    "half": torch.randn(7).to(torch.bfloat16),
    "count": torch.tensor(3),
    "nothing": torch.zeros(0, 4),
}


def test_tensors_come_back_as_they_were_made_and_tied_ones_are_one(tmp_path: Path):
    lazy = {name: Made(value) for name, value in VALUES.items()}
    found = gather_to_file({**lazy, "tied": lazy["weight"]}, tmp_path, writes=True)
    assert len(made) == len(VALUES)
    assert found["tied"] is found["weight"]
    for name, value in VALUES.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    found["weight"].zero_()
    assert torch.equal(found["half"], VALUES["half"])
    assert not list(tmp_path.iterdir())


def test_a_rank_that_does_not_write_makes_each_tensor_once(tmp_path: Path):
    lazy = {name: Made(value) for name, value in VALUES.items()}
    assert gather_to_file({**lazy, "tied": lazy["weight"]}, tmp_path, writes=False) == {}
    assert len(made) == len(VALUES)
    assert gather_to_file({}, tmp_path, writes=True) == {}


def test_where_there_is_no_room_all_are_made_before_that_is_said(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    lazy = {str(number): Made(torch.randn(64), may_be_left=1) for number in range(4)}  # the one that failed
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        with pytest.raises(DiskFullError, match="it exceeds the limit on the size of a file"):
            gather_to_file(lazy, tmp_path, writes=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(made) == 4
