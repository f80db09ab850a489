"""Real launches: what the workers are told, how signals travel, and with which code a job ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.fsdp import FSDPModule

from tests import warm
from tests.cells import beyond, selected
from tests.launches import launch, run_command
from tests.ranks import RankFailure, ask_jobs, preload, run_ranks, wait_until
from tests.warm import COLD

preload("accel_trainer.accelerator")

ROOT = Path(__file__).resolve().parents[2]
TWO = ("--cpu", "--num_processes", "2")


def write(folder: Path, text: str, name: str = "script.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def run_and_tell_pid(words: list[str], output: str, pid_file: str) -> int:
    Path(pid_file).write_text(str(os.getpid()))
    return run_command(words, output)


class Background:
    """A launcher that runs beside the test, in a process that has torch imported already."""

    def __init__(self, thread: ThreadPoolExecutor, folder: Path) -> None:
        self._thread, self._folder = thread, folder

    def start(self, *words: str, **env: str) -> None:
        output, pid_file = str(self._folder / "output.txt"), str(self._folder / "pid.txt")
        environ = {"HF_HOME": str(self._folder), "TORCHELASTIC_USE_AGENT_STORE": None, "OMP_NUM_THREADS": None, **env}
        call = (run_and_tell_pid, 1, ["launch", *words], output, pid_file)
        self._answer = self._thread.submit(run_ranks, *call, env=environ, timeout=90)

    def send_signal(self, number: int) -> None:
        os.kill(int((self._folder / "pid.txt").read_text()), number)

    def wait(self) -> tuple[int, str]:
        """Return the exit code, and what the launcher and its workers wrote."""
        [code] = self._answer.result()
        return code, (self._folder / "output.txt").read_text()


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Background]:
    with ThreadPoolExecutor(1) as thread:
        yield Background(thread, tmp_path)
    if (tmp_path / "output.txt").exists():
        print((tmp_path / "output.txt").read_text())  # shown where the test fails


REPORT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR", "CUSTOMIZED")
facts = {"argv": sys.argv[1:], "pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0))}
facts |= {name: os.environ.get(name) for name in names}
with open(os.path.join(os.path.dirname(__file__), f"facts{os.environ.get('RANK', '')}.json"), "w") as target:
    json.dump(facts, target)
"""


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def facts(folder: Path, rank: str = "") -> dict[str, object]:
    return json.loads((folder / f"facts{rank}.json").read_text())


def test_one_process_takes_the_place_of_the_launcher_which_has_not_imported_torch(tmp_path: Path) -> None:
    script = write(tmp_path, f"{REPORT}sys.exit(85)")
    command = [sys.executable, "-X", "importtime", "-m", "accel_trainer", "launch", "--cpu", script, "--lr", "--cpu"]
    environ = {**os.environ, "HF_HOME": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ) as process:
        _, imports = process.communicate()
    assert process.returncode == 85
    seen = facts(tmp_path)
    assert (seen["pid"], seen["argv"], seen["WORLD_SIZE"]) == (process.pid, ["--lr", "--cpu"], None)
    assert "accel_trainer.launch.flags" in imports
    assert " torch" not in imports


def test_two_processes_are_two_ranks_with_the_script_s_arguments_and_the_user_s_sitecustomize(tmp_path: Path) -> None:
    write(tmp_path, REPORT, "trainer_module.py")
    own_site = write(tmp_path, "import os; os.environ['CUSTOMIZED'] = __file__", "sitecustomize.py")
    words = ["--num_processes", "9", "--", "-m", "a b"]
    own = ["--num_cpu_threads_per_process", "3", "-m", "trainer_module"]
    code, output = launch(tmp_path, *TWO, *own, *words, PYTHONPATH=str(tmp_path))
    assert (code, output) == (0, "")
    for rank in ("0", "1"):
        seen = facts(tmp_path, rank)
        assert (seen["argv"], seen["OMP_NUM_THREADS"], seen["MASTER_ADDR"]) == (words, "3", "127.0.0.1")
        assert [seen[name] for name in PLACE] == [rank, rank, "2", "2"]
        assert seen["CUSTOMIZED"] == own_site


LOOPBACK = """
import os, pathlib, sys
import torch, torch.distributed as dist

def listening(pid):
    inodes = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except OSError:
            pass
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/{pid}/net/{table}").readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                yield fields[1].split(":")[0]

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
addresses = [*listening(os.getpid()), *listening(os.getppid())]
assert len(addresses) > 1, addresses
allowed = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
outside = [address for address in addresses if address not in allowed]
sys.stdout.write(f"rank {dist.get_rank()}: sum {total.item():g}, listening outside loopback: {outside}\\n")
dist.barrier()
dist.destroy_process_group()
"""


