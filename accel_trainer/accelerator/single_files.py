"""Objects in a file of their own, written once per job or node, and read as plain data; and a model's weights.

Also a prepared model's or optimizer's state in the files of accelerate's functions for FSDP: one of full tensors, or a
directory of torch.distributed.checkpoint to which each rank writes its shards, as the plugin's `state_dict_type` says.
Any number of ranks reads both, with either type. `save_state` writes all of a run, with checksums.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from accel_trainer.accelerator.accumulation import PreparedUnit
from accel_trainer.accelerator.settings import AcceleratorSettings
from accel_trainer.big_models.dispatch import is_offloaded, lazy_state_dict
from accel_trainer.checkpoint.interop.dcp import METADATA_NAME
from accel_trainer.checkpoint.interop.huggingface import export_weights, find_weights
from accel_trainer.checkpoint.run_state import read_on_main
from accel_trainer.checkpoint.safetensors_file import LazyTensor
from accel_trainer.checkpoint.torch_files import PLAIN_ARRAYS, load_torch_file
from accel_trainer.checkpoint.weights.adapters import is_peft_model
from accel_trainer.checkpoint.weights.into_model import require_tensors
from accel_trainer.checkpoint.weights.weight_files import distinct, make_tensors, save_weights
from accel_trainer.config import NonFiniteAction
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from accel_trainer.logging import get_logger
from accel_trainer.runtime.collective_checks import all_come
from accel_trainer.runtime.model_wrappers import model_has_dtensor, uncompiled_name, unwrap_module
from accel_trainer.runtime.nonfinite import check_weights
from accel_trainer.runtime.process import ProcessContext, current_process
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies.api import CheckpointIO

if TYPE_CHECKING:
    from accel_trainer import Accelerator

logger = get_logger(__name__)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict for safetensors: contiguous, tied tensors once, by the first name; others are logged."""
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    kept = distinct(tensors)
    if removed := sorted(set(tensors) - set(kept)):
        logger.warning(
            f"Removed shared tensor {removed} while saving: a tensor is written once; tie them after loading"
        )
    return {
        name: value.contiguous() if isinstance(value, Tensor) else value
        for name, value in state_dict.items()
        if name not in removed
    }


def save(
    obj: Any,
    f: str | PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
    *,
    process: ProcessContext | None = None,
) -> None:
    """Write an object on rank 0, or each node's first rank: a state dict as safetensors, others by torch's pickle."""
    process = process or current_process()
    if not (process.is_local_main if save_on_each_node else process.is_main):
        return
    if safe_serialization:
        save_file(clean_state_dict_for_safetensors(obj), f, metadata={"format": "pt"})  # type: ignore[arg-type]
    else:
        torch.save(obj, f)


