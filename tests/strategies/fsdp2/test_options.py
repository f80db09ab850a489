"""What FSDP2's options do, on two and four CPU ranks: each against the numbers of one plain process."""

from __future__ import annotations

import functools
import logging
import re
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_trainer import Accelerator
from accel_trainer.config import resolve
from accel_trainer.errors import ConfigError
from accel_trainer.plugins import FullyShardedDataParallelPlugin
from accel_trainer.precision import build_precision
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.api import TrainJob
from accel_trainer.strategies.fsdp2.strategy import FSDP2Strategy
from accel_trainer.strategies.gradients import LossScale
from tests.ranks import preload, run_ranks
from tests.scenarios import Scenarios, refused
from tests.sharded import Net, adamw, batch, build, full, own_rows, prepare, train, train_alone

preload("accel_trainer.accelerator", "accel_trainer.trainer", "tests.scenarios", "tests.sharded")

SCENARIOS = Scenarios()
results = SCENARIOS.results


@contextmanager
def logged() -> Iterator[list[str]]:
    """What this rank logs in the block."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("accel_trainer").addHandler(handler)
    yield messages
    logging.getLogger("accel_trainer").removeHandler(handler)


@functools.cache  # not before the ranks are forked, which cannot use autograd's threads then
def reference() -> Any:
    return pytest.approx(train_alone(build()), abs=1e-6)


# --- memory --------------------------------------------------------------------------------------------------------


@SCENARIOS.add
def offloaded() -> Any:
    model = build()
    unit = prepare(model, offload_params=True)
    losses = train(unit)
    unit.backward(unit.model(own_rows()))
    return losses, unit.clip_grad_norm(model.parameters(), 0.1).item()


def test_offloading_changes_no_number():
    model = build()
    train_alone(model)
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    assert results("offloaded") == [(reference(), pytest.approx(norm, rel=1e-5))] * 2


def offload_with(backend: str) -> None:
    """Ask for offloaded shards in a job of GPUs whose group has a backend; torch's fake one takes the place of all."""
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=2)
    process = ProcessContext(0, 0, 2, 2, torch.device("cuda", 0), "fake")
    job = TrainJob(build(), [], resolve(explicit={"fsdp.offload_params": True}, environ={}))
    try:
        FSDP2Strategy().check(job, build_precision("no", torch.device("cpu")), process)
    finally:
        dist.destroy_process_group()


def test_shards_on_the_host_need_a_group_that_carries_them():
    message = (
        r"fsdp\.offload_params.*'cuda:fake', which carries no tensors of the CPU; initialise it with 'cpu:gloo,cuda:"
    )
    with pytest.raises(ConfigError, match=message):
        offload_with("cuda:fake")
    offload_with("cpu:fake,cuda:fake")


@SCENARIOS.add
def resharding() -> Any:
    found = {}
    for reshard in (True, False):
        model = build()
        unit = prepare(model, reshard_after_forward=reshard)
        states = []

        def note(model: nn.Module = model, states: list[int] = states) -> None:
            states.append(sum(isinstance(p, DTensor) for p in model.parameters()))

        note()
        with torch.no_grad():
            unit.model(own_rows())
        note()
        loss = unit.model(own_rows())
        note()
        with torch.no_grad():
            unit.model(own_rows())
        unit.backward(loss)
        note()
        norm = unit.clip_grad_norm(model.parameters(), float("inf")).item()
        unit.step()
        with torch.inference_mode():
            unit.model(own_rows())
        note()
        # Names are looked up among the sharded parameters.
        state = unit.checkpoint_io().full_optimizer_state()
        unit.zero_grad()
        found[reshard] = states, norm, len(state.get("state", ())), train(unit, 2)
    return found


def test_parameters_are_shards_again_after_a_forward_without_gradients():
    model = build()
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    reference = train_alone(build())[1:]
    for rank, found in enumerate(results("resharding")):
        for reshard, (states, found_norm, names, losses) in found.items():
            # 10 parameters; those of the root (4) stay gathered from a forward to its backward, the blocks' as told.
            assert states == [10, 10, 6 if reshard else 0, 10, 10]
            assert found_norm == pytest.approx(norm, rel=1e-5)
            assert names == (10 if rank == 0 else 0)
            assert losses == pytest.approx(reference, abs=1e-6)


# --- prefetching, wrapping, compiling ------------------------------------------------------------------------------


@SCENARIOS.add
def prefetching() -> Any:
    found = {}
    for options in ({"forward_prefetch": True}, {"backward_prefetch": False}):
        model = build()
        unit = prepare(model, **options)
        states = [block._get_fsdp_state() for block in model.blocks]
        found.update(options)
        found[f"{options}"] = (
            [[states.index(s) for s in state._states_to_forward_prefetch] for state in states],
            [[states.index(s) for s in state._states_to_backward_prefetch] for state in states],
            train(unit),
        )
    return list(found.values())[1::2]


