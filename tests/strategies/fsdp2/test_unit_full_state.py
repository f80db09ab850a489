"""A sharded model saves and loads whole weights by its own methods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import Accelerator
from tests.ranks import RankFailure, preload, run_ranks

preload("accel_trainer.accelerator", "transformers.models.gpt2.modeling_gpt2")


def build_tied(seed: int) -> Any:
    """Return a tiny GPT-2, whose output weights are those of its embedding."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=64, n_layer=2, n_head=2, n_embd=32, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def save_then_load(folder: str) -> dict[str, Any]:
    """Save a sharded model without naming a state; load another model's whole weights into it."""
    import transformers

    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    model = accelerator.prepare(build_tied(seed=1))
    unwrapped = accelerator.unwrap_model(model)
    target = Path(folder, "of", "a", "run")
    unwrapped.save_pretrained(target, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    saved = transformers.GPT2LMHeadModel.from_pretrained(target).state_dict()
    expected = build_tied(seed=1).state_dict()
    other = build_tied(seed=2).state_dict()
    result = unwrapped.load_state_dict(other)
    state = accelerator.get_state_dict(model)
    return {
        "saved": all(torch.equal(saved[name], tensor) for name, tensor in expected.items()),
        "problems": [*result.missing_keys, *result.unexpected_keys],
        "loaded": all(torch.equal(state[name], other[name]) for name in state),
        "tied": unwrapped.lm_head.weight is unwrapped.transformer.wte.weight,
    }


def test_a_sharded_model_saves_and_loads_whole_weights(tmp_path: Path):
    fine = {"saved": True, "problems": [], "loaded": True, "tied": True}
    assert run_ranks(save_then_load, 2, str(tmp_path)) == [fine, fine]


class Stubborn(nn.Linear):
    """A model whose own method takes no weights."""

    def save_pretrained(self, directory: str, **options: Any) -> str:
        """Return what was given."""
        return f"{directory} {sorted(options)}"


def save_stubborn(state: dict[str, Any] | None) -> str:
    """Save a sharded model that cannot be given its gathered weights unasked."""
    model = Accelerator(cpu=True, strategy="fsdp2", config={"fsdp": {"wrap_policy": "none"}}).prepare(Stubborn(4, 4))
    return model.save_pretrained("here") if state is None else model.save_pretrained("here", state_dict=state)


def test_shards_are_never_written_for_the_whole():
    message = "save_pretrained() has no `state_dict` argument for the gathered weights; use accelerator.save_model("
    with pytest.raises(RankFailure, match=re.escape(message)) as failure:
        run_ranks(save_stubborn, 2, None)
    assert set(failure.value.failures) == {0, 1}


def test_weights_that_are_given_are_passed_on():
    assert run_ranks(save_stubborn, 2, {}) == ["here ['state_dict']"] * 2


def load_wrong(change: str) -> str:
    """Load whole weights that do not fit; return torch's message."""
    model = Accelerator(cpu=True, strategy="fsdp2", config={"fsdp": {"wrap_policy": "none"}}).prepare(nn.Linear(4, 4))
    state = nn.Linear(4, 4).state_dict()
    if change == "shape":
        state["weight"] = torch.zeros(8, 4)
    else:
        state["extra"] = state.pop("bias")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "words"),
    [("shape", ["size mismatch for weight", "[8, 4]"]), ("name", ['Missing key(s) in state_dict: "bias"', "extra"])],
)
def test_whole_weights_that_do_not_fit_are_torchs_own_error(change: str, words: list[str]):
    for message in run_ranks(load_wrong, 2, change):
        assert all(word in message for word in words)
