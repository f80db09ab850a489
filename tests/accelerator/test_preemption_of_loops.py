"""Loops that a signal ends: all ranks leave at the same update, save, end with code 85, and a resume is exact."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.kwargs import DataLoaderConfiguration
from accel_trainer.runtime import preemption
from accel_trainer.runtime.preemption import PreemptedExit
from tests.launches import launch, read_samples
from tests.loops import take_update
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")

NUM_UPDATES = 12
LOADERS = DataLoaderConfiguration(use_stateful_dataloader=True)


def train(
    folder: str, signalled: dict[int, int], in_background: bool = False, grace: float | None = None
) -> dict[str, Any]:
    """Train, from the last state if there is one.

    Args:
        signalled: by rank, the update in which it gets SIGTERM.
        grace: how long it has from then on.
    """
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, project_dir=folder, gradient_accumulation_steps=2, dataloader_config=LOADERS,
        config={"preemption": {"grace_seconds": grace}},
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(2 * 2 * NUM_UPDATES * accelerator.num_processes, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 2, shuffle=True))
    accelerator.project_configuration.automatic_checkpoint_naming = True
    updates, code = [0], None
    accelerator.load_state(missing_ok=True)
    seen = []
    try:
        with accelerator.preemptible():
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    take_update(model(batch).square().mean(), optimizer, accelerator)
                seen.append(batch)
                if accelerator.sync_gradients:
                    updates[0] += 1
                    if signalled.get(accelerator.process_index) == updates[0]:
                        os.kill(os.getpid(), signal.SIGTERM)
                if accelerator.should_stop:
                    accelerator.save_state(async_=in_background)
                    break
    except PreemptedExit as ended:
        code = ended.code
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return {"code": code, "updates": updates[0], "seen": torch.cat(seen), "weights": weights}


def train_all(base: str) -> dict[str, Any]:
    results: dict[str, Any] = {"whole": train(f"{base}/whole", {})}
    results["late"] = train(f"{base}/late", {1: 5}, grace=1e-6)
    for name, signalled in {"one": {1: 5}, "apart": {0: 4, 1: 5}, "both": {0: 6, 1: 6}}.items():
        folder = f"{base}/{name}"
        results[name] = train(folder, signalled, in_background=name == "one"), train(folder, {})
    return results


def compare(results: dict[str, Any], name: str) -> int:
    (ended, resumed), whole = results[name], results["whole"]
    assert (ended["code"], resumed["code"]) == (85, None)
    assert torch.equal(torch.cat([ended["seen"], resumed["seen"]]), whole["seen"])
    for mine, other in zip(resumed["weights"], whole["weights"], strict=True):
        assert torch.equal(mine, other)
    return len(ended["seen"])


def test_r9_all_ranks_leave_a_loop_at_one_place_and_go_on_from_it(tmp_path: Path) -> None:
    first, second = run_ranks(train_all, 2, str(tmp_path), timeout=100)
    for name in ("one", "apart", "both"):
        assert compare(first, name) == compare(second, name) > 0
    # Rank 0 got no signal, and has all the time that there is.
    for late in (first["late"], second["late"]):
        assert late["code"] == 85
        assert 5 <= late["updates"] < NUM_UPDATES
    assert not (tmp_path / "late" / "checkpoints").exists()


def alone(base: str) -> dict[str, Any]:
    with pytest.raises(ConfigError, match=r"should_stop was asked outside of preemptible\(\)"):
        Accelerator(cpu=True).should_stop  # noqa: B018
    return {"whole": train(f"{base}/whole", {}), "one": (train(f"{base}/one", {0: 3}), train(f"{base}/one", {}))}


def test_r9_one_process_leaves_its_loop_too(tmp_path: Path) -> None:
    [results] = run_ranks(alone, 1, str(tmp_path), env={"RANK": None, "WORLD_SIZE": None})
    assert compare(results, "one") == 2 * 2 * 3


def be_late(folder: str) -> None:
    """Give rank 0 a signal when rank 1 has left the loop."""
    accelerator = Accelerator(cpu=True)
    with pytest.raises(KeyboardInterrupt) if accelerator.is_main_process else nullcontext(), accelerator.preemptible():
        for update in range(3):
            if accelerator.is_main_process and update == 2:
                while not Path(folder, "left").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)
            assert not accelerator.should_stop
    Path(folder, "left").touch()
    accelerator.wait_for_everyone()


@pytest.mark.multirank
def test_a_signal_after_another_ranks_last_look_acts_as_ever(tmp_path: Path) -> None:
    run_ranks(be_late, 2, str(tmp_path), timeout=40)


def test_a_script_that_catches_the_end_is_interrupted_as_ever_afterwards(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True)

    def loop() -> None:
        with accelerator.preemptible():
            os.kill(os.getpid(), signal.SIGINT)
            assert "SIGINT came: the run saves and ends where all ranks can next" in capfd.readouterr().err
            assert accelerator.should_stop

    with pytest.raises(PreemptedExit):
        loop()
    os.kill(os.getpid(), signal.SIGINT)  # the same request, on its way to this rank
    monkeypatch.setattr(preemption, "_ONE_REQUEST_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


LATE = """
import os
import signal