def load(f: str | PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Return the plain data, tensors and arrays of a file of torch; `weights_only=False` trusts any classes."""
    kwargs.setdefault("weights_only", True)
    with torch.serialization.safe_globals(PLAIN_ARRAYS):
        return torch.load(f, map_location=map_location, **kwargs)


# --- the state of a model or an optimizer -----------------------------------------------------------------------------


class LoadedKeys(NamedTuple):
    """Names in which a load differs from the model, as of `load_state_dict`: none, for others are an error."""

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a prepared model's weights: `pytorch_model_fsdp.bin`, or shards in `pytorch_model_fsdp_0/`. Collective.

    Args:
        fsdp_plugin: `accelerator.state.fsdp_plugin`, or another whose `state_dict_type` is meant.
        model_index: which of several models; the number in the names of the files.
        adapter_only: of a `peft.PeftModel`, the parameters that are trained.
        use_dcp: files of each rank's own are not offered.

    Raises:
        ConfigError: the model was not prepared, or `use_dcp` is false.
    """
    unit, directory = accelerator.unit_of(model), Path(output_dir)
    in_shards, process = _in_shards(fsdp_plugin, use_dcp), accelerator.process
    is_partial = adapter_only and is_peft_model(unit.module)
    own: Mapping[str, Any] = {}
    full: dict[str, Tensor] | None = None
    if in_shards or is_partial:
        own = get_model_state_dict(unit.module, options=StateDictOptions(ignore_frozen_params=is_partial))
    if not in_shards:
        lazy = unit.checkpoint_io().lazy_model_state()
        gathered = ((name, tensor()) for name, tensor in lazy.items() if not is_partial or name in own)
        full = {name: tensor.cpu() for name, tensor in gathered if process.is_main}
    _write_full(process, directory / _file("pytorch_model_fsdp", model_index), full)
    if in_shards:
        dcp.save({"model": own}, storage_writer=dcp.FileSystemWriter(directory / f"pytorch_model_fsdp_{model_index}"))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> LoadedKeys:
    """Load the files of `save_fsdp_model`, or of accelerate's, into a prepared model. Collective. Arguments as there.

    Raises:
        IncompatibleCheckpointError: they are of another model; nothing was changed.
    """
    in_shards, io = _in_shards(fsdp_plugin, use_dcp), accelerator.unit_of(model).checkpoint_io()
    directory, is_partial = Path(input_dir), adapter_only and is_peft_model(model)

    def find() -> Mapping[str, Any]:
        found = find_weights(_find(directory, "pytorch_model_fsdp", model_index, in_shards))
        unknown = sorted(set(found) - set(io.lazy_model_state())) if is_partial else ()
        if unknown:
            raise IncompatibleCheckpointError(
                f"{directory.absolute()} holds {unknown[0]!r} and {len(unknown) - 1} other tensor(s) that "
                f"{type(model).__name__} has not; add the adapters that were saved before you load them"
            )
        return found

    weights = read_on_main(accelerator.process, f"load of {directory}", find)
    io.load_full_model_state(weights or {}, strict=not is_partial)
    return LoadedKeys()


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write optimizers' state: `optimizer.bin`, or shards in `optimizer_0/`; as `save_fsdp_model`. Collective."""
    in_shards, directory = _in_shards(fsdp_plugin, use_dcp), Path(output_dir)
    io = _optimizer_io(accelerator, optimizer, model)
    state = None if in_shards else io.full_optimizer_state()
    _write_full(accelerator.process, directory / _file("optimizer", optimizer_index), state)
    if in_shards:
        io.save_sharded_optimizer(directory / f"optimizer_{optimizer_index}")


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the files of `save_fsdp_optimizer`, or of accelerate's; `adapter_only` is not used. Collective."""
    in_shards, directory = _in_shards(fsdp_plugin, use_dcp), Path(input_dir)
    io, section = _optimizer_io(accelerator, optimizer, model), f"load of {directory}"
    find = partial(_find, directory, "optimizer", optimizer_index, in_shards)
    with raise_together(accelerator.process, section):
        found = find()
    if found.is_dir():
        return io.load_sharded_optimizer(found)
    state = read_on_main(accelerator.process, section, partial(load_torch_file, found, is_mapped=True))
    io.load_full_optimizer_state(state or {})


def merge_fsdp_weights(
    checkpoint_dir: str | Path,
    output_path: str | Path,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write a directory of shards as files for `from_pretrained`, on rank 0, as `merge-weights` does. Collective.

    Raises:
        ConfigError: `remove_checkpoint_dir` would remove more than shards, or what is written.
    """
    process, shards = current_process(), Path(checkpoint_dir)
    with raise_together(process, f"merge of {checkpoint_dir}"):
        if process.is_main:
            is_within = Path(output_path).resolve().is_relative_to(shards.resolve())
            if remove_checkpoint_dir and (is_within or not (shards / METADATA_NAME).is_file()):
                raise ConfigError(
                    f"remove_checkpoint_dir=True removes {shards.absolute()}, which "
                    f"{f'{output_path} is in' if is_within else f'holds more than shards: it has no {METADATA_NAME}'}; "
                    "give the directory of the shards itself, and another to write to, or remove it yourself"
                )
            export_weights(shards, Path(output_path), safe_serialization=safe_serialization)
            if remove_checkpoint_dir:
                shutil.rmtree(shards)


def _write_full(process: ProcessContext, file: Path, state: Mapping[str, Any] | None) -> None:
    """Make the directory of a file, and write an object without shards to it on rank 0. Collective."""
    with raise_together(process, f"save to {file.parent}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if process.is_main and state is not None:
            torch.save(state, file)


def _optimizer_io(accelerator: Accelerator, optimizer: Optimizer, model: nn.Module) -> CheckpointIO:
    unit = accelerator.unit_of(model)
    if accelerator.unit_of(optimizer) is not unit:
        raise ConfigError(
            f"{type(getattr(optimizer, 'optimizer', optimizer)).__name__} holds no parameters of "
            f"{type(unit.module).__name__}; pass the model that it steps"
        )
    return unit.checkpoint_io()


def _in_shards(fsdp_plugin: Any, use_dcp: bool) -> bool:
    """Return whether a plugin, ours or a description, asks for shards."""
    kind = getattr(fsdp_plugin, "state_dict_type", None)
    in_shards = str(getattr(kind, "name", kind)).upper().startswith("SHARDED")
    if in_shards and not use_dcp:
        raise ConfigError(
            "use_dcp=False would have each rank write a file that only as many ranks read; leave it out, and shards "
            "are written to a directory of torch.distributed.checkpoint, or take the state_dict_type FULL_STATE_DICT"
        )
    return in_shards


def _file(stem: str, index: int) -> str:
    return f"{stem}_{index}.bin" if index else f"{stem}.bin"


def _find(directory: Path, stem: str, index: int, in_shards: bool) -> Path:
    """Return the file or the directory of shards, whichever is there; of both, the one that is asked for."""
    full, shards = directory / _file(stem, index), directory / f"{stem}_{index}"
    shards = directory if directory.name == shards.name else shards
    present = [path for path in (shards, full) if path.is_file() or (path / METADATA_NAME).is_file()]
    if not present:
        raise CheckpointNotFoundError(
            f"neither {full.name} nor {shards.name}/ is in {directory.absolute()}; give a directory that was saved to"
        )
    return present[0 if in_shards else -1]


# --- methods of the Accelerator ---------------------------------------------------------------------------------------


def _own_state(model: nn.Module) -> dict[str, Tensor | LazyTensor]:
    """Return the state_dict of a model that was never prepared, by the user's own names; offloaded weights are read."""
    own = unwrap_module(model)
    state = lazy_state_dict(own) if is_offloaded(own) else require_tensors(own, own.state_dict())
    return {uncompiled_name(name): tensor for name, tensor in state.items()}


class AcceleratorWeights(AcceleratorSettings):
    """Saving of weights and single objects."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the full state_dict of a prepared model on rank 0, by the user's parameter names.

        Without `unwrap`, by those of the wrapper: `module.` before each under DDP. Elsewhere `{}` where the strategy
        shards models; a replica's own tensors, not copied, where it does not.
        Collective: every rank calls it. Of a model that was never prepared, each rank gets the rank's own.
        """
        found, is_sharded = self._find_unit(model), self.strategy.capabilities.shards_parameters
        if found is None:
            return make_tensors(_own_state(model))
        if not (unwrap or is_sharded):
            return model.state_dict()
        io = found.unit.checkpoint_io()
        if self.process.is_main or is_sharded:
            return io.full_model_state()
        return {name: tensor() for name, tensor in io.lazy_model_state().items()}

    def _find_unit(self, model: nn.Module) -> PreparedUnit | None:
        """Return the unit of a model; None for one that was never prepared, and is full on this rank."""
        found = self._prepared.find(model)
        if found is None and model_has_dtensor(model):
            self._prepared.get(model)  # says that it was not prepared here
        if found is not None and found.unit.local_replicas is not None and found.unit.local_replicas.is_apart:
            logger.warning_once(
                "replicas of %s differ within a LocalSGD block: these are rank 0's weights; leave the block first "
                "for those of all", type(found.unit.module).__name__,
            )  # fmt: skip
        return found

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[None]:
        """Context in which `model` has the averages of its weights that `ema_decay` keeps, to evaluate or to save it.

        After it the model has its own weights again, bit for bit. Every rank enters it; nothing is communicated. Before
        the first update, the weights are their own average. Frozen parameters and buffers stay as they are.

        Raises:
            ConfigError: no averages are kept of this model; the block is entered twice. Within it, `optimizer.step()`
                and `save_state()` are errors.
        """
        unit = self._prepared.get(model).unit
        if unit.averages is None:
            raise ConfigError(
                f"averaged_weights() was called for {type(unit.module).__name__}, and no averages of its weights are "
                "kept; set ema_decay, 0.999 for instance, and prepare the model with its optimizer"
            )
        with unit.averaged_weights():
            yield

    @section("save")
    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        averaged: bool = False,
    ) -> None:
        """Write the model's weights to `save_directory`. Collective: every rank calls it, or under DDP rank 0 alone.

        One parameter is unsharded at a time: no process ever holds the full model for it. Of a model that was never
        prepared, rank 0's weights are written.

        Args:
            max_shard_size: larger models are written as several files with an index.
            safe_serialization: False writes `pytorch_model.bin` instead of safetensors, and removes those of an earlier
                save in the directory: readers would take them first.
            averaged: write the averages that `ema_decay` keeps, in the dtypes of the weights.

        Raises:
            ConfigError: `save_directory` is a file; `averaged`, and no averages are kept of this model.
            DiskFullError: there is no room.
            NonFiniteError: weights are NaN or infinite, and `on_nonfinite` is not "warn".
            ProcessGroupError: rank 0 could not write.
        """
        directory = Path(save_directory).expanduser()
        if directory.is_file():
            raise ConfigError(f"save_directory {str(directory.absolute())!r} is a file; give a directory")
        found = self._find_unit(model)
        if found is None and self.process.is_distributed:
            logger.warning(f"{type(model).__name__} was not prepared: its weights on rank 0 are saved")
        is_alone = not self._all_come("save_model", has_all=True)
        with self._checkpointer.saving_alone() if is_alone else nullcontext():
            if found is not None:
                self._check_weights([found], f"save_model to {directory}")
            # Of sharded models rank 0 alone gets whole tensors.
            is_sharded = self.strategy.capabilities.shards_parameters
            writes = self.process.is_main if is_sharded else self.should_save_model
            # Errors of the writing are raised after the last tensor has been gathered: the ranks stay in step.
            with (
                self.averaged_weights(model) if averaged else nullcontext(),
                raise_together(self._saving_process, f"save_model to {directory}"),
            ):
                state = _own_state(model) if found is None else found.unit.checkpoint_io().lazy_model_state()
                save_weights(state, directory, max_shard_size, safe_serialization=safe_serialization, writes=writes)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write `obj` to `f` on rank 0 (on each node's first rank with `save_on_each_node`); a no-op elsewhere."""
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization, process=self.process)

    def _all_come(self, call: str, *, has_all: bool) -> bool:
        """Wait for all ranks; False where the others are past the call, and rank 0, which `has_all`, saves alone."""
        may_be_alone = (
            has_all
            and self.process.is_main
            and self.strategy.capabilities.replicates_state
            and not self.project_configuration.save_on_each_node
        )
        way_out = (
            f"All ranks call {call}(): take it out of `if accelerator.is_main_process`. The main process can save "
            "alone where it has all there is to save: under DDP without --on_rank_loss, a state at the end of an update"
        )
        return all_come(call, self.process, debug=self.config.debug, way_out=way_out, may_be_alone=may_be_alone)

    @property
    def _saving_process(self) -> ProcessContext:
        """This process among those that save."""
        return self._checkpointer.alone or self.process

    def _check_weights(
        self, units: Iterable[PreparedUnit], section: str, doing: Literal["save", "load"] = "save"
    ) -> bool:
        """Refuse to save, or to go on from, weights that are no numbers. Collective."""
        # The guard's look is one of all ranks; a main process that saves alone looks at the weights.
        if self.nonfinite_guard is not None and doing == "save" and self._checkpointer.alone is None:
            self.nonfinite_guard.look()
        named = [item for prepared in units for item in prepared.unit.module.named_parameters()]
        is_forced = self.config.on_nonfinite is NonFiniteAction.WARN
        return check_weights(named, section, self._saving_process, is_forced=is_forced, doing=doing)
