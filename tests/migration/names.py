"""Compares accelerate's recorded public names with ours, and writes docs/accelerate_names.md from the result.

Of docs/migration.md it writes three tables: modules, and accelerate's own tests and scripts that do not hold here.

    python -m tests.migration.names      # make names

`accelerate_1_15.json` holds the names, parameters, members and methods of release 1.15.0 by module; they are facts of
that release. Two files named `differences.json` hold our reasons, by `module.name` or `module.*`. That of
`accel_trainer/contrib/check` has "different" for what exists and is not the same, "absent" for what does not. That of
this folder has "lacking", the parameters and members that are covered by a "different"; "behaviour", those tests of
accelerate 1.15.0 that pass there and not here, with the reason, and a test of ours that shows it where there is one;
"scripts", the checks of test scripts inside accelerate that deviate, by numbers of processes
(test_accelerate_scripts.py runs them). Names that refuse to be imported have a reason in `unsupported.py`; meanings
that change are those of `contrib/check/changes.py`.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_trainer.contrib.check.changes import CHANGES
from accel_trainer.contrib.check.script import differences

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "accelerate_names.md"
RECORDED: dict[str, dict[str, dict[str, Any]]] = json.loads((HERE / "accelerate_1_15.json").read_text())
CALLS: dict[str, dict[str, Any]] = json.loads((HERE / "calls_1_15.json").read_text())
DIFFERENCES: dict[str, Any] = differences() | json.loads((HERE / "differences.json").read_text())
TABLES = {"changes": "migration.md", "modules": "missing.md", "behaviour": "missing.md", "scripts": "missing.md"}
"""Pages with a part between two comments of these names."""


@dataclass(frozen=True)
class Compared:
    """One of accelerate's names here."""

    module: str
    name: str
    status: str
    """"same", "different", "absent", or "open": neither the same, nor with a reason."""
    reason: str = ""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}".removeprefix(".")


def reason_of(kind: str, path: str) -> str:
    """Return the reason for a path, or for its whole module."""
    known: dict[str, str] = DIFFERENCES[kind]
    module = path.rpartition(".")[0]
    while path not in known and module:
        if f"{module}.*" in known:
            return known[f"{module}.*"]
        module = module.rpartition(".")[0]
    return known.get(path, "")


def described(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the description of a name from the module in which it is defined."""
    return RECORDED.get(entry["from"], {}).get(name, {}) if "from" in entry else entry


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def missing_parameters(function: Any, names: list[str] | None) -> list[str]:
    """Return those of accelerate's parameters that ours cannot be called with; `*` and `**` do not count."""
    own = parameters_of(function)
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in own.values()):
        return []
    return [name for name in names or [] if not name.startswith("*") and name not in own]


def gaps(found: Any, entry: dict[str, Any]) -> list[str]:
    """Return parameters, methods and members that accelerate's has and ours has not."""
    if entry.get("kind") == "enum" and isinstance(found, type) and issubclass(found, enum.Enum):
        return [f"member {name}" for name in entry["members"] if name not in found.__members__]
    lacking = [f"parameter {name}" for name in missing_parameters(found, entry.get("parameters"))]
    for method, names in entry.get("methods", {}).items():
        own = getattr(found, method, None)
        if own is None:
            lacking.append(f"{method}()")
        else:
            lacking += [f"{method}({name}=)" for name in missing_parameters(own, names)]
    own_fields = getattr(found, "__dataclass_fields__", ())
    properties = [name for name in entry.get("properties", []) if not hasattr(found, name) and name not in own_fields]
    return lacking + [f"property {name}" for name in properties]


def compare(module: str, name: str, entry: dict[str, Any]) -> Compared:
    path = f"{module}.{name}".removeprefix(".")
    try:
        found = getattr(importlib.import_module(f"accel_trainer.{module}".removesuffix(".")), name)
    except ImportError as error:
        refusal = re.match(rf"\S+ has no '{name}': (.*)", str(error))
        reason = reason_of("absent", path) or (refusal[1] if refusal else "")
        return Compared(module, name, "absent" if reason else "open", reason)
    except AttributeError:
        reason = reason_of("absent", path)
        return Compared(module, name, "absent" if reason else "open", reason)
    lacking = gaps(found, described(entry, name))
    home = f"{entry.get('from', module)}.{name}"
    reason = reason_of("different", path) or reason_of("different", home)
    covered = DIFFERENCES["lacking"].get(home, ())
    if reason and not (lacking := [each for each in lacking if each not in covered]):
        return Compared(module, name, "different", reason)
    return Compared(module, name, "open" if lacking else "same", ", ".join(lacking))


def all_compared() -> Iterator[Compared]:
    for module, names in RECORDED.items():
        for name, entry in names.items():
            yield compare(module, name, entry)


