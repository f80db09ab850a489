"""Finding a configuration: paths, packaged names, text; and what is said when it cannot be found or read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from accel_trainer.config import Dialect, packaged_names, read_file, resolve
from accel_trainer.config.config_source import MAX_BYTES
from accel_trainer.errors import ConfigError

STRATEGIES = {
    "accelerate_fsdp_bert": "fsdp2",
    "ddp": "ddp",
    "fsdp_config_flat": "fsdp2",
    "full_shard": "fsdp2",
    "full_shard_bf16": "fsdp2",
    "full_shard_offload": "fsdp2",
    "hybrid_shard": "fsdp2",
    "shard_grad_op": "fsdp2",
    "zero1": "deepspeed",
    "zero2": "deepspeed",
    "zero2_offload_optimizer": "deepspeed",
    "zero3": "deepspeed",
    "zero3_offload": "deepspeed",
    "zero3_offload_nvme": "deepspeed",
}


@pytest.mark.parametrize("name", packaged_names())
def test_every_packaged_configuration_loads_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    resolved = resolve(file=name)

    assert resolved.config.strategy == STRATEGIES[name]
    assert resolved.source("strategy").where.startswith(f"fsdp_configs/{name}.")


def test_packaged_names_are_unambiguous():
    assert len(packaged_names()) == len(set(packaged_names())) == len(STRATEGIES)


def test_packaged_configurations_differ_where_their_names_do():
    assert resolve(file="full_shard").config.fsdp.reshard_after_forward
    assert not resolve(file="shard_grad_op").config.fsdp.reshard_after_forward
    assert resolve(file="hybrid_shard").config.fsdp.replicate_per_node
    assert resolve(file="full_shard_offload").config.fsdp.offload_params
    assert resolve(file="full_shard_bf16").config.mixed_precision == "bf16"
    assert read_file("fsdp_config_flat").dialect is Dialect.FSDP_CONFIG
    assert read_file("accelerate_fsdp_bert").dialect is Dialect.ACCELERATE


def test_an_existing_file_wins_over_a_packaged_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddp").write_text("strategy: single\n", encoding="utf-8")

    assert resolve(file="ddp").config.strategy == "single"
    assert read_file("ddp").path == tmp_path / "ddp"


@pytest.mark.parametrize(
    ("file_name", "text"),
    [
        ("a.yaml", "strategy: ddp"),
        ("a.yml", "\ufeffstrategy: ddp\r\n"),
        ("a.json", '{"strategy": "ddp"}'),
        ("a.JSON", '{"strategy": "ddp"}'),
        ("a", "strategy: ddp"),
        ("b", ' {"strategy": "ddp"}'),
        ("a.conf", "strategy: ddp"),
    ],
)
def test_a_file_is_read_by_suffix_or_by_what_it_holds(tmp_path, file_name, text):
    path = tmp_path / file_name
    path.write_text(text, encoding="utf-8")

    assert resolve(file=path).config.strategy == "ddp"
    assert resolve(file=str(path)).config.strategy == "ddp"


def test_json_text_and_mappings_are_configurations():
    assert resolve(file=' {"strategy": "ddp"}').describe("strategy") == "strategy=ddp (from the JSON text:1)"
    assert resolve(file={"strategy": "ddp"}).describe("strategy") == "strategy=ddp (from the config dict)"
    assert resolve(file={}).config == resolve().config


def test_a_missing_name_lists_the_packaged_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError) as caught:
        read_file("full_shrd")

    assert str(caught.value) == (
        f"config file 'full_shrd' not found: there is no file {tmp_path / 'full_shrd'} and no packaged "
        f"configuration of that name; did you mean 'full_shard'? Packaged: {', '.join(sorted(STRATEGIES))}"
    )


def test_a_missing_file_is_named_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text("", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        resolve(file="tarin.yaml")
    assert str(caught.value) == (
        f"config file 'tarin.yaml' not found: there is no file {tmp_path / 'tarin.yaml'}; did you mean 'train.yaml'?"
    )

    with pytest.raises(ConfigError) as caught:
        read_file(Path("runs/a.yaml"))
    assert str(caught.value) == (
        f"config file 'runs/a.yaml' not found: there is no file {tmp_path / 'runs/a.yaml'}; "
        f"the directory {tmp_path / 'runs'} does not exist either"
    )


def test_a_directory_is_not_a_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"is a directory: .*; give the file in it"):
        read_file(tmp_path)


def test_an_unreadable_file_is_named_with_the_reason(tmp_path, monkeypatch):
    path = tmp_path / "train.yaml"
    path.write_text("strategy: ddp", encoding="utf-8")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)  # permissions do not stop a test that runs as root
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert str(caught.value) == f"config file {path} cannot be read: Permission denied"


def test_a_path_that_is_too_long_is_an_error_of_its_own(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        read_file(str(tmp_path / ("x" * 300)))


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("#" * MAX_BYTES + "\n", encoding="utf-8")

    with pytest.raises(ConfigError, match=f"{path} has {MAX_BYTES + 1} bytes; expected at most {MAX_BYTES}"):
        read_file(path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_bytes(b"strategy: \xff\xfe")

    with pytest.raises(ConfigError, match=r"train\.yaml is not UTF-8 text: byte 10 does not decode; save it as UTF-8"):
        read_file(path)


@pytest.mark.parametrize("source", [3, "", b"x", ["a"]])
def test_other_types_are_not_configurations(source):
    with pytest.raises(ConfigError, match="expected a path, a packaged name, JSON text or a mapping"):
        read_file(source)


def test_yaml_text_is_not_taken_for_a_path():
    with pytest.raises(
        ConfigError, match=r"text of several lines that starts with 'strategy: ddp'; .*write YAML text to a file"
    ):
        read_file("strategy: ddp\nuse_cpu: true\n")


def test_an_error_about_a_file_survives_pickling():
    with pytest.raises(ConfigError) as caught:
        read_file({"a": 1, "b": 2})

    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.yaml").write_text("strategy: ddp", encoding="utf-8")

    assert read_file(os.path.join("~", "train.yaml")).path == tmp_path / "train.yaml"
