"""Figures of training under `perf/`, beside closed forms: on one rank and two, in a Trainer and in a loop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_trainer import Accelerator
from accel_trainer.errors import ConfigError
from accel_trainer.techniques import meters as meters_module
from accel_trainer.techniques.model_flops import ModelFlops
from tests.cells import crossed
from tests.ranks import preload, run_ranks
from tests.strategy_configs import HAS_DEEPSPEED, needs_deepspeed
from tests.trainer_jobs import VOCABULARY, build_model, build_trainer

preload("accel_trainer.accelerator", "transformers.trainer")
if HAS_DEEPSPEED:
    preload("deepspeed")

pytestmark = pytest.mark.timeout(300)  # the first step of torch's counter imports what it needs
PEAK = 1e12
LENGTHS = [12, 5, 9, 3, 12, 7, 8, 4, 11, 6, 2, 10, 12]


class Ragged(Dataset):
    """Rows of tokens of different lengths."""

    def __init__(self, lengths: list[int], pause: float = 0.0) -> None:
        self.lengths, self.pause = lengths, pause

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.pause)
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(3, VOCABULARY, (self.lengths[index],), generator=generator)}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the rows as a batch with a mask."""
    width = max(len(row["input_ids"]) for row in rows)
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        tokens[index, : len(row["input_ids"])] = row["input_ids"]
        mask[index, : len(row["input_ids"])] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def pack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the rows one after the other, as one with positions."""
    tokens = torch.cat([row["input_ids"] for row in rows])[None]
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.clone()}


def flops_of(lengths: list[int]) -> float:
    """Return the operations of the tiny llama for rows of these lengths, by hand."""
    attention = 32 * 32 * 2 + 2 * 32 * 16
    weights = 2 * (attention + 3 * 32 * 64) + 32 * VOCABULARY
    return 6 * weights * sum(lengths) + 12 * 2 * 32 * sum(length**2 for length in lengths)


def check(logs: list[dict[str, float]], lengths: list[int], num_ranks: int = 1, updates: int | None = None) -> None:
    """Compare what was logged in several parts with what they have to add up to."""
    seconds = [log["perf/step_seconds"] * log["steps"] for log in logs]
    assert all(each > 0 for each in seconds)
    if updates is not None:
        assert sum(log["steps"] for log in logs) == updates

    def total(name: str) -> float:
        return sum(log[f"perf/{name}"] * each for log, each in zip(logs, seconds, strict=True))

    assert total("tokens_per_second") == pytest.approx(sum(lengths))
    assert logs[-1]["perf/tokens_seen"] == sum(lengths)
    assert total("tflops_per_device") == pytest.approx(flops_of(lengths) / num_ranks / 1e12)
    assert total("mfu") == pytest.approx(flops_of(lengths) / num_ranks / PEAK)
    assert all(0.01 < log["perf/peak_memory_gib"] < 1000 for log in logs)
    assert all(("perf/peak_memory_rank" in log) == (num_ranks > 1) for log in logs)


def perf_logs(trainer: Any) -> list[dict[str, float]]:
    """Return the logs with figures, each with the number of its updates."""
    logs, last = [], 0
    for log in trainer.state.log_history:
        if "perf/step_seconds" in log:
            logs.append({**log, "steps": log["step"] - last})
            last = log["step"]
    return logs


def train(folder: Any, lengths: list[int] = LENGTHS, *, collate: Callable[..., Any] = pad, **changes: Any) -> Any:
    """Return a Trainer after its training: a shuffled epoch in micro-batches of two rows, and a log for each update."""
    options = {"data_collator": collate, **changes.pop("options", {})}
    resume = changes.pop("resume", None)
    changes = {"per_device_train_batch_size": 2, "meters": True, "peak_flops": PEAK, **changes}
    trainer = build_trainer(folder, options=options, **changes)
    trainer.train_dataset = trainer.eval_dataset = Ragged(lengths)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def loop(
    lengths: list[int], collate: Callable[..., Any] = pad, accumulation: int = 1, every: int = 3, **options: Any
) -> list[dict[str, float]]:
    """Return what a native loop logs every few updates, and at its end."""
    config = {"meters": True, "peak_flops": PEAK, **options.pop("config", {})}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, config=config, **options)
    model = build_model()
    loader = DataLoader(Ragged(lengths), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    logs, steps = [], 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        if accelerator.sync_gradients and (steps == every or loader.end_of_dataloader):
            logs.append({**accelerator.perf(), "steps": steps})
            steps = 0
    return logs


@pytest.mark.parametrize(("collate", "accumulation"), crossed([pad, pack], [1, 3]))
def test_figures_are_those_of_the_tokens_that_are_no_padding(tmp_path, collate: Any, accumulation: int):
    trainer = train(tmp_path, collate=collate, gradient_accumulation_steps=accumulation)
    check(perf_logs(trainer), LENGTHS, updates=-(-7 // accumulation))
    check(loop(LENGTHS, collate, accumulation), LENGTHS, updates=-(-7 // accumulation))


def test_samples_are_rows_and_batches_without_tokens_have_them_alone():
    logs = loop(LENGTHS)
    rows = sum(log["perf/samples_per_second"] * log["perf/step_seconds"] * log["steps"] for log in logs)
    assert rows == pytest.approx(len(LENGTHS))
    accelerator = Accelerator(cpu=True, config={"meters": True, "peak_flops": PEAK})
    layer = nn.Linear(4, 2)
    model, optimizer, loader = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters()), DataLoader([(torch.ones(4), torch.ones(2))] * 10, batch_size=4)
    )
    for inputs, targets in loader:  # without accumulate(), too
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
    figures = accelerator.perf()
    seconds = figures["perf/step_seconds"] * 3
    assert figures["perf/samples_per_second"] * seconds == pytest.approx(10)
    assert figures["perf/mfu"] * seconds * PEAK == pytest.approx(2 * 2 * 4 * 2 * 10)  # the input needs no gradient
    assert not figures.keys() & {"perf/tokens_per_second", "perf/tokens_seen"}
    assert accelerator.perf().keys() == {"perf/peak_memory_gib"}  # nothing since


def test_without_the_option_nothing_is_counted(tmp_path):
    assert loop(LENGTHS, config={"meters": False}) == [{"steps": 3}, {"steps": 3}, {"steps": 1}]
    trainer = train(tmp_path, meters=False)
    assert not any(name.startswith("perf/") for log in trainer.state.log_history for name in log)


def of_strategy(strategy: str, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the logs of a Trainer and of a loop on this rank."""
    found = {}
    changes: dict[str, Any] = {"parallelism_config": sizes} if sizes else {"strategy": strategy}
    with tempfile.TemporaryDirectory() as folder:
        found["trainer"] = perf_logs(train(folder, **changes))
    if strategy == "ddp":  # tests/conformance has loops on the others
        found["loop"] = loop(LENGTHS, config={"strategy": strategy})
    return found


