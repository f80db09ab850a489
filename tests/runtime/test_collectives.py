from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from accel_trainer.errors import ConfigError, ProcessGroupError, UnsupportedTypeError
from accel_trainer.runtime import collectives
from accel_trainer.runtime.collectives import ReduceOp
from accel_trainer.runtime.process import ProcessContext, init_process, read_environment
from accel_trainer.runtime.tensor_trees import concatenate, find_batch_size, recursively_apply, send_to_device
from accel_trainer.runtime.uneven_gather import gather_known_rows
from tests.ranks import run_ranks

ALONE = ProcessContext(0, 0, 1, 1, torch.device("cpu"), None)
Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Output:
    logits: Any
    extra: Any = None


def join() -> ProcessContext:
    return init_process(read_environment(), use_cpu=True, timeout_seconds=30)


# --- one process ---------------------------------------------------------------------------------------------------


def test_one_process_has_the_shapes_of_many() -> None:
    assert collectives.gather(torch.tensor(3.0), ALONE).shape == (1,)
    assert collectives.gather(torch.ones(2, 3), ALONE).shape == (2, 3)
    assert collectives.gather_object({"k": 1}, ALONE) == [{"k": 1}]
    assert collectives.gather_object(["a", "b"], ALONE) == ["a", "b"]
    assert collectives.broadcast_object("x", ALONE) == "x"
    assert collectives.scatter_objects(["mine"], ALONE) == "mine"
    assert collectives.all_gather_integers([1, 2], ALONE)() == [[1, 2]]
    assert collectives.pad_across_processes(torch.ones(2, 3), ALONE, dim=1).shape == (2, 3)
    assert gather_known_rows(torch.ones(2, 3), [2], ALONE).shape == (2, 3)


@pytest.mark.parametrize("op", ["sum", "mean", "min", ReduceOp.MAX, "prod", "none"])
def test_reduce_of_one_process_has_the_dtype_of_many(op: str) -> None:
    reduced = collectives.reduce(torch.tensor([3]), ALONE, op)

    assert reduced.tolist() == [3]
    assert reduced.dtype is (torch.float32 if op == "mean" else torch.int64)


def test_an_unknown_reduction_and_what_is_no_tensor_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown reduction 'meen', expected one of sum, .*; did you mean 'mean'\?"):
        collectives.reduce(torch.ones(1), ALONE, "meen")
    message = "gather takes tensors and nestings of tensors, and got a str; use gather_object"
    with pytest.raises(UnsupportedTypeError, match=message):
        collectives.gather({"a": torch.ones(1), "b": "text"}, ALONE)


def test_padding_refuses_what_it_cannot_do_before_ranks_talk() -> None:
    # A rank of two, in a process that has joined none: a collective would be another error.
    process = ProcessContext(0, 0, 2, 2, torch.device("cpu"), "gloo")
    with pytest.raises(ConfigError, match=r"pad_index=-1 does not fit a tensor of torch.uint8, which holds 0 to 255"):
        collectives.pad_across_processes({"mask": torch.ones(2, dtype=torch.uint8)}, process, pad_index=-1)
    with pytest.raises(ConfigError, match=r"pad_index=-1 does not fit a tensor of torch.bool, which holds 0 and 1"):
        collectives.pad_across_processes(torch.ones(2, dtype=torch.bool), process, pad_index=-1)
    for place in (process, ALONE):
        with pytest.raises(ConfigError, match=r"pad_across_processes takes tensors .* and got a str"):
            collectives.pad_across_processes({"a": torch.ones(1), "b": "text"}, place)


def test_gather_ragged_wants_a_size_of_each_rank() -> None:
    process = ProcessContext(1, 1, 2, 2, torch.device("cpu"), "gloo")
    with pytest.raises(ConfigError, match="got 3 sizes for 2 ranks"):
        gather_known_rows(torch.ones(3, 2), [4, 2, 1], process)


def test_find_batch_size_takes_the_first_tensor_with_rows() -> None:
    assert find_batch_size({"scale": torch.tensor(1.0), "x": [torch.ones(5, 2)]}) == 5
    assert find_batch_size(["text"]) is None


def test_concatenate_joins_leaf_by_leaf() -> None:
    parts = [
        {"x": torch.full((2, 1), float(i)), "ids": [f"{i}"], "pair": Pair(torch.tensor(i), None)} for i in range(2)
    ]

    joined = concatenate(parts)

    assert joined["x"].shape == (4, 1)
    assert joined["ids"] == ["0", "1"]
    assert joined["pair"].left.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="concatenate got no parts"):
        concatenate([])


