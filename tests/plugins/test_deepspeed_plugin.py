"""DeepSpeedPlugin and the stand-ins, as users of similar libraries know them."""

from __future__ import annotations

import base64
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_trainer.config import resolve
from accel_trainer.config.deepspeed_block import read_block
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugins
from accel_trainer.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, HfDeepSpeedConfig

ENGINE = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_prefetch_bucket_size": "auto"},
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def resolved(plugin, **levels):
    return resolve(explicit=plugin.explicit(), **levels)


def test_without_arguments_it_is_stage_2():
    plugin = DeepSpeedPlugin()
    assert plugin.explicit() == {"strategy": "deepspeed"}
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.gradient_clipping) == (2, "none", "auto")
    assert read_block(resolved(plugin).config.deepspeed).data == {"zero_optimization": {"stage": 2}}


def test_every_field_reaches_the_configuration():
    plugin = DeepSpeedPlugin(
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        zero_stage=3,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path="/a",
        offload_param_device="cpu",
        offload_param_nvme_path="/b",
        zero3_init_flag=False,
        zero3_save_16bit_model=True,
        transformer_moe_cls_names="A, B",
    )
    config = resolved(plugin).config

    assert config.accumulation.num_steps == 4
    expected = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
            "offload_param": {"device": "cpu", "nvme_path": "/b"},
            "stage3_gather_16bit_weights_on_model_save": True,
            "leaf_module": {"classes": ["A", "B"]},
        },
        "zero3_init_flag": False,
        "gradient_clipping": 1.0,
    }
    assert read_block(config.deepspeed).data == expected
    open_ones = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    assert plugin.deepspeed_config == {**expected, **open_ones, "gradient_accumulation_steps": 4}
    plugin.refresh(config)
    assert plugin.deepspeed_config == {**expected, **open_ones, "gradient_accumulation_steps": 4}
    assert plugin.transformer_moe_cls_names == "A,B"
    assert not plugin.is_zero3_init_enabled()


def test_the_configuration_may_have_any_form(tmp_path):
    text = json.dumps(ENGINE)
    (tmp_path / "ds.json").write_text(text, encoding="utf-8")
    encoded = base64.b64encode(text.encode()).decode()
    objects = HfDeepSpeedConfig(ENGINE), SimpleNamespace(config=ENGINE)
    for form in (ENGINE, text, encoded, str(tmp_path / "ds.json"), *objects):
        plugin = DeepSpeedPlugin(hf_ds_config=form)
        assert plugin.deepspeed_config == ENGINE
        assert plugin.hf_ds_config.config is plugin.deepspeed_config is not ENGINE
        assert read_block(resolved(plugin).config.deepspeed).data == ENGINE
        assert (plugin.zero_stage, plugin.gradient_clipping, plugin.offload_param_device) == (3, 0.5, "cpu")
        assert plugin.is_zero3_init_enabled()
    assert DeepSpeedPlugin(hf_ds_config="zero3").zero_stage == 3


def test_a_field_that_contradicts_the_configuration_is_an_error():
    with pytest.raises(ConfigError) as caught:
        DeepSpeedPlugin(hf_ds_config=ENGINE, zero_stage=2, offload_param_device="nvme")
    assert str(caught.value) == (
        "2 problems in the DeepSpeed block:\n"
        "  - zero_stage is 2, and zero_optimization.stage is 3: DeepSpeed would go by 3; keep one of the two\n"
        "  - offload_param_device is 'nvme', and zero_optimization.offload_param.device is 'cpu': DeepSpeed would go "
        "by 'cpu'; keep one of the two"
    )
    message = r"^DeepSpeedPlugin\(gradient_clipping=1\.0\): its hf_ds_config says 0\.5; give one of the two, or write"
    with pytest.raises(ConfigError, match=message):
        DeepSpeedPlugin(hf_ds_config=ENGINE, gradient_clipping=1.0)


def test_what_a_field_leaves_open_comes_from_the_other_sources():
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    plugin = DeepSpeedPlugin(gradient_clipping=1.0)
    config = resolved(plugin, environ=environ).config
    assert read_block(config.deepspeed).data == {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}

    plugin.refresh(config)
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.gradient_accumulation_steps) == (3, 1.0, 1)
    assert plugin.hf_ds_config.is_zero3()