def test_two_gloo_ranks_on_the_cpu_listen_on_loopback_only(tmp_path: Path) -> None:
    code, output = launch(tmp_path, *TWO, write(tmp_path, LOOPBACK))
    assert code == 0, output
    assert sorted(output.splitlines()) == [f"rank {rank}: sum 3, listening outside loopback: []" for rank in range(2)]


# Rank 0 would outlast the time that the launch is given.
FAILED = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(3600)\n"


STOPPED = """
import os, pathlib, signal, sys, time
if os.environ["RANK"] == "0":
    pathlib.Path(__file__).with_name("ended").write_text(str(time.time()))
    sys.exit(75)
os.kill(os.getpid(), signal.SIGSTOP)
"""


KILLED = "import os, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), 9)\ntime.sleep(60)\n"


LEAVE_EARLY = """
import os, pathlib, sys, time
note = pathlib.Path(__file__).with_name("pid")
if os.environ["RANK"] == "1":
    note.with_suffix(".new").write_text(str(os.getpid()))
    note.with_suffix(".new").rename(note)
    os._exit(0)
while not note.exists():
    time.sleep(0.02)
status = pathlib.Path("/proc", note.read_text(), "stat")
while status.exists() and status.read_text().rpartition(") ")[2][0] not in "ZX":
    time.sleep(0.02)
time.sleep(0.5)  # the launcher may be late to see it on a busy machine
sys.exit(1)
"""


RESTART = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(f"rank {os.environ['RANK']} of {total.item():g} in attempt {attempt}\\n")
"""


LOST = """
import os, signal, sys, time
size, rank, attempt = os.environ["WORLD_SIZE"], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(f"rank {rank} of {size} in attempt {attempt}\\n")
sys.stdout.flush()
if attempt == "0":
    if rank == "1":
        sys.exit(9)  # as a rule, for the end of another
    os.kill(os.getpid(), signal.SIGKILL) if rank in "23" else time.sleep(60)
sys.exit(0 if attempt == "2" else 3)
"""


OUTLIVED = """
import contextlib, os, signal, sys, torch
from accel_trainer import Accelerator
accelerator = Accelerator(cpu=True)
in_window = accelerator.accumulate if sys.argv[1] == "accumulate" else contextlib.nullcontext
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
samples = torch.arange(24.0).reshape(24, 1)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(samples, 2))
number = 0
for batch in loader:
    if number == 2 and os.environ["RANK"] == sys.argv[2] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    with in_window(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    number += 1
place = f"{accelerator.process_index} of {accelerator.num_processes}"
said = f"rank {os.environ['RANK']} is {place}, {number} micro-batches"
sys.stdout.write(said + "\\n")
accelerator.end_training()
"""


PREEMPTED = """
import os, signal, sys, time
from accel_trainer import Accelerator
accelerator = Accelerator(cpu=True)
with accelerator.preemptible():
    for step in range(1000):
        time.sleep(0.02)
        if step == 10 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if accelerator.should_stop:
            break
"""


ENDED_LATER = """
import os, signal, sys, time, torch
from accel_trainer import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
samples = torch.arange(4000.0).reshape(4000, 1) / 4000
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(samples, 2))
updates = 0
with accelerator.preemptible():
    for batch in loader:
        if updates == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        updates += accelerator.sync_gradients
        time.sleep(0.02)
        if updates == 20 and os.environ["RANK"] == "0":
            sys.exit(3) if sys.argv[1] == "fails" else os.kill(os.getppid(), signal.SIGTERM)
            updates += 1
        if accelerator.should_stop:
            accelerator.save_state(__file__ + ".state")
            accelerator.print("saved with", accelerator.num_processes)
            break
