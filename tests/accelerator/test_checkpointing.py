"""save_state and load_state of the Accelerator: hooks, names, background saves and what they report."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.checkpoint.manifest import Manifest
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from tests import warm
from tests.checkpoint.crash_job import SavedRun, acknowledged, assert_survived, save_repeatedly
from tests.fault_injection import fault_env
from tests.ranks import RankFailure, ask_jobs, run_ranks


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_registered_objects_are_found_by_name_whatever_their_order(tmp_path: Path):
    one = Accelerator(cpu=True)
    one.register_for_checkpointing(Box("first"), Box("second"), ema=Box("average"))
    one.save_state(tmp_path / "s")
    other = Accelerator(cpu=True)
    boxes = [Box(None) for _ in range(3)]
    other.register_for_checkpointing(ema=boxes[2])
    other.register_for_checkpointing(*boxes[:2])
    other.register_for_checkpointing(boxes[0])  # once more is not twice
    other.load_state(tmp_path / "s")
    assert [box.value for box in boxes] == ["first", "second", "average"]
    third = Accelerator(cpu=True)
    third.register_for_checkpointing(*boxes[:2], last=Box(4))
    message = r"registered and not in it: 'last'; in it and not registered: 'ema'\. Register the same ones under"
    with pytest.raises(IncompatibleCheckpointError, match=message):
        third.load_state(tmp_path / "s")
    with pytest.raises(ConfigError, match="an object is registered for checkpointing as 'last' already"):
        third.register_for_checkpointing(last=Box(5))


def prepared() -> tuple[Accelerator, nn.Module]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    return accelerator, accelerator.prepare(model)


def test_a_hook_writes_files_of_its_own_and_takes_over_the_weights(tmp_path: Path):
    accelerator, model = prepared()

    def save(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        assert models == [model]
        torch.save(weights.pop(), Path(output_dir, "mine.pt"))

    def load(models: list[nn.Module], input_dir: str) -> None:
        models.pop().load_state_dict(torch.load(Path(input_dir, "mine.pt")))

    saving = accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(tmp_path / "s")
    names = {path.name for path in (tmp_path / "s").iterdir()}
    assert "mine.pt" in names
    assert not any("model" in name for name in names)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    loading = accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(tmp_path / "s")
    assert torch.equal(model.weight, before)
    loading.remove()
    with pytest.raises((CheckpointNotFoundError, IncompatibleCheckpointError)):
        accelerator.load_state(tmp_path / "s")
    saving.remove()
    accelerator.save_state(tmp_path / "t")
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "t")
    assert torch.equal(model.weight, before)


def changes_in_place(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
    weights[0]["weight"] = weights[0]["weight"].half()


def puts_others(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
    weights[0] = {name: value.half() for name, value in weights[0].items()}


@pytest.mark.parametrize("hook", [changes_in_place, puts_others])
def test_a_hook_that_gives_a_model_other_weights_is_refused(tmp_path: Path, hook: Any):
    accelerator, _ = prepared()
    accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(ConfigError, match="one of save_state's hooks changes an entry of its list, or puts another"):
        accelerator.save_state(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def stepped_to_milestones(folder: Path, save_after: int | None) -> list[float]:
    """Save after so many of eight updates, or load what was saved after two; return the rates of the last six."""
    accelerator, model = prepared()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parts = [LinearLR(optimizer, 0.1, total_iters=3), MultiStepLR(optimizer, [2, 2, 3])]
    optimizer, schedule = accelerator.prepare(optimizer, SequentialLR(optimizer, parts, [3]))
    if save_after is None:
        accelerator.load_state(folder)
    rates = []
    for update in range(2 if save_after is None else 0, 8):
        if update == save_after:
            accelerator.save_state(folder)
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    return rates[-6:]


def test_a_schedule_with_milestones_goes_on(tmp_path: Path):
    whole = stepped_to_milestones(tmp_path / "s", 2)
    assert whole[-1] < 0.01, "the milestones are reached"
    assert stepped_to_milestones(tmp_path / "s", None) == whole


def test_a_state_that_is_more_than_a_reader_takes_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    accelerator, _ = prepared()
    accelerator.register_for_checkpointing(losses=Box(list(range(5000))))
    monkeypatch.setattr("accel_trainer.checkpoint.publication.MAX_JSON_BYTES", 20_000)
    with pytest.raises(ConfigError, match=r"training\.json would have 2\d,\d+ bytes .* return tensors or NumPy arrays"):
        accelerator.save_state(tmp_path / "s")
    assert not (tmp_path / "s").exists()


class Failing(Box):
    """Fails on one rank, in the place that is asked for."""

    def __init__(self, place: str) -> None:
        super().__init__(0)
        self.place = place

    def fail(self, place: str) -> None:
        if self.place == place and os.environ["RANK"] == "1":
            raise ValueError(f"no {place}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fail("load of an object")


PLACES = ("save hook", "load hook", "load of an object", "missing directory")


def fail_in(directory: Path) -> dict[str, tuple[str, float, float]]:
    """Rank 1 fails in one place after the other; returns what each rank was told, how soon, and a sum afterwards."""
    run = SavedRun(directory)
    accelerator = run.accelerator
    accelerator.save_state()
    told = {}
    for place in PLACES:
        begin, handles = time.monotonic(), []
        box = Failing(place)
        accelerator._registered.objects["counter"] = box
        if place == "save hook":
            handles.append(accelerator.register_save_state_pre_hook(lambda *_, box=box: box.fail("save hook")))
        handles.append(accelerator.register_load_state_pre_hook(lambda *_, box=box: box.fail("load hook")))
        elsewhere = place == "missing directory" and accelerator.process_index == 1
        try:
            if place == "save hook":
                accelerator.save_state()
            else:
                accelerator.load_state(directory / "elsewhere" if elsewhere else directory / "checkpoints/checkpoint_0")
            told[place] = ("", 0.0, 0.0)
        except Exception as error:
            seconds = time.monotonic() - begin
            total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0), "sum").item()
            told[place] = (f"{type(error).__name__}: {error}", seconds, total)
        for handle in handles:
            handle.remove()
    return told


def test_r12_what_fails_on_one_rank_is_raised_on_both_and_the_group_lives_on(tmp_path: Path):
    other, failing = run_ranks(fail_in, 2, tmp_path)
    for place in PLACES:
        message, seconds, total = failing[place]
        expected = "CheckpointNotFoundError" if place == "missing directory" else f"ValueError: no {place}"
        assert message.startswith(expected)
        assert other[place][0].startswith("RemoteRankError: rank 1 failed in ")
        assert expected.rpartition(": ")[2] in other[place][0]
        assert max(seconds, other[place][1]) < 40
        assert total == other[place][2] == 3.0


def slow_save(directory: Path) -> dict[str, Any]:
    """Save in the background on a slow disk, and go on at once: the weights change, and what is saved does not."""
    run = SavedRun(directory)
    run.fill(0)
    run.accelerator.save_state()
    run.fill(1)
    begin = time.monotonic()
    path = run.accelerator.save_state(async_=True)
    stall = time.monotonic() - begin
    run.fill(-7)
    is_published = path.exists()
    steps = 0
    while run.accelerator._checkpointer.background.in_flight:
        run.accelerator.backward(run.model(torch.ones(1, 8)).sum())
        steps += 1
    run.accelerator.load_state()
    seen = {"stall": stall, "published": is_published, "held": run.step_held(), "steps": steps}
    return {**seen, **run.accelerator.checkpoint_metrics}


def test_r5_a_background_save_stalls_shortly_and_saves_what_was_there_when_it_was_asked(jobs: Any):
    _, ask = jobs
    results = ask("slow")
    for result in results:
        assert result["held"] == 1
        assert not result["published"]
        assert result["steps"] > 1
        # The slow disk took part in the save, and not in the stall, whatever else the machine does.
        assert result["stall"] + 0.5 < result["ckpt/duration_s"]
        assert 0 < result["ckpt/stall_s"] <= result["stall"]
    # Both ranks saw its end in the same step.
    assert results[0]["steps"] == results[1]["steps"]
    assert results[0]["ckpt/bytes"] > 8 * 8 * 4
    assert {"resume/select_s", "resume/verify_s", "resume/load_s"} <= results[0].keys()


def count_votes(directory: Path) -> list[int]:
    """Return how many collectives of the savers' group each backward of two windows starts, while a save is written."""
    run = SavedRun(directory)
    run.fill(0)
    run.accelerator.gradient_accumulation_steps = 3
    run.accelerator.save_state(async_=True)
    group = run.accelerator._checkpointer.background._main_group
    votes = []
    for _ in range(6):
        before = group._get_sequence_number_for_group()
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(run.model(torch.ones(1, 8)).sum())
        votes.append(group._get_sequence_number_for_group() - before)
    assert run.accelerator._checkpointer.background.in_flight
    run.accelerator.wait_for_checkpoint()
    assert not run.accelerator._checkpointer.background.in_flight
    return votes


