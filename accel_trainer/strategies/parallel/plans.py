"""Plans, of a model or its user, by which ranks share layers: each layer with its style; and the checks of a plan.

Of tensor and of expert parallelism. Adapters of PEFT follow the layers whose place they have taken. Changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from accel_trainer.checkpoint.weights.adapters import is_peft_model
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.torch_private import own_parameters


class Style(NamedTuple):
    """How a module computes with its shard."""

    dim: int | None = None
    """The dimension of its weight that is sharded; of a bias, the first one, and none where that is the inputs'."""
    takes: str = "shard"
    """Its input: this rank's "shard" as the module before left it, a "copy" of what all ranks have, "copies" of several
    such inputs, or "split"."""
    gives: str = "shard"
    """Its output: this rank's "shard", the "sum" over ranks, or all shards of the last dimension in a "join"."""
    sums_gradients: bool = False
    """Its parameters are on every rank, which uses them for its shard of the activations."""
    own: Mapping[str, int] = MappingProxyType({})
    """Of a module that computes with parameters of its own, no layer's: the dimension along which each is sharded."""
    num_shared: int | None = None
    """How many of its last outputs all ranks have, and each uses for its shard of the activations."""


STYLES = {
    "colwise": Style(0, "copy"),
    "colwise_gather_output": Style(0, "copy", "join"),
    "colwise_rep": Style(0, "copy", "join"),
    "rowwise": Style(1, "shard", "sum"),
    "rowwise_split_input": Style(1, "split", "sum"),
    "rowwise_rep": Style(1, "split", "sum"),
    "embedding_rowwise": Style(0, "ids", "sum"),
    "embedding_colwise": Style(1, "shard", "join"),
    "moe_tp_experts": Style(0, "experts", "sum"),
    "replicated_with_grad_allreduce": Style(sums_gradients=True),
    "mla_kv_a_proj": Style(),
    "local_params": Style(),
    "all_reduce": Style(None, "copies", "sum"),
    "replicate": Style(),
}
"""Names of transformers 5. Of a mixture's experts each rank has some in full, and not a part of each."""
_EXPERTS = Style(0, "exchange")
"""Of expert parallelism: tokens go to their experts, and come back."""
_EXPERT_STYLES = ("ep_dispatch_experts", "moe_tp_experts")
_WITH_OWN_PARAMETERS = ("local_params", "all_reduce")
"""Of modules whose own parameters have styles by their names."""
_PER_HEAD = ("k_proj", "qkv_proj", "query_key_value")
_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer")
"""Beside a 'mla_kv_a_proj': what all ranks compute alike, and give to heads through the layers that the plan names."""
_EXPERT_EXAMPLE = "model._ep_plan = {'layers.*.experts': 'ep_dispatch_experts'}"
_EXAMPLE = (
    "model._tp_plan = {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'} before prepare(), or in a file "
    "parallel: {tp_plan: [layers.*.up=colwise, layers.*.down=rowwise]}"
)

Plan = Mapping[str, Style]
"""The style of each module that a plan names, by the module's full name."""


def sharded_parameters(module: nn.Module, style: Style) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield the parameters of a module's own that its style shards, with the dimension; a bias of inputs is not."""
    for name, parameter in own_parameters(module).items():
        dim = style.own.get(name, style.dim)
        if parameter is not None and dim is not None and (name != "bias" or dim == 0):
            yield name, parameter, dim


