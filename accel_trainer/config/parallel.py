"""The axes of a job's mesh: sizes that were asked for, checked against the strategy and the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from accel_trainer.config.schema import ParallelConfig, RunConfig, get_value
from accel_trainer.errors import ConfigError

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Every axis, the outermost first: the ranks of the last one are neighbours."""
NOT_OFFERED = {"pp_size": "there are no pipelines; set it to 1, and shard with dp_shard_size"}
"""Sizes of axes that are not here, each with what to do."""
_SIZES = (*AXES, "ep")
"""All sizes; experts are distributed along a part of dp_shard x sp, or x cp."""
SIZE_PATHS = tuple(f"parallel.{axis}_size" for axis in _SIZES)
"""The options that they are."""
_AXES_OF: Mapping[str, tuple[str, ...]] = {
    "auto": ("dp_replicate",),
    "single": ("dp_replicate",),
    "ddp": ("dp_replicate",),
    "fsdp2": _SIZES,
    "deepspeed": ("dp_shard",),
}
"""The axes under each of our strategies; a registered one may have any."""


class AxisSizes(NamedTuple):
    """Ranks along each axis of a mesh; their product is the number of processes."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1

    @property
    def num_readers(self) -> int:
        """Number of ranks, or groups of ranks, that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> int:
        """Number of ranks over which the parameters of a replica are sharded, beside tensor parallelism."""
        return self.dp_shard * self.sequence

    @property
    def sequence(self) -> int:
        """Number of ranks that share the tokens of a sequence, in either way."""
        return self.cp * self.sp


def size_for_shards(config: RunConfig) -> str | None:
    """Return the path of a size that replicas of the model do not have, where one was asked for."""
    return next((path for path in SIZE_PATHS[1:] if (get_value(config, path) or 1) > 1), None)


def given_plan(config: RunConfig) -> dict[str, str]:
    """Return the style of each module that `parallel.tp_plan` names."""
    return {name: style for name, is_given, style in (e.partition("=") for e in config.parallel.tp_plan) if is_given}


def fsdp1_problems(fsdp1: str, sizes: Mapping[str, Any]) -> list[str]:
    """Return the problems of sizes of axes, by how messages name them, beside `fsdp1` (see `Layer`)."""
    # What is written for FSDP1 runs with FSDP2, but a mesh says that its writer meant one of the two.
    given = [name for name, size in sizes.items() if fsdp1 and size not in (None, 1, "1")]
    if not given:
        return []
    return [f"{fsdp1} is 1, and {', '.join(given)}: FSDP1 has no axes of a mesh; make it 2, or leave the sizes out"]


def axis_problems(config: RunConfig, describe: Callable[[str], str]) -> list[str]:
    """Return the contradictions of the sizes with other options, and with the number of processes where it is given."""
    problems = [*_missing_axes(config, describe), *_unlike_axes(config, describe)]
    if problems:
        return problems
    numbers = {"launch.min_processes": config.launch.min_processes}
    if config.parallel != ParallelConfig():
        numbers["launch.num_processes"] = config.launch.num_processes
    for path, number in numbers.items():
        try:
            if number is not None:
                is_fewest = path == "launch.min_processes" and config.launch.min_machines is not None
                machines = config.launch.min_machines if is_fewest else config.launch.num_machines
                axis_sizes(config, describe, number, machines)
        except ConfigError as error:
            problems.append(f"{describe(path)}: {error}" if path == "launch.min_processes" else str(error))
    return problems


def _missing_axes(config: RunConfig, describe: Callable[[str], str]) -> list[str]:
    paths = [f"parallel.{axis}_size" for axis in _SIZES if axis not in _AXES_OF.get(config.strategy, _SIZES)]
    return [
        f"{describe(path)} does not go with {describe('strategy')}, which has no such axis; use strategy 'fsdp2' "
        "(distributed_type: FSDP, --use_fsdp), or a size of 1"
        for path in paths
        if (get_value(config, path) or 1) > 1
    ]