def test_concatenate_joins_by_key_in_any_order() -> None:
    first, second = {"a": torch.tensor([1]), "b": torch.tensor([9])}, {"b": torch.tensor([8]), "a": torch.tensor([2])}
    joined = concatenate([(first,), (second,)])
    assert (joined[0]["a"].tolist(), joined[0]["b"].tolist()) == ([1, 2], [9, 8])
    with pytest.raises(ConfigError, match=r"parts with the keys \['a', 'b'\] and \['a'\]; give all the same"):
        concatenate([first, {"a": torch.tensor([1])}])


def test_concatenate_fills_parts_of_different_lengths() -> None:
    short, long = {"x": torch.ones(1, 2, dtype=torch.int64)}, {"x": torch.ones(2, 3, dtype=torch.int64)}

    joined = concatenate([short, long], pad_index=-100)

    assert joined["x"].tolist() == [[1, 1, -100], [1, 1, 1], [1, 1, 1]]
    assert concatenate([torch.ones(2, 1), torch.ones(3, 2)], dim=1, pad_index=0).tolist()[2] == [0, 1, 1]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        concatenate([short, long])


def test_samples_of_one_process_are_a_list_as_on_many() -> None:
    rows = collectives.gather({"x": torch.arange(4).view(2, 2), "loss": torch.tensor(3.0)}, ALONE, as_samples=True)

    assert [row.tolist() for row in rows["x"]] == [[0, 1], [2, 3]]
    assert [row.tolist() for row in rows["loss"]] == [3.0]
    assert collectives.gather(torch.ones(2, 3), ALONE, pad_index=0).shape == (2, 3)
    with pytest.raises(ConfigError, match="got pad_index=0 and as_samples=True; give pad_index to fill"):
        collectives.gather(torch.ones(2), ALONE, pad_index=0, as_samples=True)


@pytest.mark.parametrize(
    ("dtype", "value", "held"),
    [
        (torch.uint8, -100, "0 to 255"),
        (torch.int64, 0.5, "-9223372036854775808 to"),
        (torch.int64, float("inf"), "-9223372036854775808 to"),
        (torch.float16, -1e9, "-65504.0 to 65504.0"),
    ],
)
def test_a_filling_value_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, value: float, held: str) -> None:
    with pytest.raises(ConfigError, match=rf"pad_index={value} does not fit a tensor of {dtype}, which holds {held}"):
        collectives.gather(torch.ones(1, dtype=dtype), ALONE, pad_index=value)
    for fits, own in ((float("-inf"), torch.float16), (-100, torch.bool), (-100, torch.bfloat16)):
        assert collectives.gather(torch.ones(1, dtype=own), ALONE, pad_index=fits).dtype is own


def move_odd_tensors() -> Any:
    process = join()
    x = torch.tensor([1 + 2j * (process.rank + 1)])
    with pytest.raises(UnsupportedTypeError, match=r"reduce got a DTensor, .* call its full_tensor\(\), on every rank"):
        collectives.reduce(DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (2,))), process)
    return collectives.gather(x.conj(), process).tolist()


def test_conjugate_views_are_gathered_and_parts_of_a_tensor_are_refused() -> None:
    assert run_ranks(move_odd_tensors, 2) == [[1 - 2j, 1 - 4j]] * 2


def test_send_to_device_moves_everything_but_skipped_keys() -> None:
    class Own:
        def to(self, device: Any) -> str:
            return f"moved to {device}"

    data = {"x": [torch.ones(1)], "keep": torch.ones(1), "own": Own(), "text": "t"}

    moved = send_to_device(data, "meta", skip_keys=["keep"])

    assert moved["x"][0].device.type == "meta"
    assert moved["keep"].device.type == "cpu"
    assert moved["own"] == "moved to meta"
    assert moved["text"] == "t"
    nested = [UserDict(keep=torch.ones(1), x=(torch.ones(1), {"keep": torch.ones(1)}))]
    (deep,) = send_to_device(nested, "meta", False, "keep")
    assert [each.device.type for each in (deep["keep"], deep["x"][0], deep["x"][1]["keep"])] == ["cpu", "meta", "cpu"]
    assert type(deep) is UserDict
    assert send_to_device(torch.ones(1), "meta", skip_keys=None).is_meta