def test_ranks_ask_each_other_once_an_update_whether_a_background_save_has_ended(jobs: Any):
    _, ask = jobs
    assert ask("votes") == [[0, 0, 1, 0, 0, 1]] * 2


@pytest.mark.parametrize("target", ["rank 0", "rank 1", "both"])
def test_r5_a_kill_in_the_background_loses_nothing_acknowledged(jobs: Any, target: str):
    folder, ask = jobs
    with pytest.raises(RankFailure, match="SIGKILL"):
        ask(target)
    assert acknowledged(folder / target) == 0
    assert assert_survived(folder / target) in (0, 1)


CALLS = ("save_state", "load_state", "wait_for_checkpoint", "end_training")
"""What raises the error of a save in the background; the last one leaves the job."""


def fail_in_background(directory: Path) -> dict[str, str]:
    told = {}
    for call in CALLS:
        run = SavedRun(directory / call)
        run.fill(0)
        run.accelerator.save_state()
        run.accelerator.save_state(async_=True)
        try:
            getattr(run.accelerator, call)()
            told[call] = ""
        except Exception as error:
            told[call] = f"{type(error).__name__}: {error}"
    return told


@pytest.mark.parametrize("call", CALLS)
def test_r5_a_background_error_is_raised_by_whatever_comes_next(jobs: Any, call: str):
    folder, ask = jobs
    first, failing = ask("errors")
    assert failing[call] == "RuntimeError: fault injected at save.before_vote"
    assert "RuntimeError: fault injected at save.before_vote" in first[call]
    assert not list((folder / "errors" / call).rglob("_tmp-*"))


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "slow": (slow_save, "sleep@save.before_vote:rank=1:step=1:seconds=1.5"),
    "votes": (count_votes, "sleep@save.before_vote:rank=1:step=0:seconds=2"),
    "rank 0": (save_repeatedly, "kill9@save.after_vote:rank=0:step=1"),
    "rank 1": (save_repeatedly, "kill9@save.after_vote:rank=1:step=1"),
    "both": (save_repeatedly, "kill9@save.after_vote:step=1"),
    "errors": (fail_in_background, "raise@save.before_vote:rank=1:step=1"),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[str], Any]]:
    """Run two ranks with each of the FAULTS, in a directory of its name; return what gives the results of one."""
    folder = tmp_path_factory.mktemp("background")

    def run(name: str) -> list[Any]:
        function, fault = FAULTS[name]
        options = {"saves": 3, "async_": True} if function is save_repeatedly else {}
        (folder / name).mkdir()
        return run_ranks(function, 2, folder / name, env=fault_env(fault), **options)

    return folder, ask_jobs(run, FAULTS)


