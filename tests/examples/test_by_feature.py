"""The scripts of examples/by_feature run, and show what they say they show."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cells import beyond
from tests.ranks import preload, run_ranks

pytest.importorskip("sklearn")
datasets = pytest.importorskip("datasets")
preload("accel_trainer.accelerator", "evaluate", "sklearn.datasets")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "by_feature"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "digits")

# What each script prints, with options that make it short.
EXPECTED = {
    "automatic_batch_size": (
        ["--epochs", "1", "--starting_batch_size", "64", "--pretend_limit", "50"],
        r"trying 64 .*\n.*trying 57 .*\n.*trying 51 .*\n.*trying 45 .*\n.*finished with a loss of \d",
    ),
    "checkpointing": (["--epochs", "1"], r"begins at step 0 in epoch 0\n.*finished after step 47 with a loss of"),
    "distributed_evaluation": ([], r"accuracy (0\.[89]\d+) over 297 samples, and \1 by shares"),
    "early_stopping": (["--threshold", "0.5"], r"stopped after \d+ steps"),
    "gradient_accumulation": (["--epochs", "1", "--steps", "5"], r"epoch 0: 19 updates, last loss \d"),
    "gradient_clipping": (["--epochs", "1"], r"\d+ of 47 updates were clipped to a norm of 0\.5"),
    "mixed_precision": (
        ["--epochs", "1", "--output_dtype", "kept"],
        r"logits torch\.bfloat16, weights torch\.float32, loss \d\.\d+, 0 updates skipped",
    ),
    "mixture": (["--updates", "20"], r"epoch 0: 1?\d% small digits at first, [45]\d% then, last loss \d\.\d+"),
    "packing": (
        ["--epochs", "1"],
        r"epoch 0: loss \d\.\d+ over \d+ targets\n.*\d+ documents in \d+ rows: 99\.\d% real tokens, padded \d\d\.\d%",
    ),
    "profiling": ([], r"ProfilerStep\* (.*\n)+.*aten::"),
    "several_models": (["--epochs", "1"], r"epoch 0: discriminator \d\.\d+, generator \d\.\d+"),
    "several_optimizers": ([], r"accuracy 0\.[789]\d+"),
    "streaming": (["--stop_after", "5"], r"epoch 0: (160|320) digits, a stop, \d+ digits, 1797 in all"),
    "token_weighted_loss": (
        ["--epochs", "2"],
        r"epoch 0: loss 1\.\d+ over 1503 tokens\n.*epoch 1: loss 0\.\d+ over 1503",
    ),
    "tracking": (["--epochs", "1"], r"print: \{'epochs': 1.*\nprint: step 0: \{'train/loss': \d"),
    "uneven_data": (["--epochs", "1"], r"100 samples in 1 epochs, sum of weights \d+"),
}

# Two ranks take half as many steps, and each prints what it alone sees.
EXPECTED_ON_TWO = {
    "checkpointing": (["--epochs", "1"], r"begins at step 0 in epoch 0\n.*finished after step 24 with a loss of"),
    "gradient_accumulation": (["--epochs", "1", "--steps", "5"], r"epoch 0: 10 updates, last loss \d"),
    "gradient_clipping": (["--epochs", "1"], r"\d+ of 24 updates were clipped to a norm of 0\.5"),
}


# For which a stream of parquet files sleeps at its end, until pyarrow's threads are gone: 5 s, twice in one script.
SLEEP = "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.2


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a script as `python script arguments` would, in this process: its imports are paid for already."""

    def run_here(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(FOLDER / f"{script}.py"), *arguments])
        monkeypatch.setattr(datasets.config, *SLEEP)
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_here


def test_every_script_is_expected_to_print_something():
    assert sorted(EXPECTED) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_has_help(script: str, run: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    assert len((FOLDER / f"{script}.py").read_text().splitlines()) < 80
    with pytest.raises(SystemExit, match="0"):
        run(script, "--help")
    text = capsys.readouterr().out
    assert f"examples/by_feature/{script}.py" in text
    assert "--epochs" in text


# A script is in the sample on one process or on two ranks.
@pytest.mark.parametrize("script", [beyond(name) if at % 2 else name for at, name in enumerate(SCRIPTS)])
def test_a_script_runs_in_one_process(script: str, run: Callable[..., str]):
    arguments, expected = EXPECTED[script]
    assert re.search(expected, run(script, "--cpu", *arguments))


def test_checkpointing_ends_where_a_run_that_was_never_stopped_ends(run: Callable[..., str]):
    (finished,) = re.findall("finished after step 94.*", run("checkpointing", "--cpu", "--project_dir", "whole"))
    assert "finished" not in run("checkpointing", "--cpu", "--stop_after", "65")
    text = run("checkpointing", "--cpu", "--resume")
    assert "begins at step 60 in epoch 1" in text
    assert finished in text


def test_tracking_writes_to_tensorboard(run: Callable[..., str], tmp_path: Path):
    pytest.importorskip("tensorboard")
    run("tracking", "--cpu", "--epochs", "1", "--log_with", "tensorboard", "--project_dir", "logs")
    assert list(tmp_path.glob("logs/digits/events.out.tfevents.*"))


def test_profiling_writes_a_trace(run: Callable[..., str], tmp_path: Path):
    run("profiling", "--cpu", "--output_trace_dir", "traces")
    assert [path.name for path in tmp_path.glob("traces/*")] == ["profile_0.json"]


def run_on_rank(script: str, arguments: list[str], folder: str) -> str:
    """Run a script on this rank; return what it printed."""
    os.chdir(folder)
    setattr(datasets.config, *SLEEP)
    sys.path.insert(0, str(FOLDER))  # as for a script
    sys.argv = [str(FOLDER / f"{script}.py"), *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(sys.argv[0], run_name="__main__")
    return printed.getvalue()


@pytest.mark.multirank
@pytest.mark.parametrize(
    "script",
    [name if at % 2 and name != "uneven_data" else beyond(name) for at, name in enumerate(SCRIPTS)],  # which is below
)
def test_a_script_runs_on_two_ranks(script: str, tmp_path: Path):
    arguments, expected = EXPECTED_ON_TWO.get(script, EXPECTED[script])
    printed, other = run_ranks(run_on_rank, 2, script, ["--cpu", *arguments], str(tmp_path), timeout=100)
    assert re.search(expected, printed)
    assert other == ""


@pytest.mark.multirank
def test_the_numbers_of_a_script_do_not_depend_on_the_ranks(run: Callable[..., str], tmp_path: Path):
    arguments, expected = EXPECTED["uneven_data"]
    printed, other = run_ranks(run_on_rank, 2, "uneven_data", ["--cpu", *arguments], str(tmp_path), timeout=100)
    assert re.search(expected, printed)
    assert other == ""
    assert run("uneven_data", "--cpu", *arguments).strip() in printed
