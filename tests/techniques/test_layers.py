"""Activation checkpointing and offload under every strategy: the bits of a run without them, resumed too.

Those are the numbers of the plain loop, which tests/conformance/test_techniques.py asserts of techniques by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer.errors import ConfigError
from accel_trainer.techniques import activations
from tests.cells import beyond
from tests.loops import tiny_model
from tests.ranks import preload, run_ranks
from tests.strategy_configs import config_of, marked

preload("accel_trainer.accelerator", "transformers.models.llama.modeling_llama", "deepspeed")


def zero(stage: int) -> dict[str, Any]:
    """Return ZeRO of a stage, of models that are built whole: in pieces, they draw other values."""
    config = config_of(f"zero{stage}", 2)
    return config | {"deepspeed": {**config["deepspeed"], "zero3_init_flag": False}}


LAYOUTS: dict[str, tuple[int, Mapping[str, Any]]] = {
    "single": (1, {"strategy": "single"}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "hsdp": (4, {"strategy": "fsdp2", "parallel": {"dp_replicate_size": 2}}),
    "tp": (2, {"strategy": "fsdp2", "parallel": {"tp_size": 2}}),
    **{f"zero{stage}": (2, zero(stage)) for stage in (1, 2, 3)},
}
# Each policy, each with an offload, and the offload alone; dropout is on in all.
TECHNIQUES: dict[str, Mapping[str, Any]] = {
    "off": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "every other": {"activation_checkpointing": {"every": 2}, "activation_offload": True},
    "operations": {"activation_checkpointing": {"ops": ["aten.silu"]}},
    "offload": {"activation_offload": True},
    "selective offload": {"activation_checkpointing": "selective", "activation_offload": True},
}


NUM_UPDATES, WINDOW, ROWS = 2, 2, 4

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(300)]  # the first test of a layout waits for all its runs


def samples() -> list[dict[str, Tensor]]:
    tokens = torch.randint(3, 64, (NUM_UPDATES * WINDOW * ROWS, 8), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(layout: str, technique: str, folder: str = "", resumes: bool = False) -> dict[str, Any]:
    """Train with dropout on this rank; return losses, full weights (on rank 0), and how often things were done.

    Args:
        folder: where the state is saved after the first update.
        resumes: load it, and go on from there.
    """
    from accel_trainer import Accelerator

    config = {**LAYOUTS[layout][1], **TECHNIQUES[technique]}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, config=config)
    model = tiny_model("llama", attention_dropout=0.3)
    calls = {"activation": 0, "sent": 0}
    for name, module in model.named_modules():
        if name.endswith("act_fn"):
            module.register_forward_hook(lambda *_: calls.update(activation=calls["activation"] + 1))
    names = list(model.state_dict())
    loader = torch.utils.data.DataLoader(samples(), batch_size=ROWS // accelerator.readers.world_size)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    torch.manual_seed(6)
    send = activations.ActivationOffload._send
    activations.ActivationOffload._send = lambda *args: calls.update(sent=calls["sent"] + 1) or send(*args)
    losses = []
    if resumes:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, WINDOW)
    try:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == WINDOW and folder and not resumes:
                accelerator.save_state(folder)
    finally:
        activations.ActivationOffload._send = send
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    assert list(accelerator.unwrap_model(model).state_dict()) == names
    accelerator.free_memory()
    return {"losses": losses, "weights": weights, **calls}


def train_all(layout: str, folder: str) -> dict[str, Any]:
    activations._LEAST_BYTES = 0
    found: dict[str, Any] = {}
    for technique in TECHNIQUES:
        try:
            found[technique] = train(layout, technique)
        except ConfigError as error:
            found[technique] = str(error)
    if not isinstance(found["selective offload"], str):
        found["saved"] = train(layout, "selective offload", folder)
        found["resumed"] = train(layout, "selective offload", folder, resumes=True)
    return found


RESULTS: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture
def found(layout: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of rank 0, of one job for all techniques."""
    if layout not in RESULTS:
        folder = str(tmp_path_factory.mktemp("state"))
        RESULTS[layout] = run_ranks(train_all, LAYOUTS[layout][0], layout, folder, timeout=290)
    return RESULTS[layout][0]


# In the sample: one process and shards; tests/conformance/test_techniques.py has each engine, without dropout.
EVERY_LAYOUT = pytest.mark.parametrize(
    "layout",
    [layout if layout.values[0] in ("single", "fsdp2") else beyond(layout) for layout in marked(*LAYOUTS)],
)


@EVERY_LAYOUT
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_training_gives_the_same_bits_with_dropout_and_accumulation(layout: str, technique: str, found: Any):
    expected, trained = found["off"], found[technique]
    assert trained["losses"] == expected["losses"]
    assert trained["weights"].keys() == expected["weights"].keys()
    for name, value in trained["weights"].items():
        assert torch.equal(value, expected["weights"][name]), name
    # Two layers, four micro-batches. With every:2 the second layer keeps everything.
    again = {"off": 0, "offload": 0, "every other": 4}.get(technique, 8)
    assert trained["activation"] == 8 + again
    assert (trained["sent"] > 0) == ("offload" in technique or technique == "every other")


@EVERY_LAYOUT
def test_a_resumed_run_is_the_run_that_was_interrupted(layout: str, found: Any):
    whole, resumed = found["saved"], found["resumed"]
    assert whole["losses"] == found["selective offload"]["losses"]
    assert resumed["losses"] == whole["losses"][WINDOW:]
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name
