"""The embedding and the head of a language model as units of their own: what is gathered when, and what it computes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, DataLoaderConfiguration
from accel_trainer.config import resolve
from accel_trainer.precision import build_precision
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.api import TrainJob
from accel_trainer.strategies.fsdp2 import wrapping
from accel_trainer.strategies.fsdp2.strategy import FSDP2Strategy
from accel_trainer.strategies.fsdp2.wrapping import find_blocks, find_outer_units
from tests.ranks import preload
from tests.scenarios import Outcome, Scenarios

preload("accel_trainer.accelerator", "transformers.models.llama.modeling_llama")

OLDER = Path(__file__).parents[2] / "fixtures" / "fsdp2_one_outer_unit"
"""A checkpoint of two ranks after three micro-batches, by commit 5f205d4: one unit held embedding, norm and head."""
LOSSES_OF_OLDER = [3.8289294, 3.9077201, 3.9122181]
"""Of the three micro-batches after it, by that commit."""
# V vocabulary, B batch, L sequence
V, B, L = 48, 4, 8
LAYER, OUTER, NORM = 656, V * 8, 8
"""Parameters of a decoder layer, of the embedding as of the head, and of the norm between layers and head."""


def build_llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**{"vocab_size": V, **sizes, "use_cache": False, **options})
    return LlamaForCausalLM(config)


def tokens_BL() -> Tensor:
    return torch.randint(0, V, (6 * B, L), generator=torch.Generator().manual_seed(1))


def fuse_head(model: nn.Module) -> nn.Module:
    """Have the model's forward read the head's weight, and call the head for no loss, as kernels that fuse both do."""
    from transformers.utils import ModelOutput

    def forward(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        logits = hidden @ self.lm_head.weight.T
        return ModelOutput(loss=nn.functional.cross_entropy(logits.float(), labels[:, 1:].flatten()))

    model.forward = types.MethodType(forward, model)
    return model


# --- which ----------------------------------------------------------------------------------------------------------


def outer_units(model: nn.Module, **fsdp: Any) -> tuple[str | None, ...]:
    explicit = {"strategy": "fsdp2"} | {f"fsdp.{name}": value for name, value in fsdp.items()}
    found = find_outer_units(model, find_blocks(model, resolve(explicit=explicit, environ={}), None), set())
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(module and names[id(module)] for module in found)


def build_large(kind: str, **options: Any) -> nn.Module:
    """Return a language model without memory, whose vocabulary is worth a unit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **sizes, **{"vocab_size": 40_000, **options})
        )


def test_large_ones_that_are_called_and_not_tied_are_units():
    from transformers import LlamaForSequenceClassification

    large = build_large("llama")
    assert outer_units(large) == ("model.embed_tokens", "lm_head", "model")
    assert outer_units(build_large("llama", vocab_size=1000)) == (None, None, None)
    assert outer_units(build_large("llama", tie_word_embeddings=True)) == (None, None, None)
    assert outer_units(build_large("phi")) == ("model.embed_tokens", None, None)  # its head has a bias
    with torch.device("meta"):
        classifier = LlamaForSequenceClassification(large.config)
    assert outer_units(classifier) == ("model.embed_tokens", None, None)
    assert outer_units(nn.Sequential(large)) == (None, None, None)
    assert outer_units(large, wrap_classes=("LlamaDecoderLayer", "Embedding")) == (None, "lm_head", "model")


# --- what is gathered -----------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Records collectives of tensors: the name, and the elements of the tensor that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            numels = [leaf.numel() for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            self.seen.append((func.__name__.split("_base")[0].strip("_"), max(numels)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def job_of_4() -> Iterator[ProcessContext]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield ProcessContext(0, 0, 4, 4, torch.device("cpu"), "fake")
    dist.destroy_process_group()


def measure(model: Any, process: ProcessContext) -> tuple[list[tuple[str, int]], dict[str, set[int]]]:
    """Return the collectives of a step in bf16, and the bytes that are gathered in parts of it."""
    job = TrainJob(model, [], resolve(explicit={"strategy": "fsdp2"}, environ={}))
    unit = FSDP2Strategy().prepare(job, build_precision("bf16", process.device), process)
    gathered: dict[str, set[int]] = {"layers": set(), "their backward": set(), "head": set()}

    def note(part: str) -> None:
        gathered[part].add(sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor)))

    def note_layer(module: nn.Module, args: Any, output: Tensor) -> None:
        note("layers")
        output.register_hook(lambda gradient: note("their backward"))

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(note_layer)
    model.lm_head.register_forward_hook(lambda module, args, output: note("head"))
    with Collectives() as collectives:
        unit.backward(unit.model(input_ids=tokens_BL(), labels=tokens_BL()).loss)
    return collectives.seen, gathered


