"""Collectives without an Accelerator at hand, the process they speak for, and the flag that any rank may raise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, PartialState, set_seed, utils
from accel_trainer.errors import ConfigError, DistributedOperationException, ProcessGroupError
from accel_trainer.runtime.process import current_process, destroy_process_group
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "accel_trainer.utils")


def exchange() -> dict[str, Any]:
    """Call every collective of `accel_trainer.utils` on this rank."""
    with pytest.raises(
        ProcessGroupError, match=r"has not joined .* yet; make an Accelerator\(\) or a PartialState\(\)"
    ):
        utils.gather(torch.zeros(1))
    rank = PartialState(cpu=True).process_index
    value = torch.tensor([float(rank + 1)])
    names = utils.broadcast_object_list([f"rank {rank}"], from_process=1)
    padded = utils.pad_across_processes(torch.ones(rank + 1), pad_index=-1)
    set_seed(5, device_specific=True)
    seed = torch.initial_seed()
    utils.synchronize_rng_states(["torch"])
    utils.wait_for_everyone()
    return {
        "drawn": torch.rand(2).tolist(),
        "gather": utils.gather({"x": value})["x"].tolist(),
        "object": utils.gather_object({"rank": rank}),
        "sum": utils.reduce(value, "sum").item(),
        "unnamed": [utils.reduce(value).item(), Accelerator(cpu=True).reduce(value).item()],
        "min": utils.reduce(value, "min").item(),
        "mean": utils.reduce(value, utils.ReduceOp.MEAN, scale=2.0).item(),
        "broadcast": utils.broadcast(value, from_process=1).item(),
        "names": names,
        "padded": padded.tolist(),
        "seed": seed,
    }


def test_functions_speak_for_the_job_that_was_joined():
    first, second = run_ranks(exchange, 2)
    shared = {
        "gather": [1.0, 2.0],
        "object": [{"rank": 0}, {"rank": 1}],
        "sum": 3.0,
        "unnamed": [1.5, 3.0],
        "min": 1.0,
        "mean": 3.0,
        "broadcast": 2.0,
        "names": ["rank 1"],
    }
    for result in (first, second):
        assert {key: result[key] for key in shared} == shared
    assert [first["padded"], second["padded"]] == [[1.0, -1.0], [1.0, 1.0]]
    assert [first["seed"], second["seed"]] == [5, 6]
    assert first["drawn"] == second["drawn"]


def test_without_a_launcher_they_speak_for_a_process_alone():
    destroy_process_group()
    assert (current_process().rank, current_process().world_size) == (0, 1)
    assert utils.gather(torch.tensor(3.0)).tolist() == [3.0]
    assert utils.reduce(torch.tensor([2, 4]), "mean").tolist() == [2.0, 4.0]
    utils.wait_for_everyone()
    assert current_process() == Accelerator(cpu=True).process
    before = torch.get_rng_state()
    utils.synchronize_rng_states(["torch"])
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ConfigError, match="rng_types has 'numpy'; expected some of 'torch', 'generator'"):
        utils.synchronize_rng_states(["numpy"])
    with pytest.raises(ConfigError, match="unknown reduction 'minimum', expected one of sum, mean, min"):
        utils.reduce(torch.zeros(1), "minimum")
    with pytest.raises(ConfigError, match="got neither rng_type nor generator"):
        utils.synchronize_rng_state()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.warns(utils.CannotPadNestedTensorWarning, match="leaves as it is; pad it with to_padded_tensor"):
        assert utils.pad_across_processes(nested) is nested


def stop_together() -> list[bool]:
    """Raise the flag on rank 1 at step 2, and look at every step."""
    accelerator = Accelerator(cpu=True)
    seen = []
    for step in range(5):
        if accelerator.process_index == accelerator.num_processes - 1 and step == 2:
            accelerator.set_trigger()
        seen.append(accelerator.check_trigger())
    told = accelerator.broadcast(torch.tensor([accelerator.process_index]), from_process=accelerator.num_processes - 1)
    assert told.item() == accelerator.num_processes - 1
    assert accelerator.broadcast_object_list([accelerator.process_index]) == [0]
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_trigger_of_one_rank_is_seen_once_by_all_at_the_same_step(num_ranks: int):
    assert run_ranks(stop_together, num_ranks) == [[False, False, True, False, False]] * num_ranks


def exchange_more() -> dict[str, Any]:
    """Call the collectives that only some scripts use, with debug on for the last."""
    state = PartialState(cpu=True)
    rank = state.process_index
    generator = torch.Generator().manual_seed(rank)
    utils.synchronize_rng_states(["generator"], generator)
    first = torch.rand(1, generator=generator).item()
    torch.manual_seed(rank)
    utils.synchronize_rng_state("torch")
    second = torch.rand(1).item()
    copied = utils.copy_tensor_to_devices(torch.tensor([1, 2], dtype=torch.int16) if rank == 1 else None)
    with pytest.raises(ConfigError, match="got a tensor on 2 of 2 ranks; give it on one, None elsewhere"):
        utils.copy_tensor_to_devices(torch.ones(1))
    state.debug = True
    for call in (utils.gather, utils.reduce, utils.broadcast):
        with pytest.raises(utils.DistributedOperationException, match=r"rank 1 has float32 \(2,\)"):
            call({"x": torch.ones(rank + 1)})
    with pytest.raises(utils.DistributedOperationException, match="the ranks do not agree"):
        utils.pad_across_processes(torch.ones([1] * (rank + 1)))
    state.debug = False
    return {"drawn": (first, second), "copied": (copied.tolist(), copied.dtype)}


def test_streams_and_tensors_of_one_rank_reach_the_others_and_debug_compares():
    first, second = run_ranks(exchange_more, 2)
    assert first == second
    assert first["copied"] == ([1, 2], torch.int16)


def test_structures_of_tensors():
    data = {"a": [torch.arange(4.0)], "b": ("text", torch.tensor([1.5, 2.5], dtype=torch.bfloat16))}
    assert utils.listify(data) == {"a": [[0.0, 1.0, 2.0, 3.0]], "b": ("text", [1.5, 2.5])}
    assert utils.listify(utils.slice_tensors(data, slice(1, 2)))["a"] == [[1.0]]
    assert utils.find_device(data) == torch.device("cpu")
    assert utils.find_device({"a": 1}) is None
    described = utils.get_data_structure(data)
    assert described["a"][0] == utils.TensorInformation(torch.Size([4]), torch.float32)
    assert utils.initialize_tensors(described)["b"][1].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="cannot apply square to a str; pass nested lists"):
        utils.recursively_apply(torch.square, data, error_on_other_type=True)


@pytest.mark.parametrize(("rows", "ranks", "padded"), [(1, 2, 2), (4, 3, 6), (61, 6, 66), (4, 2, 4)])
def test_inputs_are_padded_to_a_multiple_by_their_last_row(rows: int, ranks: int, padded: int):
    batch = torch.arange(rows)[:, None].expand(rows, 3)
    found = utils.pad_input_tensors({"x": batch}, rows, ranks)["x"]
    assert torch.equal(found[:rows], batch)
    assert (len(found), found[rows:].unique().tolist()) == (padded, [rows - 1] if padded > rows else [])


def differ(kind: str) -> tuple[str, list[int]]:
    """Gather for metrics what differs between two ranks; return the error, and what a gather after it returns."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    values: dict[str, Any] = {
        "columns": torch.ones(3, 4 + rank),
        "rows": torch.ones(300 + rank, 4),
        "dtype": torch.ones(3, dtype=torch.float64 if rank else torch.float32),
        "number": (torch.ones(2),) * (1 + rank),
        "none": ["text"] if rank else torch.ones(2),
    }
    with pytest.raises(DistributedOperationException) as caught:
        accelerator.gather_for_metrics(values[kind])
    return str(caught.value), accelerator.gather_for_metrics(torch.tensor([rank])).tolist()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("columns", "leaf 0 of gather: rank 0 has float32 (3, 4), rank 1 has float32 (3, 5). Nothing was sent"),
        ("rows", "leaf 0 of gather: rank 0 has float32 (300, 4), rank 1 has float32 (301, 4). Nothing was sent"),
        ("dtype", "leaf 0 of gather: rank 0 has float32 (3,), rank 1 has float64 (3,)"),
        ("number", "leaf 1 of gather: rank 0 nothing, rank 1 has float32 (2,)"),
        ("none", "leaf 0 of gather: rank 0 has float32 (2,), rank 1 has 1 value(s) that are no tensors"),
    ],
)
def test_what_differs_between_ranks_is_not_gathered_for_metrics(kind: str, message: str):
    for text, gathered in run_ranks(differ, 2, kind):
        assert message in text
        assert gathered == [0, 1]


