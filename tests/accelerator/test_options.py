"""What is passed to an Accelerator, brought to configuration values; and the checks before anything is laid out."""

from __future__ import annotations

import dataclasses
import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from accel_trainer import Accelerator, DeepSpeedPlugin
from accel_trainer.accelerator.options import AcceleratorOptions, build_strategy
from accel_trainer.config import Resolved, resolve
from accel_trainer.errors import ConfigError
from accel_trainer.plugins import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugins
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.api import Capabilities


def processes(count: int) -> ProcessContext:
    """Rank 0 of a job, without one."""
    return ProcessContext(0, 0, count, count, torch.device("cpu"), "gloo" if count > 1 else None)


SCALARS = {
    "split_batches": "data.split_batches",
    "mixed_precision": "mixed_precision",
    "gradient_accumulation_steps": "accumulation.num_steps",
    "cpu": "use_cpu",
    "dynamo_backend": "compile.backend",
    "strategy": "strategy",
}


def options_of(deepspeed_plugin: DeepSpeedPlugin | None = None, **given: Any) -> AcceleratorOptions:
    scalars = {SCALARS[name]: given.pop(name) for name in list(given) if name in SCALARS}
    return AcceleratorOptions.build(scalars, **given).with_plugin(deepspeed_plugin)


def configured(environ: dict[str, str] | None = None, file: Any = None, **given: Any) -> Resolved:
    return resolve(explicit=options_of(**given).explicit, environ=environ or {}, file=file)


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("given", "count", "name"),
    [
        ({}, 1, "single"), ({}, 2, "ddp"), ({}, 64, "ddp"),  # the number of processes decides
        ({"strategy": "ddp"}, 1, "ddp"), ({"strategy": "ddp"}, 2, "ddp"), ({"strategy": "fsdp2"}, 2, "fsdp2"),
        ({"strategy": "fsdp2"}, 1, "fsdp2"),
        ({"strategy": "single"}, 1, "single"),
        ({"file": {"distributed_type": "MULTI_CPU", "num_processes": 2}}, 2, "ddp"),
    ],
)  # fmt: skip
def test_a_strategy_that_fits_is_taken(given: dict[str, Any], count: int, name: str):
    assert build_strategy(configured(**given), processes(count)).name == name


