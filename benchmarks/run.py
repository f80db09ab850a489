"""`make bench`: one table of ratios against plain PyTorch and the peer, each pair interleaved in one run.

    python benchmarks/run.py [--only NAME ...] [--rounds N]

Ratios are of medians over the rounds; "lowest" and "highest" are ratios of single rounds and show how noisy the machine
was. The peer is upstream's Trainer on Hugging Face accelerate, looked for in `.compat/accelerate` (`make bench` puts it
there); without it, its rows are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import activations_step
import checkpoints
import chunked_loss
import data_loading
import guards_step
import meters_step
import native_step
import packing
import startup
import streams
import torch
import transformers
import weight_updates
from timing import Row, print_rows

HERE = Path(__file__).parent
PEER = HERE.parent / ".compat" / "accelerate"
ECOSYSTEM = HERE.parent / ".compat" / "ecosystem"
FABRIC = HERE.parent / ".compat" / "fabric"
STORES = HERE.parent / ".compat" / "stores"


def _rows_of(command: list[str], environ: dict[str, str]) -> list[Row]:
    """Run a benchmark in processes of its own and read the rows that it prints last."""
    finished = subprocess.run(command, env=environ, capture_output=True, text=True)
    if finished.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {finished.returncode}:\n{finished.stderr[-3000:]}")
    return [Row(**row) for row in json.loads(finished.stdout.strip().splitlines()[-1])]


def _with_peer(script: str, rounds: int) -> list[Row]:
    environ = dict(os.environ)
    if PEER.is_dir():
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PEER), environ.get("PYTHONPATH")]))
    else:
        print(f"{PEER.relative_to(HERE.parent)} is not there: the rows against upstream's Trainer are left out")
    return _rows_of([sys.executable, str(HERE / script), str(rounds)], environ)


def _with_fabric(rounds: int) -> list[Row]:
    if not FABRIC.is_dir():
        print(f"{FABRIC.relative_to(HERE.parent)} is not there: the rows against Fabric are left out")
        return []
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(FABRIC), os.environ.get("PYTHONPATH", "")])}
    return _rows_of([sys.executable, str(HERE / "fabric_step.py"), str(rounds)], environ)


def _two_processes(script: str, rounds: int, packages: Path | None = None) -> list[Row]:
    return _processes(2, script, rounds, packages)


def _processes(number: int, script: str, rounds: int, packages: Path | None = None) -> list[Row]:
    launcher = [sys.executable, "-m", "accel_trainer", "launch", "--cpu", "--num_processes", str(number)]
    paths = [str(packages or ""), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return _rows_of([*launcher, str(HERE / script), str(rounds)], environ)


def _peaks(ranks: int, rounds: int) -> list[Row]:
    if not ECOSYSTEM.is_dir():
        print(f"{ECOSYSTEM.relative_to(HERE.parent)} is not there: cases with PEFT are left out")
    return _processes(ranks, "planned_peaks.py", rounds, ECOSYSTEM if ECOSYSTEM.is_dir() else None)


def _losses(sizes: tuple[str, ...], rounds: int) -> list[Row]:
    return _rows_of([sys.executable, str(HERE / "rank_loss_step.py"), str(rounds), *sizes], dict(os.environ))


def _with_store(rounds: int) -> list[Row]:
    if STORES.is_dir():
        return _two_processes("stores.py", rounds, STORES)
    print(f"{STORES.relative_to(HERE.parent)} is not there: the rows with an object store are left out")
    return []


BENCHMARKS = {
    "native": native_step.measure,
    "fabric": _with_fabric,
    "loss": chunked_loss.measure,
    "activations": activations_step.measure,
    "guards": lambda rounds: [*guards_step.measure(rounds), *_two_processes("guards_step.py", rounds)],
    "meters": meters_step.measure,
    "watching": lambda rounds: _two_processes("watching_step.py", rounds),
    "trainer": lambda rounds: _with_peer("trainer_step.py", rounds),
    "short": lambda rounds: _with_peer("short_steps.py", rounds),
    "evaluate2": lambda rounds: _rows_of(
        [sys.executable, str(HERE / "evaluation_two_ranks.py"), str(rounds)], dict(os.environ)
    ),
    "trainer2": lambda rounds: _two_processes("trainer_two_ranks.py", rounds),
    "fsdp2": lambda rounds: _two_processes("fsdp2_step.py", rounds),
    "titan": lambda rounds: _two_processes("titan_step.py", rounds),
    "updates": weight_updates.measure,
    "zero": lambda rounds: _two_processes("zero_step.py", rounds),
    "data": data_loading.measure,
    "packing": packing.measure,
    "streams": streams.measure,
    **{f"peaks{ranks}": partial(_peaks, ranks) for ranks in (1, 2, 4)},
    "checkpoints": checkpoints.measure,
    "background": lambda rounds: _two_processes("background_saves.py", rounds),
    "stores": _with_store,
    "loading": lambda rounds: _two_processes("sharded_load.py", rounds),
    "gather": lambda rounds: _two_processes("gathering.py", rounds),
    "offloading": lambda rounds: _with_peer("offloading.py", rounds),
    "ranks": lambda rounds: _rows_of([sys.executable, str(HERE / "layout_ranks.py"), str(rounds)], dict(os.environ)),
    "losses": partial(_losses, ("2.5 ms", "30 ms")),
    "votes": partial(_losses, ("HSDP of 30 ms",)),
    "startup": lambda rounds: startup.measure(rounds, PEER if PEER.is_dir() else None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), help="run these (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each pair, at least 5")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error(f"--rounds {options.rounds} is too few for a median; use 5 or more")
    rows, failed = [], []
    for name in options.only or BENCHMARKS:
        begin = time.monotonic()
        try:
            rows += BENCHMARKS[name](options.rounds)
        except (Exception, SystemExit) as error:  # which the rows of the others are not lost for
            failed.append(f"{name}: {error}")
        print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, CPU"
    )
    print_rows(rows)
    if missed := [row.name for row in rows if row.verdict == "MISSED"]:
        failed.append(f"missed: {', '.join(missed)}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
