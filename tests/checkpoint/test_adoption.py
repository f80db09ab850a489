"""Weights that were saved anew in a checkpoint become its own; damage does not."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_trainer.checkpoint import adoption
from accel_trainer.checkpoint.adoption import adopt_weights
from accel_trainer.checkpoint.manifest import Manifest, check_checkpoint
from accel_trainer.checkpoint.store import DirectoryLock
from accel_trainer.checkpoint.weights.weight_files import save_weights
from accel_trainer.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from accel_trainer.launch.cli import main
from tests import warm
from tests.publishing import ALONE, flip, publish, publish_directory

STATE = {"a": torch.arange(600.0).reshape(20, 30), "b": torch.ones(50), "n": torch.arange(3)}
RESERVED = ["model*.safetensors*", "optimizer*"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint like a Trainer's, with a file of the user's own that no reader looks for."""
    path = tmp_path / "checkpoint-4"
    with publish_directory(path, ALONE, step=4) as staged:
        save_file(STATE, staged / "model.safetensors")  # by path, as save_pretrained does
        staged.write_json("config.json", {"dtype": "float32"})
        staged.write_json("optimizer.json", {"state": 1})
        staged.metadata |= {"reserved_names": RESERVED, "tied": {"alias": "a"}}
    (path / "notes").mkdir()
    (path / "notes" / "mine.txt").write_text("mine")
    return path


def save_anew(path: Path, state: dict[str, Tensor], size: str = "1KB") -> None:
    """Save weights as `save_pretrained` does, and its description of them."""
    save_weights(state, path, size)
    (path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))


def flaw(path: Path) -> str:
    with pytest.raises(CorruptCheckpointError) as raised:
        check_checkpoint(path, "full")
    return str(raised.value)


def test_a_manifest_lists_the_tensors_of_safetensors_that_were_written_by_path(checkpoint: Path) -> None:
    layout = Manifest.read(checkpoint).tensors["model.safetensors"]
    assert {name: (entry.dtype, entry.shape) for name, entry in layout.items()} == {
        "a": ("F32", (20, 30)), "b": ("F32", (50,)), "n": ("I64", (3,)),
    }  # fmt: skip


def test_shards_another_dtype_and_one_file_again_are_adopted(checkpoint: Path, capsys) -> None:
    before = Manifest.read(checkpoint)
    half = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in STATE.items()}
    for state, size in ((half, "1KB"), (half, "1GB"), (STATE, "1KB")):
        save_anew(checkpoint, state, size)
        found = flaw(checkpoint)
        assert f"saved anew: `accel-trainer ckpt adopt {checkpoint}` makes it the checkpoint's own" in found
        assert "this one with verify='off'" in found

        assert main(["ckpt", "adopt", str(checkpoint)]) == 0
        assert capsys.readouterr().out.startswith("checkpoint-4: config.json, model")
        manifest = check_checkpoint(checkpoint, "full")
        assert manifest.metadata == before.metadata
        assert (manifest.step, manifest.world_size, manifest.versions) == (4, 1, before.versions)
        assert manifest.files["optimizer.json"] == before.files["optimizer.json"]
        listed = [entries for file, entries in manifest.tensors.items() if file.startswith("model")]
        assert set().union(*listed) == set(STATE)
        files = [load_file(checkpoint / name) for name in manifest.files if name.endswith(".safetensors")]
        assert all(torch.equal(tensor, state[name]) for file in files for name, tensor in file.items())
        assert (checkpoint / "notes" / "mine.txt").read_text() == "mine"
        assert [each.name for each in checkpoint.parent.iterdir()] == ["checkpoint-4"]
        assert all(each.stat().st_nlink == 1 for each in checkpoint.iterdir() if each.is_file())
        (checkpoint / "config.json").write_text("{}")
        adopt_weights(checkpoint)
    assert main(["ckpt", "adopt", str(checkpoint)]) == 0
    assert capsys.readouterr().out == "checkpoint-4: nothing adopted\n"


def test_a_tied_parameter_may_be_stored_under_its_other_name(checkpoint: Path) -> None:
    save_anew(checkpoint, {"alias": STATE["a"], "b": STATE["b"], "n": STATE["n"]})
    assert "model.safetensors.index.json" in adopt_weights(checkpoint)
    check_checkpoint(checkpoint, "full")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": STATE["a"], "n": STATE["n"]}, r"checkpoint-4 are without 'b', and do not fit the optimizer's state"),
        ({**STATE, "c": torch.ones(1)}, r"checkpoint-4 are with 'c', and do not fit .* begin a new run from these"),
        ({**STATE, "b": torch.ones(51)}, r"are with 'b' as torch.float32 \(51,\) in the place of F32 \(50,\), and"),
        ({**STATE, "b": torch.ones(50).char()}, r"are with 'b' as torch.int8 \(50,\) in the place of F32 \(50,\), and"),
    ],
)
def test_weights_of_another_model_are_refused(checkpoint: Path, state: dict[str, Tensor], message: str) -> None:
    save_anew(checkpoint, state)
    text = (checkpoint / "manifest.json").read_bytes()
    with pytest.raises(IncompatibleCheckpointError, match=message):
        adopt_weights(checkpoint)
    assert (checkpoint / "manifest.json").read_bytes() == text
    assert [each.name for each in checkpoint.parent.iterdir()] == ["checkpoint-4"]


