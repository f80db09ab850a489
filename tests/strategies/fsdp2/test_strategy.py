"""FSDP2 on two CPU ranks: what is sharded, in which dtypes, from whose values, and which optimizer updates it."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests import sharded
from tests.ranks import preload
from tests.scenarios import Scenarios, refused
from tests.sharded import adamw, batch, full, own_rows, train, train_alone

preload("accel_trainer.accelerator", "tests.sharded", "transformers.models.llama.modeling_llama")

SCENARIOS = Scenarios()
results = SCENARIOS.results


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.linear(x))
        self.seen.append(y.dtype)
        return y


class Net(nn.Module):
    """Blocks, and buffers of kinds that a collective may not know."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.rand(3), persistent=False)
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("phases", torch.polar(torch.ones(4), torch.rand(4)), persistent=False)
        self.register_buffer("count", torch.randint(0, 1000, ()))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden) * self.scale.sum()
        return {"loss": logits.square().mean(), "logits": logits, "hidden": (hidden,)}


def build(seed: int = 0, depth: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net(depth)


def prepare(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    return sharded.prepare(model, train=False, optimizer=optimizer, **options)


# --- whose values --------------------------------------------------------------------------------------------------


@SCENARIOS.add
def ranks_with_other_seeds() -> Any:
    unit = prepare(build(seed=int(os.environ["RANK"])))
    return {name: full(t) for name, t in [*unit.module.named_parameters(), *unit.module.named_buffers()]}


def test_every_rank_gets_rank_zeros_parameters_and_buffers():
    model = build(seed=0)
    expected = dict([*model.named_parameters(), *model.named_buffers()])
    for values in results("ranks_with_other_seeds"):
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
            assert value.dtype == expected[name].dtype


@SCENARIOS.add
def rotary_buffer() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **tiny))
    before = model.model.rotary_emb.inv_freq.clone()
    prepare(model, precision="bf16", wrap_classes=())
    after = model.model.rotary_emb.inv_freq
    return torch.equal(before, after), str(after.dtype), "model.rotary_emb.inv_freq" in model.state_dict()


def test_a_non_persistent_buffer_survives_in_full_precision():
    assert results("rotary_buffer") == [(True, "torch.float32", False)] * 2


# --- precision -----------------------------------------------------------------------------------------------------


def dtypes_of(outputs: Any) -> list[str]:
    return [str(tensor.dtype) for tensor in (outputs["loss"], outputs["logits"], outputs["hidden"][0])]


@SCENARIOS.add
def bf16() -> Any:
    model = build()
    unit = prepare(model, adamw(model), precision="bf16")
    outputs = unit.model(own_rows())
    unit.backward(outputs["loss"])
    gradients = {str(p.grad.dtype) for p in model.parameters()}
    unit.step()
    unit.zero_grad()
    with torch.no_grad():
        evaluated = unit.model(own_rows())
    return {
        "weights": {str(p.dtype) for p in model.parameters()},
        "gradients": gradients,
        "state": {str(state["exp_avg"].dtype) for state in unit.optimizers[0].state.values()},
        "blocks": {str(dtype) for block in model.blocks for dtype in block.seen},
        "outputs": dtypes_of(outputs),
        "outputs without gradients": dtypes_of(evaluated),
        "losses": train(unit),
    }


def test_bf16_keeps_fp32_weights_and_casts_the_loss_and_what_comes_without_one():
    model = build()
    reference = train_alone(model, 4)
    for result in results("bf16"):
        assert result["weights"] == result["gradients"] == result["state"] == {"torch.float32"}
        assert result["outputs"] == ["torch.float32", "torch.bfloat16", "torch.bfloat16"]
        assert result["outputs without gradients"] == ["torch.float32"] * 3
        assert result["blocks"] == {"torch.bfloat16"}
        assert result["losses"] == pytest.approx(reference[1:], rel=0.03)


@SCENARIOS.add
def bf16_weights() -> Any:
    model = build().to(torch.bfloat16)
    model.stem.requires_grad_(False)
    unit = prepare(model, adamw(model), precision="bf16")
    train(unit, 1)
    return {name: str(p.dtype) for name, p in model.named_parameters()}


def test_bf16_trainable_weights_get_fp32_masters_and_frozen_ones_stay():
    for dtypes in results("bf16_weights"):
        assert {name for name, dtype in dtypes.items() if dtype == "torch.bfloat16"} == {"stem.weight", "stem.bias"}


# --- tied weights --------------------------------------------------------------------------------------------------


def tie(model: Net) -> Net:
    """Tie weights across two blocks, and a bias from a block to the root."""
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    model.blocks[1].linear.bias = model.stem.bias
    return model


@SCENARIOS.add
def tied_weights() -> Any:
    model = tie(build())
    unit = prepare(model, adamw(model))
    losses = train(unit)
    tied = [
        model.blocks[2].linear.weight is model.blocks[0].linear.weight,
        model.blocks[1].linear.bias is model.stem.bias,
    ]
    return losses, tied, len(list(model.parameters()))


def test_weights_tied_across_blocks_stay_one_parameter_and_train_as_one():
    reference = train_alone(tie(build()))
    for losses, tied, count in results("tied_weights"):
        assert tied == [True, True]
        assert count == 8
        assert losses == pytest.approx(reference, abs=1e-6)


