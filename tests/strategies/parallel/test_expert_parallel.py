"""Expert parallelism by the plans of transformers' mixtures, and by one of one's own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer.errors import ConfigError
from accel_trainer.strategies.parallel.plans import plan_experts
from tests.cells import beyond, selected
from tests.conformance.models import MLP
from tests.family_matrix import EXPERT_FAMILIES, compare_experts, docs_experts, find_expert_difference
from tests.loops import adamw, start, take_update
from tests.ranks import preload, run_ranks
from tests.strategies.parallel.test_tensor_parallel import IS_NEW, marked_new, tiny_model

preload("transformers.models.auto.modeling_auto", "accel_trainer.accelerator")
preload("transformers.models.mixtral.modeling_mixtral", "transformers.models.qwen3_moe.modeling_qwen3_moe")

KINDS = ("mixtral", "qwen3_moe", "starved")
# Of each kind of experts one family (`make test-families` has all): with biases; without gates; two mixtures a layer;
# and what is refused.
FAMILIES = ("gpt_oss", "nemotron_h", "ernie4_5_vl_moe_text", "muse_spark_text")
NEW_FAMILIES = ("nemotron_h", "ernie4_5_vl_moe_text", "muse_spark_text")
# What the model does around its experts: a shared one; tokens that go by their ids, or by scores with a correction.
MORE_FAMILIES = ("qwen2_moe", "deepseek_v4", "deepseek_v3")
SHARDED = {"dp_shard_size": 4, "ep_size": 2}
REPLICATED = {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}


def mixture(kind: str) -> nn.Module:
    """Return a small mixture; the router of a starved one sends all tokens to the first experts."""
    if kind != "starved":
        return tiny_model(kind)
    model = tiny_model("mixtral")
    gates = [module.weight for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert gates
    for weight in gates:
        nn.init.zeros_(weight).requires_grad_(False)
    return model


def rows_of(update: int) -> Tensor:
    """Return the rows of each of four readers."""
    generator = torch.Generator().manual_seed(update)
    return torch.randint(3, 64, (4, 2, 8 + update % 3), generator=generator)


@functools.cache
def plain_loop(kind: str, num_updates: int) -> list[list[float]]:
    """Return losses and norms of the loop over all readers' rows; each reader's own rows balance the load."""
    model, seen = mixture(kind), []
    optimizer = adamw(model)
    for update in range(num_updates):
        losses = torch.stack([model(input_ids=rows, labels=rows).loss for rows in rows_of(update)])
        losses.mean().backward()
        seen.append([losses.mean().item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def train(model: nn.Module, accelerator: Any, num_updates: int) -> tuple[nn.Module, list[list[float]]]:
    """Prepare the model; return it with losses and norms."""
    model, optimizer = accelerator.prepare(model, adamw(model))
    seen = []
    for update in range(num_updates):
        own = rows_of(update)[accelerator.process_index]
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        seen.append([accelerator.reduce(loss.detach(), "mean").item(), norm.item()])
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


def through_a_window(accelerator: Any, save: str | None = None, load: str | None = None) -> dict[str, Tensor]:
    """Train one window over the rows of two updates, with a save or a load in its middle; return the weights."""
    model = tiny_model("mixtral")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if load:
        accelerator.load_state(load)
    for update in range(int(load is not None), 2):
        for own in rows_of(update)[accelerator.process_index :: accelerator.num_processes]:
            with accelerator.accumulate(model):
                take_update(model(input_ids=own, labels=own).loss, optimizer, accelerator)
        if save and update == 0:
            accelerator.save_state(save)
    return accelerator.get_state_dict(model) or {}


def on_four_ranks(directory: str) -> dict[str, Any]:
    """Everything that is asked of two groups of experts, each of which two ranks share, or have in replicas."""
    from accel_trainer import load_checkpoint_in_model

    found: dict[str, Any] = {}
    accelerator = start(sizes=SHARDED)
    for kind in KINDS:
        model, found[kind] = train(mixture(kind), accelerator, 3 if kind == "mixtral" else 2)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    found["share"] = sum(p.to_local().numel() for p in experts) / sum(p.numel() for p in experts)
    found["mesh"] = accelerator.unit_of(model).layout().mesh
    # Its weights, into a model without memory: each rank reads its own experts.
    accelerator.save_model(model, f"{directory}/export")
    with torch.device("meta"):
        empty = tiny_model("mixtral")
    empty = accelerator.prepare(empty)
    load_checkpoint_in_model(empty, f"{directory}/export")
    with torch.no_grad():
        found["loaded"] = [each(input_ids=rows_of(9)[0]).logits for each in (model, empty)]
        # transformers 5.17 cannot have the loss that balances loads of a generated text, on one process neither.
        options = {"max_new_tokens": 3, "do_sample": False, "output_router_logits": IS_NEW}
        found["text"] = empty.generate(rows_of(9)[accelerator.process_index], **options)
    _, found["replicated"] = train(mixture("mixtral"), start(sizes=REPLICATED), 2)
    for name, options in {
        "checkpointed": {"config": {"fsdp": {"activation_checkpointing": True}}},
        "bf16": {"mixed_precision": "bf16"},
    }.items():
        _, found[name] = train(mixture("mixtral"), start(sizes=SHARDED, **options), 2)
    window = {"sizes": SHARDED, "gradient_accumulation_steps": 2}
    found["saved"] = through_a_window(start(**window), save=f"{directory}/four")
    found["resumed"] = through_a_window(start(**window), load=f"{directory}/one")
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return where one process has saved its window, and its weights behind it."""
    from accel_trainer import Accelerator

    directory = tmp_path_factory.mktemp("experts")
    weights = through_a_window(Accelerator(cpu=True, gradient_accumulation_steps=8), save=f"{directory}/one")
    return directory, weights


