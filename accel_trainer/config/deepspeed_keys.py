"""Every key that a DeepSpeed configuration may have, so that a misspelled one is found before the engine swallows it.

The tables are those of DeepSpeed 0.19. They serve where DeepSpeed is not installed; the adapter adds what the
installed release knows beyond them, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accel_trainer.errors import did_you_mean

Keys = Mapping[str, Any]
"""Known keys of a section: each leads to the keys of its own section, or to None where it takes any value."""


def _keys(text: str, **sections: Keys) -> dict[str, Any]:
    return {**dict.fromkeys(text.split()), **sections}


_ZERO = _keys(
    "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
    "elastic_checkpoint sub_group_size cpu_offload cpu_offload_param cpu_offload_use_pin_memory "
    "prefetch_bucket_size stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold "
    "model_persistence_threshold stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters "
    "max_reuse_distance stage3_max_reuse_distance gather_16bit_weights_on_model_save "
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save module_granularity_threshold "
    "stage3_module_granularity_threshold use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params "
    "allgather_sequential stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
    offload_param=_keys("device nvme_path buffer_count buffer_size max_in_cpu pin_memory"),
    offload_optimizer=_keys(
        "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload "
        "cpuadam_cores_perc"
    ),
    zenflow=_keys(
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"
    ),
    leaf_module=_keys("classes names name_suffixes"),
)
_BF16 = _keys("enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states")
_COMPILE = _keys(
    "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
    "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
    "keep_all_input_tensors passes"
)
_TENSOR_PARALLEL = _keys(
    "dtype autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend injection_policy_tuple "
    "partition_config preset_model keep_module_on_host replace_with_kernel_inject kernel_inject",
    tensor_parallel=_keys("tp_size tp_grain_size mpu tp_group"),
    tp=_keys("tp_size tp_grain_size mpu tp_group"),
)

KNOWN_KEYS: Keys = _keys(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "gradient_clipping steps_per_print wall_clock_breakdown memory_breakdown dump_state disable_python_gc "
    "disable_allgather prescale_gradients gradient_predivide_factor gradient_allreduce_op communication_data_type "
    "seq_parallel_communication_data_type zero_allow_untested_optimizer zero_force_ds_cpu_optimizer vocabulary_size "
    "dataloader_drop_last log_level use_data_before_expert_parallelism data_parallel_size sequence_parallel_size "
    # Free inside: DeepSpeed reads their keys in several modules, and refuses none.
    "pipeline autotuning data_efficiency expert_parallel weight_quantization datastates_ckpt",
    optimizer=_keys("type params legacy_fusion"),
    scheduler=_keys("type params"),
    zero_optimization=_ZERO,
    fp16=_keys(
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
        "min_loss_scale fp16_master_weights_and_grads"
    ),
    bf16=_BF16,
    bfloat16=_BF16,
    torch_autocast=_keys("enabled dtype lower_precision_safe_modules"),
    activation_checkpointing=_keys(
        "partition_activations number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary "
        "profile cpu_checkpointing"
    ),
    aio=_keys("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"),
    checkpoint=_keys(
        "tag_validation checkpoint_serialization load_universal use_node_local_storage",
        parallel_write=_keys("pipeline_stage"),
        writer=_keys("type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel decoupled"),
    ),
    data_types=_keys("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    comms_logger=_keys("enabled prof_all prof_ops verbose debug"),
    flops_profiler=_keys("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
    hybrid_engine=_keys(
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph"
    ),
    timers=_keys("", throughput=_keys("enabled synchronized")),
    tensorboard=_keys("enabled output_path job_name"),
    csv_monitor=_keys("enabled output_path job_name"),
    wandb=_keys("enabled group team project"),
    comet=_keys("enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode"),
    compile=_COMPILE,
    tensor_parallel=_TENSOR_PARALLEL,
)
"""Every key of a DeepSpeed configuration, by section."""

REMOVED_KEYS: Mapping[str, str] = {
    "amp": "use fp16, bf16 or torch_autocast",
    "compression_training": "remove the block",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "eigenvalue": "remove the block",
    "elasticity": "give the batch sizes themselves",
    "graph_harvesting": "remove the key",
    "nebula": "remove the block",
    "progressive_layer_drop": "remove the block",
    "quantize_training": "remove the block",
    "sparse_attention": "remove the block",
    "sparse_gradients": "remove the key; an embedding with sparse=True needs none",
    "zero_optimization.mics_hierarchical_params_gather": "remove the key",
    "zero_optimization.mics_shard_size": "remove the key, or use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "remove the key",
}
"""Keys of older releases that DeepSpeed 0.19 has no more, and what to do instead."""

_ADAM = (
    "lr betas eps weight_decay bias_correction amsgrad adam_w_mode torch_adam fp32_optimizer_states set_grad_none "
    "foreach fused"
)
OPTIMIZER_PARAMS: Mapping[str, Keys] = {
    "adam": _keys(_ADAM),
    "adamw": _keys(_ADAM),
    "adagrad": _keys("lr eps weight_decay amsgrad lr_decay initial_accumulator_value fp32_optimizer_states"),
    "lamb": _keys("lr betas eps weight_decay bias_correction eps_inside_sqrt max_coeff min_coeff amsgrad"),
    "lion": _keys("lr betas weight_decay set_grad_none fp32_optimizer_states"),
}
"""Parameters of DeepSpeed's own optimizers by their type in lower case; any other type is checked when it is built."""

OPTIMIZER_TYPES = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD", "Muon")
"""DeepSpeed's own optimizers, in any case; any other type is one of torch's."""

_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
SCHEDULER_PARAMS: Mapping[str, Keys] = {
    "WarmupLR": _keys(_WARMUP),
    "WarmupDecayLR": _keys(f"total_num_steps {_WARMUP}"),
    "WarmupCosineLR": _keys(
        "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration"
    ),
    "LRRangeTest": _keys(
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
        "last_batch_iteration"
    ),
    "OneCycle": _keys(
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
        "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
        "last_batch_iteration"
    ),
}
"""Parameters of DeepSpeed's own schedules; any other type is one of torch's."""


def join(section: str, name: str) -> str:
    """Return the dotted path of a key of a section; the section of the top level is an empty string."""
    return f"{section}.{name}" if section else name


def unknown_keys(
    content: Mapping[str, Any], keys: Keys = KNOWN_KEYS, section: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield dotted path, beginning and end (the way out) of the message for every key that is not in the tables."""
    for name, value in content.items():
        path = join(section, name)
        if path in REMOVED_KEYS and name not in keys:
            yield path, "key", f" is one that DeepSpeed has no more: {REMOVED_KEYS[path]}"
        elif name not in keys:
            yield path, "unknown key", did_you_mean(name, keys) or _section_hint(name) or "; remove it"
        elif isinstance(value, Mapping) and isinstance(keys[name], Mapping):
            yield from unknown_keys(value, keys[name], path)


def _section_hint(name: str) -> str:
    """Name the section of a key that stands one level off."""
    sections = [section for section, keys in KNOWN_KEYS.items() if isinstance(keys, Mapping) and name in keys]
    if name in KNOWN_KEYS:
        return "; it belongs to the top level"
    return f"; it belongs into {sections[0]!r}" if len(sections) == 1 else ""
