"""Communication hooks: compression of the gradients that DistributedDataParallel sends between ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_trainer.errors import ConfigError, did_you_mean


class DDPCommunicationHookType(StrEnum):
    """Compression of a bucket of gradients."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_HOOKS: dict[str, Any] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
    DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
    DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[str, Any] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
}
_WITH_STATE = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)


@dataclass(frozen=True)
class CommHook:
    """A communication hook of torch, by name: "no", "fp16", "bf16", "power_sgd" or "batched_power_sgd".

    Raises:
        ConfigError: a name or an option of the state is unknown, or belongs to no hook.
    """

    hook: str = DDPCommunicationHookType.NO
    wrapper: str = DDPCommunicationHookType.NO
    """Type to which the hook's own output is cast: "no", "fp16" or "bf16"."""
    state_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of torch's PowerSGDState."""

    def __post_init__(self) -> None:
        _check_name("comm_hook", self.hook, [DDPCommunicationHookType.NO, *_HOOKS])
        _check_name("comm_wrapper", self.wrapper, [DDPCommunicationHookType.NO, *_WRAPPERS])
        if self.wrapper != DDPCommunicationHookType.NO and self.hook == DDPCommunicationHookType.NO:
            raise ConfigError(
                f"comm_wrapper={str(self.wrapper)!r} casts what a comm_hook sends, and there is none; pass "
                f"comm_hook={str(self.wrapper)!r}"
            )
        if self.state_options and self.hook not in _WITH_STATE:
            raise ConfigError(
                f"comm_state_option={dict(self.state_options)} is for power_sgd and batched_power_sgd, and comm_hook "
                f"is {str(self.hook)!r}; pass one of the two, or leave the options out"
            )
        known = list(inspect.signature(powerSGD_hook.PowerSGDState.__init__).parameters)[2:]
        for name in self.state_options:
            if name not in known:
                raise ConfigError(
                    f"comm_state_option: unknown option {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
                )

    @property
    def changes_gradients(self) -> bool:
        """Whether gradients are sent in another form than their own."""
        return self.hook != DDPCommunicationHookType.NO

    def check(self, device: torch.device) -> None:
        """Refuse a hook that torch cannot run on `device`: no backend of the CPU sends gradients in bf16."""
        if device.type == "cpu" and DDPCommunicationHookType.BF16 in (self.hook, self.wrapper):
            raise ConfigError(
                f"comm_hook={str(self.hook)!r}, comm_wrapper={str(self.wrapper)!r}: torch sends gradients in bf16 with "
                "NCCL and XCCL, and the CPU has gloo; use 'fp16', or 'no' to send them as they are"
            )

    def register(self, model: DistributedDataParallel) -> None:
        """Have `model` send its gradients by this hook; on every rank alike, once."""
        hook = _HOOKS[self.hook]
        if self.wrapper != DDPCommunicationHookType.NO:
            hook = _WRAPPERS[self.wrapper](hook)
        state = powerSGD_hook.PowerSGDState(None, **self.state_options) if self.hook in _WITH_STATE else None
        model.register_comm_hook(state, hook)


def _check_name(option: str, value: str, known: list[str]) -> None:
    if value not in known:
        names = [str(name) for name in known]
        raise ConfigError(
            f"{option}={value!r} is unknown{did_you_mean(str(value), names)}; expected one of {', '.join(names)}"
        )
