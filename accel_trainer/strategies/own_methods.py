"""Methods of a prepared model's own that want full weights, on ranks that hold shards: gathered for, or refused."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accel_trainer.checkpoint.safetensors_file import LazyTensor
from accel_trainer.checkpoint.weights.adapters import adapter_folders, gather_adapters, unsharded_prompts
from accel_trainer.checkpoint.weights.weight_files import full_state_dicts, gather_to_file
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.runtime.torch_private import tree_leaves
from accel_trainer.strategies.api import CheckpointIO


def gather_in_save_pretrained(model: nn.Module, process: ProcessContext, io: Callable[[], CheckpointIO] | None) -> None:
    """Have the model's own `save_pretrained` write full weights, read by `io()`; None where each rank has them."""
    # Scripts written for one process call it, and it would find this rank's shards.
    if callable(getattr(type(model), "save_pretrained", None)):
        model.save_pretrained = SavePretrained(model, process, io)  # type: ignore[assignment]


def refuse_merges(model: nn.Module) -> None:
    """Refuse to merge adapters of PEFT into weights that are sharded: the result would be wrong, or of no use."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"{type(model).__name__} is sharded, and its adapters cannot be merged into shards; save them with "
            "save_pretrained() or the Trainer's save_model(), and merge in one process: "
            "PeftModel.from_pretrained(base_model, directory).merge_and_unload()"
        )

    if adapter_folders(model):
        for name in ("merge_and_unload", "merge_adapter"):
            setattr(model, name, refuse)


def refuse_copies(model: nn.Module) -> None:
    """Refuse copying and pickling of a sharded model with a way out: of ZeRO-3, a copy would have empty parameters."""

    def refuse(*args: Any) -> Any:
        raise ConfigError(
            f"{type(model).__name__} is sharded, and its shards cannot be copied or pickled; copy the model before "
            "prepare() and prepare the copy too, or take the whole weights: accelerator.get_state_dict() on all ranks"
        )

    model.__deepcopy__ = refuse  # type: ignore[assignment]
    model.__reduce_ex__ = refuse  # type: ignore[method-assign]


def refuse_second_backward(model: nn.Module, why: str, is_foreign: Callable[[], bool] | None = None) -> RemovableHandle:
    """Refuse a backward with `create_graph=True`: `why`; or one that an engine has not begun, and would fail in."""

    def refuse(gradient: Tensor) -> None:
        if is_foreign is not None and is_foreign():
            raise ConfigError(
                f"a backward of {type(model).__name__} was not begun by accelerator.backward(loss): ZeRO-1 and 2 of "
                "DeepSpeed exchange gradients in it, and know no other (loss.backward(), torch.autograd.grad() for the "
                "gradients of inputs); use accelerator.backward, or for the latter strategy 'ddp' or 'fsdp2'"
            )
        # Grad mode is on within a backward with create_graph=True, and off in any other.
        if torch.is_grad_enabled():
            raise ConfigError(
                f"a backward of {type(model).__name__} with create_graph=True, for a gradient penalty for instance: "
                f"{why} in it, and what it leaves cannot be differentiated again; use strategy 'ddp', or take the "
                "penalty by finite differences"
            )

    def follow(module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(refuse)

    return model.register_forward_hook(follow)


class SavePretrained:
    """A model's own `save_pretrained`, given the full weights, as an instance attribute of that name. Collective."""

    def __init__(self, model: nn.Module, process: ProcessContext, io: Callable[[], CheckpointIO] | None) -> None:
        self.model = model
        self.process = process
        self.io = io

    @property
    def __signature__(self) -> inspect.Signature:
        parameters = list(inspect.signature(type(self.model).save_pretrained).parameters.values())  # type: ignore[attr-defined]
        return inspect.Signature(parameters[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the weights, write them on rank 0, and return on every rank once they are written.

        The model's own method wants all at once: it gets tensors that are mapped from a file without a name, into which
        they are gathered one by one: no rank has to have memory for the model. Of a model with adapters of PEFT, which
        that method saves alone, the base is not gathered. A call that brings its own `state_dict` gathers nothing. A
        method without such an argument runs on rank 0 alone, where `state_dict()` of the model is full meanwhile.

        Raises:
            DiskFullError: there is no room for the weights twice.
        """
        save = type(self.model).save_pretrained  # type: ignore[attr-defined]
        call = self.__signature__.bind(*args, **kwargs)
        given = kwargs.get("state_dict", call.arguments.get("state_dict"))
        if given is not None:
            if not adapter_folders(self.model):
                return save(self.model, *args, **kwargs)
            if not given and not self.process.is_main:
                return None  # get_state_dict() has the weights on rank 0; PEFT looks for each of its names
            with unsharded_prompts(self.model, given):
                return save(self.model, *args, **kwargs)
        if self.io is None:
            return save(self.model, *args, **kwargs)
        io = self.io()
        target = next(iter(call.arguments.values()), None)
        directory = Path(target if isinstance(target, (str, os.PathLike)) else tempfile.gettempdir())
        if "is_main_process" in self.__signature__.parameters:
            call.arguments["is_main_process"] = self.process.is_main and call.arguments.get("is_main_process", True)
        if adapter_folders(self.model):
            return self._save_adapters(call, io.lazy_model_state(), directory)
        with raise_together(self.process, "save_pretrained"):
            state = gather_to_file(io.lazy_model_state(), directory, writes=self.process.is_main)
        if "state_dict" not in self.__signature__.parameters:
            with raise_together(self.process, "save_pretrained"), full_state_dicts(self.model, state):
                return save(self.model, *args, **kwargs) if self.process.is_main else None
        call.arguments["state_dict"] = state
        # Also the barrier behind which every rank may read the files.
        with raise_together(self.process, "save_pretrained"):
            return save(self.model, *call.args, **call.kwargs)

    def _save_adapters(self, call: inspect.BoundArguments, lazy: Mapping[str, LazyTensor], directory: Path) -> Any:
        save = type(self.model).save_pretrained  # type: ignore[attr-defined]
        with (
            raise_together(self.process, "save_pretrained"),
            gather_adapters(self.model, lazy, directory, self.process, writes=self.process.is_main) as state,
        ):
            if self.process.is_main:
                return save(self.model, *call.args, **{**call.kwargs, "state_dict": state})
        return None
