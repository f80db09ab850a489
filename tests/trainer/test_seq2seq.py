"""Seq2SeqTrainer: generation in evaluation, on one process and on ranks that share a sharded model."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.cells import beyond
from tests.ranks import run_ranks
from tests.trainer_jobs import TokenDataset, build_model, build_trainer

pytestmark = pytest.mark.beside_accelerate

SAMPLES = 7
MAX_LENGTH = 8


def generated(prediction: Any) -> dict[str, int]:
    return {"rows": len(prediction.predictions), "width": prediction.predictions.shape[1]}


def generate(
    output_dir: str, strategy: str = "single", train: bool = True, model: str = "t5", sizes: Any = None
) -> dict[str, Any]:
    trainer = build_trainer(
        output_dir, strategy=strategy, model=model, eval_samples=SAMPLES, samples=8, uneven=True, learning_rate=0.0,
        predict_with_generate=True, generation_max_length=MAX_LENGTH, per_device_eval_batch_size=2,
        parallelism_config=sizes, options={"compute_metrics": generated},
    )  # fmt: skip
    if train:
        trainer.train()
    metrics = trainer.evaluate()
    output = trainer.predict(trainer.eval_dataset, max_length=MAX_LENGTH)
    return {"metrics": metrics, "predictions": output.predictions, "labels": output.label_ids}


@functools.cache
def expected_tokens(model: str) -> np.ndarray:
    network, rows = build_model(model).eval(), TokenDataset(SAMPLES, seed=1).rows
    tokens = torch.full((SAMPLES, MAX_LENGTH), 0)
    for index, row in enumerate(rows):
        out = network.generate(input_ids=row["input_ids"][None], max_length=MAX_LENGTH)[0]
        tokens[index, : len(out)] = out
    return tokens.numpy()


@functools.cache
def expected_loss(model: str) -> float:
    network, rows = build_model(model).eval(), TokenDataset(SAMPLES, seed=1, uneven=True).rows
    total, count = 0.0, 0
    for row in rows:
        tokens = int((row["labels"] != -100).sum())
        with torch.no_grad():
            total += float(network(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss) * tokens
        count += tokens
    return total / count


def check(result: dict[str, Any], model: str = "t5") -> None:
    # Upstream pads to the length of the model's own generation config.
    np.testing.assert_array_equal(result["predictions"][:, :MAX_LENGTH], expected_tokens(model))
    assert len({tuple(row) for row in result["predictions"]}) > 1
    assert not result["predictions"][:, MAX_LENGTH:].any()
    assert result["metrics"]["eval_rows"] == SAMPLES
    assert result["metrics"]["eval_loss"] == pytest.approx(expected_loss(model), rel=1e-5)
    assert result["labels"].shape[0] == SAMPLES


def test_one_process_generates_for_every_sample(tmp_path):
    check(generate(str(tmp_path)))


def generate_on_two(folder: str) -> list[dict[str, Any]]:
    return [generate(folder, strategy, train) for strategy in ("ddp", "fsdp") for train in (True, False)]


@pytest.mark.multirank
def test_two_ranks_generate_the_same_tokens_in_order_trained_and_untrained(tmp_path):
    for results in run_ranks(generate_on_two, 2, str(tmp_path)):
        for result in results:
            check(result)


MESHES: list[Any] = [
    {"tp_size": 2},
    {"tp_size": 2, "dp_shard_size": 2},
    beyond({"dp_replicate_size": 2, "dp_shard_size": 2}),
]


@pytest.mark.multirank
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_ranks_of_a_mesh_generate_what_one_process_does(sizes: dict[str, int], tmp_path):
    options = {"train": "tp_size" in sizes, "model": "t5gemma", "sizes": sizes}
    for result in run_ranks(generate, math.prod(sizes.values()), str(tmp_path), **options):
        check(result, "t5gemma")


def test_the_generation_length_falls_back_to_the_arguments(tmp_path):
    trainer = build_trainer(
        tmp_path, model="t5", predict_with_generate=True, generation_max_length=5, generation_num_beams=2
    )

    assert trainer.predict(trainer.eval_dataset).predictions.shape[1] >= 5
    assert trainer._gen_kwargs == {"max_length": 5, "num_beams": 2}


def test_without_generation_it_predicts_logits(tmp_path):
    trainer = build_trainer(tmp_path, model="t5", predict_with_generate=False)

    output = trainer.predict(trainer.eval_dataset)

    assert output.metrics["test_loss"] > 0
    assert output.predictions[0].shape == (11, 12, 64)
