"""Models that transformers has sharded while it loaded them, by `from_pretrained(distributed_config=...)`.

They are taken as they are: transformers has made the meshes, and the forwards that compute with parts of a layer; FSDP2
averages gradients where it shards. What is left to do is said here: who reads which data, when gradients are exchanged,
and one layout for each parameter, its gradient and the state of its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_trainer import logging
from accel_trainer.checkpoint.shards import is_sharded_or_replicated
from accel_trainer.checkpoint.weights.adapters import adapter_folders
from accel_trainer.checkpoint.weights.weight_files import USERS_CLASS
from accel_trainer.config import Resolved
from accel_trainer.config.parallel import AxisSizes
from accel_trainer.config.schema import ParallelConfig
from accel_trainer.errors import ConfigError
from accel_trainer.precision import PrecisionPolicy, apply_autocast
from accel_trainer.registry import load_strategy
from accel_trainer.runtime.model_wrappers import find_sharded_at_load
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_private import flatten_mesh
from accel_trainer.strategies.api import Capabilities, StepOutcome, Strategy, TrainJob
from accel_trainer.strategies.broadcast_values import broadcast_tensors, share_buffers_in_evaluation
from accel_trainer.strategies.fsdp2.unit import FSDP2Unit, check_optimizer_can_shard, exchange_full_state
from accel_trainer.strategies.fsdp2.wrapping import check_output_is_seen, gather_in_generate, reshard_after_inference
from accel_trainer.strategies.gradients import LossScale
from accel_trainer.strategies.optimizers import parameters_of
from accel_trainer.strategies.own_methods import refuse_copies, refuse_second_backward
from accel_trainer.strategies.single import NativeUnit, check_optimizers

logger = logging.get_logger(__name__)


def choose_strategy(models: Iterable[Any], resolved: Resolved, current: Strategy) -> PreshardedStrategy | None:
    """Return the strategy for models of which one was sharded while it was loaded; None where `current` takes them all.

    Raises:
        ConfigError: the configuration shards models, too; or models have different layouts.
    """
    chosen = current if isinstance(current, PreshardedStrategy) else None
    for sharded in filter(None, map(find_sharded_at_load, models)):
        if chosen is None:
            check_alone(sharded, resolved)
        own = PreshardedStrategy(sharded)
        if chosen is not None and chosen.layout != own.layout:
            raise ConfigError(
                f"{type(sharded).__name__} was loaded with {own.layout}, and a model before it with {chosen.layout}: "
                "ranks would read other data for each; load both with the same sizes"
            )
        chosen = chosen or own
    return None if chosen is current else chosen


def check_alone(sharded: nn.Module, resolved: Resolved) -> None:
    """Refuse options that shard, or exchange gradients otherwise, beside a model that is sharded already."""
    config = resolved.config
    facts = Capabilities() if config.strategy == "auto" else load_strategy(config.strategy).capabilities
    asked = [resolved.describe("strategy")] if facts.shards_parameters or facts.builds_engine else []
    asked += ["sizes of axes of its own"] if config.parallel != ParallelConfig() else []
    asked += [resolved.describe("local_steps")] if config.local_steps is not None else []
    if asked:
        raise ConfigError(
            f"{type(sharded).__name__} was sharded by from_pretrained(distributed_config=...), and this run has "
            f"{', '.join(asked)}; leave that out (fsdp, deepspeed, parallelism_config, local_steps), or load the model "
            "without distributed_config"
        )


class PreshardedUnit(FSDP2Unit):
    """A model that was sharded while it was loaded: by FSDP2, in parts of layers, or both."""

    def __init__(self, model: nn.Module, loss_scale: LossScale | None, *, in_parts: bool) -> None:
        """Take the model; `in_parts` where ranks compute with parts of layers."""
        super().__init__(model, (), loss_scale)  # type: ignore[arg-type]  # FSDP2 may be in the model, or nowhere
        self._units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._in_parts = in_parts

    def set_gradient_sync(self, enabled: bool) -> None:
        """Exchange gradients in the next backward, or leave them on this rank; with parts of layers, always exchange.

        transformers adds up gradients of parts in hooks (5.23, `ReplicatedWithGradAllReduce`), on all that is held:
        those of an earlier micro-batch, which were added up then, would count once more for each rank.
        """
        self._unsharded.sync = enabled
        for unit in self._units:
            unit.set_requires_gradient_sync(enabled or self._in_parts, recurse=False)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate gradients of `loss`, each laid out as its parameter. Collective."""
        apart = [] if self._units else [p for p in self.module.parameters() if p.requires_grad]
        # See `set_gradient_sync`: where FSDP2 does not take gradients away, they are put aside.
        held = [(p, p.grad) for p in apart if p.grad is not None and not isinstance(p, DTensor)]
        for parameter, _ in held:
            parameter.grad = None
        super().backward(loss, **kwargs)
        for parameter, gradient in held:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for parameter in apart:
            _lay_out_gradient(parameter)

    def step(self, closure: Callable[[], Any] | None = None, *, optimizer: Optimizer | None = None) -> StepOutcome:
        """Update the parameters, those of each mesh by themselves: a fused kernel takes no others with them."""
        stepping = optimizer or self._only_optimizer()
        by_mesh: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for parameter in parameters_of(stepping):
            if parameter.grad is not None:
                by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append((parameter, parameter.grad))
        if len(by_mesh) < 2 or closure is not None:
            return super().step(closure, optimizer=stepping)
        everything = [each for held in by_mesh.values() for each in held]
        for own in by_mesh.values():
            for parameter, _ in everything:
                parameter.grad = None
            for parameter, gradient in own:
                parameter.grad = gradient
            outcome = super().step(optimizer=stepping)
        for parameter, gradient in everything:
            parameter.grad = gradient
        return outcome


