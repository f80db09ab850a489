"""Finding a configuration: paths, packaged names, text; and what is said when it cannot be found or read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from accel_trainer.config import Dialect, packaged_names, read_file, resolve
from accel_trainer.config.config_source import MAX_BYTES
from accel_trainer.errors import ConfigError

NAMES = (
    "accelerate_fsdp_bert", "context_parallel", "ddp", "expert_parallel", "fp8", "fsdp_config_flat", "full_shard",
    "full_shard_bf16", "full_shard_offload", "hybrid_shard", "preemption", "qlora", "sequence_parallel",
    "shard_grad_op", "slurm", "tensor_parallel", "zero1", "zero2", "zero2_offload", "zero2_offload_optimizer", "zero3",
    "zero3_offload", "zero3_offload_nvme",
)  # fmt: skip


@pytest.mark.parametrize("name", packaged_names())
def test_every_packaged_configuration_loads_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    resolved = resolve(file=name)

    assert resolved.config.strategy == ("deepspeed" if name[:4] == "zero" else "ddp" if name == "ddp" else "fsdp2")
    assert resolved.source("strategy").where.startswith(f"fsdp_configs/{name}.")


def test_packaged_configurations_differ_where_their_names_do():
    assert packaged_names() == NAMES
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
        f"configuration of that name; did you mean 'full_shard'? Packaged: {', '.join(NAMES)}"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "tarin.yaml",
            "config file 'tarin.yaml' not found: there is no file {cwd}/tarin.yaml; did you mean 'train.yaml'?",
        ),
        (
            Path("runs/a.yaml"),
            "config file 'runs/a.yaml' not found: there is no file {cwd}/runs/a.yaml; the directory {cwd}/runs does "
            "not exist either",
        ),
        (Path(), "config file '.' is a directory: {cwd}; give the file in it"),
    ],
)
def test_what_is_no_file_is_named_by_its_absolute_path(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text("", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        read_file(source)
    assert str(caught.value) == message.format(cwd=tmp_path)


def test_an_unreadable_file_is_named_with_the_reason(tmp_path, monkeypatch):
    path = tmp_path / "train.yaml"
    path.write_text("strategy: ddp", encoding="utf-8")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)  # permissions do not stop a test that runs as root
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert str(caught.value) == f"config file {path} cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"#" * MAX_BYTES + b"\n", rf"train\.yaml has {MAX_BYTES + 1} bytes; expected at most {MAX_BYTES}"),
        (b"strategy: \xff\xfe", r"train\.yaml is not UTF-8 text: byte 10 does not decode; save it as UTF-8"),
    ],
    ids=["too large to be read", "not in UTF-8"],
)
def test_a_file_that_holds_no_configuration_is_refused(tmp_path, content, message):
    (tmp_path / "train.yaml").write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        read_file(tmp_path / "train.yaml")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *((source, "expected a path, a packaged name, JSON text or a mapping") for source in (3, "", b"x", ["a"])),
        ("/" + "x" * 300, "cannot be read: File name too long"),
        ("a: b\nc: d\n", r"text of several lines that starts with 'a: b'; .*write YAML text to a file"),
    ],
)
def test_what_names_no_file_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        read_file(source)


def test_an_error_about_a_file_survives_pickling():
    with pytest.raises(ConfigError) as caught:
        read_file({"a": 1, "b": 2})

    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.yaml").write_text("strategy: ddp", encoding="utf-8")

    assert read_file(os.path.join("~", "train.yaml")).path == tmp_path / "train.yaml"
