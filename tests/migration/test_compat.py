"""`compat` gives the numbers of accelerate's loops and of transformers' Trainer, run beside them on two ranks."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from accel_trainer import Accelerator, Trainer, TrainingArguments
from accel_trainer.config import SourceKind, resolve
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError, NonFiniteError
from tests.migration.accelerate_scripts import find_accelerate
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "transformers.trainer")

beside = pytest.mark.skipif(find_accelerate() is None, reason="Hugging Face accelerate is not installed")

# --- loops -----------------------------------------------------------------------------------------------------------


def loop(factory: Any, num_samples: int, **options: Any) -> list[float]:
    """Train two epochs with windows of two micro-batches; return each update's weight and learning rate."""
    accelerator = factory(gradient_accumulation_steps=2, **options)
    x = torch.arange(1.0, num_samples + 1).unsqueeze(1) / num_samples
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found += [accelerator.unwrap_model(model).weight.item(), scheduler.get_last_lr()[0]]
    return found


def own_loop(num_samples: int, **options: Any) -> list[float]:
    return loop(Accelerator, num_samples, cpu=True, **options)


def their_loop(num_samples: int) -> list[float]:
    return loop(importlib.import_module("accelerate").Accelerator, num_samples, cpu=True)


def by_hand(num_samples: int) -> list[float]:
    """The same by accelerate's rules on two processes, as one plain loop."""
    x = [(1.0 + index) / num_samples for index in range(num_samples)]
    batches = [x[begin : begin + 4] for begin in range(0, num_samples, 4)]
    wrapped = iter(x * 2)
    batches[-1] = batches[-1] + [next(wrapped) for _ in range(4 - len(batches[-1]))]
    while len(batches) % 2:
        batches.append([next(wrapped) for _ in range(4)])
    weight, step, found = 1.0, 0, []
    for _ in range(2):
        rounds = [batches[begin : begin + 2] for begin in range(0, len(batches), 2)]
        for begin in range(0, len(rounds), 2):
            losses = [batch for each in rounds[begin : begin + 2] for batch in each]
            gradient = sum(sum(2 * (weight * v - 3 * v - 1) * v for v in batch) / 4 / 2 / 2 for batch in losses)
            weight -= 0.1 / (1 + step) * gradient
            step += 2
            found += [weight, 0.1 / (1 + step)]
    return found


@pytest.mark.multirank
@pytest.mark.parametrize("num_samples", [20, 23])
def test_a_loop_has_the_numbers_of_accelerates_rules(num_samples):
    own = run_ranks(own_loop, 2, num_samples, compat="accelerate")[0]

    assert own == pytest.approx(by_hand(num_samples), rel=1e-5)
    assert run_ranks(own_loop, 2, num_samples)[0] != pytest.approx(own, rel=1e-2)


@beside
@pytest.mark.beside_accelerate
@pytest.mark.multirank
@pytest.mark.parametrize("num_samples", [20, 23])
def test_a_loop_has_the_numbers_of_accelerate_itself(num_samples):
    own = run_ranks(own_loop, 2, num_samples, compat="accelerate")
    theirs = run_ranks(their_loop, 2, num_samples, env={"ACCELERATE_USE_CPU": "true"})

    assert own[0] == own[1] == pytest.approx(theirs[0], rel=1e-6)


def test_an_option_that_is_given_stands_above_compat(caplog):
    with caplog.at_level(logging.INFO):
        accelerator = Accelerator(cpu=True, compat="accelerate", config={"on_nonfinite": "raise"})
    resolved = accelerator.resolved

    assert resolved.config.on_nonfinite == "raise"
    assert resolved.describe("scheduler_steps") == "scheduler_steps=per_process (from compat=accelerate)"
    assert resolved.source("data.even_batches").kind is SourceKind.COMPAT
    (note,) = resolved.notes
    assert note == (
        "compat=accelerate (from Accelerator(compat=...)) sets scheduler_steps=per_process, on_changed_run=warn, "
        "data.even_batches=true, accumulation.loss_division=accelerate"
    )


def test_a_nan_is_trained_as_accelerate_trains_it():
    def step(**options: Any) -> float:
        accelerator = Accelerator(cpu=True, **options)
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.full((1, 1), float("nan"))).sum())
        optimizer.step()
        return accelerator.unwrap_model(model).bias.item() + accelerator.unwrap_model(model).weight.item()

    assert step(compat="accelerate") != step(compat="accelerate")  # NaN
    with pytest.raises(NonFiniteError, match="on_nonfinite"):
        step()


def test_a_loop_that_steps_its_schedule_by_itself_takes_single_steps():
    accelerator = Accelerator(cpu=True, compat="accelerate", step_scheduler_with_optimizer=False)

    assert accelerator.config.scheduler_steps == "per_process"


@pytest.mark.parametrize("option", [{"compat": "transformers"}, {"accumulation": {"loss_division": "transformers"}}])
def test_a_loop_refuses_the_rules_of_the_trainer(option):
    with pytest.raises(
        ConfigError, match=r"transformers \(from .*was given to an Accelerator, which can take losses as acc"
    ):
        Accelerator(cpu=True, config=option)