def on_ranks(folder: str) -> dict[str, Any]:
    """Return the logs of each layout, and what a loop that saves in the folder, and one that goes on, have seen."""
    found = {"ddp": of_strategy("ddp"), "fsdp": of_strategy("fsdp"), "tp": of_strategy("fsdp", {"tp_size": 2})}
    found["seen"] = {"saved": go_on(folder, resume=False), "resumed": go_on(folder, resume=True)}
    return found | ({"zero3": of_strategy("zero3")} if HAS_DEEPSPEED else {})


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def both(state: str) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2, state, timeout=250)


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("zero3", marks=needs_deepspeed)])
def test_figures_of_two_ranks_are_those_of_all(strategy: str, both: list[dict[str, Any]]):
    # The last of four global batches has one row: rank 1 trains along with a filler, which does not count.
    first, second = (found[strategy] for found in both)
    for name, logs in first.items():
        check(logs, LENGTHS, 2, updates=4)
        shared, others = (
            [{key: value for key, value in log.items() if key.startswith("perf/")} for log in each]
            for each in (logs, second[name])
        )
        assert shared == others


@pytest.mark.multirank
def test_tokens_that_two_ranks_read_together_count_once(both: list[dict[str, Any]]):
    for found in both:
        for logs in found["tp"].values():
            check(logs, LENGTHS, 2, updates=7)


def test_evaluations_and_saves_are_no_time_of_training(tmp_path):
    begin = time.perf_counter()
    trainer = train(
        tmp_path, [8] * 4, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        per_device_eval_batch_size=1, options={"callbacks": []},
    )  # fmt: skip
    wall = time.perf_counter() - begin
    seconds = sum(log["perf/step_seconds"] for log in perf_logs(trainer))
    around = trainer.run_clock.evaluation_seconds + trainer.run_checkpoints.metrics.stalled_seconds
    assert 0 < seconds <= wall - around


def test_a_pass_that_trains_nothing_and_a_save_pause_a_loops_clock(tmp_path):
    accelerator = Accelerator(cpu=True, config={"meters": True, "peak_flops": PEAK})
    model = build_model()
    loaders = [DataLoader(Ragged([8] * 4, pause), 1, collate_fn=pad) for pause in (0.0, 0.05)]
    model, optimizer, loader, slow = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), *loaders)
    begin = time.perf_counter()
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        for held_out in slow:
            model(**held_out)
        save = time.perf_counter()
        accelerator.save_state(tmp_path / "state")
        begin += time.perf_counter() - save
    wall = time.perf_counter() - begin
    assert accelerator.perf()["perf/step_seconds"] * 4 <= wall - 4 * 4 * 0.05


def test_a_resumed_trainer_goes_on_with_the_tokens_seen(tmp_path):
    # The save lies between two logs.
    whole = train(tmp_path, save_strategy="steps", save_steps=3, logging_steps=2)
    resumed = train(tmp_path, logging_steps=2, resume=str(tmp_path / "checkpoint-3"))
    seen = [[(log["step"], log["perf/tokens_seen"]) for log in perf_logs(run)] for run in (whole, resumed)]
    assert seen[0] == seen[1]
    assert [step for step, _ in seen[0]] == [2, 4, 6]
    # The rate is that of the update since the resume, and not of the one before it.
    log = perf_logs(resumed)[1]
    assert log["perf/samples_per_second"] * log["perf/step_seconds"] == pytest.approx(2)


