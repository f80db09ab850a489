from __future__ import annotations

import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel_trainer.runtime import availability
from accel_trainer.runtime.availability import patch_environment

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
