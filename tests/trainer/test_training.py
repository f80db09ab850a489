"""Training gives the numbers of the plain PyTorch loop, on one process, DDP and FSDP2."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import default_data_collator, set_seed

from accel_trainer.data.plan import permutation
from tests.ranks import run_ranks
from tests.trainer_jobs import TokenDataset, build_model, build_trainer, summary, train

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


def run_on_two(folder: str) -> dict[Any, Any]:
    """What all tests look at that needs two ranks."""
    found: dict[Any, Any] = {"uneven": uneven_run(folder, "ddp")}
    for strategy in ("ddp", "fsdp", "fsdp_sharded"):
        for model in ("llama", "gpt2"):
            found[strategy, model] = train(
                folder, strategy=strategy, model=model, uneven=True, per_device_train_batch_size=GLOBAL_BATCH // 2
            )
    for strategy in ("ddp", "fsdp"):
        found[strategy, "accumulated"] = accumulated(folder, strategy, 2)
        found[strategy, "twice"] = run_twice(folder, strategy, 2)
        for accumulation in (1, 2):
            found[strategy, "bert", accumulation] = train(
                folder, strategy=strategy, model="bert", gradient_accumulation_steps=accumulation,
                per_device_train_batch_size=GLOBAL_BATCH // 2 // accumulation,
            )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> list[dict[Any, Any]]:
    return run_ranks(run_on_two, 2, str(tmp_path_factory.mktemp("two")), timeout=200)


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp_sharded"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_two_ranks_give_the_losses_of_one_process_at_the_same_global_batch(on_two, strategy, model):
    first, second = (found[strategy, model] for found in on_two)

    assert_same_run(first, plain_loop(model=model, uneven=True))
    assert first["losses"] == second["losses"]


def accumulated(folder: Any, strategy: str, ranks: int) -> dict[str, Any]:
    return train(
        folder, strategy=strategy, uneven=True, gradient_accumulation_steps=2,
        per_device_train_batch_size=GLOBAL_BATCH // 2 // ranks,
    )  # fmt: skip


@pytest.mark.multirank
def test_accumulated_windows_are_one_token_mean(tmp_path, on_two):
    runs = [accumulated(tmp_path, "single", 1), *(on_two[0][name, "accumulated"] for name in ("ddp", "fsdp"))]
    for run in runs:
        assert_same_run(run, plain_loop(uneven=True, accumulation=2))
        assert_same_run(run, plain_loop(uneven=True, accumulation=1))


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_that_returns_its_own_mean_trains_alike_on_two_ranks_and_in_windows(on_two, strategy, accumulation):
    run = on_two[0][strategy, "bert", accumulation]

    assert_same_run(run, plain_loop(model="bert"))
    assert run["train_loss"] == pytest.approx(np.mean(plain_loop(model="bert")["losses"]), rel=1e-4)


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


def test_nan_losses_are_left_out_of_the_log_where_they_are_filtered(tmp_path):
    trainer = build_trainer(
        tmp_path, samples=16, logging_steps=2, max_grad_norm=0.0, learning_rate=0.0, logging_nan_inf_filter=True,
        on_nonfinite="warn",
    )  # fmt: skip
    original = trainer.compute_loss

    def sometimes_nan(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        return loss * float("nan") if trainer.state.global_step == 1 else loss

    trainer.compute_loss = sometimes_nan
    trainer.train()

    assert all(np.isfinite(summary(trainer)["losses"]))


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
