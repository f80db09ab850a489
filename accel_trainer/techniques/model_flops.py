"""Operations that a model takes for a token, by a formula and by torch's counter, and the peak rates of devices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accel_trainer.runtime.model_wrappers import copy_with, unsharded_shape, unwrap_module
from accel_trainer.runtime.torch_names import GROUPED_MM
from accel_trainer.runtime.torch_private import fake_tensors
from accel_trainer.tree import leaves, map_leaves

_HOPPER, _ADA = "NVIDIA H100 Tensor Core GPU datasheet", "NVIDIA Ada GPU architecture whitepaper, appendix A"
_PEAKS: dict[str, tuple[float, str]] = {
    "GB200": (2500.0, "NVIDIA GB200 NVL72 datasheet, half of the figure with sparsity"),
    "B200": (2250.0, "NVIDIA Blackwell datasheet, HGX B200, half of the figure with sparsity"),
    "GH200": (989.4, "NVIDIA GH200 Grace Hopper Superchip datasheet"),
    "H200": (989.4, "NVIDIA H200 Tensor Core GPU datasheet, half of the figure with sparsity"),
    "H200 NVL": (835.5, "NVIDIA H200 Tensor Core GPU datasheet, half of the figure with sparsity"),
    "H100": (989.4, f"{_HOPPER}, SXM, half of the figure with sparsity"),
    "H100 NVL": (835.5, f"{_HOPPER}, NVL, half of the figure with sparsity"),
    "H100 PCIe": (756.5, f"{_HOPPER}, PCIe, half of the figure with sparsity"),
    "A100": (312.0, "NVIDIA A100 Tensor Core GPU datasheet"),
    "A40": (149.7, "NVIDIA A40 datasheet"),
    "A30": (165.0, "NVIDIA A30 Tensor Core GPU datasheet"),
    "A10": (125.0, "NVIDIA A10 Tensor Core GPU datasheet"),
    "L40S": (362.05, "NVIDIA L40S datasheet"),
    "L40": (181.05, "NVIDIA L40 datasheet"),
    "L4": (121.0, "NVIDIA L4 Tensor Core GPU datasheet, half of the figure with sparsity"),
    "RTX 5090": (209.5, "NVIDIA RTX Blackwell GPU architecture whitepaper, fp32 accumulation"),
    "RTX 4090": (165.2, f"{_ADA}, fp32 accumulation"),
    "RTX 3090": (71.0, "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A, fp32 accumulation"),
    "MI355X": (2516.6, "AMD Instinct MI355X GPU data sheet"),
    "MI325X": (1307.4, "AMD Instinct MI325X accelerator data sheet"),
    "MI300X": (1307.4, "AMD Instinct MI300X accelerator data sheet"),
    "MI250X": (191.5, "AMD Instinct MI250X accelerator data sheet, one of its two dies, which torch shows as a device"),
}
"""10^12 dense bf16 operations a second by the words in a device's name, and the vendor's document that says so."""
_OTHER_CHIPS = frozenset({"MIG", "Laptop", "Max", "D", "Ti"})
"""Words of names of devices that are slower or faster: a slice of a card, a chip for notebooks."""


def peak_flops_by_name(name: str) -> float | None:
    """Return the dense bf16 operations a second of a device; None for one that the table does not know."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    known = [key for key in _PEAKS if words.issuperset(key.split()) and not words & _OTHER_CHIPS]
    # The longest: an "H100 PCIe" is an "H100", too.
    return _PEAKS[max(known, key=len)][0] * 1e12 if known else None


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a device; its kind where there is none."""
    name = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


class ModelFlops(NamedTuple):
    """Operations of a forward and a backward: 2 for each multiplication in a product of matrices, and no others.

    Those of the model: what activation checkpointing computes again is not among them.
    """

    per_token: float = 0.0
    per_pair: float = 0.0
    """For each query and each key of its sequence, masked ones too: attention counts in full, as in PaLM's paper
    (12 L H Q T for a token), in torchtitan and in torch's counter."""
    per_sample: float = 0.0

    def total(self, tokens: float, pairs: float, samples: float) -> float:
        """Return the operations of batches with so many tokens, pairs of attention, and rows."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_sample * samples

    @classmethod
    def by_formula(cls, model: nn.Module) -> ModelFlops | None:
        """Return those of a transformer that reads one sequence of tokens; None for other models.

        For a token 2 for each weight that multiplies it, 2 more where the gradient of its input is needed, and 2 where
        it is trained itself: 6 N of a model that is trained, 4 N of one that is frozen below LoRA's weights. Of the
        experts of a mixture those count that a token is sent to.
        """
        config = getattr(model, "config", None)
        attentions = {id(module) for module in model.modules() if _is_attention(module)}
        if not _is_one_stack(config, len(attentions)):
            return None
        per_token = per_pair = 0.0
        is_reached = False  # whether a weight that comes before is trained: gradients flow back to it
        for module in model.modules():
            if id(module) in attentions:
                flows = is_reached or any(parameter.requires_grad for parameter in module.parameters())
                per_pair += 2 * _head_sizes(module, config) * (3 if flows else 1)
            own = _flops_of_weights(module, config, is_reached)
            if own is None:
                return None
            per_token += own
            is_reached |= any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        return cls(per_token, per_pair)


def _is_one_stack(config: Any, num_attentions: int) -> bool:
    """Whether a configuration of transformers is that of layers with one attention each, and of nothing else."""
    if not getattr(config, "hidden_size", None) or not getattr(config, "num_attention_heads", None):
        return False
    return num_attentions == config.num_hidden_layers and not getattr(config, "is_encoder_decoder", False)


def _is_attention(module: nn.Module) -> bool:
    """Whether a module computes attention itself: the innermost ones that are called so."""
    called = [inner for inner in module.modules() if type(inner).__name__.endswith("Attention")]
    return called == [module]


def _head_sizes(attention: Any, config: Any) -> int:
    """Return the numbers of all heads' queries and values together; latent attention has two sizes."""
    usual = getattr(attention, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query = getattr(attention, "qk_head_dim", None) or usual
    return int(config.num_attention_heads * (query + (getattr(attention, "v_head_dim", None) or query)))


def _flops_of_weights(module: nn.Module, config: Any, is_reached: bool) -> float | None:
    """Return the operations of a module's own weights for a token; None where that is not known."""
    if isinstance(module, nn.Embedding):
        return 0.0
    total = 0.0
    for parameter in module.parameters(recurse=False):
        weights = _num_multiplying(module, parameter, config)
        if weights is None:
            return None
        total += 2 * weights * (1 + is_reached + parameter.requires_grad)
    return total


def _num_multiplying(module: Any, parameter: Tensor, config: Any) -> float | None:
    """Return how many numbers of a parameter multiply a token; None where that is not known."""
    shape = unsharded_shape(parameter)
    if isinstance(module, nn.Linear) and parameter is module.weight:
        return float(module.in_features * module.out_features)  # a quantized one's tensor has another shape
    if len(shape) < 3:
        return float(torch.Size(shape).numel()) if len(shape) == 2 else 0.0
    chosen = getattr(config, "num_experts_per_tok", None)  # of a mixture, whose experts stand in one tensor
    return None if chosen is None or len(shape) > 3 else chosen * float(shape[1] * shape[2])


def copy_shapes(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device, in bf16, without hooks, decorated forwards and checkpointing of activations.

    For torch's counter, which sees matrix products: attention is transformers' eager one, whose backward computes
    nothing again, and a mixture's experts are multiplied in groups, which asks for no values.
    """
    tensors: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty(unsharded_shape(tensor), dtype=dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        tensors[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    copied = copy_with(unwrap_module(model), tensors)
    for module in copied.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False  # type: ignore[assignment]
        for name, choice in (("set_attn_implementation", "eager"), ("set_experts_implementation", "grouped_mm")):
            if callable(method := getattr(module, name, None)):
                with suppress(ValueError, RuntimeError):  # it has one implementation only
                    method(choice)
    return copied


def count_flops(copied: nn.Module, batch: Any) -> int:
    """Return the operations that torch's `FlopCounterMode` counts in a forward and backward of a copy by `copy_shapes`.

    Args:
        batch: keyword arguments of the model, or a tensor, which may come first in a sequence; its shapes count.
    """
    from torch.utils.flop_counter import FlopCounterMode

    grouped = dict.fromkeys(_grouped_products(), _grouped_flops)
    # Of a device that computes, whose values nobody has: models of transformers then ask for none.
    with fake_tensors(), FlopCounterMode(display=False, custom_mapping=grouped) as counter:
        copied.to_empty(device="cpu")
        inputs = map_leaves(_without_values, dict(batch) if isinstance(batch, Mapping) else batch)
        inputs = inputs[0] if isinstance(inputs, list | tuple) else inputs
        outputs = copied(**inputs) if isinstance(inputs, dict) else copied(inputs)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        floating = (leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        (next(floating).mean() if loss is None else loss).backward()
    return int(counter.get_total_flops())


def _without_values(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=torch.bfloat16 if leaf.is_floating_point() else leaf.dtype)


def _grouped_products() -> Iterator[Any]:
    for space, name in (("aten", GROUPED_MM), ("transformers", "grouped_mm_fallback")):
        with suppress(AttributeError):  # a release of torch or of transformers without it
            yield getattr(getattr(torch.ops, space), name)


def _grouped_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the operations of rows, each times one of several matrices."""
    return 2 * int(torch.Size(left).numel()) * int(right[-1])
