"""`accel-trainer report`: one page of a run that is over, or of several beside each other. Imports no torch."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from accel_trainer.checkpoint.disk import as_corrupt
from accel_trainer.contrib.run_report.page import build_page, write_page
from accel_trainer.contrib.run_report.recorded_run import PAGE_NAME, RecordedRun, read_run
from accel_trainer.errors import ConfigError
from accel_trainer.launch.cli import command_parser


def run_report(words: Sequence[str]) -> int:
    """Run `accel-trainer report` and return its exit code.

    Raises:
        AccelTrainerError: a run cannot be read, or the page cannot be written.
    """
    arguments = report_parser().parse_args(words)
    runs = [_read(path) for path in arguments.runs]
    _tell_apart(runs, arguments.runs)
    page = arguments.output or _default_page(arguments.runs)
    if page.is_dir():
        page = page / PAGE_NAME
    try:
        write_page(page, runs)
    except OSError as error:
        raise ConfigError(f"{page} cannot be written ({error.strerror or error}); name another --output") from error
    print(page)
    return 0


def report_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer report`."""
    parser = command_parser(
        "report",
        "Write a page with the curves, the final figures and the configuration of a run of the Trainer, or of several "
        "runs beside each other.",
    )
    text = "the output_dir of a run, a checkpoint-N in it, a trainer_state.json, or the page of one run"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=text)
    text = f"the page; default: {PAGE_NAME} in the directory of the run, or here for several"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    return parser


def _read(path: Path) -> RecordedRun:
    """Return a run whose page can be made, whoever has written its files."""
    with as_corrupt(path):
        run = read_run(path)
        build_page([run])
    return run


def _default_page(paths: Sequence[Path]) -> Path:
    if len(paths) > 1:
        return Path(PAGE_NAME)
    return (paths[0] if paths[0].is_dir() else paths[0].parent) / PAGE_NAME


def _tell_apart(runs: Sequence[RecordedRun], paths: Sequence[Path]) -> None:
    """Give runs of the same name that of their path."""
    counts = Counter(run.name for run in runs)
    for run, path in zip(runs, paths, strict=True):
        if counts[run.name] > 1:
            run.name = f"{run.name} ({path})"
