"""The models that every strategy must train alike, with batches and the plain PyTorch loop as the reference.

Dropout is off and weights are fp32, so that one process and many compute the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

GLOBAL_BATCH = 8
NUM_BATCHES = 5
CLIP = 0.5

KINDS = ("mlp", "llama", "gpt2", "bert")


class MLP(nn.Module):
    """Two layers with a batch-independent loss, and a non-persistent buffer that the forward uses."""

    _tp_plan: ClassVar = {"first": "colwise", "second": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 1)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean squared error and the predictions."""
        logits = self.second(torch.relu(self.first(x) * self.scale))
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def _transformer(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    if kind == "gpt2":
        options: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "bos_token_id": 0}
        options.update(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, eos_token_id=0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=64, **options))
    options = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    options["max_position_embeddings"] = 32
    if kind in ("llama", "mixtral"):
        if kind == "mixtral":  # the loss that balances the experts' load is of a rank's batch, and not that of them all
            # With values of this range no token's second and third expert are within 2e-5; of the usual one 6e-8 are.
            options.update(num_hidden_layers=1, num_local_experts=4, initializer_range=0.1)
        config = AutoConfig.for_model(kind, vocab_size=64, num_key_value_heads=2, **options)
        return AutoModelForCausalLM.from_config(config)
    options.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_layers=1)  # the largest one
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", vocab_size=64, **options))


def build_model(kind: str, seed: int = 0) -> nn.Module:
    """Return a fresh model; the same values for the same seed."""
    torch.manual_seed(seed)
    return MLP() if kind == "mlp" else _transformer(kind)


def build_samples(kind: str, num_samples: int = GLOBAL_BATCH * NUM_BATCHES) -> list[dict[str, Tensor]]:
    """Return samples of equal length, so that the mean over ranks of means over samples is the mean over samples."""
    generator = torch.Generator().manual_seed(7)
    if kind == "mlp":
        return [
            {"x": torch.randn(8, generator=generator), "labels": torch.randn(1, generator=generator)}
            for _ in range(num_samples)
        ]
    tokens = torch.randint(1, 64, (num_samples, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack samples into a batch."""
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def freeze_part(model: nn.Module, kind: str) -> None:
    """Freeze some parameters: the first layer, or everything that is no bias or norm of a block."""
    for name, parameter in model.named_parameters():
        if name.startswith("first") or "embed" in name or "wte" in name or "wpe" in name:
            parameter.requires_grad_(False)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters, in two groups."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.ndim > 1]
    others = [p for p in trainable if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


@functools.cache
def plain_loop(kind: str, *, accumulation: int = 1, clip: bool = False, frozen: bool = False) -> dict[str, list[float]]:
    """Train with plain PyTorch, one process, one forward per window: what strategies are compared with."""
    model = build_model(kind)
    if frozen:
        freeze_part(model, kind)
    optimizer = build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    samples = build_samples(kind)
    window = GLOBAL_BATCH * accumulation
    losses, norms = [], []
    for begin in range(0, len(samples), window):
        loss = model(**collate(samples[begin : begin + window]))["loss"]
        loss.backward()
        parameters = [p for p in model.parameters() if p.requires_grad]
        norm = nn.utils.clip_grad_norm_(parameters, CLIP if clip else float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    with torch.no_grad():
        logits = model(**collate(samples[:11]))["logits"]
    return {"losses": losses, "norms": norms, "logits": logits.flatten()[:200].tolist()}


def train(
    parts: Mapping[str, Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    loss_of: Callable[[Any], Tensor],
    clip: float = float("inf"),
    skip: int = 0,
    stop: int | None = None,
) -> dict[str, list[float]]:
    """Run the documents' loop over an epoch or a part of it; return the losses and norms of each update."""
    accelerator = parts["accelerator"]
    loader = accelerator.skip_first_batches(parts["loader"], skip) if skip else parts["loader"]
    losses, norms, window = [], [], []
    for index, batch in enumerate(loader):
        with accelerator.accumulate(*models):
            loss = loss_of(batch)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_([p for model in models for p in model.parameters()], clip)
            for each in [*optimizers, *schedulers]:
                each.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        window.append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.sync_gradients:
            losses.append(sum(window) / len(window))
            norms.append(norm.item())
            window = []
        if stop is not None and index + 1 == stop:
            break
    return {"losses": losses, "norms": norms}