def test_compat_is_a_flag_and_a_variable_too():
    assert resolve(flags={"compat": "accelerate"}).config.data.even_batches
    assert resolve(environ={"ACCEL_TRAINER_COMPAT": "transformers"}).config.on_changed_run == "warn"
    assert not resolve(flags={"compat": "none"}).is_set("on_nonfinite")


# --- the Trainer -----------------------------------------------------------------------------------------------------

TINY = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    | {"decoder_start_token_id": 0},
}


def rows(num: int) -> list[dict[str, Any]]:
    """Rows of unequally many labels."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(num):
        ids = torch.randint(3, 32, (8,), generator=generator)
        labels = ids.clone()
        labels[: index % 5] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones(8, dtype=torch.long), "labels": labels})
    return found


def train(trainer_class: Any, arguments_class: Any, family: str, output_dir: str, **options: Any) -> list[float]:
    """Train two epochs of 2 x 2 x 2 samples; return logged losses and norms, and the loss of an evaluation."""
    transformers.set_seed(0)
    config = transformers.AutoConfig.for_model(family, **TINY, **MODELS[family])
    kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM

    class InOrder(trainer_class):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    args = arguments_class(
        output_dir=output_dir,
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = InOrder(kind.from_config(config), args, train_dataset=rows(13), eval_dataset=rows(7))
    trainer.train()
    logs = [each[name] for each in trainer.state.log_history for name in ("loss", "grad_norm") if name in each]
    return [*map(float, logs), trainer.evaluate()["eval_loss"]]


def own_trainer(family: str, output_dir: str, **options: Any) -> list[float]:
    return train(Trainer, TrainingArguments, family, output_dir, **options)


def their_trainer(family: str, output_dir: str) -> list[float]:
    return train(transformers.Trainer, transformers.TrainingArguments, family, output_dir)


@beside
@pytest.mark.beside_accelerate
@pytest.mark.multirank
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("family", MODELS)
def test_a_trainer_has_the_numbers_of_transformers_itself(family, world_size, tmp_path):
    own = run_ranks(own_trainer, world_size, family, str(tmp_path), compat="transformers")[0]
    theirs = run_ranks(their_trainer, world_size, family, str(tmp_path), env={"ACCELERATE_USE_CPU": "true"})[0]

    # The last number: upstream's mean over batches counts the rows that fill up the last one where there are ranks.
    assert own[:-1] == pytest.approx(theirs[:-1], rel=1e-4)
    if world_size == 1:
        assert own[-1] == pytest.approx(theirs[-1], rel=1e-5)


def test_arguments_take_the_defaults_of_transformers(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, compat="transformers", on_changed_run="refuse")

    assert args.accelerator_config.even_batches
    assert (args.on_nonfinite, args.loss_division, args.eval_loss_weighting) == ("warn", "transformers", "batch")
    assert args.logging_nan_inf_filter
    assert args.on_changed_run == "refuse"
    plain = TrainingArguments(str(tmp_path), use_cpu=True)
    assert (plain.on_nonfinite, plain.loss_division, plain.eval_loss_weighting) == ("raise", "exact", "token")
    assert not {"on_nonfinite", "loss_division", "eval_loss_weighting"} & plain.given_fields


def test_a_default_that_is_given_stands_above_compat(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, compat="transformers", on_nonfinite="raise")

    assert args.resolved.config.on_nonfinite == "raise"


def test_the_block_of_a_run_names_what_compat_has_set(tmp_path):
    from accel_trainer.contrib.run_report.callback import describe_options
    from accel_trainer.trainer.arguments.training_arguments import list_options

    args = TrainingArguments(str(tmp_path), use_cpu=True, compat="transformers")

    assert dict(describe_options(list_options(args)))["Set by compat=transformers"] == (
        "on_nonfinite=warn, on_changed_run=warn, data.even_batches=true, accumulation.loss_division=transformers, "
        "logging_nan_inf_filter=true, eval_loss_weighting=batch"
    )


def test_a_resume_with_another_batch_goes_on(tmp_path):
    def run(batch: int, **options: Any) -> int:
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("llama", **TINY, **MODELS["llama"])
        )
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, per_device_train_batch_size=batch, max_steps=4, save_steps=2, report_to=[],
            disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=rows(16))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if batch == 4 else None)
        return trainer.state.global_step

    run(2)
    with pytest.raises(IncompatibleCheckpointError, match="on_changed_run"):
        run(4)
    assert run(4, compat="transformers") >= 3


def test_a_trainer_refuses_the_rules_of_loops(tmp_path):
    with pytest.raises(
        ConfigError, match=r"compat=accelerate \(from .*was given to a Trainer, which can take losses as transf"
    ):
        TrainingArguments(str(tmp_path), use_cpu=True, compat="accelerate")


def test_losses_are_divided_by_the_labels_that_transformers_counts(tmp_path):
    # GPT-2's loss_type is None: transformers 5.23 counts the first label of a row, which no token predicts.
    def first_loss(**options: Any) -> float:
        transformers.set_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("gpt2", **TINY, **MODELS["gpt2"])
        )
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=1,
            logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", **options,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=[rows(1)[0]] * 4)
        trainer.train()
        return float(trainer.state.log_history[0]["loss"])

    assert first_loss(compat="transformers") == pytest.approx(7 / 8 * first_loss(), rel=1e-3)
