"""The kit for a day with a GPU: every part runs on a CPU, what was done is left out, and tables come from the lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "benchmarks" / "gpu" / "kit.py"
# `tests` runs tests/gpu, which this suite does itself.
PARTS = ("waits", "speed", "saving", "copies", "ranks")


def kit(*arguments: str, fails: bool = False) -> str:
    command = [sys.executable, str(KIT), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode != 0) == fails, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_on_a_cpu_and_is_left_out_the_second_time(tmp_path: Path):
    kit(*PARTS, "--device", "cpu", "--tiny", "--out", str(tmp_path))
    lines = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in PARTS
    }
    assert all(found[-1]["what"] == "done" and found[-1]["tiny"] for found in lines.values())
    assert [line["precision"] for line in lines["waits"][:-1]] == ["no", "bf16"]
    assert {line["peer"] for line in lines["speed"] if line["what"] == "speed"} >= {"plain", "native", "trainer"}
    assert lines["saving"][0]["stall_of_save"] > 0
    assert {line["strategy"]: line["agrees"] for line in lines["ranks"][:-1]} == {"ddp": True, "fsdp2": True}
    assert kit(*PARTS, "--device", "cpu", "--out", str(tmp_path)).count(": done before, see ") == len(PARTS)


def test_a_part_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path):
    assert "no part is called 'sped'; they are tests, waits, speed" in kit("sped", "--out", str(tmp_path), fails=True)


def test_the_tables_stand_between_the_marks_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(KIT.parent))
    import kit as module

    setting = {"date": "2026-11-22", "card": "a card", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.12.1"}
    lines = [
        {"what": "waits", "precision": "bf16", "per_update": 0.0, "lines": {}},
        {"what": "waits", "precision": "fp16", "per_update": 1.0, "lines": {"loss_scale.py:84": 4}},
        {"what": "done", "code": 0, "seconds": 12.5, "tiny": False, **setting},
    ]
    (tmp_path / "waits.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{module.BEGIN}old\n{module.END}after\n")
    module.write_docs(tmp_path, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "2026-11-22, a card, torch 2.13.0, transformers 5.23.0, Python 3.12.1; done after 12.5 s." in text
    assert "| precision | per_update | lines |\n| --- | --- | --- |\n| bf16 | 0 | - |\n" in text
    assert "| fp16 | 1 | loss_scale.py:84: 4 |\n" in text
    page.write_text("nothing")
    with pytest.raises(SystemExit, match=r"page\.md has no lines"):
        module.write_docs(tmp_path, page)
    assert module.BEGIN in module.DOCS.read_text()
