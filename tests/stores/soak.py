"""Part of `make soak`: runs that upload, killed at random with their disk, their server or their connections.

    python -m tests.stores.soak [--trials N] [--seed S] [--seconds T]

In each trial a loop of two processes saves after each update and copies to a bucket. At a random moment a process is
killed, or all; or the server goes for a while, or connections end and answers are refused, and then all are killed. The
disk goes, and one or two processes go on from the bucket, five times. Ends with 1 at the first trial in which an upload
that was acknowledged is lost, or with other weights than those of a plain loop that was never killed, bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

from accel_trainer.checkpoint.object_store import ObjectStore
from tests.checkpoint.crash_job import acknowledged
from tests.ranks import RankFailure, run_ranks
from tests.stores.exact_run import URI, train
from tests.stores.faulty_server import Faulty, variables


def disturb(server: Faulty, draw: random.Random) -> None:
    """Let the server go for a while, or connections end and answers be refused."""
    time.sleep(draw.uniform(0.0, 2.0))
    if draw.random() < 0.5:
        server.stop()
        time.sleep(draw.uniform(0.1, 1.5))
        server.serve(server.port)
    else:
        server.dropped, server.unavailable = draw.randrange(1, 20), draw.randrange(5)
        server.torn = draw.choice([None, "model.00000.safetensors", "training.json", "manifest.json", "COMMITTED"])


def lose(server: Faulty, directory: Path, draw: random.Random, world_size: int, *, is_noisy: bool) -> str:
    """Have the run go on from an empty disk until it is killed at random; return how."""
    kind, last = draw.choice(["process", "machine", "server"]), (draw.randrange(5), draw.uniform(0.0, 0.5))
    kill: list[tuple[int, float] | None] = [last] * world_size
    if kind == "process" and world_size == 2:
        kill[draw.randrange(2)] = None
    disturbing = threading.Thread(target=disturb, args=(server, random.Random(draw.random())))
    if kind == "server":
        disturbing.start()
    try:
        run_ranks(train, world_size, directory, kill, is_noisy=is_noisy, env=variables(server), timeout=60)
    except RankFailure as lost:
        if not any("signal 9" in text for text in lost.failures.values()):
            raise
    else:
        raise AssertionError("nothing was killed")
    finally:
        if kind == "server":
            disturbing.join()
    shutil.rmtree(directory / "disk", ignore_errors=True)
    return kind


def trial(server: Faulty, directory: Path, seed: int) -> list[tuple[str, int, int]]:
    """Lose a run five times, and let it end; return how, on how many processes it went on, and from which update."""
    draw = random.Random(seed)
    is_noisy = draw.random() < 0.5  # other numbers of processes have other streams of random numbers
    worlds = [2, *(2 if is_noisy else draw.choice([1, 2]) for _ in range(5))]
    server.make_bucket()
    losses = []
    for world_size, next_size in pairwise(worlds):
        kind = lose(server, directory, draw, world_size, is_noisy=is_noisy)
        losses.append((kind, next_size, max(acknowledged(directory), 0)))
    begun = run_ranks(train, worlds[-1], directory, num_updates=2, is_noisy=is_noisy, env=variables(server))[0]
    store = ObjectStore(URI, "checkpoint_")
    assert store.newest() == f"checkpoint_{begun + 1}"  # the first one is 0
    for name in [name for name, _ in store.complete(store.names())]:
        store.verify(name)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="of five losses each")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; each has the next one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no trial after so many")
    options = parser.parse_args()
    logging.getLogger("accel_trainer").setLevel(logging.CRITICAL)
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server, begin, losses = Faulty(), time.monotonic(), list[tuple[str, int, int]]()
    server.serve()
    os.environ.update(variables(server))
    try:
        for seed in range(options.seed, options.seed + options.trials):
            if time.monotonic() - begin > options.seconds:
                break
            with tempfile.TemporaryDirectory(prefix="soak-") as directory:
                try:
                    losses += trial(server, Path(directory), seed)
                except (AssertionError, RankFailure) as error:
                    print(f"seed {seed}: {error}", file=sys.stderr)
                    return 1
    finally:
        server.stop()
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kind for kind, _, _ in losses).items())
    print(
        f"{len(losses)} losses from seed {options.seed} in {time.monotonic() - begin:.0f} s ({counts}; "
        f"{sum(size == 1 for _, size, _ in losses)} went on on one process, {sum(sent > 0 for _, _, sent in losses)} "
        f"after an upload that was acknowledged, the last of update {max(sent for _, _, sent in losses)}): none of "
        "those was lost, and all weights were those of a run that was never killed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
