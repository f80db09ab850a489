"""The DeepSpeed block: every spelling of it, every source it may come from, and how the levels of precedence merge."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_trainer.config import SourceKind, packaged_names, read_file, resolve, to_file_dict, to_yaml
from accel_trainer.config.deepspeed_block import FIELDS, block_of, merge_blocks, read_block
from accel_trainer.config.deepspeed_keys import KNOWN_KEYS, join
from accel_trainer.config.schema import get_key, set_key
from accel_trainer.config.yaml_reader import read_yaml
from accel_trainer.errors import ConfigError

ENGINE = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 4,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that is not the working directory, with a DeepSpeed configuration in it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "ds.json").write_text(json.dumps(ENGINE, indent=1), encoding="utf-8")
    return tmp_path


def accelerate_file(folder: Path, **block) -> Path:
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": block}), encoding="utf-8")
    return path


def engine(**levels):
    """Return the DeepSpeed configuration that the levels make together."""
    config = resolve(**levels).config
    assert config.strategy == "deepspeed"
    return read_block(config.deepspeed).data


# Every form of a source.


def test_every_form_of_a_source_holds_the_same(folder):
    text = json.dumps(ENGINE)
    (folder / "ds.yaml").write_text(yaml.safe_dump(ENGINE), encoding="utf-8")
    (folder / "own.yaml").write_text(yaml.safe_dump({"strategy": "deepspeed", "deepspeed": ENGINE}), encoding="utf-8")
    (folder / "names.yaml").write_text("strategy: deepspeed\ndeepspeed: ds.yaml\n", encoding="utf-8")
    whole = accelerate_file(folder, deepspeed_config_file="ds.json")
    sources = [
        ENGINE,
        text,
        base64.b64encode(text.encode()).decode(),
        base64.urlsafe_b64encode(text.encode()).decode(),
        folder / "ds.json",
        str(folder / "ds.yaml"),
        whole,
        folder / "own.yaml",
        folder / "names.yaml",
        {"deepspeed_config_file": str(folder / "ds.json")},
    ]
    assert [read_block(block_of(source)).data for source in sources] == [ENGINE] * len(sources)
    for source in sources:
        assert engine(explicit={"strategy": "deepspeed", "deepspeed": source}) == ENGINE
    files = [folder / name for name in ("own.yaml", "names.yaml", "ds.json", "ds.yaml")]
    for file in (whole, *files, text, ENGINE):
        assert engine(file=file) == ENGINE


RUN_FILES = {
    "own": "strategy: deepspeed\nmixed_precision: bf16\naccumulation: {num_steps: 4}\ndeepspeed: BLOCK\n",
    "chain": "strategy: deepspeed\nmixed_precision: bf16\naccumulation: {num_steps: 4}\ndeepspeed: zero.json\n",
    "accelerate": "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
    "gradient_accumulation_steps: 4\ndeepspeed_config: BLOCK\n",
}


@pytest.mark.parametrize("level", ["explicit", "flags", "environ"])
@pytest.mark.parametrize("kind", RUN_FILES)
def test_the_file_of_a_run_brings_its_precision_and_accumulation_along(folder, kind, level):
    (folder / "zero.json").write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(RUN_FILES[kind].replace("BLOCK", "{zero_optimization: {stage: 1}}"), encoding="utf-8")
    match level:
        case "explicit":
            given = {"strategy": "deepspeed", "deepspeed": str(path)}
        case "flags":
            given = {"strategy": "deepspeed", "deepspeed": {"deepspeed_config_file": str(path)}}
        case _:
            given = {"ACCEL_TRAINER_STRATEGY": "deepspeed", "ACCEL_TRAINER_DEEPSPEED": str(path)}
    resolved = resolve(**{level: given})

    assert (resolved.config.mixed_precision, resolved.config.accumulation.num_steps) == ("bf16", 4)
    assert resolved.source("mixed_precision").where == f"{path}:{3 if kind == 'accelerate' else 2}"
    assert resolved.notes == ()
    assert read_block(resolved.config.deepspeed).data["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize("flags", [{}, {"deepspeed": {"gradient_clipping": 1.0}}])
def test_the_rest_of_the_file_of_a_run_is_noted(folder, flags):
    path = folder / "run.yaml"
    text = "strategy: deepspeed\nema_decay: 0.9\nmixed_precision: fp8\ndeepspeed: {zero_optimization: {stage: 1}}\n"
    path.write_text(text, encoding="utf-8")
    environ = {"ACCEL_TRAINER_STRATEGY": "deepspeed", "ACCEL_TRAINER_DEEPSPEED": str(path)}
    assert resolve(environ=environ, flags=flags).notes == (
        f"{path} is named as the DeepSpeed configuration, and not used for ema_decay, mixed_precision",
    )


def test_the_file_of_a_run_does_not_contradict_its_own_block(folder):
    path = folder / "run.yaml"
    path.write_text(
        "strategy: deepspeed\nmixed_precision: bf16\ndeepspeed: {bf16: {enabled: false}}\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError) as caught:
        read_block(block_of(path))
    assert str(caught.value) == (
        f"bf16.enabled, by mixed_precision at {path}:2, is true, and bf16.enabled is false: DeepSpeed would go by "
        "false; keep one of the two"
    )


@pytest.mark.parametrize("name", [name for name in packaged_names() if name.startswith("zero")])
def test_a_packaged_name_is_a_source(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stage = int(name[4])
    data = read_block(block_of(name)).data
    assert data["zero_optimization"]["stage"] == stage
    assert engine(file=name) == data == engine(file={"strategy": "deepspeed", "deepspeed": name})
    offloads = [key for key in data["zero_optimization"] if key.startswith("offload_")]
    assert bool(offloads) == ("offload" in name)


def test_a_block_keeps_what_a_source_does_not_hold_apart(tmp_path):
    given_block = {"zero_optimization": {"stage": 1}}
    block = block_of(given_block)
    block["zero_optimization"]["stage"] = 3
    assert given_block == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "zero4",
            "config file 'zero4' not found: there is no file {cwd}/zero4 and no packaged configuration of that name; "
            "did you mean 'zero3'? Packaged: ",
        ),
        ("{", "the JSON text:1 is not valid JSON: Expecting property name enclosed in double quotes (column 2)"),
        ("ds.jsn", "config file 'ds.jsn' not found: there is no file {cwd}/ds.jsn"),
        (7, "a configuration is 7, of type int; expected a path, a packaged name, JSON text or a mapping"),
    ],
)
def test_what_is_no_source_is_an_error(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_block(block_of(source))
    assert str(caught.value).startswith(message.format(cwd=tmp_path))


# accelerate's fields.


def test_the_fields_of_accelerate_stand_where_deepspeed_has_them():
    block = {
        "zero_stage": "3",
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/disk/a",
        "offload_param_device": "NVME",
        "offload_param_nvme_path": "/disk/b",
        "zero3_init_flag": "false",
        "zero3_save_16bit_model": True,
        "deepspeed_moe_layer_cls_names": "MoeA, MoeB",
        "gradient_clipping": 0.5,
        "deepspeed_hostfile": "hosts",
        "deepspeed_inclusion_filter": None,
    }
    config = resolve(file={"distributed_type": "DEEPSPEED", "deepspeed_config": block}).config
    read = read_block(config.deepspeed)

    assert read.data == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/disk/a"},
            "offload_param": {"device": "nvme", "nvme_path": "/disk/b"},
            "stage3_gather_16bit_weights_on_model_save": True,
            "leaf_module": {"classes": ["MoeA", "MoeB"]},
        },
        "zero3_init_flag": False,
        "gradient_clipping": 0.5,
    }
    assert read.launch == {"deepspeed_hostfile": "hosts"}


@pytest.mark.parametrize("block", [{}, {"gradient_clipping": 1.0}, {"offload_optimizer_device": "cpu"}])
def test_fields_alone_mean_stage_2(block):
    assert engine(file={"strategy": "deepspeed", "deepspeed": block})["zero_optimization"]["stage"] == 2
    assert engine(environ={"ACCELERATE_USE_DEEPSPEED": "true"}) == {"zero_optimization": {"stage": 2}}


def test_a_configuration_of_deepspeeds_own_means_what_it_says():
    assert engine(file={"strategy": "deepspeed", "deepspeed": {"bf16": {"enabled": True}}}) == {
        "bf16": {"enabled": True}
    }


def test_a_field_fills_what_the_file_leaves_open(folder):
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": "auto"}, "gradient_clipping": "auto"}')
    file = accelerate_file(
        folder, deepspeed_config_file="ds.json", zero_stage=3, offload_param_device="none", gradient_clipping=2.0
    )
    assert engine(file=file) == {"zero_optimization": {"stage": 3}, "gradient_clipping": 2.0}


def test_a_field_that_contradicts_its_file_is_an_error(folder):
    file = accelerate_file(folder, deepspeed_config_file="ds.json", zero_stage=3, offload_optimizer_device="nvme")
    with pytest.raises(ConfigError) as caught:
        resolve(file=file)
    path = folder / "ds.json"
    assert str(caught.value) == (
        "2 problems in the configuration:\n"
        f"  - offload_optimizer_device ({file}:3) is 'nvme', and zero_optimization.offload_optimizer.device ({path}:5) "
        "is 'cpu': DeepSpeed would go by 'cpu'; keep one of the two\n"
        f"  - zero_stage ({file}:4) is 3, and zero_optimization.stage ({path}:3) is 2: DeepSpeed would go by 2; keep "
        "one of the two"
    )


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("zero_stage", 4, "0, 1, 2 or 3"),
        ("zero_stage", True, "0, 1, 2 or 3"),
        ("offload_param_device", "gpu", "one of 'none', 'cpu', 'nvme'"),
        ("zero3_init_flag", "maybe", "true or false"),
        ("offload_param_nvme_path", 3, "a directory"),
        ("deepspeed_moe_layer_cls_names", [1], "names of classes, separated by commas"),
    ],
)
def test_a_wrong_field_is_named(field, value, expected):
    shown = "true" if value is True else repr(value)
    with pytest.raises(ConfigError) as caught:
        resolve(file={"strategy": "deepspeed", "deepspeed": {field: value}})
    assert str(caught.value) == f"{field} (the config dict) is {shown}; expected {expected}"


def test_accelerates_block_is_stage_2_where_it_says_no_other():
    block = {"train_micro_batch_size_per_gpu": 8, "deepspeed_config_file": "none", "zero_stage": None}
    content = {"distributed_type": "DEEPSPEED", "deepspeed_config": {**block, "gradient_accumulation_steps": 3}}
    assert read_file(content).content == content
    whole = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8}
    assert engine(file=content) == whole
    del content["deepspeed_config"]["train_micro_batch_size_per_gpu"]
    assert engine(file=content) == {"zero_optimization": {"stage": 2}}
    content["deepspeed_config"] = {"zero_stage": 1, "train_micro_batch_size_per_gpu": 8}
    assert engine(file=content) == {**whole, "zero_optimization": {"stage": 1}}


def test_a_chain_of_files_ends(folder):
    path = accelerate_file(folder, deepspeed_config_file=str(folder / "accelerate.yaml"))
    with pytest.raises(ConfigError, match=r"names a file that names another, 4 times over$"):
        resolve(file=path)


# Variables.


def test_the_variables_of_accelerates_launcher_are_read(folder):
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,gradient_clipping",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/disk",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "false",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "MoeA",
    }
    resolved = resolve(environ=environ)

    assert read_block(resolved.config.deepspeed).data == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": "/disk"},
            "stage3_gather_16bit_weights_on_model_save": False,
            "leaf_module": {"classes": ["MoeA"]},
        },
        "zero3_init_flag": True,
        "gradient_clipping": 1.0,
    }
    assert resolved.config.accumulation.num_steps == 2
    assert resolved.block_origins()["zero_stage"] == "ACCELERATE_DEEPSPEED_ZERO_STAGE"


def test_they_are_left_alone_without_the_engine():
    resolved = resolve(environ={"ACCELERATE_DEEPSPEED_ZERO_STAGE": "7", "ACCELERATE_GRADIENT_CLIPPING": "1.0"})
    assert resolved.config.deepspeed == {}


@pytest.mark.parametrize("word", ["auto", "none", "None"])
def test_a_number_of_steps_that_nobody_gave_is_none(word, folder):
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "ds.json"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": word,
        "ACCELERATE_MIXED_PRECISION": "no",  # what the launcher writes when nobody chose one
    }
    config = resolve(environ=environ).config
    assert (config.accumulation.num_steps, config.mixed_precision) == (4, "bf16")


def test_our_own_variables_set_the_block_or_one_key_of_it(folder):
    environ = {
        "ACCEL_TRAINER_STRATEGY": "deepspeed",
        "ACCEL_TRAINER_DEEPSPEED": str(folder / "ds.json"),
        "ACCEL_TRAINER_DEEPSPEED__ZERO_OPTIMIZATION__STAGE": "3",
        "ACCEL_TRAINER_DEEPSPEED__ZERO3_INIT_FLAG": "false",
        "ACCEL_TRAINER_DEEPSPEED__OPTIMIZER__PARAMS": '{"lr": 1}',
    }
    resolved = resolve(environ=environ)
    assert read_block(resolved.config.deepspeed).data == {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 4,
        "zero3_init_flag": False,
        "optimizer": {"params": {"lr": 1}},
    }
    origins = resolved.block_origins()
    assert origins["zero_optimization.stage"] == "ACCEL_TRAINER_DEEPSPEED__ZERO_OPTIMIZATION__STAGE"
    assert origins["bf16.enabled"] == f"{folder / 'ds.json'}:9"


# Levels.


def test_a_single_field_of_a_stronger_level_wins(folder):
    file = accelerate_file(folder, deepspeed_config_file="ds.json", deepspeed_hostfile="hosts")
    resolved = resolve(
        file=file,
        environ={"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
        flags={"deepspeed": {"zero_stage": 3}},
        explicit={"deepspeed": {"offload_optimizer_device": "none"}, "deepspeed.gradient_clipping": 0.3},
    )
    read = read_block(resolved.config.deepspeed)
    assert read.data == {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.3,
    }
    assert read.launch == {"deepspeed_hostfile": "hosts"}
    assert resolved.block_origins()["zero_optimization.stage"] == "--zero_stage"
    assert resolved.source("deepspeed").kind is SourceKind.PYTHON


def test_a_whole_configuration_of_a_stronger_level_replaces_the_weaker_one(folder):
    file = accelerate_file(folder, zero_stage=3, offload_param_device="cpu", deepspeed_hostfile="hosts")
    config = resolve(file=file, explicit={"deepspeed": {"zero_optimization": {"stage": 1}}}).config
    assert config.deepspeed == {"zero_optimization": {"stage": 1}, "deepspeed_hostfile": "hosts"}


def test_fields_are_merged_one_by_one():
    below = {"zero_stage": 3, "offload_param_device": "cpu", "gradient_clipping": 1.0}
    above = {"zero_stage": 2, "offload_param_device": "none"}
    assert merge_blocks(below, above) == below | above


def test_the_block_fixes_what_nobody_else_says(folder):
    resolved = resolve(file=folder / "ds.json")
    assert resolved.config.mixed_precision == "bf16"
    assert resolved.describe("accumulation.num_steps") == f"accumulation.num_steps=4 (from {folder / 'ds.json'}:11)"
    stronger = resolve(file={"accumulation": {"num_steps": 2}}, explicit={"strategy": "deepspeed", "deepspeed": ENGINE})
    assert stronger.config.accumulation.num_steps == 4


@pytest.mark.parametrize("flags", [{}, {"deepspeed": {"gradient_clipping": 1.0}}])
def test_a_stronger_field_leaves_the_other_keys_of_the_block_as_weak_as_they_were(folder, flags):
    file = accelerate_file(folder, deepspeed_config_file="ds.json")
    environ = {"ACCEL_TRAINER_ACCUMULATION__NUM_STEPS": "2", "ACCEL_TRAINER_MIXED_PRECISION": "fp16"}
    with pytest.raises(ConfigError, match=f"(?s)^2 problems.*{folder / 'ds.json'}:11.*{folder / 'ds.json'}:9"):
        resolve(file=file, environ=environ, flags=flags)


def test_what_contradicts_the_block_is_listed_with_both_places(folder):
    with pytest.raises(ConfigError) as caught:
        resolve(file=folder / "ds.json", explicit={"accumulation.num_steps": 2, "mixed_precision": "fp16"})
    path = folder / "ds.json"
    assert str(caught.value) == (
        "2 problems in the configuration:\n"
        "  - accumulation.num_steps is 2 (from Accelerator(gradient_accumulation_steps=...)), and "
        f"gradient_accumulation_steps of the DeepSpeed configuration (from {path}:11) makes it 4: DeepSpeed would go "
        'by 4; give both the same value, or write "auto" there\n'
        "  - mixed_precision is 'fp16' (from Accelerator(mixed_precision=...)), and bf16.enabled of the DeepSpeed "
        f"configuration (from {path}:9) makes it 'bf16': DeepSpeed would go by 'bf16'; give both the same value, or "
        'write "auto" there'
    )


def test_the_steps_of_accelerates_block_are_an_option_like_any_other(folder):
    file = accelerate_file(folder, zero_stage=2, gradient_accumulation_steps=4)
    assert resolve(file=file).config.accumulation.num_steps == 4
    assert resolve(file=file, explicit={"accumulation.num_steps": 2}).config.accumulation.num_steps == 2


def test_every_key_of_the_block_is_explained(folder):
    file = accelerate_file(folder, deepspeed_config_file="ds.json")
    rows = resolve(file=file, flags={"deepspeed": {"zero_stage": 3}}).explain_block()
    assert [(path, value, source.where) for path, value, source in rows] == [
        ("deepspeed.zero_optimization.stage", 3, "--zero_stage"),
        ("deepspeed.zero_optimization.offload_optimizer.device", "cpu", f"{folder / 'ds.json'}:5"),
        ("deepspeed.bf16.enabled", True, f"{folder / 'ds.json'}:9"),
        ("deepspeed.gradient_accumulation_steps", 4, f"{folder / 'ds.json'}:11"),
    ]
    assert resolve().explain_block() == []
    (row,) = resolve(explicit={"deepspeed": {"zero_optimization": {"stage": 1}}}).explain_block()
    assert row[2].where == "Accelerator(deepspeed=...)"
    file = accelerate_file(folder, deepspeed_config_file="ds.json", deepspeed_hostfile="hosts")
    rows = resolve(file=file).explain_block()
    assert ("deepspeed.zero_optimization.stage", 2, f"{folder / 'ds.json'}:3") == (*rows[0][:2], rows[0][2].where)
    assert (rows[-1][:2], rows[-1][2].where) == (("deepspeed.deepspeed_hostfile", "hosts"), f"{file}:3")


@pytest.mark.parametrize("is_inline", [False, True])
def test_a_value_of_a_block_is_named_by_its_own_line_until_another_level_replaces_it(folder, is_inline):
    path = folder / "run.yaml"
    text = "deepspeed:\n  zero_optimization:\n    stage: 2\n    offload_optimizer:\n      device: cpu\n"
    path.write_text(f"strategy: deepspeed\n{text if is_inline else 'deepspeed: ds.json'}", encoding="utf-8")
    line = f"{path}:4" if is_inline else f"{folder / 'ds.json'}:3"
    for flags in ({}, {"deepspeed": {"gradient_clipping": 1.0}}):
        assert resolve(file=path, flags=flags).explain_block()[0][2].where == line
    for explicit in ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {"deepspeed.zero_optimization": {"stage": 3}}):
        row = resolve(file=path, explicit=explicit).explain_block()[0]
        assert (row[1], row[2].where) == (3, f"Accelerator({next(iter(explicit))}=...)")


def test_a_block_that_no_one_uses_is_noted():
    (note,) = resolve(file="zero3", explicit={"strategy": "fsdp2"}).notes
    assert note == (
        "the DeepSpeed configuration (from fsdp_configs/zero3.json:1) is not used: "
        "strategy=fsdp2 (from Accelerator(strategy=...))"
    )


# Round trips.


def _leaf_paths(keys, section=""):
    for name, inner in keys.items():
        if inner:
            yield from _leaf_paths(inner, join(section, name))
        else:
            yield join(section, name)


LEAVES = sorted(_leaf_paths(KNOWN_KEYS))
VALUES = st.integers(1, 3) | st.booleans() | st.floats(1e-9, 1e9) | st.sampled_from(["auto", "cpu", "1e-5", "no", "x"])


@st.composite
def blocks(draw):
    content: dict = {}
    names = ["zero_optimization.sub_group_size", *draw(st.lists(st.sampled_from(LEAVES), max_size=8, unique=True))]
    for path in [*names, *draw(st.lists(st.sampled_from([*FIELDS]), max_size=2))]:
        set_key(content, path, draw(VALUES))
    return content


@given(blocks())
def test_every_key_survives_yaml_and_json(content):
    config = resolve(file={"deepspeed": content}).config
    assert config.deepspeed == content
    assert resolve(file=read_yaml(to_yaml(config), "saved.yaml").root.plain()).config == config
    assert resolve(file=json.dumps(to_file_dict(config))).config == config
    assert read_file(json.dumps({"deepspeed": content})).content["deepspeed"] == content


def test_every_key_arrives_from_each_kind_of_file(tmp_path):
    content: dict = {}
    for path in LEAVES:
        set_key(content, path, 1)
    (tmp_path / "ds.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "ds.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    for file in ("ds.json", "ds.yaml"):
        data = read_block(block_of(tmp_path / file)).data
        assert [path for path in LEAVES if get_key(data, path) != 1] == []
