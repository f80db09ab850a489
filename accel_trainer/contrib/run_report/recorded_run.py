"""A run as its page shows it, by its TrainerState and its own record. Reads the runs of any Trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_trainer.checkpoint.changed_run import RECORD_KEY
from accel_trainer.checkpoint.manifest import MANIFEST_NAME
from accel_trainer.checkpoint.store import numbered_checkpoints
from accel_trainer.contrib.run_report.charts import Point, thin_out
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError

PAGE_NAME = "report.html"
STATE_NAME = "trainer_state.json"
DATA_ID = "accel-trainer-run"
"""Of the element in which a page has its runs as JSON."""

TRAIN_LOSS, LEARNING_RATE, GRAD_NORM, THROUGHPUT, MEMORY, TOKEN_RATE, MFU = (
    "loss", "learning_rate", "grad_norm", "samples_per_second", "memory_bytes", "perf/tokens_per_second", "perf/mfu",
)  # fmt: skip
"""Names of curves; those of evaluations begin with `eval_`."""
Keep = Callable[[Sequence[Point]], list[Point]]
_NOT_CURVES = ("_runtime", "_per_second", "_model_preparation_time")


@dataclass(frozen=True)
class Option:
    """An option of a run."""

    value: str
    source: str = ""
    is_set: bool = True
    """Whether its value is other than the default."""


@dataclass(kw_only=True)
class RecordedRun:
    """One run, in plain values."""

    name: str
    update: int = 0
    """The last one that is known of."""
    setup: list[tuple[str, str]] = field(default_factory=list)
    """Labels and texts of the block that a run begins its log with."""
    options: dict[str, Option] = field(default_factory=dict)
    curves: dict[str, list[Point]] = field(default_factory=dict)
    num_not_finite: dict[str, int] = field(default_factory=dict)
    """Of a curve's values, those that are NaN or infinite; they are not drawn."""
    not_finite: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """Those values, as words."""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float | None] = field(default_factory=dict)
    """By phase, and in all; None for a phase that was not measured."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Of several: each rank's seconds by phase, and windows in which it was the slow one, as `SlowRanks.to_plain`."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RecordedRun:
        """Return the run of `to_plain`."""
        options = {name: Option(**option) for name, option in plain["options"].items()}
        curves = {name: [(x, y) for x, y in points] for name, points in plain["curves"].items()}
        setup = [(label, text) for label, text in plain["setup"]]
        return cls(**{**plain, "options": options, "curves": curves, "setup": setup})


def build_run(name: str, state: Mapping[str, Any], record: Mapping[str, Any], keep: Keep = thin_out) -> RecordedRun:
    """Return the run of a TrainerState, and of the record of `RunReport.to_plain`, which may be empty.

    `keep` takes the points of a curve, and returns those to keep: of `thin_out`, as many as a page can show.
    """
    history = state["log_history"]
    run = RecordedRun(
        name=record.get("name") or name,
        update=int(state.get("global_step") or 0),
        setup=[(label, text) for label, text in record.get("setup", ())],
        options={name: Option(value, source, is_set) for name, value, source, is_set in record.get("options", ())},
        seconds=dict(record.get("seconds", {})),
        ranks=list(record.get("ranks", ())),
    )
    for entry in history:
        for key, value in entry.items():
            if "step" in entry and _is_curve(key, value):
                _add(run, key, entry["step"], value)
    for step, throughput, memory in record.get("points", ()):
        if step <= run.update:
            _add(run, THROUGHPUT, step, throughput)
            _add(run, MEMORY, step, memory)
    run.curves = {name: keep(sorted(points)) for name, points in run.curves.items()}
    run.figures = _figures(state, history, record.get("figures", {}))
    return run


def _is_curve(key: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if key in (TRAIN_LOSS, LEARNING_RATE, GRAD_NORM, TOKEN_RATE, MFU):
        return True
    return key.startswith("eval_") and not key.endswith(_NOT_CURVES)


def _add(run: RecordedRun, name: str, step: float, value: float | None) -> None:
    if value is None:
        return
    if math.isfinite(value):
        run.curves.setdefault(name, []).append((step, value))
    else:
        run.num_not_finite[name] = run.num_not_finite.get(name, 0) + 1
        run.not_finite.setdefault(name, []).append((step, str(value)))


def _figures(
    state: Mapping[str, Any], history: Sequence[Mapping[str, Any]], recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the figures of the end, or of the last that is known, by the names under which they are logged."""
    figures: dict[str, Any] = {"updates": state.get("global_step"), "max_steps": state.get("max_steps")}
    for entry in history:
        figures |= {k: v for k, v in entry.items() if k not in ("step", LEARNING_RATE) and isinstance(v, int | float)}
    if state.get("best_metric") is not None:
        figures |= {"best_metric": state["best_metric"], "best_global_step": state.get("best_global_step")}
    return figures | dict(recorded)


