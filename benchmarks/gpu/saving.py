"""Checkpoints of tensors on the device: save and load beside torch's, and how long a background save stalls a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from workload import build_loader, build_model, clock, emit, median, parse, parser

_BOUND = 0.05
"""The stall of a background save, of the time of one in the foreground."""


def _timed(options: Namespace, call: Callable[[], Any]) -> float:
    begin = clock(options)
    call()
    return clock(options) - begin


def _save_as_torch(state: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _round(
    options: Namespace, accelerator: Any, step: Callable[[], None], state: Any, folder: Path
) -> dict[str, float]:
    """Return the seconds of each way once."""
    path, own = folder / "torch.pt", folder / "state"
    seconds = {"torch_save": _timed(options, lambda: _save_as_torch(state(), path))}
    seconds["torch_load"] = _timed(options, lambda: torch.load(path, map_location=options.device, weights_only=True))
    path.unlink()
    seconds["save"] = _timed(options, lambda: accelerator.save_state(own))
    seconds["load"] = _timed(options, lambda: accelerator.load_state(own))
    seconds["load_unverified"] = _timed(options, lambda: accelerator.load_state(own, verify="off"))
    shutil.rmtree(own)
    step()
    seconds["stall"] = _timed(options, lambda: accelerator.save_state(own, async_=True))
    seconds["first_update_after"] = _timed(options, step)
    accelerator.wait_for_checkpoint()
    seconds["update"] = _timed(options, step)
    shutil.rmtree(own)
    return seconds


def main() -> None:
    from accel_trainer import Accelerator

    options = parse(parser(__doc__))
    options.batch = 1
    accelerator = Accelerator(cpu=options.device == "cpu")
    model = build_model(options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    batch = {name: value.to(accelerator.device) for name, value in next(iter(build_loader(options, 1))).items()}

    def step() -> None:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    step()
    with tempfile.TemporaryDirectory() as folder:
        rounds = [_round(options, accelerator, step, state, Path(folder)) for _ in range(options.rounds + 1)][1:]
    seconds = {name: median([each[name] for each in rounds]) for name in rounds[0]}
    num_bytes = sum(parameter.nbytes for parameter in model.parameters()) * 3  # with Adam's two moments
    share = seconds["stall"] / seconds["save"]
    holds = None if options.device == "cpu" else share <= _BOUND
    emit(what="saving", gib=num_bytes / 2**30, stall_of_save=share, bound=_BOUND, holds=holds, **seconds)


if __name__ == "__main__":
    main()
