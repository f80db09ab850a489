"""Forwards of a llama whose weights are on disk or in host memory, beside Hugging Face accelerate and the plain model.

Run by run.py in a process of its own, with accelerate on its path when `.compat/accelerate` holds it; prints the rows
as JSON on its last line. Everything computes on the CPU, with 8 tokens: a forward takes as long as it takes to read the
weights. From host memory nobody can be faster than the plain model, which reads the same ones; what differs is the time
that each layer's hooks take, and small layers show that.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory import peak_mib
from timing import SHORT, Row, interleave, ratio_row
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from accel_trainer import big_modeling

MEMORY_MIB = 200
FASTER = 1 / 1.2
LARGE = LlamaConfig(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=16,
    tie_word_embeddings=False,
)
SMALL = LlamaConfig(vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=8, num_attention_heads=2)


def _plain(config: LlamaConfig) -> nn.Module:
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _from_disk(library: Any, weights: Path, folder: Path) -> nn.Module:
    """Return the large model with all weights on disk; accelerate needs a folder for its copies of them."""
    with big_modeling.init_empty_weights():
        model = _plain(LARGE)
    # accelerate cannot read a checkpoint of which all goes to one place that is the disk.
    blocks = {"model.embed_tokens": "disk", "model.layers": "disk", "lm_head": "disk"}
    options = {} if library is big_modeling else {"offload_folder": folder}
    return library.load_checkpoint_and_dispatch(
        model, weights, {**blocks, "model.norm": "cpu", "model.rotary_emb": "cpu"}, **options
    )


def _from_host(library: Any, model: nn.Module) -> nn.Module:
    return library.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))


def _forward(model: nn.Module) -> Callable[[], Tensor]:
    ids = torch.arange(8)[None]

    def run() -> Tensor:
        with torch.inference_mode():
            return model(ids, use_cache=False).logits

    return run


def _memory_row(weights: Path, expected: Tensor) -> Row:
    def run() -> Tensor:
        model = _from_disk(big_modeling, weights, weights)
        return [_forward(model)() for _ in range(3)][-1]

    peak, logits = peak_mib(run)
    if not torch.equal(logits, expected):
        raise SystemExit("logits from disk differ from those of the plain model")
    ratio = peak / MEMORY_MIB
    return Row("big model: memory from disk", f"{MEMORY_MIB} MiB, of 838 of weights", ratio, ratio, ratio, 1.0, 1)


def _rows(name: str, models: dict[str, nn.Module], rounds: int, bounds: dict[str, float]) -> list[Row]:
    """Compare ours with each of the others; all compute the same logits."""
    forwards = {who: _forward(model) for who, model in models.items()}
    logits = {who: forward() for who, forward in forwards.items()}
    if not all(torch.equal(found, logits["ours"]) for found in logits.values()):
        raise SystemExit(f"{name}: logits differ")
    seconds = interleave(forwards, rounds)
    return [ratio_row(name, who, seconds["ours"], seconds[who], bounds[who]) for who in bounds if who in models]


def main() -> None:
    rounds = int(sys.argv[1])
    logging.disable_progress_bar()
    torch.manual_seed(0)
    # By its name, never by an import statement: it is the peer.
    peer = importlib.import_module("accelerate") if importlib.util.find_spec("accelerate") is not None else None
    libraries = {"ours": big_modeling, **({"accelerate": peer} if peer is not None else {})}
    large, small = _plain(LARGE), _plain(SMALL)
    with tempfile.TemporaryDirectory() as folder:
        weights, copies = Path(folder, "weights"), Path(folder, "copies")
        large.save_pretrained(weights)
        rows = [_memory_row(weights, _forward(large)())]
        models = {who: _from_disk(library, weights, copies) for who, library in libraries.items()}
        rows += _rows("big model: forward from disk", models, rounds, {"accelerate": FASTER})
        del models
        for name, model, times, bounds in (
            ("big model: forward from the host", large, rounds, {"plain": 1.15, "accelerate": 1.0}),
            ("small layers: from the host", small, SHORT * rounds, {"accelerate": FASTER}),
        ):
            if model is small:  # two threads wait for each other longer than such a layer computes
                torch.set_num_threads(1)
            models = {who: _from_host(library, model) for who, library in libraries.items()}
            rows += _rows(name, {**models, "plain": model}, times, bounds)
    print(json.dumps([row.to_dict() for row in rows]))


if __name__ == "__main__":
    main()
