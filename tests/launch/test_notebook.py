"""Training that is started from a running Python: real workers, forked from a process like a notebook's."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer import Accelerator, AcceleratorState, PartialState, debug_launcher, notebook_launcher
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.launch.rendezvous import BoundRendezvous
from tests.ranks import RankFailure, free_port, preload, run_ranks, wait_until
from tests.scenarios import Outcome, Scenarios

preload("accel_trainer.accelerator", "accel_trainer.launch.notebook", "tests.scenarios")

# Of a process that no launcher has started.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
ALONE: dict[str, str | None] = dict.fromkeys([*_VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"])
SCENARIOS = Scenarios(env=ALONE)


def run_all() -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as name:
        os.environ["TEST_FOLDER"] = name
        return SCENARIOS.run()


def results(name: str) -> Any:
    return SCENARIOS.results(name, run_all, world_size=1)[0]


def folder() -> Path:
    return Path(os.environ["TEST_FOLDER"])


def state_of_this_process() -> tuple[Any, ...]:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    files = {path.name for path in Path(tempfile.gettempdir()).glob("accel_trainer_*")}
    return dict(os.environ), handlers, files, threading.active_count(), multiprocessing.active_children()


def left_alone(call: Callable[[], Any]) -> bool:
    before = state_of_this_process()
    call()
    return state_of_this_process() == before


# --- what workers do -----------------------------------------------------------------------------------------------


def mean_of_ranks(name: str, factor: float) -> None:
    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor(factor * accelerator.process_index), "sum").item()
    facts = [accelerator.num_processes, accelerator.mixed_precision, str(accelerator.device), total]
    (folder() / f"{name}{accelerator.process_index}").write_text(repr(facts))


def facts(name: str, rank: int = 0) -> str:
    return (folder() / f"{name}{rank}").read_text()


@SCENARIOS.add
def with_options() -> Any:
    # The threads that compute this do not survive the fork.
    torch.set_num_threads(2)
    torch.randn(600, 600) @ torch.randn(600, 600)
    torch.randn(1_000_000).exp().sum()
    kept = left_alone(
        lambda: notebook_launcher(mean_of_ranks, ("two", 2.0), 2, mixed_precision="bf16", use_port=free_port())
    )
    return kept, [facts("two", rank) for rank in range(2)]


def test_a_function_runs_on_two_ranks_and_leaves_this_process_as_it_was():
    assert results("with_options") == (True, ["[2, 'bf16', 'cpu', 2.0]"] * 2)


@SCENARIOS.add
def from_a_cell() -> Any:
    cell = """
from accel_trainer import Accelerator, notebook_launcher
weights = torch.zeros(3)
class Parity(torch.nn.Linear):
    pass
def train(*rows):
    accelerator = Accelerator(cpu=True)
    model = Parity(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.tensor([rows[accelerator.process_index]])).sum())
    optimizer.step()
    weights[:2] = accelerator.unwrap_model(model).weight[0].detach()
    (folder / f"cell{accelerator.process_index}").write_text(repr(weights.tolist()))
