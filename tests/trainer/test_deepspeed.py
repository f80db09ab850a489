"""The Trainer under DeepSpeed: the numbers of one process, exact resumes, and arguments that agree with its file."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from accel_trainer.checkpoint.interop.huggingface import export_hf_fsdp
from accel_trainer.errors import AccelTrainerError, ConfigError, IncompatibleCheckpointError, MissingExtraError
from tests.cells import beyond
from tests.ranks import preload, run_ranks
from tests.strategy_configs import needs_deepspeed
from tests.trainer_jobs import TokenDataset, arguments, build_model, build_trainer, summary, train

# Not imported here: that takes seconds, and the ranks have it from their server.
pytestmark = [pytest.mark.beside_accelerate, needs_deepspeed]
preload("deepspeed")

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
# Small enough that parameters of the tiny models are partitioned, too.
ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
STAGE_3 = {
    **AUTO,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": ADAMW},
}
STAGE_2 = {**AUTO, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"},
}
# 13 batches of a rank, windows of 2: 7 updates an epoch, the last of one batch. An update of 8 rows, or 4.
RUN: dict[str, Any] = {
    "samples": 52, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "eval_strategy": "epoch",
    "save_strategy": "steps", "save_steps": 3,
}  # fmt: skip


def everything(output_dir: str, batch_size: int, **options: Any) -> dict[str, Any]:
    """Evaluate, train, predict, train on, save; return what came out."""
    trainer = build_trainer(output_dir, per_device_train_batch_size=batch_size, **RUN, **options)
    before = trainer.evaluate()["eval_loss"]
    assert trainer._prepare_input(torch.ones(1)).dtype == torch.float32  # transformers asks the engine's configuration
    trainer.train()
    result = {"before": before, "flos": trainer.state.total_flos, **summary(trainer)}
    result["predictions"] = trainer.predict(trainer.eval_dataset).predictions
    trainer.save_model(str(Path(output_dir, "model")))
    trainer.args.save_strategy = "no"
    trainer.train()
    return {**result, "second": summary(trainer)["losses"]}


def resumed(output_dir: str, checkpoint: str, engine_checkpoint: str = "", **options: Any) -> dict[str, Any]:
    """Go on from a checkpoint; write what the engine alone would write at the next one."""
    options = {"per_device_train_batch_size": 2, **RUN, **options}
    trainer = build_trainer(Path(output_dir, "again"), **options)
    if engine_checkpoint:
        trainer.add_callback(EngineCheckpoint(trainer, engine_checkpoint))
    trainer.train(resume_from_checkpoint=str(Path(output_dir, checkpoint)))
    return summary(trainer)


class EngineCheckpoint(TrainerCallback):
    """Makes the first checkpoint one of the stock Trainer's: the optimizer's state is in the engine's own files."""

    def __init__(self, trainer: Any, path: str) -> None:
        self.trainer = trainer
        self.path = path

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 9:
            self.trainer.deepspeed.save_checkpoint(self.path)
            if state.is_world_process_zero:
                ours = Path(args.output_dir, "checkpoint-9")
                ignored = shutil.ignore_patterns("optimizer.*", "manifest.json", "COMMITTED")
                shutil.copytree(ours, self.path, ignore=ignored, dirs_exist_ok=True)


def best(output_dir: str, **options: Any) -> dict[str, Any]:
    """Train worse and worse, saving weights only, and end with the best of them."""
    trainer = build_trainer(
        Path(output_dir, "best"), eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        num_train_epochs=3, samples=8, learning_rate=0.05, save_only_model=True, save_total_limit=1, **options,
    )  # fmt: skip
    trainer.train()
    files = sorted(os.listdir(trainer.state.best_model_checkpoint))
    return {"end": trainer.evaluate()["eval_loss"], "files": files, **summary(trainer)}