@pytest.mark.parametrize(
    ("strategy", "text", "count", "message"),
    [
        (
            None, "distributed_type: FSDP\nnum_processes: 8\n", 1,
            r"num_processes=8 \(from .*run\.yaml:2\), and 1 process\(es\) run this job",
        ),
        ("single", "", 2, r"'single' is for 1 process and this job has 2, which would each train alone"),
        *(
            (
                None, f"strategy: auto\nlaunch:\n  num_processes: {stated}\n", count,
                rf"launch\.num_processes={stated} \(from .*run\.yaml:3\), and {count} process\(es\) run this job\. "
                rf"Start it with `accel-trainer launch --num_processes {stated} SCRIPT`, or set num_processes to "
                rf"{count} there",
            )
            for stated, count in ((2, 4), (4, 1))
        ),
    ],
)  # fmt: skip
def test_a_number_of_processes_that_does_not_fit_says_what_to_start(
    tmp_path: Path, strategy: str | None, text: str, count: int, message: str
):
    resolved = configured(file=write(tmp_path, text) if text else None, strategy=strategy)
    with pytest.raises(ConfigError, match=message):
        build_strategy(resolved, processes(count))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "deepspeed"}, "batch sizes are for one number of processes; give num_processes one number"),
        (
            {"parallel.tp_size": 4},
            r"launch\.min_processes=1 .*: parallel\.tp_size=4 .* makes 4 process\(es\), and this job has 1",
        ),
    ],
)
def test_what_fewer_processes_after_a_restart_cannot_do_is_refused_at_the_first_start(
    options: dict[str, Any], message: str
):
    """Given in Python, where the launcher does not see it."""
    with pytest.raises(ConfigError, match=message):
        build_strategy(resolve(explicit=options, environ={"ACCEL_TRAINER_LAUNCH__NUM_PROCESSES": "1:4"}), processes(4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"strategy": "ddp", "fsdp_plugin": FullyShardedDataParallelPlugin()},
            r"fsdp_plugin sets strategy='fsdp2', and Accelerator\(strategy='ddp'\) was given beside it; pass one",
        ),
        (
            {"split_batches": True, "dataloader_config": DataLoaderConfiguration(split_batches=False)},
            r"dataloader_config sets split_batches=False, and Accelerator\(split_batches=True\) was given beside it",
        ),
        (
            {
                "gradient_accumulation_steps": 2,
                "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4),
            },
            r"gradient_accumulation_steps=2 and GradientAccumulationPlugin\(num_steps=4\) were both given",
        ),
        (
            {"kwargs_handlers": [InitProcessGroupKwargs(), InitProcessGroupKwargs()]},
            r"kwargs_handlers holds two InitProcessGroupKwargs; pass one",
        ),
        (
            {"gradient_accumulation_steps": 2, "deepspeed_plugin": DeepSpeedPlugin(gradient_accumulation_steps=4)},
            r"deepspeed_plugin sets gradient_accumulation_steps=4, and Accelerator\(gradient_accumulation_steps=2\)",
        ),
        ({"kwargs_handlers": InitProcessGroupKwargs()}, "kwargs_handlers is a InitProcessGroupKwargs; pass a list of"),
        (
            {"kwargs_handlers": [InitProcessGroupKwargs(timeout=60)]},
            r"InitProcessGroupKwargs\(timeout=60\) is a int; pass a datetime.timedelta",
        ),
        ({"fsdp_plugin": {"cpu_offload": True}}, "fsdp_plugin is a builtins.dict; pass accel_trainer's own FullySha"),
        ({"dataloader_config": 3}, "dataloader_config is a builtins.int; pass accel_trainer's own DataLoaderConfigur"),
        ({"kwargs_handlers": [object()]}, r"kwargs_handlers holds a object; known: .*DistributedDataParallelKwargs"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        options_of(**given)


@pytest.mark.parametrize("word", ["NO", "INDUCTOR", "inductor"])
def test_a_backend_for_compiling_may_be_written_as_elsewhere(word: str):
    assert configured(dynamo_backend=word).config.compile.backend == word.lower()


def test_arguments_of_the_accelerator_hold_for_every_deepspeed_plugin():
    build = functools.partial(options_of, gradient_accumulation_steps=4, mixed_precision="bf16")
    given = {
        "student": DeepSpeedPlugin(gradient_accumulation_steps=4, zero_stage=2),
        "teacher": DeepSpeedPlugin(zero_stage=3),
    }
    plugins = DeepSpeedPlugins.of(None, given)

    def resolve_with(plugin: DeepSpeedPlugin) -> Resolved:
        return resolve(explicit=build(deepspeed_plugin=plugin).explicit)

    first = resolve_with(given["student"])
    plugins.resolve(first, Capabilities(distributed_type="DEEPSPEED"), resolve_with)
    configs = [resolved.config for resolved in plugins.resolved.values()]
    assert [config.accumulation.num_steps for config in configs] == [4, 4]
    assert [config.deepspeed["zero_stage"] for config in configs] == [2, 3]
    given["teacher"] = DeepSpeedPlugin(gradient_accumulation_steps=8)
    with pytest.raises(ConfigError, match="deepspeed_plugin sets gradient_accumulation_steps=8, and"):
        DeepSpeedPlugins.of(None, given).resolve(first, Capabilities(), resolve_with)


def test_arguments_that_agree_are_taken():
    plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
    resolved = configured(
        strategy="fsdp2",
        fsdp_plugin=FullyShardedDataParallelPlugin(),
        split_batches=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        gradient_accumulation_steps=4,
        gradient_accumulation_plugin=plugin,
    )
    assert (resolved.config.accumulation.num_steps, resolved.config.accumulation.sync_each_batch) == (4, True)


def test_an_explicit_argument_wins_over_environment_and_file(tmp_path: Path):
    file = write(tmp_path, "accumulation:\n  num_steps: 8\nmixed_precision: bf16\n")
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "bf16"}
    argument = configured(environ, file, gradient_accumulation_steps=2, mixed_precision="no").config
    plugin = configured(environ, file, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)).config
    assert (argument.accumulation.num_steps, str(argument.mixed_precision)) == (2, "no")
    assert (plugin.accumulation.num_steps, str(plugin.mixed_precision)) == (3, "bf16")
    assert configured(environ, file).config.accumulation.num_steps == 4
    assert configured({}, file).config.accumulation.num_steps == 8


