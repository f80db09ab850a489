"""What scripts ask of their environment: packages, versions, devices, this machine, and variables."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import platform
import re
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel_trainer import Accelerator
from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.runtime import availability
from accel_trainer.runtime.availability import (
    are_libraries_initialized,
    clear_environment,
    compare_versions,
    convert_dict_to_env_variables,
    get_int_from_env,
    is_torch_version,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
    torchao_required,
)

# Packages of the tested set, and some that no test environment has.
INSTALLED = "torch_distributed transformers datasets deepspeed numpy pytest tqdm pandas"
ABSENT = "aim amdsmi clearml comet_ml msamp sagemaker lomo rocm npu mlu hpu torch_xla"


@pytest.mark.parametrize(
    ("name", "is_there"), [*((name, True) for name in INSTALLED.split()), *((name, False) for name in ABSENT.split())]
)
def test_a_package_or_device_is_available_where_it_is_there(name: str, is_there: bool):
    assert getattr(availability, f"is_{name}_available")() is is_there


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
    assert availability.is_wandb_available() is any(importlib.metadata.distributions(name="wandb"))


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


def test_fp16_is_available_where_it_is_not_refused(monkeypatch: pytest.MonkeyPatch):
    assert availability.is_fp16_available() is torch.accelerator.is_available()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert not availability.is_fp16_available()
    with pytest.raises(ConfigError, match="fp16 was asked for on the CPU, which has no fp16 training"):
        Accelerator(cpu=True, mixed_precision="fp16")


def test_a_function_that_needs_torchao_says_so():
    if availability.is_torchao_available():
        assert torchao_required(lambda: 3)() == 3
        return
    with pytest.raises(MissingExtraError, match=r"needs torchao 0.6.1 or later.*pip install torchao"):
        torchao_required(lambda: 3)()


SMI = """#!/bin/sh
case "$1" in
  *compute_capability*) echo {capability} ;;
  *driver_version*) printf '{driver}\\n{driver}\\n' ;;
  *) printf '2, {name}\\n2, {name}\\n' ;;
