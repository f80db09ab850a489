"""Files that `accelerate config` writes."""

from __future__ import annotations

import pytest

from accel_trainer.config import (
    Dialect,
    FSDPConfig,
    SourceKind,
    StateDictType,
    WrapPolicy,
    field_specs,
    read_file,
    resolve,
)
from accel_trainer.config.dialects.accelerate_file import KNOWN_KEYS
from accel_trainer.errors import ConfigError
from tests.trainer_jobs import ACCELERATE_YAML

NEUTRAL = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "downcast_bf16": "no",
    "fsdp_config": {},
    "deepspeed_config": None,
    "megatron_lm_config": {},
    "mpirun_config": {"mpirun_hostfile": None},
    "fp8_config": {},
    "dynamo_config": {},
    "ipex_config": {"ipex": False, "use_xpu": False},
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_dp_shard_size": 1,
        "parallelism_config_tp_size": 1,
        "parallelism_config_cp_size": 1,
        "parallelism_config_cp_backend": "torch",
        "parallelism_config_cp_comm_strategy": "allgather",
        "parallelism_config_sp_size": 1,
    },
    "tpu_name": None,
    "tpu_zone": "",
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "tpu_vm": None,
    "tpu_env": [],
    "commands": None,
    "command_file": None,
    "main_process_ip": None,
    "main_process_port": None,
    "gpu_ids": None,
    "num_processes": -1,
    "fp16": False,
}


def values(**keys):
    """Return what an accelerate file with these keys sets, by dotted path."""
    return {path: setting.value for path, setting in read_file(keys).settings.items()}


def test_the_file_of_the_fine_tuning_job_means_fsdp_in_bf16_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Without a suffix, as in the call that this project is about.
    (tmp_path / "fsdp_config").write_text(ACCELERATE_YAML, encoding="utf-8")

    resolved = resolve(file="fsdp_config")

    config = resolved.config
    assert (config.strategy, config.mixed_precision, config.use_cpu) == ("fsdp2", "bf16", False)
    assert config.launch.num_processes == 2
    assert config.fsdp == FSDPConfig(
        wrap_policy=WrapPolicy.TRANSFORMER,
        wrap_classes=("BertLayer",),
        state_dict_type=StateDictType.SHARDED,
        cpu_ram_efficient_loading=True,
        reshard_after_forward=True,
        backward_prefetch=True,
        forward_prefetch=False,
        offload_params=False,
    )
    assert resolved.describe("launch.num_processes") == "launch.num_processes=2 (from fsdp_config:20)"
    assert resolved.describe("fsdp.wrap_classes") == "fsdp.wrap_classes=[BertLayer] (from fsdp_config:14)"
    assert resolved.describe("strategy") == "strategy=fsdp2 (from fsdp_config:3)"
    assert resolved.notes == (
        "fsdp_config is written for FSDP1 (no fsdp_version, which means 1); it runs with FSDP2; "
        "mapped: fsdp_backward_prefetch_policy, fsdp_forward_prefetch, fsdp_sharding_strategy; "
        "without effect: fsdp_sync_module_states, fsdp_use_orig_params",
    )


def test_fsdp1_and_axes_of_a_mesh_are_refused_and_a_size_of_1_asks_for_none():
    file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}
    message = (
        r"fsdp_config.fsdp_version .*is 1, and parallel.dp_shard_size=2 \(from .*\): FSDP1 has no axes .* make it 2"
    )

    with pytest.raises(ConfigError, match=message):
        resolve(file={**file, "parallelism_config": {"parallelism_config_dp_shard_size": 2}})
    with pytest.raises(ConfigError, match=message):
        resolve(file=file, explicit={"parallel.dp_shard_size": 2})
    resolve(file={**file, "parallelism_config": {"parallelism_config_dp_shard_size": 1}})


def test_a_file_for_fsdp2_needs_no_note():
    block = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_state_dict_type": "FULL_STATE_DICT"}

    file = read_file({"distributed_type": "FSDP", "fsdp_config": block})

    assert file.dialect is Dialect.ACCELERATE
    assert file.notes == ()
    assert file.settings["fsdp.reshard_after_forward"].value is False


def test_values_that_ask_for_nothing_are_accepted():
    resolved = resolve(file=NEUTRAL)

    changed = {path for path, _, source in resolved.explain() if source.kind is not SourceKind.DEFAULT}
    assert changed == {"strategy"}
    assert resolved.config.strategy == "single"
    assert resolved.notes == ()


