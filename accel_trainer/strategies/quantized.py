"""Models whose frozen weights bitsandbytes has quantised, to train adapters on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_trainer.errors import ConfigError

_CPU_PACKING = "support_avx512bf16_for_cpu"


def keep_gradients(model: nn.Module, device: torch.device) -> None:
    """Have 4-bit layers on a CPU keep the layout that gradients pass through."""
    # On a CPU with AVX512-BF16 bitsandbytes (0.50.2, nn/modules.py:605) packs their weights anew in the first
    # evaluation, and all that is trained after it, in plain PyTorch too, gets gradients of zero without a word.
    if device.type != "cpu":
        return
    for module in model.modules():
        if getattr(module, _CPU_PACKING, False):
            setattr(module, _CPU_PACKING, False)
            module.state_dict()  # unpacks those of an evaluation before


def keep_scales(model: nn.Module) -> None:
    """Have states of a sharded model hold the scales of 4-bit layers, as those of any other do."""
    # bitsandbytes writes what it finds at the parameter, and sharding has replaced that; the layer has it, too.
    for module in model.modules():
        scales: Any = getattr(module, "quant_state", None)
        if scales is None:  # asked for first: the weight of a parametrization is computed
            continue
        weight: Any = getattr(module, "weight", None)
        if weight is not None:
            weight.quant_state = scales


def refuse_8bit_shards(model: nn.Module) -> None:
    """Refuse 8-bit weights, whose scales are attributes of the parameters that sharding replaces."""
    name = next((name for name, p in model.named_parameters() if type(p).__name__ == "Int8Params"), None)
    if name is not None:
        raise ConfigError(
            f"{name!r} of {type(model).__name__} is an 8-bit parameter of bitsandbytes, which FSDP2 cannot shard: its "
            "scales would be lost. Load the model with load_in_4bit=True, or use strategy 'ddp' or DeepSpeed"
        )