from accel_trainer import Accelerator


class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGTERM):
        kill(process, number)

late = Late()  # of the module, which ends when Python has taken its handlers back
accelerator = Accelerator(cpu=True)
with accelerator.preemptible():
    os.kill(os.getpid(), signal.SIGTERM)
    assert accelerator.should_stop
"""


def test_a_second_signal_in_the_last_moments_of_the_process_leaves_the_exit_code_85() -> None:
    assert subprocess.run([sys.executable, "-c", LATE], timeout=120).returncode == 85


WORKERS = """
import torch
from accel_trainer import Accelerator

loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, num_workers=2, persistent_workers=True)
loader = Accelerator(cpu=True).prepare(loader)
print(len(list(loader)))
"""


def test_a_process_ends_without_a_word_of_workers_that_persist() -> None:
    process = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout) == (0, "4\n")
    assert "Traceback" not in process.stderr


def test_a_save_that_does_not_fit_into_what_is_left_of_the_grace_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True, config={"preemption": {"grace_seconds": 60}})
    accelerator.prepare(nn.Linear(1, 1))

    def loop(last_seconds: float) -> None:
        with accelerator.preemptible():
            assert accelerator.save_state(tmp_path / "state") is not None
            accelerator._checkpointer.metrics.record("ckpt/duration_s", last_seconds)
            os.kill(os.getpid(), signal.SIGTERM)
            assert accelerator.should_stop
            assert (accelerator.save_state(tmp_path / "state") is None) == (last_seconds > 60)

    for last_seconds in (30.0, 90.0):
        with pytest.raises(PreemptedExit):
            loop(last_seconds)
    assert re.search(
        r"save to \S+state is left out: the last one took 90\.0 s, and 0\.\d s of 60 are over", caplog.text
    )


def test_a_signal_after_the_last_look_is_not_lost() -> None:
    accelerator = Accelerator(cpu=True)

    def loop() -> None:
        with accelerator.preemptible():
            assert not accelerator.should_stop
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        loop()


def test_a_handler_that_a_script_sets_within_the_loop_stays_and_gets_a_signal_after_the_last_look() -> None:
    accelerator, heard, before = Accelerator(cpu=True), [], signal.getsignal(signal.SIGINT)
    try:
        with accelerator.preemptible():
            assert not accelerator.should_stop
            os.kill(os.getpid(), signal.SIGINT)
            signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 2


def stop_without_readers() -> Any:
    """Get SIGINT, as the reader of the output does, which ends 50 ms later; then write to it."""
    accelerator = Accelerator(cpu=True)
    reader, writer = os.pipe()
    for descriptor in (1, 2):
        os.dup2(writer, descriptor)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.close(reader))
    try:
        with accelerator.preemptible():
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            for descriptor in (1, 2):
                os.write(descriptor, b"a progress bar")
            assert accelerator.should_stop
    except PreemptedExit as ended:
        return ended.code


def test_ctrl_c_that_ends_the_reader_of_the_output_as_well_leaves_the_run_its_save():
    assert run_ranks(stop_without_readers, 1) == [85]


# --- loops whose workers die: they go on from the newest state by one line of the script -----------------------------


SCRIPT = f"""
import os, sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.accelerator.test_preemption_of_loops import train_by_hand

