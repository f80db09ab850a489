"""Tensor and expert parallelism: layers are sharded over ranks by a model's own plans.

Matrices of a layer, over ranks that read the same data; and the experts of a mixture, over ranks that read different
data and send tokens to the experts that they were given to.

A plan maps names of modules to styles, as transformers' models declare it. Under tensor parallelism every parameter
becomes a DTensor on the axis, replicated where the plan says nothing: an optimizer has parameters of one mesh, and a
checkpoint finds who holds what. Forwards compute with plain tensors, this rank's shards; no operation is dispatched by
DTensor.
Methods of Megatron-LM, arXiv 1909.08053, section 3, and GShard, arXiv 2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.availability import compare_versions, is_torch_version
from accel_trainer.runtime.model_wrappers import ReplacedForward
from accel_trainer.runtime.rng import OwnDraws
from accel_trainer.runtime.torch_private import is_fake, own_parameters, version_of
from accel_trainer.strategies.parallel.plans import STYLES, Plan, Style, planned_model, sharded_parameters
from accel_trainer.techniques.chunked_loss import DeferredLogits, cross_entropies

_Function = Callable[[Tensor, dist.ProcessGroup], Tensor]
_MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def shard_layers(model: nn.Module, plan: Plan, mesh: DeviceMesh, unsharded: Collection[nn.Parameter]) -> None:
    """Replace the parameters by this rank's shards, and the forwards by those that compute with them.

    Every rank has all values, or is on the meta device; nothing is communicated. Tied weights stay tied, and
    `unsharded` parameters plain tensors.
    """
    dims, shared = _sharded_dims(model, plan), _share_inputs(model, plan)
    made: dict[int, nn.Parameter] = {}
    kept = set(map(id, unsharded))
    for where, module in model.named_modules():
        registry = own_parameters(module)
        for name, parameter in registry.items():
            if parameter is not None and id(parameter) not in kept:
                if id(parameter) not in made:
                    made[id(parameter)] = _shard(parameter, dims.get(id(parameter)), mesh)
                registry[name] = made[id(parameter)]
        owners = [module, *_read(module, where, plan)]
        held = [p for owner in owners for p in own_parameters(owner).values()]
        if any(p is not None and id(p) not in kept for p in held) and not _has_no_forward(module):
            module.forward = ShardedForward(module, where, plan, mesh, shared.get(where))


def draw_apart(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Have ranks draw numbers of their own where activations are sharded, and the same ones elsewhere."""
    # Between a layer that gives shards and one that adds up, dropout of a rank is that of its shard: ranks of one axis
    # have one stream of numbers, which would drop the same places of every head. Elsewhere other masks would make
    # activations differ that all ranks have. An adapter's inputs are sharded or not as its layer's are.
    own = OwnDraws(mesh.device_type, mesh.get_local_rank())
    layers = _layers(model, plan)
    parents = {where.rpartition(".")[0] for where, style in layers.items() if style == STYLES["colwise"]}
    regions = {where for where in parents if any(map(drops_out, model.get_submodule(where).modules()))}
    for where, style in layers.items():
        layer = model.get_submodule(where)
        if regions.isdisjoint(_above(where)):
            continue
        if style == STYLES["colwise"]:
            if where not in plan:  # an adapter, which may drop out inputs that all ranks have
                layer.register_forward_pre_hook(partial(_leave, own))
            layer.register_forward_hook(partial(_enter, own))
        elif style.gives == "sum":
            layer.register_forward_hook(partial(_leave, own))
    for where in regions:
        model.get_submodule(where).register_forward_hook(partial(_leave, own), always_call=True)


@torch.compiler.disable
def _enter(own: OwnDraws, module: nn.Module, *_: Any) -> None:
    if module.training:
        own.enter()


@torch.compiler.disable
def _leave(own: OwnDraws, *_: Any) -> None:
    own.leave()