# --- optimizers ----------------------------------------------------------------------------------------------------


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Weights and biases in two groups with other options, in reverse order."""
    weights = [p for p in model.parameters() if p.ndim > 1][::-1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": weights, "lr": 0.02}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


@SCENARIOS.add
def optimizer_built_before() -> Any:
    model = build()
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = grouped(model)
    before = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    unit = prepare(model, optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    after = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    options = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    return before == after, options, unit.optimizers == [optimizer], train(unit)


def test_an_optimizer_built_before_is_pointed_to_the_shards_by_name():
    model = build()
    reference = train_alone(model, optimizer=grouped(model))
    for same_names, options, same_object, losses in results("optimizer_built_before"):
        assert same_names
        assert same_object
        assert options == [(0.02, 0.01), (0.01, 0.0)]
        assert losses == pytest.approx(reference, abs=1e-6)


@SCENARIOS.add
def optimizers_bound_later() -> Any:
    stale, fresh = build(), build()
    early = adamw(stale)
    late_unit, fresh_unit = prepare(stale), prepare(fresh)
    late_unit.bind_optimizer(early)
    fresh_unit.bind_optimizer(adamw(fresh))
    return train(late_unit), train(fresh_unit)


def test_an_optimizer_may_be_bound_after_the_model_from_old_or_new_parameters():
    reference = train_alone(build())
    for early, fresh in results("optimizers_bound_later"):
        assert early == pytest.approx(reference, abs=1e-6)
        assert fresh == pytest.approx(reference, abs=1e-6)


@SCENARIOS.add
def refused_optimizers() -> Any:
    model, other = build(), build()
    optimizer = adamw(model)
    train_alone(model, 1, optimizer)
    with_state = refused(lambda: prepare(model, optimizer))
    foreign = refused(lambda: prepare(model, adamw(other)))
    untouched = not any(isinstance(p, DTensor) for p in model.parameters())
    stale = list(other.parameters())
    unit = prepare(other, adamw(other))
    after = refused(lambda: unit.bind_optimizer(torch.optim.AdamW(stale)))
    return with_state, foreign, untouched, after


def test_an_optimizer_that_cannot_follow_is_refused_before_anything_changes():
    for with_state, foreign, untouched, after in results("refused_optimizers"):
        assert "AdamW already holds state for 10 parameter(s) and was built before prepare()" in with_state
        assert "build the optimizer after" in with_state
        assert "10 of 10 parameters of the optimizer do not belong to Net" in foreign
        assert untouched
        assert "10 parameter(s) are in two optimizers, AdamW and AdamW, and would be updated by both" in after


@SCENARIOS.add
def nothing_keeps_the_whole_model() -> Any:
    model = build()
    before = [weakref.ref(p) for p in model.parameters()]
    unit = prepare(model)
    gc.collect()
    return sum(ref() is not None for ref in before), unit.optimizers == []


def test_a_model_without_an_optimizer_does_not_keep_its_unsharded_weights():
    assert results("nothing_keeps_the_whole_model") == [(0, True)] * 2


# --- frozen --------------------------------------------------------------------------------------------------------


def freeze(model: Net) -> Net:
    model.blocks[1].requires_grad_(False)
    model.stem.weight.requires_grad_(False)
    return model


@SCENARIOS.add
def frozen() -> Any:
    model = freeze(build())
    unit = prepare(model, adamw(model))
    losses = train(unit)
    frozen_weight = full(model.blocks[1].linear.weight)
    whole = build().requires_grad_(False)
    prepare(whole, precision="bf16")
    with torch.no_grad():
        logits = whole(batch())["logits"]
    is_sharded = all(isinstance(p, DTensor) and not p.requires_grad for p in whole.parameters())
    return losses, frozen_weight, logits, is_sharded


def test_frozen_parameters_and_frozen_models_are_sharded_and_left_alone():
    reference = train_alone(freeze(build()))
    for losses, weight, logits, is_sharded in results("frozen"):
        assert losses == pytest.approx(reference, abs=1e-6)
        assert torch.equal(weight, build().blocks[1].linear.weight)
        assert is_sharded
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, build()(batch())["logits"], rtol=0.05, atol=0.05)


# --- methods that call modules by themselves -----------------------------------------------------------------------


class Speaker(Net):
    """Generates as encoder-decoders of transformers do: by modules of the root's own, before any forward."""

    def generate(self, x: Tensor, *, length: int = 2) -> Tensor:
        hidden = self.stem(x)
        return torch.stack([self.head(self.blocks[0](hidden)) for _ in range(length)])


def build_speaker() -> Speaker:
    torch.manual_seed(0)
    return Speaker()


@SCENARIOS.add
def generating() -> Any:
    model = build_speaker()
    unit = prepare(model, adamw(model))
    with torch.no_grad():
        tokens = model.generate(batch(), length=3)
    is_sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return tokens, is_sharded, train(unit)


def test_generate_of_a_model_gathers_what_it_calls_and_leaves_shards():
    expected = build_speaker().generate(batch(), length=3)
    for tokens, is_sharded, losses in results("generating"):
        torch.testing.assert_close(tokens, expected)
        assert is_sharded
        assert losses == pytest.approx(train_alone(build_speaker()), abs=1e-6)