"""


begins_again = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13 begins a forward of FSDP2 again"
)


class Job(NamedTuple):
    """What is launched, and how it ends."""

    words: str
    """Of the launcher."""
    script: str
    arguments: str = ""
    code: int = 0
    says: tuple[str, ...] = ()
    """What the launcher and its workers write once, as regular expressions."""
    marks: tuple[pytest.MarkDecorator, ...] = ()


JOBS = {
    "the worker that failed first gives its code": Job(
        "--num_processes 2",
        FAILED,
        code=7,
        says=(r"\A.*rank 1 \(pid \d+\).* failed with exit code 7; this ended the job.*\n?\Z",),
    ),
    "one that was killed gives 128 and its signal": Job(
        "--num_processes 2", KILLED, code=137, says=("was ended by SIGKILL, exit code 137",)
    ),
    "one that left early without error is named beside the one that failed": Job(
        "--num_processes 2",
        LEAVE_EARLY,
        code=1,
        says=(r"rank 0 \(pid ", r"rank 1 had ended with code 0 \d+\.\d s before that"),
        marks=(pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc"),),
    ),
    "workers are started again and find each other again": Job(
        "--num_processes 2 --max_restarts 1",
        RESTART,
        says=(
            r"failed with exit code 3; starting the workers again \(1 of 1 restarts\)",
            "rank 0 of 2 in attempt 1",
            "rank 1 of 2 in attempt 1",
        ),
    ),
    "workers that fail again end the job": Job(
        "--num_processes 2 --max_restarts 1", "import sys; sys.exit(3)", code=3, says=("starting the workers again",)
    ),
    "workers that are lost are not replaced down to the fewest": Job(
        "--num_processes 2:4 --max_restarts 2 --monitor_interval 2",
        LOST,
        says=(
            r"starting the workers again on 2 rank\(s\) instead of 4 \(1 of 2 restarts\)",
            r"failed with exit code 3; starting the workers again \(2 of 2 restarts\)",
            "rank 1 of 2 in attempt 2",
        ),
    ),
    "workers go on without one that is killed": Job(
        "--num_processes 3 --on_rank_loss continue",
        OUTLIVED,
        "accumulate 0",
        says=(
            r"rank 0 \(pid \d+\) was ended by SIGKILL, .*; the 2 that are left go on without it",
            "rank 0 of the 3 that the launcher has started is lost; the 2 that are left go on after update 2",
            # 2 updates of the 4, the micro-batch in which the rank was lost, and 2 for each of those that are left.
            "rank 1 is 0 of 2, 7 micro-batches",
            "rank 2 is 1 of 2, 7 micro-batches",
        ),
    ),
    "workers go on without the replica of one that is killed": Job(
        "--num_processes 4 --use_fsdp --parallel_dp_replicate_size 2 --on_rank_loss continue",
        OUTLIVED,
        "accumulate 3",
        says=(
            r"rank 3 \(pid \d+\) was ended by SIGKILL, .*; the 2 that are left go on without it",
            r"rank 2 ends: another rank of its replica \(dp_replicate_size\) is lost",
            "rank 2, 3 of the 4 that the launcher has started is lost; the 2 that are left go on after update 2",
            "rank 0 is 0 of 2, 5 micro-batches",
            "rank 1 is 1 of 2, 5 micro-batches",
        ),
        marks=(begins_again,),
    ),
    "workers that cannot go on without another are started again": Job(
        "--num_processes 2 --on_rank_loss continue --max_restarts 1",
        OUTLIVED,
        "by_hand 1",
        says=(
            r"the others cannot go on: no update is under way, or it has backward\(\) outside of accumulate\(\)",
            r"starting the workers again \(1 of 1 restarts\)",
            "rank 1 is 1 of 2, 6 micro-batches",
        ),
    ),
    "one that fails behind a loss gives its code": Job(
        "--num_processes 3 --on_rank_loss continue",
        ENDED_LATER,
        "fails",
        code=3,
        says=(r"rank 0 \(pid \d+\) failed with exit code 3; this ended the job",),
    ),
    "workers are asked to end behind a loss": Job(
        "--num_processes 3 --on_rank_loss continue",
        ENDED_LATER,
        "asked",
        code=85,
        says=("saved with 2", "the process ends with exit code 85"),
    ),
    "one is stopped": Job("--num_processes 2", STOPPED, code=75),
    "both are asked to end": Job("--num_processes 2 --max_restarts 1", PREEMPTED, code=85),
}


class Launched(NamedTuple):
    """How a job has ended, and when."""

    code: int
    output: str
    folder: Path
    time: float


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Launched]:
    """Launch the jobs that wait for most of their time, some at once."""
    returned = selected(request, "test_another_is_started_in_the_place_of_a_worker_that_is_killed")
    jobs = {**JOBS, **{f"{action} {size}": replacing(action, size) for action, size in returned}}
    signalled = {**SAVING, **ENDING}
    folders = {name: tmp_path_factory.mktemp("launched") for name in (*jobs, *signalled)}

    def run(name: str) -> Launched:
        if name in signalled:
            return interrupt(folders[name], *signalled[name])
        words, script, arguments, *_ = jobs[name]
        given = "--cpu", *words.split(), write(folders[name], script), *arguments.split()
        return Launched(*launch(folders[name], *given, timeout=150), folders[name], time.time())

    return ask_jobs(run, folders)


@pytest.mark.parametrize("name", [pytest.param(name, marks=job.marks) for name, job in JOBS.items()])
def test_how_a_job_ends(name: str, launched: Callable[[str], Launched]) -> None:
    job = launched(name)
    assert job.code == JOBS[name].code, job.output
    for text in JOBS[name].says:
        assert len(re.findall(text, job.output)) == 1, job.output


def test_r10_a_worker_that_does_not_end_with_those_that_found_it_hung_is_killed_and_named(
    launched: Callable[[str], Launched],
) -> None:
    job = launched("one is stopped")
    assert re.search(r"rank 0 \(pid \d+\) failed with exit code 75; this ended the job", job.output)
    assert "rank 1 hung: it did not end with the others, and was killed" in job.output
    seconds = job.time - float((job.folder / "ended").read_text())
    assert seconds < 10  # 3.2 s on a quiet machine; torch waits 30 s for it


def test_r9_workers_that_were_asked_to_end_are_not_started_again(launched: Callable[[str], Launched]) -> None:
    output = launched("both are asked to end").output
    assert output.count("the process ends with exit code 85") == 1  # rank 0 alone logs
    assert "starting the workers again" not in output


RETURNED = """
import os, signal, sys, time, torch
from accel_trainer import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
samples = torch.arange(6000.0).reshape(6000, 1) / 6000
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(samples, 2))
size = os.environ["WORLD_SIZE"]
if os.environ.get("ACCEL_TRAINER_RETURNS_AS", "").startswith(f"{size}/{size}/"):
    sys.exit(3)
