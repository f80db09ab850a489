"""`accel-trainer report`: one HTML page of runs that runs no script and loads nothing; nothing here imports torch."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from accel_trainer.checkpoint.disk import as_corrupt
from accel_trainer.contrib.run_report.charts import Chart, Series, draw_chart, draw_legend, draw_shares, format_number
from accel_trainer.contrib.run_report.recorded_run import (
    DATA_ID,
    GRAD_NORM,
    LEARNING_RATE,
    MEMORY,
    MFU,
    PAGE_NAME,
    THROUGHPUT,
    TOKEN_RATE,
    TRAIN_LOSS,
    Option,
    RecordedRun,
    read_run,
)
from accel_trainer.errors import ConfigError, CorruptCheckpointError
from accel_trainer.launch.cli import command_parser

_ABSENT = "\u2013"
_MAX_METRIC_CHARTS = 8
_MAX_RANKS = 64

# Colours: Okabe and Ito's, which people with any colour vision tell apart; lighter ones of the same hues on dark.
_STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1c2024;--soft:#5a6370;--rule:#dde1e7;--grid:#e8ebf0;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b4548f;--c4:#b07800;--c5:#2d9bd8;--c6:#4d4d4d;
--k0:#9aa3ae;--k1:#e69f00;--k2:#0072b2;--k3:#d55e00;--k4:#009e73;--k5:#56b4e9;--k6:#cc79a7;--k7:#d3d8df}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1d2126;--ink:#e8eaed;--soft:#a2acb8;--rule:#343a42;
--grid:#2b3037;--c0:#56b4e9;--c1:#f0854a;--c2:#2fc79a;--c3:#dd93bd;--c4:#e6b340;--c5:#9ed2f2;--c6:#c9ced6;
--k0:#7c8692;--k1:#e6b340;--k2:#4a9fd4;--k3:#f0854a;--k4:#2fae88;--k5:#9ed2f2;--k6:#dd93bd;--k7:#464d56}}
*{box-sizing:border-box}
body{margin:0;overflow-wrap:anywhere;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:76rem;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:0}
h2{font-size:1.15rem;margin:2rem 0 .6rem}
p{margin:.3rem 0}.soft,.note{color:var(--soft)}.note{font-size:.86rem}
.grid{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr))}
.card,figure{background:var(--card);border:1px solid var(--rule);border-radius:.5rem;padding:1rem;margin:0;min-width:0}
figure{display:flex;flex-direction:column}figure>details{margin-top:auto;padding-top:.4rem}
figcaption{font-weight:600}.unit{font-weight:400;color:var(--soft)}
.tiles{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,9.5rem),1fr));margin-top:1.2rem}
.tiles dt{color:var(--soft);font-size:.86rem}.tiles dd{margin:0;font-size:1.3rem;font-variant-numeric:tabular-nums}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:.5rem;padding:.6rem .9rem}
.tiles small{display:block;font-size:.8rem;color:var(--soft)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;margin:.2rem 0 .3rem;padding:0;font-size:.86rem}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg text.y{text-anchor:end;dominant-baseline:central}svg text.x{text-anchor:middle}
.swatch{display:inline-block;width:24px;height:10px;margin-right:.4rem;vertical-align:baseline}
.grid-line,.grid path.grid{stroke:var(--grid);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.dashed{stroke-dasharray:6 4}
.bar{height:1.6rem;border-radius:.25rem;overflow:hidden}
.chip{display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin-right:.5em}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .9rem .3rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
thead th{color:var(--soft);font-weight:600}tbody th{font-weight:400}
td.n,th.n{text-align:right;white-space:nowrap}
code{font:.86rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
td small{color:var(--soft);display:block}
details{margin-top:.6rem}summary{cursor:pointer;color:var(--soft);font-size:.9rem}
summary:focus-visible{outline:2px solid var(--c0)}
@media (max-width:34rem){svg text{font-size:17px}.card,figure{padding:.8rem}h1{font-size:1.35rem}}
@media print{body{background:none}.card,figure{break-inside:avoid}}
"""
_COLOURS = "".join(f".line.c{n}{{stroke:var(--c{n})}}.dot.c{n}{{fill:var(--c{n})}}" for n in range(7)) + "".join(
    f".share.k{n}{{fill:var(--k{n})}}.chip.k{n}{{background:var(--k{n})}}" for n in range(8)
)


