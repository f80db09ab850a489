"""Collators that make one, two, three or a varying number of rows of a sample: evaluation is exact for all of them.

The reference is a plain loop over the consecutive batches that the samplers make: they are the same on any number of
ranks, because rank r takes batch r of every round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from accel_trainer.errors import ConfigError
from tests.cells import beyond
from tests.ranks import run_ranks
from tests.trainer_jobs import arguments

pytestmark = pytest.mark.timeout(120)


class Scores(nn.Module):
    """One score for each row; the loss is the mean over the rows, or over the tokens that have a label."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.weight * x
        if labels is None:
            return {"loss": scores.square().mean(), "scores": scores}
        if labels.is_floating_point():
            return {"loss": (scores - labels).square().mean(), "scores": scores}
        counted = labels != -100
        return {"loss": (scores[:, None] - labels).square()[counted].mean(), "scores": scores}


class Samples(torch.utils.data.Dataset):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index}


class SampleStream(IterableDataset):
    """Without a length."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from ({"index": index} for index in range(self.num_samples))


class ShardedSamples(SampleStream):
    """Offers three shards, so that each of at most three ranks reads some of its own."""

    num_shards = 3

    def __init__(self, num_samples: int, shards: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__(num_samples)
        self.shards = shards

    def shard(self, num_shards: int, index: int) -> ShardedSamples:
        return ShardedSamples(self.num_samples, self.shards[index::num_shards])

    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from ({"index": index} for shard in self.shards for index in range(shard, self.num_samples, 3))


DATASETS: dict[str, Any] = {
    "map": Samples, "dispatched": Samples, "stream": SampleStream, "shards": ShardedSamples,
}  # fmt: skip


@dataclass(frozen=True)
class Collate:
    """Rows of a batch: `rows` says which, `labels` what kind of labels they have."""

    rows: str
    labels: str

    def values(self, samples: list[int]) -> list[int]:
        if self.rows == "pairs":  # as DPO lays them out: all that were chosen, then all that were rejected
            return [100 * part + sample for part in range(2) for sample in samples]
        counts = {"one": lambda _: 1, "three": lambda _: 3, "ragged": lambda sample: 1 + sample % 4}
        return [100 * row + sample for sample in samples for row in range(counts[self.rows](sample))]

    def __call__(self, samples: list[dict[str, int]]) -> dict[str, Tensor]:
        x = torch.tensor(self.values([sample["index"] for sample in samples]), dtype=torch.float32)
        batch = {"x": x}
        if self.labels == "float":
            batch["labels"] = x + x % 7
        elif self.labels == "tokens":
            tokens = x.long()[:, None].expand(-1, 4).clone()
            tokens[torch.arange(4) > tokens[:, :1] % 5] = -100
            batch["labels"] = tokens
        return batch


@dataclass(frozen=True)
class Case:
    rows: str
    labels: str
    source: str
    num_samples: int
    batch_size: int
    even_batches: bool

    def batches(self) -> list[dict[str, Tensor]]:
        """The batches of a plain loop."""
        indices, size = range(self.num_samples), self.batch_size
        collate = Collate(self.rows, self.labels)
        return [
            collate([{"index": index} for index in indices[begin : begin + size]])
            for begin in range(0, self.num_samples, size)
        ]

    def expected(self) -> dict[str, Any]:
        """What evaluation has to give, by the plain loop."""
        model, batches = Scores(), self.batches()
        with torch.no_grad():
            losses = [float(model(**batch)["loss"]) for batch in batches]
            scores = torch.cat([model(**batch)["scores"] for batch in batches])
        if self.labels == "none":  # a loss of the user's own: each batch counts by its samples
            sizes = [min(self.batch_size, self.num_samples - index * self.batch_size) for index in range(len(batches))]
        elif self.labels == "tokens":
            sizes = [int((batch["labels"] != -100).sum()) for batch in batches]
        else:
            sizes = [len(batch["labels"]) for batch in batches]
        return {
            "loss": np.average(losses, weights=sizes),
            "predictions": scores.tolist(),
            "labels": None if self.labels == "none" else torch.cat([b["labels"] for b in batches]).tolist(),
            "num_samples": self.num_samples,
        }


CASES = st.builds(
    Case,
    rows=st.sampled_from(["one", "pairs", "three", "ragged"]),
    labels=st.sampled_from(["float", "tokens", "none"]),
    source=st.sampled_from(sorted(DATASETS)),
    num_samples=st.integers(1, 15),
    batch_size=st.integers(1, 4),
    even_batches=st.booleans(),
    # Shards are read in an order of their own: the loss of a batch that counts by its samples depends on it.
).filter(lambda case: (case.rows, case.labels, case.source) != ("ragged", "none", "shards"))


def build_trainer(output_dir: str, **changes: Any) -> Any:
    from accel_trainer.trainer import Trainer

    class OwnLoss(Trainer):
        """Without labels, as trainers of preferences have it: the loss comes from a step of their own."""

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            if "labels" in inputs:
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            with torch.no_grad():
                output = model(**inputs)
            return output["loss"], None if prediction_loss_only else output["scores"], None

    return OwnLoss(Scores(), arguments(output_dir, remove_unused_columns=False, **changes))


def evaluate_all(output_dir: str, cases: list[Case]) -> list[dict[str, Any]]:
    trainers = {
        (even, dispatch): build_trainer(
            output_dir,
            accelerator_config={"even_batches": even, "dispatch_batches": dispatch},
            label_names=["labels"],
        )
        for even in (False, True)
        for dispatch in (False, True)
    }
    found = []
    for case in cases:
        trainer = trainers[case.even_batches, case.source == "dispatched"]
        trainer.data_collator = Collate(case.rows, case.labels)
        trainer.args.per_device_eval_batch_size = case.batch_size
        loader = trainer.get_eval_dataloader(DATASETS[case.source](case.num_samples))
        output = trainer.evaluation_loop(loader, "Evaluation", prediction_loss_only=False)
        found.append(
            {
                "loss": output.metrics["eval_loss"],
                "predictions": output.predictions.tolist(),
                "labels": None if output.label_ids is None else output.label_ids.tolist(),
                "num_samples": output.num_samples,
            }
        )
    return found


@pytest.mark.multirank
@pytest.mark.parametrize("world_size", [1, beyond(2), 3])
# Not shrunk: each example starts processes, and a case names what failed.
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
@given(cases=st.lists(CASES, min_size=30, max_size=40, unique=True))
def test_any_number_of_rows_for_a_sample_is_evaluated_exactly(tmp_path_factory, world_size, cases):
    folder = str(tmp_path_factory.mktemp("rows"))
    results = run_ranks(evaluate_all, world_size, folder, cases, timeout=100)

    for found in results:
        for case, values in zip(cases, found, strict=True):
            expected = case.expected()
            assert values.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-6), case
            if case.source == "shards":
                for each in (values, expected):
                    each.update({name: sorted(each[name] or []) for name in ("predictions", "labels")})
            assert values == expected, case


class Alignments(Scores):
    """Its loss is a mean over rows, however many labels they have, as that of alignments."""

    loss_type = "ForCTCLoss"

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(x, None)


def test_a_loss_of_alignments_counts_by_rows(tmp_path):
    case = Case("one", "tokens", "map", 7, 3, even_batches=False)
    trainer = build_trainer(str(tmp_path), label_names=["labels"], per_device_eval_batch_size=3)
    trainer.model, trainer.data_collator = Alignments(), Collate(case.rows, case.labels)

    loss = trainer.evaluate(Samples(case.num_samples))["eval_loss"]

    assert loss == pytest.approx(np.mean([(2.0 * index) ** 2 for index in range(case.num_samples)]), rel=1e-6)


def evaluate_items(output_dir: str) -> tuple[Any, list[Any]]:
    """Evaluate a loader whose items are batches, and twice a stream that is read by workers that live on."""
    case = Case("ragged", "float", "map", 9, 2, even_batches=True)
    trainer = build_trainer(output_dir, accelerator_config={"even_batches": True}, label_names=["labels"])
    loader = trainer.accelerator.prepare(torch.utils.data.DataLoader(case.batches(), batch_size=None))
    items = trainer.evaluation_loop(loader, "Evaluation", prediction_loss_only=False)

    trainer.data_collator = Collate(case.rows, case.labels)
    changes = {"per_device_eval_batch_size": 2, "dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    for name, value in changes.items():
        setattr(trainer.args, name, value)
    stream = SampleStream(case.num_samples)
    outputs = [items, *(trainer.predict(stream) for _ in range(2))]
    losses = [items.metrics["eval_loss"], *(output.metrics["test_loss"] for output in outputs[1:])]
    return items.num_samples, [(o.predictions.tolist(), loss) for o, loss in zip(outputs, losses, strict=True)]


@pytest.mark.multirank
@pytest.mark.parametrize("world_size", [1, 2])
def test_items_that_are_batches_and_streams_read_by_workers_are_evaluated_exactly(tmp_path, world_size):
    case = Case("ragged", "float", "map", 9, 2, even_batches=True)
    expected = case.expected()

    for num_rows, found in run_ranks(evaluate_items, world_size, str(tmp_path)):
        assert num_rows == len(expected["predictions"])
        for predictions, loss in found:
            assert predictions == expected["predictions"]
            assert loss == pytest.approx(expected["loss"], rel=1e-6)


class TwoParts(IterableDataset):
    """A stream of which the part of the first of two workers ends in a step that not all ranks have samples of."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        worker = torch.utils.data.get_worker_info()
        parts = (range(9), range(100, 124))
        for part in parts if worker is None else parts[worker.id :: worker.num_workers]:
            yield from ({"index": index} for index in part)


