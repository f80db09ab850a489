"""A batch size that fits: found in steps of nine tenths, by all ranks together, and never at the price of a hang."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, InitProcessGroupKwargs
from accel_trainer.errors import BatchSizeError, ConfigError
from accel_trainer.runtime import memory
from accel_trainer.runtime.memory import find_executable_batch_size, is_out_of_memory, release_memory
from accel_trainer.runtime.torch_private import default_group, set_group_timeout
from tests.ranks import RankFailure, preload, run_ranks

preload("accel_trainer.accelerator")


def search(fits: int, **options: Any) -> tuple[Any, list[int]]:
    """What a function returns that runs with batches of up to `fits`, and the sizes that were tried."""
    tried: list[int] = []

    @find_executable_batch_size(**options)
    def train(batch_size: int, factor: int = 1) -> int:
        tried.append(batch_size)
        if batch_size > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return batch_size * factor

    return train(factor=10), tried


def test_each_step_takes_nine_tenths():
    assert search(100) == (920, [128, 115, 103, 92])
    assert search(128) == (1280, [128])
    assert search(1, starting_batch_size=3) == (10, [3, 2, 1])


def same(batch_size: int) -> int:
    return batch_size


def test_the_next_size_can_be_chosen_and_has_to_be_smaller():
    assert search(20, reduce_batch_size_fn=lambda batch_size: batch_size // 2)[1] == [128, 64, 32, 16]
    sizes = iter([50, 10])
    assert search(20, reduce_batch_size_fn=lambda: next(sizes))[1] == [128, 50, 10]
    with pytest.raises(ConfigError, match="same returned 128 after a batch size of 128; return a smaller one"):
        search(1, reduce_batch_size_fn=same)


def test_reaching_zero_is_an_error_that_names_the_ways_out():
    message = (
        r"no executable batch size: none from 4 down to 1 lets train\(\) run.*activation checkpointing, or sharding"
    )
    with pytest.raises(BatchSizeError, match=message):
        search(0, starting_batch_size=4)
    with pytest.raises(BatchSizeError, match=r"no executable .* starting_batch_size=0; begin with 1 or more"):
        search(1, starting_batch_size=0)


def test_another_error_is_raised_at_once_and_name_and_documentation_stay():
    calls: list[int] = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        """Train."""
        calls.append(batch_size)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        train()
    assert calls == [128]
    assert (train.__name__, train.__doc__) == ("train", "Train.")


def test_a_call_that_brings_its_own_batch_size_or_has_no_room_for_one_is_an_error():
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, data: list[int]) -> None:
        """Never reached."""

    refused = "cannot be called with the batch size in front"
    with pytest.raises(ConfigError, match=rf"train\(32, \[1, 2\]\) {refused}.*leave it"):
        train(32, [1, 2])
    with pytest.raises(ConfigError, match=r"train\(data=\[1\], batch_size=3\) .*passes it as the first argument"):
        train(data=[1], batch_size=3)
    with pytest.raises(ConfigError, match=rf"<lambda>\(\) {refused} .*declare it there"):
        find_executable_batch_size(lambda: None)()


def test_nothing_of_a_failed_attempt_is_alive_in_the_next_one():
    alive: list[bool] = []
    previous: list[weakref.ref[nn.Module]] = []

    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size: int) -> None:
        alive.extend(reference() is not None for reference in previous)
        model = nn.Linear(2, 2)
        model.itself = [model]
        previous.append(weakref.ref(model))
        if batch_size > 1:
            raise MemoryError

    train()
    assert alive == [False, False, False]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_are_of_memory(error: BaseException, expected: bool):
    assert is_out_of_memory(error) is expected
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62 // 4)  # the CPU really runs out
    assert is_out_of_memory(caught.value)


def test_release_memory_gives_names_to_overwrite_with():
    model = nn.Linear(2, 2)
    reference = weakref.ref(model)
    model, other = release_memory(model, [1])
    assert (model, other, reference()) == (None, None, None)


def build() -> tuple[nn.Module, TensorDataset]:
    """Return a model and 60 samples: five global batches of 6 on 2 ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, TensorDataset(torch.randn(60, 2))


