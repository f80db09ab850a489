r"""Pre-train a language model from a stream of JSON lines, packed; the same command starts a run and goes on with one.

    python examples/pretrain.py                    # Python's own sources, bytes as tokens, a tiny llama
    accel-trainer launch --num_processes 8 --config_file full_shard_bf16 examples/pretrain.py \
        --data 's3://bucket/corpus/*.jsonl.zst' --model Qwen/Qwen3-0.6B-Base --max_length 4096 --max_steps 100000

Files are opened when their turn comes. Each holds `{"text": ...}` a line; a resumed run goes on at its file and row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from accel_trainer import Trainer, TrainingArguments, set_seed

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
END = 256
"""Of a document, after the 256 bytes."""


def write_own_sources(folder: Path, num_files: int = 4) -> str:
    """Write sources of the standard library as JSON lines; return the pattern of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(argparse.__file__).parent.glob("a*.py"))
    for index in range(num_files):
        texts = (path.read_text("utf-8", "replace")[:2000] for path in sources[index::num_files])
        (folder / f"{index}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(folder / "*.jsonl")


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder, whose weights are drawn anew (default: a tiny llama of bytes)")
    parser.add_argument("--data", help="pattern of JSON lines, at any address of fsspec (default: Python's sources)")
    parser.add_argument("--output_dir", default="outputs/pretrain", help="default: %(default)s")
    parser.add_argument("--max_length", type=int, default=256, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a process (default: %(default)s)")
    parser.add_argument("--max_steps", type=int, default=60, help="updates (default: %(default)s)")
    parser.add_argument("--save_steps", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    options = parser.parse_args(argv)
    set_seed(0)
    arguments = TrainingArguments(
        options.output_dir,
        packing=True,
        max_length=options.max_length,
        per_device_train_batch_size=options.batch_size,
        max_steps=options.max_steps,  # a stream has no length
        learning_rate=3e-3 if options.model is None else 3e-4,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        save_steps=options.save_steps,
        save_total_limit=2,
        save_async=True,  # training goes on while a checkpoint is written
        logging_steps=10,
        meters=True,  # tokens a second and MFU, in the log
        report_to="none",
        use_cpu=options.cpu,
    )
    with arguments.main_process_first():
        data = options.data or write_own_sources(Path(options.output_dir, "corpus"))
    if options.model is None:
        config = AutoConfig.for_model("llama", vocab_size=END + 1, eos_token_id=END, **TINY)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        config = AutoConfig.from_pretrained(options.model)

    def tokenize(row: dict[str, str]) -> dict[str, list[int]]:
        if options.model is None:
            tokens = [*row["text"].encode(), END]
        else:
            tokens = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        return {"input_ids": tokens, "labels": tokens}

    stream = load_dataset("json", data_files=data, split="train", streaming=True)
    stream = stream.shuffle(seed=0, buffer_size=1000).map(tokenize, remove_columns=["text"])
    trainer = Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=stream)
    trainer.train(resume_from_checkpoint="auto")  # where there is none, from the beginning
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.accelerator.print(f"{trainer.state.global_step} updates, loss {losses[0]:.2f} to {losses[-1]:.2f}")
    return losses


if __name__ == "__main__":
    main()
