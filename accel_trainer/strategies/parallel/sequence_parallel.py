"""Sequence and context parallelism: the tokens of a sequence are sharded over ranks that read the same data.

A causal language model of transformers is given this rank's slice of ids, positions and shifted labels. All of it works
on tokens by themselves but attention.

`sp_size`: it gets its heads' share of the whole sequence. An all-to-all before it exchanges heads for tokens, and one
behind it back (Ulysses, arXiv 2309.14509). Attention itself, and the masks of padding, packed sequences and windows,
are transformers' own, of the implementation that the model was loaded with.

`cp_size`: it gets all heads of a slice, and the keys and values of the other slices pass by (ring attention, arXiv
2310.01889): torch's, with the kernels of its SDPA, and the causal mask alone. With another mask or attention, or on a
device without the kernels, those of the whole sequence are gathered (as for Llama 3, arXiv 2407.21783, 3.3.2), and
attention is transformers' own; `alltoall` refuses that.

Gradients come out as `size` times this rank's part of them, whose mean over the ranks is the gradient.
"""

# B batch, H heads, L tokens of the sequence, S tokens of a slice, D features of a head

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.model_wrappers import ReplacedForward
from accel_trainer.runtime.torch_private import RingAttention, has_attention_kernels
from accel_trainer.strategies.parallel.tensor_parallel import apply_collective, drops_out

_PREFIX = "sharded_"
"""Of the names under which transformers finds attention over sharded sequences; its own name follows."""
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers in which tokens meet in attention only."""
_BY_LENGTH = ("dynamic", "longrope")
"""Rotary positions that depend on the length of what is given."""
_GIVEN = frozenset({"input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels"})
_CACHES = ("cache", "past_key_values")
"""What models of transformers from 5.24 on, and those before, call what is kept of earlier tokens."""
_BY_TOKEN = ("logits", "last_hidden_state", "hidden_states")
_OTHER_SCORES = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "dropout")
"""Options of attention by which scores or weights would be others than those of the kernels."""
_TOKENS = 32
"""What half a slice is a multiple of: torch's memory-efficient kernel returns sums for so many queries at a time."""
_WIDTH = 8
"""What the size of a head is filled up to a multiple of for torch's kernels, as by its SDPA."""
_WAY_OUT = "set sp_size and cp_size to 1, and shard with dp_shard_size"
_GATHERED = ("sdpa", "eager", "flex_attention")
"""Implementations of attention that take fewer queries than keys, with a mask of ours."""


class _Slices(NamedTuple):
    """Which tokens each rank of a group has: as many as the others, of sequences that are filled up at their end."""

    group: dist.ProcessGroup
    comm_strategy: str | None
    """How keys and values pass by, in context parallelism; None where tokens are exchanged for heads."""
    has_ring: bool = False
    """Whether torch has ring attention for the model on its device."""

    def cut(self, x: Tensor, fill: int = 0, rank: int | None = None) -> Tensor:
        """Return the slice of this rank, or of another, of a tensor along its second dimension."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group) if rank is None else rank
        unit = size if self.comm_strategy is None else 2 * size * (_TOKENS if self.has_ring else 1)
        if padding := -x.shape[1] % unit:
            x = nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, padding), value=fill)
        if self.comm_strategy is None:
            return x.chunk(size, dim=1)[rank].contiguous()
        # Later tokens attend to more: with a part from either end, all ranks have as much to do.
        parts = x.chunk(2 * size, dim=1)
        return torch.cat((parts[rank], parts[-1 - rank]), dim=1)

    def join(self, slices: list[Tensor]) -> Tensor:
        """Return the whole tensor, filled up, of the slices of all ranks: the inverse of `cut`."""
        if self.comm_strategy is not None:
            halves = [x.chunk(2, dim=1) for x in slices]
            slices = [head for head, _ in halves] + [tail for _, tail in reversed(halves)]
        return torch.cat(slices, dim=1)


class _Sequence(NamedTuple):
    """A batch of sequences whose slices the ranks of a group have; passed down to attention with the other options."""

    slices: _Slices
    length: int
    """Of all slices together, without what fills the last one up."""
    positions: Tensor
    """Of all tokens (B or 1, L)."""
    is_masked: bool
    """Whether a mask was given; else transformers has one for all tokens, and would have had none."""
    documents: Tensor | None
    """Which of the documents that a row was packed from each token is of (B, L); None where rows are one document."""
    places: Tensor | None = None
    """Where in the sequence this rank's tokens are (S), where keys and values are gathered for them."""


_Given = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""

