"""Checkpoints in an object store: copied after their commit, read back by a machine that has lost its disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from transformers import TrainerCallback

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.checkpoint import object_store
from accel_trainer.checkpoint.manifest import MARKER_NAME, Manifest, NodePart
from accel_trainer.checkpoint.object_store import OWNER_NAME, ObjectStore, Uploads, shown
from accel_trainer.checkpoint.store import is_complete
from accel_trainer.errors import (
    CheckpointLockedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    MissingExtraError,
)
from accel_trainer.launch.cli import main
from tests.publishing import ALONE, flip, publish_directory
from tests.trainer_jobs import build_trainer, on_ranks, summary


class Flaky(LocalFileSystem):
    """A disk behind a network: the first requests of each kind fail, one file arrives torn, listings lag."""

    protocol = "flaky"
    failures: ClassVar[dict[str, int]] = {}
    torn: ClassVar[str | None] = None
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("flaky://"))

    def _fail(self, kind: str) -> None:
        left = type(self).failures.get(kind, 0)
        if left:
            type(self).failures[kind] = left - 1
            raise ConnectionResetError(f"{kind}: connection reset by peer")

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self._fail("put")
        super().put_file(lpath, rpath, **kwargs)
        if type(self).torn is not None and rpath.endswith(type(self).torn):
            type(self).torn = None
            path = Path(self._strip_protocol(rpath))
            path.write_bytes(path.read_bytes()[:-1])

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._fail("makedirs")
        super().makedirs(path, exist_ok=exist_ok)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._fail("info")
        return dict(super().info(path, **kwargs))

    def cat_file(self, path: str, **kwargs: Any) -> bytes:
        self._fail("cat")
        return bytes(super().cat_file(path, **kwargs))


@pytest.fixture
def flaky() -> type[Flaky]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.failures, Flaky.torn = {}, None
    return Flaky


@pytest.fixture
def gone(flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every upload to `flaky://` fail, and soon."""
    monkeypatch.setattr(object_store, "GIVE_UP_SECONDS", 0.1)
    flaky.failures = {"put": 10**6}


SHORT: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "samples": 64}
# 8 updates, by strategy.
CONSTANT = {"lr_scheduler_type": "constant"}
WHOLE: dict[str, dict[str, Any]] = {
    "single": CONSTANT, "ddp": {**CONSTANT, "samples": 64}, "fsdp_sharded": {**CONSTANT, "samples": 64},
}  # fmt: skip


def trained(directory: Path, uri: str | None = None, resume: Any = None, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": "gpt2",
        "dropout": 0.1,
        "save_strategy": "steps",
        "save_steps": 3,
        "samples": 32,
        **changes,
    }
    trainer = build_trainer(directory, checkpoint_uri=uri, **options)
    trainer.train(resume_from_checkpoint=resume)
    return summary(trainer)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    trained(directory)
    return directory / "checkpoint-3"


def store_of(directory: Path, **kwargs: Any) -> ObjectStore:
    return ObjectStore(f"file://{directory}", "checkpoint-", **kwargs)


def test_what_is_put_is_fetched_as_it_was(tmp_path: Path, checkpoint: Path) -> None:
    store = store_of(tmp_path / "store")
    assert store.newest() is None
    assert store.put(checkpoint) == Manifest.read(checkpoint).num_bytes
    assert store.newest() == "checkpoint-3"
    fetched = store.fetch("checkpoint-3", tmp_path / "disk")
    assert fetched == tmp_path / "disk" / "checkpoint-3"
    assert is_complete(fetched)
    for file in Manifest.read(checkpoint).files:
        assert (fetched / file).read_bytes() == (checkpoint / file).read_bytes()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["checkpoint-3"]
    store.verify("checkpoint-3")


