"""What the conformance suite does not ask of DeepSpeed: its gradients, its precisions, its limits."""

from __future__ import annotations

import gc
import re
import tempfile
import weakref
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("deepspeed")

from deepspeed.accelerator import get_accelerator

from accel_trainer.errors import ConfigError
from accel_trainer.integrations.deepspeed.partitions import flat_partitions
from accel_trainer.runtime.progress import PROGRESS
from tests.loops import take_update
from tests.ranks import preload
from tests.scenarios import Scenarios
from tests.zero import accelerator, adamw, alone, batch, block, build, layout, own_rows, unit_of, whole

preload("accel_trainer.accelerator", "deepspeed")

SCENARIOS = Scenarios(timeout=300)
results = SCENARIOS.results
VARIANTS = {"zero1": (1, False), "zero2": (2, False), "zero3": (3, False), "zero3 offloaded": (3, True)}


def for_each_variant(train: Any) -> Any:
    @wraps(train)
    def run() -> dict[str, Any]:
        return {name: train(stage, offload) for name, (stage, offload) in VARIANTS.items()}

    return run


def close(trained: dict[str, Any], reference: list[torch.Tensor]) -> None:
    assert trained.keys() == VARIANTS.keys()
    for name, values in trained.items():
        for value, expected in zip(values, reference, strict=True):
            torch.testing.assert_close(
                value, expected, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@SCENARIOS.add
@for_each_variant
def gradients_beyond_one(stage: int, offload: bool) -> Any:
    """Nobody asks for clipping, and the engine clips at 1.0 when its configuration is silent."""
    made, model, optimizer = layout(stage, offload)
    for step in range(3):
        take_update(model(own_rows(step)), optimizer, made)
    return whole(made, model)


def test_nothing_is_clipped_where_nobody_asked():
    norms = []
    reference = alone(lambda model: norms.append(nn.utils.get_total_norm(p.grad for p in model.parameters())))
    assert max(norms) > 2  # the engine's default would show
    close(results("gradients_beyond_one")[0], reference)


@SCENARIOS.add
@for_each_variant
def configured_bound(stage: int, offload: bool) -> Any:
    made, model, optimizer = layout(stage, offload, {"gradient_clipping": 0.3})
    for step in range(3):
        made.backward(model(own_rows(step)))
        if step == 1:
            made.clip_grad_norm_(model.parameters(), 0.1)  # for this step only
        optimizer.step()
    return whole(made, model)


def test_a_configured_bound_holds_and_an_explicit_one_wins():
    bounds = iter((0.3, 0.1, 0.3))
    close(
        results("configured_bound")[0], alone(lambda model: nn.utils.clip_grad_norm_(model.parameters(), next(bounds)))
    )


@SCENARIOS.add
@for_each_variant
def clamped(stage: int, offload: bool) -> Any:
    made, model, optimizer = layout(stage, offload)
    for step in range(3):
        made.backward(model(own_rows(step)))
        made.clip_grad_value_(model.parameters(), 0.02)
        norm = made.clip_grad_norm_(model.parameters(), 0.05)
        before = norm.item()
        optimizer.step()
        assert before != before, "NaN until the step"
        assert norm.item() > 0
    return whole(made, model)


def test_values_are_clamped_before_the_norm_is_bounded():
    def clamp(model: nn.Module) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    close(results("clamped")[0], alone(clamp))


@SCENARIOS.add
@for_each_variant
def dropped_gradients(stage: int, offload: bool) -> Any:
    made, model, optimizer = layout(stage, offload)
    for step in range(3):
        made.backward(model(own_rows(step + 10)))
        optimizer.zero_grad()
        optimizer.step()  # nothing to step with
        take_update(model(own_rows(step)), optimizer, made)
    return whole(made, model)


def test_zero_grad_drops_what_a_backward_has_left():
    close(results("dropped_gradients")[0], alone())


@SCENARIOS.add
@for_each_variant
def several_backwards(stage: int, offload: bool) -> Any:
    made, model, optimizer = layout(stage, offload)
    for step in range(3):
        losses = [model(own_rows(step)), model(own_rows(step + 10))]
        made.backward(losses[0])
        made.backward(losses[1])
        take_update(model(own_rows(step + 20)), optimizer, made)
    return whole(made, model)


def test_gradients_of_several_backwards_add_up():
    model = build()
    optimizer = adamw(model)
    for step in range(3):
        take_update(model(batch(step)) + model(batch(step + 10)) + model(batch(step + 20)), optimizer)
    close(results("several_backwards")[0], [p.detach() for p in model.parameters()])


@SCENARIOS.add
@for_each_variant
def token_means(stage: int, offload: bool) -> Any:
    made, model, optimizer = layout(stage, offload, gradient_accumulation_steps=2)
    rank = made.process_index
    for step in range(4):
        with made.accumulate(model):
            rows = own_rows(step)[: 1 + rank + step % 2]
            made.backward(made.global_token_mean(model(rows) * len(rows), len(rows)))
            made.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return whole(made, model)


def test_losses_are_weighed_by_tokens():
    rows = [
        torch.cat([batch(step).chunk(2)[rank][: 1 + rank + step % 2] for step in steps for rank in range(2)])
        for steps in ((0, 1), (2, 3))
    ]
    close(results("token_means")[0], alone(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5), rows))


