"""Precedence, the memory of where a value came from, and what is said about the result."""

from __future__ import annotations

import enum
import json
import pickle
import subprocess
import sys

import pytest

from accel_trainer.config import Source, SourceKind, field_specs, read_file, resolve
from accel_trainer.config.files import to_file_dict
from accel_trainer.errors import ConfigError


def levels(tmp_path, *names):
    """Return the arguments of resolve() that set accumulation.num_steps on these levels, each to its own number."""
    file = tmp_path / "train.yaml"
    file.write_text("# first line\naccumulation:\n  num_steps: 2\n", encoding="utf-8")
    every = {
        "file": file,
        "environ": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"},
        "flags": {"accumulation.num_steps": "4"},
        "explicit": {"accumulation.num_steps": 5},
    }
    return {name: every[name] for name in names}


@pytest.mark.parametrize(
    ("names", "value", "kind", "where"),
    [
        ((), 1, SourceKind.DEFAULT, "default"),
        (("file",), 2, SourceKind.FILE, "{tmp_path}/train.yaml:3"),
        (("file", "environ"), 3, SourceKind.ENVIRONMENT, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        (("file", "environ", "flags"), 4, SourceKind.CLI, "--gradient_accumulation_steps"),
        (
            ("file", "environ", "flags", "explicit"),
            5,
            SourceKind.PYTHON,
            "Accelerator(gradient_accumulation_steps=...)",
        ),
        (("file", "explicit"), 5, SourceKind.PYTHON, "Accelerator(gradient_accumulation_steps=...)"),
        (("environ", "explicit"), 5, SourceKind.PYTHON, "Accelerator(gradient_accumulation_steps=...)"),
        (("file", "flags"), 4, SourceKind.CLI, "--gradient_accumulation_steps"),
    ],
)
def test_the_strongest_level_wins_and_is_remembered(tmp_path, names, value, kind, where):
    resolved = resolve(**levels(tmp_path, *names))

    assert resolved.config.accumulation.num_steps == value
    assert resolved.source("accumulation.num_steps") == Source(kind, where.format(tmp_path=tmp_path))


def test_levels_are_merged_option_by_option(tmp_path):
    file = tmp_path / "train.json"
    file.write_text('{"strategy": "fsdp2",\n "mixed_precision": "bf16",\n "use_cpu": true}', encoding="utf-8")

    resolved = resolve(
        file=file,
        environ={"ACCEL_TRAINER_MIXED_PRECISION": "fp16"},
        explicit={"use_cpu": False, "debug": None, "deepspeed.zero_stage": None},
    )

    config = resolved.config
    assert (config.strategy, config.mixed_precision, config.use_cpu) == ("fsdp2", "fp16", False)
    assert resolved.source("strategy").where == f"{file}:1"
    assert resolved.is_set("use_cpu")  # to its default
    assert not resolved.is_set("debug")  # None is "not given"
    assert not resolved.config.deepspeed


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ({}, "Here(on_changed_run='warn')"),
        ({"file": "train.yaml"}, "on_changed_run: warn in train.yaml:2"),
        ({"environ": {"ACCEL_TRAINER_ON_CHANGED_RUN": "auto"}}, "ACCEL_TRAINER_ON_CHANGED_RUN=warn"),
        ({"flags": {"on_changed_run": "auto"}}, "--on_changed_run warn"),
        ({"explicit": {"on_changed_run": "auto"}}, "Accelerator(on_changed_run='warn')"),
    ],
)
def test_an_option_is_spelled_as_where_it_is_set(tmp_path, monkeypatch, given, spelled):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text("strategy: single\non_changed_run: refuse\n", encoding="utf-8")
    assert resolve(**given).spell("on_changed_run", "warn", argument="Here(on_changed_run=...)") == spelled


def test_describe_says_value_and_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text("mixed_precision: bf16\nfsdp:\n  wrap_classes: [A, B]\n", encoding="utf-8")

    resolved = resolve(file="train.yaml")

    assert resolved.describe("mixed_precision") == "mixed_precision=bf16 (from train.yaml:1)"
    assert resolved.describe("fsdp.wrap_classes") == "fsdp.wrap_classes=[A, B] (from train.yaml:3)"
    assert resolved.describe("use_cpu") == "use_cpu=false (default)"
    assert resolved.describe("launch.num_processes") == "launch.num_processes=null (default)"


