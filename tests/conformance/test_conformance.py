"""One suite for every strategy: each must give the numbers of the plain PyTorch loop in one process."""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from accel_trainer.registry import strategy_names
from accel_trainer.techniques.model_flops import ModelFlops
from tests.cells import beyond, is_beyond, sample, selected
from tests.conformance.models import (
    CLIP,
    GLOBAL_BATCH,
    KINDS,
    NUM_BATCHES,
    build_model,
    build_optimizer,
    build_samples,
    collate,
    freeze_part,
    plain_loop,
)
from tests.conformance.models import train as train_several
from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.stand_in import ALONE
from tests.strategy_configs import zero_section

preload("transformers.models.auto.modeling_auto", "accel_trainer.accelerator", "deepspeed")


@dataclass(frozen=True)
class Layout:
    """A strategy with its options, and how many ranks it is tried on."""

    strategy: str
    world_size: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = "torch"
    """The package without which it is skipped."""
    kinds: tuple[str, ...] = KINDS
    """The models that are trained by it."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Of the mesh on which a parameter lies."""
    env: Mapping[str, None] = field(default_factory=dict)
    """What a launcher sets, and none has for this one."""

    def accelerator(self, config: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Any:
        """Make an Accelerator on this rank, with further options of the configuration."""
        from accel_trainer import Accelerator

        return Accelerator(cpu=True, config={"strategy": self.strategy, **self.options, **config}, **options)


def zero(stage: int, **options: Any) -> Layout:
    """Return ZeRO of a stage, on two ranks; of whole models, whose parameters the suite groups by their dimensions."""
    block = {"zero_optimization": zero_section(stage, **options), "zero3_init_flag": False}
    return Layout("deepspeed", options={"deepspeed": block}, needs="deepspeed")


def mesh(kinds: str, axes: dict[str, int], **sizes: int) -> Layout:
    """Return a mesh of several axes, for some of the models: each rank more costs seconds."""
    world_size = axes["shard"] if "ep" in axes else functools.reduce(operator.mul, axes.values())
    return Layout("fsdp2", world_size, {"parallel": sizes}, kinds=tuple(kinds.split()), axes=axes)


LAYOUTS = {
    "single": Layout("single", 1),
    "fsdp2_alone": Layout("fsdp2", 1, kinds=("mlp", "gpt2"), axes={"shard": 1}, env=ALONE),
    "zero3_alone": replace(zero(3), world_size=1, kinds=("mlp",), env=ALONE),
    "ddp": Layout("ddp"),
    "fsdp2": Layout("fsdp2", axes={"shard": 2}),
    "hsdp": mesh("mlp", {"replicate": 2, "shard": 2}, dp_replicate_size=2),
    "tp": mesh("mlp llama", {"shard": 1, "tp": 2}, tp_size=2),
    "tp_shards": mesh("llama", {"shard": 2, "tp": 2}, tp_size=2),
    "tp_replicas": mesh("mlp", {"replicate": 2, "shard": 1, "tp": 2}, tp_size=2, dp_replicate_size=2, dp_shard_size=1),
    "ep": mesh("mixtral", {"shard": 2, "ep_shard": 1, "ep": 2}, ep_size=2),
    "sp": mesh("llama", {"shard": 2}, sp_size=2),
    "sp_shards": mesh("llama", {"shard": 4}, sp_size=2),
    "sp_tp": mesh("llama", {"shard": 2, "tp": 2}, sp_size=2, tp_size=2),
    "cp": mesh("llama", {"shard": 2}, cp_size=2),
    "sp_ep": mesh("mixtral", {"shard": 2, "ep_shard": 1, "ep": 2}, sp_size=2, ep_size=2),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3_offload": zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
}


def mark(*names: str, kind: str | None = None) -> Any:
    """Return the parameters of a case, which is skipped where a package that one of its layouts needs is missing."""
    missing = [LAYOUTS[name].needs for name in names if importlib.util.find_spec(LAYOUTS[name].needs) is None]
    values = names if kind is None else (*names, kind)
    return pytest.param(*values, marks=pytest.mark.skipif(bool(missing), reason=f"needs {missing[:1]}"))


WAYS: dict[str, Any] = {"clipped": {"clip": True}, "accumulated": {"accumulation": 3}, "frozen": {"frozen": True}}
PRODUCTS = ("tp_shards", "tp_replicas", "sp_shards", "sp_tp", "sp_ep")
MORE = (("fsdp2", "gpt2"), ("tp", "llama"))
# In the sample: each layout on its first model, but for products of some that are in it; each model on one process;
# tied weights in shards, and a plan of transformers. Layers in parts that are in shards train, save and go on in
# tests/strategies/parallel/test_tensor_parallel.py.
NAMES = [
    beyond(mark(name)) if name in PRODUCTS else mark(name) for name, layout in LAYOUTS.items() if "mlp" in layout.kinds
]
CASES = [
    case
    if name == "single" or (kind == layout.kinds[0] and name not in PRODUCTS) or (name, kind) in MORE
    else beyond(case)
    for name, layout in LAYOUTS.items()
    for kind in layout.kinds
    for case in [mark(name, kind=kind)]
]


def prepare(kind: str, layout: str, *, accumulation: int = 1, frozen: bool = False, **config: Any) -> dict[str, Any]:
    """Prepare a model, optimizer, loader and scheduler on this rank."""
    # In one way of training, which takes a step of the model on tensors without memory.
    config = {"meters": accumulation > 1, "peak_flops": 1e12, **config}
    accelerator = LAYOUTS[layout].accelerator(config, gradient_accumulation_steps=accumulation)
    # Each rank draws other values: rank 0's must count.
    model = build_model(kind, seed=accelerator.process_index)
    if frozen:
        freeze_part(model, kind)
    optimizer = build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    micro_batch = GLOBAL_BATCH // accelerator.readers.world_size
    loader = DataLoader(build_samples(kind), batch_size=micro_batch, collate_fn=collate)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    return {
        "accelerator": accelerator,
        **dict(zip(("model", "optimizer", "loader", "scheduler"), prepared, strict=True)),
    }


def train(parts: dict[str, Any], *, clip: bool = False, **part: Any) -> dict[str, list[float]]:
    """Run the documents' loop over an epoch or a part of it; return the losses and norms of each update."""
    models, optimizers, schedulers = ([parts[name]] for name in ("model", "optimizer", "scheduler"))
    bound = CLIP if clip else float("inf")
    return train_several(parts, models, optimizers, schedulers, lambda batch: models[0](**batch)["loss"], bound, **part)


def evaluate(parts: dict[str, Any], kind: str, num_samples: int = 11) -> list[float]:
    """Return the logits of the first samples, gathered: 11 do not divide by 2, so padding must be dropped."""
    accelerator, model = parts["accelerator"], parts["model"]
    loader = accelerator.prepare(DataLoader(build_samples(kind)[:num_samples], batch_size=3, collate_fn=collate))
    model.eval()
    gathered = []
    with torch.no_grad():
        for batch in loader:
            gathered.append(accelerator.gather_for_metrics(model(**batch)["logits"]))
    model.train()
    logits = torch.cat(gathered)
    assert len(logits) == num_samples
    return logits.flatten()[:200].tolist()


def run_training(kind: str, layout: str, **options: Any) -> dict[str, Any]:
    """Train, evaluate, and report what this rank holds."""
    clip = options.pop("clip", False)
    parts = prepare(kind, layout, **options)
    result: dict[str, Any] = train(parts, clip=clip)
    if figures := parts["accelerator"].perf():
        seconds = figures["perf/step_seconds"] * len(result["losses"])
        done = {name: figures[f"perf/{name}"] * seconds for name in ("samples_per_second", "mfu")}
        result["done"] = done | {"tokens": figures.get("perf/tokens_seen", 0)}
    result["logits"] = evaluate(parts, kind)
    unit = parts["accelerator"].unit_of(parts["model"])
    result["layout"], result["exposed"] = unit.layout(), unit.exposed_communication_seconds()
    parameters = parts["accelerator"].unwrap_model(parts["model"]).parameters()
    result["held"] = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parameters)
    return result


