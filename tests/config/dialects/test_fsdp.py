"""The spellings of FSDP options that transformers' `fsdp_config` and accelerate's block share."""

from __future__ import annotations

import pytest

from accel_trainer.config import Dialect, fsdp_options, read_file, resolve
from accel_trainer.errors import ConfigError


def values(content):
    return {path: setting.value for path, setting in read_file(content).settings.items()}


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize(
    ("key", "value", "path", "expected"),
    [
        ("cpu_offload", True, "fsdp.offload_params", True),
        ("offload_params", "true", "fsdp.offload_params", True),
        ("activation_checkpointing", "True", "fsdp.activation_checkpointing", True),
        ("activation_checkpointing_offload", "True", "activation_offload", True),
        ("cpu_ram_efficient_loading", 1, "fsdp.cpu_ram_efficient_loading", True),
        ("auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "fsdp.wrap_policy", "transformer"),
        ("auto_wrap_policy", "size_based_wrap", "fsdp.wrap_policy", "size"),
        ("auto_wrap_policy", "No_Wrap", "fsdp.wrap_policy", "none"),
        ("transformer_layer_cls_to_wrap", "BertLayer", "fsdp.wrap_classes", ("BertLayer",)),
        ("transformer_layer_cls_to_wrap", "A, B", "fsdp.wrap_classes", ("A", "B")),
        ("transformer_layer_cls_to_wrap", ["A", "B"], "fsdp.wrap_classes", ("A", "B")),
        ("min_num_params", 2000, "fsdp.min_num_params", 2000),
        ("min_num_params", "1e8", "fsdp.min_num_params", 100_000_000),
        ("state_dict_type", "FULL_STATE_DICT", "fsdp.state_dict_type", "full"),
        ("state_dict_type", "sharded_state_dict", "fsdp.state_dict_type", "sharded"),
        ("sharding_strategy", "FULL_SHARD", "fsdp.reshard_after_forward", True),
        ("sharding_strategy", "shard_grad_op", "fsdp.reshard_after_forward", False),
        ("sharding_strategy", 2, "fsdp.reshard_after_forward", False),
        ("sharding_strategy", "4", "fsdp.replicate_per_node", True),
        ("sharding_strategy", "HYBRID_SHARD", "fsdp.replicate_per_node", True),
        ("sharding_strategy", "_HYBRID_SHARD_ZERO2", "fsdp.reshard_after_forward", False),
        ("sharding_strategy", "NO_SHARD", "strategy", "ddp"),
        ("reshard_after_forward", True, "fsdp.reshard_after_forward", True),
        ("reshard_after_forward", "false", "fsdp.reshard_after_forward", False),
        ("reshard_after_forward", "SHARD_GRAD_OP", "fsdp.reshard_after_forward", False),
        ("reshard_after_forward", "hybrid_shard", "fsdp.replicate_per_node", True),
        ("backward_prefetch", "NO_PREFETCH", "fsdp.backward_prefetch", False),
        ("backward_prefetch_policy", "BACKWARD_PRE", "fsdp.backward_prefetch", True),
        ("backward_prefetch", False, "fsdp.backward_prefetch", False),
        ("forward_prefetch", True, "fsdp.forward_prefetch", True),
        ("ignored_modules", r"lm_head|embed\..*", "fsdp.ignored_modules", (r"lm_head|embed\..*",)),
        ("ignored_modules", ["a", "b"], "fsdp.ignored_modules", ("a", "b")),
    ],
)
def test_a_key_is_recognised_with_and_without_prefix(prefix, key, value, path, expected):
    assert values({prefix + key: value})[path] == expected


def test_what_transformers_fills_in_changes_nothing():
    filled = {
        "version": 2, "min_num_params": 0, "transformer_layer_cls_to_wrap": ["BertLayer"], "xla": False,
        "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False, "ignored_modules": None, "state_dict_type": None,
    }  # fmt: skip

    file = read_file(filled)

    assert {path: setting.value for path, setting in file.settings.items()} == {
        "strategy": "fsdp2",
        "fsdp.wrap_classes": ("BertLayer",),
    }
    assert file.notes == ()
    assert file.content == filled
    assert file.dialect is Dialect.FSDP_CONFIG


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (1, "the config dict is written for FSDP1 (fsdp_version is 1)"),
        (2, "the config dict holds keys of FSDP1"),
    ],
)
def test_keys_of_fsdp1_are_named_in_one_note(version, text):
    assert read_file({"version": version, "use_orig_params": True}).notes == (
        f"{text}; it runs with FSDP2; without effect: use_orig_params",
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("xla", True),
        ("xla_fsdp_settings", {"compute_dtype": "bfloat16"}),
        ("xla_fsdp_grad_ckpt", "true"),
        ("mixed_precision_policy", {"param_dtype": "bfloat16"}),
    ],
)
def test_what_cannot_be_honoured_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"^fsdp_{key} in the config dict is .*, which is not offered: "):
        read_file({f"fsdp_{key}": value})


def test_a_sharding_strategy_and_reshard_that_agree_are_fine():
    assert values({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": False}) == {
        "strategy": "fsdp2",
        "fsdp.reshard_after_forward": False,
        "fsdp.replicate_per_node": False,
    }


def test_a_flat_file_wins_over_nothing_and_loses_to_python():
    resolved = resolve(file={"fsdp_offload_params": True}, explicit={"fsdp.offload_params": False})

    assert resolved.config.fsdp.offload_params is False
    assert resolved.config.strategy == "fsdp2"


FULL_SHARD = {"fsdp.reshard_after_forward": True, "fsdp.replicate_per_node": False}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("full_shard", {**FULL_SHARD, "strategy": "fsdp2"}),
        ("full_shard auto_wrap", {**FULL_SHARD, "strategy": "fsdp2"}),
        (
            ["shard_grad_op", "offload"],
            {**FULL_SHARD, "strategy": "fsdp2", "fsdp.reshard_after_forward": False, "fsdp.offload_params": True},
        ),
        ("hybrid_shard", {**FULL_SHARD, "strategy": "fsdp2", "fsdp.replicate_per_node": True}),
        ("no_shard", {"strategy": "ddp"}),
    ],
)
def test_the_fsdp_argument_of_transformers_is_understood(options, expected):
    assert fsdp_options(options) == expected


def test_an_unknown_word_in_the_fsdp_argument_is_an_error():
    with pytest.raises(
        ConfigError, match=r"fsdp option 'full_shrd' is not known; did you mean 'full_shard'\? Options: "
    ):
        fsdp_options("full_shrd auto_wrap")
