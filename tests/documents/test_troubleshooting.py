"""The errors of docs/troubleshooting.md are said as it quotes them, by whom it says."""

from __future__ import annotations

import ast
import importlib.util
import mmap
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ENTRIES = re.findall(r"^### `(.*)`\n\n\*([\w ,]+)", PAGE, re.MULTILINE)
SOURCES = {
    "accel_trainer": ("accel_trainer", ("**/*.py", "integrations/**/*.py")),
    "transformers": ("transformers", ("trainer.py", "training_args.py", "tokenization_utils_base.py")),
    "DeepSpeed": ("deepspeed", ("ops/op_builder/builder.py",)),
    "torch": (
        "torch",
        ("cuda/__init__.py", "amp/grad_scaler.py", "distributed/distributed_c10d.py", "utils/data/dataloader.py"),
    ),
}
NOT_IN_A_CPU_BUILD = ("CUDA out of memory", "Watchdog caught collective operation timeout")
GAP = "\0"


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent


def texts_of(file: Path) -> Iterator[str]:
    """The strings of a file, literals in a row joined, with a gap for each value that is put in."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def said_by(package: str) -> str:
    name, patterns = SOURCES[package]
    folder = folder_of(name)
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    return "\n".join(text.replace("`", "") for file in files for text in texts_of(file))


def is_compiled_in(text: str) -> bool:
    for file in (folder_of("torch") / "lib").glob("libtorch_*.so"):
        with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if mapped.find(text.encode()) >= 0:
                return True
    return False


def test_the_page_has_the_errors_that_people_meet_most():
    assert len(ENTRIES) == len(re.findall("^### ", PAGE, re.MULTILINE)) >= 20


@pytest.mark.parametrize(("quoted", "speaker"), ENTRIES, ids=[quoted[:40] for quoted, _ in ENTRIES])
def test_an_error_is_quoted_as_it_is_said(quoted: str, speaker: str):
    if quoted.startswith(NOT_IN_A_CPU_BUILD):
        pytest.skip("said by a build for GPUs")
    package = speaker.split(",")[0]
    pieces = [piece.strip(" ,") for piece in re.split(r"\.\.\.|\d+", quoted)]
    longest = max(pieces, key=len)
    if package == "torch" and longest not in said_by(package):
        assert is_compiled_in(longest)
        return
    # What stands between two gaps of the quotation is one piece of one message, with gaps of its own or without.
    pattern = ".*?".join(re.escape(piece) for piece in pieces if piece)
    assert re.search(pattern, said_by(package)), f"{package} says nothing like {quoted!r}"
