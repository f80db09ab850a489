"""Units of sharding of a model: which modules are gathered together, for how long, and which never are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence, Set
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from accel_trainer import logging
from accel_trainer.config import Resolved, WrapPolicy
from accel_trainer.config.parallel import given_plan
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.precision import PrecisionPolicy, refuse_8bit_shards
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_engines import leaves_seen_by_fsdp
from accel_trainer.strategies.api import TrainJob, WrapPolicyFunction
from accel_trainer.strategies.layers import declared_blocks, select_layers
from accel_trainer.strategies.parallel.meshes import sizes_of
from accel_trainer.strategies.parallel.plans import Plan, plan_experts, plan_layers
from accel_trainer.strategies.parallel.sequence_parallel import find_language_model
from accel_trainer.strategies.parallel.tensor_parallel import check_loss
from accel_trainer.tree import leaves

logger = logging.get_logger(__name__)

_MIN_OUTER_NUMEL = 10_000_000
"""Parameters from which an embedding or a head is a unit: 20 MB in bf16. Less is not worth a collective of its own."""


class OuterUnits(NamedTuple):
    """The units of a language model before and behind its layers."""

    embedding: nn.Embedding | None = None
    head: nn.Linear | None = None
    body: nn.Module | None = None
    """The module that holds all layers, and whose output the head, or a loss that fuses it, takes."""


class Selection(NamedTuple):
    """The modules and parameters of a model that sharding treats in their own way."""

    layers: Sequence[nn.Module] = ()
    """Units of sharding below the root, but the outer ones."""
    treated: Sequence[nn.Module] = ()
    """Those whose activations are treated as configured."""
    outer: OuterUnits = OuterUnits()
    ignored: Sequence[nn.Module] = ()
    unsharded: frozenset[nn.Parameter] = frozenset()
    plan: Plan = MappingProxyType({})
    """Of tensor parallelism."""
    experts: Plan = MappingProxyType({})
    """Of expert parallelism; units of sharding, too."""
    language_model: nn.Module | None = None
    """The module whose sequences are shared out over ranks."""


def select_modules(job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> Selection:
    """Select the model's units of sharding, and its unsharded modules and parameters. Changes nothing."""
    model = job.model
    if precision.compute is not None and not precision.autocast_enabled:
        raise ConfigError(
            "AutocastKwargs(enabled=False) was given, and FSDP2 has no autocast to switch off: it gathers parameters "
            f"in {precision.compute}; use mixed_precision='no', or switch autocast off where the loss is computed with "
            "accelerator.autocast(AutocastKwargs(enabled=False))"
        )
    if next(model.parameters(), None) is None:
        return Selection()
    layers = find_blocks(model, job.resolved, job.wrap_policy)
    ignored = find_ignored_modules(model, job.resolved)
    # fully_shard cuts along rows, and a scalar has none: CLIP's scale of logits is one.
    unsharded = {p for p in model.parameters() if p.ndim == 0 or not p.numel()}  # torch scatters no empty gradient
    unsharded.update(p for module in ignored for p in module.parameters())
    treated = select_layers(job, layers)
    _check_combination(job, unsharded)
    refuse_8bit_shards(model)
    own_choice = job.wrap_policy is not None or job.config.fsdp.wrap_policy != WrapPolicy.TRANSFORMER
    outer = OuterUnits() if own_choice else find_outer_units(model, layers, unsharded)
    if precision.compute is None:  # else they are upcast
        _check_trained_dtypes(model, units_below_root(model, Selection(layers, outer=outer)), unsharded)
    return _with_plans(Selection(layers, treated, outer, ignored, frozenset(unsharded)), job, process)


def _with_plans(selection: Selection, job: TrainJob, process: ProcessContext) -> Selection:
    """Return the selection with the layers that are never gathered, by the model's own plans. Changes nothing."""
    model, ignored, parallel = job.model, selection.ignored, job.config.parallel
    sizes, describe = sizes_of(job, process), job.resolved.describe
    if sizes.tp > 1:
        plan = plan_layers(model, sizes.tp, ignored, describe("parallel.tp_size"), given_plan(job.config))
        selection = selection._replace(plan=plan)
    if parallel.loss_parallel:
        check_loss(model, selection.plan, describe("parallel.loss_parallel"))
    if parallel.ep_size > 1:
        experts = plan_experts(model, parallel.ep_size, ignored, describe("parallel.ep_size"))
        selection = selection._replace(experts=experts)
    if parallel.sequence_size > 1:
        origin, strategy = describe(f"parallel.{parallel.sequence_axis}_size"), parallel.comm_strategy
        device = attention_device(process)
        language_model = find_language_model(model, parallel.sequence_size, origin, sizes.tp, strategy, device)
        selection = selection._replace(language_model=language_model)
    return selection


def attention_device(process: ProcessContext) -> torch.device:
    """Return where tokens are to meet: ranks that do not exist compute nothing, and their plan is that of a card."""
    return torch.device("meta") if process.backend == "fake" else process.device


