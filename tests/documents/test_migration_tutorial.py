"""Each block of the migration tutorial, line for line but for the import, on one process, DDP x2 and FSDP2 x2.

What a block computes is compared with the plain PyTorch loop that the tutorial starts from.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, ProjectConfiguration
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "transformers.models.bert.modeling_bert", "transformers.modeling_utils")

GLOBAL_BATCH = 8
RANKS = {"single": 1, "ddp": 2, "fsdp2": 2}


def build(batch_size: int = GLOBAL_BATCH) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, Any]:
    """Return what the tutorial takes as given: model, optimizer, loader, scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = TensorDataset(torch.randn(48, 4), torch.randint(0, 2, (48,)))
    return model, optimizer, DataLoader(data, batch_size=batch_size), scheduler


loss_function = nn.CrossEntropyLoss()


def complex_loss_function(outputs: Tensor, target: Tensor) -> Tensor:
    """Tell in which dtype matrix products are computed here."""
    return (outputs @ outputs.T).mean().to(outputs.dtype) + loss_function(outputs, target)


def flat(state: dict[str, Tensor]) -> list[float]:
    """All values of a state; none for the empty one of ranks that are not the main one."""
    return [value for tensor in state.values() for value in tensor.flatten().tolist()]


def plain_loop(
    window: int = GLOBAL_BATCH, clip_norm: float = 0.0, clip_value: float = 0.0
) -> tuple[list[float], float]:
    """Train with the loop that the tutorial starts from; return the weights and the last learning rate."""
    model, optimizer, training_dataloader, scheduler = build(window)
    for batch in training_dataloader:
        optimizer.zero_grad()
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        loss.backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        scheduler.step()
    return flat(model.state_dict()), scheduler.get_last_lr()[0]


def training_loop(strategy: str) -> tuple[list[float], float]:
    """Run the block "put everything together"."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model, optimizer, training_dataloader, scheduler = build(GLOBAL_BATCH // RANKS[strategy])

    device = accelerator.device
    model.to(device)
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )

    for batch in training_dataloader:
        optimizer.zero_grad()
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    return flat(accelerator.get_state_dict(model)), scheduler.get_last_lr()[0]


def accumulating_loop(strategy: str, **clip: float) -> tuple[list[float], float]:
    """Run the block of gradient accumulation, with the methods for clipping in place of torch's."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, strategy=strategy)
    model, optimizer, training_dataloader, scheduler = build(GLOBAL_BATCH // RANKS[strategy])
    model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)
    # The block leaves the scheduler out, and the text says to pass it: a schedule follows the updates then.
    scheduler = accelerator.prepare(scheduler)

    for input, label in training_dataloader:
        with accelerator.accumulate(model):
            predictions = model(input)
            loss = loss_function(predictions, label)
            accelerator.backward(loss)
            if accelerator.sync_gradients and "norm" in clip:
                accelerator.clip_grad_norm_(model.parameters(), clip["norm"])
            if "value" in clip:
                accelerator.clip_grad_value_(model.parameters(), clip["value"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return flat(accelerator.get_state_dict(model)), scheduler.get_last_lr()[0]


def mixed_precision(strategy: str) -> dict[str, Any]:
    """Compute a loss outside of the model, under autocast; bf16 in place of fp16, which a CPU does not have."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, strategy=strategy)
    model, optimizer, training_dataloader, _ = build()
    model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)
    inputs, target = next(iter(training_dataloader))
    outputs = model(inputs)
    with accelerator.autocast():
        loss = complex_loss_function(outputs, target)
        inside = (outputs @ outputs.T).dtype
    accelerator.backward(loss)
    optimizer.step()
    return {"inside": str(inside), "outputs": str(outputs.dtype), "loss": loss.item()}


def save_and_load(strategy: str, save_directory: str) -> dict[str, Any]:
    """Run the blocks of "Model" under "Save and load"."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = accelerator.prepare(build()[0])
    expected = flat(build()[0].state_dict())

    accelerator.wait_for_everyone()
    accelerator.save_model(model, save_directory)
    files = {"single": sorted(os.listdir(save_directory))}
    accelerator.wait_for_everyone()
    accelerator.save_model(model, save_directory, max_shard_size="150B", safe_serialization=True)
    files["sharded"] = sorted(os.listdir(save_directory))
    accelerator.wait_for_everyone()
    accelerator.save_model(model, save_directory, safe_serialization=False)
    files["bin"] = sorted(os.listdir(save_directory))

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    unwrapped_model = accelerator.unwrap_model(model)
    path_to_checkpoint = os.path.join(save_directory, "pytorch_model.bin")
    unwrapped_model.load_state_dict(torch.load(path_to_checkpoint))
    state = accelerator.get_state_dict(model)
    # Where the strategy shards, the whole state is on the main process; replicas have their own.
    is_whole = accelerator.is_main_process or strategy == "ddp"
    return {"files": files, "loaded": flat(state) == expected if is_whole else state == {}}


def save_pretrained(strategy: str, directory: str) -> bool:
    """Run the block for models of transformers; return whether every rank reads the weights that were trained."""
    from transformers import AutoModel, BertConfig, BertModel

    accelerator = Accelerator(cpu=True, strategy=strategy)
    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))
    expected = flat(model.state_dict())
    model = accelerator.prepare(model)

    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        directory,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
    )
    # Under DDP only the main process writes, and nobody waits for it: the block reads in the same process.
    accelerator.wait_for_everyone()

    model = AutoModel.from_pretrained(directory)
    return flat(model.state_dict()) == expected