if sys.argv[1] != "forget":
    accelerator.load_state("nowhere", missing_ok=True)
is_first, updates, after = "ACCEL_TRAINER_RETURNS_AS" not in os.environ, 0, 0
for batch in loader:
    if is_first and updates == 2 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    updates += accelerator.sync_gradients
    time.sleep(0.05)
    after += accelerator.num_processes == int(size) and (updates > 3 or not is_first)
    if after == 3 or updates > 3 and sys.argv[1] == "forget":
        break
weight = accelerator.unwrap_model(model).weight
weight = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).item()
said = f"rank {os.environ['RANK']} is {accelerator.process_index} of {accelerator.num_processes}, {weight:.12f}"
sys.stdout.write(said + "\\n")
accelerator.end_training()
"""


def replacing(action: str, size: int) -> Job:
    shards = " --use_fsdp --parallel_dp_replicate_size 2" * (action == "shards")
    return Job(f"--num_processes {size}{shards} --on_rank_loss replace --max_restarts 2", RETURNED, action)


# A rank returns beside one, or beside several in tests/accelerator/test_lost_ranks.py, too.
@pytest.mark.parametrize(
    ("action", "size"),
    [beyond(("load", 3)), ("load", 2), ("forget", 3), pytest.param("shards", 4, marks=begins_again)],
)
def test_another_is_started_in_the_place_of_a_worker_that_is_killed(
    action: str, size: int, launched: Callable[[str], Launched]
) -> None:
    """The first of them fails before it has joined the others, which do not notice."""
    code, output, *_ = launched(f"{action} {size}")
    assert code == 0, output
    if action == "forget":
        assert "go on without it, and none is started in its place: the loop has not called load_state()" in output
        return
    left = 2 if action == "shards" else size - 1
    assert f"the {left} that are left go on without it; another is started in its place (1 of 2)" in output
    assert re.search(
        rf"failed with exit code 3; the {left} .* go on without it; another .* in its place \(2 of 2\)", output
    )
    assert re.search(
        rf"in the place of a lost rank is rank {left} of {size} behind update \d+, for which the others waited \d\.\d",
        output,
    )
    found = dict(re.findall(r"rank (\d) is (\d of \d, .*)", output))
    weight = found["0"].rpartition(", ")[2]
    assert found == {str(rank): f"{(rank + left) % size} of {size}, {weight}" for rank in range(size)}


SEEN_LATE = """
import os, sys, time
from accel_trainer.launch.cli import main
from accel_trainer.launch import torchrun
watch = torchrun._Agent._watch
def watch_late(agent, rank, pid):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    time.sleep(1.5)
    watch(agent, rank, pid)
