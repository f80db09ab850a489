"""A run explains itself: the blocks of its beginning and its end, its times, and what its checkpoints say of it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers import default_data_collator as collate
from transformers.utils import logging as transformers_logging

from accel_trainer.contrib.run_report.recorded_run import Option, read_run
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.trainer.run_clock import PHASES, UPDATE_DONE, DeviceSample, RunClock
from tests.ranks import run_ranks
from tests.trainer_jobs import build_trainer

ALONE = ProcessContext(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), backend=None)
UPSTREAM = logging.getLogger("transformers.trainer")


def block(records: list[logging.LogRecord], title: str) -> dict[str, str]:
    """The rows of the one block with this title."""
    (text,) = [record.getMessage() for record in records if record.getMessage().startswith(f"***** {title} *****")]
    return dict(line.strip().split(" = ", 1) for line in text.splitlines()[1:])


def test_a_run_begins_with_one_block_that_says_who_set_what(tmp_path, info_log, monkeypatch):
    (tmp_path / "train.yaml").write_text("debug: true\n\nmixed_precision: bf16\n")
    monkeypatch.setenv(
        "ACCEL_TRAINER_LAUNCH",
        json.dumps({"config_file": str(tmp_path / "train.yaml"), "flags": {"timeout_seconds": "600"}}),
    )
    monkeypatch.setenv("ACCEL_TRAINER_DATA__NON_BLOCKING", "true")
    trainer = build_trainer(tmp_path / "out", num_train_epochs=2, gradient_accumulation_steps=2, hub_token="hf_abc")
    trainer.train()
    rows = block(info_log.records, "Running training")
    assert rows.pop("Devices").startswith("cpu, ")
    given = rows.pop("Set by arguments").split(", ")
    number = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert rows == {
        "Strategy": "single, 1 rank on 1 node",
        "Precision": "parameters in float32, computed in bfloat16, gradients reduced in float32",
        "Model": f"LlamaForCausalLM, {number:,} parameters, {number:,} trainable",
        "Examples": "32",
        "Global batch": "8 samples = 4 x 2 x 1 (micro-batch x accumulation x ranks)",
        "Updates": "8 in 2 epochs of 4",
        "Checkpoints": "none",
        "Resume": "none, from the beginning",
        f"Set in {tmp_path / 'train.yaml'}": "mixed_precision=bf16 (line 3), debug=true (line 1)",
        "Set in the environment": "data.non_blocking=true (ACCEL_TRAINER_DATA__NON_BLOCKING)",
        "Set by flags": "timeout_seconds=600.0 (--timeout_seconds)",
    }
    assert {"learning_rate=0.01", "num_train_epochs=2", "use_cpu=true", "hub_token=***"} <= set(given)
    assert not any(each.startswith(("weight_decay", "logging_dir", "mixed_precision")) for each in given)
    assert "hf_abc" not in info_log.text


def test_lines_of_upstream_that_say_the_same_are_left_out_of_that_run_alone(tmp_path, info_log):
    trainer = build_trainer(tmp_path, max_steps=1)
    trainer.train()
    assert info_log.text.count("Running training") == 1
    assert "Instantaneous batch size" not in info_log.text
    assert UPSTREAM.filters == []

    class Stop(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("stopped")

    trainer.add_callback(Stop())
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    assert UPSTREAM.filters == []


def test_a_log_level_that_hides_upstreams_block_hides_ours(tmp_path, caplog):
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    try:
        build_trainer(tmp_path, max_steps=1).train()
    finally:
        transformers_logging.set_verbosity(level)
    assert "*****" not in caplog.text


class Slow(torch.utils.data.Dataset):
    """Rows that take their time to be read."""

    def __init__(self, rows: Any, seconds: float) -> None:
        self.rows, self.seconds = rows, seconds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.rows[index]


def test_the_end_says_loss_throughput_memory_and_where_the_time_went(tmp_path, info_log):
    trainer = build_trainer(tmp_path, num_train_epochs=1, eval_strategy="epoch", save_strategy="epoch")
    trainer.train_dataset = Slow(trainer.train_dataset, 0.005)
    trainer.eval_dataset = Slow(trainer.eval_dataset, 0.02)
    begin = time.perf_counter()
    output = trainer.train()
    wall = time.perf_counter() - begin
    rows = block(info_log.records, "Training finished")
    assert rows["Loss"].startswith(f"{output.training_loss:.4g}"[:4])
    assert "(eval_loss)" in rows["Loss"]
    assert "samples/s" in rows["Throughput"]
    assert "tokens/s" in rows["Throughput"]
    assert rows["Peak memory"].endswith("iB")
    record = trainer.run_report.to_plain()
    seconds = record["seconds"]
    assert list(seconds) == [*PHASES, "other", "total"]
    assert sum(seconds[name] for name in (*PHASES, "other")) == pytest.approx(seconds["total"], abs=0.01)
    assert seconds["total"] >= wall * 0.9
    assert 32 * 0.005 <= seconds["data"] < 32 * 0.005 + wall - 11 * 0.02
    assert seconds["evaluation"] >= 11 * 0.02
    assert seconds["checkpoints"] == pytest.approx(trainer.run_checkpoints.metrics.stalled_seconds, abs=1e-3)
    assert 0 < seconds["checkpoints"] < seconds["total"]
    assert seconds["forward + backward"] > 0
    assert seconds["exposed communication"] == 0


def test_an_update_without_a_log_runs_no_function_of_the_record(tmp_path):
    trainer = build_trainer(tmp_path, logging_steps=100, max_steps=6)
    calls: list[tuple[int, str]] = []

    def note(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).name in ("run_clock.py", "callback.py", "setup.py"):
            calls.append((trainer.state.global_step, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    assert {step for step, _ in calls} == {0, 6}
    assert "on_epoch_begin" in {name for _, name in calls}


def throughput_of(trainer: Any) -> list[tuple[int, float]]:
    return [(step, rate) for step, rate, _ in trainer.run_report._points]


def test_throughput_leaves_out_evaluations_and_saves(tmp_path):
    trainer = build_trainer(tmp_path, logging_steps=2, eval_strategy="steps", eval_steps=2, num_train_epochs=1)
    trainer.eval_dataset = Slow(trainer.eval_dataset, 0.05)
    trainer.train_dataset = Slow(trainer.train_dataset, 0.005)
    trainer.train()
    points = throughput_of(trainer)
    assert [step for step, _ in points] == [2, 4, 6, 8]
    # 8 samples of two updates take 0.04 s to be read; with an evaluation in between it would be 0.6 s.
    assert all(8 / 0.55 < rate < 8 / 0.04 for _, rate in points)
    tokens = trainer.run_clock.num_tokens
    assert tokens == 32 * 12


def test_a_run_that_goes_back_leaves_no_points_of_updates_that_were_taken_back(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "on_nonfinite": "rollback", "logging_steps": 1}
    trainer = build_trainer(tmp_path, max_steps=8, **options)
    compute_loss, calls = trainer.compute_loss, []

    def poison(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        loss = compute_loss(*args, **kwargs)
        return loss * float("nan") if trainer.state.global_step == 5 and len(calls) < 7 else loss

    trainer.compute_loss = poison
    trainer.train()
    points = throughput_of(trainer)
    assert len(calls) > trainer.state.global_step > 4
    assert [step for step, _ in points] == list(range(1, trainer.state.global_step + 1))
    assert all(rate > 0 for _, rate in points)


def test_a_resumed_run_goes_on_with_the_curves_of_the_first(tmp_path, info_log):
    first = build_trainer(tmp_path, save_strategy="steps", save_steps=4)
    first.train()
    second = build_trainer(tmp_path, save_strategy="steps", save_steps=4)
    info_log.clear()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert (
        block(info_log.records, "Running training")["Resume"] == f"{tmp_path / 'checkpoint-4'} at update 4, epoch 0.50"
    )
    assert [step for step, _ in throughput_of(second)] == list(range(1, 9))
    assert throughput_of(second)[:4] == throughput_of(first)[:4]
    seconds = second.run_report.to_plain()["seconds"]
    assert seconds["checkpoints"] >= second.checkpoint_metrics["resume/load_s"]
    assert json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["log_history"][0].keys() == {
        "epoch", "grad_norm", "learning_rate", "loss", "step",
    }  # fmt: skip


def test_record_and_page_keep_what_saves_and_the_resume_cost(tmp_path):
    build_trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    trainer = build_trainer(tmp_path, save_strategy="steps", save_steps=4, report_html=True)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    cost = {name: pytest.approx(value, abs=1e-4) for name, value in trainer.checkpoint_metrics.items()}
    assert cost.keys() >= {"goodput", "ckpt/stall_s", "resume/load_s"}
    page = read_run(tmp_path / "report.html")
    assert {name: page.figures[name] for name in cost} == cost
    assert "<dt>Goodput</dt>" in (tmp_path / "report.html").read_text()
    # The record of update 8 was written before its save had ended, and before the end of the run.
    figures = read_run(tmp_path / "checkpoint-8").figures
    assert figures["resume/load_s"] == cost["resume/load_s"]
    assert "goodput" not in figures


def test_a_checkpoint_is_enough_for_the_page(tmp_path):
    trainer = build_trainer(tmp_path / "out", save_strategy="epoch", run_name="named", weight_decay=0.25)
    trainer.train()
    run = read_run(tmp_path / "out")
    assert (run.name, run.update) == ("named", 8)
    assert set(run.curves) == {"loss", "grad_norm", "learning_rate", "samples_per_second", "memory_bytes"}
    assert [step for step, _ in run.curves["loss"]] == list(range(1, 9))
    assert run.options["weight_decay"] == Option("0.25", "argument", is_set=True)
    assert not run.options["adam_beta1"].is_set
    assert run.seconds["total"] > 0


def test_report_html_writes_the_page_at_the_end(tmp_path, info_log):
    trainer = build_trainer(tmp_path, report_html=True, eval_strategy="epoch", run_name="<script>alert(1)</script>")
    trainer.train()
    page = tmp_path / "report.html"
    assert block(info_log.records, "Training finished")["Report"] == str(page)
    run = read_run(page)
    assert run.name == "<script>alert(1)</script>"
    assert "<script>alert" not in page.read_text()
    assert run.figures["train_loss"] == pytest.approx(trainer.state.log_history[-1]["train_loss"])
    assert run.figures["eval_loss"] > 0


def test_a_page_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    output = build_trainer(tmp_path, report_html=True, max_steps=2).train()
    assert output.global_step == 2
    assert f"the report {tmp_path / 'report.html'} could not be written (IsADirectoryError" in caplog.text
    assert f"`accel-trainer report {tmp_path}` makes it" in caplog.text


class LateOnOneRank:
    """A collator with which rank 1 comes late to each exchange of gradients."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, rows: list[Any]) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(self.seconds)
        return collate(rows)


