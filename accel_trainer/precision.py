"""The dtypes of a training step, and autocast of a model's forward. The strategies apply both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accel_trainer.config import MixedPrecision, OutputDtype
from accel_trainer.errors import ConfigError
from accel_trainer.tree import map_leaves, rebuild_mapping

__all__ = [
    "AutocastForward",
    "ConvertOutputsToFp32",
    "PrecisionPolicy",
    "apply_autocast",
    "build_precision",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "remove_autocast",
]


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """The dtypes of a training step."""

    compute: torch.dtype | None = None
    """Of matrix products and gathered parameters; None runs everything in the parameters' own dtype."""
    reduce: torch.dtype | None = None
    """Of gradients while they are reduced over the ranks; None means their own."""
    output: torch.dtype | None = None
    """Floating-point outputs of the model are cast to it; None leaves them."""
    loss_scaling: bool = False
    """Whether losses are scaled so that small fp16 gradients do not vanish."""
    autocast_enabled: bool = True
    """False keeps autocast off although there is a compute dtype; a strategy without autocast refuses it."""
    cache_enabled: bool | None = None
    """Whether autocast keeps the weights that it has cast until it is left; None is torch's default."""
    casts_beside_loss: bool = False
    """Whether outputs are cast, too, that come with a loss to be trained: logits that nobody asks for any more."""

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context in which operations compute in this policy's dtype."""
        if self.compute is None:
            return nullcontext()
        return torch.autocast(
            device_type, dtype=self.compute, enabled=self.autocast_enabled, cache_enabled=self.cache_enabled
        )

    def cast_outputs(self, outputs: Any) -> Any:
        """Return a model's outputs in the dtype of this policy."""
        if self.output is None:
            return outputs
        if not self.casts_beside_loss:
            if isinstance(outputs, Mapping) and _is_trained(loss := outputs.get("loss")):
                cast = cast_floating(loss, self.output)
                return outputs if cast is loss else rebuild_mapping(outputs, {**outputs, "loss": cast})
            if type(outputs) is tuple and outputs and _is_trained(outputs[0]):  # return_dict=False
                return (cast_floating(outputs[0], self.output), *outputs[1:])
        return cast_floating(outputs, self.output)


def _is_trained(loss: Any) -> bool:
    return isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad


def _supports_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return torch.backends.mps.is_available() and torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def build_precision(
    mixed_precision: str,
    device: torch.device,
    *,
    origin: str = "mixed_precision",
    output_dtype: str = OutputDtype.AUTO,
    autocast: Mapping[str, bool] | None = None,
) -> PrecisionPolicy:
    """Return the policy for `mixed_precision` on `device`.

    bf16 reduces gradients in fp32: the sum over many ranks in bf16 loses the small ones.

    Args:
        mixed_precision: "no", "bf16" or "fp16".
        origin: how the option was given, for the message.
        output_dtype: "fp32" casts the model's outputs, "kept" leaves them as computed, "auto" casts those that come
            without a loss to be trained.
        autocast: `enabled` and `cache_enabled`, where they were set.

    Raises:
        ConfigError: the device cannot honour it. Nothing is replaced by fp32 in silence.
    """
    policy = _device_precision(mixed_precision, device, origin)
    if output_dtype == OutputDtype.KEPT:
        policy = replace(policy, output=None)
    policy = replace(policy, casts_beside_loss=output_dtype == OutputDtype.FP32)
    options = autocast or {}
    return replace(policy, autocast_enabled=options.get("enabled", True), cache_enabled=options.get("cache_enabled"))


def _device_precision(mixed_precision: str, device: torch.device, origin: str) -> PrecisionPolicy:
    if mixed_precision == MixedPrecision.NO:
        return PrecisionPolicy()
    if mixed_precision == MixedPrecision.BF16:
        if not _supports_bf16(device):
            raise ConfigError(
                f"{origin}: bf16 was asked for and {device} does not support it; use 'no', or 'fp16' on a GPU"
            )
        return PrecisionPolicy(compute=torch.bfloat16, reduce=torch.float32, output=torch.float32)
    if mixed_precision == MixedPrecision.FP16:
        if device.type == "cpu":
            raise ConfigError(
                f"{origin}: fp16 was asked for on the CPU, which has no fp16 training (it would run in fp32); "
                "use 'bf16' or 'no'"
            )
        return PrecisionPolicy(compute=torch.float16, reduce=torch.float32, output=torch.float32, loss_scaling=True)
    others = "'bf16' or 'no'" if device.type == "cpu" else "'bf16', 'fp16' or 'no'"
    raise ConfigError(
        f"{origin}: '{mixed_precision}' was asked for on {device}, and this version computes in it on no device; use "
        f"{others}"
    )


class AutocastForward:
    """A model's forward under autocast, with floating-point outputs cast back.

    An instance attribute named `forward`, not a hook and not a wrapper module: it compiles with fullgraph, pickles and
    deep-copies with the model, keeps the signature that others inspect, and `del model.forward` undoes it. A forward
    that is on the instance already (of kernel libraries, or torch.compile's wrapper) is the one that runs.
    """

    def __init__(self, model: nn.Module, policy: PrecisionPolicy) -> None:
        self.model = model
        self.policy = policy
        self.inner: Callable[..., Any] | None = model.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner or functools.partial(type(self.model).forward, self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward under autocast."""
        # Looked up on each call: with device_placement=False the user moves the model after prepare().
        device_type = next((p.device.type for p in self.model.parameters()), "cpu")
        with self.policy.autocast(device_type):
            if self.inner is None:
                outputs = type(self.model).forward(self.model, *args, **kwargs)
            else:
                outputs = self.inner(*args, **kwargs)
        return self.policy.cast_outputs(outputs)


def cast_floating(data: Any, dtype: torch.dtype) -> Any:
    """Return `data` with its 16-bit floating-point tensors cast to `dtype`, and other leaves as they are."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16):
            return leaf.to(dtype)
        return leaf

    return map_leaves(cast, data, is_leaf=lambda node: isinstance(node, torch.Tensor))


def convert_to_fp32(tensor: Any) -> Any:
    """Return a structure with its fp16 and bf16 tensors cast to fp32, and other leaves as they are."""
    return cast_floating(tensor, torch.float32)


class ConvertOutputsToFp32:
    """A function, a model's forward for instance, whose fp16 and bf16 outputs are cast to fp32. Picklable as it is."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and cast."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose fp16 and bf16 outputs are cast to fp32; `__wrapped__` is the one that it calls."""
    return ConvertOutputsToFp32(model_forward)


def apply_autocast(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Run `model`'s forward under autocast from now on; does nothing when the policy computes in full precision."""
    if policy.compute is None or isinstance(model.__dict__.get("forward"), AutocastForward):
        return
    model.forward = AutocastForward(model, policy)


def remove_autocast(model: nn.Module) -> None:
    """Undo `apply_autocast`."""
    autocast = model.__dict__.get("forward")
    if isinstance(autocast, AutocastForward):
        if autocast.inner is None:
            del model.forward
        else:
            model.forward = autocast.inner
