"""The Trainer with models that transformers shards while it loads them: numbers and checkpoints of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.ranks import RankFailure, preload, run_ranks
from tests.trainer import test_parallel_layouts as parallel_layouts
from tests.trainer.test_parallel_layouts import samples

pytestmark = [
    pytest.mark.beside_accelerate,
    pytest.mark.multirank,
    pytest.mark.skipif(
        find_spec("accelerate") is None
        or not hasattr(transformers.PreTrainedModel, "is_distributed_loading_by_transformers"),
        reason="from_pretrained(distributed_config=...) of transformers 5.23 asks for accelerate",
    ),
]

preload("transformers.trainer", "accel_trainer.trainer.trainer", "accel_trainer.strategies.fsdp2.presharded")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.0, "use_cache": False}
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "fsdp": ("dense", {"fsdp_size": 2}),
    "hsdp": ("dense", {"dp_replicate_size": 2}),
    "tp": ("dense", {"tp_size": 2}),
    "tp x fsdp": ("dense", {"tp_size": 2, "fsdp_size": 2}),
    "ep": ("experts", {"fsdp_size": 2, "ep_size": 2}),
    "ep along tp": ("experts", {"tp_size": 2, "ep_size": 2}),
}


def save_models(directory: Path) -> None:
    """Save a model with norms between sharded layers, whose gradients ranks have in parts; and a mixture."""
    torch.manual_seed(0)
    dense = transformers.Qwen3Config(**SIZES, **HEADS, attention_bias=True)
    transformers.Qwen3ForCausalLM(dense).save_pretrained(directory / "dense")
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    mixture = transformers.Qwen3MoeConfig(**SIZES, **HEADS, **experts)
    transformers.Qwen3MoeForCausalLM(mixture).save_pretrained(directory / "experts")


def load(model: str, sizes: dict[str, int] | None) -> Any:
    from transformers.distributed import DistributedConfig

    options = {} if sizes is None else {"distributed_config": DistributedConfig(**sizes)}
    return transformers.AutoModelForCausalLM.from_pretrained(model, **options)


def train(model: str, directory: str, sizes: dict[str, int] | None, resume: str | None = None) -> dict[str, Any]:
    """Train updates of 8 samples, evaluate, predict and save."""
    readers = 1 if sizes is None else sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
    trainer = parallel_layouts.train(directory, load(model, sizes), 4 // readers, None, resume)
    found = parallel_layouts.results_of(trainer)
    trainer.save_model(f"{directory}/final")
    return found


def train_and_resume(model: str, directory: str, sizes: dict[str, int], theirs: str) -> list[dict[str, Any]]:
    """Return a run, and runs that go on from its checkpoint and from that of one process."""
    trained = train(model, f"{directory}/run", sizes)
    resumed = train(model, f"{directory}/again", sizes, f"{directory}/run/checkpoint-2")
    return [trained, resumed, train(model, f"{directory}/taken", sizes, theirs)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_models(directory)
    return directory


@pytest.fixture(scope="module")
def alone(models: Path) -> Callable[[str], dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}

    def of(kind: str) -> dict[str, Any]:
        if kind not in runs:
            runs[kind] = run_ranks(train, 1, str(models / kind), str(models / f"{kind}-run"), None)[0]
        return runs[kind]

    return of


def require_equal(found: dict[str, Any], expected: dict[str, Any], last: int = 4) -> None:
    flat = [[number for log in run["logs"][-last:] for number in log] for run in (found, expected)]
    assert flat[0] == pytest.approx(flat[1], rel=1e-6)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert torch.allclose(torch.tensor(found["predictions"]), torch.tensor(expected["predictions"]), atol=1e-4)
    assert (found["tokens"], found["batch"]) == (expected["tokens"], expected["batch"])


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_sharded_at_load_trains_as_one_process_does(
    name: str, models: Path, alone: Callable[[str], dict[str, Any]], tmp_path: Path
):
    kind, sizes = LAYOUTS[name]
    world_size = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1) * sizes.get("tp_size", 1)
    expected, model = alone(kind), str(models / kind)

    saved = f"{model}-run/checkpoint-2"
    for trained, *resumed in run_ranks(train_and_resume, world_size, model, str(tmp_path), sizes, saved, timeout=110):
        require_equal(trained, expected)
        for found in resumed:
            require_equal(found, expected, last=2)
    (read,) = run_ranks(train, 1, model, str(tmp_path / "read"), None, f"{tmp_path}/run/checkpoint-2")
    require_equal(read, expected, last=2)

    own, theirs = (load_file(f"{path}/final/model.safetensors") for path in (f"{model}-run", tmp_path / "run"))
    assert own.keys() == theirs.keys()
    assert all(torch.allclose(own[key], theirs[key], atol=1e-4) for key in own)
    assert "distributed_config" not in json.loads((tmp_path / "run/final/config.json").read_text())


def build(model: str, directory: str, by_function: bool, **options: Any) -> None:
    from accel_trainer import Trainer, TrainingArguments

    args = TrainingArguments(directory, use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1, **options)
    sizes = {"tp_size": 2}
    if by_function:
        given: dict[str, Any] = {"model_init": lambda: load(model, sizes)}
    else:
        given = {"model": load(model, sizes)}
    Trainer(args=args, train_dataset=samples(), **given).train()


@pytest.mark.parametrize("options", [{"fsdp": True}, {"parallelism_config": {"tp_size": 2}}])
def test_options_that_shard_are_refused_beside_it(options: dict[str, Any], models: Path, tmp_path: Path):
    with pytest.raises(RankFailure, match=r"was sharded by from_pretrained\(.*\), and this run has"):
        run_ranks(build, 2, str(models / "dense"), str(tmp_path), False, **options)


def test_a_model_of_a_function_is_refused_with_the_way_out(models: Path, tmp_path: Path):
    with pytest.raises(RankFailure, match="load it before, and pass it as model"):
        run_ranks(build, 2, str(models / "dense"), str(tmp_path), True)