def predict_parts(output_dir: str, batch_size: int) -> list[Any]:
    case = Case("one", "tokens", "stream", 33, batch_size, even_batches=False)
    changes = {"per_device_eval_batch_size": batch_size, "dataloader_num_workers": 2, "label_names": ["labels"]}
    found = []
    for joins in (True, False):
        trainer = build_trainer(output_dir, eval_do_concat_batches=joins, **changes)
        trainer.data_collator = Collate(case.rows, case.labels)
        output = trainer.predict(TwoParts())
        kinds = [[each] if joins else each for each in (output.predictions, output.label_ids)]
        found.append([[batch.tolist() for batch in kind] for kind in kinds])
    return found


@pytest.mark.multirank
def test_a_short_step_in_the_middle_leaves_predictions_in_order(tmp_path):
    expected = predict_parts(str(tmp_path), 8)

    assert run_ranks(predict_parts, 2, str(tmp_path), 4) == [expected] * 2


# --- lists with one entry for each sample ---------------------------------------------------------------------------


class Detector(nn.Module):
    """Two boxes for each image, and a loss over images."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, pixel_values: Tensor, labels: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        scores = self.weight * pixel_values
        loss = torch.stack([scores[index] + len(label["boxes"]) for index, label in enumerate(labels)]).mean()
        return {"loss": loss, "logits": scores[:, None, None].expand(-1, 2, 3), "boxes": scores[:, None].expand(-1, 2)}


def label_of(image: int) -> dict[str, Tensor]:
    return {"image_id": torch.tensor(image), "boxes": torch.full((image % 3, 4), float(image))}


def collate_images(samples: list[dict[str, int]]) -> dict[str, Any]:
    images = [sample["index"] for sample in samples]
    return {"pixel_values": torch.tensor(images, dtype=torch.float32), "labels": [label_of(image) for image in images]}


def read_labels(labels: list[dict[str, Any]]) -> list[tuple[int, list[list[float]]]]:
    return [(int(label["image_id"]), np.asarray(label["boxes"]).tolist()) for label in labels]


class SeenLabels:
    """Notes the labels that a metric is called with, once or for each batch."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.rows: list[Any] = []

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        self.steps.append(prediction.label_ids)
        self.rows.append(prediction.predictions)
        return {}


