"""Python programs that are forked from a process which has torch imported, in place of new interpreters.

After `fork_programs()` a process forks where it would start this interpreter with a script, `-m` or `-c`, as the
launcher and DeepSpeed's runner do with their workers. The child is one in every respect: pid, session, descriptors,
signals and exit code, and the program's environment, folder and arguments. What it finds imported is 1 to 5 s of a core
for each. What is about the interpreter itself gets a new one: options but `-u`, another PYTHONPATH, a `sitecustomize`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import thread
from dataclasses import dataclass
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from tests.ranks import PYTHONPATH, run_ranks

ROOT = str(Path(__file__).resolve().parents[1])
COLD = "TESTS_COLD"
"""In the environment of a process whose programs are to be new interpreters all the same."""
ALONE = dict.fromkeys(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
     "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE")
)  # fmt: skip
"""Environment for `run_ranks` of a process that is no rank."""


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does with a command of this interpreter; all Python that it starts is forked, too."""
    return run_ranks(_run, 1, list(command), options, env=ALONE, timeout=options.get("timeout", 100) + 10)[0]


def _run(command: list[str], options: dict[str, Any]) -> subprocess.CompletedProcess[Any]:
    fork_programs()
    return subprocess.run(command, **options)


def fork_programs() -> None:
    """Fork the Python programs that this process starts from now on, or becomes."""
    if COLD in os.environ:
        return
    start, execute = subprocess._fork_exec, os.execvpe

    def fork(*given: Any) -> int:
        # Of `_posixsubprocess.fork_exec`, alike in Python 3.11 to 3.14 up to here.
        words, _, _, kept, folder, variables, *descriptors, session, group, gid, gids, uid, mask, first = given[:22]
        environ = dict(os.environb) if variables is None else dict(each.split(b"=", 1) for each in variables)
        program = _Program.read([os.fsdecode(word) for word in words], environ)
        if program is None or (gid, gids, uid, first) != (None,) * 4 or mask >= 0:
            return start(*given)
        _flush()
        if pid := os.fork():
            return pid
        if session:
            os.setsid()
        if group >= 0:
            os.setpgid(0, group)
        stdin, _, _, stdout, _, stderr, _, failed, _ = descriptors  # `exec` closes the last pipe, by which it says so
        program.begin((stdin, stdout, stderr), set(kept) - {failed}, folder)

    def replace(file: str, words: list[str], environ: Mapping[str, str]) -> None:
        program = _Program.read(words, {os.fsencode(name): os.fsencode(value) for name, value in environ.items()})
        if program is None:
            execute(file, words, environ)
        else:
            _flush()
            program.begin()

    subprocess._fork_exec, os.execvpe = fork, replace


def _folders(text: str) -> list[str]:
    return [folder for folder in text.split(os.pathsep) if folder not in ("", ROOT)]


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


@dataclass(frozen=True)
class _Program:
    """A command line of this interpreter."""

    kind: str
    """"-m", "-c" or, for a script, nothing."""
    words: list[str]
    is_unbuffered: bool
    environ: dict[bytes, bytes]

    @classmethod
    def read(cls, words: Sequence[str], environ: dict[bytes, bytes]) -> _Program | None:
        """Return the program; None for another one, and where a new interpreter is wanted."""
        rest = list(words[1:])
        if is_unbuffered := rest[:1] == ["-u"]:
            rest = rest[1:]
        kind = rest[0] if rest and rest[0] in ("-m", "-c") else ""
        rest = rest[bool(kind) :]
        is_new = _folders(os.fsdecode(environ.get(b"PYTHONPATH", b""))) != _folders(PYTHONPATH)
        if words[0] != sys.executable or is_new or not rest or (not kind and rest[0].startswith("-")):
            return None
        return cls(kind, rest, is_unbuffered, environ)

    def begin(
        self, standard: tuple[int, ...] = (-1, -1, -1), kept: Iterable[int] = (), folder: str | bytes | None = None
    ) -> NoReturn:
        """Become the program, with these descriptors and `kept` ones alone."""
        code = 1
        try:
            _end_handlers()
            _take_descriptors(standard, kept)
            os.environ.clear()
            os.environb.update(self.environ)
            if folder is not None:
                os.chdir(folder)
            _forget_parent()
            code = self._run()
        except BaseException:
            traceback.print_exc()
        os._exit(code & 0xFF)

    def _run(self) -> int:
        """Run it to the end of its threads and handlers; return the exit code."""
        sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), sys.__stdout__, sys.__stderr__  # noqa: SIM115
        sys.stdout.reconfigure(write_through=self.is_unbuffered, line_buffering=os.isatty(1))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        code: Any = 0
        try:
            code = self._report()
        except SystemExit as end:  # also of a hook for errors
            code = end.code
        threading._shutdown()
        atexit._run_exitfuncs()
        if not isinstance(code, int | KeyboardInterrupt | None):
            print(code, file=sys.stderr)
            code = 1
        util._flush_std_streams()
        if isinstance(code, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return code or 0

    def _report(self) -> int | KeyboardInterrupt:
        """Run it to the end of the script, and report an error as the interpreter does."""
        try:
            self._run_main()
        except SystemExit:
            raise
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return error if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def _run_main(self) -> None:
        name, *arguments = self.words
        added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        first = {"-m": os.getcwd(), "-c": "", "": os.path.dirname(os.path.abspath(name))}[self.kind]
        sys.path[:] = [first, *added, *(path for path in sys.path if path not in ("", ROOT, *added))]
        sys.argv[:] = ["-c" if self.kind == "-c" else name, *arguments]
        if self.kind == "-m":
            runpy._run_module_as_main(name)
            return
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        file = "<string>" if self.kind else name
        main.__dict__.update({"__builtins__": __builtins__} if self.kind else {"__file__": name})
        exec(compile(name if self.kind else Path(name).read_bytes(), file, "exec"), main.__dict__)


def _end_handlers() -> None:
    """Leave signals to the system, as `exec` does, but those that Python takes when it starts."""
    faulthandler.disable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_descriptors(standard: tuple[int, ...], kept: Iterable[int]) -> None:
    copies = [descriptor if descriptor < 0 else os.dup(descriptor) for descriptor in standard]
    for number, copy in enumerate(copies):
        if copy >= 0:
            os.dup2(copy, number)
    low = 3
    for descriptor in (*sorted(each for each in kept if each > 2), os.sysconf("SC_OPEN_MAX")):
        os.closerange(low, descriptor)
        low = descriptor + 1


def _forget_parent() -> None:
    """Be a main process with no child, no server of forks and no temporary folder; what is imported stays."""
    [main_process] = [each for each in process.BaseProcess.__subclasses__() if each.__name__ == "_MainProcess"]
    process._current_process, process._parent_process = main_process(), None
    process._children.clear()
    thread._threads_queues.clear()  # of which torch's agent starts workers
    util._finalizer_registry.clear()
    weakref.finalize._registry.clear()  # temporary folders of the parent, among others
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()
    multiprocessing.set_start_method(None, force=True)
    tempfile.tempdir = None
    gc.freeze()
    gc.enable()
