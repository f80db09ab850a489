"""Every field of transformers' TrainingArguments is honoured, refused, or known to be for the script alone.

A field that a new release brings fails the first test until somebody has decided what becomes of it.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import transformers

from accel_trainer.trainer import Seq2SeqTrainingArguments, TrainingArguments

ROOT = Path(__file__).resolve().parents[3]

ARGS = "tests/trainer/arguments/test_training_arguments.py"
BATCH = "tests/trainer/test_batch_size_search.py"
BEST = "tests/trainer/checkpoint/test_best_model.py"
CHECKPOINTS = "tests/trainer/checkpoint/test_checkpoints.py"
EFFECTS = "tests/trainer/arguments/test_field_effects.py"
EVALUATION = "tests/trainer/test_evaluation.py"
NAMES = "tests/trainer/test_optimizer_names.py"
OPTIONS = "tests/trainer/test_options.py"
ROWS = "tests/trainer/test_evaluation_rows.py"
STREAMS = "tests/trainer/checkpoint/test_resumed_streams.py"
UNEVEN = "tests/trainer/test_uneven_batches.py"
TAKEN = "tests/trainer/test_taken_arguments.py"

SECOND_TRAIN = f"{TAKEN}::test_with_model_init_the_second_train_is_that_of_a_trainer_built_with_the_new_value"
LOADERS = f"{EFFECTS}::test_loaders_read_as_the_arguments_say"
DDP = f"{EFFECTS}::test_options_of_ddp_reach_the_wrapper"
PUSH = f"{EFFECTS}::test_a_push_goes_to_the_repository_the_branch_and_with_the_token_that_were_given"
RECOMPUTATION = f"{EFFECTS}::test_options_of_recomputation_reach_the_model"
LACKING = f"{EFFECTS}::test_what_this_machine_lacks_is_named"

PROVEN: dict[str, str] = {
    "accelerator_config": f"{ARGS}::test_accelerator_config_in_every_form",
    "activation_checkpointing": RECOMPUTATION,
    "activation_checkpointing_kwargs": RECOMPUTATION,
    "adam_beta1": SECOND_TRAIN,
    "adam_beta2": SECOND_TRAIN,
    "adam_epsilon": SECOND_TRAIN,
    "auto_find_batch_size": f"{BATCH}::test_training_starts_again_with_a_batch_that_fits",
    "average_tokens_across_devices": f"{UNEVEN}::test_a_short_last_batch_gives_the_numbers_of_one_process",
    "batch_eval_metrics": f"{EVALUATION}::test_batch_metrics_see_every_sample_and_answer_once",
    "bf16": f"{OPTIONS}::test_bf16_is_close_to_fp32_and_keeps_fp32_weights",
    "bf16_full_eval": f"{EVALUATION}::test_full_bf16_evaluation_casts_the_model",
    "data_seed": SECOND_TRAIN,
    "dataloader_drop_last": SECOND_TRAIN,
    "dataloader_in_order": LOADERS,
    "dataloader_multiprocessing_context": f"{EFFECTS}::test_workers_are_started_by_the_method_that_was_asked_for",
    "dataloader_num_workers": LOADERS,
    "dataloader_persistent_workers": LOADERS,
    "dataloader_pin_memory": f"{EFFECTS}::test_memory_is_pinned_where_there_is_an_accelerator_to_copy_to",
    "dataloader_prefetch_factor": LOADERS,
    "ddp_backend": f"{EFFECTS}::test_the_backend_is_the_one_that_was_asked_for",
    "ddp_broadcast_buffers": DDP,
    "ddp_bucket_cap_mb": DDP,
    "ddp_find_unused_parameters": DDP,
    "ddp_static_graph": DDP,
    "ddp_timeout": f"{ARGS}::test_a_timeout_that_was_asked_for_reaches_the_group_on_the_cpu",
    "debug": f"{EFFECTS}::test_overflow_in_the_model_is_found_where_it_arises",
    "deepspeed": "tests/trainer/test_deepspeed.py::test_the_numbers_are_those_of_one_process_and_a_resume_is_exact",
    "disable_tqdm": f"{EFFECTS}::test_progress_is_a_bar_or_lines",
    "enable_jit_checkpoint": "tests/trainer/test_preemption.py::test_r9_one_process_ends_and_resumes_as_several_do",
    "eval_accumulation_steps": f"{EVALUATION}::test_two_ranks_are_exact_at_any_batch_size",
    "eval_delay": f"{EFFECTS}::test_evaluations_wait",
    "eval_do_concat_batches": f"{EVALUATION}::test_without_concatenation_each_step_stays_by_itself",
    "eval_on_start": f"{STREAMS}::test_an_evaluation_leaves_the_streams_of_training_where_they_are",
    "eval_steps": f"{EFFECTS}::test_evaluations_wait",
    "eval_strategy": SECOND_TRAIN,
    "eval_use_gather_object": f"{ROWS}::test_labels_of_images_come_once_and_in_order",
    "fp16_full_eval": f"{EFFECTS}::test_half_precision_evaluation_casts_the_model",
    "fsdp": f"{ARGS}::test_upstreams_option_words",
    "fsdp_config": f"{ARGS}::test_every_spelling_of_a_file_gives_the_same_dict",
    "full_determinism": f"{EFFECTS}::test_full_determinism_turns_torchs_on",
    "gradient_accumulation_steps": SECOND_TRAIN,
    "gradient_checkpointing": RECOMPUTATION,
    "gradient_checkpointing_kwargs": RECOMPUTATION,
    "greater_is_better": f"{BEST}::test_the_best_one_is_left_alone_beside_what_is_not_ours",
    "hub_always_push": PUSH,
    "hub_model_id": PUSH,
    "hub_private_repo": PUSH,
    "hub_revision": PUSH,
    "hub_strategy": f"{EFFECTS}::test_a_strategy_says_what_is_pushed",
    "hub_token": f"{EFFECTS}::test_the_token_is_in_no_file_no_log_and_no_repr",
    "ignore_data_skip": f"{CHECKPOINTS}::test_ignore_data_skip_begins_the_epoch_again",
    "include_for_metrics": f"{EVALUATION}::test_inputs_and_losses_reach_the_metrics_row_by_row",
    "include_num_input_tokens_seen": SECOND_TRAIN,
    "label_names": f"{EFFECTS}::test_labels_are_the_columns_that_are_named",
    "label_smoothing_factor": SECOND_TRAIN,
    "learning_rate": SECOND_TRAIN,
    "length_column_name": f"{EFFECTS}::test_the_column_of_lengths_is_the_one_that_is_named",
    "load_best_model_at_end": f"{CHECKPOINTS}::test_the_best_model_is_loaded_at_the_end",
    "log_level": f"{EFFECTS}::test_each_node_or_the_first_alone_logs_as_the_main_process",
    "log_level_replica": f"{EFFECTS}::test_each_node_or_the_first_alone_logs_as_the_main_process",
    "log_on_each_node": f"{EFFECTS}::test_each_node_or_the_first_alone_logs_as_the_main_process",
    "logging_first_step": f"{EFFECTS}::test_the_first_step_is_logged",
    "logging_nan_inf_filter": f"{EFFECTS}::test_a_loss_that_is_no_number_is_logged_where_it_is_not_filtered",
    "logging_steps": SECOND_TRAIN,
    "logging_strategy": SECOND_TRAIN,
    "lr_scheduler_kwargs": f"{EFFECTS}::test_options_of_the_schedule_reach_it",
    "lr_scheduler_type": SECOND_TRAIN,
    "max_grad_norm": SECOND_TRAIN,
    "max_steps": SECOND_TRAIN,
    "metric_for_best_model": f"{BEST}::test_the_best_one_is_left_alone_beside_what_is_not_ours",
    "neftune_noise_alpha": SECOND_TRAIN,
    "num_train_epochs": SECOND_TRAIN,
    "optim": f"{NAMES}::test_names_of_torch_and_transformers_train_as_the_table_says",
    "optim_args": f"{NAMES}::test_every_name_of_transformers_is_in_the_table",
    "optim_target_modules": f"{NAMES}::test_every_name_of_transformers_is_in_the_table",
    "output_dir": f"{EFFECTS}::test_the_files_of_a_run_are_where_they_were_asked_for",
    "parallelism_config": f"{ARGS}::test_bad_options",
    "per_device_eval_batch_size": SECOND_TRAIN,
    "per_device_train_batch_size": SECOND_TRAIN,
    "prediction_loss_only": f"{EFFECTS}::test_the_loss_alone_is_kept_where_it_is_all_that_was_asked_for",
    "push_to_hub": PUSH,
    "remove_unused_columns": f"{EFFECTS}::test_columns_that_the_model_does_not_take_are_removed_or_kept",
    "report_to": f"{EFFECTS}::test_the_trackers_that_are_named_record_the_run",
    "restore_callback_states_from_checkpoint": f"{EFFECTS}::test_callbacks_go_on_where_they_were",
    "run_name": f"{EFFECTS}::test_the_name_of_a_run_reaches_callbacks_and_the_page",
    "save_on_each_node": "tests/trainer/checkpoint/test_save_on_each_node.py::test_each_node_goes_on_from_its_own_disk",
    "save_only_model": f"{CHECKPOINTS}::test_weights_alone_and_only_the_last_and_the_best_are_kept",
    "save_steps": f"{EFFECTS}::test_the_files_of_a_run_are_where_they_were_asked_for",
    "save_strategy": f"{EFFECTS}::test_the_files_of_a_run_are_where_they_were_asked_for",
    "save_total_limit": f"{CHECKPOINTS}::test_weights_alone_and_only_the_last_and_the_best_are_kept",
    "seed": SECOND_TRAIN,
    "skip_memory_metrics": f"{EFFECTS}::test_memory_is_measured_where_it_is_not_skipped",
    "torch_compile": f"{OPTIONS}::test_a_compiled_model_gives_the_same_losses_and_is_saved_under_its_own_names",
    "torch_compile_backend": f"{EFFECTS}::test_the_compilers_mode_reaches_the_backend",
    "torch_compile_mode": f"{EFFECTS}::test_the_compilers_mode_reaches_the_backend",
    "torch_empty_cache_steps": f"{EFFECTS}::test_the_devices_cache_is_emptied_every_so_many_updates",
    "train_sampling_strategy": SECOND_TRAIN,
    "use_cache": f"{EFFECTS}::test_generation_caches_are_for_evaluation_where_they_are_asked_for",
    "use_cpu": f"{ARGS}::test_the_file_can_choose_the_cpu",
    "warmup_steps": SECOND_TRAIN,
    "weight_decay": SECOND_TRAIN,
}
"""The test that fails when the field is ignored."""

REFUSED: dict[str, str] = {
    "fp16": "tests/trainer/test_errors.py::test_fp16_on_the_cpu_and_replicas_of_one_process",
    "liger_kernel_config": LACKING,
    "tf32": LACKING,
    "use_liger_kernel": LACKING,
}
"""The test of the message, on a machine without an accelerator, or of what this version does not offer."""

CARRIED: dict[str, str] = {
    "do_eval": "scripts read it",
    "do_predict": "scripts read it",
    "do_train": "scripts read it",
    "local_rank": "the environment says it; transformers ignores the field",
    "project": "trackers of transformers read it",
    "resume_from_checkpoint": "scripts read it and hand it to train()",
    "trackio_bucket_id": "transformers' callback of trackio reads it",
    "trackio_space_id": "transformers' callback of trackio reads it",
    "trackio_static_space_id": "transformers' callback of trackio reads it",
}
"""Why nothing of the Trainer's is to be honoured."""

