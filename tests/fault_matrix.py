"""Every fault at every place of a run: how each rank ends, what it says, and how soon. `make test-faults` has them all.

One rank of two fails, is killed, is asked to end, is stopped, or computes NaN: in a loop of one's own and in a Trainer,
under DDP and FSDP2. `promise_of` is the library's word for it. Tests of the two fronts share a choice of cases.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate
from transformers import TrainerCallback

from accel_trainer import Accelerator
from accel_trainer.runtime import rank_watch
from accel_trainer.runtime.process import find_rank
from accel_trainer.runtime.progress import PROGRESS
from tests import fault_injection
from tests.ranks import RankFailure, map_jobs, preload, run_ranks

preload("accel_trainer.trainer", "accel_trainer.accelerator", "transformers")

# The point of each place, and its pass at which the fault comes: the second where there are several.
PLACES = {
    "forward": ("train.forward", 1),
    "backward": ("train.backward", 1),
    "optimizer": ("train.opt", 1),
    "data": ("data.next", 1),
    "eval": ("eval.batch", 1),
    "gather": ("eval.gather", 1),
    "save": ("save.before_vote", None),
    "load": ("load.verify", None),
    "callback": ("callback", None),  # not one of the library's: the job's own code at the end of an update
}
KINDS = ("raise", "kill9", "term", "stop", "exit0", "sleep", "gil", "nan")
FRONTS = ("native", "Trainer")
STRATEGIES = ("ddp", "fsdp2")
BACKGROUND = "background"
"""A Trainer whose saves are written by a thread, and copied to a store: the faults of that thread."""
BOTH = -1
"""In the place of a rank."""
POLL_SECONDS = 0.1
"""Of the threads that watch, a fifth of the library's own: a rank that is gone is found in 0.6 s, not in 3 s."""
GONE_SECONDS = 6 * POLL_SECONDS + 2.0
LIMIT_SECONDS = 3.0
"""For which a rank may be without progress, in any section."""


# By the numbers of docs/reliability.md.
PROMISES = {
    "raise": "R12", "kill9": "R12", "exit0": "R12", "term": "R9",
    "stop": "R10", "sleep": "R10", "gil": "R10", "nan": "R14",
}  # fmt: skip


class Case(NamedTuple):
    """A fault, its place, the rank that has it, and the run; its name begins with what is promised for it."""

    kind: str
    place: str
    rank: int
    front: str
    strategy: str

    def __str__(self) -> str:
        return "-".join(map(str, (PROMISES.get(self.kind, "R0"), *self)))


def cases(kinds: Iterable[str] = KINDS) -> Iterator[Case]:
    kinds = list(kinds)
    yield from itertools.starmap(Case, itertools.product(kinds, PLACES, (0, 1), FRONTS, STRATEGIES))
    ends = [kind for kind in kinds if kind in ("raise", "kill9", "exit0")]
    yield from itertools.starmap(Case, itertools.product(ends, ["save"], (0, 1), [BACKGROUND], STRATEGIES))


# --- the job ---------------------------------------------------------------------------------------------------------


