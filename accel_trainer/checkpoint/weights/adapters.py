"""Adapters of PEFT: the tensors of a model that they are, and the files that hold them.

    adapter_model.safetensors, adapter_config.json             the adapter called "default"
    NAME/adapter_model.safetensors, NAME/adapter_config.json   every other one
    trained_weights.safetensors                                in a Trainer's checkpoint: what is trained beside them

PEFT itself chooses the tensors and their names in the files; nothing here imports it before there is such a model.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accel_trainer.checkpoint.safetensors_file import LazyTensor
from accel_trainer.checkpoint.weights.weight_files import State, WeightFiles, gather_to_file
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.runtime.model_wrappers import copy_with, unsharded_shape, unwrap_module
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_calls

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
TRAINED_NAME = "trained_weights.safetensors"
# What PEFT calls the prompts that an encoder makes. They are its weights where it is an embedding alone.
_PROMPT = "prompt_embeddings"
# Of the names of prompt encoders in a `peft.PeftModel`, each under its adapter's.
_ENCODERS = "prompt_encoder."
# Buffers that a forward in training mode changes.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model, without the wrappers of data parallelism and torch.compile, is a `peft.PeftModel`."""
    # Without an import: it takes seconds, and whoever has such a model has imported it.
    return isinstance(unwrap_module(model), getattr(sys.modules.get("peft"), "PeftModel", ()))


def adapter_folders(model: nn.Module) -> dict[str, str]:
    """Return the folder of each adapter below the directory of a save, "" for that itself; nothing without adapters."""
    # Of a `peft.PeftModel` all adapters, and of a transformers model with `add_adapter()` the active one, as both save.
    anything: Any = model
    if is_peft_model(model):
        return {name: "" if name == "default" else name for name in anything.peft_config}
    if getattr(model, "_hf_peft_config_loaded", False):
        return {anything.active_adapters()[0]: ""}
    return {}