def test_explain_has_one_row_for_every_option():
    rows = resolve(file="full_shard").explain()

    assert [path for path, _, _ in rows] == list(field_specs())
    assert ("strategy", "fsdp2", Source(SourceKind.FILE, "fsdp_configs/full_shard.yaml:4")) in rows


def test_a_resolved_configuration_survives_pickling():
    resolved = resolve(file={"strategy": "deepspeed", "deepspeed": {"zero_stage": 3, "hosts": ["a", {"b": 1}]}})

    copy = pickle.loads(pickle.dumps(resolved))

    assert copy == resolved
    assert hash(copy.config) == hash(resolved.config)


def test_an_unknown_path_is_an_error_with_the_nearest_name():
    resolved = resolve()

    with pytest.raises(ConfigError, match=r"unknown option 'fsdp\.wrap_clases'; did you mean 'fsdp\.wrap_classes'\?"):
        resolved.source("fsdp.wrap_clases")
    with pytest.raises(ConfigError, match=r"unknown option 'num_steps'"):
        resolve(explicit={"num_steps": 2})


def test_problems_of_all_levels_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve(
            file={"mixed_precision": "bf61", "fsdp": {"wrap_clases": "A"}},
            environ={"ACCELERATE_USE_CPU": "maybe"},
            flags={"launch.num_processes": "two"},
            explicit={"accumulation.num_steps": 0, "use_cpu": "true"},
        )

    assert str(caught.value) == (
        "6 problems in the configuration:\n"
        "  - mixed_precision in the config dict is 'bf61'; expected one of 'no', 'bf16', 'fp16', 'fp8'; "
        "did you mean 'bf16'?\n"
        "  - unknown key 'wrap_clases' in 'fsdp' in the config dict; did you mean 'wrap_classes'?\n"
        "  - environment variable ACCELERATE_USE_CPU is 'maybe'; expected true or false\n"
        "  - --num_processes is 'two'; expected a whole number\n"
        "  - Accelerator(gradient_accumulation_steps=...) is 0; expected a whole number of at least 1\n"
        "  - Accelerator(cpu=...) is 'true'; expected true or false without quotes"
    )


def test_the_receiver_of_explicit_arguments_can_have_its_own_names():
    resolved = resolve(
        explicit={"timeout_seconds": 60, "use_cpu": True},
        explicit_name="TrainingArguments",
        explicit_keywords={"timeout_seconds": "ddp_timeout"},
    )

    assert resolved.describe("timeout_seconds") == "timeout_seconds=60.0 (from TrainingArguments(ddp_timeout=...))"
    assert resolved.source("use_cpu").where == "TrainingArguments(use_cpu=...)"