def run_resume(kind: str, layout: str, directory: str, **config: Any) -> dict[str, Any]:
    """Train half an epoch, save, finish; then load into fresh objects and finish again."""
    parts = prepare(kind, layout, **config)
    train(parts, stop=3)
    parts["accelerator"].save_state(directory)
    local_bytes = parts["accelerator"].unit_of(parts["model"]).local_bytes()
    uninterrupted = train(parts, skip=3)
    fresh = prepare(kind, layout, **config)
    fresh["accelerator"].load_state(directory)
    resumed = train(fresh, skip=3)
    return {"uninterrupted": uninterrupted, "resumed": resumed, "local_bytes": local_bytes}


def run_all(kind: str, layout: str, directory: str) -> dict[str, dict[str, Any]]:
    """Everything that is asked of a strategy, in one job: a job costs more than a tiny training run."""
    results = {"resume": run_resume(kind, layout, directory)}
    results |= {way: run_training(kind, layout, **options) for way, options in WAYS.items()}
    if kind in ("gpt2", "bert"):
        results["tied"] = {"is_tied": is_tied_after_a_step(kind, layout)}
    if kind == "mlp":
        results["frozen model"] = {"names": run_frozen_model(layout)}
        results["released"] = {"losses": run_released(layout)}
    return results


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every strategy saves the state of an interrupted run, for itself and for the others to load."""
    return tmp_path_factory.mktemp("states")


@functools.cache
def results_of(layout: str, kind: str, states: Path) -> list[dict[str, dict[str, Any]]]:
    """Return the results of `run_all` by rank; the state of the interrupted run is in `states`."""
    directory = str(states / f"{layout}-{kind}")
    env, world_size = LAYOUTS[layout].env, LAYOUTS[layout].world_size
    return run_ranks(run_all, world_size, kind, layout, directory, env=env, timeout=150)


def is_tied_after_a_step(kind: str, layout: str) -> bool:
    """Return whether input and output embeddings are one parameter after layout and a step."""
    parts = prepare(kind, layout)
    train(parts, stop=1)
    model = parts["accelerator"].unwrap_model(parts["model"])
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def run_frozen_model(layout: str) -> list[str]:
    """Prepare a model that is frozen as a whole and evaluate with it; return the names in its state."""
    accelerator = LAYOUTS[layout].accelerator()
    model = accelerator.prepare(build_model("mlp").requires_grad_(False))
    with torch.no_grad():
        model(**collate(build_samples("mlp")[:4]))
    return sorted(accelerator.get_state_dict(model))


def run_released(layout: str) -> list[float]:
    """Train for an update, release the unit, and train the same model with a new optimizer; return all losses."""
    parts = prepare("mlp", layout)
    accelerator, unit = parts["accelerator"], parts["accelerator"].unit_of(parts["model"])
    losses = train(parts, stop=1)["losses"]
    module, groups = unit.module, parts["optimizer"].optimizer.param_groups
    unit.release()
    accelerator.free_memory()  # which releases it again
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, scheduler = accelerator.prepare(module, optimizer, scheduler)
    again = {**parts, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    return losses + train(again, stop=2)["losses"]


def test_every_built_in_strategy_is_in_the_suite():
    assert {layout.strategy for layout in LAYOUTS.values()} == set(strategy_names())


def check_way(way: str, layout: str, kind: str, states: Path) -> dict[str, Any]:
    """Compare a way of training with the plain loop, which is returned."""
    reference = plain_loop(kind, **WAYS[way])
    for result in (results[way] for results in results_of(layout, kind, states)):
        assert result["losses"] == pytest.approx(reference["losses"], abs=2e-6)
        # On a CPU without AVX-512 one of gpt2's differs by 1.2e-5.
        assert result["norms"] == pytest.approx(reference["norms"], rel=2e-5)
    return reference


# A row of docs/compatibility.md is a test: the three ways are three rows.
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_losses_norms_and_evaluation_equal_the_plain_loop(layout: str, kind: str, states: Path):
    reference = check_way("clipped", layout, kind, states)
    for results in results_of(layout, kind, states):
        assert results["clipped"]["logits"] == pytest.approx(reference["logits"], abs=2e-5)


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_accumulated_windows_equal_one_large_batch(layout: str, kind: str, states: Path):
    # 5 batches in windows of 3: the last window holds 2, and its gradient is the mean over those.
    assert len(check_way("accumulated", layout, kind, states)["losses"]) == 2


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_meters_count_what_all_ranks_train(layout: str, kind: str, states: Path):
    samples, model = build_samples(kind), build_model(kind)
    rows = [sample["input_ids"].shape[-1] for sample in samples if kind != "mlp"]
    # Two layers, of which the first needs no gradient of its input.
    flops = 2 * (2 * 8 * 16 + 3 * 16) * len(samples)
    if (formula := ModelFlops.by_formula(model)) is not None:
        flops = formula.total(sum(rows), sum(length**2 for length in rows), len(samples))
    for result in (results["accumulated"]["done"] for results in results_of(layout, kind, states)):
        assert result["samples_per_second"] == pytest.approx(len(samples))
        assert result["tokens"] == sum(rows)
        assert result["mfu"] * 1e12 * LAYOUTS[layout].world_size == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_frozen_parameters_train_like_the_plain_loop(layout: str, kind: str, states: Path):
    check_way("frozen", layout, kind, states)


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_a_resumed_run_is_the_run_that_was_interrupted(layout: str, kind: str, states: Path):
    for result in (results["resume"] for results in results_of(layout, kind, states)):
        assert result["resumed"] == result["uninterrupted"]
        assert len(result["resumed"]["losses"]) == NUM_BATCHES - 3


@pytest.mark.parametrize(("layout", "kind"), [case for case in CASES if case.values[1] in ("gpt2", "bert")])
def test_tied_weights_stay_tied(layout: str, kind: str, states: Path):
    assert all(results["tied"]["is_tied"] for results in results_of(layout, kind, states))


@pytest.mark.parametrize("layout", NAMES)
def test_a_frozen_model_can_be_prepared_and_saved(layout: str, states: Path):
    names = results_of(layout, "mlp", states)[0]["frozen model"]["names"]
    assert names == ["first.bias", "first.weight", "second.bias", "second.weight"]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_local_bytes_are_what_the_ranks_write(layout: str, kind: str, states: Path):
    asked = [results["resume"]["local_bytes"] for results in results_of(layout, kind, states)]
    files = (states / f"{layout}-{kind}").glob("unit_0.*.safetensors")
    assert sum(asked) == sum(tensor.nbytes for file in files for tensor in load_file(file).values())


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_a_layout_tells_all_parameters_and_those_of_the_rank(layout: str, kind: str, states: Path):
    sizes = {name: parameter.numel() for name, parameter in build_model(kind).named_parameters()}
    frozen = build_model(kind)
    freeze_part(frozen, kind)
    num_trained = sum(parameter.numel() for parameter in frozen.parameters() if parameter.requires_grad)
    results = results_of(layout, kind, states)
    for result in results:
        assert result["clipped"]["layout"].num_parameters == sum(sizes.values())
        assert result["clipped"]["layout"].num_trainable == sum(sizes.values())
        assert result["frozen"]["layout"].num_trainable == num_trained
    local = [result["clipped"]["layout"].num_local for result in results]
    if layout in ("fsdp2", "zero3", "zero3_offload"):  # the latter fills each partition up
        assert sum(sizes.values()) <= sum(local) < sum(sizes.values()) + 2 * len(sizes)
        assert max(local) < sum(sizes.values())
    elif LAYOUTS[layout].axes and LAYOUTS[layout].world_size > 1:
        assert max(local) < 0.7 * sum(sizes.values())  # what tensor parallelism does not shard is on each of its ranks
    else:
        assert set(local) == {sum(sizes.values())}
    assert results[0]["clipped"]["layout"].mesh == LAYOUTS[layout].axes


@pytest.mark.parametrize("layout", NAMES)
def test_what_an_engine_does_not_measure_it_does_not_tell(layout: str, states: Path):
    for result in results_of(layout, "mlp", states):
        seconds = result["clipped"]["exposed"]
        assert (seconds is not None) == (layout == "ddp")
        assert seconds is None or 0.0 <= seconds < 5.0


@pytest.mark.parametrize("layout", NAMES)
def test_a_released_model_can_be_prepared_again(layout: str, states: Path):
    model, samples, losses = build_model("mlp"), build_samples("mlp"), []
    for num_updates in (1, 2):
        optimizer = build_optimizer(model)
        for begin in range(0, num_updates * GLOBAL_BATCH, GLOBAL_BATCH):
            loss = model(**collate(samples[begin : begin + GLOBAL_BATCH]))["loss"]
            take_update(loss, optimizer)
            losses.append(loss.item())
    for results in results_of(layout, "mlp", states):
        assert results["released"]["losses"] == pytest.approx(losses, abs=2e-6)


@pytest.mark.parametrize("kind", [kind if kind in ("mlp", "gpt2") else beyond(kind) for kind in KINDS])
def test_fsdp2_shards_for_real(kind: str, states: Path):
    held = [results["clipped"]["held"] for results in results_of("fsdp2", kind, states)]
    assert sum(held) == sum(p.numel() for p in build_model(kind).parameters())
    assert max(held) < 0.7 * sum(held)


# Who loads whose states: of a model of plain layers, one with tied weights, and one with a plan.
EXCHANGED: dict[str, list[tuple[str, str]]] = {
    "ddp": [("mlp", "fsdp2"), ("gpt2", "fsdp2")],
    "fsdp2": [
        *((kind, saved) for kind in ("mlp", "gpt2") for saved in ("ddp", "single", "zero2", "fsdp2_alone")),
        ("llama", "tp_shards"),
        ("mixtral", "ep"),
        ("llama", "sp_shards"),
        ("llama", "sp_tp"),
        ("mixtral", "sp_ep"),
    ],
    "single": [
        *((kind, saved) for kind in ("mlp", "gpt2") for saved in ("fsdp2", "zero3")),
        ("llama", "tp_shards"),
        ("mixtral", "ep"),
        ("llama", "sp"),
        ("llama", "cp"),
        ("llama", "sp_tp"),
        ("mixtral", "sp_ep"),
    ],
    "zero1": [("mlp", "ddp"), ("gpt2", "ddp")],
    "zero3": [("mlp", "single"), ("gpt2", "single"), ("mlp", "zero3_alone")],
    "fsdp2_alone": [("mlp", "fsdp2"), ("mlp", "hsdp"), ("llama", "tp_shards")],
    "zero3_alone": [("mlp", "zero3")],
    "hsdp": [("mlp", "tp")],
    "tp": [("mlp", "hsdp"), ("mlp", "tp_replicas"), ("llama", "fsdp2")],
    "tp_shards": [("llama", "single"), ("llama", "tp"), ("llama", "sp_tp")],
    "sp": [("llama", "fsdp2"), ("llama", "sp_tp")],
    "cp": [("llama", "sp")],
    "sp_tp": [("llama", "single"), ("llama", "tp_shards"), ("llama", "sp_shards")],
    "ep": [("mixtral", "sp_ep")],
    "sp_ep": [("mixtral", "single"), ("mixtral", "ep"), ("mixtral", "fsdp2")],
}


# The sample takes states that it has.
_SAVED = {case.values for case in CASES if not is_beyond(case)}
_EXCHANGES = [(saved, loaded, kind) for loaded, sources in EXCHANGED.items() for kind, saved in sources]


@pytest.mark.parametrize(
    ("saved", "loaded", "kind"),
    [
        *sample(mark(*each[:2], kind=each[2]) for each in _EXCHANGES if (each[0], each[2]) in _SAVED),
        *(beyond(mark(*each[:2], kind=each[2])) for each in _EXCHANGES if (each[0], each[2]) not in _SAVED),
    ],
)
@pytest.mark.timeout(400)  # the first may have all states saved, and its job loads those of others too
def test_a_state_loads_on_another_strategy_and_world_size(
    kind: str, saved: str, loaded: str, states: Path, continued: Callable[..., dict[str, Any]]
):
    uninterrupted = results_of(saved, kind, states)[0]["resume"]["uninterrupted"]
    assert continued(kind, loaded, saved)["losses"] == pytest.approx(uninterrupted["losses"], abs=2e-6)


@pytest.fixture(scope="module")
def continued(request: pytest.FixtureRequest, states: Path) -> Callable[..., dict[str, Any]]:
    """Return what gives the losses behind a state; those of one number of ranks and engine are loaded in one job."""
    chosen = selected(request, "test_a_state_loads_on_another_strategy_and_world_size")

    @functools.cache
    def run_job(*job: Any) -> dict[Any, dict[str, Any]]:
        cases = [case for case in chosen if _job_of(case[1]) == job]
        for kind, _, saved in cases:
            results_of(saved, kind, states)
        env, world_size = LAYOUTS[cases[0][1]].env, job[0]
        results = run_ranks(run_continued, world_size, cases, str(states), env=env, timeout=40 + 20 * len(cases))
        return dict(zip(cases, results[0], strict=True))

    return lambda *case: run_job(*_job_of(case[1]))[case]


def _job_of(name: str) -> tuple[int, bool, bool]:
    """Return what has to be alike of layouts that one job of ranks tries: their number, the engine, the launcher."""
    layout = LAYOUTS[name]
    return layout.world_size, layout.strategy == "deepspeed", bool(layout.env)


def run_continued(cases: list[tuple[str, str, str]], states: str) -> list[dict[str, Any]]:
    """Load states that other strategies saved, and train on."""
    found = []
    for kind, layout, saved in cases:
        parts = prepare(kind, layout)
        parts["accelerator"].load_state(f"{states}/{saved}-{kind}")
        found.append(train(parts, skip=3))
        parts["accelerator"].free_memory()
    return found