def test_the_configuration_has_the_keys_that_scripts_read_all_the_time():
    plugin = DeepSpeedPlugin()
    absent = {"device": "none"}
    expected = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": absent,
            "offload_param": absent,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    }
    assert plugin.deepspeed_config == expected
    plugins, first = DeepSpeedPlugins.of(plugin, None), resolved(plugin)
    plugins.resolve(first, SimpleNamespace(distributed_type="DEEPSPEED"), resolved)
    plugins.use("default", first, SimpleNamespace(building=None))
    assert plugin.deepspeed_config == {**expected, "gradient_accumulation_steps": 1}
    assert plugins.edited(first) is first
    plugin.deepspeed_config["gradient_clipping"] = 0.5
    assert plugins.edited(first).config.deepspeed == {
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
    }


def test_changes_of_the_configuration_are_taken_by_every_accelerator():
    plugin = DeepSpeedPlugin(zero_stage=1)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
    plugin.set_value("zero_optimization.overlap_comm", True)
    for _ in range(2):
        config = resolved(plugin).config
        plugin.refresh(config)
        assert read_block(config.deepspeed).data == {
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "train_micro_batch_size_per_gpu": 4,
        }


@pytest.mark.parametrize(
    ("given", "assigned"),
    [
        ({"zero_stage": 2}, {"zero_stage": 3, "gradient_clipping": 0.5, "gradient_accumulation_steps": 4}),
        ({"zero_stage": 3, "offload_param_device": "cpu"}, {"offload_param_device": "none", "zero3_init_flag": False}),
        ({"hf_ds_config": "zero3"}, {"offload_optimizer_device": "cpu", "transformer_moe_cls_names": "A, B"}),
    ],
)
def test_fields_that_are_assigned_are_taken_as_given_ones(given, assigned):
    plugin = DeepSpeedPlugin(**given)
    for name, value in assigned.items():
        setattr(plugin, name, value)
    direct = DeepSpeedPlugin(**(given | assigned))

    config, expected = resolved(plugin).config, resolved(direct).config

    assert config.accumulation == expected.accumulation
    plugin.refresh(config)
    direct.refresh(expected)
    assert {**plugin.to_dict(), "hf_ds_config": None} == {**direct.to_dict(), "hf_ds_config": None}
    assert plugin.deepspeed_config == direct.deepspeed_config
    plugin.zero_stage = 7
    with pytest.raises(ConfigError, match="zero_stage is 7; expected 0, 1, 2 or 3"):
        plugin.explicit()


def test_a_configuration_that_is_assigned_is_the_one_that_is_shown():
    plugin = DeepSpeedPlugin(zero_stage=2)
    plugin.deepspeed_config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.25}
    assert plugin.get_value("gradient_clipping") == 0.25

    plugin.refresh(resolved(plugin).config)

    assert (plugin.zero_stage, plugin.gradient_clipping) == (1, 0.25)
    assert plugin.hf_ds_config.config is plugin.deepspeed_config


def test_changes_of_a_plugin_that_is_not_in_use_hold_when_it_is_selected():
    first, second = DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=2)
    plugins = DeepSpeedPlugins.of(None, {"first": first, "second": second})
    plugins.resolve(resolved(first), SimpleNamespace(distributed_type="DEEPSPEED"), resolved)
    engine = SimpleNamespace(building=None)
    plugins.use("first", plugins.resolved["first"], engine)
    second.deepspeed_config["gradient_clipping"] = 0.25
    for name in ("second", "first", "second"):
        plugins.use(name, plugins.resolved[name], engine)
        found = plugins.edited(plugins.resolved[name]).config.deepspeed.get("gradient_clipping")
        assert found == (0.25 if name == "second" else None)
    assert second.deepspeed_config["gradient_clipping"] == 0.25


@pytest.mark.parametrize("options", [{"enable_msamp": True}, {"msamp_opt_level": "O2"}])
def test_what_is_not_offered_is_refused(options):
    with pytest.raises(ConfigError, match=r"MS-AMP is not offered; leave both out, and use mixed_precision='bf16'$"):
        DeepSpeedPlugin(**options)
    with pytest.raises(ConfigError, match=r"call accelerator\.state\.select_deepspeed_plugin\(name\)$"):
        DeepSpeedPlugin().select()


def test_it_can_be_asked():
    config = HfDeepSpeedConfig({**ENGINE, "fp16": {"enabled": False}, "bf16": {}})
    assert config.get_value("zero_optimization.stage") == 3
    assert config.get_value("zero_optimization.nothing.here", 7) == 7
    assert config.find_config_node("zero_optimization.stage") == (config.config["zero_optimization"], "stage")
    assert config.find_config_node("nothing.stage") == (None, "stage")
    assert config.find_config_node("fp16") == (config.config, "fp16")
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (False, True, True)
    assert (config.is_auto("gradient_accumulation_steps"), config.is_auto("bf16.enabled")) == (True, False)
    assert (config.is_true("gradient_clipping"), config.is_true("fp16.enabled")) == (True, False)
    assert (config.is_false("fp16.enabled"), config.is_false("bf16.enabled")) == (True, False)
    config.del_config_sub_tree("zero_optimization.offload_param")
    config.del_config_sub_tree("optimizer")
    assert not config.is_offload()
    with pytest.raises(ConfigError, match=r"^the DeepSpeed configuration has no 'optimizer\.params' to remove"):
        config.del_config_sub_tree("optimizer.params", must_exist=True)


