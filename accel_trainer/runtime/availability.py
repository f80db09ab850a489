"""Facts about this environment that scripts ask for: installed packages, devices, cores, environment variables.

A package is available when its files and its metadata are found; nothing is imported. A device is available when one is
there, not when torch was built for its kind. Users of accelerate import these names; the package needs few of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import operator
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from packaging.version import Version, parse

from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.logging import get_logger

__all__ = [
    "STR_OPERATION_TO_FUNC", "CPUInformation", "are_libraries_initialized", "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support", "check_os_kernel", "clear_environment", "compare_versions",
    "convert_dict_to_env_variables", "get_cpu_distributed_information", "get_current_device_type",
    "get_driver_version", "get_gpu_info", "get_int_from_env", "is_4bit_bnb_available", "is_8bit_bnb_available",
    "is_aim_available", "is_amdsmi_available", "is_bf16_available", "is_bitsandbytes_multi_backend_available",
    "is_bnb_available", "is_boto3_available", "is_clearml_available", "is_comet_ml_available", "is_cuda_available",
    "is_datasets_available", "is_deepspeed_available", "is_dvclive_available", "is_fp8_available",
    "is_fp16_available", "is_habana_gaudi1", "is_hpu_available", "is_import_timer_available", "is_lomo_available",
    "is_matplotlib_available", "is_megatron_lm_available", "is_mlflow_available", "is_mlu_available",
    "is_mps_available", "is_msamp_available", "is_musa_available", "is_neuron_available", "is_npu_available",
    "is_numpy_available", "is_pandas_available", "is_peft_available", "is_pippy_available", "is_pynvml_available",
    "is_pytest_available", "is_rich_available", "is_rocm_available", "is_sagemaker_available",
    "is_schedulefree_available", "is_sdaa_available", "is_swanlab_available", "is_tensorboard_available",
    "is_timm_available", "is_torch_distributed_available", "is_torch_version", "is_torch_xla_available",
    "is_torchao_available", "is_torchdata_available", "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available", "is_tqdm_available", "is_trackio_available", "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available", "is_transformers_available", "is_triton_available", "is_wandb_available",
    "is_weights_only_available", "is_xccl_available", "is_xpu_available", "override_numa_affinity",
    "parse_choice_from_env", "parse_flag_from_env", "patch_environment", "purge_accelerate_environment",
    "set_numa_affinity", "str_to_bool", "torchao_required",
]  # fmt: skip

logger = get_logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

STR_OPERATION_TO_FUNC: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
"""Comparisons of versions by their sign."""

_PLUGIN_DEVICES = ("mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron")
# NVIDIA's driver refuses peer-to-peer transfers between cards of this series before this version, and NCCL hangs.
_NO_PEER_TRANSFERS = "RTX 40"
_PEER_TRANSFERS_SINCE = "550.40.07"
# Kernels before it hang in a torch DataLoader's workers (https://github.com/huggingface/accelerate/issues/1929).
_OLDEST_KERNEL = "5.5.0"
_FP8_CAPABILITY = (8, 9)  # Ada Lovelace: the first with fp8 tensor cores
_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
_PREFIXES = ("ACCELERATE_", "ACCEL_TRAINER_")
_FORBIDDEN = frozenset(";\n<> ")


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return whether a version, or that of an installed package of this name, stands in a relation to another one.

    Raises:
        ConfigError: another word than one of the six signs.
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigError(f"versions are compared by one of {', '.join(STR_OPERATION_TO_FUNC)}; got {operation!r}")
    if isinstance(library_or_version, str):
        library_or_version = parse(importlib.metadata.version(library_or_version))
    return STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether the running torch stands in a relation to a version; see `compare_versions`."""
    return compare_versions(Version(torch.__version__), operation, version)


def _is_installed(package: str, *distributions: str, at_least: str | None = None) -> bool:
    """Whether a package is there, and not only a folder of its name: one of its distributions has metadata."""
    try:
        if importlib.util.find_spec(package) is None:
            return False
    except (ImportError, ValueError):  # a parent that is missing; a stand-in in sys.modules without a spec
        return False
    for distribution in distributions or (package,):
        try:
            found = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return at_least is None or parse(found) >= parse(at_least)
    return False


def _has_device(kind: str) -> bool:
    """Whether torch, or the plug-in that it loaded at import, finds a device of a kind."""
    backend = getattr(torch, kind, None)
    return backend is not None and bool(backend.is_available())


