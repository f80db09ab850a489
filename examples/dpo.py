r"""DPO by TRL on this core: answers that people preferred, beside those they did not. `pip install trl`.

    python examples/dpo.py
    accel-trainer launch --num_processes 8 --config_file full_shard_bf16 examples/dpo.py \
        --model Qwen/Qwen3-0.6B --data preferences.jsonl --max_steps 1000

`--data` has lines of `{"prompt": "...", "chosen": "...", "rejected": "..."}`. Without it a tiny llama of bytes learns
to prefer polite answers. TRL's class comes first: what it overrides stays, and its `super()` is our Trainer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import trl
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import accel_trainer


@dataclass
class DPOArguments(trl.DPOConfig, accel_trainer.TrainingArguments):
    """TRL's arguments and ours."""


class DPOTrainer(trl.DPOTrainer, accel_trainer.Trainer):
    """TRL's loss on our core."""


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte: nothing is downloaded."""
    names = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def write_tiny_base(folder: str) -> None:
    """Write a llama with fresh weights, and its tokenizer."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokenizer = build_byte_tokenizer()
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_preferences() -> Dataset:
    asked = [f"Is {number} {kind}? " for number in range(50) for kind in ("even", "odd")]
    return Dataset.from_dict(
        {"prompt": asked, "chosen": ["Let me see, please."] * 100, "rejected": ["Who cares?"] * 100}
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder (default: a tiny llama of bytes)")
    parser.add_argument("--data", help="JSON lines of prompt, chosen and rejected (default: questions made here)")
    parser.add_argument("--output_dir", default="outputs/dpo", help="default: %(default)s")
    parser.add_argument("--max_steps", type=int, default=30, help="updates (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    options = parser.parse_args(argv)
    accel_trainer.set_seed(0)
    arguments = DPOArguments(
        options.output_dir,
        beta=0.1,
        max_steps=options.max_steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3 if options.model is None else 5e-7,
        bf16=False if options.model is None else None,  # TRL's own default is True
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=options.cpu,
    )
    name = options.model
    if name is None:
        name = str(Path(options.output_dir, "base"))
        with arguments.main_process_first():
            if not Path(name).exists():
                write_tiny_base(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = make_preferences() if options.data is None else load_dataset("json", data_files=options.data, split="train")
    parts = rows.train_test_split(0.1, seed=0)
    # The reference is the model that training begins with: TRL reads it once more, from where this one came.
    model = AutoModelForCausalLM.from_pretrained(name)
    trainer = DPOTrainer(
        model=model,
        args=arguments,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        processing_class=tokenizer,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    found = {"loss": metrics["eval_loss"], "preferred": metrics["eval_rewards/accuracies"]}
    trainer.accelerator.print(
        f"held-out answers: loss {found['loss']:.3f}, the chosen one is preferred in {found['preferred']:.0%}"
    )
    return found


if __name__ == "__main__":
    main()
