"""An Accelerator under DeepSpeed: plugins, stand-ins, precisions, models in pieces, states, and what is refused."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from accel_trainer.errors import ConfigError
from tests.loops import take_update
from tests.ranks import preload
from tests.scenarios import Scenarios, refused
from tests.zero import Net, accelerator, adamw, alone, batch, block, build, layout, own_rows, whole

preload("accel_trainer.accelerator", "deepspeed", "transformers.models.auto.modeling_auto")

SCENARIOS = Scenarios(timeout=300)
results = SCENARIOS.results


def equal(values: list[torch.Tensor], reference: list[torch.Tensor]) -> None:
    for value, expected in zip(values, reference, strict=True):
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)


def step(made: Any, model: Any, optimizer: Any, number: int) -> float:
    return float(made.reduce(take_update(model(own_rows(number)), optimizer, made), "mean"))


@SCENARIOS.add
def place_in_the_job() -> Any:
    before = dict(os.environ)
    made, model, _ = layout(2, gradient_accumulation_steps=3)
    engine = made.state.deepspeed_plugin
    sizes = {name: model._config.__dict__[name] for name in ("train_batch_size", "gradient_accumulation_steps")}
    return {
        "processes": made.num_processes,
        "type": str(made.distributed_type),
        # Torch's compiler, which the engine imports, tells its own child processes where its cache is.
        "changed": {
            name
            for name in before.keys() | os.environ.keys()
            if before.get(name) != os.environ.get(name) and not name.startswith("TORCHINDUCTOR_")
        },
        "plugin": (engine.zero_stage, engine.gradient_accumulation_steps),
        "sizes": sizes,
        "module": type(made.unwrap_model(model)) is Net and model.module is made.unwrap_model(model),
    }


def test_the_job_is_as_large_as_it_is_and_the_environment_is_left_alone():
    for found in results("place_in_the_job"):
        assert found == {
            "processes": 2,
            "type": "DistributedType.DEEPSPEED",
            "changed": set(),
            "plugin": (2, 3),
            "sizes": {"train_batch_size": 6, "gradient_accumulation_steps": 3},
            "module": True,
        }


@SCENARIOS.add
def two_engines() -> Any:
    from accel_trainer import Accelerator, DeepSpeedPlugin

    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=block(2, gradient_clipping=0.3)),
        "teacher": DeepSpeedPlugin(hf_ds_config=block(3)),
    }
    made = Accelerator(cpu=True, deepspeed_plugins=plugins)
    student = build()
    student, optimizer = made.prepare(student, adamw(student))
    made.state.select_deepspeed_plugin("teacher")
    teacher = made.prepare(build())
    first = next(teacher.module.parameters())
    for number in range(3):
        with torch.no_grad():
            teacher(own_rows(number))
        step(made, student, optimizer, number)
    return {
        "stages": [engine.zero_optimization_stage() for engine in (student, teacher)],
        "pieces": hasattr(first, "ds_tensor") and first.ds_tensor.numel() < first.ds_numel,
        "selected": [plugin.selected for plugin in plugins.values()],
        "unknown": refused(lambda: made.state.select_deepspeed_plugin("techer")),
        "asked": made.state.get_deepspeed_plugin("student") is plugins["student"],
        "asked_unknown": refused(lambda: made.state.get_deepspeed_plugin("studen")),
        "student": whole(made, student),
        "teacher": whole(made, teacher),
    }


def test_models_get_engines_of_their_own_by_the_plugin_that_is_selected():
    first, second = results("two_engines")
    assert first["stages"] == second["stages"] == [2, 3]
    assert first["pieces"]
    assert first["selected"] == [False, True]
    assert first["asked"]
    assert "'studen'; did you mean 'student'?" in first["asked_unknown"]
    assert "'techer'; did you mean 'teacher'? This Accelerator has 'student', 'teacher'" in first["unknown"]
    equal(first["student"], alone(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
    equal(first["teacher"], [p.detach() for p in build().parameters()])
    assert second["student"] == []


@SCENARIOS.add
def described() -> Any:
    from accel_trainer import Accelerator, DeepSpeedPlugin, DummyOptim, DummyScheduler

    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    schedule = {"type": "WarmupLR", "params": params}
    made = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(block(3, optimizer=optimizer, scheduler=schedule)))
    model = build()
    # In the group alone, as scripts have it that spare norms and biases the decay.
    dummy = DummyOptim([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=0.01)
    model, optim, scheduler = made.prepare(model, dummy, DummyScheduler(dummy, warmup_num_steps=4))
    rates = []
    for number in range(3):
        rates.append(optim.param_groups[0]["lr"])
        made.backward(model(own_rows(number)))
        optim.step()
        scheduler.step()
        optim.zero_grad()
    return rates, whole(made, model), scheduler.get_last_lr()


def test_the_engine_makes_the_optimizer_and_the_schedule_that_are_described():
    rates, values, last = results("described")[0]
    from deepspeed.runtime.lr_schedules import WarmupLR

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = WarmupLR(optimizer, warmup_max_lr=0.01, warmup_num_steps=4, warmup_type="linear")
    for number, rate in enumerate(rates):
        assert optimizer.param_groups[0]["lr"] == rate
        model(batch(number)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert last == schedule.get_last_lr() == pytest.approx([0.005])
    equal(values, [p.detach() for p in model.parameters()])


@SCENARIOS.add
def sixteen_bits() -> Any:
    made, model, optimizer = layout(2, mixed_precision="bf16")
    output = model(own_rows(0))
    losses = [step(made, model, optimizer, number) for number in range(3)]
    held = {p.dtype for p in model.module.parameters()}
    return output.dtype, losses, held, {value.dtype for value in whole(made, model)}


def test_bf16_runs_in_the_engine_on_fp32_inputs_and_keeps_fp32_weights():
    model = build()
    optimizer = adamw(model)
    expected = [take_update(model(batch(number)), optimizer).item() for number in range(3)]
    for rank, (dtype, losses, held, saved) in enumerate(results("sixteen_bits")):
        assert dtype is torch.float32
        assert losses == pytest.approx(expected, rel=0.03)
        assert held == {torch.bfloat16}
        assert saved == ({torch.float32} if rank == 0 else set())


@SCENARIOS.add
def in_pieces() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = AutoConfig.for_model("gpt2", **options, **dropout, bos_token_id=0, eos_token_id=0)
    made = accelerator(3, config={"zero3_init_flag": True})
    torch.manual_seed(made.process_index)
    model = AutoModelForCausalLM.from_config(config)
    in_pieces = all(p.numel() < p.ds_numel or p.ds_numel == 1 for p in model.parameters() if p.ds_numel > 1)
    with made.whole_models():
        switched = [not any(hasattr(p, "ds_id") for p in AutoModelForCausalLM.from_config(config).parameters())]
    with made.state.deepspeed_plugin.zero3_init_context_manager(enable=False):
        switched.append(not any(hasattr(p, "ds_id") for p in AutoModelForCausalLM.from_config(config).parameters()))
    switched.append(hasattr(AutoModelForCausalLM.from_config(config).lm_head.weight, "ds_id"))
    empty = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}], lr=0.01)
    message = refused(lambda: made.prepare(model, empty))
    model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    state = {name: value.clone() for name, value in made.get_state_dict(model).items()}
    tokens = torch.randint(1, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    rows = tokens.chunk(2)[made.process_index]
    losses = [
        float(made.reduce(take_update(model(input_ids=rows, labels=rows).loss, optimizer, made), "mean"))
        for _ in range(3)
    ]
    made = accelerator(2)
    whole_again = all(not hasattr(p, "ds_id") for p in AutoModelForCausalLM.from_config(config).parameters())
    expected = []
    if state:
        plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(state)
        optim = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for _ in range(3):
            expected.append(take_update(plain(input_ids=tokens, labels=tokens).loss, optim).item())
    return in_pieces and all(switched), whole_again, message, losses, expected


def test_models_of_transformers_are_built_in_pieces():
    in_pieces, whole_again, message, losses, expected = results("in_pieces")[0]
    assert in_pieces
    assert whole_again
    assert message.startswith("group 1 of AdamW has no parameters, and DeepSpeed drops such groups")
    assert losses == pytest.approx(expected, abs=1e-5)


@SCENARIOS.add
def triggered() -> Any:
    found = []
    for stage in (1, 2, 3):
        made, model, optimizer = layout(stage)
        for number in (0, 2):
            with made.no_sync(model):
                made.backward(model(own_rows(number)) / 2)
                loss = model(own_rows(number + 1))
            with made.no_sync(model), made.trigger_sync_in_backward(model):
                made.backward(loss / 2)
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(made, model))
    return found


def test_a_backward_may_end_the_window_that_its_forward_did_not():
    model = build()
    optimizer = adamw(model)
    for number in (0, 2):
        take_update((model(batch(number)) + model(batch(number + 1))) / 2, optimizer)
    for values in results("triggered")[0]:
        equal(values, list(model.parameters()))


@SCENARIOS.add
def gathered() -> Any:
    from accel_trainer.utils import GatheredParameters

    made, model, _ = layout(3)
    weight = model.module.stem.weight
    with GatheredParameters(model.parameters()):
        shape = tuple(weight.shape)
    with GatheredParameters(weight, modifier_rank=0):
        weight.data.fill_(made.process_index + 5.0)
    with GatheredParameters(weight, enabled=False):
        is_left = weight.numel() < weight.ds_numel
    plain = nn.Linear(2, 2)
    with GatheredParameters(plain.parameters()):
        is_plain = plain.weight.shape == (2, 2)
    with GatheredParameters([weight]):
        values = set(weight.flatten().tolist())
    return shape, is_left, is_plain, values


def test_parameters_in_pieces_are_whole_in_a_block():
    assert results("gathered") == [((7, 4), True, True, {5.0})] * 2


def test_the_block_leaves_parameters_of_fsdp2_to_them():
    from accel_trainer.utils import GatheredParameters

    sharded = nn.Parameter(torch.ones(2))
    sharded.full_tensor = lambda: sharded
    with pytest.raises(ConfigError, match=r"that FSDP2 has sharded.*use parameter\.full_tensor\(\)"):
        GatheredParameters(sharded)


@SCENARIOS.add
def exported() -> Any:
    from safetensors.torch import load_file

    from accel_trainer.utils import broadcast_object_list

    found = {}
    for stage in (2, 3):
        made, model, optimizer = layout(stage, mixed_precision="bf16")
        step(made, model, optimizer, 0)
        with tempfile.TemporaryDirectory() as own:
            folder = Path(broadcast_object_list([own])[0])
            made.save_model(model, folder, max_shard_size="100B")
            state = made.get_state_dict(model)
            paths = list(folder.glob("*.safetensors"))
            files = {name: value for path in paths for name, value in load_file(path).items()}
            made.wait_for_everyone()
        found[stage] = state, {name: files[name] for name in state}, len(paths)
    return found


@SCENARIOS.add
def saved_by_the_model() -> Any:
    import transformers

    from accel_trainer.utils import broadcast_object_list

    made = accelerator(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=64, **sizes)
    model = transformers.BertForSequenceClassification(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prepared = made.prepare(model)
    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_object_list([own])[0]
        made.unwrap_model(prepared).save_pretrained(folder)
        with made.strategy.building(in_pieces=False):
            after = transformers.BertForSequenceClassification.from_pretrained(folder).state_dict()
        made.wait_for_everyone()
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def test_a_partitioned_model_saves_itself_in_full():
    assert results("saved_by_the_model") == [[], []]


def test_weights_are_exported_in_files_for_transformers():
    first, second = results("exported")
    for stage in (2, 3):
        state, files, count = first[stage]
        assert state.keys() == build().state_dict().keys()
        assert all(torch.equal(files[name], value) for name, value in state.items())
        assert count > 1
        assert second[stage][0] == {}


@SCENARIOS.add
def refusals() -> Any:
    from accel_trainer import Accelerator, DummyOptim

    made, model, optimizer = layout(1)
    single = Accelerator(cpu=True, strategy="ddp")
    later, built = accelerator(1), build()
    prepared = later.prepare(built)
    made.backward(model(own_rows()))
    parameters = list(model.parameters())
    messages = {
        "stage": refused(lambda: accelerator(0).prepare(build())),
        "norm type": refused(lambda: made.clip_grad_norm_(parameters, 1.0, norm_type=1)),
        "some": refused(lambda: made.clip_grad_norm_(parameters[:1], 1.0)),
        "closure": refused(lambda: optimizer.step(lambda: None)),
        "graph": refused(lambda: made.backward(model(own_rows()), create_graph=True)),
        "accumulation": refused(lambda: setattr(made, "gradient_accumulation_steps", 4)),
        "later": refused(lambda: later.prepare(adamw(built))),
        "two": refused(
            lambda: accelerator(2).prepare(built, *(torch.optim.SGD([p], lr=1.0) for p in built.parameters()))
        ),
        "untrained": refused(lambda: later.backward(prepared(own_rows()))),
        "dummy": refused(lambda: single.prepare(build(), DummyOptim(built.parameters()))),
    }
    made.clip_grad_norm_(parameters, 1.0)
    messages["values"] = refused(lambda: made.clip_grad_value_(parameters, 1.0))
    optimizer.step()
    with made.no_sync(model):
        made.backward(model(own_rows()))
    messages["local"] = refused(optimizer.step)
    return messages


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "stage",
            "stage of the DeepSpeed configuration is 0, or not given: nothing would be sharded; write stage 1, 2",
        ),
        ("norm type", "norm_type is 1, and DeepSpeed computes norms of type 2 only; use norm_type=2"),
        ("some", "was given parameters without 3 of the 4 that this engine trains.*pass model.parameters()"),
        ("closure", "AdamW.step(closure) cannot be combined with DeepSpeed.*or strategy 'ddp'"),
        ("graph", "backward() got create_graph, which DeepSpeed's engine cannot pass on; it knows retain_graph"),
        ("accumulation", "gradient_accumulation_steps = 4: strategy 'deepspeed' has its number.*pass it to the Accel"),
        ("later", "AdamW was prepared after its model Net, and DeepSpeed builds its engine around model and optimizer"),
        ("two", "Net has several optimizers (SGD, SGD, SGD, SGD), and this strategy's engine takes one for each model"),
        ("untrained", "backward() was called for Net, which was prepared without an optimizer"),
        ("dummy", "DummyOptim stands for what a DeepSpeed configuration describes.*strategy 'ddp'; pass a torch opt"),
        ("values", "clip_grad_value_() was called after clip_grad_norm_().*clip values first"),
        ("local", "was called after a backward that exchanged no gradients.*let the last backward before the step"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(name: str, message: str):
    import re

    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    for found in results("refusals"):
        assert re.search(pattern, found[name]), found[name]
