"""`accel-trainer convert-config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_trainer.config import resolve
from accel_trainer.launch.cli import main


def test_a_file_is_converted_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    (tmp_path / "ds.json").write_text(json.dumps(engine), encoding="utf-8")
    there, back = tmp_path / "fsdp.yaml", tmp_path / "back.json"

    assert main(["convert-config", str(tmp_path / "ds.json"), str(there)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'ds.json'} -> {there}",
        "- gradient_clipping has no counterpart: call accelerator.clip_grad_norm_ before the step, or set "
        "max_grad_norm of TrainingArguments",
    ]
    assert there.read_text(encoding="utf-8") == "strategy: fsdp2\nmixed_precision: bf16\n"

    assert main(["convert-config", str(there), str(back)]) == 0
    assert resolve(file=back).config.mixed_precision == "bf16"
    assert json.loads(back.read_text(encoding="utf-8"))["zero_optimization"]["stage"] == 3


def test_an_accelerate_file_keeps_what_is_not_deepspeeds(tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  zero_stage: 2\n")
    assert main(["convert-config", str(path), str(tmp_path / "out.yml")]) == 0
    config = resolve(file=tmp_path / "out.yml").config
    assert (config.strategy, config.launch.num_processes, config.deepspeed) == ("fsdp2", 4, {})


def test_without_a_target_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-config", "zero1"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "strategy: fsdp2\nfsdp:\n  reshard_after_forward: false\n"
    assert printed.err == "- zero_optimization.stage is 1: FSDP2 shards the gradients too, as stage 2 does\n"
    assert main(["convert-config", "shard_grad_op"]) == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken.yaml", "{path} exists, and is left as it is; give another name, or remove it"),
        ("out.toml", "{path} has the suffix '.toml'; expected one of .json, .yaml, .yml"),
        ("no/out.json", "{path} cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_said(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.yaml").write_text("debug: true\n")
    path = tmp_path / name
    assert main(["convert-config", "zero3", str(path)]) == 2
    assert capsys.readouterr().err == f"accel-trainer convert-config: {message.format(path=path)}\n"
    assert (tmp_path / "taken.yaml").read_text() == "debug: true\n"
