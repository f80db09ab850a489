"""The recipe for Ray Train of docs/launching.md, where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multirank
@pytest.mark.slow
def test_the_recipe_for_ray_train_runs_on_two_ranks(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    page = (ROOT / "docs" / "launching.md").read_text()
    [recipe] = re.findall(r"^```py\n(from ray.*?)^```$", page, re.DOTALL | re.MULTILINE)
    script = tmp_path / "recipe.py"
    script.write_text(f"import ray\nray.init(num_cpus=4, include_dashboard=False)\n{recipe}")
    environ = {**os.environ, "HOME": str(tmp_path), "ACCEL_TRAINER_USE_CPU": "true"}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "ranks: 2" in done.stdout + done.stderr