def test_recursively_apply_leaves_or_refuses_other_types() -> None:
    data = (torch.ones(1), "text")

    assert recursively_apply(func=lambda t: t + 1, data=data)[1] == "text"
    with pytest.raises(ConfigError, match="cannot apply"):
        recursively_apply(lambda t: t + 1, data, error_on_other_type=True)


# --- many processes ------------------------------------------------------------------------------------------------


def gather_everything() -> dict[str, Any]:
    process = join()
    rank = process.rank
    strided = torch.arange(12.0).view(3, 4).t()[:, :2] + 100 * rank
    data = {
        "strided": strided,
        "scalar": torch.tensor(rank, requires_grad=False),
        "nested": [(torch.full((2,), rank), Pair(torch.ones(1, 2) * rank, None))],
        "output": Output(logits=torch.full((1, 1), float(rank), requires_grad=True)),
        "empty": torch.zeros(0, 3),
    }
    gathered = collectives.gather(data, process, debug=True)
    dtypes = [torch.bool, torch.int16, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
    by_dtype = [collectives.gather(torch.tensor([rank, 1]).to(dtype), process) for dtype in dtypes]
    assert [tensor.dtype for tensor in by_dtype] == dtypes
    assert not gathered["output"].logits.requires_grad
    tensors, pair = gathered["nested"][0]
    strided = gathered["strided"].tolist()
    return {
        "strided": strided[:2] + strided[4:6],
        "scalar": gathered["scalar"].tolist(),
        "nested": [tensors.tolist(), pair.left.tolist(), pair.right],
        "output": gathered["output"].logits.tolist(),
        "empty": tuple(gathered["empty"].shape),
        "dtypes": [tensor.to(torch.complex64).real.tolist() for tensor in by_dtype],
    }


@pytest.mark.multirank
def test_gather_keeps_nesting_and_order_for_any_dtype() -> None:
    expected = {
        "strided": [[0.0, 4.0], [1.0, 5.0], [100.0, 104.0], [101.0, 105.0]],
        "scalar": [0, 1],
        "nested": [[0, 0, 1, 1], [[0.0, 0.0], [1.0, 1.0]], None],
        "output": [[0.0], [1.0]],
        "empty": (0, 3),
        "dtypes": [[0, 1, 1, 1]] * 6,
    }
    assert run_ranks(gather_everything, 2) == [expected] * 2


def reduce_everything() -> dict[str, Any]:
    process = join()
    value = torch.tensor([process.rank + 2, 7 - process.rank])
    results: dict[str, Any] = {}
    for op in ReduceOp:
        reduced = collectives.reduce({"v": value}, process, op, debug=True)["v"]
        results[op.value] = (reduced.tolist(), str(reduced.dtype))
    flags = torch.tensor([process.rank == 0, True])
    for op in ("sum", "mean", "min", "max"):
        reduced = collectives.reduce(flags, process, op)
        results[f"bool {op}"] = (reduced.tolist(), str(reduced.dtype))
    small = collectives.reduce(torch.tensor([process.rank], dtype=torch.int16), process, "sum")
    results["int16"] = (small.tolist(), str(small.dtype))
    half = collectives.reduce(torch.tensor([1.0 + process.rank], dtype=torch.bfloat16), process, "mean", scale=2.0)
    results["half"] = (half.tolist(), str(half.dtype))
    for value_of, dtype in ((200, torch.uint8), (100, torch.int8), (40000.0, torch.float16)):
        mean = collectives.reduce(torch.tensor([value_of], dtype=dtype), process, "mean")
        results[f"large {dtype}"] = (mean.tolist(), str(mean.dtype))
    results["untouched"] = value.tolist()
    return results


@pytest.mark.multirank
def test_d12_reduce_means_what_its_name_says() -> None:
    for rank, result in enumerate(run_ranks(reduce_everything, 2)):
        assert result == {
            "sum": ([5, 13], "torch.int64"),
            "mean": ([2.5, 6.5], "torch.float32"),
            "min": ([2, 6], "torch.int64"),
            "max": ([3, 7], "torch.int64"),
            "prod": ([6, 42], "torch.int64"),
            "none": ([rank + 2, 7 - rank], "torch.int64"),
            "bool sum": ([1, 2], "torch.int64"),
            "bool mean": ([0.5, 1.0], "torch.float32"),
            "bool min": ([False, True], "torch.bool"),
            "bool max": ([True, True], "torch.bool"),
            "int16": ([1], "torch.int16"),
            "half": ([3.0], "torch.bfloat16"),
            "large torch.uint8": ([200.0], "torch.float32"),
            "large torch.int8": ([100.0], "torch.float32"),
            "large torch.float16": ([40000.0], "torch.float16"),
            "untouched": [rank + 2, 7 - rank],
        }


def move_objects() -> dict[str, Any]:
    process = join()
    rank = process.rank
    mine = torch.full((2,), rank, dtype=torch.int16)
    sent = collectives.broadcast({"x": mine}, process, from_process=1)["x"]
    wait = collectives.all_gather_integers([rank, rank * 10], process)
    return {
        "dict": collectives.gather_object({"k": rank}, process),
        "lists": collectives.gather_object([f"a{rank}", f"b{rank}"], process),
        "uneven": collectives.gather_object(["only"] if rank else [], process),
        "mixed": collectives.gather_object([1] if rank else {"k": 0}, process),
        "broadcast": (sent.tolist(), mine.tolist()),
        "object": collectives.broadcast_object({"from": rank}, process, from_process=1),
        "object_list": collectives.broadcast_object_list([rank, "x"], process),
        "scattered": collectives.scatter_objects(["zero", "one"] if rank == 0 else None, process),
        "integers": wait(),
    }


@pytest.mark.multirank
def test_d11_objects_keep_their_structure() -> None:
    for rank, result in enumerate(run_ranks(move_objects, 2)):
        assert result["dict"] == [{"k": 0}, {"k": 1}]
        assert result["lists"] == ["a0", "b0", "a1", "b1"]
        assert result["uneven"] == ["only"]
        assert result["mixed"] == [{"k": 0}, [1]]
        assert result["broadcast"] == ([1, 1], [rank, rank])
        assert result["object"] == {"from": 1}
        assert result["object_list"] == [0, "x"]
        assert result["scattered"] == ["zero", "one"][rank]
        assert result["integers"] == [[0, 0], [1, 10]]


def pad_everything() -> dict[str, Any]:
    process = join()
    rank = process.rank
    data = {"wide": torch.ones(2, 2 + rank), "flat": torch.ones(1), "scalar": torch.tensor(1.0), "none": None}
    padded = collectives.pad_across_processes(data, process, dim=1, pad_index=-100)
    first = collectives.pad_across_processes(torch.ones(1 + rank), process, pad_first=True)
    last = collectives.pad_across_processes(torch.ones(2, 2 + rank, dtype=torch.int64), process, dim=-1, pad_index=9)
    ragged = gather_known_rows({"x": torch.full((2 + 2 * rank, 2), float(rank))}, [1, 2], process)["x"]
    return {
        "wide": padded["wide"].tolist(),
        "shapes": [tuple(padded[key].shape) for key in ("flat", "scalar")],
        "first": first.tolist(),
        "last": last.tolist(),
        "ragged": ragged[:, 0].tolist(),
    }


@pytest.mark.multirank
def test_padding_and_ragged_gathering() -> None:
    first, second = run_ranks(pad_everything, 2)

    assert first == {
        "wide": [[1, 1, -100], [1, 1, -100]],
        "shapes": [(1,), ()],
        "first": [0, 1],
        "last": [[1, 1, 9], [1, 1, 9]],
        "ragged": [0, 0, 1, 1, 1, 1],
    }
    assert (second["wide"], second["ragged"]) == ([[1, 1, 1], [1, 1, 1]], first["ragged"])


def gather_any_shapes() -> dict[str, Any]:
    process = join()
    rank = process.rank
    logits = torch.arange(2 * (2 + rank)).view(2, 2 + rank) + 100 * rank
    boxes = torch.full((3 * rank, 4), rank, dtype=torch.int16)
    data = {"logits": logits, "boxes": boxes, "flag": torch.tensor([rank == 0, True]), "loss": torch.tensor(rank + 0.5)}
    padded = collectives.gather(data, process, pad_index=-1)
    samples = collectives.gather((data, None), process, as_samples=True)[0]
    with pytest.raises(
        ConfigError, match=r"pad_index=-1 does not fit a tensor of torch.bool, which holds 0 and 1; give"
    ):
        collectives.gather(logits > 0, process, pad_index=-1)
    return {
        "padded": {name: tensor.tolist() for name, tensor in padded.items()},
        "dtypes": [str(tensor.dtype) for tensor in padded.values()],
        "samples": {name: [row.tolist() for row in rows] for name, rows in samples.items()},
        "same": collectives.gather(torch.full((1, 2), rank), process, pad_index=0).tolist(),
        "empty": collectives.gather(torch.ones(0, 1 + rank), process, pad_index=0).shape,
    }


@pytest.mark.multirank
def test_ragged_dimensions_are_filled_or_come_as_samples() -> None:
    for result in run_ranks(gather_any_shapes, 2):
        assert result["padded"] == {
            "logits": [[0, 1, -1], [2, 3, -1], [100, 101, 102], [103, 104, 105]],
            "boxes": [[1] * 4] * 3,
            "flag": [True, True, False, True],
            "loss": [0.5, 1.5],
        }
        assert result["dtypes"] == ["torch.int64", "torch.int16", "torch.bool", "torch.float32"]
        assert result["samples"]["logits"] == [[0, 1], [2, 3], [100, 101, 102], [103, 104, 105]]
        assert result["samples"]["boxes"] == [[1] * 4] * 3
        assert result["samples"]["loss"] == [0.5, 1.5]
        assert result["same"] == [[0, 0], [1, 1]]
        assert result["empty"] == (0, 2)


REDUCE_PLACE = next(
    f"test_collectives.py:{number}"
    for number, line in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), start=1)
    if line.startswith('        "operator": lambda: collectives.reduce(')
)
"""Of the call that a message below names."""


