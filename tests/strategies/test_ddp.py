"""Replicas on two CPU ranks: what is wrapped, with which options, and whose values and buffers count."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import preload
from tests.scenarios import Scenarios
from tests.strategy_configs import prepare_unit

preload("accel_trainer.accelerator", "tests.scenarios")

SCENARIOS = Scenarios()
results = SCENARIOS.results


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)
        self.extra = nn.Linear(4, 1)

    def forward(self, x: Tensor, use_extra: bool = True) -> Tensor:
        """Return a loss; `extra` may be left out."""
        y = self.second(torch.tanh(self.first(x)))
        return (y + self.extra(x) if use_extra else y).square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().mean()


def build(kind: type[nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batch() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def own_rows(parts: int = 2) -> Tensor:
    return batch().chunk(parts)[dist.get_rank()]


def prepare(model: nn.Module, optimizer: Any = None, precision: str = "no", job: Any = None, **options: Any) -> Any:
    asked = {"strategy": "ddp"} | {f"ddp.{name}": value for name, value in options.items()}
    return prepare_unit(asked, model, [optimizer] if optimizer else [], precision, **(job or {}))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_gradients_of_the_whole_batch(found: list[Tensor]) -> None:
    model = build()
    model(batch()).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


# --- what is wrapped -----------------------------------------------------------------------------------------------


@SCENARIOS.add
def wrapping() -> Any:
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    trained, frozen, scored = build(seed=rank), build(seed=rank).requires_grad_(False), build(seed=rank)
    units = {"trained": prepare(trained), "frozen": prepare(frozen)}
    units["scored"] = prepare(scored, job={"evaluation_only": True})
    wrapped = DistributedDataParallel(build(seed=rank))
    units["wrapped"] = prepare(wrapped)
    for name, unit in units.items():
        is_wrapped = isinstance(unit.model, DistributedDataParallel)
        found[name] = is_wrapped, type(unit.module).__name__, [p.detach().clone() for p in unit.module.parameters()]
    found["same"] = units["wrapped"].model is wrapped, units["frozen"].model is frozen
    return found


def test_what_trains_is_wrapped_and_every_rank_has_rank_zeros_values():
    expected = list(build(seed=0).parameters())
    for found in results("wrapping"):
        for name, is_wrapped in {"trained": True, "frozen": False, "scored": False, "wrapped": True}.items():
            assert found[name][:2] == (is_wrapped, "Net"), name
            assert all(torch.equal(a, b) for a, b in zip(found[name][2], expected, strict=True)), name
        assert found["same"] == (True, True)


def test_one_process_without_a_group_trains_alone():
    model = build()
    unit = prepare(model, sgd(model))
    assert unit.model is model
    unit.set_gradient_sync(False)
    unit.backward(unit.model(batch()))
    assert_gradients_of_the_whole_batch(gradients(model))
    assert unit.step().applied


# --- gradients -----------------------------------------------------------------------------------------------------


@SCENARIOS.add
def bf16() -> Any:
    class Typed(Net):
        def forward(self, x: Tensor, use_extra: bool = True) -> Tensor:
            self.seen = self.first(x).dtype
            return self.first(x)

    model = build(Typed)
    outputs = prepare(model, precision="bf16", find_unused_parameters=True).model(own_rows())
    return str(model.seen), str(outputs.dtype), {str(p.dtype) for p in model.parameters()}


def test_bf16_is_autocast_inside_of_the_replica():
    assert results("bf16") == [("torch.bfloat16", "torch.float32", {"torch.float32"})] * 2


# --- options -------------------------------------------------------------------------------------------------------


@SCENARIOS.add
def unused_parameters() -> Any:
    model = build()
    unit = prepare(model, find_unused_parameters=True)
    for use_extra in (False, True, False):
        model.zero_grad()
        unit.backward(unit.model(own_rows(), use_extra=use_extra))
    strict = prepare(build())
    strict.backward(strict.model(own_rows(), use_extra=False))
    try:
        strict.model(own_rows(), use_extra=False)
    except RuntimeError as error:
        return unit.model.find_unused_parameters, gradients(model.first), str(error)
    raise AssertionError("unused parameters were not noticed")


def test_unused_parameters_are_looked_for_when_asked():
    model = build()
    model(batch(), use_extra=False).backward()
    for is_set, (weight, _), message in results("unused_parameters"):
        assert is_set
        torch.testing.assert_close(weight, model.first.weight.grad)
        assert "find_unused_parameters" in message


@SCENARIOS.add
def options() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = prepare(build()).model
        set_ = prepare(
            build(), bucket_cap_mb=3, static_graph=True, gradient_as_bucket_view=False, broadcast_buffers=False
        ).model
        given = prepare(build(), job={"ddp_options": {"bucket_cap_mb": 7, "dim": 0}}, bucket_cap_mb=3).model

    def describe(model: Any) -> Any:
        return (
            model.bucket_bytes_cap // 2**20,
            model.static_graph,
            model.gradient_as_bucket_view,
            getattr(model, "forward_sync_buffers", None) or getattr(model, "broadcast_buffers", False),
        )

    return describe(plain), describe(set_), given.bucket_bytes_cap // 2**20


def test_options_reach_torch():
    for plain, changed, given in results("options"):
        assert plain == (25, False, True, True)
        assert changed == (3, True, False, False)
        assert given == 7


@SCENARIOS.add
def static_graph() -> Any:
    model = build()
    unit = prepare(model, sgd(model), static_graph=True)
    found = []
    for _ in range(2):
        for index, rows in enumerate(own_rows().chunk(2)):
            unit.set_gradient_sync(index == 1)
            unit.backward(unit.model(rows) / 2)
        found.append(gradients(model))
        unit.zero_grad()
    return found


def test_a_static_graph_accumulates():
    for found in results("static_graph"):
        for window in found:
            assert_gradients_of_the_whole_batch(window)


@SCENARIOS.add
def buffers() -> Any:
    found = []
    for broadcast in (True, False):
        unit = prepare(build(Normed), broadcast_buffers=broadcast)
        unit.model(own_rows())
        unit.model(own_rows() * 0 + torch.arange(4.0)[:, None])  # the same rows everywhere
        statistics = unit.module.norm.num_batches_tracked.item(), unit.module.norm.running_mean.clone()
        unit.module.norm.running_mean.fill_(dist.get_rank() + 1.0)
        unit.module.eval()
        unit.model(own_rows())
        found.append((statistics, unit.module.norm.running_mean.clone()))
    return found


def test_buffers_are_rank_zeros_at_every_forward_unless_declined():
    first, second = results("buffers")
    assert torch.equal(first[0][1], torch.ones(4))
    assert torch.equal(second[0][1], torch.ones(4))
    assert torch.equal(second[1][1], torch.full((4,), 2.0))
    for found in (first, second):
        for (count, mean), _ in found:
            assert count == 2
            assert torch.equal(mean, torch.full((4,), 1.5))


@SCENARIOS.add
def keyword_handler() -> Any:
    from accel_trainer import Accelerator
    from accel_trainer.plugins import DistributedDataParallelKwargs

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handler = DistributedDataParallelKwargs(
            find_unused_parameters=True, bucket_cap_mb=3, broadcast_buffers=True, static_graph=False
        )
        accelerator = Accelerator(
            kwargs_handlers=[handler], config={"ddp": {"broadcast_buffers": False, "bucket_cap_mb": 9}}
        )
        model = accelerator.prepare(build())
    sources = [accelerator.resolved.source(f"ddp.{name}").kind.value for name in ("bucket_cap_mb", "static_graph")]
    synced = getattr(model, "forward_sync_buffers", None) or getattr(model, "broadcast_buffers", False)
    return model.find_unused_parameters, model.bucket_bytes_cap // 2**20, synced, sources


def test_a_keyword_handler_wins_over_the_file():
    assert results("keyword_handler") == [(True, 3, True, ["python", "python"])] * 2


# --- how it ends ---------------------------------------------------------------------------------------------------


@SCENARIOS.add
def end_of_a_group() -> Any:
    prepare(build())  # the default group
    found = {}
    for is_collected in (False, True):
        ended: list[str] = []
        group = dist.new_group([0, 1])
        model: Any = DistributedDataParallel(build(), process_group=group)
        weakref.finalize(model.reducer, ended.append, "reducer")
        weakref.finalize(group, ended.append, "group")
        model.cycle = model if is_collected else None
        unit = prepare(model)
        model(own_rows()).backward()
        dist.destroy_process_group(group)
        del group, unit, model
        gc.collect()
        while_alone = list(ended)
        prepare(build())
        found[is_collected] = while_alone, ended
    return found


def test_a_group_outlives_the_reducer_that_would_end_it_under_the_interpreters_lock():
    # The group's own end gives the lock away: its threads may need it.
    for found in results("end_of_a_group"):
        assert set(found) == {False, True}
        assert all(ends == (["reducer"], ["reducer", "group"]) for ends in found.values()), found


class Counting(nn.Module):
    """Counts forwards in a buffer, in another tensor each time, and keeps what it has seen in a third."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("number", torch.zeros(()))
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.number = self.number + 1
        self.seen = x.detach()
        return self.norm(x).square().mean()


@SCENARIOS.add
def begun_again() -> Any:
    unit = prepare(build(Counting))
    found = []
    for _ in range(2):
        unit.begin_update()
        unit.model(own_rows())
        found.append({name: value.clone() for name, value in unit.module.named_buffers()})
    unit.drop_update()
    return [*found, dict(unit.module.named_buffers())]


def test_an_update_that_begins_again_has_the_buffers_of_its_beginning():
    for first, second, again in results("begun_again"):
        assert first["number"] == 1
        assert second["number"] == 2
        assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
        assert first.keys() == again.keys()
        assert all(torch.equal(again[name], value) for name, value in first.items())
