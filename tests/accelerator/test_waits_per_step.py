"""How often the host waits for the device in an update: never of ours in the common path, once with fp16.

On one process the meta device stands in for an accelerator, so that copies count as well. Two ranks run on the CPU,
in fp32 and bf16, where every value that is read counts. A failure names the lines.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_trainer import Accelerator
from tests.cells import beyond, crossed
from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import build_trainer
from tests.waits import DEVICE, counting_waits, report, stand_in_device

preload("accel_trainer.accelerator", "transformers.trainer")
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")

CPU = torch.device("cpu")
WARM, COUNTED = 2, 3
"""Updates: what is made in the first ones (an optimizer's state, a first divisor of tokens) may wait."""


@pytest.fixture
def device() -> Iterator[None]:
    with stand_in_device():
        yield


def rows(num_batches: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(4), torch.ones(2))] * (2 * num_batches)


def count_native(
    on: torch.device,
    accumulation: int = 1,
    clip: str = "norm",
    fused: bool = True,
    tokens: bool = False,
    **options: Any,
) -> Counter[str]:
    """Return the waits of some updates of a loop of one's own."""
    config = {"on_nonfinite": "raise" if on == CPU else "warn"}  # the other one computes nothing: its numbers are any
    accelerator = Accelerator(cpu=on == CPU, gradient_accumulation_steps=accumulation, config=config, **options)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    # After the model: `.to("meta")` makes new parameters, which cuda's does not.
    adam = torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)
    optimizer, loader = accelerator.prepare(adam, DataLoader(rows((WARM + COUNTED) * accumulation), 2))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.9**step))
    with counting_waits(on=on) as waits:
        for index, (inputs, labels) in enumerate(loader):
            if index == WARM * accumulation:
                waits.clear()
            with accelerator.accumulate(model):
                losses = (model(inputs) - labels) ** 2
                mean = accelerator.global_token_mean(losses.sum(), losses.numel()) if tokens else losses.mean()
                accelerator.backward(mean)
                if clip == "norm":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                elif clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return without_known(waits, on)


def without_known(waits: Counter[str], on: torch.device) -> Counter[str]:
    # Models of transformers ask whether a mask hides anything, under a plain loop, too. On a CPU the gradient norm is
    # looked at as it is; on an accelerator an update later, which the case of one process counts.
    known = ("transformers/masking_utils.py", *(("runtime/nonfinite.py",) if on == CPU else ()))
    return Counter({place: count for place, count in waits.items() if not any(name in place for name in known)})


