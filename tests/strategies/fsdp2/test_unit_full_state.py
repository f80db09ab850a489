"""A sharded model saves and loads whole weights by its own methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import Accelerator
from accel_trainer.errors import ConfigError
from tests.ranks import preload, run_ranks

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


class Modular(nn.Module):
    """A model that saves its modules one by one, and takes no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.register_buffer("scale", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))

    def save_pretrained(self, directory: str, **options: Any) -> list[str]:
        """Write each module to a file of its own; return what was given."""
        for name, module in self.named_children():
            torch.save(module.state_dict(), Path(directory, f"{name}.bin"))
        if not options:
            Path(directory, "class.txt").write_text(type(self).__name__)
            with pytest.raises(ConfigError, match="was called while one of them saves it: a forward takes all ranks"):
                self(torch.ones(1, 4))
        return sorted(options)


def save_modular(folder: str, options: dict[str, Any]) -> Any:
    """Save a sharded model that cannot be given its gathered weights; return what it returned and the values."""
    torch.manual_seed(0)
    model = Accelerator(cpu=True, strategy="fsdp2", config={"fsdp": {"wrap_policy": "none"}}).prepare(Modular())
    expected = {name: p.full_tensor() for name, p in model.named_parameters(remove_duplicate=False)}
    return model.save_pretrained(folder, **options), expected, type(model.state_dict()["first.weight"]).__name__


def test_modules_that_save_themselves_write_full_weights_on_rank_0(tmp_path: Path):
    (first, expected, kind), (second, _, _) = run_ranks(save_modular, 2, str(tmp_path), {})

    assert (first, second, kind) == ([], None, "DTensor")
    for name in ("first", "second"):
        saved = torch.load(tmp_path / f"{name}.bin")
        assert all(torch.equal(saved[key], expected[f"{name}.{key}"]) for key in ("weight", "bias"))
    assert (tmp_path / "class.txt").read_text() == "Modular"
    assert torch.load(tmp_path / "first.bin")["scale"].tolist() == [0.0, 1.0, 2.0]


def test_weights_that_are_given_are_passed_on(tmp_path: Path):
    found = [returned for returned, _, _ in run_ranks(save_modular, 2, str(tmp_path), {"state_dict": {}})]
    assert found == [["state_dict"]] * 2


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