def _asks_package(package: str, *distributions: str, at_least: str | None = None) -> Callable[[], bool]:
    """Return the question whether a package is installed; see `_is_installed`."""

    def is_available() -> bool:
        return _is_installed(package, *distributions, at_least=at_least)

    found = f"{package}{f' {at_least} or later' if at_least else ''}"
    is_available.__doc__ = f"Return whether {found} is installed."
    return is_available


def _asks_device(kind: str, maker: str) -> Callable[..., bool]:
    """Return the question whether there is a device; options such as `check_device` change nothing."""

    def is_available(*args: bool, **options: bool) -> bool:
        return _has_device(kind)

    is_available.__doc__ = f"Return whether there is a device of {maker}. It is looked for, whatever is passed."
    return is_available


def _answers(answer: bool, reason: str) -> Callable[..., bool]:
    """Return a question that has one answer here, whatever is installed and asked."""

    def is_available(*args: bool, **options: bool) -> bool:
        return answer

    is_available.__doc__ = f"Return {answer}: {reason}."
    return is_available


# One line a package: what is imported, the distributions that bring it where those have other names, the oldest.
is_import_timer_available = _asks_package("import_timer")
is_pynvml_available = _asks_package("pynvml", "nvidia-ml-py", "pynvml")
is_amdsmi_available = _asks_package("amdsmi")
is_pytest_available = _asks_package("pytest")
is_msamp_available = _asks_package("msamp", "ms-amp")
is_schedulefree_available = _asks_package("schedulefree")
is_lomo_available = _asks_package("lomo_optim", "lomo-optim")
is_torchao_available = _asks_package("torchao", at_least="0.6.1")
is_deepspeed_available = _asks_package("deepspeed")
is_torchvision_available = _asks_package("torchvision")
is_transformers_available = _asks_package("transformers")
is_datasets_available = _asks_package("datasets")
is_peft_available = _asks_package("peft")
is_timm_available = _asks_package("timm")
is_triton_available = _asks_package(
    "triton", "triton", "triton-xpu", "pytorch-triton", "pytorch-triton-xpu", "pytorch-triton-rocm"
)
is_wandb_available = _asks_package("wandb")
is_comet_ml_available = _asks_package("comet_ml", "comet-ml")
is_swanlab_available = _asks_package("swanlab")
is_trackio_available = _asks_package("trackio")
is_clearml_available = _asks_package("clearml")
is_dvclive_available = _asks_package("dvclive")
is_mlflow_available = _asks_package("mlflow", "mlflow", "mlflow-skinny")
is_boto3_available = _asks_package("boto3")
is_sagemaker_available = _asks_package("sagemaker")
is_tqdm_available = _asks_package("tqdm")
is_pandas_available = _asks_package("pandas")
is_matplotlib_available = _asks_package("matplotlib")
is_torchdata_available = _asks_package("torchdata")
is_torchdata_stateful_dataloader_available = _asks_package("torchdata", at_least="0.8.0")
is_4bit_bnb_available = _asks_package("bitsandbytes", at_least="0.39.0")
is_8bit_bnb_available = _asks_package("bitsandbytes", at_least="0.37.2")

is_mlu_available = _asks_device("mlu", "Cambricon")
is_musa_available = _asks_device("musa", "Moore Threads")
is_npu_available = _asks_device("npu", "Ascend")
is_sdaa_available = _asks_device("sdaa", "Tecorigin")
is_xpu_available = _asks_device("xpu", "Intel")
is_neuron_available = _asks_device("neuron", "AWS")
is_hpu_available = _asks_device("hpu", "Gaudi")

is_torch_distributed_available = torch.distributed.is_available
is_weights_only_available = _answers(True, "every supported torch loads with `weights_only` and a list of safe classes")
is_pippy_available = _answers(True, "every supported torch has `torch.distributed.pipelining`")
is_megatron_lm_available = _answers(False, "Megatron-LM is not offered, installed or not")
is_rich_available = _answers(False, "tracebacks are not coloured here, and nothing reads ACCELERATE_ENABLE_RICH")
is_habana_gaudi1 = _answers(False, "the first Gaudi is not supported by any torch that is supported here")
is_torch_xla_available = _answers(False, "torch_xla is not offered, installed or not")


def is_fp16_available() -> bool:
    """Return whether there is an accelerator: every one trains in fp16, and the CPU does not."""
    return torch.accelerator.is_available()


