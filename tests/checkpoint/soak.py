"""`make soak`: kill runs that save, or upload, at random moments, and look at what is left; load changed checkpoints.

    python -m tests.checkpoint.soak [--trials N] [--mutations N] [--seed S]

Ends with 1 at the first acknowledged save that is lost, mixed, or published broken, and at the first changed checkpoint
that neither loads equal nor is refused or passed over; the line names the seed that shows it again.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.checkpoint.crash_job import random_kill
from tests.checkpoint.mutations import KINDS, limit_memory, trial
from tests.checkpoint.store_kills import random_loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--mutations", type=int, default=20_000, help="of checkpoints of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; each has the next one")
    options = parser.parse_args()
    logging.getLogger("accel_trainer").setLevel(logging.CRITICAL)
    if kill(random_kill, "saves", options.trials, options.seed):
        return 1
    return kill(random_loss, "uploads", options.trials, options.seed) or mutate(options.mutations, options.seed)


def kill(lose: Callable[[Path, int], int], what: str, trials: int, first: int) -> int:
    begin, held = time.monotonic(), [-1]
    for seed in range(first, first + trials):
        with tempfile.TemporaryDirectory(prefix="soak-") as directory:
            try:
                held.append(lose(Path(directory), seed))
            except AssertionError as error:
                print(f"seed {seed}: {error}", file=sys.stderr)
                return 1
    print(
        f"{trials} kills in {time.monotonic() - begin:.0f} s after 0 to {max(held) + 1} {what}: none that was "
        "acknowledged was lost, none was a mixture, nothing published was broken"
    )
    return 0


def mutate(trials: int, first: int) -> int:
    begin, outcomes = time.monotonic(), Counter[str]()
    limit_memory(2 * 2**30)
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        for number in range(trials):
            kind, seed = list(KINDS)[number % len(KINDS)], first + number // len(KINDS)
            faulthandler.dump_traceback_later(60, exit=True)
            try:
                outcomes[trial(kind, seed, Path(directory))] += 1
            except BaseException:
                print(f"kind {kind!r}, seed {seed}", file=sys.stderr)
                raise
    faulthandler.cancel_dump_traceback_later()
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(f"{trials} changed checkpoints in {time.monotonic() - begin:.0f} s: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