def _outline(state: State) -> dict[str, Tensor]:
    """Return a tensor without memory for each name; quantised modules have entries that are no tensors."""
    tensors = {name: tensor for name, tensor in state.items() if hasattr(tensor, "dtype")}
    return {name: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta") for name, t in tensors.items()}


def _stored_names(model: nn.Module, adapter: str, outline: Mapping[str, Tensor], embeddings: Any) -> dict[str, str]:
    """Return the model's name of each tensor by its name in an adapter's file, but for those that PEFT computes."""
    # PEFT is handed the outline in place of a state_dict, and answers with some of its tensors under other names. With
    # embeddings="auto" those of the model are among them where the vocabulary was enlarged, for which it may ask the
    # hub; with False never.
    from peft import get_peft_model_state_dict

    known = {id(tensor): name for name, tensor in outline.items()}
    with warnings.catch_warnings(), unsharded_prompts(model, {}):
        warnings.simplefilter("ignore")  # the save itself will warn
        found = get_peft_model_state_dict(
            model, state_dict=dict(outline), adapter_name=adapter, save_embedding_layers=embeddings
        )
    prefix = "" if is_peft_model(model) else "base_model.model."
    names = {prefix + stored: known[id(tensor)] for stored, tensor in found.items() if id(tensor) in known}
    return names | _prompt_names(adapter, outline)


def _prompt_names(adapter: str, outline: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of a prompt encoder's tensors where the file holds them as they are."""
    prefix = f"{_ENCODERS}{adapter}."
    own = {name.removeprefix(prefix): name for name in outline if name.startswith(prefix)}
    embedding = own.pop("embedding.weight", None)
    is_plain = embedding is not None and own.keys() <= {"prefix_task_cols", "prefix_task_rows"}
    return {_PROMPT: embedding, **own} if embedding is not None and is_plain else {}


@contextmanager
def unsharded_prompts(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Have prompt encoders compute with unsharded `values`, by the model's names, in this block. Not collective."""
    # To save prompts PEFT runs their encoders on one rank, where shards cannot be multiplied and hooks would gather.
    encoders = getattr(model, "prompt_encoder", None) if is_peft_model(model) else None
    if not isinstance(encoders, nn.ModuleDict):
        yield
        return
    before = dict(encoders.items())
    try:
        for adapter, encoder in before.items():
            encoders[adapter] = _without_hooks(encoder, f"{_ENCODERS}{adapter}", values)
        yield
    finally:
        encoders.update(before)


def _without_hooks(module: nn.Module, prefix: str, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy on the CPU with other values and its classes' forwards; parameters without one stay random."""
    tensors: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters(prefix):
        value = values.get(name, torch.empty(unsharded_shape(parameter), dtype=parameter.dtype))
        tensors[id(parameter)] = nn.Parameter(value, requires_grad=False)
    return copy_with(module, tensors)


def saved_names(model: nn.Module, state: State, *, embeddings: Literal["auto", False] = False) -> dict[str, None]:
    """Return the names of the tensors that the files of the model's adapters hold; see `_stored_names`."""
    outline = _outline(state)
    names: dict[str, None] = {}
    for adapter in adapter_folders(model):
        names |= dict.fromkeys(_stored_names(model, adapter, outline, embeddings).values())
    return names


def trained_beside(model: nn.Module, saved: Iterable[str]) -> list[str]:
    """Return the names of the tensors that training changes and that are not among `saved`, each tied one once."""
    state = model.state_dict(keep_vars=True)
    done = {id(state[name]) for name in saved if name in state}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    beside: dict[int, str] = {}
    for name, tensor in state.items():
        if id(tensor) not in done and (id(tensor) in trained or name.rpartition(".")[2] in _STATISTICS):
            beside.setdefault(id(tensor), name)
    return list(beside.values())


def is_prompt_encoder(name: str) -> bool:
    """Whether a tensor of a `peft.PeftModel` is a prompt encoder's."""
    return name.startswith(_ENCODERS)


def _names_to_gather(model: nn.Module, state: State) -> list[str]:
    """Return the names of all tensors that PEFT may read to save the model's adapters."""
    names = saved_names(model, state, embeddings="auto")
    # Some kinds of adapters compute what they save of them.
    names |= dict.fromkeys(trained_beside(model, names))
    return [name for name in state if name in names or is_prompt_encoder(name)]


@contextmanager
def gather_adapters(
    model: nn.Module, lazy: Mapping[str, LazyTensor], target: Path, process: ProcessContext, *, writes: bool
) -> Iterator[dict[str, Tensor]]:
    """Gather a sharded model's adapters beside `target`; yields the state_dict to save, {} elsewhere. Collective."""
    # Not on each rank: the hub might answer one of them and not another.
    name = partial(_names_to_gather, model, lazy) if process.is_main else list[str]
    names = gather_calls(process, "naming of the adapters", name)[0]
    gathered = gather_to_file({name: lazy[name] for name in names}, target, writes=writes)
    if not writes:
        yield {}
        return
    with unsharded_prompts(model, gathered):
        yield {**_outline(lazy), **gathered}


def has_adapters(directory: Path) -> bool:
    """Whether adapters were saved to a directory, itself or folders of it."""
    places = [directory, *(path for path in directory.iterdir() if path.is_dir())] if directory.is_dir() else []
    return any((place / name).is_file() for place in places for name in ADAPTER_FILES)


def read_adapters(model: nn.Module, state: State, directory: Path) -> dict[str, Tensor]:
    """Return the tensors that a directory holds of a model's adapters, by the model's names; refuse other adapters."""
    outline = _outline(state)
    found: dict[str, Tensor] = {}
    expected: dict[str, None] = {}
    unexpected: list[str] = []
    for adapter, file in _find_files(model, directory).items():
        names = _stored_names(model, adapter, outline, False)
        expected |= dict.fromkeys(names.values())
        weights = WeightFiles(file)
        for stored in weights:
            # Embeddings that were saved along, since the vocabulary was enlarged, have the model's own name.
            own = names.get(stored, stored if stored in outline else None)
            if own is not None:
                found[own] = weights[stored]
            elif stored != _PROMPT:
                unexpected.append(stored)
    beside = directory / TRAINED_NAME
    if beside.is_file():
        more = WeightFiles(beside)
        found |= {name: more[name] for name in more if name in outline}
    else:
        expected |= dict.fromkeys(name for name in outline if is_prompt_encoder(name))
    _check_complete(model, directory, found, expected, [] if beside.is_file() else unexpected)
    return found


def _find_files(model: nn.Module, directory: Path) -> dict[str, Path]:
    """Return the file of each adapter of a model; the one at the top is that of the only adapter, whatever its name."""
    folders = adapter_folders(model)
    files: dict[str, Path] = {}
    for adapter, folder in folders.items():
        places = [directory / folder, directory] if len(folders) == 1 else [directory / folder]
        file = next((place / name for place in places for name in ADAPTER_FILES if (place / name).is_file()), None)
        if file is None:
            raise IncompatibleCheckpointError(
                f"{directory.absolute()} does not hold the adapter {adapter!r} of {type(model).__name__}: no "
                f"{ADAPTER_FILES[0]} in {places[0].absolute()}. Build the model with the adapters that were saved, and "
                "add others after they are loaded"
            )
        files[adapter] = file
    return files


def _check_complete(
    model: nn.Module,
    directory: Path,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Any],
    unexpected: list[str],
) -> None:
    state = model.state_dict(keep_vars=True)
    held = {id(state[name]) for name in found if name in state}  # a tied one is stored under one of its names
    missing = [name for name in expected if id(state[name]) not in held]
    if not missing and not unexpected:
        return
    problems = [f"it lacks {len(missing)} of its tensors (first: {missing[0]!r})"] if missing else []
    problems += [f"it has {len(unexpected)} more (first: {unexpected[0]!r})"] if unexpected else []
    raise IncompatibleCheckpointError(
        f"{directory.absolute()} does not fit the adapters of {type(model).__name__}: {' and '.join(problems)}. Build "
        "them as the adapter_config.json there says"
    )
