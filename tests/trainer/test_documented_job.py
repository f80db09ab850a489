"""The documents' Trainer job runs as written: from an accelerate file, sharded over two CPU ranks, pushed to a hub."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertForSequenceClassification

from tests.hub_server import Hub, serve_hub
from tests.ranks import free_port
from tests.trainer_jobs import ACCELERATE_YAML

ROOT = Path(__file__).resolve().parents[2]


def run_job(directory: Path, hub: Hub, world_size: int) -> tuple[list[dict], str]:
    """Start the job on `world_size` ranks; return each rank's report, and everything they printed."""
    (directory / "path" / "to").mkdir(parents=True)
    (directory / "path" / "to" / "fsdp_config").write_text(ACCELERATE_YAML)
    env = {
        **os.environ, **hub.environment(str(directory / "home")), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HF_DATASETS_CACHE": str(directory / "cache"),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.documented_job"]
    process = subprocess.Popen(
        command, cwd=directory, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        text = process.communicate(timeout=100)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, text[-9000:]
    reports = [json.loads(line.partition("REPORT ")[2]) for line in text.splitlines() if line.startswith("REPORT ")]
    return reports, text


@pytest.mark.multirank
@pytest.mark.slow
def test_the_documented_call_shards_trains_evaluates_saves_and_pushes(tmp_path):
    with serve_hub() as hub:
        reports, text = run_job(tmp_path, hub, 2)

    assert hub.unknown == []
    assert len(reports) == 2
    for report in reports:
        assert report["type"] == "DistributedType.FSDP"
        assert report["precision"] == "bf16"
        assert report["dtype"] == "float32"
        assert report["rows"] == 21
        assert report["steps"] == 4
        assert report["eval_loss"] == pytest.approx(report["best_metric"])
        assert "FSDPBertLayer" in report["wrapped"]
    assert sum(report["held"] for report in reports) == reports[0]["total"]
    assert all(report["held"] < report["total"] for report in reports)
    if reports[0]["device"] == "cpu":
        assert "sharded over 2 CPU processes" in text

    model = BertForSequenceClassification.from_pretrained(tmp_path / reports[0]["best"])
    assert sum(p.numel() for p in model.parameters()) == reports[0]["total"]

    assert hub.repositories[0] == "user/your-model"
    summaries = [commit.summary for commit in hub.commits]
    assert summaries == ["Training in progress, epoch 1", "Training in progress, epoch 2", "End of training"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "training_args.bin"} <= hub.commits[0].files.keys()
    # What the store keeps beside checkpoints, the lock with this machine's name for one, stays here.
    assert not [name for commit in hub.commits for name in commit.files if name.startswith((".", "_"))]
    card = hub.commits[-1].files["README.md"].decode()
    assert "your-model" in card
    assert "Accuracy" in card