def describe_seconds(seconds: float) -> str:
    """Return a length of time for people."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def describe_bytes(num_bytes: float) -> str:
    """Return an amount of memory for people."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def build_page(runs: Sequence[RecordedRun]) -> str:
    """Return the page of one run, or of several with the options that tell them apart."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    is_one, setups = len(runs) == 1, [dict(run.setup) for run in runs]
    body = [_head(runs, title), _tiles(runs[0]) if is_one else "", _charts(runs), _time(runs)]
    body += [_ranks(runs[0])] if is_one else []
    body += [] if is_one else [_by_label("Final figures", "figure", runs, [_figure_rows(run) for run in runs])]
    body += [_by_label("Run", "", runs, setups), "" if is_one else _differences(runs), _configuration(runs)]
    # "<" would let a name that holds "</script>" end the element.
    data = json.dumps({"runs": [run.to_plain() for run in runs]}).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(title)}</title><style>{_STYLE}{_COLOURS}</style></head>\n'
        f"<body><main>\n{''.join(body)}\n</main>\n"
        f'<script type="application/json" id="{DATA_ID}">{data}</script></body></html>\n'
    )


def write_page(path: Path, runs: Sequence[RecordedRun]) -> None:
    """Write the page of these runs; a reader sees the former file or the whole new one."""
    # A push of the directory to a hub passes over names with `_`; by the time its thread reads the file, it is gone.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"_{path.name}.")
    try:
        # A run is called as its folder is, whose name may be of another encoding.
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(build_page(runs))
        # As the file of a plain open(): mkstemp's is for its owner alone.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{content}</section>\n" if content else ""


def _head(runs: Sequence[RecordedRun], title: str) -> str:
    if len(runs) > 1:
        legend = draw_legend(Series(run.name, (), colour) for colour, run in enumerate(runs))
        return f"<header><h1>{escape(title)}</h1>{legend}</header>\n"
    (run,) = runs
    facts = dict(run.setup)
    shown = [facts[label] for label in ("Model", "Strategy", "Precision") if label in facts]
    return f'<header><h1>{escape(title)}</h1><p class="soft">{escape(" · ".join(shown))}</p></header>\n'


def _tiles(run: RecordedRun) -> str:
    rows = _figure_rows(run)
    tiles = []
    for label, wanted in (
        ("Training loss", "train loss, last logged"),
        ("Evaluation loss", "eval_loss"),
        ("Throughput", "samples per second"),
        ("Tokens", "tokens per second"),
        ("MFU", "mfu"),
        ("Peak memory", "peak memory"),
        ("Time", "time"),
        ("Goodput", "goodput"),
        ("Updates", "updates"),
    ):
        if wanted in rows:
            text, _, more = rows[wanted].partition(" (")
            small = f"<small>{escape(more.rstrip(')'))}</small>" if more else ""
            tiles.append(f"<div><dt>{label}</dt><dd>{escape(text)}{small}</dd></div>")
    return f'<dl class="tiles">{"".join(tiles)}</dl>\n' if tiles else ""


def _figure_rows(run: RecordedRun) -> dict[str, str]:
    """Return the final figures of a run as texts, by their labels."""
    figures, rows = run.figures, {}

    def put(label: str, name: str, text: Any = format_number) -> None:
        if isinstance(figures.get(name), int | float):
            rows[label] = text(figures[name])

    put("train loss, last logged", TRAIN_LOSS)
    put("train loss, mean of the run", "train_loss")
    for name in figures:
        if name.startswith("eval_") and not name.endswith(("_runtime", "_per_second", "_model_preparation_time")):
            put(name, name)
    put("best metric", "best_metric")
    put("best at update", "best_global_step", lambda value: f"{value:,}")
    put("samples per second", "samples_per_second", lambda value: f"{format_number(value, 3)}/s (samples)")
    put("tokens per second", "tokens_per_second", lambda value: f"{format_number(value, 3)}/s (padding included)")
    put("tokens per second", TOKEN_RATE, lambda value: f"{format_number(value, 3)}/s (without padding, last logged)")
    put("mfu", MFU, lambda value: f"{100 * value:.1f}% (last logged)")
    put("updates per second", "updates_per_second")
    if "samples_per_second" not in rows and "samples_per_second" not in figures:
        put("samples per second", "train_samples_per_second", lambda value: f"{format_number(value, 3)}/s (overall)")
    if peaks := [peak for peak in figures.get("peak_memory_bytes", ()) if peak]:
        rows["peak memory"] = describe_peaks(peaks)
    put("goodput", "goodput")
    if total := run.seconds.get("total") or figures.get("train_runtime"):
        rows["time"] = describe_seconds(total)
    if figures.get("updates") is not None:
        rows["updates"] = _describe_updates(figures)
    return rows


def _describe_updates(figures: Mapping[str, Any]) -> str:
    of, epoch = figures.get("max_steps"), figures.get("epoch")
    more = ([f"of {of:,}"] if of else []) + ([f"{format_number(epoch)} epochs"] if epoch else [])
    return f"{figures['updates']:,}" + (f" ({', '.join(more)})" if more else "")


def describe_peaks(peaks: Sequence[int]) -> str:
    """Return the most memory that ranks have taken, for people."""
    if len(peaks) == 1:
        return describe_bytes(peaks[0])
    most = max(peaks)
    return f"{describe_bytes(most)} (rank {peaks.index(most)}; least {describe_bytes(min(peaks))})"


def _charts(runs: Sequence[RecordedRun]) -> str:
    names = {name for run in runs for name in run.curves}
    losses = sorted(name for name in names if name.startswith("eval_") and name.endswith("loss"))
    metrics = sorted(name for name in names if name.startswith("eval_") and name not in losses)
    charts = [
        Chart("Loss", _series(runs, [TRAIN_LOSS, *losses]), note=_not_finite(runs, [TRAIN_LOSS, *losses])),
        Chart("Learning rate", _series(runs, [LEARNING_RATE]), from_zero=True),
        Chart("Gradient norm", _series(runs, [GRAD_NORM]), from_zero=True, note=_not_finite(runs, [GRAD_NORM])),
        Chart("Throughput", _series(runs, [THROUGHPUT]), "samples per second", from_zero=True),
        Chart("Tokens", _series(runs, [TOKEN_RATE]), "tokens per second, without padding", from_zero=True),
        Chart("MFU", _series(runs, [MFU], 100.0), "percent of the peak", from_zero=True),
        _memory_chart(runs),
        *(Chart(name, _series(runs, [name])) for name in metrics[:_MAX_METRIC_CHARTS]),
    ]
    drawn = "".join(draw_chart(chart, f"chart-{index}") for index, chart in enumerate(charts))
    if not drawn:
        return _section("Curves", '<p class="soft">The run has logged no values; see logging_steps.</p>')
    return _section("Curves", f'<div class="grid">{drawn}</div>')


def _memory_chart(runs: Sequence[RecordedRun]) -> Chart:
    highest = max((y for run in runs for _, y in run.curves.get(MEMORY, ())), default=0.0)
    unit, num_bytes = ("GiB", 2**30) if highest >= 2**30 else ("MiB", 2**20)
    return Chart("Memory of rank 0", _series(runs, [MEMORY], 1 / num_bytes), unit, from_zero=True)


def _series(runs: Sequence[RecordedRun], names: Sequence[str], factor: float = 1.0) -> list[Series]:
    """Return the lines of a chart: each run has a colour; of one run, each curve. Evaluations are dashed."""
    series = []
    for number, run in enumerate(runs):
        for index, name in enumerate(names):
            points = [(x, y * factor) for x, y in run.curves.get(name, ())]
            kind = "train" if name == TRAIN_LOSS else name
            label = kind if len(runs) == 1 else run.name if len(names) == 1 else f"{run.name}, {kind}"
            colour = index if len(runs) == 1 else number
            series.append(Series(label, points, colour, is_dashed=name.startswith("eval_")))
    return series


def _not_finite(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    parts = []
    for run in runs:
        for name in names:
            if count := run.num_not_finite.get(name):
                of = f" of {run.name}" if len(runs) > 1 else ""
                parts.append(f"{count} value(s) of {name}{of} are NaN or infinite")
    return f"{'; '.join(parts)}, and not drawn." if parts else ""


def _time(runs: Sequence[RecordedRun]) -> str:
    measured = [run for run in runs if run.seconds.get("total")]
    names = dict.fromkeys(name for run in measured for name in run.seconds if name != "total")
    phases = [name for name in names if any(run.seconds.get(name, 0.0) != 0.0 for run in measured)]
    note = (
        '<p class="note">Of rank 0, and of this train() alone if it was resumed. '
        "Exposed communication is the time for which updates waited for gradients, or for counts, of other ranks.</p>"
    )
    content = f"{_time_bars(measured, phases)}{_time_table(measured, phases)}{note}"
    return _section("Time", f'<div class="card">{content}</div>' if measured else "")


def _time_bars(runs: Sequence[RecordedRun], phases: Sequence[str]) -> str:
    longest = max((run.seconds["total"] or 0.0 for run in runs), default=0.0)
    bars = []
    for run in runs:
        shares = [(name, run.seconds.get(name) or 0.0) for name in phases]
        total = run.seconds["total"] or 0.0
        label = ", ".join(f"{name} {100 * value / total:.1f}%" for name, value in shares if value)
        heading = f'<p class="note">{escape(run.name)}</p>' if len(runs) > 1 else ""
        bars.append(heading + draw_shares(shares, longest, label))
    return "".join(bars)


def _time_table(runs: Sequence[RecordedRun], phases: Sequence[str]) -> str:
    columns = [run.name for run in runs] if len(runs) > 1 else ["seconds"]
    head = "".join(f'<th scope="col" class="n">{escape(name)}</th>' for name in columns)
    chips = [f'<span class="chip k{index}"></span>' for index in range(len(phases))]
    rows = "".join(
        f'<tr><th scope="row">{chip}{escape(name)}</th>'
        + "".join(f'<td class="n">{_share(run, name)}</td>' for run in runs)
        + "</tr>"
        for chip, name in zip([*chips, ""], [*phases, "total"], strict=True)
    )
    head = f'<thead><tr><th scope="col">phase</th>{head}</tr></thead>'
    return f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'


def _share(run: RecordedRun, name: str) -> str:
    value, total = run.seconds.get(name), run.seconds["total"] or 0.0
    if value is None:
        return '<span class="soft">not measured</span>'
    return escape(describe_seconds(value)) + (f" · {100 * value / total:.1f}%" if name != "total" and total else "")


def _ranks(run: RecordedRun) -> str:
    """Return a section with a row for each rank: those that others have waited for come first, then in their order."""
    if not run.ranks:
        return ""
    order = sorted(range(len(run.ranks)), key=lambda rank: -sum(run.ranks[rank]["slow_windows"].values()))
    phases = [name for name in run.ranks[0]["seconds"] if any(rank["seconds"][name] for rank in run.ranks)]
    rows = []
    for rank in order[:_MAX_RANKS]:
        seconds, windows = run.ranks[rank]["seconds"], run.ranks[rank]["slow_windows"]
        slow = ", ".join(f"{phase} ({count})" for phase, count in windows.items()) or _ABSENT
        rows.append((str(rank), *(escape(describe_seconds(seconds[name])) for name in phases), escape(slow)))
    rest = f" {len(order) - _MAX_RANKS} more are left out." if len(order) > _MAX_RANKS else ""
    note = (
        '<p class="note">Seconds of the work of each rank, of what it wrote for all, and of its waiting for others. A '
        "rank is slow in a phase where the others have waited for it for a tenth of the time between two logs (how "
        f"often).{rest}</p>"
    )
    return _section("Ranks", _table(["rank", *phases, "slow in"], rows) + note)


def _by_label(heading: str, first: str, runs: Sequence[RecordedRun], columns: Sequence[Mapping[str, str]]) -> str:
    """Return a section with a column of texts for each run, and a row for each label that one of them has."""
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [
        (escape(label), *(escape(column[label]) if label in column else _ABSENT for column in columns))
        for label in labels
    ]
    head = [first, *(run.name for run in runs)] if len(runs) > 1 else []
    return _section(heading, _table(head, rows) if rows else "")


def _table(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table of cells in HTML below a head in plain text, or none."""
    cells = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    top = f"<thead><tr>{cells}</tr></thead>" if head else ""
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
        for first, *others in rows
    )
    return f'<div class="card scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _cell(option: Option | None) -> str:
    if option is None:
        return _ABSENT
    source = f"<small>{escape(option.source)}</small>" if option.source and option.source != "default" else ""
    return f"<code>{escape(option.value)}</code>{source}"


