"""Every packaged configuration is planned, and trains on two ranks as a plain loop does; or it is refused by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_trainer.config import packaged_names, read_file, resolve
from accel_trainer.contrib.planner import Cluster, Workload, plan_layout
from accel_trainer.launch.cli import main
from tests.cells import beyond, selected
from tests.conformance.models import GLOBAL_BATCH, build_model, build_optimizer, build_samples, collate, plain_loop
from tests.loops import tiny_model
from tests.ranks import RankFailure, preload, run_ranks

preload(
    "accel_trainer.accelerator",
    "accel_trainer.strategies.fsdp2.strategy",
    "deepspeed",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
)


@dataclass(frozen=True)
class Expected:
    """What planning and running a file come to."""

    kind: str = "llama"
    num_ranks: int = 2
    sizes: str = "dp_shard 2"
    """Axes of the plan that are longer than one."""
    refused: str = ""
    """The refusal of a run on CPUs, where there is none."""
    tolerance: float = 2e-6


ZERO = Expected(kind="mlp")
EXPECTED = {
    "accelerate_fsdp_bert": Expected(kind="bert", tolerance=0.02),
    "context_parallel": Expected(sizes="cp 2"),
    "ddp": Expected(sizes="dp_replicate 2"),
    "expert_parallel": Expected(kind="mixtral", sizes="dp_shard 2, ep 2"),
    "fp8": Expected(refused=r"fp8 (needs torchao|was asked for on cpu)"),
    "fsdp_config_flat": Expected(),
    "full_shard": Expected(),
    "full_shard_bf16": Expected(tolerance=0.02),
    "full_shard_offload": Expected(),
    "hybrid_shard": Expected(),
    "preemption": Expected(),
    "qlora": Expected(tolerance=0.02),
    "sequence_parallel": Expected(sizes="sp 2"),
    "shard_grad_op": Expected(),
    "slurm": Expected(num_ranks=16, sizes="dp_replicate 2, dp_shard 8", tolerance=0.02),
    "tensor_parallel": Expected(sizes="tp 2"),
    "zero1": ZERO,
    "zero2": ZERO,
    "zero2_offload": ZERO,
    "zero2_offload_optimizer": ZERO,
    "zero3": ZERO,
    "zero3_offload": ZERO,
    "zero3_offload_nvme": Expected(kind="mlp", refused=r"NVMe"),
}


def test_every_packaged_file_is_expected_to_do_something():
    assert tuple(EXPECTED) == packaged_names()


@pytest.mark.parametrize("name", [name for name in EXPECTED if read_file(name).path.suffix == ".yaml"])
def test_a_file_says_in_three_lines_what_it_is_when_to_take_it_and_what_it_costs(name: str):
    lines = read_file(name).path.read_text(encoding="utf-8").splitlines()
    if name != "accelerate_fsdp_bert":  # of another tool
        assert [re.match(r"# (When: |Cost: )?", line)[1] for line in lines[:3]] == [None, "When: ", "Cost: "]
        assert not lines[3].startswith("#")


# Beyond the sample: options that others have, too; stages of real ranks are in tests/benchmarks/test_planned_peaks.py,
# and what is offloaded in tests/contrib/test_planner.py.
ALIKE = (
    "accelerate_fsdp_bert", "fsdp_config_flat", "full_shard_bf16", "full_shard_offload", "hybrid_shard", "preemption",
    "qlora", "shard_grad_op", "zero1", "zero2", "zero2_offload", "zero2_offload_optimizer", "zero3", "zero3_offload",
)  # fmt: skip


@pytest.mark.parametrize("name", [beyond(name) if name in ALIKE else name for name in EXPECTED])
def test_a_file_is_planned(name: str):
    expected = EXPECTED[name]
    kind = "llama" if expected.kind == "mlp" else expected.kind  # whose inputs a plan can make
    with torch.device("meta"):
        model = build_model(kind) if kind == "bert" else tiny_model(kind, num_hidden_layers=1)
    job = resolve(file=name, environ={}), expected.num_ranks, Workload(batch=2, sequence=12), Cluster(ranks_per_node=8)
    plan = plan_layout(model, *job)
    assert ", ".join(f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1) == expected.sizes
    assert 0 < plan.parameters < plan.peak


def losses_of(name: str, kind: str) -> list[float]:
    """Train three updates by a packaged file, in a small version of its job; return the means over all ranks."""
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, config=name)
    model = build_model(kind, seed=accelerator.process_index)
    optimizer = build_optimizer(model)
    loader = DataLoader(build_samples(kind), GLOBAL_BATCH // accelerator.readers.world_size, collate_fn=collate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch, _ in zip(loader, range(3), strict=False):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    return losses


def losses_of_each(names: list[str]) -> dict[str, list[float]]:
    return {name: losses_of(name, EXPECTED[name].kind) for name in names}


def _job_of(name: str) -> tuple[bool, bool]:
    """Return what has to be alike of files that are trained by in one job: the engine, and whether it is here."""
    return EXPECTED[name].kind == "mlp", EXPECTED[name].num_ranks == 2


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Callable[[tuple[bool, bool]], list[dict[str, list[float]]]]:
    """Return what gives the losses of a job's files by rank: a job costs more than to train in it."""
    names = [name for (name,) in selected(request, "test_a_file_trains_as_a_plain_loop_or_is_refused_by_name")]

    @functools.cache
    def train(job: tuple[bool, bool]) -> list[dict[str, list[float]]]:
        own = [name for name in names if _job_of(name) == job and not EXPECTED[name].refused]
        # The job of the SLURM file is one of two machines; options of the environment win over a file's.
        here = {"ACCEL_TRAINER_LAUNCH__NUM_PROCESSES": "2", "ACCEL_TRAINER_LAUNCH__NUM_MACHINES": "1"}
        return run_ranks(losses_of_each, 2, own, env={} if job[1] else here, timeout=200)

    return train


@pytest.mark.multirank
@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_trains_as_a_plain_loop_or_is_refused_by_name(name: str, trained: Any):
    expected = EXPECTED[name]
    if EXPECTED[name].kind == "mlp":
        pytest.importorskip("deepspeed")
    if expected.refused:
        with pytest.raises(RankFailure, match=expected.refused):
            run_ranks(losses_of, 2, name, expected.kind)
        return
    first, second = (found[name] for found in trained(_job_of(name)))
    assert first == second
    assert first == pytest.approx(plain_loop(expected.kind)["losses"][:3], rel=expected.tolerance)


def test_the_job_of_the_slurm_file_has_its_machines_and_is_warned_before_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["launch", "--print", "slurm", "--config_file", "slurm", "train.py"]) == 0
    job = capsys.readouterr().out
    assert re.findall(r"^#SBATCH --(nodes=\d+|gpus-per-node=\d+|signal=\S+)$", job, re.MULTILINE) == [
        "nodes=2", "gpus-per-node=8", "signal=USR1@360",
    ]  # fmt: skip
    assert "--config_file slurm train.py" in job