class Fault:
    """The fault of a case as the job of one rank meets it: NaN, and those that wait at no point of the library."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.is_here = case.rank in (find_rank(), BOTH)
        self.is_injected = case.kind in fault_injection.KINDS
        self._passes = 0

    @property
    def checkpoint(self) -> str:
        return str(self.folder.parent / str(_checkpoint_of(self.case)) / "checkpoint-2")

    def note_time(self) -> None:
        self.folder.joinpath("happened").write_text(str(time.monotonic()))

    def _is_due(self, place: str, number: int) -> bool:
        if not self.is_here or place != self.case.place:
            return False
        self._passes += 1
        return self._passes == number

    def pass_callback(self, model: nn.Module) -> None:
        """Be what the user's code does at the end of an update."""
        self.spoil_weights("callback", model, 2)
        if self.is_injected and self._is_due("callback", 2):
            fault_injection.Fault(self.case.kind, "callback").trigger()

    def spoil(self, place: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor, NaN where that is the fault, at the second pass of its place."""
        if self.is_injected or not self._is_due(place, 2):
            return value
        self.note_time()
        return value * torch.nan

    def spoil_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Be a hook of the optimizer, behind the look at the gradients."""
        first = optimizer.param_groups[0]["params"][0]
        first.grad = self.spoil("optimizer", first.grad)

    def spoil_weights(self, place: str, model: nn.Module, number: int) -> None:
        if self.is_injected or not self._is_due(place, number) or self.case.kind != "nan":
            return
        self.note_time()
        for parameter in model.parameters():
            (parameter.data.to_local() if hasattr(parameter.data, "to_local") else parameter.data).fill_(torch.nan)


class Regression(nn.Module):
    """A model that FSDP2 shards in two layers."""

    _no_split_modules = ("Linear",)

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.fault = fault

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.fault.spoil("forward" if self.training else "eval", self.second(self.first(x)))
        if output.requires_grad:
            output.register_hook(lambda gradient: self.fault.spoil("backward", gradient))
        return {"loss": (output - labels).square().mean(), "logits": output}


def build_job(fault: Fault) -> tuple[nn.Module, list[Any], list[Any], Callable[[Any], Any], str]:
    """Return model, rows to train on and to evaluate, a collate function, and what to do about NaN."""
    torch.manual_seed(0)
    rows = [{"x": torch.full((4,), 0.1 * index), "labels": torch.ones(1)} for index in range(16)]

    def collate(batch: list[Any]) -> dict[str, torch.Tensor]:
        collated = default_collate(batch)
        return {**collated, "x": fault.spoil("data", collated["x"])}

    return Regression(fault), rows, rows[:8], collate, "warn" if fault.case.rank == BOTH else "raise"


def native_job(fault: Fault, folder: Path) -> list[float]:
    """Train four updates; after two evaluate and save, and wherever the run is asked to end. Return predictions."""
    model, train_rows, eval_rows, collate, action = build_job(fault)
    accelerator = Accelerator(config={"strategy": fault.case.strategy, "use_cpu": True, "on_nonfinite": action})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(fault.spoil_gradients)
    loaders = (DataLoader(rows, 2, collate_fn=collate) for rows in (train_rows, eval_rows))
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *loaders)
    predictions: list[float] = []
    with accelerator.preemptible():
        if fault.case.place == "load":
            accelerator.load_state(fault.checkpoint)
        for number, batch in enumerate(train_loader, 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            fault.pass_callback(model)
            for eval_batch in eval_loader if number == 2 else ():
                with torch.no_grad():
                    output = model.eval()(**eval_batch)["logits"]
                predictions += accelerator.gather_for_metrics(fault.spoil("gather", output)).flatten().tolist()
                if accelerator.should_stop:
                    break
            model.train()
            if accelerator.should_stop or number == 2:
                fault.spoil_weights("save", model, 1)
                accelerator.save_state(folder / "checkpoint-2")
            if accelerator.should_stop:
                break
    return predictions


class Callbacks(TrainerCallback):
    """The user's code."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.optimizer.register_step_pre_hook(self.fault.spoil_gradients)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.fault.pass_callback(model)
        self.fault.spoil_weights("save", model, 2)


def trainer_job(fault: Fault, folder: Path) -> list[float]:
    """Do the same in a Trainer. Return means of predictions."""
    from accel_trainer.trainer import Trainer, TrainingArguments

    model, train_rows, eval_rows, collate, action = build_job(fault)
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, num_train_epochs=1, optim="sgd",
        per_device_train_batch_size=2, per_device_eval_batch_size=2, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, learning_rate=0.01, on_nonfinite=action,
        **({"fsdp": "full_shard auto_wrap"} if fault.case.strategy == "fsdp2" else {}),
        **({"save_async": True, "checkpoint_uri": f"file://{folder}/store"} if fault.case.front == BACKGROUND else {}),
    )  # fmt: skip
    trainer = Trainer(
        model, args, train_dataset=train_rows, eval_dataset=eval_rows, data_collator=collate,
        callbacks=[Callbacks(fault)], compute_metrics=lambda prediction: {"mean": float(prediction.predictions.mean())},
        preprocess_logits_for_metrics=lambda logits, labels: fault.spoil("gather", logits),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=fault.checkpoint if fault.case.place == "load" else None)
    return [entry["eval_mean"] for entry in trainer.state.log_history if "eval_mean" in entry]


def run_as_script(case: Case, folder: Path) -> None:
    """Run a rank as the interpreter runs a script, to the end of its process; what it prints goes to a file."""
    rank_watch._POLL_SECONDS = POLL_SECONDS
    rank, exit_process, happen = find_rank(), os._exit, fault_injection.Fault.happen
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    fault = Fault(case, folder)

    def happen_noted(self: Any, path: Path | None) -> None:
        fault.note_time()
        happen(self, path)

    def exit_noted(code: int) -> None:
        folder.joinpath(f"{rank}.end").write_text(f"{code} {time.monotonic()}")
        exit_process(code)

    os._exit, fault_injection.Fault.happen = exit_noted, happen_noted  # type: ignore[assignment,method-assign]
    code: Any = 0
    try:
        print("predictions:", (native_job if case.front == "native" else trainer_job)(fault, folder))
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        code = 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as ended:
            code = ended.code
    print(f"ended after {PROGRESS.updates} updates", flush=True)
    atexit._run_exitfuncs()
    os._exit(code)


# --- what is seen ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observed:
    """How the ranks of a job ended.

    Attributes:
        codes: exit codes; None for a rank that did not end by itself.
        seconds: from the fault to each one's end.
        said: what each has printed.
        is_saved: whether there is a checkpoint.
        how: the harness's words for each.
    """

    codes: list[int | None]
    seconds: list[float]
    said: list[str]
    is_saved: bool
    how: dict[int, str]


def observe(case: Case, base: Path) -> Observed:
    """Run a case, in a folder of its own in `base`, where the checkpoints are that it may load."""
    folder = base / str(case)
    folder.mkdir()
    env = {f"ACCEL_TRAINER_HANG__{name}_SECONDS": str(LIMIT_SECONDS) for name in ("STEP", "USER", "EVALUATION", "SAVE")}
    env["ACCEL_TRAINER_HANG__STARTUP_SECONDS"] = str(LIMIT_SECONDS if case.place == "load" else 60.0)
    if case.kind in fault_injection.KINDS and case.place != "callback":
        point, number = PLACES[case.place]
        env |= fault_injection.fault_env(
            f"{case.kind}@{point}:rank={case.rank}" + (f":step={number}" if number else "")
        )
    # Nobody ends a rank here that is stopped, or holds the lock; a launcher would.
    grace_seconds = 1.0 if case.kind in ("stop", "gil") else 20.0
    try:
        run_ranks(run_as_script, 2, case, folder, env=env, timeout=90, grace_seconds=grace_seconds)
    except RankFailure as failed:  # each rank ends its process itself, without an answer
        how = failed.failures
    begin = float(path.read_text()) if (path := folder / "happened").exists() else float("nan")
    ends = [path.read_text().split() if (path := folder / f"{rank}.end").exists() else None for rank in (0, 1)]
    # One that was stopped goes on while it is ended from here, and its watch may be quicker.
    ends = [None if "was still running" in how.get(rank, "") else end for rank, end in enumerate(ends)]
    return Observed(
        codes=[None if end is None else int(end[0]) for end in ends],
        seconds=[float("nan") if end is None else float(end[1]) - begin for end in ends],
        said=[(folder / f"{rank}.txt").read_text(errors="replace") for rank in (0, 1)],
        is_saved=any(folder.glob("checkpoint-*/COMMITTED")),
        how=how,
    )


def _checkpoint_of(case: Case) -> Case:
    return Case("nan" if case.kind == "nan" else "none", "save", BOTH, case.front, case.strategy)


def observe_all(
    wanted: Iterable[Case],
    base: Path,
    report: Callable[[Case, Observed], None] = lambda case, observed: None,
) -> dict[Case, Observed]:
    """Run cases, three at a time, after the jobs whose checkpoints they load; `report` is called after each."""
    wanted = list(wanted)
    loaded = sorted({_checkpoint_of(case) for case in wanted if case.place == "load"})
    for made in map_jobs(lambda case: observe(case, base), loaded).values():
        assert made.codes == [0, 0], made

    def run(case: Case) -> Observed:
        observed = observe(case, base)
        report(case, observed)
        return observed

    return map_jobs(run, wanted)


# --- what is promised ------------------------------------------------------------------------------------------------


class Promise(NamedTuple):
    """What a fault of one rank comes to.

    Attributes:
        own: exit code of that rank; None where it does not end by itself.
        others: exit code of the other.
        words: regular expression for what the other prints.
        within_seconds: of the fault, the other has ended.
    """

    own: int | None
    others: int
    words: str
    within_seconds: float


# Where a rank that sleeps says that it is. A word of the loop's own line, where the place is not one of the library's.
_SLEEPS_IN = {
    "native": {
        "data": "data loading, ", "forward": "forward, ", "backward": "backward, ", "optimizer": "optimizer step, ",
        "eval": "forward, ", "gather": "the loop, ", "save": "save, ", "load": "load, ", "callback": "the loop, ",
    },
    "Trainer": {
        "data": "data loading, ", "forward": "forward, ", "backward": "the loop, ", "optimizer": "optimizer step, ",
        "eval": "evaluation > forward, ", "gather": "evaluation, ", "save": "save, ", "load": "load, ",
        "callback": "callback on_step_end, ",
    },
}  # fmt: skip


def promise_of(case: Case) -> Promise:
    """Return what the library promises for a case, on a machine with nothing else to do."""
    rank, other = case.rank, 1 - case.rank
    if case.kind == "nan":
        return _promise_of_nan(case)
    hang = (
        r"HangError: no progress for \d+ s, the limit there is [\d.]+ s\. "
        rf"rank {other} waits in \w+ \(number \d+ of the group\) for rank {rank}, which has not arrived there:\n"
        rf"  rank {rank} "
    )
    gone = (
        rf"RemoteRankError: rank {rank} is gone without a word \(killed, or its machine is\).* "
        rf"Rank {other} stopped with it, in \w+ \(update \d, "
    )
    failed = (
        rf"RemoteRankError: rank {rank} failed.*: RuntimeError: fault injected at {PLACES[case.place][0]}\. "
        rf"(Rank {other}|This rank \({other}\)) (stopped with it|has waited in \w+ for \d+ s)"
    )
    silent = r"does not answer \(stopped, killed, or in a call that keeps the interpreter's lock\)"
    sleeps = (
        "is in "
        + re.escape(_SLEEPS_IN.get(case.front, {}).get(case.place, "save, "))
        + r"\w+ \(\w+\.py:\d+\): update \d"
    )
    return {
        "raise": Promise(1, 1, failed, 2.0),
        "kill9": Promise(None, 1, gone, GONE_SECONDS),
        "exit0": Promise(0, 1, gone, GONE_SECONDS),
        "term": Promise(85, 85, r"ended after \d updates", 5.0),
        "stop": Promise(None, 75, hang + silent, LIMIT_SECONDS + 5.0),
        "gil": Promise(None, 75, hang + silent, LIMIT_SECONDS + 5.0),
        "sleep": Promise(75, 75, hang + sleeps, LIMIT_SECONDS + 5.0),
    }[case.kind]


def _promise_of_nan(case: Case) -> Promise:
    seen = (
        rf"NonFiniteError: update 2: the norm of the gradients is NaN or infinite, and the loss on rank {case.rank} is"
    )
    weights = r"\d of the model's weights hold NaN or infinity, '\w+\.\w+' for one"
    refused = Promise(76, 76, rf"NonFiniteError: save[^\n]*checkpoint-2.*: {weights}; nothing is saved\.", 5.0)
    return {
        "forward": Promise(76, 76, seen, 5.0),
        "data": Promise(76, 76, seen, 5.0),
        "backward": Promise(76, 76, seen.split(", and")[0] + ", and the loss is a number on all ranks", 5.0),
        "eval": Promise(0, 0, r"predictions: \[.*nan", 20.0),
        "gather": Promise(0, 0, r"predictions: \[.*nan", 20.0),
        # Weights, behind the look at the gradients of the update after which the run saves.
        "optimizer": refused,
        "callback": refused,
        "save": refused,
        "load": Promise(76, 76, rf"NonFiniteError: load of .*checkpoint-2: {weights}; no update would mend them", 5.0),
    }[case.place]


def find_broken_promise(case: Case, observed: Observed, slack_seconds: float = 8.0) -> str:
    """Return what is not as promised; empty where all is. A busy machine may need `slack_seconds` more."""
    promise, other = promise_of(case), 1 - case.rank
    broken = []
    expected = [promise.own, promise.others][:: 1 if case.rank == 0 else -1]
    if observed.codes != expected:
        broken.append(f"exit codes are {observed.codes} and not {expected}: {observed.how}")
    # What hangs is told by one rank of those that can.
    said = "".join(observed.said) if case.kind == "sleep" else observed.said[other]
    if not re.search(promise.words, said):
        broken.append(f"rank {other} does not say {promise.words!r} but ...{said[-600:]}")
    if observed.seconds[other] > promise.within_seconds + slack_seconds:
        broken.append(f"it takes {observed.seconds[other]:.1f} s, more than {promise.within_seconds:g} s")
    if case.kind == "raise" and "RemoteRankError" in observed.said[case.rank]:
        broken.append(f"rank {case.rank} does not print its own error")
    if case.kind == "nan" and observed.is_saved and promise.others:
        broken.append("something was saved")
    if case.kind == "term":
        ends = {tuple(re.findall(r"ended after \d+ updates", said)) for said in observed.said}
        if len(ends) > 1 or not observed.is_saved:
            broken.append(f"the ranks {ends}, saved: {observed.is_saved}")
    return "; ".join(broken)


def build_tests(front: str, names: str) -> tuple[Any, Any]:
    """Return a fixture, to be called `observed`, that runs cases of one front, and the test of each.

    Args:
        names: of the cases, as `raise-data-1-ddp`.
    """
    parts = (name.split("-") for name in names.split())
    wanted = [Case(kind, place, int(rank), front, strategy) for kind, place, rank, strategy in parts]

    @pytest.fixture(scope="module")
    def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Observed]:
        return observe_all(wanted, tmp_path_factory.mktemp("faults"))

    @pytest.mark.timeout(300)  # the first test waits for the jobs of all
    @pytest.mark.parametrize("case", wanted, ids=str)
    def test(observed: dict[Case, Observed], case: Case) -> None:
        broken = find_broken_promise(case, observed[case])
        assert not broken, broken

    return observed, test


def main() -> None:
    """Run all cases, or those whose names match; print each one's outcome, and the slowest of each kind."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="a regular expression for names, as 'kill9-.*-Trainer'")
    parser.add_argument("--slack", type=float, default=0.0, help="seconds more than promised, on a busy machine")
    options = parser.parse_args()
    wanted = [case for case in cases() if re.search(options.only, str(case))]
    broken: dict[Case, str] = {}

    def report(case: Case, observed: Observed) -> None:
        text = find_broken_promise(case, observed, options.slack)
        if text:
            broken[case] = text
        ended = f"{case}: codes {observed.codes}, {observed.seconds[1 - case.rank]:.1f} s"
        print(ended, f"BROKEN: {text}" if text else "", flush=True)

    with tempfile.TemporaryDirectory() as base:
        seen = observe_all(wanted, Path(base), report)
    for kind in KINDS:
        seconds = [each.seconds[1 - case.rank] for case, each in seen.items() if case.kind == kind]
        if seconds:
            print(f"{kind}: {len(seconds)} cases, up to {max(seconds):.1f} s")
    print(f"{len(broken)} of {len(seen)} are not as promised: {', '.join(map(str, broken))}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
