"""Variables of our own, and those of accelerate's launcher."""

from __future__ import annotations

import pytest

from accel_trainer.config import SourceKind, field_specs, resolve
from accel_trainer.config.dialects.environment import RESERVED_VARIABLES, variable_name
from accel_trainer.errors import ConfigError

LAUNCHED_BY_ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer,BertEmbeddings",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
"""What `accelerate launch` exports for an FSDP job, less FSDP_VERSION; most of it are the defaults of its flags."""

SAMPLES = {bool: "true", int: "3", float: "2.5", str: "x"}
SPECIAL = {
    "activation_checkpointing": "every:2",
    "mixed_precision": "bf16",
    "output_dtype": "kept",
    "scheduler_steps": "per_process",
    "compat": "accelerate",
    "accumulation.loss_division": "accelerate",
    "loss": "chunked",
    "launch.on_rank_loss": "continue",
    "on_changed_run": "refuse",
    "on_nonfinite": "warn",
    "compile.mode": "max-autotune",
    "fsdp.wrap_policy": "size",
    "fsdp.state_dict_type": "sharded",
    "fsdp.wrap_classes": "A,B",
    "fsdp.ignored_modules": r"head\..{1,2}",
    "ema_decay": "0.5",
    "outer_optimizer.momentum": "0.5",
    "peak_flops": "989e12",
    "preemption.signals": "SIGTERM,SIGUSR2",
    "launch.gpu_ids": "0,1",
    "launch.machine_rank": "0",
    "dataset_mixture": '{"datasets": []}',
    "deepspeed": '{"zero_stage": 3}',
    "data.dispatch_batches": "no",
    "compile.dynamic": "1",
    "compile.regional": "true",
    "fsdp.replicate_per_node": "false",
    "fp8.backend": "ao",
    "parallel.loss_parallel": "false",
    "parallel.cp_comm_strategy": "alltoall",
    "parallel.cp_size": "1",
    "parallel.sp_size": "1",
    "parallel.tp_size": "1",
    "parallel.tp_plan": "layers.*.up=colwise",
    "launch.num_machines": "1",
    "launch.tee": "3",
}


@pytest.mark.parametrize("path", field_specs())
def test_every_option_has_a_variable(path):
    text = SPECIAL.get(path) or SAMPLES.get(type(field_specs()[path].default), "3")

    needed = {
        "launch.min_processes": {"launch.num_processes": text},
        "launch.min_machines": {
            "launch.num_machines": "3:3",
            "launch.num_processes": "3:3",
            "launch.rdzv_backend": "c10d",
        },
    }.get(path, {})
    resolved = resolve(environ={variable_name(name): value for name, value in {**needed, path: text}.items()})

    assert resolved.source(path).kind is SourceKind.ENVIRONMENT
    assert resolved.source(path).where == variable_name(path)


def test_variables_are_read_by_the_type_of_the_option():
    resolved = resolve(
        environ={
            "ACCEL_TRAINER_FSDP__WRAP_CLASSES": "BertLayer, BertPooler",
            "ACCEL_TRAINER_FSDP__IGNORED_MODULES": r"encoder\.layer\.\d{1,2}",
            "ACCEL_TRAINER_FSDP__MIN_NUM_PARAMS": "1e6",
            "ACCEL_TRAINER_FSDP__WRAP_POLICY": "SIZE",
            "ACCEL_TRAINER_TIMEOUT_SECONDS": "90",
            "ACCEL_TRAINER_DATA__DISPATCH_BATCHES": "no",
            "ACCEL_TRAINER_DEEPSPEED": '{"zero_stage": 2}',
        }
    ).config

    assert resolved.fsdp.wrap_classes == ("BertLayer", "BertPooler")
    assert resolved.fsdp.ignored_modules == (r"encoder\.layer\.\d{1,2}",)
    assert (resolved.fsdp.min_num_params, resolved.fsdp.wrap_policy) == (1_000_000, "size")
    assert (resolved.timeout_seconds, resolved.data.dispatch_batches) == (90.0, False)
    assert resolved.deepspeed == {"zero_stage": 2}


def test_our_own_variable_wins_over_accelerates():
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCEL_TRAINER_MIXED_PRECISION": "bf16"}

    assert resolve(environ=environ).describe("mixed_precision") == (
        "mixed_precision=bf16 (from ACCEL_TRAINER_MIXED_PRECISION)"
    )


