"""What prepare() returns is still the user's model: it pickles, copies, compiles, and is given back by unwrap_model."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from tests.ranks import preload, run_ranks
from tests.sharded import Net, adamw, batch, build

preload("accel_trainer.accelerator", "torch._dynamo", "tests.sharded")

WORLD_SIZES = {"single": 1, "ddp": 2, "fsdp2": 2}
BACKEND = "accel_trainer_counting"
compiled: list[torch.fx.GraphModule] = []


@torch._dynamo.register_backend(name=BACKEND)
def counting(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
    """A backend that compiles nothing and remembers what it was given."""
    compiled.append(graph)
    return graph.forward


def prepare(strategy: str, precision: str = "no", **options: Any) -> tuple[Any, nn.Module, nn.Module, Any]:
    """Return the Accelerator, the user's model, what prepare() made of it, and its optimizer."""
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, strategy=strategy, mixed_precision=precision, **options)
    own = build()
    prepared, optimizer = accelerator.prepare(own, adamw(own))
    return accelerator, own, prepared, optimizer


def losses(accelerator: Any, model: nn.Module, optimizer: Any) -> list[float]:
    """Return the losses of three updates on this rank's rows, averaged over the ranks."""
    rows = batch().chunk(accelerator.num_processes)[accelerator.process_index]
    found = []
    for _ in range(3):
        loss = model(rows)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    return found


def copies(strategy: str, precision: str) -> list[Any]:
    """Copy a trained model, whole and unwrapped, in two ways; say what the copies return, or what is raised."""
    accelerator, own, prepared, optimizer = prepare(strategy, precision)
    losses(accelerator, prepared, optimizer)
    found: list[Any] = [accelerator.unwrap_model(prepared) is own, prepared(batch()).item()]
    for model in (prepared, own):
        for duplicate in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
            try:
                twin = duplicate(model)
                assert twin is not model
                found.append(twin(batch()).item())
            except ValueError as error:
                found.append(str(error))
    return found


def compile_all(strategy: str) -> dict[str, Any]:
    """Train a compiled model, whole and by region; return the losses, and how many graphs there were."""
    from accel_trainer import TorchDynamoPlugin

    found: dict[str, Any] = {"compiled as a whole": set()}
    for name, regional in (("whole", False), ("regional", True), ("default", None)):
        torch.compiler.reset()
        compiled.clear()
        plugin = TorchDynamoPlugin(backend=BACKEND, use_regional_compilation=regional)
        accelerator, own, prepared, optimizer = prepare(strategy, dynamo_plugin=plugin)
        is_own = accelerator.unwrap_model(prepared) is own and list(own.state_dict()) == list(Net().state_dict())
        found[name] = (losses(accelerator, prepared, optimizer), len(compiled), is_own)
        if own._compiled_call_impl is not None:
            found["compiled as a whole"].add(name)
    torch.compiler.reset()
    compiled.clear()
    accelerator, own, prepared, optimizer = prepare(strategy)
    later = torch.compile(prepared, backend=BACKEND)
    is_own = accelerator.unwrap_model(later) is own and accelerator.prepare(later) is later
    with accelerator.accumulate(later):
        found["afterwards"] = (losses(accelerator, later, optimizer), len(compiled), is_own)
    torch.compiler.reset()
    return found


def run_all(strategy: str) -> tuple[list[list[Any]], dict[str, Any]]:
    """Everything that is looked at, in one job."""
    return [copies(strategy, precision) for precision in ("no", "bf16")], compile_all(strategy)


@functools.cache
def results_of(strategy: str) -> list[tuple[list[list[Any]], dict[str, Any]]]:
    """Return the results of `run_all` by rank."""
    return run_ranks(run_all, WORLD_SIZES[strategy], strategy)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_prepared_models_pickle_and_copy_and_are_given_back(strategy: str):
    for by_precision, _ in results_of(strategy):
        for is_own, expected, *twins in by_precision:
            assert is_own
            assert twins == [expected] * 4


def test_a_sharded_model_that_is_copied_says_what_to_do_instead():
    for by_precision, _ in results_of("fsdp2"):
        for is_own, _, *messages in by_precision:
            assert is_own
            for message in messages:
                assert "FSDPNet is sharded, and its shards cannot be copied or pickled" in message
                assert "get_state_dict()" in message


def train_alone() -> list[float]:
    """Plain PyTorch on one process."""
    model, found = build(), []
    optimizer = adamw(model)
    for _ in range(3):
        loss = model(batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("strategy", WORLD_SIZES)
@pytest.mark.parametrize("kind", ["whole", "regional", "default", "afterwards"])
def test_compiled_models_train_as_plain_ones(strategy: str, kind: str):
    for _, by_kind in results_of(strategy):
        found, num_graphs, is_own = by_kind[kind]
        assert found == pytest.approx(train_alone(), abs=1e-6)
        assert num_graphs > 0
        assert is_own


def test_sharded_models_are_compiled_by_region_unless_the_whole_model_is_asked_for():
    whole = {"single": {"whole", "default"}, "fsdp2": {"whole"}}
    for strategy, kinds in whole.items():
        assert results_of(strategy)[0][1]["compiled as a whole"] == kinds
