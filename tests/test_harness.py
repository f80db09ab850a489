"""The harness itself: what a failing, dead, hanging or leaking test is told."""

from __future__ import annotations

import ast
import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from tests import warm
from tests.builds import compile_collectives
from tests.cells import crossed
from tests.ranks import RankFailure, preload, run_ranks

preload("deepspeed")

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Answer:
    """Defined in a test module on purpose: results may be of such classes."""

    rank: int
    total: float


def sum_ranks(offset: float, *, scale: float = 1.0) -> Answer:
    dist.init_process_group("gloo")
    total = torch.tensor([scale * dist.get_rank() + offset])
    dist.all_reduce(total)
    return Answer(dist.get_rank(), total.item())


def read_variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def fail_on(failing_rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == failing_rank:
        raise ValueError(f"boom on {failing_rank}")
    dist.barrier()


def wait_for_ever_unless(failing_rank: int) -> None:
    if int(os.environ["RANK"]) == failing_rank:
        raise ValueError("boom")
    time.sleep(3600)


def kill_self(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_on(rank: int, stop: bool = False) -> None:
    if int(os.environ["RANK"]) == rank:
        if stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)


def nothing() -> tuple[int, str, int]:
    return torch.get_num_threads(), os.getcwd(), os.getpid()


def unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("agent_store", ["True", None], ids=["an agent has the store", "rank 0 has the store"])
def test_results_come_back_by_rank(agent_store: str | None) -> None:
    env = {"TORCHELASTIC_USE_AGENT_STORE": agent_store}
    assert run_ranks(sum_ranks, 2, 10.0, scale=3.0, env=env) == [Answer(0, 23.0), Answer(1, 23.0)]


def test_one_rank_is_a_process_group_too() -> None:
    assert run_ranks(sum_ranks, 1, 1.0) == [Answer(0, 1.0)]


def test_each_rank_has_its_place_and_the_variables_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN_BY_RANKS", "yes")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    names += ("SEEN_BY_RANKS", "EXTRA")
    first, second = run_ranks(read_variables, 2, *names, env={"EXTRA": "1", "MASTER_ADDR": None})
    assert first == ["0", "0", "2", "2", None, "1", "yes", "1"]
    assert second == ["1", "1", "2", "2", None, "1", "yes", "1"]


def test_variables_may_depend_on_the_rank() -> None:
    assert run_ranks(read_variables, 2, "SLURM_PROCID", env=lambda rank: {"SLURM_PROCID": str(rank)}) == [["0"], ["1"]]


def test_each_rank_has_one_thread_and_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = run_ranks(nothing, 2)
    assert [result[:2] for result in results] == [(1, str(tmp_path))] * 2
    assert len({os.getpid(), *(result[2] for result in results)}) == 3


def read_null() -> None:
    ctypes.string_at(0)


def test_a_rank_costs_a_fraction_of_importing_torch() -> None:
    # What the process has computed since it was forked; not by the clock: the machine may be busy.
    assert max(run_ranks(time.process_time, 2)) < 0.5


# By what is seen: the job, the message, and what each rank that failed has to say.
FAILURES: dict[str, tuple[Any, int, tuple[Any, ...], dict[str, Any], str, dict[int, str]]] = {
    "a failing rank shows its traceback": (
        fail_on, 2, (1,), {}, "ValueError: boom on 1", {1: r"in fail_on"},
    ),
    "every failing rank is reported": (
        os.strerror, 2, ("not a number",), {}, "2 of 2 ranks failed", {0: "TypeError", 1: "TypeError"},
    ),
    "ranks left alone by a failing one are ended soon and say where they were": (
        wait_for_ever_unless, 2, (0,), {"grace_seconds": 0.5}, "boom",
        {0: "boom", 1: r"was still running 0.5 s after another rank had failed(.|\n)* in wait_for_ever_unless"},
    ),
    "a dead rank is named": (
        kill_self, 2, (1,), {}, r"rank 1 died without an answer: killed by signal 9 \(SIGKILL\)", {1: ""},
    ),
    "a crash shows where the rank was": (
        read_null, 1, (), {}, r"rank 0 died without an answer: killed by signal 11 \(SIGSEGV\)",
        {0: r"Segmentation fault(.|\n)* in read_null"},
    ),
    "a hanging rank is named with its stack": (
        sleep_on, 2, (1,), {"timeout": 1.5}, r"rank 1 had not finished after 1\.5 s", {1: "in sleep_on"},
    ),
    "a stopped rank is named": (
        sleep_on, 2, (0,), {"stop": True, "timeout": 1.5}, r"rank 0 had not finished after 1\.5 s", {0: "in sleep_on"},
    ),
    "a result that cannot travel is an error of its rank": (
        unpicklable, 1, (), {}, "pickle", {0: ""},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "world_size", "args", "options", "message", "said"), FAILURES.values(), ids=FAILURES
)
def test_a_job_that_fails_says_which_ranks_and_why(
    function: Any, world_size: int, args: Any, options: dict[str, Any], message: str, said: dict[int, str]
) -> None:
    with pytest.raises(RankFailure, match=message) as caught:
        run_ranks(function, world_size, *args, **options)
    # The rank that waits for the one of `fail_on` may break, too.
    told = set(caught.value.failures) - ({0} if function is fail_on else set())
    assert told == set(said)
    assert all(re.search(words, caught.value.failures[rank]) for rank, words in said.items())


def test_an_error_of_ranks_keeps_no_thread_of_their_store() -> None:
    run_ranks(nothing, 1)  # with which torch starts some
    before = {*os.listdir("/proc/self/task")}
    with pytest.raises(RankFailure) as caught:
        run_ranks(kill_self, 2, 1, outlives=True)
    assert {*os.listdir("/proc/self/task")} <= before, caught


def test_a_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="module-level function"):
        run_ranks(lambda: None, 1)