def leave_at_once(directory: Path) -> None:
    run = SavedRun(directory)
    run.fill(0)
    run.accelerator.save_state(async_=True)


def test_r5_the_end_of_the_process_waits_for_the_writer(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from tests.accelerator.test_checkpointing import leave_at_once; "
        "from accel_trainer.checkpoint import manifest; manifest._FLUSH_BYTES = 1; "  # as in large files
        "from tests.fault_injection import install_faults; "
        "install_faults('sleep@save.mid_shard:step=0:seconds=0.05', 0); leave_at_once(Path(sys.argv[1]))"
    )
    warm.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    run = SavedRun(tmp_path)
    run.accelerator.load_state()
    assert run.step_held() == 0


def test_a_state_that_was_asked_for_as_a_pickle_is_none_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = SavedRun(tmp_path)
    run.accelerator.save_state(tmp_path / "state", safe_serialization=False)
    assert "save_state(safe_serialization=False): the state is written as safetensors and JSON" in caplog.text
    assert {path.suffix for path in (tmp_path / "state").rglob("*.*")} <= {".safetensors", ".json"}
    run.accelerator.load_state(tmp_path / "state")


def test_r18_a_resume_says_what_is_exact_and_what_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run_ranks(save_repeatedly, 2, tmp_path, 1)
    run = SavedRun(tmp_path)
    with caplog.at_level(logging.INFO, "accel_trainer"):
        run.accelerator.load_state()
        run.accelerator.save_state()
        run.accelerator.load_state()
        run.accelerator.load_state(verify="size")
    lines = [record.message for record in caplog.records if record.message.startswith("resumed from")]
    assert "saved by 2 process(es) and loaded by 1" in lines[0]
    assert "checkpoint_1; contents verified; " in lines[1]
    assert "saved by 2" not in lines[1]
    assert "; lengths verified; " in lines[2]
    assert all("select" in line and "verify" in line and "load" in line for line in lines)
    assert run.accelerator.save_iteration == 2


