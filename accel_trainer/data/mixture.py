"""Mixtures: samples of several data sets, drawn with weights that may change over the updates of a run.

What sample i of a mixture is depends on the seed and on i alone: ranks, workers and batch sizes change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from accel_trainer.config.config_source import ConfigSource
from accel_trainer.config.schema import thaw
from accel_trainer.config.validation import WrongValueError, mixture_of, show
from accel_trainer.data.plan import mix_seed, permutation
from accel_trainer.errors import ConfigError

STOPPING_STRATEGIES = ("first_exhausted", "all_exhausted")

_AT_ONCE = 65_536


def mix_datasets(
    datasets: Sequence[Any],
    weights: Sequence[float] | None = None,
    *,
    temperature: float = 1.0,
    schedule: Mapping[int, Sequence[float]] | None = None,
    samples_per_update: int = 1,
    stopping_strategy: str = "first_exhausted",
    num_samples: int | None = None,
    seed: int = 0,
) -> Any:
    """Return the mixture of several data sets: of `datasets` where all of them are, in one format, else a `Subset`.

    The samples of each are shuffled, anew whenever it starts over. Ranks do not communicate.

    Args:
        weights: of the data sets in their order, of any sum; None takes their sizes.
        temperature: weights count by their power of 1 / temperature: above 1 small sets are drawn more often.
        schedule: weights by the update from which on they hold, in the place of `weights`, which hold before the
            first. The order of the mixture has to stay: read it without shuffling.
        samples_per_update: of the schedule: micro-batch x accumulation x ranks.
        stopping_strategy: "first_exhausted" ends with the last sample of the first set that has no more,
            "all_exhausted" when each has been read at least once; sets that have no more start over.
        num_samples: exactly so many, whatever runs out.

    Raises:
        ConfigError: weights or options are none, or streams are mixed with what they cannot have: a schedule, or sets
            that are no streams of `datasets`.
    """
    sets = list(datasets)
    if stopping_strategy not in STOPPING_STRATEGIES:
        raise ConfigError(f"stopping_strategy={stopping_strategy!r} is none of {', '.join(STOPPING_STRATEGIES)}")
    if not sets:
        raise ConfigError("a mixture of 0 data sets was asked for; give one or more")
    if any(isinstance(each, IterableDataset) for each in sets):
        if schedule or num_samples is not None:
            raise ConfigError(
                "a mixture of streams has no schedule and no num_samples: they are drawn as they come; leave these "
                "out, or load the data sets without streaming"
            )
        return _interleave(sets, weights, temperature, stopping_strategy, seed)
    sizes = list(map(len, sets))
    updates, shares = _phases(sizes, weights, schedule, temperature)
    _check_end(shares, stopping_strategy, num_samples)
    sources = _draw(sizes, updates * samples_per_update, shares, stopping_strategy, num_samples, seed)
    chosen = np.cumsum([0, *sizes[:-1]])[sources] + _rows(sources, sizes, seed)
    if all(hasattr(each, "select") and hasattr(each, "column_names") for each in sets) and _have_one_format(sets):
        from datasets import concatenate_datasets

        return concatenate_datasets(sets).select(chosen)
    return Subset(ConcatDataset(sets), chosen.tolist())


def _have_one_format(sets: list[Any]) -> bool:
    """Whether tables that are concatenated keep their formats and transforms: `datasets` drops those that differ."""
    formats = [each.format for each in sets]
    return all(each == formats[0] for each in formats) or all(
        each["type"] is None and set(each["columns"]) == set(table.column_names)
        for each, table in zip(formats, sets, strict=True)
    )


def _interleave(sets: list[Any], weights: Any, temperature: float, stopping_strategy: str, seed: int) -> Any:
    from datasets import IterableDataset as Stream
    from datasets import interleave_datasets

    others = [type(each).__name__ for each in sets if not isinstance(each, Stream)]
    if others:
        raise ConfigError(
            f"a mixture of streams has {', '.join(others)} in it, and takes streams of `datasets` alone; make one of "
            "it with datasets.IterableDataset.from_generator, or load all without streaming"
        )
    shares = _shares([1.0] * len(sets) if weights is None else weights, len(sets), temperature)
    if stopping_strategy == "all_exhausted":  # `datasets` waits for the end of a set that it never draws
        sets, shares = [each for each, share in zip(sets, shares, strict=True) if share], shares[shares > 0]
    return interleave_datasets(sets, shares.tolist(), seed=seed, stopping_strategy=stopping_strategy)


def _phases(
    sizes: list[int],
    weights: Sequence[float] | None,
    schedule: Mapping[int, Sequence[float]] | None,
    temperature: float,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the updates at which shares change, and the shares from each of them on."""
    phases = {0: sizes if weights is None else weights}
    phases |= {int(update): each for update, each in (schedule or {}).items()}
    updates = np.array(sorted(phases))
    shares = [_shares(phases[update], len(sizes), temperature) for update in updates.tolist()]
    if updates[0] < 0 or 0 in sizes:
        raise ConfigError(
            f"a mixture of data sets of {', '.join(map(str, sizes))} samples was asked for, with weights from the "
            f"updates {', '.join(map(str, updates))} on; each needs a sample, and updates begin at 0"
        )
    return updates, shares


