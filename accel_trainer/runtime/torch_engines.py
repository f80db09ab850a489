"""Every name of torch's DDP and FSDP2 that accel_trainer uses and torch does not document: as of `torch_private`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_trainer.runtime.torch_names import FSDP_UNIT
from accel_trainer.runtime.torch_private import default_group, find, need, say_missing, tree_leaves

_collect_grad_tensors = getattr(
    importlib.import_module("torch.distributed.fsdp._common_utils"), "collect_grad_tensors", None
)


def exposed_exchange_seconds(replicas: nn.parallel.DistributedDataParallel) -> float | None:
    """Return the mean time from the last gradient to the end of the exchange; None where DDP has measured none yet."""
    # DDP takes the times of its first ten exchanges and of every hundredth one after them, whoever asks.
    read = find(replicas, "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data")
    times = {} if read is None else read()
    exchange = times.get("avg_backward_comm_time", 0)  # nanoseconds
    return max(exchange - times["avg_backward_compute_comm_overlap_time"], 0) / 1e9 if exchange else None


def abandon_exchange(replicas: nn.parallel.DistributedDataParallel) -> None:
    """Let a DDP wrapper wait for no more gradients of a backward that an error has ended, or kept from beginning."""
    # While somebody holds it, a traceback for instance, it takes those of the next wrapper's backward for its own.
    reset = find(replicas.reducer, "torch.distributed.Reducer._reset_state")
    if reset is not None:
        reset()


def is_exchange_open(replicas: nn.parallel.DistributedDataParallel) -> bool:
    """Whether a DDP wrapper still waits for gradients, when the backward is over: parameters took no part in it."""
    check = find(replicas.reducer, "torch.distributed.Reducer._check_reducer_finalized")
    try:
        if check is not None:
            check()
    except RuntimeError:
        return True
    return False


def guard_forward(replicas: nn.parallel.DistributedDataParallel, on_error: Callable[[RuntimeError], None]) -> None:
    """Have `on_error` called where an exchange before a forward fails, which goes on without it; or raises.

    Those are that of the order of buckets, in the second forward, and the broadcast of rank 0's buffers.
    """
    prepare = need(replicas, "torch.nn.parallel.DistributedDataParallel._pre_forward")
    if "_pre_forward" in vars(replicas):
        return

    def guarded(*inputs: Any, **kwargs: Any) -> Any:
        try:
            return prepare(*inputs, **kwargs)
        except RuntimeError as error:
            failure = error
        on_error(failure)
        replicas.require_forward_param_sync = False
        return prepare(*inputs, **kwargs)

    replicas._pre_forward = guarded  # type: ignore[method-assign]


def regroup_replicas(replicas: nn.parallel.DistributedDataParallel) -> None:
    """Have a DDP wrapper exchange gradients over the job's present group, in the buckets that it had when made."""
    # It rearranges them once, in the second forward, behind an exchange: where a rank is lost in that, some have done
    # it and others not, and one that joins never had. Sums would be those of different parameters.
    name = "torch.nn.parallel.DistributedDataParallel"
    need(replicas, f"{name}._update_process_group")(default_group())
    parameters, are_sparse = need(replicas, f"{name}._build_params_for_reducer")()
    names = need(replicas, f"{name}._build_debug_param_to_name_mapping")(parameters)
    need(replicas, f"{name}._ddp_init_helper")(parameters, are_sparse, names, replicas.static_graph)


def why_not_regrouped(root: Any) -> str:
    """Return why the groups of FSDP2's units cannot be replaced on this release of torch; empty where they can."""
    if hasattr(root, "reset_iter_state"):
        return ""
    return f"torch {torch.__version__} cannot begin a forward of FSDP2 again (2.13 can)"


