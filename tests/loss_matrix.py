"""`kill -9` of one of four ranks at nine places, and at random times: `make test-losses`.

What follows each, how long no update was applied, and how far the weights are from those of the run without a loss. A
restart of all ranks, for comparison, is a start of Python, imports, and a load.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from accel_trainer.accelerator.lost_ranks import LostRanks
from accel_trainer.runtime.process import find_rank
from tests.accelerator.test_lost_ranks import CONTINUE, Killed, Setup
from tests.accelerator.test_lost_ranks import train as train_natively
from tests.fault_injection import fault_env
from tests.ranks import RankFailure, preload, run_ranks
from tests.trainer.test_lost_ranks import PLACES
from tests.trainer.test_lost_ranks import train as train_by_trainer

preload("accel_trainer.trainer", "accel_trainer.accelerator", "transformers")

NATIVE_PLACES = ("data", "backward", "optimizer", "gather", "callback")


def timed(folder: Path, front: str, killed: tuple[Killed, ...], late_seconds: float = 0.0) -> Any:
    """Run a rank; note when it is killed and when it applies updates, and kill it after `late_seconds`, if any."""
    note_update, kill = LostRanks.note_update, os.kill
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  what the Trainer logs

    def note(self: LostRanks) -> None:
        note_update(self)
        with open(folder / f"{find_rank()}.updates", "a") as file:
            file.write(f"{time.monotonic()}\n")

    def kill_noted(pid: int, number: int) -> None:
        (folder / "killed").write_text(str(time.monotonic()))
        kill(pid, number)

    LostRanks.note_update, os.kill = note, kill_noted  # type: ignore[method-assign,assignment]
    if late_seconds:
        threading.Timer(late_seconds, kill_noted, (os.getpid(), signal.SIGKILL)).start()
    if front == "native":
        return train_natively(killed, Setup())[0]
    return train_by_trainer(folder / "run", killed[0].rank if killed else -1)[0]


def timed_if(folder: Path, chosen: int, late_seconds: float) -> Any:
    return timed(folder, "native", (), late_seconds if find_rank() == chosen else 0.0)


def standstill_seconds(folder: Path, rank: int) -> float:
    """Return how long after the kill the first update of a rank that is left was applied."""
    begin = float((folder / "killed").read_text())
    updates = map(float, (folder / f"{rank}.updates").read_text().split())
    return min((each for each in updates if each > begin), default=float("nan")) - begin


def describe(folder: Path, expected: Any, run: Any) -> tuple[str, str]:
    """Return the kind of an outcome, and the outcome in words."""
    try:
        results = run()
    except RankFailure as failed:
        said = " ".join(failed.failures.values())
        kind = "hung" if "had not finished" in said else "ended together, to be started again"
        return kind, f"{kind}: {said.strip().splitlines()[-1][:150]}"
    left = [rank for rank, result in enumerate(results) if result is not None]
    far = max((results[r][name] - value).abs().max().item() for r in left for name, value in expected.items())
    kind = "went on" if far < 1e-6 else "WRONG WEIGHTS"
    if len(left) == len(results):
        return "was over before", "was over before"
    return kind, f"{kind}: standstill {standstill_seconds(folder, left[0]):.2f} s, weights within {far:.0e}"


def run_table(base: Path) -> Counter[str]:
    kinds = Counter[str]()
    for front, places in (("native", NATIVE_PLACES), ("Trainer", (*PLACES, "callback"))):
        folder = base / f"{front}-undisturbed"
        folder.mkdir()
        expected = run_ranks(timed, 4, folder, front, (), timeout=90)[0]
        for place in places:
            folder = base / f"{front}-{place}"
            folder.mkdir()
            killed: tuple[Killed, ...] = (Killed(2, 3, place),)
            environment = dict(CONTINUE)
            if front == "Trainer":
                point, step = PLACES.get(place, ("", None))
                killed = () if point else killed
                if point:
                    environment |= fault_env(f"kill9@{point}:rank=2" + ("" if step is None else f":step={step}"))
            kind, text = describe(
                folder,
                expected,
                lambda: run_ranks(timed, 4, folder, front, killed, env=environment, outlives=True, timeout=90),  # noqa: B023
            )
            kinds[kind] += 1
            print(f"{front}, {place}: {text}", flush=True)
    return kinds


def run_random(base: Path, num_kills: int, seed: int) -> Counter[str]:
    """Kill a rank of native loops at random times."""
    draws, kinds = random.Random(seed), Counter[str]()
    folder = base / "undisturbed"
    folder.mkdir()
    run_ranks(timed, 4, folder, "native", (), timeout=90)  # starts the workers, which takes longer than a run
    begin = time.monotonic()
    expected = run_ranks(timed, 4, folder, "native", (), timeout=90)[0]
    seconds = time.monotonic() - begin
    for number in range(num_kills):
        folder = base / str(number)
        folder.mkdir()
        rank, late = draws.randrange(4), draws.uniform(0.3, 0.9) * seconds
        kind, text = describe(
            folder,
            expected,
            lambda: run_ranks(timed_if, 4, folder, rank, late, env=CONTINUE, outlives=True, timeout=60),  # noqa: B023
        )
        kinds[kind] += 1
        print(f"kill {number}: rank {rank} after {late:.2f} s {text}", flush=True)
    return kinds


def main() -> None:
    """Kill a rank at each place, or at random times; the exit code is 1 where a job hung or its weights are others."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--random", type=int, default=0, help="kills at random times, in the place of the table")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        kinds = run_random(Path(base), options.random, options.seed) if options.random else run_table(Path(base))
    print(", ".join(f"{kind}: {number}" for kind, number in kinds.most_common()))
    sys.exit(bool(kinds["hung"] or kinds["WRONG WEIGHTS"]))


if __name__ == "__main__":
    main()