torchrun._Agent._watch = watch_late
sys.exit(main())
"""


def test_workers_go_on_without_one_whose_end_is_seen_late(tmp_path: Path) -> None:
    script, launcher = write(tmp_path, OUTLIVED), write(tmp_path, SEEN_LATE, "launcher.py")
    words = "launch", "--cpu", "--num_processes", "3", "--on_rank_loss", "continue", script, "accumulate", "0"
    ended = warm.run([sys.executable, launcher, *words], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "the 2 that are left go on without it" in ended.stderr


SIGNALS = """
import os, pathlib, signal, sys, time
folder, how = pathlib.Path(__file__).parent, sys.argv[1]
rank = os.environ["RANK"]
def save(number, frame):
    signal.signal(number, signal.SIG_IGN if how == "deaf" else save)
    time.sleep(0.3 * (1 + int(rank)))
    (folder / f"saved{rank}").touch()
    if how == "save":
        os._exit(85)
if how != "default":
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGUSR1, save)
(folder / f"ready{rank}").touch()
while True:
    time.sleep(0.1)
"""


def both_are(what: str, folder: Path) -> bool:
    """Return whether both workers are "ready", or have "saved"."""
    return all((folder / f"{what}{rank}").exists() for rank in range(2))


def interrupt(folder: Path, script: str, how: str, numbers: list[signal.Signals], seconds: int) -> Launched:
    """Launch two workers with some seconds to save, and send the launcher signals once both are ready."""
    own_time = {} if seconds == 120 else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds)}
    with ThreadPoolExecutor(1) as thread:
        job = Background(thread, folder)
        job.start(*TWO, write(folder, script), how, **own_time)
        wait_until(lambda: both_are("ready", folder), 60)
        for number in numbers:
            job.send_signal(number)
            time.sleep(0.05)
        return Launched(*job.wait(), folder, time.time())


INTERRUPTED = """
import pathlib, time
from accel_trainer import Accelerator
rank = Accelerator(cpu=True).process_index
(pathlib.Path(__file__).parent / f"ready{rank}").touch()
time.sleep(60)
"""
SAVING = {
    "SIGUSR1": (SIGNALS, "save", [signal.SIGUSR1], 120),
    "twice at once is one": (SIGNALS, "save", [signal.SIGTERM, signal.SIGTERM], 120),
    "so are two of other names": (SIGNALS, "save", [signal.SIGTERM, signal.SIGINT], 120),
}
ENDING = {
    "without a handler": (SIGNALS, "default", [signal.SIGTERM], 120),
    "when their time is used up": (SIGNALS, "deaf", [signal.SIGTERM], 1),
    "by ctrl-C": (INTERRUPTED, "", [signal.SIGINT], 120),
}


@pytest.mark.parametrize("name", SAVING)
def test_workers_get_the_signal_and_time_to_save_and_their_code_is_the_job_s(
    name: str, launched: Callable[[str], Launched]
) -> None:
    job = launched(name)
    assert job.code == 85, job.output
    assert both_are("saved", job.folder)


@pytest.mark.parametrize(("name", "code"), [*zip(ENDING, (128 + signal.SIGTERM, 137, 130), strict=True)])
def test_workers_that_do_not_save_end_with_the_code_of_their_signal(
    name: str, code: int, launched: Callable[[str], Launched]
) -> None:
    job, (*_, [number], seconds) = launched(name), ENDING[name]
    assert job.code == code
    begin = f"accel-trainer launch: {number.name} passed on to the workers, which have {seconds} s to end"
    assert job.output.startswith(f"{begin}; another signal ends them at once")


@pytest.mark.parametrize("number", [signal.SIGINT, beyond(signal.SIGTERM)])
def test_workers_save_although_nobody_reads_what_the_launcher_says(
    tmp_path: Path, background: Background, number: signal.Signals
) -> None:
    output = tmp_path / "output.txt"
    os.mkfifo(output)
    reader = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
    background.start(*TWO, write(tmp_path, SIGNALS.replace("SIGUSR1", "SIGINT")), "save")
    wait_until(lambda: both_are("ready", tmp_path), 60)
    os.close(reader)  # `| tee log` ends with the same ctrl-C
    output.unlink()
    output.touch()
    background.send_signal(number)
    assert background.wait()[0] == 85
    assert both_are("saved", tmp_path)


LOST_SIGNAL = """
import os, pathlib, sys, weakref
from accel_trainer.launch.cli import main
from accel_trainer.launch import torchrun
raise_signal = torchrun._raise_signal
class Owner:
    pass
