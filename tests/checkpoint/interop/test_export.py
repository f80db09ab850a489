"""Weights come out of every kind of checkpoint as from_pretrained reads them, one tensor at a time."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from accel_trainer.checkpoint.interop.huggingface import export_hf_fsdp, export_weights
from accel_trainer.checkpoint.weights.weight_files import WeightFiles, save_weights
from accel_trainer.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from accel_trainer.launch.cli import main
from tests.publishing import flip
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def check(folder: Path) -> None:
    files = WeightFiles(folder)
    expected = build().state_dict()
    assert files.keys() == expected.keys()
    assert all(torch.equal(files[name], tensor) for name, tensor in expected.items())


def save_everything(folder: str) -> None:
    """Save a sharded model as save_state does, and as torch and Hugging Face accelerate do."""
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    model = build()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(Path(folder, "state"))
    dcp.save({"model": model.state_dict(), "step": 1}, checkpoint_id=f"{folder}/dcp")
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/theirs/pytorch_model_fsdp_0")
    dcp.save({"optimizer": {"lr": torch.tensor(1.0)}}, checkpoint_id=f"{folder}/optimizer_only")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_everything, 2, str(folder))
    save_weights(build().state_dict(), folder / "parts", "60B")
    save_weights(build().state_dict(), folder / "bin", safe_serialization=False)
    return folder


@pytest.mark.parametrize("kind", ["state", "dcp", "theirs", "parts", "bin"])
def test_every_kind_is_exported(saved: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["merge-weights", str(saved / kind), str(tmp_path / "one")]) == 0
    assert "one: 1 file(s), 0.0 MiB" in capsys.readouterr().out
    check(tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    options = ["--max_shard_size", "60B", "--unsafe_serialization"]
    assert main(["ckpt", "export", str(saved / kind), str(tmp_path / "many"), *options]) == 0
    check(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.bin"))) > 2


def nested_state(kind: str) -> dict[str, Any]:
    """Return what a script may save beside a model, or around it."""
    weights, optimizer = build().state_dict(), {"state": {"0.weight": {"exp_avg": torch.ones(5, 3)}}}
    return {
        "an application's": {"app": {"model": weights, "optim": optimizer}},
        "below two": {"app": {"module": {"model": torch.ones(1)}, "model": weights}, "epoch": torch.ones(1)},
        "beside": {**weights, "optimizer": optimizer},
        "a layer's own": {**weights, "0._extra_state": {"scale": torch.ones(1)}},
        "net": {"net": weights},
        "net with a step": {"net": weights, "epoch": torch.ones(1)},
        "net beside": {"net": weights, "optim": optimizer},
    }[kind]


@pytest.mark.parametrize("kind", ["an application's", "below two", "beside", "a layer's own"])
def test_weights_are_found_among_other_state(kind: str, tmp_path: Path):
    dcp.save(nested_state(kind), checkpoint_id=tmp_path / "dcp", no_dist=True)
    export_weights(tmp_path / "dcp", tmp_path / "out")
    own = [name for name in WeightFiles(tmp_path / "out") if "_extra_state" not in name]
    assert own == sorted(build().state_dict())


@pytest.mark.parametrize("kind", ["net", "net with a step", "net beside"])
def test_weights_below_a_key_that_is_not_a_models_are_refused(kind: str, tmp_path: Path):
    dcp.save(nested_state(kind), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(IncompatibleCheckpointError, match=r"below \['net'\], .* alone, or below 'model'"):
        export_weights(tmp_path / "dcp", tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("gone", {}, CheckpointNotFoundError, "gone does not exist; give a checkpoint, or a file of weights"),
        ("optimizer_only", {}, CheckpointNotFoundError, "holds an optimizer's state and no weights; give the model's"),
        ("state", {"unit": 3}, ConfigError, "has no model 3; it holds 1"),
        ("theirs/nothing", {}, CheckpointNotFoundError, "no weights in"),
    ],
)
def test_what_cannot_be_exported_is_said(
    saved: Path, source: str, options: Any, error: type, message: str, tmp_path: Path
):
    (saved / "theirs" / "nothing").mkdir(exist_ok=True)
    with pytest.raises((CheckpointNotFoundError, ConfigError), match=message):
        export_weights(saved / source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_changed_checkpoint_is_not_exported(saved: Path, tmp_path: Path):
    shutil.copytree(saved / "state", tmp_path / "state")
    flip(tmp_path / "state" / "unit_0.model.00000.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"unit_0\.model\.00000"):
        export_weights(tmp_path / "state", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    export_weights(tmp_path / "state", tmp_path / "out", verify="size")


def test_the_target_is_neither_a_file_nor_the_checkpoint(saved: Path):
    with pytest.raises(ConfigError, match=r"is a file; give another"):
        export_weights(saved / "parts", saved / "bin" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"is the checkpoint; give another"):
        export_weights(saved / "parts", saved / "parts")
    for export in (export_weights, partial(export_hf_fsdp, is_sharded=True)):
        with pytest.raises(
            ConfigError, match=r"state/\.\./state/x lies in .*/state, which would no longer be what its"
        ):
            export(saved / "state", saved / "state" / ".." / "state" / "x")


def test_a_second_model_is_found_by_its_number_only(tmp_path: Path):
    save_weights(build().state_dict(), tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"expected one of model_1\.safetensors"):
        export_weights(tmp_path, tmp_path / "out", unit=1)
    (tmp_path / "model.safetensors").rename(tmp_path / "model_1.safetensors")
    assert export_weights(tmp_path, tmp_path / "out", unit=1) == ["model.safetensors"]