esac
"""


def plant(directory: Path, monkeypatch: pytest.MonkeyPatch, **facts: str) -> None:
    """Put an nvidia-smi that tells these facts first on the path."""
    program = directory / "nvidia-smi"
    program.write_text(SMI.format(**{"name": "H100", "driver": "535.1.1", "capability": "9.0", **facts}))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_counted_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plant(tmp_path, monkeypatch)
    assert availability.get_gpu_info() == (["H100", "H100"], 2)
    assert availability.get_driver_version() == "535.1.1"
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("name", "driver", "expected"),
    [("RTX 4090", "535.1.1", False), ("RTX 4090", "550.40.07", True), ("H100", "535.1.1", True)],
)
def test_cards_whose_driver_refuses_peers(
    name: str, driver: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plant(tmp_path, monkeypatch, name=name, driver=driver)
    assert availability.check_cuda_p2p_ib_support() is expected


def test_peers_may_send_where_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert availability.check_cuda_p2p_ib_support()


@pytest.mark.parametrize(("capability", "expected"), [("8.6", False), ("8.9", True), ("10.0", True)])
def test_fp8_needs_the_cores_for_it(capability: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plant(tmp_path, monkeypatch, capability=capability)
    availability.check_cuda_fp8_capability.cache_clear()
    assert availability.check_cuda_fp8_capability() is expected
    availability.check_cuda_fp8_capability.cache_clear()


@pytest.mark.parametrize(
    ("system", "release", "warns"),
    [("Linux", "5.4.0-35-generic", True), ("Linux", "5.15.0-35-generic", False), ("Darwin", "5.4.0", False)],
)
def test_an_old_kernel_is_named(
    system: str, release: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(platform, "uname", lambda: SimpleNamespace(system=system, release=release))
    availability.check_os_kernel()
    assert ("Linux 5.4.0 may hang" in caplog.text and "5.5.0 or later" in caplog.text) is warns


@pytest.mark.parametrize("prefix", ["OMPI_COMM_WORLD", "MV2_COMM_WORLD"])
def test_the_place_in_an_mpi_job(prefix: str):
    with patch_environment(
        **{f"{prefix}_RANK": 3, f"{prefix}_SIZE": 4, f"{prefix}_LOCAL_RANK": 1, f"{prefix}_LOCAL_SIZE": 2}
    ):
        assert availability.get_cpu_distributed_information() == availability.CPUInformation(3, 4, 1, 2)
    assert availability.get_cpu_distributed_information() == availability.CPUInformation()


def test_a_machine_without_plugged_in_devices_is_taken_for_one_of_nvidias():
    if not torch.accelerator.is_available():
        assert availability.get_current_device_type() == ("cuda", "MULTI_GPU")
        assert availability.set_numa_affinity(0) is None


def test_words_of_truth():
    assert [str_to_bool(word) for word in ("Yes", "on", "1", "n", "FALSE")] == [1, 1, 1, 0, 0]
    assert str_to_bool("true", to_bool=True) is True
    with pytest.raises(ConfigError, match="invalid truth value 'maybe'; expected one of y, yes"):
        str_to_bool("maybe")


def test_a_block_changes_variables_and_puts_them_back():
    with patch_environment(outer=1, Both="a"):
        with pytest.raises(KeyError, match=r"1b2.*no such variable"), patch_environment(both="b", inner=2):
            raise KeyError(os.environ["OUTER"] + os.environ["BOTH"] + os.environ["INNER"], "no such variable")
        assert os.environ["BOTH"] == "a"
        assert "INNER" not in os.environ
        assert parse_flag_from_env("OUTER")
        assert parse_choice_from_env("BOTH") == "a"
        assert get_int_from_env(["INNER", "OUTER"], 7) == 1
    assert "OUTER" not in os.environ
    assert not parse_flag_from_env("OUTER")
    assert parse_choice_from_env("BOTH") == "no"
    assert get_int_from_env(["INNER", "OUTER"], 7) == 7


def test_a_block_without_an_environment_gets_it_back():
    before = dict(os.environ)
    with clear_environment():
        assert not os.environ
        os.environ["LEFT_BEHIND"] = "1"
    assert dict(os.environ) == before


def test_a_purged_function_leaves_launchers_variables_as_they_were():
    @purge_accelerate_environment
    def change() -> None:
        os.environ["ACCELERATE_GIVEN"] = "changed"
        os.environ["ACCEL_TRAINER_NEW"] = "1"
        del os.environ["ACCELERATE_TAKEN"]

    with patch_environment(accelerate_given="1", accelerate_taken="2"):
        change()
        assert (os.environ["ACCELERATE_GIVEN"], os.environ["ACCELERATE_TAKEN"]) == ("1", "2")
        assert "ACCEL_TRAINER_NEW" not in os.environ


@pytest.mark.parametrize("base", [unittest.TestCase, object])
def test_a_purged_class_restores_after_each_test_of_its_subclasses_too(base: type):
    @purge_accelerate_environment
    class Tests(base):  # type: ignore[misc]
        def test_sets(self) -> None:
            os.environ["ACCELERATE_SET"] = "1"

        def helper(self) -> None:
            os.environ["ACCELERATE_KEPT"] = "1"

    class MoreTests(Tests):
        def test_more(self) -> None:
            os.environ["ACCELERATE_SET"] = "2"

    with patch_environment(accelerate_kept="0"):
        for name in ("test_sets", "test_more", "helper"):
            getattr(MoreTests(*(("test_more",) if base is unittest.TestCase else ())), name)()
            assert "ACCELERATE_SET" not in os.environ
        assert os.environ["ACCELERATE_KEPT"] == "1"


def test_lines_for_a_host_file(caplog: pytest.LogCaptureFixture):
    assert convert_dict_to_env_variables({"A": "1", "BAD": "<x", "EMPTY": "", "B": "2"}) == ["A=1\n", "B=2\n"]
    assert "BAD=<x is left out" in caplog.text
    assert "EMPTY= is left out" in caplog.text


def test_libraries_that_are_imported():
    assert are_libraries_initialized("sys", "no_such_library") == ["sys"]
    assert "sys" in sys.modules
