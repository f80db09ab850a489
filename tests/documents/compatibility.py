"""The tables of docs/compatibility.md, from the tests: `python -m tests.documents.compatibility` writes them anew.

A row is a test of tests/conformance, a column a layout that it runs on: the parameters of the test say which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.conformance import (
    test_chunked_loss,
    test_conformance,
    test_features,
    test_several,
    test_techniques,
    test_windows,
)
from tests.conformance.test_features import Feature
from tests.conformance.test_techniques import Technique
from tests.odd import THINGS
from tests.odd.loop import WHOLE
from tests.release.floors import PROJECT, floors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
MODULES = (test_conformance, test_several, test_windows, test_chunked_loss)
LAYOUTS = tuple(test_conformance.LAYOUTS)
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _values(test: Callable[..., Any], name: str) -> Iterator[str]:
    """Yield the values that a parameter of a test takes."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
            for given in mark.args[1] if name in names else ():
                values = getattr(given, "values", given)
                yield values if isinstance(values, str) else values[names.index(name)]


def _tests(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in vars(module).items():
        if name.startswith("test_") and callable(value):
            yield name.removeprefix("test_").replace("_", " "), value


def _strategies() -> str:
    lines = [f"| what holds | {' | '.join(LAYOUTS)} |", f"|---|{':-:|' * len(LAYOUTS)}"]
    for module in MODULES:
        for sentence, test in _tests(module):
            on = {*_values(test, "layout"), *_values(test, "strategy")}
            if on:
                lines.append(f"| {sentence} | {' | '.join('✓' if name in on else '' for name in LAYOUTS)} |")
    return "\n".join(lines) + "\n"


def _states() -> str:
    test = test_conformance.test_a_state_loads_on_another_strategy_and_world_size
    pairs = set(zip(_values(test, "saved"), _values(test, "loaded"), strict=True))
    columns = [name for name in LAYOUTS if name in {loaded for _, loaded in pairs}]
    lines = [f"| saved by | {' | '.join(columns)} |", f"|---|{':-:|' * len(columns)}"]
    for saved in LAYOUTS:
        if any(saved == name for name, _ in pairs):
            lines.append(f"| {saved} | {' | '.join('✓' if (saved, name) in pairs else '' for name in columns)} |")
    return "\n".join(lines) + "\n"


def _versions() -> str:
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    names = ("TORCHES", "TRANSFORMERS")
    torches, older = (re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE)[0] for name in names)
    pythons = re.findall(r":: Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    around = re.findall(r"([\w-]+)==(\S+)", " ".join(re.findall(r"^ECOSYSTEM .*$", makefile, re.MULTILINE)))
    of_the_suite = ("torch", "transformers", "deepspeed", "numpy", "safetensors", "datasets", "evaluate")
    rows = {
        "`make test`": [f"{name} {pins[name]}" for name in of_the_suite],
        "`make test-matrix` (the Trainer's)": [f"transformers {version}" for version in older.split()],
        "`make test-torch` (the part)": [f"torch {version}" for version in torches.split()],
        "`make test-python` (the part)": [f"Python {version}" for version in pythons],
        "`make test-floors` (the part)": [" ".join(item) for item in floors("deepspeed", "examples").items()],
        "`make test-ecosystem`": [f"{name} {version}" for name, version in around],
    }
    lines = ["| tests | with |", "|---|---|"]
    return "\n".join([*lines, *(f"| {tests} | {', '.join(names)} |" for tests, names in rows.items())]) + "\n"


def _noted(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], mark: str) -> str:
    """Return a table with `mark` where nothing is refused, else the number of the refusal's words, which follow it."""
    notes: dict[str, int] = {}
    lines = [f"| | {' | '.join(columns)} |", f"|---|{':-:|' * len(columns)}"]
    for title, refusals in rows:
        cells = [str(notes.setdefault(words, len(notes) + 1)) if words else mark for words in refusals]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {words}" for words, number in notes.items())]) + "\n"


def _odd() -> str:
    def words(odd: Any, column: str) -> str:
        gap = odd.gap(column)
        return f"(neither) {gap}" if gap else odd.refusal(column)

    rows = ((odd.title, [words(odd, column) for column in WHOLE]) for odd in THINGS.values())
    return _noted(WHOLE, rows, "=")


def _asked(columns: Sequence[str], asked: Iterable[Technique | Feature]) -> str:
    return _noted(columns, ((each.title, [each.refused.get(column, "") for column in columns]) for each in asked), "✓")


_TABLES = {
    "strategies": _strategies,
    "states": _states,
    "versions": _versions,
    "odd": _odd,
    "techniques": lambda: _asked(test_techniques.COLUMNS, test_techniques.TECHNIQUES.values()),
    "features": lambda: _asked(test_features.COLUMNS, test_features.FEATURES.values()),
}


def replace_tables(text: str) -> str:
    """Return the page with its tables as the tests have them."""
    return _BLOCK.sub(lambda found: f"{found[1]}{_TABLES[found[2]]()}{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(replace_tables(PAGE.read_text()))
