"""What layers of a llama keep for the backward, and the time of a step: each policy, and the offload, against neither.

100 million parameters, a vocabulary of 128,000 words, 4 rows of 1,024 tokens. Bytes are of storages that are there
between the forward of the layers and the backward, but parameters and what an offload has made on the host. Logits are
outside of the layers, and count nowhere.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from timing import Row, interleave, ratio_row
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_trainer import Accelerator
from accel_trainer.techniques.activations import ActivationOffload

SIZES = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 10, "vocab_size": 128_000}
TINY = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 512}
TECHNIQUES: dict[str, Mapping[str, Any]] = {
    "off": {},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "offload": {"activation_offload": True},
    "selective, offload": {"activation_checkpointing": "selective", "activation_offload": True},
}
BYTES = {"selective": 0.6, "full": 0.2, "offload": 0.25, "selective, offload": 0.25}
TIMES = {"selective": 1.12}
"""Bounds against neither."""


class Held(TorchDispatchMode):
    """Counts the bytes of storages that operations make, as long as they are there."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.total = 0
        self._known = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}
        self._live: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.hold(leaf.untyped_storage())
        return result

    def hold(self, storage: Any) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key not in self._live and key not in self._known:
            self.total += num_bytes
            self._live[key] = weakref.ref(storage, lambda _: self.drop(key, num_bytes))

    def drop(self, key: int, num_bytes: int) -> None:
        if self._live.pop(key, None) is not None:
            self.total -= num_bytes


class Model:
    """A prepared llama and its optimizer."""

    def __init__(self, technique: str, sizes: Mapping[str, int], tokens: Tensor) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        heads = {"num_attention_heads": sizes["hidden_size"] // 64 or 1, "num_key_value_heads": 1}
        config = AutoConfig.for_model("llama", tie_word_embeddings=True, use_cache=False, **sizes, **heads)
        self.accelerator = Accelerator(cpu=True, config=TECHNIQUES[technique])
        model = AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.tokens = tokens

    def step(self) -> float:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def kept_bytes(self) -> int:
        """Return what is held behind the last layer, in training."""
        body: nn.Module = self.model.model
        sent: list[int] = []
        send = ActivationOffload._send

        def noted(self: Any, storage: Any) -> Any:
            made = send(self, storage)
            sent.append(len(made.host))
            return made

        ActivationOffload._send = noted  # type: ignore[method-assign]
        try:
            with Held([*body.parameters(), *body.buffers()]) as held:
                output = body(input_ids=self.tokens).last_hidden_state
                gc.collect()
                kept = held.total - sum(sent)
        finally:
            ActivationOffload._send = send  # type: ignore[method-assign]
        del output
        return kept


def measure(rounds: int, *, quick: bool = False) -> list[Row]:
    """Return the rows of the table; losses of all are compared first."""
    sizes, shape = (TINY, (2, 256)) if quick else (SIZES, (4, 1024))
    tokens = torch.randint(sizes["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    models = {name: Model(name, sizes, tokens) for name in TECHNIQUES}
    losses = {name: model.step() for name, model in models.items()}
    if len(set(losses.values())) > 1:
        raise SystemExit(f"losses differ: {losses}")
    kept = {name: float(model.kept_bytes()) for name, model in models.items()}
    timed = {name: models[name].step for name in ("off", "selective", "full")}
    seconds = interleave(timed, rounds, gc.collect)
    rows = [
        ratio_row(f"bytes that layers keep, {name}", "neither", [kept[name]], [kept["off"]], bound)
        for name, bound in BYTES.items()
    ]
    for name in ("selective", "full"):
        rows.append(ratio_row(f"a step, {name}", "neither", seconds[name], seconds["off"], TIMES.get(name)))
    return rows
