"""The tables of docs/configuration.md, from the schema. `python -m tests.documents.options_table` writes them anew."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Any

from accel_trainer.config import field_specs, flag_name
from accel_trainer.config.description import documentation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
_BLOCK = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    if isinstance(value, StrEnum) or not isinstance(value, str):
        return str(value)
    return value or "''"


def build_tables() -> dict[str, str]:
    """Return a Markdown table for each section of the schema; `top` holds the options outside of sections."""
    described = documentation()
    rows: dict[str, list[str]] = {}
    for path, spec in field_specs().items():
        section = path.rpartition(".")[0] or "top"
        flag = "" if path == "deepspeed" else f"`{flag_name(path)}`"
        meaning = described[path].replace("|", "\\|")
        rows.setdefault(section, []).append(f"| `{path}` | `{_as_yaml(spec.default)}` | {flag} | {meaning} |")
    head = ["| option | default | flag | meaning |", "|---|---|---|---|"]
    return {section: "\n".join([*head, *lines]) + "\n" for section, lines in rows.items()}


def replace_tables(text: str) -> str:
    """Return the page with its tables as the schema has them."""
    tables = build_tables()
    return _BLOCK.sub(lambda found: f"{found[1]}{tables[found[2]]}{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(replace_tables(PAGE.read_text()))
