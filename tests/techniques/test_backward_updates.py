"""Updates in the backward: the plain loop's weights, one gradient at a time, resumed, and what cannot be so updated."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import Accelerator
from accel_trainer.config import resolve
from accel_trainer.errors import ConfigError, NonFiniteError
from accel_trainer.techniques.muon import Muon
from tests.loops import tiny_model
from tests.ranks import preload, run_ranks
from tests.scenarios import refused
from tests.trainer_jobs import build_trainer, on_ranks, weights_of

UPDATES, SAVED = 3, 2
ON = {"optimizer_in_backward": True}
LAYOUTS: dict[str, dict[str, Any]] = {"fsdp2": {"strategy": "fsdp2"}, "tp": {"parallel": {"tp_size": 2}}}
preload("transformers.models.llama.modeling_llama")
State = dict[str, torch.Tensor]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 64, (4, 8), generator=generator) for _ in range(UPDATES)]


class Loop:
    """A loop with a schedule, whose gradients are counted whenever one of them is there."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.accelerator = Accelerator(cpu=True, config=options)
        model = tiny_model("llama", tie_word_embeddings=True)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-2, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        self.held: list[int] = []
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.parameters = list(self.model.parameters())  # the shards; gathered ones take their place in between
        for parameter in self.parameters:
            # Called after those of the preparation: with an update in the backward, this gradient is gone.
            parameter.register_post_accumulate_grad_hook(lambda _: self.held.append(self.num_held()))

    def num_held(self) -> int:
        return sum(parameter.grad is not None for parameter in self.parameters)

    def train(self, begin: int, end: int) -> State:
        readers = self.accelerator.readers
        for tokens in batches()[begin:end]:
            own = tokens.chunk(readers.world_size)[readers.rank]
            self.accelerator.backward(self.model(input_ids=own, labels=own).loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}


def train(options: dict[str, Any], folder: str) -> tuple[State, State, int, State]:
    """Return the weights of a run, of a resumed one, the most gradients that it held, and the weights without it."""
    loop = Loop(ON | options)
    loop.train(0, SAVED)
    loop.accelerator.save_state(folder)
    weights, most = loop.train(SAVED, UPDATES), max(loop.held)
    loop.accelerator.free_memory()
    again = Loop(ON | options)
    again.accelerator.load_state(folder)
    resumed = again.train(SAVED, UPDATES)
    again.accelerator.free_memory()
    return weights, resumed, most, Loop(options).train(0, UPDATES)


def train_all(folder: str) -> dict[str, Any]:
    found = {layout: train(options, f"{folder}/{layout}") for layout, options in LAYOUTS.items()}
    return found | {"refused": refused_on_ranks()}


def same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_one_process_updates_as_the_plain_loop_does_and_holds_no_gradient(tmp_path):
    weights, resumed, most, alone = train({"strategy": "single"}, str(tmp_path / "state"))
    same(weights, alone)
    same(resumed, weights)
    assert most == 0
    plain = Loop({"strategy": "single"})
    plain.train(0, 1)
    assert max(plain.held) == len(list(plain.model.parameters()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    return run_ranks(train_all, 2, str(tmp_path_factory.mktemp("backward")), timeout=200)[0]


@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_updated_as_after_the_backward(layout, runs):
    weights, resumed, most, alone = runs[layout]
    same(weights, alone)
    same(resumed, weights)
    assert most == 0


def linear(optimizer: Any = None, **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, config=ON | options)
    model = nn.Linear(2, 1)
    made = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model.parameters())
    return accelerator, *accelerator.prepare(model, made)


def test_a_parameter_that_is_unfrozen_late_is_updated_in_the_step():
    accelerator = Accelerator(cpu=True, config=ON)
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    model.bias.requires_grad_(True)
    before = model.bias.item()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert (model.bias.item(), model.weight.grad) == (before, None)
    optimizer.step()
    assert model.bias.item() == pytest.approx(before - 0.5)


def test_two_backwards_of_an_update_are_refused():
    accelerator, model, _ = linear()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigError, match=r"second gradient came for a parameter of shape .*one backward\(\) before"):
        accelerator.backward(model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_is_refused(call):
    accelerator, model, _ = linear()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigError, match=rf"{call}\(\) needs the gradients of all parameters.*set max_grad_norm=0"):
        getattr(accelerator, call)(model.parameters(), 1.0)


