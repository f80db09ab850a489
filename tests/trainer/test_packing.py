"""A Trainer on packed rows: the loss and the gradients of the documents alone, on any layout; and what is refused."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils.data import IterableDataset

import accel_trainer
from accel_trainer.data_loader import pack_dataset
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.plugins.parallelism import TorchContextParallelConfig
from tests.cells import beyond, selected
from tests.ranks import RankFailure, preload, run_ranks
from tests.strategy_configs import HAS_DEEPSPEED, zero_section
from tests.trainer_jobs import MULTIPLIES_COPIES, arguments, build_model, summary

preload("transformers.trainer", "transformers.models.llama.modeling_llama", "accel_trainer.trainer.trainer")

MAX_LENGTH = 24
RATE = 0.05


def documents(count: int = 30) -> list[dict[str, torch.Tensor]]:
    """Return documents of 2 to 19 tokens, the labels of whose first ones do not count."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(count):
        tokens = torch.randint(3, 64, (int(torch.randint(2, 20, (), generator=generator)),), generator=generator)
        labels = tokens.clone()
        labels[: index % 3] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(documents())


def build(
    directory: str, *, model: Any = None, options: dict[str, Any] | None = None, stream: bool = False, **changes: Any
) -> Any:
    from accel_trainer import Trainer

    common: dict[str, Any] = {
        "packing": True, "max_length": MAX_LENGTH, "per_device_train_batch_size": 2, "optim": "sgd",
        "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
    }  # fmt: skip
    args = arguments(directory, **(common | changes))
    data = Stream() if stream else documents()
    return Trainer(model or build_model("llama"), args, train_dataset=data, **(options or {}))


def train_all(directory: str, layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train one update of all documents with each layout.

    With 15 rows and micro-batches of 2 its windows end with a short one, or none.
    """
    found = {}
    for name, options in layouts.items():
        trainer = build(f"{directory}/{name}", gradient_accumulation_steps=20, **options)
        trainer.train()
        found[name] = summary(trainer)
    return found


@functools.cache
def alone(strategy: str) -> tuple[float, float, dict[str, Any]]:
    """Return the mean loss over the tokens of all documents, one by one, its norm, and the weights after it."""
    model = build_model("llama")
    total, count = torch.zeros(()), 0
    pieces = documents()
    if strategy == "wrapped":
        packed = pack_dataset(pieces, MAX_LENGTH, strategy, seed=42)
        pieces = [piece for index in range(len(packed)) for piece in packed[index]]
    for row in pieces:
        logits = model(input_ids=row["input_ids"][None])["logits"][0]
        total = total + nn.functional.cross_entropy(logits[:-1], row["labels"][1:], reduction="sum")
        count += int((row["labels"][1:] != -100).sum())
    (total / count).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    return total.item() / count, norm.item(), {name: value.numpy() for name, value in model.state_dict().items()}


ZERO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "single without padding": (1, {"padding_free": True}),
    "single wrapped": (1, {"packing_strategy": "wrapped"}),
    "single split": (1, {"packing_strategy": "bfd_split"}),
    "stream": (1, {"stream": True, "max_steps": 1}),
    "ddp": (2, {}),
    "ddp without padding": (2, {"padding_free": True}),
    "ddp stream": (2, {"stream": True, "max_steps": 1}),
    "fsdp2": (2, {"fsdp": "full_shard auto_wrap"}),
    "hsdp": (4, {"fsdp": "full_shard", "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}}),
    "tp": (2, {"parallelism_config": {"tp_size": 2}}),
    "sp": (2, {"parallelism_config": {"sp_size": 2}}),
    "cp": (2, {"parallelism_config": {"cp_size": 2}}),
    # Last: while ZeRO-3 is about, models are built in pieces.
    **{
        f"zero{stage}": (2, {"deepspeed": {"zero_optimization": zero_section(stage), **ZERO}})
        for stage in (1, 2, 3)
        if HAS_DEEPSPEED
    },
}
REFUSED = ("sp", "cp") if MULTIPLIES_COPIES else ()
"""With this release of transformers."""
BEYOND = ("ddp stream", "hsdp", "zero1", "zero2")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what gives the runs on a number of ranks: those of each layout, by rank."""
    cells = selected(request, "test_an_update_on_packed_rows_is_that_of_the_documents_alone")
    folder = str(tmp_path_factory.mktemp("layouts"))

    @functools.cache
    def of(world_size: int) -> list[Any]:
        layouts = {name: LAYOUTS[name][1] for (name,) in cells if LAYOUTS[name][0] == world_size}
        return run_ranks(train_all, world_size, folder, layouts, timeout=200)

    return of


@pytest.mark.timeout(240)  # the first test waits for the runs that all look at
@pytest.mark.parametrize("name", [beyond(name) if name in BEYOND else name for name in LAYOUTS if name not in REFUSED])
def test_an_update_on_packed_rows_is_that_of_the_documents_alone(name: str, runs: Any):
    world_size, options = LAYOUTS[name]
    found = [of_rank[name] for of_rank in runs(world_size)]

    loss, norm, weights = alone(options.get("packing_strategy", "bfd"))
    for run in found:
        assert run["losses"] == pytest.approx([loss], abs=2e-6)
        assert run["grad_norms"] == pytest.approx([norm], rel=2e-6)
    for key, value in found[0]["weights"].items():
        assert torch.allclose(torch.tensor(value), torch.tensor(weights[key]), rtol=0, atol=2e-6), key


def test_a_run_of_several_epochs_resumes_at_the_row(tmp_path: Path):
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    through = build(str(tmp_path / "through"), **options)
    through.train()
    resumed = build(str(tmp_path / "through"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "through" / "checkpoint-3"))

    losses = summary(through)["losses"]
    assert len(losses) > 6
    assert losses == summary(resumed)["losses"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"seed": 7}, r"with data_seed=42, this run has 7, .* Resume with data_seed=42, or set ignore_data_skip=True"),
        (
            {"packing_strategy": "bfd_split"},
            r"with packing_strategy=bfd, this run has bfd_split, and its training data",
        ),
    ],
)
def test_rows_that_are_packed_otherwise_are_no_resume(tmp_path: Path, changes: dict[str, Any], found: str):
    build(str(tmp_path), save_strategy="steps", save_steps=3).train()
    checkpoint = str(tmp_path / "checkpoint-3")

    with pytest.raises(IncompatibleCheckpointError, match=found):
        build(str(tmp_path), **changes).train(resume_from_checkpoint=checkpoint)
    build(str(tmp_path), ignore_data_skip=True, **changes).train(resume_from_checkpoint=checkpoint)
    again = build(str(tmp_path), **changes)
    again.train_dataset = pack_dataset(documents(), MAX_LENGTH, seed=42)  # by nobody's arguments
    again.train(resume_from_checkpoint=checkpoint)


