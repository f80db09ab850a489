"""What a tracker is, and what never reaches one: secrets."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from accel_trainer import Accelerator, tracking
from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.tracking import BlankTracker, GeneralTracker, mask_secrets, on_main_process, redact, secrets_of
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


class Notes(GeneralTracker):
    """Keeps values in memory."""

    name = "notes"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep nothing."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep nothing."""

    @on_main_process
    def summarize(self) -> str:
        return "summary"


class Everywhere(Notes):
    """Logs on every rank."""

    main_process_only = False


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "apikey",
        "WANDB_API_KEY",
        "hub_token",
        "hf_token",
        "token",
        "password",
        "db_passwd",
        "client_secret",
        "hub.token",
        "db.password",
        "accessToken",
        "clientSecret",
        "api_keys",
    ],
)
def test_values_of_secret_keys_are_masked(key: str):
    values = {key: "s3cret", "deep": {key: "s3cret", "lr": 0.1}}
    assert mask_secrets(values) == {key: "***", "deep": {key: "***", "lr": 0.1}}
    assert secrets_of(values) == {"s3cret"}
    assert mask_secrets({"args": argparse.Namespace(**values)}) == {"args": mask_secrets(values)}
    assert secrets_of({"args": argparse.Namespace(**values)}) == {"s3cret"}


@dataclass
class Base:
    lr: float = 0.1


@dataclass(slots=True)
class Slotted:
    hub_token: str = "s3cret"


@dataclass(slots=True)
class Both(Base):
    hub_token: str = "s3cret"


@pytest.mark.parametrize("options", [Slotted(), Both()])
def test_a_dataclass_may_have_its_options_in_slots(options: Any):
    assert mask_secrets({"args": options})["args"] == {"hub_token": "***"} | (
        {"lr": 0.1} if type(options) is Both else {}
    )
    assert secrets_of({"args": options}) == {"s3cret"}


def test_other_values_stay_and_a_secret_that_is_not_set():
    names = ["num_tokens", "max_new_tokens", "pad_token", "token_type", "tokenizer", "secretary", "key"]
    values = dict.fromkeys(names, "x") | {"hub_token": None, "num_token": 128, "use_auth_token": True}
    assert mask_secrets(values) == values
    assert secrets_of(values) == set()


def test_messages_are_redacted():
    text = "401 for key abc123 at https://me:pw@host/path"
    assert redact(text, {"abc", "abc123"}) == "401 for key *** at https://***@host/path"


def test_a_tracker_without_images_and_tables_says_so():
    for method, what in (("log_images", "images"), ("log_table", "tables")):
        with pytest.raises(ConfigError, match=f"tracker 'notes' stores no {what}"):
            getattr(Notes(), method)("values")


class Opened(Notes):
    """A tracker as the documents of similar libraries show it: it opens its run when it is made."""

    name = "opened"
    runs: ClassVar[list[str]] = []

    @on_main_process
    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.runs.append(run_name)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.runs.append(f"{step}: {values}")


def use_bound_methods() -> list[Any]:
    """Make trackers before the job is joined, and log to one of them afterwards."""
    answers = [Notes().summarize(), Everywhere().summarize()]
    accelerator = Accelerator(cpu=True, log_with=Opened("first"))
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0}, step=2)
    return [*answers, Notes().summarize(), Opened.runs]


def test_methods_can_be_bound_to_the_main_process():
    first, second = run_ranks(use_bound_methods, 2)
    assert first == ["summary", "summary", "summary", ["first", "2: {'loss': 1.0}"]]
    assert second == [None, "summary", None, []]


def test_a_blank_tracker_takes_everything():
    blank = BlankTracker()
    blank.start()
    blank.store_init_configuration({})
    blank.log({"a": 1}, step=1)
    blank.log_images({})
    blank.log_table("table", columns=["a"], data=[[1]])
    blank.finish()
    assert blank.tracker is None


def test_trackers_that_come_along_are_found_under_their_names():
    kinds = {"TensorBoardTracker": "tensorboard", "MLflowTracker": "mlflow", "WandBTracker": "wandb"}
    for name, kind in kinds.items():
        if importlib.util.find_spec(kind) is not None:
            assert getattr(tracking, name).name == kind
            continue
        with pytest.raises(MissingExtraError, match=rf"pip install 'accel-trainer\[{kind}\]'"):
            getattr(tracking, name)
    with pytest.raises(AttributeError, match=r"module 'accel_trainer.tracking' has no attribute 'AimTracker'"):
        tracking.AimTracker  # noqa: B018


@pytest.fixture
def registered() -> Iterator[dict[str, type]]:
    before = dict(tracking.LOGGER_TYPE_TO_CLASS)
    yield tracking.LOGGER_TYPE_TO_CLASS
    tracking.LOGGER_TYPE_TO_CLASS.clear()
    tracking.LOGGER_TYPE_TO_CLASS.update(before)


def test_a_registered_class_is_asked_for_by_its_name(registered: dict[str, type]):
    assert tracking.register_tracker_class(Notes) is Notes
    assert registered["notes"] is Notes
    accelerator = Accelerator(cpu=True, log_with="notes")
    accelerator.init_trackers("project", {"lr": 0.1}, init_kwargs=None)
    accelerator.log({"loss": 1.0}, step=0, log_kwargs=None)
    assert isinstance(accelerator.get_tracker("notes"), Notes)
    accelerator.end_training()
    assert "notes" in tracking.get_available_trackers()

    class Shadow(Notes):
        """Another class of that name."""

    with pytest.warns(UserWarning, match="Shadow takes the place of Notes as tracker 'notes'"):
        tracking.register_tracker_class(Shadow)


def test_a_class_in_the_form_of_accelerates_is_made_with_its_name_alone(registered: dict[str, type]):
    class Plain(Notes):
        """Takes no directory."""

        def __init__(self, run_name: str, **kwargs: Any) -> None:
            super().__init__()
            self.run_name, self.options = run_name, kwargs

    tracking.register_tracker_class(Plain)
    accelerator = Accelerator(cpu=True, log_with="notes")
    accelerator.init_trackers("project", init_kwargs={"notes": {"colour": "green"}})
    tracker = accelerator.get_tracker("notes")
    assert (tracker.run_name, tracker.options) == ("project", {"colour": "green"})
    accelerator.end_training()


def test_what_is_no_tracker_class_is_not_registered(registered: dict[str, type]):
    class Nameless(GeneralTracker):
        """Has no name."""

    for wrong, message in ((dict, "give a subclass of"), (Nameless, "has no name; set `name`")):
        with pytest.raises(ConfigError, match=message):
            tracking.register_tracker_class(wrong)  # type: ignore[arg-type]
    assert "notes" not in registered
