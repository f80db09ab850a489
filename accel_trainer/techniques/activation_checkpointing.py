"""Activation checkpointing: the backward computes a layer's results again, all of them or the cheap ones.

A policy is the text of `activation_checkpointing`: `full`, `selective`, `every:N` or `ops:NAME,NAME`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accel_trainer import logging
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.runtime.model_wrappers import ReplacedForward
from accel_trainer.runtime.torch_private import count_kept_alone, kept_results, operation_argument
from accel_trainer.techniques.activation_offload import ActivationOffload

logger = logging.get_logger(__name__)

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# What a layer's time goes into. The norms, activation functions, rotations and sums between them take a few per cent of
# it, and half of what it keeps.
_COSTLY = frozenset(
    (
        *_PRODUCTS, "aten::linear", "aten::convolution", "aten::_scaled_mm", "aten::_grouped_mm",
        "aten::_scaled_grouped_mm", "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward", "flex_attention",
    )
)  # fmt: skip
_DROPOUT = ("dropout_p", "dropout", "p_dropout")
"""Names that operations have for the share of elements that they drop."""


def check_policy(policy: str, origin: str) -> None:
    """Refuse a policy that names an operation which torch does not have, or whose result cannot be kept.

    Args:
        origin: the option and where it was given, for the message.
    """
    for name in _named_operations(policy):
        found = _find_operation(name)
        if found is None:
            namespace, _, operation = name.partition(".")
            known = [each for each in dir(getattr(torch.ops, namespace)) if not each.startswith("__")]
            raise ConfigError(
                f"{origin}: torch.ops has no operation {name!r}"
                f"{did_you_mean(operation, known) or '.'} Write NAMESPACE.NAME, such as aten.mm or aten.convolution; "
                "an operation of a library is there once the library is imported"
            )
        if _draws_always(found):
            raise ConfigError(
                f"{origin}: torch.ops.{name} draws random numbers. Where its result is kept, it is not called again, "
                "and all later draws of the layer would differ in the backward; leave it out, and it is computed "
                "again with the same numbers"
            )


def _named_operations(policy: str) -> list[str]:
    kind, _, rest = policy.partition(":")
    return rest.split(",") if kind == "ops" else []


def _find_operation(name: str) -> Any:
    """Return the operation of torch.ops under NAMESPACE.NAME or NAMESPACE.NAME.OVERLOAD; None without one."""
    try:
        return functools.reduce(getattr, name.split("."), torch.ops)
    except (AttributeError, RuntimeError):
        return None


def _draws_always(found: Any) -> bool:
    """Whether an operation draws random numbers that no argument can switch off."""
    overloads = [getattr(found, name) for name in found.overloads()] if hasattr(found, "overloads") else [found]
    return any(
        torch.Tag.nondeterministic_seeded in getattr(each, "tags", ())
        and operation_argument(each, _DROPOUT, (), {}) is None
        for each in overloads
    )


@functools.cache
def _is_listed(names: frozenset[str], operation: Any) -> bool:
    name: str = operation.name()
    return name in names or name.partition(".")[0] in names


def _decide(names: frozenset[str], weighs: bool, context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Decide whether the result of an operation is kept; `weighs` leaves out products that are cheap for their size."""
    keeps = (
        _is_listed(names, operation)
        and not (weighs and _is_wide_product(operation, args))
        # One that drops elements draws random numbers: it has to be called again for the next one to draw the same.
        and not operation_argument(operation, _DROPOUT, args, kwargs)
    )
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _is_wide_product(operation: Any, args: Sequence[Any]) -> bool:
    # Each element takes as many multiplications as the inner dimension is long: those of scores of attention (64 for
    # each of thousands of keys) or of an adapter's second matrix (8 for each of thousands of features) take much room.
    return operation.name() in _PRODUCTS and 8 * args[-2].shape[-1] < args[-1].shape[-1]


def _contexts_of(policy: str) -> Callable[[], Any] | None:
    """Return a function that makes the contexts of a layer's forward and its repetition; None where nothing is kept."""
    kind = policy.partition(":")[0]
    if kind not in ("selective", "ops"):
        return None
    # As operations name themselves: the default of several overloads has no name of its own.
    listed = frozenset(name.removesuffix(".default").replace(".", "::", 1) for name in _named_operations(policy))
    return partial(_create_contexts, listed or _COSTLY, not listed)


def _create_contexts(names: frozenset[str], weighs: bool) -> Any:
    forward, again = create_selective_checkpoint_contexts(partial(_decide, names, weighs))
    count_kept_alone(again, partial(_is_listed, names))
    return forward, again


class LayerForward(ReplacedForward):
    """A layer's forward that keeps the configured activations."""

    # Not torch's checkpoint_wrapper: names of parameters would carry its prefix, and the module would not pickle.

    def __init__(self, module: nn.Module, policy: str = "full", offload: ActivationOffload | None = None) -> None:
        """Take the policy of this layer, `off` for one that keeps everything; kept tensors go to `offload`."""
        LayerForward.remove_from(module)
        super().__init__(module)
        self.recomputes = policy != "off"
        self.contexts = _contexts_of(policy)
        self.offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward; without gradients, with nothing around it."""
        if not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        run = self._checkpointed if self.recomputes else self.own
        if self.offload is None:
            return run(*args, **kwargs)
        with self.offload.keeping(self.module):
            return run(*args, **kwargs)

    def _checkpointed(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        options: dict[str, Any] = {}
        if self.contexts is not None:
            options["context_fn"] = (
                self.contexts if self.offload is None else partial(_offloading, self.contexts, self.offload)
            )
        return checkpoint(self.own, *args, use_reentrant=False, **options, **kwargs)


def _offloading(
    contexts: Callable[[], Any], offload: ActivationOffload
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a layer's forward and of its repetition; they send kept tensors away, and bring them."""
    forward, again = contexts()
    results: list[Any] = []

    @contextmanager
    def sending() -> Iterator[None]:
        with forward:
            yield
        results.extend(kept_results(forward))
        offload.send_results(results)

    @contextmanager
    def bringing() -> Iterator[None]:
        offload.bring_results(reversed(results))
        with again:
            yield

    return sending(), bringing()


def _is_cache(value: Any) -> bool:
    """Whether `value` holds the keys and values of earlier tokens."""
    # A layer that runs twice would add its own twice.
    is_cache = callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))
    if is_cache:
        logger.warning_once("activation checkpointing leaves caches of keys and values out of the forward in training")
    return is_cache


def treat_layers(layers: Sequence[nn.Module], policy: str, offload: ActivationOffload | None = None) -> None:
    """Have layers keep the activations of a policy for the backward, on the device or by `offload`.

    With `every:N`, the first layer and each Nth after it keeps nothing, and the others everything.
    """
    kind, _, number = policy.partition(":")
    for index, layer in enumerate(layers):
        is_recomputed = kind != "every" or index % int(number) == 0
        if is_recomputed or offload is not None:
            layer.forward = LayerForward(layer, policy if is_recomputed else "off", offload)


def release_layers(model: nn.Module) -> None:
    """Give the layers of a model their own forwards back."""
    for module in model.modules():
        LayerForward.remove_from(module)
