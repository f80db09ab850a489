"""Saving and loading 100 million parameters with AdamW, about 1.1 GiB, beside torch.save and a mapped torch.load."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from memory import peak_mib
from timing import Row, interleave, ratio_row
from torch import nn

from accel_trainer import Accelerator

NUM_LAYERS, WIDTH = 24, 2048
BUFFER_MIB = 256


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class _Job:
    """The same model and optimizer, saved and loaded by us and plainly."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.accelerator = Accelerator(cpu=True)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain_save(self) -> None:
        path = self.directory / "plain.pt"
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _fsync(self.directory)

    def save(self) -> None:
        shutil.rmtree(self.directory / "state", ignore_errors=True)
        self.accelerator.save_state(self.directory / "state")

    def start_background_save(self) -> float:
        shutil.rmtree(self.directory / "background", ignore_errors=True)
        begin = time.perf_counter()
        self.accelerator.save_state(self.directory / "background", async_=True)
        return time.perf_counter() - begin

    def plain_load(self) -> None:
        """Map the file, and copy what is in it to where it belongs."""
        stored: dict[str, Any] = torch.load(self.directory / "plain.pt", mmap=True, weights_only=True)
        self.model.load_state_dict(stored["model"])
        for parameter, entry in zip(self.model.parameters(), stored["optimizer"]["state"].values(), strict=True):
            for key, value in entry.items():
                self.optimizer.state[parameter][key].copy_(value)

    def load(self) -> None:
        self.accelerator.load_state(self.directory / "state")

    def load_unverified(self) -> None:
        self.accelerator.load_state(self.directory / "state", verify="off")


def _stalls(job: _Job, rounds: int) -> tuple[list[float], list[float]]:
    """Return how long a background save and a synchronous one hold up the run, in turn; the first of them warms up."""
    stalls, whole = [], []
    for _ in range(rounds + 1):
        stalls.append(job.start_background_save())
        job.accelerator.wait_for_checkpoint()
        begin = time.perf_counter()
        job.save()
        whole.append(time.perf_counter() - begin)
    return stalls[1:], whole[1:]


def measure(rounds: int) -> list[Row]:
    """Compare saves and loads in one process; each save is on the disk when its time is taken."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as directory:
        job = _Job(Path(directory))
        saves = interleave({"plain": job.plain_save, "ours": job.save}, rounds)
        loads = interleave({"plain": job.plain_load, "ours": job.load, "unverified": job.load_unverified}, rounds)
        peak, _ = peak_mib(job.save)
        stalls, whole = _stalls(job, rounds)
    return [
        ratio_row("save_state (1.1 GiB, on the disk)", "torch.save and fsync", saves["ours"], saves["plain"], 1.25),
        ratio_row("load_state, verified", "mapped torch.load", loads["ours"], loads["plain"], 2.0),
        ratio_row("load_state, not verified", "mapped torch.load", loads["unverified"], loads["plain"], 1.2),
        ratio_row("stall of a background save", "save_state", stalls, whole, 0.2),
        ratio_row("extra memory of save_state", f"{BUFFER_MIB} MiB", [peak], [float(BUFFER_MIB)], 1.0),
    ]
