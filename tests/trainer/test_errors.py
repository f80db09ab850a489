"""What cannot be honoured is refused, with what was found and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from accel_trainer.errors import ConfigError
from accel_trainer.trainer import Trainer
from tests.ranks import run_ranks
from tests.trainer_jobs import TokenDataset, arguments, build_model, build_trainer


def give_empty_later(trainer: Trainer) -> None:
    trainer.train_dataset = TokenDataset(0)
    trainer.train()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda folder: build_trainer(folder, samples=0), r"train_dataset is empty .*0 samples.*check its path, split"),
        (lambda folder: give_empty_later(build_trainer(folder)), "train_dataset is empty"),
        (lambda folder: build_trainer(folder, eval_samples=0), "eval_dataset is empty"),
        (
            lambda folder: Trainer(
                build_model(), arguments(folder), train_dataset=TokenDataset(4),
                eval_dataset={"long": TokenDataset(3), "short": TokenDataset(0)},
            ),
            r"eval_dataset\['short'\] is empty",
        ),
        (lambda folder: build_trainer(folder).evaluate(TokenDataset(0)), "eval_dataset is empty"),
        (lambda folder: build_trainer(folder).predict(TokenDataset(0)), "test_dataset is empty"),
    ],
    ids=["training set", "training set given later", "evaluation set", "one of several", "to evaluate", "to predict"],
)  # fmt: skip
def test_an_empty_dataset_is_named(tmp_path, use: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        use(tmp_path)


def test_a_schedule_of_batches(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_TRAINER_SCHEDULER_STEPS", "per_process")

    with pytest.raises(ConfigError, match=r"scheduler_steps=per_process .*the Trainer sizes its own in updates; leave"):
        build_trainer(tmp_path)


@pytest.mark.parametrize("model", [42, {"weights": 1}, build_model])
def test_model_that_is_neither_module_nor_path(tmp_path, model):
    with pytest.raises(ConfigError, match=r"model is a .*; expected a torch.nn.Module, or the path or name of a saved"):
        Trainer(model, arguments(tmp_path))


def test_a_path_is_a_model(tmp_path):
    build_model("bert").save_pretrained(tmp_path / "bert")

    trainer = Trainer(tmp_path / "bert", arguments(tmp_path), train_dataset=TokenDataset(8, kind="class"))
    trainer.train()

    assert type(trainer.model) is transformers.BertForSequenceClassification


def test_a_path_whose_configuration_names_no_class(tmp_path):
    model = build_model("bert")
    model.config.save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"names no architecture, which transformers cannot build"):
        Trainer(str(tmp_path), arguments(tmp_path))


def test_arguments_of_another_class(tmp_path):
    foreign = object.__new__(transformers.TrainingArguments)

    with pytest.raises(ConfigError, match=r"args is a transformers.*TrainingArguments.*build that one"):
        Trainer(build_model(), foreign)


def test_no_arguments_are_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    trainer = Trainer(build_model(), train_dataset=TokenDataset(4))

    assert type(trainer.args).__module__ == "accel_trainer.trainer.arguments.training_arguments"
    assert trainer.args.output_dir == "tmp_trainer"


@pytest.mark.parametrize(
    "name", ["per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_counts_below_one(tmp_path, name, value):
    with pytest.raises(ConfigError, match=rf"{name}={value} was given.*use an integer of 1 or more"):
        arguments(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True}, r"fp16 was asked for on the CPU.*use 'bf16' or 'no'"),
        (
            {"fsdp": "hybrid_shard", "fsdp_config": {}},
            r"a replica on each node, and this job has one process; start more, or shard in full",
        ),
    ],
)
def test_fp16_on_the_cpu_and_replicas_of_one_process(tmp_path, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_trainer(tmp_path, **options)


def test_bf16_where_the_device_has_none(tmp_path, monkeypatch):
    import accel_trainer.precision

    monkeypatch.setattr(accel_trainer.precision, "_supports_bf16", lambda device: False)

    with pytest.raises(ConfigError, match=r"bf16 was asked for and cpu does not support it"):
        build_trainer(tmp_path, bf16=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "LamaDecoderLayer"}}, r"LlamaDecoderLayer"),
    (
        {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": True},
        r"both would recompute the same layers; keep the one in fsdp_config",
    ),
    (
        {"fsdp": True, "auto_find_batch_size": True},
        r"auto_find_batch_size is set with strategy 'fsdp2', which shards the model in place.*model_init",
    ),
]


def train_refused(output_dir: str) -> None:
    for changes, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            Trainer(build_model(), arguments(output_dir, **changes), train_dataset=TokenDataset(8)).train()


@pytest.mark.multirank
def test_what_two_ranks_cannot_do_is_refused_on_both(tmp_path):
    """Unknown layers to wrap, two kinds of recomputation, a search for the batch size."""
    run_ranks(train_refused, 2, str(tmp_path))


def test_prediction_that_is_no_tensor(tmp_path):
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
            return {"loss": self.layer.weight.sum(), "logits": input_ids, "note": "text"}

    trainer = Trainer(Odd(), arguments(tmp_path, label_names=["labels"]), eval_dataset=TokenDataset(4))

    with pytest.raises((ConfigError, AttributeError), match=r"str"):
        trainer.predict(TokenDataset(4))