def test_the_launcher_brings_its_file_and_its_flags(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("mixed_precision: bf16\nuse_cpu: true\n", encoding="utf-8")
    told = {"config_file": str(file), "flags": {"mixed_precision": "fp16", "launch.num_processes": 2}}

    resolved = resolve(environ={"ACCEL_TRAINER_LAUNCH": json.dumps(told), "ACCELERATE_MIXED_PRECISION": "no"})

    assert resolved.source("mixed_precision") == Source(SourceKind.CLI, "--mixed_precision")
    assert resolved.source("launch.num_processes").where == "--num_processes"
    assert resolved.source("use_cpu").where == f"{file}:2"


def test_a_file_given_in_python_leaves_the_launchers_word_on_the_launch(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("mixed_precision: bf16\nlaunch:\n  num_processes: 2:3\n", encoding="utf-8")
    environ = {"ACCEL_TRAINER_LAUNCH": json.dumps({"config_file": str(file), "flags": {}})}

    resolved = resolve(environ=environ, file="full_shard")

    assert (resolved.config.launch.min_processes, resolved.config.launch.num_processes) == (2, 3)
    assert (resolved.source("mixed_precision").kind, resolved.config.strategy) == (SourceKind.DEFAULT, "fsdp2")
    file.unlink()  # as on a machine that has none: the script's own is what counts
    assert resolve(environ=environ, file="full_shard").config.launch.num_processes is None


@pytest.mark.parametrize("text", ["{", "[]", '{"file": 1}', '{"config_file": 3}', '{"flags": []}'])
def test_a_damaged_launch_variable_is_an_error_that_names_it(text):
    with pytest.raises(ConfigError, match=r"environment variable ACCEL_TRAINER_LAUNCH is .*accel-trainer launch"):
        resolve(environ={"ACCEL_TRAINER_LAUNCH": text})


def test_what_read_file_returned_can_be_resolved():
    assert resolve(file=read_file("accelerate_fsdp_bert")) == resolve(file="accelerate_fsdp_bert")


def test_contradictions_between_levels_name_both_places():
    with pytest.raises(ConfigError) as caught:
        resolve(
            file={"launch": {"num_machines": 2, "num_processes": 3}, "fsdp": {"replicate_size": 2}},
            explicit={"fsdp.replicate_per_node": True},
            flags={"launch.machine_rank": 2},
        )

    assert str(caught.value) == (
        "3 problems in the configuration:\n"
        "  - fsdp.replicate_per_node=true (from Accelerator(fsdp.replicate_per_node=...)) contradicts "
        "fsdp.replicate_size=2 (from the config dict): give the number of replicas, or one per node, not both\n"
        "  - launch.machine_rank=2 (from --machine_rank) does not fit launch.num_machines=2 (from the config dict): "
        "machines are numbered from 0 to num_machines - 1\n"
        "  - launch.num_processes=3 (from the config dict) cannot be divided over launch.num_machines=2 "
        "(from the config dict): every machine runs the same number of processes"
    )


@pytest.mark.parametrize(
    ("content", "notes"),
    [
        (
            {"strategy": "fsdp2", "fsdp": {"wrap_policy": "none", "wrap_classes": ["A"], "min_num_params": 5}},
            [
                "fsdp.wrap_classes=[A] (from the config dict) is not used: fsdp.wrap_policy=none "
                "(from the config dict)",
                "fsdp.min_num_params=5 (from the config dict) is not used: fsdp.wrap_policy=none "
                "(from the config dict)",
            ],
        ),
        (
            {"fsdp": {"wrap_classes": ["A"], "offload_params": True, "reshard_after_forward": True}},
            [
                "fsdp.wrap_classes=[A] (from the config dict), fsdp.offload_params=true (from the config dict): "
                "not used with strategy=auto (default)"
            ],
        ),
        (
            {"strategy": "fsdp2", "ddp": {"static_graph": True}},
            ["ddp.static_graph=true (from the config dict): not used with strategy=fsdp2 (from the config dict)"],
        ),
        (
            {"compile": {"fullgraph": True}},
            ["compile.fullgraph=true (from the config dict): not used with compile.backend=no (default)"],
        ),
        ({"strategy": "theirs", "ddp": {"static_graph": True}, "fsdp": {"offload_params": True}}, []),
        ({"ddp": {"static_graph": True}}, []),
    ],
)
def test_options_that_another_one_leaves_without_effect_are_noted(content, notes):
    assert list(resolve(file=content).notes) == notes


class Backend(str, enum.Enum):  # noqa: UP042  # str() must give 'Backend.INDUCTOR'
    """An enumeration of another library, whose str() is not its value."""

    INDUCTOR = "INDUCTOR"


@pytest.mark.parametrize("level", ["file", "flags", "explicit", "environ"])
def test_names_of_compilers_may_be_written_as_elsewhere(level):
    spelled = {"file": {"compile": {"backend": "INDUCTOR"}}, "environ": {"ACCEL_TRAINER_COMPILE__BACKEND": "INDUCTOR"}}
    given = spelled.get(level, {"compile.backend": Backend.INDUCTOR})

    assert resolve(**{level: given}).config.compile.backend == "inductor"


def test_the_configuration_imports_no_torch_and_yaml_only_when_needed():
    code = (
        "import sys; from accel_trainer.config import resolve; resolve(file={'strategy': 'ddp'}); "
        "early = 'yaml' in sys.modules; resolve(file='full_shard'); "
        "print(early, sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "[]"]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("selective", "selective"),
        ("off", "off"),  # which YAML reads as false
        ("true", "full"),
        ("{every: 2}", "every:2"),
        ("every:2", "every:2"),
        ("{ops: [aten.mm, aten.addmm.default]}", "ops:aten.mm,aten.addmm.default"),
        ("ops:aten.mm", "ops:aten.mm"),
    ],
)
def test_a_policy_of_checkpointing_in_every_form(tmp_path, text, policy):
    file = tmp_path / "run.yaml"
    file.write_text(f"strategy: ddp\nactivation_checkpointing: {text}\n")  # true alone is a key of fsdp_config

    config = resolve(file=file).config
    assert config.activation_checkpointing == config.recomputation == policy
    assert resolve(file=to_file_dict(config)).config == config
    if "{" not in text:
        given = {"explicit": {"strategy": "ddp"}, "environ": {"ACCEL_TRAINER_ACTIVATION_CHECKPOINTING": text}}
        flags = {"strategy": "ddp", "activation_checkpointing": text}
        assert resolve(**given).config == config == resolve(flags=flags).config


@pytest.mark.parametrize("text", ["off", "false"])
@pytest.mark.parametrize("before", ["", "mixed_precision: 'no'\n"])
def test_a_file_that_turns_checkpointing_off_asks_for_no_sharding(tmp_path, text, before):
    file = tmp_path / "run.yaml"
    file.write_text(f"{before}activation_checkpointing: {text}\n")
    config = resolve(file=file).config
    assert (config.strategy, config.recomputation) == (resolve().config.strategy, "off")


@pytest.mark.parametrize(
    "text",
    ["every:0", "{every: two}", "{every: 2, ops: [aten.mm]}", "'ops:'", "ops:mm", "{ops: [aten.mm, 3]}", "[full]"],
)
def test_what_is_no_policy_of_checkpointing_is_refused(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(f"activation_checkpointing: {text}\n")

    message = r"run\.yaml:1 is .*; expected 'off', 'full', 'selective', 'every:N' with N from 1 on, or 'ops:NAME"
    with pytest.raises(ConfigError, match=message):
        resolve(file=file)


def test_the_spelling_of_fsdp_means_full_and_contradicts_other_policies():
    given = {"strategy": "fsdp2", "fsdp.activation_checkpointing": True}
    assert resolve(explicit=given).config.recomputation == "full"
    assert resolve(explicit=given | {"strategy": "ddp"}).config.recomputation == "off"
    assert resolve(explicit=given | {"activation_checkpointing": "full"}).config.recomputation == "full"
    with pytest.raises(
        ConfigError, match=r"fsdp\.activation_checkpointing=true .* contradicts activation_check.*selective"
    ):
        resolve(explicit=given | {"activation_checkpointing": "selective"})


@pytest.mark.parametrize(
    ("file", "stronger", "policy"),
    [
        ({"fsdp": {"activation_checkpointing": True}}, {"flags": {"activation_checkpointing": "off"}}, "off"),
        (
            {"fsdp": {"activation_checkpointing": True}},
            {"flags": {"activation_checkpointing": "selective"}},
            "selective",
        ),
        ({"activation_checkpointing": "full"}, {"flags": {"fsdp.activation_checkpointing": "false"}}, "off"),
        ({"activation_checkpointing": "selective"}, {"explicit": {"fsdp.activation_checkpointing": True}}, "full"),
        # accelerate's launcher always writes this variable.
        (
            {"activation_checkpointing": "selective"},
            {"environ": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "false"}},
            "selective",
        ),
        # That of FSDP is without effect here.
        (
            {"strategy": "ddp", "activation_checkpointing": "full"},
            {"flags": {"fsdp.activation_checkpointing": "true"}},
            "full",
        ),
    ],
)
def test_of_both_spellings_that_of_the_stronger_level_wins(file, stronger, policy):
    assert resolve(file={"strategy": "fsdp2", **file}, **stronger).config.recomputation == policy


def test_the_offload_of_activations_contradicts_a_compiler():
    with pytest.raises(
        ConfigError, match=r"activation_offload=true .* contradicts compile\.backend=inductor .* a compiler"
    ):
        resolve(explicit={"activation_offload": True, "compile.backend": "inductor"})


def test_keys_that_are_given_twice_in_a_mixture_or_a_deepspeed_text_are_refused(tmp_path):
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("seed: 1\nseed: 2\ndatasets: [{path: a}]\n")
    with pytest.raises(ConfigError, match=r"'?seed'? .*mixture\.yaml"):
        resolve(explicit={"dataset_mixture": str(mixture)})
    text = '{"zero_optimization":{"stage":2},"zero_optimization":{"stage":3}}'
    with pytest.raises(ConfigError, match="zero_optimization"):
        resolve(explicit={"strategy": "deepspeed", "deepspeed": text})
