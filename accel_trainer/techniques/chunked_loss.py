"""Cross entropy of a language model whose logits are made chunk by chunk of tokens, and never whole.

A head of 128,000 words makes 2 GiB of logits in fp32 for 4,096 tokens, and the loss a copy of them or two. Here the
head hands out `DeferredLogits` where a model is called with labels. What its forward does with them on the way to the
loss (a scale, soft-capping, a cast, the shift of the labels) is noted, and anything else is refused; so a loss is the
plain one or an error. Where they arrive at `torch.nn.functional.cross_entropy`, loss and gradients of hidden states and
of the head are made in one pass over chunks of tokens.
"""

# N tokens, C tokens of a chunk, H features, V vocabulary (of this rank, where ranks share it)

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accel_trainer import logging
from accel_trainer.config import LossImplementation, Resolved
from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.runtime.model_wrappers import ReplacedForward

logger = logging.get_logger(__name__)

_CHUNK_NUMEL = {"cpu": 2**25, "other": 2**27}
"""Logits of a chunk where no number of tokens is given: 256 tokens of 131,072 words on a CPU, 1,024 elsewhere.

Each chunk reads and writes the head's gradient once: fewer tokens make that, and not the products, the cost.
"""
_INSTALLED = "_chunked_loss"
"""Attribute of a model: the `ChunkedLoss` that acts on it."""


class AbsentLogitsError(ConfigError, AttributeError):
    """Logits are used that were not made."""  # an AttributeError: they have no such attribute, for `hasattr` either


# --- the head's output ------------------------------------------------------------------------------------------------

_CHANGES: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "div": torch.div,
    "mul": torch.mul,
    "sub": torch.sub,
    "tanh": lambda logits, _: torch.tanh(logits),
    "to": lambda logits, dtype: logits.to(dtype),
}
"""Functions of each logit by itself that may stand between a head and a loss."""
_NAMES = {"multiply": "mul", "divide": "div", "true_divide": "div", "truediv": "div", "subtract": "sub"}
_SYMMETRIC = ("add", "mul")


@dataclass(eq=False)
class _Head:
    """The head of one forward, and the deferred logits that were made of its output."""

    loss: ChunkedLoss
    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    length: int
    """Words of the weight, which ZeRO-3 may have released by the time when they are asked for."""
    group: dist.ProcessGroup | None = None
    """Ranks that each have a part of the vocabulary."""
    made: list[DeferredLogits] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.length * (1 if self.group is None else dist.get_world_size(self.group))


