"""The task of `launch --print skypilot` in SkyPilot's own parser, which `make test-skypilot` installs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.launch.cli import main

SKY = Path(__file__).resolve().parents[2] / ".compat" / "skypilot" / "bin" / "python"
READ = """
import json, sys, sky, yaml
# As `sky jobs launch FILE --secret HF_TOKEN` does.
task = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])), secrets_overrides=[("HF_TOKEN", "x")])
[resources] = task.resources
mounts = {folder: [store.source, store.mode.value] for folder, store in task.storage_mounts.items()}
recovery = {**resources.job_recovery}
print(json.dumps([task.num_nodes, resources.accelerators, resources.use_spot, recovery, mounts, sorted(task.secrets)]))
"""
pytestmark = pytest.mark.skipif(not SKY.exists(), reason="SkyPilot is not installed")


def read(folder: Path, capsys: pytest.CaptureFixture[str], *words: str, check: bool = True) -> Any:
    """Return what SkyPilot reads in a task, or what it says of it."""
    assert main(["launch", "--print", "skypilot", *words]) == 0
    (folder / "task.yaml").write_text(capsys.readouterr().out)
    (folder / "train.py").touch()
    environ = {**os.environ, "HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environ.pop("PYTHONPATH", None)
    command = [str(SKY), "-c", READ, str(folder / "task.yaml")]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)
    assert (done.returncode == 0) == check, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if check else done.stderr


def test_skypilot_reads_machines_bucket_and_recovery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    Path("train.py").touch()
    job = ["--num_machines", "2", "--num_processes", "16", "train.py"]
    words = ["--resources", "accelerators=H100,use_spot=true", "--volume", "s3://bucket:/runs", "--secret", "HF_TOKEN"]
    nodes, accelerators, spot, recovery, mounts, secrets = read(tmp_path, capsys, *words, *job)
    assert (nodes, accelerators, spot) == (2, {"H100": 8}, True)
    assert recovery["recover_on_exit_codes"] == [85]
    assert recovery["max_restarts_on_errors"] == 3
    assert mounts == {"/runs": ["s3://bucket", "MOUNT_CACHED"]}
    assert secrets == ["HF_TOKEN"]
    wrong = read(tmp_path, capsys, "--resources", "accelerators=H100,use_spto=true", *job, check=False)
    assert "use_spto" in wrong
