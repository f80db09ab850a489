"""Options of FSDP2 as an object, under the names that scripts written for FSDP1 use too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from accel_trainer import logging
from accel_trainer.config import Resolved
from accel_trainer.config.dialects.fsdp import DIRECT, NAMED, SHARDING_STRATEGIES, WITHOUT_EFFECT, fsdp_options
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.plugins.kwargs import OptionObject
from accel_trainer.precision import PrecisionPolicy
from accel_trainer.strategies.api import Capabilities

logger = logging.get_logger(__name__)

_OWN = {name: f"fsdp.{name}" for name in ("reshard_after_forward", "replicate_size", "replicate_per_node")}
_WITHOUT_EFFECT = (*WITHOUT_EFFECT, "state_dict_config", "optim_state_dict_config")
_REFUSED = {
    "mixed_precision_policy": "what is computed in which precision is Accelerator(mixed_precision=...)",
    "param_init_fn": "build the model in init_empty_weights(), and load its weights after prepare()",
}


@dataclass
class FullyShardedDataParallelPlugin(OptionObject):
    """Shard with FSDP2: giving one chooses it. None leaves an option as configured; torch's enumerations are taken."""

    reshard_after_forward: bool | None = None
    auto_wrap_policy: str | Callable[..., bool] | None = None
    """A name ("transformer_based_wrap", "size_based_wrap", "no_wrap"), or a callable, true for modules to be units;
    those of `torch.distributed.fsdp.wrap` are asked as FSDP1 asks them."""
    transformer_cls_names_to_wrap: Iterable[str] | None = None
    min_num_params: int | None = None
    cpu_offload: Any = None
    """Whether parameters are kept in host memory: a bool, or torch's object, of FSDP1 or FSDP2."""
    activation_checkpointing: bool | str | None = None
    """Whether layers are computed again in the backward, or by which policy: "selective", "every:2"."""
    activation_checkpointing_offload: bool | None = None
    """Whether what they keep for the backward goes to host memory."""
    cpu_ram_efficient_loading: bool | None = None
    state_dict_type: Any = None
    """"full" or "sharded"; also "FULL_STATE_DICT" and "SHARDED_STATE_DICT"."""
    ignored_modules: Iterable[str] | None = None
    """Regular expressions for the full names of the modules that are not sharded."""
    backward_prefetch: Any = None
    """A bool, or FSDP1's "BACKWARD_PRE", "BACKWARD_POST" (both on) and "NO_PREFETCH"."""
    forward_prefetch: bool | None = None
    replicate_size: int | None = None
    replicate_per_node: bool | None = None
    fsdp_version: int = 2
    sharding_strategy: Any = None
    """FSDP1's "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD" or "HYBRID_SHARD_ZERO2", in FSDP2's options."""
    use_orig_params: bool | None = None
    """Always so with FSDP2; taken without effect."""
    sync_module_states: bool | None = None
    """Ranks whose values differ are given rank 0's in any case; taken without effect."""
    limit_all_gathers: bool | None = None
    """Taken without effect."""
    state_dict_config: Any = None
    """State dicts are on the CPU of rank 0 in any case; taken without effect."""
    optim_state_dict_config: Any = None
    """Taken without effect."""
    mixed_precision_policy: Any = None
    """Refused: the precision is the Accelerator's."""
    param_init_fn: Any = None
    """Refused: weights are loaded after `prepare`."""

    def __post_init__(self) -> None:
        if str(self.fsdp_version) != "2":
            raise ConfigError(f"{self._named('fsdp_version')}: only FSDP2 is offered; pass 2")
        for name, way_out in _REFUSED.items():
            if getattr(self, name) is not None:
                raise ConfigError(f"{self._named(name)} is not offered: {way_out}")
        policy = self.auto_wrap_policy
        if policy is not None and not isinstance(policy, str | Enum) and not callable(policy):
            raise ConfigError(
                f"{self._named('auto_wrap_policy')} is no name and cannot be called; pass the function that it asks, "
                "true for modules to be units"
            )

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set `state_dict_type`, for an Accelerator that is made later; one has its own: `state.fsdp_plugin`."""
        self.state_dict_type = state_dict_type if state_dict_type is not None else self.state_dict_type

    def _named(self, name: str) -> str:
        return f"{type(self).__name__}({name}={getattr(self, name)!r})"

    def objects(self) -> dict[str, Any]:
        """Return the callable given as `auto_wrap_policy`, if one was."""
        return {"wrap_policy": self.auto_wrap_policy if callable(self.auto_wrap_policy) else None}

    def explicit(self) -> dict[str, Any]:
        """Return the options that were set, by dotted path."""
        options = {"strategy": "fsdp2", **self._sharding(), **self._policy()}
        for name, path in {**DIRECT, **_OWN}.items():
            value = self._direct(name)
            if value is None:
                continue
            if options.setdefault(path, value) != value:
                raise ConfigError(
                    f"{self._named('sharding_strategy')} means {path.removeprefix('fsdp.')}={options[path]!r}, and "
                    f"{name}={value!r} was given; keep one of the two"
                )
        for name, (path, values) in NAMED.items():
            value = _plain(getattr(self, name, None))
            if value is not None and not callable(value):
                # An unknown name is passed on: the configuration refuses it, with the known ones.
                options[path] = values.get(value.upper(), value) if isinstance(value, str) else value
        unused = [name for name in _WITHOUT_EFFECT if getattr(self, name) is not None]
        if unused:
            logger.info("FullyShardedDataParallelPlugin: %s have no effect with FSDP2", ", ".join(unused))
        return options

    def _direct(self, name: str) -> Any:
        """Return an option as the configuration has it; None where it is not set, or a key of files only."""
        value = getattr(self, name, None)
        if name == "cpu_offload" and value is not None:
            from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

            is_policy = isinstance(value, OffloadPolicy)  # of FSDP2, which says it by its class
            return isinstance(value, CPUOffloadPolicy) if is_policy else getattr(value, "offload_params", value)
        if name in self._policy():
            return None
        if value is not None and name in ("transformer_cls_names_to_wrap", "ignored_modules"):
            return (value,) if isinstance(value, str) else tuple(value)
        return value

    def _policy(self) -> dict[str, Any]:
        """Return `activation_checkpointing` where it is the name of a policy, which is an option of every strategy."""
        policy = self.activation_checkpointing
        return {"activation_checkpointing": policy} if isinstance(policy, str) else {}

    def _sharding(self) -> dict[str, Any]:
        if self.sharding_strategy is None:
            return {}
        word = str(_plain(self.sharding_strategy)).upper()
        known = [name for name in SHARDING_STRATEGIES if name != "NO_SHARD"]
        if word == "NO_SHARD":
            raise ConfigError(
                f"{self._named('sharding_strategy')} keeps the whole model on every rank; leave the plugin out, and "
                "pass Accelerator(strategy='ddp')"
            )
        if word not in known:
            raise ConfigError(
                f"{self._named('sharding_strategy')}; expected one of {', '.join(known)}{did_you_mean(word, known)}"
            )
        return fsdp_options(word)


@dataclass
class FSDPDescription:
    """The sharding in force, under the attribute names that transformers and TRL read from `state.fsdp_plugin`."""

    fsdp_version: int
    reshard_after_forward: bool
    state_dict_type: str
    cpu_offload: Any
    """An argument of torch's fully_shard, with which TRL shards a reference model; as is `mixed_precision_policy`."""
    mixed_precision_policy: Any
    ignored_modules: str | None
    """One regular expression for the full names of all modules that are not sharded."""
    activation_checkpointing: bool
    activation_checkpointing_offload: bool
    transformer_cls_names_to_wrap: list[str]

    @classmethod
    def of(cls, resolved: Resolved, facts: Capabilities, precision: PrecisionPolicy) -> FSDPDescription | None:
        """Return the sharding of a strategy with these facts; None where something else shards, or nothing."""
        if facts.distributed_type != "FSDP":
            return None
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        fsdp = resolved.config.fsdp
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute, reduce_dtype=precision.reduce, output_dtype=precision.output
        )
        return cls(
            fsdp_version=2,
            reshard_after_forward=fsdp.reshard_after_forward,
            state_dict_type=f"{fsdp.state_dict_type.upper()}_STATE_DICT",
            cpu_offload=CPUOffloadPolicy() if fsdp.offload_params else None,
            mixed_precision_policy=policy,
            ignored_modules="|".join(f"(?:{pattern})" for pattern in fsdp.ignored_modules) or None,
            activation_checkpointing=resolved.config.recomputation != "off",
            activation_checkpointing_offload=resolved.config.activation_offload,
            transformer_cls_names_to_wrap=list(fsdp.wrap_classes),
        )

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose "FULL_STATE_DICT" or "SHARDED_STATE_DICT" for later saves; None leaves it.

        For the optimizer's state in a Trainer's checkpoints, and the functions that take a plugin. Weights that are
        saved for others, and `get_state_dict`, are full in any case; a state of `save_state` is in shards.

        Raises:
            ConfigError: it is another word.
        """
        if state_dict_type is None:
            return
        word = f"{str(_plain(state_dict_type)).upper().removesuffix('_STATE_DICT')}_STATE_DICT"
        known = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
        if word not in known:
            raise ConfigError(f"set_state_dict_type({state_dict_type!r}); expected one of {', '.join(known)}")
        self.state_dict_type = word

    @property
    def saves_shards(self) -> bool:
        """Whether optimizers are saved in shards."""
        return self.state_dict_type == "SHARDED_STATE_DICT"


def _plain(value: Any) -> Any:
    """Return the name of a member of an enumeration, and other values as they are."""
    return value.name if isinstance(value, Enum) else value
