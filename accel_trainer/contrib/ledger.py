"""The ledger of a step on tensors without memory: storages as they come and go, collectives, and operations.

Behind it operations as GPUs do them, for a step that is taken on a CPU: what they keep for the backward is counted.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from accel_trainer.runtime.side_stream import SideStream
from accel_trainer.runtime.torch_names import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, GROUPED_MM, UNIT_EXCHANGES
from accel_trainer.runtime.torch_private import DeviceContext, OperationMode, joined_groups, tree_leaves


class Call(NamedTuple):
    """A collective of a step."""

    kind: str
    ranks: tuple[int, ...]
    num_bytes: int
    times: int
    """In an update."""
    is_of_unit: bool = False
    """Whether it gathers parameters or reduces gradients of a unit, beside the computation of another."""


class Ledger(OperationMode):
    """The storages of a step as they come and go, its collectives, and the operations of its matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        """The number of a storage, and by how many bytes memory grew with it."""
        self.parts: dict[int, str] = {}
        """What a storage is for, by its number."""
        self.calls: list[Call] = []
        self.flops = 0
        self.flops_of_experts = 0
        self.is_of_engine = False
        """Whether a value that is asked for is 0, as an engine's counts of overflows are; else it is an error."""
        self.has_experts = False
        self.weight = 1
        """How often in an update what happens now happens."""
        self._is_paused = False
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._sizes: list[int] = []
        self._ranks: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is counted."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def hold(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, which is counted from now on."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._known:
            self._known[key] = (len(self._sizes), weakref.ref(storage, partial(self._drop, key)))
            self._sizes.append(0)
            self._count(self._known[key][0], storage.nbytes())
        return self._known[key][0]

    @property
    def num_storages(self) -> int:
        """Storages that have been counted, by whose number the next one goes."""
        return len(self._sizes)

    def held_since(self, first: int) -> list[int]:
        """Return the numbers of storages that are there, and have been counted since there were `first` of them."""
        return [number for number in range(first, len(self._sizes)) if self._sizes[number]]

    def size_of(self, numbers: Iterable[int]) -> int:
        """Return the bytes of storages now."""
        return sum(self._sizes[number] for number in numbers)

    def _count(self, number: int, num_bytes: int) -> None:
        self.events.append((number, num_bytes - self._sizes[number]))
        self._sizes[number] = num_bytes

    def _drop(self, key: int, reference: Any) -> None:
        self._count(self._known.pop(key)[0], 0)

    def resize(self, storage: Any) -> None:
        """Count a storage anew whose size has changed: only those of gathered units do."""
        if id(storage) in self._known:
            number = self._known[id(storage)][0]
            self.parts[number] = "unsharded"
            self._count(number, storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with local tensors
        if func is torch.ops.prim.device.default:
            return args[0].device  # half of all calls, each as long as a product's by torch's rules for such tensors
        result = self._answer(func, args) if func is _READ and self.is_of_engine else _run(func, args, kwargs or {})
        self._hold_all(result)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_collective(func, args, result)
        else:
            flops = self.weight * _flops_of(func, args, kwargs or {}, result)
            if func.overloadpacket.__name__ == GROUPED_MM:
                self.has_experts = True
                self.flops_of_experts += flops
            else:
                self.flops += flops
        return result

    def _answer(self, func: Any, args: Any) -> Any:
        """Return a value that an engine reads: its own counts are known, what a device has counted is 0."""
        try:
            return func(*args)
        except RuntimeError:
            return 0.0 if args[0].is_floating_point() else 0

    def _hold_all(self, values: Any, part: str | None = None) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                number = self.hold(leaf)
                if part is not None:
                    self.parts.setdefault(number, part)

    def _note_collective(self, func: Any, args: Any, result: Any) -> None:
        kind, ranks = _kind_of(func.overloadpacket.__name__), self._ranks_of(args)
        if kind is None or ranks is None:
            return
        tensors = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in (*args, result)]
        num_bytes = max(sum(tensor.nbytes for tensor in of_one) for of_one in tensors)
        is_of_unit = self.is_of_engine or func.overloadpacket.__name__ in UNIT_EXCHANGES
        self.calls.append(Call(kind, ranks, num_bytes, self.weight, is_of_unit))
        if is_of_unit:
            self._hold_all(args[:2], "unsharded" if self.is_of_engine and kind == "all_gather" else "exchange")

    def _ranks_of(self, args: Iterable[Any]) -> tuple[int, ...] | None:
        """Return the ranks that a collective is over: one of its arguments is their group, or its name."""
        groups = joined_groups()
        if len(groups) != len(self._ranks):  # an engine forms some of its own
            self._ranks = {str(group.group_name): tuple(dist.get_process_group_ranks(group)) for group in groups}
        for value in args:
            if isinstance(value, str) and value in self._ranks:
                return self._ranks[value]
            if isinstance(value, torch.ScriptObject):
                with suppress(RuntimeError):  # a handle of something else: of the operation of a sum, for one
                    return self._ranks[str(dist.ProcessGroup.unbox(value).group_name)]
        return None