def count_trainer(on: torch.device, folder: Path, accumulation: int, **changes: Any) -> Counter[str]:
    """Return the waits of some updates of the Trainer."""
    from transformers import TrainerCallback

    class Clearing(TrainerCallback):
        """Counts from the end of the first updates to the end of the last."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM:
                waits.clear()
            if state.global_step == steps:
                found.update(waits)

    found: Counter[str] = Counter()
    steps = WARM + COUNTED
    trainer = build_trainer(
        folder,
        samples=steps * accumulation * 2 * 2,
        options={"callbacks": [Clearing()]},
        use_cpu=on == CPU,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        save_strategy="no",
        logging_strategy="no",
        optim="adamw_torch_fused",
        on_nonfinite="raise" if on == CPU else "warn",  # the other one computes nothing: its numbers are any
        logging_nan_inf_filter=on != CPU,  # where a look at the number is the fastest; elsewhere nothing looks
        **changes,
    )
    with counting_waits(on=on) as waits:
        trainer.train()
    return without_known(found, on)


@pytest.mark.parametrize(("clip", "accumulation"), crossed(["none", "norm", "value"], [1, 2]))
def test_a_loop_on_one_process_waits_for_nothing(device: None, accumulation: int, clip: str):
    waits = count_native(DEVICE, accumulation, clip)
    assert not waits, report(waits)


def test_a_mean_over_tokens_that_the_host_has_counted_waits_for_nothing(device: None):
    waits = count_native(DEVICE, accumulation=2, tokens=True)
    assert not waits, report(waits)


@pytest.mark.parametrize("fused", [True, False])
def test_fp16_waits_once_for_an_update(device: None, fused: bool):
    """The host has to know whether the update was applied: the schedule steps with it."""
    waits = count_native(DEVICE, accumulation=2, fused=fused, mixed_precision="fp16")
    assert waits.total() == COUNTED, report(waits)


@pytest.mark.parametrize(("accumulation", "has_meters"), crossed([1, 2], [False, True]))
def test_the_trainer_on_one_process_waits_for_nothing(device: None, tmp_path, accumulation: int, has_meters: bool):
    """Its meters do not until they are logged: the mask of each batch is summed on the device."""
    meters = {"meters": True, "peak_flops": 1e12} if has_meters else {}
    waits = count_trainer(DEVICE, tmp_path, accumulation, **meters)
    assert not waits, report(waits)


def test_a_loops_meters_wait_for_nothing_until_they_are_read(device: None):
    accelerator = Accelerator(config={"meters": True, "peak_flops": 1e12, "on_nonfinite": "warn"})
    model = accelerator.prepare(nn.Embedding(8, 4))
    rows = [{"input_ids": torch.arange(6), "attention_mask": torch.ones(6)}] * (2 * (WARM + COUNTED))
    optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters()), DataLoader(rows, 2))
    with counting_waits() as waits:
        for index, batch in enumerate(loader):
            if index == WARM:
                waits.clear()
            take_update(model(batch["input_ids"]).mean(), optimizer, accelerator)
        assert not waits, report(waits)
        accelerator.perf()
        assert waits


Case = tuple[str, str, int]
"""A strategy, a precision, and an accumulation."""


def count_on_ranks(cases: list[Case]) -> dict[str, Counter[str]]:
    found = {}
    for strategy, precision, accumulation in cases:
        case = f"{strategy} {precision} {accumulation}"
        found[f"loop {case}"] = count_native(CPU, accumulation, strategy=strategy, mixed_precision=precision)
        with tempfile.TemporaryDirectory() as folder:
            found[f"Trainer {case}"] = count_trainer(
                CPU,
                Path(folder),
                accumulation,
                strategy=strategy,
                bf16=precision == "bf16",
                ddp_find_unused_parameters=False,
            )
    return found


# The sample has each pair of values, too.
SAMPLE: list[Case] = [("ddp", "no", 2), ("ddp", "bf16", 1), ("fsdp2", "no", 1), ("fsdp2", "bf16", 2)]
OTHERS: list[Case] = [(strategy, precision, 3 - accumulation) for strategy, precision, accumulation in SAMPLE]


@pytest.mark.multirank
@pytest.mark.parametrize("cases", [pytest.param(SAMPLE, id="sample"), beyond(pytest.param(OTHERS, id="others"))])
def test_two_ranks_wait_for_no_value(cases: list[Case]):
    for found in run_ranks(count_on_ranks, 2, cases):
        assert len(found) == 8
        for case, waits in found.items():
            assert not waits, f"{case}: {report(waits)}"


def wait_in_some_way() -> dict[str, int]:
    x = torch.ones(3, device=DEVICE)
    ways = {
        "item": lambda: x[0].item(),
        "truth": lambda: bool(x.any()),
        "number": lambda: float(x.sum()),
        "list": lambda: x.tolist(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 0],
        "filled mask": lambda: x.masked_select(x > 0),
        "equal": lambda: torch.equal(x, x),
        "to the host": lambda: x.cpu(),
        "into the host": lambda: torch.zeros(3).copy_(x),
        "to the device": lambda: torch.ones(3).to(DEVICE),
        "made of numbers": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
        "nothing": lambda: (x * 2, x.clone(), torch.ones(3).to(DEVICE, non_blocking=True), x.where(x > 0, 0.0)),
    }
    found = {}
    for name, way in ways.items():
        with counting_waits() as waits:
            way()
        found[name] = waits.total()
        assert all("test_waits_per_step.py" in place for place in waits), report(waits)
    return found


def test_every_way_to_wait_is_seen_with_its_line():
    found = wait_in_some_way()
    assert found.pop("nothing") == 0
    assert all(found.values()), found
