"""The first update at which two runs part, by their logs and by the fingerprints of their updates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_trainer.contrib.run_report.recorded_run import MEMORY, MFU, THROUGHPUT, TOKEN_RATE, TRAIN_LOSS, RecordedRun
from accel_trainer.errors import CorruptCheckpointError

FINGERPRINTS_NAME = "fingerprints.jsonl"
_TIMES = (MEMORY, MFU, THROUGHPUT, TOKEN_RATE)
"""Curves that are those of a machine, and differ between two runs that are alike."""


def find_logged_difference(first: RecordedRun, second: RecordedRun) -> str:
    """Return, in words, the first value that both runs have logged and that differs; empty where none does."""
    parted: list[tuple[float, str, float, float]] = []
    last_alike: dict[str, float] = {}
    for name in first.curves.keys() & second.curves.keys() - {*_TIMES}:
        theirs = dict(second.curves[name])
        for step, value in first.curves[name]:
            if step not in theirs:
                continue
            if value != theirs[step]:
                parted.append((step, name, value, theirs[step]))
                break
            last_alike[name] = step
    if not parted:
        return ""
    step, name, value, other = min(parted, key=lambda each: (each[0], each[1] != TRAIN_LOSS, each[1]))
    before = f"alike until update {last_alike[name]:g}" if name in last_alike else "the first that both have logged"
    return f"update {step:g}: {name} is {value!r} and {other!r}; {before}"


def find_fingerprint_difference(first: Path, second: Path) -> str | None:
    """Return the first update, and the first module in it, whose fingerprints differ; None where runs have none.

    Raises:
        CorruptCheckpointError: a file of fingerprints cannot be read.
    """
    ours, theirs = _read_fingerprints(first), _read_fingerprints(second)
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return None
    for place, update in enumerate(both):
        if ours[update] == theirs[update]:
            continue
        pairs = zip(ours[update], theirs[update], strict=False)
        found = next((mine[0] for mine, other in pairs if mine != other), "how many modules were called")
        before = f"those of update {both[place - 1]} are alike" if place else "it is the first that both have"
        return f"update {update}: {found}; {before}"
    return ""


def _read_fingerprints(path: Path) -> Mapping[int, Sequence[Any]]:
    file = (path if path.is_dir() else path.parent) / FINGERPRINTS_NAME
    if not file.is_file() and file.parent.name.startswith("checkpoint-"):
        file = file.parent.parent / FINGERPRINTS_NAME
    if not file.is_file():
        return {}
    try:
        # A run that was resumed, or has gone back, has come by some updates again: the last one counts.
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return {line["update"]: line["sums"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{file} cannot be read ({error}); name runs whose file is whole") from error


def describe_difference(runs: Sequence[RecordedRun], paths: Sequence[Path], options: Sequence[str]) -> tuple[str, bool]:
    """Return the text of `accel-trainer report --diff`, and whether the runs part; `options` are those that differ."""
    logged = find_logged_difference(*runs)
    prints = find_fingerprint_difference(*paths)
    lines = [f"first difference of {runs[0].name} and {runs[1].name}", f"  logged: {logged or 'none'}"]
    missing = "neither, or no update of both (fingerprint_every)"
    lines.append(f"  fingerprints: {missing if prints is None else prints or 'none'}")
    lines += [
        f"  option {name}: {runs[0].options[name].value} and {runs[1].options[name].value}"
        for name in options
        if all(name in run.options for run in runs)
    ]
    return "\n".join(lines), bool(logged or prints)