def train_with_a_late_rank(output_dir: str, strategy: str) -> dict[str, Any]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    library = logging.getLogger("transformers")
    library.addHandler(Keep())
    library.setLevel(logging.INFO)
    trainer = build_trainer(
        output_dir, strategy=strategy, samples=96, report_html=True, options={"data_collator": LateOnOneRank(0.03)}
    )
    output = trainer.train()
    begun = [text for text in records if text.startswith("***** Running training")]
    ended = [text for text in records if text.startswith("***** Training finished")]
    seconds = trainer.run_report.to_plain()["seconds"]
    return {"begun": begun, "ended": ended, "seconds": seconds, "updates": output.global_step}


@pytest.mark.multirank
def test_a_rank_that_waits_for_gradients_says_so_under_ddp(tmp_path):
    waiting, late = run_ranks(train_with_a_late_rank, 2, str(tmp_path), "ddp", timeout=100)
    updates = waiting["updates"]
    assert waiting["seconds"]["exposed communication"] > 0.6 * 0.03 * updates
    assert late["seconds"]["data"] > 0.9 * 0.03 * updates
    assert late["seconds"]["exposed communication"] < waiting["seconds"]["exposed communication"]
    assert waiting["seconds"]["data"] < 0.5 * late["seconds"]["data"]
    assert "Strategy = ddp, 2 ranks on 1 node" in waiting["begun"][0]
    assert "exposed communication" in waiting["ended"][0]
    assert "rank" in waiting["ended"][0]  # of the peak memory
    assert (late["begun"], late["ended"]) == ([], [])
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.multirank
def test_what_a_sharded_run_cannot_measure_it_does_not_tell(tmp_path):
    main, _ = run_ranks(train_with_a_late_rank, 2, str(tmp_path), "fsdp", timeout=100)
    assert main["seconds"]["exposed communication"] is None
    assert "exposed communication not measured" in main["ended"][0]
    assert "Strategy = fsdp2, mesh shard=2, 2 ranks on 1 node" in main["begun"][0]
    assert "Model = LlamaForCausalLM, 22,688 parameters, 22,688 trainable, 11,344 on this rank" in main["begun"][0]