def test_r16_a_state_holds_options_and_versions_and_a_resume_names_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def resume(batch_size: int = 4, **options: Any) -> str:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        accelerator.prepare(nn.Linear(2, 1), DataLoader(torch.zeros(8, 2), batch_size))
        if not (tmp_path / "s").exists():
            accelerator.save_state(tmp_path / "s")
        caplog.clear()
        accelerator.load_state(tmp_path / "s")
        return caplog.text

    assert "set up otherwise" not in resume(config={"timeout_seconds": 77})
    manifest = Manifest.read(tmp_path / "s")
    assert manifest.metadata["options"]["accumulation.num_steps"] == "2"
    assert manifest.versions | {"torch": torch.__version__, "python": platform.python_version()} == manifest.versions
    assert "set up otherwise" not in resume()
    text = resume(2, mixed_precision="bf16")
    assert "is of a run that was set up otherwise: mixed_precision: no -> bf16\n" in text
    assert (
        "had 8 samples = 4 x 2 x 1 (micro-batch x accumulation x ranks) from loader 0, and this run's have 4 samples = "
        "2 x 2 x 1 (micro-batch x accumulation x ranks); set gradient_accumulation_steps=4 (now 2) or batch_size=4 "
    ) in text


def test_a_directory_may_be_given_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    accelerator = Accelerator(
        cpu=True,
        project_dir="~/project",
        project_config=ProjectConfiguration(project_dir=tmp_path / "project", automatic_checkpoint_naming=True),
    )
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.save_state("~/state")
    accelerator.save_state()
    accelerator.save_model(model, "~/model")
    assert accelerator.load_state("~/state", missing_ok=True) == tmp_path / "state"
    assert accelerator.load_state("~/none", missing_ok=True) is None
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "project" / "checkpoints" / "checkpoint_0").is_dir()
    assert accelerator.logging_dir == tmp_path / "project"