@pytest.fixture(scope="module")
def meshed(alone: tuple[Path, dict[str, Tensor]]) -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, 4, str(alone[0]), timeout=200)


@pytest.mark.parametrize(
    ("name", "kind", "tolerance"),
    [
        *((kind, kind, 2e-6) for kind in KINDS),
        ("replicated", "mixtral", 2e-6),
        ("checkpointed", "mixtral", 2e-6),
        ("bf16", "mixtral", 0.05),
    ],
)
def test_a_mixture_trains_as_on_one_process(name: str, kind: str, tolerance: float, meshed: list[dict[str, Any]]):
    for found in meshed:
        expected = plain_loop(kind, len(found[name]))
        assert torch.allclose(torch.tensor(found[name]), torch.tensor(expected), rtol=0, atol=tolerance), name


def test_each_rank_has_its_shard_of_some_experts(meshed: list[dict[str, Any]]):
    assert [found["share"] for found in meshed] == [0.25] * 4
    assert meshed[0]["mesh"] == {"shard": 4, "ep_shard": 2, "ep": 2}


def test_a_model_without_memory_reads_its_experts_from_files(meshed: list[dict[str, Any]]):
    for found in meshed:
        trained, loaded = found["loaded"]
        assert torch.equal(trained, loaded)
        assert found["text"].shape == (2, 11)


def test_a_window_goes_on_on_other_layouts(meshed: list[dict[str, Any]], alone: tuple[Path, dict[str, Tensor]]):
    from accel_trainer import Accelerator

    directory, expected = alone
    resumed = through_a_window(Accelerator(cpu=True, gradient_accumulation_steps=8), load=f"{directory}/four")
    for weights in (meshed[0]["saved"], meshed[0]["resumed"], resumed):
        assert weights.keys() == expected.keys()
        assert max((weights[name] - value).abs().max().item() for name, value in expected.items()) < 1e-6


@pytest.fixture(scope="module")
def families(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    chosen = [kind for (kind,) in selected(request, "test_a_family_with_a_plan_of_experts_is_exact_or_refused")]
    return run_ranks(compare_experts, 2, [kind for kind in chosen if IS_NEW or kind not in NEW_FAMILIES], timeout=150)


@pytest.mark.parametrize("kind", [*marked_new(FAMILIES, NEW_FAMILIES), *map(beyond, MORE_FAMILIES)])
def test_a_family_with_a_plan_of_experts_is_exact_or_refused(kind: str, families: list[dict[str, Any]]):
    for found in families:
        assert not find_expert_difference(kind, found[kind])
        assert found[kind].refused or found[kind].share == pytest.approx(0.5, abs=0.01)


def test_the_page_has_the_families_whose_experts_ranks_share():
    page = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()
    assert docs_experts() in page, "paste what python -m tests.family_matrix --table prints"
    assert all(f"`{kind}`" in page.partition("## Expert parallelism")[2] for kind in EXPERT_FAMILIES)


# --- what is refused --------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self, number: int = 4, rows: int = 4, norm: bool = False) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.zeros(rows, 2, 2))
        if norm:
            self.norm = nn.LayerNorm(2)


def scaled(experts: Experts) -> Experts:
    experts.register_buffer("scales", torch.ones(4))
    return experts


def with_experts(experts: nn.Module, plan: dict[str, str] | None = None) -> nn.Module:
    model = MLP()
    model.experts, model._ep_plan = experts, plan or {"experts": "ep_dispatch_experts", "experts.up": "grouped_gemm"}
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MLP(), "^ep_size=2: MLP declares no plan for expert parallelism .*give it one before .*_ep_plan = {'layers"),
        (with_experts(Experts(), {"experts.up": "grouped_gemm"}), "declares no plan for expert parallelism"),
        (with_experts(Experts(3, 3)), "^ep_size=2 does not divide the 3 experts of experts; use a size that does"),
        (with_experts(Experts(4, 3)), r"whose up is \(3, 2, 2\), not of 4 experts; set the size to 1"),
        (with_experts(scaled(Experts())), r"experts of experts have a buffer scales, \(4,\), which each rank would re"),
        (with_experts(Experts(norm=True)), "the experts of experts have modules with a weight, which ranks cannot"),
        (with_experts(nn.ModuleList([Experts()])), "the experts of experts have modules with a up"),
    ],
)
def test_experts_that_cannot_be_distributed_are_refused(model: nn.Module, message: str):
    with pytest.raises(ConfigError, match=message):
        plan_experts(model, 2, (), "ep_size=2")


def test_experts_that_are_left_out_are_not_distributed():
    model = with_experts(Experts())
    with pytest.raises(ConfigError, match=r"the experts of experts are left out by fsdp\.ignored_modules"):
        plan_experts(model, 2, [model.experts], "ep_size=2")
