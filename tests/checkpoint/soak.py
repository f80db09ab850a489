"""`make soak`: kill runs that save all the time at random moments, and look at what is left.

    python -m tests.checkpoint.soak [--trials N] [--seed S]

Ends with 1 at the first acknowledged save that is lost, mixed, or published broken; the line names the seed that shows
it again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoint.crash_job import random_kill


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; each has the next one")
    options = parser.parse_args()
    logging.getLogger("accel_trainer").setLevel(logging.ERROR)
    begin, held = time.monotonic(), []
    for seed in range(options.seed, options.seed + options.trials):
        with tempfile.TemporaryDirectory(prefix="soak-") as directory:
            try:
                held.append(random_kill(Path(directory), seed))
            except AssertionError as error:
                print(f"seed {seed}: {error}", file=sys.stderr)
                return 1
    print(
        f"{options.trials} kills in {time.monotonic() - begin:.0f} s after 0 to {max(held) + 1} saves: none that was "
        "acknowledged was lost, none was a mixture, nothing published was broken"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
