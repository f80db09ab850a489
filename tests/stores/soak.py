"""Part of `make soak`: runs that upload, killed at random with their disk, their server or their connections.

    python -m tests.stores.soak [--trials N] [--seed S] [--seconds T]

In each trial a loop of two processes saves after each update and copies to a bucket. At a random moment a process is
killed, or both; or the server goes for a while, or connections end and answers are refused, and then both are killed.
The disk goes, and one or two processes go on from the bucket to the end. Ends with 1 at the first trial in which an
upload that was acknowledged is lost, or whose weights are not those of a plain loop that was never killed, bit for bit.
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
from pathlib import Path

from accel_trainer.checkpoint.object_store import ObjectStore
from tests.checkpoint.crash_job import acknowledged
from tests.ranks import RankFailure, run_ranks
from tests.stores.exact_run import NUM_UPDATES, URI, expected_weights, train
from tests.stores.faulty_server import Faulty, variables


def disturb(server: Faulty, draw: random.Random) -> None:
    """Let the server go for a while, or connections end and answers be refused."""
    if draw.random() < 0.5:
        server.stop()
        time.sleep(draw.uniform(0.1, 1.5))
        server.serve(server.port)
    else:
        server.dropped, server.unavailable = draw.randrange(1, 20), draw.randrange(5)
        server.torn = draw.choice([None, "model.00000.safetensors", "training.json", "manifest.json", "COMMITTED"])


def trial(server: Faulty, directory: Path, seed: int) -> tuple[str, int, int]:
    """Run a trial; return the kind of loss, the number of processes that went on, and the update they began with."""
    draw = random.Random(seed)
    kind, num_left = draw.choice(["rank", "machine", "server"]), draw.choice([1, 2])
    delay, is_noisy = draw.uniform(0.2, 3.0), num_left == 2
    kill = draw.choice([(delay, None), (None, delay)]) if kind == "rank" else (delay, delay)
    disturbing = threading.Timer(delay * draw.random(), disturb, (server, draw))
    server.make_bucket()
    if kind == "server":
        disturbing.start()
    try:
        run_ranks(train, 2, directory, kill, is_noisy=is_noisy, env=variables(server), timeout=60)
        kind = "not killed in time"
    except RankFailure as lost:
        if not any("signal 9" in text for text in lost.failures.values()):
            raise
    if disturbing.is_alive():
        disturbing.join()
    last = acknowledged(directory)
    shutil.rmtree(directory / "disk", ignore_errors=True)
    found = run_ranks(train, num_left, directory, is_noisy=is_noisy, env=variables(server), timeout=60)
    begun, weights = found[0]
    assert begun >= last, f"the upload of update {last} was acknowledged, and {begun} is what the store has"
    assert weights == expected_weights(is_noisy=is_noisy), f"other weights, from {begun} on {num_left} process(es)"
    store = ObjectStore(URI, "checkpoint_")
    names = store.names()
    assert store.newest() == names[-1]
    for name in [name for name, _ in store.complete(names)]:
        store.verify(name)
    return kind, num_left, begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; each has the next one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no trial after so many")
    options = parser.parse_args()
    logging.getLogger("accel_trainer").setLevel(logging.CRITICAL)
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server, begin, counts, begun = Faulty(), time.monotonic(), Counter[str](), [0]
    server.serve()
    os.environ.update(variables(server))
    try:
        for seed in range(options.seed, options.seed + options.trials):
            if time.monotonic() - begin > options.seconds:
                break
            with tempfile.TemporaryDirectory(prefix="soak-") as directory:
                try:
                    kind, num_left, update = trial(server, Path(directory), seed)
                except (AssertionError, RankFailure) as error:
                    print(f"seed {seed}: {error}", file=sys.stderr)
                    return 1
            counts[f"{kind}, on {num_left}"] += 1
            begun.append(update)
    finally:
        server.stop()
    print(
        f"{len(begun) - 1} uploading runs lost from seed {options.seed} in {time.monotonic() - begin:.0f} s "
        f"({', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}), gone on from update "
        f"{min(begun[1:])} to {max(begun)} of {NUM_UPDATES}, {sum(update > 0 for update in begun)} from the store: "
        "none that was acknowledged was lost, and all ended with the weights of a run that was not"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
