r"""LoRA or QLoRA on conversations: `pip install peft`, and for 4-bit weights `pip install bitsandbytes`.

    python examples/qlora.py --load_in_4bit
    accel-trainer launch --num_processes 8 --config_file qlora examples/qlora.py --load_in_4bit \
        --model Qwen/Qwen3-8B --data chats.jsonl --max_length 2048 --max_steps 1000

`--data` has lines of `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`,
which the model's own chat template sets; all tokens count. Without it a tiny llama of bytes learns sums, in less than a
minute. What is saved is the adapter. examples/sft.py makes a chat model of nothing, with losses of the answers alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from accel_trainer import Trainer, TrainingArguments, set_seed


def write_tiny_base(folder: Path) -> str:
    """Write a llama of 128 dimensions, the fewest that bitsandbytes packs, with fresh weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, **sizes)).save_pretrained(folder)
    return str(folder)


def make_sums() -> Dataset:
    asked = [(f"{a}+{b}", str(a + b)) for a in range(20) for b in range(20)]
    return Dataset.from_dict(
        {"messages": [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in asked]}
    )


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder, with a chat template (default: a tiny llama of bytes)")
    parser.add_argument("--data", help="JSON lines of messages (default: sums)")
    parser.add_argument("--load_in_4bit", action="store_true", help="QLoRA: the frozen base in 4 bits")
    parser.add_argument("--rank", type=int, default=16, help="of LoRA's matrices (default: %(default)s)")
    parser.add_argument("--output_dir", default="outputs/qlora", help="default: %(default)s")
    parser.add_argument("--max_length", type=int, default=128, help="tokens of a packed row (default: %(default)s)")
    parser.add_argument("--max_steps", type=int, default=60, help="updates (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    options = parser.parse_args(argv)
    set_seed(0)
    arguments = TrainingArguments(
        options.output_dir,
        packing=True,
        max_length=options.max_length,
        per_device_train_batch_size=4,
        max_steps=options.max_steps,
        learning_rate=1e-2 if options.model is None else 2e-4,
        lr_scheduler_type="cosine",
        activation_checkpointing="full",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=options.cpu,
    )
    name = options.model
    if name is None:
        with arguments.main_process_first():
            name = str(Path(options.output_dir, "base"))
            name = name if Path(name).exists() else write_tiny_base(Path(name))
    options_4bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.bfloat16, quantization_config=options_4bit if options.load_in_4bit else None
    )
    if options.load_in_4bit:  # recomputation is the Trainer's
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    lora = LoraConfig(task_type="CAUSAL_LM", r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    model = get_peft_model(model, lora)

    tokenizer = None if options.model is None else AutoTokenizer.from_pretrained(options.model)

    def tokenize(row: dict[str, Any]) -> dict[str, list[int]]:
        if tokenizer is None:
            tokens = list("".join(f"<{said['role']}> {said['content']}\n" for said in row["messages"]).encode())
        else:
            tokens = tokenizer.apply_chat_template(row["messages"])["input_ids"]
        return {"input_ids": tokens, "labels": tokens}

    chats = make_sums() if options.data is None else load_dataset("json", data_files=options.data, split="train")
    rows = chats.map(tokenize, remove_columns=chats.column_names)
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    trainer.accelerator.print(
        f"{'QLoRA' if options.load_in_4bit else 'LoRA'}: {trained} weights are trained, "
        f"loss {losses[0]:.2f} to {losses[-1]:.2f}; the adapter is in {options.output_dir}"
    )
    return losses


if __name__ == "__main__":
    main()