def _layers(model: nn.Module, plan: Plan) -> dict[str, Style]:
    """Return the style of each layer that the model's plan names: an adapter's is that of the layer in it."""
    layers: dict[str, Style] = {}
    adapters: set[str] = set()
    for where, _ in model.named_modules():
        inner = next((name for name in (f"{where}.base_layer", f"{where}.original_module") if name in plan), where)
        if inner in plan and adapters.isdisjoint(_above(where)):
            layers[where] = plan[inner]
            adapters.update({where} - {inner})
    return layers


def _above(where: str) -> Iterator[str]:
    """Yield the names of the modules that a module is in, the nearest first."""
    while where:
        where = where.rpartition(".")[0]
        yield where


def drops_out(module: nn.Module) -> bool:
    """Return whether a module, or its configuration, has a rate of dropout above 0, by the names that rates have."""
    if "Dropout" in type(module).__name__ and getattr(module, "p", 0.0) > 0.0:
        return True
    config: Any = getattr(module, "config", None)
    known = {**getattr(config, "__dict__", {}), **vars(module)}
    return any("drop" in name and isinstance(value, (int, float)) and value > 0 for name, value in known.items())


class _SharedInputs:
    """Inputs that a module gives to several sharded layers, as attention does to those of queries, keys and values."""

    # Each is copied once: backwards, the layers' gradients are added up before those of the ranks are, in one
    # collective: two all-reduces in the backward of a llama layer, where there were five (7B on 64 ranks, tp_size 8:
    # 101 -> 83 ms of planned exposed communication).

    def __init__(self, module: nn.Module) -> None:
        self.copies: list[tuple[Tensor, int, Tensor]] | None = None
        """Each input, the version that it had, and its copy; None outside of the module's forward."""
        module.register_forward_pre_hook(self._open)
        module.register_forward_hook(self._close, always_call=True)

    def _open(self, *_: Any) -> None:
        self.copies = []

    def _close(self, *_: Any) -> None:
        self.copies = None

    def copy(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the copy of an input that another layer has taken, or a new one."""
        if self.copies is None or not (x.requires_grad and torch.is_grad_enabled()):
            return _copy(x, group)
        for known, version, copied in self.copies:
            if known is x and version == version_of(x):
                return copied
        copied = _copy(x, group)
        self.copies.append((x, version_of(x), copied))
        return copied


def _share_inputs(model: nn.Module, plan: Plan) -> dict[str, _SharedInputs]:
    """Return by name where layers find the inputs of those beside them; an adapter's are beside others as its layer."""
    layers = _layers(model, plan)
    beside: dict[str, list[str]] = {}
    for where, style in plan.items():
        if style.takes == "copy":
            layer = next(name for name in (where, *_above(where)) if name in layers)
            beside.setdefault(layer.rpartition(".")[0], []).append(where)
    several = {parent: names for parent, names in beside.items() if len(names) > 1}
    made = {parent: _SharedInputs(model.get_submodule(parent)) for parent in several}
    return {name: made[parent] for parent, names in several.items() for name in names}


def _read(module: nn.Module, where: str, plan: Plan) -> list[nn.Module]:
    """Return the modules below a module whose parameters its forward may read without calling them.

    Linear attention and state spaces hand weights of their layers to kernels, and a block may have methods beside its
    forward (AltUp of Gemma 3n). So matrices, all layers of a block of nothing but layers, such blocks with their
    layers, and what has no forward (ParameterList). What the plan names is called.
    """
    found: list[nn.Module] = []
    is_block = _is_block(module)
    for path, child in _unplanned(module, where, plan).items():
        if _is_block(child) or _has_no_forward(child):
            found += [child, *filter(_is_layer, _unplanned(child, path, plan).values())]
        elif _is_layer(child) and (is_block or isinstance(child, _MATRICES)):
            found.append(child)
    return found


def _unplanned(module: nn.Module, where: str, plan: Plan) -> dict[str, nn.Module]:
    """Return the children that the plan does not name, by their full names, but no lists of modules."""
    children = {f"{where}.{name}".lstrip("."): child for name, child in module.named_children()}
    lists = (nn.ModuleList, nn.ModuleDict)
    return {path: child for path, child in children.items() if path not in plan and not isinstance(child, lists)}


def _is_layer(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _is_block(module: nn.Module) -> bool:
    return not _is_layer(module) and all(map(_is_layer, module.children()))


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward


def _sharded_dims(model: nn.Module, plan: Plan) -> dict[int, int]:
    dims: dict[int, int] = {}
    for where, style in plan.items():
        dims |= {id(parameter): dim for _, parameter, dim in sharded_parameters(model.get_submodule(where), style)}
    return dims


def _shard(parameter: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    local = parameter.detach()
    if dim is not None:
        length = parameter.shape[dim] // mesh.size()
        local = local.narrow(dim, mesh.get_local_rank() * length, length).clone(memory_format=torch.contiguous_format)
    placement = Replicate() if dim is None else Shard(dim)
    shape, stride = parameter.shape, parameter.stride()
    sharded = DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


class ShardedForward(ReplacedForward):
    """A module's forward on this rank's shards of its parameters."""

    def __init__(
        self, module: nn.Module, where: str, plan: Plan, mesh: DeviceMesh, shared: _SharedInputs | None = None
    ) -> None:
        super().__init__(module)
        self.style, self.read = plan.get(where, Style()), _read(module, where, plan)
        self.mesh, self.group, self.rank, self.shared = mesh, mesh.get_group(), mesh.get_local_rank(), shared
        self.joins = True
        """Whether shards of the output are joined, if the style says so."""
        self.where = where
        self.full_width = getattr(module, "in_features", None) if self.style == STYLES["rowwise"] else None
        """The number of inputs of a layer that takes this rank's shard of them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output as the next one takes it. Collective, as its style says."""
        args, kwargs = self._take_inputs(args, kwargs)
        own = {"ids": self._look_up, "experts": self._ask_experts, "exchange": self._exchange_tokens}
        call: Callable[..., Any] = own.get(self.style.takes, self.own)
        read = [module for module in self.read if self._is_gathered(module)]
        held = [(registry, dict(registry)) for registry in map(own_parameters, (self.module, *read))]
        for registry, _ in held:
            self._take_shards(registry)
        bias, registry = None, own_parameters(self.module)
        if self.style.gives == "sum":
            # Once, behind the sum, and not once on each rank.
            bias, registry["bias"] = registry.get("bias"), None
        try:
            output = call(*args, **kwargs)
        finally:
            for each, parameters in held:
                each.clear()
                each.update(parameters)
        output = self._give(output)
        return output if bias is None else output + bias

    def _take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which the module computes: its shard of the first one, or copies."""
        takes = self.style.takes
        if self.full_width is not None and args[0].shape[-1] == self.full_width:
            raise ConfigError(
                f"the plan for tensor parallelism has {self.where!r} as 'rowwise', for this rank's shard of its "
                f"{self.full_width} inputs, and it is given all of them: no layer before it is sharded; give it "
                "'rowwise_split_input' in tp_plan, or set tp_size to 1 and shard with dp_shard_size"
            )
        if takes == "copies":
            return tuple(map(self._copy, args)), {name: self._copy(value) for name, value in kwargs.items()}
        if takes == "split":
            args = (_split(args[0], self.group), *args[1:])
        elif takes == "copy":
            copy = _copy if self.shared is None else self.shared.copy
            args = (copy(args[0], self.group), *args[1:])
        return args, kwargs

    def _give(self, output: Any) -> Any:
        """Return this rank's output as the next module takes it."""
        style = self.style
        if style.gives == "sum":
            return _sum(output, self.group)
        if style.gives == "join" and self.joins:
            return output.shard(self.group) if isinstance(output, DeferredLogits) else _join(output, self.group)
        if style.num_shared:
            kept, shared = output.split([output.shape[-1] - style.num_shared, style.num_shared], dim=-1)
            return torch.cat([kept, _copy(shared, self.group)], dim=-1)
        return output

    def _is_gathered(self, module: nn.Module) -> bool:
        """Whether a module's parameters are sharded on this axis alone, and not on another until its own forward."""
        own = own_parameters(module).values()
        return all(p.device_mesh == self.mesh for p in own if isinstance(p, DTensor))

    def _copy(self, value: Any) -> Any:
        return _copy(value, self.group) if isinstance(value, Tensor) and value.requires_grad else value

    def _take_shards(self, registry: dict[str, Any]) -> None:
        for name, parameter in registry.items():
            if isinstance(parameter, DTensor):
                local: Any = parameter.to_local()
                registry[name] = _copy(local, self.group) if self.style.sums_gradients else local

    def _ask_experts(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """Return the weighed outputs of this rank's experts, for the tokens that were given to them.

        The index behind the last expert stands for none, as in transformers' own expert parallelism. Without an index
        there are as many tokens for each expert, in the order of the experts (Llama 4).
        """
        number = self.module.num_experts
        own_number = number // dist.get_world_size(self.group)
        if top_k_index is None or top_k_weights is None:
            hidden_states = _copy(hidden_states, self.group)
            before, own_rows = (len(hidden_states) // number * own_number * n for n in (self.rank, 1))
            outputs = self._run_own_experts(own_number, hidden_states.narrow(0, before, own_rows))
            return nn.functional.pad(outputs, (0, 0, before, len(hidden_states) - before - own_rows))
        own = top_k_index - own_number * self.rank
        is_own = (own >= 0) & (own < own_number)
        hidden_states, weights = (_copy(x, self.group) for x in (hidden_states, top_k_weights))
        self.module._is_expert_parallel = True
        implementation = getattr(getattr(self.module, "config", None), "_experts_implementation", None)
        none = own_number if implementation not in (None, "eager") or _knows_no_expert() else 0
        return self._run_own_experts(
            own_number, hidden_states, own.masked_fill(~is_own, none), weights.masked_fill(~is_own, 0.0)
        )

    @torch.compiler.disable
    def _exchange_tokens(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return all experts' outputs for this rank's (tokens, width), by the index (tokens, choices). Collective."""
        size, number = dist.get_world_size(self.group), self.module.num_experts
        num_choices = top_k_index.shape[-1]
        chosen, order = top_k_index.flatten().sort(stable=True)
        bounds = torch.searchsorted(chosen, torch.arange(number + 1, device=chosen.device))
        sent = bounds.diff().view(size, number // size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        num_sent, num_received = _count_rows(sent, received, len(chosen))
        rows = _exchange_rows(hidden_states[order // num_choices], num_received, num_sent, self.group, float(size))
        # Rows arrive by rank, and within a rank by expert.
        own = torch.arange(number // size, device=chosen.device).repeat(size)
        own = own.repeat_interleave(received.flatten(), output_size=sum(num_received))
        if len(own) == 0:
            # A row of zeros: without any, the experts would have no gradients, which FSDP2 exchanges.
            rows, own = nn.functional.pad(rows, (0, 0, 0, 1)), own.new_zeros(1)
        own = own.unsqueeze(-1)
        outputs = self._run_own_experts(number // size, rows, own, torch.ones_like(own, dtype=rows.dtype))
        outputs = outputs[: sum(num_received)]
        # FSDP2 averages over the ranks that have an expert; the mean is over all that send it tokens.
        outputs = _exchange_rows(outputs, num_sent, num_received, self.group, 1.0 / size)
        choices = torch.empty_like(outputs).index_copy(0, order, outputs).view(*top_k_weights.shape, -1)
        return (choices * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _run_own_experts(self, own_number: int, *args: Tensor) -> Tensor:
        number, self.module.num_experts = self.module.num_experts, own_number
        try:
            output: Tensor = self.own(*args)
        finally:
            self.module.num_experts = number
        return output

    def _look_up(self, ids: Tensor) -> Tensor:
        """Return the vectors of the ids whose rows this rank has, and zeros for the others.

        Those of ids beyond the vocabulary are NaN: torch stops there, but looking would wait for the device.
        """
        module = self.module
        num_rows = module.weight.shape[0]
        own, padding_idx = ids - num_rows * self.rank, module.padding_idx
        is_own = (own >= 0) & (own < num_rows)
        if padding_idx is not None:
            padding_idx -= num_rows * self.rank
            module.padding_idx = padding_idx if 0 <= padding_idx < num_rows else None
        try:
            vectors: Tensor = self.own(own.clamp(0, num_rows - 1))
        finally:
            if padding_idx is not None:
                module.padding_idx = padding_idx + num_rows * self.rank
        is_beyond = (ids < 0) | (ids >= num_rows * dist.get_world_size(self.group))
        vectors = vectors.masked_fill(~is_own.unsqueeze(-1), 0.0)
        return vectors.masked_fill(is_beyond.unsqueeze(-1), float("nan"))


@cache
def _knows_no_expert() -> bool:
    # transformers 5.17 asks experts one by one without a place for an index behind the last: any of a weight of 0 does.
    return compare_versions("transformers", ">=", "5.20")


def _count_rows(sent: Tensor, received: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Return how many rows go to and come from each rank: `sent` (ranks, experts) to experts, `num_rows` in all."""
    # Tensors have no values where a layout is planned: then all ranks get as many.
    if is_fake(sent):
        size = len(sent)
        return ([num_rows // size + (rank < num_rows % size) for rank in range(size)],) * 2
    # The layer waits for the device here: collectives want their sizes on the host.
    num_sent, num_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return num_sent, num_received


def _exchange_rows(
    x: Tensor, num_received: list[int], num_sent: list[int], group: dist.ProcessGroup, factor: float
) -> Tensor:
    """Return the rows that all ranks send to this one, by rank; backwards, they go back, times a factor."""

    def back(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_to_all(gradient, num_sent, num_received, group).mul_(factor)

    return apply_collective(x, group, lambda x, group: _all_to_all(x, num_received, num_sent, group), back)


_LOSES_GRADIENTS = is_torch_version("<", "2.12")
"""Of a tensor that a collective has changed in place, in a compiled graph: layers below get zeros, without a word."""


class _Collective(torch.autograd.Function):
    """A function of a tensor and a group; backwards, another one of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: _Function, back: _Function) -> Tensor:
        ctx.group, ctx.back = group, back
        result = there(x, group)
        return result.clone() if _LOSES_GRADIENTS and torch.compiler.is_compiling() else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient, ctx.group), None, None, None


def apply_collective(x: Tensor, group: dist.ProcessGroup, there: _Function, back: _Function) -> Tensor:
    """Return `there(x, group)`; backwards, `back(gradient, group)`. Collective as they are."""
    result: Tensor = _Collective.apply(x, group, there, back)
    return result


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _all_to_all(x: Tensor, num_received: list[int], num_sent: list[int], group: dist.ProcessGroup) -> Tensor:
    received = x.new_empty(sum(num_received), *x.shape[1:])
    dist.all_to_all_single(received, x.detach().contiguous(), num_received, num_sent, group=group)
    return received


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.detach().contiguous()
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, x, group=group)
    return torch.cat(shards, dim=-1)


def _own_of_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    length = x.shape[-1] // dist.get_world_size(group)
    return x.narrow(-1, dist.get_rank(group) * length, length).contiguous()


_copy = partial(apply_collective, there=_same, back=_all_reduce)
"""The input of a layer whose matrix is sharded; backwards, the sum of the shards' gradients."""
_sum = partial(apply_collective, there=_all_reduce, back=_same)
"""The sum of the outputs of a layer's shards; backwards, the gradient of the sum is that of each."""
_join = partial(apply_collective, there=_all_gather_last, back=_own_of_last)
"""All shards of the last dimension; backwards, this rank's of the gradient, which is equal on all ranks."""
_split = partial(apply_collective, there=_own_of_last, back=_all_gather_last)
"""This rank's shard of the last dimension; backwards, all shards."""


# --- loss parallelism: the cross entropy of logits whose vocabulary is sharded ----------------------------------------
#
# Nobody gathers logits in training: ranks exchange three numbers for each token.


def _head(model: nn.Module) -> nn.Module | None:
    """Return the module that makes the logits of a causal language model whose loss is the usual one, if it is one."""
    # Its own: some wrapper may hand out that of the model inside.
    loss = getattr(model, "loss_function", None) if hasattr(type(model), "loss_function") else None
    is_causal = getattr(loss, "__name__", "") == "ForCausalLMLoss"
    get_head = getattr(model, "get_output_embeddings", None)
    return get_head() if is_causal and callable(get_head) else None


def check_loss(model: nn.Module, plan: Plan, origin: str) -> None:
    """Refuse a model that does not make its loss of logits whose vocabulary the plan shards. Changes nothing."""
    head = _head(planned_model(model)[1])
    parts = set() if head is None else set(map(id, head.modules()))
    if not any(style.gives == "join" and id(model.get_submodule(where)) in parts for where, style in plan.items()):
        found = "makes no loss of its own in the way of causal language models" if head is None else "has a full head"
        raise ConfigError(
            f"{origin}: {type(model).__name__} {found}; expected a model of transformers whose loss_function is "
            "ForCausalLMLoss, and a plan that has its head as 'colwise_gather_output'; leave loss_parallel off"
        )


def shard_loss(model: Any, mesh: DeviceMesh) -> None:
    """Have a model, whose layers are sharded, make its loss of sharded logits in training. Not collective."""
    inner: Any = planned_model(model)[1]
    sharded = _ShardedLoss(inner, mesh)
    inner.forward, inner.loss_function = sharded, sharded.loss


class _ShardedLoss(ReplacedForward):
    """The forward of a causal language model whose logits stay sharded, a DTensor, where it makes a loss."""

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        super().__init__(model)
        head: Any = _head(model)
        self.mesh = mesh
        forwards = (module.__dict__.get("forward") for module in head.modules())
        self.heads = [f for f in forwards if isinstance(f, ShardedForward) and f.style.gives == "join"]
        """The head, or what adapters have put in its place."""
        self.joins = True
        """Whether they join their shards."""
        self.full_loss: Callable[..., Tensor] = model.loss_function
        self.shape: tuple[int, ...] = ()
        """Of the last sharded logits of which there was a loss."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_given = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        if not (is_given and self.module.training and torch.is_grad_enabled()):
            return self.own(*args, **kwargs)
        self._set_joins(False)
        try:
            output = self.own(*args, **kwargs)
        finally:
            self._set_joins(True)
        # Where logits are in a tuple depends on the model: they are the first of their shape.
        is_tuple = isinstance(output, tuple)
        place: Any = (
            next(i for i, x in enumerate(output) if getattr(x, "shape", None) == self.shape) if is_tuple else "logits"
        )
        logits = DTensor.from_local(output[place], self.mesh, [Shard(len(self.shape) - 1)], run_check=False)
        if is_tuple:
            return (*output[:place], logits, *output[place + 1 :])
        output[place] = logits
        return output

    def _set_joins(self, joins: bool) -> None:
        self.joins = joins
        for head in self.heads:
            head.joins = joins

    def loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean cross entropy over labels, or its sum over `num_items_in_batch`."""
        if self.joins:
            return self.full_loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs
            )
        self.shape = logits.shape
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.flatten().to(logits.device)
        is_label = targets != ignore_index
        losses: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), targets, is_label, self.mesh.get_group())
        num_items = is_label.sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum() / (num_items.to(losses.device) if isinstance(num_items, Tensor) else num_items)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of rows of logits, of which each rank has a shard of the vocabulary; 0 for rows without a label."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, is_label: Tensor, group: dist.ProcessGroup) -> Tensor:
        losses, of_logits = cross_entropies(logits, targets.masked_fill(~is_label, 0), group)
        ctx.save_for_backward(of_logits, is_label)
        ctx.dtype = logits.dtype
        return losses.masked_fill(~is_label, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_logits, is_label = ctx.saved_tensors
        return (of_logits * (gradient * is_label).unsqueeze(-1)).to(ctx.dtype), None, None, None
