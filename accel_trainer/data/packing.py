"""Packing: documents of many lengths in rows of one length, which see nothing of each other.

`pack_dataset` plans the rows from the lengths of the documents alone, so every rank and worker has the same plan, and
rows are shuffled, sharded and resumed as the samples of any other data set are. `PackingCollator` makes batches of
rows: positions begin at 0 with each document, by which transformers (5.23, masking_utils.py:876 and
modeling_flash_attention_utils.py:855) keeps attention within it, and its first token is no target. `check_packing` asks
a model whether it does.
"""

# B rows, L tokens of a row, V vocabulary

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from accel_trainer.data.plan import mix_seed, permutation
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.logging import get_logger
from accel_trainer.runtime.rng import KeptStreams
from accel_trainer.runtime.tensor_trees import send_to_device

logger = get_logger(__name__)

STRATEGIES = ("bfd", "bfd_split", "wrapped")

_WINDOW = 8192
"""Documents that are packed together: a window leaves one row or two that are not full, of about a thousand."""

Piece = tuple[Any, int, int]
"""A document, or its index, with the first of its tokens and the one after the last."""


# --- the plan ---------------------------------------------------------------------------------------------------------


def pack_lengths(
    lengths: np.ndarray, max_length: int, strategy: str, seed: int = 0, window: int = _WINDOW
) -> tuple[np.ndarray, np.ndarray]:
    """Return pieces of documents, row by row, and how many are in each row: a function of the arguments only.

    Args:
        lengths: tokens of each document, int64 (documents,).
        max_length: most tokens of a row.
        strategy: "bfd" puts each document, the longest first, where the least space is left over (best fit decreasing;
            Ding et al., arXiv 2404.10830), and cuts the end of longer ones off; "bfd_split" cuts those into pieces;
            "wrapped" fills each row to the end, and goes on with the rest of a document in the next.
        seed: of the order of the rows of a window, which "bfd" makes of the longest documents first.
        window: documents that are packed together.

    Returns:
        int64 (pieces, 3), index of the document with the first of its tokens and the one after the last; int64 (rows,).
    """
    if strategy == "wrapped":
        rows = list(_wrap(enumerate(lengths.tolist()), max_length))
        numbers = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int64)
        return numbers.reshape(-1, 3), np.array([*map(len, rows)], np.int64)
    pieces, counts = [np.empty((0, 3), np.int64)], [np.empty(0, np.int64)]
    for number, begin in enumerate(range(0, len(lengths), window)):
        held = lengths[begin : begin + window]
        packed, in_rows = _pack_window(held, max_length, strategy, mix_seed(seed, number))
        packed[:, 0] += begin
        pieces.append(packed)
        counts.append(in_rows)
    return np.concatenate(pieces), np.concatenate(counts)