def raise_in_callback(number, frame):
    owner = Owner()
    ref = weakref.ref(owner, lambda _: raise_signal(number, frame))
    del owner
torchrun._raise_signal = raise_in_callback
pathlib.Path(__file__).with_name("pid.txt").write_text(str(os.getpid()))
sys.exit(main())
"""


def test_a_signal_that_comes_where_python_ignores_errors_is_passed_on(tmp_path: Path) -> None:
    """In a weakref's callback, or a finalizer."""
    words = [sys.executable, write(tmp_path, LOST_SIGNAL, "launcher.py"), "launch", *TWO, write(tmp_path, SIGNALS)]
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(warm.run, [*words, "save"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        wait_until(lambda: both_are("ready", tmp_path), 60)
        os.kill(int((tmp_path / "pid.txt").read_text()), signal.SIGTERM)
    assert "Exception ignored in" in ended.result().stderr
    assert ended.result().returncode == 85, ended.result().stderr
    assert (tmp_path / "saved1").exists()


TELL_PID = "(folder / ('pid' + os.environ['RANK'])).write_text(str(os.getpid()))\n"


def test_workers_of_a_killed_launcher_save_and_end(tmp_path: Path, background: Background) -> None:
    # Workers can be ready before their pids have come to who ends them in the place of the launcher, and warm ones are.
    script = f"import os, pathlib, time\ntime.sleep(1)\nfolder = pathlib.Path(__file__).parent\n{TELL_PID}{SIGNALS}"
    background.start(*TWO, write(tmp_path, script), "save", **{COLD: "1"})
    wait_until(lambda: both_are("ready", tmp_path), 60)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    background.send_signal(signal.SIGKILL)
    wait_until(lambda: both_are("saved", tmp_path), 60)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
    with pytest.raises(RankFailure, match="killed by signal 9"):
        background.wait()
    text = (tmp_path / "output.txt").read_text()
    assert "the launcher was killed; its workers get SIGTERM, and have 120 s to end" in text


def test_a_second_signal_ends_workers_that_do_not_listen(tmp_path: Path, background: Background) -> None:
    background.start(*TWO, write(tmp_path, SIGNALS), "deaf", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3600")
    wait_until(lambda: both_are("ready", tmp_path), 60)
    background.send_signal(signal.SIGTERM)
    wait_until(lambda: both_are("saved", tmp_path), 60)
    background.send_signal(signal.SIGTERM)
    code, output = background.wait()
    assert code == 137, output


def test_logs_are_kept_in_a_folder_and_shown(tmp_path: Path) -> None:
    script = write(tmp_path, "import os\nprint('hello from', os.environ['RANK'])\n")
    code, output = launch(tmp_path, *TWO, "--log_dir", str(tmp_path / "logs"), "--role", "worker", script)
    assert code == 0
    assert "[worker0]:hello from 0" in output
    kept = sorted(path.read_text() for path in tmp_path.glob("logs/**/stdout.log"))
    assert kept == ["hello from 0\n", "hello from 1\n"]


def test_tee_without_a_folder_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    script = write(tmp_path, "print('hello')")
    code, output = launch(tmp_path, *TWO, "--tee", "3", script, TMPDIR=str(tmp_path / "temporary"))
    assert (code, output.count("hello"), list((tmp_path / "temporary").iterdir())) == (0, 2, [])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores")
def test_cpu_affinity_gives_each_rank_cores_of_its_own(tmp_path: Path) -> None:
    # The worker is bound after it was started: it may have read its first line by then.
    waiting = f"""
import os, time
end = time.monotonic() + 30
while len(os.sched_getaffinity(0)) == {len(os.sched_getaffinity(0))} and time.monotonic() < end:
    time.sleep(0.02)
"""
    script = write(tmp_path, waiting + REPORT)
    # Without --cpu: a machine without a GPU is one all the same.
    words = ("--num_processes", "2", "--enable_cpu_affinity", "true", script)
    assert launch(tmp_path, *words, CUDA_VISIBLE_DEVICES="")[0] == 0
    first, second = (facts(tmp_path, rank)["cores"] for rank in ("0", "1"))
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert min(len(first), len(second)) > 0 == len(set(first) & set(second))


def test_a_program_runs_without_python(tmp_path: Path) -> None:
    script = write(tmp_path, "#!/bin/sh\necho rank $RANK\nexit 4\n", "run.sh")
    os.chmod(script, 0o755)
    code, output = launch(tmp_path, *TWO, "--no_python", script)
    assert code == 4
    assert "rank " in output