def scheduled(output_dir: str) -> list[list[float]]:
    """Train with the schedule of the engine's configuration; return losses and rates, once whole and once resumed."""
    options: dict[str, Any] = {
        "deepspeed": {**STAGE_3, "zero_optimization": {"stage": 1}, "scheduler": WARMUP}, "warmup_steps": 2,
        "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3,
    }  # fmt: skip
    found = []
    for checkpoint in (None, str(Path(output_dir, "scheduled", "checkpoint-3"))):
        trainer = build_trainer(Path(output_dir, "scheduled" if checkpoint is None else "rescheduled"), **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append([entry[name] for name in ("loss", "learning_rate") for entry in history])
    return found


def job(output_dir: str, **options: Any) -> dict[str, Any]:
    result = {**everything(output_dir, 2, **options), "scheduled": scheduled(output_dir)}
    stock = str(Path(output_dir, "stock"))
    result["resumed"] = resumed(output_dir, "checkpoint-6", stock, **options)
    result["stock"] = resumed(output_dir, "stock", **options)
    result["best"] = best(output_dir, **options)
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return everything(str(tmp_path_factory.mktemp("alone")), 4)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [beyond(2), 3])
def test_the_numbers_are_those_of_one_process_and_a_resume_is_exact(tmp_path, alone, stage):
    if stage == 2:
        results = run_ranks(job, 2, str(tmp_path), deepspeed=STAGE_2, timeout=250)
    else:
        # As accelerate's launcher hands it over.
        path = tmp_path / "zero3.json"
        path.write_text(json.dumps(STAGE_3))
        environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
        results = run_ranks(job, 2, str(tmp_path), env=environ, timeout=250)

    for result in results:
        for name in ("losses", "grad_norms", "eval_losses", "before", "second", "train_loss"):
            np.testing.assert_allclose(result[name], alone[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(result["predictions"], alone["predictions"], rtol=1e-4, atol=1e-5)
        assert result["flos"] == alone["flos"] > 0
        assert result["resumed"]["losses"] == result["stock"]["losses"] == result["losses"]
        assert_is_scheduled(*result["scheduled"])
        assert result["best"]["end"] == pytest.approx(min(result["best"]["eval_losses"][:3]), rel=1e-6)
        assert result["best"]["eval_losses"][0] < result["best"]["eval_losses"][2]
        assert "model.safetensors" in result["best"]["files"]
        assert not {"optimizer.bin", "optimizer.json", "scheduler.pt"} & set(result["best"]["files"])
    for name, values in results[0]["weights"].items():
        # On a CPU without AVX-512 one of 2,048 differs by 1.6e-6: Adam divides by the size of a gradient.
        np.testing.assert_allclose(values, alone["weights"][name], rtol=1e-4, atol=2e-6, err_msg=name)
        np.testing.assert_array_equal(values, results[0]["resumed"]["weights"][name], err_msg=name)
    assert_is_loadable(tmp_path / "model", results[0]["predictions"].shape)
    assert_is_in_equal_parts(tmp_path / "checkpoint-6")
    if stage == 2:
        elsewhere = run_ranks(resumed, 1, str(tmp_path), "checkpoint-6", per_device_train_batch_size=4, timeout=100)[0]
        np.testing.assert_allclose(elsewhere["losses"], alone["losses"], rtol=1e-5)
        export_hf_fsdp(tmp_path / "checkpoint-6", tmp_path / "fsdp", is_sharded=False)
        state = torch.load(tmp_path / "fsdp" / "optimizer.bin", weights_only=True)["state"]
        assert state["model.embed_tokens.weight"]["exp_avg"].shape == build_model().model.embed_tokens.weight.shape


def assert_is_scheduled(whole: list[float], resumed: list[float]) -> None:
    rates = whole[len(whole) // 2 :]
    assert resumed == whole
    assert len(rates) == 8
    assert max(rates) == pytest.approx(1e-2)
    assert rates[-1] < rates[-2] < rates[-3]


def assert_is_in_equal_parts(checkpoint: Path) -> None:
    parts = [path.stat().st_size for path in sorted(checkpoint.glob("optimizer.optimizer.*.safetensors"))]
    assert sum(parts[0::2]) == pytest.approx(sum(parts[1::2]), rel=0.2)


def assert_is_loadable(path: Path, shape: tuple[int, ...]) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in build_model().parameters())
    assert shape[-1] == model.config.vocab_size


def arguments_of(output_dir: str, sources: list[Any], **changes: Any) -> list[Any]:
    """Return the engine's configuration, and the arguments, that each source leads to."""
    import transformers
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    found = []
    for source in sources:
        args = arguments(output_dir, **{"deepspeed": source, **changes})
        model = transformers.AutoModelForCausalLM.from_config(build_model().config)
        found.append(
            {
                "config": args.hf_deepspeed_config.config,
                "field": args.deepspeed == source,
                "partitioned": hasattr(next(model.parameters()), "ds_id"),
                "numbers": (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.max_grad_norm),
                "learning_rate": args.learning_rate,
                "environ": os.environ.get("ACCELERATE_USE_DEEPSPEED"),
            }
        )
        with args.whole_models():
            whole = transformers.AutoModelForCausalLM.from_config(build_model().config)
        found[-1]["whole"] = not hasattr(next(whole.parameters()), "ds_id") and is_deepspeed_zero3_enabled()
        del args, model
        gc.collect()
        found[-1]["left"] = is_deepspeed_zero3_enabled()
        later = build_model()
        found[-1]["later"] = hasattr(next(later.parameters()), "ds_id")
    return found


def saved_under_other_names(output_dir: str) -> set[str]:
    """Load a classifier in pieces, evaluate it and save it; return the names that differ from its own."""
    import transformers
    from safetensors.torch import load_file

    from accel_trainer.trainer import Trainer

    args = arguments(output_dir, deepspeed=STAGE_3)
    with args.whole_models():
        build_model("bert").save_pretrained(output_dir)
    model = transformers.BertForSequenceClassification.from_pretrained(output_dir)
    assert hasattr(next(model.parameters()), "ds_id")
    trainer = Trainer(model, args, train_dataset=TokenDataset(8, kind="class"))
    trainer.train()
    trainer.save_model(f"{output_dir}/saved")
    return set(load_file(f"{output_dir}/saved/model.safetensors")) ^ set(build_model("bert").state_dict())


@pytest.mark.multirank
def test_a_model_that_was_loaded_in_pieces_is_saved_under_its_own_names(tmp_path):
    assert run_ranks(saved_under_other_names, 1, str(tmp_path), timeout=100) == [set()]


@pytest.mark.multirank
def test_a_configuration_comes_from_anywhere_and_models_are_built_in_pieces_while_it_lives(tmp_path):
    content = {**STAGE_3, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    yaml = tmp_path / "accelerate.yaml"
    yaml.write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {path}\n  zero3_init_flag: false\n"
    )
    plain = tmp_path / "ds.yaml"
    plain.write_text("zero_optimization: {stage: 3}\ntrain_micro_batch_size_per_gpu: 2\ngradient_clipping: 0.5\n")
    sources = [content, str(path), path, json.dumps(content), str(plain), str(yaml)]

    found = run_ranks(arguments_of, 1, str(tmp_path), sources, per_device_train_batch_size=8, timeout=100)[0]

    for result, source in zip(found, sources, strict=True):
        assert result["config"]["zero_optimization"]["stage"] == 3
        assert result["config"]["train_batch_size"] == 2
        assert result["numbers"] == (2, 1, 0.5)
        assert result["field"]
        assert result["partitioned"] == (source != str(yaml))
        assert result["whole"] == result["partitioned"]
        assert (result["left"], result["later"]) == (False, False)


@pytest.mark.multirank
def test_the_launchers_variables_are_hidden_from_upstream_and_back_afterwards(tmp_path):
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}

    found = run_ranks(arguments_of, 1, str(tmp_path), [None], env=environ, timeout=100)[0][0]

    assert found["config"]["zero_optimization"]["stage"] == 2
    assert found["environ"] == "true"
    assert not found["partitioned"]


def test_all_conflicts_with_the_arguments_are_named_at_once(tmp_path):
    block = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 2, "stag": 1},
    }

    with pytest.raises(ConfigError) as caught:
        arguments(
            tmp_path, deepspeed=block, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=2.0,
            adam_beta2=0.9,
        )  # fmt: skip

    message = str(caught.value)
    said = "(TrainingArguments(deepspeed=...))"
    for line in (
        f"train_micro_batch_size_per_gpu {said} is 8, and TrainingArguments(per_device_train_batch_size=...) says 4",
        f"gradient_clipping {said} is 0.1, and TrainingArguments(max_grad_norm=...) says 2.0",
        f"optimizer.params.lr {said} is 0.001, and TrainingArguments(learning_rate=...) says 0.01",
        f"optimizer.params.betas {said} is [0.9, 0.95], and TrainingArguments(adam_beta1=..., adam_beta2=...) says",
        "unknown key 'zero_optimization.stag'",
    ):
        assert line in message, message
    assert "gradient_accumulation_steps" in message


