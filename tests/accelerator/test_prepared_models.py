"""What prepare() returns is still the user's model: it pickles, copies, compiles, and is given back by unwrap_model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from tests.cells import beyond, selected
from tests.ranks import preload, run_ranks
from tests.sharded import Net, adamw, batch, build, train_alone

preload("accel_trainer.accelerator", "torch._dynamo", "tests.sharded")

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


REGIONAL = {"whole": False, "regional": True, "default": None}


def prepare_compiled(strategy: str, kind: str) -> tuple[Any, ...]:
    from accel_trainer import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend=BACKEND, use_regional_compilation=REGIONAL[kind])
    return prepare(strategy, dynamo_plugin=plugin)


def compiled_parts(strategy: str, kind: str) -> list[bool]:
    """Return whether a model was compiled as a whole, and whether each of its blocks was."""
    _, own, *_ = prepare_compiled(strategy, kind)
    return [module._compiled_call_impl is not None for module in (own, *own.blocks)]


def train_compiled(strategy: str, kind: str) -> tuple[list[float], int, bool]:
    """Train a compiled model; return the losses, how many graphs there were, and whether it is still the user's."""
    torch.compiler.reset()
    compiled.clear()
    if kind == "afterwards":
        accelerator, own, prepared, optimizer = prepare(strategy)
        later = torch.compile(prepared, backend=BACKEND)
        is_own = accelerator.unwrap_model(later) is own and accelerator.prepare(later) is later
        with accelerator.accumulate(later):
            return losses(accelerator, later, optimizer), len(compiled), is_own
    accelerator, own, prepared, optimizer = prepare_compiled(strategy, kind)
    is_own = accelerator.unwrap_model(prepared) is own and list(own.state_dict()) == list(Net().state_dict())
    return losses(accelerator, prepared, optimizer), len(compiled), is_own


def run_all(strategies: list[str], cells: list[tuple[str, str]]) -> dict[Any, Any]:
    """Everything that is looked at, in one job."""
    found: dict[Any, Any] = {}
    for strategy in strategies:
        found["copies", strategy] = [copies(strategy, precision) for precision in ("no", "bf16")]
        found["parts", strategy] = {kind: compiled_parts(strategy, kind) for kind in REGIONAL}
    return found | {(kind, on): train_compiled(on, kind) for kind, on in cells if on in strategies}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    """What one process finds, and then each of two ranks: the first is that of strategy "single"."""
    cells = selected(request, "test_compiled_models_train_as_plain_ones")
    return [*run_ranks(run_all, 1, ["single"], cells), *run_ranks(run_all, 2, ["ddp", "fsdp2"], cells)]


def results_of(found: list[dict[Any, Any]], what: str, strategy: str) -> list[Any]:
    return [each[what, strategy] for each in (found[:1] if strategy == "single" else found[1:])]


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_prepared_models_pickle_and_copy_and_are_given_back(found: list[dict[Any, Any]], strategy: str):
    for by_precision in results_of(found, "copies", strategy):
        for is_own, expected, *twins in by_precision:
            assert is_own
            assert twins == [expected] * 4


def test_a_sharded_model_that_is_copied_says_what_to_do_instead(found: list[dict[Any, Any]]):
    for by_precision in results_of(found, "copies", "fsdp2"):
        for is_own, _, *messages in by_precision:
            assert is_own
            for message in messages:
                assert "FSDPNet is sharded, and its shards cannot be copied or pickled" in message
                assert "get_state_dict()" in message


# Beyond the sample: regions are compiled alike wherever they lie (tests/conformance has them in each layout), and
# what is found in a compiled wrapper of DDP is found in a compiled model.
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("single", "whole"), ("ddp", "whole"), ("fsdp2", "whole"), ("fsdp2", "regional"), ("ddp", "afterwards"),
        *map(beyond, [("single", "regional"), ("ddp", "regional"), ("single", "afterwards"), ("fsdp2", "afterwards")]),
    ],
)  # fmt: skip
def test_compiled_models_train_as_plain_ones(found: list[dict[Any, Any]], strategy: str, kind: str):
    for trained, num_graphs, is_own in results_of(found, kind, strategy):
        assert trained == pytest.approx(train_alone(build()), abs=1e-6)
        assert num_graphs > 0
        assert is_own


@pytest.mark.parametrize(("strategy", "default"), [("single", "whole"), ("ddp", "whole"), ("fsdp2", "regional")])
def test_sharded_models_are_compiled_by_region_unless_the_whole_model_is_asked_for(
    found: list[dict[Any, Any]], strategy: str, default: str
):
    parts = {"whole": [True, False, False, False], "regional": [False, True, True, True]}
    for by_kind in results_of(found, "parts", strategy):
        assert by_kind == {**parts, "default": parts[default]}