def test_what_a_plugin_leaves_out_stays_as_configured():
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "FSDP_OFFLOAD_PARAMS": "true"}
    environ |= {"ACCELERATE_USE_FSDP": "true"}
    resolved = configured(
        environ,
        gradient_accumulation_plugin=GradientAccumulationPlugin(sync_each_batch=True),
        fsdp_plugin=FullyShardedDataParallelPlugin(reshard_after_forward=False),
        dataloader_config=DataLoaderConfiguration(),
    )
    assert resolved.config.accumulation.num_steps == 4
    assert resolved.config.accumulation.sync_each_batch
    assert resolved.config.fsdp.offload_params
    assert not resolved.config.fsdp.reshard_after_forward
    assert resolved.source("accumulation.num_steps").where == "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def test_plugins_write_nothing_to_the_environment():
    before = dict(os.environ)
    FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, activation_checkpointing=True).explicit()
    GradientAccumulationPlugin(num_steps=2).explicit()
    DistributedDataParallelKwargs(static_graph=True).given()
    configured(fsdp_plugin=FullyShardedDataParallelPlugin())
    Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16").prepare(nn.Linear(1, 1))
    assert dict(os.environ) == before


def wrap_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


FSDP_FIELDS: dict[str, tuple[Any, str, Any]] = {
    "reshard_after_forward": (False, "reshard_after_forward", False),
    "auto_wrap_policy": ("SIZE_BASED_WRAP", "wrap_policy", "size"),
    "transformer_cls_names_to_wrap": (["A", "B"], "wrap_classes", ("A", "B")),
    "min_num_params": (5, "min_num_params", 5),
    "cpu_offload": (True, "offload_params", True),
    "activation_checkpointing": (True, "activation_checkpointing", True),
    "cpu_ram_efficient_loading": (True, "cpu_ram_efficient_loading", True),
    "state_dict_type": ("SHARDED_STATE_DICT", "state_dict_type", "sharded"),
    "ignored_modules": (["head"], "ignored_modules", ("head",)),
    "backward_prefetch": (False, "backward_prefetch", False),
    "forward_prefetch": (True, "forward_prefetch", True),
    "replicate_size": (2, "replicate_size", 2),
    "replicate_per_node": (True, "replicate_per_node", True),
}


def test_every_field_of_the_fsdp_plugin_is_tried_here():
    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    others = {"fsdp_version", "sharding_strategy", "activation_checkpointing_offload"}
    assert fields == {*FSDP_FIELDS, *others, *FSDP1_WITHOUT_EFFECT, *FSDP1_REFUSED}
    paths = {field.name for field in dataclasses.fields(resolve(environ={}).config.fsdp)}
    assert paths == {path for _, path, _ in FSDP_FIELDS.values()}


@pytest.mark.parametrize("name", list(FSDP_FIELDS))
def test_a_field_of_the_fsdp_plugin_reaches_the_configuration(name: str):
    value, path, expected = FSDP_FIELDS[name]
    resolved = configured(fsdp_plugin=FullyShardedDataParallelPlugin(**{name: value}))
    assert resolved.config.strategy == "fsdp2"
    assert getattr(resolved.config.fsdp, path) == expected
    assert getattr(resolve(environ={}).config.fsdp, path) != expected  # or nothing was shown
    others = [p for p in resolved.sources if p.startswith("fsdp.") and p != f"fsdp.{path}"]
    assert {resolved.source(p).kind.value for p in others} == {"default"}


def test_a_policy_of_checkpointing_and_the_offload_are_options_of_every_strategy():
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing="every:2", activation_checkpointing_offload=True)
    config = configured(fsdp_plugin=plugin).config
    assert (config.recomputation, config.activation_offload) == ("every:2", True)
    assert not config.fsdp.activation_checkpointing