@SCENARIOS.add
@for_each_variant
def uneven_data(stage: int, offload: bool) -> Any:
    made, model, optimizer = layout(stage, offload)
    loader = made.prepare(DataLoader(list(batch()[:5]), batch_size=1))
    with made.join_uneven_inputs([model], even_batches=False):
        for rows in loader:  # 2, 2 and 1 rows: in the last step, one rank has none
            take_update(model(rows), optimizer, made)
    return whole(made, model)


def test_a_rank_without_data_takes_part_with_weight_zero():
    close(results("uneven_data")[0], alone(rows=batch()[:5].split(2)))


class Branches(nn.Module):
    """One part takes part in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(4, 1)
        self.sometimes = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, is_used: bool) -> torch.Tensor:
        output = self.always(x)
        return (output + self.sometimes(x) if is_used else output).square().mean()


USED = (True, False, False, True, False)
DECAYED = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.5}


@SCENARIOS.add
def parts_without_gradients() -> Any:
    def train(stage: int, offload: bool) -> Any:
        made, model = accelerator(stage, offload), Branches()
        model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), **DECAYED))
        for step, is_used in enumerate(USED):
            made.backward(model(own_rows(step), is_used))
            made.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return whole(made, model)

    return for_each_variant(train)() | {"zero2 offloaded": train(2, True)}


def test_a_part_without_gradients_stays_as_it_is():
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), **DECAYED)
    for step, is_used in enumerate(USED):
        model(batch(step), is_used).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    trained = results("parts_without_gradients")[0]
    offloaded = trained.pop("zero2 offloaded")
    close(trained | {"zero3 offloaded": offloaded}, [p.detach() for p in model.parameters()])
    close(trained, [p.detach() for p in model.parameters()])


@SCENARIOS.add
def parameters_that_begin_with_integers() -> Any:
    """Train under ZeRO-3 on a device that has fp16, as cards and some CPUs do."""
    made, model = accelerator(3, False), build()
    optimizer = adamw(model)
    model.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        engine, prepared = made.prepare(model, optimizer)
    for step in range(3):
        take_update(engine(own_rows(step)), prepared, made)
    return whole(made, engine)


def test_a_first_parameter_of_integers_is_kept_on_a_device_that_has_fp16():
    codes, *values = results("parameters_that_begin_with_integers")[0]
    assert codes.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(values, alone(), atol=1e-6, rtol=1e-5)


@SCENARIOS.add
@for_each_variant
def prepared_again(stage: int, offload: bool) -> Any:
    made = accelerator(stage, offload)
    model = build()
    optimizer = adamw(model)
    engine, prepared = made.prepare(model, optimizer)
    made.backward(engine(own_rows()))
    held = [weakref.ref(kept) for kept in (engine, engine.optimizer, *flat_partitions(engine.optimizer))]
    engine, prepared = made.free_memory(engine, prepared)
    gc.collect()
    hooks = model._forward_hooks or model._forward_pre_hooks or model.stem._forward_pre_hooks
    left = [kept() is not None for kept in held] + [bool(hooks)]
    engine, prepared = made.prepare(model, optimizer)
    for step in range(3):
        made.backward(engine(own_rows(step)))
        prepared.step()
    values = whole(made, engine)
    held = [weakref.ref(kept) for kept in (model, *model.parameters())]
    engine, prepared, model, optimizer = made.clear(engine, prepared, model, optimizer)
    gc.collect()
    return values, left + [kept() is not None for kept in held]


def test_free_memory_leaves_nothing_of_the_engine_and_model_and_optimizer_can_be_prepared_again():
    for rank, found in enumerate(results("prepared_again")):
        for name, (_, left) in found.items():
            assert left
            assert not any(left), (rank, name, left)
    close({name: values for name, (values, _) in results("prepared_again")[0].items()}, alone())


@SCENARIOS.add
def a_model_in_two_engines() -> Any:
    """Train, let another Accelerator prepare the model, train on, and collect what is left of the first engine."""

    def train(stage: int, offload: bool, is_freed: bool) -> Any:
        first, model, optimizer = layout(stage, offload)
        module = first.unwrap_model(model)
        first.backward(model(own_rows(0)))
        optimizer.step()
        if is_freed:
            first.free_memory()
        second = accelerator(stage, offload)
        again, prepared = second.prepare(module, adamw(module))
        message = "before a model was prepared" if is_freed else "Net was prepared again, or .* use what the last"
        with pytest.raises(ConfigError, match=message):
            first.backward(model(own_rows(0)))
        assert not first.is_prepared(module)
        second.backward(again(own_rows(1)))
        prepared.step()
        first, model, optimizer = None, None, None
        gc.collect()
        second.backward(again(own_rows(2)))
        prepared.step()
        values = whole(second, again)
        second.clear()
        return values

    return {is_freed: for_each_variant(partial(train, is_freed=is_freed))() for is_freed in (True, False)}


def test_an_engine_that_was_taken_off_its_model_leaves_the_next_one_alone():
    model = build()
    for steps in ((0,), (1, 2)):
        optimizer = adamw(model)
        for step in steps:
            take_update(model(batch(step)), optimizer)
    for found in results("a_model_in_two_engines")[0].values():
        close(found, [p.detach() for p in model.parameters()])


@SCENARIOS.add
def overflow() -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # Torch computes in fp16 on the CPU, slowly; the engine says no for that reason.
    CPU_Accelerator.is_fp16_supported = lambda self: True
    scale = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 2}
    found = {}
    for stage in (1, 2, 3):
        unit = unit_of(stage, {"fp16": scale})
        steps = []
        for _ in range(12):
            before = [p.detach().clone() for p in unit.checkpoint_io().full_model_state().values()]
            unit.backward(unit.model(own_rows(0)))
            promised = unit.clip_grad_norm(unit.model.parameters(), 0.01)
            outcome = unit.step()
            assert torch.equal(promised, outcome.grad_norm)
            after = unit.checkpoint_io().full_model_state().values()
            moved = max((float((a - b).abs().max()) for a, b in zip(after, before, strict=True)), default=None)
            steps.append((outcome.applied, float(outcome.grad_norm), moved))
        again = unit_of(stage, {"fp16": scale})
        again.checkpoint_io().load_full_optimizer_state(unit.checkpoint_io().full_optimizer_state())
        scales = [each.checkpoint_io().full_optimizer_state().get("loss_scale") for each in (unit, again)]
        assert scales[0] == scales[1]
        assert scales[0] is None or scales[0]["cur_scale"] != 2**20
        found[stage] = steps
    return found


def test_fp16_overflow_skips_the_update_and_says_so():
    model = build()
    model(batch(0)).backward()
    norm = float(nn.utils.get_total_norm(p.grad for p in model.parameters()))
    for rank, found in enumerate(results("overflow")):
        for steps in found.values():
            skipped = [step for step in steps if not step[0]]
            applied = [step for step in steps if step[0]]
            assert steps[0] == (False, float("inf"), 0.0 if rank == 0 else None)
            assert all(step[1:] == steps[0][1:] for step in skipped)
            assert applied[0][1] == pytest.approx(norm, rel=0.01)
            if rank == 0:
                # Adam moves by its rate whatever the gradients are scaled by, when the scale grows too.
                assert all(0.005 < step[2] < 0.02 for step in applied)
                assert len(applied) >= 3


@SCENARIOS.add
def states_of_two_engines() -> Any:
    from accel_trainer.errors import IncompatibleCheckpointError
    from accel_trainer.utils import broadcast_object_list

    def two(outputs: int, number: int) -> tuple[Any, Any]:
        made, first, optimizer = layout(2)
        second = build()
        second.head = nn.Linear(7, outputs)
        made.prepare(second, adamw(second))
        made.backward(first(own_rows(number)))
        optimizer.step()
        return made, first

    made, first = two(1, 0)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(broadcast_object_list([own])[0]) / "s"
        made.save_state(folder)
        saved = whole(made, first)
        made, first = two(2, 1)
        before = whole(made, first)
        with pytest.raises(IncompatibleCheckpointError, match=r"head\.weight is \(1, 7\).*and \(2, 7\) in the model"):
            made.load_state(folder)
        kept = whole(made, first)
        made, first = two(1, 2)
        other = whole(made, first)
        made.load_state(folder)
        return saved, (before, kept), (other, whole(made, first))


def test_a_state_that_does_not_fit_one_engine_changes_none():
    saved, (before, kept), (other, loaded) = results("states_of_two_engines")[0]
    assert all(torch.equal(value, expected) for value, expected in zip(kept, before, strict=True))
    assert not all(torch.equal(value, expected) for value, expected in zip(kept, saved, strict=True))
    assert not all(torch.equal(value, expected) for value, expected in zip(other, saved, strict=True))
    assert all(torch.equal(value, expected) for value, expected in zip(loaded, saved, strict=True))


@SCENARIOS.add
def a_step_left_out() -> Any:
    from accel_trainer import Accelerator
    from accel_trainer.errors import DesyncError

    content = {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}, "debug": True}
    made, model = Accelerator(cpu=True, config=content), build()
    model, optimizer = made.prepare(model, adamw(model))
    try:
        for step in range(3):
            made.backward(model(own_rows(step)))
            if not (step == 1 and made.process_index == 1):
                optimizer.step()
            optimizer.zero_grad()
    except DesyncError as error:
        PROGRESS.updates = 0
        return str(error), made.gather(torch.ones(1)).sum().item()
    return "", 0


def test_r11_debug_names_a_step_of_the_engine_that_a_rank_leaves_out() -> None:
    for text, after in results("a_step_left_out"):
        assert re.match(
            r"the ranks do not agree on the operation: rank 0 calls optimizer\.step in update \d+, a_step_left_out "
            r"\(test_strategy\.py:\d+\); rank 1 calls backward in update \d+, a_step_left_out \(.*\)\. Nothing was",
            text,
        ), text
        assert after == 2


# --- mixtures of experts under ZeRO-3: ranks that run different experts still gather the same parameters --------------


class Experts(nn.Module):
    """Sends each row to the expert that its first number chooses, and runs no other one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0].long()
        mixed = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero().squeeze(1)
            mixed = mixed.index_add(0, rows, self.experts[index](x[rows]))
        return mixed


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.experts = Experts()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x[:, :1], self.stem(x[:, 1:])], dim=1)
        return self.head(x + self.experts(x)).square().mean()


