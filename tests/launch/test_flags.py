"""Flags: every option has one, both dashes, accelerate's spellings, and where the script begins."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from accel_trainer.config import field_specs, resolve
from accel_trainer.config.schema import get_value
from accel_trainer.errors import ConfigError
from accel_trainer.launch.flags import Options, launch_flags, options_parser, parse_options

# Frozen: a flag that disappears from here breaks somebody's command line.
FLAGS = """
accumulation_keep_global_batch accumulation_loss_division accumulation_micro_batch_size accumulation_sync_each_batch
accumulation_sync_with_dataloader activation_checkpointing activation_offload as_accelerate checkpoint_mib_per_second
checkpoint_uri compat compile_backend compile_dynamic compile_fullgraph compile_mode compile_regional config_file cpu
data_data_seed data_dispatch_batches data_even_batches data_non_blocking data_pin_memory data_prefetch_to_device
data_split_batches data_use_seedable_sampler data_use_stateful_dataloader dataset_mixture ddp_broadcast_buffers
ddp_bucket_cap_mb ddp_find_unused_parameters ddp_gradient_as_bucket_view ddp_static_graph debug deepspeed_config_file
deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter deepspeed_moe_layer_cls_names
deepspeed_multinode_launcher dry_run dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph
dynamo_use_regional_compilation ema_decay enable_cpu_affinity fp8_backend fp8_emulate
fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim fsdp_activation_checkpointing fsdp_backward_prefetch
fsdp_cpu_ram_efficient_loading fsdp_forward_prefetch fsdp_ignored_modules fsdp_min_num_params fsdp_offload_params
fsdp_replicate_per_node fsdp_replicate_size fsdp_reshard_after_forward fsdp_state_dict_type fsdp_wrap_classes
fsdp_wrap_policy gpu_ids gradient_accumulation_steps gradient_clipping hang_evaluation_seconds hang_save_seconds
hang_startup_seconds hang_step_seconds hang_user_seconds image local_steps local_steps_after log_dir loss
loss_chunk_tokens m machine_rank main_process_ip main_process_port main_training_function max_restarts max_rollbacks
meters min_machines min_processes mixed_precision module monitor_interval multi_gpu no_python
num_cpu_threads_per_process num_machines num_processes offload_optimizer_device offload_optimizer_nvme_path
offload_param_device offload_param_nvme_path on_changed_run on_nonfinite on_rank_loss optimizer_in_backward
outer_optimizer_lr outer_optimizer_momentum outer_optimizer_nesterov output_dtype parallel_cp_comm_strategy
parallel_cp_size parallel_dp_replicate_size parallel_dp_shard_size parallel_ep_size parallel_loss_parallel
parallel_sp_size parallel_tp_plan parallel_tp_size parallelism_config_cp_comm_strategy parallelism_config_cp_size
parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_ep_size
parallelism_config_sp_size parallelism_config_tp_size peak_flops preemption_grace_seconds preemption_signals print q
quiet rdzv_backend rdzv_conf resources role same_network save_async scheduler_steps secret slow_rank_updates strategy
submit t tee timeout_seconds use_cpu use_deepspeed use_fsdp use_parallelism_config volume zero3_init_flag
zero3_save_16bit_model zero_stage
"""


def parse(*words: str) -> Options:
    return parse_options(words, "accel-trainer launch")


def test_the_flags_are_these() -> None:
    assert sorted(launch_flags()) == FLAGS.split()


def test_every_option_has_a_flag_with_a_line_of_help() -> None:
    flags = {flag.path: flag for flag in launch_flags().values() if flag.preset is None}
    assert set(flags) - {None, "parallelism_config"} == set(field_specs())
    assert all(flag.help for flag in flags.values())
    text = options_parser("usage", "description").format_help()
    assert "--fsdp_wrap_classes A,B" in text
    assert "{no,bf16,fp16,fp8}" in text


def test_flags_of_every_type_reach_the_configuration() -> None:
    words = (
        "--mixed-precision=bf16 --num_processes 2 --monitor_interval 0.5 --fsdp_wrap_classes A,B --debug --cpu false"
    )
    config = resolve(flags=parse(*shlex.split(words)).flags).config
    assert config.mixed_precision == "bf16"
    assert config.launch.num_processes == 2
    assert config.launch.monitor_interval_seconds == 0.5
    assert config.fsdp.wrap_classes == ("A", "B")
    assert config.debug
    assert not config.use_cpu


@pytest.mark.parametrize(
    ("words", "options"),
    [
        pytest.param("--num_processes 4", Options(flags={"launch.num_processes": "4"}), id="underscores"),
        pytest.param(
            "--num-processes=4", Options(flags={"launch.num_processes": "4"}), id="dashes, and an equals sign"
        ),
        pytest.param(
            "--main_process_port -1", Options(flags={"launch.main_process_port": "-1"}), id="a value with a dash"
        ),
        pytest.param("--cpu", Options(flags={"use_cpu": True}), id="a switch alone"),
        pytest.param("--cpu False", Options(flags={"use_cpu": "False"}), id="a switch with its value"),
        pytest.param(
            "--use_fsdp",
            Options(flags={"strategy": "fsdp2"}, spelled={"strategy": "--use_fsdp"}),
            id="a switch that stands for a strategy",
        ),
        pytest.param("--use_fsdp=false", Options(flags={}), id="and says no"),
        pytest.param("-m", Options(module=True), id="a module"),
        pytest.param("--no_python", Options(no_python=True), id="a program"),
    ],
)
def test_words_before_the_script_are_ours_and_everything_behind_it_is_the_scripts(words: str, options: Options) -> None:
    options.rest = ("train.py", "--num_processes", "9", "--", "--cpu", "-m", "--unknown=1")
    assert parse(*words.split(), *options.rest) == options


def test_two_dashes_end_our_options() -> None:
    assert parse("--cpu", "--", "-odd-name.py", "--", "x").rest == ("-odd-name.py", "--", "x")


@pytest.mark.parametrize(("word", "value"), [("no", False), ("False", False), ("true", True)])
def test_a_switch_takes_true_and_false(word: str, value: bool) -> None:
    assert resolve(flags=parse(f"--cpu={word}").flags).config.use_cpu is value


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("--fsdp_reshard_after_forward SHARD_GRAD_OP", "fsdp.reshard_after_forward", False),
        ("--fsdp_reshard_after_forward full_shard", "fsdp.reshard_after_forward", True),
        ("--fsdp_reshard_after_forward=SHARD_GRAD_OP", "fsdp.reshard_after_forward", False),
        ("--fsdp_reshard_after_forward no", "fsdp.reshard_after_forward", False),
        ("--fsdp_reshard_after_forward", "fsdp.reshard_after_forward", True),
        ("--fsdp_offload_params 1", "fsdp.offload_params", True),
        ("--fsdp_offload_params no", "fsdp.offload_params", False),
    ],
)
def test_a_switch_takes_what_accelerate_takes_where_it_has_a_value_there(words: str, path: str, value: bool) -> None:
    options = parse("--use_fsdp", *words.split(), "train.py")
    assert options.rest == ("train.py",)
    assert get_value(resolve(flags=options.flags).config, path) is value
    options_parser(None, "").parse_args(["--use_fsdp", *words.split()])  # as other libraries parse them


_UNKNOWN = "unknown option '{}' of accel-trainer launch; did you mean '--{}'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--debug=maybe", "--debug is 'maybe'; expected true or false"),
        ("--debug maybe train.py", "--debug is 'maybe'; expected true or false, or a script behind it, and there is"),
        ("--fsdp_reshard_after_forward maybe train.py", "--fsdp_reshard_after_forward is 'maybe'; expected true or"),
        ("--zero3_init_flag maybe train.py", "--zero3_init_flag is 'maybe'; expected true or false"),
        ("--mixed_presision 2 train.py", _UNKNOWN.format("--mixed_presision", "mixed_precision")),
        ("--num-proces 2 train.py", _UNKNOWN.format("--num-proces", "num_processes")),
        ("--fsdp_wrap_clases 2 train.py", _UNKNOWN.format("--fsdp_wrap_clases", "fsdp_wrap_classes")),
        ("-num_processes 2 train.py", _UNKNOWN.format("-num_processes", "num_processes")),
        ("--zzz train.py", r"there is none like it\. Options of the script stand behind"),
        ("--num_processes", "option --num_processes of accel-trainer launch needs a value"),
        ("--num_processes --cpu train.py", "option --num_processes of accel-trainer launch needs a value"),
        ("--use_fsdp --multi_gpu", "--multi_gpu asks for strategy 'ddp', and another option for 'fsdp2'"),
        (
            "--fsdp_auto_wrap_policy LAYERS",
            "--fsdp_auto_wrap_policy is 'LAYERS'; expected one of TRANSFORMER_BASED_WRAP",
        ),
        (
            "--use_fsdp --fsdp_version 1 --parallel_tp_size 2",
            "--fsdp_version is 1, and --parallel_tp_size: FSDP1 has no",
        ),
        (
            "--use_fsdp --fsdp_reshard_after_forward false --fsdp_sharding_strategy FULL_SHARD",
            "--fsdp_sharding_strategy contradicts --fsdp_reshard_after_forward: they set fsdp.reshard_after_forward to "
            "true and to 'false'; keep one of the two",
        ),
        (
            "--parallel_tp_size 2 --parallelism_config_tp_size 4",
            "--parallelism_config_tp_size contradicts --parallel_tp_size: they set parallel.tp_size to 4 and to '2'",
        ),
        ("--fsdp_version 1 --parallelism_config_tp_size 2", "--fsdp_version is 1, and --parallelism_config_tp_size"),
        ("--fsdp_state_dict_type SHARDS", "--fsdp_state_dict_type is 'SHARDS'; expected one of"),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(flags=parse(*words.split()).flags)


@pytest.mark.parametrize(
    ("word", "option", "value"),
    [
        ("tp_size 1", "tp_size", 1),
        ("cp_size 1", "cp_size", 1),
        ("cp_comm_strategy alltoall", "cp_comm_strategy", "alltoall"),
    ],
)
def test_a_size_of_1_and_a_strategy_of_communication_win_over_those_of_a_file(
    word: str, option: str, value: object
) -> None:
    sizes = {
        "parallelism_config_tp_size": 2,
        "parallelism_config_cp_size": 2,
        "parallelism_config_cp_comm_strategy": "allgather",
    }
    file = {"distributed_type": "FSDP", "num_processes": 4, "parallelism_config": sizes}
    size, given = f"parallelism_config_{word}".split()
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", size.upper(): given}

    for levels in ({"flags": parse(f"--{size}", given, "train.py").flags}, {"environ": variables}):
        assert getattr(resolve(file=file, **levels).config.parallel, option) == value


def test_accelerate_s_spellings_of_fsdp_flags_are_translated() -> None:
    words = (
        "--use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap BertLayer "
        "--fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_state_dict_type SHARDED_STATE_DICT --fsdp_use_orig_params true"
    )
    options = parse(*shlex.split(words))
    config = resolve(flags=options.flags).config
    assert config.strategy == "fsdp2"
    assert config.fsdp.wrap_classes == ("BertLayer",)
    assert config.fsdp.wrap_policy == "transformer"
    assert config.fsdp.state_dict_type == "sharded"
    assert not config.fsdp.reshard_after_forward
    assert "mapped: fsdp_sharding_strategy; without effect: fsdp_use_orig_params" in options.notes[0]


@pytest.mark.parametrize("flag", ["--fsdp_sharding_strategy", "--fsdp_reshard_after_forward"])
def test_strategies_of_fsdp1_mean_all_that_they_mean_under_either_flag(flag: str) -> None:
    hybrid = resolve(flags=parse("--use_fsdp", flag, "HYBRID_SHARD_ZERO2").flags).config
    facts = hybrid.strategy, hybrid.fsdp.replicate_per_node, hybrid.fsdp.reshard_after_forward
    assert facts == ("fsdp2", True, False)
    options = parse("--use_fsdp", flag, "NO_SHARD")
    assert resolve(flags=options.flags).config.strategy == "ddp"
    assert "every rank keeps the whole model, so strategy 'ddp' is used" in options.notes[0]


def test_full_shards_of_a_flag_undo_the_replicas_of_a_file() -> None:
    file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
    flags = parse("--fsdp_sharding_strategy", "FULL_SHARD").flags
    assert resolve(file=file).config.fsdp.replicate_per_node
    assert not resolve(file=file, flags=flags).config.fsdp.replicate_per_node


ACCELERATES = json.loads((Path(__file__).parents[1] / "migration" / "launch_flags_1_15.json").read_text())


@pytest.mark.parametrize("name", ACCELERATES)
def test_a_flag_of_accelerates_launcher_is_taken_or_refused_with_the_way_out(name: str) -> None:
    message = ""
    try:
        parse(f"--{name}=1", "train.py")
    except ConfigError as error:
        message = str(error)
    assert "unknown option" not in message
    if "not offered" in message:
        assert name.replace("-", "_") not in launch_flags()
        assert ";" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--use_megatron_lm", "--use_megatron_lm is an option of accelerate .*; use --use_fsdp, with --par"),
        ("--megatron_lm_tp_degree 2", "there is no Megatron-LM strategy"),
        ("--fp8_format E4M3", "it is an option of TransformerEngine or MS-AMP, and fp8 is torchao's here"),
        ("--mpirun_hostfile hosts", r"start the launcher or the script with mpirun itself"),
        ("--env X=1", "it is for pods of TPUs; leave it out"),
        ("--aws_access_key_id K", "jobs are not started on SageMaker"),
        ("--parallelism_config_cp_backend torch", "each way to share sequences has one backend"),
        (
            "--parallelism_config_cp_size 2 --parallelism_config_cp_comm_strategy ring",
            "cp_comm_strategy is 'ring'; expected one of 'allgather', 'alltoall'",
        ),
        ("--parallelism_config_tp_size two", "--parallelism_config_tp_size is 'two'; expected a whole number"),
    ],
)
def test_what_is_not_offered_says_why(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words.split(), "train.py")


def test_sizes_of_a_mesh_are_those_of_fsdp() -> None:
    sizes = (
        "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 4 --parallelism_config_tp_size 1"
    )
    options = parse(*f"-q --quiet --use_fsdp --use_parallelism_config {sizes} x.py".split())
    config = resolve(flags=options.flags).config
    assert (config.strategy, config.parallel.dp_replicate_size, options.rest) == ("fsdp2", 2, ("x.py",))