def test_building_in_pieces_is_switched_for_a_while():
    plugin = DeepSpeedPlugin(zero_stage=3)
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
    assert plugin.is_zero3_init_enabled()
    assert not DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).is_zero3_init_enabled()


def test_processing_fills_every_auto():
    plugin = DeepSpeedPlugin(hf_ds_config=ENGINE)
    assert plugin.is_auto("train_micro_batch_size_per_gpu")
    plugin.deepspeed_config_process(
        **{
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "zero_optimization.stage3_prefetch_bucket_size": 10,
            "gradient_clipping": 0.5,
        }
    )
    assert plugin.get_value("train_micro_batch_size_per_gpu") == 2
    assert plugin.get_value("zero_optimization.stage3_prefetch_bucket_size") == 10


def test_processing_says_all_that_is_missing_or_different():
    plugin = DeepSpeedPlugin(hf_ds_config=ENGINE)
    with pytest.raises(ConfigError) as caught:
        plugin.deepspeed_config_process(train_micro_batch_size_per_gpu=2, gradient_clipping=1.0)
    assert str(caught.value) == (
        "3 problems in the DeepSpeed configuration:\n"
        "  - zero_optimization.stage3_prefetch_bucket_size is 'auto' in the DeepSpeed configuration, and no value was "
        "passed for it; write one there, or pass **{'zero_optimization.stage3_prefetch_bucket_size': value}\n"
        "  - gradient_accumulation_steps is 'auto' in the DeepSpeed configuration, and no value was passed for it; "
        "write one there, or pass **{'gradient_accumulation_steps': value}\n"
        "  - gradient_clipping is 0.5, and 1.0 was passed; give the same values in the DeepSpeed configuration, or "
        'write "auto" there'
    )
    mismatches: list[str] = []
    plugin.fill_match("gradient_clipping", mismatches, gradient_clipping=1.0)
    plugin.fill_match("no.such.key", mismatches)
    plugin.fill_match("gradient_clipping", mismatches, must_match=False, gradient_clipping=2.0)
    assert mismatches == ["gradient_clipping is 0.5, and 1.0 was passed"]


def test_a_section_can_be_processed_by_itself():
    plugin = DeepSpeedPlugin(hf_ds_config=ENGINE)
    plugin.deepspeed_config_process(
        prefix="zero_optimization.",
        config=plugin.deepspeed_config["zero_optimization"],
        **{"zero_optimization.stage3_prefetch_bucket_size": 5},
    )
    assert plugin.get_value("zero_optimization.stage3_prefetch_bucket_size") == 5


def test_a_plugin_can_be_pickled():
    plugin = pickle.loads(pickle.dumps(DeepSpeedPlugin(hf_ds_config=ENGINE)))
    assert plugin.deepspeed_config == ENGINE
    assert plugin.hf_ds_config.config is plugin.deepspeed_config


def test_the_placeholders_remember_their_arguments():
    model = nn.Linear(2, 2)
    optimizer = DummyOptim(model.parameters(), lr=0.1, betas=(0.9, 0.95))
    assert optimizer.params == list(model.parameters())
    assert optimizer.numbers == {"lr": 0.1, "betas": (0.9, 0.95)}
    assert (optimizer.lr, optimizer.weight_decay) == (0.1, 0.0)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (0.1, 0.0, 2)
    grouped = DummyOptim([{"params": [model.weight], "weight_decay": 0.3}, {"params": [model.bias]}])
    assert grouped.numbers == {}
    assert [group["weight_decay"] for group in grouped.param_groups] == [0.3, 0.0]
    assert all(group["lr"] == 0.001 for group in grouped.param_groups)

    scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    assert scheduler.numbers == {"total_num_steps": 10, "warmup_num_steps": 2}
    assert scheduler.optimizer is optimizer
    built = DummyScheduler(optimizer, lr_scheduler_callable=torch.optim.lr_scheduler.LambdaLR)
    assert built.lr_scheduler_callable is torch.optim.lr_scheduler.LambdaLR
    assert built.numbers == {}
