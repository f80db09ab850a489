"""`accel-trainer estimate`, against models that are built, and the figures of accelerate 1.15's own tests."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import LlamaConfig, LlamaForCausalLM

from accel_trainer.commands.estimate import (
    create_empty_model,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
    verify_on_hub,
)
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, MissingExtraError
from accel_trainer.launch import estimate
from accel_trainer.launch.cli import main

SMALL: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip
CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(8, 4)
        self.post_init()
"""


def write(directory: Path, content: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    return str(directory)


def row(words: list[str]) -> list[Any]:
    return gather_data(estimate_command_parser().parse_args(words))[0]


@pytest.mark.parametrize("is_tied", [False, True])
def test_sizes_are_those_of_the_model_that_the_configuration_names(is_tied: bool, tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, tie_word_embeddings=is_tied, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    built = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=is_tied))
    own = [*built.parameters(), *built.buffers()]
    num_bytes = sum(4 * each.numel() for each in own)
    layer = sum(4 * each.numel() for each in built.model.layers[0].parameters())
    training = {"model": num_bytes, "gradients": num_bytes, "optimizer": 2 * num_bytes, "step": 4 * num_bytes}

    model = create_empty_model(str(tmp_path), None)
    assert isinstance(model, LlamaForCausalLM)
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert row([str(tmp_path), "--dtypes", "float32"]) == ["float32", layer, num_bytes, training]
    half = {name: size / 2 for name, size in training.items()}
    assert row([str(tmp_path / "config.json"), "--dtypes", "bfloat16"]) == ["bfloat16", layer / 2, num_bytes / 2, half]


def test_without_a_class_it_is_the_body_as_with_accelerate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = write(tmp_path / "bert", {"model_type": "bert", "vocab_size": 28996})  # bert-base-cased
    assert row([name])[1:3] == [90669056, 433249280]  # of test_cli.py there
    for command in ("estimate", "estimate-memory"):
        assert main([command, name, "--dtypes", "float32", "int4"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"Memory usage of BertModel, loaded from `{name}`",
            "  dtype  Largest Layer  Total Size  Training using Adam",
            "float32       86.47 MB   413.18 MB              1.61 GB",
            "   int4       10.81 MB    51.65 MB                  N/A",
        ]


def test_code_beside_the_configuration_runs_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    auto = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    name = write(tmp_path / "own", {"model_type": "own", "auto_map": auto})
    (tmp_path / "own" / "own_code.py").write_text(CODE)
    with pytest.raises(ConfigError, match="--trust_remote_code"):
        row([name])
    assert row([name, "--trust_remote_code"])[2] == 4 * (8 * 4 + 4)


def test_what_is_not_trained_has_no_training() -> None:
    assert set(estimate_training_usage(100, "int8").values()) == {-1}


def refused(kind: type[Exception]) -> Any:
    error = kind.__new__(kind)

    def ask(*args: Any, **kwargs: Any) -> None:
        raise error

    return ask


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "some/model is gated: log in with `hf auth login`"),
        (RepositoryNotFoundError, "some/model is neither a directory nor a model on the Hub"),
        (
            ConnectionError,
            "the Hub cannot be asked for some/model .ConnectionError.*pass a directory, or --library_name",
        ),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_named(
    error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.model_info", refused(error))
    with pytest.raises(CheckpointNotFoundError, match=message):
        row(["some/model"])


def test_the_hub_says_which_library_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = argparse.Namespace(library_name="diffusers")
    monkeypatch.setattr("huggingface_hub.model_info", lambda *args, **kwargs: said)
    assert verify_on_hub("some/model") is said
    with pytest.raises(ConfigError, match=r"some/model is of the library diffusers; .*pass --library_name"):
        row(["some/model"])


def test_files_that_are_no_configuration_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointNotFoundError, match=r"notes.txt cannot be read .*give a directory with the config"):
        row([str(tmp_path / "notes.txt")])
    with pytest.raises(ConfigError, match=r"transformers makes no model from the configuration of .*unknown"):
        row([write(tmp_path / "unknown", {"model_type": "no-such-model"})])
    monkeypatch.setattr(estimate.importlib, "import_module", refused(ImportError))
    with pytest.raises(MissingExtraError, match="is a model of timm, which is not installed: pip install timm"):
        row([write(tmp_path / "timm", {"architecture": "resnet18"})])
