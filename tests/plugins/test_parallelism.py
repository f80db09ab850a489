"""Sizes of a mesh's axes: what they make together, what excludes what, and what an Accelerator takes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from accel_trainer import Accelerator, FullyShardedDataParallelPlugin
from accel_trainer.config import resolve
from accel_trainer.config.parallel import AxisSizes, axis_sizes
from accel_trainer.config.schema import CommStrategy, ParallelConfig
from accel_trainer.errors import ConfigError
from accel_trainer.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_trainer.runtime.availability import patch_environment
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


@pytest.mark.parametrize(
    ("sizes", "names", "shape"),
    [
        ({}, (), ()),
        ({"dp_replicate_size": 8}, ("dp_replicate",), (8,)),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, ("dp_replicate", "dp_shard"), (2, 4)),
        ({"tp_size": 2, "dp_shard_size": 4}, ("dp_shard", "tp"), (4, 2)),
        ({"tp_size": 2, "cp_size": 3, "dp_shard_size": 4}, ("dp_shard", "cp", "tp"), (4, 3, 2)),
    ],
)
def test_the_axes_above_1_make_the_mesh(sizes: dict[str, int], names: tuple[str, ...], shape: tuple[int, ...]):
    config = ParallelismConfig(**sizes)
    assert config._get_mesh() == (names, shape)
    assert (config.total_size, sorted(config.active_mesh_dims)) == (math.prod(shape), sorted(names))
    assert config.data_parallel_size * config.non_data_parallel_size == math.prod(shape)


def test_what_axes_are_for():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2, tp_size=2)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert isinstance(config.tp_handler, TorchTensorParallelConfig)
    assert config.to_json()["cp_handler"] == {"cp_comm_strategy": "allgather"}


def test_sizes_that_are_not_given_come_from_the_environment():
    with patch_environment(parallelism_config_tp_size=3, parallelism_config_cp_comm_strategy="alltoall"):
        assert ParallelismConfig().tp_size == 3
        assert ParallelismConfig(tp_size=1).tp_size == 1
        assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
    with patch_environment(parallelism_config_sp_seq_length=64, parallelism_config_sp_seq_length_is_variable=False):
        assert DeepSpeedSequenceParallelConfig().sp_seq_length == 64
    with patch_environment(parallelism_config_cp_size="", parallelism_config_cp_backend=" "):
        assert (ParallelismConfig().cp_size, ParallelismConfig().cp_backend) == (1, "torch")
    for value in ("two", "1.5"):
        with (
            patch_environment(parallelism_config_cp_size=value),
            pytest.raises(
                ConfigError, match=f"variable PARALLELISM_CONFIG_CP_SIZE is '{value}'; expected a whole number"
            ),
        ):
            ParallelismConfig()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 0}, "tp_size must be at least 1, but got 0"),
        ({"cp_backend": "ring"}, "cp_backend must be 'torch', but got 'ring'"),
        ({"cp_size": 2, "sp_size": 2}, "mutually exclusive: cp_size=2 and sp_size=2; set one of them to 1"),
        ({"cp_size": 2, "dp_replicate_size": 2}, "cp_size=2 does not go with replicas alone"),
        ({"cp_handler": 3}, "cp_handler is a int; expected TorchContextParallelConfig"),
        ({"tp_plan": ["up"]}, r"tp_plan is \['up'\]; expected styles by .*a list of NAME=STYLE: write"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ParallelismConfig(**options)


@pytest.mark.parametrize(
    "given",
    [
        ParallelConfig(cp_size=2, cp_comm_strategy=CommStrategy.ALLTOALL),
        SimpleNamespace(cp_size=2, cp_handler=TorchContextParallelConfig("alltoall")),  # as accelerate's has it
    ],
)
def test_how_keys_pass_is_taken_with_the_sizes(given: Any):
    taken = ParallelismConfig.of(given)
    assert (taken.cp_size, taken.cp_handler) == (2, TorchContextParallelConfig("alltoall"))


def test_options_of_axes_are_checked():
    with pytest.raises(ConfigError, match="Invalid cp_comm_strategy: ring; expected one of allgather, alltoall"):
        TorchContextParallelConfig("ring")
    with pytest.raises(ConfigError, match="sp_seq_length is not given; pass the length, or set"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    with pytest.raises(ConfigError, match="Invalid sp_attn_implementation: eager; expected one of flash_attention_2"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager")


@pytest.mark.parametrize("given", [ParallelismConfig(tp_size=2), {"tp_size": 2}, '{"tp_size": 2}'])
def test_a_dp_size_that_is_not_given_takes_the_ranks_that_are_left(given: Any):
    config = ParallelismConfig.of(given)
    again = ParallelismConfig.of(config.to_json())
    for each in (config, again):
        found = resolve(explicit=each.explicit())
        assert axis_sizes(found.config, found.describe, 8, 1) == AxisSizes(dp_shard=4, tp=2)
    assert (config.total_size, config.dp_shard_size) == (2, 1)

    config.take_sizes(AxisSizes(dp_shard=4, tp=2))

    assert (config.total_size, config.to_json()["dp_shard_size"]) == (8, 4)
    closed = resolve(explicit=ParallelismConfig(tp_size=2, dp_shard_size=1).explicit())
    with pytest.raises(ConfigError, match=r"makes 2 process\(es\), and this job has 8"):
        axis_sizes(closed.config, closed.describe, 8, 1)


def build_meshes() -> Any:
    dist.init_process_group("gloo")
    config = ParallelismConfig(dp_shard_size=2)
    with pytest.raises(ConfigError, match="needs its device_type"):
        config.get_device_mesh()
    mesh = config.get_device_mesh("cpu")
    assert config.get_device_mesh() is mesh
    with pytest.raises(ConfigError, match="built on 'cpu', and is asked for on 'cuda'"):
        config.get_device_mesh("cuda")
    facts = (mesh.mesh_dim_names, mesh["dp"].size(), mesh["dp_shard_cp"].size())
    dist.barrier()  # a rank that is gone early closes connections that the other still makes
    dist.destroy_process_group()
    return facts


def test_a_mesh_has_its_joint_axes():
    assert run_ranks(build_meshes, 2) == [(("dp_shard",), 2, 2)] * 2


def open_sizes() -> Any:
    config = ParallelismConfig(tp_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    assert accelerator.parallelism_config is config
    facts = config.dp_shard_size, config.total_size, accelerator.torch_device_mesh.size()
    accelerator.wait_for_everyone()  # a rank that is gone early closes connections that the others still make
    return facts


def test_an_accelerator_puts_the_sizes_of_its_job_into_those_that_are_open():
    assert run_ranks(open_sizes, 4) == [(2, 4, 4)] * 4


def in_accelerators() -> Any:
    plugin = FullyShardedDataParallelPlugin()
    replicas = ParallelismConfig(dp_replicate_size=2)
    shards = ParallelismConfig(dp_shard_size=2)
    assert Accelerator(cpu=True, parallelism_config=replicas).parallelism_config is replicas
    assert Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=shards).state.parallelism_config is shards
    assert Accelerator(cpu=True, parallelism_config=shards).resolved.describe("strategy") == (
        "strategy=fsdp2 (from Accelerator(parallelism_config.dp_shard_size=...))"
    )
    assert Accelerator(cpu=True, parallelism_config=ParallelismConfig()).num_processes == 2
    named = Accelerator(cpu=True, config={"parallel": {"dp_replicate_size": 2}})
    assert named.parallelism_config.total_size == 2
    for options, message in (
        (
            {"parallelism_config": ParallelismConfig(dp_replicate_size=3)},
            r"dp_replicate_size=3 \(from .*\) makes 3 process\(es\), and this job has 2; the product of the sizes",
        ),
        ({"parallelism_config": shards, "strategy": "ddp"}, "dp_shard_size=2 .* does not go with strategy=ddp"),
        ({"parallelism_config": replicas, "fsdp_plugin": plugin}, "leaves nothing to shard on 2 processes"),
        (
            {"parallelism_config": ParallelismConfig(cp_size=3, cp_handler=TorchContextParallelConfig("alltoall"))},
            r"cp_size=3 \(from .*\) makes 3 process\(es\), and this job has 2",
        ),
        (
            {
                "parallelism_config": ParallelismConfig(
                    sp_size=2, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(None, None, "sdpa")
                )
            },
            "has sp_attn_implementation='sdpa', and the attention is that of the model",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Accelerator(cpu=True, **options)


def test_an_accelerator_checks_sizes_against_its_job():
    run_ranks(in_accelerators, 2)


def hybrid() -> Any:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), parallelism_config=config)
    return accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank


def test_replicas_of_shards_are_hybrid_sharding():
    assert run_ranks(hybrid, 4) == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_what_is_no_factor_of_the_ranks_is_told_by_its_path():
    assert ParallelismConfig(tp_size=2, loss_parallel=True).explicit()["parallel.loss_parallel"] is True
    planned = ParallelismConfig.of({"tp_size": 2, "tp_plan": {"up": "colwise"}})
    assert planned.explicit()["parallel.tp_plan"] == ["up=colwise"]
    written = ParallelismConfig.of(ParallelConfig(tp_size=2, tp_plan=("up=colwise",)))
    assert written.explicit()["parallel.tp_plan"] == ["up=colwise"]
    assert "parallel.tp_plan" not in ParallelismConfig.of(ParallelConfig()).explicit()
    experts = ParallelismConfig.of({"dp_shard_size": 4, "ep_size": 2})
    assert (experts.total_size, experts.explicit()["parallel.ep_size"]) == (4, 2)
