"""A loss whose logits are made in chunks of tokens is the plain one, on every layout: `loss: chunked`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.cells import beyond
from tests.conformance.models import plain_loop
from tests.conformance.test_conformance import LAYOUTS, NUM_BATCHES, WAYS, mark, run_resume, run_training
from tests.ranks import preload, run_ranks

preload("transformers.models.auto.modeling_auto", "accel_trainer.accelerator", "deepspeed")

CHUNKED = {"loss": "chunked", "loss_chunk_tokens": 7}
"""A micro-batch has 96 tokens or fewer: chunks of several rows, and a last one that is shorter."""


def _kinds(name: str) -> list[str]:
    """Return the language models of a layout: all where shards and whole heads differ, elsewhere one."""
    # Layouts that the suite tries on no language model are tried on one here. gpt2 and bert tie head and embedding.
    kinds = [kind for kind in LAYOUTS[name].kinds if kind != "mlp"] or ["llama"]
    return kinds if name in ("single", "fsdp2", "zero3") else kinds[:1]


KINDS = {name: _kinds(name) for name in LAYOUTS}
# In the sample: each model on one process, and one where the head or its tokens are sharded in a way of their own. The
# engines are in that of test_techniques.py.
CASES = [
    case if name == "single" or (name == "tp" and kind == kinds[0]) else beyond(case)
    for name, kinds in KINDS.items()
    for kind in kinds
    for case in [mark(name, kind=kind)]
]


def run_all(kind: str, layout: str, directory: str) -> dict[str, dict[str, Any]]:
    """Train in the ways of the suite, and resume, in one job."""
    results = {way: run_training(kind, layout, **options, **CHUNKED) for way, options in WAYS.items()}
    return results | {"resume": run_resume(kind, layout, directory, **CHUNKED)}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the state of an interrupted run is saved."""
    return tmp_path_factory.mktemp("states")


@functools.cache
def results_of(layout: str, kind: str, states: Path) -> list[dict[str, dict[str, Any]]]:
    """Return the results of `run_all` by rank."""
    env, world_size = LAYOUTS[layout].env, LAYOUTS[layout].world_size
    return run_ranks(run_all, world_size, kind, layout, str(states / f"{layout}-{kind}"), env=env, timeout=150)


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_a_loss_in_chunks_of_tokens_is_the_plain_one(layout: str, kind: str, states: Path):
    for way, options in WAYS.items():
        reference = plain_loop(kind, **options)
        for results in results_of(layout, kind, states):
            assert results[way]["losses"] == pytest.approx(reference["losses"], rel=2e-6)
            # AdamW makes steps as large as any of gradients that are rounding alone, as those of gpt2's key biases.
            assert results[way]["norms"] == pytest.approx(reference["norms"], rel=1e-4)
            if way == "clipped":
                assert results[way]["logits"] == pytest.approx(reference["logits"], abs=5e-5)  # 3.3e-5 of gpt2


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_a_resumed_run_with_chunks_is_the_run_that_was_interrupted(layout: str, kind: str, states: Path):
    for result in (results["resume"] for results in results_of(layout, kind, states)):
        assert result["resumed"] == result["uninterrupted"]
        assert len(result["resumed"]["losses"]) == NUM_BATCHES - 3
