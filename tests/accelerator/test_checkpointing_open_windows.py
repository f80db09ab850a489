"""A save in the middle of an accumulation window: the run that goes on makes the same updates."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, DataLoaderConfiguration
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from tests.ranks import run_ranks

GLOBAL_BATCH, STEPS, STOP = 4, 6, 3
"""Micro-batches of all ranks; two make an update, so that the third begins one."""


def build(strategy: str | None, num_steps: int = 2, is_stateful: bool = True, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        gradient_accumulation_steps=num_steps,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=is_stateful, data_seed=1),
        **options,
    )
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(GLOBAL_BATCH * STEPS, 3)
    batch_size = GLOBAL_BATCH * 2 // num_steps // accelerator.num_processes
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size, shuffle=True)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader)


def train(parts: tuple[Any, ...], stop: int | None = None, by_tokens: bool = False) -> list[float]:
    """Train to the end of the epoch, or for some micro-batches; return the losses of all ranks' batches."""
    accelerator, model, optimizer, loader = parts
    losses = []
    for step, (x, y) in enumerate(loader, 1):
        with accelerator.accumulate(model):
            error = nn.functional.mse_loss(model(x), y, reduction="sum" if by_tokens else "mean")
            accelerator.backward(accelerator.global_token_mean(error, len(x)) if by_tokens else error)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(error.detach(), "mean").item())
        if step == stop:
            break
    return losses


def run(folder: Path, strategy: str | None, by_tokens: bool = False) -> tuple[list[float], list[float]]:
    """Train without a stop; then with a save in the middle of an update."""
    whole = train(build(strategy), by_tokens=by_tokens)
    parts = build(strategy)
    head = train(parts, STOP, by_tokens)
    parts[0].save_state(folder)
    return whole, head


def go_on(folder: Path, strategy: str | None, num_steps: int = 2, by_tokens: bool = False) -> list[float]:
    parts = build(strategy, num_steps)
    parts[0].load_state(folder)
    return train(parts, by_tokens=by_tokens)


def run_two(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp2"):
        whole, head = run(folder / strategy, strategy)
        results[strategy] = (whole, head, go_on(folder / strategy, strategy))
    results["ddp to fsdp2"] = go_on(folder / "ddp", "fsdp2")
    results["fsdp2 to ddp"] = go_on(folder / "fsdp2", "ddp")
    whole, head = run(folder / "tokens", "ddp", by_tokens=True)
    results["tokens"] = (whole, head, go_on(folder / "tokens", "ddp", by_tokens=True))
    results["one to ddp"] = go_on(folder / "one", "ddp")
    results["one to fsdp2"] = go_on(folder / "one", "fsdp2")
    return results


@pytest.mark.multirank
def test_r7_a_half_full_window_is_filled_by_the_run_that_goes_on(tmp_path: Path) -> None:
    alone, head = run(tmp_path / "one", None)
    assert [*head, *go_on(tmp_path / "one", None)] == alone

    for result in run_ranks(run_two, 2, tmp_path):
        for strategy in ("ddp", "fsdp2", "tokens"):
            whole, before, after = result[strategy]
            assert [*before, *after] == pytest.approx(whole, rel=1e-5), strategy
        assert [*result["ddp"][1], *result["ddp"][2]] == result["ddp"][0], "bit by bit"
        assert result["ddp"][0] == pytest.approx(alone, rel=1e-5)
        for other in ("ddp to fsdp2", "fsdp2 to ddp", "one to ddp", "one to fsdp2"):
            assert result[other] == pytest.approx(alone[STOP:], rel=1e-5), other
    for saved in ("ddp", "fsdp2"):
        assert go_on(tmp_path / saved, None) == pytest.approx(alone[STOP:], rel=1e-5), saved
    tokens = run(tmp_path / "tokens alone", None, by_tokens=True)[0]
    assert go_on(tmp_path / "tokens", None, by_tokens=True) == pytest.approx(tokens[STOP:], rel=1e-5)


def test_r7_smaller_micro_batches_fill_the_rest_of_an_update(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "state", None)
    finer = go_on(tmp_path / "state", None, num_steps=4)

    means = [(first + second) / 2 for first, second in zip(finer[::2], finer[1::2], strict=True)]
    assert means == pytest.approx(whole[STOP:], rel=1e-5)


def test_a_window_that_no_micro_batch_of_this_run_ends_in_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "state", None)
    accelerator, model, optimizer, _ = build(None, num_steps=1)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    with pytest.raises(IncompatibleCheckpointError, match=r"after 1 of 2 micro-batches .* takes 1 for one.*steps=2"):
        accelerator.load_state(tmp_path / "state")
    torch.testing.assert_close([model.state_dict(), optimizer.state_dict()], before, rtol=0, atol=0)


