"""Model weights as safetensors, or as torch's own files, under the names that `from_pretrained` reads."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_trainer.checkpoint.boxes import Index
from accel_trainer.checkpoint.disk import (
    check_regular,
    create_file,
    explain_full_disk,
    fsync_path,
    read_json,
    write_durably,
)
from accel_trainer.checkpoint.manifest import MANIFEST_NAME
from accel_trainer.checkpoint.safetensors_file import (
    LazyTensor,
    SafetensorsFile,
    StagingMemory,
    TensorReader,
    tensor_file_bytes,
    write_order,
    write_tensor_file,
)
from accel_trainer.checkpoint.torch_files import load_torch_file
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from accel_trainer.runtime.whereabouts import for_all

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
BIN_NAME = "pytorch_model.bin"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"

USERS_CLASS = "_users_class"
"""Attribute of a model whose class a strategy has replaced: the class that it was given with."""

_ALIGNMENT = 64

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def parse_size(size: int | str) -> int:
    """Return a size such as `"10GB"` or `"500MiB"` in bytes."""
    text = str(size).strip().upper()
    digits = text.rstrip("BKMGTI")
    unit = text[len(digits) :] or "B"
    try:
        value = int(float(digits) * _UNITS[unit])
    except (OverflowError, ValueError, KeyError):
        value = 0
    if value <= 0:
        raise ConfigError(f"size {size!r} is not a positive number of bytes; write it like '10GB', '500MiB' or 1000000")
    return value


State = Mapping[str, Tensor | LazyTensor]
_Stored = TypeVar("_Stored", bound=Tensor | LazyTensor)


def _identity(tensor: Tensor | LazyTensor) -> Any:
    # A key that the names of one tied tensor share.
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def distinct(state: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """Keep each tied tensor once, under its first name: safetensors refuses shared memory, and loaders tie again."""
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        first.setdefault(_identity(tensor), name)
    return {name: state[name] for name in first.values()}


def _split(state: State, limit: int) -> list[dict[str, Tensor | LazyTensor]]:
    """Split `state` into shards of at most `limit` bytes, in its order; the names of a tied tensor stay together."""
    shards: list[dict[str, Tensor | LazyTensor]] = [{}]
    shard_of: dict[Any, dict[str, Tensor | LazyTensor]] = {}
    size = 0
    for name, tensor in state.items():
        shard = shard_of.get(_identity(tensor))
        if shard is None:
            num_bytes = tensor_file_bytes({name: tensor})
            if shards[-1] and size + num_bytes > limit:
                shards.append({})
                size = 0
            size += num_bytes
            shard = shard_of[_identity(tensor)] = shards[-1]
        shard[name] = tensor
    return shards


def remove_weights(directory: Path, *, keep: Sequence[str] = (), with_bin: bool = False) -> None:
    """Remove weights of earlier saves, `keep` excepted, so that no stale file is read in place of a new one."""
    # Torch's own files need not go when safetensors are written, which are read before them.
    # Indexes before the files that they name: a reader finds all weights or none.
    patterns = [INDEX_NAME, WEIGHTS_NAME, "model-*-of-*.safetensors"]
    if with_bin:
        patterns += [BIN_INDEX_NAME, BIN_NAME, "pytorch_model-*-of-*.bin"]
    for pattern in patterns:
        for path in directory.glob(pattern):
            if path.name not in keep:
                path.unlink()


def save_weights(
    state: State,
    directory: Path,
    max_shard_size: int | str = "10GB",
    *,
    safe_serialization: bool = True,
    writes: bool = True,
) -> list[str]:
    """Write `state` as `model.safetensors`, or as numbered shards with an index when it exceeds `max_shard_size`.

    One tensor is in memory at a time, of torch's own files one shard. Files get their names once all are written, and
    weights of an earlier save in `directory` go last: a kill leaves those or the new ones readable. Collective where
    `state` holds lazy tensors that gather: every rank calls it, one of them writes, and its errors are raised after the
    last tensor, so that nobody waits for it.

    Args:
        safe_serialization: False writes torch's own files, `pytorch_model.bin`, with every name of tied tensors.
        writes: whether this rank writes.

    Returns:
        The names of the weight files.
    """
    shards = _split(distinct(state) if safe_serialization else state, parse_size(max_shard_size))
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    names = [f"{stem}.{suffix}"]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)]
    made = (tensor() for shard in shards for tensor in _lazy_tensors(shard, safe_serialization))
    if not writes:
        deque(made, maxlen=0)
        return names
    try:
        _write_shards(directory, names, shards, made, safe_serialization)
        index = directory / f"{stem}.{suffix}.index.json" if len(shards) > 1 else None
        _publish(directory, names, index, shards)
        kept = [*names, index.name] if index is not None else names
        # After the new ones have their names: a kill before leaves two generations, of which the index names one.
        remove_weights(directory, keep=kept, with_bin=not safe_serialization)
        fsync_path(directory)
    finally:
        for name in names:
            _incomplete(directory / name).unlink(missing_ok=True)
    return names


def _lazy_tensors(shard: State, safe_serialization: bool) -> list[LazyTensor]:
    """Return the distinct lazy tensors of a file, in the order in which its writer makes them."""
    in_order = [shard[name] for name in (write_order(shard) if safe_serialization else shard)]
    return list({id(tensor): tensor for tensor in in_order if not isinstance(tensor, Tensor)}.values())


def _write_shards(
    directory: Path, names: Sequence[str], shards: Sequence[State], made: Iterator[Tensor], safe_serialization: bool
) -> None:
    """Write each shard under a temporary name. After an error the rest of `made` is made, in step with other ranks."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            _write_shard(_incomplete(directory / name), shard, made, safe_serialization)
    except Exception:
        deque(made, maxlen=0)  # nothing where making one has failed: the ranks are out of step then
        raise


