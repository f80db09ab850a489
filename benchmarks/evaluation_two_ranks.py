"""Trainer.evaluate on two processes against one: every process with one thread, and a core of its own.

python benchmarks/evaluation_two_ranks.py ROUNDS    # the row, as JSON on the last line; run.py calls it
python benchmarks/evaluation_two_ranks.py --rank    # one process: evaluates for every line that it reads
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile

import torch
import transformers
from timing import Row, interleave, ratio_row
from trainer_step import build_evaluation

import accel_trainer
from accel_trainer.utils import get_free_port

NUM_SAMPLES = 8000


def serve(kept: str) -> None:
    """Evaluate once unmeasured, then once for every line of the standard input; keep the loss alone, or all logits."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (NUM_SAMPLES, 16))]
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_evaluation(accel_trainer, folder, data)
        if kept == "loss":
            trainer.compute_metrics = None
        is_open = True
        while is_open:
            with contextlib.redirect_stdout(io.StringIO()):
                trainer.evaluate()
            print("done", flush=True)
            is_open = bool(sys.stdin.readline())


class Job:
    """Processes that evaluate together when they are called."""

    def __init__(self, num_ranks: int, kept: str) -> None:
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
        ranks = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)} if num_ranks > 1 else {}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", kept],
                env={**environ, **ranks, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {})},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        self._wait()

    def __call__(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            print("go", file=process.stdin, flush=True)
        self._wait()

    def _wait(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "done":
                raise SystemExit(f"{process.args} ended with {process.wait()}")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()


def measure(rounds: int, kept: str, bound: float | None) -> Row:
    """Compare a job of two processes with one of one."""
    jobs = {"one": Job(1, kept), "two": Job(2, kept)}
    try:
        seconds = interleave(jobs, rounds)
    finally:
        for job in jobs.values():
            job.close()
    name = f"evaluate({NUM_SAMPLES}), 2 processes, {kept}"
    return ratio_row(name, "one process", seconds["two"], seconds["one"], bound)


def main() -> None:
    rounds = int(sys.argv[1])
    # Of logits the ranks exchange 64 MiB, and each computes the metric over all of them.
    rows = [measure(rounds, "loss", 0.65), measure(rounds, "logits", None)]
    print(json.dumps([row.to_dict() for row in rows]))


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1] == "--rank" else main()