def test_loading_closes_a_window_that_is_open(tmp_path: Path) -> None:
    parts = build(None)
    parts[0].save_state(tmp_path / "state")
    train(parts, STOP)
    parts[0].load_state(tmp_path / "state")

    assert all(parameter.grad is None for parameter in parts[1].parameters())
    assert train(parts) == train(build(None))


def test_an_engine_that_keeps_gradients_to_itself_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = build(None)
    train(parts, STOP)
    unit = parts[0].unit_of(parts[1])
    unit.held_gradients = lambda: None
    with caplog.at_level(logging.WARNING):
        parts[0].save_state(tmp_path / "state")
    assert "after 1 of 2 micro-batches of an update, and the engine of Sequential keeps their gradients" in caplog.text
    again = build(None)
    again[0].load_state(tmp_path / "state")
    assert len(train(again)) == STEPS - STOP


def save_mixed(folder: Path) -> tuple[int, int]:
    """Save in the middle of an update where FSDP2 keeps gradients to itself; return what a run does that goes on."""
    parts = build("fsdp2", mixed_precision="bf16")
    train(parts, STOP)
    parts[0].save_state(folder)
    again = build("fsdp2", mixed_precision="bf16")
    again[0].load_state(folder)
    return len(train(again)), len(list(folder.glob("window_*.json")))


@pytest.mark.multirank
def test_mixed_precision_of_fsdp2_begins_an_update_anew(tmp_path: Path) -> None:
    for steps, num_files in run_ranks(save_mixed, 2, tmp_path / "state"):
        assert (steps, num_files) == (STEPS - STOP, 2)


def test_deepspeed_refuses_the_gradients_of_another_strategy() -> None:
    from accel_trainer.integrations.deepspeed.unit import DeepSpeedUnit

    unit = DeepSpeedUnit.__new__(DeepSpeedUnit)
    assert unit.held_gradients() is None
    with pytest.raises(ConfigError, match="DeepSpeed's engine cannot take its gradients; save where sync_gradients"):
        unit.put_gradients({})


def needs_in_a_window(folder: Path) -> list[tuple[int, int, list[int]]]:
    """Return, of each strategy, what a save asks for and writes, both of all ranks, and each rank's gradients."""
    found = []
    for strategy in ("ddp", "fsdp2"):
        parts = build(strategy)
        train(parts, STOP)
        asked = torch.tensor(
            sum(each.unit.local_bytes(in_window=each.window.is_open) for each in parts[0]._prepared.units)
        )
        parts[0].save_state(folder / strategy)
        sizes = {
            path.name: sum(tensor.nbytes for tensor in load_file(path).values())
            for name in ("unit_*.safetensors", "window*.safetensors")
            for path in (folder / strategy).glob(name)
        }
        gradients = [
            sum(sizes.get(name, 0) for name in (f"window_{rank}.safetensors", f"window.{rank:05d}.safetensors"))
            for rank in range(2)
        ]
        found.append((int(parts[0].reduce(asked, "sum")), sum(sizes.values()), gradients))
    return found


@pytest.mark.multirank
def test_a_save_asks_for_the_room_of_the_gradients_of_an_open_window(tmp_path: Path):
    whole = 4 * (3 * 8 + 8 + 8 + 1)
    ddp, fsdp2 = run_ranks(needs_in_a_window, 2, tmp_path)[0]
    for asked, written, _ in (ddp, fsdp2):
        assert asked == written
    assert ddp[2] == [whole, whole], "not exchanged yet: each rank has its own"
    assert fsdp2[2] == [100, 64], "the mean of what its shards are"


def mean_gradients(sizes: list[int]) -> list[float]:
    """Train with windows of these sizes; return the gradient of each update."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=sizes[0])
    weight = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(weight, torch.optim.SGD(weight.parameters(), lr=0.0))
    found, number = [], 0
    for size in sizes:
        accelerator.gradient_accumulation_steps = size
        assert accelerator.gradient_accumulation_steps == accelerator.gradient_state.num_steps == size
        for _ in range(size):
            with accelerator.accumulate(model):
                number += 1
                accelerator.backward(model(torch.tensor([[float(number)]])).sum())
                if accelerator.sync_gradients:
                    found.append(weight.weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
    return found


def test_the_size_of_the_next_windows_can_be_set():
    # Inputs 1, 2 | 3, 4, 5 | 6 | 7, 8 are the gradients whose means are taken.
    assert mean_gradients([2, 3, 1, 2]) == pytest.approx([1.5, 4.0, 6.0, 7.5])


def test_a_size_of_windows_that_is_none_or_comes_within_a_window_is_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    for size in (0, -1, 2.0, True, "2"):
        message = rf"gradient_accumulation_steps = {size!r}: expected an integer, 1 or more"
        with pytest.raises(ConfigError, match=message):
            accelerator.gradient_accumulation_steps = size
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(ConfigError, match=r"= 2 was set after 1 of 3 micro-batches of an update.*sync_gradients"):
        accelerator.gradient_accumulation_steps = 2
    assert accelerator.gradient_accumulation_steps == 3