def is_xccl_available() -> bool:
    """Return whether torch communicates by XCCL, Intel's collectives."""
    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether NumPy of a version, or a later one, is installed."""
    return _is_installed("numpy", at_least=min_version)


def is_transformer_engine_available() -> bool:
    """Return whether TransformerEngine, or Intel's on Gaudi, is installed."""
    if is_hpu_available():
        return _is_installed("intel_transformer_engine", "intel-transformer-engine")
    return _is_installed("transformer_engine", "transformer-engine")


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether TransformerEngine is installed and finds a device that computes in mxfp8."""
    if not _is_installed("transformer_engine", "transformer-engine"):
        return False
    from transformer_engine.pytorch.fp8 import check_mxfp8_support  # type: ignore[import-not-found]

    return bool(check_mxfp8_support()[0])


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes, of a version or a later one, is installed."""
    return _is_installed("bitsandbytes", at_least=min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether the installed bitsandbytes works on other devices than CUDA's."""
    if not is_bnb_available():
        return False
    import bitsandbytes  # type: ignore[import-not-found]

    return "multi_backend" in getattr(bitsandbytes, "features", set())


def is_aim_available() -> bool:
    """Return whether Aim before release 4, whose interface is another one, is installed."""
    return _is_installed("aim") and compare_versions("aim", "<", "4.0.0")


def is_tensorboard_available() -> bool:
    """Return whether tensorboard or tensorboardX is installed."""
    return _is_installed("tensorboard") or _is_installed("tensorboardX")


def is_cuda_available() -> bool:
    """Return whether there is a CUDA or ROCm device. Asks the driver's library, so that a fork afterwards is safe.

    Source: `PYTORCH_NVML_BASED_CUDA_CHECK` of torch.cuda.
    """
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK=1):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Return whether there is a ROCm device."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether there is an Apple GPU, and torch is of a version or a later one."""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this machine's device computes in bf16; a CPU always does, if slowly."""
    if is_cuda_available():
        return torch.cuda.is_bf16_supported()
    if is_mlu_available():
        return bool(torch.mlu.is_bf16_supported())  # type: ignore[attr-defined]
    if is_xpu_available():
        return torch.xpu.is_bf16_supported()
    return torch.backends.mps.is_macos_or_newer(14, 0) if is_mps_available() else True


def is_fp8_available() -> bool:
    """Return whether a package for training in fp8 is installed: MS-AMP, TransformerEngine or torchao."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def torchao_required(func: F) -> F:
    """Decorate a function so that it raises MissingExtraError where torchao is not installed."""

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_torchao_available():
            raise MissingExtraError(
                f"{func.__name__}() needs torchao 0.6.1 or later, which is not installed: pip install torchao"
            )
        return func(*args, **kwargs)

    return run  # type: ignore[return-value]


# --- this machine, asked without starting a device --------------------------------------------------------------------


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of this machine's devices and its `DistributedType`; starts nothing, so that forks are safe."""
    kind = next(filter(_has_device, _PLUGIN_DEVICES), None)
    return ("cuda", "MULTI_GPU") if kind is None else (kind, f"MULTI_{kind.upper()}")