class DeferredLogits:
    """Logits (..., V) that were not made, for a loss that is made of them chunk by chunk.

    Scales, soft-capping, casts, and views that keep a token's logits together are taken down. Any other use of them
    raises `AbsentLogitsError`, and so does every use behind the model's forward, where they are in its outputs.
    """

    def __init__(self, head: _Head, hidden: Tensor, changes: tuple[tuple[str, Any], ...] = ()) -> None:
        self._head, self._hidden, self._changes = head, hidden, changes
        self._name, self._origin = head.loss.name, head.loss.origin
        head.made.append(self)

    def close(self) -> None:
        """Let go of hidden states and head."""
        del self._head, self._hidden

    def shard(self, group: dist.ProcessGroup) -> DeferredLogits:
        """Return itself, as logits of which each rank of a group has an equal part of the vocabulary."""
        self._head.group = group
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "_head" not in vars(self):
            raise AbsentLogitsError(
                f"the logits of {self._name} are asked for ({name.lstrip('_')!r}), and {self._origin} makes its loss "
                "without them; call the model without labels or in eval(), or set loss to plain"
            )
        raise self._refusal(name)

    def _refusal(self, name: str) -> AbsentLogitsError:
        return AbsentLogitsError(
            f"{self._name} makes its loss of logits by {name!r}, and {self._origin} knows cross_entropy of logits that "
            "are scaled, soft-capped, cast and shifted; set loss to plain"
        )

    def __repr__(self) -> str:
        return f"DeferredLogits({self._name}: never made, by {self._origin})"

    @property
    def shape(self) -> torch.Size:
        """As of the logits themselves."""
        return torch.Size((*self._hidden.shape[:-1], self._head.vocab_size))

    @property
    def ndim(self) -> int:
        """As of the logits themselves."""
        return self._hidden.ndim

    @property
    def device(self) -> torch.device:
        """As of the logits themselves."""
        return self._hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """As of the logits themselves."""
        casts = [value for name, value in self._changes if name == "to"]
        return casts[-1] if casts else _compute_dtype(self._head.weight)

    def dim(self) -> int:
        """As of the logits themselves."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """As of the logits themselves."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> DeferredLogits:
        """Return itself."""
        return self

    def float(self) -> DeferredLogits:
        """Note a cast to fp32."""
        return self.to(torch.float32)

    def to(self, *args: Any, dtype: torch.dtype | None = None, device: Any = None) -> DeferredLogits:
        """Note a cast; they stay on their device."""
        for value in (*args, dtype, device):
            if isinstance(value, torch.dtype):
                dtype = value
            elif value is not None and torch.device(value) != self.device:
                raise self._refusal("to(device)")
        return self if dtype is None else self._changed("to", dtype)

    def view(self, *shape: Any) -> DeferredLogits:
        """Return the same logits in another shape, whose last dimension is the vocabulary."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if sizes[-1] not in (self.shape[-1], -1) or (sizes[-1] == -1 and torch.Size(sizes[:-1]) != self.shape[:-1]):
            raise self._refusal("view")
        return DeferredLogits(self._head, self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]), self._changes)

    reshape = view

    def __getitem__(self, index: Any) -> DeferredLogits:
        indices = index if isinstance(index, tuple) else (index,)
        reaches_last = Ellipsis in indices or len(indices) >= self.ndim
        if not all(i is Ellipsis or isinstance(i, (slice, int)) for i in indices) or (
            reaches_last and indices[-1] not in (Ellipsis, slice(None))
        ):
            raise self._refusal("[]")
        return DeferredLogits(self._head, self._hidden[index], self._changes)

    def _changed(self, name: str, value: Any) -> DeferredLogits:
        """Return the logits behind one more change: by a number, or by one number for each word that is not trained."""
        if isinstance(value, Tensor):
            is_bias = self._head.group is None and value.shape[-1:] == self.shape[-1:] == value.squeeze().shape
            if value.requires_grad or not (value.numel() == 1 or is_bias):
                raise self._refusal(f"{name}(tensor)")
            value = value.detach().reshape(-1) if is_bias else value.detach().reshape(())
        elif not isinstance(value, (int, float, torch.dtype, type(None))):
            raise self._refusal(f"{name}({type(value).__name__})")
        return DeferredLogits(self._head, self._hidden, (*self._changes, (name, value)))

    def __mul__(self, value: Any) -> DeferredLogits:
        return self._changed("mul", value)

    __rmul__ = __mul__

    def __truediv__(self, value: Any) -> DeferredLogits:
        return self._changed("div", value)

    def __add__(self, value: Any) -> DeferredLogits:
        return self._changed("add", value)

    __radd__ = __add__

    def __sub__(self, value: Any) -> DeferredLogits:
        return self._changed("sub", value)

    def tanh(self) -> DeferredLogits:
        """Note a tanh of every logit, as soft-capping has it."""
        return self._changed("tanh", None)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        first = next(x for x in (*args, *given.values()) if isinstance(x, cls))
        if function is nn.functional.cross_entropy and args and args[0] is first:
            return _cross_entropy(*args, **given)
        return first._changed_by(function, args, given)

    def _changed_by(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeferredLogits:
        name = getattr(function, "__name__", str(function)).strip("_")
        name = _NAMES.get(name, name)
        others = [x for x in args if x is not self]
        is_known = name in _CHANGES and name != "to" and not kwargs and len(args) <= 2
        if not is_known or args[0] is not self and name not in _SYMMETRIC:
            raise self._refusal(name)
        return self._changed(name, others[0] if others else None)


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss (scalar, fp32), as `torch.nn.functional.cross_entropy` does of (N, V) logits."""
    is_other = weight is not None or size_average is not None or reduce is not None
    if is_other or reduction not in ("mean", "sum") or target.is_floating_point() or logits.ndim != 2:
        raise logits._refusal(f"cross_entropy(reduction={reduction!r}, target of {tuple(target.shape)})")
    loss = logits._head.loss
    criterion = _Criterion(
        loss.settings, logits._changes, ignore_index, label_smoothing or loss.label_smoothing, logits._head.group,
        torch.is_grad_enabled(),
    )  # fmt: skip
    loss.is_made = True
    total = criterion.of_head(logits._head, logits._hidden, target)
    if reduction == "sum":
        return total
    # Without labels torch's mean is NaN as well, but its gradients are 0; divided by 0, these would be NaN.
    count = (target != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), float("nan"))


