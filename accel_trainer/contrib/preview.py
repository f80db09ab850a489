"""`accel-trainer data preview`: the first batches of a run as text and mask, how full they are, and the mixture."""

from __future__ import annotations

import argparse
import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from accel_trainer.config.config_source import load_document
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.launch.cli import command_parser

if TYPE_CHECKING:
    from accel_trainer.data.mixture import Mixture

_SOURCE = "_data_set"
_COUNTED_BATCHES = 200
_READ: dict[str, Any] = {
    "tokenizer": None, "dataset_mixture": None, "packing": False, "packing_strategy": "bfd", "max_length": 1024,
    "padding_free": False, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": -1,
    "seed": 42, "data_seed": None, "train_sampling_strategy": "random", "pad_batches_to_multiple_of": None,
}  # fmt: skip


def data_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer data`."""
    parser = command_parser("data", "Training data, before a run.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    previewing = commands.add_parser("preview", help="print the first batches of a run", allow_abbrev=False)
    text = "YAML or JSON with dataset_mixture, tokenizer (a path or name), and fields of TrainingArguments"
    previewing.add_argument("file", metavar="FILE", help=text)
    previewing.add_argument("--batches", type=int, default=2, metavar="N", help="how many (default: %(default)s)")
    return parser


def run_data(words: Sequence[str]) -> int:
    """Run `accel-trainer data` and return its exit code."""
    arguments = data_parser().parse_args(words)
    for line in preview(arguments.file, arguments.batches):
        print(line)
    return 0


def preview(file: str, num_batches: int) -> Iterator[str]:
    """Yield the lines of a preview: the first batches of a run on one process.

    Raises:
        ConfigError: the file has a key that is none, no mixture, or data without tokens and no tokenizer.
    """
    from torch.utils.data import DataLoader

    from accel_trainer.data.mixture import read_mixture
    from accel_trainer.data.packing import PackingCollator
    from accel_trainer.data.sampler import SeedableRandomSampler

    options = _read_options(file)
    tokenizer = _load_tokenizer(options["tokenizer"])
    mixture = read_mixture(options["dataset_mixture"], tokenizer)
    rows = _build_rows(options, mixture)
    is_sequential = not hasattr(rows, "__len__") or options["train_sampling_strategy"] == "sequential"
    sampler = None if is_sequential else SeedableRandomSampler(rows, _seed(options))
    loader = DataLoader(rows, options["per_device_train_batch_size"], sampler=sampler, collate_fn=list)
    collate = PackingCollator(
        pad_token_id=getattr(tokenizer, "pad_token_id", None) or 0,
        padding_free=options["padding_free"],
        pad_to_multiple_of=options["pad_batches_to_multiple_of"],
        columns=("input_ids", "labels", "attention_mask"),
    )
    counts, computed = _Counts(), 0
    for number, group in enumerate(islice(loader, max(num_batches, _COUNTED_BATCHES))):
        documents = [document for row in group for document in (row if isinstance(row, list) else [row])]
        tokens = collate(group)["input_ids"]
        own = _count(documents, mixture.names)
        counts, computed = counts + own, computed + tokens.numel()
        if number < num_batches:
            yield f"batch {number}: {' x '.join(map(str, tokens.shape))} tokens, {_fill(own, tokens.numel())}"
            for document in documents:
                yield from _show(document, mixture.names, tokenizer)
    yield f"first {number + 1} batches: {_fill(counts, computed)}"
    for name in mixture.names:
        yield f"  {name}: " + ", ".join(
            f"{counts[name, unit]} {unit} ({counts[name, unit] / _sum(counts, unit):.1%})" for unit in _UNITS
        )


_Counts = Counter[tuple[str, str]]
"""Documents and tokens by the name of their data set and the unit."""
_UNITS = ("documents", "tokens")


def _count(documents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> _Counts:
    counts = _Counts()
    for document in documents:
        name = names[document[_SOURCE]]
        counts.update({(name, "documents"): 1, (name, "tokens"): len(document["input_ids"])})
    return counts


def _sum(counts: _Counts, unit: str) -> int:
    return sum(number for (_, counted), number in counts.items() if counted == unit)


def _fill(counts: _Counts, computed: int) -> str:
    used = _sum(counts, "tokens")
    return f"{used} of {computed} used ({used / computed:.1%}), {_sum(counts, 'documents')} documents"


def _show(document: Mapping[str, Any], names: Sequence[str], tokenizer: Any) -> Iterator[str]:
    """Yield a document's tokens as text, in runs that are targets (+) or not (-); its first one never is."""
    ids = list(document["input_ids"])
    labels = [-100, *list(document.get("labels", ids))[1:]]
    yield f"  {names[document[_SOURCE]]}: {len(ids)} tokens, {sum(label != -100 for label in labels)} targets"
    for is_target, run in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != -100):
        tokens = [token for token, _ in run]
        yield f"    {'+' if is_target else '-'} {tokenizer.decode(tokens) if tokenizer else tokens!s}"


def _build_rows(options: Mapping[str, Any], mixture: Mixture) -> Any:
    from accel_trainer.data.packing import pack_dataset

    update = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"]
    for each, name in zip(mixture.sets, mixture.names, strict=True):
        if "input_ids" not in (each.column_names or ()):
            raise ConfigError(
                f"{name} has columns {', '.join(each.column_names or ())}, and no tokens; add tokenizer: PATH to the "
                "file for data with messages or text, or tokenize it"
            )
    marked = mixture._replace(sets=[each.map(partial(_mark, number)) for number, each in enumerate(mixture.sets)])
    data = marked.mix(seed=_seed(options), samples_per_update=update, num_updates=options["max_steps"])
    if not options["packing"]:
        return data
    return pack_dataset(data, options["max_length"], options["packing_strategy"], seed=_seed(options))


def _mark(number: int, sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, _SOURCE: number}


def _seed(options: Mapping[str, Any]) -> int:
    return int(options["seed"] if options["data_seed"] is None else options["data_seed"])


def _read_options(file: str) -> dict[str, Any]:
    from accel_trainer.trainer import TrainingArguments

    given = load_document(file).root.plain()
    known = [*_READ, *(field.name for field in fields(TrainingArguments))]
    for name in given if isinstance(given, Mapping) else ():
        if name not in known:
            raise ConfigError(
                f"{file} holds the unknown key {name!r}{did_you_mean(name, known)} Expected dataset_mixture, tokenizer "
                "and fields of TrainingArguments"
            )
    if not isinstance(given, Mapping) or not given.get("dataset_mixture"):
        raise ConfigError(f"{file} has no dataset_mixture, whose batches could be shown; add one, see docs/data.md")
    options = {**_READ, **given}
    if options["train_sampling_strategy"] not in ("random", "sequential"):
        raise ConfigError(
            f"{file} has train_sampling_strategy={options['train_sampling_strategy']!r}, whose batches a preview does "
            "not make; it shows those of 'random' and 'sequential'"
        )
    return options


def _load_tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(name)