def test_one_without_its_marker_is_passed_over(tmp_path: Path, checkpoint: Path) -> None:
    store = store_of(tmp_path)
    store.put(checkpoint)
    newer = checkpoint.with_name("checkpoint-6")
    store.put(newer)
    assert store.newest() == "checkpoint-6"
    (tmp_path / "checkpoint-6" / MARKER_NAME).unlink()
    assert store.newest() == "checkpoint-3"
    with pytest.raises(CheckpointNotFoundError, match="checkpoint-6 is incomplete: it has no COMMITTED"):
        store.fetch("checkpoint-6", tmp_path / "disk")


def test_a_flipped_bit_is_found_while_it_is_read(tmp_path: Path, checkpoint: Path) -> None:
    store = store_of(tmp_path / "store")
    store.put(checkpoint)
    flip(tmp_path / "store" / "checkpoint-3" / "model.safetensors")
    for read in (store.verify, lambda name: store.fetch(name, tmp_path / "disk")):
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors is not as it was saved"):
            read("checkpoint-3")
    assert not list((tmp_path / "disk").iterdir())
    store.verify("checkpoint-3", contents=False)


def test_a_store_that_stumbles_is_tried_again(tmp_path: Path, checkpoint: Path, flaky: type[Flaky]) -> None:
    flaky.failures, flaky.torn = {"put": 3, "cat": 2, "makedirs": 1}, "model.safetensors"
    store = ObjectStore(f"flaky://{tmp_path}/store", "checkpoint-")
    store.put(checkpoint)
    assert flaky.failures == {"put": 0, "cat": 2, "makedirs": 0}
    assert flaky.torn is None
    for read in (lambda: store.fetch("checkpoint-3", tmp_path / "disk"), lambda: store.verify("checkpoint-3")):
        flaky.failures["info"] = 1
        read()
    flaky.failures["info"] = 1
    assert store.retire(1) == []


def test_a_file_that_is_sent_for_longer_than_that_is_tried_again(
    tmp_path: Path, checkpoint: Path, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "GIVE_UP_SECONDS", 0.5)
    send = flaky._fail

    def send_slowly(self: Flaky, kind: str) -> None:
        if kind == "put":
            time.sleep(0.6 * (self.failures["put"] > 0))
        send(self, kind)

    monkeypatch.setattr(flaky, "_fail", send_slowly)
    flaky.failures = {"put": 1}
    store = ObjectStore(f"flaky://{tmp_path}/store", "checkpoint-")
    store.put(checkpoint)
    assert store.newest() == "checkpoint-3"


def test_a_store_that_does_not_come_back_is_given_up(tmp_path: Path, checkpoint: Path, gone) -> None:
    store = ObjectStore(f"flaky://{tmp_path}/store", "checkpoint-")
    with pytest.raises(ConnectionResetError, match="put: connection reset"):
        store.put(checkpoint)
    assert store.newest() is None


def test_retention_leaves_the_newest_and_the_best(tmp_path: Path, checkpoint: Path) -> None:
    store = store_of(tmp_path)
    for step in (3, 6, 8):
        store.put(checkpoint.with_name(f"checkpoint-{step}") if step < 8 else checkpoint)
    (tmp_path / "checkpoint-9").mkdir()  # incomplete: none of ours to remove
    assert store.retire(1, ["checkpoint-3"]) == []
    assert store.retire(1) == ["checkpoint-3"]
    assert store.names() == ["checkpoint-6", "checkpoint-9"]
    assert store.retire(1) == []


