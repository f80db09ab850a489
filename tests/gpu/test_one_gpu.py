"""What only a GPU can show, on one of them. Skipped elsewhere; docs/gpu.md says when it was last run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, DataLoaderConfiguration, GradScalerKwargs
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(accelerator: Accelerator) -> tuple[nn.Module, Any, DataLoader, Any]:
    """Prepare a small regression with its optimizer, loader and schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    return accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, pin_memory=True), schedule)


def losses(accelerator: Accelerator) -> list[float]:
    """Train an epoch; return the losses."""
    model, optimizer, loader, schedule = build(accelerator)
    seen = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 3e-2), ("fp16", 1e-2)])
def test_the_losses_are_those_of_the_cpu(precision: str, tolerance: float):
    reference = losses(Accelerator(cpu=True))
    accelerator = Accelerator(mixed_precision=precision, dataloader_config=DataLoaderConfiguration(non_blocking=True))
    assert accelerator.device.type == "cuda"
    assert losses(accelerator) == pytest.approx(reference, rel=tolerance)


def test_models_and_batches_are_moved_and_master_weights_stay_fp32():
    model, _, loader, _ = build(Accelerator(mixed_precision="bf16"))
    x, _ = next(iter(loader))
    assert x.is_cuda
    assert model(x).dtype is torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_an_overflow_skips_the_update_and_the_schedule():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**60)])
    model, optimizer, loader, schedule = build(accelerator)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    schedule.step()
    assert accelerator.optimizer_step_was_skipped
    assert schedule.last_epoch == 0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_devices_random_stream_is_saved_and_restored(tmp_path: Path):
    accelerator = Accelerator()
    build(accelerator)
    accelerator.save_state(tmp_path / "state")
    drawn = torch.rand(4, device=accelerator.device)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(torch.rand(4, device=accelerator.device), drawn)


def backend_and_losses() -> tuple[str, list[float]]:
    """Train under DDP in a job of one rank, which has a process group."""
    accelerator = Accelerator(strategy="ddp")
    return str(accelerator.backend), losses(accelerator)


def test_a_job_of_one_rank_has_an_nccl_group_and_the_same_losses():
    ((backend, seen),) = run_ranks(backend_and_losses, 1)
    assert backend == "nccl"
    assert seen == pytest.approx(losses(Accelerator(cpu=True)), rel=1e-4)
