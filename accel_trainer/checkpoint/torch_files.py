"""Files of torch's own, read without running code that is in them, and without more memory than their size.

torch's restricted unpickler (`weights_only=True`) calls nothing but what is on its list, and Python's own asks
`find_class`. Neither looks at the numbers and names that a pickle hands to what it may call: `check_torch_pickles` and
`check_numbering` do.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from accel_trainer.checkpoint.disk import as_corrupt, check_regular
from accel_trainer.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)

# The opcode by which torch's unpickler, which allows it, gets at a buffer of any length.
_BUFFER = re.compile(rb"c(__builtin__|builtins)\nbytearray\n")
_ENCODE = b"c_codecs\nencode\n"
# Encodings of bytes as bytes, by their letters and digits: hex forty times is a factor of 10^12. rot13 spells them.
_GROWING = re.compile("(base64|bz2|hex|quopri|uu|zlib)(codec)?|quotedprintable|rot13|zip")
# In one of torch's files up to torch 1.5: a mark, a version, the system, the object, and the names of its storages.
_NUM_PICKLES = 5


def check_torch_pickles(pickled: bytes, path: Path) -> None:
    """Refuse pickles for torch's unpickler by which a few bytes ask for memory without bound."""
    if _BUFFER.search(pickled):
        raise CorruptCheckpointError(
            f"{path.absolute()} holds a bytearray, which can ask for memory without bound (0 of them are read); save "
            "tensors, numbers, strings, lists and dicts"
        )
    for _, argument in _opcodes(pickled) if _ENCODE in pickled else ():
        if isinstance(argument, str) and _is_growing(argument):
            raise CorruptCheckpointError(
                f"{path.absolute()} holds bytes, and the word {argument[:40]!r}, an encoding by which they can grow "
                "without bound; save tensors, numbers, strings, lists and dicts"
            )


def check_numbering(pickled: bytes, path: Path) -> None:
    """Refuse a pickle for Python's own unpickler, which makes room for twice the largest number of an object."""
    for name, argument in _opcodes(pickled):
        if name in ("PUT", "LONG_BINPUT") and argument > len(pickled):
            raise CorruptCheckpointError(
                f"{path.absolute()} gives an object the number {argument:,}, and a pickle of {len(pickled):,} bytes "
                "has fewer; load another checkpoint"
            )


def _is_growing(encoding: str) -> bool:
    return _GROWING.fullmatch(re.sub("[^a-z0-9]", "", encoding.lower())) is not None


def _opcodes(pickled: bytes) -> Iterator[tuple[str, Any]]:
    """Yield opcodes with their arguments, up to the first one that no unpickler reads either."""
    stream = io.BytesIO(pickled)
    with suppress(ValueError):
        for _ in range(_NUM_PICKLES):
            yield from ((opcode.name, argument) for opcode, argument, _ in pickletools.genops(stream))


# --- NumPy's arrays ---------------------------------------------------------------------------------------------------
# A dtype sets what its pickle says: fields that are objects, at any of a number's bytes, and whoever looks at such a
# field follows an address that the file has chosen. Here a dtype is a word, and numbers alone have one.


class _NumberType:
    """The dtype of numbers, in the place of `numpy.dtype`."""

    def __init__(self, text: str, *_align_and_copy: Any) -> None:
        if re.fullmatch(r"[biufc]\d{1,2}", text) is None:
            raise pickle.UnpicklingError(f"an array of {text[:40]!r}, which are no numbers")
        self.str = text

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, order, *fields_and_sizes = state
        if order not in ("<", ">", "|", "=") or fields_and_sizes[:3] != [None, None, None]:
            raise pickle.UnpicklingError("an array of records, which are no numbers")
        self.str = order + self.str


