"""A sharded model gets its values from where they are: every rank's memory, rank 0's, or files read in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer.checkpoint.weights.into_model import LoadReport, load_checkpoint_in_model
from accel_trainer.checkpoint.weights.weight_files import WeightFiles, save_weights
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, ProcessGroupError
from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.sharded import adamw, build, full, own_rows, train_alone

preload("accel_trainer.accelerator", "transformers.models.auto.modeling_auto")


def accelerate(**options: Any) -> Any:
    from accel_trainer import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"], **options)
    return Accelerator(cpu=True, strategy="fsdp2", fsdp_plugin=plugin)


def train(accelerator: Any, model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = [
        accelerator.reduce(take_update(model(own_rows()), optimizer, accelerator), "mean").item() for _ in range(steps)
    ]
    return losses


def empty() -> nn.Module:
    from accel_trainer import init_empty_weights

    with init_empty_weights():
        return build()


def refused(call: Any, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# --- from files ----------------------------------------------------------------------------------------------------


def load_from_files(folder: str) -> dict[str, Any]:
    accelerator = accelerate()
    model = empty()
    model, optimizer = accelerator.prepare(model, adamw(model))
    found: dict[str, Any] = {"refused": refused(lambda: model(own_rows()))}
    read = []
    original = WeightFiles.fill
    WeightFiles.fill = lambda self, name, index, to: read.append((name, index)) or original(self, name, index, to)
    try:
        found["report"] = load_checkpoint_in_model(model, folder)
    finally:
        WeightFiles.fill = original
    found["rows"] = {name: index[0].stop - index[0].start for name, index in read}
    found["held"] = sum(p.to_local().numel() for p in model.parameters())
    found["losses"] = train(accelerator, model, optimizer)
    accelerator.save_state(Path(folder, "state"))
    found["next"] = train(accelerator, model, optimizer)
    # Another one, straight from the state.
    model = empty()
    accelerator = accelerate()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.load_state(Path(folder, "state"))
    found["resumed"] = train(accelerator, model, optimizer)
    return found


def test_a_model_without_values_is_laid_out_first_and_each_rank_reads_its_slices(tmp_path: Path):
    save_weights(build().state_dict(), tmp_path, "300B")
    reference = train_alone(build(), 3)
    results = run_ranks(load_from_files, 2, str(tmp_path))
    for found in results:
        assert "10 parameter(s) and buffer(s) of FSDPNet have no values yet (first: 'stem.weight')" in found["refused"]
        assert "load_checkpoint_in_model(model, directory) before it runs" in found["refused"]
        assert found["report"] == LoadReport([], [], [])
        assert found["losses"] == pytest.approx(reference, abs=1e-6)
        assert found["resumed"] == found["next"]
        assert found["rows"]["stem.weight"] == 4, "half of 8 rows"
    assert [found["held"] for found in results] == [sum(p.numel() for p in build().parameters()) // 2] * 2


def load_what_rank_zero_sees(folder: str) -> list[Any]:
    accelerator = accelerate()
    model = accelerator.prepare(empty())
    there = folder if accelerator.is_main_process else f"{folder}/not-mounted-here"
    load_checkpoint_in_model(model, there, broadcast_from_rank0=True)
    gone = refused(
        lambda: load_checkpoint_in_model(model, f"{folder}/gone", broadcast_from_rank0=True), CheckpointNotFoundError
    )
    return [gone, {name: full(p) for name, p in model.named_parameters()}]


def test_files_that_only_rank_zero_sees_are_sent_tensor_by_tensor(tmp_path: Path):
    save_weights(build().state_dict(), tmp_path, "300B")
    for message, loaded in run_ranks(load_what_rank_zero_sees, 2, str(tmp_path)):
        assert "gone; expected a directory or a file of weights" in message
        assert all(torch.equal(loaded[name], tensor) for name, tensor in build().state_dict().items())


def transformer(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    options = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=32, max_position_embeddings=16, pad_token_id=0, **options)
    return AutoModelForSequenceClassification.from_config(config).eval()


def load_transformer(kind: str, folder: str) -> tuple[Any, ...]:
    """Lay out a model of which everything is on meta, load it without its head, and run it."""
    from accel_trainer import Accelerator, init_empty_weights

    accelerator = Accelerator(cpu=True, strategy="fsdp2" if torch.distributed.is_torchelastic_launched() else None)
    with init_empty_weights(include_buffers=True):
        model = transformer(kind)
    if accelerator.num_processes > 1:
        model = accelerator.prepare(model)
    torch.manual_seed(5 + accelerator.process_index)
    report = load_checkpoint_in_model(model, folder, init_missing=True)
    head = next(p for name, p in model.named_parameters() if name.endswith(("classifier.weight", "score.weight")))
    with torch.no_grad():
        return report, full(head), model(torch.arange(1, 9)[None]).logits


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_computed_buffers_and_new_heads_are_the_same_on_any_number_of_ranks(tmp_path: Path, kind: str):
    torch.manual_seed(0)
    state = transformer(kind).state_dict()
    heads = [name for name in state if name.startswith(("classifier", "score"))]
    save_weights({name: tensor for name, tensor in state.items() if name not in heads}, tmp_path)
    (alone,) = run_ranks(load_transformer, 1, kind, str(tmp_path), env={"TORCHELASTIC_RUN_ID": None})
    assert alone[0] == LoadReport(heads, [], [])
    for report, head, logits in run_ranks(load_transformer, 2, kind, str(tmp_path), env={"TORCHELASTIC_RUN_ID": "t"}):
        assert report == alone[0]
        assert torch.equal(head, alone[1])
        assert torch.allclose(logits, alone[2], atol=1e-6)


# --- from rank 0 ---------------------------------------------------------------------------------------------------


def only_rank_zero_has_values(options: dict[str, Any]) -> Any:
    accelerator = accelerate(**options)
    model = build() if accelerator.is_main_process else empty()
    optimizer = adamw(model)
    if not accelerator.config.fsdp.cpu_ram_efficient_loading:
        kind = ProcessGroupError if accelerator.is_main_process else ConfigError
        return refused(lambda: accelerator.prepare(model, optimizer), kind)
    model, optimizer = accelerator.prepare(model, optimizer)
    return train(accelerator, model, optimizer), accelerator.unwrap_model(model).stem.weight.to_local().shape[0]


@pytest.mark.parametrize(
    ("options", "env"),
    [
        ({"cpu_ram_efficient_loading": True}, {}),
        ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}),
        ({"cpu_ram_efficient_loading": True, "ignored_modules": ["head"]}, {}),
        ({"cpu_ram_efficient_loading": True, "cpu_offload": True}, {}),
    ],
)
def test_values_of_rank_zero_alone_reach_every_rank(options: dict[str, Any], env: dict[str, str]):
    reference = train_alone(build())
    for losses, rows in run_ranks(only_rank_zero_has_values, 2, options, env=env):
        assert losses == pytest.approx(reference, abs=1e-6)
        assert rows == 4


def test_ranks_without_values_are_refused_unless_it_is_asked_for():
    told = run_ranks(only_rank_zero_has_values, 2, {})
    assert "'stem.weight' of Net is on the meta device on rank 1 and has values on rank 0" in told[1]
    assert "or, with fsdp.cpu_ram_efficient_loading=true, on rank 0 alone" in told[1]
    assert "rank 1 failed in comparison of Net over the ranks: " in told[0]


# --- from every rank's memory --------------------------------------------------------------------------------------


def compare(case: str) -> Any:
    from accel_trainer.runtime.process import init_process, read_environment
    from accel_trainer.strategies.broadcast_values import broadcast_differing, compare_values

    process = init_process(read_environment(), use_cpu=True)
    model = build()
    model.register_buffer("late", torch.arange(70_000, dtype=torch.int16))
    if case == "other head" and process.rank == 1:
        with torch.no_grad():
            model.head.weight[1, 7] += 1e-7
            model.late[:2] = model.late[:2].flip(0)
    elif case == "other shape" and process.rank == 1:
        model.head = nn.Linear(8, 3)
    elif case == "extra" and process.rank == 1:
        model.other = nn.Linear(1, 1)
    elif case == "rank 0 has none" and process.rank == 0:
        model.stem.weight = nn.Parameter(model.stem.weight.to("meta"))
    try:
        values = compare_values(model, process, may_await=True)
    except (ConfigError, ProcessGroupError) as error:
        return str(error)
    broadcast_differing(model, values, process.device)
    same = torch.equal(model.head.weight, build().head.weight) and model.late[0] == 0
    return values.differing, values.awaited, values.empty, bool(same)


def test_what_ranks_have_alike_is_sent_nowhere():
    assert run_ranks(compare, 2, "equal") == [([], [], [], True)] * 2


def test_what_differs_is_sent_and_nothing_else():
    assert run_ranks(compare, 2, "other head") == [(["head.weight", "late"], [], [], True)] * 2


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "other shape",
            "'head.weight' is (3, 8) in torch.float32 here and (2, 8) in torch.float32 there; build",
        ),
        ("extra", "'other.weight' is (1, 1) in torch.float32 here and absent there"),
        ("rank 0 has none", "'stem.weight' of Net is on the meta device on rank 0 and has values on rank 1; give it"),
    ],
)
def test_other_models_are_refused_on_every_rank(case: str, message: str):
    told = run_ranks(compare, 2, case)
    assert message in told[1]
    assert "rank 1 failed in comparison of Net over the ranks" in told[0]


def wide(num_layers: int = 12) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)))


def load_wide(folder: str) -> float:
    """Load 48 MiB over two ranks; return by how many MiB this rank's own memory rose at most."""
    from accel_trainer import Accelerator, init_empty_weights

    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    accelerator.prepare(wide(1))
    with init_empty_weights():
        model = wide()

    def anonymous() -> float:
        return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024

    before = anonymous()
    model = accelerator.prepare(model)
    load_checkpoint_in_model(model, folder)
    return anonymous() - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from Linux's /proc")
def test_a_rank_takes_memory_for_its_shard_only(tmp_path: Path):
    save_weights(wide().state_dict(), tmp_path)
    # Its shard is 24 MiB; some of that may lie in memory that was free already, and a layer on the way takes 4.
    assert all(16 < rise < 36 for rise in run_ranks(load_wide, 2, str(tmp_path)))
