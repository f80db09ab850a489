"""What a user overrides in a step, and what a script does with one, is called and done as upstream does."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from accel_trainer.trainer import Trainer
from tests.trainer_jobs import TokenDataset, arguments, build_model

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


def run(output_dir: Any, model: nn.Module, trainer_class: type[Trainer] = Trainer, **options: Any) -> Any:
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

    run(tmp_path, model, callbacks=[Evaluating()])

    assert model.modes == [(True, True)] * STEPS * ACCUMULATION


def test_a_model_with_methods_of_its_own_has_them_called(tmp_path):
    model = Counting()
    run(tmp_path, model)

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
    trainer = run(tmp_path, Normalized(), Overriding)
    contexts = trainer.calls.pop("context")

    assert trainer.calls == {"input": STEPS * ACCUMULATION * 3, "clip": STEPS, "tokens": STEPS * ACCUMULATION}
    assert contexts >= STEPS * ACCUMULATION


def test_a_step_that_a_script_takes_by_itself_is_that_of_a_plain_loop(tmp_path):
    trainer = Trainer(build_model(), arguments(tmp_path), train_dataset=TokenDataset(4))
    batch = next(iter(trainer.get_train_dataloader()))

    loss = trainer.training_step(trainer.model, dict(batch))

    expected = build_model()
    expected(**batch).loss.backward()
    assert loss.item() == pytest.approx(expected(**batch).loss.item(), rel=1e-6)
    for (name, parameter), other in zip(trainer.model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_are_gone_after_an_update(tmp_path):
    trainer = run(tmp_path, build_model())

    assert all(parameter.grad is None for parameter in trainer.model.parameters())


class Recording(transformers.TrainerCallback):
    """Hears everything."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()

    def on_substep_end(self, args, state, control, **kwargs):
        self.events["substep"] += 1

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.events["pre_step"] += 1

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.events["step"] += 1


def test_callbacks_hear_what_they_listen_to_also_when_they_come_late(tmp_path):
    early, late = Recording(), Recording()

    class Adding(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.add_callback(late)

    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS)
    trainer = Trainer(Normalized(), args, train_dataset=TokenDataset(16), callbacks=[early, Adding()])
    trainer.train()

    assert early.events == {"substep": STEPS, "pre_step": STEPS, "step": STEPS}
    assert late.events == {"substep": STEPS - 1, "pre_step": STEPS - 1, "step": STEPS - 1}
