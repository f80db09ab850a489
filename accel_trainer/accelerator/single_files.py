"""Objects in a file of their own, written once per job or node, and read as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from accel_trainer.checkpoint.weights.writing import distinct
from accel_trainer.logging import get_logger
from accel_trainer.runtime.process import ProcessContext, current_process

__all__ = ["clean_state_dict_for_safetensors", "load", "save"]

logger = get_logger(__name__)

# What pickles of arrays and of random states refer to: numbers and their types, no code of anybody's.
_SAFE_CLASSES = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType]  # type: ignore[attr-defined]


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that safetensors takes: tied tensors once, under their first name, and contiguous.

    Names that are left out are said in a warning.
    """
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    kept = distinct(tensors)
    if removed := sorted(set(tensors) - set(kept)):
        logger.warning(
            f"Removed shared tensor {removed} while saving: a tensor is written once; tie them after loading"
        )
    return {
        name: value.contiguous() if isinstance(value, Tensor) else value
        for name, value in state_dict.items()
        if name not in removed
    }


def save(
    obj: Any,
    f: str | PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
    *,
    process: ProcessContext | None = None,
) -> None:
    """Write an object to a file on rank 0; a no-op elsewhere.

    Args:
        save_on_each_node: write on the first rank of each node.
        safe_serialization: write a state dict as safetensors, by `clean_state_dict_for_safetensors`; else a pickle of
            torch's.
        process: the rank that this is; None for the process's own job.
    """
    process = process or current_process()
    if not (process.is_local_main if save_on_each_node else process.is_main):
        return
    if safe_serialization:
        save_file(clean_state_dict_for_safetensors(obj), f, metadata={"format": "pt"})  # type: ignore[arg-type]
    else:
        torch.save(obj, f)


def load(f: str | PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Return an object that `torch.load` reads, of plain data, tensors and NumPy's arrays only: no code is run.

    Args:
        **kwargs: arguments of `torch.load`; `weights_only=False` trusts the file.

    Raises:
        pickle.UnpicklingError: it holds objects of other classes.
    """
    kwargs.setdefault("weights_only", True)
    with torch.serialization.safe_globals(_SAFE_CLASSES):
        return torch.load(f, map_location=map_location, **kwargs)