def _lay_out_gradient(parameter: Tensor) -> None:
    """Lay out the gradient of a sharded parameter as the parameter. Collective where it is another layout."""
    # That of an embedding sharded by rows comes whole. A checkpoint, and fused updates, want one layout.
    own = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(own, DTensor) and own.placements != parameter.placements:
        parameter.grad = own.redistribute(placements=parameter.placements)


class PreshardedStrategy(Strategy):
    """Takes models as transformers has sharded them, and others beside them as replicas."""

    name: ClassVar[str] = "presharded"
    capabilities: ClassVar[Capabilities] = Capabilities(shards_parameters=True, distributed_type="FSDP")

    def __init__(self, sharded: Any) -> None:
        """Take the layout of a sharded model; a ConfigError for one with pipelines."""
        config = sharded.config.distributed_config
        self.sizes = AxisSizes(dp_replicate=config.dp_replicate_size, dp_shard=config.fsdp_size, tp=config.tp_size)
        names = ("dp_replicate_size", "fsdp_size", "tp_size", "ep_size", "pp_size")
        given = {name: getattr(config, name, None) or 1 for name in names}
        self.layout = ", ".join(f"{name}={size}" for name, size in given.items() if size > 1)
        self.in_parts = max(given["tp_size"], given["ep_size"]) > 1
        self._mesh = sharded._mesh_manager
        if given["pp_size"] > 1:
            raise ConfigError(
                f"{type(sharded).__name__} was loaded with {self.layout}, and pipelines are not trained here; load it "
                "with fsdp_size and tp_size, or without distributed_config and shard it by options of this run (fsdp, "
                "parallelism_config)"
            )

    def readers(self, resolved: Resolved, process: ProcessContext) -> ProcessContext:
        """Return this process among the ranks along the axes of replicas and shards. Collective where there are both.

        Those along tp have the same samples. Those that exchange tokens for experts have samples of their own.
        """
        if self.sizes.tp == 1:
            return process
        axes = self._mesh.get_mesh(("dp_replicate", "fsdp"))
        axis = "dp_replicate" if self.sizes.dp_shard == 1 else "fsdp"
        many = min(self.sizes.dp_replicate, self.sizes.dp_shard) > 1
        return process.among(flatten_mesh(axes, "dp").get_group() if many else axes[axis].get_group())

    def check(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> None:
        """Refuse options that do not go together with the layout, and optimizers that cannot update shards."""
        if (sharded := find_sharded_at_load(job.model)) is None:
            load_strategy("ddp").check(job, precision, process)
            return
        name, named = type(sharded).__name__, job.model.named_parameters()
        packed = next((n for n, p in named if isinstance(p, DTensor) and not is_sharded_or_replicated(p)), None)
        for is_found, found, way_out in (
            (precision.float8 is not None, "fp8 replaces its layers", "use mixed_precision 'bf16'"),
            (job.comm_hook is not None, "a communication hook is DDP's", "leave the hook out"),
            (
                packed is not None,
                f"a rank has several pieces of {packed}",
                "give its layer another tp_plan, or ep_size",
            ),
            (self.in_parts and precision.loss_scaling, "fp16 scales losses", "use mixed_precision 'bf16'"),
            (self.in_parts and bool(adapter_folders(job.model)), "it has adapters of PEFT", "load it with fsdp_size"),
        ):
            if is_found:
                raise ConfigError(
                    f"{name} was loaded with {self.layout}, and {found}, which does not go together here; {way_out}, "
                    "or load the model without distributed_config and shard it by options of this run (fsdp, "
                    "parallelism_config)"
                )
        for optimizer in job.optimizers:
            check_optimizer_can_shard(optimizer, in_parts=self.in_parts, num_shards=self.sizes.dp_shard)
        check_optimizers(job)

    def prepare(self, job: TrainJob, precision: PrecisionPolicy, process: ProcessContext) -> NativeUnit:
        """Take the model as it is. Collective: rank 0's values count of unsharded tensors, adapters for one."""
        self.check(job, precision, process)
        model, sharded = job.model, find_sharded_at_load(job.model)
        if sharded is None:
            # Ranks along tp have the same gradients: the mean over all ranks is that over those that read other data.
            unit: NativeUnit = load_strategy("ddp").prepare(replace(job, evaluation_only=False), precision, process)
            return unit
        if job.config.compile.backend != "no":
            described = job.resolved.describe("compile.backend")
            logger.warning(
                "%s is sharded already and is taken as it is, without: %s", type(sharded).__name__, described
            )
        broadcast_tensors([p.detach() for p in model.parameters() if not isinstance(p, DTensor)], process.device)
        apply_autocast(model, precision)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_hook(reshard_after_inference)
        if isinstance(model, FSDPModule):
            setattr(model, USERS_CLASS, type(model).__mro__[2])
            model.register_forward_hook(check_output_is_seen)
            refuse_second_backward(model, "FSDP2 gives the gathered weights back")
            gather_in_generate(model)
        # Its save_pretrained() would gather once more what it is given, and wait for ranks that do not write.
        sharded.gather_sharded_state_dict_for_save = lambda model, state_dict, *_, **__: state_dict
        sharded.barrier_after_gathered_checkpoint_save = lambda *_: None
        exchange_full_state(model, process)
        share_buffers_in_evaluation(model, model, process.device)
        refuse_copies(model)
        return PreshardedUnit(model, job.loss_scale, in_parts=self.in_parts).with_optimizers(job)