def read_run(path: Path, keep: Keep = thin_out) -> RecordedRun:
    """Return the run of an output directory, of a checkpoint, of a `trainer_state.json`, or of a page of one run.

    Of a directory, the state with the highest update counts: its own, that of its newest checkpoint, or its page.

    Raises:
        CheckpointNotFoundError: there is no such path, or no state in it.
        CorruptCheckpointError: a state or a page is not what its name says.
    """
    if path.is_file():
        return _read_page(path) if path.suffix in (".html", ".htm") else _read_state(path, keep)
    if not path.is_dir():
        raise CheckpointNotFoundError(
            f"{path} does not exist; name the output_dir of a run, a checkpoint in it, or a page"
        )
    runs = [_read_state(state, keep) for state in _states_in(path)]
    if keep is thin_out or not runs:
        runs = [*_page_in(path, runs), *runs]
    if not runs:
        raise CheckpointNotFoundError(
            f"{path} holds neither {STATE_NAME} nor a checkpoint-N with one, nor a {PAGE_NAME}; name the output_dir of "
            "a run that has saved, that was trained with report_html=True, or that called trainer.save_state()"
        )
    # The first of several with the same update: a page has what came after the last save, too.
    return max(runs, key=lambda run: run.update)


def _page_in(path: Path, runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the run of a directory's page, if there is one; none where it is not that of the states, or broken."""
    page = path / PAGE_NAME
    if not page.is_file():
        return []
    try:
        shown = _read_page(page)
    except AccelTrainerError:
        if not runs:
            raise
        return []
    return [shown] if not runs or _is_of(shown, runs[-1]) else []


def _is_of(page: RecordedRun, state: RecordedRun) -> bool:
    """Return whether a page shows the run of a state, and not one that was in the directory before."""
    shown = dict(page.curves.get(TRAIN_LOSS, ()))
    return all(shown.get(step, loss) == loss for step, loss in state.curves.get(TRAIN_LOSS, ()))


def _states_in(path: Path) -> list[Path]:
    """Return the state of an output directory, and that of its newest checkpoint with one."""
    checkpoints = [checkpoint for _, checkpoint in numbered_checkpoints(path, "checkpoint-")]
    saved = [found for checkpoint in checkpoints if (found := checkpoint / STATE_NAME).is_file()]
    own = path / STATE_NAME
    return [own, *saved[-1:]] if own.is_file() else saved[-1:]


def _read_state(path: Path, keep: Keep) -> RecordedRun:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read as JSON ({error}); name another run") from error
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise CorruptCheckpointError(f"{path} is no state of a Trainer: it has no log_history; name a {STATE_NAME}")
    folder = path.absolute().parent
    is_checkpoint = folder.name.startswith("checkpoint-")
    record = _read_record(folder)
    if not record and not is_checkpoint:
        newest = numbered_checkpoints(folder, "checkpoint-")
        record = _read_record(newest[-1][1]) if newest else {}
    return build_run(folder.parent.name if is_checkpoint else folder.name, state, record, keep)


def _read_record(checkpoint: Path) -> Mapping[str, Any]:
    """Return the record in a checkpoint's manifest; empty where there is none."""
    try:
        manifest = json.loads((checkpoint / MANIFEST_NAME).read_text(encoding="utf-8"))
        record = manifest["metadata"][RECORD_KEY]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return record if isinstance(record, dict) else {}


def _read_page(path: Path) -> RecordedRun:
    text = path.read_text(encoding="utf-8", errors="replace")
    _, found, rest = text.partition(f'<script type="application/json" id="{DATA_ID}">')
    if not found:
        raise CorruptCheckpointError(f"{path} is no page of accel-trainer; name the output_dir of the run instead")
    try:
        runs = json.loads(rest.partition("</script>")[0])["runs"]
        if len(runs) != 1:
            raise ConfigError(f"{path} shows {len(runs)} runs; name the page or the output_dir of each of them")
        return RecordedRun.from_plain(runs[0])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, AccelTrainerError):
            raise
        raise CorruptCheckpointError(f"{path} holds a run that cannot be read ({error}); make the page anew") from error
