"""What is set on `trainer.args` between two train() calls holds for the second one."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from accel_trainer import ParallelismConfig
from accel_trainer.errors import ConfigError
from accel_trainer.trainer import Trainer
from tests.cells import beyond
from tests.ranks import run_ranks
from tests.trainer_jobs import TokenDataset, arguments, build_model, build_trainer

pytestmark = pytest.mark.beside_accelerate

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None

# Of a run of 3 updates of 8 rows, the last one of 6, with a line of the log for each.
OF_THE_RUN: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_steps": 2, "lr_scheduler_type": "cosine",
    "warmup_steps": 2, "logging_steps": 2, "logging_strategy": "epoch", "max_grad_norm": 0.01,
    "dataloader_drop_last": True, "train_sampling_strategy": "sequential", "eval_strategy": "epoch",
    "per_device_eval_batch_size": 2, "include_num_input_tokens_seen": "all",
}  # fmt: skip
OF_THE_OPTIMIZER: dict[str, Any] = {
    "learning_rate": 3e-3, "weight_decay": 0.5, "optim": "sgd", "adam_beta1": 0.5, "adam_beta2": 0.9,
    "adam_epsilon": 1e-2,
}  # fmt: skip
OF_THE_DATA: dict[str, Any] = {"seed": 314, "data_seed": 7, "per_device_train_batch_size": 4}
OF_THE_MODEL: dict[str, Any] = {"label_smoothing_factor": 0.3, "neftune_noise_alpha": 5.0}
# Those that upstream takes once, at its first train() or before: they have no effect on its second one.
NOT_HEARD_UPSTREAM = {"data_seed", "per_device_train_batch_size", *OF_THE_MODEL}
ALL = OF_THE_RUN | OF_THE_OPTIMIZER | OF_THE_DATA | OF_THE_MODEL
SAMPLE = {*OF_THE_OPTIMIZER, "gradient_accumulation_steps", "per_device_eval_batch_size", "seed", *OF_THE_MODEL}


def settings(**changes: Any) -> dict[str, Any]:
    return {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4, "weight_decay": 0.1, **changes}


def fresh_model() -> transformers.PreTrainedModel:
    """Return a model with weights that depend on the seed, as a user's `model_init` does."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def build(folder: Any, model: Any = None, trainer_class: Any = Trainer, args: Any = None, **changes: Any) -> Any:
    what = {"model_init": fresh_model} if model is None else {"model": model}
    return trainer_class(
        **what,
        args=args or arguments(folder, **settings(**changes)),
        train_dataset=TokenDataset(22, uneven=True),
        eval_dataset=TokenDataset(5, seed=1, uneven=True),
    )


def history_of(trainer: Any) -> list[dict[str, Any]]:
    """Train, and return the log without its times."""
    trainer.train()
    times = ("runtime", "per_second")
    return [
        {key: value for key, value in entry.items() if not key.endswith(times)} for entry in trainer.state.log_history
    ]


def second_history(trainer: Any, changes: dict[str, Any]) -> list[dict[str, Any]]:
    trainer.train()
    for name, value in changes.items():
        setattr(trainer.args, name, value)
    return history_of(trainer)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory) -> list[dict[str, Any]]:
    return second_history(build(tmp_path_factory.mktemp("unchanged")), {})


# In the sample those that the next test does not have, and one of each kind of the others.
@pytest.mark.parametrize("name", [name if name in SAMPLE else beyond(name) for name in ALL])
def test_with_model_init_the_second_train_is_that_of_a_trainer_built_with_the_new_value(tmp_path, unchanged, name):
    second = second_history(build(tmp_path), {name: ALL[name]})

    assert second == history_of(build(tmp_path, **{name: ALL[name]}))
    assert second != unchanged or name == "per_device_eval_batch_size"