notebook_launcher(train, ([1.0, 0.0], [0.0, 1.0]), num_processes=2)
"""
    namespace = {"__name__": "__main__", "torch": torch, "folder": folder()}
    kept = left_alone(lambda: exec(cell, namespace))
    return kept, [facts("cell", rank) for rank in range(2)], namespace["weights"].tolist()


def test_classes_functions_and_values_of_a_cell_are_there_in_the_workers():
    kept, found, here = results("from_a_cell")
    assert kept
    assert found == ["[0.5, 0.5, 0.0]"] * 2  # the mean of both ranks' gradients
    assert here == [0.0, 0.0, 0.0]


def fail_on(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == rank:
        raise LookupError(f"no sample 7 on rank {rank}")
    accelerator.wait_for_everyone()


def die(number: int) -> None:
    if Accelerator(cpu=True).process_index == 1:
        os.kill(os.getpid(), number)
    signal.pause()


def fail_once(name: str) -> None:
    first = folder() / name
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and not first.exists():
        first.touch()
        raise LookupError("once")
    accelerator.wait_for_everyone()


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ConfigError, ProcessGroupError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


@SCENARIOS.add
def failures() -> dict[str, Any]:
    before = state_of_this_process()
    with pytest.raises(ProcessGroupError) as caught:
        debug_launcher(fail_on, (1,))
    messages: dict[str, Any] = {
        "stores kept by the error": sum(isinstance(each, BoundRendezvous) for each in gc.get_objects()),
        "raised": f"{caught.typename}: {caught.value}",
        "killed": refused(lambda: debug_launcher(die, (signal.SIGKILL,))),
        "fp16": refused(lambda: notebook_launcher(mean_of_ranks, ("fp16", 1.0), 2, mixed_precision="fp16")),
        "restarted": notebook_launcher(fail_once, ("once",), 2, max_restarts=1),
    }
    messages["kept"] = state_of_this_process() == before
    return messages


def test_an_error_of_a_worker_comes_back_with_its_rank_and_traceback():
    found = results("failures")
    assert found["raised"].startswith("ProcessGroupError: rank 1 of 2 failed, which ended the job. In that process:\n")
    assert 'test_notebook.py", line ' in found["raised"]
    assert found["raised"].endswith("LookupError: no sample 7 on rank 1\n")
    assert "rank 1 of 2 ended outside of the function, by SIGKILL; out of memory, maybe" in found["killed"]
    assert "fp16 was asked for on the CPU" in found["fp16"]
    assert found["restarted"] is None
    assert found["stores kept by the error"] == 0
    assert found["kept"]


def wait_for_ever(name: str) -> None:
    (folder() / f"{name}{Accelerator(cpu=True).process_index}").touch()
    signal.pause()


@SCENARIOS.add
def interrupted() -> Any:
    marks = [folder() / f"waits{rank}" for rank in range(2)]

    def interrupt() -> None:
        try:
            wait_until(lambda: all(mark.exists() for mark in marks))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    before = state_of_this_process()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        debug_launcher(wait_for_ever, ("waits",))
    thread.join()
    return state_of_this_process() == before


def test_an_interrupt_ends_the_workers_and_is_an_interrupt_here():
    assert results("interrupted")


def speak(word: str) -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    accelerator.wait_for_everyone()  # one that ends while another still connects breaks gloo's full mesh
    print(f"{word} {rank} in {os.environ['TORCHELASTIC_RUN_ID']}")


@SCENARIOS.add
def with_the_agents_options() -> Any:
    port = free_port()
    written = folder() / "output"

    def launch() -> None:
        with _output_in(written):
            notebook_launcher(
                speak,
                ("here",),
                2,
                rdzv_backend="c10d",
                rdzv_endpoint=f"127.0.0.1:{port}",
                rdzv_conf={"join_timeout": 30},
                rdzv_id="cell7",
                log_line_prefix_template="<${rank}> ",
            )

    kept = left_alone(launch)
    with contextlib.redirect_stdout(io.StringIO()):  # which has no file that workers could write to
        message = refused(lambda: notebook_launcher(speak, ("nobody",), 2, log_line_prefix_template="<${rank}> "))
    return kept, sorted(written.read_text().splitlines()), message


@contextlib.contextmanager
def _output_in(path: Path) -> Iterator[None]:
    sys.stdout.flush()
    before = os.dup(1)
    with open(path, "w") as target:
        os.dup2(target.fileno(), 1)
    try:
        yield
        sys.stdout.flush()
    finally:
        os.dup2(before, 1)
        os.close(before)


def test_the_agent_can_be_told_where_to_meet_and_how_to_print():
    kept, lines, message = results("with_the_agents_options")
    assert kept
    assert lines == ["<0> here 0 in cell7", "<1> here 1 in cell7"]
    assert "ended outside of the function, with exit code 1, which ended the job. " in message
    assert "UnsupportedOperation: fileno" in message


def results_of_rank(kind: str) -> Any:
    rank = Accelerator(cpu=True).process_index
    if kind == "exit":
        sys.exit()
    return {"loss": torch.tensor(0.5 + rank), "rank": rank} if kind == "value" else (lambda: rank)


@SCENARIOS.add
def returning() -> Any:
    debug_launcher(mean_of_ranks, ("three", 1.0), num_processes=3)
    values = []
    kept = left_alone(lambda: values.append(notebook_launcher(results_of_rank, ("value",), 2)))
    with pytest.warns(UserWarning, match="cannot be pickled, so None is returned here: .*lambda") as warned:
        values += [debug_launcher(results_of_rank, ("function",)), debug_launcher(results_of_rank, ("exit",))]
    values.append(notebook_launcher(results_of_rank, ("value",), 1))
    return kept, facts("three", 2), values, [Path(warning.filename).name for warning in warned]


def test_the_value_of_rank_0_is_returned_and_there_may_be_any_number_of_ranks():
    of_rank_0 = {"loss": torch.tensor(0.5), "rank": 0}
    kept, of_three, values, warned = results("returning")
    assert kept
    assert of_three == "[3, 'no', 'cpu', 3.0]"
    assert (values, warned) == ([of_rank_0, None, None, of_rank_0], ["notebook.py"])


@SCENARIOS.add
def after_a_state() -> Any:
    PartialState()
    AcceleratorState()
    try:
        debug_launcher(mean_of_ranks, ("state", 1.0))
        return [facts("state", rank) for rank in range(2)], notebook_launcher(states_of_rank, (), 2)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def states_of_rank() -> tuple[int, bool]:
    PartialState()
    return AcceleratorState().num_processes, AcceleratorState().is_main_process


def test_workers_have_no_state_of_an_earlier_cell():
    assert results("after_a_state") == (["[2, 'no', 'cpu', 1.0]"] * 2, (2, True))


@SCENARIOS.add
def alone() -> Any:
    seen = []

    def look() -> None:
        accelerator = Accelerator(cpu=True)
        seen.append((os.getpid(), accelerator.num_processes, accelerator.mixed_precision))

    kept = left_alone(lambda: notebook_launcher(look, mixed_precision="bf16"))
    notebook_launcher(look)
    return kept, seen == [(os.getpid(), 1, "bf16"), (os.getpid(), 1, "no")]


def test_one_process_is_this_one():
    assert results("alone") == (True, True)


EXPECTED = "expected one process and one machine at least, and a node_rank from 0"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "precision": (
        {"mixed_precision": "fp61"},
        "notebook_launcher(mixed_precision=...) is 'fp61'; expected one of 'no', 'bf16', 'fp16', 'fp8'",
    ),
    "port": ({"use_port": "http"}, "use_port='http': expected the number of a port"),
    "endpoint": ({"rdzv_endpoint": "somewhere"}, "rdzv_endpoint='somewhere': expected address:port"),
    "none": ({"num_processes": 0}, f"num_processes=0, num_nodes=1, node_rank=0: {EXPECTED}"),
    "node": ({"num_nodes": 2, "node_rank": 2}, f"num_nodes=2, node_rank=2: {EXPECTED}"),
    "conf": ({"rdzv_conf": {"tiemout": 3}}, "rdzv_conf has 'tiemout', which the static rendezvous does not know"),
    "text": ({"num_processes": "2"}, f"num_processes='2', num_nodes=1, node_rank=0: {EXPECTED}"),
    "high": ({"use_port": 99999}, "notebook_launcher(use_port=...) is 99999; expected a port number from 0 to 65535"),
    "restarts": ({"max_restarts": -1}, "(max_restarts=...) is -1; expected a whole number of at least 0"),
    "interval": ({"monitor_interval": 0}, "(monitor_interval=...) is 0; expected a positive number of seconds"),
}


@SCENARIOS.add
def prevented() -> dict[str, str]:
    def launch(**options: Any) -> Callable[[], None]:
        return lambda: notebook_launcher(mean_of_ranks, ("never", 1.0), **{"num_processes": 2, **options})

    messages = {name: refused(launch(**options)) for name, (options, _) in WRONG.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        messages["few"] = refused(launch(num_processes=3))
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        messages["used"] = refused(launch())
    accelerator = Accelerator(cpu=True)
    messages["accelerator"] = refused(launch())
    del accelerator
    os.environ.update(RANK="0", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="outer")
    messages["nested"] = refused(launch())
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    messages["group"] = refused(launch())
    torch.distributed.destroy_process_group()
    assert not list(folder().glob("never*"))
    return messages


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, message) for name, (_, message) in WRONG.items()),
        ("few", "num_processes=3 on this machine, which has 2 GPU(s); start at most 2"),
        ("used", "this process has used a GPU, and workers forked from it could not; restart"),
        ("accelerator", "there is an Accelerator in this process, made outside of the function that is launched"),
        ("nested", "this is already rank 0 of 2 of another launcher"),
        ("group", "this process has joined a process group, which its workers would share"),
    ],
)
def test_what_cannot_be_started_is_refused_before_a_worker_is(name: str, message: str):
    assert message in results("prevented")[name]


def test_a_variable_that_asks_for_the_cpu_counts_no_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("ACCEL_TRAINER_USE_CPU", "true")
    seen: list[int] = []
    notebook_launcher(lambda: seen.append(os.getpid()))
    assert seen == [os.getpid()]


def one_of_two_machines(port: int) -> None:
    node = int(os.environ.pop("TEST_NODE"))
    notebook_launcher(mean_of_ranks, (f"node{node}_", 1.0), 1, use_port=port, node_rank=node, num_nodes=2, use_cpu=True)


def test_two_machines_form_one_job(tmp_path: Path):
    def environ(rank: int) -> dict[str, str | None]:
        return {**ALONE, "TEST_FOLDER": str(tmp_path), "TEST_NODE": str(rank), "GLOO_SOCKET_IFNAME": "lo"}

    run_ranks(one_of_two_machines, 2, free_port(), env=environ)
    assert (tmp_path / "node0_0").read_text() == (tmp_path / "node1_1").read_text() == "[2, 'no', 'cpu', 1.0]"


def tell_pid_and_sleep(directory: str) -> None:
    path = Path(directory, f"new{os.environ['RANK']}")
    path.write_text(str(os.getpid()))
    path.rename(path.with_name(f"pid{os.environ['RANK']}"))
    time.sleep(60)


def launch_sleepers(directory: str) -> None:
    tempfile.tempdir = directory  # what it keeps there stays behind
    Path(directory, "parent").write_text(str(os.getpid()))
    notebook_launcher(tell_pid_and_sleep, (directory,), num_processes=2, use_cpu=True)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells processes of their parent's end")
def test_workers_end_with_a_kernel_that_is_killed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(run_ranks, launch_sleepers, 1, str(tmp_path), env=ALONE, timeout=90)
        pids = [tmp_path / f"pid{rank}" for rank in range(2)]
        wait_until(lambda: all(path.exists() for path in pids), 60)
        os.kill(int((tmp_path / "parent").read_text()), signal.SIGKILL)
        wait_until(lambda: not any(Path("/proc", path.read_text()).exists() for path in pids), 60)
        with pytest.raises(RankFailure, match="killed by signal 9"):
            answer.result()
