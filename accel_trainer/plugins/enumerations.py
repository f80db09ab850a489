"""Closed sets of words as enumerations, for scripts that name or compare their members.

Each member equals its word, so that options take either. A word is tested with `in`, as in a list of words:
`"bf16" in PrecisionType`.
"""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Any

__all__ = [
    "BaseEnum",
    "ComputeEnvironment",
    "CustomDtype",
    "DynamoBackend",
    "EnumWithContains",
    "FP8BackendType",
    "LoggerType",
    "PrecisionType",
    "RNGType",
    "SageMakerDistributedType",
]


class EnumWithContains(EnumMeta):
    """Metaclass of an enumeration that is asked for words: `in` is false for what is no word of it."""

    def __contains__(cls, item: Any) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(str, Enum, metaclass=EnumWithContains):  # noqa: UP042  # str() gives the word in Python 3.11, too
    """An enumeration of words; `str` gives the word."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the words, in their order."""
        return [str(member) for member in cls]


class PrecisionType(BaseEnum):
    """Words of `mixed_precision`."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(BaseEnum):
    """Words of `log_with`."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class RNGType(BaseEnum):
    """Words of `rng_types`: streams of random numbers."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class CustomDtype(Enum):
    """Dtypes that torch does not have, by which sizes of models are counted."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class FP8BackendType(BaseEnum):
    """Packages that compute in fp8."""

    NO = "NO"
    AO = "AO"
    TE = "TE"
    MSAMP = "MSAMP"


class ComputeEnvironment(BaseEnum):
    """Places where a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(BaseEnum):
    """Kinds of distributed training that SageMaker has."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class DynamoBackend(BaseEnum):
    """Backends of `torch.compile`, in capitals."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"
