"""Sequence parallelism: the tokens of a sequence are sharded over ranks that read the same data.

A causal language model of transformers is given this rank's slice of ids, positions and shifted labels. All of it works
on tokens by themselves but attention, which gets its heads' share of the whole sequence: an all-to-all before it
exchanges heads for tokens, and one behind it back (Ulysses, arXiv 2309.14509). Attention itself, and the masks of
padding, packed sequences and windows, are transformers' own, of the implementation that the model was loaded with.

Gradients come out as `size` times this rank's part of them, whose mean over the ranks is the gradient.
"""

# B batch, H heads, L tokens of the sequence, S tokens of a slice, D features of a head

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from accel_trainer.errors import ConfigError

__all__ = ["find_language_model", "shard_sequences"]

_PREFIX = "ulysses_"
"""Of the names under which transformers finds attention over sharded sequences; its own name follows."""
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers in which tokens meet in attention only."""
_BY_LENGTH = ("dynamic", "longrope")
"""Rotary positions that depend on the length of what is given."""
_GIVEN = frozenset({"input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels"})
_BY_TOKEN = ("logits", "last_hidden_state", "hidden_states")
_WAY_OUT = "set sp_size to 1, and shard with dp_shard_size"


class _Sequence(NamedTuple):
    """A batch of sequences whose slices the ranks of a group have; passed down to attention with the other options."""

    group: dist.ProcessGroup
    length: int
    """Of all slices together, without what fills the last one up."""
    positions: Tensor
    """Of all tokens (B or 1, L)."""
    is_masked: bool
    """Whether a mask was given; else transformers has one for all tokens, and would have had none."""
    documents: Tensor | None
    """Which of the documents that a row was packed from each token is of (B, L); None where rows are one document."""


_current: ContextVar[_Sequence | None] = ContextVar("sequence", default=None)
"""The sequences of the forward that runs, for masks: they are made once for all layers, from shapes alone."""


# --- what can be sharded ----------------------------------------------------------------------------------------------


def find_language_model(model: nn.Module, size: int, origin: str, num_parts: int = 1) -> nn.Module:
    """Return the causal language model that `model` is, or wraps. Not collective; changes nothing.

    Args:
        size: number of ranks on the axis.
        origin: where `size` was asked for, for messages.
        num_parts: number of ranks that share the heads of a layer: its `tp_size`.

    Raises:
        ConfigError: there is none, or its tokens meet elsewhere than in attention.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    found = [m for m in model.modules() if any(c.__name__ in known for c in type(m).__mro__)]
    name = type(model).__name__
    if not found or not all(any(p is q for q in found[0].parameters()) for p in model.parameters() if p.requires_grad):
        raise ConfigError(
            f"{origin}: {name} is not a causal language model of transformers, whose tokens could be shared out over "
            f"ranks; {_WAY_OUT}"
        )
    reason = _reason_against(found[0], size, num_parts)
    if reason is not None:
        raise ConfigError(f"{origin}: {type(found[0]).__name__} {reason}")
    return found[0]


def _reason_against(model: Any, size: int, num_parts: int) -> str | None:
    heads, names = getattr(model.config, "num_attention_heads", None), _parameters_of(model)
    if isinstance(heads, int) and heads % (size * num_parts):  # where layers differ, attention looks itself
        sizes = f"sp_size={size}" if num_parts == 1 else f"sp_size={size} x tp_size={num_parts}"
        return f"has num_attention_heads={heads}, which {sizes} does not divide; use sizes that do"
    if not getattr(model, "_supports_attention_backend", False) or "position_ids" not in names:
        return f"does not take attention from transformers' registry, or no positions; {_WAY_OUT}"
    if getattr(model, "loss_type", None) not in ("ForCausalLM", None) or "_loss_function" in vars(model):
        return f"computes its loss by a function of its own, which may mix tokens; {_WAY_OUT}"
    for module in model.modules():
        if getattr(module, "sinks", None) is not None:
            return f"has sinks in {type(module).__name__}, one for each head of the whole sequence; {_WAY_OUT}"
        if isinstance(module, nn.Embedding) and "attention_mask" in _parameters_of(module):
            return f"has a {type(module).__name__}, which takes positions from the mask of a slice; {_WAY_OUT}"
    return _mixing(model.config)