@pytest.mark.parametrize(
    ("kind", "processes", "strategy"),
    [
        ("NO", 1, "single"),
        (False, 1, "single"),  # NO without quotes
        ("MULTI_GPU", 2, "ddp"),
        ("MULTI_GPU", 1, "auto"),
        ("MULTI_GPU", -1, "ddp"),
        ("MULTI_XPU", 4, "ddp"),
        ("MULTI_NPU", 4, "ddp"),
        ("MULTI_CPU", 2, "ddp"),
        ("FSDP", 2, "fsdp2"),
        ("DEEPSPEED", 2, "deepspeed"),
    ],
)
def test_the_distributed_type_is_a_strategy(kind, processes, strategy):
    assert values(distributed_type=kind, num_processes=processes)["strategy"] == strategy


def test_multi_cpu_runs_on_the_cpu_unless_the_file_says_otherwise():
    assert values(distributed_type="MULTI_CPU")["use_cpu"] is True
    assert values(distributed_type="MULTI_CPU", use_cpu=False)["use_cpu"] is False


def test_a_block_without_distributed_type_is_the_strategy():
    assert values(fsdp_config={"fsdp_version": 2})["strategy"] == "fsdp2"
    assert values(deepspeed_config={"zero_stage": 2})["strategy"] == "deepspeed"
    assert "strategy" not in values(dynamo_config={"dynamo_backend": "EAGER"})


def test_a_block_that_is_not_used_is_noted():
    file = read_file({"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_offload_params": True}})

    assert file.notes == ("fsdp_config in the config dict is not used: distributed_type is MULTI_GPU",)
    assert "fsdp.offload_params" not in file.settings


def test_launch_keys_are_mapped():
    launch = {
        "num_processes": 16,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29501,
        "rdzv_backend": "c10d",
        "same_network": False,
        "gpu_ids": "0,1",
        "enable_cpu_affinity": True,
        "main_training_function": "train",
    }
    others = {"debug": True, "mixed_precision": "fp16"}
    assert values(distributed_type="NO", gpu_ids=0)["launch.gpu_ids"] == "0"

    mapped = {"strategy": "ddp", **others, **{f"launch.{key}": value for key, value in launch.items()}}
    assert values(distributed_type="MULTI_GPU", **launch, **others) == mapped


@pytest.mark.parametrize("prefix", ["dynamo_", ""])
def test_the_compile_block_is_mapped(prefix):
    block = {
        "backend": "INDUCTOR",
        "mode": "max-autotune",
        "use_fullgraph": True,
        "use_dynamic": False,
        "use_regional_compilation": "true",
    }

    got = values(distributed_type="NO", dynamo_config={prefix + key: value for key, value in block.items()})

    assert {path: value for path, value in got.items() if path.startswith("compile")} == {
        "compile.backend": "inductor",
        "compile.mode": "max-autotune",
        "compile.fullgraph": True,
        "compile.dynamic": False,
        "compile.regional": True,
    }


def test_the_deepspeed_block_is_kept_as_written():
    block = {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0, "deepspeed_hostfile": None}

    config = resolve(file={"distributed_type": "DEEPSPEED", "deepspeed_config": block}).config

    assert config.strategy == "deepspeed"
    assert config.deepspeed == block
    with pytest.raises(TypeError, match="part of a frozen configuration"):
        config.deepspeed["zero_stage"] = 2


