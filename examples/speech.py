r"""Speech recognition: wav2vec 2.0 learns to write down what it hears, with the CTC loss on rows of unequal length.

    python examples/speech.py
    accel-trainer launch --cpu --num_processes 2 examples/speech.py
    accel-trainer launch --num_processes 8 --mixed_precision bf16 examples/speech.py \
        --model facebook/wav2vec2-base --data transcribed.jsonl --learning_rate 1e-4 --max_steps 5000

`--data` has lines of `{"samples": [...], "text": "..."}`, at 16 kHz. Without it a language of five letters is spoken
here: each letter is a tone, and the tiny model learns to spell it from some hundred words.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoConfig, AutoModelForCTC

from accel_trainer import Trainer, TrainingArguments, set_seed

LETTERS = " abcdefghijklmnopqrstuvwxyz'"
"""Label 0 is CTC's blank, and padding; letters begin with 1."""
TINY = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "conv_dim": (32, 32), "conv_kernel": (20, 8), "conv_stride": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip


def speak(text: str, draw: torch.Generator) -> list[float]:
    """Return the tones of a text: 320 samples for each letter, with noise and a pause."""
    time = torch.arange(320) / 16_000
    tones = [torch.sin(2 * torch.pi * (400 + 300 * LETTERS.index(letter)) * time) for letter in text]
    silence = torch.zeros(80)
    wave = torch.cat([part for tone in tones for part in (tone, silence)])
    return (wave + 0.05 * torch.randn(len(wave), generator=draw)).tolist()


def make_rows(count: int) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 7, (count,), generator=draw).tolist()
    texts = ["".join("abcde"[i] for i in torch.randint(5, (n,), generator=draw).tolist()) for n in lengths]
    return Dataset.from_dict({"samples": [speak(text, draw) for text in texts], "text": texts})


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Scale waves to a mean of 0 and a variance of 1, and pad them; labels with -100, which the loss leaves out."""
    waves = [torch.tensor(row["samples"]) for row in rows]
    labels = [torch.tensor([1 + LETTERS.index(letter) for letter in row["text"].lower()]) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_values": pad([(wave - wave.mean()) / (wave.std() + 1e-7) for wave in waves], batch_first=True),
        "attention_mask": pad([torch.ones(len(wave), dtype=torch.long) for wave in waves], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def count_right(found: Any) -> dict[str, float]:
    """Return the share of words that are spelled right: CTC's best path, without repeats and blanks."""
    best = [torch.tensor(logits).argmax(-1).unique_consecutive().tolist() for logits in found.predictions]
    spelled = [[label for label in labels if label > 0] for labels in (*best, *found.label_ids.tolist())]
    pairs = zip(spelled[: len(best)], spelled[len(best) :], strict=True)
    return {"words_right": sum(found == wanted for found, wanted in pairs) / len(best)}


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder (default: a tiny wav2vec 2.0 with fresh weights)")
    parser.add_argument("--data", help="JSON lines of samples and text (default: tones)")
    parser.add_argument("--output_dir", default="outputs/speech", help="default: %(default)s")
    parser.add_argument("--batch_size", type=int, default=8, help="of a process (default: %(default)s)")
    parser.add_argument("--max_steps", type=int, default=200, help="updates (default: %(default)s)")
    parser.add_argument(
        "--learning_rate", type=float, default=3e-3, help="default: %(default)s; a model that has learned wants 1e-4"
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    options = parser.parse_args(argv)
    set_seed(0)
    dataset = make_rows(400) if options.data is None else load_dataset("json", data_files=options.data, split="train")
    parts = dataset.map(lambda row: {"length": len(row["samples"])}).train_test_split(0.1, seed=0)
    head = {"vocab_size": 1 + len(LETTERS), "pad_token_id": 0, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True}
    if options.model is None:
        model = AutoModelForCTC.from_config(AutoConfig.for_model("wav2vec2", **TINY, **head))
    else:
        model = AutoModelForCTC.from_pretrained(options.model, ignore_mismatched_sizes=True, **head)
        model.freeze_feature_encoder()
    arguments = TrainingArguments(
        options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=0.1,
        train_sampling_strategy="group_by_length",  # rows of like length: less padding
        length_column_name="length",
        remove_unused_columns=False,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        use_cpu=options.cpu,
    )

    trainer = Trainer(
        model,
        arguments,
        collate,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        compute_metrics=count_right,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    found = {name: metrics[f"eval_{name}"] for name in ("loss", "words_right")}
    trainer.accelerator.print(f"loss {found['loss']:.3f}, {found['words_right']:.0%} of the held-out words are right")
    return found


if __name__ == "__main__":
    main()