def test_another_length_of_a_row_is_no_resume(tmp_path: Path):
    build(str(tmp_path), save_strategy="steps", save_steps=3).train()
    other = build(str(tmp_path))
    other.args.max_length = 20

    with pytest.raises(
        IncompatibleCheckpointError, match=r"a training dataset of 14 samples, .* this run's has 1[5-9]:"
    ):
        other.train(resume_from_checkpoint=True)


def test_evaluation_counts_each_sample_once_and_is_not_packed(tmp_path: Path):
    rows = [row for row in documents() if len(row["input_ids"]) == 12]
    trainer = build(str(tmp_path), per_device_eval_batch_size=2)

    found = trainer.predict(rows)

    assert found.predictions.shape == (len(rows), 12, 64)
    assert found.label_ids.tolist() == [row["labels"].tolist() for row in rows]


@pytest.mark.parametrize(("padding_free", "has_tokenizer"), [(False, False), (False, True), (True, True)])
def test_documents_that_packing_takes_are_evaluated(tmp_path: Path, padding_free: bool, has_tokenizer: bool):
    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    options = {"processing_class": tokenizer if has_tokenizer else None}
    trainer = build(str(tmp_path), options=options, padding_free=padding_free, per_device_eval_batch_size=4)
    bare = [{"input_ids": row["input_ids"]} for row in documents()]
    labelled = [{**row, "labels": row["input_ids"].clone()} for row in bare]

    losses = [trainer.evaluate(data)["eval_loss"] for data in (documents(), bare, labelled)]

    assert losses == pytest.approx([alone("bfd")[0], losses[2], losses[2]], abs=2e-6)


def test_the_collator_of_the_user_makes_the_labels_of_each_document(tmp_path: Path):
    def double(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = samples[0]["input_ids"][None]
        return {"input_ids": ids, "labels": 63 - ids}

    batch = next(iter(build(str(tmp_path), options={"data_collator": double}).get_train_dataloader()))

    counted = batch["labels"] != -100
    assert counted.any()
    assert torch.equal(batch["labels"][counted], 63 - batch["input_ids"][counted])


def test_without_padding_alone_the_samples_of_a_batch_are_one_row(tmp_path: Path):
    trainer = build(str(tmp_path), packing=False, padding_free=True, train_sampling_strategy="sequential")

    batch = next(iter(trainer.get_train_dataloader()))

    expected = torch.cat([row["input_ids"] for row in documents()[:2]])
    assert torch.equal(batch["input_ids"], expected[None])


def test_what_cannot_be_packed_is_refused_before_the_first_batch(tmp_path: Path):
    blind = build_model("llama")
    original = blind.forward
    blind.forward = lambda input_ids, position_ids=None, **kwargs: original(input_ids=input_ids, **kwargs)

    trainer = build(str(tmp_path), model=blind)
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot be trained on packed documents: what it"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packing_strategy": "ffd"},
            "packing=True: packing_strategy='ffd' is none of bfd, bfd_split, wrapped; choose",
        ),
        ({"max_length": None}, "packing=True: max_length=None is no length of a row; give the number of tokens"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length' groups samples"),
        ({"model": "bert"}, "packing=True: BertForSequenceClassification is no causal language model"),
        ({"model": "bert", "packing": False, "padding_free": True}, "padding_free=True: BertForSequenceClassification"),
    ],
)
def test_options_that_do_not_go_with_packing_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    if "model" in changes:
        changes = changes | {"model": build_model(changes["model"])}
    with pytest.raises(ConfigError, match=message):
        build(str(tmp_path), **changes)


def ring(directory: str) -> None:
    build(directory, parallelism_config={"cp_size": 2, "cp_handler": TorchContextParallelConfig("alltoall")})


@pytest.mark.skipif(MULTIPLIES_COPIES, reason="this release of transformers is refused with cp_size")
def test_ring_attention_is_refused_by_name(tmp_path: Path):
    with pytest.raises(RankFailure, match=r"cp_comm_strategy=alltoall is ring attention.*to all.*use allgather"):
        run_ranks(ring, 2, str(tmp_path))


def test_a_class_of_another_library_with_these_fields_packs_by_itself(tmp_path: Path):
    @dataclass
    class Theirs(transformers.TrainingArguments):
        packing: bool = True
        max_length: int | None = None

    @dataclass
    class Both(Theirs, accel_trainer.TrainingArguments):
        pass

    args = Both(str(tmp_path), use_cpu=True, report_to="none")
    trainer = accel_trainer.Trainer(build_model("llama"), args, train_dataset=documents())

    assert (args.packing, args.max_length) == (True, None)
    assert len(trainer.get_train_dataloader().dataset) == 30
