"""A Checkpointer without a product: it numbers, keeps, selects and times whatever its jobs write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from accel_trainer.checkpoint.background import SavePolicy
from accel_trainer.checkpoint.checkpointer import Checkpointer, SaveJob
from accel_trainer.checkpoint.manifest import Manifest
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.reader import CheckpointKind
from accel_trainer.checkpoint.store import LOCK_NAME
from accel_trainer.errors import CheckpointNotFoundError
from tests.publishing import ALONE

KIND = CheckpointKind(prefix="step-", reads_without_manifest=lambda path: (path / "theirs.txt").is_file())
MISSING = CheckpointNotFoundError("none yet")


@pytest.fixture
def checkpointer() -> Checkpointer:
    return Checkpointer(ALONE, KIND)


def word(text: str) -> Callable[[StagedDirectory], None]:
    return lambda staged: staged.write_json("word.json", text)


def job(directory: Path, number: int | None, text: str = "", name: str | None = None, **changes: Any) -> SaveJob:
    return SaveJob(
        section="save",
        directory=directory,
        name=name,
        number=number,
        write=word(text or f"word {number}"),
        need_bytes=0,
        policy=SavePolicy(),
        **changes,
    )


def all_files(manifest: Manifest) -> Iterable[str]:
    return manifest.files


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_good_one_is_selected_and_timed(tmp_path: Path, checkpointer: Checkpointer):
    for number in (2, 10, 3):
        assert checkpointer.save(job(tmp_path, number, replaces=True)) == tmp_path / f"step-{number}"
    (tmp_path / "step-10" / "word.json").write_text('"word XX"')

    selection = checkpointer.select_newest(tmp_path, "full", all_files, MISSING)

    assert selection.stored is not None
    assert selection.stored.json("word.json") == "word 3"
    (line,) = selection.passed_over
    assert line.startswith("step-10: ")
    assert selection.describe("resumed", [selection.verified]) == (
        f"resumed from {tmp_path / 'step-3'}; contents verified; passed over {line}"
    )
    assert checkpointer.metrics.values.keys() == {
        "ckpt/stall_s", "ckpt/duration_s", "ckpt/bytes", "resume/select_s", "resume/verify_s",
    }  # fmt: skip


def test_one_of_another_library_is_selected_without_a_manifest(tmp_path: Path, checkpointer: Checkpointer):
    checkpointer.save(job(tmp_path, 1, replaces=True))
    theirs = tmp_path / "step-7"
    theirs.mkdir()
    (theirs / "theirs.txt").touch()

    newest = checkpointer.select_newest(tmp_path, "full", all_files, MISSING)
    named = checkpointer.select_named(theirs, "full", all_files)

    assert (newest.path, newest.stored) == (named.path, named.stored) == (theirs, None)
    assert not newest.is_named
    assert named.is_named
    assert newest.verified == "not written by accel_trainer, contents not verified"


def test_so_many_are_kept_and_those_that_are_protected(tmp_path: Path, checkpointer: Checkpointer):
    best = tmp_path / "step-1"
    for number in range(1, 5):
        checkpointer.save(job(tmp_path, number, replaces=True, keep=2, protected=lambda: [best]))
    assert [name for name in names(tmp_path) if name != LOCK_NAME] == ["step-1", "step-4"]


def test_a_number_that_is_taken_is_left_out_or_replaced(tmp_path: Path, checkpointer: Checkpointer):
    saved = [checkpointer.save(job(tmp_path, 4, text, replaces=text == "c")) for text in "abc"]
    assert saved == [tmp_path / name for name in ("step-4", "step-5", "step-4")]
    selection = checkpointer.select_named(tmp_path / "step-4", "full", all_files)
    assert selection.stored is not None
    assert selection.stored.json("word.json") == "c"


def test_a_background_save_is_waited_for_by_the_next(tmp_path: Path, checkpointer: Checkpointer):
    for number in (1, 2):
        checkpointer.save(job(tmp_path, number, replaces=True, in_background=True))
    assert (tmp_path / "step-1").is_dir()
    checkpointer.close()
    assert names(tmp_path) == ["step-1", "step-2"]


class Gone(LocalFileSystem):
    """A store that takes nothing."""

    protocol = "gone"
    cachable = False

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        raise PermissionError("access denied")


@pytest.mark.parametrize("ends_run", [False, True])
def test_a_save_is_written_before_the_error_of_an_upload_is_raised(tmp_path: Path, ends_run: bool):
    fsspec.register_implementation("gone", Gone, clobber=True)
    checkpointer = Checkpointer(ALONE, KIND, store=f"gone://{tmp_path}/store")
    checkpointer.save(job(tmp_path / "run", None))
    assert checkpointer._uploads is not None
    checkpointer._uploads.wait()
    with nullcontext() if ends_run else pytest.raises(PermissionError, match="access denied"):
        checkpointer.save(job(tmp_path / "run", None, ends_run=ends_run))
    assert names(tmp_path / "run") == [LOCK_NAME, "step-0", "step-1"]
    checkpointer.close(is_failed=True)