def _parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(module).forward).parameters


def _mixing(config: Any) -> str | None:
    """Return the part of a model that looks at tokens together, beside attention, by its configuration."""
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - set(_LAYERS))
    by_length = [kind for kind in _BY_LENGTH if kind in str(getattr(config, "rope_parameters", None))]
    if kinds:
        return f"has layers of {', '.join(kinds)}, in which tokens meet outside of attention; {_WAY_OUT}"
    if by_length:
        return f"has rotary positions of type {by_length[0]}, which depend on the length of a slice; {_WAY_OUT}"
    if not getattr(config, "is_causal", True):
        return f"is not causal, and packed rows are told apart in causal attention only; {_WAY_OUT}"
    if getattr(config, "output_router_logits", False):
        return (
            "has output_router_logits=True, and the auxiliary loss of its router is not the mean of those of slices; "
            f"set it to False, or {_WAY_OUT}"
        )
    return None


def shard_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the forward of a causal language model by one that computes a slice of each sequence on each rank.

    Collective then. The loss that it returns is that of all tokens, on every rank. Without labels, and where gradients
    are off, so are logits and hidden states; with labels in training, they are those of this rank's slice. With a cache
    of keys and values, in `generate` for one, each rank computes all of it.

    Args:
        mesh: one axis, whose ranks read the same data.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        inner = getattr(config, "_attn_implementation", None)
        if inner is None or inner.startswith(_PREFIX):  # that of a model which has been prepared
            continue
        ALL_ATTENTION_FUNCTIONS.register(_PREFIX + inner, partial(_attend, inner))
        ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + inner, partial(_make_mask, inner))
        config._attn_implementation = _PREFIX + inner
    model.forward = _SequenceForward(model, mesh)


# --- attention --------------------------------------------------------------------------------------------------------


