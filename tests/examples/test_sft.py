"""sft.py: a model learns a chat format on packed rows; held-out conversations say how well."""

from __future__ import annotations

import re
from pathlib import Path

from tests.example_runs import run_example


def test_the_loss_of_conversations_that_were_held_out_falls(tmp_path: Path):
    (run,) = run_example("sft", ["--cpu", "--base_steps", 30, "--max_steps", 30, "--output_dir", tmp_path])

    found = re.search(r"600 conversations in \d+ rows, (\d+\.\d)% real tokens", run.out)
    assert float(found[1]) > 95
    assert run.result["base"] > 2
    assert run.result["chat"] < 0.5 * run.result["base"]
