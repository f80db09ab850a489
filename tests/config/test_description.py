"""The tree as others read it: the schema knows what the reader takes, and comments change no value."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_trainer.config import field_specs, packaged_names, read_file, resolve, to_file_dict
from accel_trainer.config.description import SCHEMA_FILE, commented_yaml, documentation, json_schema
from accel_trainer.config.files import Dialect
from accel_trainer.config.schema import set_key
from accel_trainer.errors import ConfigError

VALUES: dict[str, list[Any]] = {
    "fsdp.wrap_classes": [["A"], "A,B"],
    "dataset_mixture": [{"datasets": [{"path": "facts", "weight": 3}], "schedule": {"10": [1]}}],
    "deepspeed": [{"zero_stage": 2}, "zero2"],
    "launch.main_process_ip": ["10.0.0.1"],
    "launch.log_dir": ["logs"],
    "launch.role": ["trainer"],
    "strategy": ["ddp", "fsdp2"],
    "mixed_precision": ["no", "bf16"],
    "launch.num_processes": [2, None],
    "data.data_seed": [3],
    "debug": [True],
    "gradient_accumulation_steps": [4],
    "timeout_seconds": [30.5, 60],
}


@functools.cache
def validator() -> Any:
    """Return what `jsonschema.validate` makes, after it has checked the schema, for each of a hundred files anew."""
    return jsonschema.Draft202012Validator(json_schema())


def test_every_option_is_described() -> None:
    assert field_specs().keys() <= documentation().keys()


def test_the_packaged_schema_is_that_of_the_tree() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema()
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_every_packaged_file_of_ours_fits_it() -> None:
    checked = []
    for name in packaged_names():
        content = read_file(name)
        if content.dialect is Dialect.OWN:
            jsonschema.validate(content.content, json_schema())
            checked.append(name)
    assert len(checked) >= 4


@pytest.mark.parametrize(
    "content",
    [{"mixed_precison": "no"}, {"fsdp": {"wrap": 1}}, {"debug": "maybe"}, {"launch": {"num_processes": "two"}}],
)
def test_what_the_reader_refuses_the_schema_refuses(content: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        resolve(file=content)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, json_schema())


@given(st.dictionaries(st.sampled_from(sorted(VALUES)), st.integers(0, 1)))
def test_comments_change_no_value(chosen: dict[str, int]) -> None:
    content: dict[str, Any] = {}
    for path, index in chosen.items():
        set_key(content, path, VALUES[path][index % len(VALUES[path])])
    validator().validate(content)
    text = commented_yaml(content)
    assert (yaml.safe_load(text) or {}) == content
    assert text.startswith(f"# yaml-language-server: $schema={SCHEMA_FILE}\n")
    assert all(f"  # {documentation()[path]}" in text for path in chosen if path in documentation())


def test_a_whole_tree_is_read_back(tmp_path: Path) -> None:
    config = resolve(file="full_shard").config
    (tmp_path / "full.yaml").write_text(commented_yaml(to_file_dict(config, full=True)))
    assert resolve(file=str(tmp_path / "full.yaml")).config == config
