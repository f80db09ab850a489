"""Whole weights in and out of a sharded module, where scripts written for one process ask the module itself for them.

`module.save_pretrained(directory)` would find this rank's shards, and `module.load_state_dict(state)` would be handed
tensors that are no shards. Both do on a sharded module what they do on any other.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from accel_trainer.checkpoint.weights.gather_to_file import gather_to_file
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.strategies.parameter_state.torch_io import TorchCheckpointIO

__all__ = ["SavePretrained", "exchange_whole_weights", "refuse_copies"]


def refuse_copies(model: nn.Module) -> None:
    """Make copying and pickling of a sharded model say what to do instead; torch's own words are about its classes."""

    def refuse(*args: Any) -> Any:
        raise ConfigError(
            f"{type(model).__name__} is sharded, and its shards cannot be copied or pickled; copy the model before "
            "prepare() and prepare the copy too, or take the whole weights: accelerator.get_state_dict() on all ranks"
        )

    model.__deepcopy__ = refuse  # type: ignore[assignment]
    model.__reduce_ex__ = refuse  # type: ignore[method-assign]


class SavePretrained:
    """A sharded model's `save_pretrained`: the model's own, given the whole weights. Collective.

    An instance attribute of that name, as the prepared forward is one: the class stays the user's.
    """

    def __init__(self, model: nn.Module, process: ProcessContext) -> None:
        self.model = model
        self.process = process

    @property
    def __signature__(self) -> inspect.Signature:
        parameters = list(inspect.signature(type(self.model).save_pretrained).parameters.values())  # type: ignore[attr-defined]
        return inspect.Signature(parameters[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the weights, write them on rank 0, and return on every rank once they are written.

        The model's own method wants all of them at once. It gets tensors that are mapped from a file without a name
        beside its target, into which they are gathered one by one: no rank has to have memory for the model.

        A call that brings its own `state_dict` is passed on as it is, and gathers nothing.

        Raises:
            ConfigError: the model's own method has no argument for weights that were gathered.
            DiskFullError: there is no room for the weights twice.
        """
        save = type(self.model).save_pretrained  # type: ignore[attr-defined]
        call = self.__signature__.bind(*args, **kwargs)
        if kwargs.get("state_dict", call.arguments.get("state_dict")) is not None:
            return save(self.model, *args, **kwargs)
        if "state_dict" not in self.__signature__.parameters:
            raise ConfigError(
                f"{type(self.model).__name__} is sharded, and its save_pretrained() has no `state_dict` argument for "
                "the gathered weights; use accelerator.save_model(model, directory)"
            )
        with raise_together(self.process, "save_pretrained"):
            call.arguments["state_dict"] = gather_to_file(
                TorchCheckpointIO(self.model).lazy_model_state(),
                _path_of(next(iter(call.arguments.values()), None)),
                writes=self.process.is_main,
            )
        if "is_main_process" in self.__signature__.parameters:
            call.arguments["is_main_process"] = self.process.is_main and call.arguments.get("is_main_process", True)
        # Also the barrier behind which every rank may read what was written.
        with raise_together(self.process, "save_pretrained"):
            return save(self.model, *call.args, **call.kwargs)


def _path_of(target: Any) -> Path:
    """Return `target`; the directory for temporary files where it is no path."""
    return Path(target if isinstance(target, (str, os.PathLike)) else tempfile.gettempdir())


def exchange_whole_weights(model: nn.Module, process: ProcessContext) -> None:
    """Let a sharded model save and load whole weights by its own methods. Nothing is communicated here."""
    if callable(getattr(type(model), "save_pretrained", None)):
        model.save_pretrained = SavePretrained(model, process)  # type: ignore[assignment]
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_shard_state)


def _shard_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace the whole tensors meant for `module`'s own shards by shards; every rank has been given all of them."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            # src_data_rank=None: each rank takes its part of its own tensor, without communication.
            state_dict[prefix + name] = distribute_tensor(
                value.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
