"""Whole parameters of a model that is built or held in pieces, for the length of a block."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from accel_trainer.errors import ConfigError

__all__ = ["GatheredParameters"]


def GatheredParameters(  # the name that users of DeepSpeed know
    params: Iterable[Tensor] | Tensor, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Return the context in which parameters that ZeRO-3 has partitioned are whole; an empty one for all others.

    Collective for partitioned parameters: every rank enters it with the same ones.

    Args:
        params: one parameter, or several.
        modifier_rank: the rank whose changes in the block hold for all; None where nothing is changed.
        fwd_module: a module that uses the parameters without holding them; see `deepspeed.zero.GatheredParameters`.
        enabled: false leaves the parameters as they are.

    Raises:
        ConfigError: parameters are FSDP2's, which are whole in `parameter.full_tensor()`.
    """
    given = [params] if isinstance(params, Tensor) else list(params)
    if enabled and any(hasattr(parameter, "full_tensor") for parameter in given):
        raise ConfigError(
            "GatheredParameters() was given parameters that FSDP2 has sharded, and puts together those of DeepSpeed; "
            "use parameter.full_tensor(), or accelerator.get_state_dict(model)"
        )
    if not enabled or not any(hasattr(parameter, "ds_id") for parameter in given):
        return nullcontext()
    # Who has partitioned them is imported.
    context: AbstractContextManager[Any] = sys.modules["deepspeed"].zero.GatheredParameters(
        given, modifier_rank=modifier_rank, fwd_module=fwd_module
    )
    return context
