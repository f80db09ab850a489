"""The layers of a model whose activations are treated as configured: the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from accel_trainer.errors import ConfigError
from accel_trainer.strategies.api import TrainJob
from accel_trainer.strategies.compile import repeated_blocks
from accel_trainer.techniques.activations import check_policy


def declared_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the submodules of the classes in the `_no_split_modules` of the model and its submodules."""
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in declared]


def select_layers(job: TrainJob, units: Sequence[nn.Module] | None = None) -> list[nn.Module]:
    """Return the layers whose activations are to be treated as configured; none where nothing is asked for.

    Args:
        units: those of sharding; None for the classes that the model declares, else the members of its ModuleLists.

    Raises:
        ConfigError: the policy names unknown operations, the model recomputes by itself, or has no layers.
    """
    model, config = job.model, job.config
    recomputes = config.recomputation != "off"
    if job.evaluation_only or not (recomputes or config.activation_offload):
        return []
    asked = job.resolved.describe(config.recomputation_path if recomputes else "activation_offload")
    if recomputes:
        check_policy(config.recomputation, asked)
        _check_recomputes_not(model, asked)
    blocks = [*(declared_blocks(model) or repeated_blocks(model))] if units is None else units
    layers = _outermost([block for block in blocks if block is not model])
    if not layers:
        own = "fsdp.wrap_classes" if units is not None else "_no_split_modules, an attribute of the model or its class"
        _check_frozen(model, f"{asked}: no module of", f"name its classes of layers in {own}")
    return layers


def _check_frozen(model: nn.Module, asked: str, hint: str) -> None:
    if any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{asked} {type(model).__name__} is a unit of its own whose activations could be treated by themselves; "
            f"{hint}"
        )


def _check_recomputes_not(model: nn.Module, asked: str) -> None:
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise ConfigError(
            f"{asked}: {type(model).__name__} computes its layers again by itself already (gradient_checkpointing="
            "True, or model.gradient_checkpointing_enable() was called), and both would do so for the same layers; "
            "keep one"
        )


def _outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave out blocks within others; but of one that holds most of all, a whole body, take those within it."""
    blocks = [block for block in blocks if any(block.children())]  # a Linear by itself keeps its input in any case
    inside = {id(block): {id(module) for module in block.modules()} - {id(block)} for block in blocks}

    def holds(block: nn.Module, others: Sequence[nn.Module]) -> int:
        return sum(id(other) in inside[id(block)] for other in others)

    layers = [block for block in blocks if 2 * holds(block, blocks) <= len(blocks)]
    return [block for block in layers if not any(holds(other, [block]) for other in layers)]