class Counter:
    """A stateful item of the user's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def save_state(strategy: str, project_dir: str) -> dict[str, Any]:
    """Train a step, save, train on, load, and train on again: the second way must repeat the first."""
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        project_config=ProjectConfiguration(project_dir=project_dir, automatic_checkpoint_naming=True, total_limit=2),
    )
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(*build(GLOBAL_BATCH // RANKS[strategy]))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)

    def train() -> list[float]:
        noise = []
        for inputs, targets in training_dataloader:
            counter.count += 1
            noise.append(torch.rand(()).item())
            accelerator.backward(loss_function(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return [*noise, *scheduler.get_last_lr(), *flat(accelerator.get_state_dict(model))]

    train()
    accelerator.save_state()
    first = train()
    accelerator.load_state()
    count = counter.count
    second = train()
    for _ in range(2):
        accelerator.save_state()
    accelerator.wait_for_everyone()
    names = sorted(path.name for path in (Path(project_dir) / "checkpoints").glob("[!._]*"))
    return {"repeats": first == second, "count": count, "names": names}


def run_tutorial(strategy: str, folder: str) -> dict[str, Any]:
    """Run all blocks on one rank."""
    return {
        "training": training_loop(strategy),
        "accumulation": accumulating_loop(strategy),
        "norm": accumulating_loop(strategy, norm=0.1),
        "value": accumulating_loop(strategy, value=0.01),
        "precision": mixed_precision(strategy),
        "saving": save_and_load(strategy, f"{folder}/weights"),
        "pretrained": save_pretrained(strategy, f"{folder}/my_model_directory"),
        "state": save_state(strategy, f"{folder}/project"),
    }


@pytest.fixture(scope="module", params=RANKS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp(request.param))
    return run_ranks(run_tutorial, RANKS[request.param], request.param, folder)


@pytest.mark.parametrize(
    ("block", "reference"),
    [
        ("training", {}),
        ("accumulation", {"window": 2 * GLOBAL_BATCH}),
        ("norm", {"window": 2 * GLOBAL_BATCH, "clip_norm": 0.1}),
        ("value", {"window": 2 * GLOBAL_BATCH, "clip_value": 0.01}),
    ],
)
def test_the_loops_train_as_plain_pytorch_at_the_same_global_batch(
    results: list[dict[str, Any]], block: str, reference: dict[str, Any]
):
    weights, rate = plain_loop(**reference)
    assert results[0][block][0] == pytest.approx(weights, abs=1e-5)
    for result in results:
        assert result[block][1] == pytest.approx(rate)


def test_a_loss_under_autocast_is_computed_in_the_lower_precision(results: list[dict[str, Any]]):
    for result in results:
        assert result["precision"]["inside"] == "torch.bfloat16"
        assert result["precision"]["outputs"] == "torch.float32"
        assert result["precision"]["loss"] > 0


def test_weights_are_saved_whole_in_every_format_and_loaded_into_the_prepared_model(results: list[dict[str, Any]]):
    shards = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for result in results:
        assert result["saving"]["loaded"]
        assert result["saving"]["files"] == {
            "single": ["model.safetensors"],
            "sharded": [*shards, "model.safetensors.index.json"],
            "bin": ["pytorch_model.bin"],
        }


def test_models_of_transformers_and_states_come_back_with_everything(results: list[dict[str, Any]]):
    steps = 48 // GLOBAL_BATCH
    for result in results:
        assert result["pretrained"]
        assert result["state"] == {"repeats": True, "count": steps, "names": ["checkpoint_1", "checkpoint_2"]}
