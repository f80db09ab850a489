"""`make soak`: send the ranks of a training run signals at random moments until it has come to its end.

    python -m tests.trainer.signal_soak [--trials N] [--seed S]

SIGTERM to one rank or to both at different times, SIGUSR1 to one with its loader workers, SIGKILL. After each the run
is started again. Ends with 1 where a rank hangs, ends with another code than 85, or where losses, evaluations or
weights at the end are not those of the uninterrupted run, bit for bit; the line names the seed that shows it again.
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

import torch
from transformers import TrainerCallback

from tests.ranks import RankFailure, run_ranks
from tests.trainer.test_preemption import run

OPTIONS: dict[str, Any] = {
    "samples": 160, "save_steps": 7, "save_total_limit": 2, "eval_steps": 5, "num_train_epochs": 1,
    "gradient_accumulation_steps": 2, "eval_samples": 24, "logging_steps": 1, "dataloader_num_workers": 2,
}  # fmt: skip
"""20 updates on two ranks."""


_ATTEMPTS = 40


class Pace(TrainerCallback):
    """Lets updates and evaluations take their time, and sends a signal some time after the first one has begun."""

    def __init__(self, delays: dict[int, float], number: int, to_group: bool) -> None:
        self.delay, self.number, self.to_group = delays.get(int(os.environ["RANK"])), number, to_group

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        delay, self.delay = self.delay, None
        if delay is not None:
            target = 0 if self.to_group else os.getpid()
            timer = threading.Timer(delay, os.kill, (target, self.number))
            timer.daemon = True
            timer.start()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # a run that is over has nothing to save

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.01)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)


def attempt(folder: str, delays: dict[int, float], number: int, to_group: bool) -> dict[str, Any]:
    has_saved = any(Path(folder).glob("checkpoint-*"))
    return run(folder, Pace(delays, number, to_group), resume=has_saved, **OPTIONS)


def plan(chance: random.Random) -> tuple[dict[int, float], int, bool]:
    """Return when which rank gets which signal, and whether its whole process group does."""
    moments = {rank: chance.uniform(0.0, 1.5) for rank in range(2)}
    kind = chance.choice(("one", "both", "group", "kill"))
    if kind == "both":
        return moments, signal.SIGTERM, False
    rank = chance.randrange(2)
    number = {"one": signal.SIGTERM, "group": signal.SIGUSR1, "kill": signal.SIGKILL}[kind]
    return {rank: moments[rank]}, number, kind == "group"


def trial(seed: int, folder: str, whole: dict[str, Any]) -> Counter[str]:
    """Run to the end through signals; return how often the run was ended how."""
    chance, ends = random.Random(seed), Counter[str]()
    for _ in range(_ATTEMPTS):
        delays, number, to_group = plan(chance)
        try:
            results = run_ranks(attempt, 2, folder, delays, number, to_group, timeout=120)
        except RankFailure as failure:
            if number != signal.SIGKILL:
                raise AssertionError(str(failure)) from failure
            ends["killed"] += 1
            continue
        codes = {each["code"] for each in results}
        assert len(codes) == 1, codes
        assert codes <= {85, None}, codes
        if codes == {85}:
            ends["saved and ended"] += 1
            continue
        for each in results:
            assert each["history"] == whole["history"], "losses or evaluations are others"
            for name, value in whole["weights"].items():
                assert torch.equal(each["weights"][name], value), name
        ends["came to its end"] += 1
        return ends
    raise AssertionError(f"{_ATTEMPTS} attempts did not come to the end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=7, help="runs; each is ended about three times")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; each has the next")
    options = parser.parse_args()
    begin, ends = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="soak-") as base:
        whole = run_ranks(attempt, 2, f"{base}/whole", {}, signal.SIGTERM, False, timeout=120)[0]
        for seed in range(options.seed, options.seed + options.trials):
            try:
                ends += trial(seed, f"{base}/{seed}", whole)
            except AssertionError as error:
                print(f"seed {seed}: {error}", file=sys.stderr)
                return 1
    counts = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    print(f"{options.trials} runs in {time.monotonic() - begin:.0f} s: {counts}; each was the uninterrupted one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