class _NumberArray(np.ndarray[Any, Any]):
    """An array of numbers, in the place of `numpy.ndarray`; empty until its state is set."""

    def __new__(cls, *_arguments: Any) -> _NumberArray:
        return super().__new__(cls, (0,), np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if self.size:  # NumPy would free what a tensor of the same file may share by now
            raise pickle.UnpicklingError("an array is set twice")
        version, shape, dtype, is_fortran, content = state
        # NumPy's own comes where a script has allowed it for all that torch reads.
        plain = np.dtype(dtype.str) if isinstance(dtype, _NumberType | np.dtype) else None
        if plain is None or plain.kind not in "biufc":
            raise pickle.UnpicklingError("an array of objects, which are no numbers")
        super().__setstate__((version, shape, plain, is_fortran, content))

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()


def _reconstruct(*_arguments: Any) -> _NumberArray:
    return _NumberArray()


PLAIN_ARRAYS: list[Any] = [
    (_NumberType, "numpy.dtype"),
    (_NumberArray, "numpy.ndarray"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),  # of NumPy 2
    (_reconstruct, "numpy.core.multiarray._reconstruct"),  # of NumPy 1
]
"""For `torch.serialization.safe_globals`: NumPy's arrays of numbers, which are made of their bytes alone."""


_MAX_PICKLE_BYTES = 256 * 2**20
# Of an archive: its mark, four numbers, and bytes and place of its directory; then the length of a comment.
_END = struct.Struct("<4s4H2IH")
_LOCATOR, _END_64 = struct.Struct("<4sIQI"), struct.Struct("<4sQ2H2I4Q")
"""Before that of a large one: the place of its own end, and that end, which has the place of the directory last."""


def check_torch_file(path: Path) -> None:
    """Refuse one of torch's files that would take far more memory than its size on the disk, or is no regular file."""
    check_regular(path)
    with open(path, "rb") as file:
        check_torch_bytes(file, path)


def check_torch_bytes(file: BinaryIO, path: Path) -> None:
    """As `check_torch_file`, of an open file whose name is `path`."""
    is_archive = file.read(4) == b"PK\3\4"
    file.seek(0)
    # torch.load chooses by the same four bytes.
    for pickled in _pickles_in(file, path) if is_archive else [_pickles_before_values(file, path)]:
        check_torch_pickles(pickled, path)


def _pickles_before_values(file: BinaryIO, path: Path) -> bytes:
    """Return the pickles of a file of torch up to 1.5, one after the other, with some of the values behind them."""
    head = file.read(_MAX_PICKLE_BYTES)
    if file.read(1) and sum(name == "STOP" for name, _ in _opcodes(head)) < _NUM_PICKLES:
        raise CorruptCheckpointError(
            f"{path.absolute()} is no file of torch's, or begins with more than {_MAX_PICKLE_BYTES:,} bytes of "
            "pickles, and no more are read; the values of tensors lie behind them. Load another checkpoint"
        )
    return head


def _pickles_in(file: BinaryIO, path: Path) -> list[bytes]:
    """Return the pickles in an archive of torch's, once it is known to expand to no more than its size."""
    num_bytes = file.seek(0, os.SEEK_END)
    try:
        with as_corrupt(path, NotImplementedError, struct.error), zipfile.ZipFile(file) as archive:
            _check_directory(file, num_bytes, archive.start_dir, path)
            _check_members(archive.infolist(), num_bytes, path)
            return [archive.read(member) for member in archive.infolist() if _is_pickle(member)]
    except (zipfile.BadZipFile, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the beginning of the file
            raise
        raise CorruptCheckpointError(
            f"{path.absolute()} ends too early, or is damaged ({error}); load another one"
        ) from error


def _is_pickle(member: zipfile.ZipInfo) -> bool:
    return member.filename.lower().endswith(".pkl")  # torch's reader finds "data.PKL", too


def _check_directory(file: BinaryIO, num_bytes: int, found: int, path: Path) -> None:
    """Refuse an archive with two directories: Python finds the one before the end, and torch the one that it names."""
    end = num_bytes - _END.size
    mark, *_, named, len_comment = _read(file, _END, end)
    locator, _, end_64, _ = _read(file, _LOCATOR, end - _LOCATOR.size)
    if locator == b"PK\6\7":
        is_near = end_64 == end - _LOCATOR.size - _END_64.size
        named = _read(file, _END_64, end_64)[-1] if is_near else None
    if mark != b"PK\5\6" or len_comment or named != found:
        raise CorruptCheckpointError(
            f"{path.absolute()} is an archive whose directory is not where its end says, or that has a comment, as "
            "torch.save() leaves none: readers may see other contents in it than each other. Load another checkpoint"
        )


def _read(file: BinaryIO, record: struct.Struct, place: int) -> tuple[Any, ...]:
    file.seek(max(place, 0))
    return record.unpack(file.read(record.size).ljust(record.size, b"\0"))


def _check_members(members: Sequence[zipfile.ZipInfo], num_bytes: int, path: Path) -> None:
    expanded = sum(member.file_size for member in members)
    if expanded > num_bytes or any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CorruptCheckpointError(
            f"{path.absolute()} is compressed: its {num_bytes:,} bytes are {expanded:,} in memory, and no more than "
            "the file has are read. torch.save() does not compress: save it anew"
        )
    num_pickled = sum(member.file_size for member in members if _is_pickle(member))
    if num_pickled > _MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(
            f"{path.absolute()} holds {num_pickled:,} bytes of pickles, and at most {_MAX_PICKLE_BYTES:,} are read; "
            "the values of tensors lie beside them. Load another checkpoint"
        )


def load_torch_file(path: Path, *, is_mapped: bool = False, has_arrays: bool = False) -> Any:
    """Return the plain data in a file of torch's.

    Args:
        is_mapped: tensors stay in the file, a zip file, until they are used.
        has_arrays: NumPy's arrays of numbers are plain data, too: random states have one.

    Raises:
        CorruptCheckpointError: it is damaged, or takes more memory than its size; see `check_torch_file`.
        IncompatibleCheckpointError: it cannot be read, or holds more than tensors, numbers, strings, lists and dicts.
    """
    check_torch_file(path)
    try:
        with torch.serialization.safe_globals(PLAIN_ARRAYS if has_arrays else []):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path.absolute()} is missing") from None
    except pickle.UnpicklingError as error:
        raise IncompatibleCheckpointError(
            f"{path.absolute()} holds more than tensors, numbers and strings, and loading it could run code that it "
            "contains; if you trust it, load it with torch.load(path, weights_only=False) and save plain data"
        ) from error
    except Exception as error:  # torch has several errors of its own for a damaged file
        raise IncompatibleCheckpointError(
            f"{path.absolute()} cannot be read as weights or state ({type(error).__name__}: {error}); is it damaged, "
            "or of another format?"
        ) from error
