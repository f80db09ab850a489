"""TrainingArguments: every way to configure a run, what it resolves to, and what it leaves alone."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import FSDPOption

from accel_trainer import Accelerator
from accel_trainer.config import HangConfig
from accel_trainer.errors import ConfigError
from accel_trainer.state import AcceleratorState, PartialState
from accel_trainer.trainer import Seq2SeqTrainingArguments, TrainingArguments
from accel_trainer.utils import FullyShardedDataParallelPlugin
from tests.ranks import RankFailure, run_ranks
from tests.trainer_jobs import ACCELERATE_YAML, build_trainer

pytestmark = pytest.mark.beside_accelerate


def build(tmp_path: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), **options)


def write(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


FLAT = {"transformer_layer_cls_to_wrap": "BertLayer", "state_dict_type": "SHARDED_STATE_DICT", "cpu_offload": True}
NESTED = ACCELERATE_YAML.replace("num_processes: 2\n", "")


def test_every_spelling_of_a_file_gives_the_same_dict(tmp_path):
    prefixed = {f"fsdp_{key}": value for key, value in FLAT.items()}
    spellings = [
        FLAT,
        prefixed,
        json.dumps(FLAT),
        write(tmp_path, "flat.json", json.dumps(FLAT)),
        write(tmp_path, "flat.yaml", "\n".join(f"{key}: {value}" for key, value in FLAT.items())),
        {"distributed_type": "FSDP", "fsdp_config": {**prefixed, "fsdp_version": 2}},
    ]

    given = copy.deepcopy(spellings)
    dicts = [build(tmp_path, fsdp=True, fsdp_config=spelling).fsdp_config for spelling in spellings]

    assert spellings == given  # the caller's are not changed
    assert all(content == dicts[0] for content in dicts)
    assert dicts[0]["transformer_layer_cls_to_wrap"] == ["BertLayer"]
    assert dicts[0]["state_dict_type"] == "SHARDED_STATE_DICT"
    assert dicts[0]["cpu_offload"] is True
    assert dicts[0]["version"] == 2


def test_a_whole_accelerate_file_is_read(tmp_path):
    args = build(tmp_path, fsdp="full_shard", fsdp_config=write(tmp_path, "fsdp.yaml", NESTED))

    assert args.fsdp is True
    assert args.mixed_precision == "bf16"
    assert args.bf16 is False
    assert args.resolved.describe("mixed_precision").endswith("fsdp.yaml:18)")
    assert args.fsdp_config["transformer_layer_cls_to_wrap"] == ["BertLayer"]
    assert args.fsdp_config["cpu_ram_efficient_loading"] is True
    assert any("use_orig_params" in note and "sync_module_states" in note for note in args.resolved.notes)


@pytest.mark.parametrize(
    ("fsdp", "fsdp_config", "reshards", "offloads"),
    [
        (True, None, True, False),
        ("True", None, True, False),
        ("full_shard", None, True, False),
        ("full_shard auto_wrap", None, True, False),
        ("shard_grad_op offload", None, False, True),
        (["shard_grad_op"], None, False, False),
        ([FSDPOption.FULL_SHARD, FSDPOption.OFFLOAD], None, True, True),
        (True, "full_shard", True, False),  # the name of a packaged file
        ("full_shard offload", {"reshard_after_forward": False}, False, True),  # the word fills what the file leaves
    ],
)
def test_upstreams_option_words(tmp_path, fsdp, fsdp_config, reshards, offloads):
    args = build(tmp_path, fsdp=fsdp, fsdp_config=fsdp_config)
    config = args.resolved.config

    assert (args.fsdp, config.strategy) == (True, "fsdp2")
    assert config.fsdp.reshard_after_forward is args.fsdp_config["reshard_after_forward"] is reshards
    assert config.fsdp.offload_params is args.fsdp_config["cpu_offload"] is offloads


@pytest.mark.parametrize("given_as", ["file", "flags", "variables"])
def test_option_words_win_over_what_the_launcher_brings(tmp_path, monkeypatch, given_as):
    flags = {"fsdp.offload_params": False, "fsdp.reshard_after_forward": True}
    file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False}}
    if given_as == "variables":
        monkeypatch.setenv("ACCEL_TRAINER_FSDP__OFFLOAD_PARAMS", "false")
    else:
        path = write(tmp_path, "launched.yaml", json.dumps(file))
        launched = {"config_file": path} if given_as == "file" else {"flags": flags}
        monkeypatch.setenv("ACCEL_TRAINER_LAUNCH", json.dumps(launched))
    resolved = build(tmp_path, fsdp="shard_grad_op offload").resolved

    for described in ("fsdp.offload_params=true", "fsdp.reshard_after_forward=false"):
        path = described.partition("=")[0]
        assert resolved.describe(path) == f"{described} (from TrainingArguments(fsdp=...))"


def test_without_sharding_it_is_plain_data_parallel(tmp_path):
    args = build(tmp_path, fsdp="no_shard")

    assert (args.fsdp, args.resolved.config.strategy) == (False, "ddp")


@pytest.mark.parametrize("as_file", [False, True])
def test_a_file_that_shards_nothing_is_data_parallel_too(tmp_path, as_file):
    given: Any = {"sharding_strategy": "NO_SHARD"}
    if as_file:
        given = tmp_path / "accelerate.yaml"
        given.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD, fsdp_version: 1}\n")
    assert build(tmp_path, fsdp=True, fsdp_config=given).resolved.config.strategy == "ddp"
    assert (
        build(tmp_path, fsdp=True, fsdp_config={"sharding_strategy": "FULL_SHARD"}).resolved.config.strategy == "fsdp2"
    )


def read_back(tmp_path: Path) -> tuple[bool, bool]:
    args = build(tmp_path, fsdp="hybrid_shard", use_cpu=True)
    again = dataclasses.replace(args)
    return args.resolved.config.fsdp.replicate_per_node, again.resolved.config == args.resolved.config


def test_hybrid_sharding_reads_back_and_is_refused_on_one_process(tmp_path):
    assert run_ranks(read_back, 2, tmp_path) == [(True, True)] * 2
    with pytest.raises(ConfigError, match="hybrid sharding with a replica on each node, and this job has one process"):
        build(tmp_path, fsdp="hybrid_shard")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": "full_shart"}, "full_shart.*did you mean 'full_shard'"),
        (
            {"fsdp": True, "fsdp_config": {"state_dict_typ": "x"}},
            "unknown key 'state_dict_typ'.*did you mean 'state_dict_type'",
        ),
        ({"fsdp": True, "fsdp_config": "no/such/file.yaml"}, "no/such/file.yaml"),
        ({"fsdp": True, "fsdp_config": "{not json"}, "fsdp_config is not valid JSON"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "there is no XLA strategy"),
        ({"eval_loss_weighting": "samples"}, "eval_loss_weighting='samples' is neither 'token' nor 'batch'"),
        ({"verify": "no"}, "verify='no'; expected 'full' .contents., 'size' .lengths. or 'off'"),
        ({"on_save_error": "wait"}, "on_save_error='wait'; expected one of raise, warn, pause"),
        ({"parallelism_config": object()}, "parallelism_config is a object; pass a ParallelismConfig, or a mapping"),
        ({"parallelism_config": {"tp_sise": 2}}, "parallelism_config has the unknown key 'tp_sise'.*'tp_size'"),
        (
            {"parallelism_config": {"dp_replicate_size": 2}},
            r"dp_replicate_size=2 .*makes 2 process\(es\), and .* has 1",
        ),
        ({"parallelism_config": '{"cp_size": 2}'}, r"cp_size=2 .*makes 2 process\(es\), and .* has 1"),
        ({"parallelism_config": "{tp_size: 1}"}, "parallelism_config is no valid JSON"),
        ({"parallelism_config": {"tp_size": "1"}}, "tp_size must be at least 1, but got '1'"),
        ({"accelerator_config": "{"}, "accelerator_config is not valid JSON"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batc": True}}},
            "unknown key 'sync_each_batc'; did you mean 'sync_each_batch'",
        ),
        ({"accelerator_config": {"gradient_accumulation_kwargs": "x"}}, "_kwargs='x'; give a mapping with some of"),
        ({"accelerator_config": {"even_batchs": True}}, "accelerator_config.*even_batchs.*did you mean 'even_batches'"),
        (
            {"accelerator_config": {"even_batches": "x"}},
            r"TrainingArguments\(accelerator_config.even_batches=...\) is 'x'; expected true or false",
        ),
        ({"use_cpu": 3}, r"TrainingArguments\(use_cpu=...\) is 3; expected true or false"),
        ({"ddp_timeout": -3}, r"TrainingArguments\(ddp_timeout=...\) is -3; expected a positive number of seconds"),
        ({"torch_compile_mode": "slow"}, r"TrainingArguments\(torch_compile_mode=...\) is 'slow'; expected one of"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **options)


@pytest.mark.parametrize(
    ("given", "option", "argument"),
    [
        ({"bf16": True}, "mixed_precision", "bf16"),
        ({"fp16": True}, "mixed_precision", "fp16"),
        ({"fsdp": True}, "strategy", "fsdp"),
        ({"fsdp": "full_shard offload"}, "fsdp.offload_params", "fsdp"),
        ({"torch_compile": True}, "compile.backend", "torch_compile_backend"),
        ({"data_seed": 3}, "data.data_seed", "data_seed"),
    ],
)
def test_an_option_that_was_given_is_named_by_its_argument(tmp_path, given, option, argument):
    assert build(tmp_path, **given).resolved.source(option).where == f"TrainingArguments({argument}=...)"


@pytest.mark.parametrize(
    ("given", "even"),
    [
        (None, False),
        ({"non_blocking": True}, False),
        ({"even_batches": True, "split_batches": False}, True),  # upstream's default, and not ours
        ({"even_batches": False, "split_batches": True}, False),
    ],
)
def test_batches_are_even_where_that_is_asked_for_and_arguments_read_back(tmp_path, given, even):
    args = build(tmp_path, accelerator_config=given)
    data = args.resolved.config.data

    assert (data.even_batches, data.split_batches) == (even, (given or {}).get("split_batches", False))
    for form in (args.to_dict()["accelerator_config"], args.accelerator_config, copy.deepcopy(args.accelerator_config)):
        assert build(tmp_path, accelerator_config=form).resolved.config.data == data


def test_arguments_made_of_others_take_what_was_given_to_those_and_leave_the_rest_open(tmp_path):
    given = build(tmp_path, accelerator_config={"even_batches": True})
    assigned = build(tmp_path)
    assigned.accelerator_config.even_batches = True  # in place, as TRL does
    filed = build(tmp_path, fsdp=True, fsdp_config={**OWN, "data": {"even_batches": True}})
    for args in (given, assigned, filed):
        again = dataclasses.replace(args, learning_rate=1e-3)
        assert again.resolved.describe("data.even_batches").startswith("data.even_batches=true (from")
    as_upstream = dataclasses.replace(build(tmp_path), compat="transformers")
    assert as_upstream.resolved.config.data.even_batches is True
    assert dataclasses.replace(as_upstream, compat="none").resolved.config.data.even_batches is False


def test_fsdp_config_alone_says_that_it_is_not_read(tmp_path, caplog):
    args = build(tmp_path, fsdp_config=FLAT)

    assert args.resolved.config.strategy == "auto"
    assert "fsdp_config is not read because fsdp is not set" in caplog.text


@pytest.mark.parametrize("name", ["fsdp.yaml", "fsdp_config"])
def test_a_file_for_another_number_of_processes(tmp_path, monkeypatch, name):
    write(tmp_path, name, ACCELERATE_YAML)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(
        ConfigError, match=rf"num_processes=2 \(from {name}:20\), and 1 process.*launch --num_processes 2"
    ):
        build(tmp_path, fsdp=True, fsdp_config=name)


def build_on_rank(output_dir: str, own_group_seconds: int | None = None, **options: Any) -> dict[str, Any]:
    if own_group_seconds is not None:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=own_group_seconds))
    args = TrainingArguments(output_dir=output_dir, **options)
    buffer = io.BytesIO()
    torch.save(args, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    group = torch.distributed.distributed_c10d._get_default_group()
    return {
        "timeout": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        "rank": loaded.process_index,
        "world_size": loaded.world_size,
        "mode": str(loaded.parallel_mode),
        "type": str(args.distributed_state.distributed_type),
        "n_gpu": args.n_gpu,
        "should_save": args.should_save,
    }


@pytest.mark.multirank
def test_three_ranks_with_a_file_for_two(tmp_path):
    path = write(tmp_path, "fsdp.yaml", ACCELERATE_YAML)

    with pytest.raises(RankFailure, match=r"num_processes=2 .*and 3 process.*launch --num_processes 2") as failure:
        run_ranks(build_on_rank, 3, str(tmp_path), fsdp=True, fsdp_config=path)
    assert len(failure.value.failures) == 3


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("options", "seconds"), [({"use_cpu": True, "ddp_timeout": 17}, 17), ({"own_group_seconds": 7200}, 7200)]
)
def test_a_timeout_that_was_asked_for_reaches_the_group_on_the_cpu(tmp_path, options, seconds):
    for rank, seen in enumerate(run_ranks(build_on_rank, 2, str(tmp_path), **options)):
        assert seen == {
            "timeout": seconds, "rank": rank, "world_size": 2, "mode": "ParallelMode.DISTRIBUTED",
            "type": "DistributedType.MULTI_CPU", "n_gpu": 0, "should_save": rank == 0,
        }  # fmt: skip


def test_explicit_precision_wins_over_the_file(tmp_path):
    path = write(tmp_path, "fsdp.yaml", NESTED.replace("mixed_precision: bf16", "mixed_precision: fp16"))

    assert build(tmp_path, fsdp=True, fsdp_config=path).mixed_precision == "fp16"
    assert build(tmp_path, fsdp=True, fsdp_config=path, bf16=True).mixed_precision == "bf16"


def test_the_launchers_precision_and_accumulation_are_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")

    assert build(tmp_path).mixed_precision == "bf16"
    assert build(tmp_path).gradient_accumulation_steps == 4
    assert build(tmp_path, gradient_accumulation_steps=2).gradient_accumulation_steps == 2


def test_the_micro_batch_of_a_file_is_taken_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_TRAINER_ACCUMULATION__MICRO_BATCH_SIZE", "3")
    args = build(tmp_path)
    assert (args.per_device_train_batch_size, args.train_batch_size) == (3, 3)
    assert build(tmp_path, per_device_train_batch_size=5).per_device_train_batch_size == 5


def test_the_file_can_choose_the_cpu(tmp_path):
    path = write(tmp_path, "fsdp.yaml", NESTED.replace("use_cpu: false", "use_cpu: true"))

    args = build(tmp_path, fsdp=True, fsdp_config=path)

    assert (args.use_cpu, args.device) == (True, torch.device("cpu"))


def test_bf16_needs_no_further_argument_on_a_machine_without_accelerator(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")

    assert build(tmp_path, bf16=True).mixed_precision == "bf16"
    assert build(tmp_path).use_cpu is False


def test_arguments_survive_copies_files_and_pickles(tmp_path):
    args = build(tmp_path, fsdp="full_shard", fsdp_config=write(tmp_path, "fsdp.yaml", NESTED), learning_rate=2e-5)
    torch.save(args, tmp_path / "training_args.bin")

    copies = [
        copy.deepcopy(args),
        dataclasses.replace(args, learning_rate=2e-5),
        TrainingArguments(**args.to_dict()),
        TrainingArguments(**json.loads(args.to_json_string())),
        torch.load(tmp_path / "training_args.bin", weights_only=False),
    ]

    for other in copies:
        assert other.fsdp_config == args.fsdp_config
        assert other.mixed_precision == "bf16"
        assert other.resolved.config == dataclasses.replace(args.resolved.config, launch=other.resolved.config.launch)
        assert other.device == args.device


OWN = {
    "strategy": "fsdp2",
    "mixed_precision": "bf16",
    "ema_decay": 0.9,
    "activation_checkpointing": "selective",
    "fsdp": {"wrap_classes": ["BertLayer"], "backward_prefetch": False},
    "accumulation": {"num_steps": 4},
    "data": {"even_batches": False},
    "hang": {"step_seconds": 120.0},
    "timeout_seconds": 77,
}


@pytest.mark.parametrize("as_file", [False, True])
def test_what_a_file_of_ours_says_besides_fsdp_survives_copies(tmp_path, as_file):
    args = build(tmp_path, fsdp=True, fsdp_config=write(tmp_path, "own.json", json.dumps(OWN)) if as_file else OWN)

    copies = [
        dataclasses.replace(args),
        TrainingArguments(**json.loads(args.to_json_string())),
        build(tmp_path, fsdp=True, fsdp_config=json.dumps(args.fsdp_config), gradient_accumulation_steps=4),
    ]

    assert args.resolved.config.timeout_seconds == 77
    assert args.resolved.config.fsdp.backward_prefetch is False
    for other in copies[:2]:
        assert other.fsdp_config == args.fsdp_config
        # The number of micro-batches has a field of its own.
        assert other.gradient_accumulation_steps == args.gradient_accumulation_steps == 4
        assert dataclasses.replace(other.resolved.config, accumulation=args.resolved.config.accumulation) == (
            args.resolved.config
        )
    assert copies[2].resolved.config.hang == args.resolved.config.hang != HangConfig()
    # It can be set back to its default.
    again = dataclasses.replace(args, gradient_accumulation_steps=1)
    assert (again.gradient_accumulation_steps, again.resolved.config.ema_decay) == (1, 0.9)
    changed = dataclasses.replace(args, fsdp_config={**args.fsdp_config, "forward_prefetch": True})
    assert (changed.resolved.config.fsdp.forward_prefetch, changed.resolved.config.timeout_seconds) == (True, 77)


def test_serialised_forms_hide_tokens_and_hold_plain_values(tmp_path):
    args = build(tmp_path, hub_token="secret", accelerator_config={"even_batches": False})

    assert "secret" not in args.to_json_string() + str(args) + repr(args) + str(args.to_sanitized_dict())
    assert args.to_dict()["accelerator_config"]["even_batches"] is False
    assert {type(value) for value in args.to_sanitized_dict().values()} <= {bool, int, float, str, torch.Tensor}


def test_compile_options_do_not_leak_into_the_environment(tmp_path):
    before = dict(os.environ)

    args = build(tmp_path, torch_compile_backend="eager", torch_compile_mode="reduce-overhead")

    assert dict(os.environ) == before
    assert args.torch_compile is True
    assert args.resolved.config.compile.backend == "eager"
    assert args.resolved.config.compile.mode == "reduce-overhead"
    assert build(tmp_path, torch_compile=True).torch_compile_backend == "inductor"


@pytest.mark.parametrize("form", ["dict", "text", "file", "instance"])
def test_accelerator_config_in_every_form(tmp_path, form):
    content = {"split_batches": True, "even_batches": False}
    given = {
        "dict": content,
        "text": json.dumps(content),
        "file": write(tmp_path, "config.json", json.dumps(content)),
        "instance": AcceleratorConfig(**content),
    }[form]

    data = build(tmp_path, accelerator_config=given).resolved.config.data

    assert (data.split_batches, data.even_batches) == (True, False)


def test_a_class_is_no_accelerator_config(tmp_path):
    with pytest.raises(NotImplementedError, match=r"Tried passing in a callable to `accelerator_config`"):
        build(tmp_path, accelerator_config=AcceleratorConfig)


CONFIGURED = {"accelerator_config": {"use_configured_state": True}}


@pytest.fixture
def no_state() -> Iterator[None]:
    """A process without a state, as a script begins."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_configured_state_must_exist(tmp_path, no_state):
    with pytest.raises(ValueError, match=r"requires a pre-configured .*this process has none; make a PartialState"):
        build(tmp_path, **CONFIGURED)