def build_mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture()


# Of each step, the expert of rank 0 and that of rank 1.
ROUTES = [(0, 1), (1, 2), (2, 2), (1, 0)]


def routed_rows(step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    x[:, 0] = ROUTES[step][rank]
    return x


def train_experts(classes: list[str] | str) -> Any:
    made = accelerator(3, config={"deepspeed_moe_layer_cls_names": classes})
    model = build_mixture()
    try:
        model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), **DECAYED))
    except ConfigError as error:
        return str(error)
    for step in range(len(ROUTES)):
        take_update(model(routed_rows(step, made.process_index)), optimizer, made)
    return whole(made, model)


def experts_alone() -> list[torch.Tensor]:
    model = build_mixture()
    optimizer = torch.optim.SGD(model.parameters(), **DECAYED)
    for step in range(len(ROUTES)):
        model(torch.cat([routed_rows(step, 0), routed_rows(step, 1)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@SCENARIOS.add
def mixtures() -> Any:
    return train_experts("Experts"), train_experts("Expert, Other")


def test_ranks_that_choose_other_experts_train_as_one_process_does():
    trained, refused = results("mixtures")[0]
    torch.testing.assert_close(trained, experts_alone(), atol=1e-6, rtol=1e-5)
    assert "has no module of class Expert or Other, which zero_optimization.leaf_module.classes" in refused
    assert "ranks that run different experts would wait for each other" in refused


@SCENARIOS.add
def kept_activations() -> Any:
    """Train layers that the engine shares, of more elements than the few that it leaves whole, for three updates."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from accel_trainer import Accelerator

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    tokens_BL = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(0))
    found = {}
    for policy in ("off", "selective"):
        ways = {"activation_checkpointing": policy, "loss": "chunked"}
        made = Accelerator(cpu=True, config={"strategy": "deepspeed", "deepspeed": block(3), **ways})
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=512, **sizes))
        model, optimizer = made.prepare(model, adamw(model))
        found[policy] = [
            take_update(model(input_ids=tokens_BL, labels=tokens_BL).loss, optimizer, made).item() for _ in range(3)
        ]
        made.free_memory()
    return found


def test_selective_checkpointing_goes_by_no_operation_of_the_engine():
    """From the second update on it releases layers in the backward that it keeps in the forward, for their next use."""
    for found in results("kept_activations"):
        assert found["selective"] == found["off"]
        assert found["off"][2] < found["off"][0]
