"""Layouts of a job: which there are for a number of ranks, and the plan of each for the options of a command."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from accel_trainer.contrib.empty_models import add_adapters, create_empty_model
from accel_trainer.errors import ConfigError
from accel_trainer.launch.flags import Options
from accel_trainer.launch.job import resolve_options

if TYPE_CHECKING:
    from accel_trainer.contrib.planner import LayoutPlan

T = TypeVar("T")

SIZES_OF_MODELS = ("parallel.tp_size", "parallel.sp_size", "parallel.ep_size")
"""The axes that not every model can take."""
SPEEDS = (
    ("ranks_per_node", 8, "ranks of one machine, unless the number of machines is configured [8]"),
    ("bandwidth", 50.0, "GB/s that a rank sends to other machines [50]"),
    ("node_bandwidth", 300.0, "GB/s that a rank sends within its machine [300]"),
    ("teraflops", 400.0, "10^12 operations a second of matrix products, as a rank sustains them [400]"),
)
MARGIN = 1.05
"""Of a planned peak, what a rank is taken to need: plans are within 5 % of what was measured (docs/gpu.md)."""
_COSTS = {"chunked": 1.01, "selective": 1.13}
_ALONE_SECONDS = 5.0
"""How long layouts are compared in this process alone: another one imports torch and transformers for that long."""


class DoesNotFitError(ConfigError):
    """A layout that needs too much memory, or has no whole number of rows: others of the same sizes may fit."""


def with_policy(policy: str) -> dict[str, Any]:
    """Return the options of a policy of activation checkpointing, whichever option the configuration has it by."""
    return {"activation_checkpointing": policy, "fsdp.activation_checkpointing": False}


def cost_of(options: Mapping[str, Any]) -> float:
    """Return the time of an update with ways to save memory, beyond the products that a plan counts: as a card had it.

    The plan counts what is multiplied again; a loss in chunks and norms that are computed again are no products
    (docs/gpu.md).
    """
    return math.prod(_COSTS.get(str(value), 1.0) for value in options.values())


def plan_of(args: argparse.Namespace, options: Options, flags: Mapping[str, Any]) -> LayoutPlan:
    """Return the plan of the job that the options configure, with some of them replaced."""
    resolved, _ = resolve_options(dataclasses.replace(options, flags={**options.flags, **flags}), os.environ, None)
    launch = resolved.config.launch
    if launch.num_processes is None:
        raise ConfigError("the plan of a layout needs the number of processes; add --num_processes N")
    from accel_trainer.checkpoint.weights.into_model import as_dtype
    from accel_trainer.contrib.planner import Cluster, Workload, plan_layout

    cluster = Cluster(**{name: getattr(args, name) for name, *_ in SPEEDS})
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    dtype: Any = as_dtype(args.dtype)
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 2048
    args.sequence = args.sequence or min(2048, most)
    if args.lora is not None:  # adapters have a dtype of their own
        model, dtype = add_adapters(model.to(dtype), args.lora, in_4_bits=args.load_in_4bit), None
    elif args.load_in_4bit:
        raise ConfigError(
            "--load_in_4bit is for a frozen model, whose packed weights get no gradients; add --lora RANK"
        )
    workload = Workload(
        batch=args.batch,
        sequence=args.sequence,
        dtype=dtype,
        optimizer=args.optimizer,
        is_on_gpu=not resolved.config.use_cpu,
    )
    return plan_layout(model, resolved, launch.num_processes, workload, cluster)


def outcomes(
    args: argparse.Namespace, layouts: Iterable[Mapping[str, Any]], plan: Callable[[Any], T | ConfigError]
) -> list[T | ConfigError]:
    """Return plans or refusals, after some seconds by all cores; sizes refused alone are not tried with others."""
    num_workers = getattr(args, "num_workers", 1)
    until = float("inf") if num_workers == 1 else time.perf_counter() + _ALONE_SECONDS
    waiting = deque(layouts)
    found: list[T | ConfigError] = []
    refused: set[tuple[str, int]] = set()
    """Sizes that do not fit the model, with nothing beside them: nor will they with something."""
    while waiting and time.perf_counter() < until:
        flags = waiting.popleft()
        asked = _sizes_of_models(flags)
        if not asked & refused:
            found.append(outcome := plan(flags))
            if len(asked) == 1 and isinstance(outcome, ConfigError) and not isinstance(outcome, DoesNotFitError):
                refused |= asked
    if rest := [flags for flags in waiting if not _sizes_of_models(flags) & refused]:
        # Not forked from here: torch's threads do not survive that. A server has none, and imports once for all.
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        context.set_forkserver_preload([__name__, "accel_trainer.contrib.planner", "transformers"])
        with ProcessPoolExecutor(min(num_workers, len(rest)), mp_context=context) as pool:
            found += pool.map(plan, rest)
    return found


def _sizes_of_models(flags: Mapping[str, Any]) -> set[tuple[str, int]]:
    return {(path, flags[path]) for path in SIZES_OF_MODELS if flags.get(path, 1) > 1}


def try_plan(args: argparse.Namespace, options: Options, flags: Mapping[str, Any]) -> LayoutPlan | ConfigError:
    """Return the plan, or the refusal: for a model without that axis, or a size that does not divide."""
    try:
        return plan_of(args, options, flags)
    except ConfigError as problem:
        return problem


def candidates(
    args: argparse.Namespace, options: Options, policies: Sequence[str] = ("off", "full")
) -> Iterator[dict[str, Any]]:
    """Yield the options of layouts: replicas, and sizes of all axes with each policy of checkpointing."""
    num_processes = resolve_options(options, os.environ, None)[0].config.launch.num_processes or 1
    if num_processes == 1:
        yield {}
        return
    fixed = {"fsdp.replicate_size": 1, "fsdp.replicate_per_node": False, **dict.fromkeys(SIZES_OF_MODELS, 1)}
    none = {"strategy": "ddp", "parallel.dp_replicate_size": num_processes, "parallel.dp_shard_size": 1}
    yield {**fixed, **none, **with_policy("off")}
    for sizes, policy in itertools.product(_sharded_sizes(args, num_processes), policies):
        yield {**fixed, "strategy": "fsdp2", **sizes, **with_policy(policy)}


def _sharded_sizes(args: argparse.Namespace, num_processes: int) -> Iterator[dict[str, int]]:
    """Yield sizes of axes, single ones first: shards over all ranks or a machine's, which share layers or tokens."""
    node = min(args.ranks_per_node, num_processes)
    within = [size for size in range(1, node + 1) if node % size == 0 and num_processes % size == 0]
    for tp, sp in sorted(itertools.product(within, within), key=lambda each: (min(each), each)):
        rest, remainder = divmod(num_processes, tp * sp)
        if node % (tp * sp) or remainder:
            continue
        for shard in dict.fromkeys((rest, node // (tp * sp), *[1] * (sp == 1))):
            if rest % shard or shard * tp * sp == 1:
                continue
            for ep in (1, *_expert_sizes(within, tp, sp, shard)):
                sizes = {"dp_replicate": rest // shard, "dp_shard": shard, "tp": tp, "sp": sp, "ep": ep}
                yield {f"parallel.{axis}_size": size for axis, size in sizes.items()}


def _expert_sizes(within: Sequence[int], tp: int, sp: int, shard: int) -> list[int]:
    """Return sizes over which experts are shared: some neighbours; beside slices of sequences, all of a machine."""
    shared = within[1:] if sp == 1 else within[-1:]
    return [size for size in shared if tp == 1 and shard * sp % size == 0]


def adapters_in_words(args: argparse.Namespace) -> str:
    """Return the end of a list of options, where adapters are trained."""
    return "" if args.lora is None else f", LoRA of rank {args.lora}{', its layers in 4 bits' * args.load_in_4bit}"


def layout_name(plan: LayoutPlan) -> str:
    """Return the axes of a plan that are larger than 1, in words."""
    sizes = [f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1 and axis != "ep"]
    experts = f", ep {plan.sizes['ep']}" if plan.sizes["ep"] > 1 else ""
    return (" x ".join(sizes) or "one process") + experts