def _rows(sources: np.ndarray, sizes: list[int], seed: int) -> np.ndarray:
    """Return the index of each sample in its data set, which is shuffled anew whenever it starts over."""
    rows = np.empty(len(sources), dtype=np.int64)
    for index, size in enumerate(sizes):
        places = np.flatnonzero(sources == index)
        passes = range(-(-len(places) // size))
        orders = [permutation(size, mix_seed(seed, index, number), 0).numpy() for number in passes]
        if orders:
            rows[places] = np.concatenate(orders)[: len(places)]
    return rows


def _shares(weights: Sequence[float], count: int, temperature: float) -> np.ndarray:
    """Return weights as probabilities."""
    values = np.array([float(weight) for weight in weights])
    if len(values) != count or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ConfigError(
            f"weights {list(weights)} were given for {count} data sets; give each a number from 0 on, and one above 0"
        )
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature!r} was given for the weights of a mixture; use a number above 0")
    powers = np.where(values > 0, (values / values.max()) ** (1 / temperature), 0.0)
    shares: np.ndarray = powers / powers.sum()
    return shares


def _check_end(shares: list[np.ndarray], stopping_strategy: str, num_samples: int | None) -> None:
    never = np.flatnonzero((shares[-1] == 0) & (np.sum(shares, axis=0) > 0))
    if stopping_strategy == "all_exhausted" and num_samples is None and len(never):
        raise ConfigError(
            f"stopping_strategy='all_exhausted' waits for data set {never[0]}, whose weight is 0 at the end of the "
            "schedule; use 'first_exhausted', or num_samples"
        )


def _draw(
    sizes: Sequence[int],
    begins: np.ndarray,
    shares: list[np.ndarray],
    stopping_strategy: str,
    num_samples: int | None,
    seed: int,
) -> np.ndarray:
    """Return the data set of each sample."""
    limits = np.array(sizes, dtype=np.float64)
    limits[np.sum(shares, axis=0) == 0] = np.inf if stopping_strategy == "first_exhausted" else 0
    edges = np.cumsum(shares, axis=1)
    edges[edges > 1 - 1e-12] = 1.0  # a set with weight 0 is not drawn for the rounding of the others
    counts, drawn, total = np.zeros(len(sizes)), [], 0
    for chunk in _uniform(seed):
        places = np.arange(total, total + len(chunk))
        phases = np.searchsorted(begins, places, side="right") - 1
        sources = (chunk[:, None] >= edges[phases]).sum(1)
        if num_samples is not None:
            end = num_samples - total
        else:
            reached = counts + np.cumsum(sources[:, None] == np.arange(len(sizes)), axis=0) >= limits
            done = reached.any(1) if stopping_strategy == "first_exhausted" else reached.all(1)
            end = int(done.argmax()) + 1 if done.any() else len(chunk) + 1
        drawn.append(sources[: max(end, 0)])
        if end <= len(chunk):
            break
        counts += np.bincount(sources, minlength=len(sizes))
        total += len(chunk)
    return np.concatenate(drawn)


def _uniform(seed: int) -> Iterator[np.ndarray]:
    generator = np.random.Generator(np.random.PCG64(seed))
    while True:
        yield generator.random(_AT_ONCE)


# --- from a configuration ---------------------------------------------------------------------------------------------


class Mixture(NamedTuple):
    """The data sets that a configuration mixes, tokenized, and the arguments of `mix_datasets`."""

    sets: list[Any]
    names: list[str]
    weights: list[float] | None
    options: dict[str, Any]

    def mix(self, *, samples_per_update: int = 1, num_updates: int = -1, **defaults: Any) -> Any:
        """Return them mixed by these options, where theirs leave some out; a schedule lasts as long as the run."""
        defaults["samples_per_update"] = samples_per_update
        if self.options.get("schedule") and num_updates > 0:
            defaults["num_samples"] = num_updates * samples_per_update
        return mix_datasets(self.sets, self.weights, **{**defaults, **self.options})


def load_mixture(source: ConfigSource, tokenizer: Any = None, **defaults: Any) -> Any:
    """Return the mixture that a configuration describes, tokenized where it has no tokens and there is a tokenizer.

    Ranks do not communicate: let the main process go first, where files are downloaded or converted.

    Args:
        source: a mapping, such as `accelerator.config.dataset_mixture`, or the path of a YAML or JSON file, that is one
            or has it under "dataset_mixture": "datasets", a list of mappings with "path" and, as
            `datasets.load_dataset` takes them, "name", "data_dir", "data_files" and "split" ("train" by default),
            "columns" to keep and a "weight"; "streaming"; options of `mix_datasets`.
        defaults: options of `mix_datasets` for what `source` leaves out.

    Raises:
        ConfigError: a key is unknown, or a data set is not there.
    """
    return read_mixture(source, tokenizer).mix(**defaults)


def read_mixture(source: ConfigSource, tokenizer: Any = None) -> Mixture:
    """Return the data sets of `load_mixture`, not mixed yet."""
    try:
        config = thaw(mixture_of(source))
    except WrongValueError as error:
        raise ConfigError(f"dataset_mixture is {show(source)}; expected {error.expected}{error.hint}") from None
    entries = config.pop("datasets", None) or ()
    weights, streaming = _weights_of(entries), bool(config.pop("streaming", False))
    loaded = [_load(entry, streaming) for entry in entries]
    # A collator takes labels of all samples of a batch, or of none.
    has_labels = any({"messages", "labels"}.intersection(each.column_names or ()) for each in loaded)
    sets = [_tokenized(each, tokenizer, has_labels) for each in loaded]
    return Mixture(sets, list(map(_name_of, entries)), weights, config)


def _weights_of(entries: Sequence[Mapping[str, Any]]) -> list[float] | None:
    weights = [entry.get("weight") for entry in entries]
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise ConfigError(
            f"dataset_mixture gives weights {weights} to its data sets; give one to each, or to none, which then count "
            "by their sizes"
        )
    return given or None


def _name_of(entry: Mapping[str, Any]) -> str:
    files = entry.get("data_files")
    return str(entry.get("name") or Path(files if isinstance(files, str) else entry["path"]).stem)


def _load(entry: Mapping[str, Any], streaming: bool) -> Any:
    from datasets import load_dataset, load_from_disk

    path, split = entry.get("path"), entry.get("split", "train")
    if path is None:
        raise ConfigError(f"a data set of dataset_mixture has {', '.join(entry) or 'no keys'}, and no path; give one")
    files = {name: entry[name] for name in ("name", "data_dir", "data_files") if name in entry}
    if Path(path, "state.json").is_file() or Path(path, "dataset_dict.json").is_file():
        loaded = load_from_disk(path)
        loaded = loaded[split] if isinstance(loaded, dict) else loaded
    else:
        loaded = load_dataset(path, split=split, streaming=streaming, **files)
    return loaded.select_columns(list(entry["columns"])) if entry.get("columns") else loaded


def _tokenized(dataset: Any, tokenizer: Any, has_labels: bool) -> Any:
    """Return a data set with the tokens of its "messages" (by the chat template) or "text"; as it is with "input_ids".

    What the chat template marks as the assistant's counts as labels; without such marks, and of text, all tokens do.
    Text ends with the tokenizer's end of a sequence, and has labels where another data set of the mixture has.
    """
    columns = dataset.column_names or ()
    column = next((name for name in ("messages", "text") if name in columns), None)
    if "input_ids" in columns or tokenizer is None or column is None:
        return dataset
    tokens = partial(_tokens_of_chat if column == "messages" else partial(_tokens_of_text, has_labels), tokenizer)
    return dataset.map(lambda sample: tokens(sample[column]), remove_columns=columns)


def _tokens_of_chat(tokenizer: Any, messages: Any) -> dict[str, list[int]]:
    # By the expression of transformers 5.23 (chat_template_utils.py:737): `add_generation_prompt` is no mark.
    is_marked = re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=is_marked)
    ids = made["input_ids"]
    counts = made["assistant_masks"] if is_marked else [1] * len(ids)
    return {"input_ids": ids, "labels": [token if count else -100 for token, count in zip(ids, counts, strict=True)]}


def _tokens_of_text(has_labels: bool, tokenizer: Any, text: str) -> dict[str, list[int]]:
    ids, end = tokenizer(text)["input_ids"], tokenizer.eos_token_id
    ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
    return {"input_ids": ids, "labels": ids} if has_labels else {"input_ids": ids}
