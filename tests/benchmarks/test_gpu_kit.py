"""The kit for a day with a GPU: every part runs on a CPU, what was done is left out, and tables come from the lines."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import stand_in, warm
from tests.cells import beyond
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "accel_trainer.trainer.trainer", "transformers.models.llama.modeling_llama")

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "benchmarks" / "gpu" / "kit.py"


def kit(*arguments: str, fails: bool = False) -> str:
    command = [sys.executable, str(KIT), *arguments]
    finished = warm.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode != 0) == fails, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def run_part(name: str) -> list[dict[str, Any]]:
    """Return the lines of a part's script, which runs as the kit runs it but for imports that are done already."""
    sys.path.insert(0, str(KIT.parent))
    part = importlib.import_module("kit").PARTS[name]
    sys.argv = [part.script, "--device", "cpu", "--tiny", *part.arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        importlib.import_module(part.script.removesuffix(".py")).main()
    return [json.loads(line) for line in output.getvalue().splitlines() if line.startswith('{"what":')]


def lines_of(part: str) -> list[dict[str, Any]]:
    return run_ranks(run_part, 1, part, env={**stand_in.ALONE, "HF_HUB_OFFLINE": "1"}, timeout=200)[0]


@pytest.mark.parametrize("part", ["speed", beyond("recompute")])
def test_every_peer_is_timed_beside_a_plain_loop(part: str):
    by_peer = {line["peer"]: line for line in lines_of(part) if line["what"] == "speed"}
    assert by_peer.keys() >= {"plain", "native", "chunked", "trainer"}
    assert by_peer["plain"]["times_plain"] == 1
    assert all(line["recompute"] == (part == "recompute") for line in by_peer.values())
    assert (by_peer["native"]["bound"], by_peer["trainer"]["bound"]) == (1.02, 1.03)


def test_techniques_are_timed_beside_the_loop_without_any_or_left_out_by_name():
    lines = lines_of("techniques")
    timed = {line["technique"]: line for line in lines if line["what"] == "technique"}
    assert timed["none"]["times_without"] == 1
    assert timed["meters"]["bound"] == 1.005
    left_out = {line["technique"]: line["why"] for line in lines if line["what"] == "left out"}
    assert len(timed) + len(left_out) == 8
    assert all(why.startswith("no option ") for why in left_out.values())


def test_what_compiling_is_worth_is_timed_beside_the_loop_without():
    lines = lines_of("compiled")
    timed = [line["technique"] for line in lines if line["what"] == "technique"]
    assert timed == ["none", "compiled blocks", "CUDA graphs"]
    left_out = {line["technique"]: line["why"] for line in lines if line["what"] == "left out"}
    assert left_out == dict.fromkeys(("fp8", "fp8, compiled blocks"), "fp8 needs torchao and a card")


def test_waits_are_counted_per_precision():
    assert [line["precision"] for line in lines_of("waits")] == ["no", "bf16"]  # fp16 needs a card


def test_a_background_saves_stall_is_compared_with_a_save():
    (line,) = lines_of("saving")
    assert 0 < line["stall_of_save"] == pytest.approx(line["stall"] / line["save"], rel=1e-3)


def test_real_tokens_are_timed_padded_and_packed():
    by_way = {line["way"]: line for line in lines_of("packing")}
    assert by_way.keys() == {"padded", "packed"}  # a CPU has no backward of flex attention
    assert 1 <= by_way["packed"]["computed_per_real"] < by_way["padded"]["computed_per_real"]


def test_peaks_are_planned_beside_what_a_card_measures():
    lines = lines_of("peaks")
    assert len(lines) == 3  # of a quarter of the cases; fp16 needs a card
    assert all(line["planned_gib"] > 0 and line["measured_gib"] is None for line in lines)


def test_batches_that_are_copied_ahead_are_compared_with_others():
    (line,) = lines_of("copies")
    assert line["ratio"] == pytest.approx(line["ahead_s"] / line["when_used_s"], rel=1e-3)


def test_a_part_is_a_process_and_is_left_out_once_it_is_done(tmp_path: Path):
    options = ("ranks", "--device", "cpu", "--out", str(tmp_path))
    kit("--tiny", *options)
    *both, end = [json.loads(line) for line in (tmp_path / "ranks.jsonl").read_text().splitlines()]
    assert {line["strategy"]: line["holds"] for line in both} == {"ddp": True, "fsdp2": True, "cp": True}
    assert (end["what"], end["tiny"]) == ("done", True)
    (tmp_path / "ranks.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in ({**both[0], "holds": False}, end))
    )
    said = kit(*options)
    assert "ranks: done before, see " in said
    assert 'bound missed in ranks: {"what": "two ranks", "strategy": "ddp"' in said


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
    old = "### waits\n\nold\n\n### saving\n\nof another day\n\n"
    page.write_text(f"before\n{module.BEGIN}\n{old}{module.END}after\n")
    module.write_docs(tmp_path, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"### saving\n\nof another day\n\n{module.END}after\n")
    assert "old" not in text
    assert "2026-11-22, a card, torch 2.13.0, transformers 5.23.0, Python 3.12.1; done after 12.5 s." in text
    assert "| precision | per_update | lines |\n| --- | --- | --- |\n| bf16 | 0 | - |\n" in text
    assert "| fp16 | 1 | loss_scale.py:84: 4 |\n" in text
    page.write_text("nothing")
    with pytest.raises(SystemExit, match=r"page\.md has no lines"):
        module.write_docs(tmp_path, page)
    assert module.BEGIN in module.DOCS.read_text()