def tell_start_method() -> str:
    return multiprocessing.get_start_method()


def test_processes_of_a_rank_begin_as_those_of_a_script() -> None:
    (method,) = run_ranks(tell_start_method, 1)
    assert method == multiprocessing.get_all_start_methods()[0]  # the platform's own


# Stand-ins of a card, of packages that start CUDA when they are imported, and of others that import them.
FORKED_BESIDE_A_CARD = {
    "card.py": "import torch\ntorch.cuda.device_count = lambda: 1\n",
    "bitsandbytes.py": "import os\nSTARTED_IN = os.getpid()\n",
    "torchao.py": "import os\nSTARTED_IN = os.getpid()\n",
    "peft.py": "from importlib.util import find_spec\nif find_spec('bitsandbytes'):\n    import bitsandbytes\n",
    "model.py": "from importlib.util import find_spec\nif find_spec('torchao'):\n    import torchao\n",
    "ranks_of.py": (
        "import os\nfrom tests.ranks import preload, run_ranks\npreload('card', 'peft', 'model')\n"
        "def began() -> tuple:\n    import model, peft\n"
        "    return peft.bitsandbytes.STARTED_IN, model.torchao.STARTED_IN, os.getpid()\n"
        "if __name__ == '__main__':\n    import ranks_of\n    print(run_ranks(ranks_of.began, 2))\n"
    ),
}


def test_what_starts_cuda_is_imported_by_each_rank_and_not_before_it_is_forked(tmp_path: Path) -> None:
    for name, text in FORKED_BESIDE_A_CARD.items():
        (tmp_path / name).write_text(text)
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    command = [sys.executable, "ranks_of.py"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100
    )
    assert not ran.returncode, ran.stderr
    found = ast.literal_eval(ran.stdout)
    assert len(found) == 2
    for *started_in, rank in found:
        assert started_in == [rank, rank]


LEAKS = {
    "environment variable LEFT_BEHIND set to '1'": "os.environ['LEFT_BEHIND'] = '1'",
    "environment variable HOME removed": "del os.environ['HOME']",
    "thread 'left-behind'": "threading.Thread(target=threading.Event().wait, name='left-behind', daemon=True).start()",
    "an initialised process group": "dist.init_process_group('fake', rank=0, world_size=2, store=dist.HashStore())",
    "left_behind.txt": "open('left_behind.txt', 'w').close()",
    "torch default dtype = torch.float64": "torch.set_default_dtype(torch.float64)",
}
INNER = """
import os, sys, threading, torch, torch.distributed as dist, torch.testing._internal.distributed.fake_pg
sys.modules.pop("tests.ranks", None)  # whose server no test here needs

def test_clean(): pass
"""