def test_prefetching_is_as_configured():
    for (forward, _, losses), (none, backward, losses_without) in results("prefetching"):
        assert forward == [[1], [2], []]
        assert none == [[], [], []]
        # FSDP2 gathers the next unit unless it is given a list: a unit that is gathered already costs nothing.
        assert backward == [[0], [1], [2]]
        assert losses == losses_without == reference()


@SCENARIOS.add
def callable_policy() -> Any:
    model = build()
    unit = prepare(model, policy=lambda module: isinstance(module, nn.Linear) and module.in_features == 8)
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)], train(unit)


def test_a_callable_decides_what_is_sharded():
    linears = [f"blocks.{i}.linear" for i in range(3)]
    assert results("callable_policy") == [(["", *linears, "head"], reference())] * 2


@SCENARIOS.add
def shared_block() -> Any:
    model = build()
    model.blocks[2] = model.blocks[0]
    return train(prepare(model)), isinstance(model.blocks[0], FSDPModule)


def test_a_block_that_runs_twice_trains_as_one():
    model = build()
    model.blocks[2] = model.blocks[0]
    assert results("shared_block") == [(pytest.approx(train_alone(model), abs=1e-6), True)] * 2


@SCENARIOS.add
def prepared_twice() -> Any:
    model = build()
    first = prepare(model, train=False)
    with logged() as messages:
        second = prepare(model, train=True, precision="bf16", reshard_after_forward=False)
    return first.model is second.model, train(second), messages


def test_a_model_that_is_sharded_already_is_taken_as_it_is_and_says_which_options_it_lacks():
    main, other = results("prepared_twice")
    assert main[:2] == other[:2] == (True, reference())
    (message,) = main[2]
    assert message.startswith("FSDPNet is sharded already and is taken as it is, without: fsdp.reshard_after_forward=")
    assert "fsdp.wrap_classes=" in message
    assert "mixed_precision=" in message
    assert other[2] == []


@SCENARIOS.add
def scaled() -> Any:
    found = []
    for bad_rank in (None, 1):
        model = build()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        unit = prepare(model, loss_scale=LossScale(scaler))
        unit.backward(unit.model(own_rows()))
        if dist.get_rank() == bad_rank:
            model.stem.weight.grad.to_local()[0, 0] = float("inf")
        norm = unit.clip_grad_norm(model.parameters(), float("inf")).item()
        before = full(model.stem.weight)
        applied = unit.step().applied
        found.append((norm, applied, torch.equal(before, full(model.stem.weight)), scaler.get_scale()))
    mixed = build()
    scaler = torch.amp.GradScaler("cpu")
    message = refused(lambda: prepare(mixed, loss_scale=LossScale(scaler), ignored_modules=("head",)))
    return found, message, isinstance(mixed, FSDPModule)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    model = build()
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    for (good, bad), message, is_sharded in results("scaled"):
        assert good == (pytest.approx(norm, rel=1e-5), True, False, 1024.0)
        assert bad[1:] == (False, True, 512.0)
        assert message.startswith("fsdp.ignored_modules=")
        assert "2 parameter(s) of Net stay whole" in message
        assert "cannot unscale sharded and whole gradients together; use bf16" in message
        assert not is_sharded


@SCENARIOS.add
def scaled_together() -> Any:
    """Two models with one optimizer, and two optimizers for a third; an overflow of one rank in one of them."""
    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    models = [build(), build(), build()]
    optimizers = [
        torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1),
        torch.optim.SGD(models[2].stem.parameters(), lr=0.1),
        torch.optim.SGD([p for name, p in models[2].named_parameters() if "stem" not in name], lr=0.1),
    ]
    *prepared, joint, stem, rest = accelerator.prepare(*models, *optimizers)
    accelerator.backward(sum(model(own_rows()) for model in prepared))
    if accelerator.process_index == 1:
        models[1].stem.weight.grad.to_local()[0, 0] = float("inf")
        models[2].head.weight.grad.to_local()[0, 0] = float("inf")
    norm = accelerator.clip_grad_norm_(models[0].parameters(), float("inf")).item()
    stems = [model.stem.weight for model in models]
    before = [full(weight) for weight in stems]
    for optimizer in (joint, stem, rest):
        optimizer.step()
    moved = [not torch.equal(old, full(weight)) for old, weight in zip(before, stems, strict=True)]
    return norm, [o.step_was_skipped for o in (joint, stem, rest)], moved, accelerator.scaler.get_scale()


def test_optimizers_that_share_a_scale_skip_for_what_they_hold_alone():
    model = build()
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    for found in results("scaled_together"):
        # Twice lower: the scale follows each unit's window.
        assert found == (pytest.approx(norm, rel=1e-5), [True, False, True], [False, False, True], 256.0)


@SCENARIOS.add
def hidden_outputs() -> Any:
    class Hidden(Net):
        def forward(self, x: Tensor) -> Any:
            return UserDict(loss=super().forward(x))

    unit = prepare(Hidden())
    with torch.no_grad():
        unit.model(own_rows())
    return refused(lambda: unit.model(own_rows()))


