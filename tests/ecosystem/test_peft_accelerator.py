"""PEFT in loops of one's own: states, adapters and merges of prepared models."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_trainer.errors import IncompatibleCheckpointError, ProcessGroupError
from accel_trainer.utils import load_fsdp_model, save_fsdp_model
from tests.ecosystem.peft_models import RANKS, STRATEGIES, adapt, batch_loss, prepare_loop, train_loop
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import build_model

peft = pytest.importorskip("peft")
preload("peft", "accel_trainer.accelerator", "transformers.models.llama.modeling_llama", "deepspeed")

METHODS = ("modules_to_save", "prompt")


def prepare(strategy: str, method: str) -> Any:
    return prepare_loop(strategy, lambda: adapt(build_model(), method))


def everything(folder: str, strategy: str) -> dict[str, Any]:
    """Train with each kind of adapter, save the state and the adapters in each way; return by kind what came out."""
    found = {}
    for method in METHODS:
        out = Path(folder, method)
        accelerator, model, *rest = prepare(strategy, method)
        losses = train_loop(accelerator, model, *rest, save_to=out / "state")
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(
            out / "given",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
        unwrapped.save_pretrained(out / "own", is_main_process=accelerator.is_main_process)
        accelerator.wait_for_everyone()
        numbers = unwrapped.get_nb_trainable_parameters()
        found[method] = {"losses": losses, "numbers": numbers, "merge": merge(unwrapped)}
        accelerator.free_memory()
    return found


def merge(model: Any) -> Any:
    try:
        return batch_loss(model.merge_and_unload())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def resume(folder: str, strategy: str) -> dict[str, list[float]]:
    """Go on from the states of another strategy; return the losses."""
    found = {}
    for method in METHODS:
        accelerator, *rest = prepare(strategy, method)
        found[method] = train_loop(accelerator, *rest, load_from=Path(folder, method, "state"))
        accelerator.free_memory()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def run(strategy: str) -> Any:
        folder = tmp_path_factory.mktemp(strategy)
        return run_ranks(everything, RANKS[strategy], str(folder), strategy, timeout=100), folder

    return run


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_are_trained_and_saved_alone_in_both_ways(runs, strategy):
    alone = runs("single")[0][0]
    results, folder = runs(strategy)
    for method in METHODS:
        found = results[0][method]
        np.testing.assert_allclose(found["losses"], alone[method]["losses"], rtol=2e-6)
        assert found["numbers"] == alone[method]["numbers"]
        expected = alone[method]["merge"] if method != "prompt" else None
        for way in ("given", "own"):
            names = {path.name for path in (folder / method / way).iterdir()}
            assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
            loss = batch_loss(peft.PeftModel.from_pretrained(build_model(), folder / method / way))
            expected = loss if expected is None else expected
            assert loss == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_merging_is_right_or_refused(runs, strategy):
    expected = runs("single")[0][0]["modules_to_save"]["merge"]
    for merged in (rank["modules_to_save"]["merge"] for rank in runs(strategy)[0]):
        if strategy in ("fsdp", "zero3"):
            assert merged.startswith("ConfigError")
            assert "its adapters cannot be merged into shards; save them with save_pretrained()" in merged
        else:
            assert merged == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("origin", "strategy"), [("single", "fsdp"), ("single", "zero3"), ("fsdp", "single"), ("zero3", "ddp")]
)
def test_a_state_goes_on_on_any_number_of_ranks(runs, origin, strategy):
    results, folder = runs(origin)
    resumed = run_ranks(resume, RANKS[strategy], str(folder), strategy, timeout=100)[0]
    for method in METHODS:
        np.testing.assert_allclose(resumed[method], results[0][method]["losses"][2:], rtol=2e-6)


def adapters_alone(folder: str) -> tuple[list[str], bool]:
    """Save the trained parameters by accelerate's function for FSDP, and load them into a model with others."""
    accelerator, model, *_ = prepare("fsdp", "lora")
    plugin = accelerator.state.fsdp_plugin
    trained = accelerator.get_state_dict(model)
    save_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    accelerator.wait_for_everyone()
    names = sorted(torch.load(Path(folder, "pytorch_model_fsdp.bin"), weights_only=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    load_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    loaded = accelerator.get_state_dict(model)
    is_equal = all(torch.equal(value, loaded[name]) for name, value in trained.items())
    other = accelerator.prepare(adapt(build_model(), "prompt"))
    with pytest.raises((IncompatibleCheckpointError, ProcessGroupError), match=r"lora_A.* has not; add the adapters"):
        load_fsdp_model(plugin, accelerator, other, folder, adapter_only=True)
    return names, is_equal


@pytest.mark.multirank
def test_trained_parameters_alone_are_saved_by_the_functions_for_fsdp(tmp_path: Path):
    names, is_equal = run_ranks(adapters_alone, 2, str(tmp_path), timeout=100)[0]
    assert names
    assert all(".lora_" in name for name in names)
    assert is_equal