def disagree(kind: str) -> str:
    process = join()
    rank = process.rank
    calls = {
        "shape": lambda: collectives.gather([torch.ones(1), torch.ones(2, 3 + rank)], process, debug=True),
        "dtype": lambda: collectives.broadcast(
            torch.ones(2).to(torch.int64 if rank else torch.float32), process, debug=True
        ),
        "operator": lambda: collectives.reduce(torch.ones(1), process, "sum" if rank else "max", debug=True),
        "number": lambda: collectives.gather([torch.ones(1)] * (1 + rank), process, debug=True),
        "padding": lambda: collectives.pad_across_processes([torch.ones(2)] * (1 + rank), process, debug=True),
        "dimensions": lambda: collectives.gather(torch.ones((2,) * (1 + rank)), process, pad_index=0),
        "uneven": lambda: gather_known_rows(torch.ones(2 - rank, 3 + rank), [2, 1], process, debug=True),
        "rows": lambda: gather_known_rows(torch.ones(2 - rank + 3 * rank, 1), [2, 3], process, debug=True),
    }
    with pytest.raises(ProcessGroupError) as caught:
        calls[kind]()
    assert collectives.gather(torch.tensor(rank), process).tolist() == [0, 1]
    return str(caught.value)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "shape",
            "do not agree on leaf 1 of gather: rank 0 has float32 (2, 3), rank 1 has float32 (2, 4). Nothing was sent",
        ),
        ("dtype", "leaf 0 of broadcast: rank 0 has float32 (2,), rank 1 has int64 (2,)"),
        ("operator", f"the operation: rank 0 calls reduce(max) in update 0, <lambda> ({REDUCE_PLACE}); rank 1"),
        ("operator", f"rank 1 calls reduce(sum) in update 0, <lambda> ({REDUCE_PLACE}). Nothing was sent"),
        ("number", "leaf 1 of gather: rank 0 nothing, rank 1 has float32 (1,)"),
        ("padding", "leaf 1 of pad_across_processes: rank 0 nothing, rank 1 has float32 with 1 dimension(s)"),
        ("shape", "pass pad_index= or as_samples=True where they may differ"),
        ("dimensions", "rank 0 has float32 with 1 dimension(s), rank 1 has float32 with 2 dimension(s)"),
        ("uneven", "has float32 with 1 row(s) of (3,) for each sample, rank 1 has float32 with 1 row(s) of (4,) for"),
        ("rows", "with 1 row(s) of (1,) for each sample, rank 1 has float32 with 4 row(s) of (1,) for 3 samples"),
    ],
)
def test_debug_names_both_sides_on_every_rank_before_data_moves(kind: str, message: str) -> None:
    for text in run_ranks(disagree, 2, kind):
        assert message in text
