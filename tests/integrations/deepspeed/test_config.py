"""DeepSpeed configurations: what "auto" becomes, what is refused and with which words, and which keys there are."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_trainer.config import packaged_names, resolve
from accel_trainer.config.deepspeed_block import block_of, read_block
from accel_trainer.config.deepspeed_keys import KNOWN_KEYS, OPTIMIZER_TYPES, REMOVED_KEYS, SCHEDULER_PARAMS
from accel_trainer.errors import ConfigError
from accel_trainer.integrations.deepspeed.config import (
    Fact,
    Facts,
    hidden_size_of,
    resolve_engine_config,
)
from tests.strategy_configs import needs_deepspeed

# What Hugging Face's documentation gives for ZeRO-3 with offload: everything that it can leave to "auto" is.
ALL_AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
             "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                   "total_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "communication_data_type": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def said(**values):
    """Facts as the arguments of a training run tell them."""
    return {name: Fact(value, f"TrainingArguments({name}={value!r})") for name, value in values.items()}


FULL = Facts(
    world_size=2,
    micro_batch_size=Fact(4, "TrainingArguments(per_device_train_batch_size=4)"),
    accumulation_steps=Fact(2, "TrainingArguments(gradient_accumulation_steps=2)"),
    max_grad_norm=Fact(0.5, "TrainingArguments(max_grad_norm=0.5)"),
    precision=Fact("bf16", "TrainingArguments(bf16=True)"),
    optimizer=said(lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1),
    scheduler=said(total_num_steps=100, warmup_num_steps=10),
    hidden_size=Fact(64, "model.config.hidden_size"),
)
NATIVE = Facts(
    world_size=2,
    micro_batch_size=Fact(4, "the prepared data loader"),
    accumulation_steps=Fact(1, "default", is_default=True),
    precision=Fact("no", "default", is_default=True),
)


def alone(**known):
    """Facts of one process with rows of 1."""
    return Facts(world_size=1, micro_batch_size=Fact(1, "x"), **known)


def data(block, facts=NATIVE, **options):
    return resolve_engine_config(block, facts=facts, **options).data


def message(block, facts=NATIVE):
    with pytest.raises(ConfigError) as caught:
        resolve_engine_config(block, facts=facts)
    return str(caught.value)


# What "auto" becomes.


def test_every_auto_gets_its_value():
    block = copy.deepcopy(ALL_AUTO)
    config = resolve_engine_config(block, facts=FULL)

    assert block == ALL_AUTO
    assert '"auto"' not in json.dumps(config.data)
    expected = copy.deepcopy(ALL_AUTO)
    expected["fp16"]["enabled"] = False
    expected["bf16"]["enabled"] = True
    expected["optimizer"]["params"] = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    expected["scheduler"]["params"] = {
        "warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 100,
    }  # fmt: skip
    expected["zero_optimization"] |= {
        "reduce_bucket_size": 64 * 64,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    del expected["communication_data_type"]
    expected |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 16}
    expected["gradient_clipping"] = 0.5
    assert config.data == expected
    assert (config.stage, config.precision, config.builds_in_pieces) == (3, "bf16", True)
    assert (offload_device(config, "optimizer"), offload_device(config, "param")) == ("cpu", "cpu")
    assert (config.micro_batch_size, config.accumulation_steps, config.gradient_clipping) == (4, 2, 0.5)


def offload_device(config, section: str) -> str:
    return config.value(f"zero_optimization.offload_{section}.device", "none")


@pytest.mark.parametrize("name", [name for name in packaged_names() if name.startswith("zero")])
def test_every_packaged_configuration_can_be_resolved(name):
    config = resolve_engine_config(resolve(file=name).config.deepspeed, facts=NATIVE)
    assert config.stage == int(name[4])
    assert (offload_device(config, "optimizer") != "none") == ("offload" in name)
    path = config.value("zero_optimization.offload_optimizer.nvme_path")
    assert path == ("/local_nvme" if "nvme" in name else None)


def test_a_run_that_says_nothing_is_stage_2_and_clips_nothing():
    assert data({}) == {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 8,
        "gradient_clipping": 0.0,
    }


def test_the_sharding_section_is_not_mandatory():
    assert resolve_engine_config({"train_batch_size": 8}, facts=NATIVE).stage == 0


@pytest.mark.parametrize(
    ("block", "facts", "bound"),
    [
        ({}, NATIVE, 0.0),
        ({"gradient_clipping": "auto"}, NATIVE, 0.0),
        ({"gradient_clipping": 1}, NATIVE, 1.0),
        ({"gradient_clipping": "auto"}, FULL, 0.5),
        ({}, FULL, 0.5),
        ({}, alone(max_grad_norm=Fact(None, "x")), 0.0),
        ({"gradient_clipping": 0.5}, FULL, 0.5),
    ],
)
def test_clipping_is_what_somebody_asked_for(block, facts, bound):
    assert resolve_engine_config(block, facts=facts).gradient_clipping == bound


@pytest.mark.parametrize(
    ("block", "sizes"),
    [
        ({"train_micro_batch_size_per_gpu": 3}, (3, 1, 6)),
        ({"train_batch_size": 12}, (6, 1, 12)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, (2, 3, 12)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, (2, 3, 12)),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": "auto"},
            (2, 3, 12),
        ),
    ],
)
def test_batch_sizes_follow_from_each_other_and_from_the_real_world(block, sizes):
    found = data(block, Facts(world_size=2))
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert tuple(found[name] for name in names) == sizes


def test_a_batch_size_that_nobody_chose_gives_way():
    facts = Facts(world_size=2, micro_batch_size=Fact(1, "nobody", is_default=True))
    assert data({}, facts)["train_batch_size"] == 2
    assert data({"train_micro_batch_size_per_gpu": 8}, facts)["train_batch_size"] == 16
    assert data({"train_batch_size": 8}, facts)["train_micro_batch_size_per_gpu"] == 4


@pytest.mark.parametrize(
    ("block", "chosen", "precision"),
    [
        ({}, "bf16", "bf16"),
        ({"fp16": {"loss_scale_window": 10}}, "fp16", "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "no", "no"),
        ({"fp16": {"enabled": False}}, "bf16", "bf16"),
        ({"bfloat16": {"enabled": True}}, None, "bf16"),
        ({"bf16": {"enabled": True}}, "bf16", "bf16"),
    ],
)
def test_precision_is_what_the_run_chose(block, chosen, precision):
    fact = None if chosen is None else Fact(chosen, "Accelerator(mixed_precision=...)")
    facts = alone(precision=fact)
    assert resolve_engine_config(block, facts=facts).precision == precision


def test_a_default_of_the_run_never_contradicts_a_number():
    block = {
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4}},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 4,
    }
    facts = alone(
        accumulation_steps=Fact(1, "default", is_default=True),
        precision=Fact("no", "default", is_default=True),
        optimizer={"lr": Fact(1e-3, "DummyOptim", is_default=True)},
        given_optimizer="dummy",
    )
    config = resolve_engine_config(block, facts=facts)
    assert config.value("optimizer.params.lr") == 3e-4
    assert (config.precision, config.accumulation_steps) == ("bf16", 4)


def test_the_peak_of_the_schedule_is_the_rate_of_the_optimizer():
    block = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    facts = alone(scheduler=said(warmup_num_steps=0))
    # DeepSpeed refuses a warm-up of no steps.
    assert data(block, facts)["scheduler"]["params"] == {"warmup_max_lr": 3e-4, "warmup_num_steps": 1}


def test_numbers_that_were_given_hold_where_the_section_does_not_have_them():
    given = {**said(lr=0.1, weight_decay=0.5), "eps": Fact(1e-8, "default", is_default=True)}
    schedule = {**said(total_num_steps=9), "warmup_num_steps": Fact(0, "default", is_default=True)}
    facts = alone(optimizer={**given, **said(betas=[0.5, 0.6])}, scheduler=schedule)
    block = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}
    found = data(block, facts)
    assert found["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.5, "betas": [0.5, 0.6]}
    # WarmupLR has no total_num_steps; nobody gave a warm-up, so that of the section is no conflict.
    assert found["scheduler"]["params"] == {"warmup_num_steps": 2, "warmup_max_lr": 0.1}
    of_torch = data({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, facts)
    assert of_torch["optimizer"]["params"] == {"momentum": 0.9, "lr": 0.1, "weight_decay": 0.5}


def test_a_torch_optimizer_is_taken_as_it_is():
    facts = Facts(world_size=2, micro_batch_size=Fact(1, "x"), given_optimizer="torch")
    sharded = data({"zero_stage": 2}, facts)
    assert sharded["zero_allow_untested_optimizer"] is True
    assert "zero_force_ds_cpu_optimizer" not in sharded
    offloaded = data({"zero_stage": 2, "offload_optimizer_device": "cpu"}, facts)
    assert offloaded["zero_force_ds_cpu_optimizer"] is False
    own_word = data({"zero_force_ds_cpu_optimizer": True, "zero_optimization": {"stage": 1}}, facts)
    assert own_word["zero_force_ds_cpu_optimizer"] is True
    assert "zero_allow_untested_optimizer" not in data({"zero_stage": 2})


def test_old_spellings_are_taken():
    found = data({"zero_optimization": {"stage": 2, "cpu_offload": True}, "bfloat16": {"enabled": False}})
    assert found["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert found["bf16"] == {"enabled": False}


def test_sizes_of_stage_3_are_left_out_of_other_stages():
    zero = {"stage": 2, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    assert data({"zero_optimization": zero})["zero_optimization"] == {"stage": 2}


def test_where_deepspeed_knows_auto_it_stays():
    block = {
        "data_types": {"keep_in_fp32_modules": "auto"},
        "zero_optimization": {"stage": 1, "zenflow": {"select_strategy": "auto"}},
    }
    found = data(block)
    assert found["data_types"] == block["data_types"]
    assert found["zero_optimization"]["zenflow"] == {"select_strategy": "auto"}


def test_a_partial_look_leaves_out_what_cannot_be_known_yet():
    config = resolve_engine_config(ALL_AUTO, facts=Facts(world_size=2), partial=True)
    assert '"auto"' not in json.dumps(config.data)
    assert config.data["train_batch_size"] == 2
    assert config.data["optimizer"]["params"] == {}
    assert "reduce_bucket_size" not in config.data["zero_optimization"]
    with pytest.raises(ConfigError, match=r"^unknown key 'zero_optimisation'; did you mean 'zero_opt"):
        resolve_engine_config({"zero_optimisation": {}}, facts=Facts(world_size=2), partial=True)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"zero_stage": 3}, True),
        ({"zero_stage": 3, "zero3_init_flag": False}, False),
        ({"zero_stage": 2, "zero3_init_flag": True}, False),
    ],
)
def test_models_are_built_in_pieces_at_stage_3_only(block, expected):
    config = resolve_engine_config(block, facts=NATIVE)
    assert config.builds_in_pieces is expected
    assert "zero3_init_flag" not in config.data


def test_leaf_classes_come_from_either_spelling():
    for block in (
        {"zero_stage": 3, "deepspeed_moe_layer_cls_names": "A,B"},
        {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["A", "B"]}}},
    ):
        assert resolve_engine_config(block, facts=NATIVE).leaf_classes == ("A", "B")
    single = {"zero_optimization": {"stage": 3, "leaf_module": {"classes": "Moe"}}}
    assert resolve_engine_config(single, facts=NATIVE).leaf_classes == ("Moe",)
    assert resolve_engine_config({}, facts=NATIVE).leaf_classes == ()


class Config(SimpleNamespace):
    def to_dict(self):
        return vars(self)


@pytest.mark.parametrize(
    ("config", "size", "where"),
    [
        (Config(hidden_size=8, vision_config=Config(hidden_size=99)), 8, "model.config.hidden_size"),
        (Config(hidden_sizes=[4, 16, 8]), 16, "model.config.hidden_sizes"),
        (
            Config(vision_config=Config(hidden_size=99), text_config=Config(hidden_size=8)),
            8,
            "model.config.text_config.hidden_size",
        ),
        (
            Config(encoder=Config(hidden_size=4), decoder=Config(hidden_sizes=[12, 6])),
            12,
            "model.config.decoder.hidden_sizes",
        ),
        (
            Config(thinker_config=Config(text_config=Config(hidden_size=5)), name="x"),
            5,
            "model.config.thinker_config.text_config.hidden_size",
        ),
        ({"llm_config": {"hidden_size": 7}}, 7, "model.config.llm_config.hidden_size"),
        (Config(width=3), None, None),
        (None, None, None),
    ],
)
def test_the_width_of_nested_models_is_found(config, size, where):
    fact = hidden_size_of(config)
    assert (fact.value, fact.where) == (size, where) if size else fact is None


def test_the_width_of_a_real_configuration_is_found():
    transformers = pytest.importorskip("transformers")
    t5 = transformers.T5Config(d_model=24)  # hidden_size is an alias of d_model there
    assert hidden_size_of(t5).value == 24
    llava = transformers.LlavaConfig(text_config={"model_type": "llama", "hidden_size": 32})
    assert hidden_size_of(llava).value == 32


# What is refused, and with which words.

AT = {"zero_optimization.stage": "ds.json:7", "gradient_accumulation_steps": "ds.json:3"}
CONFLICT = 'DeepSpeed would go by {}: give both the same value, or write "auto"'
BAD: dict[str, Any] = {
    "ranks that share a batch": (
        {"tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel.autotp_size is 2; expected 1: ranks read different data under DeepSpeed; use tp_size of "
        "strategy 'fsdp2'",
    ),
    "ranks that share sequences": (
        {"sequence_parallel_size": 2},
        "sequence_parallel_size is 2; expected 1: ranks read different data under DeepSpeed; use sp_size of "
        "strategy 'fsdp2'",
    ),
    "misspelled": ({"gradient_cliping": 1.0}, "unknown key 'gradient_cliping'; did you mean 'gradient_clipping'?"),
    "misspelled inside": (
        {"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}},
        "unknown key 'zero_optimization.offload_param.devise'; did you mean 'device'?",
    ),
    "misspelled number of the optimizer": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1.0, "weigth_decay": 0.1}}},
        "unknown key 'optimizer.params.weigth_decay'; did you mean 'weight_decay'?",
    ),
    "number of another schedule": (
        {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}},
        "unknown key 'scheduler.params.total_num_steps'; did you mean 'warmup_num_steps'?",
    ),
    "wrong level": ({"stage": 3}, "unknown key 'stage'; it belongs into 'zero_optimization'"),
    "removed": (
        {"amp": {"enabled": True}, "zero_optimization": {"mics_shard_size": 2}},
        "2 problems in the DeepSpeed configuration:\n"
        "  - key 'amp' is one that DeepSpeed has no more: use fp16, bf16 or torch_autocast\n"
        "  - key 'zero_optimization.mics_shard_size' is one that DeepSpeed has no more: remove the key, or use "
        "zero_hpz_partition_size",
    ),
    "stage": (
        {"zero_optimization": {"stage": 4}},
        "zero_optimization.stage (ds.json:7) is 4; expected 0, 1, 2 or 3",
        alone(origins=AT),
    ),
    "no section": ({"zero_optimization": True}, "zero_optimization is true; expected a section of keys"),
    "parameters offloaded below stage 3": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device is 'cpu'; expected 'none', since the stage is 2, or stage 3",
    ),
    "offload without sharding": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device is 'cpu'; expected 'none', since the stage is 0, or stage 1 or"
        " higher",
    ),
    "disk without a folder": (
        {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "none"},
        "zero_optimization.offload_param.device is 'nvme', and zero_optimization.offload_param.nvme_path is not "
        "given; write the directory of a local disk",
    ),
    "device": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
        "zero_optimization.offload_param.device is 'gpu'; expected one of 'none', 'cpu', 'nvme'",
    ),
    "both precisions": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled and bf16.enabled are both true; keep one of the two",
    ),
    "world": (
        {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
        'train_batch_size is 4, and 4 rows x 1 accumulation steps x 2 processes make 8: write 8, or "auto"',
    ),
    "no batch size": (
        {"train_micro_batch_size_per_gpu": "auto"},
        "train_micro_batch_size_per_gpu is 'auto', and no data loader tells the batch size: write the number of "
        "rows that one process takes at a time, or prepare a loader with the model",
        Facts(world_size=2),
    ),
    "batch size": ({"train_batch_size": 0}, 'train_batch_size is 0; expected a whole number of at least 1, or "auto"'),
    "clipping": (
        {"gradient_clipping": True},
        'gradient_clipping is true; expected a number of at least 0 (0 does not clip), or "auto"',
    ),
    "type of the optimizer": (
        {"optimizer": {"type": "AdmW"}},
        "optimizer.type is 'AdmW'; expected one of Adam, AdamW, Adagrad, Lamb, Lion, MuAdam, MuAdamW, MuSGD, Muon,"
        " or one of torch.optim; did you mean 'AdamW'?",
    ),
    "type of the schedule": (
        {"scheduler": {"type": "WarmupCosinLR"}},
        "scheduler.type is 'WarmupCosinLR'; expected one of WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, "
        "OneCycle, or one of torch.optim.lr_scheduler; did you mean 'WarmupCosineLR'?",
    ),
    "two optimizers": (
        {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}},
        "2 problems in the DeepSpeed configuration:\n"
        "  - the DeepSpeed configuration has a section 'optimizer', and a torch optimizer was given too; remove the "
        "section, or pass DummyOptim instead\n"
        "  - the DeepSpeed configuration has a section 'scheduler', and a torch scheduler was given too; remove the "
        "section, or pass DummyScheduler instead",
        alone(given_optimizer="torch", given_scheduler="torch"),
    ),
    "placeholders for nothing": (
        {},
        "2 problems in the DeepSpeed configuration:\n"
        "  - a DummyOptim was given, and the DeepSpeed configuration has no 'optimizer' section for it to stand for; "
        "add the section, or pass a torch optimizer\n"
        "  - a DummyScheduler was given, and the DeepSpeed configuration has no 'scheduler' section for it to stand "
        "for; add the section, or pass a torch scheduler or DummyScheduler(lr_scheduler_callable=...)",
        alone(given_optimizer="dummy", given_scheduler="dummy"),
    ),
    "auto that nothing fills": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
        },
        "3 problems in the DeepSpeed configuration:\n"
        "  - optimizer.params.lr is 'auto', and nothing tells its value: write a value, or pass DummyOptim with it\n"
        "  - zero_optimization.reduce_bucket_size is 'auto', and nothing tells its value: the model has no config with "
        "a hidden_size; write a number\n"
        "  - zero_optimization.overlap_comm is 'auto', and nothing tells its value: write a value, or remove the key "
        "for DeepSpeed's default",
    ),
    "conflicts": (
        {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.999]}},
        },
        "6 problems in the DeepSpeed configuration:\n"
        "  - train_micro_batch_size_per_gpu is 8, and TrainingArguments(per_device_train_batch_size=4) says 4; "
        f"{CONFLICT.format(8)}\n"
        "  - gradient_accumulation_steps (ds.json:3) is 4, and TrainingArguments(gradient_accumulation_steps=2) says "
        f"2; {CONFLICT.format(4)}\n"
        "  - gradient_clipping is 1.0, and TrainingArguments(max_grad_norm=0.5) says 0.5; "
        f"{CONFLICT.format(1.0)}\n"
        "  - fp16.enabled is true, and TrainingArguments(bf16=True) says 'bf16'; "
        f"{CONFLICT.format('true')}\n"
        "  - optimizer.params.lr is 0.1, and TrainingArguments(lr=0.001) says 0.001; "
        f"{CONFLICT.format(0.1)}\n"
        "  - optimizer.params.betas is [0.9, 0.999], and TrainingArguments(betas=(0.9, 0.95)) says [0.9, 0.95]; "
        f"{CONFLICT.format('[0.9, 0.999]')}",
        dataclasses.replace(FULL, origins=AT),
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_a_bad_configuration_is_refused_with_these_words(bad):
    block, expected, facts = (*bad, NATIVE)[:3]
    assert message(block, facts) == expected


@needs_deepspeed
@pytest.mark.parametrize("name", [*(name for name in packaged_names() if name.startswith("zero")), "all auto"])
def test_deepspeed_reads_what_was_resolved(name):
    from accel_trainer.integrations.deepspeed.runtime import import_deepspeed

    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    facts = dataclasses.replace(FULL, world_size=1)
    config = resolve_engine_config(ALL_AUTO if name == "all auto" else read_block(block_of(name)).data, facts=facts)
    seen = DeepSpeedConfig(config.data)
    assert (seen.train_micro_batch_size_per_gpu, seen.gradient_accumulation_steps, seen.train_batch_size) == (4, 2, 8)
    assert (seen.gradient_clipping, seen.zero_optimization_stage) == (0.5, config.stage)
    assert (seen.bfloat16_config.enabled, seen.float16_config.enabled) == (True, False)
    offload = seen.zero_config.offload_optimizer
    assert (offload.device if offload else "none") == offload_device(config, "optimizer")
    assert seen.optimizer_name == ("adamw" if config.data.get("optimizer") else None)


@needs_deepspeed
def test_values_are_asked_of_deepspeeds_own_models():
    facts = alone(origins={"zero_optimization.reduce_bucket_size": "d:3"})
    zero = {"stage": 3, "reduce_bucket_size": -1, "overlap_comm": "maybe"}
    assert message({"zero_optimization": zero}, facts) == (
        "2 problems in the DeepSpeed configuration:\n"
        "  - zero_optimization.reduce_bucket_size (d:3) is -1, which DeepSpeed refuses: Input should be greater than "
        "0\n"
        "  - zero_optimization.overlap_comm is 'maybe', which DeepSpeed refuses: Input should be a valid boolean, "
        "unable to interpret input"
    )
    assert message({"zero_optimization": {"stage": 3, "compute_grad_norm": False}}) == (
        "zero_optimization: DeepSpeed refuses it: compute_grad_norm=false is supported only with ZeRO Stage 1 or 2"
    )


def test_without_deepspeed_everything_but_its_own_word_is_checked(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert data({"zero_optimization": {"stage": 1, "reduce_bucket_size": -1}})["zero_optimization"]["stage"] == 1
    assert message({"gradient_cliping": 1}) == BAD["misspelled"][1]


# The tables of known keys.


@needs_deepspeed
def test_the_tables_know_what_the_installed_release_knows():
    from accel_trainer.config.schema import get_key
    from accel_trainer.integrations.deepspeed.config import SECTION_MODELS, _models, installed_keys, model_keys

    models = dict(_models())
    assert models.keys() == SECTION_MODELS.keys()
    for section, model in models.items():
        assert get_key(KNOWN_KEYS, section) == model_keys(model), section
    assert installed_keys() == KNOWN_KEYS


@needs_deepspeed
def test_the_tables_know_the_keys_that_the_release_reads_without_a_model():
    from accel_trainer.integrations.deepspeed.runtime import import_deepspeed

    import_deepspeed()
    import deepspeed.runtime.config as reader
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    class Asked(dict):
        """A configuration that writes down what is asked of it."""

        def __init__(self, content=()):
            super().__init__(content)
            self.asked = set()

        def get(self, name, default=None):
            self.asked.add(name)
            return super().get(name, default)

        def __contains__(self, name):
            self.asked.add(name)
            return super().__contains__(name)

        def keys(self):
            return Keys(self, super().keys())

    class Keys:
        def __init__(self, owner, names):
            self.owner, self.names = owner, names

        def __contains__(self, name):
            self.owner.asked.add(name)
            return name in self.names

        def __iter__(self):
            return iter(self.names)

    asked = Asked({"train_batch_size": 1})
    config = object.__new__(reader.DeepSpeedConfig)
    config.global_rank, config.world_size = 0, 1
    config._initialize_params(asked)
    assert asked.asked - KNOWN_KEYS.keys() == set()
    assert set(reader._REMOVED_TOP_LEVEL_CONFIG_KEYS) == {name for name in REMOVED_KEYS if "." not in name}
    removed = {f"zero_optimization.{name}" for name in reader._REMOVED_ZERO_CONFIG_KEYS}
    assert removed == {name for name in REMOVED_KEYS if "." in name}
    assert {name.lower() for name in OPTIMIZER_TYPES} == set(reader.DEEPSPEED_OPTIMIZERS)
    assert set(KNOWN_KEYS["activation_checkpointing"]) == set(ACT_CHKPT_DEFAULT)
    assert set(KNOWN_KEYS["aio"]) == set(AIO_DEFAULT_DICT)
    assert set(KNOWN_KEYS["flops_profiler"]) == set(vars(DeepSpeedFlopsProfilerConfig({})))
    assert set(SCHEDULER_PARAMS) == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, params in SCHEDULER_PARAMS.items():
        code = getattr(lr_schedules, name).__init__.__code__
        assert set(params) == set(code.co_varnames[2 : code.co_argcount]), name


def test_a_source_is_read_for_the_engine_too(tmp_path):
    (tmp_path / "ds.yaml").write_text("zero_optimization:\n  stage: 1\n", encoding="utf-8")
    assert data(read_block(block_of(tmp_path / "ds.yaml")).data)["zero_optimization"] == {"stage": 1}
    assert data({"deepspeed_config_file": str(tmp_path / "ds.yaml")})["zero_optimization"] == {"stage": 1}


def test_the_page_shows_what_is_said(tmp_path, monkeypatch):
    page = Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md"
    (shown,) = re.findall(r"```text\n(.*?)\n```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        """{
  "gradient_accumulation_steps": 1,
  "gradient_cliping": 1.0,
  "zero_optimization": {
    "stage": 2, "offload_param": {
      "device": "cpu"}
  },
  "train_micro_batch_size_per_gpu": 8,
  "optimizer": {
    "type": "AdamW", "params": {
      "lr": "auto"
    }
  }
}"""
    )
    where = "TrainingArguments(per_device_train_batch_size=...)"
    facts = Facts(world_size=2, micro_batch_size=Fact(4, where))
    block = resolve(file={"strategy": "deepspeed", "deepspeed": {"deepspeed_config_file": "ds.json"}}).config.deepspeed
    assert message(block, facts).replace(f"{tmp_path}/", "") == shown
