"""docs/cli.md: the help of every command. `python -m tests.documents.commands_page` writes it anew."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from accel_trainer.launch.cli import COMMANDS, main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
_SUBCOMMANDS = {
    "config": ("default", "show", "update", "schema"),
    "data": ("preview",),
    "ckpt": ("list", "verify", "prune", "export"),
}
_HEAD = """\
# The command line

What each command says of itself; [Launching](launching.md) tells what to do with it. `-` and `_` in the names of
options are the same, and so are `accel-trainer` and `python -m accel_trainer`.
"""

_NEXT = "Next: [Configuration](configuration.md) · [Launching](launching.md)\n"


def _help(*words: str) -> str:
    output = io.StringIO()
    # argparse asks for the width of the terminal, and newer ones for its colors.
    width = mock.patch.dict(os.environ, {"COLUMNS": "110", "NO_COLOR": "1"})
    with width, contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return output.getvalue()


def _sections() -> Iterator[str]:
    yield _HEAD
    seen: dict[object, str] = {}
    for name, (function, _, text) in COMMANDS.items():
        yield f"## {name}\n"
        if function in seen:
            yield f"The same as [{seen[function]}](#{seen[function]}).\n"
            continue
        seen[function] = name
        if name in ("test", "explain"):
            yield f"{text[0].upper()}{text[1:]}. It takes the options of [launch](#launch).\n"
            continue
        yield f"```text\n{_help(name).rstrip()}\n```\n"
        for command in _SUBCOMMANDS.get(name, ()):
            yield f"### {name} {command}\n\n```text\n{_help(name, command).rstrip()}\n```\n"


def build_page() -> str:
    return "\n".join([*_sections(), _NEXT])


if __name__ == "__main__":
    PAGE.write_text(build_page())
