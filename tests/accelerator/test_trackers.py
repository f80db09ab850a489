"""Trackers and profiles of an Accelerator: who logs, what a failure does, and which arguments are errors."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_trainer import Accelerator, ProfileKwargs, ProjectConfiguration, registry
from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.tracking import GeneralTracker, get_available_trackers
from tests.ranks import RankFailure, preload, run_ranks

preload("accel_trainer.accelerator")


class Notes(GeneralTracker):
    """Keeps what it is called with."""

    name = "notes"

    def __init__(self, project_name: str = "", logging_dir: Any = None, /, **kwargs: Any) -> None:
        super().__init__(project_name, logging_dir, **kwargs)
        self.calls: list[tuple[Any, ...]] = []

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    def start(self) -> None:
        self.note("start", self.project_name, self.kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.note("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.note("log", values, step, kwargs)

    def finish(self) -> None:
        self.note("finish")


class OnEveryRank(Notes):
    """Logs on every rank."""

    name = "on_every_rank"
    main_process_only = False


class Broken(Notes):
    """Fails in the methods it is told."""

    name = "broken"
    fails_in = ("config", "log", "finish")
    error: Exception = RuntimeError("server https://me:pw@host says no to KEY123")

    def note(self, *call: Any) -> None:
        if call[0] in self.fails_in:
            raise type(self.error)(*self.error.args)  # one that is raised keeps its frames, and the Accelerator there


def test_a_run_starts_stores_logs_and_ends():
    notes = Notes()
    accelerator = Accelerator(cpu=True, log_with=notes)
    accelerator.init_trackers("project", config={"lr": 0.1, "hub_token": "hf_abc"})
    accelerator.log(
        {"loss": torch.tensor(0.5), "logits": torch.ones(2)}, step=3, log_kwargs={"notes": {"commit": False}}
    )
    accelerator.log({"epoch": np.float32(1)})
    accelerator.end_training()
    assert type(notes.calls[3][1]["epoch"]) is float
    assert [call[0] for call in notes.calls] == ["start", "config", "log", "log", "finish"]
    assert notes.calls[1] == ("config", {"lr": 0.1, "hub_token": "***"})
    _, values, step, kwargs = notes.calls[2]
    assert (values["loss"], type(values["loss"]), step, kwargs) == (0.5, float, 3, {"commit": False})
    assert torch.equal(values["logits"], torch.ones(2))


def end_twice(directory: Path) -> bool:
    options = ProjectConfiguration(str(directory / "run"), automatic_checkpoint_naming=True)
    config = {"checkpoint_uri": f"file://{directory}/store", "save_async": True}
    accelerator = Accelerator(cpu=True, project_config=options, config=config)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state()
    accelerator.end_training()
    accelerator.end_training()
    return (directory / "store" / "checkpoint_0").is_dir()


@pytest.mark.multirank
def test_training_may_be_ended_twice(tmp_path: Path):
    assert all(run_ranks(end_twice, 2, tmp_path))


def test_a_class_gets_the_name_the_directory_and_its_options(tmp_path: Path):
    accelerator = Accelerator(cpu=True, log_with=[Notes, OnEveryRank()], project_dir=tmp_path)
    accelerator.init_trackers("project", init_kwargs={"notes": {"team": "red"}})
    notes = accelerator.get_tracker("notes")
    assert notes.calls == [("start", "project", {"team": "red"})]
    assert notes.logging_dir == tmp_path
    assert accelerator.get_tracker("notes", unwrap=True) is notes
    assert [tracker.name for tracker in accelerator.trackers] == ["notes", "on_every_rank"]
    accelerator.init_trackers("second")
    assert notes.calls[-1] == ("finish",)
    assert accelerator.get_tracker("notes").project_name == "second"


def test_logging_before_a_run_is_open_is_said_once_and_without_trackers_never(caplog: pytest.LogCaptureFixture):
    accelerator, untracked = Accelerator(cpu=True, log_with=Notes), Accelerator(cpu=True)
    for _ in range(3):
        accelerator.log({"loss": 1.0})
        untracked.log({"loss": 1.0})
    assert [m for m in caplog.messages if "init_trackers" in m] == [
        "log() was called before init_trackers(): nothing is stored"
    ]
    untracked.init_trackers("project", config={"lr": 0.1})
    untracked.log({"loss": 1.0})
    untracked.end_training()


def test_a_failing_tracker_warns_once_without_secrets_and_the_others_go_on(caplog: pytest.LogCaptureFixture):
    notes = Notes()
    accelerator = Accelerator(cpu=True, log_with=[Broken, notes])
    accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs={"broken": {"api_key": "KEY123"}})
    for step in range(3):
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.end_training()
    warnings = [message for message in caplog.messages if "broken" in message]
    assert len(warnings) == 1
    assert "tracker 'broken' failed in store_init_configuration, and the training goes on" in warnings[0]
    assert "RuntimeError: server https://***@host says no to ***" in warnings[0]
    assert [call[0] for call in notes.calls] == ["start", "config", "log", "log", "log", "finish"]


class Unreachable(Broken):
    """Cannot be opened."""

    fails_in = ("start",)


class UnreachableWhenMade(Notes):
    """Opens its run when it is made."""

    name = "broken"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to host")


@pytest.mark.parametrize("tracker", [Unreachable, UnreachableWhenMade])
def test_a_tracker_that_cannot_be_reached_leaves_its_place_empty(caplog: pytest.LogCaptureFixture, tracker: type):
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    accelerator.get_tracker("broken").log_images({})
    assert accelerator.get_tracker("broken", unwrap=True) is None
    assert any("failed in start" in message for message in caplog.messages)


def test_options_of_another_tracker_are_passed_over_and_a_misspelt_one_is_not(caplog: pytest.LogCaptureFixture):
    accelerator = Accelerator(cpu=True, log_with=Notes)
    accelerator.init_trackers("project", init_kwargs={"wandb": {"entity": "us"}})
    accelerator.log({"loss": 1.0}, log_kwargs={"wandb": {"commit": False}})
    assert not caplog.messages
    accelerator.log({"loss": 1.0}, log_kwargs={"note": {"commit": False}})
    assert caplog.messages == ["log_kwargs has options for 'note', and no tracker is called so"]
    accelerator.end_training()


class InAccelerateForm(Notes):
    """Is made with its name alone, and an option of its own."""

    name = "InAccelerateForm"

    def __init__(self, run_name: str, entity: str | None = None) -> None:
        super().__init__(run_name)
        self.entity = entity


def test_a_class_gets_its_options_and_no_directory_that_it_does_not_ask_for(tmp_path: Path):
    registry.TRACKER_CLASSES["InAccelerateForm"] = InAccelerateForm
    try:
        for options, entity in (({}, None), ({"entity": "us"}, "us")):
            accelerator = Accelerator(cpu=True, log_with="InAccelerateForm", project_dir=tmp_path)
            accelerator.init_trackers("project", init_kwargs={"InAccelerateForm": options})
            assert accelerator.get_tracker("InAccelerateForm").entity == entity
            accelerator.end_training()
    finally:
        del registry.TRACKER_CLASSES["InAccelerateForm"]


class Picky(Unreachable):
    """Takes no options, as a library whose argument is misspelled."""

    error = TypeError("init() got an unexpected keyword argument 'entty'")


def test_what_is_wrong_with_trackers_is_said():
    accelerator = Accelerator(cpu=True, log_with=Notes)
    with pytest.raises(ConfigError, match=r"no tracker 'notes' is open.*call init_trackers\(\) first"):
        accelerator.get_tracker("notes")
    with pytest.raises(ConfigError, match=r"options for 'note'; did you mean 'notes'\? Trackers of this run: notes"):
        accelerator.init_trackers("project", init_kwargs={"note": {}})
    with pytest.raises(ConfigError, match="init_kwargs has options for 'notes', which log_with has as an object; give"):
        Accelerator(cpu=True, log_with=Notes()).init_trackers("project", init_kwargs={"notes": {"entity": "us"}})
    with pytest.raises(ConfigError, match=r"init_trackers\(config=...\) got a list; pass a dict"):
        accelerator.init_trackers("project", config=[1])
    with pytest.raises(ConfigError, match=r"'wanbd'.*Trackers of this run: none, since log_with is not given"):
        Accelerator(cpu=True).init_trackers("project", init_kwargs={"wanbd": {}})
    with pytest.raises(TypeError, match="unexpected keyword argument 'entty'"):  # of the library
        Accelerator(cpu=True, log_with=Picky).init_trackers("project", init_kwargs={"broken": {"entty": 1}})
    accelerator.init_trackers("project")
    with pytest.raises(ConfigError, match=r"no tracker 'wandb' is open.* Trackers of log_with: notes"):
        accelerator.get_tracker("wandb")


class Nameless(GeneralTracker):
    """Lacks a name."""

    store_init_configuration = log = Notes.note


class Unfinished(GeneralTracker):
    """Lacks methods."""

    name = "unfinished"


@pytest.mark.parametrize(
    ("log_with", "message"),
    [
        (
            "tensorbord",
            r"unknown tracker 'tensorbord'; did you mean 'tensorboard'\? Known trackers: mlflow, tensorboard",
        ),
        (
            "tensorboard",
            r"Logging with `tensorboard` requires a `logging_dir`, .* pass Accelerator\(project_dir",
        ),
        ([3], r"log_with holds a int; give a name \(mlflow, tensorboard, trackio, wandb or 'all'\)"),
        (Nameless(), "tracker class Nameless lacks name; see GeneralTracker"),
        (Unfinished, "tracker class Unfinished lacks log, store_init_configuration"),
        ([Notes(), Notes()], "log_with holds two trackers called 'notes'"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_an_error(log_with: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, log_with=log_with)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    hidden = ("mlflow", "tensorboard", "trackio", "wandb")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in hidden else find_spec(name, *rest)
    )


def test_a_folder_that_a_package_has_left_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "wandb").mkdir()  # of earlier runs, beside the script
    spec = importlib.machinery.PathFinder.find_spec("wandb", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: spec)
    assert "wandb" not in get_available_trackers()
    with pytest.raises(MissingExtraError, match="needs the package 'wandb', which is not installed"):
        Accelerator(cpu=True, log_with="wandb")


@pytest.mark.parametrize("others", [[], ["all"]])
@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_a_missing_package_names_its_extra(name: str, others: list[str], nothing_installed: None, tmp_path: Path):
    with pytest.raises(
        MissingExtraError, match=rf"pip install 'accel-trainer\[{name}\]'`, or take '{name}' out of log_with"
    ):
        Accelerator(cpu=True, log_with=[*others, name], project_dir=tmp_path)


def test_all_without_any_package_warns_and_the_run_goes_on(
    nothing_installed: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    accelerator = Accelerator(cpu=True, log_with="all", project_dir=tmp_path)
    assert "log_with='all', and no tracker can be used, so that nothing is logged: known are mlflow" in caplog.text
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    assert accelerator.log_with == accelerator.trackers == []


def test_all_is_what_is_installed_and_has_a_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = importlib.util.find_spec("pytest")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in ("wandb", "mlflow") else found)
    accelerator = Accelerator(cpu=True, log_with="ALL", project_config=ProjectConfiguration(logging_dir=tmp_path))
    assert [tracker.name for tracker in accelerator.log_with] == ["tensorboard", "trackio"]
    assert [tracker.name for tracker in Accelerator(cpu=True, log_with="all").log_with] == ["trackio"]


def test_a_registered_name_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry._TRACKERS, "targets", dict(registry._TRACKERS.targets))
    registry.register_tracker("plain", f"{Notes.__module__}:Notes")
    assert Accelerator(cpu=True, log_with="plain").log_with == [Notes]


def log_on_ranks() -> dict[str, Any]:
    """What the trackers of each rank saw."""
    notes, everywhere = Notes(), OnEveryRank()
    accelerator = Accelerator(cpu=True, log_with=[notes, everywhere])
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"rank": accelerator.process_index})
    accelerator.get_tracker("notes").log({"direct": 1})
    unwrapped = accelerator.get_tracker("notes", unwrap=True)
    accelerator.end_training()
    return {
        "notes": [call[0] for call in notes.calls],
        "everywhere": [call[1] for call in everywhere.calls if call[0] == "log"],
        "unwrapped": unwrapped is not None,
    }


def test_only_the_main_process_logs_unless_the_tracker_says_otherwise():
    main, other = run_ranks(log_on_ranks, 2)
    assert main == {
        "notes": ["start", "config", "log", "log", "finish"],
        "everywhere": [{"rank": 0}],
        "unwrapped": True,
    }
    assert other == {"notes": [], "everywhere": [{"rank": 1}], "unwrapped": False}


def open_on_the_main_process_alone() -> tuple[list[str], float]:
    notes = Notes()
    accelerator = Accelerator(cpu=True, log_with=notes)
    if accelerator.is_main_process:
        accelerator.init_trackers("project", config={"lr": 0.1})
    total = accelerator.reduce(torch.tensor(1.0))
    accelerator.log({"total": total})
    accelerator.get_tracker("notes").log({"direct": 1})
    accelerator.end_training()
    return [call[0] for call in notes.calls], total.item()


def test_the_main_process_may_open_trackers_alone():
    assert run_ranks(open_on_the_main_process_alone, 2) == [
        (["start", "config", "log", "log", "finish"], 2.0), ([], 2.0)
    ]  # fmt: skip


def open_a_picky_tracker() -> None:
    accelerator = Accelerator(cpu=True, log_with=Picky)
    accelerator.init_trackers("project")
    accelerator.wait_for_everyone()


def test_an_error_that_rank_0_alone_sees_ends_all_ranks_at_the_next_collective():
    with pytest.raises(RankFailure) as caught:
        run_ranks(open_a_picky_tracker, 2)
    assert "TypeError: init() got an unexpected keyword argument 'entty'" in caught.value.failures[0]
    assert "rank 0 failed" in caught.value.failures[1]
    assert "TypeError: init() got an unexpected keyword argument" in caught.value.failures[1]


def profile_on_ranks(folder: str) -> list[str]:
    """The traces that a rank finds when its profile is over."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    with accelerator.profile() as profiler:
        torch.ones(8) @ torch.ones(8)
    assert any(event.key == "aten::matmul" for event in profiler.key_averages())
    return sorted(path.name for path in Path(folder).iterdir())


def test_each_rank_writes_a_trace_and_all_are_there_at_the_end(tmp_path: Path):
    assert run_ranks(profile_on_ranks, 2, str(tmp_path)) == [["profile_0.json", "profile_1.json"]] * 2
    assert json.loads((tmp_path / "profile_1.json").read_text())["traceEvents"]


def test_a_second_profile_leaves_the_trace_of_the_first(tmp_path: Path):
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=tmp_path)
    accelerator, before = Accelerator(cpu=True, kwargs_handlers=[handler]), handler.to_dict()
    for name in ("train", "evaluate"):
        with accelerator.profile(), torch.profiler.record_function(name):
            torch.ones(8) @ torch.ones(8)
    assert ['"train"' in (tmp_path / name).read_text() for name in ("profile_0.json", "profile_0_1.json")] == [
        True,
        False,
    ]
    assert (handler.to_dict(), handler.given()) == (before, {"activities": ["cpu"], "output_trace_dir": tmp_path})


def test_a_profile_may_have_options_of_its_own(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(record_shapes=True, profile_memory=True)) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any(event.input_shapes for event in profiler.key_averages(group_by_input_shape=True))
