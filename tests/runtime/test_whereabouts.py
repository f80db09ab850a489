"""Where a thread is, seen from another one, which must leave no trace in it."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer.runtime.whereabouts import (
    Whereabouts,
    describe_failure,
    describe_thread,
    position_of,
    section,
    waits,
)
from tests.ranks import run_ranks


class Guard:
    """Notes in which thread it is destroyed."""

    def __init__(self, destroyed_in: set[int]) -> None:
        self._destroyed_in = destroyed_in

    def __del__(self) -> None:
        self._destroyed_in.add(threading.get_ident())


@pytest.fixture
def switching():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(params=["collected seldom", "collected all the time"])
def collecting(request: pytest.FixtureRequest):
    """Garbage is collected at each second allocation, with a callback of Python, as hypothesis has one."""
    before, callback = gc.get_threshold(), lambda phase, info: None
    if request.param == "collected all the time":
        gc.callbacks.append(callback)
        gc.set_threshold(1, 1_000, 1_000)
    yield
    gc.set_threshold(*before)
    if callback in gc.callbacks:
        gc.callbacks.remove(callback)


def look_at_calls(look: Any, depth: int) -> None:
    """Look at this thread while calls return, and find out whether a look has kept their variables."""
    watched, is_over = threading.get_ident(), threading.Event()
    destroyed_in: set[int] = set()

    def within(depth: int) -> None:
        guard = Guard(destroyed_in)  # noqa: F841
        if depth:
            within(depth - 1)

    def watch() -> None:
        while not is_over.is_set():
            look(watched)

    excluded = torch._C._dispatch_tls_local_exclude_set()
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(16_000 // depth):
        within(depth)
    for _ in range(500):
        repr(torch.ones(1))  # holds a guard of the dispatcher in a variable
    is_over.set()
    watcher.join()

    assert destroyed_in == {watched}
    assert gc.isenabled()
    assert torch._C._dispatch_tls_local_exclude_set().raw_repr() == excluded.raw_repr()


@pytest.mark.usefixtures("switching", "collecting")
@pytest.mark.parametrize("depth", [4, 150])
@pytest.mark.parametrize("look", [position_of, describe_thread])
def test_a_look_at_a_thread_keeps_none_of_its_variables(look, depth):
    look_at_calls(look, depth)


def look_beside_an_audit_hook(look: Any) -> None:
    sys.setswitchinterval(1e-6)
    sys.addaudithook(lambda event, arguments: None)  # to the end of the process
    look_at_calls(look, 4)


@pytest.mark.parametrize("look", [position_of, describe_thread])
def test_nor_where_a_hook_of_python_hears_of_attributes(look):
    """filelock 4, which transformers imports, has one from Python 3.12 on."""
    run_ranks(look_beside_an_audit_hook, 1, look)


def look_while_threads_enter(num_threads: int) -> int:
    """Start threads of C that call back, each of which makes itself known to the interpreter, and look at this one."""
    sys.setswitchinterval(5e-4)
    calls = []
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(calls.append)
    libc, number = ctypes.CDLL(None), ctypes.c_ulong()
    watched, is_over = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            position_of(watched)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(num_threads):
        assert libc.pthread_create(ctypes.byref(number), None, callback, None) == 0
        libc.pthread_join(number, None)
    is_over.set()
    watcher.join()
    return len(calls)


def test_a_look_while_threads_enter_the_interpreter_is_safe():
    assert run_ranks(look_while_threads_enter, 1, 4_000) == [4_000]


SOURCE = """
def wait(entered, left):
    entered.set()
    left.wait()

def call_event(*events):
    wait(*events)

def on_save(*events):
    call_event(*events)
"""


def seen_from_outside(path: Path) -> Whereabouts:
    """Where a thread is that waits in `SOURCE`."""
    entered, left = threading.Event(), threading.Event()
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, str(path), "exec"), namespace)
    thread = threading.Thread(target=namespace["on_save"], args=(entered, left), name="näme")
    thread.start()
    try:
        assert entered.wait(10)
        where = describe_thread(thread.ident)
    finally:
        left.set()
        thread.join()
    assert where is not None
    assert describe_thread(thread.ident) is None
    return where


@pytest.mark.parametrize("name", ["plain.py", "bücher.py", '模型 \\".py', "🙂.py"])
def test_a_thread_is_described_by_lines_and_names(tmp_path, name):
    path = tmp_path / name
    path.write_text(SOURCE)
    where = seen_from_outside(path)
    assert where.line == f"wait ({name}:4)"
    assert f'  File "{path}", line 10, in on_save\n    call_event(*events)\n' in where.stack


def test_a_callback_is_named_by_its_event_and_a_thread_describes_itself(tmp_path):
    assert seen_from_outside(tmp_path / "transformers/trainer_callback.py").section == "callback on_save"
    here = describe_thread(threading.get_ident())
    assert here is not None
    assert here.line.startswith(
        "test_a_callback_is_named_by_its_event_and_a_thread_describes_itself (test_whereabouts.py:"
    )


@section("a section of the test")
def fail(in_collective: bool) -> None:
    wait_for_all() if in_collective else int("no number")


@waits("a wait of the test")
def wait_for_all() -> None:
    raise ValueError("in the wait")


@pytest.mark.parametrize(("in_collective", "operation"), [(True, "a wait of the test"), (False, "")])
def test_a_marked_function_is_a_section_whatever_its_name_is(in_collective, operation):
    with pytest.raises(ValueError, match="in") as failed:
        fail(in_collective)
    where = describe_failure(failed.value)
    assert (where.section, where.operation) == ("a section of the test", operation)