def test_two_runs_do_not_share_a_store(tmp_path: Path, checkpoint: Path) -> None:
    first, second = store_of(tmp_path, job="first"), store_of(tmp_path, job="second")
    first.put(checkpoint)
    with pytest.raises(CheckpointLockedError, match=r"is the store of another run, on .*resume from there"):
        second.put(checkpoint)
    store_of(tmp_path, job="first").put(checkpoint)  # started again
    heir = store_of(tmp_path, job="heir", takes_over=True)
    heir.put(checkpoint)
    with pytest.raises(CheckpointLockedError, match=r"was taken over by a run on .*this one saves there no more"):
        first.put(checkpoint)
    owner = json.loads((tmp_path / OWNER_NAME).read_text())
    (tmp_path / OWNER_NAME).write_text(json.dumps({**owner, "time": time.time() - 700}))
    second.put(checkpoint)
    process = subprocess.Popen(["true"])
    process.wait()  # its number is nobody's now
    ended = {**owner, "job": "ended", "pid": process.pid, "time": time.time()}
    for changes, is_free in (({"boot": "another machine's"}, False), ({"space": "a container's"}, False), ({}, True)):
        (tmp_path / OWNER_NAME).write_text(json.dumps({**ended, **changes}))
        with nullcontext() if is_free else pytest.raises(CheckpointLockedError):
            store_of(tmp_path, job="next").put(checkpoint)


