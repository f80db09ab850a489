"""Files that `accelerate config` writes."""

from __future__ import annotations

import pytest

from accel_trainer.config import Dialect, SourceKind, StateDictType, WrapPolicy, field_specs, read_file, resolve
from accel_trainer.config.dialects.accelerate import KNOWN_KEYS
from accel_trainer.errors import ConfigError

ISSUE_YAML = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

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


@pytest.fixture
def issue_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fsdp_config"  # without a suffix, as in the call that this project is about
    path.write_text(ISSUE_YAML, encoding="utf-8")
    return "fsdp_config"


def test_the_file_of_the_fine_tuning_job_means_fsdp_in_bf16_on_two_ranks(issue_file):
    resolved = resolve(file=issue_file)

    config = resolved.config
    assert (config.strategy, config.mixed_precision, config.use_cpu) == ("fsdp2", "bf16", False)
    assert config.launch.num_processes == 2
    assert config.fsdp.wrap_policy is WrapPolicy.TRANSFORMER
    assert config.fsdp.wrap_classes == ("BertLayer",)
    assert config.fsdp.state_dict_type is StateDictType.SHARDED
    assert config.fsdp.cpu_ram_efficient_loading
    assert config.fsdp.reshard_after_forward
    assert config.fsdp.backward_prefetch
    assert not config.fsdp.forward_prefetch
    assert not config.fsdp.offload_params


def test_its_values_remember_their_lines(issue_file):
    resolved = resolve(file=issue_file)

    assert resolved.describe("launch.num_processes") == "launch.num_processes=2 (from fsdp_config:20)"
    assert resolved.describe("fsdp.wrap_classes") == "fsdp.wrap_classes=[BertLayer] (from fsdp_config:14)"
    assert resolved.describe("strategy") == "strategy=fsdp2 (from fsdp_config:3)"


def test_one_note_names_its_keys_of_fsdp1(issue_file):
    assert resolve(file=issue_file).notes == (
        "fsdp_config is written for FSDP1 (no fsdp_version, which means 1); it runs with FSDP2; "
        "mapped: fsdp_backward_prefetch_policy, fsdp_forward_prefetch, fsdp_sharding_strategy; "
        "without effect: fsdp_sync_module_states, fsdp_use_orig_params",
    )


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
        ("MULTI_GPU", 2, "ddp"),
        ("MULTI_GPU", 1, "auto"),
        ("MULTI_GPU", -1, "ddp"),
        ("MULTI_XPU", 4, "ddp"),
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


def test_no_shard_is_ddp_with_a_note():
    file = read_file({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "sharding_strategy": "NO_SHARD"}})

    assert file.settings["strategy"].value == "ddp"
    assert any("every rank keeps the whole model, so strategy 'ddp' is used" in note for note in file.notes)


def test_a_block_that_is_not_used_is_noted():
    file = read_file({"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_offload_params": True}})

    assert file.notes == ("fsdp_config in the config dict is not used: distributed_type is MULTI_GPU",)
    assert "fsdp.offload_params" not in file.settings


def test_launch_keys_are_mapped():
    got = values(
        distributed_type="MULTI_GPU",
        num_processes=16,
        num_machines=2,
        machine_rank=1,
        main_process_ip="10.0.0.1",
        main_process_port=29501,
        rdzv_backend="c10d",
        same_network=False,
        gpu_ids="0,1",
        enable_cpu_affinity=True,
        main_training_function="train",
        debug=True,
        mixed_precision="fp16",
    )

    assert got == {
        "strategy": "ddp",
        "launch.num_processes": 16,
        "launch.num_machines": 2,
        "launch.machine_rank": 1,
        "launch.main_process_ip": "10.0.0.1",
        "launch.main_process_port": 29501,
        "launch.rdzv_backend": "c10d",
        "launch.same_network": False,
        "launch.gpu_ids": "0,1",
        "launch.enable_cpu_affinity": True,
        "launch.main_training_function": "train",
        "debug": True,
        "mixed_precision": "fp16",
    }


def test_a_single_gpu_number_is_text_for_gpu_ids():
    assert values(distributed_type="NO", gpu_ids=0)["launch.gpu_ids"] == "0"


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


def test_keys_of_old_files_are_mapped():
    got = values(distributed_type="NO", fp16=True, dynamo_backend="AOT_EAGER")

    assert (got["mixed_precision"], got["compile.backend"]) == ("fp16", "aot_eager")


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


def test_a_sharded_loss_needs_ranks_that_share_the_vocabulary():
    with pytest.raises(ConfigError, match=r"loss_parallel=true .* needs ranks that share the vocabulary; give a tp_si"):
        resolve(file={"strategy": "fsdp2", "parallel": {"loss_parallel": True}})


def test_a_plan_names_a_style_for_each_module_and_is_used_with_a_size():
    with pytest.raises(ConfigError, match=r"tp_plan=\[up\] .* is not one NAME=STYLE for each module; write layers"):
        resolve(file={"strategy": "fsdp2", "parallel": {"tp_size": 2, "tp_plan": ["up"]}})
    notes = resolve(file={"strategy": "fsdp2", "parallel": {"tp_plan": ["up=colwise"]}}).notes
    assert any("parallel.tp_plan=[up=colwise]" in note and "is not used: parallel.tp_size=1" in note for note in notes)


def test_tensor_parallelism_of_megatron_is_that_of_the_models_own_plan():
    block = {"tp_degree": 2, "pp_degree": 1, "use_distributed_optimizer": True, "sequence_parallelism": False}
    block = {f"megatron_lm_{name}": value for name, value in block.items()}

    resolved = resolve(file={"distributed_type": "MEGATRON_LM", "num_processes": 4, "megatron_lm_config": block})

    assert (resolved.config.strategy, resolved.config.parallel.tp_size) == ("fsdp2", 2)
    assert any("models of Megatron-LM are not here; strategy 'fsdp2' runs" in note for note in resolved.notes)


def test_an_unquoted_no_is_the_distributed_type_no(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("distributed_type: NO\n", encoding="utf-8")

    assert resolve(file=path).config.strategy == "single"


def test_the_keys_of_the_launcher_are_those_of_accelerate():
    # ClusterConfig of accelerate 1.15, and the flags of its launcher that files may hold.
    keys = [
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "rdzv_backend",
        "rdzv_conf",
        "same_network",
        "gpu_ids",
        "enable_cpu_affinity",
        "num_cpu_threads_per_process",
        "max_restarts",
        "monitor_interval",
        "tee",
        "log_dir",
        "role",
        "main_training_function",
    ]

    assert set(keys) <= KNOWN_KEYS
    others = {"launch.min_processes"}  # set by num_processes MIN:MAX
    assert len(keys) == sum(path.startswith("launch.") and path not in others for path in field_specs())