def test_a_callable_policy_is_kept_beside_the_configuration():
    options = options_of(fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy=wrap_linear))
    assert options.wrap_policy is wrap_linear
    assert "fsdp.wrap_policy" not in options.explicit
    assert options_of(fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="none")).wrap_policy is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"auto_wrap_policy": "by_layer"}, r"wrap_policy.*'by_layer'.*expected one of"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, r"state_dict_type.*LOCAL_STATE_DICT"),
        ({"reshard_after_forward": "FULL_SHARD"}, r"reshard_after_forward.*'FULL_SHARD'"),
        ({"min_num_params": -1}, r"min_num_params.*-1"),
    ],
)
def test_a_value_that_the_configuration_refuses_is_refused_in_a_plugin(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        configured(fsdp_plugin=FullyShardedDataParallelPlugin(**given))


FSDP1_WITHOUT_EFFECT = {
    "use_orig_params": True,
    "sync_module_states": True,
    "limit_all_gathers": False,
    "state_dict_config": FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
    "optim_state_dict_config": FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
}
FSDP1_REFUSED = {
    "mixed_precision_policy": (MixedPrecision(), r"mixed_precision_policy=.*Accelerator\(mixed_precision=\.\.\.\)"),
    "param_init_fn": (nn.Module.to_empty, r"param_init_fn=.*init_empty_weights\(\)"),
}


FULL_SHARD = {"reshard_after_forward": True, "replicate_per_node": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, FULL_SHARD),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {**FULL_SHARD, "reshard_after_forward": False}),
        ({"sharding_strategy": "hybrid_shard"}, {**FULL_SHARD, "replicate_per_node": True}),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}, FULL_SHARD),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, {"backward_prefetch": True}),
        ({"backward_prefetch": "NO_PREFETCH"}, {"backward_prefetch": False}),
        ({"state_dict_type": StateDictType.SHARDED_STATE_DICT}, {"state_dict_type": "sharded"}),
        ({"cpu_offload": CPUOffload(offload_params=True)}, {"offload_params": True}),
        ({"cpu_offload": CPUOffloadPolicy()}, {"offload_params": True}),
        ({"cpu_offload": OffloadPolicy()}, {"offload_params": False}),
        (FSDP1_WITHOUT_EFFECT, {}),
        *(
            ({"auto_wrap_policy": written}, {"wrap_policy": policy})
            for written, policy in (("transformer_based_wrap", "transformer"), ("NO_WRAP", "none"), ("none", "none"))
        ),
    ],
)
def test_what_scripts_for_fsdp1_pass_to_the_plugin_is_taken(given: dict[str, Any], expected: dict[str, Any]):
    resolved = configured(fsdp_plugin=FullyShardedDataParallelPlugin(**given))
    set_here = [path for path in resolved.sources if resolved.source(path).kind.value != "default"]
    assert {path.removeprefix("fsdp.") for path in set_here if path.startswith("fsdp.")} == set(expected)
    assert {name: getattr(resolved.config.fsdp, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({name: value}, message) for name, (value, message) in FSDP1_REFUSED.items()),
        ({"sharding_strategy": "NO_SHARD"}, r"'NO_SHARD'\) keeps the whole model.*strategy='ddp'"),
        (
            {"sharding_strategy": "FULL_SHART"},
            r"'FULL_SHART'\); expected one of FULL_SHARD, .*did you mean 'FULL_SHARD'",
        ),
        (
            {"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True},
            r"'SHARD_GRAD_OP'\) means reshard_after_forward=False, and reshard_after_forward=True was given; keep one",
        ),
        ({"auto_wrap_policy": CustomPolicy(wrap_linear)}, r"auto_wrap_policy=.* cannot be called; pass the function"),
    ],
)
def test_what_fsdp2_has_not_is_refused_in_the_plugin(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        FullyShardedDataParallelPlugin(**given).explicit()


@pytest.mark.parametrize("version", [1, "1"])
def test_fsdp1_is_refused_by_the_plugin(version: Any):
    with pytest.raises(ConfigError, match=rf"Plugin\(fsdp_version={version!r}\): only FSDP2 is offered; pass 2"):
        FullyShardedDataParallelPlugin(fsdp_version=version)
    assert FullyShardedDataParallelPlugin(fsdp_version=type(version)(2)).explicit() == {"strategy": "fsdp2"}


def test_options_of_loaders_and_groups_reach_the_configuration():
    resolved = configured(
        dataloader_config=DataLoaderConfiguration(even_batches=False, data_seed=3, dispatch_batches=True),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(minutes=2)),
            DistributedDataParallelKwargs(bucket_cap_mb=7),
        ],
    )
    data = resolved.config.data
    assert (data.even_batches, data.data_seed, data.dispatch_batches, data.split_batches) == (False, 3, True, False)
    assert resolved.config.timeout_seconds == 120
    assert resolved.config.ddp.bucket_cap_mb == 7


def test_a_backend_and_ddp_options_of_no_path_are_kept():
    handlers = [InitProcessGroupKwargs(backend="gloo"), DistributedDataParallelKwargs(dim=1, static_graph=True)]
    options = options_of(kwargs_handlers=handlers)
    assert options.backend == "gloo"
    assert options.ddp_options == {"dim": 1}
    assert options.explicit == {"ddp.static_graph": True}
