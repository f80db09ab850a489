"""Import paths of similar libraries: a script that changes its import line finds our modules under them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ALIASES = {
    "": (
        "commands:launch.entry_points hooks:big_models inference:unsupported launchers:launch.notebook "
        "local_sgd:accelerator.local_sgd memory_utils:utils optimizer:accelerator.accelerated_optimizer "
        "parallelism_config:plugins.parallelism scheduler:accelerator.accelerated_scheduler "
        "state:accelerator.shared_state"
    ),
    "commands": (
        "accelerate_cli:launch.cli config:launch.entry_points config.config_args:launch.entry_points "
        "config.default:launch.entry_points env:launch.entry_points estimate:contrib.estimate "
        "launch:launch.entry_points merge:launch.entry_points test:launch.entry_points to_fsdp2:contrib.deepspeed_fsdp"
    ),
    "utils": (
        "ao:utils constants:utils dataclasses:utils deepspeed:utils environment:utils fsdp_utils:utils imports:utils "
        "memory:utils modeling:utils offload:utils operations:utils other:utils random:utils versions:utils"
    ),
}
"""By package: `NAME:PATH` of each module."""

ALIASES = {
    f"{package}.{name}".removeprefix("."): path
    for package, aliases in _ALIASES.items()
    for name, _, path in (alias.partition(":") for alias in aliases.split())
}
"""Paths of our modules by the names that similar libraries give them, both below `accel_trainer`."""

_PACKAGE = __name__.rpartition(".")[0]


class _AliasFinder(MetaPathFinder, Loader):
    """Finds under an alias the very module that it names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == _PACKAGE and name in ALIASES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system: `exec_module` puts another one in its place."""

    def exec_module(self, module: ModuleType) -> None:
        alias = module.__name__
        # The import system returns the entry of sys.modules when the loader is done, not the module that it made.
        sys.modules[alias] = importlib.import_module(f"{_PACKAGE}.{ALIASES[alias.removeprefix(f'{_PACKAGE}.')]}")


def find_aliases() -> None:
    """Let aliases be imported; behind all other finders, so that it costs nothing where a module is found."""
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(_AliasFinder())