seen = train_by_hand(sys.argv[1])
if os.environ["RANK"] == "0":
    torch.save(seen, sys.argv[2])
"""


def build_regression() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


class Count:
    """Updates of a loop."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]


def train_by_hand(folder: str) -> dict[str, Any]:
    """A loop over 36 samples in updates of 6, saved after every second; rank 1 dies after the third."""
    accelerator = Accelerator(
        project_config=ProjectConfiguration(f"{folder}/run", automatic_checkpoint_naming=True),
        config={
            "strategy": "fsdp2",
            "accumulation": {"num_steps": 2, "keep_global_batch": True},
            "data": {"use_stateful_dataloader": True},
        },
    )
    data = torch.utils.data.DataLoader(torch.arange(36.0).reshape(36, 1), batch_size=1, shuffle=True)
    model, optimizer, data = accelerator.prepare(*build_regression(), data)
    count = Count()
    accelerator.register_for_checkpointing(count)
    begun_from = accelerator.load_state(missing_ok=True)
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], accelerator.process_index
    for batch in data:
        with Path(folder, f"{attempt}-{rank}.txt").open("a") as file:
            file.write(f"{count.updates} {' '.join(str(int(number)) for number in batch.flatten())}\n")
        with accelerator.accumulate(model):
            take_update((model(batch / 36) - batch / 8).square().mean(), optimizer, accelerator)
        if accelerator.sync_gradients:
            count.updates += 1
            if count.updates == 3 and attempt == "0" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if count.updates % 2 == 0:
                accelerator.save_state()
    return {"begun_from": begun_from, "weights": accelerator.get_state_dict(model)}


def test_a_loop_of_ones_own_goes_on_with_fewer_ranks_from_its_newest_state(tmp_path: Path) -> None:
    """Under FSDP2, with one line for it: load_state(missing_ok=True)."""
    script, runs = tmp_path / "train.py", str(tmp_path)
    script.write_text(SCRIPT)

    words = ["--num_processes", "2:3", "--cpu", "--max_restarts", "1", str(script), runs, str(tmp_path / "seen")]
    code, output = launch(tmp_path, *words, timeout=100)

    assert code == 0, output
    assert "starting the workers again on 2 rank(s) instead of 3" in output
    restarted = torch.load(tmp_path / "seen", weights_only=False)
    assert restarted["begun_from"].name == "checkpoint_0"
    before, after = read_samples(tmp_path, "0-*.txt"), read_samples(tmp_path, "1-*.txt")
    assert after[2] == before[2]  # the update that was lost is done again, with its samples
    updates = {step: before[step] for step in range(2)} | after
    assert [len(numbers) for numbers in updates.values()] == [6] * 6
    assert sorted(number for numbers in updates.values() for number in numbers) == list(range(36))
    model, optimizer = build_regression()
    for numbers in updates.values():
        batch = torch.tensor(numbers, dtype=torch.float32).reshape(6, 1)
        take_update((model(batch / 36) - batch / 8).square().mean(), optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(restarted["weights"][name], value, rtol=0, atol=1e-6)


def test_a_loop_that_begins_anew_after_a_restart_is_told_of_what_was_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "state")
    assert "this loop has begun anew without the states that were saved before: call load_state(missing_ok=True)" in (
        caplog.text
    )
    caplog.clear()
    again = Accelerator(cpu=True)
    again.prepare(torch.nn.Linear(1, 1))
    assert again.load_state(tmp_path / "none", missing_ok=True) is None
    assert again.load_state(tmp_path / "state", missing_ok=True) == tmp_path / "state"
    again.save_state(tmp_path / "state")
    assert "begun anew" not in caplog.text
