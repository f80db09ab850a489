"""`accel-trainer check PATH ...`: a verdict on each line of scripts and configurations that concerns this package."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from accel_trainer.config import read_file, resolve
from accel_trainer.config.config_source import FileProblemsError
from accel_trainer.contrib.check.changes import Verdict
from accel_trainer.contrib.check.script import Finding, Script
from accel_trainer.errors import ConfigError
from accel_trainer.launch.cli import command_parser
from accel_trainer.launch.flags import parse_options

_SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".json")
_IS_CONFIG = re.compile(r"\b(distributed_type|compute_environment|fsdp_version|zero_optimization|mixed_precision)\b")
_LAUNCH = re.compile(r"\baccelerate\s+launch\b(?P<words>(?:[^\n\\]|\\\n)*)")


def check_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer check`."""
    parser = command_parser(
        "check",
        "Say what of scripts and configurations works as it is, what changes meaning, and what to write instead. They "
        "are read, and not run. Exit code 1 where a line changes or has to be replaced.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a script, a configuration, or a folder of them")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
    parser.add_argument("--problems", action="store_true", help="leave out what works, and import lines")
    parser.add_argument(
        "--compat", action="store_true", help="the run will have compat: what it restores does not change"
    )
    return parser


def run_check(words: Sequence[str]) -> int:
    """Run `accel-trainer check`; return 1 where a line changes or has to be replaced, else 0."""
    arguments = check_parser().parse_args(words)
    wanted = (Verdict.CHANGES, Verdict.REPLACE) if arguments.problems else tuple(Verdict)
    findings = [each for path in arguments.paths for each in check_path(Path(path), compat=arguments.compat)]
    shown = [each for each in findings if each.verdict in wanted]
    if arguments.json:
        print(json.dumps([asdict(each) for each in shown], indent=2))
    else:
        for each in shown:
            print(each)
        counts = Counter(each.verdict for each in findings)
        print(", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict), file=sys.stderr)
    return int(any(each.verdict in (Verdict.CHANGES, Verdict.REPLACE) for each in findings))


def check_path(path: Path, *, compat: bool = False) -> Iterator[Finding]:
    """Yield the verdicts on a file, or on those of a folder that have to do with this package.

    Raises:
        ConfigError: the path is not there, or not a file that can be read.
    """
    if path.is_dir():
        for each in sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file()):
            text = each.read_text(encoding="utf-8-sig", errors="replace")
            if each.suffix in (".py", ".sh") or _IS_CONFIG.search(text):
                yield from _check_file(each, text, compat=compat)
        return
    if not path.is_file():
        raise ConfigError(f"{path} is not there; check takes scripts, configurations and folders of them")
    yield from _check_file(path, path.read_text(encoding="utf-8-sig", errors="replace"), compat=compat)


def _check_file(path: Path, text: str, *, compat: bool) -> list[Finding]:
    if path.suffix == ".py":
        try:
            return Script(str(path), text, compat=compat).judge()
        except SyntaxError as error:
            words = f"this is not Python: {error.msg}"
            return [Finding(str(path), error.lineno or 1, Verdict.REPLACE, words)]
    return list(_check_shell(path, text) if path.suffix == ".sh" else _check_config(path))


def _check_config(path: Path) -> Iterator[Finding]:
    """Yield the problems of a configuration, each at its line, and keys that are mapped to others."""
    own = re.compile(rf"\s*\(?(?:(?:from|at|in) )?{re.escape(str(path))}:(\d+)\)?:?")
    try:
        file = read_file(path)
        resolved = resolve(file=file)
    except ConfigError as error:
        problems = error.problems if isinstance(error, FileProblemsError) else _split(str(error))
        for problem in problems:
            found = own.search(problem)
            yield Finding(str(path), int(found[1]) if found else 1, Verdict.REPLACE, own.sub("", problem).strip())
        return
    for note in resolved.notes:
        found = own.search(note)
        yield Finding(str(path), int(found[1]) if found else 1, Verdict.CHANGES, note)
    if not resolved.notes:
        yield Finding(str(path), 1, Verdict.WORKS, f"{len(file.settings)} options, in the spelling of {file.dialect}")


def _split(report: str) -> list[str]:
    """Return the problems of a report of several."""
    head, *problems = report.split("\n  - ")
    return problems or [head]


def _check_shell(path: Path, text: str) -> Iterator[Finding]:
    """Yield a verdict for each `accelerate launch` of a shell script."""
    for found in _LAUNCH.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        try:
            parse_options(shlex.split(found["words"].replace("\\\n", " "), comments=True), "accelerate launch")
        except ConfigError as error:
            if "$" not in str(error):  # a variable's value is not known
                yield Finding(str(path), line, Verdict.REPLACE, str(error))
                continue
        except ValueError:  # a part of a quoted command
            pass
        yield Finding(str(path), line, Verdict.IMPORT, "accelerate launch", "accel-trainer launch, with the same flags")
