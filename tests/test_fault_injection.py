"""Faults of tests happen where and when they were asked for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from accel_trainer.runtime.fault_point import fault_point
from tests.fault_injection import fault_env, injected
from tests.ranks import RankFailure, run_ranks


def test_a_fault_waits_for_its_rank_and_its_step():
    with injected("raise@save.begin:rank=1:step=4"):
        fault_point("save.begin", 4)
    with injected("raise@save.begin:rank=1:step=4; raise@stage", rank=1):
        fault_point("save.begin", 3)
        with pytest.raises(RuntimeError, match=r"fault injected at save\.begin"):
            fault_point("save.begin", 4)
        with pytest.raises(RuntimeError, match="fault injected at stage"):
            fault_point("stage")
    fault_point("stage")
    # A point without a step counts its passes.
    with injected("enospc@load.select:step=1"):
        fault_point("load.select")
        with pytest.raises(OSError, match=r"No space left on device \(injected\)"):
            fault_point("load.select")
        fault_point("load.select")


def test_a_flipped_bit_keeps_the_length(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with injected("flip@save.after_shard"):
        fault_point("save.after_shard", path=path)
    content = path.read_bytes()
    assert len(content) == 100
    assert sorted(content)[-2:] == [0, 1]


def test_one_thread_sleeps_and_with_gil_all_do():
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        with injected("sleep@stage:seconds=0.5"):
            fault_point("stage")
        during_sleep = ticks
        before = ticks
        with injected("gil@stage:seconds=0.5"):
            fault_point("stage")
        during_gil = ticks - before
    finally:
        done.set()
        ticker.join()
    assert during_sleep > 5
    assert during_gil <= 3


@pytest.mark.parametrize(
    "text",
    ["kill@save.begin", "kill9@save.beginn", "kill9@save.begin:when=1", "raise@save.begin:step=1; term@save.begin"],
)
def test_a_fault_that_nobody_understands_is_refused(text: str):
    with pytest.raises(AssertionError), injected(text):
        pass


def native_run(seen: list[str]) -> None:
    """Train two windows of two batches and evaluate two batches; say what was done."""
    from torch import nn
    from torch.utils.data import DataLoader

    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = DataLoader(torch.randn(4, 2)), DataLoader(torch.randn(2, 2))
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *loaders)
    for batch in train_loader:
        seen.append("train batch")
        with accelerator.accumulate(model):
            loss = model(batch).mean()
            seen.append("forward")
            accelerator.backward(loss)
            seen.append("backward")
            optimizer.step()
            seen.append("step")
            optimizer.zero_grad()
    model.eval()
    for batch in eval_loader:
        seen.append("eval batch")
        predictions = model(batch)
        seen.append("prediction")
        accelerator.gather_for_metrics(predictions)
        seen.append("gather")


MISSING = {
    "data.next": "train batch", "train.forward": "forward", "train.backward": "backward", "train.opt": "step",
    "eval.batch": "prediction", "eval.gather": "gather",
}  # fmt: skip


@pytest.mark.parametrize(("point", "missing"), MISSING.items())
def test_a_fault_strikes_in_a_loop_at_its_point(point: str, missing: str):
    whole: list[str] = []
    native_run(whole)
    seen: list[str] = []

    with injected(f"raise@{point}:step=1"), pytest.raises(RuntimeError, match=rf"fault injected at {point}"):
        native_run(seen)

    # The second time: what the loop does next in a run without fault is what the point stands before.
    assert seen == whole[: len(seen)]
    assert whole[len(seen)] == missing
    # The optimizer steps at the end of a window of two batches, and is called after each of them.
    assert seen.count(missing) == (3 if point == "train.opt" else 1)


def die() -> None:
    fault_point("save.begin")
    time.sleep(60)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("kill9", "SIGKILL"), ("term", "SIGTERM"), ("exit0", "exit code 0"), ("stop", "had not finished after 1 s")],
)
def test_a_rank_dies_or_stops_the_way_that_was_asked_for(kind: str, words: str):
    with pytest.raises(RankFailure, match=words):
        run_ranks(die, 1, env=fault_env(f"{kind}@save.begin"), timeout=1 if kind == "stop" else 60)
