"""PEFT under the Trainer: adapters trained, saved, resumed and merged on one process, DDP, FSDP2 and ZeRO."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cells import beyond
from tests.ecosystem.peft_models import METHODS, RANKS, STRATEGIES, batch_loss, build_peft_trainer, trained_tensors
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import build_model

peft = pytest.importorskip("peft")
preload("peft", "accel_trainer.trainer", "transformers.models.llama.modeling_llama", "deepspeed")

pytestmark = pytest.mark.timeout(300)
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
BEST: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}


def losses(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def everything(folder: str, strategy: str) -> dict[str, Any]:
    """Train with each kind of adapter, resume, and save; return by kind what came out."""
    found = {}
    for method in METHODS:
        out = Path(folder, method)
        trainer = build_peft_trainer(out, strategy, method, **SAVES, **BEST)
        trainer.train()
        trainer.save_model(str(out / "model"))
        again = build_peft_trainer(out / "again", strategy, method, **SAVES)
        again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        best = trainer.evaluate()["eval_loss"]
        resumed = trained_tensors(again)
        best_step = trainer.state.best_global_step
        trainer._load_from_checkpoint(str(out / "checkpoint-4"))
        found[method] = {
            "losses": losses(trainer),
            "eval_losses": losses(trainer, "eval_loss")[:2],
            "best": best,
            "best_step": best_step,
            "resumed_losses": losses(again),
            "trained": trained_tensors(trainer),
            "resumed": resumed,
        }
    return found


def resume_all(folder: str, strategy: str) -> dict[str, list[float]]:
    """Go on from the checkpoints of another strategy; return the losses."""
    found = {}
    for method in METHODS:
        trainer = build_peft_trainer(Path(folder, f"{method}-on-{strategy}"), strategy, method)
        trainer.train(resume_from_checkpoint=str(Path(folder, method, "checkpoint-2")))
        found[method] = losses(trainer)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what came out of a strategy's runs, and their folder; each runs once."""

    @functools.cache
    def run(strategy: str) -> Any:
        folder = tmp_path_factory.mktemp(strategy)
        return run_ranks(everything, RANKS[strategy], str(folder), strategy, timeout=250)[0], folder

    return run


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_learn_as_on_one_process_and_resume_exactly(runs, strategy):
    alone, found = runs("single")[0], runs(strategy)[0]
    for method in METHODS:
        ours, expected = found[method], alone[method]
        np.testing.assert_allclose(ours["losses"], expected["losses"], rtol=2e-6)
        np.testing.assert_allclose(ours["eval_losses"], expected["eval_losses"], rtol=2e-6)
        assert ours["best_step"] == expected["best_step"]
        assert ours["best"] == pytest.approx(min(ours["eval_losses"]), rel=1e-6)
        assert ours["resumed_losses"] == ours["losses"]
        assert ours["trained"].keys() == ours["resumed"].keys() == expected["trained"].keys()
        for name, value in ours["trained"].items():
            np.testing.assert_array_equal(ours["resumed"][name], value)
            np.testing.assert_allclose(value, expected["trained"][name], atol=2e-5)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_hold_the_adapter_alone_and_from_pretrained_reads_it(runs, strategy):
    found, folder = runs(strategy)
    for method in METHODS:
        for directory in (folder / method / "checkpoint-4", folder / method / "model"):
            names = {path.name for path in directory.iterdir()}
            assert {"adapter_model.safetensors", "adapter_config.json"} <= names
            assert not any(name.startswith(("model", "pytorch_model", "trained_weights")) for name in names)
        saved = peft.PeftModel.from_pretrained(build_model(), folder / method / "model")
        assert batch_loss(saved) == pytest.approx(found[method]["best"], rel=1e-6)
        if method != "prompt":
            assert batch_loss(saved.merge_and_unload()) == pytest.approx(found[method]["best"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("origin", "strategy"),
    [
        ("fsdp", "single"),
        ("single", "fsdp"),
        ("single", "zero2"),
        ("fsdp", "zero3"),
        *map(beyond, [("single", "ddp"), ("fsdp", "ddp"), ("fsdp", "zero2"), ("single", "zero3")]),
    ],
)
def test_every_strategy_and_number_of_ranks_goes_on_from_any_checkpoint(runs, origin, strategy):
    found, folder = runs(origin)
    resumed = run_ranks(resume_all, RANKS[strategy], str(folder), strategy, timeout=250)[0]
    for method in METHODS:
        np.testing.assert_allclose(resumed[method], found[method]["losses"], rtol=2e-6)
