"""The benchmark of the loss in chunks runs, in seconds and on a small model, and keeps its bound of memory there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.ranks import preload, run_ranks
from tests.stand_in import ALONE

preload("accel_trainer.accelerator", "transformers.models.llama.modeling_llama")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def measure() -> list[dict[str, object]]:
    """Return the rows of the quick benchmark, in a process whose memory nobody else uses."""
    sys.path.insert(0, str(BENCHMARKS))
    return [row.to_dict() for row in importlib.import_module("chunked_loss").measure(1, quick=True)]


@pytest.mark.cell  # a measurement of half a minute of processor time, which `make bench` takes too
def test_a_loss_in_chunks_takes_a_third_of_the_memory():
    memory, time = run_ranks(measure, 1, env=ALONE, timeout=200)[0]
    assert memory["name"] == "chunked loss, 131,072 words: memory"
    assert float(str(memory["ratio"])) <= 0.35
    assert time["bound"] == 1.05  # how long it took is no matter of a test on a busy machine