def test_a_flipped_bit_is_no_weights_saved_anew(checkpoint: Path) -> None:
    flip(checkpoint / "model.safetensors")
    assert "ckpt adopt" not in flaw(checkpoint)
    with pytest.raises(CorruptCheckpointError, match=r"that were saved, and other bytes, as a damaged .* --values$"):
        adopt_weights(checkpoint)
    assert adopt_weights(checkpoint, takes_values=True) == ["model.safetensors"]
    check_checkpoint(checkpoint, "full")


def test_a_file_that_was_cut_or_that_is_none_of_the_weights_stays_corrupt(checkpoint: Path) -> None:
    save_anew(checkpoint, STATE)
    flip(checkpoint / "optimizer.json")
    with pytest.raises(CorruptCheckpointError, match=r"optimizer.json was changed after the save"):
        adopt_weights(checkpoint)
    flip(checkpoint / "optimizer.json")
    shard = checkpoint / "model-00001-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert "model-00002-of-00002.safetensors is a complete file" in flaw(checkpoint)
    with pytest.raises(CorruptCheckpointError, match=r"00001-of-00002.safetensors is not a safetensors file"):
        adopt_weights(checkpoint)
    shard.write_bytes(content)
    (checkpoint / "optimizer.pt").write_bytes(b"more")
    with pytest.raises(CorruptCheckpointError, match=r"holds 'optimizer.pt', which its manifest does not name"):
        adopt_weights(checkpoint)
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(
        IncompatibleCheckpointError, match=r"holds 'model.safetensors' beside model.safetensors.index.json"
    ):
        adopt_weights(checkpoint)


def test_weights_that_are_pickles_and_states_of_loops_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    torch.save(STATE, checkpoint / "pytorch_model.bin")
    with pytest.raises(IncompatibleCheckpointError, match=r"pytorch_model.bin holds weights as pickles; save them as"):
        adopt_weights(checkpoint)
    publish(tmp_path / "state", "word")
    with pytest.raises(IncompatibleCheckpointError, match=r"state lists no weights under the names that save_pretr"):
        adopt_weights(tmp_path / "state")


def test_a_checkpoint_that_was_passed_over_gets_its_name_back(checkpoint: Path) -> None:
    save_anew(checkpoint, STATE)
    bad = checkpoint.with_name("_bad-checkpoint-4-01234567")
    checkpoint.rename(bad)
    adopt_weights(checkpoint)
    check_checkpoint(checkpoint, "full")
    assert not bad.exists()
    for number in range(2):
        shutil.copytree(checkpoint, checkpoint.with_name(f"_bad-checkpoint-5-0123456{number}"))
    with pytest.raises(
        CheckpointNotFoundError, match=r"checkpoint-5 is no directory; .* name one of _bad-checkpoint-5-"
    ):
        adopt_weights(checkpoint.with_name("checkpoint-5"))


def test_an_adoption_that_fails_leaves_the_checkpoint_as_it_was(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_anew(checkpoint, STATE)
    files = {each.name: each.read_bytes() for each in checkpoint.iterdir() if each.is_file()}

    def fail(staged: Path, target: Path) -> None:
        raise OSError("no")

    monkeypatch.setattr(adoption, "publish_name", fail)
    with pytest.raises(OSError, match=r"^no$"):
        adopt_weights(checkpoint)
    assert {each.name: each.read_bytes() for each in checkpoint.iterdir() if each.is_file()} == files
    assert [each.name for each in checkpoint.parent.iterdir()] == ["checkpoint-4"]


def test_a_checkpoint_of_a_run_that_saves_is_left_alone(checkpoint: Path) -> None:
    save_anew(checkpoint, STATE)
    lock = DirectoryLock.take(checkpoint.with_name("_lock"))
    command = [sys.executable, "-m", "accel_trainer", "ckpt", "adopt", str(checkpoint)]
    done = warm.run(command, capture_output=True, text=True, timeout=60)
    lock.release()
    assert done.returncode == 2
    assert f"is written to by another run (process {os.getpid()} on" in done.stderr
    assert "model-00001-of" in flaw(checkpoint)
