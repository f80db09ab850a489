"""`accel-trainer data preview`: the batches of a run's beginning as text and mask, how full they are, the mixture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from accel_trainer.launch.cli import main
from tests.documented_job import build_tokenizer

FILE = """\
dataset_mixture:
  datasets:
    - {{path: json, data_files: {folder}/films.jsonl, weight: 3}}
    - {{path: json, data_files: {folder}/plots.jsonl, weight: 1}}
  stopping_strategy: all_exhausted
per_device_train_batch_size: 2
max_length: 8
packing: true
tokenizer: {folder}/tokenizer
learning_rate: 1.0e-3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for name, texts in {"films": ["good film"] * 40, "plots": ["a very bad plot"] * 10}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return tmp_path


def test_a_preview_shows_text_mask_and_how_full_batches_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text(FILE.format(folder=folder))

    assert main(["data", "preview", str(folder / "run.yaml"), "--batches", "1"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"batch 0: 2 x 8 tokens, \d+ of 16 used \(\d+\.\d%\), \d+ documents", lines[0])
    text = "\n".join(lines)
    assert "  films: 2 tokens, 1 targets\n    - good\n    + film" in text
    assert "  plots: 4 tokens, 3 targets\n    - a\n    + very bad plot" in text
    assert text.count("batch ") == 1
    used, computed = map(int, re.search(r"batches: (\d+) of (\d+) used", text).groups())
    films, plots = (tuple(map(int, re.search(rf"^  {name}: (\d+) documents .*, (\d+) tokens", text, re.M).groups()))
                    for name in ("films", "plots"))  # fmt: skip
    assert films[0] * 2 == films[1]
    assert plots[0] * 4 == plots[1]
    assert films[1] + plots[1] == used > 0.9 * computed
    assert films[0] / plots[0] == pytest.approx(3, abs=1.5)


def test_a_preview_pads_as_the_run_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text(FILE.format(folder=folder) + "pad_batches_to_multiple_of: 32\n")
    assert main(["data", "preview", str(folder / "run.yaml"), "--batches", "1"]) == 0
    assert capsys.readouterr().out.startswith("batch 0: 2 x 32 tokens, ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pakcing: true", "unknown key 'pakcing'; did you mean 'packing'"),
        ("tokenizer: null", "films has columns text, and no tokens; add tokenizer: PATH"),
        ("train_sampling_strategy: group_by_length", "'group_by_length', whose batches a preview does not make"),
        ("dataset_mixture: null", "has no dataset_mixture, whose batches could be shown"),
    ],
)
def test_files_that_show_nothing_are_refused(
    line: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = line.split(":")[0]
    text = re.sub(rf"^{key}:.*\n( .*\n)*", "", FILE.format(folder=folder), flags=re.M)
    (folder / "run.yaml").write_text(f"{text}{line}\n")

    assert main(["data", "preview", str(folder / "run.yaml")]) == 2
    assert message in capsys.readouterr().err