def test_an_output_in_which_fsdp_finds_no_tensor_is_refused():
    for message in results("hidden_outputs"):
        assert "the forward of FSDPHidden returns a UserDict" in message
        assert "would not be averaged; return a tensor, dict" in message


# --- what clips ----------------------------------------------------------------------------------------------------


@SCENARIOS.add
def clipping() -> Any:
    from accel_trainer import Accelerator
    from accel_trainer.plugins import FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"]))
    model = build()
    stale = list(model.parameters())
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(model(own_rows()))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()
    messages = [
        refused(lambda: accelerator.clip_grad_norm_(stale, 1.0)),
        refused(lambda: accelerator.clip_grad_value_(stale, 1.0)),
        refused(lambda: accelerator.clip_grad_norm_([stale[0], *model.parameters()], 1.0)),
    ]
    return norm, messages, str(accelerator.distributed_type), optimizer.optimizer.param_groups[0]["lr"]


def test_parameters_taken_before_sharding_cannot_be_clipped():
    model = build()
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for found, messages, kind, _ in results("clipping"):
        assert found == pytest.approx(norm, rel=1e-5)
        for message, counted in zip(messages, ("10 of 10", "10 of 10", "1 of 11"), strict=True):
            assert f"{counted} parameters belong to no prepared model" in message
            assert "take model.parameters() from the model that prepare() returned" in message
        assert kind == "DistributedType.FSDP"


# --- hybrid sharding -----------------------------------------------------------------------------------------------


HYBRID: list[dict[str, Any]] = [{"replicate_size": 2}, {"replicate_per_node": True}]


def hybrid() -> list[Any]:
    found = []
    for options in HYBRID:
        model = build()
        unit = prepare(model, ignored_modules=("head",), **options)
        losses = train(unit)
        unit.backward(unit.model(own_rows()))
        norm = unit.clip_grad_norm(model.parameters(), 0.1).item()
        weight = model.stem.weight
        found.append((losses, norm, tuple(weight.device_mesh.shape), weight.placements, weight.to_local().shape[0]))
    return found


def test_hybrid_sharding_gives_the_same_losses():
    model = build()
    reference = train_alone(model)
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    on_two_nodes = run_ranks(hybrid, 4, env=lambda rank: {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)})
    for found in on_two_nodes:
        for options, (losses, clipped, *layout) in zip(HYBRID, found, strict=True):
            assert losses == pytest.approx(reference, abs=1e-6), options
            assert clipped == pytest.approx(norm, rel=1e-5), options
            assert layout == [(2, 2), (Replicate(), Shard(0)), 4], options


HYBRID_YAML = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: HYBRID_SHARD\n"


@SCENARIOS.add
def replicas_by_node() -> Any:
    """What is logged for each way to ask for hybrid sharding."""
    from accel_trainer import TrainingArguments
    from accel_trainer.trainer import Trainer

    found = {}
    with TemporaryDirectory() as directory:
        file = Path(directory, "hybrid.yaml")
        file.write_text(HYBRID_YAML)
        arguments = partial(TrainingArguments, output_dir=directory, use_cpu=True, report_to=[])
        plugin = FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD")
        ways: dict[str, Callable[[], Any]] = {
            "packaged file": lambda: Accelerator(cpu=True, config="hybrid_shard"),
            "accelerate's file": lambda: Accelerator(cpu=True, config=file),
            "plugin": lambda: Accelerator(cpu=True, fsdp_plugin=plugin),
            "arguments": lambda: Trainer(model=build(), args=arguments(fsdp="hybrid_shard")),
            "file of arguments": lambda: Trainer(model=build(), args=arguments(fsdp=True, fsdp_config=str(file))),
        }
        for way, make in ways.items():
            with logged() as messages:
                make()
            found[way] = [message for message in messages if "replica" in message]
    return found


@pytest.mark.parametrize(
    ("way", "origin"),
    [
        ("packaged file", r"fsdp_configs/hybrid_shard\.yaml:\d+"),
        ("accelerate's file", r"\S+/hybrid\.yaml:4"),
        ("plugin", r"Accelerator\(fsdp_plugin=\.\.\.\)"),
        ("arguments", r"TrainingArguments\(fsdp=\.\.\.\)"),
        ("file of arguments", r"\S+/hybrid\.yaml:4"),
    ],
)
def test_replicas_by_node_say_what_they_are_on_one_node(way: str, origin: str):
    message, *others = results("replicas_by_node")[0][way]
    assert re.fullmatch(
        rf"fsdp\.replicate_per_node=true \(from {origin}\) is hybrid sharding with a replica on each node, and all 2 "
        r"ranks are on one: they share the shards of one replica, as without it\. Replicas within a node are "
        r"fsdp\.replicate_size",
        message,
    )
    assert not others