_current: ContextVar[_Sequence | None] = ContextVar("sequence", default=None)
"""The sequences of the forward that runs, for masks: they are made once for all layers, from shapes alone."""


# --- what can be sharded ----------------------------------------------------------------------------------------------


def find_language_model(
    model: nn.Module,
    size: int,
    origin: str,
    num_parts: int = 1,
    comm_strategy: str | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """Return the causal language model that `model` is, or wraps. Not collective; changes nothing.

    Args:
        size: number of ranks on the axis.
        origin: where `size` was asked for, for messages.
        num_parts: number of ranks that share the heads of a layer: its `tp_size`.
        comm_strategy: "allgather" or "alltoall", in context parallelism; None exchanges tokens for heads.
        device: where attention is to be computed; for "alltoall" alone.

    Raises:
        ConfigError: there is none, its tokens meet elsewhere than in attention, or torch has no ring attention for it.
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
    if comm_strategy is None:
        reason = _reason_against(found[0], size, num_parts)
    else:
        reason = _reason_against_context(found[0].config, comm_strategy, device) or _reason_against(found[0], 1, 1)
    if reason is not None:
        raise ConfigError(f"{origin}: {type(found[0]).__name__} {reason}")
    return found[0]


def _reason_against(model: Any, size: int, num_parts: int) -> str | None:
    heads = getattr(model.config, "num_attention_heads", None)
    names = inspect.signature(type(model).forward).parameters
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
        if isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(type(module).forward).parameters:
            return f"has a {type(module).__name__}, which takes positions from the mask of a slice; {_WAY_OUT}"
    return _mixing(model.config)


def _own_attention(config: Any) -> str:
    return str(config._attn_implementation).removeprefix(_PREFIX)


def _reason_against_context(config: Any, comm_strategy: str, device: torch.device | None) -> str | None:
    if comm_strategy == "alltoall" and device is not None:
        return _reason_against_ring(config, device)
    attention = _own_attention(config)
    if attention in _GATHERED:
        return None
    return (
        f"was loaded with attn_implementation {attention}, and context parallelism takes {', '.join(_GATHERED)}; use "
        f"one of them, sp_size, or {_WAY_OUT}"
    )


def _reason_against_ring(config: Any, device: torch.device) -> str | None:
    """Return the reason why ring attention does not fit a configuration or device; None where it does."""
    if not has_attention_kernels(device):
        return (
            f"asks for ring attention on {device.type!r}, and torch has the kernels of that for CUDA; set "
            "cp_comm_strategy to allgather"
        )
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"})
    attention = _own_attention(config)
    window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    rates = [name for name, value in vars(config).items() if re.search("att.*drop", name) and value]
    found = {
        "has layers of": ", ".join(kinds),
        "has sliding_window": window,
        "drops in attention by": ", ".join(f"{name}={getattr(config, name)}" for name in rates),
        "was loaded with attn_implementation": attention if attention != "sdpa" else None,
    }
    reason = next((f"{what} {value}" for what, value in found.items() if value), None)
    return reason and (
        f"{reason}, and ring attention is causal SDPA to all tokens, without dropout; change that, set "
        f"cp_comm_strategy to allgather, use sp_size, or {_WAY_OUT}"
    )


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


def shard_sequences(
    model: nn.Module, mesh: DeviceMesh, comm_strategy: str | None = None, device: torch.device | None = None
) -> None:
    """Replace the forward of a causal language model by one that computes a slice of each sequence on each rank.

    Collective then. The loss that it returns is that of all tokens, on every rank. Without labels, and where gradients
    are off, so are logits and hidden states; with labels in training, they are those of this rank's slice. With a cache
    of keys and values, in `generate` for one, each rank computes all of it.

    Args:
        mesh: one axis, whose ranks read the same data.
        comm_strategy: "allgather" or "alltoall", in context parallelism; None exchanges tokens for heads.
        device: where attention is computed, in context parallelism.
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
    has_ring = comm_strategy is not None and device is not None and _reason_against_ring(model.config, device) is None
    model.forward = _SequenceForward(model, mesh, _Slices(mesh.get_group(), comm_strategy, has_ring))


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
    """Attend to whole sequences with this rank's heads or tokens: query (B, H, S, D) to (B, S, H, D), no weights."""
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
    given = query, key, value
    if sharded_sequence.places is not None:
        return _attend_gathered(attend, module, given, attention_mask, sharded_sequence, options)
    if sharded_sequence.slices.comm_strategy is not None:
        return _attend_in_ring(module, given, attention_mask, sharded_sequence.slices, options), None
    return _attend_to_all(attend, module, given, attention_mask, sharded_sequence, options)


def _attend_to_all(
    attend: Callable[..., Any], module: Any, given: _Given, mask: Any, sequence: _Sequence, options: dict[str, Any]
) -> tuple[Tensor, Any]:
    name, group, length = type(module).__name__, sequence.slices.group, sequence.length
    size, heads, own_heads = dist.get_world_size(group), given[0].shape[1], given[1].shape[1]
    if heads % size or heads % own_heads:
        raise ConfigError(
            f"{name} has {heads} heads and {own_heads} of keys, which sp_size={size} does not divide; use a size that "
            "does"
        )
    _check_keys(name, mask, length)
    # Heads of keys that are fewer than ranks, or do not divide by them, are on several ranks.
    copies = math.lcm(own_heads, size) // own_heads
    copied = (given[0], *(x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in given[1:]))
    whole = [_swap(x, group)[:, :, :length] for x in copied]
    if options.get("position_ids") is not None:
        options["position_ids"] = sequence.positions
    groups = getattr(module, "num_key_value_groups", 1)
    if copies > 1:
        module.num_key_value_groups = groups // copies
    try:
        attended, _ = attend(module, *whole, mask, **options)
    finally:
        if copies > 1:
            module.num_key_value_groups = groups
    attended = nn.functional.pad(attended, (0, 0, 0, 0, 0, -length % size))
    return _swap(attended, group), None


def _attend_gathered(
    attend: Callable[..., Any], module: Any, given: _Given, mask: Any, sequence: _Sequence, options: dict[str, Any]
) -> tuple[Tensor, Any]:
    """Attend with this rank's queries to the keys and values of the whole sequence, which its backward keeps."""
    query, key, value = given
    if mask is None:
        raise ConfigError(f"{type(module).__name__} takes no mask, by which tokens know their places; {_WAY_OUT}")
    _check_keys(type(module).__name__, mask, sequence.length)
    there, back = partial(_gather_tokens, sequence), partial(_return_tokens, sequence)
    whole = apply_collective(torch.cat((key, value), dim=-1), sequence.slices.group, there=there, back=back)
    attended, _ = attend(module, query, *whole.split((key.shape[-1], value.shape[-1]), dim=-1), mask, **options)
    return attended, None


def _check_keys(name: str, mask: Any, length: int) -> None:
    if isinstance(mask, Tensor) and mask.shape[-1] != length:
        raise ConfigError(f"{name} is given a mask of {tuple(mask.shape)} for {length} tokens; {_WAY_OUT}")


def _gather_tokens(sequence: _Sequence, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (B, H, L, D) of the slices (B, H, S, D) of all ranks."""
    own = x.detach().transpose(1, 2).contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return sequence.slices.join(parts)[:, : sequence.length].transpose(1, 2)


def _return_tokens(sequence: _Sequence, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's slice (B, H, S, D) of the sum of all ranks' tensors for the whole sequence (B, H, L, D)."""
    size, x = dist.get_world_size(group), x.transpose(1, 2)
    parts = torch.stack([sequence.slices.cut(x, rank=rank) for rank in range(size)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.sum(0).transpose(1, 2)


@torch.compiler.disable
def _attend_in_ring(module: Any, given: _Given, mask: Any, slices: _Slices, options: Mapping[str, Any]) -> Tensor:
    _check_scores(module, mask, options)
    query, _, value = given
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    width = max(x.shape[-1] for x in given)
    width += -width % _WIDTH
    filled = (nn.functional.pad(x.to(dtype), (0, width - x.shape[-1])) for x in given)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    attended: Tensor = _RingAttention.apply(*filled, slices, scale)
    return attended[..., : value.shape[-1]].transpose(1, 2).contiguous()


def _check_scores(module: Any, attention_mask: Any, options: Mapping[str, Any]) -> None:
    found = [name for name in _OTHER_SCORES if isinstance(value := options.get(name), Tensor) or value]
    is_causal = options.get("is_causal")
    if attention_mask is not None:
        found.append("a mask")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        found.append("is_causal=False")
    if found:
        raise ConfigError(
            f"{type(module).__name__} asks for {', '.join(found)}, and ring attention is causal SDPA to all tokens; "
            f"use sp_size, or {_WAY_OUT}"
        )


class _RingAttention(torch.autograd.Function):
    """Causal attention of this rank's tokens (B, H, S, D) to all; keys and values may have fewer heads."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, slices: _Slices, scale: float) -> Tensor:
        ctx.ring = RingAttention.among(slices.group, str(slices.comm_strategy), query, scale)
        output, sums, ctx.rest = ctx.ring.forward(query, key, value)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.ring.backward(gradient.contiguous(), *ctx.saved_tensors, ctx.rest), None, None


def _make_mask(inner: str, **options: Any) -> Any:
    """Return the mask of whole sequences, where transformers asks for that of a slice."""
    from transformers import masking_utils

    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[inner]
    sequence = _current.get()
    if sequence is None:
        return make(**options)
    if sequence.slices.comm_strategy is not None and sequence.places is None:
        if options["mask_function"] is not masking_utils.causal_mask_function:
            raise ConfigError(f"a mask is asked for that is not the causal one; use sp_size, or {_WAY_OUT}")
        return None
    options |= {"q_length": sequence.length, "kv_length": sequence.length}
    if not sequence.is_masked:
        options["attention_mask"] = None
    if sequence.documents is not None:
        options["allow_is_causal_skip"] = False
        options["mask_function"] = _within_documents(options["mask_function"], sequence)
    if sequence.places is not None:
        options |= {"q_length": len(sequence.places), "allow_is_causal_skip": False}
        options["mask_function"] = _at_places(options["mask_function"], sequence.places)
    return make(**options)


def _at_places(mask_function: Any, places: Tensor) -> Any:
    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(batch, head, places[query], key)

    return mask


def _within_documents(mask_function: Any, sequence: _Sequence) -> Any:
    from transformers import masking_utils

    # Not in 5.17 to 5.20, which count chunks of attention from the beginning of a row.
    within = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if within is not None:
        return within(mask_function, sequence.positions, sequence.documents)
    return masking_utils.and_masks(masking_utils.packed_sequence_mask_function(sequence.documents), mask_function)


def _exchange(x: Tensor, group: dist.ProcessGroup, shared: int, whole: int) -> Tensor:
    parts = torch.stack(x.detach().chunk(dist.get_world_size(group), shared))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), whole)


_swap = partial(
    apply_collective, there=partial(_exchange, shared=1, whole=2), back=partial(_exchange, shared=2, whole=1)
)
"""This rank's share of the second dimension, for all of the third; backwards, the other way."""


# --- the model --------------------------------------------------------------------------------------------------------


class _SequenceForward(ReplacedForward):
    """A language model's forward on this rank's slice of each sequence."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, slices: _Slices) -> None:
        super().__init__(model)
        self.slices, self.size, self.rank = slices, mesh.size(), mesh.get_local_rank()
        self.has_dropout = any(map(drops_out, model.modules()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.__signature__.parameters, args, strict=False)), **kwargs}
        skips_logits = given.pop("skip_logits", False)  # of a Trainer's evaluation for which the loss is enough
        keep = given.get("logits_to_keep", 0)
        has_cache = any(given.get(name) is not None for name in _CACHES)
        if has_cache or given.get("use_cache") or isinstance(keep, Tensor) or keep:
            return self.own(**given)
        self._check(given)
        asked = given.pop("return_dict", None)  # which PEFT gives as None
        as_tuple = not (self.module.config.return_dict if asked is None else asked)
        output = self._run(given, skips_logits)
        return output.to_tuple() if as_tuple else output

    def _check(self, given: Mapping[str, Any]) -> None:
        """Refuse inputs of which it is not known where their tokens are."""
        name = type(self.module).__name__
        known = {*_GIVEN, "num_items_in_batch"}
        others = [key for key, value in given.items() if isinstance(value, Tensor) and key not in known]
        if others:
            raise ConfigError(
                f"{name} is given {', '.join(others)}, and sequence parallelism shares out "
                f"{', '.join(sorted(_GIVEN))}; leave it out, or {_WAY_OUT}"
            )
        if given.get("output_router_logits"):
            raise ConfigError(f"{name} is asked for router logits, of which no rank has all; leave them out")
        if given.get("output_attentions") or self.module.config.output_attentions:
            raise ConfigError(f"{name} is asked for attentions, which no rank has in full; set output_attentions=False")

    def _run(self, given: dict[str, Any], skips_logits: bool) -> Any:
        given.pop("use_cache", None)
        words = given.get("input_ids")
        words = given["inputs_embeds"] if words is None else words
        sequence = self._sequence(given, words)
        labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
        num_items = given.pop("num_items_in_batch", None)
        if shifted is None and labels is not None:
            shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        if self.slices.comm_strategy is not None:
            sequence = self._with_places(sequence, given.get("attention_mask"), shifted)
        for name in ("input_ids", "inputs_embeds"):
            if given.get(name) is not None:
                given[name] = self.slices.cut(given[name])
        given["position_ids"] = self.slices.cut(sequence.positions)
        if not sequence.is_masked:
            # Else transformers would look for packed sequences in the positions of a slice.
            given["attention_mask"] = words.new_ones(words.shape[:2], dtype=torch.bool)
        loss, before = None, vars(self.module).get("_loss_function")
        if shifted is not None:
            loss = self.module.loss_function = _Loss(self.module.loss_function, shifted, num_items)
            given["labels"] = self.slices.cut(shifted, fill=-100)
        token = _current.set(sequence)
        try:
            with self._own_random_numbers(words.device):
                output = self.own(**given, use_cache=False, return_dict=True, sharded_sequence=sequence)
        finally:
            _current.reset(token)
            vars(self.module).pop("_loss_function", None)
            if before is not None:
                self.module.loss_function = before
        return self._whole(output, loss, sequence.length, skips_logits)

    def _with_places(self, sequence: _Sequence, mask: Tensor | None, shifted: Tensor | None) -> _Sequence:
        """Return the sequence with the places of this rank's tokens, unless ring attention is enough for it."""
        slices, name = self.slices, type(self.module).__name__
        if mask is not None and (mask.ndim != 2 or mask.shape[1] != sequence.length):
            raise ConfigError(
                f"{name} is given a mask of {tuple(mask.shape)} for {sequence.length} tokens, and context parallelism "
                f"takes (B, {sequence.length}); use that, or sp_size"
            )
        if slices.has_ring:
            found = _beyond_causal(sequence, mask, shifted)
            if found is None:
                return sequence
            if slices.comm_strategy == "alltoall":
                raise ConfigError(
                    f"{name} is given {found}, and ring attention is causal SDPA to all tokens; set cp_comm_strategy "
                    "to allgather, pad behind the tokens, with labels of -100, or use sp_size"
                )
        places = torch.arange(sequence.length, device=sequence.positions.device).unsqueeze(0)
        # What fills a slice up is at the last place: it counts nowhere, and its mask is not empty.
        return sequence._replace(places=slices.cut(places, fill=sequence.length - 1)[0])

    @contextmanager
    def _own_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Draw others than the ranks that have the other slices; behind it, all draw the same again."""
        if not (self.has_dropout and self.module.training):
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
        return _Sequence(self.slices, length, positions, is_masked, documents)

    def _whole(self, output: Any, loss: _Loss | None, length: int, skips_logits: bool) -> Any:
        """Return the output with the loss of all tokens, and those of its tensors in full that are asked for."""
        if loss is not None:
            if not loss.is_called:
                raise ConfigError(
                    f"{type(self.module).__name__} does not compute its loss by its loss_function, and that of a slice "
                    f"cannot be told from that of a sequence; take off what has replaced its forward, or {_WAY_OUT}"
                )
            output["loss"] = self._sum(output["loss"])
        if loss is None or not (torch.is_grad_enabled() or skips_logits):
            for name in _BY_TOKEN:
                value = output.get(name)
                if isinstance(value, Tensor):
                    output[name] = _join(value, self.slices)[:, :length]
                elif isinstance(value, tuple):
                    output[name] = tuple(_join(x, self.slices)[:, :length] for x in value)
        return output

    def _sum(self, loss: Tensor) -> Tensor:
        """Return the sum over ranks, with the gradient of this rank's part times their number. Collective."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.slices.group)
        # No autograd.Function: the Trainer follows a loss to the number of items that it was divided by.
        part = loss * self.size
        return total + (part - part.detach())


def _beyond_causal(sequence: _Sequence, mask: Tensor | None, shifted: Tensor | None) -> str | None:
    """Return why a token that counts attends to others than all before it; None if none does. Masks are waited for."""
    if sequence.documents is not None:
        return "rows packed of several documents, by position_ids"
    if mask is not None and bool(_counts_behind_padding(mask.bool(), shifted).any()):
        return "padding before tokens or labels that count"
    return None


def _counts_behind_padding(mask: Tensor, shifted: Tensor | None) -> Tensor:
    """Return which tokens, or labels of them, are behind a padded one, by row."""
    counts = mask if shifted is None else mask | (shifted != -100)
    return counts & ((~mask).cumsum(1) > 0)


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


def _join(x: Tensor, slices: _Slices) -> Tensor:
    """Return the tokens of all ranks; backwards, this rank's of the gradient, equal on all, times their number."""
    size = dist.get_world_size(slices.group)

    def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.detach().contiguous(), group=group)
        return slices.join(parts)

    return apply_collective(x, slices.group, gather, lambda gradient, group: slices.cut(gradient) * size)