def go_on(folder: str, resume: bool) -> Any:
    """Return the tokens seen after a part of an epoch in a loop, which saves, or goes on from there."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, config={"meters": True})
    model = build_model()
    loader = DataLoader(Ragged(LENGTHS), batch_size=1, collate_fn=pad)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, 3)
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if index == 2 and not resume:
            accelerator.save_state(folder)
            break
    return accelerator.perf()["perf/tokens_seen"]


def test_a_resumed_loop_goes_on_with_the_tokens_seen(tmp_path):
    assert go_on(str(tmp_path / "state"), resume=False) == sum(LENGTHS[:3])
    assert go_on(str(tmp_path / "state"), resume=True) == sum(LENGTHS)


@pytest.mark.multirank
def test_two_ranks_go_on_with_the_tokens_of_all(both: list[dict[str, Any]], state: str):
    # Three rounds of two rows have been read; the last round has one.
    assert [found["seen"] for found in both] == [{"saved": sum(LENGTHS[:6]), "resumed": sum(LENGTHS)}] * 2
    assert go_on(state, resume=True) == sum(LENGTHS[:6]) + sum(LENGTHS[3:])  # which skips three rows by hand


def test_a_run_that_goes_back_forgets_the_tokens_of_the_updates_that_it_takes_back(tmp_path):
    trainer = build_trainer(
        tmp_path, options={"data_collator": pad}, meters=True, peak_flops=PEAK, per_device_train_batch_size=2,
        save_strategy="steps", save_steps=2, on_nonfinite="rollback",
    )  # fmt: skip
    trainer.train_dataset = Ragged([8] * 16)
    step, losses = trainer.compute_loss, []

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        losses.append(None)
        loss = step(*args, **kwargs)
        return loss * float("nan") if len(losses) == 4 else loss

    trainer.compute_loss = compute_loss
    trainer.train()
    logs = perf_logs(trainer)
    # Data goes on behind the update that failed: two of eight updates, 3 and 4, are taken back.
    assert trainer.state.global_step == 6
    assert logs[-1]["perf/tokens_seen"] == 6 * 2 * 8


def test_an_unknown_device_is_told_of_once_with_the_option(caplog):
    logs = loop(LENGTHS, config={"peak_flops": None})
    assert all("perf/mfu" not in log and "perf/tflops_per_device" in log for log in logs)
    lines = [record.getMessage() for record in caplog.records if "perf/mfu" in record.getMessage()]
    assert len(lines) <= 1  # of this process: an earlier test may have been told
    meters = meters_module.StepMeters(Accelerator(cpu=True).process, None, lambda: 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accel_trainer.logging._said", set())
        caplog.clear()
        for _ in range(2):
            assert "perf/mfu" not in meters._utilisation(1e12, meters._gather(1.0))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the peak rate of 'cpu' is not known" in line
    assert "TrainingArguments(peak_flops=989e12)" in line


def test_a_peak_in_other_units_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"peak_flops.*989.*operations a second of one device, 1e9 at least"):
        Accelerator(cpu=True, config={"meters": True, "peak_flops": 989})
    with pytest.raises(ConfigError, match=r"peak_flops.*989.*operations a second of one device, 1e9 at least"):
        train(tmp_path, peak_flops=989)


def test_a_formula_that_is_off_gives_way_to_the_counter(monkeypatch, caplog):
    monkeypatch.setattr(ModelFlops, "by_formula", classmethod(lambda cls, model: cls(per_token=1.0)))
    logs = loop([12] * 6)
    flops = sum(log["perf/mfu"] * log["perf/step_seconds"] * log["steps"] for log in logs) * PEAK
    assert flops == pytest.approx(flops_of([12] * 6))
    assert any("those of the counter are taken" in record.getMessage() for record in caplog.records)


class Asking(nn.Module):
    """Branches on a value, which the counter's copy does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


def test_a_model_that_neither_formula_nor_counter_know_has_no_flops(caplog):
    accelerator = Accelerator(cpu=True, config={"meters": True, "peak_flops": PEAK})
    layer = Asking()
    model, loader = accelerator.prepare(layer, DataLoader([torch.ones(4)] * 4, batch_size=2))
    for batch in loader:
        accelerator.backward(model(batch).sum())
    assert not any("flops" in name or "mfu" in name for name in accelerator.perf())
    assert any("torch's counter cannot follow this model" in record.getMessage() for record in caplog.records)


def test_the_meters_draw_no_random_number_and_change_no_loss(tmp_path):
    losses = []
    for on in (False, True):
        trainer = build_trainer(tmp_path / str(on), model="gpt2", dropout=0.3, samples=12, meters=on, peak_flops=PEAK)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == losses[1]


def test_a_report_shows_what_was_logged(tmp_path):
    trainer = train(tmp_path, report_html=True)
    page = Path(tmp_path / "report.html").read_text()
    mfu = perf_logs(trainer)[-1]["perf/mfu"]
    assert "<dt>MFU</dt>" in page
    assert f"{100 * mfu:.1f}%" in page
    assert "without padding" in page
