"""Updates whose loss is far above those before: found before the step, named by samples, left out or taken back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from accel_trainer.errors import ConfigError, NonFiniteError
from accel_trainer.trainer.loss_spikes import LossSpikes
from tests.cells import beyond
from tests.trainer_jobs import build_trainer, on_ranks

_SPIKE, _UPDATES = 25, 30


def test_a_spike_is_a_loss_so_many_deviations_above_the_median():
    """Of 1, 2, ..., 20 the median is 10.5 and the median deviation 5, which is 7.413 standard deviations."""
    spikes = LossSpikes(threshold=6.0)
    assert not any(map(spikes.look, range(1, 21)))
    assert spikes.look(10.5 + 5.9 * 7.413) == ""
    spikes._losses.pop()
    found = spikes.look(10.5 + 6.1 * 7.413)
    assert found == "the loss is 55.72, 6.1 deviations above the median of 10.5"
    assert spikes.look(float("nan")) == ""
    assert spikes.look(-1e9) == ""  # a fall is none


def test_losses_of_the_first_updates_are_no_spikes():
    spikes = LossSpikes(threshold=6.0)
    assert not any(map(spikes.look, [1.0] * 18 + [100.0]))


def test_ten_spikes_in_a_row_are_a_new_level(caplog: pytest.LogCaptureFixture):
    spikes = LossSpikes(threshold=6.0)
    assert not any(map(spikes.look, [1.0] * 30))
    assert all(map(spikes.look, [9.0] * 10))
    assert not any(map(spikes.look, [9.0] * 30))
    assert "10 losses in a row were spikes: training goes on at a new level" in caplog.text
    assert spikes.look(80.0)


class _Weights(TrainerCallback):
    def __init__(self) -> None:
        self.after: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        weight = next(model.parameters()).detach()
        self.after.append((weight.full_tensor() if hasattr(weight, "full_tensor") else weight).clone())


def train_with_spike(folder: str, *, strategy: str = "single", rank: int = 0, **options: Any) -> dict[str, Any]:
    """Train 30 updates, the 25th of which has a loss 50 times as large on one rank; return what came of it."""
    weights, messages = _Weights(), list[str]()
    given = {"max_steps": _UPDATES, "per_device_train_batch_size": 2, "learning_rate": 1e-3, **options}
    trainer = build_trainer(folder, strategy=strategy, samples=8 * _UPDATES, options={"callbacks": [weights]}, **given)
    rows = [trainer.train_dataset[index]["input_ids"].tolist() for index in range(8 * _UPDATES)]
    compute_loss, process, read = trainer.compute_loss, trainer.accelerator.process, list[list[int]]()
    micro_batches = trainer.args.gradient_accumulation_steps

    def spiking(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        read.append([rows.index(row) for row in inputs["input_ids"].tolist()])
        loss = compute_loss(model, inputs, *args, **kwargs)
        is_due = (len(read) - 1) // micro_batches + 1 == _SPIKE and process.rank == rank
        return loss * 50 if is_due else loss

    trainer.compute_loss = spiking
    error = ""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("trainer.loss_spikes", "runtime.nonfinite"):
            module = __import__(f"accel_trainer.{name}", fromlist=["logger"])
            patch.setattr(module.logger, "warning", lambda text, *words: messages.append(text % words))
        try:
            trainer.train()
        except NonFiniteError as raised:
            error = str(raised)
    begin = micro_batches * (_SPIKE - 1)
    named = [index for batch in read[begin : begin + micro_batches] for index in batch]
    return {
        "weights": weights.after, "messages": messages, "error": error, "named": named, "read": len(read),
        "step": trainer.state.global_step, "max_steps": trainer.state.max_steps,
    }  # fmt: skip


@pytest.mark.parametrize("strategy", ["single", beyond("ddp"), "fsdp"])
def test_an_update_that_spikes_is_left_out_and_named_by_its_samples(tmp_path: Path, strategy: str):
    ranks = on_ranks(
        strategy, train_with_spike, str(tmp_path), on_loss_spike="skip_batch",
        gradient_accumulation_steps=2,
    )  # fmt: skip
    for seen in ranks:
        weights = seen["weights"]
        assert torch.equal(weights[_SPIKE - 1], weights[_SPIKE - 2])
        assert not torch.equal(weights[_SPIKE], weights[_SPIKE - 1])
        assert (len(weights), seen["step"]) == (_UPDATES, _UPDATES)
    lists = [", ".join(map(str, seen["named"])) for seen in ranks]
    names = [f"samples of rank {rank}: {each}" for rank, each in enumerate(lists)]
    where = "; ".join(names) if len(ranks) > 1 else f"samples {lists[0]}"
    assert len(ranks[0]["messages"]) == 1
    assert re.fullmatch(
        rf"update {_SPIKE}: the loss is \S+, \S+ deviations above the median of \S+ \({where}\); it is left out",
        ranks[0]["messages"][0],
    )


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_rollback_goes_on_from_the_newest_checkpoint_with_the_data_behind(tmp_path: Path, strategy: str):
    ranks = on_ranks(
        strategy, train_with_spike, str(tmp_path), on_loss_spike="rollback", save_strategy="steps",
        save_steps=10,
    )  # fmt: skip
    for seen in ranks:
        assert (seen["error"], seen["step"], seen["max_steps"], seen["read"]) == ("", 25, 25, 30)
        assert len(seen["weights"]) == 29  # 24 updates, and 5 after the 20th again
    assert re.search(r"deviations above .*; the run goes back to \S*checkpoint-20", ranks[0]["messages"][0])


def test_a_warning_leaves_the_update_as_it_is(tmp_path: Path):
    warned = train_with_spike(str(tmp_path / "warned"), on_loss_spike="warn")
    plain = train_with_spike(str(tmp_path / "plain"))
    assert "the weights get it (on_loss_spike='warn')" in warned["messages"][0]
    assert plain["messages"] == []
    assert all(map(torch.equal, warned["weights"], plain["weights"]))


def test_a_rollback_without_a_checkpoint_is_an_error(tmp_path: Path):
    error = train_with_spike(str(tmp_path), on_loss_spike="rollback", save_strategy="no")["error"]
    assert re.search("on_loss_spike='rollback' has no checkpoint of this run to go back to yet", error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_loss_spike": "skip"}, "on_loss_spike='skip' is none of off, warn, skip_batch, rollback"),
        ({"loss_spike_threshold": 0.0}, "loss_spike_threshold=0.0 is a number of deviations"),
        ({"loss_spike_threshold": "6"}, "loss_spike_threshold='6' is a number of deviations"),
        ({"save_only_model": True}, "on_loss_spike='rollback' contradicts save_only_model=True"),
        ({"local_steps": 2}, "on_loss_spike='rollback' contradicts local_steps"),
        ({"optimizer_in_backward": True, "max_grad_norm": 0.0}, "on_loss_spike='rollback' contradicts optimizer_in"),
    ],
)
def test_a_spike_that_cannot_be_answered_is_refused(tmp_path: Path, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_trainer(tmp_path, **{"on_loss_spike": "rollback", **options})
