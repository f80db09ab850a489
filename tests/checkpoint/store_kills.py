"""A run that copies its checkpoints to a store which stumbles, killed at random; what an empty disk gets back."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from accel_trainer.checkpoint.object_store import ObjectStore
from accel_trainer.errors import CheckpointNotFoundError
from accel_trainer.runtime import rank_watch
from tests.checkpoint.crash_job import SavedRun, acknowledged
from tests.ranks import RankFailure, run_ranks


class Stumbling(LocalFileSystem):
    """A tenth of the requests fails, before or after they have had their effect, and a tenth of the files is cut."""

    protocol = "stumbling"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("stumbling://"))

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        chance = random.random()
        if chance < 0.05:
            raise ConnectionResetError("before")
        super().put_file(lpath, rpath, **kwargs)
        if chance < 0.15:
            os.truncate(self._strip_protocol(rpath), os.path.getsize(lpath) // 2)
        elif chance < 0.2:
            raise TimeoutError("after")


def save_to_store(directory: Path, kill: tuple[float | None, ...]) -> None:
    """Save without end; rank 0 notes in `acknowledged` the step whose upload has ended."""
    rank_watch._POLL_SECONDS = 0.1
    fsspec.register_implementation("stumbling", Stumbling, clobber=True)
    run = SavedRun(directory / "disk", config={"checkpoint_uri": f"stumbling://{directory}/store"})
    rank, draw = run.accelerator.process_index, random.Random(0)
    if kill[rank] is not None:
        killer = threading.Timer(kill[rank], os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    for step in range(100_000):
        run.fill(step)
        run.accelerator.save_state(async_=draw.random() < 0.5)
        run.fill(-5)
        waits = draw.random() < 0.5
        run.accelerator.wait_for_checkpoint()
        uploads = run.accelerator._checkpointer._uploads
        if uploads is not None and waits:
            uploads.wait()
            (directory / "acknowledged").write_text(str(step))


def random_loss(directory: Path, seed: int) -> int:
    """Kill a run at a random moment, take its disk, and load what the store has; return the step that was held."""
    draw = random.Random(seed)
    delay = draw.uniform(0.2, 1.2)
    kill = draw.choice([(delay, delay), (delay, None), (None, delay)])
    try:
        run_ranks(save_to_store, 2, directory, kill, timeout=30)
    except RankFailure:
        pass
    else:
        raise AssertionError("nothing was killed")
    shutil.rmtree(directory / "disk", ignore_errors=True)
    run = SavedRun(directory / "disk", config={"checkpoint_uri": f"file://{directory}/store"})
    try:
        run.accelerator.load_state()
        held = run.step_held()
    except CheckpointNotFoundError:
        held = -1
    last = acknowledged(directory)
    assert held >= last, f"the upload of step {last} was acknowledged, and {held} is what the store has"
    run.fill(held + 1)
    run.accelerator.save_state()
    run.accelerator.end_training()
    assert ObjectStore(f"file://{directory}/store", "checkpoint_").newest() == f"checkpoint_{held + 1}"
    return held