def _unlike_axes(config: RunConfig, describe: Callable[[str], str]) -> list[str]:
    """Return the contradictions of axes with each other, with replicas of `fsdp`, and with a reader for all ranks."""
    sizes, fsdp, replicas = config.parallel, config.fsdp, config.parallel.dp_replicate_size
    others = {"replicate_size": fsdp.replicate_size not in (1, replicas), "replicate_per_node": fsdp.replicate_per_node}
    checks = (
        *(
            (
                replicas is not None and is_other,
                f"{describe('parallel.dp_replicate_size')} contradicts {describe(f'fsdp.{name}')}: keep one of them",
            )
            for name, is_other in others.items()
        ),
        *(
            (
                get_value(config, path) > 1 and config.data.dispatch_batches,
                f"{describe('data.dispatch_batches')} has one rank read for all, and {describe(path)} needs ranks that "
                "read the same, each for itself; leave dispatch_batches off",
            )
            for path in ("parallel.tp_size", "parallel.cp_size", "parallel.sp_size")
        ),
        (
            sizes.cp_size > 1 and sizes.sp_size > 1,
            f"{describe('parallel.cp_size')} contradicts {describe('parallel.sp_size')}: both share out the tokens of "
            "a sequence; set one of them to 1",
        ),
        (
            sizes.loss_parallel and sizes.tp_size == 1,
            f"{describe('parallel.loss_parallel')} needs ranks that share the vocabulary; give a tp_size above 1, "
            "or leave it off",
        ),
        (
            len(given_plan(config)) < len(sizes.tp_plan),
            f"{describe('parallel.tp_plan')} is not one NAME=STYLE for each module; write layers.*.up=colwise, for one",
        ),
        (
            sizes.tp_size > 1 and sizes.ep_size > 1,
            f"{describe('parallel.ep_size')} contradicts {describe('parallel.tp_size')}: ranks that share the matrices "
            "of a layer have its experts in full, too, and read the same data; set one of them to 1",
        ),
    )
    return [problem for is_wrong, problem in checks if is_wrong]


def _paths_of(sizes: Mapping[str, int | None]) -> list[str]:
    """Return the options that give sizes, for messages; a `tp_size` of 1, for one, says nothing."""
    default = {"tp": 1, "cp": 1, "sp": 1}
    return [f"parallel.{axis}_size" for axis, size in sizes.items() if size != default.get(axis)]


def axis_sizes(config: RunConfig, describe: Callable[[str], str], world_size: int, num_nodes: int | None) -> AxisSizes:
    """Return the sizes of a job's axes; `num_nodes` is None where nodes have unequally many ranks. Not collective."""
    shards = "dp_shard" in _AXES_OF.get(config.strategy, AXES)
    sizes = {axis: get_value(config, f"parallel.{axis}_size") for axis in AXES}
    paths = _paths_of(sizes)
    if shards and sizes["dp_replicate"] is None:
        path, sizes["dp_replicate"] = _replicas_of_fsdp(config, describe, world_size, num_nodes)
        paths.append(path)
    found = {axis: 1 if size is None else size for axis, size in sizes.items()}
    rest_axis = "dp_shard" if shards else "dp_replicate"
    rest, remainder = divmod(world_size, prod(found.values()))
    named = " x ".join(map(describe, paths))
    if remainder or (sizes[rest_axis] is not None and rest > 1):
        raise ConfigError(
            f"{named} makes {prod(found.values())} process(es), and this job has {world_size}; the product of the "
            "sizes is the number of processes, and a dp size that is not given takes the rest"
        )
    found[rest_axis] *= rest
    if shards and 1 < world_size == found["dp_replicate"]:
        raise ConfigError(
            f"{named} leaves nothing to shard on {world_size} processes; use fewer replicas, or strategy 'ddp' for "
            "replicas only"
        )
    _check_experts(config, describe, AxisSizes(**found))
    return AxisSizes(**found)


def _check_experts(config: RunConfig, describe: Callable[[str], str], sizes: AxisSizes) -> None:
    if sizes.num_shards % config.parallel.ep_size:
        along = f"dp_shard x {config.parallel.sequence_axis}" if sizes.sequence > 1 else "dp_shard"
        raise ConfigError(
            f"{describe('parallel.ep_size')} does not divide the {sizes.num_shards} ranks along {along}, over which "
            "experts are distributed; use a size that does"
        )


def _replicas_of_fsdp(
    config: RunConfig, describe: Callable[[str], str], world_size: int, num_nodes: int | None
) -> tuple[str, int]:
    """Return the option of `fsdp` that says how many replicas there are, and their number."""
    if not config.fsdp.replicate_per_node:
        return "fsdp.replicate_size", config.fsdp.replicate_size
    if world_size == 1:
        raise ConfigError(
            f"{describe('fsdp.replicate_per_node')} is hybrid sharding with a replica on each node, and this job has "
            "one process; start more, or shard in full (FULL_SHARD), which runs on one as well"
        )
    if num_nodes is None:
        raise ConfigError(
            f"{describe('fsdp.replicate_per_node')}: nodes hold different numbers of the job's {world_size} "
            "processes; start as many on each, or set fsdp.replicate_size"
        )
    return "fsdp.replicate_per_node", num_nodes
