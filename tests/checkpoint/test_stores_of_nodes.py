"""Nodes with disks of their own that save to one store: it has one checkpoint of all, for any number of ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from accel_trainer.checkpoint import object_store
from accel_trainer.checkpoint.manifest import NODE_KEY, Manifest, NodePart
from accel_trainer.checkpoint.object_store import ObjectStore, Uploads, is_copy
from accel_trainer.errors import ConfigError, CorruptCheckpointError
from tests.cells import beyond
from tests.checkpoint.crash_job import SavedRun
from tests.publishing import ALONE, publish_directory
from tests.ranks import run_ranks
from tests.strategy_configs import HAS_DEEPSPEED
from tests.trainer.checkpoint.test_save_on_each_node import (
    ENGINES,
    files_of,
    on_nodes,
    run,
    straight,
    straight_and_stopped,
)
from tests.trainer_jobs import build_trainer

pytestmark = pytest.mark.multirank

# Into a second epoch of five updates; saves are after 3, 6 and the last one.
SHORT: dict[str, Any] = {"max_steps": 8, "eval_strategy": "no", "timeout": 100}


def run_to_store(*args: Any, **options: Any) -> dict[str, Any]:
    """Train on a node that looks often for what the other one has sent; each save waits for that, twice."""
    object_store._POLL_SECONDS = 0.05
    return run(*args, **options)


def checkpoint_of(folder: Path, node: int, step: int) -> Path:
    return folder / f"node{node}" / "out" / f"checkpoint-{step}"


def assert_equal_runs(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for own, reference in zip(found, expected, strict=True):
        assert own["losses"] == reference["losses"]
        np.testing.assert_equal(own["weights"], reference["weights"])


# Of ddp the test below loses both disks, too, and in the one after it nodes have two ranks each.
@pytest.mark.parametrize(
    ("engine", "num_ranks", "lost"),
    [beyond(("ddp", 2, "01")), ("fsdp_sharded", 2, "1"), beyond(("fsdp_sharded", 4, "1")), ("zero3", 2, "0")],
)
def test_nodes_that_lose_their_disks_go_on_from_the_store(
    tmp_path: Path, engine: str, num_ranks: int, lost: str
) -> None:
    if engine == "zero3" and not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed is not installed")
    uri, env = f"file://{tmp_path}/store", on_nodes(num_ranks)
    options: dict[str, Any] = {**ENGINES[engine], **SHORT, "samples": 10 * num_ranks, "env": env}
    first = {"checkpoint_uri": uri, "save_async": True}
    reference = run_ranks(straight_and_stopped, num_ranks, tmp_path, run_to_store, first, **options)
    options["checkpoint_uri"] = uri

    held = [files_of(checkpoint_of(tmp_path / "first", node, 6)) for node in (0, 1)]
    assert held[0] != held[1]
    sent = files_of(tmp_path / "store" / "checkpoint-6")
    shared = files_of(tmp_path / "straight" / "checkpoint-6")  # as a disk that all nodes see has it
    assert sent == shared
    store = ObjectStore(uri, "checkpoint-")
    store.verify("checkpoint-6")
    manifest = store.manifest("checkpoint-6")
    assert manifest.num_bytes < 1.02 * Manifest.read(tmp_path / "straight" / "checkpoint-6").num_bytes
    assert NODE_KEY not in manifest.metadata
    for node in (0, 1):
        ranks = [node * num_ranks // 2, (node + 1) * num_ranks // 2]
        assert Manifest.read(checkpoint_of(tmp_path / "first", node, 6)).metadata[NODE_KEY]["ranks"] == ranks

    (tmp_path / "first").rename(tmp_path / "second")  # nothing knows where it was
    for node in lost:
        shutil.rmtree(tmp_path / "second" / f"node{node}")
    assert_equal_runs(run_ranks(run_to_store, num_ranks, tmp_path / "second", "latest", **options), reference)


def test_workers_that_are_started_again_on_empty_disks_go_on_from_the_store(tmp_path: Path) -> None:
    """Without resume_from_checkpoint="auto": from what this job has saved, and not from what else is there."""

    def restarted(rank: int) -> dict[str, str]:
        return {**on_nodes(2)(rank), "TORCHELASTIC_RESTART_COUNT": "1"}

    options: dict[str, Any] = {**ENGINES["ddp"], **SHORT, "samples": 20}
    reference = run_ranks(straight, 2, str(tmp_path / "straight"), **options)
    options["checkpoint_uri"] = f"file://{tmp_path}/store"
    run_ranks(run_to_store, 2, tmp_path / "run", stop_at=6, env=on_nodes(2), **options)
    shutil.rmtree(tmp_path / "run")
    assert_equal_runs(run_ranks(run_to_store, 2, tmp_path / "run", env=restarted, **options), reference)
    for node in (0, 1):  # which would have both if the run had begun anew
        held = [checkpoint_of(tmp_path / "run", node, step).exists() for step in (3, 6)]
        assert held == [False, True]


def test_another_number_of_nodes_takes_what_the_store_has(tmp_path: Path) -> None:
    options: dict[str, Any] = {**ENGINES["fsdp_sharded"], **SHORT, "samples": 40, "dropout": 0.0}
    options |= {"checkpoint_uri": f"file://{tmp_path}/store", "lr_scheduler_type": "constant"}
    whole = run_ranks(run_to_store, 4, tmp_path / "run", env=on_nodes(4), **options)[0]
    shutil.rmtree(tmp_path / "run" / "node1")
    for path in (tmp_path / "store").glob("checkpoint-*"):
        if path.name != "checkpoint-3":  # of later ones the first node has its part
            shutil.rmtree(path)
    (tmp_path / "store" / "_owner.json").unlink()
    one_node = {"GROUP_RANK": "0"}
    options["per_device_train_batch_size"] = 4
    found = run_ranks(run_to_store, 2, tmp_path / "run", "auto", env=one_node, on_changed_run="warn", **options)[0]
    np.testing.assert_allclose(found["losses"], whole["losses"], rtol=1e-5)
    for name, value in whole["weights"].items():
        np.testing.assert_allclose(found["weights"][name], value, rtol=1e-3, atol=1e-5)
    bad = {path.name[: len("_bad-checkpoint-N")] for path in (tmp_path / "run" / "node0" / "out").glob("_bad-*")}
    assert bad == {f"_bad-checkpoint-{number}" for number in "368"}  # of 3 the part, for which the whole came


# --- a loop of one's own ---------------------------------------------------------------------------------------------


def saved_run(directory: Path) -> SavedRun:
    """Return a run of a node with a disk of its own."""
    object_store._POLL_SECONDS = 0.05
    node = directory / f"node{os.environ['RANK']}"
    node.mkdir(parents=True, exist_ok=True)
    os.chdir(node)
    run = SavedRun(Path(), total_limit=2, config={"checkpoint_uri": f"file://{directory}/store"})
    run.accelerator.project_configuration.save_on_each_node = True
    return run


def save_thrice(directory: Path) -> None:
    run = saved_run(directory)
    for step in range(3):
        run.fill(step)
        run.accelerator.save_state(async_=step == 1)
        run.accelerator.wait_for_checkpoint()
        run.accelerator._checkpointer._uploads.wait()
    run.accelerator.end_training()


def load_and_save(directory: Path) -> tuple[int, list[str]]:
    run = saved_run(directory)
    run.accelerator.load_state()
    held = run.step_held()
    run.fill(held + 10)
    run.accelerator.save_state()
    run.accelerator.end_training()
    return held, sorted(path.name for path in Path("checkpoints").iterdir())


def test_what_one_node_alone_has_is_passed_over(tmp_path: Path) -> None:
    run_ranks(save_thrice, 2, tmp_path, env=on_nodes(2))
    store = ObjectStore(f"file://{tmp_path}/store", "checkpoint_")
    assert store.names() == ["checkpoint_1", "checkpoint_2"]
    shutil.rmtree(tmp_path / "store" / "checkpoint_2")  # as if it had not been sent when the second node was lost
    (tmp_path / "store" / "_owner.json").unlink()
    shutil.rmtree(tmp_path / "node1" / "checkpoints")
    (held, first), (other, second) = run_ranks(load_and_save, 2, tmp_path, env=on_nodes(2))
    assert held == other == 1
    assert [name for name in first if name.startswith("_bad-checkpoint_2-")]
    assert {"checkpoint_1", "checkpoint_2"} <= set(first) & set(second)
    assert store.newest() == "checkpoint_2"
    assert run_ranks(load_and_save, 2, tmp_path, env=on_nodes(2))[0][0] == 11


def load_named(directory: Path) -> str:
    run = saved_run(directory)
    with pytest.raises(CorruptCheckpointError) as caught:
        run.accelerator.load_state(Path("checkpoints", "checkpoint_2"))
    return str(caught.value)


def test_parts_of_two_saves_are_not_put_together(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run_ranks(save_thrice, 2, tmp_path / name, env=on_nodes(2))
    shutil.rmtree(tmp_path / "one" / "node1")
    shutil.copytree(tmp_path / "two" / "node1", tmp_path / "one" / "node1")
    for said in run_ranks(load_named, 2, tmp_path / "one", env=on_nodes(2)):
        assert re.search("the disks of the nodes hold parts of 2 saves as .*checkpoint_2, seen by ranks 0, 1", said)
    shutil.rmtree(tmp_path / "one" / "store" / "checkpoint_2")
    (tmp_path / "one" / "store" / "_owner.json").unlink()
    assert run_ranks(load_and_save, 2, tmp_path / "one", env=on_nodes(2))[0][0] == 1


def save_while_a_node_sends(directory: Path) -> list[str]:
    run = saved_run(directory)
    sent, go_on = list[str](), threading.Event()
    put = ObjectStore.put

    def slow_put(store: ObjectStore, path: Path, part: NodePart | None = None) -> int:
        sent.append(path.name)
        if os.environ["RANK"] == "1":
            go_on.wait(20)
        return put(store, path, part)

    ObjectStore.put = slow_put  # type: ignore[method-assign]
    for step in range(3):
        run.fill(step)
        run.accelerator.save_state()
    go_on.set()
    run.accelerator.end_training()
    return sent


def test_nodes_send_the_same_saves_where_one_is_slow(tmp_path: Path) -> None:
    sent = run_ranks(save_while_a_node_sends, 2, tmp_path, env=on_nodes(2))
    assert sent == [["checkpoint_0", "checkpoint_2"]] * 2  # the last one at the end
    store = ObjectStore(f"file://{tmp_path}/store", "checkpoint_")
    assert store.names() == ["checkpoint_0", "checkpoint_2"]
    for name in store.names():
        store.verify(name)


def end_while_a_node_sends(directory: Path) -> int | None:
    """Train on a node to a signal, which comes while the second one still sends an earlier save."""
    object_store._POLL_SECONDS = 0.05
    put = ObjectStore.put

    def slow_put(store: ObjectStore, path: Path, part: NodePart | None = None) -> int:
        if os.environ["RANK"] == "1" and path.name == "checkpoint-2":
            time.sleep(2.0)
        return put(store, path, part)

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3 and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGTERM)

    ObjectStore.put = slow_put  # type: ignore[method-assign]
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 50, "save_on_each_node": True}
    own = directory / f"node{os.environ['RANK']}"
    own.mkdir()
    os.chdir(own)
    trainer = build_trainer("out", strategy="ddp", checkpoint_uri=f"file://{directory}/store", **options)
    trainer.add_callback(Stop())
    try:
        trainer.train()
    except SystemExit as end:
        return end.code
    return None


def test_what_is_saved_at_a_signal_is_sent_where_a_node_is_still_sending(tmp_path: Path) -> None:
    assert run_ranks(end_while_a_node_sends, 2, tmp_path, env=on_nodes(2)) == [85, 85]
    store = ObjectStore(f"file://{tmp_path}/store", "checkpoint-")
    on_disk = {path.name for path in (tmp_path / "node0" / "out").glob("checkpoint-*")}
    assert store.names()[-1] == max(on_disk, key=store.number_of) != "checkpoint-2"
    store.verify(store.names()[-1])


def save_beside_another_run(directory: Path, saves: int) -> list[str]:
    """Save to a store that refuses the first node; return what the uploads have ended with."""
    run = saved_run(directory)
    run.accelerator.project_configuration.on_save_error = "warn"
    ended, take_error = list[str](), Uploads.take_error

    def note(uploads: Uploads) -> BaseException | None:
        if (error := take_error(uploads)) is not None:
            ended.append(str(error))
        return error

    Uploads.take_error = note  # type: ignore[method-assign]
    run.fill(0)
    run.accelerator.save_state()
    uploads = run.accelerator._checkpointer._uploads
    if saves == 2:
        if os.environ["RANK"] == "0":
            uploads.wait()
        run.accelerator.wait_for_everyone()
        run.accelerator.save_state()
        uploads.wait()  # on the second node for the first save, until it hears of it in the second one
    run.accelerator.end_training()
    Uploads.take_error = take_error  # type: ignore[method-assign]
    return ended


def save_beside_others(directory: Path) -> list[list[str]]:
    return [save_beside_another_run(directory / str(saves), saves) for saves in (1, 2)]


def test_a_node_does_not_wait_for_one_whose_upload_is_refused(tmp_path: Path) -> None:
    """It would for five minutes: until the next save, or the end of training, which sends the one that was left out."""
    for saves in (1, 2):
        ObjectStore(f"file://{tmp_path}/{saves}/store", "checkpoint_", job="another").claim()
    for saves, refused, alone in zip((1, 2), *run_ranks(save_beside_others, 2, tmp_path, env=on_nodes(2)), strict=True):
        assert len(refused) == len(alone) == saves
        assert all("store is the store of another run" in said for said in refused)
        for number, said in enumerate(alone):
            assert f"store: another node could not send its part of checkpoint_{number}; its log says why" in said
        assert [path.name for path in (tmp_path / str(saves) / "store").iterdir()] == ["_owner.json"]


# --- the store alone -------------------------------------------------------------------------------------------------


def parts_on_disks(directory: Path, save: str = "a") -> list[tuple[Path, NodePart]]:
    """Return what two nodes have committed, each on its disk."""
    found = []
    for node in (0, 1):
        path = directory / f"node{node}" / "checkpoint-3"
        with publish_directory(path, ALONE) as staged:
            staged.write_json("shared.json", node)
            slices = {"x": ((6,), (3 * node,))}
            staged.write_tensors(f"shards.{node:05d}.safetensors", {"x": torch.full((3,), node)}, slices=slices)
            staged.write_tensors(f"copies.{node:05d}.safetensors", {"y": torch.ones(3)})
            staged.metadata[NODE_KEY] = {"save": save, "ranks": [node, node + 1]}
        own = Manifest.read(path).files
        files = list(own) if node == 0 else [name for name in own if name.startswith("shards")]
        found.append((path, NodePart(save, [0, 1], node, files)))
    return found


def test_the_first_node_commits_what_all_have_sent(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "_POLL_SECONDS", 0.05)
    (first, whole), (second, part) = parts_on_disks(tmp_path)
    stores = [ObjectStore(f"file://{tmp_path}/store", "checkpoint-", job="job") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        later = pool.submit(stores[1].put, second, part)
        stores[0].put(first, whole)
        later.result()
    names = {path.name for path in (tmp_path / "store" / "checkpoint-3").iterdir()}
    expected = {"shared.json", "shards.00000.safetensors", "shards.00001.safetensors", "copies.00000.safetensors"}
    assert names == expected | {"manifest.json", "COMMITTED"}
    assert json.loads((tmp_path / "store" / "checkpoint-3" / "shared.json").read_text()) == 0
    assert [is_copy(path, stores[0].manifest("checkpoint-3")) for path in (first, second)] == [True, False]
    fetched = stores[0].fetch("checkpoint-3", tmp_path / "disk")
    assert set(Manifest.read(fetched).files) == expected == set(Manifest.read(fetched).tensors) | {"shared.json"}


def test_a_part_alone_is_not_sent(tmp_path: Path) -> None:
    path, _ = parts_on_disks(tmp_path)[0]
    with pytest.raises(ConfigError, match=r"checkpoint-3 is one node's part of a checkpoint of 1 ranks, of no use"):
        ObjectStore(f"file://{tmp_path}/store", "checkpoint-").put(path)
    assert not (tmp_path / "store").exists()


def test_a_node_that_hears_nothing_of_the_others_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(object_store, "GIVE_UP_SECONDS", 0.3)
    (first, whole), (second, part) = parts_on_disks(tmp_path)
    store = ObjectStore(f"file://{tmp_path}/store", "checkpoint-", job="job")
    (tmp_path / "store" / "checkpoint-3").mkdir(parents=True)
    for note in ("_node_0.json", "_node_1.json"):  # of an upload before, which was killed
        (tmp_path / "store" / "checkpoint-3" / note).write_text('{"save": "another", "manifest": {}}')
    with pytest.raises(
        TimeoutError, match=r"checkpoint-3/_node_0\.json has not come from that node's first process in"
    ):
        store.put(second, part)
    assert len(list((tmp_path / "store" / "checkpoint-3").iterdir())) == 2  # nothing was sent
    with pytest.raises(TimeoutError, match=r"checkpoint-3/_node_1\.json has not come .* not complete there"):
        store.put(first, whole)
    assert store.newest() is None