def test_without_deepspeed_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(MissingExtraError, match=r"pip install 'accel-trainer\[deepspeed\]'"):
        arguments(tmp_path, deepspeed=STAGE_2)


def test_fsdp_and_deepspeed_exclude_each_other(tmp_path):
    with pytest.raises(ConfigError, match="fsdp and deepspeed are both set"):
        arguments(tmp_path, deepspeed=STAGE_2, fsdp=True)


def engine_checkpoint_of(output_dir: Path, num_ranks: int) -> str:
    """Make a checkpoint look as if the stock Trainer had written it under DeepSpeed on a number of ranks."""
    train(output_dir, strategy="single", save_strategy="steps", save_steps=2)
    path = output_dir / "checkpoint-2"
    for name in ("optimizer.pt", "manifest.json", "COMMITTED"):
        (path / name).unlink()
    (path / "global_step2").mkdir()
    for rank in range(num_ranks):
        (path / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    return str(path)


def test_the_state_of_an_engine_is_not_left_out_without_one(tmp_path):
    path = engine_checkpoint_of(tmp_path, 2)

    with pytest.raises(IncompatibleCheckpointError, match=r"of a DeepSpeed engine, which strategy .single. cannot"):
        build_trainer(tmp_path / "again").train(resume_from_checkpoint=path)


def train_with_an_empty_group(output_dir: str) -> None:
    trainer = build_trainer(output_dir, deepspeed=STAGE_2)
    trainer.optimizer = torch.optim.AdamW([{"params": [*trainer.model.parameters()]}, {"params": []}])
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1.0)
    trainer.train()