def test_replicas_of_the_parallelism_block_are_hybrid_sharding():
    block = {"dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}

    got = values(distributed_type="FSDP", num_processes=8, parallelism_config=block)

    assert (got["parallel.dp_replicate_size"], got["parallel.dp_shard_size"]) == (2, 4)


def test_replicas_without_fsdp_are_what_ddp_does():
    got = values(distributed_type="MULTI_GPU", num_processes=2, parallelism_config={"dp_replicate_size": 2})

    assert (got["strategy"], got["parallel.dp_replicate_size"]) == ("ddp", 2)


@pytest.mark.parametrize(
    ("kind", "num_processes", "sizes", "message"),
    [
        ("MULTI_GPU", 4, {"dp_replicate_size": 3}, r"dp_replicate_size=3 .* makes 3 process\(es\), and this job has 4"),
        (
            "MULTI_GPU",
            2,
            {"dp_shard_size": 2},
            "dp_shard_size=2 .* does not go with strategy=ddp .*, which has no such",
        ),
        ("FSDP", 8, {"dp_replicate_size": 2, "dp_shard_size": 2}, r"makes 4 process\(es\), and this job has 8"),
        ("FSDP", 6, {"ep_size": 4}, "^parallel.ep_size=4 .* does not divide the 6 ranks along dp_shard, over which"),
        ("FSDP", 4, {"ep_size": 2, "tp_size": 2}, "ep_size=2 .* contradicts .*tp_size=2 .*: ranks that share the matr"),
        ("MULTI_GPU", 4, {"ep_size": 2}, "ep_size=2 .* does not go with strategy=ddp .*, which has no such"),
    ],
)
def test_sizes_that_are_no_job_are_refused(kind, num_processes, sizes, message):
    with pytest.raises(ConfigError, match=message):
        resolve(file={"distributed_type": kind, "num_processes": num_processes, "parallelism_config": sizes})


def test_shared_sequences_of_accelerate_are_those_of_fsdp2():
    sizes = {"sp_size": 2, "dp_shard_size": 2, "sp_backend": "deepspeed", "sp_seq_length_is_variable": True}
    block = {f"parallelism_config_{name}": value for name, value in sizes.items()}
    resolved = resolve(file={"distributed_type": "MULTI_GPU", "num_processes": 4, "parallelism_config": block})
    assert (resolved.config.strategy, resolved.config.parallel.sp_size) == ("fsdp2", 2)
    assert any("is MULTI_GPU, and sp_size is 2: strategy 'fsdp2' runs" in note for note in resolved.notes)


def test_what_shared_sequences_of_accelerate_do_not_choose_is_noted_or_refused():
    sizes = {"sp_size": 2, "sp_attn_implementation": "flash_attention_2"}
    file = {"distributed_type": "FSDP", "num_processes": 2, "parallelism_config": sizes}
    (note,) = (note for note in resolve(file=file).notes if "sp_attn_implementation" in note)
    assert note == (
        "parallelism_config.sp_attn_implementation in the config dict is 'flash_attention_2', which is not used: the "
        "attention is that of the model; load it with attn_implementation=..."
    )
    for name, expected in (("sp_backend", "'deepspeed' or 'ulysses'"), ("cp_backend", "'torch'")):
        with pytest.raises(
            ConfigError, match=f"parallelism_config.{name} in the config dict is 'x'; expected {expected}$"
        ):
            resolve(file={**file, "parallelism_config": {"sp_size": 2, name: "x"}})


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"loss_parallel": True}, r"loss_parallel=true .* needs ranks that share the vocabulary; give a tp_si"),
        ({"tp_size": 2, "tp_plan": ["up"]}, r"tp_plan=\[up\] .* is not one NAME=STYLE for each module; write layers"),
    ],
)
def test_options_of_shared_layers_that_are_no_plan_are_refused(parallel, message):
    with pytest.raises(ConfigError, match=message):
        resolve(file={"strategy": "fsdp2", "parallel": parallel})


def test_a_plan_is_used_with_a_size():
    notes = resolve(file={"strategy": "fsdp2", "parallel": {"tp_plan": ["up=colwise"]}}).notes
    assert any("parallel.tp_plan=[up=colwise]" in note and "is not used: parallel.tp_size=1" in note for note in notes)


def test_tensor_parallelism_of_megatron_is_that_of_the_models_own_plan():
    block = {"tp_degree": 2, "pp_degree": 1, "use_distributed_optimizer": True, "sequence_parallelism": False}
    block = {f"megatron_lm_{name}": value for name, value in block.items()}

    resolved = resolve(file={"distributed_type": "MEGATRON_LM", "num_processes": 4, "megatron_lm_config": block})

    assert (resolved.config.strategy, resolved.config.parallel.tp_size) == ("fsdp2", 2)
    assert any("models of Megatron-LM are not here; strategy 'fsdp2' runs" in note for note in resolved.notes)


@pytest.mark.parametrize("bound", [1, 1.0])
def test_a_bound_of_gradients_is_refused_under_megatron(bound):
    with pytest.raises(
        ConfigError, match=r"megatron_lm_gradient_clipping .*, which is not offered: remove it, and clip"
    ):
        values(distributed_type="MEGATRON_LM", megatron_lm_config={"megatron_lm_gradient_clipping": bound})


def test_the_keys_of_the_launcher_are_those_of_accelerate():
    # ClusterConfig of accelerate 1.15, and the flags of its launcher that files may hold.
    keys = {
        "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
        "rdzv_conf", "same_network", "gpu_ids", "enable_cpu_affinity", "num_cpu_threads_per_process", "max_restarts",
        "monitor_interval", "tee", "log_dir", "role", "main_training_function",
    }  # fmt: skip

    assert keys <= KNOWN_KEYS
    # The first two are set by num_processes and num_machines as MIN:MAX.
    others = {"launch.min_processes", "launch.min_machines", "launch.on_rank_loss"}
    assert len(keys) == sum(path.startswith("launch.") and path not in others for path in field_specs())
