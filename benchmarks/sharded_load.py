"""Loading an 838 MiB llama onto two ranks: laid out empty and read in slices, beside from_pretrained on every rank.

Run by run.py through the launcher.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory import peak_mib
from timing import Row, interleave, ratio_row
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig
from two_ranks import print_measured

from accel_trainer import Accelerator, init_empty_weights, load_checkpoint_in_model

MARGIN_MIB = 128


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=False,
    )


def _free(accelerator: Accelerator) -> None:
    """Give back the memory of the last model: neither way of loading is to be charged with the other's."""
    accelerator.free_memory()
    gc.collect()
    dist.barrier()


def _ours(accelerator: Accelerator, directory: Path) -> Any:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(_config(), dtype=torch.float32)
    model = accelerator.prepare(model)
    load_checkpoint_in_model(model, directory)
    dist.barrier()
    return model


def _plain(directory: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dist.barrier()
    return model


def _check(ours: Any, plain: Any) -> None:
    named = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.to_local(), named[name].to_local()), name


def rows(rounds: int) -> list[Row]:
    """Compare the time of both loads, and our memory with its bound. Collective."""
    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    box = [tempfile.mkdtemp(prefix="bench-", dir=Path.cwd()) if accelerator.is_main_process else ""]
    dist.broadcast_object_list(box, src=0)
    directory = Path(box[0])
    try:
        if accelerator.is_main_process:
            AutoModelForCausalLM.from_config(_config(), dtype=torch.float32).save_pretrained(directory)
        dist.barrier()
        seconds = interleave(
            {"ours": lambda: _ours(accelerator, directory), "plain": lambda: _plain(directory)},
            rounds,
            between=lambda: _free(accelerator),
        )
        _free(accelerator)
        peak, ours = peak_mib(lambda: _ours(accelerator, directory))
        _check(ours, _plain(directory))
        shard = sum(parameter.to_local().nbytes for parameter in ours.parameters()) / 2**20
        peaks = torch.tensor([peak, shard], dtype=torch.float64)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        dist.barrier()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(directory, ignore_errors=True)
    peak, shard = peaks.tolist()
    return [
        ratio_row(
            "sharded load (838 MiB, 2 ranks)", "from_pretrained + fully_shard", seconds["ours"], seconds["plain"], 1.2
        ),
        ratio_row(
            "memory of a rank's sharded load", f"{shard:.0f} + {MARGIN_MIB} MiB", [peak], [shard + MARGIN_MIB], 1.0
        ),
    ]


if __name__ == "__main__":
    print_measured(rows)
    dist.destroy_process_group()