def test_a_test_that_leaks_fails_and_the_others_do_not(tmp_path: Path) -> None:
    """One inner session for all leaks: every leaking test must fail for its own reason, and only it."""
    inner_path = tmp_path / "tests"
    inner_path.mkdir()
    settings = (ROOT / "tests" / "conftest.py").read_text()
    (inner_path / "conftest.py").write_text(settings.replace("_SETTLE_SECONDS = 2.0", "_SETTLE_SECONDS = 0.2"))
    leaking = [f"def test_leak_{number}(): {code}\n" for number, code in enumerate(LEAKS.values())]
    (inner_path / "test_inner.py").write_text(INNER + "".join(leaking))
    # Plain: plugins are imported already, and pytest would warn of each that it cannot rewrite it.
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--assert=plain", f"--rootdir={tmp_path}", str(tmp_path)]
    done = warm.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    # pytest counts the failing fixture beside the test that passed before it.
    assert f"{1 + len(LEAKS)} passed, {len(LEAKS)} errors" in done.stdout, done.stdout + done.stderr
    for number, leak in enumerate(LEAKS):
        section = done.stdout.split(f"ERROR at teardown of test_leak_{number} ")[1].split("____ ERROR")[0]
        assert "the test left behind: " in section
        assert leak in section
        assert ";" not in section, f"more than one leak was blamed on one test: {section}"


def test_collectives_that_are_compiled_for_this_torch_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiling(Exception):
        pass

    def refuse(*args: object, **kwargs: object) -> None:
        raise Compiling

    library = tmp_path / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    compile_collectives()
    (library.parent / "lock").touch()
    with pytest.raises(Compiling):
        compile_collectives()
    (library.parent / "lock").unlink()
    os.utime(library, (0, 0))
    with pytest.raises(Compiling):
        compile_collectives()


def compile_anew() -> str:
    """Have collectives compiled in a process that is forked with DeepSpeed, which takes 5 s of a core to import."""
    warm.fork_programs()
    with pytest.raises(pytest.exit.Exception) as ended:
        compile_collectives()
    return str(ended.value)


def test_a_lock_of_a_killed_compiler_ends_the_run_and_is_named(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    if not hasattr(cpp_extension, "FileBaton"):
        pytest.skip("a lock of the kernel's, which goes with its process: torch 2.14")
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    message = (
        f"waits for the lock {re.escape(str(lock))}.* no process on .* delete the folder {re.escape(str(lock.parent))}"
    )
    (said,) = run_ranks(compile_anew, 1, env={**warm.ALONE, "TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert re.search(message, said)


PROGRAM = """
import atexit, multiprocessing, os, signal, sys, threading
print(sys.argv[1:], __name__, sys.path[0], os.getcwd(), os.environ["OWN"], os.getsid(0) == os.getpid())
print(sorted(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
print(multiprocessing.current_process().name, multiprocessing.parent_process(), sys.stdin.read(), flush=True)
threading.Timer(0.1, print, ["late"]).start()
atexit.register(print, "last")
sys.excepthook = (lambda *error: sys.exit(76)) if sys.argv[1] == "hook" else sys.excepthook
exec({"text": "sys.exit('text')", "code": "sys.exit(7)", "killed": "os.kill(os.getpid(), signal.SIGKILL)",
      "ctrl-C": "raise KeyboardInterrupt", "end": ""}.get(sys.argv[1], "raise ValueError(3)"))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("ending", "kind"),
    crossed(["end", "text", "code", "error", "hook", "ctrl-C", "killed"], ["script", "-c", "-m"]),
)
def test_a_program_that_is_forked_is_as_one_that_is_started(kind: str, ending: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = {"script": ["program.py"], "-c": ["-c", PROGRAM], "-m": ["-m", "program"]}[kind]
    options = {"cwd": tmp_path, "env": {**os.environ, "OWN": "1"}, "input": "read", "start_new_session": True}
    options |= {"capture_output": True, "text": True}
    command = [sys.executable, *words, ending, "--lr", "1 e"]
    forked, started = warm.run(command, **options), subprocess.run(command, **options)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]
    assert "warm.py" not in forked.stderr
