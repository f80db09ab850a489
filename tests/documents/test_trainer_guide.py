"""The native half of the Trainer guide, line for line but for the import; tests/documented_job.py is its other half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from accel_trainer import Accelerator
from tests.launches import launch
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import ACCELERATE_YAML, TokenDataset, build_model

preload("accel_trainer.accelerator", "tqdm.auto")

ROOT = Path(__file__).resolve().parents[2]
GLOBAL_BATCH = 8

# The guide's script: what its functions take as given stands above `main`.
YOUR_SCRIPT = r"""
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_trainer import Accelerator

class BertLayer(nn.Linear):
    pass

loss_function = nn.MSELoss()

def main():
  accelerator = Accelerator()
  torch.manual_seed(0)
  model = nn.Sequential(BertLayer(4, 4), BertLayer(4, 4))
  optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
  training_dataloader = DataLoader(TensorDataset(torch.ones(8, 4), torch.zeros(8, 4)), batch_size=2)

  model, optimizer, training_dataloader, scheduler = accelerator.prepare(
      model, optimizer, training_dataloader, scheduler
  )

  for batch in training_dataloader:
      optimizer.zero_grad()
      inputs, targets = batch
      outputs = model(inputs)
      loss = loss_function(outputs, targets)
      accelerator.backward(loss)
      optimizer.step()
      scheduler.step()

  sys.stdout.write("REPORT " + json.dumps({
      "arguments": sys.argv[1:], "rank": accelerator.process_index, "ranks": accelerator.num_processes,
      "type": accelerator.distributed_type, "precision": accelerator.mixed_precision, "loss": loss.item(),
      "held": sum(p.to_local().numel() for p in model.parameters()),
  }) + "\n")

if __name__ == "__main__":
    main()
"""


def batches(batch_size: int) -> DataLoader:
    return DataLoader(TokenDataset(24, kind="class"), batch_size=batch_size)


def plain_loop() -> list[float]:
    """Train without the library; return the losses."""
    model = build_model("bert")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for batch in batches(GLOBAL_BATCH):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def native(strategy: str, late_schedule: bool) -> list[float]:
    """Run the guide's blocks; the scheduler is not prepared, as there, and may be made of the prepared optimizer."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    device = accelerator.device
    model = build_model("bert")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not late_schedule:
        lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train_dataloader = batches(GLOBAL_BATCH // accelerator.num_processes)
    eval_dataloader = batches(4)
    num_epochs = 1

    train_dataloader, eval_dataloader, model, optimizer = accelerator.prepare(
        train_dataloader, eval_dataloader, model, optimizer
    )

    if late_schedule:
        lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    progress_bar = tqdm(range(len(train_dataloader)), disable=True)
    losses = []
    for _ in range(num_epochs):
        for batch in train_dataloader:
            assert all(tensor.device == device for tensor in batch.values())
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            progress_bar.update(1)
            losses.append(accelerator.reduce(loss, "mean").item())
    assert len(eval_dataloader) == 6 // accelerator.num_processes
    return losses


def native_in_both_ways(strategy: str) -> list[list[float]]:
    return [native(strategy, late_schedule) for late_schedule in (False, True)]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_the_native_loop_trains_as_plain_pytorch_whenever_its_schedule_is_made(strategy: str, ranks: int):
    expected = plain_loop()
    for early, late in run_ranks(native_in_both_ways, ranks, strategy):
        assert early == pytest.approx(expected, abs=1e-5)
        assert late == pytest.approx(expected, abs=1e-5)


@pytest.mark.multirank
@pytest.mark.slow
def test_the_launch_command_takes_the_file_in_its_default_place_and_flags_override_it(tmp_path: Path):
    default = tmp_path / "hf" / "accel_trainer" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text(ACCELERATE_YAML.replace("num_processes: 2", "num_processes: 4"))
    script = tmp_path / "your_script.py"
    script.write_text(YOUR_SCRIPT)
    words = ("--num_processes=2", str(script), "--mine", "--debug")
    code, output = launch(tmp_path, *words, timeout=100, HF_HOME=str(tmp_path / "hf"), PYTHONPATH=str(ROOT))
    assert code == 0, output
    lines = [line.partition("REPORT ")[2] for line in output.splitlines() if "REPORT " in line]
    reports = sorted(map(json.loads, lines), key=lambda report: report["rank"])
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert (report["ranks"], report["type"], report["precision"]) == (2, "FSDP", "bf16")
        assert report["arguments"] == ["--mine", "--debug"]
        assert report["loss"] < 1
    assert sum(report["held"] for report in reports) == 2 * (4 * 4 + 4)
