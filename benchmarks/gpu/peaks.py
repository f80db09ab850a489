"""The peak that `accel-trainer estimate` plans beside the one a card has, for configurations that nobody tuned for."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from argparse import Namespace
from typing import Any

import torch
from workload import emit, parse, parser, peak_gib, reset_peak

_BOUND = 0.05
_SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16}
_CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], int, int, str], ...] = (
    ("llama", {}, {}, 4, 1024, "AdamW"),
    ("llama", {"vocab_size": 128256}, {}, 2, 1024, "AdamW"),
    ("llama", {"vocab_size": 128256}, {"loss_chunk_tokens": 1024}, 2, 1024, "AdamW"),
    ("llama", {}, {"mixed_precision": "bf16"}, 4, 1024, "AdamW"),
    ("llama", {}, {"mixed_precision": "bf16"}, 1, 4096, "SGD"),
    ("llama", {}, {"mixed_precision": "bf16", "activation_checkpointing": "full"}, 8, 2048, "AdamW"),
    ("llama", {}, {"mixed_precision": "bf16", "activation_checkpointing": "selective"}, 4, 2048, "AdamW"),
    ("llama", {}, {"mixed_precision": "bf16", "activation_checkpointing": "every:2"}, 4, 2048, "AdamW"),
    ("llama", {}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}, 4, 1024, "AdamW"),
    ("qwen3", {"head_dim": 64, "num_key_value_heads": 4}, {"mixed_precision": "bf16"}, 4, 1024, "AdamW"),
    ("gemma2", {"head_dim": 64, "num_key_value_heads": 4}, {"mixed_precision": "bf16"}, 2, 1024, "AdamW"),
    ("gpt2", {"n_embd": 1024, "n_layer": 12, "n_head": 16}, {"mixed_precision": "bf16"}, 4, 1024, "AdamW"),
    ("opt", {"ffn_dim": 4096, "max_position_embeddings": 2048}, {"mixed_precision": "fp16"}, 4, 512, "AdamW"),
)
"""Family, sizes, options of the configuration, rows, tokens of a row, optimizer."""
_QLORA_CASES = (
    ("llama", {}, {"mixed_precision": "bf16"}, 4, 1024, "AdamW"),
    ("llama", {}, {"mixed_precision": "bf16", "loss_chunk_tokens": 1024}, 8, 2048, "AdamW"),
    ("llama", {}, {"mixed_precision": "bf16", "activation_checkpointing": "full"}, 4, 2048, "AdamW"),
    ("qwen3", {"head_dim": 64, "num_key_value_heads": 4}, {"mixed_precision": "bf16"}, 4, 1024, "AdamW"),
)
"""The same of QLoRA: adapters on a base in 4 bits, where bitsandbytes and PEFT are installed."""
_RANK = 16


def _config(options: Namespace, family: str, sizes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if options.tiny:
        sizes = {**sizes, "num_hidden_layers": 2, "n_layer": 2, "vocab_size": 1024}
    return AutoConfig.for_model(family, **{"vocab_size": 32768, "use_cache": False, **_SMALL, **sizes})


def _planned(config: Any, case: dict[str, Any], batch: int, length: int, optimizer: str, *, is_packed: bool) -> int:
    from transformers import AutoModelForCausalLM

    from accel_trainer.config import resolve
    from accel_trainer.contrib.empty_models import add_adapters
    from accel_trainer.contrib.planner import Cluster, Workload, plan_layout

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if is_packed:
        model = add_adapters(model.to(torch.bfloat16), _RANK, in_4_bits=True)
    dtype = None if is_packed else torch.float32  # adapters have one of their own
    workload = Workload(batch=batch, sequence=length, dtype=dtype, optimizer=optimizer)
    return plan_layout(model, resolve(file=case, environ={}), 1, workload, Cluster()).peak


def _build(options: Namespace, config: Any, *, is_packed: bool) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config)
    if not is_packed:
        return model
    import peft
    from transformers import BitsAndBytesConfig

    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=packing, dtype=torch.bfloat16)
    return peft.get_peft_model(model, peft.LoraConfig(r=_RANK, target_modules="all-linear")).train()


def _measured(options: Namespace, model: Any, case: dict[str, Any], batch: int, length: int, name: str) -> float:
    """Return the bytes at the peak of the last of three updates of a native loop."""
    from accel_trainer import Accelerator

    gc.collect()
    accelerator = Accelerator(cpu=options.device == "cpu", config=case)
    optimizer = getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(0, 1024, (batch, length), device=accelerator.device)
    for _ in range(3):
        reset_peak(options)
        for _ in range(accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
    return (peak_gib(options) or 0.0) * 2**30


def main() -> None:
    options = parse(parser(__doc__))
    packed = _QLORA_CASES if all(map(importlib.util.find_spec, ("bitsandbytes", "peft"))) else ()
    cases = [*[(*case, False) for case in _CASES], *[(*case, True) for case in packed]]
    for family, sizes, case, batch, length, optimizer, is_packed in cases[:: 4 if options.tiny else 1]:
        if options.device == "cpu" and case.get("mixed_precision") == "fp16":
            continue
        if options.tiny:
            batch, length = 1, 16
        config = _config(options, family, sizes)
        planned = _planned(config, case, batch, length, optimizer, is_packed=is_packed)
        model = _build(options, config, is_packed=is_packed)
        measured = _measured(options, model, case, batch, length, optimizer)
        del model  # before the next one is there
        ratio = planned / measured if measured else None
        emit(
            what="peaks", family=f"{family}, 4 bits" if is_packed else family, options={**sizes, **case}, rows=batch,
            tokens=length, optimizer=optimizer, planned_gib=planned / 2**30,
            measured_gib=measured / 2**30 if measured else None, ratio=ratio,
            holds=None if ratio is None else abs(ratio - 1) <= _BOUND,
        )  # fmt: skip


if __name__ == "__main__":
    main()
