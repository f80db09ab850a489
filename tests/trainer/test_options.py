"""Options that change the loss or the layout do so alike on one process and on ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from accel_trainer.errors import ConfigError
from accel_trainer.trainer import Trainer
from tests.ranks import run_ranks
from tests.trainer_jobs import Hearing, TokenDataset, arguments, build_model, build_trainer, summary, train, weights_of

pytestmark = pytest.mark.timeout(240)  # the first test waits for the runs that all look at


def run(output_dir: str, strategy: str, **changes: Any) -> dict[str, Any]:
    batch_size = 4 if strategy == "single" else 2
    changes |= {"uneven": True, "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 2}
    return train(output_dir, strategy=strategy, **changes)


# Those that change the loss, and other optimizers, are in test_loss.py and test_optimizer_names.py.
VARIANTS: dict[str, dict[str, Any]] = {
    "recompute": {"gradient_checkpointing": True},
    "sync_each_batch": {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    "no_clipping": {"max_grad_norm": 0.0},
}


def run_on_two(folder: str) -> dict[Any, Any]:
    """What all tests look at that needs two ranks."""
    found: dict[Any, Any] = {}
    for strategy in ("ddp", "fsdp"):
        for name, changes in VARIANTS.items():
            found[strategy, name] = run(folder, strategy, **changes)
        found[strategy, "bf16"] = run(folder, strategy, bf16=True)
        build_trainer(folder, strategy=strategy).save_model(f"{folder}/{strategy}-saved")
    for strategy in ("ddp", "fsdp_sharded"):
        found[strategy, "twice"] = train_twice_with_checkpoints(f"{folder}/{strategy}-twice", strategy)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def on_two(folder) -> dict[Any, Any]:
    return run_ranks(run_on_two, 2, folder, timeout=200)[0]


@pytest.mark.multirank
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_agree_with_one_process(tmp_path, on_two, name):
    one = run(str(tmp_path), "single", **VARIANTS[name])

    for strategy in ("ddp", "fsdp"):
        two = on_two[strategy, name]
        np.testing.assert_allclose(two["losses"], one["losses"], rtol=3e-5)
        np.testing.assert_allclose(two["grad_norms"], one["grad_norms"], rtol=1e-3)


def test_a_compiled_model_gives_the_same_losses_and_is_saved_under_its_own_names(tmp_path):
    plain = run(str(tmp_path), "single")
    compiled = run(str(tmp_path), "single", torch_compile_backend="eager", save_strategy="epoch")

    np.testing.assert_allclose(compiled["losses"], plain["losses"], rtol=1e-5)
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4").config.vocab_size == 64


@pytest.mark.multirank
def test_bf16_is_close_to_fp32_and_keeps_fp32_weights(tmp_path, on_two):
    exact = run(str(tmp_path), "single")
    one = run(str(tmp_path), "single", bf16=True)

    for result in (one, on_two["ddp", "bf16"], on_two["fsdp", "bf16"]):
        assert result["losses"] != exact["losses"]
        np.testing.assert_allclose(result["losses"], exact["losses"], rtol=2e-2)
        assert {values.dtype for values in result["weights"].values()} == {np.dtype(np.float32)}


def train_twice_with_checkpoints(output_dir: str, strategy: str) -> list[float]:
    trainer = build_trainer(output_dir, strategy=strategy, samples=16, save_strategy="epoch")
    trainer.train()
    trainer.train()
    steps = {int(entry["step"]) for entry in trainer.optimizer.state_dict()["state"].values()}
    return [len(steps), max(steps)]


@pytest.mark.multirank
def test_a_second_train_saves_and_goes_on_with_the_optimizer(tmp_path, on_two):
    assert train_twice_with_checkpoints(str(tmp_path), "single") == [1, 8]
    for strategy in ("ddp", "fsdp_sharded"):
        assert on_two[strategy, "twice"] == [1, 4], strategy


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_can_be_saved_before_it_is_laid_out(folder, on_two, strategy):
    loaded = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/{strategy}-saved").state_dict()
    for name, values in build_model().state_dict().items():
        assert torch.equal(loaded[name], values), name


def launched(output_dir: str) -> tuple[str, bool, bool]:
    trainer = Trainer(build_model(), arguments(output_dir), train_dataset=TokenDataset(8))
    trainer.train()
    weights_of(trainer)
    sharded = all(hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters())
    return str(trainer.accelerator.distributed_type), trainer.is_fsdp_enabled, sharded


@pytest.mark.multirank
@pytest.mark.parametrize(
    "env",
    [
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
        {"ACCEL_TRAINER_STRATEGY": "fsdp2"},
    ],
)
def test_a_launcher_can_turn_sharding_on(tmp_path, env):
    assert run_ranks(launched, 2, str(tmp_path), env=env) == [("DistributedType.FSDP", True, True)] * 2


def test_num_steps_of_the_accelerator_config_are_the_accumulation_steps(tmp_path):
    trainer = build_trainer(tmp_path, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}})

    assert trainer.args.gradient_accumulation_steps == 4
    assert trainer.accelerator.gradient_accumulation_steps == 1
    with pytest.raises(ConfigError, match=r"`num_steps` is set but `gradient_accumulation_steps` is greater .*4 and 2"):
        build_trainer(tmp_path, gradient_accumulation_steps=2, accelerator_config=trainer.args.accelerator_config)


def test_arguments_for_accelerate_are_not_built(tmp_path):
    with pytest.raises(ConfigError, match=r"builds arguments for Hugging Face accelerate.*set self.accelerator"):
        build_trainer(tmp_path)._build_accelerator_args()


@pytest.mark.parametrize("backend", ["optuna", "ray", "wandb", None])
def test_a_search_names_the_package_that_it_needs(tmp_path, monkeypatch, backend):
    backends = transformers.trainer.ALL_HYPERPARAMETER_SEARCH_BACKENDS.values()
    for kind in backends:
        monkeypatch.setattr(kind, "is_available", staticmethod(lambda: False))
    trainer = Trainer(model_init=lambda: build_model(), args=arguments(tmp_path), train_dataset=TokenDataset(8))

    package = r"'ray\[tune\]'" if backend == "ray" else backend
    message = rf"You picked the {backend} backend.*pip install {package}`" if backend else "No hyperparameter search"
    with pytest.raises(RuntimeError, match=message):
        trainer.hyperparameter_search(backend=backend)
    assert trainer.hp_search_backend is None


def test_a_model_function_is_called_for_each_train(tmp_path):
    built: list[Any] = []

    def model_init() -> Any:
        built.append(build_model())
        return built[-1]

    trainer = Trainer(model_init=model_init, args=arguments(tmp_path), train_dataset=TokenDataset(8))
    trainer.train()
    first = summary(trainer)["losses"]
    trainer.train()

    assert len(built) == 3
    assert summary(trainer)["losses"] == first


def test_callbacks_are_called_in_upstreams_order(tmp_path):
    events: list[str] = []

    class Recorder(Hearing):
        def hear(self, event: str, *args: Any, **kwargs: Any) -> None:
            events.append(event)

    trainer = build_trainer(
        tmp_path, samples=16, gradient_accumulation_steps=2, eval_samples=2, eval_strategy="epoch",
        save_strategy="epoch", options={"callbacks": [Recorder]},
    )  # fmt: skip
    trainer.train()

    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"]
    end = ["on_epoch_end", "on_prediction_step", "on_log", "on_evaluate", "on_save", "on_log", "on_train_end"]
    assert events == ["on_init_end", "on_train_begin", "on_epoch_begin", *step, *step, *end]


class Padding:
    """A collator that pads, as those of transformers."""

    pad_to_multiple_of: int | None = None

    def __call__(self, rows: list[Any]) -> Any:
        raise AssertionError("nothing is trained here")


def test_the_collator_pads_to_the_multiple_that_is_asked_for(tmp_path: Any) -> None:
    given = Padding()
    args = arguments(tmp_path, pad_batches_to_multiple_of=16)
    trainer = Trainer(model=build_model(), args=args, data_collator=given, train_dataset=TokenDataset(4))
    assert (trainer.data_collator.pad_to_multiple_of, given.pad_to_multiple_of) == (16, None)
    with pytest.raises(ConfigError, match=r"cannot be asked of default_data_collator.*use a collator .* that pads"):
        Trainer(model=build_model(), args=args, train_dataset=TokenDataset(4))
    given.pad_to_multiple_of = 8
    with pytest.raises(ConfigError, match="cannot be asked of Padding, which pads to a multiple of 8"):
        Trainer(model=build_model(), args=args, data_collator=given, train_dataset=TokenDataset(4))


# --- a model given by its path is sharded without values where memory is spared, and trains as otherwise ---


def train_from_path(folder: str, kind: str, spare: bool, first: str) -> dict[str, Any]:
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"cpu_ram_efficient_loading": spare}}
    data = {"kind": "class" if kind == "bert" else "lm"}
    trainer = Trainer(
        f"{folder}/model",
        arguments(f"{folder}/out", **options),
        train_dataset=TokenDataset(16, **data),
        eval_dataset=TokenDataset(6, seed=1, **data),
    )
    found: dict[str, Any] = {"is_empty": all(p.is_meta for p in trainer.model.parameters())}
    found["metrics"] = trainer.evaluate()["eval_loss"] if first == "evaluate" else None
    trainer.train()
    return {**found, **summary(trainer)}


KINDS = [("llama", "train"), ("gpt2", "evaluate"), ("bert", "train")]


def models_on_two(folder: str) -> dict[Any, Any]:
    """Each kind of model, without values at first and with; and one that `from_pretrained` has to load."""
    found: dict[Any, Any] = {
        (kind, spare): train_from_path(f"{folder}/{kind}", kind, spare, first)
        for kind, first in KINDS
        for spare in (True, False)
    }
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"cpu_ram_efficient_loading": True}}
    trainer = Trainer(f"{folder}/renamed", arguments(f"{folder}/out", **options), train_dataset=TokenDataset(4))
    found["renamed"] = any(p.is_meta for p in trainer.model.parameters())
    return found


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("models")
    for kind, _ in KINDS:
        build_model(kind, seed=3).save_pretrained(folder / kind / "model")
    model = build_model("llama")
    model.model.save_pretrained(folder / "renamed")  # without the prefix that the whole model's names have
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder / "renamed")
    return run_ranks(models_on_two, 2, str(folder), timeout=100)


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "first"), KINDS)
def test_an_empty_model_trains_as_a_loaded_one(laid_out, kind: str, first: str):
    spared, loaded = laid_out[0][kind, True], laid_out[0][kind, False]
    assert (spared["is_empty"], loaded["is_empty"]) == (True, False)
    assert spared["metrics"] == pytest.approx(loaded["metrics"]) if first == "evaluate" else spared["metrics"] is None
    assert spared["losses"] == pytest.approx(loaded["losses"], abs=1e-6)
    for name, weight in loaded["weights"].items():
        assert torch.allclose(torch.from_numpy(spared["weights"][name]), torch.from_numpy(weight), atol=1e-6), name


@pytest.mark.multirank
def test_files_that_from_pretrained_has_to_rename_are_loaded_by_it(laid_out):
    assert [found["renamed"] for found in laid_out] == [False, False]
