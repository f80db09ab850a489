"""Gradients that DDP sends in another form: the numbers of plain DDP with the same hook of torch, on two CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_trainer import DDPCommunicationHookType, DistributedDataParallelKwargs
from accel_trainer.errors import ConfigError
from tests.ranks import preload
from tests.scenarios import Scenarios, refused

preload("accel_trainer.accelerator", "tests.scenarios")

SCENARIOS = Scenarios()
results = SCENARIOS.results
POWER = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}
ASKED: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"comm_hook": DDPCommunicationHookType.FP16},
    "power_sgd": {"comm_hook": "power_sgd", "comm_state_option": POWER},
    "power_sgd in fp16": {"comm_hook": "power_sgd", "comm_wrapper": "fp16", "comm_state_option": POWER},
}


def register_by_hand(name: str, model: DistributedDataParallel) -> None:
    """Register what torch's documentation says, without our names for it."""
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "power_sgd":
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **POWER), powerSGD_hook.powerSGD_hook)
    elif name == "power_sgd in fp16":
        hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **POWER), hook)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: Any, backward: Any) -> list[Tensor]:
    """Take four updates with rows of this rank's own; return the weights after each."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(4):
        backward(model(torch.randn(8, 16, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return seen


@SCENARIOS.add
def trained() -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    from accel_trainer import Accelerator

    found = {}
    for name, asked in ASKED.items():
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**asked)])
        model = build()
        ours = train(*accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3)), accelerator.backward)
        plain = DistributedDataParallel(build())
        register_by_hand(name, plain)
        found[name] = ours, train(plain, torch.optim.SGD(plain.parameters(), lr=0.3), Tensor.backward)
    return found


def test_each_hook_trains_as_plain_ddp_with_that_hook():
    for by_name in results("trained"):
        for name, (ours, plain) in by_name.items():
            for step, (found, expected) in enumerate(zip(ours, plain, strict=True)):
                assert torch.equal(found, expected), (name, step)
        ends = {name: ours[-1] for name, (ours, _) in by_name.items()}
        assert all(not torch.equal(ends[name], ends["none"]) for name in ends if name != "none")
        assert not torch.equal(ends["power_sgd"], ends["power_sgd in fp16"])


@SCENARIOS.add
def with_fsdp() -> str:
    from accel_trainer import Accelerator

    handler = DistributedDataParallelKwargs(comm_hook="fp16")
    return refused(lambda: Accelerator(cpu=True, strategy="fsdp2", kwargs_handlers=[handler]))


@SCENARIOS.add
def bf16_on_the_cpu() -> list[str]:
    from accel_trainer import Accelerator

    messages = []
    for asked in ({"comm_hook": "bf16"}, {"comm_hook": "power_sgd", "comm_wrapper": "bf16"}):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**asked)])
        messages.append(refused(lambda each=accelerator: each.prepare(build())))
    return messages


def test_bf16_is_refused_on_the_cpu_before_anything_is_laid_out():
    for messages in results("bf16_on_the_cpu"):
        assert messages[0].startswith("comm_hook='bf16', comm_wrapper='no': torch sends gradients in bf16 with NCCL")
        assert messages[1].endswith("and the CPU has gloo; use 'fp16', or 'no' to send them as they are")


def test_a_hook_of_ddp_is_refused_where_something_else_sends_gradients():
    for message in results("with_fsdp"):
        assert message == (
            "DistributedDataParallelKwargs(comm_hook='fp16') is for strategy 'ddp', and strategy=fsdp2 (from "
            "Accelerator(strategy=...)) sends gradients in its own way; take comm_hook out, or use 'ddp'"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"comm_hook": "fp61"},
            "comm_hook='fp61' is unknown; did you mean 'fp16'.*; expected one of no, fp16, bf16, p",
        ),
        (
            {"comm_hook": "fp16", "comm_wrapper": "power_sgd"},
            "comm_wrapper='power_sgd' is unknown; expected one of no, fp16, bf16$",
        ),
        ({"comm_wrapper": "bf16"}, "casts what a comm_hook sends, and there is none; pass comm_hook='bf16'"),
        (
            {"comm_hook": "fp16", "comm_state_option": {"matrix_approximation_rank": 2}},
            "is for power_sgd and batched_power_sgd, and comm_hook is 'fp16'",
        ),
        (
            {"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_ranks": 2}},
            "unknown option 'matrix_approximation_ranks'; did you mean 'matrix_approximation_rank'",
        ),
    ],
)
def test_a_hook_that_is_not_there_is_an_error_where_it_is_asked_for(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        DistributedDataParallelKwargs(**options)