@pytest.mark.parametrize("name", OF_THE_RUN | OF_THE_DATA | OF_THE_MODEL)
def test_without_model_init_training_goes_on_as_a_trainer_built_with_the_new_value_would(tmp_path, name):
    # SGD has no state that a new Trainer would lack.
    trainer = build(tmp_path, build_model(), optim="sgd", learning_rate=0.1)
    trainer.train()
    trained, streams = copy.deepcopy(trainer.model), torch.get_rng_state()
    setattr(trainer.args, name, ALL[name])

    second = history_of(trainer)

    reference = build(tmp_path, trained, optim="sgd", learning_rate=0.1, **{name: ALL[name]})
    if name != "seed":
        torch.set_rng_state(streams)  # which building a Trainer has seeded
    assert second == history_of(reference)


@pytest.mark.parametrize("name", OF_THE_OPTIMIZER)
def test_an_optimizer_goes_on_with_its_state_and_new_options(tmp_path, name):
    trainer = build(tmp_path, build_model())
    trainer.train()
    trained, before = copy.deepcopy(trainer.model), trainer.optimizer.optimizer
    state = {index: copy.deepcopy(before.state[each]) for index, each in enumerate(trainer.model.parameters())}
    setattr(trainer.args, name, ALL[name])

    second = history_of(trainer)

    reference = build(tmp_path, trained, **{name: ALL[name]})
    optimizer = reference.create_optimizer()
    if name == "optim":
        assert type(trainer.optimizer.optimizer) is torch.optim.SGD
    else:
        optimizer.state.update({each: state[index] for index, each in enumerate(reference.model.parameters())})
    assert second == history_of(reference)


def test_options_that_did_not_change_leave_the_optimizer_alone(tmp_path):
    trainer = build(tmp_path, build_model())
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    optimizer.param_groups[0]["weight_decay"] = 0.25

    trainer.train()

    assert trainer.optimizer.optimizer is optimizer
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_an_optimizer_of_the_users_own_keeps_its_options(tmp_path):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    args = arguments(tmp_path, **settings())
    trainer = Trainer(model, args, train_dataset=TokenDataset(22), optimizers=(optimizer, None))
    trainer.train()
    args.learning_rate = 1e-3

    trainer.train()

    assert trainer.optimizer.optimizer is optimizer
    assert trainer.state.log_history[0]["learning_rate"] == 0.5


@pytest.mark.skipif(not HAS_ACCELERATE, reason="Hugging Face accelerate is not installed")
@pytest.mark.parametrize("name", sorted(set(ALL) - NOT_HEARD_UPSTREAM))
def test_with_model_init_the_second_train_is_that_of_the_stock_trainer(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # accelerate sets it and leaves it
    ours = second_history(build(tmp_path), {name: ALL[name]})

    args = arguments(tmp_path, **settings())
    stock = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no",
        num_train_epochs=1, learning_rate=args.learning_rate, **settings(),
    )  # fmt: skip
    theirs = second_history(build(tmp_path, trainer_class=transformers.Trainer, args=stock), {name: ALL[name]})

    assert [entry.get("loss") for entry in ours] == [entry.get("loss") for entry in theirs]
    assert [entry.get("learning_rate") for entry in ours] == [entry.get("learning_rate") for entry in theirs]
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in theirs]


