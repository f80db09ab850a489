"""Tiny texts, a tokenizer from no files, and tiny models for libraries that tokenize by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "hills")


def quiet() -> None:
    """Keep libraries from progress bars; call it in each process."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def build_tokenizer() -> Any:
    """Return a tokenizer with one token for each byte."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>", model_max_length=128
    )


def save_llama(folder: str, *, is_classifier: bool = False) -> str:
    """Save a tiny Llama with fresh weights; return the folder."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1, num_labels=1,
    )  # fmt: skip
    kind = transformers.LlamaForSequenceClassification if is_classifier else transformers.LlamaForCausalLM
    kind(config).save_pretrained(folder)
    return folder


def save_bert(folder: str) -> str:
    """Save a tiny BERT without a head, and the tokenizer; return the folder."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def build_embedder(folder: str) -> Any:
    """Return a SentenceTransformer of a saved body, with the mean over its tokens."""
    import sentence_transformers
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    body = Transformer(folder)
    pooling = Pooling(body.get_embedding_dimension())
    return sentence_transformers.SentenceTransformer(modules=[body, pooling], device="cpu")


def sentence(index: int, num_words: int) -> str:
    """Return a text that depends on the numbers alone."""
    return " ".join(WORDS[(index * 7 + position * 3) % len(WORDS)] for position in range(num_words))


def texts(count: int, first: int = 0) -> Any:
    """Return texts of unequal lengths."""
    from datasets import Dataset

    return Dataset.from_dict({"text": [sentence(first + index, 3 + index % 4) for index in range(count)]})


def preferences(count: int, first: int = 0) -> Any:
    """Return prompts with a chosen and a rejected answer."""
    from datasets import Dataset

    rows = range(first, first + count)
    return Dataset.from_dict(
        {
            "prompt": [sentence(row, 2) + " " for row in rows],
            "chosen": [sentence(row + 1, 1 + row % 3) for row in rows],
            "rejected": [sentence(row + 2, 1 + (row + 1) % 3) for row in rows],
        }
    )


def pairs(count: int, first: int = 0) -> Any:
    """Return pairs of texts."""
    from datasets import Dataset

    rows = range(first, first + count)
    return Dataset.from_dict(
        {"anchor": [sentence(row, 3) for row in rows], "positive": [sentence(row + 1, 3) for row in rows]}
    )


def numbers_of(trainer: Any, figures: Iterable[str]) -> dict[str, Any]:
    """Return what a run has logged under these names, its weights, and whose its Accelerator is. Collective."""
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().numpy().copy()
        for name, p in trainer.model.named_parameters()
    }
    logged = {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in figures}
    return {**logged, "weights": weights, "ours": type(trainer.accelerator).__module__}


def assert_equal(first: dict[str, Any], second: dict[str, Any], tolerance: float = 0.0) -> None:
    """Compare what `numbers_of` has returned of two runs, but for whose Accelerator it was."""
    figures = {name: value for name, value in second.items() if name not in ("weights", "ours")}
    for name, value in figures.items():
        np.testing.assert_allclose(first[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
    for name, value in second["weights"].items():
        np.testing.assert_allclose(first["weights"][name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def run_unmodified(*words: str) -> str:
    """Run Python with these words, and return what it has printed."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