def _differing_options(runs: Sequence[RecordedRun]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.options)
    return [name for name in names if len({run.options.get(name, Option("")).value for run in runs}) > 1]


def _differences(runs: Sequence[RecordedRun]) -> str:
    known = [run for run in runs if run.options]
    differing = _differing_options(known)
    if differing:
        rows = [(f"<code>{escape(name)}</code>", *(_cell(run.options.get(name)) for run in runs)) for name in differing]
        content = _table(["option", *(run.name for run in runs)], rows)
    else:
        text = "All options that are recorded are the same." if known else "These runs have recorded no configuration."
        content = f'<p class="soft">{text}</p>'
    return _section("Different options", content)


def _configuration(runs: Sequence[RecordedRun]) -> str:
    content = []
    for run in runs:
        if not run.options:
            continue
        chosen = {name: option for name, option in run.options.items() if option.is_set}
        rest = {name: option for name, option in run.options.items() if not option.is_set}
        heading = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        tables = _options_table(chosen) if chosen else '<p class="soft">Every option has its default.</p>'
        defaults = f"<details><summary>{len(rest)} options at their defaults</summary>{_options_table(rest)}</details>"
        content.append(f"{heading}{tables}{defaults if rest else ''}")
    joined = "".join(content)
    if len(runs) > 1 and joined:
        joined = f"<details><summary>All options of each run</summary>{joined}</details>"
    return _section("Configuration", joined)


