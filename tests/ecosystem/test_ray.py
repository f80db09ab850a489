"""Ray Train, Tune and Data on a local cluster: examples/ray with workers that die, other numbers of them, trials."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, set_seed
from accel_trainer.launch.cli import main

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train")

from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402

from tests.ecosystem import ray_jobs  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.multirank, pytest.mark.timeout(300)]
STEPS = list(range(8, 65, 8))


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster with a node of two CPUs; a start of workers takes about 15 s, most of it imports."""
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    paths = [str(ROOT), str(ROOT / "examples" / "ray")]
    for name, value in {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "HOME": str(tmp_path_factory.mktemp("home")),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # each report waits for it
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "2",
        "RAY_memory_monitor_refresh_ms": "0",  # it kills workers where others fill the machine
        "CRC32C_SW_MODE": "auto",  # set by what Tune imports
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }.items():
        patch.setenv(name, value)
    for path in paths:
        patch.syspath_prepend(path)
    node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    ray.init(address=cluster.address, log_to_driver=True)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    patch.undo()


def fit(folder: Path, num_workers: Any, name: str = "run", failures: int = 0, **config: Any) -> Any:
    result = TorchTrainer(
        ray_jobs.train_example,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(failures)),
    ).fit()
    assert result.error is None
    return result


def native(folder: Path, num_workers: Any, strategy: str | None, epochs: int = 4, **options: Any) -> Any:
    config = {"strategy": strategy, "epochs": epochs, "save_every": 8, "project_dir": str(folder / "states")}
    return fit(folder, num_workers, example="native", **config, **options).metrics_dataframe


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    """Losses of a plain loop on the whole batches, after each 8 updates."""
    example = importlib.import_module("native")
    set_seed(0)
    model = example.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.9)
    loader = Accelerator(cpu=True).prepare(DataLoader(example.build_data(), batch_size=32, shuffle=True))
    losses = []
    for _ in range(4):
        for points, targets in loader:
            loss = F.mse_loss(model(points), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[7::8]


@pytest.mark.slow
def test_a_loop_whose_worker_dies_goes_on_and_later_on_another_number_of_workers(
    tmp_path: Path, plain_losses: list[float]
) -> None:
    kill = {"after": 20, "marker": str(tmp_path / "dead")}
    frame = native(tmp_path, 2, "ddp", epochs=2, failures=1, kill=kill)
    assert (tmp_path / "dead").exists()
    assert frame["step"].tolist() == STEPS[:4]  # begun anew, the first two would be there twice
    frame = native(tmp_path, 1, None)
    assert frame["step"].tolist() == STEPS
    assert frame["workers"].tolist() == [2] * 4 + [1] * 4
    assert frame["loss"].tolist() == pytest.approx(plain_losses, rel=1e-4)


@pytest.mark.slow
def test_an_elastic_loop_under_fsdp2_goes_on_with_the_workers_of_the_nodes_that_are_left(
    tmp_path: Path, cluster: Any, plain_losses: list[float]
) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
    time.sleep(21)  # Ray Train looks for new nodes every 20 s, and begins with what it knows
    kill = {"after": 28, "marker": str(tmp_path / "dead"), "head": ray.get_runtime_context().get_node_id()}
    frame = native(tmp_path, (2, 4), "fsdp2", failures=1, kill=kill)
    assert frame["step"].tolist() == STEPS
    workers = frame["workers"].tolist()
    assert workers == sorted(workers, reverse=True)
    assert set(workers) == {4, 2}
    assert frame["loss"].tolist() == pytest.approx(plain_losses, rel=1e-4)


def plain_evaluations(folder: Path, **changes: Any) -> dict[int, float]:
    """Return the losses of the evaluations of a Trainer on one process, by update."""
    trainer = importlib.import_module("trainer").build_trainer(trainer_config(folder, **changes))
    trainer.train()
    return {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}


def trainer_config(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"output_dir": str(folder), "max_steps": 24, "save_steps": 8, "eval_steps": 8, **changes}


@pytest.mark.parametrize("fsdp", ["full_shard auto_wrap", pytest.param("", marks=pytest.mark.slow)])
def test_a_trainer_whose_worker_dies_reports_each_checkpoint_once(tmp_path: Path, fsdp: str) -> None:
    kill = {"after": 20, "marker": str(tmp_path / "dead")}
    config = trainer_config(tmp_path / "output", fsdp=fsdp)
    result = fit(tmp_path, 2, failures=1, example="trainer", kill=kill, **config)
    assert (tmp_path / "dead").exists()
    frame = result.metrics_dataframe
    assert frame["step"].tolist() == [8, 16, 24]
    expected = plain_evaluations(tmp_path / "plain")
    assert dict(zip(frame["step"], frame["eval_loss"], strict=True)) == pytest.approx(expected, rel=1e-5)
    # One copy, as it was committed: marker, manifest and checksums.
    with result.checkpoint.as_directory() as folder:
        assert main(["ckpt", "verify", folder]) == 0


@pytest.mark.slow
def test_tune_tries_learning_rates_with_a_trainer_each(tmp_path: Path) -> None:
    rates = [1e-4, 1e-2]
    # Without saves, so that evaluations alone are reported; the folder of a trial is the process's own.
    space = trainer_config(Path("output"), learning_rate=ray.tune.grid_search(rates), save_strategy="no")
    tuner = ray.tune.Tuner(
        ray_jobs.try_learning_rate, param_space=space, run_config=ray.tune.RunConfig(storage_path=str(tmp_path))
    )
    results = tuner.fit()
    assert not results.errors
    best = results.get_best_result(metric="eval_loss", mode="min")
    expected = [plain_evaluations(tmp_path / "plain", learning_rate=rate, save_strategy="no") for rate in rates]
    for result in results:
        frame = result.metrics_dataframe
        losses = expected[rates.index(result.config["learning_rate"])]
        assert dict(zip(frame["step"], frame["eval_loss"], strict=True)) == pytest.approx(losses, rel=1e-5)
    assert best.config["learning_rate"] == min(rates, key=lambda rate: expected[rates.index(rate)][24])


@pytest.mark.slow
def test_a_shard_of_ray_data_is_a_loader_whose_rows_are_each_seen_once(tmp_path: Path) -> None:
    TorchTrainer(
        ray_jobs.read_shard,
        train_loop_config={"folder": str(tmp_path)},
        # The tasks that read want a CPU, too.
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        datasets={"train": ray.data.range(22)},
    ).fit()
    seen, sizes, ends, trained = json.loads((tmp_path / "seen").read_text())
    assert [sorted(rows) for rows in seen] == [list(range(22))] * 2
    assert trained == list(range(22))
    assert sizes == [4, 4, 3] * 2
    assert ends == [False, False, True] * 2