def plan_layers(
    model: nn.Module,
    size: int,
    ignored: Collection[nn.Module],
    origin: str,
    given: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Return the style of each module that the model's plan names. Not collective; changes nothing.

    Args:
        size: number of ranks on the axis.
        ignored: modules whose parameters stay as they are.
        origin: where `size` was asked for, for messages.
        given: styles by name that come before those of the model's plan.

    Raises:
        ConfigError: there is no plan, or the model cannot be sharded by it over so many ranks.
    """
    modules = dict(model.named_modules())
    _check_adapters(modules, origin)
    prefix, inner = planned_model(model)
    declared = {prefix + where: style for where, style in _declared_styles(inner, origin, given).items()}
    plan = {where: style for name, own in declared.items() for where, style in _spread(name, modules[name], own)}
    _follow_tied(modules, plan)
    _check_tied(modules, plan, origin)
    left_out = {id(inner) for module in ignored for inner in module.modules()}
    for where, style in plan.items():
        _check_module(where, modules[where], style, size, id(modules[where]) in left_out, origin)
    _check_neighbours(type(inner).__name__, modules, declared, plan, origin)
    _check_sparsity(inner, declared, origin)
    if any(where.rpartition(".")[2] in _PER_HEAD and style.gives == "shard" for where, style in declared.items()):
        _check_heads(inner, size, origin)
    return plan


def _declared_styles(model: nn.Module, origin: str, given: Mapping[str, str]) -> dict[str, Style]:
    """Return the styles of modules that a plan names; refuse those that are not known."""
    name, modules = type(model).__name__, [where for where, _ in model.named_modules()]
    parameters = [where for where, _ in model.named_parameters(remove_duplicate=False)]
    declared: dict[str, str] = {**(getattr(model, "_tp_plan", None) or {}), **given}
    found = _match(declared, modules)
    _check_names(name, given, [*modules, *parameters], origin)
    if not found:
        raise ConfigError(
            f"{origin}: {name} declares no plan for tensor parallelism that names its modules (its _tp_plan is "
            f"{declared}); set tp_size to 1 and shard with dp_shard_size, or give it one: {_EXAMPLE}"
        )
    experts = tuple(f"{where}." for where, style in found.items() if style == "moe_tp_experts")
    names = (where for where in parameters if not where.startswith(experts))
    bare = _match(declared, names)
    _check_styles(name, found, bare, origin)
    return {where: _style_of(model, where, style, bare, origin) for where, style in found.items()}


def _check_names(model_name: str, given: Iterable[str], names: Collection[str], origin: str) -> None:
    if unmatched := [key for key in given if not _match({key: ""}, names)]:
        raise ConfigError(
            f"{origin}: tp_plan has {', '.join(map(repr, unmatched))}, and {model_name} has no such modules; name them "
            "as named_modules() does, with * for a number"
        )


def _style_of(model: nn.Module, where: str, name: str, bare: Mapping[str, str], origin: str) -> Style:
    """Return the style of a module, completed by its parameters and its sizes."""
    style, module, parent = STYLES[name], model.get_submodule(where), model.get_submodule(where.rpartition(".")[0])
    problem = ""
    if name in _WITH_OWN_PARAMETERS:
        own = {key: parameter for key, parameter in own_parameters(module).items() if parameter is not None}
        given = {key: bare.get(f"{where}.{key}") for key in own}
        style = style._replace(own=_own_dims(own, given))
        unnamed = [f"{where}.{key}" for key in own if given[key] is None]
        problem = f"no style for {', '.join(unnamed)}, with which it computes" if unnamed else ""
    elif name == "mla_kv_a_proj":
        style = style._replace(num_shared=getattr(parent, "qk_rope_head_dim", None))
        if style.num_shared is None:
            problem = f"no qk_rope_head_dim in a {type(parent).__name__}, which says what heads share"
    if problem:
        raise ConfigError(
            f"{origin}: the plan of {type(model).__name__} has {name!r} for {where}, and {problem}; give it, or set "
            "tp_size to 1 and shard with dp_shard_size"
        )
    return style


def _own_dims(own: Mapping[str, nn.Parameter], given: Mapping[str, str | None]) -> Mapping[str, int]:
    """Return the dimension along which each of a module's own parameters is sharded, by their styles."""
    dims = {key: max(p.ndim - (1 if given[key] == "rowwise" else 2), 0) for key, p in own.items()}
    return MappingProxyType({key: dim for key, dim in dims.items() if given[key] != "replicate"})


def _check_styles(name: str, found: Mapping[str, str], bare: Mapping[str, str], origin: str) -> None:
    owners = {where for where, style in found.items() if style in _WITH_OWN_PARAMETERS}
    unknown = sorted({*found.values(), *bare.values()} - STYLES.keys()) or [
        where
        for where, style in bare.items()
        if style != "replicate" and (where.rpartition(".")[0] not in owners or style not in ("colwise", "rowwise"))
    ]
    if "sequence_parallel" in unknown:
        raise ConfigError(
            f"{origin}: the plan of {name} has 'sequence_parallel', whose modules take shards of the sequence, and no "
            "style of transformers gives such shards to a module: each rank has all tokens; give norms no style, and "
            "share sequences out over ranks with sp_size"
        )
    if unknown:
        packed = "give a fused layer 'colwise_gather_output', or " * any(
            style.startswith("packed_") for style in unknown
        )
        raise ConfigError(
            f"{origin}: the plan of {name} has {', '.join(map(repr, unknown))}, and known are {', '.join(STYLES)} of "
            f"modules; {packed}set tp_size to 1 and shard with dp_shard_size"
        )


def _match(declared: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the styles of those names that a plan has, where `*` stands for a number."""
    rules = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in declared.items()]
    return {where: style for where in names for pattern, style in rules if pattern.fullmatch(where)}


def plan_experts(model: nn.Module, size: int, ignored: Collection[nn.Module], origin: str) -> Plan:
    """Return the style of each mixture's experts that the model's plan names. Not collective; changes nothing.

    What else the plan has is computed on each rank's own data, and stays as it is. Arguments as of `plan_layers`.

    Raises:
        ConfigError: there is no plan, or the experts cannot be distributed over so many ranks.
    """
    prefix, inner = planned_model(model)
    declared: dict[str, str] = dict(getattr(inner, "_ep_plan", None) or {})
    found = _match(declared, (where for where, _ in inner.named_modules()))
    plan = {prefix + where: _EXPERTS for where, style in found.items() if style in _EXPERT_STYLES}
    if not plan:
        raise ConfigError(
            f"{origin}: {type(inner).__name__} declares no plan for expert parallelism that names its experts (its "
            f"_ep_plan is {declared}); set ep_size to 1 and shard with dp_shard_size, or give it one before prepare(): "
            f"{_EXPERT_EXAMPLE}"
        )
    modules = {where: model.get_submodule(where) for where in plan}
    _check_adapters(modules, origin)
    for where in plan:
        _check_own_parameters(where, modules[where], ignored, origin)
        _check_experts(where, modules[where], size, origin)
    return plan


def _check_own_parameters(where: str, module: nn.Module, ignored: Collection[nn.Module], origin: str) -> None:
    is_ignored = any(inner is module for each in ignored for inner in each.modules())
    inner = next((name for child in module.children() for name, _ in child.named_parameters()), None)
    if is_ignored or inner is not None:
        kind = "are left out by fsdp.ignored_modules" if is_ignored else f"have modules with a {inner}"
        raise ConfigError(
            f"{origin}: the experts of {where} {kind}, which ranks cannot share; set ep_size to 1 and shard with "
            "dp_shard_size"
        )


# --- adapters of PEFT -------------------------------------------------------------------------------------------------

_ADAPTERS = (
    "peft.tuners.lora.layer.Linear",
    "peft.tuners.lora.layer.Embedding",
    "peft.tuners.lora.model.LoraModel",
    "peft.utils.other.ModulesToSaveWrapper",
    "peft.tuners.prompt_tuning.model.PromptEmbedding",
    "peft.tuners.p_tuning.model.PromptEncoder",
)
"""Classes that compute alike with sharded layers below them."""


def planned_model(model: Any) -> tuple[str, nn.Module]:
    """Return the model that declares plans, which may be inside adapters of PEFT, behind the prefix of its names."""
    inner = model.get_base_model() if is_peft_model(model) else model
    where = next(where for where, module in model.named_modules() if module is inner)
    return where and f"{where}.", inner


def _check_adapters(modules: Mapping[str, nn.Module], origin: str) -> None:
    for where, module in modules.items():
        variants: Mapping[str, Any] = getattr(module, "lora_variant", {})
        kind = f"{type(module).__module__}.{type(module).__name__}"
        is_known = kind in _ADAPTERS or is_peft_model(module)
        if kind.startswith("peft.") and (variants or not is_known):
            kind = next((type(each).__name__ for each in variants.values()), kind)
            raise ConfigError(
                f"{origin}: {where} is an adapter of PEFT of the kind {kind}, and those that follow "
                "the sharding of a layer are LoRA of linear layers and embeddings (without use_dora and other "
                "variants), modules_to_save, and prompts; use one of them, or set the size to 1 and shard with "
                "dp_shard_size"
            )


def _spread(where: str, module: Any, style: Style) -> list[tuple[str, Style]]:
    """Return a module's style by its name, or of the LoRA matrices in its place: one is sharded as the layer."""
    kind = type(module).__name__ if type(module).__module__.startswith("peft.") else ""
    if kind == "ModulesToSaveWrapper":
        names = ["original_module", *(f"modules_to_save.{name}" for name in module.modules_to_save)]
        parts = dict.fromkeys(names, style)
    elif kind:
        shared = style if style.sums_gradients else STYLES["replicate"]
        first, second = (style, shared) if style.gives == "sum" else (shared, style)
        parts = {"base_layer": style}
        if kind == "Linear":  # those of an embedding are parameters of its own, and on every rank
            parts |= {f"lora_A.{name}": first for name in module.lora_A}
            parts |= {f"lora_B.{name}": second for name in module.lora_B}
    else:
        return [(where, style)]
    return [(f"{where}.{name}", own) for name, own in parts.items()]


# --- checks -----------------------------------------------------------------------------------------------------------


def _follow_tied(modules: Mapping[str, nn.Module], plan: dict[str, Style]) -> None:
    """Let an embedding look up its rows on the ranks that have them, where the head that it is tied to is sharded."""
    sharded = {id(own_parameters(modules[where]).get("weight")) for where, style in plan.items() if style.dim == 0}
    for where, module in modules.items():
        if isinstance(module, nn.Embedding) and where not in plan and id(module.weight) in sharded:
            plan[where] = STYLES["embedding_rowwise"]
    for where in [where for where, style in plan.items() if style.takes == "ids"]:
        for inner, _ in modules[where].named_modules(prefix=where):  # a norm behind it sees this rank's rows
            plan.setdefault(inner, STYLES["replicated_with_grad_allreduce"])


def _check_tied(modules: Mapping[str, nn.Module], plan: Plan, origin: str) -> None:
    sharded = {
        id(parameter): (f"{where}.{name}", dim)
        for where, style in plan.items()
        for name, parameter, dim in sharded_parameters(modules[where], style)
    }
    for where, module in modules.items():
        dims = {name: dim for name, _, dim in sharded_parameters(module, plan.get(where, Style()))}
        for name, parameter in own_parameters(module).items():
            first, dim = sharded.get(id(parameter), ("", None))
            if dims.get(name) != dim:
                own = "gives it none" if name not in dims else f"shards dimension {dims[name]}"
                raise ConfigError(
                    f"{origin}: the plan shards dimension {dim} of {first}, and {own} where {where}.{name} is tied to "
                    f"it; give {where} a style that shards the same dimension, as 'colwise_gather_output' of a head "
                    "does beside 'embedding_rowwise' of an embedding, or untie them"
                )


def _check_module(where: str, module: nn.Module, style: Style, size: int, is_ignored: bool, origin: str) -> None:
    _check_own_dims(where, module, style, size, is_ignored, origin)
    if style.dim is None:
        return
    if style.takes == "experts":
        return _check_experts(where, module, size, origin)
    if style.takes == "ids":
        _check_look_up(where, module, origin)
    weight = own_parameters(module).get("weight")
    if weight is None or weight.ndim != 2 or is_ignored:
        kind = "is left out by fsdp.ignored_modules" if is_ignored else f"is a {type(module).__name__} without a matrix"
        raise ConfigError(
            f"{origin}: the plan shards {where}, which {kind}; leave it out of the plan (adapters and quantized layers "
            "go with dp_shard_size, and tp_size 1)"
        )
    if weight.shape[style.dim] % size:
        way_out = ", resize_token_embeddings(pad_to_multiple_of=...) for one of the vocabulary" * (style.dim == 0)
        raise ConfigError(
            f"{origin} does not divide dimension {style.dim} of {where}.weight, {tuple(weight.shape)}; use a size that "
            f"does{way_out}"
        )


def _check_own_dims(where: str, module: nn.Module, style: Style, size: int, is_ignored: bool, origin: str) -> None:
    for name, dim in style.own.items():
        shape = tuple(own_parameters(module)[name].shape)
        if shape[dim] % size or is_ignored:
            kind = "is left out by fsdp.ignored_modules" if is_ignored else f"is {shape}, which {size} does not divide"
            raise ConfigError(
                f"{origin}: the plan shards dimension {dim} of {where}.{name}, and it {kind}; use another size"
            )


def _check_look_up(where: str, module: nn.Module, origin: str) -> None:
    others = [name for name, parameter in own_parameters(module).items() if name != "weight" and parameter is not None]
    if others:
        raise ConfigError(
            f"{origin}: the plan shards the rows of {where}, a {type(module).__name__} with {', '.join(others)} beside "
            "its weight, which it may choose by ids of all rows; give it 'replicate' in tp_plan"
        )


def _check_experts(where: str, module: Any, size: int, origin: str) -> None:
    number = getattr(module, "num_experts", None)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.shape[:1] == (number,):
            raise ConfigError(
                f"{origin}: the experts of {where} have a buffer {name}, {tuple(buffer.shape)}, which each rank would "
                "read by the numbers of its own experts; make it a parameter without gradients, or set the size to 1 "
                "and shard with dp_shard_size"
            )
    for name, parameter in own_parameters(module).items():
        if parameter is not None and parameter.shape[:1] != (number,):
            raise ConfigError(
                f"{origin}: the plan shards the experts of {where}, whose {name} is {tuple(parameter.shape)}, not of "
                f"{number} experts; set the size to 1 and shard with dp_shard_size"
            )
    if not isinstance(number, int) or number % size:
        raise ConfigError(f"{origin} does not divide the {number} experts of {where}; use a size that does")


def _check_neighbours(
    model_name: str, modules: Mapping[str, nn.Module], declared: Plan, plan: Plan, origin: str
) -> None:
    """Refuse parameters beside layers whose outputs stay sharded, where the plan says nothing about them.

    On a shard of the activations, each rank's gradient of them is that of its shard: replicas would drift apart.
    """
    for parent, where in _unnamed_neighbours(modules, declared, plan):
        raise ConfigError(
            f"{origin}: the plan of {model_name} shards layers of {parent or 'the model'}, and does not name "
            f"{where or 'the model'}, which has parameters beside them; add it as 'replicated_with_grad_allreduce' if "
            "it is given shards, or as 'replicate' if all ranks give it the same: "
            f"model._tp_plan[{where!r}] = ..."
        )


def _unnamed_neighbours(modules: Mapping[str, nn.Module], declared: Plan, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield modules with trained parameters that the plan does not name, each with the one whose layers it shards."""
    parents = {where.rpartition(".")[0] for where, style in declared.items() if style == STYLES["colwise"]}
    latent = {where.rpartition(".")[0] for where, style in declared.items() if style.num_shared is not None}
    for parent in sorted(parents):
        shared = tuple(f"{parent}.{name}" for name in _LATENT) if parent in latent else ()
        for where, module in modules[parent].named_modules(prefix=parent):
            if not (where in plan or where.startswith(shared)) and _is_trained(module):
                yield parent, where


def _is_trained(module: nn.Module) -> bool:
    return any(parameter is not None and parameter.requires_grad for parameter in own_parameters(module).values())


def _check_heads(model: nn.Module, size: int, origin: str) -> None:
    config = _text_config(model)
    # Where layers differ, each has a configuration of its own.
    for each in config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]:
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(each, key, None)
            if isinstance(heads, int) and heads % size:
                name = type(model).__name__
                raise ConfigError(f"{origin} does not divide {key}={heads} of {name}; use a size that does")


def _check_sparsity(model: nn.Module, declared: Plan, origin: str) -> None:
    """Refuse shards of activations of which a model keeps the largest: Gemma 3n's plan has them nevertheless."""
    pattern = getattr(_text_config(model), "activation_sparsity_pattern", None) or ()
    shards = [where for where, style in declared.items() if where.endswith("mlp.gate_proj") and style.gives == "shard"]
    if any(pattern) and shards:
        raise ConfigError(
            f"{origin}: {type(model).__name__} keeps the largest activations of each layer "
            f"(activation_sparsity_pattern={pattern}), and its plan gives {shards[0]} shards of them; give "
            "mlp.gate_proj and mlp.up_proj 'colwise_gather_output', and mlp.down_proj 'rowwise_split_input', in tp_plan"
        )


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