SEQ2SEQ = {
    "generation_config",
    "generation_max_length",
    "generation_num_beams",
    "predict_with_generate",
    "sortish_sampler",
}


def fields_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_every_field_has_been_decided():
    known = PROVEN.keys() | REFUSED.keys() | CARRIED.keys()
    assert fields_of(transformers.TrainingArguments) - known == set(), "add it to one of the tables, with its test"
    assert fields_of(transformers.Seq2SeqTrainingArguments) - known == SEQ2SEQ


def test_no_field_is_in_two_tables():
    assert len(PROVEN.keys() | REFUSED.keys() | CARRIED.keys()) == len(PROVEN) + len(REFUSED) + len(CARRIED)


def test_our_classes_have_every_field_of_transformers():
    assert fields_of(transformers.TrainingArguments) <= fields_of(TrainingArguments)
    assert fields_of(transformers.Seq2SeqTrainingArguments) <= fields_of(Seq2SeqTrainingArguments)


@pytest.mark.parametrize("node", sorted({*PROVEN.values(), *REFUSED.values()}))
def test_the_test_of_a_field_exists_and_speaks_of_it(node):
    path, _, name = node.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}
    text = (ROOT / path).read_text()
    fields = [field for field, proof in (PROVEN | REFUSED).items() if proof == node]
    assert [field for field in fields if field not in text] == []
