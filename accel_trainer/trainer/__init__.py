"""Hugging Face's Trainer on accel_trainer: same arguments, same callbacks, same files."""

from __future__ import annotations

from accel_trainer.trainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments
from accel_trainer.trainer.trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]