def _write_shard(path: Path, shard: State, made: Iterator[Tensor], safe_serialization: bool) -> None:
    """Write a file, durably; its lazy tensors are the next ones of `made`."""
    lazy = _lazy_tensors(shard, safe_serialization)
    taken = {id(tensor): LazyTensor(tensor.dtype, tensor.shape, partial(next, made)) for tensor in lazy}
    state = {name: taken.get(id(tensor), tensor) for name, tensor in shard.items()}
    with explain_full_disk(path, tensor_file_bytes(shard)), create_file(path) as file:
        if safe_serialization:
            write_tensor_file(file, state)
        else:
            torch.save(make_tensors(state), file)
        file.flush()
        os.fsync(file.fileno())


def make_tensors(state: State) -> dict[str, Tensor]:
    """Return the tensors of `state`, each lazy one made once: tied ones stay one."""
    distinct = {id(tensor): tensor for tensor in state.values()}
    full = {key: tensor if isinstance(tensor, Tensor) else tensor() for key, tensor in distinct.items()}
    return {name: full[id(tensor)] for name, tensor in state.items()}


def gather_to_file(
    tensors: Mapping[str, LazyTensor], target: Path, *, writes: bool, memory: StagingMemory | None = None
) -> dict[str, Tensor]:
    """Make every tensor once, and return all mapped from a file beside `target` that has no name and goes with them.

    One of them is in memory at a time. Collective where they gather: every rank calls it with the same names.

    Args:
        target: a directory, or where one will be.
        writes: False makes the tensors, and returns none.
        memory: where they are copied to, in place of a file: a save in the background writes them from there.
    """
    distinct = {str(id(tensor)): tensor for tensor in tensors.values()}
    made = (distinct[key]() for key in write_order(distinct))
    if not writes:
        deque(made, maxlen=0)
        return {}
    try:
        if memory is None:
            found = _through_file(distinct, made, target)
        else:
            found = memory.copy({key: LazyTensor(t.dtype, t.shape, partial(next, made)) for key, t in distinct.items()})
    except Exception:
        deque(made, maxlen=0)  # in step with other ranks; nothing where making one has failed
        raise
    return {name: found[str(id(tensor))] for name, tensor in tensors.items()}


@for_all
def _through_file(distinct: Mapping[str, LazyTensor], made: Iterator[Tensor], target: Path) -> dict[str, Tensor]:
    """Append tensors, `made` in their `write_order`, to a file without a name, and return them mapped from it."""
    directory = next(each for each in (target.absolute(), *target.absolute().parents) if each.is_dir())
    offsets: dict[str, int] = {}
    need_bytes = sum(tensor_file_bytes({"": tensor}) for tensor in distinct.values())
    with (
        explain_full_disk(directory, need_bytes),
        tempfile.TemporaryFile(dir=directory, buffering=0) as file,
    ):
        for key in write_order(distinct):
            offsets[key] = _append(file, next(made))
        # Private: changes of the tensors reach neither the file nor anybody else. An empty file cannot be mapped.
        num_bytes = os.fstat(file.fileno()).st_size
        mapped = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY) if num_bytes else bytearray()
    return {key: view_of(mapped, offsets[key], tensor) for key, tensor in distinct.items()}


