"""Checkpoints of a Trainer, under upstream's file names: written once, loadable by `from_pretrained`.

A sharded Trainer writes:

    model.safetensors, config.json, ...   always, in Hugging Face's format
    optimizer.bin                         state_dict_type full: the full state by parameter name, one torch file
    optimizer.json, optimizer.optimizer.* state_dict_type sharded, and DeepSpeed: each rank its shards
    optimizer.json, optimizer.*.replica_* with local_steps: each rank its replica; model.safetensors is their mean
    outer_optimizer.bin                   with local_steps and an outer optimizer: its weights and state
    averages.RRRRR.safetensors            with ema_decay, on one process too: rank R's shards of the averaged weights
    scheduler.pt  rng_state_R.pth  trainer_state.json  training_args.bin

Of a model with adapters of PEFT, a Trainer of any strategy writes in place of model.safetensors and config.json:

    adapter_model.safetensors, adapter_config.json    in a folder of its own unless the adapter is called "default"
    trained_weights.safetensors                       what is trained beside the adapters, if anything is

Read as well: the files of transformers' Trainer (`optimizer.pt`; `pytorch_model_fsdp.bin`, `pytorch_model_fsdp_0/`,
`optimizer_0/`; under DeepSpeed `global_step*/`). `checkpoint/interop/huggingface.py` writes those of FSDP.
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerState, modeling_utils
from transformers.trainer_pt_utils import reissue_pt_warnings
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from accel_trainer.accelerator.accelerated_scheduler import AcceleratedScheduler
from accel_trainer.checkpoint.background import GatheredLater, NeedsValuesError
from accel_trainer.checkpoint.disk import as_corrupt, check_regular, create_file, read_json
from accel_trainer.checkpoint.interop.foreign_states import name_parameters
from accel_trainer.checkpoint.interop.huggingface import find_weights
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_trainer.checkpoint.object_store import shown
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.reader import CheckpointKind, Selection, open_checkpoint
from accel_trainer.checkpoint.safetensors_file import SafetensorsFile
from accel_trainer.checkpoint.shards import StoredShards
from accel_trainer.checkpoint.store import numbered_checkpoints
from accel_trainer.checkpoint.torch_files import check_torch_file, load_torch_file
from accel_trainer.checkpoint.weights.adapters import (
    TRAINED_NAME,
    adapter_folders,
    gather_adapters,
    has_adapters,
    is_prompt_encoder,
    read_adapters,
    saved_names,
    trained_beside,
)
from accel_trainer.checkpoint.weights.into_model import names_by_tensor
from accel_trainer.checkpoint.weights.weight_files import USERS_CLASS, distinct, full_state_dicts, gather_to_file
from accel_trainer.config import Resolved
from accel_trainer.data.position import Position
from accel_trainer.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from accel_trainer.runtime.model_wrappers import uncompiled_name, unwrap_module
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_calls, raise_together
from accel_trainer.runtime.whereabouts import for_all
from accel_trainer.strategies.api import CheckpointIO
from accel_trainer.strategies.local_replicas import LocalReplicas, OuterOptimizer
from accel_trainer.strategies.parameter_state.torch_io import TorchCheckpointIO
from accel_trainer.tracking import is_secret, mask_secrets
from accel_trainer.trainer.arguments.deepspeed_arguments import masked_engine_config, unsharded_models
from accel_trainer.trainer.arguments.training_arguments import TrainingArguments, setting

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger("transformers.trainer")

_NAMES_IN_SHARDS = ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0")
FULL_OPTIMIZER_NAME = "optimizer.bin"
SHARDED_OPTIMIZER_NAME = "optimizer_0"
PLAIN_OPTIMIZER_NAME = "optimizer.pt"
SHARDS_PREFIX = "optimizer"
SHARDS_NAME = f"{SHARDS_PREFIX}.json"
_OPTIMIZER_NAMES = (FULL_OPTIMIZER_NAME, SHARDED_OPTIMIZER_NAME, PLAIN_OPTIMIZER_NAME, SHARDS_NAME)
OUTER_OPTIMIZER_NAME = "outer_optimizer.bin"
AVERAGES_PREFIX = "averages"
SCHEDULER_NAME = "scheduler.pt"
ENGINE_STATE_PATTERN = "global_step*"
PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
TRAINER_STATE_NAME = "trainer_state.json"
_READ_BY_RANK_0 = re.compile(r"(model|pytorch_model|trained_weights)[^/]*|([^/]+/)?adapter_model[^/]*|optimizer\.bin")
"""Of a sharded Trainer's checkpoint; the other ranks are sent their shards."""
_RANDOM_STREAMS = re.compile(r"(?:epoch_)?rng_state(?:_(\d+))?\.pth")
_REPLICA = re.compile(r"^optimizer\.(?:model\.|optimizer\.)?replica_(\d+)\.")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def files_to_read(manifest: Manifest, process: ProcessContext, *, is_sharded: bool) -> Iterator[str]:
    """Yield the files of a checkpoint that this rank reads."""
    for name in manifest.files:
        streams, replica = _RANDOM_STREAMS.fullmatch(name), _REPLICA.search(name)
        if streams is not None:
            if int(streams[1] or 0) == process.rank:
                yield name
        elif replica is not None and manifest.world_size == process.world_size and int(replica[1]) != process.rank:
            continue
        elif process.is_main or not is_sharded or not _READ_BY_RANK_0.fullmatch(name):
            yield name


