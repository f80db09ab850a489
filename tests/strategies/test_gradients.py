"""Norms and clipping, against closed forms: plain gradients, sharded ones, and both at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, profiler

from accel_trainer.strategies.gradients import clip_grad_norm, clip_grad_value, gradients_of, scale_gradients
from tests.ranks import preload, run_ranks

preload("accel_trainer.strategies.gradients")

SHARDED = torch.arange(1.0, 11.0).reshape(5, 2)
"""Five rows over two ranks: three on the first, two on the second."""
PLAIN = torch.tensor([3.0, -4.0])


def parameter(gradient: Tensor | None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(3 if gradient is None else gradient.shape, dtype=dtype))
    made.grad = None if gradient is None else gradient.clone().to(dtype)
    return made


def p_norm(vectors: list[Tensor], p: float) -> float:
    values = [abs(value) for vector in vectors for value in vector.flatten().tolist()]
    return max(values) if p == math.inf else sum(value**p for value in values) ** (1 / p)


# --- plain gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_is_that_of_all_gradients_as_one_vector(p: float):
    norm = clip_grad_norm([parameter(SHARDED), parameter(None), parameter(PLAIN)], math.inf, p)
    assert norm.item() == pytest.approx(p_norm([SHARDED, PLAIN], p))


@pytest.mark.parametrize("norm_type", [1.0, 2, 3.0, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 5.0, 1000.0])
def test_clipping_is_that_of_torch(max_norm: float, norm_type: Any):
    ours, theirs = ([parameter(SHARDED), parameter(PLAIN)] for _ in range(2))
    norm = clip_grad_norm(ours, max_norm, norm_type)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, max_norm, norm_type))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=0)


def test_gradients_that_are_differentiated_again_leave_no_graph_in_the_norm():
    weight = parameter(None)
    (weight**3).sum().backward(create_graph=True)
    assert weight.grad.requires_grad
    norm = clip_grad_norm([weight], math.inf)
    assert not norm.requires_grad


def test_an_infinite_bound_only_computes():
    parameters = [parameter(SHARDED)]
    clip_grad_norm(parameters, math.inf)
    assert torch.equal(parameters[0].grad, SHARDED)


def test_no_gradients_have_norm_zero():
    assert clip_grad_norm([parameter(None)], 1.0).item() == 0.0
    clip_grad_value([parameter(None)], 1.0)
    scale_gradients([], 2.0)


def test_a_tied_parameter_counts_once():
    tied = parameter(PLAIN)
    assert clip_grad_norm([tied, tied], 1.0).item() == pytest.approx(5.0)
    assert len(gradients_of(iter([tied, tied]))) == 1
    assert tied.grad.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_gradients_of_several_dtypes():
    parameters = [parameter(SHARDED, torch.bfloat16), parameter(PLAIN), parameter(PLAIN, torch.float64)]
    norm = clip_grad_norm(parameters, 1.0)
    assert norm.item() == pytest.approx(p_norm([SHARDED, PLAIN, PLAIN], 2.0), rel=1e-2)
    total = p_norm([p.grad.float() for p in parameters], 2.0)
    assert total == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float):
    norm = clip_grad_norm([parameter(torch.tensor([1.0, bad])), parameter(PLAIN)], 1.0)
    assert not math.isfinite(norm.item())


def test_values_are_clamped():
    parameters = [parameter(SHARDED), parameter(PLAIN)]
    clip_grad_value(parameters, 3.5)
    assert torch.equal(parameters[0].grad, SHARDED.clamp(max=3.5))
    assert parameters[1].grad.tolist() == [3.0, -3.5]


def test_scaling_multiplies_every_gradient():
    parameters = [parameter(SHARDED), parameter(PLAIN)]
    scale_gradients(parameters, 0.5)
    assert torch.equal(parameters[0].grad, SHARDED * 0.5)
    assert torch.equal(parameters[1].grad, PLAIN * 0.5)


# --- sharded gradients beside plain ones ---------------------------------------------------------------------------


def distribute(meshes: list[Any], placements: list[Any]) -> Callable[[], list[nn.Parameter]]:
    """Return a maker of parameters with gradients: SHARDED on each mesh, and PLAIN."""
    from torch.distributed.tensor import distribute_tensor

    def make() -> list[nn.Parameter]:
        made = [parameter(PLAIN)]
        for mesh, placement in zip(meshes, placements, strict=True):
            sharded = nn.Parameter(distribute_tensor(torch.zeros_like(SHARDED), mesh, placement))
            sharded.grad = distribute_tensor(SHARDED, mesh, placement)
            made.insert(0, sharded)
        return made

    return make


def whole(gradient: Any) -> list[Any]:
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).tolist()


def clip_on_meshes() -> dict[str, Any]:
    """Do everything once on one mesh, on a mesh with replicas, with two axes of shards, and on several at once."""
    from torch.distributed.tensor import Replicate, Shard

    from accel_trainer.runtime.process import init_process, read_environment
    from accel_trainer.strategies.parallel.meshes import init_mesh

    process = init_process(read_environment())
    flat, hybrid = init_mesh(process.device.type, (4,)), init_mesh(process.device.type, (2, 2))
    layouts = {
        "flat": ([flat], [[Shard(0)]]),
        "hybrid": ([hybrid], [[Replicate(), Shard(0)]]),
        "both": ([flat, hybrid], [[Shard(0)], [Replicate(), Shard(0)]]),
        "crossed": ([hybrid] * 3, [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Shard(0)]]),
    }
    result: dict[str, Any] = {}
    for name, layout in layouts.items():
        make = distribute(*layout)
        norms = {p: clip_grad_norm(make(), math.inf, p).item() for p in (1.0, 2.0, math.inf)}
        clipped, clamped, scaled = make(), make(), make()
        clip_grad_norm(clipped, 2.0)
        clip_grad_value(clamped, 3.5)
        scale_gradients(scaled, 0.25)
        result[name] = {
            "norms": norms,
            "after": clip_grad_norm(clipped, math.inf).item(),
            "clipped": whole(clipped[0].grad),
            "clamped": [whole(p.grad) for p in clamped],
            "scaled": [whole(p.grad) for p in scaled],
            "only_plain": clip_grad_norm(clipped[-1:], math.inf).item(),
        }
    return result


def test_norms_over_sharded_and_plain_gradients_equal_the_closed_form():
    # Four ranks and five rows: the last rank's shard is empty.
    results = run_ranks(clip_on_meshes, 4)
    for result in results:
        for name, copies in {"flat": 1, "hybrid": 1, "both": 2, "crossed": 3}.items():
            found, vectors = result[name], [*([SHARDED] * copies), PLAIN]
            for p, norm in found["norms"].items():
                assert norm == pytest.approx(p_norm(vectors, p), rel=1e-6), (name, p)
            total = p_norm(vectors, 2.0)
            factor = 2.0 / (total + 1e-6)
            assert found["after"] == pytest.approx(2.0, rel=1e-5)
            torch.testing.assert_close(torch.tensor(found["clipped"]), SHARDED * factor)
            assert found["clamped"] == [*([SHARDED.clamp(max=3.5).tolist()] * copies), [3.0, -3.5]]
            assert found["scaled"] == [*([(SHARDED * 0.25).tolist()] * copies), (PLAIN * 0.25).tolist()]
            assert found["only_plain"] == pytest.approx(5.0 * factor, rel=1e-5)


def clip_other_kinds() -> dict[str, Any]:
    """Norms of 16-bit and 64-bit shards, and of sums that are still to be taken; collectives of a norm; a refusal."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    from accel_trainer.runtime.process import init_process, read_environment
    from accel_trainer.strategies.parallel.meshes import init_mesh

    mesh = init_mesh(init_process(read_environment()).device.type, (2, 2))

    def norm_of(*gradients: Tensor, p: float = 2.0) -> Tensor:
        made = []
        for gradient in gradients:
            made.append(nn.Parameter(torch.zeros_like(gradient)))
            made[-1].grad = gradient
        return clip_grad_norm(made, math.inf, p)

    # The last rank of an axis has no row of the second, and takes part in the same dtype.
    half = distribute_tensor(SHARDED.bfloat16(), mesh, [Shard(0), Shard(1)])
    double = distribute_tensor(SHARDED[:1].double(), mesh, [Replicate(), Shard(0)])
    summand = DTensor.from_local(SHARDED / 2, mesh, [Partial(), Replicate()])
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as recorder:
        mixed = norm_of(half, double, PLAIN, half)
    num_calls = sum(event.count for event in recorder.key_averages() if event.key.startswith("c10d::"))
    with pytest.raises(ValueError, match=r"norm_type=0.0: norms of sharded gradients have a positive order; use 2.0"):
        norm_of(half, p=0)
    half_norm = norm_of(half)
    largest = []
    for rank in range(4):
        broken = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
        if rank == mesh.get_rank():
            broken.to_local()[0, 0] = math.nan
        largest.append(norm_of(broken, SHARDED, p=math.inf).item())
    return {
        "largest": largest,
        "mixed": (mixed.item(), str(mixed.dtype), num_calls),
        "half": (half_norm.item(), str(half_norm.dtype)),
        "summand": norm_of(summand).item(),
    }


@pytest.fixture(scope="module")
def other_kinds() -> list[dict[str, Any]]:
    return run_ranks(clip_other_kinds, 4)


def test_norms_of_shards_of_several_kinds_take_one_collective_for_each_axis(other_kinds: list[dict[str, Any]]):
    for found in other_kinds:
        expected = p_norm([SHARDED, SHARDED[:1], PLAIN, SHARDED], 2.0)
        assert found["mixed"] == (pytest.approx(expected, rel=3e-3), "torch.float64", 2)
        assert found["half"] == (pytest.approx(p_norm([SHARDED], 2.0), rel=3e-3), "torch.float32")
        assert found["summand"] == pytest.approx(p_norm([SHARDED], 2.0), rel=1e-6)


def test_a_nan_of_any_rank_is_the_infinite_norm_of_all(other_kinds: list[dict[str, Any]]):
    for found in other_kinds:
        assert all(map(math.isnan, found["largest"]))
