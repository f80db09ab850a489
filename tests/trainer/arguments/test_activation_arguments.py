"""Policies of activation checkpointing and the offload in TrainingArguments, beside transformers' own fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from transformers import HfArgumentParser

from accel_trainer import TrainingArguments
from accel_trainer.errors import ConfigError
from accel_trainer.techniques import activations
from tests.trainer_jobs import arguments, build_trainer, summary

# transformers 5.17 and 5.20 name it gradient_checkpointing.
FIELD = "activation_checkpointing"
needs_field = pytest.mark.skipif(
    FIELD not in {each.name for each in dataclasses.fields(TrainingArguments)}, reason="no such field in this release"
)


@needs_field
def test_a_policy_in_the_field_of_transformers_is_the_policy(tmp_path):
    args = arguments(tmp_path, activation_checkpointing="selective", activation_offload=True)
    for each in (args, dataclasses.replace(args), TrainingArguments(**args.to_dict())):
        assert each.activation_checkpointing_policy == "selective"
        assert not each.activation_checkpointing
        assert each.resolved.config.recomputation == "selective"
        assert each.resolved.config.activation_offload is True
    assert "TrainingArguments(activation_checkpointing_policy=...)" in args.resolved.describe(
        "activation_checkpointing"
    )
    assert arguments(tmp_path, activation_checkpointing={"every": 3}).resolved.config.recomputation == "every:3"
    own = arguments(tmp_path, activation_checkpointing=True)
    assert own.activation_checkpointing is True
    assert own.resolved.config.recomputation == "off"


def test_flags_of_a_script_say_both(tmp_path):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        f"--output_dir {tmp_path} --use_cpu --activation_checkpointing_policy every:2 --activation_offload".split()
    )
    assert (args.resolved.config.recomputation, args.resolved.config.activation_offload) == ("every:2", True)


@pytest.mark.parametrize("name", [pytest.param(FIELD, marks=needs_field), "activation_checkpointing_policy"])
def test_a_word_that_is_no_policy_is_refused(tmp_path, name: str):
    message = r"TrainingArguments\(activation_checkpointing_policy=\.\.\.\) is 'some'; expected 'off', 'full', 'select"
    with pytest.raises(ConfigError, match=message):
        arguments(tmp_path, **{name: "some"})


@pytest.mark.parametrize("name", [pytest.param(FIELD, marks=needs_field), "gradient_checkpointing"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_a_policy_beside_the_models_own_method_is_refused(tmp_path, name: str):
    message = r"set in the arguments, and activation_checkpointing=full \(from .*\): both would .*; keep the policy"
    with pytest.raises(ConfigError, match=message):
        build_trainer(tmp_path, activation_checkpointing_policy="full", **{name: True}).train()


def test_a_model_that_recomputes_by_itself_is_refused(tmp_path):
    trainer = build_trainer(tmp_path, activation_checkpointing_policy="full")
    model = trainer.model
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    message = r"LlamaForCausalLM computes its layers again by itself already \(gradient_checkpointing=True.*keep one"
    with pytest.raises(ConfigError, match=message):
        trainer.train()


def test_training_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "_LEAST_BYTES", 0)
    runs: dict[str, dict[str, Any]] = {}
    for policy in ("off", "selective", "every:2", "full"):
        options = {"activation_checkpointing_policy": policy, "activation_offload": policy != "off"}
        trainer = build_trainer(tmp_path, max_steps=2, **options)
        trainer.train()
        runs[policy] = summary(trainer)
    for policy, found in runs.items():
        assert found["losses"] == runs["off"]["losses"], policy
        np.testing.assert_array_equal(found["grad_norms"], runs["off"]["grad_norms"], err_msg=policy)
