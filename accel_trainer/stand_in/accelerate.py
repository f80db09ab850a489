"""`accelerate` in programs that are started with `--as_accelerate`: its names and modules are those of accel_trainer.

Their PYTHONPATH begins with this folder, in which importlib also finds the metadata of the release whose names we have.
Processes that they start find it there, too, and a `sitecustomize` of the user's is not touched.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import accel_trainer

__version__ = "1.15.0"
__all__ = [*vars(accel_trainer)["__all__"]]
__path__: list[str] = []  # a package, whose modules the finder below knows


class _StandInFinder(MetaPathFinder, Loader):
    """Finds our modules under accelerate's names; behind all other finders, names found nowhere are explained."""

    def __init__(self) -> None:
        self._names = {"accel_trainer": __name__}
        """By module of ours: accelerate's name, by which it was imported first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package == __name__:
            importlib.util.find_spec(f"accel_trainer.{name}")  # comes back to us where there is none
            return ModuleSpec(fullname, self)
        if package != "accel_trainer":
            return None
        owner, _, name = fullname.rpartition(".")
        # With `fullname` as its name, `from accelerate import NAME` would lose the text: importlib swallows that one.
        raise ModuleNotFoundError(_explain(self._names.get(owner, owner), name), name=__name__)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system: `exec_module` puts ours in its place."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        ours = importlib.import_module(f"accel_trainer{name.removeprefix(__name__)}")
        self._names.setdefault(ours.__name__, name)
        # `from accelerate.state import NAME` looks for a module NAME in packages only, and hears from us why not.
        vars(ours).setdefault("__path__", [])
        sys.modules[name] = ours


def _explain(owner: str, name: str) -> str:
    return (
        f"{owner} has no {name!r} here: with --as_accelerate it is accel_trainer, which does not have it. The page "
        "accelerate_names.md of its documentation says what it has, and what to write instead of the rest; without "
        "--as_accelerate the program runs on accelerate itself"
    )


def __getattr__(name: str) -> Any:
    try:
        return getattr(accel_trainer, name)
    except AttributeError:
        raise AttributeError(_explain(__name__, name)) from None


if __name__ == "accelerate":  # and no module of our package, by which tools find it
    sys.meta_path.append(_StandInFinder())
