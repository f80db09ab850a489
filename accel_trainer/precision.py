"""The dtypes of a training step, and autocast of a model's forward. The strategies apply both."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accel_trainer.config import Fp8Config, MixedPrecision, OutputDtype
from accel_trainer.errors import MISSING_TORCHAO, ConfigError, MissingExtraError
from accel_trainer.logging import get_logger
from accel_trainer.runtime.model_wrappers import ReplacedForward
from accel_trainer.tree import map_leaves, rebuild_mapping

__all__ = [
    "AutocastForward", "ConvertOutputsToFp32", "Float8Recipe", "ModuleFilter", "PrecisionPolicy", "apply_autocast",
    "apply_float8", "build_precision", "convert_model_to_fp8_ao", "convert_outputs_to_fp32", "convert_to_fp32",
    "filter_linear_layers", "find_first_last_linear_layers", "has_ao_layers", "remove_autocast",
]  # fmt: skip

logger = get_logger(__name__)

_HALF = (torch.float16, torch.bfloat16)

ModuleFilter = Callable[[nn.Module, str], bool]
"""Whether a module of a name computes in fp8."""


@dataclass(frozen=True, slots=True)
class Float8Recipe:
    """Which linear layers compute in fp8, and how."""

    config: Any
    """torchao's Float8LinearConfig."""
    module_filter: ModuleFilter | None = None
    """None leaves out the first and the last linear layer, and those whose sizes are no multiples of 16."""

    @classmethod
    def build(cls, options: Fp8Config, given: Any = None, module_filter: ModuleFilter | None = None) -> Float8Recipe:
        """Return the recipe of the options, or the Float8LinearConfig given; MissingExtraError without torchao."""
        config_class = _torchao().Float8LinearConfig
        config = given or config_class(
            enable_fsdp_float8_all_gather=options.enable_fsdp_float8_all_gather,
            pad_inner_dim=options.pad_inner_dim,
            emulate=options.emulate,
        )
        return cls(config, module_filter)


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
    float8: Float8Recipe | None = None
    """Linear layers that compute in fp8 where the others do in `compute`."""

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context in which operations compute in this policy's dtype."""
        if not self.autocast_enabled:
            return torch.autocast(device_type, enabled=False)
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
    float8: Float8Recipe | None = None,
) -> PrecisionPolicy:
    """Return the policy for `mixed_precision` on `device`.

    bf16 reduces gradients in fp32: the sum over many ranks in bf16 loses the small ones.

    Args:
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        origin: how the option was given, for the message.
        output_dtype: "fp32" casts the model's outputs, "kept" leaves them as computed, "auto" casts those that come
            without a loss to be trained.
        autocast: `enabled` and `cache_enabled`, where they were set.
        float8: the recipe of fp8.

    Raises:
        MissingExtraError: fp8 was asked for, and torchao is not installed.
        ConfigError: the device cannot honour it. Nothing is replaced by fp32 in silence.
    """
    if mixed_precision == MixedPrecision.FP8:
        recipe = float8 or Float8Recipe.build(Fp8Config())
        if not recipe.config.emulate:
            _require_fp8(device, origin)
        policy = replace(_device_precision(MixedPrecision.BF16, device, origin), float8=recipe)
    else:
        policy = _device_precision(mixed_precision, device, origin)
    if output_dtype == OutputDtype.KEPT:
        policy = replace(policy, output=None)
    policy = replace(policy, casts_beside_loss=output_dtype == OutputDtype.FP32)
    options = autocast or {}
    return replace(policy, autocast_enabled=options.get("enabled", True), cache_enabled=options.get("cache_enabled"))


def _device_precision(mixed_precision: str, device: torch.device, origin: str) -> PrecisionPolicy:
    if mixed_precision == MixedPrecision.NO:
        return PrecisionPolicy()
    if mixed_precision not in (MixedPrecision.BF16, MixedPrecision.FP16):
        known = ", ".join(f"'{each}'" for each in MixedPrecision)
        raise ConfigError(f"{origin}: '{mixed_precision}' is unknown; expected one of {known}")
    is_fp16 = mixed_precision == MixedPrecision.FP16
    if is_fp16 and device.type == "cpu":
        raise ConfigError(
            f"{origin}: fp16 was asked for on the CPU, which has no fp16 training (it would run in fp32); "
            "use 'bf16' or 'no'"
        )
    if not is_fp16 and not _supports_bf16(device):
        raise ConfigError(
            f"{origin}: bf16 was asked for and {device} does not support it; use 'no', or 'fp16' on a GPU"
        )
    compute = torch.float16 if is_fp16 else torch.bfloat16
    return PrecisionPolicy(compute, reduce=torch.float32, output=torch.float32, loss_scaling=is_fp16)


def _require_fp8(device: torch.device, origin: str) -> None:
    if device.type == "xpu" or device.type == "cuda" and torch.version.hip is not None:
        return  # torchao knows which of these have it
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 9):
            return
        name = torch.cuda.get_device_name(device)
        found = f"{name} has no cores for it (they begin with compute capability 8.9: Ada, Hopper)"
    else:
        found = "this kind of device multiplies no matrices in it"
    raise ConfigError(
        f"{origin}: fp8 was asked for on {device}, and {found}; use 'bf16', or fp8.emulate: true, which rounds to fp8 "
        "and multiplies in fp32, for tests"
    )


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise MissingExtraError(f"mixed_precision='fp8': {MISSING_TORCHAO}") from error


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of a model, None where it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Collection[str]) -> bool:
    """Return whether a layer may compute in fp8: a linear one of multiples of 16 that is not among those left out."""
    if type(module) is not nn.Linear or fqn in layers_to_filter:  # subclasses are other layers, of 4-bit weights say
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether layers of a model compute in torchao's fp8."""
    return any(map(_is_float8, model.modules()))


