"""What the engine is configured to do: every "auto" gets its value, and all that is wrong is said at once.

Nothing here needs DeepSpeed to be installed; where it is, its own models say which keys and values it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_trainer.config.deepspeed.block import get_key, read_block, read_deepspeed
from accel_trainer.config.readers.config_source import problem_report
from accel_trainer.errors import ConfigError
from accel_trainer.integrations.deepspeed.facts import Fact, Facts, hidden_size_of
from accel_trainer.integrations.deepspeed.resolver import Resolver

__all__ = ["EngineConfig", "Fact", "Facts", "hidden_size_of", "read_deepspeed", "resolve_engine_config"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """A DeepSpeed configuration with nothing left open.

    Attributes:
        stage: 0 (no sharding) to 3.
        data: what `deepspeed.initialize(config=...)` gets; plain dicts and lists, a copy of its own.
        builds_in_pieces: whether models are to be built under `deepspeed.zero.Init` (stage 3 only).
    """

    stage: int
    data: dict[str, Any]
    builds_in_pieces: bool = False

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path of `data`."""
        return get_key(self.data, path, default)

    @property
    def micro_batch_size(self) -> int:
        """Rows of one micro-batch on one rank."""
        return int(self.data["train_micro_batch_size_per_gpu"])

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of one update."""
        return int(self.data["gradient_accumulation_steps"])

    @property
    def gradient_clipping(self) -> float:
        """Bound of the gradient norm in the engine's step; 0 does not clip."""
        return float(self.data["gradient_clipping"])

    @property
    def precision(self) -> str:
        """bf16, fp16, or no."""
        return next((kind for kind in ("bf16", "fp16") if self.value(f"{kind}.enabled")), "no")

    @property
    def offload_optimizer(self) -> str:
        """Where optimizer state lives: none (on the device), cpu or nvme."""
        return str(self.value("zero_optimization.offload_optimizer.device", "none"))

    @property
    def offload_param(self) -> str:
        """Where parameters live between uses: none (on the device), cpu or nvme."""
        return str(self.value("zero_optimization.offload_param.device", "none"))

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """Directories that tensors are swapped to."""
        sections = ("offload_optimizer", "offload_param")
        found = [self.value(f"zero_optimization.{name}", {}) for name in sections]
        return tuple(dict.fromkeys(str(item["nvme_path"]) for item in found if (item or {}).get("device") == "nvme"))

    @property
    def leaf_classes(self) -> tuple[str, ...]:
        """Class names of the modules whose parameters are gathered together (mixtures of experts)."""
        classes = self.value("zero_optimization.leaf_module.classes", ())
        return (classes,) if isinstance(classes, str) else tuple(classes)

    @property
    def has_optimizer(self) -> bool:
        """Whether the configuration describes the optimizer."""
        return bool(self.data.get("optimizer"))

    @property
    def has_scheduler(self) -> bool:
        """Whether the configuration describes the schedule of the learning rate."""
        return bool(self.data.get("scheduler"))


def resolve_engine_config(block: Mapping[str, Any], *, facts: Facts, partial: bool = False) -> EngineConfig:
    """Fill every "auto" of a DeepSpeed configuration and check the rest of it.

    Where nobody asks for clipping, `gradient_clipping` becomes 0: DeepSpeed clips at 1.0 when its configuration is
    silent. Where a torch optimizer is given, DeepSpeed is told to take it, under CPU offload too, where it would
    otherwise insist on an optimizer of its own.

    Args:
        block: what `RunConfig.deepspeed` holds, in DeepSpeed's spelling or with fields of accelerate's; not changed.
        facts: what the run knows.
        partial: for a look before the model and the data exist: what cannot be known yet is left out instead of
            being an error, and a batch size that nobody gave is 1.

    Raises:
        ConfigError: unknown keys, values that cannot be, autos that nothing fills, and conflicts, all at once.
    """
    resolver = Resolver(read_block(block, origins=facts.origins), facts, partial=partial)
    resolver.resolve()
    if resolver.problems:
        raise ConfigError(problem_report(resolver.problems, facts.name))
    stage = int(get_key(resolver.data, "zero_optimization.stage", 0))
    return EngineConfig(stage, resolver.data, stage == 3 and resolver.builds_in_pieces)
