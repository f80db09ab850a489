"""Adapters of other shapes under the Trainer: several, tied, reparameterised, incompatible, of other dtypes."""

from __future__ import annotations

import functools
import io
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import logging as transformers_logging

from accel_trainer.checkpoint.interop.huggingface import export_weights
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from tests.cells import beyond, selected
from tests.ecosystem.peft_models import (
    RANKS,
    adapt,
    batch_loss,
    build_peft_trainer,
    prepare_loop,
    train_loop,
    trained_tensors,
)
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import TokenDataset, arguments, build_model

peft = pytest.importorskip("peft")
preload("peft", "accel_trainer.trainer", "transformers.models.llama.modeling_llama", "deepspeed")

SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


def two_adapters() -> Any:
    """A model with two active adapters, and a third that is frozen and not used."""
    model = adapt(build_model(), "lora")
    for name in ("second", "idle"):
        torch.manual_seed(len(name))
        model.add_adapter(name, peft.LoraConfig(**LORA, init_lora_weights=False, task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "second"])
    return model


def unfrozen() -> Any:
    """A model whose user has unfrozen a layer of the base."""
    model = adapt(build_model(), "lora")
    model.base_model.model.model.norm.weight.requires_grad = True
    return model


def tied() -> Any:
    """A model whose output weights are those of its embedding, both trained."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, target_modules=["c_attn"], modules_to_save=["wte"], ensure_weight_tying=True, fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(build_model("gpt2"), config)


def built_in() -> Any:
    """A model of transformers with an adapter by its own methods."""
    model = build_model()
    torch.manual_seed(5)
    model.add_adapter(peft.LoraConfig(**LORA))
    return model


KINDS: dict[str, Any] = {
    "reparameterized": lambda: adapt(build_model(), "reparameterized"),
    "projected": lambda: adapt(build_model(), "projected"),
    "two": two_adapters,
    "unfrozen": unfrozen,
    "tied": tied,
    "built_in": built_in,
    "dora": lambda: adapt(build_model(), "lora", use_dora=True),
}
BESIDE = {
    "reparameterized": {"embedding.weight", *(f"mlp_head.{n}.{p}" for n in (0, 2, 4) for p in ("weight", "bias"))},
    "projected": {"embedding.weight", *(f"transform.{n}.{p}" for n in (0, 2) for p in ("weight", "bias"))},
    "unfrozen": {"model.norm.weight"},
}


# Beyond the sample: under ZeRO-3, what others have in their checkpoints, too.
CELLS = [
    *((kind, strategy) for strategy in ("single", "fsdp") for kind in KINDS),
    *((kind, "zero3") for kind in ("reparameterized", "two", "tied", "dora")),
    *(beyond((kind, "zero3")) for kind in ("projected", "unfrozen", "built_in")),
]


def resume_each(folder: str, strategy: str, kinds: list[str]) -> dict[str, Any]:
    """Train each kind of model, and again from the middle; return by kind what came out."""
    found = {}
    for kind in kinds:
        out = Path(folder, kind)
        trainer = build_peft_trainer(out, strategy, "lora", model=KINDS[kind](), **SAVES)
        trainer.train()
        again = build_peft_trainer(out / "again", strategy, "lora", model=KINDS[kind]())
        again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        found[kind] = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "resumed_losses": [entry["loss"] for entry in again.state.log_history if "loss" in entry],
            "trained": trained_tensors(trainer),
            "resumed": trained_tensors(again),
            "active": again.model.base_model.active_adapters if kind == "two" else None,
            "numbers": again.get_num_trainable_parameters(),
        }
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what gives the results of a strategy's runs, and their folder."""
    cells = selected(request, "test_every_kind_of_adapter_resumes_exactly")

    @functools.cache
    def run(strategy: str) -> Any:
        kinds = {"reparameterized"} | {kind for kind, on in cells if strategy in (on, "single")}
        folder = tmp_path_factory.mktemp(strategy)
        results = run_ranks(resume_each, RANKS[strategy], str(folder), strategy, sorted(kinds), timeout=100)
        return results[0], folder

    return run


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "strategy"), CELLS)
def test_every_kind_of_adapter_resumes_exactly(runs, strategy, kind):
    alone, (results, folder) = runs("single")[0][kind], runs(strategy)
    found = results[kind]
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=3e-6)
    assert found["resumed_losses"] == found["losses"]
    assert found["numbers"] == alone["numbers"]
    assert found["trained"].keys() == alone["trained"].keys()
    for name, value in found["trained"].items():
        np.testing.assert_array_equal(found["resumed"][name], value)
    beside = folder / kind / "checkpoint-2" / "trained_weights.safetensors"
    assert beside.is_file() == (kind in BESIDE)
    if kind in BESIDE:
        from safetensors.torch import load_file

        stored = load_file(beside)
        assert len(stored) == len(BESIDE[kind])
        assert all(any(name.endswith(end) for end in BESIDE[kind]) for name in stored)
    if kind == "two":
        assert found["active"] == ["default", "second"]
        assert (folder / kind / "checkpoint-2" / "idle" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["single", "fsdp", "zero3"])
