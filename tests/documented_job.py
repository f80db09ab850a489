"""The fine-tuning job of the documents, word for word, with a tiny BERT and made-up sentences.

`python -m tests.documented_job` prints one JSON line per rank. It is a process of its own, since huggingface_hub reads
HF_ENDPOINT when it is imported, and forks the other ranks: an interpreter for each would import all of this anew.
"""

from __future__ import annotations

import json
import os
import random

import numpy as np
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

from accel_trainer import Trainer, TrainingArguments

WORDS = ["good", "bad", "film", "plot", "very", "not", "a", "the"]


def build_tokenizer():
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def build_dataset(tokenizer):
    draw = random.Random(0)

    def rows(count):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) for _ in range(count)]
        return Dataset.from_dict({"text": texts, "label": [int("good" in text) for text in texts]})

    dataset = DatasetDict(train=rows(64), test=rows(21))
    return dataset.map(lambda batch: tokenizer(batch["text"]), batched=True)


def compute_metrics(prediction):
    return {
        "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean()),
        "rows": len(prediction.label_ids),
    }


def main():
    tokenizer = build_tokenizer()
    dataset = build_dataset(tokenizer)
    data_collator = DataCollatorWithPadding(tokenizer)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(WORDS) + 2, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
    )

    training_args = TrainingArguments(
        output_dir="your-model",
        learning_rate=2e-5,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        num_train_epochs=2,
        fsdp_config="path/to/fsdp_config",
        fsdp="full_shard",
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        push_to_hub=True,
    )

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        processing_class=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
    )

    trainer.train()

    trainer.push_to_hub()
    metrics = trainer.evaluate()
    parameters = list(trainer.model.parameters())
    report = {
        "rank": training_args.process_index,
        "type": str(trainer.accelerator.distributed_type),
        "precision": trainer.accelerator.mixed_precision,
        "device": training_args.device.type,
        "held": sum(p.to_local().numel() for p in parameters),
        "total": sum(p.numel() for p in parameters),
        "best": trainer.state.best_model_checkpoint,
        "best_metric": trainer.state.best_metric,
        "eval_loss": metrics["eval_loss"],
        "rows": metrics["eval_rows"],
        "steps": trainer.state.global_step,
        "wrapped": sorted({type(m).__name__ for m in trainer.model.modules() if type(m).__name__.startswith("FSDP")}),
        "dtype": str(np.dtype(np.float32)) if parameters[0].dtype.itemsize == 4 else str(parameters[0].dtype),
    }
    print("\nREPORT " + json.dumps(report) + "\n", end="", flush=True)  # at once: the ranks share the pipe
    trainer.accelerator.end_training()


def fork_ranks():
    """Return in as many processes as there are ranks; the pids of the others in the first, and none in those."""
    others = []
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        if (pid := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return []
        others.append(pid)
    return others


if __name__ == "__main__":
    others = fork_ranks()
    main()
    assert not any(os.waitpid(pid, 0)[1] for pid in others)
