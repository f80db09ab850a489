"""The base class of experiment trackers, the package's and a user's own, and the masking of secrets."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from accel_trainer.errors import ConfigError
from accel_trainer.registry import OWN_TRACKERS, TRACKER_CLASSES, installed_trackers, load_tracker, register_tracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS", "BlankTracker", "GeneralTracker", "get_available_trackers", "is_secret", "mask_secrets",
    "on_main_process", "redact", "register_tracker", "register_tracker_class", "secrets_of",
]  # fmt: skip

MASK = "***"

_SECRET = re.compile(r"(^|_)(token|secret|passw(or)?d|credentials?|apikey|api_?keys)$|_key$", re.IGNORECASE)
"""The last words of a name: `num_tokens` and `tokenizer` stay readable."""
_SPECIAL_TOKEN = re.compile(
    r"(pad|bos|eos|unk|cls|sep|mask|image|audio|video|start|end|special|think)_token$", re.IGNORECASE
)
"""Those of a tokenizer, which are no secrets."""
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
# `--hub_token hf_...`, `hub_token='hf_...'`, `"api_key": "..."`
_NAMED_VALUE = re.compile(
    r"""(?P<name>(?<![\w-])-{0,2}[\w-]*(?:token|secret|passw(?:or)?d|credentials?|key))"""
    r"""(?P<between>["']?\s?=\s?|["']\s?:\s?|\s+(?!-))"""
    r"""(?P<value>"[^"]*"|'[^']*'|(?!None\b|null\b)[^\s"',;&}\])]+)""",
    re.IGNORECASE,
)


def __getattr__(name: str) -> Any:
    # The package's trackers by class name, imported at first use: their libraries are optional.
    if name not in OWN_TRACKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load_tracker(OWN_TRACKERS[name])


class GeneralTracker(ABC):
    """Writes the logged values of a run to one place.

    The Accelerator calls, on the main process: `start`, `store_init_configuration` once, `log` for each set of values,
    `finish`. An exception in one of them is a warning and does not stop the training.
    """

    name: ClassVar[str]
    """Its name in `log_with`, `get_tracker`, `init_kwargs` and `log_kwargs`."""
    requires_logging_directory: ClassVar[bool] = False
    """Whether it writes files, and needs `Accelerator(project_dir=...)`."""
    main_process_only: ClassVar[bool] = True
    """False: every rank has one, and logs its own values."""

    def __init__(self, project_name: str = "", logging_dir: str | Path | None = None, /, **kwargs: Any) -> None:
        """Keep the name of the run, where its files go, and this entry of `init_kwargs`; `start` opens the run."""
        self.project_name = project_name
        # Path("gs://bucket") would be the folder "gs:/bucket" of this machine.
        is_address = isinstance(logging_dir, str) and "://" in logging_dir
        self.logging_dir = logging_dir if logging_dir is None or is_address else Path(logging_dir)
        """A Path; an address such as gs://bucket/logs stays a text."""
        self.kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The object of the library that is written with."""
        return self

    def start(self) -> None:  # noqa: B027  # optional
        """Open the run."""

    @abstractmethod
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, once, after `start`."""

    @abstractmethod
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store values of a step: numbers, texts, and other types that the library takes."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store images of a step by name: arrays (height, width, channels); a ConfigError where it cannot."""
        raise ConfigError(f"tracker {self.name!r} stores no images; log them with another one of log_with")

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Store a table of a step, columns and rows or a pandas dataframe; a ConfigError where it cannot."""
        raise ConfigError(f"tracker {self.name!r} stores no tables; log them with another one of log_with")

    def finish(self) -> None:  # noqa: B027  # optional
        """Close the run; called by `end_training`."""


LOGGER_TYPE_TO_CLASS = TRACKER_CLASSES
"""Tracker classes that `register_tracker_class` has taken, by name."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Let `log_with` name a GeneralTracker by its `name`; may be a decorator. A ConfigError for other classes."""
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigError(
            f"register_tracker_class got {tracker_class!r}; give a subclass of accel_trainer.tracking.GeneralTracker"
        )
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str):
        raise ConfigError(f"tracker class {tracker_class.__name__} has no name; set `name`, under which log_with asks")
    if TRACKER_CLASSES.get(name, tracker_class) is not tracker_class:
        warnings.warn(
            f"{tracker_class.__name__} takes the place of {TRACKER_CLASSES[name].__name__} as tracker {name!r}",
            stacklevel=2,
        )
    TRACKER_CLASSES[name] = tracker_class
    return tracker_class


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose package is installed, sorted."""
    return list(installed_trackers())


class BlankTracker(GeneralTracker):
    """Stands for a tracker on ranks that do not log, so that a script needs no branch."""

    name = "blank"

    @property
    def tracker(self) -> None:
        """None: there is nothing to write with."""
        return None

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    store_init_configuration = log_images = log_table = log


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a tracker's method so that it runs on rank 0, or everywhere with `main_process_only = False`.

    The Accelerator calls trackers on the right ranks by itself; this is for methods that a script calls, `__init__`
    before there is an Accelerator included.
    """

    @functools.wraps(function)
    def run(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        from accel_trainer.runtime.process import find_rank  # imports torch

        if not self.main_process_only or find_rank() == 0:
            return function(self, *args, **kwargs)
        return None

    return run


def is_secret(name: str) -> bool:
    """Whether a name is that of a secret: `hub_token`, `WANDB_API_KEY`, `--client-secret`, but not `pad_token`."""
    name = re.sub(r"[-./]|(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))  # `db.password`, `accessToken`
    return bool(_SECRET.search(name)) and not _SPECIAL_TOKEN.search(name)


def mask_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, nested ones too, with those of keys such as `api_key` as `***`; texts as of `redact`."""
    return {key: MASK if _is_masked(str(key), value) else _mask(value) for key, value in values.items()}


def _is_masked(name: str, value: Any) -> bool:
    if value is None or isinstance(value, Mapping | bool):
        return False
    is_count = isinstance(value, int | float) and name.lower().endswith("token")  # `num_token`
    return is_secret(name) and not is_count


def _mask(value: Any) -> Any:
    if isinstance(value, Mapping):
        return mask_secrets(value)
    if type(value) in (list, tuple):
        return type(value)(map(_mask, value))
    if _has_options(value):
        return mask_secrets(_options_of(value))
    return redact(value) if type(value) is str else value


def _has_options(value: Any) -> bool:
    """Whether a value is a script's arguments: a Namespace, or a dataclass."""
    return isinstance(value, argparse.Namespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _options_of(value: Any) -> dict[str, Any]:
    """Return a script's arguments by name; a dataclass may have some of them in slots."""
    names = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in names if hasattr(value, name)}}


def secrets_of(values: Mapping[str, Any]) -> set[str]:
    """Return the texts that `mask_secrets` hides."""
    found: set[str] = set()
    for key, value in values.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Mapping) or _has_options(each):
                found |= secrets_of(each if isinstance(each, Mapping) else _options_of(each))
            elif isinstance(each, str) and each and is_secret(str(key)):
                found.add(each)
    return found


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """Return a text without secrets: those given, values behind a secret's name, and credentials in addresses."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _CREDENTIALS_IN_URL.sub(f"{MASK}@", _NAMED_VALUE.sub(_mask_named, text))


def _mask_named(found: re.Match[str]) -> str:
    name, between = found["name"], found["between"]
    if not is_secret(name) or between.isspace() and not name.startswith("--"):
        return found[0]
    return f"{name}{between}{MASK}"
