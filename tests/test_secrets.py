"""R17: a token that is planted in options and variables is in no file and no output of ours."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from accel_trainer import Accelerator
from accel_trainer.config import resolve
from accel_trainer.launch.cli import main
from accel_trainer.plugins.deepspeed_plugin import HfDeepSpeedConfig
from accel_trainer.trainer.arguments.deepspeed_arguments import masked_engine_config
from tests.accelerator.test_trackers import Notes
from tests.trainer_jobs import build_trainer

CANARY = "hf_canary7f3a9c1e2b4d6f80"
NAMES = ("hub_token", "my_service_token", "wandb_api_key", "license_key", "client_secret", "db_password")
SECRETS: dict[str, Any] = dict.fromkeys(NAMES, CANARY) | {"deep": [{"auth_token": CANARY}], "pad_token": "<pad>"}

BLOCK = {"zero_stage": 1, "comet": {"enabled": False, "api_key": CANARY, "project": "shown"}}
CONFIGURATION = {"strategy": "deepspeed", "use_cpu": True, "launch": {"num_processes": 2}, "deepspeed": BLOCK}


def leaks(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.setenv(f"ACCELERATE_{name.upper()}", CANARY)
        monkeypatch.setenv(name.upper(), CANARY)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("NCCL_PROXY", f"http://me:{CANARY}@proxy:80")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_r17_a_trainer_writes_and_logs_no_token(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "report_html": True}
    options |= {"hub_token": CANARY, "gradient_checkpointing_kwargs": SECRETS}
    build_trainer(folder / "run", max_steps=1, **options).train()
    trainer = build_trainer(folder / "run", max_steps=2, **options)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model(str(folder / "saved"))
    assert main(["report", str(folder / "run"), "--output", str(folder / "page.html")]) == 0
    assert {"training_args.bin", "manifest.json", "report.html", "page.html"} <= {
        each.name for each in folder.rglob("*")
    }
    assert leaks(folder) == []
    assert CANARY not in caplog.text + repr(trainer.args) + trainer.args.to_json_string()
    # Nothing of the run itself is changed.
    assert (trainer.args.hub_token, trainer.args.gradient_checkpointing_kwargs) == (CANARY, SECRETS)


class Behind(LocalFileSystem):
    """A disk whose addresses hold a key."""

    protocol = "behind"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix(f"behind://me:{CANARY}@host"))


def test_r17_the_key_of_a_store_is_saved_nowhere(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fsspec.register_implementation("behind", Behind, clobber=True)
    uri = f"behind://me:{CANARY}@host{folder}/store"
    trainer = build_trainer(folder / "run", max_steps=1, save_strategy="steps", save_steps=1, checkpoint_uri=uri)
    trainer.train()
    assert (folder / "store" / "checkpoint-1" / "COMMITTED").exists()
    assert leaks(folder) == []
    assert CANARY not in caplog.text + repr(trainer.args)
    assert trainer.args.checkpoint_uri == trainer.args.resolved.config.checkpoint_uri == uri


def test_r17_the_engines_configuration_is_pickled_with_the_arguments_without_its_keys() -> None:
    args = SimpleNamespace(
        resolved=resolve(flags={"strategy": "deepspeed", "deepspeed": BLOCK}, environ={}),
        hf_deepspeed_config=HfDeepSpeedConfig(BLOCK),
    )
    masked = pickle.dumps(masked_engine_config(args))
    assert CANARY.encode() not in masked
    assert b"shown" in masked
    assert args.hf_deepspeed_config.get_value("comet.api_key") == CANARY


def test_r17_a_state_and_a_tracker_have_no_token(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    accelerator = Accelerator(cpu=True, config={"deepspeed": BLOCK}, log_with=notes)
    accelerator.init_trackers("project", config=SECRETS | {"url": f"http://me:{CANARY}@host"})
    accelerator.prepare(nn.Linear(2, 1))
    accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    assert leaks(folder) == []
    [stored] = [call[1] for call in notes.calls if call[0] == "config"]
    assert CANARY not in str(notes.calls) + caplog.text
    assert stored["pad_token"] == "<pad>"


SCRIPT = ["train.py", "--hub_token", CANARY, f"--wandb_api_key={CANARY}", "--license_key", CANARY, "--pad_token", "<p>"]


@pytest.mark.parametrize(
    "words",
    [
        ["env"],
        ["env", "--config_file", "broken.yaml"],
        ["explain"],
        ["explain", "--config_file", "broken.yaml"],
        ["config", "show"],
        ["launch", "--dry-run", *SCRIPT],
        ["launch", "--dry-run", "--use_fsdp", "--num_processes", "1", *SCRIPT],
        ["launch", "--print", "slurm", *SCRIPT],
        ["launch", "--print", "kubernetes", "--image", "me/train:1", *SCRIPT],
        ["launch", "--dry-run", f"--hub_token={CANARY}", "train.py"],
        ["launch", "--dry-run", "-m", f"http://me:{CANARY}@host"],
    ],
    ids=lambda words: " ".join(words).replace(CANARY, "X")[:60],
)
def test_r17_a_command_prints_no_token(folder: Path, capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    (folder / "train.py").touch()
    (folder / "run.yaml").write_text(json.dumps(CONFIGURATION))
    (folder / "broken.yaml").write_text(
        f"hub_token: {CANARY}\ndeepspeed: {{comet: {{api_key: [{CANARY}]}}, zero: 9}}\n"
    )
    if "--config_file" not in words and "--use_fsdp" not in words:
        at = 2 if words[0] == "config" else 1
        words = [*words[:at], "--config_file", "run.yaml", *words[at:]]
    main(words)
    shown = "".join(capfd.readouterr())
    assert shown
    assert CANARY not in shown, shown
