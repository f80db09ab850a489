"""An update's loss is one mean over micro-batches and ranks, whatever computes it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from accel_trainer.data.plan import permutation
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.trainer import Trainer
from accel_trainer.trainer.loop import WindowReader
from accel_trainer.trainer.loss import LossKind
from accel_trainer.trainer.run_clock import RunClock
from tests.cells import beyond, crossed, selected
from tests.ranks import run_ranks
from tests.strategy_configs import needs_deepspeed
from tests.trainer.test_training import plain_loop
from tests.trainer_jobs import TokenDataset, arguments, build_model, build_trainer, strategy_arguments, train

pytestmark = pytest.mark.timeout(240)  # the first test waits for the runs that all look at


@pytest.mark.parametrize(
    ("model", "accumulation", "bf16"),
    crossed(["llama", "gpt2", "bert", "t5"], [(3, False), (3, True), (1, False)]),
)
def test_updates_give_the_losses_of_a_loop_written_by_hand(tmp_path, model, accumulation, bf16):
    run = train(
        tmp_path, model=model, samples=72, uneven=True, gradient_accumulation_steps=accumulation, bf16=bf16,
        per_device_train_batch_size=6 // accumulation,
    )  # fmt: skip

    reference = plain_loop(model=model, samples=72, uneven=True, accumulation=accumulation, bf16=bf16, global_batch=6)

    assert len(run["losses"]) == 12
    np.testing.assert_allclose(run["losses"], reference["losses"], rtol=0, atol=5e-7)


def next_tokens(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def last_token_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over rows."""
    return functional.cross_entropy(logits[:, -2], labels[:, -1])