class Emptying(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs.clear()


def train_with_logs_kept_back(output_dir: str) -> list[Any]:
    records = list[Any]()
    for callbacks in ([], [Emptying()]):
        trainer = build_trainer(output_dir, max_steps=2, report_html=True, options={"callbacks": callbacks})
        if not callbacks:
            log = trainer.log
            trainer.log = lambda logs, *rest, log=log: log(logs, *rest) if int(os.environ["RANK"]) == 0 else None
        trainer.train()
        records.append(trainer.run_report._final)
    return records


@pytest.mark.multirank
def test_a_run_ends_with_its_figures_whichever_rank_or_callback_keeps_logs_back(tmp_path):
    main, other = run_ranks(train_with_logs_kept_back, 2, str(tmp_path), timeout=100)
    for record in [*main, *other]:
        assert len(record["figures"]["peak_memory_bytes"]) == 2
        assert record["figures"]["tokens_per_second"] > 0
    assert read_run(tmp_path / "report.html").figures["tokens_per_second"] > 0


class FakeEvent:
    """An event of a device whose clock is the number of records."""

    clock = 0.0

    def __init__(self, is_passed: bool = True) -> None:
        self.is_passed, self.at = is_passed, -1.0

    def record(self) -> None:
        FakeEvent.clock += 10.0
        self.at = FakeEvent.clock

    def query(self) -> bool:
        return self.is_passed

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def mark_updates(sample: DeviceSample, number: int = 1) -> None:
    for _ in range(number):
        for boundary in range(4):
            sample.mark(boundary)


def test_a_sample_takes_the_events_of_one_update_after_those_it_lets_pass():
    sample = DeviceSample([FakeEvent() for _ in range(4)], num_skipped=2)
    mark_updates(sample, 2)
    assert not sample.is_complete
    mark_updates(sample)
    assert sample.is_complete
    taken = sample.seconds()
    assert taken == [0.01, 0.01, 0.01]
    sample.mark(UPDATE_DONE)  # of the updates until the next log
    assert sample.seconds() == taken


def test_on_an_accelerator_one_update_stands_for_those_between_two_logs():
    clock = RunClock(ALONE)
    clock.is_sampled = True
    clock.compute_seconds = 1e6  # the host's, which says nothing there
    clock.sample = DeviceSample([FakeEvent() for _ in range(4)], num_skipped=0)
    mark_updates(clock.sample)
    clock._begin -= 100.0
    clock.take_sample(5)
    seconds = clock.split(0.0, None)
    assert seconds["data"] == pytest.approx(0.05)
    assert seconds["forward + backward"] == pytest.approx(0.05)
    assert seconds["exposed communication"] is None
    assert sum(value for name, value in seconds.items() if value and name != "total") == pytest.approx(seconds["total"])


def test_without_a_sample_the_times_of_updates_are_not_measured():
    clock = RunClock(ALONE)
    clock.is_sampled = True
    clock.sample = DeviceSample([FakeEvent(is_passed=False) for _ in range(4)], num_skipped=0)
    clock.take_sample(3)
    seconds = clock.split(0.0, 0.5)
    assert [seconds[name] for name in ("data", "forward + backward", "exposed communication", "update")] == [None] * 4
    assert seconds["other"] == pytest.approx(seconds["total"])
