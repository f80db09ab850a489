"""Native loops with models that transformers shards while it loads them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from tests.ranks import RankFailure, preload, run_ranks
from tests.trainer.test_parallel_layouts import samples
from tests.trainer.test_sharded_at_load import load, save_models

pytestmark = [
    pytest.mark.beside_accelerate,
    pytest.mark.multirank,
    pytest.mark.skipif(
        find_spec("accelerate") is None
        or not hasattr(transformers.PreTrainedModel, "is_distributed_loading_by_transformers"),
        reason="from_pretrained(distributed_config=...) of transformers 5.23 asks for accelerate",
    ),
]

preload("transformers", "accel_trainer.accelerator", "accel_trainer.strategies.fsdp2.presharded")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_models(directory)
    return directory


def loop(
    model: str, sizes: dict[str, int] | None, project: str, begin: int = 0, save_at: int | None = None
) -> list[tuple[float, float]]:
    """Train on micro-batches of 4 samples, two for an update; return the losses, and the norms of the updates.

    Args:
        begin: the micro-batch with which it goes on from the saved state.
        save_at: the micro-batch before which to save.
    """
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    trained = load(model, sizes)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
    readers = 1 if sizes is None else sizes.get("fsdp_size", 1)
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in samples()[:8]]
    loader = DataLoader(rows * 3, batch_size=4 // readers)
    trained, optimizer, loader = accelerator.prepare(trained, optimizer, loader)
    if begin:
        accelerator.load_state(f"{project}/state")
    found = []
    for number, batch in enumerate(accelerator.skip_first_batches(loader, begin), begin):
        if number == save_at:
            accelerator.save_state(f"{project}/state")
        with accelerator.accumulate(trained):
            loss = trained(**batch).loss
            accelerator.backward(loss)
            norm = float("nan")
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(trained.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        found.append((float(accelerator.reduce(loss.detach(), "mean")), norm))
    if save_at is not None:
        trained.save_pretrained(f"{project}/final")
    return found


@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, {"tp_size": 2}], ids=["fsdp", "tp"])
def test_a_native_loop_goes_on_within_a_window_as_one_process_does(sizes: dict[str, int], models: Path, tmp_path: Path):
    model = str(models / "dense")
    (alone,) = run_ranks(loop, 1, model, None, str(tmp_path / "alone"), save_at=3)
    both = run_ranks(loop, 2, model, sizes, str(tmp_path / "both"), save_at=3)
    resumed = run_ranks(loop, 2, model, sizes, str(tmp_path / "both"), 3)
    (read,) = run_ranks(loop, 1, model, None, str(tmp_path / "both"), 3)

    close = {"rel": 2e-6, "nan_ok": True}
    for found in both:
        assert [n for pair in found for n in pair] == pytest.approx([n for pair in alone for n in pair], **close)
    for found in (*resumed, read):
        assert [n for pair in found for n in pair] == pytest.approx([n for pair in alone[3:] for n in pair], **close)
    again, expected = (load(f"{tmp_path}/{name}/final", None).state_dict() for name in ("both", "alone"))
    assert all(torch.allclose(again[key], expected[key], atol=1e-4) for key in expected)


def refused(model: str, case: str) -> None:
    from accel_trainer import Accelerator
    from accel_trainer.utils import DistributedDataParallelKwargs

    options = [DistributedDataParallelKwargs(comm_hook="fp16")] if case == "hook" else []
    accelerator = Accelerator(cpu=True, strategy="fsdp2" if case == "strategy" else None, kwargs_handlers=options)
    loader = DataLoader(samples(), batch_size=2)
    if case == "order":
        accelerator.prepare(loader)
    if case == "sizes":
        accelerator.prepare(load(model, {"fsdp_size": 2}))
    trained = load(model, {"tp_size": 2})
    accelerator.prepare(trained, torch.optim.AdamW(trained.parameters()))


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("strategy", "dense", "and this run has strategy=fsdp2.*; leave that out"),
        ("order", "dense", "a data loader was prepared for 2 ranks that read different data.*prepare the model first"),
        ("sizes", "dense", "was loaded with tp_size=2, and a model before it with fsdp_size=2"),
        ("packed", "experts", "was loaded with tp_size=2, and a rank has several pieces of .*gate_up_proj"),
        ("hook", "dense", "was loaded with tp_size=2, and a communication hook is DDP's.*leave the hook out"),
    ],
)
def test_what_does_not_go_together_is_refused(case: str, kind: str, message: str, models: Path):
    with pytest.raises(RankFailure, match=message):
        run_ranks(refused, 2, str(models / kind), case)


def beside(model: str, sizes: dict[str, int]) -> tuple[float, int, float]:
    """Train a layer of its own behind a sharded model, both by one optimizer; return a weight, ranks, and the loss."""
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True)
    trained, head = load(model, sizes), torch.nn.Linear(64, 1, bias=False)
    torch.nn.init.constant_(head.weight, 0.01 * (1 + accelerator.process_index))  # rank 0's count
    optimizer = torch.optim.SGD([*trained.parameters(), *head.parameters()], lr=1e-2)
    readers = sizes.get("fsdp_size", 1)
    loader = DataLoader(samples()[:4], batch_size=4 // readers)
    trained, head, optimizer, loader = accelerator.prepare(trained, head, optimizer, loader)
    for batch in loader:
        loss = head(trained(input_ids=batch["input_ids"]).logits).square().mean()
        accelerator.backward(loss)
        optimizer.step()
    return float(head.module.weight[0, 0].detach()), accelerator.readers.world_size, float(loss.detach())


def test_a_layer_beside_it_is_replicated(models: Path):
    by_data, by_layers = (
        run_ranks(beside, 2, str(models / "dense"), sizes) for sizes in ({"fsdp_size": 2}, {"tp_size": 2})
    )
    assert [ranks for _, ranks, _ in (*by_data, *by_layers)] == [2, 2, 1, 1]
    weights = [weight for weight, _, _ in (*by_data, *by_layers)]
    assert weights == pytest.approx([weights[0]] * 4, rel=1e-5)