def render(compared: list[Compared]) -> str:
    """Return the page."""
    counts = {status: sum(each.status == status for each in compared) for status in ("same", "different", "absent")}
    lines = [
        "# accelerate's names, one by one",
        "",
        "Every public name of accelerate 1.15 at its path there, compared with ours by its parameters, methods",
        "and members. The page is written by `make names`, and a test compares it with the code.",
        "",
        f"{counts['same']} are the same, {counts['different']} differ on purpose, {counts['absent']} are not here.",
        "What differs in behaviour is on the page [Coming from accelerate](migration.md).",
    ]
    for module in RECORDED:
        own = [each for each in compared if each.module == module]
        lines += ["", f"## accelerate{'.' * bool(module)}{module}", ""]
        same = [f"`{each.name}`" for each in own if each.status == "same"]
        if same:
            lines += [f"Same: {', '.join(same)}.", ""]
        rest = [each for each in own if each.status != "same"]
        if rest:
            lines += ["| name | here | reason |", "|---|---|---|"]
            by_reason: dict[tuple[str, str], list[str]] = {}
            for each in rest:
                by_reason.setdefault((each.status, each.reason), []).append(f"`{each.name}`")
            words = {"different": "different on purpose", "absent": "not here", "open": "open"}
            lines += [
                f"| {', '.join(names)} | {words[status]} | {reason.replace('|', '/')} |"
                for (status, reason), names in by_reason.items()
            ]
        while lines[-1] == "":
            lines.pop()
    for title, kind, head in (
        ("Attributes of objects that are not here", "attributes", "attribute"),
        ("Other defaults", "defaults", "argument"),
    ):
        grouped: dict[str, list[str]] = {}
        for path, reason in DIFFERENCES[kind].items():
            grouped.setdefault(reason, []).append(f"`{path.partition('.')[2]}`")
        lines += ["", f"## {title}", "", f"| {head} | reason |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {reason} |" for reason, names in grouped.items()]
    ways = "[Coming from accelerate or transformers](migration.md) · [What is refused, and what is missing](missing.md)"
    lines += ["", f"Next: {ways}"]
    return "\n".join(lines) + "\n"


def render_changes() -> str:
    """Return the table of meanings that change, as `accel-trainer check` knows them."""
    lines = ["| call | what differs | instead |", "|---|---|---|"]
    for each in CHANGES:
        name, _, value = each.keyword.partition("=")
        argument = f"{name}={value or '...'}" if name else ""
        ways = f"{each.instead}; or `compat`" if each.by_compat else each.instead
        lines.append(f"| `{each.call}({argument})` | {each.words} | {ways} |")
    return "\n".join(lines)


def render_modules(compared: list[Compared]) -> str:
    """Return the table of accelerate's modules: how many names are the same, different on purpose, and not here."""
    lines = ["| module | the same | different on purpose | not here |", "|---|---|---|---|"]
    for top in dict.fromkeys(module.partition(".")[0] for module in RECORDED):
        # Names that a package shows again count once.
        own = {each.name: each.status for each in compared if each.module.partition(".")[0] == top}
        counts = [list(own.values()).count(status) or "" for status in ("same", "different", "absent")]
        lines.append(f"| `{f'accelerate.{top}'.removesuffix('.')}` | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def render_behaviour() -> str:
    """Return the table of accelerate's own tests that do not hold here, with the reasons."""
    lines = ["| test of accelerate 1.15 | why it does not hold here |", "|---|---|"]
    for entry in DIFFERENCES["behaviour"]:
        names = ", ".join(f"`{name.rpartition('::')[2]}`" for name in entry["theirs"])
        lines.append(f"| {names} | {entry['reason']} |")
    return "\n".join(lines)


def render_scripts() -> str:
    """Return the table of what deviates in the test scripts inside accelerate, with the reasons."""
    lines = ["| script of accelerate 1.15 | processes | checks | why they do not hold here |", "|---|---|---|---|"]
    for entry in DIFFERENCES["scripts"]:
        checks = ", ".join(f"`{check}`" for check in entry["checks"])
        lines.append(
            f"| `{entry['script']}` | {' and '.join(map(str, entry['processes']))} | {checks} | {entry['reason']} |"
        )
    return "\n".join(lines)


def with_tables(compared: list[Compared]) -> dict[Path, str]:
    """Return the pages of `TABLES` with their tables written anew."""
    pages = {name: PAGE.with_name(name).read_text() for name in dict.fromkeys(TABLES.values())}
    tables = (render_changes(), render_modules(compared), render_behaviour(), render_scripts())
    for (name, file), table in zip(TABLES.items(), tables, strict=True):
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        head, _, rest = pages[file].partition(begin)
        pages[file] = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return {PAGE.with_name(file): text for file, text in pages.items()}


if __name__ == "__main__":
    result = list(all_compared())
    PAGE.write_text(render(result))
    for page, text in with_tables(result).items():
        page.write_text(text)
    for each in result:
        if each.status == "open":
            print(f"open: {each.path}: {each.reason or 'not here, and no reason'}")
