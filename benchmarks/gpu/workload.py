"""What the parts of the GPU kit share: arguments, a llama and its data, a clock that waits for the device, results.

Results are JSON lines on the standard output. `--tiny` has sizes that a CPU does in seconds: it shows that a part runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument("--tiny", action="store_true", help="sizes that a CPU does in seconds")
    made.add_argument("--rounds", type=int, default=5)
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments, with sizes: sequences of 2,048 tokens in batches of 8, or next to nothing."""
    options = made.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("there is no CUDA device here; try the kit with --device cpu --tiny")
    options.length, options.batch = (32, 2) if options.tiny else (2048, 8)
    options.rounds = 1 if options.tiny else options.rounds
    if options.device == "cpu":
        torch.set_num_threads(1)
    return options


def emit(**fields: Any) -> None:
    rounded = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in fields.items()}
    print(json.dumps(rounded), flush=True)


def build_model(options: argparse.Namespace) -> nn.Module:
    """Return a llama of 1.1 billion parameters in fp32 on the device, drawn there; the same for every peer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    if options.tiny:
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, **heads, use_cache=False, max_position_embeddings=4096)
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config).train()


class Rows(Dataset[dict[str, Tensor]]):
    """Random tokens, each its own label."""

    def __init__(self, num_rows: int, length: int) -> None:
        self._tokens = torch.randint(0, 256, (num_rows, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def build_loader(options: argparse.Namespace, num_batches: int) -> DataLoader[dict[str, Tensor]]:
    rows = Rows(num_batches * options.batch, options.length)
    return DataLoader(rows, batch_size=options.batch, pin_memory=options.device == "cuda", drop_last=True)


def clock(options: argparse.Namespace) -> float:
    """Return the time, once the device has done everything before."""
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(options: argparse.Namespace) -> float | None:
    """Return the most memory that tensors took on the device; None on a CPU, where nobody counts."""
    return torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None


def utilisation(options: argparse.Namespace, model: Any, tokens_per_second: float) -> float | None:
    """Return the share of the card's dense bf16 peak that the model's products use; None for an unknown card."""
    from accel_trainer.techniques.model_flops import ModelFlops, device_name, peak_flops_by_name

    peak, flops = peak_flops_by_name(device_name(torch.device(options.device))), ModelFlops.by_formula(model)
    if peak is None or flops is None:
        return None
    return tokens_per_second * (flops.per_token + flops.per_pair * options.length) / peak


def median(values: list[float]) -> float:
    return statistics.median(values)
