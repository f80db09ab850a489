"""Tokens a second, utilisation and peak memory: plain loop, native loop, our Trainer, upstream's; interleaved.

The native loop with other losses, too: in chunks, and by Liger's kernel where that is installed.

All of them: fp32 weights, bf16 autocast, fused AdamW, clipping to 1, a linear schedule, pinned batches.
"""

from __future__ import annotations

import gc
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from workload import (
    Rows,
    build_loader,
    build_model,
    clock,
    emit,
    median,
    parse,
    parser,
    peak_gib,
    reset_peak,
    utilisation,
)

_BOUNDS = {"native": 1.02, "trainer": 1.03}
"""How many times the plain loop's time, on a card."""
_PEAK_BOUND = 1.01
"""How many times the plain loop's peak memory."""
Peer = Callable[[Namespace, Any], float]
"""Trains a model for the updates that are warm-up and those that count; returns the seconds of the latter."""


def _optimizer(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 1000)


def plain(options: Namespace, model: Any) -> float:
    optimizer, schedule = _optimizer(model)
    begin = 0.0
    for step, batch in enumerate(build_loader(options, options.warm + options.steps)):
        if step == options.warm:
            begin = clock(options)
        there = {name: value.to(options.device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(options.device, torch.bfloat16):
            loss = model(**there).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return clock(options) - begin


def native(options: Namespace, model: Any, config: Mapping[str, Any] | None = None) -> float:
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=options.device == "cpu", config={"mixed_precision": "bf16", **(config or {})})
    loader = build_loader(options, options.warm + options.steps)
    model, optimizer, schedule, loader = accelerator.prepare(model, *_optimizer(model), loader)
    begin = 0.0
    for step, batch in enumerate(loader):
        if step == options.warm:
            begin = clock(options)
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return clock(options) - begin


def by_trainer(classes: Any, options: Namespace, model: Any) -> float:
    from transformers import TrainerCallback

    times: dict[int, float] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (options.warm, options.warm + options.steps):
                times[state.global_step] = clock(options)

    with tempfile.TemporaryDirectory() as folder:
        arguments = classes.TrainingArguments(
            output_dir=folder, use_cpu=options.device == "cpu", bf16=True, max_steps=options.warm + options.steps,
            per_device_train_batch_size=options.batch, learning_rate=1e-4, max_grad_norm=1.0, report_to="none",
            disable_tqdm=True, save_strategy="no", logging_strategy="no",
            gradient_checkpointing=options.recompute, gradient_checkpointing_kwargs={"use_reentrant": False},
        )  # fmt: skip
        rows = Rows((options.warm + options.steps) * options.batch, options.length)
        classes.Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()]).train()
    return times[options.warm + options.steps] - times[options.warm]


def _peers() -> dict[str, Peer]:
    import transformers

    from accel_trainer import trainer

    return {
        "plain": plain,
        "native": native,
        "chunked": partial(native, config={"loss": "chunked"}),
        "liger": partial(native, config={"loss": "liger"}),
        "trainer": partial(by_trainer, trainer),
        "upstream": partial(by_trainer, transformers),
    }


def run_peer(options: Namespace, peer: Peer) -> tuple[float, float | None, float | None]:
    """Return seconds, peak memory and utilisation of one round of a peer, which has the device for itself."""
    gc.collect()
    reset_peak(options)
    model = build_model(options)
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    seconds = peer(options, model)
    return seconds, peak_gib(options), utilisation(options, model, num_tokens(options) / seconds)


def num_tokens(options: Namespace) -> int:
    """Return how many tokens a round that counts trains."""
    return options.steps * options.batch * options.length


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--recompute", action="store_true", help="activation checkpointing")
    options = parse(made)
    options.warm, options.steps = (1, 2) if options.tiny else (4, 10)
    peers, rounds = _peers(), {}
    for number in range(options.rounds):
        names = list(peers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            try:
                rounds.setdefault(name, []).append(run_peer(options, peers[name]))
            except ImportError as error:  # upstream's Trainer without Hugging Face accelerate, or Liger
                del peers[name], rounds[name]
                emit(what="left out", peer=name, why=str(error).strip().splitlines()[0])
    seconds = {name: median([each[0] for each in results]) for name, results in rounds.items()}
    base_peak = rounds["plain"][-1][1]
    for name, results in rounds.items():
        times = seconds[name] / seconds["plain"]
        peak_times = results[-1][1] / base_peak if base_peak else None
        holds = None
        if name in _BOUNDS and peak_times is not None:  # on a card
            holds = times <= _BOUNDS[name] and peak_times <= _PEAK_BOUND
            holds = holds and (name != "trainer" or seconds[name] < seconds.get("upstream", float("inf")))
        spread = max(each[0] for each in results) / min(each[0] for each in results)
        emit(
            what="speed", peer=name, recompute=options.recompute, times_plain=times, bound=_BOUNDS.get(name),
            peak_times_plain=peak_times, holds=holds, spread=spread, tokens_per_s=num_tokens(options) / seconds[name],
            utilisation=results[-1][2], peak_gib=results[-1][1],
        )  # fmt: skip


if __name__ == "__main__":
    main()