def generate_apart(output_dir: str) -> tuple[Any, bool, bool]:
    """Generate texts of unlike lengths with a model that was not built in pieces; and build others behind a Trainer."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    section = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "zero3_init_flag": False}
    trainer = build_trainer(output_dir, deepspeed={**AUTO, **section}, max_steps=1)
    before = hasattr(next(build_model().parameters()), "ds_id")
    trainer.train()
    model, length = trainer.accelerator.unwrap_model(trainer.model_wrapped).eval(), 4 + trainer.args.process_index

    class Stop(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= length, dtype=torch.bool)

    criteria = StoppingCriteriaList([Stop()])
    words = torch.tensor([[5, 6, 7]])
    found = model.generate(words, max_new_tokens=6, do_sample=False, stopping_criteria=criteria, eos_token_id=None)
    return found.shape[1], before, hasattr(next(build_model().parameters()), "ds_id")


@pytest.mark.multirank
def test_a_model_that_is_not_built_in_pieces_generates_texts_of_unlike_lengths(tmp_path):
    found = run_ranks(generate_apart, 2, str(tmp_path), timeout=100)
    assert found == [(4, False, False), (5, False, False)]


def refusals(output_dir: str) -> list[str]:
    messages = []
    path = engine_checkpoint_of(Path(output_dir), 4)
    for call in (
        lambda: build_trainer(output_dir, deepspeed=STAGE_2, auto_find_batch_size=True),
        lambda: build_trainer(output_dir, deepspeed=STAGE_2).hyperparameter_search(),
        lambda: build_trainer(output_dir, deepspeed=STAGE_2).train(resume_from_checkpoint=path),
        lambda: train_with_an_empty_group(output_dir),
    ):
        try:
            call()
        except AccelTrainerError as error:
            messages.append(str(error))
    return messages


@pytest.mark.multirank
def test_what_an_engine_cannot_do_is_refused(tmp_path):
    search, trials, other_ranks, group = run_ranks(refusals, 1, str(tmp_path), timeout=100)[0]

    assert "auto_find_batch_size is set with strategy 'deepspeed', whose engine is built for one batch size" in search
    assert "hyperparameter_search() builds a model and an optimizer for each trial" in trials
    assert "was written by DeepSpeed's engine on 4 ranks, and this run has 1" in other_ranks
    assert "group 1 of AdamW has no parameters, and DeepSpeed drops such groups, so that a scheduler" in group
