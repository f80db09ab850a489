"""`accel-trainer ckpt`: what it prints, what it removes, and that it needs no torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel_trainer.checkpoint.store import DirectoryLock
from accel_trainer.launch.cli import main
from tests import warm
from tests.publishing import ALONE, publish_directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("checkpoint_9", "checkpoint_10", "checkpoint-500", "mine"):
        with publish_directory(tmp_path / name, ALONE) as staged:
            staged.write_tensors("x.safetensors", {"x": torch.zeros(300_000)})
            staged.write_json("y.json", name)
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    return tmp_path


def test_list_shows_every_checkpoint_by_number(directory: Path, capsys: pytest.CaptureFixture[str]):
    (directory / "checkpoint_9" / "COMMITTED").unlink()
    assert main(["ckpt", "list", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint_9", "checkpoint_10", "checkpoint-500", "mine"]
    assert re.fullmatch(r"checkpoint_9  not good: .*checkpoint_9 is incomplete: COMMITTED is missing.*", lines[0])
    versions = "python .*, accel_trainer .*, torch .*"
    assert re.fullmatch(rf"mine  complete, 1\.1 MiB in 2 files, 1 process, {versions}", lines[3])


def test_verify_reads_everything_and_says_what_is_bad(directory: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["ckpt", "verify", str(directory)]) == 0
    assert capsys.readouterr().out.count("good") == 4
    with open(directory / "checkpoint_10" / "x.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"!")
    assert main(["ckpt", "verify", str(directory)]) == 1
    assert "x.safetensors was changed after the save: its xxh3-128 is" in capsys.readouterr().out
    assert main(["ckpt", "verify", "--size", str(directory)]) == 0
    assert main(["ckpt", "verify", str(directory / "checkpoint_10")]) == 1
    assert main(["ckpt", "verify", str(directory / "checkpoint_9")]) == 0


def test_prune_keeps_the_newest_complete_ones_of_each_kind(directory: Path, capsys: pytest.CaptureFixture[str]):
    (directory / "_tmp-checkpoint_11-01234567").mkdir()
    with publish_directory(directory / "checkpoint_8", ALONE) as staged:
        staged.write_json("y.json", 8)
    (directory / "checkpoint_10" / "COMMITTED").unlink()
    assert main(["ckpt", "prune", "--keep", "1", str(directory)]) == 0
    assert capsys.readouterr().out == "removed checkpoint_8\n1 removed, the newest 1 complete kept\n"
    kept = sorted(path.name for path in directory.iterdir())
    assert kept == ["checkpoint-500", "checkpoint_10", "checkpoint_9", "mine", "notes.txt"]


def test_prune_leaves_the_directory_of_a_live_run_alone(directory: Path, capsys: pytest.CaptureFixture[str]):
    lock = DirectoryLock.take(directory / "_lock")
    command = [sys.executable, "-m", "accel_trainer", "ckpt", "prune", "--keep", "1", str(directory)]
    done = warm.run(command, capture_output=True, text=True, timeout=30)
    lock.release()
    assert done.returncode == 2
    assert f"is written to by another run (process {os.getpid()} on" in done.stderr
    assert (directory / "checkpoint_9").is_dir()


def test_wrong_uses_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["ckpt", "list", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no directory; give one with checkpoints" in capsys.readouterr().err
    for command in ("list", "verify"):
        assert main(["ckpt", command, f"file://{tmp_path}/nowhere"]) == 2
        assert "nowhere has no checkpoints; give the address of a run's store" in capsys.readouterr().err
    assert main(["ckpt", "list", str(tmp_path)]) == 2
    assert "no checkpoint in" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["ckpt", "prune", "--keep", "0", str(tmp_path)])
    assert "--keep 0 would leave no checkpoint; keep 1 or more" in capsys.readouterr().err


def test_no_command_imports_torch(directory: Path):
    code = (
        "import sys; from accel_trainer.launch.cli import main; d = sys.argv[1]; "
        "main(['ckpt', 'list', d]); main(['ckpt', 'verify', d]); main(['ckpt', 'prune', '--keep', '1', d]); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=60)