def _check_combination(job: TrainJob, unsharded: Set[nn.Parameter]) -> None:
    name = type(job.model).__name__
    if unsharded and job.loss_scale is not None:
        raise ConfigError(
            f"{job.resolved.describe('fsdp.ignored_modules')}: {len(unsharded)} parameter(s) of {name} stay whole, "
            "ignored ones or scalars, and torch's GradScaler cannot unscale sharded and whole gradients together; use "
            "bf16"
        )


def _check_trained_dtypes(model: nn.Module, blocks: Sequence[nn.Module], unsharded: Set[nn.Parameter]) -> None:
    """Refuse trained parameters of several dtypes in one unit, whose gradients FSDP2 reduces together.

    Frozen ones may have others: a base model in bf16, or quantised, under adapters in fp32.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken: set[int] = set()
    for unit in (*reversed(blocks), model):  # deepest first
        own = [p for p in unit.parameters() if id(p) not in taken and p not in unsharded]
        taken.update(map(id, own))
        first: dict[torch.dtype, str] = {}
        for parameter in own:
            if parameter.requires_grad:
                first.setdefault(parameter.dtype, names[id(parameter)])
        if len(first) > 1:
            found = " and ".join(f"{name!r} in {dtype}" for dtype, name in first.items())
            raise ConfigError(
                f"{type(model).__name__} trains {found}, and FSDP2 reduces the gradients of the {type(unit).__name__} "
                "that both are in together, in one dtype; give all that is trained one dtype "
                "(parameter.data = parameter.data.float()), or use mixed_precision='bf16', which keeps it in fp32"
            )


def _blocks_by_class(model: nn.Module, class_names: Iterable[str], origin: str) -> list[nn.Module]:
    present = {type(module).__name__ for module in model.modules()}
    for name in class_names:
        if name not in present:
            leaves_last = sorted(present - {type(m).__name__ for m in model.modules() if not any(m.children())})
            raise ConfigError(
                f"{origin}: no module of class {name!r} in {type(model).__name__}{did_you_mean(name, present) or '.'} "
                f"Its module classes: {', '.join(leaves_last)}"
            )
    wanted = set(class_names)
    return [module for module in model.modules() if type(module).__name__ in wanted]


def _blocks_by_function(model: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Return the submodules for which `policy(module)` is true.

    The policies of `torch.distributed.fsdp.wrap` are called as FSDP1 calls them, deepest modules first: whether to go
    into a module, and whether to make a unit of its parameters that are in no unit yet.
    """
    if "recurse" not in inspect.signature(policy).parameters:
        return [module for module in model.modules() if policy(module)]
    chosen: list[nn.Module] = []
    taken: set[int] = set()

    def num_left(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in taken)

    def visit(module: nn.Module) -> None:
        if policy(module=module, recurse=True, nonwrapped_numel=num_left(module)):
            for child in module.children():
                visit(child)
            if module is not model and policy(module=module, recurse=False, nonwrapped_numel=num_left(module)):
                chosen.append(module)
                taken.update(map(id, module.parameters()))

    visit(model)
    return chosen


def find_blocks(model: nn.Module, resolved: Resolved, policy: WrapPolicyFunction | None) -> list[nn.Module]:
    """Return the submodules to shard as units of their own, in the order of `model.modules()`, without the root.

    A callable wins; then the configuration: class names, else the model's own `_no_split_modules`; by size; or none.
    """
    config = resolved.config.fsdp
    if policy is not None:
        chosen = _blocks_by_function(model, policy)
    elif config.wrap_policy == WrapPolicy.NONE:
        chosen = []
    elif config.wrap_policy == WrapPolicy.SIZE:
        # Enough parameters that are in no deeper unit; every module is gone into.
        chosen = _blocks_by_function(
            model, lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel >= config.min_num_params
        )
    elif config.wrap_classes:
        chosen = _blocks_by_class(model, config.wrap_classes, resolved.describe("fsdp.wrap_classes"))
    else:
        chosen = declared_blocks(model)
    picked = {id(module) for module in chosen}
    # ModuleList and ModuleDict have no forward, so a unit made of one would never gather its parameters.
    return [
        module
        for module in model.modules()
        if id(module) in picked and module is not model and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]