def pass_streams_name(rank: int) -> str:
    """Return the name of the file with a rank's random streams at the beginning of the pass under way."""
    return f"epoch_rng_state_{rank}.pth"


def check_named(path: Path, run_dir: Path) -> None:
    """Refuse a path that names no checkpoint of a Trainer: upstream would look for one file after the other."""
    if (path / TRAINER_STATE_NAME).is_file():
        return
    within = [found.name for _, found in numbered_checkpoints(path, PREFIX)] if path.is_dir() else []
    found = f"which has no {TRAINER_STATE_NAME}"
    if within:
        found = f"which holds {', '.join(within)}, and is none itself"
    elif not path.is_dir():
        found = "which is a file" if path.exists() else "which does not exist"
    raise CheckpointNotFoundError(
        f"Can't find a valid checkpoint at {path}, {found}; resume_from_checkpoint takes the path of a {PREFIX}N that "
        f"a Trainer has saved, or True for the newest in {run_dir}. Weights alone are loaded by from_pretrained()"
    )


def _check_readable(path: Path) -> None:
    """Refuse the state of a Trainer, or safetensors, that cannot be read."""
    state = path / TRAINER_STATE_NAME
    read_json(state)
    with as_corrupt(state):
        TrainerState.load_from_json(os.fspath(state))
    for file in sorted(path.glob("*.safetensors")):
        check_regular(file)
        SafetensorsFile(file)


def _check_outline(path: Path) -> None:
    """Refuse a checkpoint without manifest that was not written to its end."""
    state = path / TRAINER_STATE_NAME
    if not state.is_file():
        raise CheckpointNotFoundError(f"{state.absolute()} is missing, which is written last; its save never ended")
    _check_readable(path)
    for file in sorted(path.iterdir()):
        if file.suffix in _TORCH_SUFFIXES:
            check_torch_file(file)
            # An archive's directory is written last.
            if not zipfile.is_zipfile(file):
                raise CorruptCheckpointError(f"{file.absolute()} ends too early; its save never ended")


def _own_files(selection: Selection) -> Iterator[Path]:
    """Yield the files of a checkpoint that a resume may look at: not those that a callback has added."""
    manifest = None if selection.stored is None else selection.stored.manifest
    for file in sorted(selection.path.iterdir()) if selection.path.is_dir() else ():
        if manifest is None or file.name in manifest.files or manifest.reserves(file.name):
            yield file


