"""What saving and resuming cost a train(), what it has lost, and how much of its time went into new updates."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["RunFigures", "UpdateNote"]

NOTE_NAME = "_last_update"
"""In a run's directory. Begins as `_lock` does: pushing the directory to a hub leaves such names out."""


class RunFigures:
    """The figures of one train(), by the names under which they are logged.

    `ckpt/stall_s`, `ckpt/duration_s`, `ckpt/bytes` of the last save (bytes where it was committed);
    `resume/{select,verify,load,data}_s`; `lost_steps`, where it is known; `goodput`.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.begun_at: int | None = None
        """The update after which this train() goes on; None until it does."""
        self._waiting: list[str] = []
        self._begin = time.perf_counter()
        self._standstill = 0.0

    @contextmanager
    def resuming(self, part: str) -> Iterator[None]:
        """Add the time that a block takes to a part of the resume: select, verify, load or data."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add_resume(part, time.perf_counter() - begin)

    def add_resume(self, part: str, seconds: float) -> None:
        """Add to the time of a part of the resume."""
        name = f"resume/{part}_s"
        self._set(name, self.values.get(name, 0.0) + seconds)
        self._standstill += seconds

    def add_loss(self, num_updates: int) -> None:
        """Note how many updates this run does that an earlier one had done."""
        self._set("lost_steps", float(num_updates))

    def add_save(self, duration: float, stall: float, num_bytes: int | None) -> None:
        """Note a save: the seconds until its commit, those that training stood still, its size where that is known."""
        self._set("ckpt/stall_s", stall)
        self._set("ckpt/duration_s", duration)
        if num_bytes is not None:
            self._set("ckpt/bytes", float(num_bytes))
        self._standstill += stall

    def _set(self, name: str, value: float) -> None:
        self.values[name] = value
        self._waiting.append(name)

    def take(self) -> dict[str, float]:
        """Return what has not been logged yet, rounded as transformers rounds its times."""
        waiting, self._waiting = self._waiting, []
        return {name: round(self.values[name], 4) for name in dict.fromkeys(waiting)}

    def finish(self, last_update: int) -> dict[str, float]:
        """Return all figures, with the share of the time that went into updates nobody had done before.

        Of a run that neither saved nor resumed there are none.

        Args:
            last_update: the one that this train() ends with.
        """
        if self.values:
            wall = max(time.perf_counter() - self._begin, 1e-9)
            num_updates = last_update - (last_update if self.begun_at is None else self.begun_at)
            again = min(self.values.get("lost_steps", 0.0) / max(num_updates, 1), 1.0)
            self.values["goodput"] = max(wall - self._standstill, 0.0) * (1.0 - again) / wall
            self._waiting = list(self.values)
        return self.take()


class UpdateNote:
    """The number of a run's last update, in a file for the run that resumes; written over in place, and never synced.

    What it tells survives the process, and not the machine. It is for a figure: where it cannot be written, there is
    none.
    """

    def __init__(self, path: Path, descriptor: int, saved: int) -> None:
        self.path = path
        self.saved = saved
        """The last update of which there is a checkpoint."""
        self._update = saved
        self._descriptor = descriptor

    @classmethod
    def begin(cls, directory: Path, saved: int) -> UpdateNote | None:
        """Begin to take note in a run's directory, at an update that was just saved; None where that cannot be."""
        path = directory / NOTE_NAME
        try:
            note = cls(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), saved)
        except OSError:
            return None
        note.write(saved)
        return note

    @staticmethod
    def read(directory: Path) -> int | None:
        """Return what a run has noted there; None where there is no note, or none that can be read."""
        try:
            return int((directory / NOTE_NAME).read_bytes())
        except (OSError, ValueError):
            return None

    @staticmethod
    def remove(directory: Path) -> None:
        """Remove the note of a run that has come to its end."""
        with suppress(OSError):
            (directory / NOTE_NAME).unlink()

    def write(self, update: int) -> None:
        """Note an update that is complete."""
        self._update = update
        with suppress(OSError):
            os.pwrite(self._descriptor, b"%020d\n" % update, 0)

    def close(self, *, is_over: bool) -> None:
        """Leave the note to the run that resumes, if there is something that it has to do again."""
        os.close(self._descriptor)
        if is_over or self._update <= self.saved:
            self.remove(self.path.parent)
