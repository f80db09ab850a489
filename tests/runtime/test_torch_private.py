from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.agent.server import WorkerSpec, local_elastic_agent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import accel_trainer
from accel_trainer.errors import AccelTrainerError
from accel_trainer.runtime import torch_private
from accel_trainer.runtime.torch_names import ABSENT_IN, AGENT, PRIVATE_NAMES

PACKAGE = Path(accel_trainer.__file__).parent
MODULE = nn.Linear(1, 1)
# Their attributes are there once they were made.
INSTANCES: dict[str, Any] = {
    "torch._dynamo.eval_frame.OptimizedModule": torch.compile(MODULE),
    "torch.distributed.device_mesh.DeviceMesh": dist.device_mesh.DeviceMesh("cpu", [0], _init_backend=False, _rank=0),
    "torch.amp.GradScaler": torch.amp.GradScaler("cpu"),
    AGENT: local_elastic_agent.LocalElasticAgent(
        WorkerSpec("", 1, DynamicRendezvousHandler.__new__(DynamicRendezvousHandler), entrypoint="true"),
        DefaultLogsSpecs(),
    ),
    "torch.nn.Module": MODULE,
    "torch.optim.AdamW": torch.optim.AdamW(MODULE.parameters(), fused=True),
    "torch.utils.data.DataLoader": DataLoader([1]),
}
# Objects of torch that the house handles: an attribute of theirs that begins with `_` is torch's own.
HANDLED = [
    *INSTANCES.values(), torch, torch.Tensor, torch.Generator, torch.autograd.Variable,
    torch.optim.SGD(MODULE.parameters(), lr=1.0), torch.optim.lr_scheduler.LRScheduler,
    dist, dist.ProcessGroup, dist.ProcessGroupGloo, dist.device_mesh.DeviceMesh, dist.distributed_c10d,
    nn.parallel.DistributedDataParallel, torch.utils.data.dataloader, DTensor, FSDPModule,
]  # fmt: skip
TORCHS_OWN = {name for thing in HANDLED for name in dir(thing) if re.match("_[a-zA-Z]", name)}
ROOMS = ("engines", "names", "private")
NAMED = {path.rpartition(".")[2] for path in PRIVATE_NAMES if not path.endswith("__")}
TORCHS_OWN |= NAMED
ALLOWED = {
    ("accelerator/shared_state.py", "PartialState._reset_state"),  # accelerate's name, too
    ("data/loader.py", "super(PreparedDataLoader, reader)._get_iterator"),
    # Overrides have to carry the name.
    *(
        ("launch/torchrun.py", f"super()._{name}")
        for name in ("start_workers", "shutdown", "rendezvous", "monitor_workers", "exit_barrier")
    ),
}


def resolve(path: str) -> Any:
    owner, _, name = path.rpartition(".")
    if owner in INSTANCES:
        return getattr(INSTANCES[owner], name)
    try:
        return getattr(importlib.import_module(owner), name)
    except ImportError:
        return getattr(resolve(owner), name)


@pytest.mark.parametrize("path", PRIVATE_NAMES)
def test_a_private_name_is_still_there(path: str) -> None:
    if torch.__version__.partition("+")[0] in ABSENT_IN.get(path, ()):
        with pytest.raises(AttributeError):
            resolve(path)
    else:
        resolve(path)


def is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def private_names_of_torch(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                if "._" in f"{node.module}.{alias.name}":
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr in TORCHS_OWN:
            if not is_name(node.value, "self", "cls"):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg in NAMED:
            yield node.value.lineno, f"{node.arg}="
        elif isinstance(node, ast.Call) and is_name(node.func, "getattr", "hasattr", "setattr"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, ast.unparse(node)) for name in names if name in TORCHS_OWN)


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    found = {
        f"{relative}:{line}: {text}"
        for directory in (PACKAGE, PACKAGE / "integrations")
        for path in directory.rglob("*.py")
        if (relative := str(path.relative_to(PACKAGE))) not in {f"runtime/torch_{name}.py" for name in ROOMS}
        for line, text in private_names_of_torch(ast.parse(path.read_text()))
        if (relative, text) not in ALLOWED
    }
    assert not found, "use them in runtime/torch_private.py: " + ", ".join(sorted(found))


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils._pytree import tree_leaves",
        "from torch.utils.data.dataloader import _BaseDataLoaderIter",
        "group._device_types",
        "torch._foreach_mul_(gradients, 2)",
        "getattr(model, '_orig_mod', model)",
        "vars(loader).update(_iterator=None)",
    ],
)
def test_a_private_name_of_torch_is_found(source: str) -> None:
    assert list(private_names_of_torch(ast.parse(source)))


def test_a_function_that_torch_has_no_more_is_refused_when_it_is_called() -> None:
    gone = torch_private._bind("torch.utils._no_such_module", "function")
    with pytest.raises(AccelTrainerError, match=r"has no torch.utils._no_such_module.function.*use a release of torch"):
        gone(1)


def test_a_scaler_without_the_notes_of_a_step_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    torch_private.check_scaler(scaler)
    del scaler._per_optimizer_states
    with pytest.raises(AccelTrainerError, match="_per_optimizer_states"):
        torch_private.check_scaler(scaler)


def test_a_name_that_a_run_does_without_is_named_once_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch.utils.data.dataloader, "_BaseDataLoaderIter")
    torch_private.say_missing.cache_clear()

    assert [torch_private.keeps_iterator(DataLoader([1])) for _ in range(2)] == [False, False]

    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"torch {torch.__version__} has no torch.utils.data.dataloader._BaseDataLoaderIter; the run goes on without: "
        "a loader that keeps an iterator of the dataset is not refused"
    )


def test_a_dtensor_without_its_spec_is_laid_out_anew() -> None:
    class Renamed:
        device_mesh, placements, shape = "mesh", ("shard",), (4, 2)

        def stride(self) -> tuple[int, int]:
            return 2, 1

        @classmethod
        def from_local(cls, local: Any, *layout: Any, **options: Any) -> Any:
            return local, layout, options

    local = torch.ones(2, 2)
    made: Any = torch_private.dtensor_like(Renamed(), local)
    assert made == (local, ("mesh", ("shard",)), {"shape": (4, 2), "stride": (2, 1), "run_check": False})
