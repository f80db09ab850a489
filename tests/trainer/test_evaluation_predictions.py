"""Rows of several ranks come back in sample order, whatever their shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from accel_trainer.errors import ConfigError
from accel_trainer.trainer import evaluation
from accel_trainer.trainer.evaluation import concat_steps, gather_steps, to_numpy
from accel_trainer.trainer.trainer import Trainer
from tests.ranks import run_ranks
from tests.trainer_jobs import TokenDataset, arguments, build_trainer


def test_steps_of_different_widths_are_padded():
    joined = concat_steps([torch.ones(2, 3), torch.ones(1, 5)])

    assert joined.shape == (3, 5)
    assert joined[0].tolist() == [1, 1, 1, -100, -100]


def test_structures_are_joined_leaf_by_leaf():
    step = {"a": torch.ones(2), "b": (torch.zeros(2, 1), torch.tensor(1.0))}

    joined = concat_steps([step, step])

    assert joined["a"].shape == (4,)
    assert joined["b"][0].shape == (4, 1)
    assert joined["b"][1].tolist() == [1.0, 1.0]


def test_different_numbers_of_dimensions_are_refused():
    with pytest.raises(ConfigError, match=r"dimensions in different batches"):
        concat_steps([torch.ones(2, 3), torch.ones(2)])


def test_other_leaves_are_refused():
    with pytest.raises(ConfigError, match=r"returned a str among its predictions.*ignore_keys"):
        concat_steps([(torch.ones(2), "text")])


def test_bfloat16_becomes_float32():
    assert to_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32


class Compared(torch.nn.Module):
    """Returns a loss by itself, as models that compare what they are given do; or a tuple, or a bare tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, return_loss: bool = True) -> Any:
        scores = self.weight * x
        if self.kind == "bare":
            return scores
        if self.kind == "tuple":
            return (scores.mean(), scores, x) if labels is not None else (scores, x)
        return {"loss": scores.mean() if return_loss else None, "scores": scores, "past_key_values": x}


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("ignore_keys", [None, ["scores"]])
@pytest.mark.parametrize("case", ["llama", "no labels", "t5", "compared", "not compared", "tuple", "bare"])
def test_a_step_is_that_of_transformers(tmp_path, case, ignore_keys, loss_only):
    rows = TokenDataset(3, seed=1)
    inputs: dict[str, Any] = {key: torch.stack([row[key] for row in rows.rows]) for key in rows.rows[0]}
    if case in ("llama", "no labels", "t5"):
        trainer = build_trainer(tmp_path, model="t5" if case == "t5" else "llama")
        if case == "no labels":
            del inputs["labels"]
    else:
        names = ["labels"] if case == "tuple" else []
        inputs = {"x": torch.arange(3.0), **({"labels": torch.ones(3)} if case == "tuple" else {})}
        inputs |= {"return_loss": False} if case in ("not compared", "bare") else {}
        trainer = Trainer(Compared(case), arguments(tmp_path, label_names=names, remove_unused_columns=False))

    expected = transformers.Trainer.prediction_step(trainer, trainer.model, inputs, loss_only, ignore_keys=ignore_keys)
    found = evaluation._Pass(trainer, "Evaluation", ignore_keys)._predict(trainer.model, inputs, loss_only)[:3]

    assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(expected)
    for own, theirs in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        if isinstance(own, torch.Tensor):  # and no cache of t5
            torch.testing.assert_close(own, theirs)


class CountSteps(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.num_steps = 0

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self.num_steps += 1


def test_callbacks_hear_every_step(tmp_path):
    count = CountSteps()

    build_trainer(tmp_path, per_device_eval_batch_size=4, options={"callbacks": [count]}).evaluate()

    assert count.num_steps == 3


CASES = [(dtype, size) for dtype in (torch.float32, torch.int64, torch.bfloat16) for size in (1, 2**20)]


def gather_ragged(accelerator: Any, dtype: torch.dtype, piece_bytes: int) -> Any:
    """Rank r has r + 1 rows of width r + 2 in each of 3 steps, and rank 1 lacks the last step."""
    evaluation._PIECE_BYTES = piece_bytes
    rank = accelerator.process_index
    steps = [torch.full((rank + 1, rank + 2), 10 * step + rank).to(dtype) for step in range(3 if rank == 0 else 2)]
    return gather_steps(steps, accelerator).float().numpy()


def gather_from_one(accelerator: Any) -> Any:
    steps = [{"a": torch.arange(3), "b": torch.ones(3, 2, dtype=torch.bool)}] if accelerator.is_main_process else []
    result = gather_steps(steps, accelerator)
    return result["a"].tolist(), result["b"].shape, bool(result["b"].all())


def gather_all() -> Any:
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True)
    ragged = [gather_ragged(accelerator, dtype, piece_bytes) for dtype, piece_bytes in CASES]
    no_tensors = gather_steps([()] if accelerator.is_main_process else [], accelerator)
    return ragged, gather_from_one(accelerator), no_tensors


@pytest.mark.multirank
def test_ranks_are_interleaved_step_by_step_and_one_without_steps_learns_the_structure():
    for ragged, from_one, no_tensors in run_ranks(gather_all, 2):
        assert len(ragged) == len(CASES)
        for result in ragged:
            assert result[:, 0].tolist() == [0, 1, 1, 10, 11, 11, 20]
            assert result[0].tolist() == [0, 0, -100]
            assert result[1].tolist() == [1, 1, 1]
        assert from_one == ([0, 1, 2], (3, 2), True)
        assert no_tensors == ()
