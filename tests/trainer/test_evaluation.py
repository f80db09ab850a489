"""Evaluation sees every sample exactly once, in order, and its loss is the exact mean, on any ranks and batch size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import default_data_collator

from accel_trainer import Accelerator
from accel_trainer.errors import ConfigError
from accel_trainer.runtime import uneven_gather
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.uneven_gather import gather_steps
from accel_trainer.trainer import Trainer
from accel_trainer.trainer.evaluation import to_numpy
from tests.cells import beyond
from tests.ranks import run_ranks
from tests.trainer_jobs import Hearing, TokenDataset, arguments, build_model, build_trainer, strategy_arguments

pytestmark = [
    pytest.mark.beside_accelerate,
    pytest.mark.timeout(240),
]
EVAL_SAMPLES = 11


def exact_loss(model: str = "llama", samples: int = EVAL_SAMPLES) -> float:
    """The mean over all label tokens of the evaluation set, one sample at a time."""
    network = build_model(model).eval()
    total, count = 0.0, 0
    for row in TokenDataset(samples, seed=1, uneven=True, kind="class" if model == "bert" else "lm").rows:
        labels = row["labels"][1:] if model != "bert" else row["labels"].reshape(1)
        with torch.no_grad():
            logits = network(input_ids=row["input_ids"][None]).logits[0]
        logits = logits[:-1] if model != "bert" else logits[None]
        logits = logits.reshape(-1, logits.shape[-1])
        total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        count += int((labels != -100).sum())
    return total / count


def exact_logits(samples: int = EVAL_SAMPLES) -> np.ndarray:
    network = build_model().eval()
    tokens = torch.stack([row["input_ids"] for row in TokenDataset(samples, seed=1).rows])
    with torch.no_grad():
        return network(input_ids=tokens).logits.numpy()


def accuracy(prediction: Any) -> dict[str, float]:
    predicted = prediction.predictions.argmax(-1)
    wanted = prediction.label_ids != -100
    return {"accuracy": float((predicted == prediction.label_ids)[wanted].mean()), "rows": len(predicted)}


def evaluate(output_dir: str, strategy: str = "single", **build: Any) -> dict[str, Any]:
    build = {"uneven": True, "options": {"compute_metrics": accuracy}, **build}
    trainer = build_trainer(output_dir, strategy=strategy, **build)
    metrics = trainer.evaluate()
    output = trainer.predict(trainer.eval_dataset)
    return {"metrics": metrics, "predictions": output.predictions, "labels": output.label_ids, "test": output.metrics}


def check(result: dict[str, Any], samples: int = EVAL_SAMPLES) -> None:
    labels = np.stack([row["labels"].numpy() for row in TokenDataset(samples, seed=1, uneven=True).rows])
    np.testing.assert_array_equal(result["labels"], labels)
    np.testing.assert_allclose(result["predictions"], exact_logits(samples), atol=1e-5)
    assert result["metrics"]["eval_loss"] == pytest.approx(exact_loss(samples=samples), rel=1e-6)
    assert result["test"]["test_loss"] == pytest.approx(exact_loss(samples=samples), rel=1e-6)
    assert result["metrics"]["eval_rows"] == samples


@pytest.mark.parametrize("batch_size", [1, beyond(2), 4, beyond(8), 16])
def test_one_process_is_exact_at_any_batch_size(tmp_path, batch_size):
    check(evaluate(str(tmp_path), per_device_eval_batch_size=batch_size))


class Graphed(torch.nn.Module):
    """A model that returns the same memory in each forward, as CUDA graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.outputs = build_model(), (torch.empty(()), torch.empty(0))

    @torch.compiler.disable
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.network(input_ids=input_ids, labels=labels)
        for output, value in zip(self.outputs, (found.loss, found.logits), strict=True):
            output.resize_(value.shape).copy_(value)
        return dict(zip(("loss", "logits"), self.outputs, strict=True))


