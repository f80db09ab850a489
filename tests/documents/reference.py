"""The pages of the API reference: which public name stands on which page. `make docs` writes them.

A page holds the names in `__all__` of its modules, each once: on the first page of the table that has it. mkdocstrings
puts signatures and docstrings in their place when the site is built.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"

PAGES = {
    "accelerator": ("Accelerator", ("accelerator", "optimizer", "scheduler", "local_sgd")),
    "trainer": ("Trainer and TrainingArguments", ("trainer",)),
    "plugins": ("Options in Python", ("plugins", "parallelism_config")),
    "data_loader": ("Data loaders", ("data_loader",)),
    "state": ("Process state", ("state",)),
    "launchers": ("Launchers and commands", ("launchers", "commands")),
    "big_modeling": ("Big models", ("big_modeling", "hooks")),
    "tracking": ("Trackers and logging", ("tracking", "logging")),
    "config": ("Configuration", ("config",)),
    "strategies": ("Strategies of your own", ("registry", "strategies.api", "precision")),
    "errors": ("Errors", ("errors",)),
    "utils": ("Utilities", ("utils", "")),
}
"""Title and modules below accel_trainer of each page, in the order of the site."""


def _import(module: str) -> ModuleType:
    return importlib.import_module(f"accel_trainer.{module}".rstrip("."))


def _identity(module: ModuleType, name: str) -> tuple[str, str]:
    """Return the module that defines a name and its name there; a constant stands for itself, wherever it is listed."""
    value: Any = getattr(module, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        value = inspect.unwrap(value)
        if value.__module__.startswith("accel_trainer") and "<locals>" not in value.__qualname__:
            return value.__module__, value.__qualname__
    return module.__name__, name


def public_names() -> dict[str, dict[str, list[str]]]:
    """Return, for each page, the path at which each name on it is defined, with the names that users know it by."""
    entries: dict[tuple[str, str], list[str]] = {}
    pages: dict[str, dict[str, list[str]]] = {}
    for page, (_, modules) in PAGES.items():
        pages[page] = {}
        for imported in map(_import, modules):
            for name in imported.__all__:
                defined = _identity(imported, name)
                if defined == (imported.__name__, name) and any(name in names for names in entries.values()):
                    continue  # a constant that several modules list
                if defined not in entries:
                    pages[page][".".join(defined)] = entries[defined] = [name]
                elif name not in entries[defined]:
                    entries[defined].append(name)
    return pages


def write_pages() -> None:
    """Write the pages below docs/reference/, each name as a directive of mkdocstrings."""
    FOLDER.mkdir(exist_ok=True)
    for page, entries in public_names().items():
        title, modules = PAGES[page]
        paths = ", ".join(f"`{f'accel_trainer.{module}'.rstrip('.')}`" for module in modules)
        directives = "\n".join(
            f"::: {path}\n    options:\n      heading: '{', '.join(names)}'\n      toc_label: '{names[0]}'\n"
            for path, names in entries.items()
        )
        (FOLDER / f"{page}.md").write_text(f"# {title}\n\nNames of {paths}.\n\n{directives}")
