"""Updates of each rank's own in the Trainer: a loop by hand, a resumed run, the mean that is saved and evaluated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from accel_trainer.config import resolve
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from tests.ranks import run_ranks
from tests.trainer_jobs import TokenDataset, build_model

UPDATES, ACCUMULATION, ROUND, AFTER, RATE, BOUND = 8, 2, 3, 1, 0.02, 0.5
OUTER = {"outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}
State = dict[str, torch.Tensor]


def build(directory: Path, **options: Any) -> Any:
    from accel_trainer import Trainer, TrainingArguments

    options = {"local_steps": ROUND, "local_steps_after": AFTER, **OUTER, **options}
    args = TrainingArguments(
        str(directory), use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=4, max_steps=UPDATES,
        gradient_accumulation_steps=ACCUMULATION, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=BOUND, logging_steps=1, save_steps=2, eval_strategy="steps", eval_steps=2, report_to=[],
        disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    # Two updates in an epoch are windows of two micro-batches, the third one has one.
    return Trainer(model=build_model(), args=args, train_dataset=TokenDataset(20), eval_dataset=TokenDataset(5, seed=9))


def copy_of(model: torch.nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def mean_of(model: torch.nn.Module) -> State:
    state = copy_of(model)
    for tensor in state.values():
        dist.all_reduce(tensor)
        tensor /= 2
    return state


def windows(directory: Path) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield this rank's micro-batches of each update."""
    loader = build(directory).get_train_dataloader()
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches = list(loader)
        yield from (batches[begin : begin + ACCUMULATION] for begin in range(0, len(batches), ACCUMULATION))


def by_hand(directory: Path) -> tuple[list[State], State]:
    """Return the mean of the replicas after each update, and the weights in the end."""
    model = build_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    outer_weights = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    outer = torch.optim.SGD(outer_weights, lr=0.7, momentum=0.9, nesterov=True)
    pairs = list(zip(parameters, outer_weights, strict=True))

    def exchange() -> None:
        for parameter, weight in pairs:
            dist.all_reduce(parameter.data)
            weight.grad = weight.detach() - parameter.detach() / 2
        outer.step()
        for parameter, weight in pairs:
            parameter.data.copy_(weight)

    means: list[State] = []
    for update, window in enumerate(itertools.islice(windows(directory), UPDATES), 1):
        for batch in window:
            (model(**batch).loss / len(window)).backward()
        if update <= AFTER:
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        torch.nn.utils.clip_grad_norm_(parameters, BOUND)
        optimizer.step()
        optimizer.zero_grad()
        if update == AFTER:
            for parameter, weight in pairs:
                weight.data.copy_(parameter.data)
        elif (update - AFTER) % ROUND == 0:
            exchange()
        means.append(mean_of(model))
    exchange()  # of the round that the run ends in
    return means, copy_of(model)


def train(directory: Path, resume: Path | None = None, **options: Any) -> tuple[State, dict[int, float], list[Any]]:
    """Return the weights in the end, the losses of evaluations by update, and those of training."""
    trainer = build(directory, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    history = trainer.state.log_history
    evaluated = {log["step"]: log["eval_loss"] for log in history if "eval_loss" in log}
    return copy_of(trainer.model), evaluated, [log["loss"] for log in history if "loss" in log]


def schedule_free(directory: Path) -> None:
    class Averaging(torch.optim.SGD):
        def eval(self) -> None: ...

        def train(self) -> None: ...

    trainer = build(directory)
    trainer.optimizer = Averaging(trainer.model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"local_steps=3 .* with Averaging, which puts other weights .*use another"):
        trainer.train()


def everything(directory: Path) -> dict[str, Any]:
    results = {"hand": by_hand(directory / "hand"), "whole": train(directory / "whole")}
    results["resumed"] = train(directory / "resumed", directory / "whole" / "checkpoint-6")
    with pytest.raises(IncompatibleCheckpointError, match="with an outer optimizer, and this run has none"):
        train(directory / "other", directory / "whole" / "checkpoint-6", outer_optimizer_lr=None)
    schedule_free(directory / "free")
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("local")
    return directory, run_ranks(everything, 2, directory, timeout=150)


@pytest.mark.multirank
def test_a_trainer_with_local_steps_is_a_loop_by_hand(results: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in results[1]:
        expected = found["hand"][1]
        for name, tensor in found["whole"][0].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    first, second = (found["whole"][0] for found in results[1])
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.multirank
def test_a_run_resumed_between_two_exchanges_is_the_interrupted_one(results: tuple[Path, list[Any]]) -> None:
    for found in results[1]:
        weights, evaluated, losses = found["whole"]
        resumed = found["resumed"]
        assert all(torch.equal(tensor, resumed[0][name]) for name, tensor in weights.items())
        assert resumed[1:] == (evaluated, losses)


@pytest.mark.multirank
def test_the_mean_of_the_replicas_is_evaluated_and_saved(results: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, (found, _) = results
    for update in (2, 6):
        mean = found["hand"][0][update - 1]
        saved = load_file(directory / "whole" / f"checkpoint-{update}" / "model.safetensors")
        model = build_model()
        model.load_state_dict(saved, strict=False)
        for name, tensor in saved.items():
            torch.testing.assert_close(tensor, mean[name], rtol=1e-6, atol=1e-6)
        rows = torch.utils.data.default_collate(list(TokenDataset(5, seed=9)))
        with torch.no_grad():
            assert found["whole"][1][update] == pytest.approx(model.eval()(**rows).loss.item(), abs=1e-5)


@pytest.mark.multirank
def test_one_process_goes_on_with_the_mean(results: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    directory, _ = results
    weights, _, losses = run_ranks(train, 1, tmp_path, directory / "whole" / "checkpoint-6")[0]
    assert len(losses) > 6
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fsdp2"}, r"local_steps=8 .*contradicts strategy=fsdp2 .*keeps no replica.*use strategy ddp"),
        ({"strategy": "deepspeed"}, r"local_steps=8 .*contradicts strategy=deepspeed"),
        ({"parallel": {"tp_size": 2}}, r"local_steps=8 .*contradicts strategy=fsdp2"),
        ({"mixed_precision": "fp16"}, r"local_steps=8 .*contradicts mixed_precision=fp16.*use bf16"),
        ({"ddp": {"static_graph": True}}, r"local_steps=8 .*contradicts ddp.static_graph=true.*leave static_graph out"),
        ({"on_nonfinite": "skip_step"}, r"local_steps=8 .*contradicts on_nonfinite=skip_step.*use raise or warn"),
        ({"outer_optimizer": {"momentum": 1.0}}, "outer_optimizer.momentum.* is 1.0; expected a number from 0 on and"),
        ({"local_steps": 0}, "local_steps.* is 0; expected a whole number of at least 1"),
    ],
)
def test_what_cannot_be_updated_apart_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(file={"local_steps": 8, **options})


def test_options_without_effect_are_named() -> None:
    notes = resolve(file={"local_steps_after": 5, "outer_optimizer": {"lr": 0.7}}).notes
    assert any("outer_optimizer.lr=0.7" in note and "local_steps=null" in note for note in notes)
    assert any("local_steps_after=5" in note for note in notes)
    notes = resolve(file={"local_steps": 5, "outer_optimizer": {"momentum": 0.5}}).notes
    assert any("outer_optimizer.momentum=0.5" in note and "outer_optimizer.lr=null" in note for note in notes)
