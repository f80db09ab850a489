"""What odd things run in: a plain PyTorch loop on one process, and the same calls by an Accelerator on ranks.

An odd thing is a function of a `Loop`. It says the same to both kinds, and notes numbers and weights to be compared.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_trainer.errors import AccelTrainerError
from tests.strategy_configs import zero_section

TOLERANCE = 1e-6
"""Of losses and weights, beside the largest value of each where that is above 1."""
BATCH, STEPS = 8, 3
"""Rows of a step over all ranks, and updates."""


class Column(NamedTuple):
    """A strategy with its options, on some ranks."""

    strategy: str
    world_size: int = 2
    options: Mapping[str, Any] = {}
    trainer: Mapping[str, Any] = {}
    """Arguments of a Trainer for the same layout."""
    num_readers: int = 2
    """Ranks that read unlike rows."""


def _zero(stage: int) -> Column:
    block = {"zero_optimization": zero_section(stage)}
    arguments = {"deepspeed": {**block, "train_micro_batch_size_per_gpu": "auto"}}
    return Column("deepspeed", options={"deepspeed": {**block, "zero3_init_flag": False}}, trainer=arguments)


COLUMNS: Mapping[str, Column] = {
    "single": Column("single", 1, num_readers=1),
    "ddp": Column("ddp"),
    "fsdp2": Column("fsdp2", trainer={"fsdp": "full_shard auto_wrap"}),
    "hsdp": Column(
        "fsdp2",
        4,
        {"parallel": {"dp_replicate_size": 2}},
        {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}},
        num_readers=4,
    ),
    "tp": Column("fsdp2", 2, {"parallel": {"tp_size": 2}}, {"parallelism_config": {"tp_size": 2}}, num_readers=1),
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero(3),
}
WHOLE = ("single", "ddp", "fsdp2", "zero3")
"""Columns whose cells are in docs/compatibility.md. The others are to be asked for; most models have no plan for tp."""
_GROUPS = {
    "all": " ".join(COLUMNS),
    "several": "ddp fsdp2 hsdp tp zero1 zero2 zero3",
    "fsdp": "fsdp2 hsdp tp",
    "zero": "zero1 zero2 zero3",
    "shards": "fsdp2 hsdp tp zero3",
    "gathers": "fsdp2 hsdp tp zero1 zero2 zero3",
}
"""Names under which a thing gives the words of a refusal for several columns."""


class Loop:
    """Plain PyTorch in one process."""

    name, rank, world_size = "plain", 0, 1

    def __init__(self, num_readers: int = 1) -> None:
        self.num_readers = num_readers
        """Ranks that read unlike rows, in the job that is compared with this one."""
        self.noted: list[Any] = []
        """Losses and other numbers, of all ranks' rows, and what was said."""
        self.weights: dict[str, Tensor] = {}

    def begin(self, **options: Any) -> None:
        """Make ready with options of an Accelerator, which the plain loop has not."""

    def prepare(self, *given: Any, **options: Any) -> Any:
        return given if len(given) > 1 else given[0]

    def bare(self, model: nn.Module) -> Any:
        """Return the user's own model."""
        return model

    def own(self, rows: Any) -> Any:
        """Return this rank's rows."""
        return rows

    def rows(self, step: int, width: int = 4) -> Tensor:
        """Return this rank's rows of a step: (BATCH / ranks, width)."""
        return self.own(torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step)))

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def update(self, loss: Tensor, *optimizers: Any) -> None:
        """Go backward, step and drop the gradients; note the loss."""
        self.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.note(loss)

    def note(self, *values: Tensor) -> None:
        """Note means over ranks of means over their rows."""
        self.noted += [float(self.mean(value)) for value in values]

    def keep(self, *models: nn.Module) -> None:
        """Keep the weights to be compared."""
        for number, model in enumerate(models):
            self.weights |= {f"{number}.{name}": value.clone() for name, value in self.state(model).items()}

    def state(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the weights by the user's names, without those of wrappers of torch.compile."""
        return {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}

    def parts(self, model: nn.Module, loss_of: Callable[[Any], Tensor], rows: Any) -> Tensor:
        """Return the mean of losses of the rows that each rank has; buffers are the first one's afterwards."""
        copies = [copy.deepcopy(dict(model.named_buffers())) for _ in range(self.num_readers)]
        losses = []
        for part, buffers in zip(rows.chunk(self.num_readers), copies, strict=True):
            losses.append(torch.func.functional_call(model, buffers, (part,)))
        for name, buffer in model.named_buffers():
            buffer.copy_(copies[0][name])
        return torch.stack([loss_of(output) for output in losses]).mean()

    def window(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> None:
        """Update once by the mean of the losses of a window."""
        self.update(torch.stack([loss() for loss in losses]).mean(), optimizer)

    def clip_norm(self, model: nn.Module, bound: float) -> None:
        self._norm = nn.utils.clip_grad_norm_(model.parameters(), bound)

    def clip_value(self, model: nn.Module, bound: float) -> None:
        nn.utils.clip_grad_value_(model.parameters(), bound)

    def loader(self, data: Any, rows: int = 4, **options: Any) -> Any:
        """Return a loader that yields `rows` rows of each step over all ranks, this rank's here."""
        return DataLoader(data, batch_size=rows, **options)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over ranks."""
        return value.detach()

    def gather(self, rows: Tensor) -> list[Any]:
        """Return the rows of a batch of all ranks."""
        return rows.detach().tolist()


class Ranks(Loop):
    """The same by an Accelerator, on this rank of a job."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self._column = name, COLUMNS[name]
        self.accelerator: Any = None
        self.begin()

    def begin(self, **options: Any) -> None:
        from accel_trainer import Accelerator

        if self.accelerator is not None:
            self.accelerator.free_memory()
        config = {"strategy": self._column.strategy, **self._column.options, **options.pop("config", {})}
        self.accelerator = Accelerator(cpu=True, config=config, **options)
        readers = self.accelerator.readers
        self.rank, self.world_size = readers.rank, readers.world_size

    def prepare(self, *given: Any, **options: Any) -> Any:
        return self.accelerator.prepare(*given, **options)

    def bare(self, model: nn.Module) -> Any:
        return self.accelerator.unwrap_model(model)

    def own(self, rows: Any) -> Any:
        return rows.chunk(self.world_size)[self.rank]

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.accelerator.backward(loss, **options)

    def mean(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value.detach().clone(), "mean")

    def state(self, model: nn.Module) -> Mapping[str, Any]:
        return self.accelerator.get_state_dict(model)

    def parts(self, model: nn.Module, loss_of: Callable[[Any], Tensor], rows: Any) -> Tensor:
        return loss_of(model(rows))

    def window(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> None:
        found = []
        for number, loss_of in enumerate(losses, 1):
            is_last = number == len(losses)
            self.accelerator.set_gradient_sync(model, is_last)
            loss = loss_of()
            self.accelerator.backward(loss / len(losses))
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        self.note(torch.stack(found).mean())

    def clip_norm(self, model: nn.Module, bound: float) -> None:
        self.accelerator.clip_grad_norm_(model.parameters(), bound)

    def clip_value(self, model: nn.Module, bound: float) -> None:
        self.accelerator.clip_grad_value_(model.parameters(), bound)

    def loader(self, data: Any, rows: int = 4, **options: Any) -> Any:
        return self.accelerator.prepare(DataLoader(data, batch_size=rows // self.world_size, **options))

    def gather(self, rows: Tensor) -> list[Any]:
        return self.accelerator.gather_for_metrics(rows.detach()).tolist()


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass
class Odd:
    """An odd thing, and where it is refused."""

    title: str
    run: Callable[[Loop], Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    """The words of a refusal, by column or by a name of `_GROUPS`; where it says " ... ", anything stands in it."""
    left: Mapping[str, str] = field(default_factory=dict)
    """What goes wrong where it is neither, by the same names. Such a cell is not run."""
    ends: bool = False
    """Whether ranks are of no more use afterwards: one has failed."""

    def refusal(self, column: str) -> str:
        """Return what a column's refusal says; empty where it has to be as the plain loop."""
        return _of_column(self.refused, column)

    def gap(self, column: str) -> str:
        """Return what goes wrong in a column; empty where it is as the plain loop, or refused."""
        return _of_column(self.left, column)

    def is_refusal(self, column: str, said: str) -> bool:
        """Return whether it is refused with the words that the table has for it."""
        words = self.refusal(column)
        return bool(words) and re.search(".*".join(map(re.escape, words.split(" ... "))), said, re.DOTALL) is not None


def _of_column(words: Mapping[str, str], column: str) -> str:
    groups = (said for name, said in words.items() if column in _GROUPS.get(name, "").split())
    return words.get(column, next(groups, ""))


THINGS: dict[str, Odd] = {}


def odd(
    title: str, *, ends: bool = False, left: Mapping[str, str] | None = None, **refused: str
) -> Callable[[Callable[[Loop], Any]], Callable[[Loop], Any]]:
    """Put a function into the table under its name."""

    def add(run: Callable[[Loop], Any]) -> Callable[[Loop], Any]:
        THINGS[run.__name__] = Odd(title, run, refused, left or {}, ends)
        return run

    return add


# --- a cell -----------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a thing has come to on one rank."""

    noted: list[Any] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    refused: str = ""
    error: str = ""
    """A traceback."""


def see(name: str, column: str | int) -> Seen:
    """Run a thing on this rank; in plain PyTorch for a number of ranks that read unlike rows."""
    torch.manual_seed(0)
    loop: Loop | None = None
    try:
        loop = Loop(column) if isinstance(column, int) else Ranks(column)
        THINGS[name].run(loop)
        return Seen(loop.noted, loop.weights)
    except Exception as error:
        if THINGS[name].ends:
            return Seen(refused=tell(error))
        if not isinstance(error, AccelTrainerError):
            return Seen(error=traceback.format_exc())
        _check_group()
        return Seen(refused=str(error))
    finally:
        if isinstance(loop, Ranks) and not THINGS[name].ends:
            loop.accelerator.free_memory()
        del loop
        gc.collect()


def tell(error: Exception) -> str:
    """Return what is printed of an error that nobody catches: the hook tells other ranks, and has theirs for gloo's."""
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    return printed.getvalue()


def _check_group() -> None:
    """Fail where a refusal has left ranks at unlike places."""
    if dist.is_initialized():
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == dist.get_world_size()


def find_difference(expected: Seen, found: Seen, holds_weights: bool) -> str:
    """Return what is not as in the plain loop; empty where all is."""
    if not _is_close(expected.noted, found.noted):
        return f"notes {found.noted} and not {expected.noted}"
    if not holds_weights:
        return ""
    if expected.weights.keys() != found.weights.keys():
        return f"weights {sorted(expected.weights.keys() ^ found.weights.keys())} are on one side only"
    far = (_distance(name, value, found.weights[name]) for name, value in expected.weights.items())
    return "; ".join(filter(None, far))


def _distance(name: str, want: Tensor, have: Tensor) -> str:
    """Return how far weights are from those of the plain loop; empty where they are near."""
    if want.shape != have.shape or want.dtype != have.dtype:
        return f"{name} is {tuple(have.shape)} of {have.dtype} and not {tuple(want.shape)} of {want.dtype}"
    # Integers and booleans as numbers.
    want, have = (each if each.is_complex() else each.double() for each in (want, have))
    distance = (want - have).abs().max().item() if want.numel() else 0.0
    bound = TOLERANCE * max(1.0, want.abs().max().item()) if want.numel() else 0.0
    return "" if distance <= bound else f"{name} is {distance:.1e} off"


def _is_close(want: Any, have: Any) -> bool:
    if isinstance(want, list) and isinstance(have, list):
        return len(want) == len(have) and all(map(_is_close, want, have))
    if isinstance(want, float) and isinstance(have, float):
        return abs(want - have) <= TOLERANCE * max(1.0, abs(want))
    return bool(want == have)
