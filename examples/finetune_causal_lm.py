"""Train a small llama on the sources of Python's standard library, with the Trainer.

Text, tokenizer and model are made on the spot, so nothing is downloaded; no file is in both halves:

    python examples/finetune_causal_lm.py
    accel-trainer launch --config_file full_shard --cpu --num_processes 2 examples/finetune_causal_lm.py
    python examples/finetune_causal_lm.py --model HuggingFaceTB/SmolLM2-135M --max_steps 100
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import datasets
import evaluate
import numpy as np
import torch
from datasets import Dataset, DatasetDict
from options import add_model_options, add_run_options, add_trainer_options, build_arguments
from report import count_parameters, describe_layout, print_table
from stdlib_text import load_sources, train_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from accel_trainer import Trainer, set_seed

METRIC = str(Path(__file__).parent / "metrics" / "accuracy")


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("data and model")
    group.add_argument("--model", help="name or path of a pretrained model (default: a small one from random weights)")
    group.add_argument("--train_blocks", type=int, default=4096, help="at most so many (default: %(default)s)")
    group.add_argument("--eval_blocks", type=int, default=256, help="at most so many (default: %(default)s)")
    add_run_options(parser, output_dir="outputs/causal_lm", epochs=2, batch_size=32)
    add_trainer_options(parser)
    add_model_options(parser, vocab_size=2048, max_length=64)
    return parser.parse_args(argv)


def build_model(options: argparse.Namespace, corpus: list[str]) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Return a tokenizer and a language model: pretrained ones, or small ones made for these texts."""
    set_seed(options.seed)  # every rank starts from the same weights
    if options.model:
        return AutoTokenizer.from_pretrained(options.model), AutoModelForCausalLM.from_pretrained(options.model)
    tokenizer = train_tokenizer(corpus, options.vocab_size, options.max_length)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden_size // 32),
        num_key_value_heads=max(1, options.hidden_size // 64),
        intermediate_size=2 * options.hidden_size,
        max_position_embeddings=options.max_length,
        attention_dropout=options.dropout,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        tie_word_embeddings=True,
    )
    return tokenizer, LlamaForCausalLM(config)


def build_blocks(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Return the sources as blocks of `max_length` tokens. Training keeps whole global batches only."""
    blocks = {}
    for split, limit in (("train", options.train_blocks), ("eval", options.eval_blocks)):
        texts = [source.text for source in load_sources() if source.split == split]
        tokens = np.concatenate([np.asarray(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]])
        rows = tokens[: len(tokens) // options.max_length * options.max_length].reshape(-1, options.max_length)
        rows = rows[np.random.default_rng(options.seed).permutation(len(rows))[:limit]]
        if split == "train":
            rows = rows[: len(rows) // options.global_batch_size * options.global_batch_size]
        blocks[split] = Dataset.from_dict({"input_ids": rows, "labels": rows})
    return DatasetDict(blocks)


def measure_unigrams(blocks: DatasetDict, vocab_size: int) -> tuple[float, float]:
    """Return perplexity and accuracy of a model that knows only how frequent each token is in the training half.

    Returns:
        Over the tokens that the language model has to predict: all of a block but its first.
    """
    counts = np.bincount(np.concatenate(blocks["train"]["input_ids"][:]), minlength=vocab_size) + 1  # add-one smoothing
    targets = np.asarray(blocks["eval"]["input_ids"][:])[:, 1:].ravel()
    surprise = -np.log(counts / counts.sum())[targets].mean()
    return float(np.exp(surprise)), float((targets == counts.argmax()).mean())


def check_saved(output_dir: str, blocks: Dataset, predicted: np.ndarray) -> str:
    """Load what was saved as anyone would, and compare its predictions with the trained model's."""
    AutoTokenizer.from_pretrained(output_dir)
    model = AutoModelForCausalLM.from_pretrained(output_dir).eval()
    tokens = torch.tensor(blocks["input_ids"][:8])
    with torch.no_grad():
        again = model(input_ids=tokens).logits.argmax(-1).numpy()
    return f"loads it; {(again == predicted[: len(again)]).mean():.1%} of {again.size} predictions are the same"


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = parse_options(argv)
    arguments = build_arguments(options)
    is_main = arguments.process_index == 0
    if not is_main:
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()

    with arguments.main_process_first(desc="preparing the data"):
        tokenizer, model = build_model(options, [source.text for source in load_sources() if source.split == "train"])
        blocks = build_blocks(options, tokenizer)
    num_parameters = count_parameters(model)
    accuracy = evaluate.load(METRIC, keep_in_memory=True)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        # The prediction at a position is for the token after it.
        predicted, labels = prediction.predictions[:, :-1].ravel(), prediction.label_ids[:, 1:].ravel()
        return accuracy.compute(predictions=predicted, references=labels)

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=blocks["train"],
        eval_dataset=blocks["eval"],
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trained = trainer.train()
    trainer.save_model(options.output_dir)
    final = trainer.predict(blocks["eval"], metric_key_prefix="eval")

    perplexity, accuracy = math.exp(final.metrics["eval_loss"]), final.metrics["eval_accuracy"]
    unigram_perplexity, unigram_accuracy = measure_unigrams(blocks, len(tokenizer))
    layout = describe_layout(trainer.accelerator, trainer.model, num_parameters)
    if is_main:
        num_train, num_eval = len(blocks["train"]), len(blocks["eval"])
        speed = trained.metrics["train_steps_per_second"]
        with arguments.whole_models():  # this rank alone looks at it
            same = check_saved(options.output_dir, blocks["eval"], final.predictions)
        rows = [
            *layout,
            ("blocks", f"{num_train:,} for training, {num_eval:,} for evaluation, {options.max_length} tokens each"),
            ("training", f"{trainer.state.global_step} updates, {speed:.2f} steps/s"),
            ("eval loss", f"{final.metrics['eval_loss']:.6f}"),
            ("perplexity", f"{perplexity:.1f} (from token frequencies alone: {unigram_perplexity:.1f})"),
            ("token accuracy", f"{accuracy:.4f} (always the most frequent token: {unigram_accuracy:.4f})"),
            ("saved to", options.output_dir),
            ("from_pretrained", same),
        ]
        print_table("Causal language model", rows)
    trainer.accelerator.end_training()
    return {
        **trained.metrics,
        **final.metrics,
        "eval_perplexity": perplexity,
        "unigram_perplexity": unigram_perplexity,
        "unigram_accuracy": unigram_accuracy,
    }


if __name__ == "__main__":
    main()
