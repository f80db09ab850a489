"""`kill -9` of one of four ranks at nine places, and at random times: `make test-losses`.

What follows each, how long no update was applied, and how far the weights are from those of the run without a loss. A
restart of all ranks, for comparison, is a start of Python, imports, and a load.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from accel_trainer.accelerator.lost_ranks import LostRanks
from accel_trainer.runtime.process import find_rank
from tests.accelerator.test_lost_ranks import CONTINUE, REPLACE, Killed, Setup, samples_of_updates
from tests.accelerator.test_lost_ranks import train as train_natively
from tests.fault_injection import fault_env
from tests.ranks import RankFailure, preload, run_ranks
from tests.trainer.test_lost_ranks import DDP, HSDP, PLACES
from tests.trainer.test_lost_ranks import train as train_by_trainer

preload("accel_trainer.trainer", "accel_trainer.accelerator", "transformers")

SHORT, LONG = Setup(), Setup(num_epochs=40)
NATIVE_PLACES = ("data", "backward", "optimizer", "gather", "callback")
FRONTS = {
    "native": NATIVE_PLACES,
    "native HSDP": (*NATIVE_PLACES, "forward", "reduction", "vote", "step"),
    "Trainer": (*PLACES, "callback"),
    "Trainer HSDP": (*PLACES, "callback"),
}


def timed(folder: Path, front: str, killed: tuple[Killed, ...], late_seconds: float = 0.0, setup: Setup = SHORT) -> Any:
    """Run a rank; note when it is killed and when it applies updates, and kill it after `late_seconds`, if any."""
    note_update, meet, kill = LostRanks.note_update, LostRanks._meet, os.kill
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  what the Trainer logs

    def note(self: LostRanks) -> None:
        note_update(self)
        with open(folder / f"{find_rank()}.updates", "a") as file:
            file.write(f"{time.monotonic()}\n")

    def kill_noted(pid: int, number: int) -> None:
        (folder / "killed").write_text(str(time.monotonic()))
        kill(pid, number)

    def meet_noted(self: LostRanks, error: BaseException | None = None, number: int | None = None) -> None:
        begin = time.monotonic()
        meet(self, error, number)
        if number is not None:
            with open(folder / f"{os.environ['RANK']}.joins", "a") as file:  # by which the launcher started it
                file.write(f"{time.monotonic() - begin}\n")

    LostRanks.note_update, LostRanks._meet, os.kill = note, meet_noted, kill_noted  # type: ignore[method-assign,assignment]
    if late_seconds:
        threading.Timer(late_seconds, kill_noted, (os.getpid(), signal.SIGKILL)).start()
    shards = front.endswith("HSDP")
    if front.startswith("native"):
        setup = setup._replace(strategy="fsdp2", num_replicas=2) if shards else setup
        return train_natively(killed, setup, folder if late_seconds or setup is LONG else None)[0]
    return train_by_trainer(folder / "run", killed[0].rank if killed else -1, options=HSDP if shards else DDP)[0]


def timed_if(folder: Path, late_seconds: list[list[float]]) -> Any:
    """Run a rank that is killed after some seconds, and so is each process in its place, as long as there are times."""
    rank = find_rank()
    with open(folder / f"{rank}.starts", "a") as file:
        file.write("x")
    number = (folder / f"{rank}.starts").stat().st_size - 1
    late = late_seconds[rank][number] if number < len(late_seconds[rank]) else 0.0
    return timed(folder, "native", (), late, LONG)


def standstill_seconds(folder: Path, rank: int) -> float:
    """Return how long after the kill the first update of a rank that is left was applied."""
    begin = float((folder / "killed").read_text())
    updates = map(float, (folder / f"{rank}.updates").read_text().split())
    return min((each for each in updates if each > begin), default=float("nan")) - begin


def describe_joins(folder: Path) -> str:
    """Return how many ranks have returned, and how long the others waited for one at most; empty for none."""
    seconds = [list(map(float, path.read_text().split())) for path in folder.glob("*.joins")]
    return f", {max(map(len, seconds))} returned, for at most {max(map(max, seconds)):.2f} s each" if seconds else ""


def describe(folder: Path, expected: Any, run: Any) -> tuple[str, str]:
    """Return the kind of an outcome, and the outcome in words."""
    try:
        results = run()
    except RankFailure as failed:
        said = " ".join(failed.failures.values())
        if all("(SIGKILL)" in text for text in failed.failures.values()):  # when the others had ended
            return "was over before", "was over before"
        kind = "hung" if "had not finished" in said else "ended together, to be started again"
        for rank, text in failed.failures.items():
            print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
        lines = said.strip().splitlines()
        reason = next((line for line in reversed(lines) if "RankLostError" in line), lines[-1])
        return kind, f"{kind}: {reason[:250]}"
    left = [rank for rank, result in enumerate(results) if result is not None]
    far = max((results[r][name] - value).abs().max().item() for r in left for name, value in expected.items())
    kind = "went on" if far < 1e-6 else "WRONG WEIGHTS"
    if not (folder / "killed").exists():
        return "was over before", "was over before"
    seconds, joins = standstill_seconds(folder, left[0]), describe_joins(folder)
    return kind, f"{kind}: standstill {seconds:.2f} s, weights within {far:.0e}{joins}"


def describe_samples(folder: Path, expected: list[list[int]]) -> str:
    """Return which update has other samples, and what each rank has noted of it."""
    pairs = itertools.zip_longest(samples_of_updates(folder), expected)
    update = next(number for number, (found, wanted) in enumerate(pairs) if found != wanted)
    noted = {
        path.name: [line for line in path.read_text().splitlines() if line.startswith(f"[{update},")]
        for path in sorted(folder.glob("[0-9]"))
    }
    return f"WRONG SAMPLES of update {update}: {noted}, and not {expected[update : update + 1]}"


def run_table(base: Path) -> Counter[str]:
    kinds = Counter[str]()
    for front, places in FRONTS.items():
        folder = base / f"{front}-undisturbed"
        folder.mkdir()
        expected = run_ranks(timed, 4, folder, front, (), timeout=90)[0]
        for place in places:
            folder = base / f"{front}-{place}"
            folder.mkdir()
            killed: tuple[Killed, ...] = (Killed(2, 3, place),)
            environment = dict(CONTINUE)
            if front.startswith("Trainer"):
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


def run_random(base: Path, num_runs: int, seed: int, *, returns: bool) -> Counter[str]:
    """Kill a rank of native loops at random times; with `returns` up to three, and processes started in their place."""
    draws, kinds = random.Random(seed), Counter[str]()
    folder = base / "undisturbed"
    folder.mkdir()
    timed_run = partial(run_ranks, timed_if, 4, folder, timeout=90)
    timed_run([[]] * 4)  # starts the workers, which takes longer than a run
    shutil.rmtree(folder)
    folder.mkdir()
    begin = time.monotonic()
    expected = timed_run([[]] * 4)[0]
    seconds, samples = time.monotonic() - begin, samples_of_updates(folder)
    for number in range(num_runs):
        folder = base / str(number)
        folder.mkdir()
        late: list[list[float]] = [[], [], [], []]
        for _ in range(draws.randint(1, 3) if returns else 1):
            late[draws.randrange(4)].append(draws.uniform(0.3, 0.9) * seconds)
        kind, text = describe(
            folder,
            expected,
            lambda: run_ranks(
                timed_if, 4, folder, late, env=REPLACE if returns else CONTINUE, outlives=True,  # noqa: B023
                replaces=9 * returns, timeout=60,
            ),
        )  # fmt: skip
        if kind == "went on" and samples_of_updates(folder) != samples:
            kind, text = "WRONG SAMPLES", f"{text}, {describe_samples(folder, samples)}"
        kinds[kind] += 1
        print(f"run {number}: kills after {late}: {text}", flush=True)
    return kinds


def main() -> None:
    """Kill a rank at each place, or at random times; the exit code is 1 where a job hung or its weights are others."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--random", type=int, default=0, help="kills at random times, in the place of the table")
    parser.add_argument("--returns", action="store_true", help="with --random: start another in the place of each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        if options.random:
            kinds = run_random(Path(base), options.random, options.seed, returns=options.returns)
        else:
            kinds = run_table(Path(base))
    print(", ".join(f"{kind}: {number}" for kind, number in kinds.most_common()))
    sys.exit(bool(kinds["hung"] or kinds["WRONG WEIGHTS"] or kinds["WRONG SAMPLES"]))


if __name__ == "__main__":
    main()
