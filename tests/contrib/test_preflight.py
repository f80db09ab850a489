"""Preflight: what each rank will take is planned, and refused, before anything is prepared, exchanged or written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_trainer import Accelerator
from accel_trainer.config import LossImplementation
from accel_trainer.contrib.preflight import plan_training
from accel_trainer.errors import ConfigError
from tests.cells import beyond
from tests.contrib.test_planner import LAYOUTS, B, L, build, local, plan
from tests.loops import take_update
from tests.ranks import run_ranks
from tests.trainer_jobs import build_trainer, on_ranks


def planned_in_job(names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Plan within a job of real ranks, then train in it, in each of these layouts; return the figures."""
    return {name: plan_and_train(name) for name in names}


def plan_and_train(name: str) -> list[Any]:
    accelerator = Accelerator(cpu=True, config=LAYOUTS[name][1])
    torch.manual_seed(0)
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens_BL = torch.ones(B, L, dtype=torch.long)
    batch = {"input_ids": tokens_BL, "labels": tokens_BL}
    groups = dict(dist.distributed_c10d._world.pg_map)
    found = accelerator.preflight(model, optimizer, batch)
    assert found is not None
    assert groups == dict(dist.distributed_c10d._world.pg_map)
    before = [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        take_update(model(**batch).loss, optimizer, accelerator)
    total = accelerator.reduce(torch.ones(()), "sum").item()
    accelerator.free_memory()
    held = sum(local(p).nbytes for p in model.parameters())
    return [found.peak, found.parameters, held, total]


# Beyond the sample: what is in two others.
@pytest.mark.parametrize(
    ("num_processes", "names"),
    [(2, ("ddp", "fsdp2 bf16", "tp")), beyond((2, ("fsdp2",))), beyond((4, ("tp x fsdp2",)))],
)
def test_a_rank_of_a_job_plans_what_a_process_alone_plans_and_the_job_goes_on(
    num_processes: int, names: tuple[str, ...]
):
    by_rank = run_ranks(planned_in_job, num_processes, names, timeout=60)
    for name in names:
        alone = plan(num_processes, LAYOUTS[name][1], name=name)
        for peak, parameters, held, total in (found[name] for found in by_rank):
            assert (peak, parameters, total) == (alone.peak, alone.parameters, num_processes), name
            assert parameters == held, name


def planned_of_zero_3() -> list[Any]:
    """Plan a model that transformers has built in pieces, and in full, and say whether it was; see `building`."""
    options = {"deepspeed": {"zero_optimization": {"stage": 3}}, "mixed_precision": "bf16"}
    accelerator = Accelerator(cpu=True, config={"strategy": "deepspeed", **options})
    tokens_BL = torch.ones(B, L, dtype=torch.long)
    batch = {"input_ids": tokens_BL, "labels": tokens_BL}
    found = []
    for in_pieces in (True, False):
        with accelerator.strategy.building(in_pieces):
            model = build()
        plan = accelerator.preflight(model, torch.optim.AdamW(model.parameters()), batch)
        assert plan is not None
        has_pieces = any(p.numel() == 0 for p in model.parameters())
        found.append((has_pieces, plan.parameters, plan.peak, plan.flops))
    return found


def test_a_model_that_zero_3_has_built_in_pieces_is_planned_in_full():
    for in_pieces, in_full in run_ranks(planned_of_zero_3, 2, timeout=120):
        assert (in_pieces[0], in_full[0]) == (True, False)
        assert in_pieces[1:] == in_full[1:]


# --- a Trainer --------------------------------------------------------------------------------------------------------


def train_with(folder: str, *, strategy: str, mode: str = "refuse", **options: Any) -> Any:
    """Train with a plan in too little memory; return the losses, or the refusal and what was written until then."""
    trainer = build_trainer(folder, strategy=strategy, preflight=mode, max_steps=2, save_strategy="steps", **options)
    # Hardly too little: where no change of a run suffices, dozens of them are planned.
    trainer.args.preflight_memory = f"{int(1.05 * plan_training(trainer).plan.peak) - 1000}B"
    try:
        trainer.train()
    except ConfigError as error:
        return str(error), os.listdir(folder) if os.path.isdir(folder) else [], trainer.accelerator._prepared.units
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# One process is refused where the advice is looked at, too.
@pytest.mark.parametrize("strategy", [beyond("single"), beyond("ddp"), "fsdp"])
def test_a_run_that_will_not_fit_is_refused_on_every_rank_before_anything_is_written(tmp_path: Path, strategy: str):
    for rank, (message, written, units) in enumerate(on_ranks(strategy, train_with, str(tmp_path / "out"))):
        assert re.match(rf"rank {rank} is planned to take \d+\.\d+ KiB at the peak: \d+\.\d+ KiB parameters, ", message)
        assert "for a micro-batch of 4 rows; with the 5 % that a plan may miss it needs " in message
        sizes = re.search(r"it needs (\d+\.\d+) KiB, and (\d+\.\d+) KiB may be taken: ", message)
        assert sizes is not None
        assert float(sizes[1]) - float(sizes[2]) == pytest.approx(1000 / 1024, abs=0.02)
        assert message.endswith("TrainingArguments(preflight='warn') begins all the same")
        assert (written, list(units)) == ([], [])


def test_a_warning_changes_no_number(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    found = train_with(str(tmp_path / "warned"), strategy="single", mode="warn", dropout=0.1)
    assert "rank 0 is planned to take" in caplog.text
    reference = build_trainer(tmp_path / "plain", max_steps=2, dropout=0.1)
    reference.train()
    assert found == [entry["loss"] for entry in reference.state.log_history if "loss" in entry]


def test_the_advice_of_a_refusal_is_accepted_and_is_the_same_update(tmp_path: Path):
    planned = plan_training(build_trainer(tmp_path, preflight="warn", max_steps=1, gradient_accumulation_steps=2))
    limit = int(1.05 * planned.plan.peak) - 1000
    first, *_ = changes = planned.changes(limit)
    assert all(change.needed_bytes <= limit for change in changes)
    assert [change.slowdown for change in changes] == sorted(change.slowdown for change in changes)
    with pytest.raises(
        ConfigError, match=r"cheapest changes with which it fits\n  .*: about \d+\.\d+ KiB at the peak, "
    ):
        train_of(tmp_path, f"{limit}B")
    assert "per_device_train_batch_size=2 with gradient_accumulation_steps=4, the same update" in str(
        [change.text for change in changes]
    )
    planned.limit = limit
    rows = planned.largest_rows()
    assert rows in (1, 2)
    assert planned.replan(rows).rows == planned.plan.rows
    assert 1.05 * planned.replan(rows).peak <= limit
    assert first.plan.peak < planned.plan.peak
    train_of(tmp_path, f"{limit}B", per_device_train_batch_size=rows, gradient_accumulation_steps=8 // rows)


def test_a_loss_in_chunks_is_no_advice_for_a_model_without_a_head(tmp_path: Path):
    planned = plan_training(build_trainer(tmp_path, model="bert"))
    changes = planned.changes(1.05 * planned.plan.peak - 1000)
    assert changes
    assert not [change.text for change in changes if "loss" in change.options]
    with pytest.raises(ConfigError, match="BertForSequenceClassification has no head"):
        planned.replan(loss=LossImplementation.CHUNKED)


def train_of(folder: Path, memory: str, **options: Any) -> None:
    options = {"gradient_accumulation_steps": 2, **options}
    build_trainer(folder, preflight="refuse", preflight_memory=memory, max_steps=1, **options).train()


def test_the_longest_of_the_rows_is_planned(tmp_path: Path):
    trainer = build_trainer(tmp_path, preflight="warn")
    short = plan_training(trainer).plan
    row = trainer.train_dataset.rows[17]
    trainer.train_dataset.rows[17] = {name: each.repeat(3) for name, each in row.items()}
    trainer.data_collator = lambda rows: {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]
    }
    long = plan_training(trainer)
    assert long._workload.inputs["input_ids"].shape == (4, 36)
    assert long.plan.activations > 2 * short.activations


def test_a_stream_has_no_rows_to_plan_with(tmp_path: Path):
    trainer = build_trainer(tmp_path, preflight="refuse", max_steps=2)
    trainer.train_dataset = iter(trainer.train_dataset)
    with pytest.raises(
        ConfigError, match=r"rows of a iterator are not known .*accelerator.preflight\(model, optimizer"
    ):
        plan_training(trainer)


@pytest.mark.parametrize(("options", "message"), [({"preflight": "yes"}, "none of 'off', 'warn'"), (
    {"preflight_memory": "much"}, "'much' is no number of bytes")])  # fmt: skip
def test_a_wrong_word_is_refused_with_the_arguments(tmp_path: Path, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_trainer(tmp_path, **options)


# --- a loop of one's own ----------------------------------------------------------------------------------------------


def test_what_is_frozen_has_no_gradients_and_no_state():
    """As the base of adapters; a compiler is none of a plan's business."""
    accelerator = Accelerator(cpu=True, config={"compile": {"backend": "inductor"}})
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 8, bias=False))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([model[1].weight])
    found = accelerator.preflight(model, optimizer, {"input": torch.ones(4, 256)})
    frozen, trained = 4 * 256 * 256, 4 * 256 * 8
    assert (found.parameters, found.gradients) == (frozen + trained, trained)
    assert found.optimizer_state == pytest.approx(2 * trained, abs=64)


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_a_loop_plans_its_own_loss(caplog: pytest.LogCaptureFixture):
    accelerator = Accelerator(cpu=True)
    model, batch = nn.Linear(256, 256, bias=False), {"x": torch.ones(64, 256)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch["x"]) ** 2).mean()

    found = accelerator.preflight(model, optimizer, batch, compute_loss=loss)
    matrix, rows = 4 * 256 * 256, 4 * 64 * 256
    assert found is not None
    assert (found.parameters, found.gradients, found.optimizer_state) == (matrix, matrix, matrix)
    assert found.activations == 2 * rows + 4  # the input, what is squared, and the loss
    with pytest.raises(
        ConfigError,
        match=r"rank 0 is planned .* and 512\.00 KiB may be taken: nothing that is planned here (?s:.*)mode='warn'",
    ):
        accelerator.preflight(model, optimizer, batch, compute_loss=loss, memory=2 * matrix)
    branching = Branching(256, 256)
    options: dict[str, Any] = {"compute_loss": loss, "memory": "1GiB"}
    with pytest.raises(
        ConfigError, match=r"this run cannot be planned .*Branching cannot take a step on tensors without"
    ):
        accelerator.preflight(branching, torch.optim.SGD(branching.parameters(), lr=1.0), batch, **options)
    assert accelerator.preflight(branching, optimizer, batch, mode="warn", **options) is None
    assert "this run cannot be planned" in caplog.text
    with pytest.raises(ConfigError, match=r"'loud'. is neither 'refuse' nor 'warn'"):
        accelerator.preflight(model, optimizer, batch, mode="loud")  # type: ignore[arg-type]


def test_a_batch_may_have_numbers_beside_its_rows():
    accelerator = Accelerator(cpu=True)
    model, batch = nn.Linear(256, 256, bias=False), {"scale": torch.tensor(2.0), "x": torch.ones(1024, 256)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch["x"]) * batch["scale"]).mean()

    found = accelerator.preflight(model, optimizer, batch, compute_loss=loss)
    assert found is not None
    assert found.rows == 1024
    # Refused, with other numbers of rows.
    with pytest.raises(ConfigError, match=r"rank 0 is planned (?s:.*)the loader's batch_size=512"):
        accelerator.preflight(model, optimizer, batch, compute_loss=loss, memory=found.peak)