@contextmanager
def full_state_dicts(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which `state_dict()` of a sharded model, and of each module in it, has the full values of `state`.

    For `save_pretrained` of models that take no `state_dict`, and save their modules one by one. The model's own
    `save_pretrained` is called in the block, not one that gathers. Not collective: one rank saves, and a forward there,
    for the model card of sentence-transformers for instance, would wait for the others, and is refused.

    Args:
        state: values by the model's names; a tied parameter has one of them.
    """
    by_tensor = {id(p): state[name] for name, p in model.named_parameters(remove_duplicate=False) if name in state}
    # First of all hooks: those of a sharded model would gather, and wait for ranks that do not save.
    handles = [model.register_forward_pre_hook(_refuse_forward, prepend=True)]
    for prefix, module in model.named_modules():
        own = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        named = ((name, state.get(f"{prefix}.{name}" if prefix else name, by_tensor.get(id(p)))) for name, p in own)
        full = {name: tensor for name, tensor in named if tensor is not None}
        if full:
            handles.append(module.register_state_dict_post_hook(partial(_replace_values, full)))
    gathering = vars(model).pop("save_pretrained", None)
    try:
        with users_class(model):
            yield
    finally:
        if gathering is not None:
            model.save_pretrained = gathering
        for handle in handles:
            handle.remove()


@contextmanager
def users_class(model: nn.Module) -> Iterator[None]:
    """Context in which a model's class is the user's, where a strategy has noted it as `USERS_CLASS`."""
    prepared_class = type(model)
    model.__class__ = vars(model).get(USERS_CLASS, prepared_class)
    try:
        yield
    finally:
        model.__class__ = prepared_class


def _refuse_forward(model: nn.Module, args: Any) -> None:
    raise ConfigError(
        f"{type(model).__name__} is sharded over the ranks, and was called while one of them saves it: a forward takes "
        "all ranks; compute before the save what it writes"
    )


def _replace_values(
    full: Mapping[str, Tensor], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    # Buffers that are not saved are in neither.
    state_dict |= {prefix + name: tensor for name, tensor in full.items() if prefix + name in state_dict}


def _append(file: IO[bytes], tensor: Tensor) -> int:
    """Write a tensor's bytes, and return their offset."""
    begin = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
    rest = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
    while rest:
        rest = rest[file.write(rest) :]
    return begin


def view_of(mapped: mmap.mmap | bytearray, offset: int, tensor: LazyTensor) -> Tensor:
    """Return the tensor of that dtype and shape at an offset of mapped memory."""
    num_bytes = tensor_file_bytes({"": tensor})
    if not num_bytes:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=offset)
    return raw.view(tensor.dtype).reshape(tuple(tensor.shape))


def _incomplete(path: Path) -> Path:
    return path.with_name(f".{path.name}.incomplete")


