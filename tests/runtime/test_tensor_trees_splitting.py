"""Work is cut into contiguous parts that hold every sample once; padding is asked for, inputs stay as they are."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from accel_trainer import Accelerator, PartialState
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.tensor_trees import split_evenly
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")

KINDS = {
    "list": list,
    "tuple": tuple,
    "range": lambda rows: range(len(rows)),
    "tensor": torch.tensor,
    "matrix": lambda rows: torch.tensor([[row, -row] for row in rows]).view(len(rows), 2),
    "array": np.array,
    "dataset": lambda rows: Dataset.from_dict({"row": list(rows)}),
    "dict": lambda rows: {"a": list(rows), "b": torch.tensor(list(rows))},
    "nested": lambda rows: {"inner": {"a": tuple(rows)}, "b": list(rows)},
}


def rows_of(part: Any) -> list[int]:
    """The samples of a part, whatever its kind."""
    if isinstance(part, dict):
        rows = [rows_of(value) for value in part.values()]
        assert all(row == rows[0] for row in rows)
        return rows[0]
    if isinstance(part, Dataset):
        return part["row"][:]
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return (part if part.ndim == 1 else part[:, 0]).tolist()
    return list(part)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "parts"), [(7, 3), (6, 3), (2, 3), (1, 1)])
def test_the_parts_together_are_the_whole_in_order_and_padding_repeats_the_last_sample(
    kind: str, length: int, parts: int
):
    inputs = KINDS[kind](range(length))
    cut = [rows_of(split_evenly(inputs, parts, index)) for index in range(parts)]
    assert [row for part in cut for row in part] == list(range(length))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert sorted(map(len, cut), reverse=True) == list(map(len, cut))
    longest = -(-length // parts)
    for index, valid in enumerate(cut):
        padded = rows_of(split_evenly(inputs, parts, index, apply_padding=True))
        assert padded == valid + [length - 1] * (longest - len(valid))


@given(length=st.integers(0, 40), parts=st.integers(1, 9), padding=st.booleans())
def test_any_split_is_contiguous_and_complete(length: int, parts: int, padding: bool):
    assert split_evenly({}, parts, parts - 1) == {}
    cut = [split_evenly(list(range(length)), parts, index, apply_padding=padding) for index in range(parts)]
    assert sorted({row for part in cut for row in part}) == list(range(length))
    if padding:
        assert len({len(part) for part in cut}) == 1
    else:
        assert [row for part in cut for row in part] == list(range(length))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [False, True])
def test_d34_the_input_stays_as_it_was(kind: str, padding: bool):
    inputs = KINDS[kind](range(5))
    before = copy.deepcopy(inputs)
    part = split_evenly(inputs, 2, 1, apply_padding=padding)
    assert type(part) is (list if kind == "range" and padding else type(inputs))
    assert rows_of(inputs) == rows_of(before)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("a prompt", "cannot split str between processes: every one of them would do all of it"),
        (7, "cannot split int between processes"),
        ({"a": 7}, "cannot split int"),
        (torch.tensor(1), "cannot split Tensor without dimensions"),
        ({"a": [1, 2], "b": [1]}, "differ in length: 'a' has 2, 'b' has 1"),
    ],
)
def test_what_has_no_samples_is_an_error(inputs: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        split_evenly(inputs, 2, 0)


def split_on_ranks() -> dict[str, Any]:
    """Split through the accelerator and through the state."""
    accelerator = Accelerator(cpu=True)
    prompts = {"text": ["a", "b", "c"], "ids": torch.arange(3)}
    with accelerator.split_between_processes(prompts) as mine:
        texts = mine["text"]
    with PartialState().split_between_processes([1, 2, 3], apply_padding=True) as padded:
        gathered = accelerator.gather(torch.tensor(padded)).tolist()
    return {"texts": texts, "gathered": gathered, "kept": len(prompts["text"])}


def test_ranks_get_their_parts():
    first, second = run_ranks(split_on_ranks, 2)
    assert first == {"texts": ["a", "b"], "gathered": [1, 2, 3, 3], "kept": 3}
    assert second == {"texts": ["c"], "gathered": [1, 2, 3, 3], "kept": 3}
    with Accelerator(cpu=True).split_between_processes(("a", "b")) as mine:
        assert mine == ("a", "b")