def test_layers_run_without_the_embedding_and_the_head(job_of_4: ProcessContext, monkeypatch: pytest.MonkeyPatch):
    seen, gathered = measure(build_llama(), job_of_4)
    around = 2 * OUTER + NORM
    layers = [("allgather", LAYER)] * 2
    layers_back = [("allgather", LAYER), ("allgather", LAYER), ("reduce_scatter", LAYER), ("reduce_scatter", LAYER)]
    assert seen == [("allgather", around), *layers, *layers_back, ("reduce_scatter", around)]
    assert gathered == {
        "layers": {2 * (LAYER + around)},
        "their backward": {2 * (LAYER + around)},
        "head": {2 * around},
    }

    monkeypatch.setattr(wrapping, "_MIN_OUTER_NUMEL", OUTER)
    seen, gathered = measure(build_llama(), job_of_4)
    forward = [("allgather", NORM), ("allgather", OUTER), *layers, ("allgather", OUTER)]
    assert seen[:5] == forward
    # The head's gradient goes first; the embedding's backward gathers nothing.
    assert sorted(seen[5:]) == sorted([*layers_back, *[("reduce_scatter", size) for size in (OUTER, OUTER, NORM)]])
    assert seen[5:].index(("reduce_scatter", OUTER)) < seen[5:].index(("reduce_scatter", LAYER))
    assert gathered == {
        "layers": {2 * (LAYER + NORM)},
        "their backward": {2 * (LAYER + NORM)},
        "head": {2 * (OUTER + NORM)},
    }


# --- what it computes -----------------------------------------------------------------------------------------------

SCENARIOS = Scenarios()


def run_all() -> dict[str, Outcome]:
    wrapping._MIN_OUTER_NUMEL = OUTER
    return SCENARIOS.run()


def results(name: str) -> list[Any]:
    return SCENARIOS.results(name, run_all, world_size=2)


def build(model: nn.Module, **options: Any) -> tuple[Any, ...]:
    data = DataLoaderConfiguration(use_stateful_dataloader=True, split_batches=True)
    accelerator = Accelerator(
        cpu=True, strategy="fsdp2", gradient_accumulation_steps=2, dataloader_config=data, **options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(TensorDataset(tokens_BL()), B))


def train(parts: tuple[Any, ...]) -> list[float]:
    """Train to the end of the epoch; return the losses of all ranks' batches."""
    accelerator, model, optimizer, loader = parts
    losses = []
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def train_alone(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for step, batch_BL in enumerate(tokens_BL().split(B), start=1):
        loss = model(input_ids=batch_BL, labels=batch_BL).loss
        (loss / 2).backward()
        if step % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def is_sharded(model: nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


@SCENARIOS.add
def trained() -> dict[str, tuple[list[float], bool]]:
    seen = {}
    for name, model, options in (
        ("fp32", build_llama(), {}),
        ("bf16", build_llama(), {"mixed_precision": "bf16"}),
        ("fused", fuse_head(build_llama()), {}),
        ("tied", build_llama(tie_word_embeddings=True), {}),
    ):
        parts = build(model, **options)
        seen[name] = (train(parts), is_sharded(parts[1]))
    with mock.patch.object(wrapping, "_MIN_OUTER_NUMEL", OUTER + 1):
        seen["bf16 in one unit"] = (train(build(build_llama(), mixed_precision="bf16")), True)
    return seen


def test_the_losses_are_those_of_one_process():
    expected, tied = train_alone(build_llama()), train_alone(build_llama(tie_word_embeddings=True))
    assert train_alone(fuse_head(build_llama())) == pytest.approx(expected, rel=1e-5)
    for seen in results("trained"):
        assert seen["fp32"] == (pytest.approx(expected, rel=1e-5), True)
        assert seen["fused"] == (pytest.approx(expected, rel=1e-5), True)
        assert seen["tied"] == (pytest.approx(tied, rel=1e-5), True)
        assert seen["bf16"] == seen["bf16 in one unit"]


@SCENARIOS.add
def inferred() -> tuple[list[Any], list[bool]]:
    model = build(build_llama())[1].eval()
    fused = build(fuse_head(build_llama()))[1].eval()
    tokens = tokens_BL()[:2]
    found, sharded = [], []
    with torch.no_grad():
        for each in (model, fused, fused, model):
            found.append(each(input_ids=tokens, labels=tokens).loss.item())
            sharded.append(is_sharded(each))
        found.append(model.generate(tokens, max_new_tokens=4, do_sample=False).tolist())
        sharded.append(is_sharded(model))
    return found, sharded


def test_inference_gathers_them_anew_and_leaves_shards():
    model, tokens = build_llama().eval(), tokens_BL()[:2]
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
        made = model.generate(tokens, max_new_tokens=4, do_sample=False).tolist()  # type: ignore[operator]
    for found, sharded in results("inferred"):
        assert found[:4] == pytest.approx([loss] * 4, rel=1e-5)
        assert found[4] == made
        assert all(sharded)


@SCENARIOS.add
def resumed() -> list[float]:
    parts = build(build_llama())
    parts[0].load_state(OLDER)
    return train(parts)


def test_a_checkpoint_in_a_window_of_one_outer_unit_goes_on():
    for losses in results("resumed"):
        assert losses == pytest.approx(LOSSES_OF_OLDER, rel=1e-5)
