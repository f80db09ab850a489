"""Data and model of the classification job, shared by the example with the Trainer and the one with a native loop."""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import numpy as np
import torch
from datasets import Dataset, DatasetDict, load_dataset
from stdlib_text import load_snippets, train_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from accel_trainer import set_seed

METRIC = str(Path(__file__).parent / "metrics" / "accuracy")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add what chooses model and dataset."""
    group = parser.add_argument_group("data and model")
    group.add_argument("--model", help="name or path of a pretrained model (default: a small one from random weights)")
    group.add_argument(
        "--dataset", help="name or path of a dataset with a label and one or two texts (default: the stdlib)"
    )
    group.add_argument("--config", help="configuration of the dataset, for instance mrpc")
    group.add_argument(
        "--snippet_chars", type=int, default=300, help="length of a stdlib snippet (default: %(default)s)"
    )
    group.add_argument(
        "--snippets_per_package",
        type=int,
        default=300,
        help="for training; a third for evaluation (default: %(default)s)",
    )


def load_texts(options: argparse.Namespace) -> DatasetDict:
    """Return the splits "train" and "eval", with a "label" and one or two columns of text.

    The training split holds whole global batches only, at most one batch less than there is: a short last batch has to
    be filled up where it is shared by several ranks, and a run would then depend on their number.

    Raises:
        SystemExit: the dataset has not what the job needs.
    """
    if options.dataset is None:
        texts = load_snippets(options.snippet_chars, options.snippets_per_package)
    else:
        texts = _load_from_hub(options.dataset, options.config)
    num_samples = len(texts["train"]) // options.global_batch_size * options.global_batch_size
    if not num_samples:
        raise SystemExit(f"{len(texts['train'])} samples make no global batch of {options.global_batch_size}")
    texts["train"] = texts["train"].shuffle(seed=options.seed).select(range(num_samples))
    return texts


def _load_from_hub(name: str, config: str | None) -> DatasetDict:
    splits = load_dataset(name, config)
    held_out = next((split for split in ("validation", "validation_matched", "test") if split in splits), None)
    if "train" not in splits or held_out is None or "label" not in splits["train"].features:
        raise SystemExit(f"{name} needs a split 'train', one to evaluate on, and a column 'label'; it has {splits}")
    if not isinstance(splits["train"].features["label"], datasets.ClassLabel):
        splits = splits.class_encode_column("label")
    return DatasetDict(train=splits["train"], eval=splits[held_out])


def _text_columns(texts: Dataset) -> list[str]:
    columns = [name for name, kind in texts.features.items() if getattr(kind, "dtype", None) == "string"]
    if not 1 <= len(columns) <= 2:
        raise SystemExit(f"one or two columns of text are needed, and the dataset has {columns}")
    return columns


def build_model(options: argparse.Namespace, train: Dataset) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Return a tokenizer and a classifier: pretrained ones, or small ones made for these texts."""
    names = train.features["label"].names
    labels = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }
    set_seed(options.seed)  # every rank starts from the same weights
    if options.model:
        model = AutoModelForSequenceClassification.from_pretrained(options.model, **labels)
        return AutoTokenizer.from_pretrained(options.model), model
    corpus = (text for column in _text_columns(train) for text in train[column])
    tokenizer = train_tokenizer(corpus, options.vocab_size, options.max_length)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden_size // 32),
        intermediate_size=2 * options.hidden_size,
        max_position_embeddings=options.max_length,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
        # BERT's own 0.02 is for 768 units. At 192 the loss starts on a plateau, and rounding errors grow on the way off
        # it: after 306 updates, one and two ranks differ by 2e-4 in eval loss with 0.02, and by 2e-5 with 0.05.
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        **labels,
    )
    return tokenizer, BertForSequenceClassification(config)


def tokenize(texts: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Return token ids and labels, nothing else, so that any collator can pad them."""
    columns = _text_columns(texts["train"])

    def convert(rows: dict[str, list]) -> dict[str, list]:
        return tokenizer(*(rows[column] for column in columns), truncation=True)

    unused = [name for name in texts["train"].column_names if name != "label"]
    return texts.map(convert, batched=True, remove_columns=unused, desc="tokenizing")


def largest_class(labels: list[int]) -> float:
    """Return the accuracy of always answering the most frequent class of these labels: the number to beat."""
    return float(np.bincount(labels).max() / len(labels))


def describe_data(texts: DatasetDict) -> str:
    """Return how many samples there are, for the table."""
    num_classes = len(texts["train"].features["label"].names)
    return f"{len(texts['train']):,} for training, {len(texts['eval']):,} for evaluation, {num_classes} classes"


def describe_result(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """Return what the model learnt, beside the number to beat, for the table."""
    accuracy, baseline = metrics["eval_accuracy"], metrics["majority_accuracy"]
    return [
        ("eval loss", f"{metrics['eval_loss']:.6f}"),
        ("eval accuracy", f"{accuracy:.4f}, {accuracy / baseline:.1f} x the majority class"),
        ("majority class", f"{baseline:.4f} (accuracy of always answering the most frequent class)"),
    ]


def check_saved(output_dir: str, texts: Dataset, predicted: np.ndarray) -> str:
    """Load what was saved as anyone would, and compare its predictions with the trained model's."""
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    model = AutoModelForSequenceClassification.from_pretrained(output_dir).eval()
    sample = texts.select(range(min(64, len(texts))))
    columns = [sample[column][:] for column in _text_columns(sample)]
    inputs = tokenizer(*columns, truncation=True, padding=True, return_tensors="pt")
    with torch.no_grad():
        again = model(**inputs).logits.argmax(-1).numpy()
    return f"loads it; {int((again == predicted[: len(sample)]).sum())} of {len(sample)} predictions are the same"
