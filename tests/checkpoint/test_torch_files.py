"""Pickles of ill will that run no code of their own: bytes that grow, numbers that ask for memory, false arrays."""

from __future__ import annotations

import encodings.aliases
import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_trainer.accelerator.single_files import load
from accel_trainer.checkpoint import torch_files
from accel_trainer.checkpoint.interop.dcp import DcpDirectory
from accel_trainer.checkpoint.torch_files import load_torch_file
from accel_trainer.errors import CorruptCheckpointError, IncompatibleCheckpointError

IN_HEX = 8


def archive(pickled: bytes, name: str = "archive/data.pkl", kind: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive as torch's, around a pickle."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", kind) as written:
        for member, content in ((name, pickled), ("archive/version", b"3"), ("archive/byteorder", b"little")):
            written.writestr(member, content)
    return target.getvalue()


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def growing(name: str) -> bytes:
    """A pickle of 30 bytes more for each time that its bytes double."""
    begin = b"\x80\x02c_codecs\nencode\nq\x00" + text("ab") + text("latin1") + b"\x86Rq\x01"
    return begin + (b"h\x00h\x01" + text(name) + b"\x86Rq\x01") * IN_HEX + b"."


@pytest.mark.parametrize("name", ["hex", "HEX!", "--base_64", "quoted printable", "rot13"])
def test_bytes_that_a_pickle_encodes_as_more_bytes_are_refused_before_they_grow(tmp_path: Path, name: str):
    path = tmp_path / "state.pt"
    path.write_bytes(archive(growing(name)))
    said = (
        rf"state\.pt holds bytes, and the word {name!r}, an encoding by which they can grow without bound; save tensors"
    )
    with pytest.raises(CorruptCheckpointError, match=said):
        load_torch_file(path)


def is_text_encoding(name: str) -> bool:
    try:
        return "".encode(name) is not None
    except UnicodeError:  # "undefined", which encodes nothing
        return True
    except LookupError as error:
        return "is not a text encoding" not in str(error)


def test_every_encoding_of_bytes_as_bytes_is_known():
    names = {name for pair in encodings.aliases.aliases.items() for name in pair} - {"mbcs", "dbcs", "ansi", "oem"}
    growing = {name for name in names if not is_text_encoding(name)}
    assert growing == {name for name in names if torch_files._is_growing(name)} != set()


def test_bytes_and_words_of_encodings_apart_are_read(tmp_path: Path):
    torch.save({"seed": b"\x00\xff", "hexagon": 6}, tmp_path / "bytes.pt")
    torch.save({"hex": 6}, tmp_path / "word.pt")
    assert load_torch_file(tmp_path / "bytes.pt") == {"seed": b"\x00\xff", "hexagon": 6}
    assert load_torch_file(tmp_path / "word.pt") == {"hex": 6}


def test_a_pickle_whose_name_is_in_capitals_is_looked_at_as_torch_reads_it(tmp_path: Path):
    path = tmp_path / "state.pt"
    pickled = b"\x80\x02cbuiltins\nbytearray\nJ\x02\x00\x00\x00\x85R."
    path.write_bytes(archive(pickled, "archive/data.PKL"))
    assert torch.load(path, weights_only=True) == bytearray(2)
    with pytest.raises(CorruptCheckpointError, match="holds a bytearray, which can ask for memory without bound"):
        load_torch_file(path)


LEN_END = 22


def with_two_directories(before_end: bytes, named: bytes) -> bytes:
    """Return an archive whose end names the directory of one pickle, and has that of another one before it."""
    hidden = archive(named, kind=zipfile.ZIP_DEFLATED)
    gap = hidden.index(b"PK\1\2") - archive(before_end).index(b"PK\1\2")
    return hidden[:-LEN_END] + archive(before_end + gap * b"\0")[:-LEN_END] + hidden[-LEN_END:]


def test_an_archive_in_which_python_and_torch_find_different_files_is_refused(tmp_path: Path):
    path = tmp_path / "state.pt"
    bomb = b"\x80\x02" + text("a" * 2**20) + b"."
    path.write_bytes(with_two_directories(b"\x80\x02K\x01.", bomb))
    with zipfile.ZipFile(path) as seen:
        assert seen.read("archive/data.pkl").startswith(b"\x80\x02K\x01.")
    assert torch.load(path, weights_only=True) == "a" * 2**20
    with pytest.raises(
        CorruptCheckpointError, match=r"state\.pt is an archive whose directory is not where its end says"
    ):
        load_torch_file(path)


def test_an_archive_with_a_comment_is_refused(tmp_path: Path):
    torch.save([1], tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt", "a") as written:
        written.comment = b"a directory may lie here"
    with pytest.raises(CorruptCheckpointError, match=r"or that has a comment, as torch.save\(\) leaves none"):
        load_torch_file(tmp_path / "state.pt")


def test_a_large_archive_names_its_directory_in_a_record_of_its_own(tmp_path: Path):
    path = tmp_path / "state.pt"
    torch.save([1], path)
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\6\6") + 48
    assert struct.unpack_from("<Q", content, place)[0] == content.index(b"PK\1\2")
    struct.pack_into("<I", content, len(content) - 6, 2**32 - 1)  # as from 4 GiB on
    path.write_bytes(content)
    assert load_torch_file(path) == [1]
    struct.pack_into("<Q", content, place, 0)
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"ends too early|whose directory is not where its end says"):
        load_torch_file(path)


def test_the_pickles_of_an_old_file_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_files, "_MAX_PICKLE_BYTES", 2000)
    path = tmp_path / "old.pt"
    torch.save({"x": torch.ones(2000)}, path, _use_new_zipfile_serialization=False)
    assert load_torch_file(path)["x"].sum() == 2000
    torch.save({"x": "a" * 3000}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptCheckpointError, match=r"begins with more than 2,000 bytes of pickles, and no"):
        load_torch_file(path)


