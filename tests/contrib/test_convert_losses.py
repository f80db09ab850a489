"""DeepSpeed configurations as ones for FSDP2, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_trainer.config import build_config, packaged_names, resolve
from accel_trainer.contrib.deepspeed_fsdp import to_deepspeed, to_fsdp
from accel_trainer.errors import ConfigError


def fsdp_of(block):
    return to_fsdp(resolve(file={"strategy": "deepspeed", "deepspeed": block}).config)


@pytest.mark.parametrize(
    ("stage", "strategy", "reshards"),
    [(0, "ddp", True), (1, "fsdp2", False), (2, "fsdp2", False), (3, "fsdp2", True)],
)
def test_stages_become_strategies(stage, strategy, reshards):
    config, lost = fsdp_of({"zero_optimization": {"stage": stage}})
    assert (config.strategy, config.fsdp.reshard_after_forward, config.deepspeed) == (strategy, reshards, {})
    assert lost == (
        ["zero_optimization.stage is 1: FSDP2 shards the gradients too, as stage 2 does"] if stage == 1 else []
    )


def test_precision_accumulation_and_offload_are_kept():
    block = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 4,
    }
    config, lost = fsdp_of(block)
    assert config.fsdp.offload_params
    assert (config.mixed_precision, config.accumulation.num_steps, lost) == ("bf16", 4, [])


def test_what_has_no_counterpart_is_listed():
    _, lost = fsdp_of(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            "gradient_clipping": 1.0,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 4,
            "wall_clock_breakdown": False,
            "zero3_init_flag": True,
            "deepspeed_hostfile": "hosts",
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "reduce_bucket_size": 1000,
                "stage3_prefetch_bucket_size": "auto",
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "nvme", "nvme_path": "/disk"},
            },
        }
    )
    assert lost == [
        "zero_optimization.offload_param.device is 'nvme': fsdp.offload_params keeps it in CPU memory, there is no "
        "offload to disks",
        "optimizer has no counterpart: build the optimizer in the script",
        "scheduler has no counterpart: build the scheduler in the script",
        "gradient_clipping has no counterpart: call accelerator.clip_grad_norm_ before the step, or set max_grad_norm "
        "of TrainingArguments",
        "train_micro_batch_size_per_gpu has no counterpart: it is the batch size of the data loader",
        "zero3_init_flag has no counterpart: models are built whole, and then sharded",
        "zero_optimization.reduce_bucket_size has no counterpart: 1000 is left out",
        "zero_optimization.offload_param.nvme_path has no counterpart: '/disk' is left out",
        "deepspeed_hostfile has no counterpart: start the script on each machine",
    ]


def test_offload_of_the_optimizer_alone_is_said_to_become_more():
    config, lost = fsdp_of({"zero_stage": 2, "offload_optimizer_device": "cpu"})
    assert config.fsdp.offload_params
    assert lost == [
        "zero_optimization.offload_optimizer.device is 'cpu': fsdp.offload_params keeps the parameters in CPU memory "
        "too"
    ]


def test_a_run_with_fsdp_becomes_a_configuration_of_deepspeed():
    config = resolve(
        file={
            "strategy": "fsdp2",
            "mixed_precision": "fp16",
            "accumulation": {"num_steps": 2},
            "fsdp": {
                "offload_params": True,
                "state_dict_type": "sharded",
                "wrap_classes": ["Block"],
                "activation_checkpointing": True,
                "replicate_per_node": True,
                "forward_prefetch": True,
            },
            "compile": {"backend": "inductor"},
            "launch": {"num_processes": 4},
        }
    ).config
    data, lost = to_deepspeed(config)
    assert data == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": True},
    }
    assert lost == [
        "compile.backend='inductor' has no counterpart",
        "fsdp.wrap_classes=['Block'] has no counterpart: DeepSpeed needs no groups of layers",
        "fsdp.activation_checkpointing=true has no counterpart: call model.gradient_checkpointing_enable()",
        "fsdp.forward_prefetch=true has no counterpart",
        "fsdp.replicate_per_node=true has no counterpart; zero_optimization.zero_hpz_partition_size is the nearest",
        "launch.num_processes=4 is no option of DeepSpeed; set it where the run's other options are",
    ]


def test_half_an_offload_and_fp8_are_said():
    config = build_config(
        {
            "strategy": "fsdp2",
            "fsdp.reshard_after_forward": False,
            "fsdp.offload_params": True,
            "mixed_precision": "fp8",
        }
    )
    data, lost = to_deepspeed(config)
    assert data["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert lost == [
        "fsdp.offload_params at stage 2 offloads optimizer state only; the parameters stay on the device",
        "mixed_precision=fp8 has no counterpart",
    ]


@given(
    st.sampled_from(["ddp", "fsdp2"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["no", "bf16", "fp16"]),
    st.integers(1, 9),
)
def test_what_both_have_survives_the_way_there_and_back(strategy, reshards, offloads, precision, steps):
    sharded = {"fsdp.reshard_after_forward": reshards, "fsdp.offload_params": offloads}
    config = build_config(
        {"strategy": strategy, "accumulation.num_steps": steps, **(sharded if strategy == "fsdp2" else {})}
    )
    config = resolve(file={}, explicit={"mixed_precision": precision, **_paths(config)}).config

    data, lost = to_deepspeed(config)
    back, _ = to_fsdp(resolve(file=data).config)

    assert back == config
    half = strategy == "fsdp2" and offloads and not reshards
    assert len(lost) == int(half)


def _paths(config):
    return {
        "strategy": config.strategy,
        "accumulation.num_steps": config.accumulation.num_steps,
        "fsdp.reshard_after_forward": config.fsdp.reshard_after_forward,
        "fsdp.offload_params": config.fsdp.offload_params,
    }


@pytest.mark.parametrize("name", packaged_names())
def test_every_packaged_configuration_can_be_converted(name):
    config = resolve(file=name).config
    if config.strategy == "deepspeed":
        assert to_fsdp(config)[0].strategy == "fsdp2"
    else:
        data, _ = to_deepspeed(config)
        assert resolve(file=data).config.strategy == "deepspeed"


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ConfigError, match=r"^strategy=ddp is not 'deepspeed'; there is nothing to convert to FSDP2$"):
        to_fsdp(resolve(file="ddp").config)
    message = r"^strategy=auto has no counterpart in DeepSpeed; convert a configuration whose strategy is fsdp2 or ddp$"
    with pytest.raises(ConfigError, match=message):
        to_deepspeed(resolve().config)