_READ = torch.ops.aten._local_scalar_dense.default


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    if func.overloadpacket.__name__ == GROUPED_MM and args[0].dtype != torch.bfloat16:
        # torch's rule for tensors without values is that of GPUs, which have it in bf16 alone; CPUs have it in others.
        return func(*(each.bfloat16() for each in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _kind_of(operation: str) -> str | None:
    """Return the kind of a collective: c10d has several operations of each, some with a `_base_` in their names."""
    plain = operation.replace("_", "")
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
    return next((kind for kind in kinds if kind.replace("_", "") in plain), None)


_ATTENTION: dict[str, tuple[Callable[..., int], int]] = {
    CPU_ATTENTION: (sdpa_flop_count, 3),
    CPU_ATTENTION_BACKWARD: (sdpa_backward_flop_count, 4),
}
"""By operation, the formula of its shapes, and of how many tensors."""


def _flops_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    name = packet.__name__
    if name in _ATTENTION:
        count, num_tensors = _ATTENTION[name]
        # As if there were no fewer heads of keys, which the formulas of torch 2.11 refuse: as many products are made.
        return int(count(*((x.shape[0], args[0].shape[1], *x.shape[2:]) for x in args[:num_tensors])))
    if name == GROUPED_MM:
        return int(2 * args[0].numel() * args[1].shape[-1])
    return 0


@contextmanager
def noting_resizes(ledger: Ledger) -> Iterator[None]:
    """Tell a ledger of storages that change their size: that is no operation of torch, and FSDP2 frees so."""
    inherited = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = inherited(storage, size)
        ledger.resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_


# --- as on GPUs -------------------------------------------------------------------------------------------------------


# fmt: off
_IN_FP32 = frozenset((
    "__pow__", "__rdiv__", "__rpow__", "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_similarity",
    "cosine_embedding_loss", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "kl_div", "l1_loss",
    "hinge_embedding_loss", "layer_norm", "log", "log10", "log_softmax", "log1p", "log2", "margin_ranking_loss", "pow",
    "mse_loss", "nll_loss", "norm", "prod", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "sum",
    "softmax", "softmin", "softplus", "tan", "triplet_margin_loss",
))
# fmt: on
"""What autocast computes in fp32 on GPUs (torch 2.13, docs/source/amp.md); on CPUs it leaves most of it in 16 bits."""


class EveryLayer(DeviceContext):
    """Models that drop layers by chance (LayerDrop: BART, OPT) keep them all, as the update of the peak does."""

    # A device's context is the only mode of functions that torch enters again where a backward computes layers again.
    # It is entered plainly: torch's own remembers one device to go back to, and there are two when it is entered twice.
    __enter__, __exit__ = TorchFunctionMode.__enter__, TorchFunctionMode.__exit__

    def __init__(self) -> None:
        super().__init__("cpu")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and args == ([],):
            return torch.tensor(1.0)  # with a value, which a drawn number has not
        return super().__torch_function__(func, types, args, kwargs)


class _AsOnGpu(EveryLayer):
    """Autocast and dropout of GPUs, and attention without any, with which a CPU keeps the scores of all tokens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = [each.float() if _is_in_16_bits(each) else each for each in args]
        if func is nn.functional.dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is nn.functional.scaled_dot_product_attention:
            kwargs = {**(kwargs or {}), "dropout_p": 0.0}
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def kernels_of_gpus() -> Iterator[None]:
    """Context in which code that asks for autocast without naming a device, as PEFT's, hears of that of the plan."""
    inherited = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda *device: inherited(*(device or ("cpu",)))
    try:
        with _AsOnGpu():
            yield
    finally:
        torch.is_autocast_enabled = inherited


def _is_in_16_bits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop out by the operation of GPUs, which keeps a byte for each element, where a CPU keeps factors."""
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


@contextmanager
def one_document_in_each_row() -> Iterator[None]:
    """Have models of transformers take rows for whole: from positions without values they make masks of documents."""
    # 5.23, masking_utils.py:776. Such a mask is converted to 16 bits in every layer: 384 MiB in all of 12 layers for a
    # row of 4,096 tokens, whose plan was 5.1 % too high for it.
    masks, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    inherited = getattr(masks, name, None)
    if inherited is None:
        yield
        return
    setattr(masks, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masks, name, inherited)


class _Packed(torch.autograd.Function):
    """A product with weights of 4 bits: those of 16 are made for it and again in the backward, as by bitsandbytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: Sequence[int]) -> Tensor:
        ctx.shape = shape
        ctx.save_for_backward(packed)
        return x @ x.new_empty(shape).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ gradient.new_empty(ctx.shape), None, None


def multiply_packed(module: Any, x: Tensor) -> Tensor:
    """Stand in for the forward of bitsandbytes' `Linear4bit`, whose parameters want values."""
    product: Tensor = _Packed.apply(x.to(module.compute_dtype or x.dtype), module.weight, module.quant_state.shape)
    return (product if module.bias is None else product + module.bias).to(x.dtype)


class _CopiesNothing(SideStream):
    """The stream of a device that is planned for, beside the one that computes; host memory is not counted."""

    def __init__(self) -> None:
        pass

    def empty_host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def copy(self, source: Tensor, target: Tensor, *, is_held: bool = False) -> None:
        pass

    def mark(self) -> None:
        pass

    def hand_over(self, event: Any, tensors: Iterable[Tensor]) -> None:
        pass


def copy_beside(model: nn.Module) -> None:
    """Have layers send what they keep to the host as on a GPU, where what is on its way is still on the device."""
    for module in model.modules():
        if (offload := getattr(vars(module).get("forward"), "offload", None)) is not None:
            offload.copy_in(_CopiesNothing())