def test_reparameterized_prompts_are_saved_as_they_are_computed(runs, strategy):
    folder = runs(strategy)[1]
    base = build_model()
    saved = peft.PeftModel.from_pretrained(base, folder / "reparameterized" / "checkpoint-4")
    expected = peft.PeftModel.from_pretrained(base, runs("single")[1] / "reparameterized" / "checkpoint-4")
    assert batch_loss(saved) == pytest.approx(batch_loss(expected), rel=1e-6)


def test_trained_parameters_of_no_adapter_are_named(tmp_path: Path):
    told = logging.StreamHandler(io.StringIO())  # caplog has the lines twice where CI is set: they propagate there
    transformers_logging.add_handler(told)
    try:
        build_peft_trainer(tmp_path, "single", "lora", model=unfrozen(), save_strategy="epoch").train()
    finally:
        transformers_logging.remove_handler(told)
    message = "1 tensor(s) are trained that belong to no adapter (first: 'base_model.model.model.norm.weight')"
    assert told.stream.getvalue().count(message) == 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    build_peft_trainer(folder, "single", "lora", **SAVES).train()
    return folder / "checkpoint-2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 8}, "is (4, 32) in the checkpoint and (8, 32) in the model"),
        ({"target_modules": ["q_proj", "k_proj"]}, "it lacks 4 of its tensors (first: "),
        ({"target_modules": ["q_proj"]}, "it has 4 more (first: "),
    ],
)
def test_another_adapter_is_refused(checkpoint: Path, tmp_path: Path, changes: dict[str, Any], words: str):
    trainer = build_peft_trainer(tmp_path, "single", "lora", model=adapt(build_model(), "lora", **changes))
    with pytest.raises(IncompatibleCheckpointError, match=re.escape(words)):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_an_adapter_that_was_not_saved_is_named(checkpoint: Path, tmp_path: Path):
    trainer = build_peft_trainer(tmp_path, "single", "lora", model=two_adapters())
    with pytest.raises(IncompatibleCheckpointError, match="does not hold the adapter 'second' of PeftModelForCausalLM"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_reader_of_whole_models_says_that_it_is_an_adapter(checkpoint: Path, tmp_path: Path):
    message = "it holds an adapter of PEFT, which goes on top of its base model"
    with pytest.raises(CheckpointNotFoundError, match=message):
        export_weights(checkpoint, tmp_path / "out")


def test_an_adapter_of_the_stock_trainer_is_resumed_and_the_other_way_round(checkpoint: Path, tmp_path: Path):
    import transformers

    options: dict[str, Any] = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    options |= {"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-2}

    def stock(folder: Path, resume: Any = None) -> list[float]:
        args = transformers.TrainingArguments(str(folder), save_strategy="steps", save_steps=2, **options)
        trainer = transformers.Trainer(adapt(build_model(), "lora"), args, train_dataset=TokenDataset(16))
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = stock(tmp_path / "stock")
        ours = build_peft_trainer(tmp_path / "ours", "single", "lora", **SAVES)
        ours.train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-2"))
        losses = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
        back = stock(tmp_path / "back", str(checkpoint))
    # Its own count of the labels is right here: all loss types that it knows shift.
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(back, expected, rtol=1e-6)


def test_a_model_is_built_with_its_adapter_by_model_init(tmp_path: Path):
    from datasets import Dataset

    from accel_trainer import Trainer

    rows = [{**{name: value.tolist() for name, value in row.items()}, "unused": 1} for row in TokenDataset(16).rows]
    data = Dataset.from_list(rows)
    trainer = Trainer(
        args=arguments(tmp_path), train_dataset=data, eval_dataset=data, model_init=lambda: adapt(build_model(), "lora")
    )
    trainer.train()
    assert trainer.label_names == ["labels"]
    assert trainer.model.get_input_embeddings().weight.shape == (64, 32)
    assert trainer.get_num_trainable_parameters() == 896
    assert trainer.evaluate()["eval_loss"] < 4.2


def units(*configs: dict[str, Any]) -> list[list[list[str]]]:
    """Shard a model with adapters by each configuration, and return for each unit what kinds of parameters it has."""
    from torch.distributed.fsdp import FSDPModule

    found = []
    for config in configs:
        options = {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
        trainer = build_peft_trainer("unused", "fsdp", "lora", max_steps=1, **options)
        trainer.train()
        found.append([])
        for name, module in trainer.model.named_modules():
            if isinstance(module, FSDPModule):
                kinds = {("lora" if "lora" in own else "base") for own, _ in module.named_parameters()}
                found[-1].append([name.rpartition("base_model.model.")[2], *sorted(kinds)])
    return found


@pytest.mark.multirank
def test_blocks_of_the_base_model_are_units_with_their_adapters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = [["", "base", "lora"], *([f"model.layers.{index}", "base", "lora"] for index in (0, 1))]
    found = run_ranks(units, 2, {}, {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]})
    assert found == [[expected] * 2] * 2


def mixed(strategy: str, precision: str, **changes: Any) -> list[float]:
    """Train LoRA in fp32 on a base in bf16; return the losses."""
    prepared = prepare_loop(
        strategy, lambda: adapt(build_model().to(torch.bfloat16), "lora", **changes), mixed_precision=precision
    )
    return train_loop(*prepared)


SAVED = {"modules_to_save": ["o_proj"]}


def mixed_shards() -> list[list[float]]:
    """Train so under FSDP2, where a unit may not have trained parameters of two dtypes."""
    message = (
        "in torch.float32 and 'base_model.model.model.layers.1.self_attn.o_proj.modules_to_save.default.weight' in"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        mixed("fsdp", "no", **SAVED)
    return [mixed("fsdp", "no"), mixed("fsdp", "bf16", **SAVED)]


@pytest.mark.multirank
def test_fsdp2_trains_fp32_adapters_on_a_bf16_base_and_refuses_trained_parameters_of_two_dtypes_in_a_unit():
    expected = [mixed("single", "no"), mixed("single", "bf16", **SAVED)]
    np.testing.assert_allclose(run_ranks(mixed_shards, 2)[0], expected, rtol=2e-3)


@pytest.mark.parametrize("method", ["lora", "prompt", "projected"])
def test_smoothed_labels_are_those_that_the_model_predicts(tmp_path: Path, method: str) -> None:
    epsilon = 0.1
    trainer = build_peft_trainer(tmp_path, "single", method, label_smoothing_factor=epsilon)
    rows = TokenDataset(11, seed=1).rows
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        logits = trainer.model.eval()(**batch).logits
    first = 0 if method == "prompt" else 1  # the last of the virtual tokens predicts a row's first label
    num_targets = batch["labels"].shape[1] - first
    log_probs = logits[:, -num_targets - 1 : -1].log_softmax(-1)
    true = log_probs.gather(-1, batch["labels"][:, first:, None]).mean()
    expected = -(1 - epsilon) * true - epsilon * log_probs.mean()

    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    trainer.train()
    assert trainer.state.global_step == 4