@pytest.mark.parametrize("number", [b"r\xff\xff\xff\x7f", b"p2147483647\n"])
def test_metadata_that_numbers_more_objects_than_it_has_are_refused(tmp_path: Path, number: bytes):
    (tmp_path / ".metadata").write_bytes(b"\x80\x02N" + number + b".")
    with pytest.raises(
        CorruptCheckpointError, match=r"gives an object the number 2,147,483,647, and a pickle of \d+ bytes"
    ):
        DcpDirectory(tmp_path)


# --- NumPy's arrays ---------------------------------------------------------------------------------------------------


class Pickled:
    """Whatever a pickle says: a callable with its arguments, and a state."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def array_of(dtype: Any, content: Any = b"A" * 16, shape: Any = (2,)) -> Pickled:
    reconstruct, arguments, _ = np.zeros(2, np.uint32).__reduce__()
    return Pickled(reconstruct, arguments, (1, shape, dtype, False, content))


def number_type(*, subarray: Any = None, names: Any = None, fields: Any = None) -> Pickled:
    return Pickled(np.dtype, ("i8", False, True), (3, "<", subarray, names, fields, -1, -1, 0))


OBJECTS = Pickled(np.dtype, ("O", False, True))
FIELDS = {"names": ("python",), "fields": {"python": (OBJECTS, 0)}}


@pytest.mark.parametrize(
    "hostile",
    [
        array_of(number_type(**FIELDS)),
        array_of(number_type(subarray=(OBJECTS, (2,)))),
        array_of(OBJECTS, content=["a", "b"]),
        array_of(Pickled(np.dtype, ("i8,O", False, True))),
    ],
    ids=["fields", "subarray", "objects", "records"],
)
def test_an_array_of_anything_but_numbers_is_refused(tmp_path: Path, hostile: Pickled):
    path = tmp_path / "random_states_0.pkl"
    torch.save({"numpy_random_seed": hostile}, path)
    with pytest.raises(IncompatibleCheckpointError, match="holds more than tensors, numbers and strings"):
        load_torch_file(path, has_arrays=True)
    with pytest.raises(pickle.UnpicklingError, match="which are no numbers"):
        load(path)


def test_an_array_is_as_long_as_its_bytes(tmp_path: Path):
    torch.save(Pickled(np.ndarray, ((2**40,),)), tmp_path / "long.pt")
    assert load(tmp_path / "long.pt").size == 0
    torch.save(array_of(np.dtype(np.int64), shape=(2**40,)), tmp_path / "longer.pt")
    with pytest.raises(IncompatibleCheckpointError, match="buffer size does not match array size"):
        load_torch_file(tmp_path / "longer.pt", has_arrays=True)


def test_an_array_is_set_once(tmp_path: Path):
    """Else a tensor that shares its memory, by a function that torch allows, is left with memory that was freed."""
    first = pickle.dumps(np.arange(2), protocol=2)
    state = first[first.rindex(b"(K\x01K\x02\x85") : -1]
    assert state.endswith(b"b")
    path = tmp_path / "twice.pt"
    path.write_bytes(archive(first[:-1] + state + b"."))
    with pytest.raises(IncompatibleCheckpointError, match="holds more than tensors, numbers and strings"):
        load_torch_file(path, has_arrays=True)
    path.write_bytes(archive(first))
    assert load_torch_file(path, has_arrays=True).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", ["?", "<u4", ">i8", "f2", "f8", "c16"])
def test_arrays_of_numbers_are_read_and_can_be_written_again(tmp_path: Path, dtype: str):
    array = np.asfortranarray(np.arange(6).reshape(2, 3).astype(dtype))
    torch.save(array, tmp_path / "first.pt")
    read, expected = load(tmp_path / "first.pt"), pickle.loads(pickle.dumps(array, protocol=2))
    assert (read.dtype, read.tolist(), read.strides) == (expected.dtype, array.tolist(), expected.strides)
    torch.save(read, tmp_path / "second.pt")
    assert type(torch.load(tmp_path / "second.pt", weights_only=False)) is np.ndarray
