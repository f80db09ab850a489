"""The benchmark of kept activations runs, on a small model, and every policy keeps less than none does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.ranks import preload, run_ranks
from tests.stand_in import ALONE

preload("accel_trainer.accelerator", "transformers.models.llama.modeling_llama")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def measure() -> list[Any]:
    """Return the rows of the quick benchmark, in a process of its own."""
    sys.path.insert(0, str(BENCHMARKS))
    return [row.to_dict() for row in importlib.import_module("activations_step").measure(1, quick=True)]


def test_policies_and_the_offload_keep_what_they_promise():
    by_name = {row["name"]: row["ratio"] for row in run_ranks(measure, 1, env=ALONE, timeout=100)[0]}
    kept = {name.removeprefix("bytes that layers keep, "): ratio for name, ratio in by_name.items()}
    assert kept["full"] < 0.2 < kept["selective"] < 0.7
    assert max(kept["offload"], kept["selective, offload"]) < 0.25
    assert by_name.keys() >= {"a step, selective", "a step, full"}