def gather_all_kinds() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    dtypes = (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float8_e5m2)
    tensors = [torch.full((3, 2), rank + 1).to(dtype) for dtype in dtypes]
    tensors += [torch.tensor(rank), torch.empty(0, 4), torch.full((5, 100), float(rank)), torch.ones(2, 3).t()]
    tensors += [torch.arange(6.0).view(3, 2)[:, 1:]]
    gathered = accelerator.gather_for_metrics(tensors)
    assert [tensor.dtype for tensor in gathered] == [tensor.dtype for tensor in tensors]
    sums = [tensor.to(torch.complex64).real.sum(dim=0).flatten()[:1].tolist() for tensor in gathered]
    return [(tuple(tensor.shape), total) for tensor, total in zip(gathered, sums, strict=True)]


def test_small_and_large_tensors_of_any_dtype_are_gathered_for_metrics_exactly():
    expected = [((6, 2), [6.0])] + [((6, 2), [9.0])] * 4
    expected += [((2,), [1.0]), ((0, 4), [0.0]), ((10, 100), [5.0]), ((6, 2), [6.0]), ((6, 1), [18.0])]
    assert run_ranks(gather_all_kinds, 2) == [expected] * 2


def gather_numbers() -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(1.0, 6.0), batch_size=2))
    found: tuple[list[Any], ...] = ([], [], [], [])
    for batch in loader:
        mean = batch.mean()
        for kept, each in zip(found, (mean, mean.item(), np.array(mean.item()), {mean.item()}), strict=True):
            kept.extend(accelerator.gather_for_metrics(each))
    for batch in loader:
        found[1].extend(accelerator.gather_for_metrics(batch.mean().item(), use_gather_object=True))
    return found


def test_numbers_of_a_rank_that_has_no_sample_in_a_step_are_left_out():
    for tensors, numbers, arrays, sets in run_ranks(gather_numbers, 2):
        assert [each.item() for each in tensors] == [1.5, 3.5, 5.0]
        assert numbers == [1.5, 3.5, 5.0] * 2
        assert [each.item() for each in arrays] == [1.5, 3.5, 5.0]
        assert sets == [{1.5}, {3.5}, {5.0}]
