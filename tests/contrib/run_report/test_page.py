"""The page of a run: what it shows, that it is safe to open, that a browser draws it, and `accel-trainer report`."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from accel_trainer.contrib.run_report.charts import Chart, Series, draw_chart, format_number, nice_ticks, thin_out
from accel_trainer.contrib.run_report.page import build_page, describe_seconds, write_page
from accel_trainer.contrib.run_report.recorded_run import RecordedRun, build_run, read_run
from accel_trainer.errors import ConfigError, CorruptCheckpointError
from accel_trainer.launch.cli import main

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"run\" 'one'"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).resolve().parents[3]


def recorded(name: str = "digits", *, rate: float = 1e-3, updates: int = 200) -> RecordedRun:
    history = []
    for step in range(10, updates + 1, 10):
        trained = {"epoch": step / 100, "loss": 2.0 / step**0.5, "grad_norm": 1.5, "learning_rate": rate}
        evaluated = {"eval_loss": 2.2 / step**0.5, "eval_accuracy": step / 400, "eval_runtime": 3.0}
        history += [{"step": step, **values} for values in (trained, evaluated)[: 2 if step % 50 == 0 else 1]]
    history.append({"step": updates, "train_loss": 0.4, "train_runtime": 12.0, "train_samples_per_second": 100.0})
    seconds = {"data": 1.0, "forward + backward": 8.0, "exposed communication": None, "other": 3.0, "total": 12.0}
    record = {
        "name": name,
        "setup": [("Strategy", "ddp, 2 ranks on 1 node"), ("Model", "Digits, 10 parameters")],
        "options": [
            ("learning_rate", str(rate), "argument", True),
            ("strategy", "ddp", "train.yaml:3", True),
            ("seed", "42", "default", False),
        ],
        "points": [[step, 100.0 + step, 2**28] for step in range(10, updates + 1, 10)],
        "seconds": seconds,
        "ranks": [
            {"seconds": {"data": 1.0, "forward": 4.0, "save": 0.0, "waits": 5.0}, "slow_windows": {}},
            {"seconds": {"data": 6.0, "forward": 4.0, "save": 0.0, "waits": 0.0}, "slow_windows": {"data": 3}},
        ],
        "figures": {"samples_per_second": 100.0, "tokens_per_second": None, "peak_memory_bytes": [2**28, 2**29]},
    }
    state = {"log_history": history, "global_step": updates, "max_steps": updates}
    return build_run(name, state, record)


class Elements(HTMLParser):
    """The elements of a page: tags, their attributes, and what is left open."""

    _VOID = ("meta", "path", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self._VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self._VOID:
            assert self.open.pop() == tag


def test_a_page_holds_the_curves_the_figures_and_who_set_what():
    page = build_page([recorded()])
    for shown in ("Loss", "Learning rate", "Gradient norm", "Throughput", "Memory of rank 0", "eval_accuracy"):
        assert f"<figcaption>{shown}" in page
    assert page.count('class="line c0"') >= 5
    assert "train.yaml:3" in page
    assert "not measured" in page
    assert "512.0 MiB" in page
    assert "eval_runtime" not in page.replace("&quot;", "").split("<script")[0]


def test_a_page_says_which_rank_the_others_have_waited_for():
    page = build_page([recorded()])
    (_, section) = page.split("<h2>Ranks</h2>")
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in section.partition("</table>")[0].split("<tr>")[1:]]
    assert rows == [
        ["rank", "data", "forward", "waits", "slow in"],
        ["1", "6 s", "4 s", "0 s", "data (3)"],
        ["0", "1 s", "4 s", "5 s", "\u2013"],
    ]
    assert "<h2>Ranks</h2>" not in build_page([recorded(), recorded("second")])


@pytest.mark.parametrize("runs", [[recorded()], [recorded(), recorded("second", rate=2e-3)]], ids=["one", "two"])
def test_a_page_is_well_formed_and_loads_nothing(runs):
    page = build_page(runs)
    elements = Elements(page)
    assert elements.open == []
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(elements.tags)
    kinds = [value for tag, name, value in elements.attributes if tag == "script" and name == "type"]
    assert kinds == ["application/json"]
    names = {name for _, name, _ in elements.attributes}
    assert not {name for name in names if name in ("src", "href", "xlink:href", "style") or name.startswith("on")}
    assert not re.search(r"url\(|@import|https?://", page)
    assert "default-src 'none'" in page


def test_texts_of_a_run_are_escaped_everywhere():
    run = recorded(EVIL)
    run.options[EVIL] = run.options["strategy"]
    run.setup.append((EVIL, EVIL))
    run.curves[f"eval_{EVIL}"] = [(1, 2.0)]
    for runs in ([run], [run, recorded()]):
        elements = Elements(build_page(runs))
        assert elements.tags.count("script") == 1
        assert "img" not in elements.tags
        assert elements.open == []


def test_a_page_of_one_run_is_read_back(tmp_path: Path):
    run = recorded(EVIL)
    write_page(tmp_path / "report.html", [run])
    assert read_run(tmp_path / "report.html") == run
    assert read_run(tmp_path) == run
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o666 & ~mask
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_written_leaves_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "report.html"
    path.write_text("former")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_page(path, [recorded()])
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "former"


def test_pages_that_are_none_are_named(tmp_path: Path):
    page = tmp_path / "report.html"
    page.write_text("<html></html>")
    with pytest.raises(CorruptCheckpointError, match=r"report\.html is no page of accel-trainer; name the output_dir"):
        read_run(page)
    write_page(page, [recorded(), recorded("second")])
    with pytest.raises(ConfigError, match="shows 2 runs; name the page or the output_dir of each"):
        read_run(page)
    page.write_text(build_page([recorded()]).replace('"curves"', '"corves"'))
    with pytest.raises(CorruptCheckpointError, match="holds a run that cannot be read"):
        read_run(page)


def test_only_options_that_differ_are_compared():
    page = build_page([recorded(), recorded("second", rate=2e-3)])
    table = page.partition("Different options")[2].partition("</section>")[0]
    assert "learning_rate" in table
    assert "0.002" in table
    assert "strategy" not in table


def test_values_that_are_not_finite_are_counted_and_not_drawn():
    state = {
        "global_step": 3,
        "log_history": [{"step": step, "loss": loss} for step, loss in ((1, 1.0), (2, math.nan), (3, math.inf))],
    }
    run = build_run("nan", json.loads(json.dumps(state)), {})
    assert run.curves["loss"] == [(1, 1.0)]
    page = build_page([run])
    assert "2 value(s) of loss are NaN or infinite, and not drawn." in page
    assert "infinity" in page  # the last figure, as it is


def test_an_evaluation_before_the_first_update_alone_is_drawn_at_the_left_edge():
    state = {"global_step": 0, "log_history": [{"step": 0, "eval_accuracy": 0.1}]}
    page = build_page([build_run("start", state, {})])
    legend, drawn = re.findall(r'<circle class="dot c0" cx="([\d.]+)"', page)
    assert (legend, drawn) == ("12", "66.0")


def test_a_run_that_logged_nothing_says_so():
    assert "The run has logged no values" in build_page([build_run("mute", {"global_step": 0, "log_history": []}, {})])


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (4.05, 4.2), (-3.0, 12.0), (1e-5, 9e-5), (0.0, 123456.0), (0.999, 1.001)]
)
def test_ticks_are_round_few_and_reach_over_all_values(low: float, high: float):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    assert 3 <= len(ticks) <= 12
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - nice) for nice in (1, 2, 5, 10)) < 1e-6


def test_small_values_have_their_power_of_ten_in_the_title():
    drawn = draw_chart(Chart("Learning rate", [Series("rate", [(0, 1e-5), (10, 5e-5)])], from_zero=True), "c")
    assert "(\u00d710\u207b\u2075)" in drawn
    assert ">5</text>" in drawn


def test_thinned_curves_keep_their_extremes_and_their_ends():
    points = [(float(x), math.sin(x / 50)) for x in range(10_000)] + [(10_000.0, -9.0), (10_001.0, 0.0)]
    points[777] = (777.0, 42.0)
    thinned = thin_out(points, 400)
    assert len(thinned) <= 410
    assert {points[0], points[777], (10_000.0, -9.0), points[-1]} <= set(thinned)
    assert thinned == sorted(thinned)


def test_numbers_and_times_are_for_people():
    shown = {0: "0", 4.0730001: "4.073", 1234567.0: "1,234,567", 2e-5: "2.000e-5", 0.00034: "0.00034", math.nan: "NaN"}
    assert {value: format_number(value) for value in shown} == shown
    assert [describe_seconds(each) for each in (0.25, 61, 3725)] == ["0.25 s", "1 min 01 s", "1 h 02 min"]


def browse(page: Path, folder: Path, *flags: str) -> str:
    """Open a page in Chromium, with a profile of its own; return what it wrote to the console and elsewhere."""
    assert CHROMIUM is not None
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
    headless = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb")
    profile = (f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND")
    command = [CHROMIUM, *headless, *quiet, *profile, "--enable-logging=stderr", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
@pytest.mark.parametrize(
    ("scheme", "background", "line"),
    [("1", (246, 247, 249), (0, 114, 178)), ("0", (20, 23, 27), (86, 180, 233))],
    ids=["light", "dark"],
)
def test_a_browser_draws_the_curves_in_both_colour_schemes(tmp_path: Path, scheme, background, line):
    image = pytest.importorskip("PIL.Image")
    page, picture, log = tmp_path / "report.html", tmp_path / "page.png", tmp_path / "net.json"
    write_page(page, [recorded(EVIL)])
    said = browse(
        page, tmp_path, f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1200,1500",
        f"--screenshot={picture}", f"--log-net-log={log}",
    )  # fmt: skip
    assert "CONSOLE" not in said
    pixels = image.open(picture).convert("RGB")
    assert pixels.getpixel((3, 3)) == background
    colours = {colour: count for count, colour in pixels.getcolors(2**24)}
    assert colours.get(line, 0) > 2000  # five curves of 2 pixels' width
    # The browser itself, which is no origin, may ask for this and that; the origin of a page in a file is null.
    assert set(re.findall(r'"initiator":"([^"]*)"', log.read_text())) <= {"not an origin"}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_nothing_of_a_page_is_wider_than_a_telephone(tmp_path: Path):
    """The page runs no script; this one, put beside it, asks the browser for the width of the laid-out page."""
    page = tmp_path / "narrow.html"
    text = build_page([recorded("a_name_without_any_space_" * 5), recorded("second", rate=2e-3)])
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    lines = "document.querySelectorAll('figure svg[role=img] path.line').length"
    script = f"document.title=document.documentElement.scrollWidth+' of '+innerWidth+', lines '+{lines}"
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    dom = browse(page, tmp_path, "--window-size=500,900", "--dump-dom")
    width, room, drawn = map(int, re.search(r"<title>(\d+) of (\d+), lines (\d+)</title>", dom).groups())
    assert width <= room
    assert drawn >= 12


# --- accel-trainer report ---------------------------------------------------------------------------------------------


def write_state(path: Path, *, updates: int = 4, loss: float = 1.0) -> None:
    """Write the state of any Trainer, as transformers writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    history = [{"step": step, "loss": loss / step, "learning_rate": 1e-3} for step in range(1, updates + 1)]
    path.write_text(json.dumps({"log_history": history, "global_step": updates, "max_steps": updates}))