@pytest.mark.parametrize("make", [PartialState, Accelerator, lambda: TrainingArguments(output_dir="unused")])
def test_whatever_made_a_state_has_configured_it(tmp_path, no_state, make):
    made = make()

    args = build(tmp_path, **CONFIGURED)

    assert args.distributed_state.process == PartialState().process
    assert args.resolved.config.mixed_precision == "no"
    assert dataclasses.replace(args).resolved.config == args.resolved.config
    del made


def test_a_configured_state_keeps_its_precision(tmp_path, no_state):
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)

    assert build(tmp_path, **CONFIGURED).mixed_precision == "bf16"
    assert build(tmp_path, **CONFIGURED, bf16=True).mixed_precision == "bf16"
    assert build(tmp_path).mixed_precision == "no"
    with pytest.raises(ConfigError, match=r"mixed_precision=bf16, and mixed_precision=fp16 \(from Train.*give both"):
        build(tmp_path, **CONFIGURED, fp16=True)
    del accelerator


def build_on_a_state(output_dir: str) -> dict[str, Any]:
    state = PartialState(cpu=True, timeout_seconds=77)
    args = TrainingArguments(output_dir=output_dir, **CONFIGURED)
    group = torch.distributed.distributed_c10d._get_default_group()
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), cpu=True)
    with pytest.raises(ConfigError, match=r"an Accelerator that runs FSDP, and the arguments ask for strategy 'ddp'"):
        build_trainer(output_dir, **CONFIGURED)
    trained = build_trainer(output_dir, strategy="fsdp", **CONFIGURED).train().global_step
    del accelerator
    return {
        "is_one": args.distributed_state.process == state.process,
        "timeout": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        "steps": trained,
    }


@pytest.mark.multirank
def test_a_configured_state_on_two_ranks(tmp_path):
    for seen in run_ranks(build_on_a_state, 2, str(tmp_path)):
        assert seen == {"is_one": True, "timeout": 77, "steps": 4}


def test_seq2seq_arguments_are_arguments(tmp_path):
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), predict_with_generate=True, generation_max_length=7)

    assert isinstance(args, TrainingArguments)
    assert isinstance(args, transformers.Seq2SeqTrainingArguments)
    assert args.to_dict()["generation_max_length"] == 7


def test_the_command_line_parser_of_transformers_reads_them(tmp_path):
    parser = transformers.HfArgumentParser(TrainingArguments)

    given = f"--output_dir {tmp_path} --fsdp full_shard --eval_loss_weighting batch --on_save_error pause"
    (args,) = parser.parse_args_into_dataclasses(given.split(), look_for_args_file=False)

    assert args.fsdp is True
    assert args.eval_loss_weighting == "batch"
    assert (args.save_policy.on_save_error, args.save_policy.max_pause_s) == ("pause", 3600.0)
