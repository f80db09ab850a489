"""The optimizer and the scheduler that a loop holds: when they step, and what they return."""

from __future__ import annotations

import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import Accelerator
from accel_trainer.accelerator.accelerated_optimizer import ReplicaCheck
from accel_trainer.errors import DesyncError
from accel_trainer.optimizer import move_to_device
from accel_trainer.runtime.own_watch import current_watch
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.progress import PROGRESS
from tests.loops import take_update
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("order", ["together", "scheduler first", "scheduler last", "on the wrapper"])
def test_a_schedule_steps_once_per_update_in_whatever_order_things_were_prepared(order: str):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = build()
    if order == "on the wrapper":
        model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if order == "scheduler first":
        scheduler = accelerator.prepare(scheduler)
    if order == "together":
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    elif order != "on the wrapper":
        model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(scheduler)
    for _ in range(8):
        with accelerator.accumulate(model):
            take_update(model(torch.ones(1, 2)).sum(), optimizer, accelerator)
            scheduler.step()
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_step_with_a_closure_returns_its_loss_as_torchs_own_does(kind: type[torch.optim.Optimizer]):
    found = []
    for is_prepared in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        if is_prepared:
            model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        found.append([optimizer.step(closure).item() for _ in range(3)])
    assert found[0] == found[1]


def test_a_prepared_optimizer_and_schedule_show_and_change_what_they_wrap():
    model, optimizer = build()
    other = nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, other, prepared, schedule = Accelerator(cpu=True).prepare(model, other, optimizer, scheduler)
    assert (prepared.defaults, schedule.optimizer, schedule.base_lrs) == (optimizer.defaults, optimizer, [0.1])
    assert repr(prepared) == f"AcceleratedOptimizer({optimizer!r})"

    prepared.add_param_group({"params": other.parameters(), "lr": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    prepared.param_groups, prepared.state = prepared.param_groups[:1], {}
    prepared.defaults = {**prepared.defaults, "lr": 1.0}
    assert (len(optimizer.param_groups), optimizer.state, optimizer.defaults["lr"]) == (1, {}, 1.0)

    calls: list[str] = []
    prepared.register_step_pre_hook(lambda *_: calls.append("before"))
    prepared.register_step_post_hook(lambda *_: calls.append("after"))
    model(torch.ones(1, 2)).sum().backward()
    prepared.step()
    schedule.step()
    assert calls == ["before", "after"]
    assert schedule.get_last_lr() == [0.05]


def test_a_prepared_optimizer_is_pickled_with_its_state_whose_tensors_can_be_moved():
    model, _ = build()
    model, prepared = Accelerator(cpu=True).prepare(model, torch.optim.Adam(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    prepared.step()
    loaded = pickle.loads(pickle.dumps(prepared))
    for name, value in prepared.state_dict()["state"][0].items():
        assert torch.equal(loaded.state_dict()["state"][0][name], value)
    moved = move_to_device({"step": 1, "momenta": [torch.ones(2), (torch.ones(1),)]}, "meta")
    assert moved["step"] == 1
    assert (moved["momenta"][0].device.type, moved["momenta"][1][0].device.type) == ("meta", "meta")


# --- the comparison of the ranks -------------------------------------------------------------------------------------


def save_apart(folder: str, what: str, strategy: str = "ddp") -> str:
    """Save where the second of two ranks has something else; return the error."""
    PROGRESS.updates = 0
    accelerator = Accelerator(cpu=True, config={"strategy": strategy})
    if what == "scale":
        accelerator.scaler = torch.amp.GradScaler("cpu")  # fp16 itself is refused there
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    is_apart = accelerator.process_index == 1
    for update in range(3):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        if not (what == "updates" and is_apart and update == 2):
            optimizer.step()
        optimizer.zero_grad()
    if what == "rate" and is_apart:
        optimizer.param_groups[0]["lr"] = 0.2
    if what == "scale" and is_apart:
        accelerator.scaler.update(1024.0)
    if what == "weights" and is_apart:
        next(model.parameters()).data.add_(1)
    try:
        accelerator.save_state(f"{folder}/{what} {strategy}")
    except DesyncError as error:
        return str(error)
    return ""


def drift() -> tuple[int, str]:
    """Change a weight of one rank in update 10, and train on; return the update at which the error came."""
    PROGRESS.updates = 0
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for update in range(1, 200):
            take_update(model(torch.ones(1, 4)).sum(), optimizer, accelerator)
            if update == 10 and accelerator.process_index == 1:
                next(model.parameters()).data.add_(1)
            deadline = time.monotonic() + 20
            while update == 100 and not current_watch().facts.difference and time.monotonic() < deadline:
                time.sleep(0.02)  # what the threads compare, no update waits for
    except DesyncError as error:
        return update, str(error)
    return update, ""


def check_own_rate() -> None:
    """Train with an optimizer that finds its learning rate by itself: None for it."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, prepared = accelerator.prepare(model, optimizer)
    prepared.param_groups[0]["lr"] = None
    accelerator.check_replicas("save")


def check_all(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {
        what: save_apart(folder, what) for what in ("rate", "weights", "updates", "scale", "nothing")
    }
    results["rate sharded"] = save_apart(folder, "rate", "fsdp2")
    results["nothing sharded"] = save_apart(folder, "nothing", "fsdp2")
    check_own_rate()
    results["drift"] = drift()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(check_all, 2, str(tmp_path_factory.mktemp("states")), timeout=100)


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("rate", r"the learning rate of optimizer 1 \(SGD\) is 0\.1 on rank 0, and 0\.2 on rank 1"),
        ("rate sharded", r"the learning rate of optimizer 1 \(SGD\) is 0\.1 on rank 0, and 0\.2 on rank 1"),
        ("weights", r"the sum of weight \(cpu \w+\) is -?\d+\.\d+ on rank 0, and -?\d+\.\d+ on rank 1"),
        ("scale", r"the loss scale is 65536 on rank 0, and 1024 on rank 1"),
        ("updates", r"the number of updates is 3 on rank 0, and 2 on rank 1"),
    ],
)
def test_r11_a_save_of_ranks_that_differ_names_both_and_their_values(
    ranks: list[dict[str, Any]], what: str, difference: str
) -> None:
    for seen in ranks:
        assert re.match(rf"the ranks are out of step: save to .*: {difference}\. Nothing of it was saved", seen[what])


def test_r11_ranks_that_are_alike_are_saved(ranks: list[dict[str, Any]]) -> None:
    assert [(seen["nothing"], seen["nothing sharded"]) for seen in ranks] == [("", ""), ("", "")]


def test_r11_replicas_that_drift_apart_are_found_without_a_save(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        update, text = seen["drift"]
        assert update == 128
        assert re.match(
            r"the ranks are out of step: after update 64 the sum of weight \(cpu \w+\) is .* on rank 0, ", text
        )


def test_one_process_is_never_out_of_step(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    accelerator.check_replicas("save")
    accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state").is_dir()


def test_a_comparison_is_pickled_with_the_optimizers_that_call_it() -> None:
    check = ReplicaCheck(ProcessContext(0, 0, 2, 2, torch.device("cpu"), None), has_replicas=True)
    assert vars(pickle.loads(pickle.dumps(check))).keys() == vars(check).keys()
