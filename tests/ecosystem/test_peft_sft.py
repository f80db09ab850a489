"""examples/sft.py with PEFT: adapters learn the chat format, and the base model beneath them stays as it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.example_runs import run_example

pytest.importorskip("peft")


def test_adapters_learn_the_chat_format_and_leave_the_base_alone(tmp_path: Path):
    options = ["--cpu", "--base_steps", 30, "--max_steps", 30, "--rank", 8, "--output_dir", tmp_path]
    (run,) = run_example("sft", options)

    found = re.search(r"(\d+) weights are trained by LoRA\n", run.out)
    assert found, run.out
    assert 0 < int(found[1]) < 40_000
    assert run.result["base"] > 2
    assert run.result["chat"] < 0.5 * run.result["base"]
    assert run.result["adapter off"] == run.result["base"]