def _replace_index(path: Path, index: Any) -> None:
    """Write an index in place of an older one, in one step of the filesystem."""
    temporary = _incomplete(path)
    try:
        write_durably(temporary, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def _publish(directory: Path, names: Sequence[str], index: Path | None, shards: Sequence[State]) -> None:
    """Give written files their names, such that a kill at any moment leaves old or new weights readable."""
    # Without an index that is one step. With one, the index comes last, and shards of the old one whose names are taken
    # by new ones stay readable under other names until then.
    if index is not None:
        _set_aside(index, names)
    for name in names:
        os.replace(_incomplete(directory / name), directory / name)
    fsync_path(directory)
    if index is not None:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(tensor_file_bytes(distinct(shard)) for shard in shards)
        _replace_index(index, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _set_aside(index: Path, names: Sequence[str]) -> None:
    """Have an old index name its shards otherwise where `names` has them; it goes where the filesystem cannot link."""
    try:
        old = read_json(index)
        weight_map = dict(old["weight_map"])
        taken = set(weight_map.values()) & set(names)
        aside = {name: "{}-old-{}".format(*name.split("-", 1)) for name in taken}
        for name, other in aside.items():
            (index.parent / other).unlink(missing_ok=True)
            # A hard link costs no room, and survives the replacement of the first name.
            os.link(index.parent / name, index.parent / other)
        if aside:
            old["weight_map"] = {key: aside.get(name, name) for key, name in weight_map.items()}
            fsync_path(index.parent)
            _replace_index(index, old)
    except FileNotFoundError:
        index.unlink(missing_ok=True)
    except (OSError, ValueError, KeyError, TypeError):
        # Better no weights than some of the old ones with some of the new ones.
        index.unlink()
    fsync_path(index.parent)


def read_index(path: Path) -> dict[str, str]:
    """Return which file beside the index `path` holds which tensor."""
    try:
        content = read_json(path)
        is_bare = bool(content) and all(isinstance(value, str) for value in content.values())
        weight_map: dict[str, str] = dict(content if is_bare else content["weight_map"])
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise IncompatibleCheckpointError(
            f"{path} is not an index of weights ({type(error).__name__}: {error}); expected a JSON object with "
            "'weight_map'. Save the weights again"
        ) from error
    for name in sorted({str(name) for name in weight_map.values()}):
        if Path(name).name != name:
            raise IncompatibleCheckpointError(
                f"{path} names {name[:200]!r}, which is not a plain file name; do not load it"
            )
        try:
            check_regular(path.parent / name)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"{path} names {name!r}, which is missing") from error
    return weight_map


class WeightFiles(TensorReader):
    """The tensors in a directory, an index, or a file of weights: one is read, and one file open, at a time.

    Raises:
        CheckpointNotFoundError: there are no weights.
        IncompatibleCheckpointError: a file cannot be read as weights.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.path = path = find_weight_file(checkpoint) if checkpoint.is_dir() else checkpoint
        if checkpoint.is_dir():
            check_regular(path)
        elif not path.is_file():
            raise CheckpointNotFoundError(f"no file {path.absolute()}; expected a directory or a file of weights")
        self._open = lru_cache(1)(lambda file: _open_file(path.parent / file))
        if path.name.endswith(".index.json"):
            # In this order each file is opened once.
            self._files = dict(sorted(read_index(path).items(), key=lambda entry: entry[1]))
        else:
            self._files = dict.fromkeys(self._open(path.name), path.name)

    def __getitem__(self, name: str) -> Tensor:
        return self._holding(name)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _holding(self, name: str) -> TensorReader:
        """Return the file that holds a tensor, opened."""
        opened = self._open(self._files[name])
        if name not in opened:
            raise CorruptCheckpointError(
                f"{self.file_of(name).absolute()} lacks {name!r}, which the index beside it says it holds; save the "
                "weights again"
            )
        return opened

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.path.parent / self._files[name]

    def file_names(self) -> list[str]:
        """Return the names of the files with tensors."""
        return sorted(set(self._files.values()))

    def fill(self, name: str, index: Index, target: Tensor) -> None:
        """Copy a slice of a tensor into `target`; see `SafetensorsFile.fill`."""
        self._holding(name).fill(name, index, target)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from its file's header."""
        return self._holding(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading its values."""
        return self._holding(name).dtype(name)


class BroadcastFiles(TensorReader):
    """Weight files of rank 0 alone, which broadcasts one tensor at a time by `device`. Collective in each call."""

    def __init__(self, checkpoint: Path, device: torch.device) -> None:
        self.path = checkpoint
        self._device = device
        self._weights: WeightFiles | None = None
        message: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                self._weights = WeightFiles(checkpoint)
                outline = {name: (self._weights.shape(name), self._weights.dtype(name)) for name in self._weights}
                message = [outline]
            except AccelTrainerError as error:
                message = [error]
        # Errors too: a rank that waits for the first tensor would never hear of a missing file.
        dist.broadcast_object_list(message, src=0)
        if isinstance(message[0], Exception):
            raise message[0]
        self._outline: dict[str, tuple[tuple[int, ...], torch.dtype]] = message[0]

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._outline[name]
        if self._weights is not None:
            tensor = self._weights[name].to(self._device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)  # gloo knows few types
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._outline[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._outline[name][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outline)

    def __len__(self) -> int:
        return len(self._outline)


class _TensorDict(dict[str, Tensor], TensorReader):
    """A state dict from one of torch's own files, which is mapped."""


def find_weight_file(directory: Path, unit: int = 0) -> Path:
    """Return the index or the file that holds a model's weights in `directory`; of `unit`, where there are several."""
    # Safetensors come before torch's own files, and an index before a single file: the file that lies beside an index
    # is older, for a save that needed no index would have removed it. The only index of another name comes last. Names
    # with a number are accelerate's, those with "fsdp" are accelerate's and its Trainer's for FULL_STATE_DICT.
    suffix = f"_{unit}" if unit else ""
    stems = (f"model{suffix}.safetensors", f"pytorch_model{suffix}.bin", f"pytorch_model_fsdp{suffix}.bin")
    names = [name for stem in stems for name in (f"{stem}.index.json", stem)]
    found = next((directory / name for name in names if (directory / name).is_file()), None)
    if found is not None:
        return found
    indexes = [] if unit else list(directory.glob("*.index.json"))
    if len(indexes) == 1:
        return indexes[0]
    hint = ""
    if (directory / "adapter_config.json").is_file():
        hint = (
            "; it holds an adapter of PEFT, which goes on top of its base model: build that with its adapter "
            "(get_peft_model) to resume, or read it with PeftModel.from_pretrained(base_model, directory)"
        )
    elif (directory / MANIFEST_NAME).is_file():
        hint = "; save_state() wrote this directory, and accelerator.load_state() reads it"
    raise CheckpointNotFoundError(
        f"no weights in {directory.absolute()}: expected one of {', '.join(names)}, as save_model() and "
        f"save_pretrained() write them{hint}"
    )


def _open_file(path: Path) -> TensorReader:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    state = load_torch_file(path, is_mapped=True)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise IncompatibleCheckpointError(f"{path} is not a mapping of names to tensors; expected a model's state dict")
    return _TensorDict(state)
