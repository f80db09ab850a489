r"""Distillation: a small model learns the distribution of a larger one, which is laid out like it and trains nothing.

    python examples/distillation.py
    accel-trainer launch --cpu --num_processes 2 --config_file full_shard examples/distillation.py
    accel-trainer launch --num_processes 8 --config_file full_shard_bf16 examples/distillation.py \
        --teacher Qwen/Qwen3-8B --model Qwen/Qwen3-0.6B

Without names the teacher is a llama that is first trained here on Python's sources; the student sees no labels at all.
Both models need one vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from accel_trainer import Trainer, TrainingArguments, set_seed


class Distiller(Trainer):
    """A Trainer whose loss is the divergence from a teacher's distribution, per token."""

    def __init__(self, *args: Any, teacher: torch.nn.Module, temperature: float = 2.0, **options: Any) -> None:
        super().__init__(*args, **options)
        # Sharded as the student is, without gradients and without an optimizer.
        self.teacher = self.accelerator.prepare_model(teacher.requires_grad_(False), evaluation_mode=True)
        self.temperature = temperature

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits.float() / self.temperature
        found = outputs.logits.float() / self.temperature
        loss = F.kl_div(found.log_softmax(-1).flatten(0, 1), wanted.softmax(-1).flatten(0, 1), reduction="batchmean")
        loss = loss * self.temperature**2  # gradients of the size that a plain loss has
        return (loss, outputs) if return_outputs else loss


def build_llama(hidden_size: int, num_layers: int) -> torch.nn.Module:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=256, num_attention_heads=4, **sizes)
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", help="name or folder (default: a llama that is trained here)")
    parser.add_argument("--model", help="the student's name or folder (default: a smaller llama)")
    parser.add_argument("--output_dir", default="outputs/distillation", help="default: %(default)s")
    parser.add_argument("--max_steps", type=int, default=60, help="updates of each (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    options = parser.parse_args(argv)
    set_seed(0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: 600 * 64])).view(-1, 64)
    rows = [{"input_ids": row, "labels": row} for row in text]
    arguments = TrainingArguments(
        options.output_dir,
        max_steps=options.max_steps,
        learning_rate=5e-3 if options.model is None else 1e-5,
        per_device_train_batch_size=8,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=options.cpu,
    )
    if options.teacher is None:
        teacher = build_llama(64, 2)
        first = Trainer(teacher, arguments, train_dataset=rows[100:])
        first.train()
        teacher = first.accelerator.unwrap_model(first.model)
    else:
        teacher = AutoModelForCausalLM.from_pretrained(options.teacher)
    student = build_llama(32, 1) if options.model is None else AutoModelForCausalLM.from_pretrained(options.model)
    trainer = Distiller(student, arguments, train_dataset=rows[100:], eval_dataset=rows[:100], teacher=teacher)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trainer.accelerator.print(f"divergence from the teacher on held-out text: {before:.3f}, distilled {after:.3f}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
