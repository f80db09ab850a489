"""A step of a 100M-parameter llama of 131,072 words with `loss: chunked`, against the plain loss: memory and time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from memory import peak_mib
from timing import Row, interleave, ratio_row
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from accel_trainer import Accelerator

FULL = {"vocab_size": 131_072, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10}
QUICK = {"vocab_size": 131_072, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def _llama(sizes: dict[str, int]) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, max_position_embeddings=1024,
        **sizes,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def measure(rounds: int, *, quick: bool = False) -> list[Row]:
    """Compare a forward and backward of 4 x 1,024 tokens, in one process; `quick` takes a model of seconds."""
    sizes, batch = (QUICK, (2, 512)) if quick else (FULL, (4, 1024))
    tokens = torch.randint(0, sizes["vocab_size"], batch)

    def step_of(loss: str) -> Callable[[], None]:
        accelerator = Accelerator(cpu=True, config={"loss": loss})
        model = accelerator.prepare(_llama(sizes))

        def step() -> None:
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            model.zero_grad()

        return step

    steps = {name: step_of(name) for name in ("plain", "chunked")}
    name = f"chunked loss, {sizes['vocab_size']:,} words"
    for step in steps.values():
        step()  # what torch allocates once is no part of a step
    peaks = {key: peak_mib(step)[0] for key, step in steps.items()}
    ratio = peaks["chunked"] / peaks["plain"]
    memory = Row(f"{name}: memory", f"plain loss, {peaks['plain']:,.0f} MiB", ratio, ratio, ratio, 0.35, 1)
    seconds = interleave(steps, rounds)
    return [memory, ratio_row(f"{name}: time", "plain loss", seconds["chunked"], seconds["plain"], 1.05)]