def _options_table(options: Mapping[str, Option]) -> str:
    rows = (
        (f"<code>{escape(name)}</code>", f"<code>{escape(option.value)}</code>", escape(option.source))
        for name, option in options.items()
    )
    return _table(["option", "value", "set by"], rows)


# --- the first update at which two runs part, by their logs and fingerprints ------------------------------------------


FINGERPRINTS_NAME = "fingerprints.jsonl"
_TIMES = (MEMORY, MFU, THROUGHPUT, TOKEN_RATE)
"""Curves that are those of a machine, and differ between two runs that are alike."""


def find_logged_difference(first: RecordedRun, second: RecordedRun) -> str:
    """Return, in words, the first value that both runs have logged and that differs; empty where none does."""
    parted: list[tuple[float, str, Any, Any]] = []
    last_alike: dict[str, float] = {}
    logged: list[dict[str, Any]] = [
        {name: dict(points) for name, points in run.curves.items()} for run in (first, second)
    ]
    for values, run in zip(logged, (first, second), strict=True):
        for name, points in run.not_finite.items():
            values.setdefault(name, {}).update(points)
    for name in logged[0].keys() & logged[1].keys() - {*_TIMES}:
        ours, theirs = (values[name] for values in logged)
        for step, value in sorted(ours.items()):
            if step not in theirs:
                continue
            if value != theirs[step]:
                parted.append((step, name, value, theirs[step]))
                break
            last_alike[name] = step
    if not parted:
        return ""
    step, name, value, other = min(parted, key=lambda each: (each[0], each[1] != TRAIN_LOSS, each[1]))
    before = f"alike until update {last_alike[name]:g}" if name in last_alike else "the first that both have logged"
    return f"update {step:g}: {name} is {value} and {other}; {before}"


