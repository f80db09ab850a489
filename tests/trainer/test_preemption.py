"""A Trainer that a signal asks to end: all ranks save at the same place, end with code 85, and a resume is exact."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer.runtime import preemption
from accel_trainer.runtime.process import init_process, read_environment
from tests.cells import beyond, selected
from tests.ranks import RankFailure, run_ranks
from tests.scenarios import Scenarios
from tests.trainer_jobs import Hearing, build_trainer

pytestmark = pytest.mark.timeout(300)  # the first test waits for the runs that all look at

OPTIONS: dict[str, Any] = {
    "samples": 32, "eval_samples": 12, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2, "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 2,
    "save_strategy": "steps", "save_steps": 3, "logging_steps": 1, "learning_rate": 1e-2,
    "include_num_input_tokens_seen": "all",
}  # fmt: skip


PLACE_OF = {
    "on_substep_end": "micro-batch", "on_step_end": "update", "on_prediction_step": "evaluation", "on_save": "save",
    "on_epoch_end": "epoch", "on_evaluate": "evaluated",
}  # fmt: skip


class Signals(Hearing):
    """Sends this process a signal at a place of the run."""

    def __init__(
        self, place: str, count: int, number: int = signal.SIGTERM, delay: float = 0.0, to_group: bool = False
    ) -> None:
        self.place, self.left, self.number, self.delay, self.to_group = place, count, number, delay, to_group

    def hear(self, event: str, *args: Any, **kwargs: Any) -> None:
        if PLACE_OF.get(event) == self.place:
            self.left -= 1
            if self.left == 0:
                time.sleep(self.delay)
                os.kill(0 if self.to_group else os.getpid(), self.number)


def run(folder: str, *callbacks: Any, resume: bool = False, **changes: Any) -> dict[str, Any]:
    """Train; return how that ended, and what there is then."""
    options = {**OPTIONS, **changes}
    trainer = build_trainer(folder, model="gpt2", dropout=0.1, options={"callbacks": list(callbacks)}, **options)
    code: Any = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as ended:
        code = ended.code
        if not trainer.stop_signals.seconds_since:
            os.kill(os.getpid(), signal.SIGTERM)  # that of a rank that was asked to end later than the others
    history = [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second"))}
        for entry in trainer.state.log_history
        if "loss" in entry or "eval_loss" in entry
    ]
    return {
        "code": code,
        "step": trainer.state.global_step,
        "saved": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
        "weights": {name: value.detach().clone() for name, value in trainer.model.named_parameters()},
        "history": history,
        "tokens": trainer.state.num_input_tokens_seen,
    }


PLACES = {
    "both ranks at an update": ((0, 1), "update", 5),
    "one rank at an update": ((1,), "update", 4),
    "both ranks within an update": ((0, 1), "micro-batch", 3),
    "rank 0 alone within an update": ((0,), "micro-batch", 6),
    "within an evaluation": ((1,), "evaluation", 4),
    "in a save": ((0, 1), "save", 1),
    "at the end of an epoch": ((1,), "epoch", 1),
    "within the last evaluation": ((0,), "evaluation", 10),
}
# One rank within an update is one at its end, and both are in the other place within one.
OTHER_PLACES = ("both ranks at an update", "rank 0 alone within an update")
SCENARIOS = Scenarios(timeout=300)


@SCENARIOS.add
def all_places() -> dict[str, Any]:
    rank = init_process(read_environment(), use_cpu=True).rank
    base = os.environ["TEST_FOLDER"]
    results: dict[str, Any] = {"whole": run(f"{base}/whole")}
    for name in os.environ["TEST_PLACES"].splitlines():
        ranks, place, count = PLACES[name]
        folder = f"{base}/{name}"
        callbacks = [Signals(place, count, delay=0.05 * rank)] if rank in ranks else []
        results[name] = run(folder, *callbacks), run(folder, resume=True)
    return results


@SCENARIOS.add
def shards_and_workers() -> Any:
    """The whole process group gets the signal, loader workers too, and an engine shards the model."""
    rank = init_process(read_environment(), use_cpu=True).rank
    folder = f"{os.environ['TEST_FOLDER']}/workers"
    options = {"strategy": "fsdp", "dataloader_num_workers": 2, "save_steps": 100}
    ended = run(folder, Signals("update", 3, signal.SIGUSR1, to_group=rank == 1), **options)
    return ended["code"], ended["saved"]


def run_all() -> Any:
    return SCENARIOS.run()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    name = test_r9_all_ranks_stop_at_one_place_and_the_resumed_run_is_the_uninterrupted_one.__name__
    places = [place for (place,) in selected(request, name)]
    SCENARIOS._env = {"TEST_FOLDER": str(tmp_path_factory.mktemp("places")), "TEST_PLACES": "\n".join(places)}
    return SCENARIOS.results("all_places", run_all, 2)


def compare(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    assert resumed["step"] == whole["step"]
    assert resumed["history"] == whole["history"]
    assert resumed["tokens"] == whole["tokens"]
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name


@pytest.mark.parametrize("place", [beyond(place) if place in OTHER_PLACES else place for place in PLACES])
def test_r9_all_ranks_stop_at_one_place_and_the_resumed_run_is_the_uninterrupted_one(ranks: list[Any], place: str):
    ended = [rank[place][0] for rank in ranks]
    assert [each["code"] for each in ended] == [85, 85]
    assert ended[0]["step"] == ended[1]["step"]
    assert f"checkpoint-{ended[0]['step']}" in ended[0]["saved"]
    for rank in ranks:
        compare(rank[place][1], rank["whole"])


def test_r9_a_signal_to_the_whole_process_group_leaves_the_loader_workers_alone(ranks: list[Any]):
    assert SCENARIOS.results("shards_and_workers", run_all, 2) == [(85, ["checkpoint-3"])] * 2


def alone(base: str) -> dict[str, Any]:
    short = {"num_train_epochs": 1}
    results: dict[str, Any] = {"whole": run(f"{base}/whole", **short)}
    for name, signals in {
        "update": Signals("update", 3),
        "micro-batch": Signals("micro-batch", 3, signal.SIGINT),
        "evaluation": Signals("evaluation", 2, signal.SIGUSR1),
        "first": Signals("micro-batch", 1),
    }.items():
        results[name] = run(f"{base}/{name}", signals, **short), run(f"{base}/{name}", resume=True, **short)
    late = Signals("update", 5)
    results["no time"] = run(f"{base}/late", late, preempt_grace_s=1e-4)
    results["jit"] = run(f"{base}/jit", Signals("update", 1), save_strategy="no", enable_jit_checkpoint=True)
    sys.ps1 = ">>> "  # as in a notebook
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        run(f"{base}/notebook", Signals("update", 1, signal.SIGINT))
    del sys.ps1
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    results["own handler"] = run(f"{base}/own", Signals("update", 1), **short), heard
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return results


def test_r9_one_process_ends_and_resumes_as_several_do(tmp_path: Path):
    [seen] = run_ranks(alone, 1, str(tmp_path), timeout=100, env={"RANK": None, "WORLD_SIZE": None})
    for place, step in {"update": 3, "micro-batch": 2, "evaluation": 2, "first": 0}.items():
        ended, resumed = seen[place]
        assert (ended["code"], ended["step"], ended["saved"]) == (85, step, [f"checkpoint-{step}"])
        compare(resumed, seen["whole"])
    assert (seen["no time"]["code"], seen["no time"]["saved"]) == (85, ["checkpoint-3"])
    assert (seen["jit"]["code"], seen["jit"]["saved"]) == (85, ["checkpoint-1"])
    ended, heard = seen["own handler"]
    assert (ended["code"], ended["step"], heard) == (None, 8, [signal.SIGTERM])


EPOCH_ENDS: dict[str, Any] = {
    # The signal, and options that differ; the first of two epochs has 4 updates.
    "the last update": (("update", 4), {}),
    "the last update of the run": (("update", 8), {}),
    "the last update of a run that ends within an epoch": (("update", 6), {"max_steps": 6}),
    "the evaluation, after a save of the update": (("evaluation", 2), {"save_strategy": "steps", "save_steps": 4}),
    "the end of the evaluation, after such a save": (("evaluated", 1), {"save_strategy": "steps", "save_steps": 4}),
    "the end of the epoch, after such a save": (
        ("epoch", 1), {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"},
    ),
}  # fmt: skip


def end_at_epochs(base: str) -> dict[str, Any]:
    rank = init_process(read_environment(), use_cpu=True).rank
    results: dict[str, Any] = {}
    for name, (place, changes) in EPOCH_ENDS.items():
        options = {
            "samples": 16, "eval_samples": 8, "gradient_accumulation_steps": 1, "eval_strategy": "epoch",
            "save_strategy": "epoch", "logging_strategy": "epoch", **changes,
        }  # fmt: skip
        callbacks = [Signals(*place)] if rank == 0 else []
        ended = run(f"{base}/{name}", *callbacks, **options)
        results[name] = ended, run(f"{base}/{name}", resume=True, **options), run(f"{base}/{name} whole", **options)
    return results


def test_r9_what_is_due_at_the_end_of_an_epoch_is_done_once_though_a_signal_comes_there(tmp_path: Path):
    for results in run_ranks(end_at_epochs, 2, str(tmp_path), timeout=200):
        for name, (ended, resumed, whole) in results.items():
            assert (ended["code"], ended["step"]) == (85, 4 if "run" not in name else whole["step"]), name
            compare(resumed, whole)
            assert resumed["saved"] == whole["saved"], name


def test_r9_a_run_that_saves_nothing_dies_of_its_signal(tmp_path: Path):
    with pytest.raises(RankFailure, match=r"killed by signal 15 \(SIGTERM\)"):
        run_ranks(run, 1, str(tmp_path), Signals("update", 1), save_strategy="no")


def ask_twice(folder: str) -> None:
    preemption._ONE_REQUEST_SECONDS = 0.0
    run(folder, Signals("update", 1), Signals("save", 1))


def test_r9_a_second_signal_of_the_same_name_ends_the_process(tmp_path: Path):
    with pytest.raises(RankFailure, match=r"killed by signal 15 \(SIGTERM\)"):
        run_ranks(ask_twice, 1, str(tmp_path))
