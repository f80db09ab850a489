"""Training gives the numbers of the plain PyTorch loop, on one process, DDP and FSDP2."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import random
import sys
from collections import Counter
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import default_data_collator, set_seed

from accel_trainer.data.plan import permutation
from accel_trainer.trainer import Trainer
from tests.cells import crossed, selected
from tests.ranks import run_ranks
from tests.trainer_jobs import Hearing, TokenDataset, arguments, build_model, build_trainer, summary, train

GLOBAL_BATCH = 8
pytestmark = [
    pytest.mark.beside_accelerate,
    pytest.mark.timeout(240),
]


@functools.cache
def plain_loop(
    *, model: str = "llama", samples: int = 32, uneven: bool = False, accumulation: int = 1, epochs: int = 1,
    dropout: float = 0.0, clip: float = 1.0, global_batch: int = GLOBAL_BATCH, bf16: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The reference: AdamW, linear schedule, global batches in the seeded order, one token mean per update."""
    network = build_model(model, dropout=dropout)
    dataset = TokenDataset(samples, kind="class" if model == "bert" else "lm", uneven=uneven)
    set_seed(42)
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    steps = samples // global_batch * epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (steps - step) / steps))
    losses, norms, shifts = [], [], model in ("llama", "gpt2")
    for epoch in range(epochs):
        order = permutation(samples, 42, epoch).tolist()
        loader = DataLoader(
            dataset, batch_size=global_batch // accumulation, sampler=order, collate_fn=default_data_collator
        )
        batches = list(loader)
        for first in range(0, len(batches), accumulation):
            window = batches[first : first + accumulation]
            counts = [int((batch["labels"][:, 1:] if shifts else batch["labels"]).ne(-100).sum()) for batch in window]
            total = 0.0
            for batch, count in zip(window, counts, strict=True):
                # Those that shift labels divide by the number of items themselves; others return the mean of a batch.
                extra = {"num_items_in_batch": torch.tensor(sum(counts))} if shifts else {}
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = network(**batch, **extra).loss
                loss = loss if shifts else loss * (count / sum(counts))
                loss.backward()
                total += loss.item()
            norms.append(float(torch.nn.utils.clip_grad_norm_(network.parameters(), clip)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(total)
    weights = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    return {"losses": losses, "grad_norms": norms, "weights": weights}


def assert_same_run(run: dict[str, Any], reference: dict[str, Any], tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(run["losses"], reference["losses"], rtol=tolerance)
    np.testing.assert_allclose(run["grad_norms"], reference["grad_norms"], rtol=tolerance * 10)
    assert run["weights"].keys() == reference["weights"].keys()
    for name, values in reference["weights"].items():
        # AdamW divides by the root of tiny second moments: single weights move by up to lr on rounding noise.
        difference = np.abs(run["weights"][name] - values)
        assert difference.mean() < 1e-4, f"{name} differs by {difference.mean()} on average"


@pytest.mark.parametrize("model", ["llama", "bert", "gpt2"])
def test_one_process_gives_the_losses_of_the_plain_loop(tmp_path, model):
    run = train(tmp_path, model=model, uneven=True, per_device_train_batch_size=GLOBAL_BATCH, num_train_epochs=2)

    reference = plain_loop(model=model, uneven=True, epochs=2)

    np.testing.assert_allclose(run["losses"], reference["losses"], rtol=1e-6)
    np.testing.assert_allclose(run["grad_norms"], reference["grad_norms"], rtol=1e-5)


def test_dropout_draws_the_same_masks_as_the_plain_loop(tmp_path):
    run = train(tmp_path, model="gpt2", dropout=0.2, per_device_train_batch_size=GLOBAL_BATCH)

    reference = plain_loop(model="gpt2", dropout=0.2)

    np.testing.assert_allclose(run["losses"], reference["losses"], rtol=1e-6)


def run_on_two(folder: str, cells: list[tuple[str, str]]) -> dict[Any, Any]:
    """What all tests look at that needs two ranks."""
    found: dict[Any, Any] = {"uneven": uneven_run(folder, "ddp"), "skipping": train_skipping(folder)}
    for model, strategy in cells:
        found[strategy, model] = train(
            folder, strategy=strategy, model=model, uneven=True, per_device_train_batch_size=GLOBAL_BATCH // 2
        )
    return found | {(strategy, "twice"): run_twice(folder, strategy, 2) for strategy in ("ddp", "fsdp")}


@pytest.fixture(scope="module")
def on_two(request, tmp_path_factory) -> list[dict[Any, Any]]:
    cells = selected(request, "test_two_ranks_give_the_losses_of_one_process_at_the_same_global_batch")
    return run_ranks(run_on_two, 2, str(tmp_path_factory.mktemp("two")), cells, timeout=200)


@pytest.mark.multirank
@pytest.mark.parametrize(("strategy", "model"), crossed(["ddp", "fsdp", "fsdp_sharded"], ["llama", "gpt2"]))
def test_two_ranks_give_the_losses_of_one_process_at_the_same_global_batch(on_two, strategy, model):
    first, second = (found[strategy, model] for found in on_two)

    assert_same_run(first, plain_loop(model=model, uneven=True))
    assert first["losses"] == second["losses"]


def uneven_run(output_dir: str, strategy: str) -> list[float]:
    """Ranks have very different losses, nothing is learned, and nothing is logged before the end."""
    trainer = build_trainer(
        output_dir, strategy=strategy, samples=16, logging_steps=500, learning_rate=0.0,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    for index, row in enumerate(trainer.train_dataset.rows):
        if index % 8 >= 4:
            row["labels"] = torch.full_like(row["labels"], 5)
    result = trainer.train()
    return [result.training_loss, result.metrics["train_loss"]]


@pytest.mark.multirank
def test_train_loss_is_the_mean_over_ranks_also_for_what_was_never_logged(tmp_path, on_two):
    one = uneven_run(str(tmp_path), "single")

    first, second = (found["uneven"] for found in on_two)

    assert first == second
    assert first == pytest.approx(one, rel=1e-5)


def fail_before_backward(trainer: Any) -> Exception:
    """Fail in train() after the first forward; return the error, whose traceback holds all that was prepared."""
    compute = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        compute(*args, **kwargs)
        raise ArithmeticError("no backward")

    trainer.compute_loss = compute_loss
    with pytest.raises(ArithmeticError) as caught:
        trainer.train()
    del trainer.compute_loss
    return caught.value


def run_twice(output_dir: str, strategy: str, ranks: int) -> dict[str, Any]:
    trainer = build_trainer(output_dir, strategy=strategy, per_device_train_batch_size=GLOBAL_BATCH // ranks)
    failure = fail_before_backward(trainer)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    first = summary(trainer)
    trainer.train()
    assert str(failure) == "no backward"
    return {"before": before, "first": first, "second": summary(trainer), "after": trainer.evaluate()["eval_loss"]}


@pytest.mark.multirank
def test_evaluating_and_training_again_after_a_failure_too_go_on_from_the_weights_there_are(tmp_path, on_two):
    runs = [run_twice(str(tmp_path), "single", 1), *(on_two[0][name, "twice"] for name in ("ddp", "fsdp"))]
    for run in runs:
        assert_same_run(run["first"], plain_loop())
        assert run["second"]["losses"][0] < run["first"]["losses"][0]
        assert run["after"] != run["before"]


def test_a_stream_that_ends_inside_a_window_is_trained_as_one_short_window(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from TokenDataset(12).rows

    trainer = build_trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4)
    trainer.train_dataset = Stream()

    trainer.train()

    assert trainer.state.global_step == 4
    assert all(np.isfinite(summary(trainer)["losses"]))


def test_frozen_parameters_stay_as_they_are(tmp_path):
    trainer = build_trainer(tmp_path)
    trainer.model.model.embed_tokens.weight.requires_grad_(False)
    before = trainer.model.model.embed_tokens.weight.detach().clone()

    trainer.train()

    assert torch.equal(trainer.model.model.embed_tokens.weight, before)


def test_random_state_of_the_caller_is_seeded_as_upstream(tmp_path):
    build_trainer(tmp_path, seed=7)
    drawn = random.random()

    set_seed(7)

    assert drawn == random.random()


def test_a_train_that_failed_leaves_no_noise_behind(tmp_path):
    trainer = build_trainer(tmp_path, neftune_noise_alpha=5.0)
    embeddings = trainer.model.get_input_embeddings()
    for _ in range(2):
        fail_before_backward(trainer)
        assert not embeddings._forward_hooks
        assert not trainer.is_in_train


# --- layers that get no gradient in some updates: LayerDrop, experts without tokens ---

NUM_SKIPPING = 4


class Skipping(nn.Module):
    """Two layers, the second of which is left out where `skips` says so."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.rank, self.calls = rank, 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        hidden = self.first(x)
        if not skips(self.rank, self.calls):
            hidden = hidden + self.second(hidden)
        self.calls += 1
        return {"loss": (hidden**2).mean()}


def skips(rank: int, call: int) -> bool:
    """Every parameter is used in the first update; then rank 1 leaves the layer out, at last both do."""
    return call > 0 and (rank == 1 or call == NUM_SKIPPING - 1)


def flat_weights(model: Any) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def train_skipping(folder: str) -> list[list[float]]:
    """Train on this rank; the Trainer decides whether DDP looks for unused parameters."""
    args = arguments(
        folder, max_steps=NUM_SKIPPING, per_device_train_batch_size=1, learning_rate=0.1, max_grad_norm=0.0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    model = Skipping(args.process_index)
    Trainer(model, args, train_dataset=[{"x": torch.ones(2)}] * (2 * NUM_SKIPPING)).train()
    return flat_weights(model)


def train_alone() -> list[list[float]]:
    """Plain PyTorch: the mean of the two ranks' losses."""
    model = Skipping(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for step in range(NUM_SKIPPING):
        loss = torch.zeros(())
        for rank in range(2):
            model.rank, model.calls = rank, step
            loss = loss + model(torch.ones(1, 2))["loss"] / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return flat_weights(model)


@pytest.mark.multirank
def test_a_layer_that_later_updates_leave_out_neither_hangs_nor_gets_a_gradient(on_two):
    """A first backward that uses every parameter says nothing about the next one: DDP goes on looking."""
    for found in on_two:
        assert found["skipping"] == [pytest.approx(values, abs=1e-6) for values in train_alone()]


# --- the stock Trainer, where accelerate is installed: the same losses, and both work in one process ---

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
needs_accelerate = pytest.mark.skipif(not HAS_ACCELERATE, reason="Hugging Face accelerate is not installed")

PARITY_RUN: dict[str, Any] = {
    "num_train_epochs": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "samples": 26,
    "dropout": 0.1, "accelerator_config": {"even_batches": True},  # as the stock Trainer by default
}  # fmt: skip


def run_stock(output_dir: str) -> dict[str, Any]:
    transformers.utils.logging.disable_progress_bar()
    args = arguments(
        output_dir, **{key: value for key, value in PARITY_RUN.items() if key not in ("samples", "dropout")}
    )
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)} - {"fsdp_config"}
    stock = transformers.TrainingArguments(**{key: value for key, value in args.to_dict().items() if key in names})
    trainer = transformers.Trainer(
        build_model(dropout=PARITY_RUN["dropout"]),
        stock,
        train_dataset=TokenDataset(PARITY_RUN["samples"], uneven=True),
    )
    trainer.train()
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
    }


def run_ours(output_dir: str) -> dict[str, Any]:
    trainer = build_trainer(output_dir, uneven=True, **PARITY_RUN)
    trainer.train()
    return {key: summary(trainer)[key] for key in ("losses", "grad_norms")}


@needs_accelerate
def test_one_process_gives_exactly_the_losses_of_the_stock_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # accelerate sets it and leaves it
    ours, stock, again = run_ours(str(tmp_path)), run_stock(str(tmp_path)), run_ours(str(tmp_path))

    assert ours["losses"] == stock["losses"]
    assert ours["losses"] == again["losses"]
    assert ours["grad_norms"] == pytest.approx(stock["grad_norms"], rel=1e-5)


@needs_accelerate
@pytest.mark.multirank
def test_two_ranks_give_exactly_the_losses_of_the_stock_trainer(tmp_path):
    ours = run_ranks(run_ours, 2, str(tmp_path))
    stock = run_ranks(run_stock, 2, str(tmp_path), timeout=100)

    assert ours[0]["losses"] == stock[0]["losses"]


def test_accelerate_is_not_imported_by_a_run(tmp_path):
    trainer = build_trainer(tmp_path)
    before = "accelerate" in sys.modules

    trainer.train()

    # transformers imports it where it is installed; we add nothing to that.
    assert before is HAS_ACCELERATE
    assert ("accelerate" in sys.modules) is before


# --- what a user overrides in a step, and what a script does with one, is called and done as upstream does ---

STEPS, ACCUMULATION = 3, 2


class Normalized(nn.Module):
    """A model of which a user may freeze one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 64)
        self.modes: list[tuple[bool, bool]] = []

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **_: Any
    ) -> dict[str, torch.Tensor]:
        if torch.is_grad_enabled():  # not where the Trainer asks what the loss follows
            self.modes.append((self.training, self.norm.training))
        logits = self.head(self.norm(self.embed(input_ids).flatten(0, 1)))
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


class Counting(Normalized):
    """Does something of its own on train() and zero_grad()."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def train(self, mode: bool = True) -> Any:
        self.calls["train"] += 1
        super().train(mode)
        self.norm.train(False)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls["zero_grad"] += 1
        super().zero_grad(set_to_none)


def run_step(output_dir: Any, model: nn.Module, trainer_class: type[Trainer] = Trainer, **options: Any) -> Any:
    args = arguments(
        output_dir, per_device_train_batch_size=2, gradient_accumulation_steps=ACCUMULATION, max_steps=STEPS
    )  # fmt: skip
    trainer = trainer_class(model, args, train_dataset=TokenDataset(16), **options)
    trainer.train()
    return trainer


def test_a_layer_that_a_callback_put_into_evaluation_mode_is_back_in_training_mode_for_the_next_batch(tmp_path):
    model = Normalized()

    class Evaluating(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            model.norm.eval()

    run_step(tmp_path, model, callbacks=[Evaluating()])

    assert model.modes == [(True, True)] * STEPS * ACCUMULATION


def test_a_model_with_methods_of_its_own_has_them_called(tmp_path):
    model = Counting()
    run_step(tmp_path, model)

    assert model.modes == [(True, False)] * STEPS * ACCUMULATION
    assert model.calls["train"] >= STEPS * ACCUMULATION
    assert model.calls["zero_grad"] == STEPS + 1  # and once before the first


class Overriding(Trainer):
    def __init__(self, *args, **kwargs):
        self.calls: Counter[str] = Counter()
        super().__init__(*args, **kwargs)

    @contextmanager
    def autocast_smart_context_manager(self, cache_enabled=True):
        self.calls["context"] += 1
        yield

    def _prepare_input(self, data):
        self.calls["input"] += isinstance(data, torch.Tensor)
        return super()._prepare_input(data)

    def _clip_grad_norm(self, model):
        self.calls["clip"] += 1
        return super()._clip_grad_norm(model)

    def _track_num_input_tokens(self, inputs):
        self.calls["tokens"] += 1


def test_methods_of_a_subclass_are_called_for_every_micro_batch_or_update(tmp_path):
    trainer = run_step(tmp_path, Normalized(), Overriding)
    contexts = trainer.calls.pop("context")

    assert trainer.calls == {"input": STEPS * ACCUMULATION * 3, "clip": STEPS, "tokens": STEPS * ACCUMULATION}
    assert contexts >= STEPS * ACCUMULATION


def test_gradients_are_gone_after_an_update(tmp_path):
    trainer = run_step(tmp_path, Normalized())

    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_step_that_a_script_takes_by_itself_is_that_of_a_plain_loop(tmp_path):
    trainer = Trainer(build_model(), arguments(tmp_path), train_dataset=TokenDataset(4))
    batch = next(iter(trainer.get_train_dataloader()))

    loss = trainer.training_step(trainer.model, dict(batch))

    expected = build_model()
    expected(**batch).loss.backward()
    assert loss.item() == pytest.approx(expected(**batch).loss.item(), rel=1e-6)
    for (name, parameter), other in zip(trainer.model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_a_step_of_a_loop_of_ones_own_is_divided_as_upstream_divides_it(tmp_path):
    """A subclass with upstream's loop in its place says how many micro-batches its window has."""
    trainer = Trainer(build_model(), arguments(tmp_path), train_dataset=TokenDataset(4))
    batch = next(iter(trainer.get_train_dataloader()))
    whole = trainer.model(**batch).loss.item()
    num_labels = (batch["labels"][:, 1:] != -100).sum()
    trainer.current_gradient_accumulation_steps = 2

    assert trainer.training_step(trainer.model, dict(batch)).item() == pytest.approx(whole / 2, rel=1e-6)
    by_items = trainer.training_step(trainer.model, dict(batch), 2 * num_labels)
    assert by_items.item() == pytest.approx(whole / 2, rel=1e-6)


class Recording(Hearing):
    """Counts what it hears."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()

    def hear(self, event: str, *args: Any, **kwargs: Any) -> None:
        self.events[event] += 1


def test_callbacks_hear_what_they_listen_to_also_when_they_come_late(tmp_path):
    early, late = Recording(), Recording()

    class Adding(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.add_callback(late)

    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS)
    trainer = Trainer(Normalized(), args, train_dataset=TokenDataset(16), callbacks=[early, Adding()])
    trainer.train()

    for event in ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"):
        assert (early.events[event], late.events[event]) == (STEPS, STEPS - 1)