def test_losses_that_are_weighed_after_their_backward_are_refused():
    accelerator, model, optimizer = linear()
    with accelerator.accumulate(model):
        accelerator.backward(accelerator.global_token_mean(model(torch.ones(1, 2)).sum(), 3))
        with pytest.raises(ConfigError, match=r"weighed after its backward \(global_token_mean, accumulation\) needs"):
            optimizer.step()


def test_a_nan_ends_the_run():
    accelerator, model, optimizer = linear()
    accelerator.backward(model(torch.full((1, 2), float("nan"))).sum())
    with pytest.raises(NonFiniteError, match="update 1: the norm of the gradients is NaN"):
        optimizer.step()


class Counting(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


@pytest.mark.parametrize("kind", [Counting, torch.optim.LBFGS])
def test_an_optimizer_that_may_look_at_all_parameters_is_refused(kind):
    with pytest.raises(ConfigError, match=rf"\.{kind.__name__} cannot be called for one parameter at a.*use AdamW"):
        linear(kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ddp"}, r"contradicts strategy=ddp .*keeps all gradients.*use strategy fsdp2"),
        ({"strategy": "deepspeed"}, r"contradicts strategy=deepspeed"),
        ({"accumulation": {"num_steps": 2}}, r"contradicts accumulation.num_steps=2 .*windows of one micro-batch"),
        ({"mixed_precision": "fp16"}, r"contradicts mixed_precision=fp16 .*use bf16"),
        ({"on_nonfinite": "skip_step"}, r"contradicts on_nonfinite=skip_step .*use raise or warn"),
        ({"local_steps": 4}, r"contradicts local_steps=4 .*leave one of the two out"),
    ],
)
def test_options_that_need_all_gradients_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(file=ON | options)


def test_a_number_of_micro_batches_is_refused_later_too():
    accelerator, *_ = linear()
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps = 2: with optimizer_in_backward=true"):
        accelerator.gradient_accumulation_steps = 2


def refused_on_ranks() -> list[str]:
    model = nn.Linear(4, 4, bias=False)
    sgd, muon = torch.optim.SGD(model.parameters(), lr=0.1), Muon(model.parameters())
    return [
        refused(lambda: Accelerator(cpu=True, config=ON).prepare(model, sgd)),
        refused(lambda: Accelerator(cpu=True, config=ON | {"strategy": "fsdp2"}).prepare(model, muon)),
    ]


@pytest.mark.multirank
def test_what_exchanges_or_holds_gradients_is_refused_on_ranks(runs):
    of_ddp, of_muon = runs["refused"]
    assert re.search(r"optimizer_in_backward=true .*strategy 'ddp', which keeps .*use strategy", of_ddp)
    assert "Muon cannot train with strategy 'fsdp2': its exchanges would come between" in of_muon


def run(folder: str, *, strategy: str, resume: str | None = None, **changes: Any) -> Any:
    options = {"max_steps": UPDATES, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2, "samples": 64}
    trainer = build_trainer(folder, strategy=strategy, **options, **changes)
    trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    weights = {name: torch.from_numpy(value) for name, value in weights_of(trainer).items()}
    return [log["loss"] for log in logs if "loss" in log], weights, any("grad_norm" in log for log in logs)


def run_thrice(folder: str, *, strategy: str) -> list[Any]:
    """Return what a run with the option, one without it, and one that goes on within the first end with."""
    return [
        run(f"{folder}/on", strategy=strategy, **ON),
        run(f"{folder}/off", strategy=strategy),
        run(f"{folder}/again", strategy=strategy, resume=f"{folder}/on/checkpoint-2", **ON),
    ]


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_trainer_trains_and_resumes_as_without(strategy, tmp_path):
    (losses, weights, has_norms), plain, again = on_ranks(strategy, run_thrice, str(tmp_path))[0]
    assert (losses, has_norms) == (plain[0], False)
    same(weights, plain[1])
    assert again[0] == losses
    same(again[1], weights)


def test_a_trainers_bound_of_the_norm_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"max_grad_norm=1\.0, gradient_accumulation_steps=1 would .*set max_grad"):
        build_trainer(tmp_path, **ON)