def get_gpu_info() -> tuple[list[str], int]:
    """Return names and number of NVIDIA's GPUs by nvidia-smi, whose OSError or CalledProcessError is raised."""
    names = [line.split(",")[1].strip() for line in _ask_nvidia("count,name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver, that of the first GPU. CUDA is not started; see `get_gpu_info`."""
    return _ask_nvidia("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the GPUs of this machine may send to each other directly; True where that cannot be known."""
    try:
        names, count = get_gpu_info()
        if count < 2 or not any(_NO_PEER_TRANSFERS in name for name in names):
            return True
        return parse(get_driver_version()) >= parse(_PEER_TRANSFERS_SINCE)
    except (OSError, subprocess.CalledProcessError):
        return True


@functools.lru_cache
def check_cuda_fp8_capability() -> bool:
    """Return whether the first GPU has fp8 tensor cores. Starts CUDA where nvidia-smi does not answer."""
    try:
        capability = tuple(map(int, _ask_nvidia("compute_capability")[0].split(".")))
    except (OSError, subprocess.CalledProcessError):
        if not torch.cuda.is_available():
            return False
        capability = torch.cuda.get_device_capability()
    return capability >= _FP8_CAPABILITY


def _ask_nvidia(fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()


def check_os_kernel() -> None:
    """Warn on a Linux whose kernel lets the workers of a DataLoader hang."""
    system = platform.uname()
    release = system.release.split("-")[0]
    if system.system == "Linux" and parse(release) < parse(_OLDEST_KERNEL):
        logger.warning(
            f"Linux {release} may hang in the workers of a DataLoader; upgrade the kernel to {_OLDEST_KERNEL} or later"
        )


@dataclass
class CPUInformation:
    """This process's place in a job, as MPI or torchrun says it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return this process's place in a job from the variables of torchrun, PMI, Open MPI or MVAPICH."""
    mpi = ("OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    return CPUInformation(
        rank=get_int_from_env(["RANK", "PMI_RANK", *(f"{name}_RANK" for name in mpi)], 0),
        world_size=get_int_from_env(["WORLD_SIZE", "PMI_SIZE", *(f"{name}_SIZE" for name in mpi)], 1),
        local_rank=get_int_from_env(["LOCAL_RANK", "MPI_LOCALRANKID", *(f"{name}_LOCAL_RANK" for name in mpi)], 0),
        local_world_size=get_int_from_env(
            ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", *(f"{name}_LOCAL_SIZE" for name in mpi)], 1
        ),
    )


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores next to one of NVIDIA's GPUs; nothing on a machine without one.

    Args:
        local_process_index: index of the GPU, in the driver's order.
        verbose: log the cores; when None, `ACCELERATE_DEBUG_MODE` decides.

    Raises:
        MissingExtraError: nvidia-ml-py is not installed.
    """
    if not torch.cuda.is_available():
        return
    if not is_pynvml_available():
        raise MissingExtraError("cores near a GPU are found through nvidia-ml-py: pip install nvidia-ml-py")
    import pynvml  # type: ignore[import-not-found]

    pynvml.nvmlInit()
    words = pynvml.nvmlDeviceGetCpuAffinity(
        pynvml.nvmlDeviceGetHandleByIndex(local_process_index), -(-(os.cpu_count() or 1) // 64)
    )
    cores = {64 * index + bit for index, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    os.sched_setaffinity(0, cores)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        logger.log(logging.INFO, f"local rank {local_process_index} runs on cores {sorted(cores)}")


@functools.lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process as `override_numa_affinity` does, once: later calls do nothing."""
    override_numa_affinity(local_process_index, verbose)


# --- environment variables --------------------------------------------------------------------------------------------


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 or 0 for a word of truth, True or False with `to_bool`; a ConfigError for another word."""
    word = value.lower()
    if word not in _TRUE + _FALSE:
        raise ConfigError(f"invalid truth value {value!r}; expected one of {', '.join(_TRUE + _FALSE)}")
    return word in _TRUE if to_bool else int(word in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the truth of a variable, or `default` where it is not set; a ConfigError for no word of truth."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of a variable, or `default` where it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first value of these variables that is 0 or more, or `default`."""
    values = (int(os.environ.get(key, -1)) for key in env_keys)
    return next((value for value in values if value >= 0), default)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the names that this process has imported."""
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return lines `NAME=value` for a host file; a value that would break one is left out with a warning."""
    lines = []
    for name, value in current_env.items():
        if name and value and not _FORBIDDEN.intersection(name + value):
            lines.append(f"{name}={value}\n")
        else:
            logger.warning("%s=%s is left out: it is empty, or holds a character of %r", name, value, ";\\n<> ")
    return lines


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables for a block, and put them back as they were behind it. Names are written in capitals."""
    changed = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        set_variables(before)


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment for a block, and put it back as it was behind it."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a test, or all of a class and its subclasses, so that ACCELERATE_* and ACCEL_TRAINER_* are restored."""
    if not isinstance(func_or_cls, type):
        return _purge_after(func_or_cls)
    _purge_after_tests(func_or_cls)
    inherited = func_or_cls.__init_subclass__

    def decorate_subclass(cls: type, **options: Any) -> None:
        inherited(**options)
        _purge_after_tests(cls)

    func_or_cls.__init_subclass__ = classmethod(decorate_subclass)  # type: ignore[assignment]
    return func_or_cls


def _purge_after_tests(tests: type) -> None:
    for name in dir(tests):
        method = getattr(tests, name)
        if name.startswith("test") and callable(method) and not hasattr(method, "_purges_environment"):
            setattr(tests, name, _purge_after(method))


def _purge_after(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
        try:
            return function(*args, **kwargs)
        finally:
            set_variables({name: before.get(name) for name in {*os.environ, *before} if name.startswith(_PREFIXES)})

    run._purges_environment = True  # type: ignore[attr-defined]
    return run


def set_variables(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process, or remove those that are None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
