"""Faults strike a Trainer at the points of its training and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import TrainerCallback

from tests.fault_injection import injected
from tests.trainer_jobs import build_trainer


def recorded(output_dir: Any, seen: list[str]) -> None:
    """Train two updates and evaluate two batches; say what was done."""

    class Steps(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            seen.append("step")

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append("metrics")
        return {}

    trainer = build_trainer(
        output_dir, samples=8, eval_samples=4, per_device_eval_batch_size=2, eval_strategy="epoch",
        options={"callbacks": [Steps], "compute_metrics": metrics},
    )  # fmt: skip
    read = trainer.get_batch_samples

    def get_batch_samples(*args: Any) -> Any:
        samples = read(*args)
        seen.append("batch")
        return samples

    trainer.get_batch_samples = get_batch_samples
    trainer.model.register_forward_hook(lambda model, *_: seen.append("forward" if model.training else "prediction"))
    trainer.model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: seen.append("backward"))
    trainer.train()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[str]:
    """What a run without faults does."""
    seen: list[str] = []
    recorded(tmp_path_factory.mktemp("whole"), seen)
    return seen


@pytest.mark.parametrize(
    ("point", "missing"),
    [
        ("data.next", "batch"),
        ("train.forward", "forward"),
        ("train.backward", "backward"),
        ("train.opt", "step"),
        ("eval.batch", "prediction"),
        ("eval.gather", "metrics"),
    ],
)
def test_a_fault_strikes_a_trainer_at_its_point(tmp_path, whole, point: str, missing: str):
    seen: list[str] = []

    with injected(f"raise@{point}:step=1"), pytest.raises(RuntimeError, match=rf"fault injected at {point}"):
        recorded(tmp_path, seen)

    # The second time; predictions are gathered first, and labels next, before the metrics.
    assert seen == whole[: len(seen)]
    assert whole[len(seen)] == missing
    assert seen.count(missing) == (0 if point == "eval.gather" else 1)
