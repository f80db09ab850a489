"""A trace of some updates: of these alone, on the ranks that were asked for, also where training ends before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.errors import ConfigError
from tests.trainer_jobs import build_trainer, on_ranks


def _profile(folder: str, *, strategy: str, **options: Any) -> None:
    trainer = build_trainer(folder, strategy=strategy, **{"max_steps": 5, **options})
    if fails_at := options.get("seed"):
        compute_loss = trainer.compute_loss

        def failing(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step + 1 == fails_at:
                raise KeyError("a sample")
            return compute_loss(*args, **kwargs)

        trainer.compute_loss = failing
        with pytest.raises(KeyError):
            trainer.train()
        return
    trainer.train()


def _num_steps(path: Path) -> int:
    """The optimizer's steps in a trace, which torch names."""
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert any("DataLoader" in name for name in names)
    return sum(name.startswith("Optimizer.step") for name in names)


@pytest.mark.parametrize(
    ("options", "ranks", "steps"),
    [
        ({"profile": "2:4"}, [0], 2),
        ({"profile": "1:2", "profile_ranks": "1"}, [1], 1),
        ({"profile": "3:99", "profile_ranks": "all"}, [0, 1], 3),
    ],
)
def test_each_rank_that_is_asked_for_writes_the_updates_that_are(
    tmp_path: Path, options: dict[str, Any], ranks: list[int], steps: int
):
    on_ranks("ddp", _profile, str(tmp_path), **options)
    traces = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in traces] == [f"profile_{rank}.json" for rank in ranks]
    assert [_num_steps(path) for path in traces] == [steps] * len(ranks)


def test_a_training_that_fails_leaves_its_trace(tmp_path: Path):
    _profile(str(tmp_path), strategy="single", profile="2:5", seed=4)
    assert _num_steps(tmp_path / "profile" / "profile_0.json") == 2


def test_without_the_option_there_is_no_folder(tmp_path: Path):
    _profile(str(tmp_path), strategy="single")
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("text", ["5", "0:3", "4:4", "3:2", "a:b", "1:2:3", "-1:4"])
def test_what_is_no_range_of_updates_is_refused(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match=f"profile='{text}' is no range of updates: give START:STOP"):
        build_trainer(tmp_path, profile=text)


def test_a_rank_that_there_is_not_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="profile_ranks='0,1' names '1', and this job has the ranks 0 to 0"):
        build_trainer(tmp_path, profile="1:2", profile_ranks="0,1")