def _pack_window(lengths: np.ndarray, max_length: int, strategy: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    documents = np.flatnonzero(lengths)
    begins = np.zeros_like(documents)
    if strategy == "bfd_split":
        counts = -(-lengths // max_length)
        documents = np.repeat(np.arange(len(lengths)), counts)
        begins = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_length
    sizes = np.minimum(lengths[documents] - begins, max_length)
    longest_first = np.argsort(-sizes, kind="stable")
    rows = np.array(_best_fit(sizes[longest_first].tolist(), max_length), np.int64)
    order = list(range(int(rows.max(initial=-1)) + 1))
    random.Random(seed).shuffle(order)
    rows = np.argsort(order)[rows]
    by_row = longest_first[np.argsort(rows, kind="stable")]
    return np.stack([documents, begins, begins + sizes], axis=1)[by_row], np.bincount(rows)


def _best_fit(sizes: list[int], max_length: int) -> list[int]:
    """Return the row of each piece, of which the longest come first."""
    rows: list[int] = []
    by_space: list[list[int]] = [[] for _ in range(max_length)]
    spaces = num_rows = 0  # bit n of spaces: a row has n tokens left; the lowest one that fits is found in 0.2 us
    for size in sizes:
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, row = max_length, num_rows
            num_rows += 1
        rows.append(row)
        if left := space - size:
            by_space[left].append(row)
            spaces |= 1 << left
    return rows


def _wrap(documents: Iterable[tuple[Any, int]], max_length: int, begin: int = 0) -> Iterator[list[Piece]]:
    """Yield full rows, and the last one; the first document from its token `begin` on."""
    row: list[Piece] = []
    space = max_length
    for document, length in documents:
        while begin < length:
            end = min(length, begin + space)
            row.append((document, begin, end))
            begin, space = end, space - (end - begin)
            if not space:
                yield row
                row, space = [], max_length
        begin = 0
    if row:
        yield row


def pack_dataset(
    dataset: Any,
    max_length: int,
    packing_strategy: str = "bfd",
    *,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    buffer_size: int = _WINDOW,
) -> PackedDataset | PackedStream:
    """Return a data set whose samples are packed rows, for a loader whose collate function is a `PackingCollator`.

    A map-style set is planned here, once, from the lengths of all its documents: of tokenized sets of `datasets` these
    are read from the tables, of others document by document, unless they are given. A stream is packed as it comes.
    Ranks do not communicate: each has the same plan.

    Args:
        dataset: its samples are mappings with "input_ids" of any length, unpadded, and what else there is for each
            token, such as "labels".
        max_length: tokens of a row.
        packing_strategy: "bfd" cuts off what of a document is longer than a row, "bfd_split" makes pieces of it, and
            "wrapped" cuts wherever a row is full. Each piece is a document of its own.
        seed: of the order in which documents are packed.
        buffer_size: documents of a stream that are packed together.

    Raises:
        ConfigError: an argument is none of these, or the samples have no "input_ids".
    """
    if packing_strategy not in STRATEGIES:
        raise ConfigError(f"packing_strategy={packing_strategy!r} is none of {', '.join(STRATEGIES)}; choose one")
    for name, value in (("max_length", max_length), ("buffer_size", buffer_size)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} was given to packing, which needs an integer of 1 or more")
    if isinstance(dataset, IterableDataset):
        return PackedStream(dataset, max_length, packing_strategy, seed, buffer_size)
    return PackedDataset(dataset, max_length, packing_strategy, seed, lengths)


class PackedDataset(Dataset[Any]):
    """Packed rows of a map-style set, made by `pack_dataset`: lists of its documents, or of pieces of them.

    Attributes:
        dataset: the documents.
        num_tokens: tokens in all rows.
    """

    def __init__(
        self, dataset: Any, max_length: int, packing_strategy: str, seed: int, lengths: Sequence[int] | None
    ) -> None:
        self.dataset = dataset
        self.max_length = max_length
        found = _lengths_of(dataset) if lengths is None else np.array(lengths, np.int64)
        if len(found) != len(dataset):
            raise ConfigError(f"{len(found)} lengths were given for {len(dataset)} documents; give one for each")
        longer = int((found > max_length).sum())
        if longer and packing_strategy == "bfd":
            logger.warning(
                f"{longer} of {len(found)} documents are longer than max_length={max_length}, and their ends are left "
                "out; packing_strategy='bfd_split' keeps them as documents of their own"
            )
        order = permutation(len(found), seed, 0).numpy()
        pieces, counts = pack_lengths(found[order], max_length, packing_strategy, seed)
        pieces[:, 0] = order[pieces[:, 0]]
        self._pieces = torch.from_numpy(pieces)
        self._ends = torch.from_numpy(np.cumsum([0, *counts]))
        self.num_tokens = int((pieces[:, 2] - pieces[:, 1]).sum())

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> list[Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[list[Any]]:
        """Return rows, whose documents are read in one call where the data set has one for it."""
        if indices and not -len(self) <= min(indices) <= max(indices) < len(self):
            raise IndexError(f"row {max(indices)} of {len(self)} packed rows")
        bounds = [(int(self._ends[index % len(self)]), int(self._ends[index % len(self) + 1])) for index in indices]
        pieces = [self._pieces[begin:end].tolist() for begin, end in bounds]
        wanted = [index for row in pieces for index, _, _ in row]
        read_all = getattr(self.dataset, "__getitems__", None)
        samples = iter(read_all(wanted) if read_all else [self.dataset[index] for index in wanted])
        return [[_cut(next(samples), begin, end) for _, begin, end in row] for row in pieces]


class PackedStream(IterableDataset[Any]):
    """Packed rows of a stream, made by `pack_dataset`; each reader packs its own rows.

    Its state is that of a stream with one, at the documents that are packed together, and the rows of them.

    Attributes:
        dataset: the documents.
    """

    def __init__(self, dataset: Any, max_length: int, packing_strategy: str, seed: int, buffer_size: int) -> None:
        self.dataset = dataset
        self.max_length = max_length
        self._strategy, self._seed, self._buffer_size = packing_strategy, seed, buffer_size
        self._packed_by = {
            "max_length": max_length, "packing_strategy": packing_strategy, "seed": seed, "buffer_size": buffer_size,
        }  # fmt: skip
        """What its rows depend on, for a state: the place in them is none in others."""
        self._num_longer = 0
        self._begin: dict[str, Any] | None = None
        self._state: dict[str, Any] = {}
        self._before: Any = None
        """The state of the data set before the documents of a window, or the last one where rows are filled in turn."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the next row is: plain data if the state of the data set is."""
        return {**self._state, "packed_by": self._packed_by}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next pass at a state; an IncompatibleCheckpointError where its rows were packed otherwise."""
        before, now = state_dict.get("packed_by"), self._packed_by
        if before not in (None, now):
            raise IncompatibleCheckpointError(
                f"the place is one in rows of {before}, and these are packed by {now}; resume with those options"
            )
        self._begin = state_dict if "window" in state_dict else None

    def __iter__(self) -> Iterator[list[Any]]:
        begin, self._begin = self._begin or {"dataset": None, "window": 0, "given": 0}, None
        self._before = begin["dataset"]
        if self._before is not None:
            self.dataset.load_state_dict(self._before)
        read = self._wrapped if self._strategy == "wrapped" else self._windows
        for row in read(begin["window"], begin["given"]):
            yield [_cut(sample, begin, end) for sample, begin, end in row]

    def _wrapped(self, _: int, begin: int) -> Iterator[list[Piece]]:
        for row in _wrap(self._documents(1), self.max_length, begin):
            self._state = {"dataset": self._before, "window": 0, "given": row[-1][2]}
            yield row

    def _windows(self, first: int, given: int) -> Iterator[list[Piece]]:
        size = self._buffer_size
        documents = self._documents(size)
        for number in count(first):
            if not (held := list(islice(documents, size))):
                return
            lengths, before = np.array([length for _, length in held]), self._before
            pieces, counts = _pack_window(lengths, self.max_length, self._strategy, mix_seed(self._seed, number))
            rest = iter(pieces.tolist())
            for index, count_here in enumerate(counts.tolist(), 1):
                row = [(held[document][0], begin, end) for document, begin, end in islice(rest, count_here)]
                if index > given:
                    self._state = {"dataset": before, "window": number, "given": index}
                    yield row
            given = 0

    def _documents(self, window: int) -> Iterator[tuple[Any, int]]:
        samples = iter(self.dataset)
        for number in count():
            if number and number % window == 0 and hasattr(self.dataset, "state_dict"):
                self._before = self.dataset.state_dict()
            if (sample := next(samples, None)) is None:
                return
            length = _count_tokens(sample)
            if length > self.max_length and self._strategy == "bfd" and not self._num_longer:
                self._num_longer = length
                logger.warning(
                    f"a document of {length} tokens is longer than max_length={self.max_length}: the ends of such are "
                    "left out; packing_strategy='bfd_split' keeps them as documents of their own"
                )
            yield sample, length


def _lengths_of(dataset: Any) -> np.ndarray:
    """Return the number of tokens of each document, of tables without making Python objects of the tokens."""
    is_table = hasattr(dataset, "with_format") and "input_ids" in (getattr(dataset, "column_names", None) or ())
    if is_table and dataset.format["type"] != "custom":  # what a transform makes of the table is as long as it wants
        tables = dataset.select_columns("input_ids").with_format("arrow").iter(batch_size=_WINDOW)
        chunks = [chunk.value_lengths() for table in tables for chunk in table["input_ids"].chunks]
        lengths = np.concatenate([np.empty(0, np.int64), *(each.fill_null(0).to_numpy(False) for each in chunks)])
        return lengths.astype(np.int64)
    return np.array([_count_tokens(dataset[index]) for index in range(len(dataset))], np.int64)


def _count_tokens(sample: Any) -> int:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        found = f"columns {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
        raise ConfigError(
            f"a sample to be packed has {found}, and packing counts the tokens in its 'input_ids'; tokenize the data "
            "set first"
        )
    return len(sample["input_ids"])


def _cut(sample: Any, begin: int, end: int) -> Any:
    length = len(sample["input_ids"])
    if not begin and end >= length:
        return sample
    return {name: value[begin:end] if _is_by_token(value, length) else value for name, value in sample.items()}


def _is_by_token(value: Any, length: int) -> bool:
    # Tensors and arrays without dimensions have a __len__ that raises.
    has_length = hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0
    return has_length and not isinstance(value, (str, bytes)) and len(value) == length


# --- the batch --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class PackingCollator:
    """Makes batches of packed rows, or of plain samples, for models that predict the next token.

    A batch has "input_ids", "labels" (those of the samples, else the tokens) and "position_ids", (B, L), int64, and
    what else the samples have for each token. The labels of first tokens, and of what fills short rows up, are -100.
    It has no attention mask, by which transformers would take each row for one document, and `use_cache=False`: with a
    cache it does not look for documents (5.23, masking_utils.py:876).
    """

    pad_token_id: int = 0
    padding_free: bool = False
    """Put the documents of a batch into one row (1, total), without padding: as flash attention wants them."""
    return_flash_attn_kwargs: bool = False
    """With `padding_free`: add `cu_seq_lens_q`, `cu_seq_lens_k` (int32) and `max_length_q`, `max_length_k`, which flash
    attention would work out of the positions in each layer."""
    pad_to_multiple_of: int | None = None
    columns: Sequence[str] | None = None
    """Columns of a sample to read; None reads all."""
    collate_document: Callable[[list[Any]], Any] | None = None
    """A collate function of your own, called with each document alone; its padding is taken off."""

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Return the batch of packed rows, or of samples, which are rows of one document."""
        documents = [self._read_row(row) for row in rows]
        if self.padding_free:
            documents = [list(chain.from_iterable(documents))]
        lengths = [[len(document["input_ids"]) for document in row] for row in documents]
        width = max(map(sum, lengths))
        width += -width % (self.pad_to_multiple_of or 1)
        fills = {"input_ids": self.pad_token_id, "labels": -100}
        names = dict.fromkeys(chain.from_iterable(chain.from_iterable(documents)))
        _check_columns(set(names) - {"labels"}, documents)
        batch = {name: _stack(documents, name, width, fills.get(name, 0)) for name in names}
        if "labels" not in batch:
            batch["labels"] = batch["input_ids"].clone()
            for labels, row in zip(batch["labels"], lengths, strict=True):
                labels[sum(row) :] = -100
        return batch | self._mark_documents(batch["labels"], lengths, width)

    def _mark_documents(self, labels: Tensor, lengths: list[list[int]], width: int) -> dict[str, Any]:
        """Take the first tokens of documents from the labels; return arguments that say where documents begin."""
        # What fills a row up is a document as well: it sees itself, and nobody sees it.
        sizes = torch.tensor([n for row in lengths for n in (*row, width - sum(row)) if n])
        ends = sizes.cumsum(0)
        starts = ends - sizes
        labels.view(-1)[starts] = -100
        positions = torch.arange(labels.numel()) - starts.repeat_interleave(sizes)
        marks = {"position_ids": positions.view(-1, width), "use_cache": False}
        if self.padding_free and self.return_flash_attn_kwargs:
            bounds, longest = nn.functional.pad(ends, (1, 0)).int(), int(sizes.max())
            marks |= {f"cu_seq_lens_{side}": bounds for side in "qk"} | {f"max_length_{side}": longest for side in "qk"}
        return marks

    def _read_row(self, row: Any) -> list[dict[str, Any]]:
        """Return the documents of a packed row, or a sample, as columns that have a value for each token."""
        return [self._read(self._select(sample)) for sample in (row if isinstance(row, list) else [row])]

    def _select(self, sample: Any) -> Any:
        if isinstance(sample, Mapping):  # concatenated tables have None where one of them lacks a column
            names = sample if self.columns is None else self.columns
            sample = {name: value for name, value in sample.items() if name in names and value is not None}
        if self.collate_document is not None:
            made = self.collate_document([sample])
            sample = {name: value[0] for name, value in made.items() if value is not None}
        return sample

    def _read(self, sample: Any) -> dict[str, Any]:
        length = _count_tokens(sample)
        others = sorted(name for name, value in sample.items() if not _is_by_token(value, length))
        if others:
            raise ConfigError(
                f"a document of {length} tokens has {', '.join(others)} without a value for each token, which cannot "
                "be packed; remove those columns"
            )
        document = {name: value for name, value in sample.items() if name != "attention_mask"}
        mask = sample.get("attention_mask", ())
        if not _is_all_true(mask):
            if self.collate_document is None:
                raise ConfigError(
                    f"a document of {length} tokens has padding, by its attention_mask, and packing is to do without; "
                    "tokenize with padding=False"
                )
            kept = torch.as_tensor(mask).bool()
            document = {name: torch.as_tensor(value)[kept] for name, value in document.items()}
        return document


def _is_all_true(mask: Any) -> bool:
    return bool(mask.all()) if isinstance(mask, Tensor) else 0 not in mask


def _check_columns(columns: set[str], documents: list[list[dict[str, Any]]]) -> None:
    if lacking := sorted({name for row in documents for document in row for name in columns - document.keys()}):
        raise ConfigError(
            f"some documents of a batch have {', '.join(lacking)}, and others have none, which cannot be packed; "
            "give all of them a value for each token, or remove those columns"
        )


def _stack(documents: list[list[dict[str, Any]]], name: str, width: int, fill: int) -> Tensor:
    """Return a column of all documents as rows (B, width), filled up; tokens and labels that are integers as int64."""

    def read(document: dict[str, Any]) -> Tensor:
        value = document["input_ids"] if name == "labels" and name not in document else document[name]
        value = value if isinstance(value, Tensor) else torch.tensor(value)
        return value.long() if name in ("input_ids", "labels") and not value.is_floating_point() else value

    # Without documents of no tokens: torch makes float32 of an empty list.
    parts = [[value for value in map(read, row) if len(value)] for row in documents]
    dtype = next((value.dtype for value in chain.from_iterable(parts)), torch.int64)
    rows = [torch.cat(row) if row else torch.empty(0, dtype=dtype) for row in parts]
    return torch.stack([nn.functional.pad(row, (0, width - len(row)), value=fill) for row in rows])


# --- the model --------------------------------------------------------------------------------------------------------

_NUM_TOKENS = 5
_FLEX = "flex_attention"
_WAY_OUT = "leave packing and padding_free out for it"


def check_packing(model: nn.Module, collator: PackingCollator | None = None, *, device: Any = None) -> None:
    """Refuse a model in which packed documents see each other, or have other positions than alone.

    Two documents of five tokens are computed packed and alone, three forwards of it without gradients, dropout or a
    trace in random streams. Every rank calls it where the forward is collective.

    Args:
        model: a causal language model, prepared or not.
        collator: as batches are made; the default one for None.
        device: of the inputs; that of the parameters for None.

    Raises:
        ConfigError: it takes no positions; its documents are not what they are alone; or it cannot be trained there.
    """
    bare = _unwrapped(model)
    name = type(bare).__name__.removeprefix("FSDP")
    parameters = inspect.signature(bare.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters and not takes_all:
        raise ConfigError(
            f"{name} takes no position_ids, by which packed documents are told apart; {_WAY_OUT}, or use a model that "
            "does"
        )
    device = next(bare.parameters()).device if device is None else torch.device(device)
    if device.type == "cpu" and getattr(getattr(bare, "config", None), "_attn_implementation", None) == _FLEX:
        raise ConfigError(
            f"{name} has attn_implementation={_FLEX!r}, of which torch has no backward on CPUs; train with 'sdpa' there"
        )
    found = _compare(model, bare, collator or PackingCollator(), device)
    if found is not None:
        raise ConfigError(f"{name} cannot be trained on packed documents: {found}; {_WAY_OUT}")


def check_prepared(models: Iterable[nn.Module], loaders: Iterable[Any], device: torch.device) -> None:
    """Call `check_packing` for models that take tokens, where a loader beside them packs. Every rank calls it."""
    packing = [loader.collate_fn for loader in loaders if isinstance(loader.collate_fn, PackingCollator)]
    for model in models if packing else ():
        if "input_ids" in inspect.signature(_unwrapped(model).forward).parameters:
            check_packing(model, packing[0], device=device)


def _unwrapped(model: nn.Module) -> Any:
    bare: Any = model
    while isinstance(getattr(bare, "module", None), nn.Module):
        bare = bare.module
    return bare


def _compare(model: nn.Module, bare: Any, collator: PackingCollator, device: Any) -> str | None:
    """Return the difference between packed documents and those alone; None where they do not."""
    sizes = [module.num_embeddings for module in bare.modules() if isinstance(module, nn.Embedding)]
    vocabulary = sizes[0] if sizes else 2
    first, other, second = ([(start + 7 * token) % vocabulary for token in range(_NUM_TOKENS)] for start in (3, 5, 11))

    def logits_of(rows: list[list[list[int]]]) -> Tensor:
        plain = PackingCollator(
            padding_free=collator.padding_free, return_flash_attn_kwargs=collator.return_flash_attn_kwargs
        )
        batch = plain([[{"input_ids": document} for document in row] for row in rows])
        del batch["labels"]
        output = model(**send_to_device(batch, device))
        logits: Tensor = output["logits"] if isinstance(output, Mapping) else output[0]
        return logits.float().view(len(rows), -1, logits.shape[-1])

    with _asking(model):
        packed = logits_of([[first, second], [other, second]])
        alone = logits_of([[second], [second]])[0]
        joined = logits_of([[first + second], [other + second]])
    behind = slice(_NUM_TOKENS, None)
    # What another context makes of the second document, and what kernels make of the same first one.
    change = (joined[0, behind] - joined[1, behind]).norm()
    noise = 16 * (joined[0, :_NUM_TOKENS] - packed[0, :_NUM_TOKENS]).norm().clamp(max=1e-3 * alone.norm())
    # Attention gives 0 to what it does not see, to the bit; experts, whose groups change, differ by 1e-7 of the logits.
    # Fresh convolutions (LFM2) give 1e-4 to the document before, fresh state spaces (Jamba) 1e-3, in fp32.
    is_fp32 = all(parameter.dtype.itemsize >= 4 for parameter in bare.parameters())
    if (packed[0, behind] - packed[1, behind]).norm() > noise + (1e-5 if is_fp32 else 1e-3) * alone.norm():
        return "what it computes of a document depends on the one before it in the row"
    if (packed[0, behind] - alone).norm() > noise + 0.1 * change:
        return "what it computes of a document depends on where it is in the row"
    return None


@contextmanager
def _asking(model: nn.Module) -> Iterator[None]:
    """Context of forwards in evaluation mode, without gradients or a trace."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), KeptStreams(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        torch.clear_autocast_cache()