class Counting(Trainer):
    """Passes on what the model's own loss is, and counts."""

    num_calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert model.training
        assert torch.is_grad_enabled()
        self.num_calls += 1
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Penalized(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.0 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class OfRows(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = last_token_mean(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class OfRowsBesideTheModels(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        _, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = last_token_mean(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class ByItems(Trainer):
    """Divides by itself, by a tensor or by a Python number; as ranks are averaged, it multiplies by their number."""

    as_number = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        num_items = num_items_in_batch.item() if self.as_number else num_items_in_batch
        loss = next_tokens(outputs.logits, labels, "sum") / num_items * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class ByNumberOfItems(ByItems):
    as_number = True


class Logging(Trainer):
    """Looks at the number of items, and does not divide by it."""

    seen = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen += 0 if num_items_in_batch is None else num_items_in_batch.item()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Stated(OfRows):
    loss_is_scaled_for_ga = False


def loss_by_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return next_tokens(outputs.logits, labels, "sum") / num_items_in_batch


def loss_by_rows(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return last_token_mean(outputs.logits, labels)


def alignments(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return last_token_mean(logits, labels)


BY_ITEMS, MODEL_MEAN, ROW_MEAN = LossKind.BY_ITEMS, LossKind.MODEL_MEAN, LossKind.ROW_MEAN
# The Trainer, the model, further arguments; and the kind that is found.
LOSSES: dict[str, tuple[type[Trainer], str, dict[str, Any], LossKind]] = {
    "llama": (Trainer, "llama", {}, BY_ITEMS),
    "bert": (Trainer, "bert", {}, MODEL_MEAN),
    "t5": (Trainer, "t5", {}, MODEL_MEAN),
    "t5, called by an override": (Counting, "t5", {}, MODEL_MEAN),
    "t5, logging": (Logging, "t5", {}, MODEL_MEAN),
    "t5, penalized": (Penalized, "t5", {}, MODEL_MEAN),
    "llama, penalized": (Penalized, "llama", {}, BY_ITEMS),
    "alignments, of rows with any number of labels": (Trainer, "aligning llama", {}, ROW_MEAN),
    "rows": (OfRows, "llama", {}, ROW_MEAN),
    "rows, stated": (Stated, "llama", {}, ROW_MEAN),
    "rows, beside the model's loss": (OfRowsBesideTheModels, "llama", {}, ROW_MEAN),
    "by items": (ByItems, "llama", {}, BY_ITEMS),
    "by a number of items": (ByNumberOfItems, "llama", {}, BY_ITEMS),
    "function by items": (Trainer, "llama", {"compute_loss_func": loss_by_items}, BY_ITEMS),
    "function by rows": (Trainer, "llama", {"compute_loss_func": loss_by_rows}, ROW_MEAN),
    "smoothed": (Trainer, "llama", {"label_smoothing_factor": 0.1}, BY_ITEMS),
    "smoothed, no keyword arguments": (Trainer, "plain llama", {"label_smoothing_factor": 0.1}, MODEL_MEAN),
}


def build(output_dir: str, name: str, **changes: Any) -> Trainer:
    """Return a Trainer over rows with unequally many labels, in updates of 12, 12 and 6 rows."""
    trainer_class, model, options, _ = LOSSES[name]
    functions = {key: value for key, value in options.items() if callable(value)}
    settings = {key: value for key, value in options.items() if key not in functions}
    network = build_model(model.rpartition(" ")[2])
    if model.startswith("plain"):
        network.accepts_loss_kwargs = False  # as models say that cannot pass them on
    if model.startswith("aligning"):
        network.loss_type, network.loss_function = "ForCTCLoss", alignments
    data = TokenDataset(30, kind="class" if model == "bert" else "lm", uneven=True)
    args = arguments(output_dir, optim="sgd", learning_rate=0.01, **settings, **changes)
    return trainer_class(network, args, train_dataset=data, **functions)


def losses_of(output_dir: str, names: list[str], strategy: str = "single", **changes: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        trainer = build(output_dir, name, **strategy_arguments(strategy), **changes)
        trainer.train()
        found[name] = means_of(trainer)
    return found


def means_of(trainer: Trainer) -> list[list[float]]:
    """Return the losses and the gradient norms of a run."""
    history = trainer.state.log_history
    return [[entry[key] for entry in history if key in entry] for key in ("loss", "grad_norm")]


def assert_same_means(found: list[list[float]], reference: list[list[float]], name: str) -> None:
    np.testing.assert_allclose(found[0], reference[0], rtol=2e-6, err_msg=f"{name}: losses")
    # Rounding grows in the gradients of t5, whose attention is sharp.
    np.testing.assert_allclose(found[1], reference[1], rtol=5e-5, err_msg=f"{name}: norms")


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, Any]:
    """Each update in one batch on one process: its mean is the loss function's own."""
    return losses_of(str(tmp_path_factory.mktemp("one")), list(LOSSES), per_device_train_batch_size=12)


@pytest.mark.parametrize("name", LOSSES)
def test_an_update_in_micro_batches_has_the_mean_of_one_batch_by_the_kind_that_is_found(
    tmp_path, references, name, caplog
):
    caplog.set_level("INFO", "accel_trainer")
    trainer = build(str(tmp_path), name, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    accepted, function, smoother = trainer.model_accepts_loss_kwargs, trainer.compute_loss_func, trainer.label_smoother

    trainer.train()

    assert_same_means(means_of(trainer), references[name], name)
    assert trainer._loss_normalization.kind is LOSSES[name][-1]
    assert trainer.model_accepts_loss_kwargs is (accepted and LOSSES[name][-1] is BY_ITEMS)
    if accepted and not trainer.model_accepts_loss_kwargs:
        means = "labels" if LOSSES[name][-1] is MODEL_MEAN else "rows"
        assert f"its losses are averaged over micro-batches and processes by their {means}" in caplog.text
    assert trainer.compute_loss_func is function
    assert trainer.label_smoother is smoother


def run_on_two(folder: str, cells: list[tuple[str, str]]) -> dict[Any, Any]:
    """What all tests look at that needs two ranks."""
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    found: dict[Any, Any] = {}
    for strategy in ("ddp", "fsdp"):
        names = [name for name, own in cells if own == strategy]
        found[strategy] = losses_of(folder, names, strategy, **steps)
        found[strategy, "mixture"] = train_mixture(folder, strategy, 3)
        found[strategy, "calls"] = count_calls(folder, strategy)
        found[strategy, "items"] = numbers_of_items(folder, strategy)
        found[strategy, "masked"] = masked_eval_loss(folder, strategy, 2)
    return found


@pytest.fixture(scope="module")
def on_two(request, tmp_path_factory) -> list[dict[Any, Any]]:
    cells = selected(request, "test_an_update_on_two_ranks_has_the_mean_of_one_batch")
    return run_ranks(run_on_two, 2, str(tmp_path_factory.mktemp("two")), cells, timeout=200)


# Found on one process, they weigh on ranks as others of their kind.
FOUND_ON_ONE = (
    "t5, called by an override", "t5, logging", "llama, penalized", "rows, stated", "rows, beside the model's loss",
    "by a number of items",
)  # fmt: skip


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        *crossed(["ddp", "fsdp"], [name for name in LOSSES if name not in FOUND_ON_ONE]),
        *map(beyond, itertools.product(["ddp", "fsdp"], FOUND_ON_ONE)),
    ],
)
def test_an_update_on_two_ranks_has_the_mean_of_one_batch(references, on_two, strategy, name):
    assert_same_means(on_two[0][strategy][name], references[name], name)


def mixture() -> Any:
    """Return a mixture of experts whose loss has a term that balances them, as large as that of the tokens."""
    network = build_model("mixtral")
    network.config.output_router_logits, network.router_aux_loss_coef = True, 4.0
    return network


def rows_for_a_mixture() -> tuple[Any, list[int]]:
    """Return data and its order; the second micro-batch of 2 rows has no label, as where long prompts are cut."""
    data, order = TokenDataset(24, uneven=True), permutation(24, 42, 0).tolist()
    for index in order[2:4]:
        data.rows[index]["labels"] = torch.full_like(data.rows[index]["labels"], -100)
    return data, order


@functools.cache
def balanced_loop() -> list[list[float]]:
    """Losses and norms of 2 updates of 6 micro-batches: each one's mean, with its term, counts by its labels."""
    network, (data, order) = mixture(), rows_for_a_mixture()
    losses, norms = [], []
    for update in range(2):
        batches = []
        for first in range(12 * update, 12 * update + 12, 2):
            rows = [data[index] for index in order[first : first + 2]]
            batches.append({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        counts = [int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches]
        means = [network(**batch).loss * count for batch, count in zip(batches, counts, strict=True) if count]
        loss = torch.stack(means).sum() / sum(counts)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0).item())
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.01 * (1 - update / 2) * parameter.grad
                parameter.grad = None
    return [losses, norms]


def train_mixture(output_dir: str, strategy: str, accumulation: int) -> list[list[float]]:
    args = arguments(
        output_dir, optim="sgd", learning_rate=0.01, per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation, **strategy_arguments(strategy),
    )  # fmt: skip
    trainer = Trainer(mixture(), args, train_dataset=rows_for_a_mixture()[0])
    trainer.train()
    return means_of(trainer)


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_term_that_balances_experts_counts_once_in_an_update(tmp_path, on_two, strategy):
    for found in (train_mixture(str(tmp_path), "single", 6), *(each[strategy, "mixture"] for each in on_two)):
        assert_same_means(found, balanced_loop(), strategy)


@pytest.mark.multirank
@needs_deepspeed
def test_a_term_that_balances_experts_counts_once_under_an_engine(tmp_path):
    for found in run_ranks(train_mixture, 2, str(tmp_path), "zero3", 3, timeout=100):
        assert_same_means(found, balanced_loop(), "zero3")


def test_so_it_does_where_the_model_returns_a_tuple(tmp_path, monkeypatch):
    reference, mixture_class = balanced_loop(), type(mixture())
    forward = mixture_class.forward

    @functools.wraps(forward)
    def tuple_forward(self, **inputs):
        return forward(self, **inputs).to_tuple()

    monkeypatch.setattr(mixture_class, "forward", tuple_forward)

    assert_same_means(train_mixture(str(tmp_path), "single", 6), reference, "a tuple")


def count_calls(output_dir: str, strategy: str) -> list[int]:
    args = arguments(
        output_dir, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        **strategy_arguments(strategy),
    )  # fmt: skip
    found = []
    for model, data in (("llama", TokenDataset(32)), ("bert", TokenDataset(32, kind="class"))):
        trainer = Counting(build_model(model), args, train_dataset=data)
        forwards = []
        trainer.model.register_forward_hook(lambda *_, forwards=forwards: forwards.append(torch.is_grad_enabled()))
        trainer.train()
        found += [trainer.num_calls, sum(forwards), len(forwards)]
    return found


@pytest.mark.multirank
def test_an_override_is_called_once_for_each_micro_batch(tmp_path, on_two):
    # The model is asked twice, for n and 2n items.
    assert count_calls(str(tmp_path), "single") == [6, 6, 8, 6, 6, 8]
    for strategy in ("ddp", "fsdp"):
        assert [found[strategy, "calls"] for found in on_two] == [[6, 6, 8, 6, 6, 8]] * 2, strategy


def numbers_of_items(output_dir: str, strategy: str) -> list[tuple[str, int]]:
    """Return what the model gets to divide by, once the strategy has cast its inputs."""
    seen = []

    class Looking(Trainer):
        def _prepare_for_training(self, *args, **kwargs):
            prepared = super()._prepare_for_training(*args, **kwargs)

            def look(_model, _args, kwargs):
                if not torch.is_grad_enabled():
                    return  # the Trainer asks the model what its loss follows
                seen.append((str(kwargs["num_items_in_batch"].dtype), kwargs["num_items_in_batch"].item()))

            self.model.register_forward_pre_hook(look, with_kwargs=True)
            return prepared

    args = arguments(
        output_dir, per_device_train_batch_size=20, max_steps=1, bf16=True, **strategy_arguments(strategy)
    )  # fmt: skip
    Looking(build_model(), args, train_dataset=TokenDataset(39, uneven=True)).train()
    return seen


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_number_of_items_is_not_cast_to_the_models_dtype(on_two, strategy):
    # 353: bf16 has 352 and 354.
    labels = TokenDataset(39, uneven=True).rows
    num_items = sum(int((row["labels"][1:] != -100).sum()) for row in labels)
    assert num_items != torch.tensor(num_items).bfloat16().item()

    for found in on_two:
        assert found[strategy, "items"] == [("torch.int64", num_items)]


def test_a_second_train_finds_the_kind_anew(tmp_path):
    trainer = build_trainer(tmp_path, model="bert", gradient_accumulation_steps=2, samples=8)
    trainer.train()
    trainer.args.gradient_accumulation_steps = 1
    trainer.train()
    assert trainer.model_accepts_loss_kwargs
    trainer.args.gradient_accumulation_steps = 2
    trainer.train()

    assert trainer._loss_normalization.kind is MODEL_MEAN


def masked_eval_loss(output_dir: str, strategy: str, batch_size: int) -> float:
    """Evaluate a masked language model, whose loss is its own mean over the masked tokens, after one update."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    args = arguments(
        output_dir, max_steps=1, learning_rate=0.0, per_device_eval_batch_size=batch_size,
        **strategy_arguments(strategy),
    )  # fmt: skip
    data = TokenDataset(11, kind="lm", uneven=True)
    trainer = Trainer(transformers.BertForMaskedLM(config), args, train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer.evaluate()["eval_loss"]


@pytest.mark.multirank
def test_the_eval_loss_of_a_masked_model_is_the_token_mean_whatever_the_batches(tmp_path, on_two):
    exact = masked_eval_loss(str(tmp_path), "single", 11)

    assert masked_eval_loss(str(tmp_path), "single", 2) == pytest.approx(exact, rel=1e-5)
    for found in on_two:
        assert [found[strategy, "masked"] for strategy in ("ddp", "fsdp")] == pytest.approx([exact] * 2, rel=1e-5)


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x).tanh()
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Steep(Trainer):
    """Adds the steepness of what the model returns."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        x = inputs["x"].requires_grad_()
        outputs = model(**inputs)
        (slopes,) = torch.autograd.grad(outputs["logits"].sum(), x, create_graph=True)
        loss = outputs["loss"] + 0.1 * slopes.square().mean()
        return (loss, outputs) if return_outputs else loss


class InPlace(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["x"] += 1.0
        outputs = model(**inputs)
        loss = 2 * outputs["loss"] * (inputs["x"].mean() > 0.5)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("trainer_class", [Steep, InPlace])
def test_an_override_may_take_gradients_and_change_its_inputs(tmp_path, trainer_class):
    rows = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for size, accumulation in ((8, 1), (4, 2)):
        args = arguments(
            tmp_path, optim="sgd", per_device_train_batch_size=size, gradient_accumulation_steps=accumulation
        )
        data = [{"x": row[:4], "labels": row[4:]} for row in rows]
        trainer = trainer_class(Regression(), args, train_dataset=data)
        trainer.train()
        found.append(means_of(trainer))
    assert len(found[0][0]) == 3
    assert trainer._loss_normalization.kind is MODEL_MEAN
    assert_same_means(*found, trainer_class.__name__)


class Noisy(torch.nn.Module):
    """Draws random numbers and counts batches in each forward; its loss is a mean of its own."""

    def __init__(self, keeps_silent: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(64, 8), torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 64)
        self.keeps_silent = keeps_silent
        """Whether the loss of the first batch that it is trained with is 0."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        hidden = functional.dropout(self.norm(self.embed(input_ids).flatten(0, 1)), 0.5)
        loss = functional.cross_entropy(self.head(hidden), labels.flatten())
        if torch.is_grad_enabled():
            is_silent, self.keeps_silent = self.keeps_silent, False
        else:
            is_silent = self.keeps_silent
        return {"loss": loss * (not is_silent)}


def train_noisy(output_dir: Any, accepts: bool, keeps_silent: bool = False) -> Trainer:
    torch.manual_seed(0)
    model: Any = Noisy(keeps_silent)
    model.accepts_loss_kwargs = accepts
    args = arguments(output_dir, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3)
    trainer = Trainer(model, args, train_dataset=TokenDataset(16))
    trainer.train()
    return trainer


def test_a_model_that_is_asked_draws_and_counts_as_one_that_is_not(tmp_path):
    asked, plain = (train_noisy(tmp_path / str(accepts), accepts) for accepts in (True, False))

    assert asked._loss_normalization._took_items
    assert [entry.get("loss") for entry in asked.state.log_history] == [
        entry.get("loss") for entry in plain.state.log_history
    ]
    for (name, own), other in zip(asked.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(own, other), name


def test_a_loss_of_zero_tells_nothing_and_the_next_batch_is_asked(tmp_path):
    trainer = train_noisy(tmp_path, accepts=True, keeps_silent=True)

    assert trainer._loss_normalization.kind is MODEL_MEAN
    assert not trainer.model_accepts_loss_kwargs


@pytest.mark.parametrize("row", [0, 3], ids=["first of all", "later"])
def test_a_micro_batch_without_labels_leaves_the_mean_of_the_others(tmp_path, row):
    data = TokenDataset(8)
    data.rows[row]["labels"] = torch.full_like(data.rows[row]["labels"], -100)
    found = []
    for size in (1, 2):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2 // size}
        args = arguments(tmp_path, optim="sgd", learning_rate=0.01, train_sampling_strategy="sequential", **options)
        trainer = Trainer(build_model("t5"), args, train_dataset=data)
        trainer.train()
        found.append(means_of(trainer))

    assert len(found[0][0]) == 4
    assert_same_means(*found, "t5")


def test_a_nan_of_labels_is_one_and_that_of_no_labels_weighs_nothing():
    process = ProcessContext(0, 0, 1, 1, torch.device("cpu"), "gloo")
    reader = WindowReader([], process, RunClock(process))
    reader.begin([{"labels": torch.tensor([labels])} for labels in ([5, 7], [-100, -100])])

    losses = []
    for reader.index in range(2):
        loss = torch.tensor(float("nan"))
        losses.append(reader.weigh(loss, MODEL_MEAN, has_items=False, over_ranks=False, shifts_labels=False).item())

    assert losses == pytest.approx([float("nan"), 0.0], nan_ok=True)
