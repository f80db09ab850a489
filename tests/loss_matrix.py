"""`kill -9` of one of four ranks at nine places, and at random times: `make test-losses`.

What follows each, how long no update was applied, and how far the weights are from those of the run without a loss;
beside it how long a restart of all ranks takes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_trainer import Accelerator
from accel_trainer.accelerator.lost_ranks import LostRanks
from accel_trainer.runtime.process import find_rank
from tests.accelerator.test_lost_ranks import CONTINUE, REPLACE, Killed, Setup, samples_of_updates
from tests.accelerator.test_lost_ranks import train as train_natively
from tests.fault_injection import fault_env
from tests.ranks import RankFailure, preload, run_ranks
from tests.trainer.test_lost_ranks import DDP, HSDP, PLACES
from tests.trainer.test_lost_ranks import train as train_by_trainer

preload("accel_trainer.trainer", "accel_trainer.accelerator", "transformers")

MAX_STEP_SECONDS, MAX_START_SECONDS = 0.1, 2.0
"""Of what is killed at random: about an update of a busy machine, and the start of a process that returns."""
SHORT, LONG = Setup(), Setup(num_epochs=40)
NATIVE_PLACES = ("data", "backward", "optimizer", "gather", "callback")
FRONTS = {
    "native": NATIVE_PLACES,
    "native HSDP": (*NATIVE_PLACES, "forward", "reduction", "vote", "step"),
    "Trainer": (*PLACES, "callback"),
    "Trainer HSDP": (*PLACES, "callback"),
}


class Kill(NamedTuple):
    """When a rank is killed: so many seconds after an update of the job that it has applied; of 0, after its start."""

    update: int
    seconds: float


def note_time(folder: Path) -> None:
    """Note that this rank has applied an update."""
    with open(folder / f"{find_rank()}.updates", "a") as file:
        file.write(f"{time.monotonic()}\n")


def timed(folder: Path, front: str, killed: tuple[Killed, ...], late: Kill | None = None, setup: Setup = SHORT) -> Any:
    """Run a rank; note when it is killed and when it applies updates."""
    note_update, meet, hand_over, kill = LostRanks.note_update, LostRanks._meet, LostRanks._hand_over, os.kill
    sent = 0.0
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  what the Trainer logs

    def kill_late(num_updates: int) -> None:
        nonlocal late
        if late is not None and num_updates >= late.update:
            threading.Timer(late.seconds, kill_noted, (os.getpid(), signal.SIGKILL)).start()
            late = None

    def note(self: LostRanks) -> None:
        note_update(self)
        kill_late(self.num_updates)
        note_time(folder)

    def kill_noted(pid: int, number: int) -> None:
        (folder / "killed").write_text(str(time.monotonic()))
        kill(pid, number)

    def meet_noted(self: LostRanks, error: BaseException | None = None, replica: int | None = None) -> None:
        nonlocal sent
        begin, sent = time.monotonic(), 0.0
        meet(self, error, replica)
        if replica is not None:
            with open(folder / f"{os.environ['RANK']}.joins", "a") as file:  # by which the launcher started it
                file.write(f"{time.monotonic() - begin} {sent}\n")

    def hand_over_noted(self: LostRanks, accelerator: Accelerator) -> int:
        nonlocal sent
        begin = time.monotonic()
        num_bytes = hand_over(self, accelerator)
        sent = time.monotonic() - begin
        return num_bytes

    LostRanks.note_update, LostRanks._meet, os.kill = note, meet_noted, kill_noted  # type: ignore[method-assign]
    LostRanks._hand_over = hand_over_noted  # type: ignore[method-assign]
    kill_late(0)
    shards = front.endswith("HSDP")
    if front.startswith("native"):
        notes = folder if setup is LONG else None
        setup = setup._replace(strategy="fsdp2", num_replicas=2) if shards else setup
        return train_natively(killed, setup, notes)[0]
    return train_by_trainer(folder / "run", killed[0].rank if killed else -1, options=HSDP if shards else DDP)[0]


def timed_if(folder: Path, kills: list[list[Kill]], front: str) -> Any:
    """Run a rank that is killed late, and so is each process in its place, as long as there are `kills` of the rank."""
    rank = find_rank()
    with open(folder / f"{rank}.starts", "a") as file:
        file.write("x")
    number = (folder / f"{rank}.starts").stat().st_size - 1
    return timed(folder, front, (), kills[rank][number] if number < len(kills[rank]) else None, LONG)


def restarted(folder: Path) -> None:
    """Run a rank of a job in which one is killed, and all are started again; note when it applies updates."""
    register_optimizer_step_post_hook(lambda *_: note_time(folder))
    timed(folder, "native", () if (folder / "killed").exists() else (Killed(2, 3, "backward"),))


def restart_seconds(folder: Path) -> float:
    """Return how long no update is applied where the launcher starts four ranks again that have nothing to load."""
    command = [sys.executable, "-m", "accel_trainer", "launch", "--cpu", "--num_processes", "4", "--max_restarts", "1"]
    subprocess.run([*command, "--module", "tests.loss_matrix", "--restarted", str(folder)], check=True, timeout=90)
    return standstill_seconds(folder)


def standstill_seconds(folder: Path) -> float:
    """Return how long after the kill the first update was applied by rank 0, which may be another process by then."""
    begin = float((folder / "killed").read_text())
    updates = map(float, (folder / "0.updates").read_text().split())
    return min((each for each in updates if each > begin), default=float("nan")) - begin


def describe_kills(kills: list[list[Kill]]) -> str:
    return "; ".join(
        f"of {rank} " + ", ".join(f"{kill.seconds:.3f} s after {kill.update}" for kill in of_rank)
        for rank, of_rank in enumerate(kills) if of_rank
    )  # fmt: skip


def describe_joins(folder: Path) -> str:
    """Return how many ranks have returned, and how long the others waited for one beside an update; empty for none."""
    joins = [
        [tuple(map(float, line.split())) for line in path.read_text().splitlines()] for path in folder.glob("*.joins")
    ]
    if not joins:
        return ""
    updates = sorted(map(float, (folder / "0.updates").read_text().split()))
    update = statistics.median(end - begin for begin, end in itertools.pairwise(updates))
    longest, sent = max(map(max, joins))
    return (
        f", {max(map(len, joins))} returned, for at most {longest:.3f} s each, {sent:.3f} of them to send (an update "
        f"takes {update:.3f} s)"
    )


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
        reason = next((line for line in reversed(lines) if "cannot go on" in line), lines[-1])
        return kind, f"{kind}: {reason[:250]}"
    left = [rank for rank, result in enumerate(results) if result is not None]
    far = max((results[r][name] - value).abs().max().item() for r in left for name, value in expected.items())
    kind = "went on" if far < 1e-6 else "WRONG WEIGHTS"
    if not (folder / "killed").exists():
        return "was over before", "was over before"
    seconds, joins = standstill_seconds(folder), describe_joins(folder)
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
    folder = base / "restarted"
    folder.mkdir()
    print(f"all ranks started again, without --on_rank_loss: standstill {restart_seconds(folder):.2f} s", flush=True)
    return kinds


def run_random(base: Path, num_runs: int, seed: int, front: str, *, returns: bool) -> Counter[str]:
    """Kill a rank of native loops at random times; with `returns` up to three, and processes started in their place."""
    draws, kinds = random.Random(seed), Counter[str]()
    folder = base / "undisturbed"
    folder.mkdir()
    timed_run = partial(run_ranks, timed_if, 4, folder, front=front, timeout=90)
    timed_run([[]] * 4)  # starts the workers, which takes longer than a run
    shutil.rmtree(folder)
    folder.mkdir()
    expected, samples = timed_run([[]] * 4)[0], samples_of_updates(folder)
    for number in range(num_runs):
        folder = base / str(number)
        folder.mkdir()
        late: list[list[Kill]] = [[], [], [], []]
        for _ in range(draws.randint(1, 3) if returns else 1):
            kills = late[draws.randrange(4)]
            if kills and draws.random() < 0.5:  # before it has joined, or while it does
                kills.append(Kill(0, draws.uniform(0, MAX_START_SECONDS)))
            else:
                kills.append(Kill(draws.randint(1, int(0.9 * len(samples))), draws.uniform(0, MAX_STEP_SECONDS)))
        kind, text = describe(
            folder,
            expected,
            lambda: run_ranks(
                timed_if, 4, folder, late, front, env=REPLACE if returns else CONTINUE, outlives=True,  # noqa: B023
                replaces=9 * returns, timeout=60,
            ),
        )  # fmt: skip
        if kind == "went on" and samples_of_updates(folder) != samples:
            kind, text = "WRONG SAMPLES", f"{text}, {describe_samples(folder, samples)}"
        kinds[kind] += 1
        print(f"run {number}: kills {describe_kills(late)}: {text}", flush=True)
    return kinds


def main() -> None:
    """Kill a rank at each place, or at random times; the exit code is 1 where a job hung or its weights are others."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--random", type=int, default=0, help="kills at random times, in the place of the table")
    parser.add_argument("--returns", action="store_true", help="with --random: start another in the place of each")
    parser.add_argument("--hsdp", action="store_true", help="with --random: replicas of shards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restarted", type=Path, help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args()
    if options.restarted:
        restarted(options.restarted)
        return
    with tempfile.TemporaryDirectory() as base:
        if options.random:
            front = "native HSDP" if options.hsdp else "native"
            kinds = run_random(Path(base), options.random, options.seed, front, returns=options.returns)
        else:
            kinds = run_table(Path(base))
    print(", ".join(f"{kind}: {number}" for kind, number in kinds.most_common()))
    sys.exit(bool(kinds["hung"] or kinds["WRONG WEIGHTS"] or kinds["WRONG SAMPLES"]))


if __name__ == "__main__":
    main()
