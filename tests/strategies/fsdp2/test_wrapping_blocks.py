"""Which submodules become units of sharding: by class, by the model's own word, by size, by a callable."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    _recursive_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accel_trainer.config import CompileConfig, Resolved, resolve
from accel_trainer.errors import ConfigError
from accel_trainer.strategies.fsdp2.strategy import choose_regions
from accel_trainer.strategies.fsdp2.wrapping import find_blocks, find_ignored_modules, warn_of_one_unit


def configured(**fsdp: Any) -> Resolved:
    return resolve(explicit={"strategy": "fsdp2"} | {f"fsdp.{name}": value for name, value in fsdp.items()}, environ={})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(10, 10, bias=False)
        self.mlp = nn.Sequential(nn.Linear(10, 40, bias=False), nn.ReLU(), nn.Linear(40, 10, bias=False))


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(10, 20, bias=False)


def names(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    by_id = {id(module): name for name, module in model.named_modules()}
    return [by_id[id(module)] for module in modules]


def blocks_of(model: nn.Module, policy: Any = None, **fsdp: Any) -> list[str]:
    return names(model, find_blocks(model, configured(**fsdp), policy))


# --- by class ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "options", "found"),
    [
        (2, {"wrap_classes": ("Block", "Embedding")}, ["embed", "blocks.0", "blocks.1"]),
        (1, {"wrap_classes": ("Block", "Sequential")}, ["blocks.0", "blocks.0.mlp"]),
        # A block has 100 + 800 parameters, its mlp 800, the embedding and the head 200.
        (2, {"wrap_policy": "size", "min_num_params": 900}, ["blocks.0", "blocks.1"]),
        (2, {"wrap_policy": "size", "min_num_params": 800}, ["blocks.0.mlp", "blocks.1.mlp"]),
        (2, {"wrap_policy": "size", "min_num_params": 10**6}, []),
        # No parameter counts twice: both linears of an mlp are units of 400, which leaves 100 in the block.
        (1, {"wrap_policy": "size", "min_num_params": 400}, ["blocks.0.mlp.0", "blocks.0.mlp.2"]),
        # A list of modules is no unit: its forward is never called, so nothing would gather its parameters.
        (3, {"wrap_policy": "size", "min_num_params": 1000}, []),
        (1, {"wrap_policy": "none"}, []),
    ],
)
def test_modules_are_units_by_class_or_size_in_the_models_order(depth: int, options: Any, found: list[str]):
    assert blocks_of(Model(depth), **options) == found


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (
            ("Blok",),
            r"fsdp.wrap_classes=.*: no module of class 'Blok' in Model; did you mean 'Block'\? "
            r"Its module classes: Block, Model, ModuleList, Sequential",
        ),
        (("Block", "BertLayer"), r"class 'BertLayer' in Model\. Its module classes: Block, Model, "),
    ],
)
def test_an_unknown_class_names_the_closest_and_those_that_are_there(classes: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        blocks_of(Model(), wrap_classes=classes)


def test_an_unknown_class_says_where_it_was_written():
    resolved = resolve(environ={}, file={"strategy": "fsdp2", "fsdp": {"wrap_classes": ["BertLayer"]}})
    with pytest.raises(ConfigError, match=r"^fsdp\.wrap_classes=.*BertLayer.*from "):
        find_blocks(Model(), resolved, None)


# --- by the model's own word ---------------------------------------------------------------------------------------

TINY = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": (TINY | {"vocab_size": 16}, {"LlamaDecoderLayer"}),
    "gpt2": ({"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 16}, {"GPT2Block"}),
    "bert": (TINY | {"vocab_size": 16}, {"BertLayer", "BertEmbeddings"}),
    "t5": ({"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 16}, {"T5Block"}),
    "vit": (TINY | {"image_size": 8, "patch_size": 4}, {"ViTLayer", "ViTEmbeddings"}),
}


def build(family: str, head: bool = False) -> nn.Module:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **FAMILIES[family][0])
    return (AutoModelForCausalLM if head else AutoModel).from_config(config)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_models_own_blocks_are_wrapped_unless_declined(family: str):
    model = build(family)
    assert blocks_of(model, wrap_policy="none") == []
    found = find_blocks(model, configured(), None)
    kinds = {type(module).__name__ for module in found}
    assert kinds <= FAMILIES[family][1]
    layers = [module for module in found if type(module).__name__.endswith(("Layer", "Block"))]
    assert len(layers) == (4 if family == "t5" else 2)  # encoder and decoder


def test_the_blocks_are_found_below_a_head_and_in_a_module_that_holds_a_model():
    assert blocks_of(build("llama", head=True)) == ["model.layers.0", "model.layers.1"]
    assert blocks_of(nn.Sequential(build("gpt2"), nn.Linear(8, 2))) == ["0.h.0", "0.h.1"]


def test_a_model_without_declared_blocks_is_one_unit_and_says_so(caplog: pytest.LogCaptureFixture):
    model = Model()
    with caplog.at_level(logging.WARNING):
        assert blocks_of(model) == []
        warn_of_one_unit(model, [], configured(wrap_policy="none"))
        warn_of_one_unit(model, list(model.blocks), configured())
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        warn_of_one_unit(model, [], configured())
    assert "Model declares no _no_split_modules" in caplog.text
    assert "fsdp.wrap_classes" in caplog.text


def test_a_model_that_is_compiled_as_a_whole_is_named(caplog: pytest.LogCaptureFixture):
    model = Model()
    blocks = list(model.blocks)
    with caplog.at_level(logging.WARNING):
        assert choose_regions(model, CompileConfig(), blocks).backend == "no"
        assert choose_regions(model, CompileConfig(backend="eager"), blocks).regional
        choose_regions(model.head, CompileConfig(backend="eager", regional=False), [])
    assert not caplog.text
    for compiled in (CompileConfig(backend="eager", regional=False), CompileConfig(backend="eager", regional=True)):
        caplog.clear()
        whole = model if not compiled.regional else Model(1)
        with caplog.at_level(logging.WARNING):
            assert choose_regions(whole, compiled, list(whole.blocks)) == compiled
        assert "Model is compiled as a whole" in caplog.text
        assert f"the graph breaks at each of the {len(whole.blocks)}" in caplog.text


# --- by a callable ---------------------------------------------------------------------------------------


def test_a_callable_is_really_used_and_wins():
    model = Model(2)
    asked: list[nn.Module] = []

    def policy(module: nn.Module) -> bool:
        asked.append(module)
        return isinstance(module, nn.Linear) and module.out_features == 10

    found = blocks_of(model, policy, wrap_policy="transformer", wrap_classes=("Block",))
    assert found == ["blocks.0.attention", "blocks.0.mlp.2", "blocks.1.attention", "blocks.1.mlp.2"]
    assert {id(module) for module in asked} >= {id(module) for module in model.modules() if module is not model}


def test_the_root_is_never_in_the_list():
    assert blocks_of(Model(1), lambda module: True)[0] == "embed"


# --- ignored modules -----------------------------------------------------------------------------------------------


def test_ignored_modules_are_found_by_their_whole_name():
    model = Model(3)
    found = find_ignored_modules(model, configured(ignored_modules=(r"blocks\.[02]\.mlp", "head")))
    assert names(model, found) == ["blocks.0.mlp", "blocks.2.mlp", "head"]
    assert find_ignored_modules(model, configured()) == []


def test_a_pattern_that_matches_nothing_is_refused():
    message = r"fsdp.ignored_modules=.*: 'blocks.0.ml' matches the name of no submodule of Model"
    with pytest.raises(ConfigError, match=message):
        find_ignored_modules(Model(), configured(ignored_modules=("head", "blocks.0.ml")))


# --- by a policy of torch's ----------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({Block, nn.Embedding}),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Sequential)),
        partial(size_based_auto_wrap_policy, min_num_params=450),
        partial(size_based_auto_wrap_policy, min_num_params=850, force_leaf_modules={nn.ModuleList}),
    ],
)
def test_policies_of_torch_choose_what_they_choose_for_fsdp1(policy: Any):
    wrapped = Model()
    ignored: tuple[set[nn.Module], set[nn.Parameter]] = (set(), set())
    _recursive_wrap(wrapped, policy, Wrapped, *ignored, only_wrap_children=True)
    chosen = [module.inner for module in wrapped.modules() if isinstance(module, Wrapped)]
    names_of_chosen = [name.replace(".inner", "").removeprefix("inner.") for name in names(wrapped, chosen)]
    assert blocks_of(Model(), policy) == names_of_chosen
