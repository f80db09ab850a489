"""What packing is worth: real tokens a second of the same documents padded, and packed with two kernels of attention.

Documents are pieces of the standard library's sources, with bytes as tokens. Packed rows have a mask of blocks under
SDPA, and flex attention's, compiled, under the other.
"""

from __future__ import annotations

import random
import sysconfig
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from workload import build_model, clock, emit, median, parse, parser, peak_gib, reset_peak

_WARM = 2
_WAYS = {"padded": ("sdpa", False), "packed": ("sdpa", True), "packed, flex attention": ("flex_attention", True)}


def _documents(options: Namespace, num_tokens: int) -> list[dict[str, list[int]]]:
    """Return documents of up to a row's tokens, most of them short: a quarter of a row on average."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text, draw, begin, found = b"".join(path.read_bytes() for path in sources), random.Random(0), 0, []
    while begin < num_tokens:
        length = min(options.length, int(8 + draw.expovariate(4 / options.length)))
        found.append({"input_ids": list(text[begin : begin + length])})
        begin += length
    return found


def _pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids, labels = (torch.nn.utils.rnn.pad_sequence(rows, True, fill) for fill in (0, -100))
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _train(options: Namespace, documents: list[Any], attention: str, packs: bool) -> tuple[float, float, float | None]:
    """Return real tokens a second after the warm-up, computed tokens for each of them, and the peak."""
    from accel_trainer import Accelerator
    from accel_trainer.data_loader import PackingCollator, pack_dataset

    reset_peak(options)
    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision="bf16")
    model = build_model(options)
    model.set_attn_implementation(attention)
    rows: Any = pack_dataset(documents, options.length) if packs else documents
    # What a loop trains is counted from the labels, on the host: nothing waits for the device.
    batches = list(DataLoader(rows, options.batch, collate_fn=PackingCollator() if packs else _pad, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    begin = 0.0
    for step, batch in enumerate(batches):
        if step == _WARM:
            begin = clock(options)
        accelerator.backward(model(**{name: _there(value, accelerator) for name, value in batch.items()}).loss)
        optimizer.step()
        optimizer.zero_grad()
    seconds = clock(options) - begin
    counted = batches[_WARM:]
    real = sum(_num_real(batch) for batch in counted)
    return real / seconds, sum(batch["labels"].numel() for batch in counted) / real, peak_gib(options)


def _there(value: Any, accelerator: Any) -> Any:
    return value.to(accelerator.device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _num_real(batch: dict[str, Any]) -> int:
    """Return how many tokens are no padding: with a target, or the first of a document."""
    starts = batch["position_ids"] == 0 if "position_ids" in batch else torch.zeros(1, dtype=torch.bool)
    return int(((batch["labels"] != -100) | starts).sum())


def main() -> None:
    options = parse(parser(__doc__))
    documents = _documents(options, (_WARM + 12) * options.batch * options.length)
    rounds: dict[str, list[Any]] = {name: [] for name in _WAYS}
    for _ in range(options.rounds):
        for name, way in _WAYS.items():
            if options.device == "cuda" or way[0] != "flex_attention":  # a CPU has no backward of it
                rounds[name].append(_train(options, documents, *way))
    rates = {name: median([each[0] for each in results]) for name, results in rounds.items() if results}
    for name, rate in rates.items():
        computed, peak = rounds[name][-1][1:]
        emit(
            what="packing", way=name, real_tokens_per_s=rate, times_padded=rate / rates["padded"],
            computed_per_real=computed, peak_gib=peak,
        )  # fmt: skip


if __name__ == "__main__":
    main()
