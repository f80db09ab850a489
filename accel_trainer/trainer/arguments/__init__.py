"""TrainingArguments, and how `fsdp`, `fsdp_config` and `deepspeed` of them become one configuration."""

from accel_trainer.trainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments

__all__ = ["Seq2SeqTrainingArguments", "TrainingArguments"]
