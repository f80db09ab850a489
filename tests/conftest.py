"""A test fails that leaves variables, threads, processes, a process group, files or changed torch defaults behind."""

from __future__ import annotations

import gc
import logging
import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / "docs" / "test_times.md"

if os.access(sys.prefix, os.W_OK):
    # Another environment's DeepSpeed lies elsewhere, and the two would rebuild each other's in the user's cache.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start what runs in their background so, and all processes of the tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Property tests measure no time: the machine may be busy.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

# What a launcher sets: the tests must not depend on how pytest itself was started.
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "PMI_RANK", "PMI_SIZE", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_LAUNCHER_PREFIXES = ("ACCELERATE_", "ACCEL_TRAINER_", "FSDP_", "OMPI_", "SLURM_", "TORCHELASTIC_")

# Set by libraries while they are imported or warm up, whoever does so first.
_ALLOWED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Hugging Face accelerate sets it, and transformers imports accelerate where it is
}
_ALLOWED_VARIABLE_PREFIXES = ("TRITON_", "HYPOTHESIS_")

# Daemon threads that live as long as the process and belong to a library, by the start of their name or their class.
_ALLOWED_THREADS = (
    "pytest_timeout", "fsspecIO", "asyncio_", "checkpoint-heartbeat", "QueueFeederThread", "InductorSubproc",
    "SubprocPool", "TMonitor",
)  # fmt: skip

_ALLOWED_FILES = {".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", ".import_linter_cache", "__pycache__"}
_ALLOWED_FILES |= {".cache", "site"}  # of `make docs`, which .ci/run has beside tests

_OWN_PREFIXES = ("accel_trainer", "accel-trainer")

# Threads and processes that are on their way out get this long.
_SETTLE_SECONDS = 2.0


@pytest.fixture(scope="session", autouse=True)
def no_launcher_environment() -> Iterator[None]:
    """Run the session as one process without a launcher, whatever started pytest."""
    patch = pytest.MonkeyPatch()
    for name in list(os.environ):
        if name in _LAUNCHER_VARIABLES or name.startswith(_LAUNCHER_PREFIXES):
            patch.delenv(name)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep temporary files apart from those of other sessions on the machine, which come and go during a test."""
    tmp_path_factory.getbasetemp()  # stays where it was: pytest keeps the last ones to look at
    folder = tempfile.mkdtemp(prefix="tests-")
    # Last of all: what multiprocessing has in there goes with the process.
    multiprocessing.util.Finalize(None, shutil.rmtree, [folder], {"ignore_errors": True}, exitpriority=-1000)
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", folder)
    patch.setattr(tempfile, "tempdir", folder)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def early_fork_server(own_temporary_files: None) -> None:
    """Let the server of the ranks import what it will need while the first tests run."""
    if ranks := sys.modules.get("tests.ranks"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ranks.COLLECTED, " ".join(name for name in sys.modules if name.startswith("tests.")))
            ranks.start_fork_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect tests without looking for garbage: what they import makes 2 million objects that all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cells beyond the sample (tests/cells.py), unless a marker or the name of a test asks for them."""
    if hasattr(config, "workerinput"):
        # Workers get files in this order: without it a file of one long test comes last, and one worker waits.
        seconds = dict(re.findall(r"^\| `(tests/\S+\.py)` \| ([\d.]+) \|", TIMES.read_text(), re.MULTILINE))
        items.sort(key=lambda item: -float(seconds.get(item.nodeid.partition("::")[0], 0)))
    if "cell" in config.option.markexpr or any("::" in argument for argument in config.args):
        return
    beyond = [item for item in items if item.get_closest_marker("cell")]
    config.hook.pytest_deselected(items=beyond)
    items[:] = [item for item in items if not item.get_closest_marker("cell")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare once what tests would wait for."""
    # A full collection, which some code under test asks for, takes half a second with all that collecting imports.
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:
        # As in the ranks. Threads gain nothing with such small tensors, and wait for each other on a busy machine.
        sys.modules["torch"].set_num_threads(1)
    needed = any("deepspeed" in item.nodeid or "zero" in item.nodeid for item in session.items)
    if needed and not session.config.option.collectonly:
        from tests.builds import compile_collectives  # not where test_harness.py tries this file by itself

        compile_collectives()


@pytest.fixture(autouse=True)
def no_leaks(no_launcher_environment: None, own_temporary_files: None) -> Iterator[None]:
    """Fail the test that leaves something behind, and clean up so that only this test fails."""
    environ, threads, files, defaults = dict(os.environ), set(threading.enumerate()), _files(), _torch_defaults()
    children = set(multiprocessing.active_children())
    yield
    leaks = [
        *_process_group_leaks(),
        *_environment_leaks(environ),
        *_wait_until_gone("thread", lambda: _new_threads(threads)),
        *_wait_until_gone("child process", lambda: set(multiprocessing.active_children()) - children),
        *(f"file {path}" for path in sorted(_files() - files)),
        *(f"torch {name} = {value}" for name, value in _torch_defaults().items() if defaults.get(name, value) != value),
    ]
    _restore_logging()
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def _restore_logging() -> None:
    """Let the package's loggers speak again, as those of rank 0, whatever a test has joined or configured."""
    if "accel_trainer.logging" in sys.modules:
        sys.modules["accel_trainer.logging"].set_rank(0)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "accel_trainer" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            if logger.level != logging.NOTSET:
                logger.setLevel(logging.NOTSET)  # walks all loggers, a millisecond for each test


def _process_group_leaks() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an initialised process group"]


def _environment_leaks(before: dict[str, str]) -> list[str]:
    leaks = []
    for name in sorted({*before, *os.environ}):
        old, new = before.get(name), os.environ.get(name)
        if old == new or name in _ALLOWED_VARIABLES or name.startswith(_ALLOWED_VARIABLE_PREFIXES):
            continue
        change = "removed" if new is None else f"set to {new!r}" if old is None else f"changed to {new!r}"
        leaks.append(f"environment variable {name} {change}")
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
    return leaks


def _new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    def is_allowed(thread: threading.Thread) -> bool:
        return thread.daemon and (thread.name.startswith(_ALLOWED_THREADS) or type(thread).__name__ in _ALLOWED_THREADS)

    return {thread for thread in threading.enumerate() if thread not in before and not is_allowed(thread)}


def _wait_until_gone(kind: str, find: Any) -> list[str]:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(f"{kind} {item.name!r}" for item in left)


def _files() -> set[str]:
    """Entries of the project's root and of the working directory, and our own in the root of the temporary files."""
    # Twice for every test: pathlib would take 0.4 ms each time.
    temporary, current = tempfile.gettempdir(), os.getcwd()
    own = {f"{temporary}/{name}" for name in os.listdir(temporary) if name.startswith(_OWN_PREFIXES)}
    folders = {str(ROOT), current} if f"{current}/".startswith(f"{ROOT}/") else {str(ROOT)}
    return own | {f"{folder}/{name}" for folder in folders for name in os.listdir(folder) if name not in _ALLOWED_FILES}


def _torch_defaults() -> dict[str, Any]:
    """Global switches of torch that change what later tests compute."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
