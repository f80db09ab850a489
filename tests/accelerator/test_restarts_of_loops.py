"""Loops whose workers die: they are started again, and go on from the newest state by one line of the script."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer import Accelerator, ProjectConfiguration
from tests.launches import launch, read_samples

SCRIPT = f"""
import os, sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.accelerator.test_restarts_of_loops import train_by_hand

seen = train_by_hand(sys.argv[1])
if os.environ["RANK"] == "0":
    torch.save(seen, sys.argv[2])
"""


def build_regression() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


class Count:
    """Updates of a loop."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]


def train_by_hand(folder: str) -> dict[str, Any]:
    """A loop over 36 samples in updates of 6, saved after every second; rank 1 dies after the third."""
    accelerator = Accelerator(
        project_config=ProjectConfiguration(f"{folder}/run", automatic_checkpoint_naming=True),
        config={
            "strategy": "fsdp2",
            "accumulation": {"num_steps": 2, "keep_global_batch": True},
            "data": {"use_stateful_dataloader": True},
        },
    )
    data = torch.utils.data.DataLoader(torch.arange(36.0).reshape(36, 1), batch_size=1, shuffle=True)
    model, optimizer, data = accelerator.prepare(*build_regression(), data)
    count = Count()
    accelerator.register_for_checkpointing(count)
    begun_from = accelerator.load_state(missing_ok=True)
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], accelerator.process_index
    for batch in data:
        with Path(folder, f"{attempt}-{rank}.txt").open("a") as file:
            file.write(f"{count.updates} {' '.join(str(int(number)) for number in batch.flatten())}\n")
        with accelerator.accumulate(model):
            accelerator.backward((model(batch / 36) - batch / 8).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            count.updates += 1
            if count.updates == 3 and attempt == "0" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if count.updates % 2 == 0:
                accelerator.save_state()
    return {"begun_from": begun_from, "weights": accelerator.get_state_dict(model)}


def test_a_loop_of_ones_own_goes_on_with_fewer_ranks_from_its_newest_state(tmp_path: Path) -> None:
    """Under FSDP2, with one line for it: load_state(missing_ok=True)."""
    script, runs = tmp_path / "train.py", str(tmp_path)
    script.write_text(SCRIPT)

    words = ["--num_processes", "2:3", "--cpu", "--max_restarts", "1", str(script), runs, str(tmp_path / "seen")]
    code, output = launch(tmp_path, *words, timeout=100)

    assert code == 0, output
    assert "starting the workers again on 2 rank(s) instead of 3" in output
    restarted = torch.load(tmp_path / "seen", weights_only=False)
    assert restarted["begun_from"].name == "checkpoint_0"
    before, after = read_samples(tmp_path, "0-*.txt"), read_samples(tmp_path, "1-*.txt")
    assert after[2] == before[2]  # the update that was lost is done again, with its samples
    updates = {step: before[step] for step in range(2)} | after
    assert [len(numbers) for numbers in updates.values()] == [6] * 6
    assert sorted(number for numbers in updates.values() for number in numbers) == list(range(36))
    model, optimizer = build_regression()
    for numbers in updates.values():
        batch = torch.tensor(numbers, dtype=torch.float32).reshape(6, 1)
        (model(batch / 36) - batch / 8).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(restarted["weights"][name], value, rtol=0, atol=1e-6)


def test_a_loop_that_begins_anew_after_a_restart_is_told_of_what_was_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "state")
    assert "this loop has begun anew without the states that were saved before: call load_state(missing_ok=True)" in (
        caplog.text
    )
    caplog.clear()
    again = Accelerator(cpu=True)
    again.prepare(torch.nn.Linear(1, 1))
    assert again.load_state(tmp_path / "none", missing_ok=True) is None
    assert again.load_state(tmp_path / "state", missing_ok=True) == tmp_path / "state"
    again.save_state(tmp_path / "state")
    assert "begun anew" not in caplog.text
