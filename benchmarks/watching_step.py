"""An update of 30 ms and more with the look-out for slow ranks, and with fingerprints, and without; processor time.

On the two processes that run.py starts it on. One model and one loop; what a loop does where it logs is in each round.
The look-out looks rarely while no rank is slow, which is its usual state and has the bound, and often where one is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import WAITING, Row, interleave, ratio_row
from transformers import AutoConfig, AutoModelForCausalLM
from two_ranks import print_measured

from accel_trainer import Trainer, TrainingArguments
from accel_trainer.runtime.own_watch import current_watch
from accel_trainer.runtime.slow_ranks import OFTEN, RARELY, PhaseSampler
from accel_trainer.trainer.diagnostics import Fingerprints

NUM_UPDATES, ROWS, LENGTH = 10, 2, 128
PACES = {"slow ranks": RARELY, "slow ranks, while one is": OFTEN}


def build(folder: str) -> Callable[[str], None]:
    """Return a function that trains some updates with what it is given the name of."""
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=512, use_cache=False, **sizes)
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], fingerprint_every=1, save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(AutoModelForCausalLM.from_config(config), args)
    accelerator = trainer.accelerator
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(trainer.model, optimizer)
    trainer.model_wrapped = model
    rows = [torch.randint(0, 512, (ROWS, LENGTH)) for _ in range(NUM_UPDATES)]
    watch, fingerprints = current_watch(), Fingerprints(trainer)
    assert watch is not None
    assert accelerator.slow_ranks is not None

    def run(name: str) -> None:
        kind, _, every = name.partition(" every ")
        if watch._sampler is not None:
            watch._sampler.close()
        watch._sampler = PhaseSampler(watch._loop_thread, PACES[kind]) if kind in PACES else None
        fingerprints._every = int(every or NUM_UPDATES + 1)
        for trainer.state.global_step, ids in enumerate(rows):
            call: Any = (args, trainer.state, trainer.control)
            fingerprints.on_step_begin(*call)
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                fingerprints.on_pre_optimizer_step(*call)
                optimizer.step()
                fingerprints.on_optimizer_step(*call)
                optimizer.zero_grad()
        watched = kind in PACES
        own = accelerator.slow_ranks.read() if watched else torch.zeros(1)
        ranks = accelerator.gather(own[None])  # of the loss, where nobody looks: a log has this exchange anyway
        if watched:
            accelerator.slow_ranks.judge(ranks)

    return run


def measure(rounds: int) -> list[Row]:
    """Compare the loop with each of them and with none, in turn. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        run = build(folder)
        names = ("none", *PACES, f"fingerprints every {NUM_UPDATES}", "fingerprints every 1")
        seconds = interleave(
            {name: partial(run, name) for name in names}, WAITING * rounds // 2, clock=time.process_time
        )
    print(f"{1000 * min(seconds['none']) / NUM_UPDATES:.1f} ms of processor time an update", flush=True)
    bounds = {"slow ranks": 1.01}
    return [
        ratio_row(name, "the same update without", seconds[name], seconds["none"], bounds.get(name))
        for name in names[1:]
    ]


if __name__ == "__main__":
    print_measured(measure)
