"""Configurations written as our own kind of file and read back."""

from __future__ import annotations

import dataclasses
import json
import typing
from enum import StrEnum

from hypothesis import assume, given
from hypothesis import strategies as st

from accel_trainer.config import RunConfig, build_config, field_specs, resolve, to_file_dict, to_yaml
from accel_trainer.config.validation import COMPILE_MODES, WrongValueError, coerce
from accel_trainer.config.yaml_reader import read_yaml
from accel_trainer.errors import ConfigError

TEXTS = st.text(min_size=1, max_size=10) | st.sampled_from(["no", "1e5", "010", "~", "null", "0,1", "{", "a: b", "# c"])
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,8}", fullmatch=True)
POSITIVE = st.integers(1, 999_999)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1, 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
SPECIAL = {
    "activation_checkpointing": st.sampled_from(["off", "full", "selective", "every:3", "ops:aten.mm,aten.addmm"]),
    "activation_offload": st.just(False),  # a compiler contradicts it
    "compile.mode": st.sampled_from(COMPILE_MODES),
    "dataset_mixture": st.fixed_dictionaries({"datasets": st.just([{"path": "a"}])}, optional={"seed": POSITIVE}),
    "deepspeed": st.dictionaries(TEXTS, JSON_VALUES, max_size=3),
    "fsdp.ignored_modules": st.lists(NAMES, max_size=2).map(tuple),
    "fsdp.wrap_classes": st.lists(NAMES, max_size=3).map(tuple),
    "parallel.dp_replicate_size": st.none(),
    "parallel.dp_shard_size": st.none(),
    "parallel.ep_size": st.just(1),
    "parallel.cp_size": st.just(1),
    "parallel.sp_size": st.just(1),
    "parallel.loss_parallel": st.just(False),
    "parallel.tp_size": st.just(1),
    "parallel.tp_plan": st.just(()),
    "ema_decay": st.floats(0.01, 0.99),
    "optimizer_in_backward": st.just(False),
    "outer_optimizer.momentum": st.floats(0, 0.99),
    "peak_flops": st.floats(1e9, 1e18),
    "preemption.signals": st.lists(st.sampled_from(["SIGTERM", "SIGUSR1", "SIGUSR2"]), unique=True).map(tuple),
    "launch.gpu_ids": st.sampled_from(["all", "0", "0,1", "3,1"]),
    "launch.main_process_port": st.integers(0, 65535),
    "launch.machine_rank": st.just(0),
    "launch.num_machines": st.just(1),
    "launch.tee": st.sampled_from(["0", "3", "0:1,1:2"]),
    "strategy": TEXTS.filter(str.strip),
    "compile.backend": TEXTS.filter(lambda text: bool(text.strip()) and not text.isupper()),
}


def values_of(spec):
    """Return the values that an option may have."""
    if spec.path in SPECIAL:
        return SPECIAL[spec.path]
    kinds = [kind for kind in typing.get_args(spec.annotation) if kind is not type(None)]
    kind = kinds[0] if kinds and not isinstance(spec.annotation, type) else spec.annotation
    if issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    return {bool: st.booleans(), int: POSITIVE, float: st.floats(1e-6, 1e6), str: TEXTS}[kind]


@st.composite
def configurations(draw):
    specs = list(field_specs().values())
    chosen = draw(st.lists(st.sampled_from(specs), unique_by=lambda spec: spec.path, max_size=12))
    values = {spec.path: draw(values_of(spec)) for spec in chosen}
    assume(not (values.get("fsdp.replicate_per_node") and values.get("fsdp.replicate_size", 1) > 1))
    if "local_steps" in values:
        assume("ema_decay" not in values)
        assume(not values.get("ddp.static_graph") and values.get("strategy", "auto") not in ("fsdp2", "deepspeed"))
        assume(values.get("on_nonfinite") in (None, "raise", "warn") and values.get("mixed_precision") != "fp16")
    if "launch.min_processes" in values:
        assume(values.get("fsdp.replicate_size", 1) == 1)  # which would have to divide it
        values["launch.num_processes"] = values["launch.min_processes"] + 1
    if values.get("launch.on_rank_loss", "restart") != "restart":  # on one machine, with torch's static rendezvous
        values["launch.rdzv_backend"] = "static"
    if values.get("launch.on_rank_loss") == "replace":
        values["launch.max_restarts"] = 1
    if "launch.min_machines" in values:
        fewest = values["launch.min_machines"]
        assume("fsdp.replicate_per_node" not in values)
        values |= {"launch.num_machines": fewest, "launch.num_processes": fewest, "launch.min_processes": fewest}
        values |= {"launch.machine_rank": 0, "launch.rdzv_backend": "c10d"}
        assume(values.get("launch.on_rank_loss", "restart") == "restart" and values.get("fsdp.replicate_size", 1) == 1)
    if "loss_chunk_tokens" in values:
        values["loss"] = "chunked"
    if values.get("mixed_precision") == "fp8":
        assume(values.get("fp8.backend", "ao") == "ao" and values.get("parallel.tp_size", 1) == 1)
    return build_config(values)


@given(configurations(), st.booleans())
def test_a_configuration_is_read_back_from_a_mapping_json_and_yaml(config, full):
    content = to_file_dict(config, full=full)

    assert read_yaml(to_yaml(config, full=full), "x.yaml").root.plain() == content
    assert resolve(file=content).config == config
    assert resolve(file=json.dumps(content)).config == config


@given(configurations())
def test_explicit_values_make_the_same_configuration(config):
    values = {path: value for path, value, _ in resolve(file=to_file_dict(config)).explain()}

    assert build_config(values) == config
    assert resolve(explicit=values).config == config


@given(st.sampled_from(list(field_specs().values())), JSON_VALUES, st.booleans())
def test_a_value_is_taken_as_its_type_or_refused(spec, value, lenient):
    if value is None:
        return
    try:
        taken = coerce(spec, value, lenient=lenient)
    except WrongValueError:
        return
    again = coerce(spec, taken)
    assert (type(again), again) == (type(taken), taken)


@given(
    st.dictionaries(
        st.sampled_from([*field_specs(), "fsdp", "launch", "distributed_type"]) | NAMES, JSON_VALUES, max_size=4
    )
)
def test_any_mapping_is_read_or_refused_as_a_configuration(content):
    try:
        resolve(file=content)
    except ConfigError:
        return


def test_only_what_differs_from_the_defaults_is_written():
    assert to_file_dict(RunConfig()) == {}
    assert to_yaml(resolve(file={"fsdp": {"wrap_classes": "A,B"}, "use_cpu": True}).config) == (
        "use_cpu: true\nfsdp:\n  wrap_classes:\n  - A\n  - B\n"
    )


def test_a_full_file_has_every_option_that_has_a_value():
    content = to_file_dict(RunConfig(), full=True)

    given = [item.name for item in dataclasses.fields(RunConfig) if item.default is not None]
    assert list(content) == given
    assert "dispatch_batches" not in content["data"]  # None: nothing to write
    assert content["fsdp"]["wrap_policy"] == "transformer"
