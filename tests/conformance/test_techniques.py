"""What fits a bigger model, on each layout: the numbers of the plain loop, resumed too, or a refusal by name.

`TECHNIQUES` are the rows of a table in docs/compatibility.md: a cell is a test here, or the words of the refusal.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_trainer.errors import ConfigError
from accel_trainer.techniques import activations
from accel_trainer.techniques.muon import Muon, muon_groups
from tests.cells import beyond, selected
from tests.conformance.models import GLOBAL_BATCH, build_model, build_optimizer, build_samples, collate
from tests.conformance.test_conformance import LAYOUTS, mark
from tests.ranks import preload, run_ranks

preload("transformers.models.llama.modeling_llama", "accel_trainer.accelerator", "deepspeed")

COLUMNS = ("single", "ddp", "fsdp2", "hsdp", "tp", "sp", "cp", "zero1", "zero2", "zero3")
SAMPLE = ("single", "ddp", "fsdp2", "zero3")
COMBINED = {f"activations computed again: {policy}" for policy in ("selective", "ops:aten.silu")}
COMBINED |= {"activations in host memory"}
"""What is by itself on one process in the sample, and with another technique on shards."""
ZERO = ("zero1", "zero2", "zero3")
UPDATES, SAVED, DECAY = 2, 1, 0.5
TOKENS = GLOBAL_BATCH * 12


@dataclass(frozen=True)
class Technique:
    """What is asked for beside a layout, and where it is refused."""

    title: str
    config: Mapping[str, Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = build_optimizer
    refused: Mapping[str, str] = field(default_factory=dict)
    """Words of the message, by layout."""
    tolerance: float = 2e-6


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(muon_groups(model), lr=1e-2)


TECHNIQUES = {
    each.title: each
    for each in (
        Technique("a loss in chunks", {"loss": "chunked", "loss_chunk_tokens": 7}),
        *(
            Technique(f"activations computed again: {policy}", {"activation_checkpointing": policy})
            for policy in ("full", "selective", "every:2", "ops:aten.silu")
        ),
        Technique(
            "selective, a loss in chunks",
            {"activation_checkpointing": "selective", "loss": "chunked", "loss_chunk_tokens": 7},
        ),
        Technique("activations in host memory", {"activation_offload": True}),
        Technique(
            "selective, the rest in host memory", {"activation_checkpointing": "selective", "activation_offload": True}
        ),
        Technique(
            "updates in the backward",
            {"optimizer_in_backward": True},
            refused=dict.fromkeys(("ddp", *ZERO), "which keeps all gradients in buffers of its own"),
        ),
        Technique(
            "Muon",
            {},
            _muon,
            dict.fromkeys(ZERO, "the engine hands it flat pieces of all parameters of a group"),
            tolerance=1e-3,  # it rounds to bf16 on its way
        ),
        Technique(
            "averaged weights",
            {"ema_decay": DECAY},
            refused={"zero3": "whose engine keeps pieces of parameters"},
        ),
        Technique("meters", {"meters": True, "peak_flops": 1e12}),
    )
}


def train(layout: str, asked: Technique, folder: str = "", begin: int = 0) -> list[float]:
    """Return losses on this rank, then the averaged model's loss and the tokens seen, where there are some.

    Args:
        folder: of the state: saved after an update, or loaded where the run does not begin at 0.
    """
    accelerator = LAYOUTS[layout].accelerator(asked.config)
    model = build_model("llama")
    loader = DataLoader(build_samples("llama"), GLOBAL_BATCH // accelerator.readers.world_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, asked.optimizer(model), loader)
    if begin:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, begin)
    losses = []
    for update, batch in enumerate(itertools.islice(loader, UPDATES - begin), begin + 1):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if update == SAVED:
            accelerator.save_state(folder)
    if "ema_decay" in asked.config:
        with accelerator.averaged_weights(model), torch.no_grad():
            losses.append(accelerator.reduce(model(**batch)["loss"], "mean").item())
    if figures := accelerator.perf():
        losses.append(figures["perf/tokens_seen"])
    accelerator.free_memory()
    return losses


def run_all(layout: str, folder: str, titles: tuple[str, ...]) -> dict[str, Any]:
    """Return what each technique gives on this rank: numbers, those of a resumed run, or a refusal."""
    activations._LEAST_BYTES = 0
    found: dict[str, Any] = {}
    for number, title in enumerate(titles):
        asked = TECHNIQUES[title]
        try:
            state = f"{folder}/{number}"
            found[title] = train(layout, asked, state), train(layout, asked, state, SAVED)
        except ConfigError as error:
            found[title] = str(error)
    return found


@functools.cache
def results_of(layout: str, folder: Path, titles: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the results of `run_all` by rank."""
    on = LAYOUTS[layout]
    return run_ranks(run_all, on.world_size, layout, str(folder), titles, env=on.env, timeout=150)


@functools.cache
def plain_loop(title: str) -> list[float]:
    """Train with plain PyTorch on one process, averages by their formula."""
    asked = TECHNIQUES[title]
    model, samples, losses = build_model("llama"), build_samples("llama"), []
    optimizer = asked.optimizer(model)
    averages: dict[str, torch.Tensor] = {}
    for step in range(UPDATES):
        batch = collate(samples[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        for name, value in model.state_dict().items():
            averages[name] = DECAY * averages[name] + (1 - DECAY) * value if step else value.clone()
    if "ema_decay" in asked.config:
        model.load_state_dict(averages)
        losses.append(model(**batch)["loss"].item())
    return [*losses, UPDATES * TOKENS] if "meters" in asked.config else losses


def require_plain_or_refused(found: Any, layout: str, technique: str, begin: int) -> None:
    """Assert that a technique was refused by name, or that both runs gave the plain loop's numbers.

    `begin`: of the resumed run, among those of the whole one.
    """
    asked = TECHNIQUES[technique]
    if layout in asked.refused:
        assert isinstance(found, str), found
        assert asked.refused[layout] in found
        return
    assert not isinstance(found, str), found
    whole, resumed = found
    assert whole == pytest.approx(plain_loop(technique), rel=asked.tolerance, abs=asked.tolerance)
    assert resumed == whole[begin:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("techniques")


def _is_beyond(title: str, layout: str) -> bool:
    """Return whether `make test-cells` has a cell: in the sample, engines compute again whole blocks alone."""
    is_part = TECHNIQUES[title].config.get("activation_checkpointing", "full") != "full"
    return layout not in SAMPLE or (is_part and layout in ("ddp", "zero3")) or (title in COMBINED and layout == "fsdp2")


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("layout", "technique"),
    [
        beyond(mark(name, kind=title)) if _is_beyond(title, name) else mark(name, kind=title)
        for title in TECHNIQUES
        for name in COLUMNS
    ],
)
def test_a_technique_is_the_plain_loop_or_refused_by_name(
    layout: str, technique: str, folder: Path, request: pytest.FixtureRequest
):
    cells = selected(request, "test_a_technique_is_the_plain_loop_or_refused_by_name")
    titles = tuple(title for name, title in cells if name == layout)
    for results in results_of(layout, folder / layout, titles):
        require_plain_or_refused(results[technique], layout, technique, SAVED)