def drop_tied_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave out blocks that share a parameter with a module outside: both users must be gathered by one unit."""
    # fully_shard replaces a parameter in the modules of its unit only: the other user's would be sharded apart, and
    # the tie be gone.
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(module))
    kept = []
    for block in blocks:
        inside = {id(module) for module in block.modules()}
        if all(users[id(parameter)] <= inside for parameter in block.parameters()):
            kept.append(block)
        else:
            what = "%s shares a parameter with another module and is sharded with its parent"
            logger.info(what, type(block).__name__)
    return kept


def find_outer_units(model: nn.Module, layers: Sequence[nn.Module], unsharded: Set[nn.Parameter]) -> OuterUnits:
    """Return the embedding and the head of a language model that save memory as units of their own; often none."""
    # In the root's unit they are gathered from the first to the last moment of a step, and so are their gradients. They
    # stay there where they are tied, small, in a layer, or of a kind that need not be called to be used.
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # no model of transformers, or one without tokens
        return OuterUnits()
    if head is None and not type(model).__module__.startswith("transformers."):
        embedding = None  # a model of somebody else may multiply by its weight
    inner = {id(module) for layer in layers for module in layer.modules()}
    large: list[Any] = [*filter(_is_large, [embedding, head])]
    found = drop_tied_blocks(model, [m for m in large if id(m) not in inner and m.weight not in unsharded])
    body = _body(model, head, layers) if head in found else None
    return OuterUnits(embedding if embedding in found else None, head if body else None, body)


def _is_large(module: Any) -> bool:
    # An embedding's max_norm changes the weight in a forward. With a bias a head returns a view, on which FSDP2's hooks
    # are lost by an operation in place.
    changes = getattr(module, "max_norm", None) is not None or getattr(module, "bias", None) is not None
    return type(module) in (nn.Embedding, nn.Linear) and not changes and module.weight.numel() >= _MIN_OUTER_NUMEL


def _body(model: nn.Module, head: nn.Module, layers: Sequence[nn.Module]) -> nn.Module | None:
    """Return the largest module that holds the last layer and not the head."""
    for module in model.modules():
        inside = set(module.modules())
        if head not in inside and not inside.isdisjoint(layers[-1:]):
            return module
    return None


def units_below_root(model: nn.Module, selection: Selection) -> list[nn.Module]:
    """Return all units but the root, in the order of `model.modules()`."""
    outer, experts = selection.outer, [model.get_submodule(where) for where in selection.experts]
    chosen = {id(m) for m in (*drop_tied_blocks(model, selection.layers), outer.embedding, outer.head, *experts)}
    return [module for module in model.modules() if id(module) in chosen]


def warn_of_one_unit(model: nn.Module, blocks: Sequence[nn.Module], resolved: Resolved) -> None:
    """Warn that the model is one unit, where the configuration left the choice of blocks to the model."""
    config = resolved.config.fsdp
    if not blocks and config.wrap_policy == WrapPolicy.TRANSFORMER and not config.wrap_classes:
        logger.warning(
            "%s declares no _no_split_modules and fsdp.wrap_classes is empty: the whole model is one unit of "
            "sharding. Name its block classes in fsdp.wrap_classes to gather less memory at once",
            type(model).__name__,
        )


def find_ignored_modules(model: nn.Module, resolved: Resolved) -> list[nn.Module]:
    """Return the submodules whose full names match `fsdp.ignored_modules`; refuse an expression that matches none."""
    found = []
    for pattern in resolved.config.fsdp.ignored_modules:
        origin = resolved.describe("fsdp.ignored_modules")
        matches = [module for name, module in model.named_modules() if name and re.fullmatch(pattern, name)]
        if not matches:
            raise ConfigError(f"{origin}: {pattern!r} matches the name of no submodule of {type(model).__name__}")
        found.extend(matches)
    return found


def reshard_after_inference(module: nn.Module, args: Any, output: Any) -> None:
    """Give memory back after a forward without backward."""
    # FSDP2 leaves parameters gathered for the backward, which never comes here: those of the root and of the head
    # always, a block's with `reshard_after_forward=False`.
    if not torch.is_grad_enabled():
        module.reshard()  # type: ignore[operator]


def gather_in_generate(model: nn.Module) -> None:
    """Have a sharded model's own `generate`, if it has one, find the root's parameters gathered, as `forward` does.

    It calls modules by themselves: an encoder of transformers reads embeddings that belong to the root.
    """
    if not callable(getattr(model, "generate", None)):
        return
    register_fsdp_forward_method(model, "generate")
    gathering: Any = model.generate

    @wraps(gathering)
    def generate(*args: Any, **kwargs: Any) -> Any:
        output = gathering(*args, **kwargs)
        reshard_after_inference(model, args, output)
        return output

    model.generate = generate  # type: ignore[assignment]


def check_output_is_seen(module: nn.Module, args: Any, output: Any) -> None:
    """Refuse an output in which FSDP2 finds no tensor: it would never learn of the backward, and average nothing."""
    if not torch.is_grad_enabled():
        return
    known = {id(leaf) for leaf in leaves_seen_by_fsdp(output)}
    for leaf in leaves(output, is_leaf=lambda node: isinstance(node, Tensor)):
        # Of an object of another class, its attributes.
        held = [leaf] if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(each, Tensor) and each.requires_grad and id(each) not in known for each in held):
            raise ConfigError(
                f"the forward of {type(module).__name__} returns a {type(output).__name__}, in which FSDP2 finds no "
                "tensors, so that their gradients would not be averaged; return a tensor, dict, tuple, dataclass or "
                "ModelOutput, or register the class with torch.utils._pytree.register_pytree_node"
            )