def find_fingerprint_difference(first: Path, second: Path) -> str | None:
    """Return the first update, and the first module in it, whose fingerprints differ; None where runs have none.

    Raises:
        CorruptCheckpointError: a file of fingerprints cannot be read.
    """
    ours, theirs = _read_fingerprints(first), _read_fingerprints(second)
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return None
    for place, update in enumerate(both):
        if ours[update] == theirs[update]:
            continue
        # From the end: a run that begins or resumes asks a forward or two more of its first micro-batch.
        number = min(len(ours[update]), len(theirs[update]))
        pairs = zip(ours[update][-number:], theirs[update][-number:], strict=True)
        found = next((mine[0] for mine, other in pairs if mine != other), None)
        if found is None:
            continue
        before = f"those of update {both[place - 1]} are alike" if place else "it is the first that both have"
        return f"update {update}: {found}; {before}"
    return ""


def _read_fingerprints(path: Path) -> Mapping[int, Sequence[Any]]:
    file = (path if path.is_dir() else path.parent) / FINGERPRINTS_NAME
    if not file.is_file() and file.parent.name.startswith("checkpoint-"):
        file = file.parent.parent / FINGERPRINTS_NAME
    if not file.is_file():
        return {}
    try:
        # A run that was resumed, or has gone back, has come by some updates again: the last one counts.
        found = [line for text in file.read_text(encoding="utf-8").splitlines() if (line := _read_line(text))]
        if not found:
            raise ValueError("no line of it is JSON")
        return {line["update"]: line["sums"] for line in found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{file} cannot be read ({error}); name runs whose file is whole") from error


def _read_line(text: str) -> Any:
    """Return a line of fingerprints; None for the half of one that a run which was killed has left."""
    with suppress(ValueError):
        return json.loads(text)
    return None


def describe_difference(runs: Sequence[RecordedRun], paths: Sequence[Path], options: Sequence[str]) -> tuple[str, bool]:
    """Return the text of `accel-trainer report --diff`, and whether the runs part; `options` are those that differ."""
    logged = find_logged_difference(*runs)
    prints = find_fingerprint_difference(*paths)
    lines = [f"first difference of {runs[0].name} and {runs[1].name}", f"  logged: {logged or 'none'}"]
    missing = "neither, or no update of both (fingerprint_every)"
    lines.append(f"  fingerprints: {missing if prints is None else prints or 'none'}")
    lines += [
        f"  option {name}: {runs[0].options[name].value} and {runs[1].options[name].value}"
        for name in options
        if all(name in run.options for run in runs)
    ]
    return "\n".join(lines), bool(logged or prints)


# --- the command ------------------------------------------------------------------------------------------------------


def run_report(words: Sequence[str]) -> int:
    """Run `accel-trainer report` and return its exit code."""
    arguments = report_parser().parse_args(words)
    paths: list[Path] = arguments.runs
    if arguments.diff:
        return _print_difference(paths)
    runs = [_read(path) for path in paths]
    counts = Counter(run.name for run in runs)
    for run, path in zip(runs, paths, strict=True):
        if counts[run.name] > 1:
            run.name = f"{run.name} ({path})"
    page = arguments.output or (Path() if len(paths) > 1 else paths[0] if paths[0].is_dir() else paths[0].parent)
    if page.is_dir():
        page = page / PAGE_NAME
    try:
        write_page(page, runs)
    except OSError as error:
        raise ConfigError(f"{page} cannot be written ({error.strerror or error}); name another --output") from error
    print(page)
    return 0


def _print_difference(paths: Sequence[Path]) -> int:
    if len(paths) != 2:
        raise ConfigError(f"--diff was given {len(paths)} run(s), and compares two: accel-trainer report --diff A B")
    runs = []
    for path in paths:
        with as_corrupt(path):
            runs.append(read_run(path, list))
    text, is_parted = describe_difference(runs, paths, _differing_options(runs))
    print(text)
    return int(is_parted)


def report_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer report`."""
    parser = command_parser(
        "report",
        "Write a page with the curves, the final figures and the configuration of a run of the Trainer, or of several "
        "runs beside each other.",
    )
    text = "the output_dir of a run, a checkpoint-N in it, a trainer_state.json, or the page of one run"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=text)
    text = "print the first update at which two runs part, and exit with 1 where they do"
    parser.add_argument("--diff", action="store_true", help=text)
    text = f"the page; default: {PAGE_NAME} in the directory of the run, or here for several"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    return parser


def _read(path: Path) -> RecordedRun:
    """Return a run whose page can be made, whoever has written its files."""
    with as_corrupt(path):
        run = read_run(path)
        build_page([run])
    return run