def test_the_newest_checkpoint_of_a_run_of_any_trainer_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    for updates in (4, 10, 9):
        write_state(run / f"checkpoint-{updates}" / "trainer_state.json", updates=updates)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    assert "<title>run</title>" in page
    assert read_run(run).update == 10
    # A page that is there is no source of an older run than the run itself.
    write_state(run / "trainer_state.json", updates=12)
    assert read_run(run).update == 12


def test_a_page_of_the_run_that_was_there_before_is_no_source_of_a_new_one(tmp_path: Path):
    run = tmp_path / "run"
    write_state(run / "trainer_state.json", loss=3.0)
    assert main(["report", str(run)]) == 0
    write_state(run / "trainer_state.json", loss=7.0)  # another run of as many updates
    assert main(["report", str(run)]) == 0
    assert read_run(run / "report.html").curves["loss"][0] == (1, 7.0)


def test_a_loss_that_is_no_number_differs_from_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, last in (("a", 1.5), ("b", math.nan), ("c", math.nan)):
        write_state(tmp_path / name / "trainer_state.json")
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        state["log_history"][-1]["loss"] = last
        (tmp_path / name / "trainer_state.json").write_text(json.dumps(state))
    assert main(["report", "--diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "update 4: loss is 1.5 and nan; alike until update 3" in capsys.readouterr().out
    assert main(["report", "--diff", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    state = json.loads((tmp_path / "c" / "trainer_state.json").read_text())
    state["log_history"] = [{**entry, "loss": math.inf} for entry in state["log_history"]]
    (tmp_path / "c" / "trainer_state.json").write_text(json.dumps(state))
    assert main(["report", "--diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "update 1: loss is 1.0 and inf; the first that both have logged" in capsys.readouterr().out


def test_runs_are_compared_in_one_page_and_told_apart_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a/out", "b/out"):
        write_state(tmp_path / folder / "trainer_state.json", loss=len(folder))
    assert main(["report", "a/out", "b/out/trainer_state.json"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<title>2 runs compared</title>" in page
    assert "out (a/out), train" not in page  # neither has evaluations: the name of the run is enough
    assert "<li>" in page
    assert "out (b/out/trainer_state.json)" in page
    assert "These runs have recorded no configuration." in page
    assert main(["report", "a/out", "--output", "one.html"]) == 0
    assert read_run(tmp_path / "one.html").curves["loss"][0] == (1, 5.0)


def test_mistakes_are_one_line_and_the_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.json").write_text('{"log_history": [')
    (tmp_path / "other.json").write_text("[1, 2]")
    write_state(tmp_path / "good" / "trainer_state.json")
    for words, expected in {
        ("nowhere",): "nowhere does not exist; name the output_dir of a run",
        ("empty",): "empty holds neither trainer_state.json nor a checkpoint-N with one, nor a report.html; name the",
        ("cut.json",): "cut.json cannot be read as JSON",
        ("other.json",): "other.json is no state of a Trainer: it has no log_history; name a trainer_state.json",
        ("good", "--output", "no/such/page.html"): "page.html cannot be written (No such file or directory); name",
    }.items():
        paths = [word if word.startswith("--") else str(tmp_path / word) for word in words]
        assert main(["report", *paths]) == 2
        error = capsys.readouterr().err
        assert error.startswith("accel-trainer report: ")
        assert expected in error
        assert error.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        *(
            (
                json.dumps({"log_history": [], "global_step": 4, "max_steps": 4, **wrong}),
                "not hold what its writer puts",
            )
            for wrong in (
                {"global_step": "four"},
                {"max_steps": [1]},
                {"log_history": [1]},
                {"log_history": [{"loss": 10**400, "step": 1}]},
                {"log_history": [{"loss": 1.0, "step": "</script>"}]},
            )
        ),
        ("[" * 200_000, "RecursionError"),
    ],
    ids=["step", "length", "history", "huge", "markup", "brackets"],
)
def test_a_state_of_other_contents_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, message: str
):
    (tmp_path / "trainer_state.json").write_text(state)
    assert main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_in_a_folder_whose_name_is_of_another_encoding_has_a_page(tmp_path: Path):
    run = tmp_path / os.fsdecode(b"r\xe9sum\xe9")
    write_state(run / "trainer_state.json")
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert r"<title>r\udce9sum\udce9</title>" in (tmp_path / "page.html").read_text()


def test_the_page_is_made_without_torch(tmp_path: Path):
    write_state(tmp_path / "trainer_state.json")
    words = [sys.executable, "-X", "importtime", "-m", "accel_trainer", "report", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "accel_trainer.contrib.run_report.charts" in imported
    assert not imported & {"torch", "transformers", "numpy"}