def check_contents(selection: Selection, process: ProcessContext) -> None:
    """Refuse a checkpoint whose files match their checksums, and hold other things than a Trainer's."""
    # Torch's files that upstream would wait for, or could not hold in memory, among them.
    path = selection.path
    if selection.stored is not None and process.is_main:
        _check_readable(path)
        with as_corrupt(path / MANIFEST_NAME):
            progress = selection.stored.manifest.metadata.get("trainer", {})
            if progress.get("position") is not None:
                Position.read(progress["position"])
    for file in _own_files(selection):
        streams = _RANDOM_STREAMS.fullmatch(file.name)
        if file.suffix in _TORCH_SUFFIXES and (streams is None or int(streams[1] or 0) == process.rank):
            check_torch_file(file)
            if streams is not None:
                # Upstream reads them next, and lets NumPy make what it likes of their arrays; see `PLAIN_ARRAYS`.
                load_torch_file(file, has_arrays=True)


TRAINER_CHECKPOINTS = CheckpointKind(
    prefix=PREFIX, reads_without_manifest=lambda path: True, check_without_manifest=_check_outline
)
"""Upstream's own, without a manifest, among them."""


def _io(trainer: Trainer) -> CheckpointIO:
    io: CheckpointIO = trainer.accelerator.unit_of(trainer.model).checkpoint_io()
    return io


def _staged(trainer: Trainer, directory: Path) -> StagedDirectory | None:
    """Return the checkpoint that is being written, where `directory` is it."""
    staged = trainer.run_checkpoints.staged
    return staged if staged is not None and staged.path == directory else None


@for_all
def _write_torch(trainer: Trainer, directory: Path, name: str, value: Any, *, is_private: bool = False) -> None:
    """Write a file of a checkpoint, or of any other directory, as `torch.save` does."""
    staged = _staged(trainer, directory)
    if staged is not None:
        staged.write_torch(name, value, is_private=is_private)
        return
    directory.mkdir(parents=True, exist_ok=True)
    with create_file(directory / name) as file:
        torch.save(value, file)


