"""Our objects by the names that scripts have for them, their attributes, and why one is not here."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import accel_trainer
from accel_trainer.errors import did_you_mean

DIFFERENCES_FILE = Path(__file__).with_name("differences.json")
PEERS = ("accelerate", "transformers")
_NOT_PUBLIC = {
    "test_utils.*": "they are for accelerate's own tests; a library whose tests use them installs accelerate for that"
}


@functools.cache
def differences() -> dict[str, dict[str, str]]:
    """Return our reasons: by `absent`, `different` or `attributes`, then by `module.name` of accelerate."""
    content: dict[str, dict[str, str]] = json.loads(DIFFERENCES_FILE.read_text(encoding="utf-8"))
    return content


@functools.cache
def trainer_names() -> frozenset[str]:
    """Return the names of transformers that have a class of ours in their place."""
    names = vars(accel_trainer)["__all__"]  # its stub has none
    return frozenset(name for name in names if name.endswith(("Trainer", "TrainingArguments")))


def belongs_here(origin: str) -> bool:
    """Whether a dotted name of a script, `accelerate.utils.set_seed`, is of a package that ours takes the place of."""
    root, _, rest = origin.partition(".")
    if root == "transformers":
        return rest.rpartition(".")[2] in trainer_names()
    return root in ("accelerate", "accel_trainer")


@dataclass(frozen=True, slots=True)
class Missing:
    """A name that is not here, and why."""

    reason: str


@functools.cache
def find(origin: str) -> Any:
    """Return our object for a dotted name, or a `Missing`."""
    root, _, rest = origin.partition(".")
    if root == "transformers":
        return getattr(accel_trainer, rest.rpartition(".")[2])
    found: Any = accel_trainer
    parts = rest.split(".") if rest else []
    for index, name in enumerate(parts):
        path = ".".join(parts[: index + 1])
        try:
            found = getattr(found, name)
            continue
        except (AttributeError, ImportError) as error:
            hint = str(error).partition(f"has no {name!r}: ")[2]
        try:
            found = importlib.import_module(f"accel_trainer.{path}")
        except ImportError as error:
            if not (error.name or "").startswith("accel_trainer"):
                return object()  # a module of ours, for a library that this environment lacks
            return Missing(hint or reason_of(path) or _not_known(found, name))
    return found


def reason_of(path: str) -> str:
    """Return why a name of accelerate's is not here, by itself or with its whole module."""
    known = differences()["absent"] | _NOT_PUBLIC
    if path in known:
        return known[path]
    while path and f"{path}.*" not in known:
        path = path.rpartition(".")[0]
    return known.get(f"{path}.*", "")


def _not_known(owner: Any, name: str) -> str:
    names = dir(owner) if isinstance(owner, ModuleType) else attributes_of(owner)
    return f"there is no such name here{did_you_mean(name, names)}"


@functools.cache
def attributes_of(cls: Any) -> frozenset[str]:
    """Return the attributes of a class and of its instances, those that its methods assign included."""
    names = set(dir(cls))
    for base in getattr(cls, "__mro__", ()):
        names |= set(getattr(base, "__annotations__", ()))
        if base.__module__.partition(".")[0] in ("accel_trainer", *PEERS):
            names |= _assigned(base)
    return frozenset(names)


def _assigned(cls: type) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # made at run time
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def takes_any(cls: Any) -> bool:
    """Whether attributes of an object are those of another one, which its class does not show."""
    return any("__getattr__" in vars(base) for base in getattr(cls, "__mro__", ()))


def parameters_of(function: Any, *, is_method: bool = False) -> list[inspect.Parameter] | None:
    """Return the parameters of a call, without `self`; None where Python does not know them."""
    try:
        own = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    return own[1:] if is_method and own else own
