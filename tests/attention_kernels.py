"""CUDA's attention kernels on the CPU: their names, arguments and demands, computed by the kernel that a CPU has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SUMS_AT_A_TIME = 32


def _demand(*tensors: Tensor) -> None:
    """Refuse what CUDA's kernels refuse: heads that are no multiple of 8, or that do not lie one number by the next."""
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert x.shape[1] == tensors[0].shape[1]
        assert x.dtype == tensors[0].dtype


# What torch hands over behind these arguments, which the kernel of a CPU has no use for, is `unused`.


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *unused: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert query.dtype.itemsize == 2
    _demand(query, key, value)
    none = query.new_empty(0)
    attended = _forward(query, key, value, dropout_p, is_causal, scale=scale)
    return *attended, none, none, query.shape[2], key.shape[2], none, none, none


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *unused: Any,
    scale: float | None = None,
) -> Any:  # fmt: skip
    _demand(grad_out, query, key, value, out)
    return _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale=scale)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert attn_bias is None
    assert compute_log_sumexp
    assert query.dtype == torch.float32  # else flash is faster
    _demand(query, key, value)
    output, sums = _forward(query, key, value, dropout_p, is_causal, scale=scale)
    sums = nn.functional.pad(sums, (0, -sums.shape[2] % _SUMS_AT_A_TIME), value=math.inf)
    return output, sums, query.new_empty(0), query.new_empty(0)


def _efficient_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, out: Tensor,
    logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool],
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert attn_bias is None
    assert list(grad_input_mask) == [True, True, True, False]
    _demand(grad_out, query, key, value, out)
    gradients = _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale=scale)
    return *gradients, query.new_empty(0)


def register_attention_kernels() -> torch.library.Library:
    """Give the CPU CUDA's kernels, for as long as what is returned is held."""
    library = torch.library.Library("aten", "IMPL")
    for kind, kernels in {"flash": (_flash, _flash_backward), "efficient": (_efficient, _efficient_backward)}.items():
        for way, kernel in zip(("", "_backward"), kernels, strict=True):
            library.impl(f"_scaled_dot_product_{kind}_attention{way}", kernel, "CPU")
    return library