@pytest.mark.parametrize(
    ("uri", "error", "message"),
    [
        ("nowhere://bucket", ConfigError, "is no address of a store"),
        ("abfs://user:secret@bucket/run", MissingExtraError, "adlfs"),
    ],
)
def test_an_address_that_cannot_be_opened_says_what_is_missing(uri: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        ObjectStore(uri, "checkpoint-")
    assert "secret" not in str(caught.value)


def test_credentials_are_not_shown() -> None:
    assert shown("s3://key:secret@host/run and memory://x") == "s3://***@host/run and memory://x"


def test_uploads_keep_to_a_bandwidth(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-3"
    with publish_directory(path, ALONE) as staged:
        for name in ("a", "b"):
            staged.write_tensors(f"{name}.safetensors", {"weight": torch.zeros(2**19)})  # 2 MiB each
    store = store_of(tmp_path / "store", mib_per_second=10.0)
    begin = time.monotonic()
    store.put(path)
    assert time.monotonic() - begin > 0.3  # the first of four chunks goes at once
    store.verify("checkpoint-3")


def test_a_trainer_hands_on_the_bandwidth(tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path / "run", checkpoint_uri=f"file://{tmp_path}/store", checkpoint_mib_per_second=2**10,
        save_strategy="steps", save_steps=1, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.run_checkpoints.checkpointer._uploads.store._pace._rate == 2**30


def test_a_slow_store_gets_the_newest(tmp_path: Path, checkpoint: Path) -> None:
    began, go_on = threading.Event(), threading.Event()

    class Slow(ObjectStore):
        sent: ClassVar[list[str]] = []

        def put(self, path: Path, part: NodePart | None = None) -> int:
            began.set()
            go_on.wait(20)
            self.sent.append(path.name)
            return 0

    uploads = Uploads(Slow(f"file://{tmp_path}", "checkpoint-"))
    uploads.submit(Path("checkpoint-1"), None, ())
    began.wait(20)
    for number in (2, 3):
        uploads.submit(Path(f"checkpoint-{number}"), None, ())
    assert [path.name for path in uploads.in_use] == ["checkpoint-1", "checkpoint-3"]
    go_on.set()
    uploads.wait()
    assert Slow.sent == ["checkpoint-1", "checkpoint-3"]
    assert uploads.in_use == []


# --- a run that loses its disk ----------------------------------------------------------------------------------------


def after_a_loss(
    directory: Path, *, strategy: str, given: Any, save_async: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train without a loss; then to the middle, and from there on another, empty disk."""
    uri = f"file://{directory}/store"
    options = {**WHOLE[strategy], "strategy": strategy}
    whole = trained(directory / "whole", **options)
    options |= {"save_async": save_async, "save_total_limit": 2}
    trained(directory / "lost", uri, max_steps=6, **options)
    given = given.format(uri=uri) if isinstance(given, str) else given
    return whole, trained(directory / "new", uri, given, **options)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("strategy", "given", "save_async"),
    [
        ("single", "latest", False),
        ("single", "{uri}", True),
        ("ddp", True, True),
        ("fsdp_sharded", "{uri}/checkpoint-6", False),
    ],
)
def test_a_run_goes_on_from_the_store_on_an_empty_disk(
    tmp_path: Path, strategy: str, given: Any, save_async: bool
) -> None:
    whole, found = on_ranks(strategy, after_a_loss, tmp_path, given=given, save_async=save_async)[0]
    assert found["losses"] == whole["losses"]
    np.testing.assert_equal(found["weights"], whole["weights"])
    store = store_of(tmp_path / "store")
    assert set(store.names()) == {path.name for path in (tmp_path / "new").glob("checkpoint-*")}
    assert len(store.names()) == 2
    for name in store.names():
        store.verify(name)


def native(directory: Path, uri: str, source: str | None = None) -> list[float]:
    """Take three steps from what there is, and save after each; return the weights."""
    options = ProjectConfiguration(project_dir=str(directory), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=options, config={"checkpoint_uri": uri})
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if source is None:
        accelerator.load_state(missing_ok=True)
    else:
        accelerator.load_state(source)
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        accelerator.save_state()
        accelerator._checkpointer._uploads.wait()  # else the next one may take its place
    accelerator.end_training()
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def test_a_native_loop_goes_on_from_the_store(tmp_path: Path) -> None:
    uris = [f"file://{tmp_path}/store", f"file://{tmp_path}/other"]
    native(tmp_path / "lost", uris[0])
    assert sorted(path.name for path in (tmp_path / "store").glob("checkpoint_*")) == ["checkpoint_1", "checkpoint_2"]
    native(tmp_path / "kept", uris[1])
    expected = native(tmp_path / "kept", uris[1])
    copy = shutil.copytree(tmp_path / "store", tmp_path / "third")
    assert native(tmp_path / "new", uris[0]) == expected
    assert (tmp_path / "new" / "checkpoints" / "checkpoint_5").is_dir()
    assert native(tmp_path / "another", uris[1], f"file://{copy}/checkpoint_2") == expected


def test_auto_begins_where_there_is_nothing_and_goes_on_from_either_place(tmp_path: Path, caplog) -> None:
    uri, options = f"file://{tmp_path}/store", CONSTANT
    whole = trained(tmp_path / "whole", **options)
    caplog.set_level("INFO", "accel_trainer")
    with pytest.raises(
        ConfigError, match=r"no checkpoint-N in .*/run or file://.*/store; train without .* or give .*'auto'"
    ):
        trained(tmp_path / "run", uri, "latest", **options)
    assert "begins" not in caplog.text
    trained(tmp_path / "alone", resume="auto", max_steps=1, **options)
    assert f"there is no checkpoint in {tmp_path}/alone, and the run begins" in caplog.text
    trained(tmp_path / "run", uri, "auto", max_steps=6, **options)
    assert f"there is no checkpoint in {tmp_path}/run or {uri}, and the run begins" in caplog.text
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    caplog.clear()
    for directory, place in (("copy", None), ("empty", uri)):
        found = trained(tmp_path / directory, place, "auto", **options)
        assert found["losses"] == whole["losses"]
        np.testing.assert_equal(found["weights"], whole["weights"])
        assert "the run begins" not in caplog.text


def test_a_loop_is_told_what_to_load_by_the_same_words(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO", "accel_trainer")
    uri, options = f"file://{tmp_path}/store", {"automatic_checkpoint_naming": True}
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(tmp_path / "run"), **options), config={"checkpoint_uri": uri}
    )
    accelerator.prepare(torch.nn.Linear(2, 1))
    with pytest.raises(
        CheckpointNotFoundError, match=r"no checkpoint_N in .*/checkpoints or file://.*, or load_state\('auto'"
    ):
        accelerator.load_state("latest")
    assert accelerator.load_state("auto") is None
    assert f"no state has been saved to {tmp_path}/run/checkpoints or {uri} yet, and the run begins" in caplog.text
    for address in (uri, f"{uri}/checkpoint_0"):
        assert accelerator.load_state(address, missing_ok=True) is None
        assert f"no state has been saved to {address} yet, and the run begins" in caplog.text
    saved = accelerator.save_state()
    accelerator._checkpointer._uploads.wait()
    assert accelerator.load_state(uri, missing_ok=True) == saved
    assert accelerator.load_state(f"{uri}/checkpoint_0", missing_ok=True) == saved
    assert accelerator.load_state(f"{uri}/checkpoint_1", missing_ok=True) is None
    assert accelerator.load_state("auto") == accelerator.load_state("latest") == saved
    shutil.rmtree(saved)
    assert accelerator.load_state("auto") == saved
    accelerator.end_training()


@pytest.mark.parametrize("name", ["manifest.json", MARKER_NAME])
def test_one_that_is_damaged_is_no_reason_to_begin(tmp_path: Path, name: str) -> None:
    uri, options = f"file://{tmp_path}/store", {"max_steps": 4, "save_total_limit": 1, **SHORT}
    trained(tmp_path / "lost", uri, **options)
    file = tmp_path / "store" / "checkpoint-4" / name
    file.write_bytes(file.read_bytes()[:-20])
    for word in ("auto", "latest"):
        with pytest.raises(CorruptCheckpointError, match=r"is good; .*store/checkpoint-4: "):
            trained(tmp_path / "new", uri, word, **options)
    (tmp_path / "store" / "checkpoint-4" / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"store/checkpoint-4 has lost its manifest\.json"):
        trained(tmp_path / "new", uri, "auto", **options)


def test_the_directory_of_a_run_is_no_store_of_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"checkpoint_uri is file://.*/link, the directory .*/run in which the run"):
        trained(tmp_path / "run", f"file://{tmp_path}/link", max_steps=4, **SHORT)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


class BreakOnce(TrainerCallback):
    """Has the loss of one update be infinite, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = -1

            def spoil(module: Any, given: Any, output: Any) -> Any:
                handle.remove()
                output.loss = output.loss * float("nan")
                return output

            handle = model.register_forward_hook(spoil)


def test_a_rollback_takes_no_checkpoint_of_another_run_from_the_store(tmp_path: Path) -> None:
    uri, options = f"file://{tmp_path}/store", {"max_steps": 8, **SHORT}
    trained(tmp_path / "one", uri, **options)
    (tmp_path / "store" / OWNER_NAME).unlink()  # as where its process has ended
    trainer = build_trainer(tmp_path / "two", checkpoint_uri=uri, on_nonfinite="rollback", logging_steps=1, **options)
    trainer.add_callback(BreakOnce(3))
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps == sorted(set(steps))
    assert steps[:3] == [1, 2, 3]
    assert trainer.state.global_step <= 8


def damage(checkpoint: Path) -> None:
    flip(next(checkpoint.glob("*.safetensors")))


def test_an_older_one_is_taken_where_the_newest_of_the_store_is_not_good(tmp_path: Path, caplog) -> None:
    uri = f"file://{tmp_path}/store"
    native(tmp_path / "lost", uri)  # 1 and 2 are kept
    older = shutil.copytree(tmp_path / "store", tmp_path / "older")
    shutil.rmtree(older / "checkpoint_2")
    (older / OWNER_NAME).unlink()
    damage(tmp_path / "store" / "checkpoint_2")
    found = native(tmp_path / "new", uri)
    assert "checkpoint_2 is passed over: " in caplog.text
    assert found == native(tmp_path / "other", f"file://{older}")
    assert (tmp_path / "new" / "checkpoints" / "checkpoint_4").is_dir()  # 1 was loaded, and 2, 3, 4 written


def test_a_bad_one_on_the_disk_comes_from_the_store(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    native(tmp_path / "run", uri)
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    expected = native(copy / "run", f"file://{copy}/store")
    damage(tmp_path / "run" / "checkpoints" / "checkpoint_2")
    assert native(tmp_path / "run", uri) == expected
    assert list((tmp_path / "run" / "checkpoints").glob("_bad-checkpoint_2-*"))


def test_a_failed_upload_is_raised_by_the_next_save(tmp_path: Path, gone) -> None:
    class Wait(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if (uploads := trainer.run_checkpoints.checkpointer._uploads) is not None:
                uploads.wait()

    for policy, step in (("raise", 4), ("warn", 6)):
        options = {"max_steps": 6, "on_save_error": policy, **SHORT}
        trainer = build_trainer(tmp_path / policy, checkpoint_uri=f"flaky://{tmp_path}/store", **options)
        trainer.add_callback(Wait())
        with pytest.raises(ConnectionResetError, match="put: connection reset") if step == 4 else nullcontext():
            trainer.train()
        assert trainer.state.global_step == step


def test_the_command_line_reads_and_prunes_a_store(tmp_path: Path, checkpoint: Path, capsys) -> None:
    uri = f"file://{tmp_path}/store"
    for step in (3, 6):
        assert main(["ckpt", "copy", str(checkpoint.with_name(f"checkpoint-{step}")), uri]) == 0
    assert main(["ckpt", "list", uri]) == 0
    assert main(["ckpt", "verify", uri]) == 0
    (tmp_path / "store" / "checkpoint-3" / "trainer_state.json").write_text("{}")
    assert main(["ckpt", "verify", uri]) == 1
    assert main(["ckpt", "prune", uri, "--keep", "1"]) == 0
    assert main(["ckpt", "copy", f"{uri}/checkpoint-6", str(tmp_path / "disk")]) == 0
    assert is_complete(tmp_path / "disk" / "checkpoint-6")
    lines = capsys.readouterr().out
    assert "checkpoint-6  complete, " in lines
    assert "checkpoint-3  not good: " in lines
    assert "removed checkpoint-3\n1 removed" in lines
    assert main(["ckpt", "copy", str(tmp_path), str(tmp_path / "disk")]) == 2
    assert "one of them is to be an address (s3://bucket/run)" in capsys.readouterr().err


# --- what is in its way -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has saved after 2 and 4 updates, on its disk (`live`) and to a store (`run`)."""
    folder = tmp_path_factory.mktemp("uploaded")
    build_trainer(folder / "live", max_steps=4, checkpoint_uri=f"file://{folder}/run", **SHORT).train()
    return folder


@pytest.fixture
def of_another(uploaded: Path, tmp_path: Path) -> Path:
    """A copy of them, of which the store is signed by another run that lives; the store."""
    shutil.copytree(uploaded, tmp_path, dirs_exist_ok=True)
    owner = json.loads((tmp_path / "run" / OWNER_NAME).read_text())
    (tmp_path / "run" / OWNER_NAME).write_text(json.dumps({**owner, "job": "another"}))
    return tmp_path / "run"


@pytest.mark.parametrize("resumes", ["from another store", "from its disk"])
def test_a_store_is_not_taken_over_by_a_run_that_has_resumed_from_elsewhere(
    tmp_path: Path, of_another: Path, resumes: str
) -> None:
    shutil.rmtree(of_another / "checkpoint-4")  # which is newer than the run's own, and would be taken
    other = {} if resumes == "from its disk" else {"checkpoint_uri": f"file://{tmp_path}/run2"}
    build_trainer(tmp_path / "mine", max_steps=2, learning_rate=0.1, **other, **SHORT).train()
    if other:
        shutil.rmtree(tmp_path / "mine")
    trainer = build_trainer(
        tmp_path / "mine", max_steps=4, learning_rate=0.1, checkpoint_uri=f"file://{of_another}", **SHORT
    )
    with pytest.raises(CheckpointLockedError, match="is the store of another run"):
        trainer.train(resume_from_checkpoint=f"file://{tmp_path}/run2/checkpoint-2" if other else True)
    assert json.loads((of_another / OWNER_NAME).read_text())["job"] == "another"


def test_a_store_is_taken_over_from_the_disk_that_it_has_a_copy_of(tmp_path: Path, of_another: Path) -> None:
    trainer = build_trainer(tmp_path / "live", max_steps=6, checkpoint_uri=f"file://{of_another}", **SHORT)
    trainer.train(resume_from_checkpoint=True)
    assert json.loads((of_another / OWNER_NAME).read_text())["job"] != "another"
    assert is_complete(of_another / "checkpoint-6")


@pytest.mark.parametrize("content", [None, "mine"])
def test_what_stands_where_a_checkpoint_is_fetched_to_is_kept(
    tmp_path: Path, uploaded: Path, caplog, content: str | None
) -> None:
    uri, there = f"file://{tmp_path}/store", tmp_path / "run" / "checkpoint-4"
    shutil.copytree(uploaded / "run", tmp_path / "store")
    there.mkdir(parents=True)
    if content is not None:
        (there / "predictions.csv").write_text(content)
    build_trainer(tmp_path / "run", max_steps=6, checkpoint_uri=uri, **SHORT).train(resume_from_checkpoint=True)
    assert is_complete(there)
    kept = [path / "predictions.csv" for path in (tmp_path / "run").glob("_bad-checkpoint-4-*")]
    assert [path.read_text() for path in kept] == [content] * (content is not None)
    assert (f"It is not {uri}/checkpoint-4 as it was saved, which gets its name" in caplog.text) == bool(kept)


def test_an_address_is_not_answered_with_another_run_s_checkpoint_of_that_number(
    tmp_path: Path, uploaded: Path
) -> None:
    build_trainer(tmp_path / "mine", max_steps=2, learning_rate=0.1, **SHORT).train()
    runs = (uploaded / "live", tmp_path / "mine")
    weights = [(run / "checkpoint-2" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] != weights[1]
    for num_kept in (1, 1):  # the second time it is there
        trainer = build_trainer(tmp_path / "mine", max_steps=2, **SHORT)
        trainer.train(resume_from_checkpoint=f"file://{uploaded}/run/checkpoint-2")
        assert (tmp_path / "mine" / "checkpoint-2" / "model.safetensors").read_bytes() == weights[0]
        kept = list((tmp_path / "mine").glob("_bad-checkpoint-2-*/model.safetensors"))
        assert [path.read_bytes() for path in kept] == [weights[1]] * num_kept


def test_a_copy_replaces_no_other_checkpoint(tmp_path: Path, checkpoint: Path, capsys) -> None:
    store, disk = store_of(tmp_path / "store"), tmp_path / "disk"
    store.put(checkpoint)
    copy = ["ckpt", "copy", f"{store.uri}/checkpoint-3", str(disk)]
    assert main(copy) == main(copy) == 0
    assert [path.name for path in disk.iterdir()] == ["checkpoint-3"]
    damage(disk / "checkpoint-3")
    assert main(copy) == 0
    store.verify("checkpoint-3")
    assert main(["ckpt", "verify", str(disk / "checkpoint-3")]) == 0
    shutil.copytree(checkpoint.with_name("checkpoint-6"), disk / "checkpoint-3", dirs_exist_ok=True)
    assert main(copy) == 2
    assert re.search(
        r"disk/checkpoint-3 is there already, and no copy of file://.*; remove it", capsys.readouterr().err
    )
    assert len(list(disk.iterdir())) == 2


def test_pruning_a_store_leaves_the_best(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store")
    for step in (1, 2, 3, 4):
        with publish_directory(tmp_path / f"checkpoint-{step}", ALONE) as staged:
            staged.metadata["trainer"] = {"best_step": 1}
        store.put(tmp_path / f"checkpoint-{step}")
    for place in (str(tmp_path), store.uri):
        assert main(["ckpt", "prune", place, "--keep", "2"]) == 0
    assert store.names() == [path.name for path in sorted(tmp_path.glob("checkpoint-*"))]
    assert store.names() == ["checkpoint-1", "checkpoint-4"]


# --- uploads that fail, and those at the end of a script --------------------------------------------------------------


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_the_last_upload_that_fails_is_raised_at_the_end(tmp_path: Path, gone, policy: str) -> None:
    options = {"max_steps": 2, "on_save_error": policy, **SHORT}
    trainer = build_trainer(tmp_path / "run", checkpoint_uri=f"flaky://{tmp_path}/store", **options)
    with pytest.raises(ConnectionResetError, match="put: connection reset") if policy == "raise" else nullcontext():
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-2"]  # and no lock


@pytest.mark.parametrize(
    ("best", "left"),
    [
        ({"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}, "checkpoint-1"),
        ({}, "checkpoint-4"),
    ],
)
def test_no_checkpoint_is_removed_while_it_is_uploaded(tmp_path: Path, flaky, monkeypatch, best, left: str) -> None:
    put_file = LocalFileSystem.put_file
    monkeypatch.setattr(flaky, "put_file", lambda *given, **options: (time.sleep(0.1), put_file(*given, **options)))
    trainer = build_trainer(
        tmp_path / "run", checkpoint_uri=f"flaky://{tmp_path}/store", max_steps=4, eval_steps=1, eval_samples=2,
        eval_strategy="steps", save_total_limit=1, **{**SHORT, "save_steps": 1}, **best,
    )  # fmt: skip
    trainer.compute_metrics = lambda _: {"score": -float(trainer.state.global_step)}
    trainer.train()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [left]
    assert (tmp_path / "store" / "checkpoint-4" / MARKER_NAME).exists()


class Terminate(TrainerCallback):
    """Sends SIGTERM once the upload before has failed."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.trainer.run_checkpoints.checkpointer._uploads.wait()
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_is_answered_whatever_an_upload_has_met(tmp_path: Path, gone) -> None:
    stop = Terminate()
    options = {"max_steps": 8, "options": {"callbacks": [stop]}, **SHORT}
    stop.trainer = build_trainer(tmp_path / "run", checkpoint_uri=f"flaky://{tmp_path}/store", **options)
    with pytest.raises(SystemExit) as ended:
        stop.trainer.train()
    assert ended.value.code == 85
    assert (tmp_path / "run" / "checkpoint-3" / "COMMITTED").exists()


def test_the_last_upload_of_a_script_is_complete(tmp_path: Path) -> None:
    """Of one that waits for its save, and of one that does not: a fork, as the imports take seconds."""
    script = textwrap.dedent(
        """
        import os
        import time
        from concurrent.futures import ThreadPoolExecutor
        import torch
        from accel_trainer import Accelerator, ProjectConfiguration
        from accel_trainer.checkpoint.object_store import ObjectStore

        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
        name = "now" if child else "background"
        options = ProjectConfiguration(project_dir=name, automatic_checkpoint_naming=True)
        uri = f"file://{os.getcwd()}/{name}/store"
        accelerator = Accelerator(cpu=True, project_config=options, config={"checkpoint_uri": uri})
        accelerator.prepare(torch.nn.Linear(2, 1))
        pool, claim = ThreadPoolExecutor(1), ObjectStore.claim
        pool.submit(int)

        def claim_late(store):
            time.sleep(0.5)
            pool.submit(int).result()  # as clients look up an address
            claim(store)

        ObjectStore.claim = claim_late
        accelerator.save_state(async_=not child)
        """
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=100)
    for name in ("now", "background"):
        assert is_complete(tmp_path / name / "store" / "checkpoint_0"), name
