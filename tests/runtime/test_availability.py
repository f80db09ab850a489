from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.runtime import availability
from accel_trainer.runtime.availability import compare_versions, is_torch_version, torchao_required

# Packages of the tested set, and some that no test environment has.
INSTALLED = ("torch_distributed", "transformers", "datasets", "deepspeed", "numpy", "pytest", "tqdm", "pandas")
ABSENT = (
    "aim",
    "amdsmi",
    "clearml",
    "comet_ml",
    "msamp",
    "sagemaker",
    "lomo",
    "rocm",
    "npu",
    "mlu",
    "hpu",
    "torch_xla",
)


@pytest.mark.parametrize("name", INSTALLED)
def test_installed_packages_are_available(name: str):
    assert getattr(availability, f"is_{name}_available")() is True


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_not_there_is_not_available(name: str):
    assert getattr(availability, f"is_{name}_available")() is False


def test_every_question_has_a_truth_for_an_answer():
    questions = [name for name in availability.__all__ if re.match(r"is_\w+(_available|gaudi1)$", name)]
    assert len(questions) > 55
    for name in questions:
        assert isinstance(getattr(availability, name)(), bool), name
        assert inspect.getdoc(getattr(availability, name)), name


def test_nothing_is_imported_to_find_a_package():
    before = {*sys.modules}
    availability.is_matplotlib_available()
    assert "matplotlib" in before or "matplotlib" not in sys.modules


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert availability.is_wandb_available() is _has_distribution("wandb")


def _has_distribution(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_versions_are_compared_as_versions():
    assert compare_versions("torch", ">=", "2.9")  # as texts, "2.13" comes before "2.9"
    assert is_torch_version(">=", "2.11.0")
    assert not is_torch_version("<", "2.11.0")
    with pytest.raises(ConfigError, match="compared by one of >, >=, ==, !=, <=, <; got '=>'"):
        compare_versions("torch", "=>", "2.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        compare_versions("no-such-package", ">", "1")


def test_a_cpu_computes_in_bf16():
    if not torch.accelerator.is_available():
        assert availability.is_bf16_available()


def test_a_function_that_needs_torchao_says_so():
    if availability.is_torchao_available():
        assert torchao_required(lambda: 3)() == 3
        return
    with pytest.raises(MissingExtraError, match=r"needs torchao 0.6.1 or later.*pip install torchao"):
        torchao_required(lambda: 3)()