@contextmanager
def weights_in_background(staged: StagedDirectory, later: GatheredLater | None = None) -> Iterator[None]:
    """Context in which transformers' writing of safetensors into `staged`, a save in the background, copies them.

    Args:
        later: notes them instead, as views of its placeholders.
    """
    # What it does before - ties, names of old, shards - reads the model, and stays on this thread. transformers 5.17 to
    # 5.23 write by these two names (modeling_utils.py:3617, trainer.py:4156); by another, a file is written at once.
    write_now = safetensors.torch.save_file

    def write(tensors: dict[str, Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        path = Path(filename)
        if staged.path in path.parents:
            name = path.relative_to(staged.path).as_posix()
            if later is None:
                staged.write_tensors(name, tensors, metadata=metadata)
            else:
                later.write(name, tensors, metadata)
        else:
            write_now(tensors, filename, metadata)

    if staged.memory is None:
        yield
        return
    with setting(safetensors.torch, save_file=write), setting(modeling_utils, safe_save_file=write):
        yield


def save_model(trainer: Trainer, output_dir: str, *, is_overridden: bool) -> None:
    """Write weights, configuration and processing class so that `from_pretrained` reads them. Collective.

    Args:
        is_overridden: the Trainer's `_save` is one of the user's.
    """
    # Sharded weights are gathered one by one into a file without a name: they take disk room twice, and no rank's
    # memory.
    writes = trainer.args.should_save
    process, is_prepared = trainer.accelerator.process, trainer.accelerator.is_prepared(trainer.model)
    if adapter_folders(trainer.model) and is_prepared:
        lazy = _io(trainer).lazy_model_state()
        with (  # the base model is not gathered
            raise_together(process, "save_model"),
            gather_adapters(trainer.model, lazy, Path(output_dir), process, writes=writes) as state,
        ):
            if writes:
                trainer._save(output_dir, state_dict=state)
        return
    staged = _staged(trainer, Path(output_dir))
    if is_prepared and not is_overridden and staged is not None and _save_later(trainer, staged):
        return
    with raise_together(process, "save_model"):
        if is_prepared:
            lazy, memory = _io(trainer).lazy_model_state(), None if staged is None else staged.memory
            state = gather_to_file(lazy, Path(output_dir), writes=writes, memory=memory)
        else:
            state = trainer.model.state_dict()
    with raise_together(trainer.accelerator.process, "save_model"):
        if writes:
            # Some save no `state_dict` that they are given: sentence-transformers saves its modules one by one.
            with full_state_dicts(trainer.model, state) if is_prepared else nullcontext():
                trainer._save(output_dir, state_dict=state)


def _save_later(trainer: Trainer, staged: StagedDirectory) -> bool:
    """Have a background save's thread gather the weights; False where their writer needs the values. Collective."""
    model, process, writes = trainer.model, trainer.accelerator.process, trainer.args.should_save
    own = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
    save = getattr(vars(own).get(USERS_CLASS, type(own)), "save_pretrained", None)
    # A save of the user's, or of a quantizer, may read what it is given to write, and finds zeros in placeholders.
    is_transformers = save in (None, PreTrainedModel.save_pretrained) and getattr(own, "hf_quantizer", None) is None
    is_possible = is_transformers and staged.group is not None and not trainer.args.save_on_each_node
    tensors = _io(trainer).boxed_model_state() if is_possible and trainer.run_checkpoints.gathers_later else None
    if tensors is None:
        return False
    first_names = {name: names[0] for names in names_by_tensor(tensors).values() for name in names}
    later = GatheredLater({name: tensors[name] for name in dict.fromkeys(first_names.values())}, staged, process.rank)

    def note() -> bool:
        if not writes:
            return True
        views = later.placeholders()
        state = {name: views[first_names[name]] for name in tensors}
        try:
            with full_state_dicts(model, state), weights_in_background(staged, later):
                trainer._save(os.fspath(staged), state_dict=state)
        except NeedsValuesError:  # transformers stores these weights otherwise than the model holds them
            return False
        return True

    trainer.run_checkpoints.gathers_later = gather_calls(process, "save_model", note)[0]
    if trainer.run_checkpoints.gathers_later:
        later.register()
    return trainer.run_checkpoints.gathers_later


@contextmanager
def without_secrets(args: TrainingArguments) -> Iterator[None]:
    """Leave secrets out of `training_args.bin`, which transformers 5.17 to 5.23 pickle and push with them."""
    values = {name: value for name, value in vars(args).items() if isinstance(value, str | dict | list)}
    masked = {name: None if is_secret(name) else value for name, value in mask_secrets(values).items()}
    masked |= masked_engine_config(args)
    if (uri := args.resolved.config.checkpoint_uri) is not None:
        resolved: Resolved = masked.get("resolved") or args.resolved
        config = dataclasses.replace(resolved.config, checkpoint_uri=shown(uri))
        masked["resolved"] = dataclasses.replace(resolved, config=config)
    before = {name: getattr(args, name) for name in masked}
    args.__dict__.update(masked)
    try:
        yield
    finally:
        args.__dict__.update(before)


@contextmanager
def saving_on_this_rank(model: nn.Module | None) -> Iterator[None]:
    """Let a model's `save_pretrained` write on this rank, whichever it is; change nothing without one."""
    # transformers 5.17 to 5.23 write on rank 0 of the job alone (distributed/mixin.py:349), and leave the other nodes
    # without a model where each is to have one.
    name = "should_save_on_this_rank"
    if not hasattr(model, name):
        yield
        return
    setattr(model, name, lambda is_main_process: is_main_process)
    try:
        yield
    finally:
        delattr(model, name)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model, or the one within a wrapper, is of transformers or PEFT, and saves and ties its own weights."""
    return hasattr(model, "_keys_to_ignore_on_save") or bool(adapter_folders(model))


def storable(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a model that has no `save_pretrained` as safetensors take it: contiguous, tied ones once."""
    # transformers 5.23 (trainer.py:4156) hands it over as it is, and fails at the first checkpoint.
    kept = distinct(state)
    return {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in kept.items()}


def save_trained_beside(trainer: Trainer, staged: StagedDirectory) -> None:
    """Write the tensors that training changes and that the files of the adapters leave out. Collective."""
    # A prompt encoder's own weights, for instance: PEFT saves the prompts that it makes. Nothing without adapters.
    model = trainer.model
    if not adapter_folders(model):
        return
    lazy = _io(trainer).lazy_model_state()
    names = trained_beside(model, saved_names(model, lazy))
    encoders = [name for name in names if is_prompt_encoder(name)]
    if len(encoders) < len(names):
        first = next(name for name in names if name not in encoders)
        logger.warning_once(
            f"{len(names) - len(encoders)} tensor(s) are trained that belong to no adapter (first: {first!r}): "
            f"checkpoints hold them for a resume, in {TRAINED_NAME}; save_model() and PEFT leave them out. Name their "
            "modules in modules_to_save of the adapter's configuration"
        )
    gathered = {name: lazy[name]() for name in names}
    if names and staged.commits:
        staged.write_tensors(TRAINED_NAME, {name: tensor.cpu().contiguous() for name, tensor in gathered.items()})


def load_weights(trainer: Trainer, model: nn.Module, directory: Path) -> bool:
    """Load a checkpoint's weights into a model; False where upstream's own way does it. Collective."""
    if adapter_folders(trainer.model) and has_adapters(directory):
        load_adapters(trainer, directory)
    elif trainer.is_sharded:
        load_model(trainer, model, directory)
    else:
        return load_as_held(trainer, model, directory)
    return True


def load_adapters(trainer: Trainer, directory: Path) -> None:
    """Load a checkpoint's adapters into the model; active ones stay active. Collective; rank 0 reads."""
    logger.info(f"Loading model from {directory}.")
    model, process = trainer.model, trainer.accelerator.process
    io = _io(trainer) if trainer.is_sharded else TorchCheckpointIO(model)
    found: dict[str, Tensor] = {}
    with raise_together(process, "load_model"):
        if process.is_main:
            found = read_adapters(model, io.lazy_model_state(), directory)
    io.load_full_model_state(found, strict=False)


def save_optimizer(trainer: Trainer, output_dir: str) -> None:
    """Write the optimizer's and the scheduler's state next to the model. Collective where the model is sharded."""
    directory, writes = Path(output_dir), trainer.args.should_save
    staged, replicas, io = _staged(trainer, directory), trainer.local_replicas, _io(trainer)
    is_apart = replicas is not None and replicas.is_apart
    if staged is not None and (is_apart or _saves_shards(trainer)):
        # With the weights only where each rank has its own: model.safetensors is the mean of those.
        io.save(staged, SHARDS_PREFIX, weights=is_apart)
        if replicas is not None and replicas.outer is not None:
            _save_outer(staged, replicas.outer, writes)
    elif trainer.is_sharded:
        if state := io.full_optimizer_state(keep=writes):
            _write_torch(trainer, directory, FULL_OPTIMIZER_NAME, state, is_private=True)
    elif writes:
        _write_torch(trainer, directory, PLAIN_OPTIMIZER_NAME, trainer.optimizer.state_dict())
    if writes:
        with warnings.catch_warnings(record=True) as caught:
            _write_torch(trainer, directory, SCHEDULER_NAME, trainer.lr_scheduler.state_dict(), is_private=True)
        reissue_pt_warnings(caught)


def _saves_shards(trainer: Trainer) -> bool:
    accelerator = trainer.accelerator
    # An engine's state in full would be gathered parameter by parameter, with two collectives for each.
    in_shards = accelerator.strategy.capabilities.builds_engine or accelerator.state.saves_shards
    return trainer.is_sharded and in_shards


def _save_outer(staged: StagedDirectory, outer: OuterOptimizer, writes: bool) -> None:
    if writes:
        staged.write_torch(OUTER_OPTIMIZER_NAME, outer.state_dict())


def _as_held(model: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return weights under the names and in the shapes that `model` has, where transformers stores others."""
    # Its `save_pretrained` undoes what `from_pretrained` does: a mixture has one tensor of all experts, and a file each
    # expert by itself. Loaded by name, they would be left out.
    own = set(map(uncompiled_name, model.state_dict(keep_vars=True)))
    model = unwrap_module(model)
    if not isinstance(model, PreTrainedModel) or own.issuperset(weights) or not own.difference(weights):
        return weights
    model_class: Any = vars(model).get(USERS_CLASS, type(model))
    # In one that holds the values of all: `model.dtype` is that of its first parameter.
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1}
    dtype = reduce(torch.promote_types, dtypes) if dtypes else model.dtype
    with unsharded_models():
        found, report = model_class.from_pretrained(
            None, config=deepcopy(model.config), state_dict=dict(weights), dtype=dtype, output_loading_info=True
        )
    held = {name: value for name, value in found.state_dict().items() if name not in report["missing_keys"]}
    return held | {name: weights[name] for name in report["unexpected_keys"]}


def load_as_held(trainer: Trainer, model: nn.Module, directory: Path) -> bool:
    """Load weights that are stored otherwise than a model that is not sharded holds them; return whether they are."""
    # Those of a model that is not of transformers, too: upstream (5.23, trainer.py:4063) asks it for what it never has
    # where a name is missing. Else nothing is loaded. Every rank reads.
    try:
        weights = find_weights(directory, verify="off")
    except CheckpointNotFoundError:
        return False  # transformers knows more files
    held = _as_held(model, weights)
    names = {uncompiled_name(name): name for name in model.state_dict(keep_vars=True)}
    # Upstream (5.23, trainer.py:3639) refuses what it wrote in shards where it has none, and knows no compiled layers.
    is_of_shards = any((directory / name).exists() for name in _NAMES_IN_SHARDS)
    if held is weights and is_of_transformers(model) and not is_of_shards and list(names) == list(names.values()):
        return False
    logger.info(f"Loading model from {directory}.")
    model.load_state_dict({names.get(name, name): held[name] for name in held}, strict=False)
    _warn_of_differences(trainer, set(names), set(held), model)
    return True


def load_model(trainer: Trainer, model: nn.Module, directory: Path) -> None:
    """Load a checkpoint's weights into a prepared model. Collective; rank 0 reads."""
    logger.info(f"Loading model from {directory}.")
    unit = trainer.accelerator.unit_of(model)
    weights: Mapping[str, Tensor] = {}
    with raise_together(trainer.accelerator.process, "load_model"):
        if trainer.accelerator.is_main_process:
            try:
                # Contents were compared with their checksums when the checkpoint was chosen.
                weights = _as_held(unit.module, find_weights(directory, verify="off"))
            except CheckpointNotFoundError as error:
                raise CheckpointNotFoundError(
                    f"Can't find a valid checkpoint at {directory}: {error}, and no pytorch_model_fsdp_0/"
                ) from error
    names = set(map(uncompiled_name, unit.module.state_dict()))
    unit.checkpoint_io().load_full_model_state(
        {name: weights[name] for name in weights if name in names} if not names.issuperset(weights) else weights,
        strict=False,
    )
    _warn_of_differences(trainer, names, set(weights), unit.module)


def _warn_of_differences(trainer: Trainer, own: set[str], stored: set[str], module: nn.Module) -> None:
    if not trainer.accelerator.is_main_process:
        return
    named = {uncompiled_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    # A tied parameter is stored under one of its names.
    loaded = {id(parameter) for name, parameter in named.items() if name in stored}
    missing = [name for name in sorted(own - stored) if id(named.get(name)) not in loaded]
    if missing:
        logger.warning(f"There were missing keys in the checkpoint model loaded: {missing}.")
    if stored - own:
        logger.warning(f"There were unexpected keys in the checkpoint model loaded: {sorted(stored - own)}.")


def has_engine_state(directory: str) -> bool:
    """Whether transformers' Trainer wrote it under DeepSpeed: the engine's own files hold weights and state."""
    folder = Path(directory)
    return not any((folder / name).exists() for name in _OPTIMIZER_NAMES) and any(folder.glob(ENGINE_STATE_PATTERN))


def load_engine_state(trainer: Trainer, directory: str) -> None:
    """Load weights and optimizer's state from the engine's own files. Collective."""
    strategy = trainer.accelerator.strategy
    if not strategy.capabilities.builds_engine:
        raise IncompatibleCheckpointError(
            f"{directory} holds the optimizer's state of a DeepSpeed engine, which strategy "
            f"{strategy.name!r} cannot read; resume with deepspeed=..., or begin a new training "
            "from its weights: pass the directory as the model"
        )
    logger.info(f"Loading the state of the engine from {directory}.")
    _io(trainer).load_engine_files(Path(directory))


def load_engine_scheduler(trainer: Trainer, directory: str) -> None:
    """Load the schedule of a checkpoint with the engine's own files, where the engine has not loaded it itself."""
    if os.path.isfile(os.path.join(directory, SCHEDULER_NAME)):
        load_scheduler(trainer, Path(directory))
    elif not isinstance(trainer.lr_scheduler, AcceleratedScheduler):  # as the schedule that an engine builds is
        raise CheckpointNotFoundError(
            f"{directory} has no {SCHEDULER_NAME}: the schedule was that of DeepSpeed's configuration, and this run "
            "has one of the Trainer's own; resume with the configuration that wrote it"
        )


def has_optimizer(directory: str) -> bool:
    """Whether a checkpoint has a state to resume the optimizer and the scheduler from; refuse one of half of it."""
    has_state = any(os.path.exists(os.path.join(directory, name)) for name in _OPTIMIZER_NAMES)
    if has_state != os.path.isfile(os.path.join(directory, SCHEDULER_NAME)):
        found, missing = ("optimizer", SCHEDULER_NAME) if has_state else ("schedule", "/".join(_OPTIMIZER_NAMES))
        raise CheckpointNotFoundError(
            f"{directory} has the state of the {found} and no {missing}; it is incomplete. Resume from another one, or "
            "begin a new training from its weights: pass the directory as the model"
        )
    return has_state


def read_train_batch_size(directory: str) -> int | None:
    """Return the batch size that the run which wrote a checkpoint had found."""
    state = TrainerState.load_from_json(os.path.join(directory, TRAINER_STATE_NAME))
    size: int | None = state.train_batch_size
    return size


def load_optimizer(trainer: Trainer, directory: Path) -> None:
    """Load the optimizer's state, whatever number of processes and strategy wrote it. Collective."""
    io = _io(trainer)
    if (directory / SHARDED_OPTIMIZER_NAME).is_dir():
        io.load_sharded_optimizer(directory / SHARDED_OPTIMIZER_NAME)
        return
    if (directory / SHARDS_NAME).is_file():
        # Contents were compared with their checksums when the checkpoint was chosen.
        stored = open_checkpoint(directory, trainer.accelerator.process, verify="size")
        # Replicas that were updated apart have weights of their own, of which the model's files hold the mean.
        has_replicas = any(name.startswith(f"{SHARDS_PREFIX}.model.") for name in stored.manifest.files)
        io.load(stored, SHARDS_PREFIX, weights=has_replicas)
        return
    state: Mapping[str, Any] = {}
    with raise_together(trainer.accelerator.process, "load_optimizer"):
        if trainer.accelerator.is_main_process:
            is_full = (directory / FULL_OPTIMIZER_NAME).is_file()
            path = directory / (FULL_OPTIMIZER_NAME if is_full else PLAIN_OPTIMIZER_NAME)
            state = name_parameters(load_torch_file(path), io.group_names(), path)
    io.load_full_optimizer_state(state)


def load_outer_optimizer(outer: OuterOptimizer | None, replicas: LocalReplicas, directory: Path) -> None:
    """Load the state of the optimizer at the exchanges of local updates, if this run has one; every rank reads it."""
    path = directory / OUTER_OPTIMIZER_NAME
    if outer is not None and path.is_file():
        outer.load_state_dict(load_torch_file(path))
    elif replicas.is_apart and (outer is not None or path.is_file()):
        found, asked = ("no outer optimizer", "one") if outer is not None else ("an outer optimizer", "none")
        raise IncompatibleCheckpointError(
            f"{directory} was saved between exchanges of local_steps with {found}, and this run has {asked} "
            "(outer_optimizer.lr): the next exchange would be another; resume with the options that it was saved with, "
            "or begin a new training from its weights: pass the directory as the model"
        )


def save_averages(trainer: Trainer, staged: StagedDirectory) -> None:
    """Write the averages of the weights, each rank its shards, where the run keeps some."""
    _io(trainer).save_averages(staged, AVERAGES_PREFIX)


def load_averages(trainer: Trainer, directory: str | Path, *, into_model: bool = False) -> None:
    """Go on with a checkpoint's averages of the weights, or give them to the model, if the run has any. Collective."""
    if trainer.accelerator.config.ema_decay is None:
        return
    stored = trainer.run_checkpoints.checkpointer.open_named(Path(directory), "size")
    if stored is None:
        logger.warning(f"{directory} holds no averages of the weights (ema_decay): they begin with the next update.")
    elif into_model:
        _io(trainer).load_full_model_state(StoredShards(stored, AVERAGES_PREFIX), strict=False)
    else:
        _io(trainer).plan_averages(stored, AVERAGES_PREFIX)()


def load_scheduler(trainer: Trainer, directory: Path) -> None:
    """Load the learning-rate schedule's state; every rank reads it."""
    scheduler = trainer.lr_scheduler
    with warnings.catch_warnings(record=True) as caught:
        state = load_torch_file(directory / SCHEDULER_NAME)
        saved, groups = state.get("base_lrs"), trainer.optimizer.param_groups
        if saved is not None and len(saved) != len(groups):
            state = _fit_groups(state, len(saved), [bool(group["params"]) for group in groups], directory)
        scheduler.load_state_dict(state)
    reissue_pt_warnings(caught)


def _fit_groups(state: Mapping[str, Any], num_saved: int, holds: list[bool], directory: Path) -> dict[str, Any]:
    """Return a schedule's state for other groups, of which each `holds` parameters or not, and empty ones differ."""
    if num_saved != sum(holds) and len({repr(rate) for rate in state["base_lrs"]}) > 1:
        raise IncompatibleCheckpointError(
            f"the schedule in {directory.absolute()} was saved for {num_saved} parameter groups with rates "
            f"{state['base_lrs']}, and this optimizer has {len(holds)}, {sum(holds)} of them with parameters: which "
            "belong together is not known. Leave groups without parameters out of the optimizer"
        )
    # Those without parameters take what the first one has: nothing is trained with it.
    places = [sum(holds[:index]) if holds[index] else 0 for index in range(len(holds))]
    return {
        key: [value[min(place, num_saved - 1)] for place in places]
        if isinstance(value, list) and len(value) == num_saved
        else value
        for key, value in state.items()
    }
