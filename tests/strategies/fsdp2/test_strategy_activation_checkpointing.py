"""Activation checkpointing: the same numbers, with activations computed again."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from accel_trainer.techniques.activations import treat_layers
from tests.ranks import preload
from tests.scenarios import Scenarios, refused
from tests.sharded import batch, build, full, own_rows, prepare

preload("accel_trainer.accelerator", "tests.scenarios", "tests.sharded", "transformers.models.auto.modeling_auto")

SCENARIOS = Scenarios()
results = SCENARIOS.results


@SCENARIOS.add
def checkpointed_dropout() -> Any:
    losses, gradients, runs = [], [], []
    for checkpointed in (False, True):
        model = build(dropout=0.5)
        unit = prepare(model, activation_checkpointing=checkpointed)
        torch.manual_seed(11)
        loss = unit.model(own_rows())
        unit.backward(loss)
        losses.append(loss.item())
        gradients.append({name: full(p.grad) for name, p in model.named_parameters()})
        runs.append([block.runs for block in model.blocks])
    return losses, gradients, runs


def test_activations_are_computed_again_with_the_same_dropout():
    for losses, (plain, again), runs in results("checkpointed_dropout"):
        assert losses[0] == losses[1]
        assert runs == [[1, 1, 1], [2, 2, 2]]
        assert plain.keys() == again.keys()
        for name, gradient in plain.items():
            assert torch.equal(gradient, again[name]), name


@SCENARIOS.add
def checkpointed_ties() -> Any:
    model = build()
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    unit = prepare(model, activation_checkpointing=True)
    unit.backward(unit.model(own_rows()))
    return [block.runs for block in model.blocks], [isinstance(block, FSDPModule) for block in model.blocks]


def test_blocks_that_share_a_weight_are_checkpointed_although_their_parent_is_the_unit():
    assert results("checkpointed_ties") == [([2, 2, 2], [False, True, False])] * 2


@SCENARIOS.add
def checkpointed_instance_forward() -> Any:
    model = build()
    block = model.blocks[1]
    block.forward = types.MethodType(lambda self, x: x * 3.0, block)
    unit = prepare(model, activation_checkpointing=True)
    return unit.model(own_rows()).item(), block.runs


def test_a_forward_that_was_put_on_a_block_is_the_one_that_is_computed_again():
    model = build()
    model.blocks[1].forward = types.MethodType(lambda self, x: x * 3.0, model.blocks[1])
    for rank, (loss, runs) in enumerate(results("checkpointed_instance_forward")):
        assert loss == pytest.approx(model(batch().chunk(2)[rank]).item())
        assert runs == 0


@SCENARIOS.add
def checkpointing_without_blocks() -> Any:
    model = build()
    message = refused(lambda: prepare(model, activation_checkpointing=True, wrap_policy="none", wrap_classes=()))
    return message, isinstance(model, FSDPModule)


def test_checkpointing_without_blocks_is_refused():
    for message, is_sharded in results("checkpointing_without_blocks"):
        assert message.startswith("fsdp.activation_checkpointing=true")
        assert "no module of Net is a unit of its own" in message
        assert "fsdp.wrap_classes" in message
        assert not is_sharded


@SCENARIOS.add
def checkpointed_language_models() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    kinds: dict[str, dict[str, Any]] = {"llama": tiny, "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16}}
    tokens = torch.arange(12).reshape(2, 6) + dist.get_rank()
    found = []
    for kind, sizes in kinds.items():
        for checkpointed in (False, True):
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, vocab_size=32, attn_implementation="eager", **sizes)
            model = AutoModelForCausalLM.from_config(config).train()
            unit = prepare(model, activation_checkpointing=checkpointed, wrap_classes=())
            torch.manual_seed(1)
            loss = unit.model(input_ids=tokens, labels=tokens).loss
            unit.backward(loss)
            gradients = [full(p.grad) for p in model.parameters()]
            # In evaluation the cache must go on working.
            model.eval()
            with torch.no_grad():
                outputs = model(input_ids=tokens)
            found.append((loss.item(), gradients, outputs.past_key_values.get_seq_length()))
    return found


def test_language_models_with_a_cache_can_be_checkpointed():
    for llama, llama_again, gpt2, gpt2_again in results("checkpointed_language_models"):
        for plain, again in ((llama, llama_again), (gpt2, gpt2_again)):
            assert plain[0] == again[0]
            assert all(torch.equal(a, b) for a, b in zip(plain[1], again[1], strict=True))
            assert plain[2] == again[2] == 6


def test_a_checkpointed_block_pickles_and_copies_and_keeps_its_signature():
    model = build()
    expected = inspect.signature(model.blocks[0].forward)
    treat_layers(model.blocks, "full")
    treat_layers(model.blocks, "full")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.blocks[0].forward.module is twin.blocks[0]
        assert twin.blocks[0].forward.inner is None
        assert inspect.signature(twin.blocks[0].forward) == expected
        twin(batch()).backward()
        assert [block.runs for block in twin.blocks] == [2, 2, 2]


def test_without_gradients_nothing_is_computed_again():
    model = build()
    treat_layers(model.blocks, "full")
    with torch.no_grad():
        model(batch())
    assert [block.runs for block in model.blocks] == [1, 1, 1]
