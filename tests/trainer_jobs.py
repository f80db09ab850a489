"""Tiny models, datasets and whole Trainer runs that the Trainer's tests share, in one process or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback

from tests.ranks import preload, run_ranks

preload(
    "accel_trainer.trainer",
    "accel_trainer.contrib.run_report.callback",
    "datasets",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.models.t5gemma.modeling_t5gemma",
)

VOCABULARY = 64

MULTIPLIES_COPIES = "get_tp_size" not in transformers.Trainer.compute_loss.__code__.co_names
"""In transformers 5.17: losses of ranks that share a sequence's tokens, so that sp_size and cp_size are refused."""

# What `accelerate config` writes for FSDP on two devices.
ACCELERATE_YAML = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


class SaveAt(TrainerCallback):
    """Saves after some updates."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step in self.steps


class SaveWithin(TrainerCallback):
    """Saves while the update after `step` is under way, as transformers' callback for SIGTERM does."""

    def __init__(self, event: str, step: int) -> None:
        self.trainer: Any = None
        self.step = step
        setattr(self, event, self.save)

    def save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


class TokenDataset(Dataset):
    """Random token rows with labels.

    Args:
        kind: "lm" gives labels for tokens, "class" one label for a row.
        uneven: rows differ in how many tokens have a label, so that means over batches and over tokens differ.
    """

    def __init__(self, num_samples: int, *, kind: str = "lm", seed: int = 0, uneven: bool = False, length: int = 12):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for index in range(num_samples):
            tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
            row = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            if kind == "class":
                row["labels"] = torch.tensor(int(tokens[0]) % 4)
            else:
                labels = tokens.clone()
                if uneven:
                    labels[: (index * 5) % (length - 2)] = -100
                row["labels"] = labels
            self.rows.append(row)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Hearing(TrainerCallback):
    """A callback that hears every event by one method, with its name."""

    def hear(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise NotImplementedError


def _hear(event: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self.hear(event, *args, **kwargs)


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Hearing, _event, _hear(_event))


def build_model(kind: str = "llama", seed: int = 0, dropout: float = 0.0) -> torch.nn.Module:
    """Return a tiny model with fresh weights: llama, mixtral, gpt2 (tied), bert (classifier), t5 or t5gemma."""
    import transformers

    torch.manual_seed(seed)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, num_key_value_heads=2, attention_dropout=dropout, **layers
        )
        return transformers.LlamaForCausalLM(config)
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, **layers
        )
        return transformers.MixtralForCausalLM(config)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=32, n_positions=32, bos_token_id=0, eos_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=32, num_labels=4, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, **layers,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)
    if kind == "t5gemma":  # an encoder with a decoder that declares a plan for tensor parallelism
        stack = {
            "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8,
            "initializer_range": 0.3, **layers, "num_hidden_layers": 1,
        }  # fmt: skip
        gemma = transformers.T5GemmaForConditionalGeneration(
            transformers.T5GemmaConfig(encoder=stack, decoder=stack, vocab_size=VOCABULARY)
        )
        nn.init.constant_(gemma.model.decoder.layers[0].post_cross_attn_layernorm.weight, 8.0)  # as of t5 below
        return gemma
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=dropout,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    network = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "EncDecAttention" in name:
                parameter.mul_(4.5)  # else a fresh model generates the same token whatever it reads
    return network


def strategy_arguments(strategy: str) -> dict[str, Any]:
    """Return the TrainingArguments that choose a strategy: "single", "ddp", "fsdp", "fsdp_sharded" or "zero3"."""
    if strategy in ("single", "ddp"):
        return {}
    if strategy == "zero3":  # parameters of tiny models are partitioned, too
        stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        return {"deepspeed": {"zero_optimization": stage, **dict.fromkeys(names, "auto")}}
    kind = "SHARDED_STATE_DICT" if strategy == "fsdp_sharded" else "FULL_STATE_DICT"
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": {"state_dict_type": kind}}


def arguments(output_dir: Any, **changes: Any) -> Any:
    """Return our TrainingArguments on the CPU, quiet, with a log line for every update."""
    from accel_trainer.trainer import Seq2SeqTrainingArguments, TrainingArguments

    options: dict[str, Any] = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
    }
    options.update(changes)
    seq2seq = "predict_with_generate" in options
    return (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(**options)


def build_trainer(
    output_dir: Any,
    *,
    strategy: str = "single",
    model: str = "llama",
    dropout: float = 0.0,
    samples: int = 32,
    eval_samples: int = 11,
    uneven: bool = False,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return a Trainer over tiny data.

    Args:
        options: more keyword arguments of the Trainer.
        changes: TrainingArguments.
    """
    import transformers

    from accel_trainer.trainer import Seq2SeqTrainer, Trainer

    transformers.utils.logging.disable_progress_bar()
    kind = "class" if model == "bert" else "lm"
    args = arguments(output_dir, **strategy_arguments(strategy), **changes)
    return (Seq2SeqTrainer if "predict_with_generate" in changes else Trainer)(
        build_model(model, dropout=dropout),
        args,
        train_dataset=TokenDataset(samples, kind=kind, uneven=uneven),
        eval_dataset=TokenDataset(eval_samples, kind=kind, seed=1, uneven=uneven),
        **(options or {}),
    )


def weights_of(trainer: Any) -> dict[str, np.ndarray]:
    """Return the whole weights on rank 0, by name. Collective."""
    return {name: value.numpy() for name, value in trainer.accelerator.get_state_dict(trainer.model).items()}


def summary(trainer: Any) -> dict[str, Any]:
    """Return what a run logged, and its weights. Collective."""
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "train_loss": next((entry["train_loss"] for entry in reversed(history) if "train_loss" in entry), None),
        "step": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "weights": weights_of(trainer),
    }


def on_ranks(strategy: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call `function(*args, strategy=..., **kwargs)` here for "single", else on two ranks; return results by rank."""
    if strategy == "single":
        return [function(*args, strategy=strategy, **kwargs)]
    return run_ranks(function, 2, *args, strategy=strategy, timeout=100, **kwargs)


def train(output_dir: str | Path, resume: str | None = None, **build: Any) -> dict[str, Any]:
    """Build a Trainer, train, and return its summary."""
    trainer = build_trainer(output_dir, **build)
    trainer.train(resume_from_checkpoint=resume)
    return summary(trainer)