def regroup_units(units: Sequence[Any], mesh: DeviceMesh) -> None:
    """Have FSDP2's units, and all tensors on their mesh, use another mesh; drop what forward and backward have left.

    Gradients of shards stay. The first of the units is the outermost one.
    """
    read = "torch.distributed.fsdp.FSDPModule._get_fsdp_state"
    groups = [group for unit in units for group in need(unit, read)()._fsdp_param_groups]
    infos = {id(info): info for group in groups for info in (group.mesh_info, group.post_forward_mesh_info) if info}
    # In place: shards, gradients, an optimizer's state and averages refer to it, each by a layout of its own.
    for old in {id(info.mesh): info.mesh for info in infos.values()}.values():
        vars(old).clear()
        vars(old).update(vars(mesh))
    for info in infos.values():
        info.__post_init__()  # which takes the groups of its mesh
    kept = _drop_unsharded(groups)
    if need(units[0], read)()._is_root is not None:  # else it has had no forward, and torch 2.13 finds nothing to reset
        units[0].reset_iter_state()
    for parameter, gradient in kept:
        parameter.grad = gradient  # torch 2.15 drops it, and a rank that has voted has its step to make


def _drop_unsharded(groups: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Have shards use the meshes that their groups have now, without what is unsharded; return them and gradients."""
    kept = []
    for group in groups:
        group._all_gather_result = None  # whose end nobody waits for
        for shard in group.fsdp_params:
            shard._shard_mesh = shard._init_shard_mesh()
            if "unsharded_accumulated_grad" in vars(shard):  # torch 2.15 keeps the parameter's own alone
                shard.unsharded_accumulated_grad = None
            if hasattr(shard, "_unsharded_param"):
                shard._unsharded_param.grad = None
            kept.append((shard.sharded_param, shard.sharded_param.grad))
    return kept


def leaves_seen_by_fsdp(output: Any) -> Sequence[Any]:
    """Return the tensors that FSDP2 finds in a forward's output; it learns of the backward by these tensors."""
    found: Sequence[Any] = (_collect_grad_tensors or tree_leaves)(output)
    return found


def watch_units(
    units: Iterable[tuple[str, Any]],
    on_gather: Callable[[str], None],
    on_reduce: Callable[[str, list[str]], None],
) -> None:
    """Have functions called before units of FSDP2 gather for a forward, and before they reduce gradients.

    They get the unit's name, which stands before it in `units`; `on_reduce` the names of its trained parameters, too,
    that have no gradient on this rank.
    """
    for name, unit in units:
        for group in _groups_of(unit):
            if hasattr(group, "pre_forward") and hasattr(group, "post_backward"):
                _watch_unit(group, name, on_gather, on_reduce)
            else:
                say_missing(FSDP_UNIT)


def has_gathered(units: Iterable[Any], leaves: Set[int]) -> bool:
    """Return whether there are gathered parameters of units of FSDP2 among tensors, which are given by their ids."""
    shards = (shard for unit in units for group in _groups_of(unit) for shard in group.fsdp_params)
    return any(id(getattr(shard, "_unsharded_param", None)) in leaves for shard in shards)


def _groups_of(unit: Any) -> list[Any]:
    read = find(unit, "torch.distributed.fsdp.FSDPModule._get_fsdp_state")
    state = None if read is None else read()
    groups = getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])  # 2.11 has one
    return [group for group in groups if group is not None]


def _watch_unit(group: Any, name: str, on_gather: Callable[[str], None], on_reduce: Callable[..., None]) -> None:
    gather, reduce = group.pre_forward, group.post_backward

    def pre_forward(*args: Any, **kwargs: Any) -> Any:
        on_gather(name)
        return gather(*args, **kwargs)

    def post_backward(*args: Any) -> None:
        trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
        missing = [each for each in trained if not _has_gradient(each)]
        if group.reduce_grads and len(missing) < len(trained):  # else the unit reduces nothing
            on_reduce(name, [each._param_fqn or each._module_info.param_name for each in missing])
        reduce(*args)

    group.pre_forward, group.post_backward = pre_forward, post_backward


def _has_gradient(shard: Any) -> bool:
    full = getattr(shard, "_unsharded_param", None)
    return full is not None and (full.grad is not None or shard.unsharded_accumulated_grad is not None)