def test_what_cuda_graphs_return_is_copied_before_the_next_step(tmp_path):
    options = {"torch_compile_backend": "eager", "torch_compile_mode": "reduce-overhead"}
    args = arguments(str(tmp_path), per_device_eval_batch_size=4, **options)
    output = Trainer(Graphed(), args).predict(TokenDataset(EVAL_SAMPLES, seed=1, uneven=True))
    np.testing.assert_allclose(output.predictions, exact_logits(), atol=1e-5)
    assert output.metrics["test_loss"] == pytest.approx(exact_loss(), rel=1e-5)  # nobody knows that it shifts labels


CLASSIFIER: dict[str, Any] = {"model": "bert", "per_device_eval_batch_size": 4, "options": {}}
ACCUMULATIONS: list[dict[str, Any]] = [{}, {"eval_accumulation_steps": 1}, {"eval_accumulation_steps": 3}]


class Normed(torch.nn.Module):
    """A model with statistics of batches, which each rank's forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(x))[:, 0]
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


def points(count: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(count)) * torch.arange(1, 5)
    return [{"x": row, "labels": row.sum()} for row in rows]


def evaluate_normed(folder: str, strategy: str) -> tuple[float, float, int]:
    """Return the loss of an evaluation after training, that of rank 0's model over all samples, and its broadcasts."""
    options = {**strategy_arguments(strategy), "max_steps": 2, "dataloader_drop_last": True}
    trainer = Trainer(
        Normed(), arguments(folder, **options), train_dataset=points(16), eval_dataset=points(EVAL_SAMPLES)
    )
    trainer.train()
    sent, broadcast = [], dist.broadcast

    def count(*args: Any, **kwargs: Any) -> Any:
        sent.append(args[0].shape)
        return broadcast(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", count)
        loss = trainer.evaluate()["eval_loss"]
    assert len(trainer.predict(points(EVAL_SAMPLES)).predictions) == EVAL_SAMPLES
    saved = Normed().eval()
    state = trainer.accelerator.get_state_dict(trainer.model)
    saved.load_state_dict(state, strict=trainer.is_world_process_zero())  # the only one that has all of it
    with torch.no_grad():
        of_saved = saved(**default_data_collator(points(EVAL_SAMPLES)))["loss"].item()
    return loss, of_saved, len(sent)


def run_on_two(folder: str) -> dict[Any, Any]:
    """What all tests look at that needs two ranks."""
    found: dict[Any, Any] = {
        ("ddp", 1): evaluate(folder, "ddp", per_device_eval_batch_size=1),
        ("fsdp", 4): evaluate(folder, "fsdp", per_device_eval_batch_size=4),
        "one sample": evaluate(folder, "fsdp", eval_samples=1, per_device_eval_batch_size=4),
        "classifier": evaluate(folder, "ddp", **CLASSIFIER),
        "steps": evaluate_in_steps(folder, "ddp"),
        "inputs": [evaluate_with_inputs(folder, "ddp", **changes) for changes in ACCUMULATIONS],
        "shards": shard_sizes(folder),
    }
    for strategy in ("ddp", "fsdp"):
        found[strategy, "ragged"] = evaluate_ragged(folder, strategy)
        found[strategy, "by batch"] = evaluate_by_batch(folder, strategy)
        found[strategy, "normed"] = evaluate_normed(folder, strategy)
    return found


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> list[dict[Any, Any]]:
    return run_ranks(run_on_two, 2, str(tmp_path_factory.mktemp("two")), timeout=200)


@pytest.mark.multirank
@pytest.mark.parametrize(("strategy", "batch_size"), [("ddp", 1), ("fsdp", 4)])
def test_two_ranks_are_exact_at_any_batch_size(on_two, strategy, batch_size):
    for found in on_two:
        check(found[strategy, batch_size])


@pytest.mark.multirank
def test_a_rank_without_any_sample_takes_part(on_two):
    for found in on_two:
        check(found["one sample"], samples=1)


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_model_that_is_evaluated_is_the_one_that_is_saved(on_two, strategy):
    logged, of_saved, _ = on_two[0][strategy, "normed"]
    assert logged == pytest.approx(of_saved)


@pytest.mark.multirank
def test_buffers_are_sent_once_before_an_evaluation(on_two):
    # Statistics of a batch norm, and their number of batches: one bucket for each dtype.
    assert [found["fsdp", "normed"][2] for found in on_two] == [2, 2]


@pytest.mark.multirank
def test_a_classifier_gets_the_mean_over_its_rows(tmp_path, on_two):
    for result in (evaluate(str(tmp_path), **CLASSIFIER), on_two[0]["classifier"]):
        assert result["metrics"]["eval_loss"] == pytest.approx(exact_loss("bert"), rel=1e-6)


def test_batch_weighting_gives_the_number_of_upstream_on_one_process(tmp_path):
    by_batch = evaluate(str(tmp_path), per_device_eval_batch_size=4, eval_loss_weighting="batch")
    by_token = evaluate(str(tmp_path), per_device_eval_batch_size=4)

    network, rows = build_model().eval(), TokenDataset(EVAL_SAMPLES, seed=1, uneven=True).rows
    weighted = []
    for first in range(0, EVAL_SAMPLES, 4):
        batch = {key: torch.stack([row[key] for row in rows[first : first + 4]]) for key in rows[0]}
        with torch.no_grad():
            weighted += [float(network(**batch).loss)] * len(batch["labels"])
    assert by_batch["metrics"]["eval_loss"] == pytest.approx(np.mean(weighted), rel=1e-6)
    assert abs(by_batch["metrics"]["eval_loss"] - by_token["metrics"]["eval_loss"]) > 1e-5


def pad_left(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Cut each batch to its own length, so that batches differ."""
    length = 6 + int(rows[0]["input_ids"][0]) % 6
    return {key: torch.stack([row[key][:length] for row in rows]) for key in rows[0]}


def evaluate_ragged(output_dir: str, strategy: str) -> dict[str, Any]:
    return evaluate(
        output_dir, strategy, per_device_eval_batch_size=2, options={"data_collator": pad_left}, uneven=False
    )


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batches_of_different_lengths_are_padded_with_the_ignored_index(tmp_path, on_two, strategy):
    one = evaluate_ragged(str(tmp_path), "single")

    two = on_two[0][strategy, "ragged"]

    np.testing.assert_allclose(two["predictions"], one["predictions"], atol=1e-5)
    np.testing.assert_array_equal(two["labels"], one["labels"])
    assert (one["labels"] == -100).any()
    assert two["metrics"]["eval_loss"] == pytest.approx(one["metrics"]["eval_loss"], rel=1e-6)


class BatchAccuracy:
    """Counts over batches and answers when it is told to."""

    def __init__(self) -> None:
        self.hits, self.rows, self.answers = 0, 0, 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float] | None:
        assert isinstance(prediction.predictions, torch.Tensor)
        self.hits += int((prediction.predictions == prediction.label_ids[:, 0]).sum())
        self.rows += len(prediction.predictions)
        if not compute_result:
            return None
        self.answers += 1
        inputs = len(prediction.inputs["input_ids"])
        return {"rows": self.rows, "hits": self.hits, "answers": self.answers, "inputs": inputs}


def first_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits[:, 0].argmax(-1)


def evaluate_by_batch(output_dir: str, strategy: str) -> dict[str, float]:
    trainer = build_trainer(
        output_dir, strategy=strategy, batch_eval_metrics=True, include_for_metrics=["inputs", "loss"],
        per_device_eval_batch_size=2,
        options={"compute_metrics": BatchAccuracy(), "preprocess_logits_for_metrics": first_token},
    )  # fmt: skip
    return trainer.evaluate()


@pytest.mark.multirank
def test_batch_metrics_see_every_sample_and_answer_once(tmp_path, on_two):
    one = evaluate_by_batch(str(tmp_path), "single")
    two = [found[strategy, "by batch"] for found in on_two for strategy in ("ddp", "fsdp")]

    for metrics in (one, *two):
        assert metrics["eval_rows"] == EVAL_SAMPLES
        assert metrics["eval_answers"] == 1
        assert metrics["eval_inputs"] == (1 if metrics is one else 3)


def seen(prediction: Any) -> dict[str, Any]:
    return {
        "inputs_ok": bool((prediction.inputs[:, 0] == prediction.label_ids[:, 0]).all()),
        "losses": len(prediction.losses),
        "mean": float(prediction.losses.mean()),
    }


def evaluate_with_inputs(output_dir: str, strategy: str, **changes: Any) -> dict[str, Any]:
    trainer = build_trainer(
        output_dir, strategy=strategy, include_for_metrics=["inputs", "loss"], per_device_eval_batch_size=2,
        options={"compute_metrics": seen}, **changes,
    )  # fmt: skip
    return trainer.evaluate()


@pytest.mark.multirank
def test_inputs_and_losses_reach_the_metrics_row_by_row(tmp_path, on_two):
    one = [evaluate_with_inputs(str(tmp_path), "single", **changes) for changes in ACCUMULATIONS]

    for metrics in (*one, *on_two[0]["inputs"]):
        assert metrics["eval_inputs_ok"] is True
        assert metrics["eval_losses"] == EVAL_SAMPLES
        assert metrics["eval_mean"] == pytest.approx(metrics["eval_loss"], rel=1e-5)


def steps_seen(prediction: Any) -> dict[str, Any]:
    return {
        "sizes": [len(step) for step in prediction.predictions],
        "widths": [s.shape[1] for s in prediction.label_ids],
    }


def evaluate_in_steps(output_dir: str, strategy: str) -> dict[str, Any]:
    options = {"compute_metrics": steps_seen, "data_collator": pad_left}
    trainer = build_trainer(
        output_dir, strategy=strategy, eval_do_concat_batches=False, per_device_eval_batch_size=4, options=options
    )
    return trainer.evaluate()


@pytest.mark.multirank
def test_without_concatenation_each_step_stays_by_itself(tmp_path, on_two):
    one = evaluate_in_steps(str(tmp_path), "single")
    two = on_two[0]["steps"]

    assert one["eval_sizes"] == [4, 4, 3]
    assert len(set(one["eval_widths"])) > 1
    assert two["eval_sizes"] == [8, 3]


def test_batches_without_a_label_do_not_count(tmp_path):
    trainer = build_trainer(tmp_path, per_device_eval_batch_size=1, uneven=True)
    expected = trainer.evaluate()["eval_loss"]

    trainer.eval_dataset.rows.append({**trainer.eval_dataset.rows[0], "labels": torch.full((12,), -100)})

    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_predictions_without_labels_have_no_loss(tmp_path):
    trainer = build_trainer(tmp_path)
    rows = [{"input_ids": row["input_ids"]} for row in trainer.eval_dataset.rows]

    output = trainer.predict(rows)

    assert output.label_ids is None
    assert output.predictions.shape == (EVAL_SAMPLES, 12, 64)
    assert "test_loss" not in output.metrics


def test_several_evaluation_sets_have_their_own_metrics(tmp_path):
    trainer = build_trainer(tmp_path)
    trainer.eval_dataset = {"long": TokenDataset(9), "short": TokenDataset(3)}

    metrics = trainer.evaluate()

    assert {"eval_long_loss", "eval_short_loss"} <= metrics.keys()


def test_a_loader_of_ones_own_counts_every_row(tmp_path):
    trainer = build_trainer(tmp_path)
    loader = torch.utils.data.DataLoader(trainer.eval_dataset, batch_size=3)
    trainer.get_eval_dataloader = lambda dataset=None: loader

    assert trainer.evaluate()["eval_loss"] == pytest.approx(build_trainer(tmp_path).evaluate()["eval_loss"], rel=1e-6)


def shard_sizes(output_dir: str) -> tuple[list[int], int]:
    trainer = build_trainer(output_dir, strategy="fsdp")
    trainer.train()
    trainer.evaluate()
    return [parameter.to_local().numel() for parameter in trainer.model.parameters()], sum(
        parameter.numel() for parameter in trainer.model.parameters()
    )


@pytest.mark.multirank
def test_a_sharded_model_is_sharded_again_after_evaluation(on_two):
    results = [found["shards"] for found in on_two]

    assert sum(sum(local) for local, _ in results) == results[0][1]


def test_full_bf16_evaluation_casts_the_model(tmp_path):
    trainer = build_trainer(tmp_path, bf16_full_eval=True)

    loss = trainer.evaluate()["eval_loss"]

    assert next(trainer.model.parameters()).dtype == torch.bfloat16
    assert loss == pytest.approx(exact_loss(), rel=0.05)
    # Which transformers would now train, in 16 bits.
    with pytest.raises(ConfigError, match=r"an evaluation with bf16_full_eval=True has cast the weights.*train first"):
        trainer.train()


# --- rows of several ranks come back in sample order, whatever their shapes ---

ALONE = ProcessContext(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), backend=None)


def test_steps_of_different_widths_are_padded():
    joined = gather_steps([torch.ones(2, 3), torch.ones(1, 5)], ALONE)
    assert joined.tolist() == [[1, 1, 1, -100, -100]] * 2 + [[1] * 5]


def test_structures_are_joined_leaf_by_leaf():
    step = {"a": torch.ones(2), "b": (torch.zeros(2, 1), torch.tensor(1.0))}

    joined = gather_steps([step, step], ALONE)

    assert joined["a"].shape == (4,)
    assert joined["b"][0].shape == (4, 1)
    assert joined["b"][1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([torch.ones(2, 3), torch.ones(2)], "dimensions in different batches"),
        ([(torch.ones(2), "text")], "returned a str among its predictions.*ignore_keys"),
    ],
)
def test_steps_that_cannot_be_joined_are_refused(steps, message):
    with pytest.raises(ConfigError, match=message):
        gather_steps(steps, ALONE)


def test_bfloat16_becomes_float32():
    assert to_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32


class CountSteps(Hearing):
    num_steps = 0

    def hear(self, event: str, *args: Any, **kwargs: Any) -> None:
        self.num_steps += event == "on_prediction_step"


def test_callbacks_hear_every_step(tmp_path):
    count = CountSteps()
    build_trainer(tmp_path, per_device_eval_batch_size=4, options={"callbacks": [count]}).evaluate()
    assert count.num_steps == 3


CASES = [(dtype, size) for dtype in (torch.float32, torch.int64, torch.bfloat16) for size in (1, 2**20)]


def gather_ragged(accelerator: Any, dtype: torch.dtype, piece_bytes: int) -> Any:
    """Rank r has r + 1 rows of width r + 2 in each of 3 steps, and rank 1 lacks the last step."""
    uneven_gather._PIECE_BYTES = piece_bytes
    rank = accelerator.process_index
    steps = [torch.full((rank + 1, rank + 2), 10 * step + rank).to(dtype) for step in range(3 if rank == 0 else 2)]
    return gather_steps(steps, accelerator.readers).float().numpy()


def gather_from_one(accelerator: Any) -> Any:
    steps = [{"a": torch.arange(3), "b": torch.ones(3, 2, dtype=torch.bool)}] if accelerator.is_main_process else []
    result = gather_steps(steps, accelerator.readers)
    return result["a"].tolist(), result["b"].shape, bool(result["b"].all())


def gather_all() -> Any:
    accelerator = Accelerator(cpu=True)
    ragged = [gather_ragged(accelerator, dtype, piece_bytes) for dtype, piece_bytes in CASES]
    no_tensors = gather_steps([()] if accelerator.is_main_process else [], accelerator.readers)
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
