"""What each technique costs and saves: time, tokens a second, utilisation and peak memory beside a loop without any.

All are options of the configuration, tried in the same native loop, interleaved. One that this release does not have is
left out, with a line.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from training_speed import native, num_tokens, run_peer
from workload import emit, median, parse, parser

from accel_trainer.config import field_specs

_TECHNIQUES: dict[str, tuple[dict[str, Any], float | None]] = {
    "meters": ({"meters": True}, 1.005),
    "chunked loss": ({"loss_chunk_tokens": 1024}, 1.05),
    "full checkpointing": ({"activation_checkpointing": "full"}, None),
    "selective checkpointing": ({"activation_checkpointing": "selective"}, 1.12),
    "activation offload": ({"activation_offload": True}, None),
    "full checkpointing, activation offload": (
        {"activation_checkpointing": "full", "activation_offload": True},
        None,
    ),
    "chunked loss, selective checkpointing": (
        {"loss_chunk_tokens": 1024, "activation_checkpointing": "selective"},
        None,
    ),
}
"""Options by name, and how many times the loop's time without they may take on a card."""


def _compiled(backend: str) -> dict[str, tuple[dict[str, Any], float | None]]:
    blocks = {"compile": {"backend": backend, "regional": True}}
    return {
        "compiled blocks": (blocks, None),
        "CUDA graphs": ({"compile": {"backend": backend, "mode": "reduce-overhead"}}, None),
        "fp8": ({"mixed_precision": "fp8"}, None),
        "fp8, compiled blocks": ({"mixed_precision": "fp8", **blocks}, None),
    }


def _known(techniques: dict[str, tuple[dict[str, Any], float | None]]) -> dict[str, dict[str, Any]]:
    """Return the configurations of techniques that this release has."""
    known: dict[str, dict[str, Any]] = {"none": {}}
    has_fp8 = importlib.util.find_spec("torchao") is not None and torch.cuda.is_available()
    for name, (options, _) in techniques.items():
        if missing := [option for option in options if option not in {*field_specs(), "compile"}]:
            emit(what="left out", technique=name, why=f"no option {', '.join(missing)}")
        elif options.get("mixed_precision") == "fp8" and not has_fp8:
            emit(what="left out", technique=name, why="fp8 needs torchao and a card")
        else:
            known[name] = options
    return known


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--compiled", action="store_true", help="what torch.compile and fp8 are worth instead")
    options = parse(made)
    options.recompute = False
    options.warm, options.steps = (1, 2) if options.tiny else (4, 10)
    backend = "inductor" if options.device == "cuda" else "eager"  # a compiler takes a minute
    techniques = _compiled(backend) if options.compiled else _TECHNIQUES
    configs = _known(techniques)
    rounds: dict[str, list[Any]] = {name: [] for name in configs}
    for number in range(options.rounds):
        names = list(configs)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.compiler.reset()  # CUDA graphs keep their memory
            rounds[name].append(run_peer(options, partial(native, config=configs[name])))
    seconds = {name: median([each[0] for each in results]) for name, results in rounds.items()}
    base_peak = rounds["none"][-1][1]
    for name, results in rounds.items():
        times, bound = seconds[name] / seconds["none"], techniques.get(name, ({}, None))[1]
        peak_gib, used = results[-1][1:]
        emit(
            what="technique", technique=name, times_without=times, bound=bound,
            holds=None if bound is None or options.device == "cpu" else times <= bound,
            peak_times_without=peak_gib / base_peak if base_peak else None,
            tokens_per_s=num_tokens(options) / seconds[name], utilisation=used, peak_gib=peak_gib,
        )  # fmt: skip


if __name__ == "__main__":
    main()
