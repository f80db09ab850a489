"""The examples that need PEFT, bitsandbytes or TRL, tiny."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cells import beyond
from tests.example_runs import run_example
from tests.ranks import preload


@pytest.mark.timeout(300)  # without AVX-512
def test_adapters_on_a_base_in_4_bits_learn_in_shards_what_they_learn_on_one_process(tmp_path: Path):
    for name in ("peft", "bitsandbytes"):
        pytest.importorskip(name)
    preload("peft", "bitsandbytes")
    options = ["--cpu", "--load_in_4bit", "--max_steps", 20, "--output_dir"]
    (alone,) = run_example("qlora", [*options, tmp_path / "alone"])
    assert alone.result[-1] < alone.result[0] - 0.5
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {
        path.name for path in (tmp_path / "alone").iterdir()
    }

    sharded, _ = run_example("qlora", [*options, tmp_path / "shards"], num_processes=2, file="qlora")
    assert sharded.result[-1] < sharded.result[0] - 0.5


@pytest.mark.parametrize("num_processes", [beyond(1), 2])
def test_a_model_learns_which_answers_are_preferred(num_processes: int, tmp_path: Path):
    pytest.importorskip("trl")
    preload("trl")
    options = ["--cpu", "--max_steps", 10, "--output_dir", tmp_path]
    run, *_ = run_example("dpo", options, num_processes=num_processes, CI="1")  # TRL asks for it, and sends nothing
    assert run.result["preferred"] > 0.9
    assert run.result["loss"] < 0.6
