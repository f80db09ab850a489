"""Environment variables as scripts and their tests read, set and restore them. Nothing of the package needs these."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from accel_trainer.errors import ConfigError
from accel_trainer.logging import get_logger

T = TypeVar("T")

logger = get_logger(__name__)

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
_PREFIXES = ("ACCELERATE_", "ACCEL_TRAINER_")
_FORBIDDEN = frozenset(";\n<> ")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 or 0 for a word of truth; with `to_bool`, True or False.

    Raises:
        ConfigError: another word.
    """
    word = value.lower()
    if word not in _TRUE + _FALSE:
        raise ConfigError(f"invalid truth value {value!r}; expected one of {', '.join(_TRUE + _FALSE)}")
    return word in _TRUE if to_bool else int(word in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the truth of a variable, or `default` where it is not set.

    Raises:
        ConfigError: its text is no word of truth.
    """
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of a variable, or `default` where it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first value of these variables that is 0 or more, or `default`."""
    values = (int(os.environ.get(key, -1)) for key in env_keys)
    return next((value for value in values if value >= 0), default)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the names that this process has imported."""
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return lines `NAME=value` for a host file; a value that would break one is left out with a warning."""
    lines = []
    for name, value in current_env.items():
        if name and value and not _FORBIDDEN.intersection(name + value):
            lines.append(f"{name}={value}\n")
        else:
            logger.warning("%s=%s is left out: it is empty, or holds a character of %r", name, value, ";\\n<> ")
    return lines


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables for a block, and put them back as they were behind it. Names are written in capitals."""
    changed = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        _restore(before)


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment for a block, and put it back as it was behind it."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a test, or each test of a class and its subclasses, so that launchers' variables are restored behind it.

    Variables that begin with `ACCELERATE_` or `ACCEL_TRAINER_` are.
    """
    if not isinstance(func_or_cls, type):
        return _purge_after(func_or_cls)
    _purge_after_tests(func_or_cls)
    inherited = func_or_cls.__init_subclass__

    def decorate_subclass(cls: type, **options: Any) -> None:
        inherited(**options)
        _purge_after_tests(cls)

    func_or_cls.__init_subclass__ = classmethod(decorate_subclass)  # type: ignore[assignment]
    return func_or_cls


def _purge_after_tests(tests: type) -> None:
    for name in dir(tests):
        method = getattr(tests, name)
        if name.startswith("test") and callable(method) and not hasattr(method, "_purges_environment"):
            setattr(tests, name, _purge_after(method))


def _purge_after(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
        try:
            return function(*args, **kwargs)
        finally:
            _restore({name: before.get(name) for name in {*os.environ, *before} if name.startswith(_PREFIXES)})

    run._purges_environment = True  # type: ignore[attr-defined]
    return run


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