def changed_run(output_dir: str, strategy: str) -> list[dict[str, Any]]:
    ranks = 1 if strategy == "single" else 2
    trainer = build_trainer(output_dir, strategy=strategy, uneven=True, per_device_train_batch_size=8 // ranks)
    trainer.train()
    for name, value in {"seed": 314, "learning_rate": 1e-3, "gradient_accumulation_steps": 2}.items():
        setattr(trainer.args, name, value)
    trainer.args.per_device_train_batch_size = 4 // ranks
    trainer.train()
    history = trainer.state.log_history
    return [[entry[key] for entry in history if key in entry] for key in ("loss", "grad_norm", "learning_rate")]


def changed_runs(output_dir: str) -> list[Any]:
    return [changed_run(output_dir, strategy) for strategy in ("ddp", "fsdp")]


@pytest.mark.multirank
def test_two_ranks_take_new_values_as_one_process_does(tmp_path):
    one = changed_run(str(tmp_path), "single")

    for found in run_ranks(changed_runs, 2, str(tmp_path)):
        for run in found:
            for values, reference in zip(run, one, strict=True):
                np.testing.assert_allclose(values, reference, rtol=3e-4)


def test_what_is_assigned_before_a_trainer_is_built_is_as_given(tmp_path):
    given = {
        "activation_checkpointing": "full", "ddp_find_unused_parameters": False, "ema_decay": 0.5,
        "on_nonfinite": "skip_step", "save_async": True,
    }  # fmt: skip
    args = arguments(tmp_path, **settings())
    for name, value in given.items():
        setattr(args, name, value)
    args.set_dataloader(train_batch_size=8, sampler_seed=7)
    args.accelerator_config.even_batches = True  # in place, as TRL does

    trainer = build(tmp_path, build_model(), args=args)

    direct = build(
        tmp_path, build_model(), **given, data_seed=7, accelerator_config={"even_batches": True}, num_train_epochs=3
    )
    assert trainer.accelerator.config == direct.accelerator.config
    args.num_train_epochs = direct.args.num_train_epochs
    assert history_of(trainer) == history_of(direct)


def test_what_is_assigned_to_a_copy_is_that_copys_own(tmp_path):
    base = arguments(tmp_path, **settings())
    for given in ({"meters": True}, {"ema_decay": 0.5}, {"meters": False}):
        args = copy.copy(base)
        for name, value in given.items():
            setattr(args, name, value)

        trainer = build(tmp_path, build_model(), args=args)

        assert trainer.accelerator.config == build(tmp_path, build_model(), **given).accelerator.config


def test_what_is_changed_within_an_argument_is_taken_or_refused(tmp_path):
    mixture = {"datasets": [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]}
    args = arguments(tmp_path, dataset_mixture=mixture)
    args.dataset_mixture["datasets"][0]["weight"] = 9
    args.take_assigned()
    assert args.resolved.config.dataset_mixture["datasets"][0]["weight"] == 9

    sharded = arguments(tmp_path, fsdp=True, fsdp_config={"fsdp": {"backward_prefetch": False}})
    sharded.fsdp_config["accel_trainer"]["fsdp"]["backward_prefetch"] = True
    with pytest.raises(
        ConfigError, match=r"args\.fsdp_config was set to .* after TrainingArguments\(\) had been built"
    ):
        sharded.take_assigned()

    trainer = build(tmp_path, build_model(), accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 1}})
    trainer.args.accelerator_config.gradient_accumulation_kwargs["num_steps"] = 2
    with pytest.raises(ConfigError, match=r"args\.accelerator_config was set to .* after the Trainer had been built"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bf16", True),
        ("fsdp", True),
        ("use_cpu", False),
        ("accelerator_config", {"a": 1}),
        ("parallelism_config", ParallelismConfig(tp_size=2)),
        ("ddp_backend", "nccl"),
    ],
)
def test_what_other_things_were_made_of_is_refused_when_a_trainer_is_built(tmp_path, name, value):
    args = arguments(tmp_path)
    setattr(args, name, value)

    with pytest.raises(ConfigError, match=rf"args\.{name}.* was set to .* after TrainingArguments\(\) had been built"):
        build(tmp_path, build_model(), args=args)


@pytest.mark.parametrize(
    ("name", "value"), [("bf16", True), ("fsdp", True), ("torch_compile", True), ("ddp_backend", "nccl")]
)
def test_a_value_that_the_trainer_is_prepared_for_cannot_change(tmp_path, name, value):
    trainer = build(tmp_path, build_model())
    setattr(trainer.args, name, value)

    with pytest.raises(
        ConfigError, match=rf"args\.{name} was set to {value!r} after the Trainer had been built with .*, "
    ):
        trainer.train()


def test_a_batch_size_out_of_range_is_refused_at_the_next_train(tmp_path):
    trainer = build(tmp_path, build_model())
    trainer.args.per_device_train_batch_size = 0

    with pytest.raises(ConfigError, match="per_device_train_batch_size=0 was given"):
        trainer.train()
