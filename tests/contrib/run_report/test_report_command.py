"""`accel-trainer report`: a page from what runs have left on disk, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer.contrib.run_report.recorded_run import read_run
from accel_trainer.launch.cli import main

ROOT = Path(__file__).resolve().parents[2]


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
