"""The activations that layers keep for the backward: computed again there, or kept in host memory, or both.

A policy of checkpointing is the text of `activation_checkpointing`: `full`, `selective`, `every:N` or `ops:NAME,NAME`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accel_trainer import logging
from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.config import RunConfig
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.runtime.model_wrappers import ReplacedForward
from accel_trainer.runtime.side_stream import SideStream, has_streams
from accel_trainer.runtime.torch_private import count_kept_alone, is_fake, kept_results, operation_argument

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


def treat_activations(model: nn.Module, layers: Sequence[nn.Module], config: RunConfig, device: torch.device) -> None:
    """Have layers keep the configured activations for the backward. Before a module is compiled, sharded or wrapped."""
    release_layers(model)  # those that an earlier prepare() has treated
    treat_layers(layers, config.recomputation, ActivationOffload(device) if config.activation_offload else None)


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


# --- offload: kept tensors wait in host memory, and come back in reverse order ----------------------------------------


_LEAST_BYTES = 64 * 2**10
"""Less stays on the device: it would travel for a few microseconds, and take as long to be asked for."""
_MOST_BYTES_IN_FLIGHT = 512 * 2**20
"""Of the device, each way: copies that have not arrived yet, and what has come back before it is used. A layer of a 7B
keeps about a gigabyte for 4,096 tokens in 16 bits, in pieces of up to 90 MB."""

_copy_stream = functools.cache(SideStream)


class _Sent:
    """A storage that has been sent to the host."""

    def __init__(self, storage: Any, host: Tensor, place: int) -> None:
        self.host = host
        self.place = place
        """In the order in which storages were sent."""
        self.back: weakref.ref[Any] = weakref.ref(storage)
        """The storage on the device, as long as it is there."""
        self.num_views = 0
        """Those that autograd holds and has not asked for."""
        self.held: Any = None
        """The storage that has come back, until the last of them is asked for."""


class _Arrival(NamedTuple):
    storage: Any
    event: Any


class _View(NamedTuple):
    """A stand-in that autograd holds in the place of a tensor."""

    sent: _Sent
    dtype: torch.dtype
    offset: Any
    shape: torch.Size
    stride: tuple[int, ...]


class ActivationOffload:
    """Sends tensors that layers keep to the host, in a stream of their own where the device has streams.

    Storages are sent: several views of one, or a tensor that is kept twice, are one copy. On the CPU they are plain
    copies. Parameters stay, and so does what is small, sparse or a subclass of Tensor.
    """

    def __init__(self, device: torch.device) -> None:
        """Send tensors on `device`, to pinned memory if it has streams."""
        self._device = device
        self._side = _copy_stream(device) if has_streams(device) else None
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[_Sent]]] = {}
        """By the id of a storage that has been sent, while it is on the device."""
        self._order: list[weakref.ref[_Sent]] = []
        self._leaving: dict[int, _Arrival] = {}
        """By place, storages whose copies the computing stream has not waited for: it may not reuse their memory."""
        self._coming: dict[int, _Arrival] = {}
        """By place, storages that come back ahead of their use."""

    def copy_in(self, side: SideStream) -> None:
        """Copy in a stream from now on, whatever the device: a plan has one that copies nothing."""
        self._side = side

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActivationOffload, (self._device,))  # a copied model has nothing on its way

    def keeping(self, layer: nn.Module) -> AbstractContextManager[Any]:
        """Context in which tensors that a layer's forward keeps are sent to the host."""
        owners = [module for module in layer.modules() if next(module.parameters(recurse=False), None) is not None]
        return saved_tensors_hooks(functools.partial(self.send, owners), self.bring)

    def send(self, owners: Sequence[nn.Module], tensor: Tensor) -> Any:
        """Return a stand-in for a tensor while it is on the host; the tensor itself if it stays.

        Args:
            owners: modules whose own parameters stay, under FSDP2 those that are gathered now.
        """
        if not self._may_leave(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < _LEAST_BYTES or _is_parameter(storage, owners):
            return tensor
        known = self._known.get(id(storage))
        sent = None if known is None else known[1]()
        if sent is None:
            sent = self._send(storage)
        sent.num_views += 1
        return _View(sent, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _may_leave(self, tensor: Tensor) -> bool:
        is_plain = (type(tensor) is Tensor or is_fake(tensor)) and tensor.layout is torch.strided
        return is_plain and tensor.device.type == self._device.type and not (tensor.is_conj() or tensor.is_neg())

    def send_results(self, results: Iterable[Any]) -> None:
        """Send the results that selective checkpointing keeps, `val` of each."""
        for result in results:
            result.val, result.version = self.send((), result.get_val(False)), None

    def bring_results(self, results: Iterable[Any]) -> None:
        """Bring it back."""
        for result in results:
            result.val = self.bring(result.val)

    @torch.no_grad()
    def _send(self, storage: Any) -> _Sent:
        flat = _as_tensor(storage, torch.uint8)
        self._forget_graphs()
        if self._side is None:
            sent = _Sent(storage, flat.to("cpu", copy=True), len(self._order))
        else:
            sent = _Sent(storage, self._side.empty_host(len(flat)), len(self._order))
            self._side.copy(flat, sent.host, is_held=True)
            self._leaving[sent.place] = _Arrival(storage, self._side.mark())
            self._settle(_MOST_BYTES_IN_FLIGHT)
        self._order.append(weakref.ref(sent))
        key = id(storage)
        self._known[key] = (weakref.ref(storage, lambda _: self._known.pop(key, None)), weakref.ref(sent))
        return sent

    def _forget_graphs(self) -> None:
        """Give the places of graphs free that are gone."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
            self._coming.pop(len(self._order), None)
            if self._side is not None and (arrival := self._leaving.pop(len(self._order), None)):
                self._side.hand_over(arrival.event, ())

    def _settle(self, most: int) -> None:
        """Let go of storages that have left, the first ones first, until at most `most` bytes are on their way."""
        total = _total(self._leaving)
        while total > most and self._side is not None:
            arrival = self._leaving.pop(next(iter(self._leaving)))
            total -= arrival.storage.nbytes()
            # The computing stream waits, and not the host: memory that is freed now is reused behind the copy.
            self._side.hand_over(arrival.event, ())

    @torch.no_grad()
    def bring(self, kept: Any) -> Tensor:
        """Return the tensor that `send` was given, and begin to bring those back that were sent before it."""
        if not isinstance(kept, _View):
            tensor: Tensor = kept
            return tensor
        sent = kept.sent
        storage = self._arrived(sent)
        sent.num_views -= 1
        sent.held = storage if sent.num_views > 0 else None
        if self._side is not None:
            self._bring_ahead(sent.place)
        view = torch.empty(0, dtype=kept.dtype, device=self._device)
        return view.set_(storage, kept.offset, kept.shape, kept.stride)

    def _arrived(self, sent: _Sent) -> Any:
        """Return a storage on the device, which the computing stream may read."""
        if self._side is None:
            return sent.host.to(self._device).untyped_storage()
        found = self._leaving.pop(sent.place, None) or self._coming.pop(sent.place, None)
        if found is None and (storage := sent.back()) is not None:
            return storage
        arrival = found or self._fetch(sent)
        self._side.hand_over(arrival.event, ())
        return arrival.storage

    def _fetch(self, sent: _Sent) -> _Arrival:
        assert self._side is not None
        # Of the computing stream's memory: what frees it is ordered behind what reads it.
        flat = torch.empty(len(sent.host), dtype=torch.uint8, device=self._device)
        self._side.copy(sent.host, flat, is_held=True)
        arrival = _Arrival(flat.untyped_storage(), self._side.mark())
        sent.back = weakref.ref(arrival.storage)
        return arrival

    def _bring_ahead(self, place: int) -> None:
        total = _total(self._coming)
        for earlier in range(place - 1, -1, -1):
            sent = self._order[earlier]()
            if sent is None or sent.num_views <= 0 or sent.back() is not None:
                continue
            total += len(sent.host)
            if total > _MOST_BYTES_IN_FLIGHT:
                break
            self._coming[earlier] = self._fetch(sent)


def _as_tensor(storage: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _total(arrivals: dict[int, _Arrival]) -> int:
    return sum(arrival.storage.nbytes() for arrival in arrivals.values())


def _is_parameter(storage: Any, owners: Sequence[nn.Module]) -> bool:
    own = (parameter for module in owners for parameter in module.parameters(recurse=False))
    return any(local_tensor(parameter).untyped_storage() is storage for parameter in own)