def _is_float8(module: nn.Module) -> bool:
    return type(module).__name__ == "Float8Linear"  # its module takes a second to import


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: ModuleFilter | None = None
) -> None:
    """Let linear layers compute in fp8, in place; parameters keep their names and their values in full precision.

    Args:
        config: torchao's Float8LinearConfig; None is its default.
        module_filter_func: takes a module and its name; None as of `Float8Recipe`.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    float8 = _torchao()
    ends = {name for name in find_first_last_linear_layers(model) if name}
    chosen = module_filter_func or functools.partial(filter_linear_layers, layers_to_filter=ends)
    float8.convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def apply_float8(model: nn.Module, policy: PrecisionPolicy, *, compiles: bool, shards: bool = False) -> None:
    """Let a model's linear layers compute in the fp8 of a policy, in place; does nothing without one.

    Args:
        compiles: the model, or its blocks, are compiled next; it is logged where they are not.
        shards: FSDP2 shards the model next; their weights may become tensors that it gathers in fp8, new objects. Else
            each parameter stays the object that it is.

    Raises:
        ConfigError: no layer of the model is one that computes in fp8.
    """
    if policy.float8 is None or next(model.parameters(), None) is None:
        return
    config = policy.float8.config
    if not shards:
        config = replace(config, enable_fsdp_float8_all_gather=False)
    convert_model_to_fp8_ao(model, config, policy.float8.module_filter)
    num_layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    num_fp8 = sum(map(_is_float8, model.modules()))
    if num_fp8 == 0:
        raise ConfigError(
            f"fp8 was asked for, and none of {type(model).__name__}'s {num_layers} linear layer(s) computes in it: the "
            "first and the last stay in bf16, and sizes have to be multiples of 16; use mixed_precision='bf16', or "
            "choose layers with AORecipeKwargs(module_filter_func=...)"
        )
    logger.info("%s: %d of %d linear layers compute in fp8", type(model).__name__, num_fp8, num_layers)
    if not (compiles or config.emulate):
        logger.warning(
            "fp8 without torch.compile can take twice the time of bf16 (2.07 of it on an H200, and 0.63 of it with): "
            "each scaling is a pass over memory of its own. Set compile.backend: inductor and compile.regional: true"
        )


class AutocastForward(ReplacedForward):
    """A model's forward under autocast, with floating-point outputs cast back."""

    def __init__(self, model: nn.Module, policy: PrecisionPolicy) -> None:
        super().__init__(model)
        self.policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward under autocast."""
        # Looked up on each call: with device_placement=False the user moves the model after prepare().
        device_type = next((p.device.type for p in self.module.parameters()), "cpu")
        given = (*args, *kwargs.values())
        if device_type == "meta" and not any(isinstance(value, torch.Tensor) and value.is_meta for value in given):
            # Weights are offloaded, and come to this machine's accelerator when they are needed.
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device_type = "cpu" if accelerator is None else accelerator.type
        with self.policy.autocast(device_type):
            outputs = self.own(*args, **kwargs)
        return self.policy.cast_outputs(outputs)


def cast_floating(data: Any, dtype: torch.dtype, of: Collection[torch.dtype] = _HALF) -> Any:
    """Return `data` with its tensors of some dtypes, the 16-bit ones, cast to `dtype`, and other leaves as they are."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in of else leaf

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
    """Run `model`'s forward under this policy's autocast from now on, and under no earlier one's."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, AutocastForward) and forward.policy == policy:
        return
    remove_autocast(model)
    if policy.compute is not None:
        model.forward = AutocastForward(model, policy)


def remove_autocast(model: nn.Module) -> None:
    """Undo `apply_autocast`."""
    AutocastForward.remove_from(model)


# --- frozen weights that bitsandbytes has quantised, to train adapters on --------------------------------------------

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


def scales_of(module: nn.Module) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Yield the tensors of a 4-bit layer beside its packed weights: the holder of each, its name, and itself."""
    state: Any = getattr(module, "quant_state", None)
    for holder in (state, getattr(state, "state2", None)):  # of scales that are quantised themselves
        for name in ("absmax", "code", "offset"):
            if isinstance(value := getattr(holder, name, None), torch.Tensor):
                yield holder, name, value


def refuse_8bit_shards(model: nn.Module) -> None:
    """Refuse 8-bit weights, whose scales are attributes of the parameters that sharding replaces."""
    name = next((name for name, p in model.named_parameters() if type(p).__name__ == "Int8Params"), None)
    if name is not None:
        raise ConfigError(
            f"{name!r} of {type(model).__name__} is an 8-bit parameter of bitsandbytes, which FSDP2 cannot shard: its "
            "scales would be lost. Load the model with load_in_4bit=True, or use strategy 'ddp' or DeepSpeed"
        )
