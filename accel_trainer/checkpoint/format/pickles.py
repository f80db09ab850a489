"""Pickles of unknown authors: what restricted unpicklers allow, and what takes memory without bound all the same.

torch's (`weights_only=True`) calls nothing but what is on its list, and Python's own asks `find_class`. Neither looks
at the numbers and names that a pickle hands to what it may call.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from accel_trainer.errors import CorruptCheckpointError

__all__ = ["PLAIN_ARRAYS", "check_numbering", "check_torch_pickles", "has_all_pickles"]

_BUFFER = re.compile(rb"c(__builtin__|builtins)\nbytearray\n")
"""The opcode by which torch's unpickler, which allows it, gets at a buffer of any length."""
_ENCODE = b"c_codecs\nencode\n"
_GROWING = re.compile("(base64|bz2|hex|quopri|uu|zlib)(codec)?|quotedprintable|rot13|zip")
"""Encodings of bytes as bytes, by their letters and digits: hex forty times is a factor of 10^12. rot13 spells them."""
_NUM_PICKLES = 5
"""In one of torch's files up to torch 1.5: a mark, a version, the system, the object, and the names of its storages."""


def check_torch_pickles(pickled: bytes, path: Path) -> None:
    """Refuse pickles for torch's unpickler by which a few bytes ask for memory without bound.

    Args:
        pickled: one pickle, or an old file of torch's from its beginning.

    Raises:
        CorruptCheckpointError: they make a `bytearray`, or encode bytes as more bytes.
    """
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
    """Refuse a pickle for Python's own unpickler, which makes room for twice the largest number of an object.

    Raises:
        CorruptCheckpointError: a number is larger than the pickle.
    """
    for name, argument in _opcodes(pickled):
        if name in ("PUT", "LONG_BINPUT") and argument > len(pickled):
            raise CorruptCheckpointError(
                f"{path.absolute()} gives an object the number {argument:,}, and a pickle of {len(pickled):,} bytes "
                "has fewer; load another checkpoint"
            )


def has_all_pickles(head: bytes) -> bool:
    """Whether the values in an old file of torch's, which lie behind its pickles, begin within its first bytes."""
    stream = io.BytesIO(head)
    try:
        for _ in range(_NUM_PICKLES):
            for _opcode in pickletools.genops(stream):
                pass
    except ValueError:
        return False
    return True


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
