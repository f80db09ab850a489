"""Real text that is on every machine: the sources of Python's standard library, and a tokenizer trained on them.

Whole files go to the training half or to the evaluation half, so that no file is in both. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

# Packages that CPython 3.11 to 3.14 all have, of several files each, so that both halves get some.
PACKAGES = (
    "asyncio",
    "ctypes",
    "email",
    "encodings",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
)
_MIN_PACKAGES = 8

# Share of a package's characters that its evaluation files should reach, and must not exceed.
_EVAL_SHARE, _MAX_EVAL_SHARE = 0.20, 0.45


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the standard library."""

    package: str
    path: str
    """Below the folder of the standard library, with slashes."""
    text: str
    split: str
    """"train" or "eval"."""


def load_sources(packages: Iterable[str] = PACKAGES) -> list[Source]:
    """Return the files of the given packages, each in one half. The order is the same on every machine and rank.

    Raises:
        SystemExit: fewer than 8 of the packages are there with files for both halves; some systems install the
            standard library in parts, or without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[Source] = []
    num_packages = 0
    for package in packages:
        found = _split_package(package, dict(_read_package(root, package)))
        if {source.split for source in found} == {"train", "eval"}:
            sources += found
            num_packages += 1
    if num_packages < _MIN_PACKAGES:
        raise SystemExit(
            f"{num_packages} of the packages {', '.join(packages)} have sources below {root}, and {_MIN_PACKAGES} are "
            "needed; install the whole standard library of this Python, or pass --dataset"
        )
    return sources


def load_snippets(snippet_chars: int, snippets_per_package: int, packages: Iterable[str] = PACKAGES) -> DatasetDict:
    """Return snippets of source code, labelled with the package they come from.

    Args:
        snippet_chars: about how long a snippet is; it ends with a line.
        snippets_per_package: at most so many for training, and a third of it for evaluation, so that no large package
            drowns the others.

    Returns:
        Splits "train" and "eval" with the columns "text" and "label".
    """
    sources = load_sources(packages)
    names = list(dict.fromkeys(source.package for source in sources))
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    caps = {"train": snippets_per_package, "eval": max(1, snippets_per_package // 3)}
    splits = {}
    seen: set[str] = set()
    for split, cap in caps.items():
        rows: dict[str, list] = {"text": [], "label": []}
        for name in names:
            texts = [source.text for source in sources if source.package == name and source.split == split]
            # Licence headers stand in many files: a snippet counts once, and never in both halves.
            snippets = {piece for text in texts for piece in _cut(text, snippet_chars)} - seen
            seen |= snippets
            chosen = sorted(snippets, key=_digest)[:cap]
            rows["text"] += chosen
            rows["label"] += [name] * len(chosen)
        splits[split] = Dataset.from_dict(rows, features=features)
    return DatasetDict(splits)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on `texts`: every byte has a token, frequent sequences have their own.

    The result depends on the texts only, so every rank trains the same one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["[PAD]", "[CLS]", "[SEP]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def _read_package(root: Path, package: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of a package's files, in an order that neither names nor file systems decide."""
    paths = {path.relative_to(root).as_posix(): path for path in (root / package).rglob("*.py")}
    for name in sorted(paths, key=_digest):
        if not {"test", "tests", "idle_test"} & set(name.split("/")):
            text = paths[name].read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield name, text


def _split_package(package: str, files: dict[str, str]) -> list[Source]:
    total, taken = sum(map(len, files.values())), 0
    sources = []
    for path, text in files.items():
        is_eval = taken < _EVAL_SHARE * total and taken + len(text) <= _MAX_EVAL_SHARE * total
        taken += len(text) if is_eval else 0
        sources.append(Source(package, path, text, "eval" if is_eval else "train"))
    return sources


def _cut(text: str, size: int) -> Iterator[str]:
    """Yield pieces of whole lines, of about `size` characters; an end of less than half of it is left out."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > size:
            yield piece
            piece = ""
        piece += line
    if len(piece) >= size // 2:
        yield piece


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", errors="replace")).digest()