# --- the loss ---------------------------------------------------------------------------------------------------------


def cross_entropies(logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the cross entropies (N) of logits (N, V), of whose words each rank has a part, and their gradient (N, V).

    Collective. A target that is no word makes its row NaN.
    """
    settings = LossSettings(LossImplementation.PLAIN, None)
    return _Criterion(settings, (), -100, 0.0, group, wants_gradients=True).of_chunk(logits, target)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


@dataclass(frozen=True)
class _Criterion:
    """A sum of cross entropies over tokens, of hidden states and a head."""

    settings: LossSettings
    changes: tuple[tuple[str, Any], ...]
    ignore_index: int
    label_smoothing: float
    group: dist.ProcessGroup | None
    wants_gradients: bool

    def of_head(self, head: _Head, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the sum (scalar, fp32). Where a head's weight is gathered for its forward only, it is called again."""
        if head.weight.untyped_storage().nbytes():
            return self.of_tensors(hidden, head.weight, head.bias, target)
        if self.group is not None:
            raise ConfigError(
                f"{head.loss.origin}: the head of {head.loss.name} is a unit of FSDP2 that is sharded again behind its "
                "forward, and ranks share its vocabulary; leave it out of fsdp.wrap_classes, or set loss to plain"
            )
        total: Tensor = head.module(hidden, _Closing(self, target))
        return total

    def of_tensors(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        """Return the sum (scalar, fp32) of hidden (N, H), weight (V, H), bias (V) and target (N)."""
        if self.settings.implementation is LossImplementation.LIGER:
            return _liger_sum(self, hidden, weight, bias, target)
        total: Tensor = _ChunkedSum.apply(hidden, weight, bias, target, self)
        return total

    def of_chunk(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (C) of a chunk and the gradient (C, V) of their sum. Collective with a group."""
        if all(change == ("to", torch.float32) for change in self.changes):  # as the logarithms are anyway
            return self._of_logits(logits, target)
        # Chains of a few cheap functions: torch knows their derivatives.
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            changed = leaf
            for name, value in self.changes:
                changed = _CHANGES[name](changed, value)
        losses, gradient = self._of_logits(changed.detach(), target)
        if self.wants_gradients:
            (gradient,) = torch.autograd.grad(changed, leaf, gradient.to(changed.dtype))
        return losses, gradient

    def _of_logits(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        smoothing, vocab_size = self.label_smoothing, logits.shape[-1]
        log_probs = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        own, is_own = target.unsqueeze(-1), None
        if self.group is not None:
            log_probs.add_(self._log_share(logits[:, :1] - log_probs[:, :1]))
            own = own - vocab_size * dist.get_rank(self.group)
            is_own = (own >= 0) & (own < vocab_size)
            own = own.masked_fill(~is_own, 0)
            vocab_size *= dist.get_world_size(self.group)
        of_target = log_probs.gather(-1, own)
        if is_own is not None:
            of_target.masked_fill_(~is_own, 0.0)
        numbers = [of_target.squeeze(-1), *([log_probs.sum(-1)] if smoothing else [])]
        if self.group is not None:
            both = torch.stack(numbers)
            dist.all_reduce(both, group=self.group)
            numbers = list(both)
            # As with loss_parallel: torch stops at such a target, but looking would wait for the device.
            numbers[0].masked_fill_((target < 0) | (target >= vocab_size), float("nan"))
        losses = -(1.0 - smoothing) * numbers[0]
        if smoothing:
            losses = losses - smoothing / vocab_size * numbers[1]
        if not self.wants_gradients:
            return losses, log_probs
        share = torch.full_like(of_target, smoothing - 1.0)
        if is_own is not None:
            share.masked_fill_(~is_own, 0.0)
        gradient = log_probs.exp_().scatter_add_(-1, own, share)
        return losses, gradient.sub_(smoothing / vocab_size) if smoothing else gradient

    def _log_share(self, own: Tensor) -> Tensor:
        """Return the log of this rank's part of all words' probability, of the log of its sum (C, 1). Collective."""
        largest = own.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        total = (own - largest).exp_()
        dist.all_reduce(total, group=self.group)
        return own - largest - total.log_()


@dataclass(eq=False)
class _Closing:
    """The argument with which a head's forward makes the loss; hooks look into tuples, and not into this."""

    criterion: _Criterion
    target: Tensor


class _ChunkedSum(torch.autograd.Function):
    """The sum of a criterion, whose gradients are made in the forward: backwards they are only scaled."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, criterion: _Criterion
    ) -> Tensor:
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        wanted = [criterion.wants_gradients and wants for wants in ctx.needs_input_grad[:3]]
        dtype = _compute_dtype(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            total, ctx.gradients = _pass_over_chunks(
                hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), target, criterion, wanted
            )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In place, and handed on: a head of 128,000 words by 4,096 features has 2 GiB of gradients.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise ConfigError(
                "backward() was called a second time on a loss in chunks, whose gradients are made in the forward and "
                "handed on in the first backward; add the losses and call backward() once, or set loss to plain"
            )
        scaled = (
            None if own is None else own.mul_(gradient).to(to) for own, to in zip(gradients, ctx.dtypes, strict=True)
        )
        return *scaled, None, None


def _pass_over_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, criterion: _Criterion, wanted: list[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sum, and its gradients by hidden states, weight and bias where they are wanted."""
    # Sums over tokens are in fp32 at least, also where a chunk's part of them is in 16 bits.
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
    for start in range(0, len(hidden), length := criterion.settings.chunk_length(weight)):
        rows = slice(start, start + length)
        counts = target[rows] != criterion.ignore_index
        logits = nn.functional.linear(hidden[rows], weight, bias)
        losses, gradient = criterion.of_chunk(logits, target[rows].masked_fill(~counts, 0))
        del logits
        total += losses.masked_fill_(~counts, 0.0).sum()
        if not any(wanted):
            continue
        gradient = gradient.to(weight.dtype)
        # Rows that do not count are left out where they have H numbers, and not V.
        mask = counts.unsqueeze(-1)
        if of_hidden is not None:
            torch.mm(gradient, weight, out=of_hidden[rows]).mul_(mask)
        if of_weight is not None:
            counted = hidden[rows] * mask
            if wide == weight.dtype:
                of_weight.addmm_(gradient.t(), counted)
            else:
                of_weight.add_(gradient.t() @ counted)
        if of_bias is not None:
            of_bias += counts.to(gradient.dtype) @ gradient
    return total, [of_hidden, of_weight, of_bias]


def _liger_sum(criterion: _Criterion, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Return the sum by Liger's kernel, which knows scales before soft-capping, and no others."""
    functional = importlib.import_module("liger_kernel.transformers.functional")
    dtype = _compute_dtype(weight)
    changes, softcap = [change for change in criterion.changes if change[0] != "to"], None
    match changes[-3:]:
        case [("div", cap), ("tanh", _), ("mul", factor)] if cap == factor:
            changes, softcap = changes[:-3], cap
    for name, value in changes:
        if name not in ("mul", "div"):
            raise ConfigError(
                f"loss=liger has a kernel for logits that are scaled and soft-capped, and this model's are changed by "
                f"{name!r}, too; use chunked"
            )
        hidden = _CHANGES[name](hidden, value)
        bias = None if bias is None else _CHANGES[name](bias, value)
    total: Tensor = functional.liger_fused_linear_cross_entropy(
        hidden.to(dtype), weight.to(dtype), target, None if bias is None else bias.to(dtype), reduction="sum",
        ignore_index=criterion.ignore_index, label_smoothing=criterion.label_smoothing, softcap=softcap,
        accum_dtype=torch.float32,
    )  # fmt: skip
    return total


# --- installing it ----------------------------------------------------------------------------------------------------


class LossSettings(NamedTuple):
    """Who makes the loss, and of how many tokens at a time."""

    implementation: LossImplementation
    chunk_tokens: int | None

    def chunk_length(self, weight: Tensor) -> int:
        """Return the number of tokens of a chunk for a head's weight (V, H)."""
        numel = _CHUNK_NUMEL["cpu" if weight.device.type == "cpu" else "other"]
        return self.chunk_tokens or max(1, numel // len(weight))


class ChunkedLoss:
    """The loss of a language model without whole logits: in training, where the model is called with labels."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.origin = ""
        self.settings = LossSettings(LossImplementation.PLAIN, None)
        self.label_smoothing = 0.0
        self.skips_logits = False
        """Whether the loss is enough, in a Trainer's evaluation."""
        self.is_made = False
        """Whether the forward that runs has made its loss."""
        self._heads: list[_Head] | None = None
        """Of the forward that runs; None where logits are to be made."""

    def defer(self, module: nn.Module, hidden: Tensor) -> DeferredLogits | None:
        """Return deferred logits of a head in a forward that makes a loss; None elsewhere."""
        if self._heads is None:
            return None
        weight: Any = module.weight
        if type(weight).__name__ == "DTensor":
            raise ConfigError(
                f"{self.origin}: the head of {self.name} computes with a DTensor, sharded by other means than a "
                "parallelism_config; give tp_size instead, or set loss to plain"
            )
        self._heads.append(_Head(self, module, weight, module.bias, len(weight)))  # type: ignore[arg-type]
        return DeferredLogits(self._heads[-1], hidden)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Context of a forward that is to make its loss of deferred logits."""
        self._heads, self.is_made = [], False
        try:
            yield
            if not self.is_made:
                raise ConfigError(
                    f"{self.origin}: {self.name} makes its loss of something else than cross_entropy of its head's "
                    "logits; set loss to plain"
                )
        finally:
            made = [logits for head in self._heads for logits in head.made]
            self._heads = None
            for logits in made:
                logits.close()


class _HeadForward(ReplacedForward):
    """A head's forward, which may leave its logits for later."""

    def __init__(self, module: nn.Module, loss: ChunkedLoss) -> None:
        super().__init__(module)
        self.loss = loss

    def __call__(self, hidden: Tensor, closing: _Closing | None = None) -> Any:
        if closing is not None:
            return closing.criterion.of_tensors(hidden, self.module.weight, self.module.bias, closing.target)
        deferred = self.loss.defer(self.module, hidden)
        return self.own(hidden) if deferred is None else deferred


class _ModelForward(ReplacedForward):
    """A model's forward, which makes its loss without logits."""

    def __init__(self, model: nn.Module, loss: ChunkedLoss) -> None:
        super().__init__(model)
        self.loss = loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        skips_logits = kwargs.pop("skip_logits", False) or self.loss.skips_logits
        forward = self.own
        given = kwargs if not args else {**dict(zip(self.__signature__.parameters, args, strict=False)), **kwargs}
        is_labelled = given.get("labels") is not None or given.get("shift_labels") is not None
        is_plain = self.loss.settings.implementation is LossImplementation.PLAIN
        if is_plain or not is_labelled:
            return forward(*args, **kwargs)
        if not (self.module.training or skips_logits):
            if torch.is_grad_enabled():  # as from_pretrained() leaves a model, and PEFT makes one of it
                logger.warning_once(
                    f"{self.loss.origin}: {self.loss.name} is in eval(), where logits are made whole; call train() to "
                    "train it, or evaluate it under torch.no_grad()"
                )
            return forward(*args, **kwargs)
        with self.loss.deferring():
            return forward(*args, **kwargs)


def find_chunked_loss(model: nn.Module) -> ChunkedLoss | None:
    """Return the chunked loss of a prepared model; None where it has none, or makes its loss of whole logits."""
    found = (vars(module).get(_INSTALLED) for module in model.modules())
    loss = next((each for each in found if each is not None), None)
    return None if loss is None or loss.settings.implementation is LossImplementation.PLAIN else loss


def _find_heads(model: nn.Module) -> tuple[nn.Module, list[nn.Module]] | None:
    """Return the language model in a model, and the linear layers that are, or take turns as, its head."""
    for module in model.modules():
        if not hasattr(type(module), "get_output_embeddings"):
            continue
        try:
            head: Any = module.get_output_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            continue
        if head is not None:
            # PEFT's modules_to_save: one that is trained in the place of the original.
            parts = head.modules() if type(head).__name__ == "ModulesToSaveWrapper" else [head]
            return module, [part for part in parts if isinstance(part, nn.Linear)] or [head]
    return None


def check_chunked_loss(model: nn.Module, resolved: Resolved, device: torch.device) -> None:
    """Refuse a model whose loss cannot be made without logits as asked. Not collective; changes nothing.

    Raises:
        ConfigError: it has no head of its own that is one linear layer; or Liger's kernel cannot run.
        MissingExtraError: Liger is not installed.
    """
    config = resolved.config
    if config.loss is LossImplementation.PLAIN or next(model.parameters(), None) is None:
        return
    origin, found = resolved.describe("loss"), _find_heads(model)
    if found is None:
        raise ConfigError(
            f"{origin}: {type(model).__name__} has no head by get_output_embeddings(), whose logits could be left out; "
            "expected a language model of transformers; set loss to plain"
        )
    other = next((head for head in found[1] if type(head).forward is not nn.Linear.forward), None)
    if other is not None:
        raise ConfigError(
            f"{origin}: the head of {type(found[0]).__name__} is a {type(other).__module__}.{type(other).__name__}, "
            "and a torch.nn.Linear is expected, which can be multiplied in chunks; leave adapters and quantisation off "
            "the head (modules_to_save trains a whole one), or set loss to plain"
        )
    if config.compile.backend != "no" and config.compile.fullgraph:
        raise ConfigError(
            f"{resolved.describe('compile.fullgraph')} contradicts {origin}, which breaks the graph between the layers "
            "and the loss; leave fullgraph out"
        )
    if config.loss is LossImplementation.LIGER:
        _check_liger(resolved, origin, device)


def _check_liger(resolved: Resolved, origin: str, device: torch.device) -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        raise MissingExtraError(
            f"{origin} needs liger-kernel, which is not installed: pip install liger-kernel; or use chunked"
        )
    if device.type == "cpu":
        raise ConfigError(f"{origin} needs a GPU, and this process computes on {device}; use chunked")
    if resolved.config.parallel.tp_size > 1:
        raise ConfigError(
            f"{origin} contradicts {resolved.describe('parallel.tp_size')}: its kernel wants all words on each rank; "
            "use chunked"
        )


def apply_chunked_loss(model: nn.Module, resolved: Resolved) -> None:
    """Have a model make its loss without whole logits, in place, as the configuration says; or of them again.

    Before anything else is put around the forwards of model and head: what shards a head has to find its own.
    """
    found = _find_heads(model)
    if found is None:
        return
    language_model, heads = found
    loss: ChunkedLoss | None = vars(language_model).get(_INSTALLED)
    settings = LossSettings(resolved.config.loss, resolved.config.loss_chunk_tokens)
    if loss is None:
        if settings.implementation is LossImplementation.PLAIN:
            return
        loss = ChunkedLoss(type(language_model).__name__)
        setattr(language_model, _INSTALLED, loss)
        language_model.forward = _ModelForward(language_model, loss)
        for head in heads:
            head.forward = _HeadForward(head, loss)
    loss.settings, loss.origin = settings, resolved.describe("loss")