def test_an_empty_variable_is_not_set():
    environ = {"ACCELERATE_MIXED_PRECISION": "", "ACCEL_TRAINER_USE_CPU": " ", "ACCEL_TRAINER_LAUNCH": ""}

    assert not resolve(environ=environ).is_set("mixed_precision")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCEL_TRAINER_TIMEOUT_SECONDS", "soon", "environment variable {name} is 'soon'; expected a number"),
        ("ACCELERATE_USE_CPU", "maybe", "environment variable {name} is 'maybe'; expected true or false"),
        ("ACCELERATE_USE_FSDP", "maybe", "environment variable {name} is 'maybe'; expected true or false"),
        (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "0",
            "environment variable {name} is '0'; expected a whole number of at least 1",
        ),
        (
            "ACCEL_TRAINER_DEEPSPEED",
            "{",
            "environment variable {name}: the JSON text:1 is not valid JSON: Expecting property name enclosed in "
            "double quotes (column 2)",
        ),
        (
            "ACCEL_TRAINER_MIXED_PRECISON",
            "bf16",
            "unknown environment variable '{name}'; did you mean 'ACCEL_TRAINER_MIXED_PRECISION'?",
        ),
        (
            "ACCELERATE_USE_MEGATRON_LM",
            "true",
            "environment variable {name} is true, which is not offered: use FSDP, with "
            "PARALLELISM_CONFIG_TP_SIZE for tensor parallelism, or DeepSpeed",
        ),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(name, value, message):
    with pytest.raises(ConfigError) as caught:
        resolve(environ={name: value})

    assert str(caught.value) == message.format(name=name)


def test_reserved_and_foreign_variables_are_left_alone():
    environ = dict.fromkeys(RESERVED_VARIABLES.keys() - {"ACCEL_TRAINER_LAUNCH"}, "x")

    resolved = resolve(environ={**environ, "PATH": "/bin", "ACCELERATE_LOG_LEVEL": "info", "FSDP_VERSION": "nonsense"})

    assert {source.kind for source in resolved.sources.values()} == {SourceKind.DEFAULT}


def test_fsdp_variables_count_only_with_accelerate_use_fsdp():
    environ = {**LAUNCHED_BY_ACCELERATE, "ACCELERATE_USE_FSDP": "false"}

    resolved = resolve(environ=environ)

    assert resolved.config.strategy == "auto"
    assert not any(resolved.is_set(path) for path in field_specs() if path.startswith("fsdp."))


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_job_of_accelerates_launcher_is_understood(version):
    resolved = resolve(environ={**LAUNCHED_BY_ACCELERATE, "FSDP_VERSION": version})

    config = resolved.config
    assert (config.strategy, config.mixed_precision, config.compile.backend) == ("fsdp2", "bf16", "no")
    assert config.fsdp.wrap_classes == ("BertLayer", "BertEmbeddings")
    assert (config.fsdp.state_dict_type, config.fsdp.cpu_ram_efficient_loading) == ("sharded", True)
    assert resolved.source("fsdp.wrap_classes").where == "FSDP_TRANSFORMER_CLS_TO_WRAP"
    assert len(resolved.notes) == (1 if version == "1" else 0)


@pytest.mark.parametrize(
    ("variables", "reshard", "per_node"),
    [
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, False, False),
        ({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, False, False),
        ({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "2"}, False, False),
        ({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, True, True),
        # The one that `accelerate config` writes for FSDP1, and that its own plugin then ignores.
        ({"FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, False, False),
    ],
)
def test_the_launchers_defaults_do_not_hide_what_was_asked_for(variables, reshard, per_node):
    config = resolve(environ={**LAUNCHED_BY_ACCELERATE, **variables}).config

    assert (config.fsdp.reshard_after_forward, config.fsdp.replicate_per_node) == (reshard, per_node)


def test_no_shard_is_ddp_with_a_note():
    environ = {**LAUNCHED_BY_ACCELERATE, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "NO_SHARD"}

    resolved = resolve(environ=environ)

    assert resolved.describe("strategy") == "strategy=ddp (from FSDP_SHARDING_STRATEGY)"
    assert any("every rank keeps the whole model, so strategy 'ddp' is used" in note for note in resolved.notes)


def test_parallel_sizes_in_the_environment_are_mapped_or_refused():
    environ = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}

    mapped = resolve(environ={**environ, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"})

    described = "parallel.dp_replicate_size=2 (from PARALLELISM_CONFIG_DP_REPLICATE_SIZE)"
    assert mapped.describe("parallel.dp_replicate_size") == described
    ring = {"PARALLELISM_CONFIG_CP_SIZE": "2", "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"}
    assert resolve(environ={**environ, **ring}).config.parallel.cp_comm_strategy == "alltoall"
    with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_CP_SIZE is 'x'; expected a whole number of at least 1"):
        resolve(environ={**environ, "PARALLELISM_CONFIG_CP_SIZE": "x"})


def test_one_engine_in_the_environment_is_the_strategy_and_two_are_refused():
    assert resolve(environ={"ACCELERATE_USE_DEEPSPEED": "true"}).config.strategy == "deepspeed"
    with pytest.raises(ConfigError, match="ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED are both true"):
        resolve(environ={"ACCELERATE_USE_FSDP": "1", "ACCELERATE_USE_DEEPSPEED": "1"})