def _attend(
    inner: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    sharded_sequence: _Sequence | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attend to whole sequences with this rank's share of the heads.

    Args:
        query: (B, H, S, D); keys and values have as many heads or fewer.

    Returns:
        (B, S, H, D), and no weights.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(inner, own)
    if sharded_sequence is None:
        if _current.get() is not None:
            raise ConfigError(
                f"{type(module).__name__} does not pass the options of its model on to attention; {_WAY_OUT}"
            )
        output: tuple[Tensor, Any] = attend(module, query, key, value, attention_mask, **options)
        return output
    return _attend_to_all(attend, module, (query, key, value), attention_mask, sharded_sequence, options)


def _attend_to_all(
    attend: Callable[..., Any],
    module: Any,
    given: tuple[Tensor, Tensor, Tensor],
    attention_mask: Any,
    sequence: _Sequence,
    options: dict[str, Any],
) -> tuple[Tensor, Any]:
    name, group, length = type(module).__name__, sequence.group, sequence.length
    size, heads, own_heads = dist.get_world_size(group), given[0].shape[1], given[1].shape[1]
    if heads % size or heads % own_heads:
        raise ConfigError(
            f"{name} has {heads} heads and {own_heads} of keys, which sp_size={size} does not divide; use a size that "
            "does"
        )
    if isinstance(attention_mask, Tensor) and attention_mask.shape[-1] != length:
        raise ConfigError(f"{name} is given a mask of {tuple(attention_mask.shape)} for {length} tokens; {_WAY_OUT}")
    # Heads of keys that are fewer than ranks, or do not divide by them, are on several ranks.
    copies = math.lcm(own_heads, size) // own_heads
    copied = (given[0], *(x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in given[1:]))
    whole = [_AllToAll.apply(x, 1, 2, group)[:, :, :length] for x in copied]
    if options.get("position_ids") is not None:
        options["position_ids"] = sequence.positions
    groups = getattr(module, "num_key_value_groups", 1)
    if copies > 1:
        module.num_key_value_groups = groups // copies
    try:
        attended, _ = attend(module, *whole, attention_mask, **options)
    finally:
        if copies > 1:
            module.num_key_value_groups = groups
    attended = nn.functional.pad(attended, (0, 0, 0, 0, 0, -length % size))
    return _AllToAll.apply(attended, 1, 2, group), None


def _make_mask(inner: str, **options: Any) -> Any:
    """Return the mask of whole sequences, where transformers asks for that of a slice."""
    from transformers import masking_utils

    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[inner]
    sequence = _current.get()
    if sequence is None:
        return make(**options)
    options |= {"q_length": sequence.length, "kv_length": sequence.length}
    if not sequence.is_masked:
        options["attention_mask"] = None
    if sequence.documents is not None:
        options["allow_is_causal_skip"] = False
        options["mask_function"] = masking_utils.packed_sequence_compatibility_function(
            options["mask_function"], sequence.positions, sequence.documents
        )
    return make(**options)


class _AllToAll(torch.autograd.Function):
    """This rank's share of one dimension, for all of another of which it had a share; backwards, the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: int, whole: int, group: dist.ProcessGroup) -> Tensor:
        ctx.shared, ctx.whole, ctx.group = shared, whole, group
        return _exchange(x, shared, whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.whole, ctx.shared, ctx.group), None, None, None


def _exchange(x: Tensor, shared: int, whole: int, group: dist.ProcessGroup) -> Tensor:
    parts = torch.stack(x.detach().chunk(dist.get_world_size(group), shared))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), whole)


# --- the model --------------------------------------------------------------------------------------------------------


class _SequenceForward:
    """A language model's forward on this rank's slice of each sequence. Lives in the model's `forward` attribute."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model: Any = model
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.inner: Callable[..., Any] = model.__dict__.get("forward") or partial(type(model).forward, model)
        self.has_dropout = any(map(_drops, model.modules()))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.__signature__.parameters, args, strict=False)), **kwargs}
        keep = given.get("logits_to_keep", 0)
        if given.get("past_key_values") is not None or given.get("use_cache") or isinstance(keep, Tensor) or keep:
            return self.inner(**given)
        self._check(given)
        as_tuple = not given.pop("return_dict", self.model.config.return_dict)
        output = self._run(given)
        return output.to_tuple() if as_tuple else output

    def _check(self, given: Mapping[str, Any]) -> None:
        """Refuse inputs of which it is not known where their tokens are."""
        name = type(self.model).__name__
        others = [key for key, value in given.items() if isinstance(value, Tensor) and key not in _GIVEN]
        others = [key for key in others if key != "num_items_in_batch"]
        if others:
            raise ConfigError(
                f"{name} is given {', '.join(others)}, and sequence parallelism shares out "
                f"{', '.join(sorted(_GIVEN))}; leave it out, or {_WAY_OUT}"
            )
        if given.get("output_attentions") or self.model.config.output_attentions:
            raise ConfigError(f"{name} is asked for attentions, which no rank has in full; set output_attentions=False")

    def _run(self, given: dict[str, Any]) -> Any:
        words = given.get("input_ids")
        words = given["inputs_embeds"] if words is None else words
        sequence = self._sequence(given, words)
        labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
        num_items = given.pop("num_items_in_batch", None)
        if shifted is None and labels is not None:
            shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        for name in ("input_ids", "inputs_embeds"):
            if given.get(name) is not None:
                given[name] = self._slice(given[name])
        given["position_ids"] = self._slice(sequence.positions)
        if not sequence.is_masked:
            # Else transformers would look for packed sequences in the positions of a slice.
            given["attention_mask"] = words.new_ones(words.shape[:2], dtype=torch.bool)
        loss, before = None, vars(self.model).get("_loss_function")
        if shifted is not None:
            loss = self.model.loss_function = _Loss(self.model.loss_function, shifted, num_items)
            given["labels"] = self._slice(shifted, fill=-100)
        token = _current.set(sequence)
        try:
            with self._own_random_numbers(words.device):
                output = self.inner(**given, use_cache=False, return_dict=True, sharded_sequence=sequence)
        finally:
            _current.reset(token)
            vars(self.model).pop("_loss_function", None)
            if before is not None:
                self.model.loss_function = before
        return self._whole(output, loss, sequence.length)

    @contextmanager
    def _own_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Draw others than the ranks that have the other slices; behind it, all draw the same again."""
        if not (self.has_dropout and self.model.training):
            yield
            return
        seed = int(torch.randint(2**62, ()))  # of the CPU's stream, which is the same on all
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(seed + self.rank)
            yield

    def _sequence(self, given: Mapping[str, Any], words: Tensor) -> _Sequence:
        from transformers.masking_utils import find_packed_sequence_indices

        batch_size, length = words.shape[:2]
        positions, documents, is_masked = given.get("position_ids"), None, given.get("attention_mask") is not None
        if positions is None:
            positions = torch.arange(length, device=words.device).unsqueeze(0)
        elif not is_masked:  # as transformers does
            positions = positions.expand(batch_size, -1)
            documents = find_packed_sequence_indices(positions)
        return _Sequence(self.group, length, positions, is_masked, documents)

    def _slice(self, x: Tensor, fill: int = 0) -> Tensor:
        """Return this rank's tokens, the second dimension, of a tensor that is filled up to have as many on all."""
        if padding := -x.shape[1] % self.size:
            x = nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, padding), value=fill)
        return x.chunk(self.size, dim=1)[self.rank].contiguous()

    def _whole(self, output: Any, loss: _Loss | None, length: int) -> Any:
        """Return the output with the loss of all tokens, and those of its tensors in full that are asked for."""
        if loss is not None:
            if not loss.is_called:
                raise ConfigError(
                    f"{type(self.model).__name__} does not compute its loss by its loss_function, and that of a slice "
                    f"cannot be told from that of a sequence; take off what has replaced its forward, or {_WAY_OUT}"
                )
            output["loss"] = self._sum(output["loss"])
        if loss is None or not torch.is_grad_enabled():
            for name in _BY_TOKEN:
                value = output.get(name)
                if isinstance(value, Tensor):
                    output[name] = _Join.apply(value, self.group)[:, :length]
                elif value is not None:
                    output[name] = tuple(_Join.apply(x, self.group)[:, :length] for x in value)
        return output

    def _sum(self, loss: Tensor) -> Tensor:
        """Return the sum over ranks, with the gradient of this rank's part times their number. Collective."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        # No autograd.Function: the Trainer follows a loss to the number of items that it was divided by.
        part = loss * self.size
        return total + (part - part.detach())


def _drops(module: nn.Module) -> bool:
    """Whether a module has a rate of dropout that is not 0."""
    rates = [value for name, value in vars(module).items() if name == "p" or "dropout" in name]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


class _Loss:
    """The model's loss function on a slice: the part of its tokens in the mean over all tokens of the batch."""

    def __init__(self, function: Callable[..., Tensor], shifted: Tensor, num_items: Any) -> None:
        self.function = function
        self.num_items = (shifted != -100).sum() if num_items is None else num_items
        self.is_called = False

    def __call__(self, logits: Tensor, labels: Tensor, *args: Any, **options: Any) -> Tensor:
        self.is_called = True
        options.pop("sharded_sequence", None)
        options |= {"shift_labels": labels, "num_items_in_batch": self.num_items}
        return self.function(logits, labels, *args, **options)


class _Join(torch.autograd.Function):
    """The tokens of all ranks; backwards, this rank's of the gradient, which is equal on all, times their number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        slices = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(slices, x.detach().contiguous(), group=group)
        return torch.cat(slices, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        return gradient.chunk(size, dim=1)[dist.get_rank(ctx.group)] * size, None