def of_each_image(logits: Any, labels: Any) -> list[dict[str, Tensor]]:
    """What post-processing of a detector gives: as many boxes of an image as it has."""
    return [{"boxes": row[: int(label["image_id"]) % 3]} for row, label in zip(logits[1], labels, strict=True)]


def tensor_of_each_image(logits: Any, labels: Any) -> list[Tensor]:
    return [row["boxes"] for row in of_each_image(logits, labels)]


def build_detector(output_dir: str, **changes: Any) -> Any:
    from accel_trainer.trainer import Trainer

    options = {name: changes.pop(name) for name in ("preprocess_logits_for_metrics",) if name in changes}
    args = arguments(
        output_dir, remove_unused_columns=False, label_names=["labels"], per_device_eval_batch_size=2, **changes
    )
    seen = SeenLabels()
    return Trainer(Detector(), args, data_collator=collate_images, compute_metrics=seen, **options), seen


def detect(output_dir: str, num_images: int) -> dict[str, Any]:
    """All ways in which the labels of images come, and what they are, as plain lists."""
    found: dict[str, Any] = {}
    for name, changes in {
        "steps": {"eval_do_concat_batches": False, "eval_use_gather_object": True},
        "steps, not told": {"eval_do_concat_batches": False, "eval_accumulation_steps": 1},
        "joined": {},
        "batches": {"batch_eval_metrics": True},
    }.items():
        trainer, seen = build_detector(output_dir, **changes)
        metrics = trainer.evaluate(Samples(num_images))
        steps = seen.steps[0] if name.startswith("steps") else seen.steps
        found[name] = [read_labels(step) for step in steps], metrics["eval_loss"]
        rows = seen.rows[0] if name.startswith("steps") else seen.rows
        found[f"{name}: ids by rows"] = [(np.asarray(row[0])[:, 0, 0] / 2).tolist() for row in rows]
    for name, function, changes in (
        ("own dicts", of_each_image, {}),
        ("own tensors", tensor_of_each_image, {"eval_use_gather_object": True}),
    ):
        trainer, _ = build_detector(output_dir, preprocess_logits_for_metrics=function, **changes)
        rows = trainer.predict(Samples(num_images)).predictions
        found[name] = [np.asarray(row["boxes"] if name == "own dicts" else row).tolist() for row in rows]
    trainer, _ = build_detector(output_dir, preprocess_logits_for_metrics=tensor_of_each_image)
    with pytest.raises(
        ConfigError, match=r"predictions hold .* in (one|different) steps?\..*set eval_use_gather_object=True"
    ):
        trainer.predict(Samples(num_images))
    return found


@pytest.mark.multirank
@pytest.mark.parametrize("world_size", [1, beyond(2), 3])
def test_labels_of_images_come_once_and_in_order(tmp_path, world_size):
    num_images, per_step = 7, 2 * world_size
    images = [(image, [[float(image)] * 4] * (image % 3)) for image in range(num_images)]
    steps = [images[begin : begin + per_step] for begin in range(0, num_images, per_step)]
    loss = np.mean([2.0 * image + image % 3 for image in range(num_images)])

    for found in run_ranks(detect, world_size, str(tmp_path), num_images):
        for name in ("steps", "steps, not told", "batches"):
            assert found[name] == (steps, pytest.approx(loss)), name
            assert found[f"{name}: ids by rows"] == [[float(image) for image, _ in step] for step in steps], name
        assert found["joined"] == ([images], pytest.approx(loss))
        expected = [[2.0 * image] * min(2, image % 3) for image in range(num_images)]
        assert found["own dicts"] == found["own tensors"] == expected