def plain_loop(batch_size: int) -> list[float]:
    """The sums of the weights after training on one process."""
    model, data = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(data, batch_size=batch_size):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [value.sum().item() for value in model.state_dict().values()]


def train_until_it_fits(strategy: str, who: dict[int, int], where: str) -> dict[str, Any]:
    """Search on 2 ranks; rank r runs out of memory above `who[r]` samples, in the forward or before anything else."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> list[float]:
        accelerator.free_memory()
        tried.append(batch_size)
        too_large = batch_size > who.get(accelerator.process_index, 8)
        if too_large and where == "start":
            raise torch.OutOfMemoryError("out of memory")
        model, data = build()
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=batch_size)
        )
        for step, (x,) in enumerate(loader):
            loss = model(x).square().mean()
            if too_large and where == f"step {step}":
                raise torch.OutOfMemoryError("out of memory")
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        return [value.sum().item() for value in state.values()]

    begin = time.monotonic()
    weights = train()
    seconds = time.monotonic() - begin
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]  # the new group is whole
    return {"tried": tried, "weights": weights, "seconds": seconds}


@pytest.mark.parametrize(("strategy", "where"), [("ddp", "step 2"), ("fsdp2", "step 2"), ("fsdp2", "step 0")])
def test_one_rank_out_of_memory_in_a_step_takes_the_waiting_one_along(strategy: str, where: str):
    # Rank 0 waits in a gradient exchange that rank 1 never enters; in the first step of FSDP2, in the store.
    results = run_ranks(train_until_it_fits, 2, strategy, {1: 6}, where)
    assert [result["tried"] for result in results] == [[8, 7, 6]] * 2
    assert all(result["seconds"] < 30 for result in results)
    assert results[0]["weights"] == pytest.approx(plain_loop(2 * 6), abs=1e-5)


def wait_in_the_store(where: str, path: str) -> tuple[int, float]:
    """Return the size that is found where rank 0 waits for rank 1 in no collective, and the seconds of the search."""
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        for _ in range(63 if where == "the comparison of calls" else 0):
            accelerator.reduce(torch.ones(1))
        if batch_size == 8 and accelerator.process_index == 1:
            raise torch.OutOfMemoryError("out of memory")
        accelerator.reduce(torch.ones(1)) if where == "the comparison of calls" else accelerator.save_state(path)
        return batch_size

    begin = time.monotonic()
    return train(), time.monotonic() - begin


@pytest.mark.parametrize("where", ["the comparison of calls", "a save"])
def test_a_rank_that_waits_in_the_store_learns_of_one_that_runs_out(where: str, tmp_path: Path):
    for found, seconds in run_ranks(wait_in_the_store, 2, where, str(tmp_path / "state")):
        assert found == 7
        assert seconds < 30


def save_in_the_background(ranks: list[int], path: str) -> int:
    """Return the size that is found where the `ranks` run out of memory with saves behind them, the last under way."""
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        accelerator.prepare(nn.Linear(2, 2))
        for step in range(3):
            accelerator.save_state(f"{path}/{batch_size}/{step}", async_=True)
            if batch_size == 8 and step == 1 and accelerator.process_index in ranks:
                raise torch.OutOfMemoryError("out of memory")
        return batch_size

    found = train()
    accelerator.end_training()
    return found


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_saves_in_the_background_begin_anew_in_the_next_attempt(ranks: list[int], tmp_path: Path):
    assert run_ranks(save_in_the_background, 2, ranks, str(tmp_path), timeout=30) == [7, 7]
    assert sorted(str(each.relative_to(tmp_path)) for each in tmp_path.glob("*/*")) == [
        "7/0",
        "7/1",
        "7/2",
        "8/0",
        "8/1",
    ]


@pytest.mark.parametrize(("who", "tried"), [({0: 7}, [8, 7]), ({0: 7, 1: 6}, [8, 7, 6]), ({}, [8])])
def test_ranks_try_the_same_sizes_whoever_runs_out(who: dict[int, int], tried: list[int]):
    results = run_ranks(train_until_it_fits, 2, "ddp", who, "start")
    assert [result["tried"] for result in results] == [tried] * 2


def wait_for_a_device(runs_out: bool) -> float:
    """Rank 0 waits in what stands for a kernel of nccl, which ends when its group is aborted; return for how long."""
    accelerator = Accelerator(cpu=True)
    aborted = threading.Event()
    memory._Ballot.abort = lambda ballot: aborted.set()
    ballot = memory._Ballot("attempt")
    begin = time.monotonic()
    if accelerator.process_index == 0:
        with memory._released_with_others(ballot):
            aborted.wait(20 if runs_out else 3)
    else:
        time.sleep(1)
        ballot.cast(memory._OUT_OF_MEMORY if runs_out else memory._DONE)
        ballot.is_cast(memory._DONE)  # what was cast has arrived
    seconds = time.monotonic() - begin
    accelerator.wait_for_everyone()
    return seconds


def test_ranks_that_wait_on_devices_abort_the_group_when_one_runs_out_of_memory():
    assert 1 < run_ranks(wait_for_a_device, 2, True)[0] < 10
    assert run_ranks(wait_for_a_device, 2, False)[0] >= 3


def abort_groups() -> tuple[list[str], list[str]]:
    """Abort in a job that has a mesh's group and one for the host alone; gloo takes nccl's place."""
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="cpu:gloo,cuda:gloo")])
    replicas = dist.new_group([0, 1], backend="cpu:gloo,cuda:gloo")
    dist.new_group([0, 1], backend="cpu:gloo")
    aborted: list[str] = []
    dist.ProcessGroup.abort = lambda group: aborted.append(group.group_name)
    memory._Ballot("attempt").abort()
    return sorted(aborted), sorted([default_group().group_name, replicas.group_name])


def test_an_abort_reaches_every_group_that_works_on_devices():
    for aborted, expected in run_ranks(abort_groups, 2):
        assert aborted == expected


def end_differently(error_rank: int, waits: bool = False) -> str:
    """Train without collectives: one rank is done, or waits for the other in a reduction, and the other fails."""
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> str:
        if accelerator.process_index == error_rank:
            raise ValueError("a label is missing")
        if waits:  # until the other's connections close
            dist.all_reduce(torch.ones(1))
        return "done"

    try:
        return train()
    except ValueError as error:
        if waits:  # as the process ends
            sys.excepthook(type(error), error, error.__traceback__)
            dist.destroy_process_group()
        raise


def test_another_error_on_one_rank_is_raised_there_and_named_on_the_others():
    with pytest.raises(RankFailure) as caught:
        run_ranks(end_differently, 2, 1)
    assert "ValueError: a label is missing" in caught.value.failures[1]
    assert "ProcessGroupError: rank 1 failed: ValueError: a label is missing. This rank (0)" in caught.value.failures[0]


def test_a_rank_that_waits_for_one_with_another_error_names_it():
    with pytest.raises(RankFailure) as caught:
        run_ranks(end_differently, 2, 1, True)
    assert "ValueError: a label is missing" in caught.value.failures[1]
    assert "RemoteRankError: rank 1 failed" in caught.value.failures[0]


def never_vote() -> None:
    accelerator = Accelerator(cpu=True)
    set_group_timeout(default_group(), 1.0)  # here: a busy machine may take a second to connect
    if accelerator.process_index == 0:
        find_executable_batch_size(lambda batch_size: None)()


def test_a_rank_that_does_not_answer_is_named_after_the_groups_timeout():
    with pytest.raises(RankFailure, match=r"rank\(s\) \[1\] did not say within 1 s how batch size search 0\.0 ended"):
        run_ranks(never_vote, 2)
