"""Names of accelerate in the sources of libraries that import it, and what each is here.

    python -m tests.migration.imported_names LIBRARY...    # records those of installed libraries

`imported_names.json` holds them by library, at the release that is recorded with them: `imported` for names in import
statements, `used` for what is read as an attribute (`accelerate.hooks.CpuOffload` after `import accelerate`).
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from tests.migration.names import RECORDED, reason_of

DATA = Path(__file__).resolve().parent / "imported_names.json"
_IMPORT = re.compile(r"^\s*(from accelerate\b|import .*\baccelerate\b)", re.MULTILINE)
LIBRARIES: dict[str, dict[str, Any]] = json.loads(DATA.read_text()) if DATA.is_file() else {}


def is_of_accelerate(path: str) -> bool:
    return path.partition(".")[0] == "accelerate"


def imported_by(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield a path and the name under which a file knows it, of each import of accelerate."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level and is_of_accelerate(node.module):
            yield from ((f"{node.module}.{each.name}", each.asname or each.name) for each in node.names)
        if isinstance(node, ast.Import):
            for each in node.names:
                if is_of_accelerate(each.name):
                    yield each.name, each.asname or "accelerate"


def path_of(node: ast.AST, known: dict[str, str]) -> str | None:
    """Return the path that an attribute of an imported name stands for."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := path_of(node.value, known)):
        return f"{owner}.{node.attr}"
    return None


def is_in_accelerate(path: str) -> bool:
    """Whether 1.15 has a member of a class; libraries ask older releases for some that it has no more."""
    owner, _, member = path.rpartition(".")
    module, _, name = owner.removeprefix("accelerate.").rpartition(".")
    entry = RECORDED.get(module, {}).get(name, {})
    entry = RECORDED[entry["from"]].get(name, {}) if "from" in entry else entry
    members = [*entry.get("methods", ()), *entry.get("properties", ()), *entry.get("members", ())]
    return not members or member.startswith("_") or member in members


def names_in(sources: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of accelerate that files import, and what they read of these."""
    imported, used = set(), set()
    for source in sources:
        if not _IMPORT.search(source):
            continue
        tree = ast.parse(source)
        pairs = list(imported_by(tree))
        known = {name: "accelerate" if name == "accelerate" else path for path, name in pairs}
        imported.update(path for path, _ in pairs)
        used.update(
            path for node in ast.walk(tree) if isinstance(node, ast.Attribute) if (path := path_of(node, known))
        )
    used = {path for path in used if "__" not in path and is_in_accelerate(path)}
    return {"imported": sorted(imported - {"accelerate"}), "used": sorted(used)}


def record(library: str) -> dict[str, Any]:
    """Return the release of an installed library, and its names of accelerate."""
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        raise SystemExit(f"{library} is not installed")
    files = sorted(Path(found.origin).parent.rglob("*.py"))
    return {"version": importlib.metadata.version(library), **names_in(file.read_text() for file in files)}


def lacking(library: str) -> list[str]:
    """Return the names of a library that are not here, at accelerate's path, and have no reason."""
    names = LIBRARIES[library]
    paths = [*((path, is_importable(path)) for path in names["imported"])]
    paths += [(path, is_attribute(path)) for path in names["used"]]
    return [path for path, is_here in paths if not is_here and not reason_of("absent", path.partition(".")[2])]


def is_importable(path: str) -> bool:
    """Whether `from MODULE import NAME` finds a name, or `import MODULE` a module, in accel_trainer."""
    module, _, name = f"accel_trainer.{path.partition('.')[2]}".rpartition(".")
    try:
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def is_attribute(path: str) -> bool:
    """Whether a path is there for one who has imported accel_trainer, and nothing below."""
    try:
        reduce(getattr, path.split(".")[1:], importlib.import_module("accel_trainer"))
    except (AttributeError, ImportError):
        return False
    return True


if __name__ == "__main__":
    DATA.write_text(json.dumps({**LIBRARIES, **{name: record(name) for name in sys.argv[1:]}}, indent=1) + "\n")
