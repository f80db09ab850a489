"""Tensor parallelism by the plans of transformers' models, and by one of one's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_outputs import CausalLMOutput

from accel_trainer.errors import ConfigError
from accel_trainer.strategies.parallel.plans import plan_layers
from accel_trainer.strategies.parallel.tensor_parallel import check_loss
from tests import loops
from tests.cells import beyond, selected
from tests.conformance.models import MLP, build_model
from tests.family_matrix import FAMILIES as ALL_FAMILIES
from tests.family_matrix import compare, docs_table, find_difference
from tests.loops import adamw, check_open_window, resume_open_window, start, updates
from tests.ranks import preload, run_ranks

preload("transformers.models.auto.modeling_auto", "accel_trainer.accelerator")

IS_NEW = Version(transformers.__version__) >= Version("5.23")
needs_new = pytest.mark.skipif(not IS_NEW, reason="needs a newer transformers")

# Of each way in which a plan shards something, one family (`make test-families` has all): biases and a tied head, a
# head with a bias, experts of a mixture with the loss that balances their load; beyond the sample, scaled and tied
# embeddings with norms of heads, fused matrices that are gathered, fused heads, other experts.
FAMILIES = ("qwen2", "phi", "mixtral", "gemma3_text", "phi3", "gpt_neox", "qwen3_moe")
# Of which gradients are compared: latent heads, bare parameters, experts with rows of their own, weights that a kernel
# gets, a norm in an embedding.
BY_GRADIENT = ("minicpm3", "granite_swa", "llama4_text", "lfm2_moe", "inkling_text")
# Before, its plan says of a bare parameter what is said of modules, which is refused.
NEW_BY_GRADIENT = ("granite_swa",)


def marked_new(kinds: Sequence[str], new: Sequence[str]) -> list[Any]:
    """Return kinds as parameters of a test; those of `new` have no plan, or another, in older releases."""
    return [pytest.param(kind, marks=needs_new) if kind in new else kind for kind in kinds]


def tiny_model(kind: str) -> nn.Module:
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "output_router_logits": True}
    return loops.tiny_model(kind, num_hidden_layers=1, tie_word_embeddings=kind == "qwen2", **experts)


def tokens(rows: int = 2, length: int = 10) -> Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def same_batches() -> list[dict[str, Tensor]]:
    return [{"input_ids": tokens(), "labels": tokens()}] * 2


def train_families(kinds: list[str]) -> dict[str, Any]:
    accelerator = start(sizes={"tp_size": 2})
    found = {}
    for kind in kinds:
        plain = tiny_model(kind)
        model = copy.deepcopy(plain)
        expected = updates(plain, adamw(plain), same_batches())
        model, optimizer = accelerator.prepare(model, adamw(model))
        trained = updates(model, optimizer, same_batches(), accelerator)
        with torch.no_grad():
            logits = [each(tokens()).logits for each in (plain, model)]
            # transformers 5.17 cannot balance experts over one token after others.
            options = {"output_router_logits": False} if kind == "mixtral" else {}
            texts = [each.generate(tokens(), max_new_tokens=4, do_sample=False, **options) for each in (plain, model)]
        share = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
        found[kind] = (expected, trained, (logits[0] - logits[1]).abs().max().item(), texts[0].equal(texts[1]), share)
        accelerator.free_memory()
    return found


def lossy_labels() -> Tensor:
    """Return labels of which some say nothing, and none of the first row does."""
    labels = tokens().masked_fill(torch.arange(20).view(2, 10) % 3 == 0, -100)
    labels[0] = -100
    return labels


def make_sharded_losses() -> dict[str, Any]:
    """Return losses, gradients and logits of models that gather no logits in training, beside those of plain ones."""
    accelerator = start(sizes={"tp_size": 2, "loss_parallel": True})
    return {kind: make_losses(kind, accelerator) for kind in ("qwen2", "phi", "mixtral")}


def make_losses(kind: str, accelerator: Any) -> dict[str, Any]:
    plain = tiny_model(kind)
    model = accelerator.prepare(copy.deepcopy(plain))
    losses: list[float] = []
    kept: set[int] = set()
    noting = torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.update(x.shape[-1:]), x)[1], lambda x: x)
    for each in (plain, model):
        for labels, options in ((tokens(), {}), (lossy_labels(), {}), (lossy_labels(), {"num_items_in_batch": 5})):
            kept.clear()
            with noting:
                output = each(tokens(), labels=labels, **options)
            output.loss.backward()
            losses.append(output.loss.item())
    found: dict[str, Any] = {"losses": (losses[:3], losses[3:]), "kept": set(kept)}
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    found["gradients"] = max((p.grad - gradients[name]).abs().max().item() for name, p in plain.named_parameters())
    in_tuple = next(x for x in model(tokens(), labels=tokens(), return_dict=False) if x.ndim == 3)
    found["tuple"] = (in_tuple.full_tensor() - output.logits.full_tensor()).abs().max().item()
    found["beyond"] = model(tokens(), labels=tokens() + 60).loss.item()
    with torch.no_grad():
        expected, evaluated = (each.eval()(tokens(), labels=lossy_labels()) for each in (plain, model))
    found["evaluated"] = (expected.loss - evaluated.loss).abs().item()
    found["logits"] = [
        (x - expected.logits).abs().max().item() for x in (evaluated.logits, output.logits.full_tensor())
    ]
    found["types"] = (type(evaluated.logits).__name__, type(output.logits).__name__)
    accelerator.free_memory()
    return found


class Dropping(nn.Module):
    """Dropout before a layer's two matrices, between them, and behind them; of the second half, computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.before, self.between, self.behind = (nn.Dropout(0.5) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        return x + self.behind(self.down(self.between(torch.tanh(self.up(self.before(x))))))

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.body, self.body(x), use_reentrant=False).square().mean()


DROPOUTS = ("before", "between", "behind")


def dropping(masks: dict[str, list[Tensor]], given: bool = False) -> Dropping:
    """Return the model; its masks are noted, or taken one after the other."""
    torch.manual_seed(0)
    model = Dropping()

    def note(name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if given:
            return args[0] * masks[name].pop(0)
        masks[name].append((output / args[0]).detach())
        return output

    for name in DROPOUTS:
        getattr(model, name).register_forward_hook(functools.partial(note, name))
    return model


def drop_out() -> dict[str, Any]:
    """Return masks, loss and gradients of a model with dropout, and the activations of one of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    accelerator = start(sizes={"tp_size": 2, "tp_plan": {"up": "colwise", "down": "rowwise"}})
    found: dict[str, Any] = {"masks": {name: [] for name in DROPOUTS}}
    model = accelerator.prepare(dropping(found["masks"]))
    torch.manual_seed(1)
    loss = model(torch.ones(4, 8))
    accelerator.backward(loss)
    found["loss"] = loss.item()
    found["gradients"] = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    rates = dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("starcoder2", vocab_size=64, num_key_value_heads=2, **sizes, **rates)
    accelerator = start(sizes={"tp_size": 2})
    model = accelerator.prepare(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    output = model.train()(tokens(), output_hidden_states=True, output_attentions=True)
    found["hidden"], found["attention"] = output.hidden_states, output.attentions
    return found


def load_empty(sizes: dict[str, int], folder: str) -> dict[str, Any]:
    """Return the reads of a model without values, which is sharded first, and its distance from the plain one."""
    from accel_trainer import init_empty_weights
    from accel_trainer.checkpoint.weights.into_model import load_checkpoint_in_model
    from accel_trainer.checkpoint.weights.weight_files import WeightFiles

    accelerator = start(sizes=sizes)
    with init_empty_weights(include_buffers=True):
        model = tiny_model("qwen2")
    model = accelerator.prepare(model)
    read: dict[str, int] = {}
    fill = WeightFiles.fill
    WeightFiles.fill = lambda self, name, index, to: read.update({name: to.numel()}) or fill(self, name, index, to)
    try:
        report = load_checkpoint_in_model(model, folder)
    finally:
        WeightFiles.fill = fill
    with torch.no_grad():
        logits = [each.eval()(tokens()).logits for each in (model, tiny_model("qwen2"))]
    held = {name: p.to_local().numel() for name, p in model.named_parameters()}
    return {"read": read, "held": held, "report": report, "logits": (logits[0] - logits[1]).abs().max().item()}


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"config": {"fsdp": {"activation_checkpointing": True}}},
    "compiled": {"dynamo_backend": "eager"},
}


class Gated(nn.Module):
    """Two layers that share an input. To compile one layer of transformers takes a rank 6 s of a core."""

    _tp_plan: ClassVar = {"embed": "replicate", "gate": "colwise", "up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        x = self.embed(input_ids)
        logits = self.down(torch.tanh(self.gate(x)) * self.up(x))
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def count_sums(way: str) -> dict[str, Any]:
    """Return the sums over ranks in the forward and in the backward of a second micro-batch, and gradients of both."""
    accelerator = start(sizes={"tp_size": 2}, gradient_accumulation_steps=2, **WAYS[way])
    plain = Gated() if way == "compiled" else tiny_model("qwen3")
    model = accelerator.prepare(copy.deepcopy(plain))
    for batch in same_batches():
        (plain(**batch).loss / 2).backward()
        with accelerator.accumulate(model):
            with profile(activities=[ProfilerActivity.CPU]) as forward:
                loss = model(**batch).loss
            with profile(activities=[ProfilerActivity.CPU]) as backward:
                accelerator.backward(loss)
    events = (profiled.profiler.kineto_results.events() for profiled in (forward, backward))
    calls = [sum(event.name() == "c10d::allreduce_" for event in each) for each in events]
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    difference = max((p.grad - gradients[name]).abs().max().item() for name, p in plain.named_parameters())
    held = [module.copies for module in shared_inputs(model)]
    return {"calls": calls, "gradients": difference, "held": held}


def shared_inputs(model: nn.Module) -> list[Any]:
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return [found for found in (getattr(forward, "shared", None) for forward in forwards) if found is not None]


class OwnPlan(nn.Module):
    """Layers of one's own: fused halves, siblings between which their input changes in place, and experts."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        torch.manual_seed(0)
        self.enter = nn.Linear(8, 8)
        self.fused, self.leave = nn.Linear(8, 32), nn.Linear(16, 8)
        # Without a gradient of its weight a layer keeps no input, and autograd allows the change.
        self.early, self.late = (nn.Linear(8, 16).requires_grad_(False) for _ in range(2))
        self.join = nn.Linear(16, 8)
        config = AutoConfig.for_model("mixtral", hidden_size=8, intermediate_size=16, num_local_experts=4)
        self.experts = MixtralExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fused(self.enter(x)).chunk(2, dim=-1)
        x = self.leave(torch.tanh(gate) * up)
        early = self.early(x)
        x.mul_(-3)
        x = self.join(torch.tanh(early) * self.late(x))
        chosen = torch.arange(2 * len(x)).view(len(x), 2) % 4
        return self.experts(x, chosen, torch.full(chosen.shape, 0.5)).square().mean()


OWN_PLAN = {
    "fused": "colwise_gather_output",
    "leave": "rowwise_split_input",
    "early": "colwise",
    "late": "colwise",
    "join": "rowwise",
    "enter": "replicate",
    "experts": "moe_tp_experts",
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
}


class Penalized(nn.Module):
    """A sharded layer beside a way around it, whose gradient is there without the layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(3).sum() + self.down(torch.tanh(self.up(x))).sum()


def train_own_models() -> dict[str, Any]:
    """Return what becomes of a plan of one's own, of ids beyond a vocabulary, and of gradients of gradients."""
    accelerator = start(sizes={"tp_size": 2, "tp_plan": OWN_PLAN})
    plain = OwnPlan()
    model = accelerator.prepare(copy.deepcopy(plain))
    losses = [each(torch.linspace(-1, 1, 48).view(6, 8)) for each in (plain, model)]
    for loss in losses:
        loss.backward()
    trained = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    expected = {name: plain.get_parameter(name).grad for name in trained}
    differences = {name: ((x - trained[name]).abs().max() / x.abs().max()).item() for name, x in expected.items()}
    found: dict[str, Any] = {"losses": [loss.item() for loss in losses], "gradients": differences}
    found["shapes"] = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    accelerator = start(sizes={"tp_size": 2})
    ids = tokens(rows=3)
    ids[0, 3], ids[1, 0] = 64, -1
    with torch.no_grad():
        if IS_NEW:  # before, the plan leaves the embedding whole, and torch refuses the id
            found["beyond"] = accelerator.prepare(tiny_model("llama")).eval()(ids).logits.isnan().any(-1)
    accelerator = start(sizes={"tp_size": 2, "tp_plan": {"up": "colwise", "down": "rowwise"}})
    x = torch.ones(2, 8, requires_grad=True)
    try:
        torch.autograd.grad(accelerator.prepare(Penalized())(x), x, create_graph=True)
    except ConfigError as error:
        found["twice"] = str(error)
    return found


def on_two_ranks(folder: str, families: list[str], by_gradient: list[str]) -> dict[str, Any]:
    found = {"loaded": load_empty({"tp_size": 2}, folder), "dropout": drop_out()}
    found["sums"] = {way: count_sums(way) for way in WAYS}
    # In transformers 5.17 its sizes of other releases are an error.
    refused = compare(["glm5_next_text"], given=False) if IS_NEW else None
    found |= {"gradients": compare(by_gradient), "refused": refused}
    return train_families(families) | found | {"sharded losses": make_sharded_losses(), "own": train_own_models()}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("weights"))
    tiny_model("qwen2").save_pretrained(folder)  # with tied embeddings
    return folder


@pytest.fixture(scope="module")
def families(weights: str, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    trained, compared = (
        [kind for (kind,) in selected(request, name)]
        for name in (
            "test_a_family_of_transformers_trains_and_generates_as_on_one_process",
            "test_a_familys_gradients_are_those_of_one_process",
        )
    )
    return run_ranks(on_two_ranks, 2, weights, trained, compared, timeout=150)


@pytest.mark.parametrize("kind", [*FAMILIES[:3], *map(beyond, FAMILIES[3:])])
def test_a_family_of_transformers_trains_and_generates_as_on_one_process(kind: str, families: list[dict[str, Any]]):
    for found in families:
        expected, trained, difference, is_same_text, share = found[kind]
        assert trained == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert difference < 1e-3  # after updates of 1e-2 that follow the sign of a gradient
        assert is_same_text
        assert share < 0.6


@pytest.mark.parametrize("way", WAYS)
def test_an_input_that_layers_share_has_its_gradient_summed_once(way: str, families: list[dict[str, Any]]):
    for found in (of_rank["sums"][way] for of_rank in families):
        # Forward: the embedding, which older plans leave whole, and the outputs of attention and MLP. Backward: the
        # inputs of head, attention and MLP, and the weights of two norms of heads; what is computed again adds up the
        # output of attention, too.
        assert found["calls"] == ([1, 1] if way == "compiled" else [2 + IS_NEW, 5 + (way == "checkpointed")])
        assert found["gradients"] < 2e-6
        # Queries, keys, values; gate, up: nothing outlives the forward.
        assert found["held"] == [None] * (2 if way == "compiled" else 5)


@pytest.mark.parametrize("kind", marked_new(BY_GRADIENT, NEW_BY_GRADIENT))
def test_a_familys_gradients_are_those_of_one_process(kind: str, families: list[dict[str, Any]]):
    for found in (of_rank["gradients"][kind] for of_rank in families):
        assert not find_difference(found)
        assert found.share < 1


@needs_new
def test_a_layer_that_is_given_all_inputs_for_its_shard_says_so(families: list[dict[str, Any]]):
    for found in (of_rank["refused"]["glm5_next_text"].refused for of_rank in families):
        assert "'layers.0.self_attn.o_proj' as 'rowwise', for this rank's shard of its 32 inputs, and it is" in found
        assert "give it 'rowwise_split_input' in tp_plan" in found


def test_fused_layers_experts_and_inputs_changed_in_place_are_exact_by_a_plan_of_ones_own(families: Any):
    for found in (of_rank["own"] for of_rank in families):
        assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5)
        assert found["gradients"].keys() >= {"enter.weight", "fused.weight", "leave.weight", "experts.gate_up_proj"}
        assert max(found["gradients"].values()) < 1e-5, found["gradients"]
        assert found["shapes"]["experts.gate_up_proj"] == (2, 32, 8)  # each rank has two experts in full
        assert found["shapes"]["fused.weight"] == (16, 8)


@needs_new
def test_an_id_beyond_the_vocabulary_makes_its_row_nan(families: list[dict[str, Any]]):
    for found in (of_rank["own"]["beyond"] for of_rank in families):
        assert found.tolist() == [[True] * 10, [True] * 10, [False] * 10]


def test_gradients_of_gradients_are_refused_by_sharded_layers(families: list[dict[str, Any]]):
    for found in families:
        assert "a backward of FSDPPenalized with create_graph=True" in found["own"]["twice"]


def test_the_page_has_the_families_and_what_the_others_need():
    page = Path(__file__).parents[3] / "docs" / "parallelism.md"
    assert docs_table() in page.read_text(), "paste what python -m tests.family_matrix --table prints"
    assert set(BY_GRADIENT) | set(FAMILIES) <= ALL_FAMILIES.keys()


@pytest.mark.parametrize("kind", ["qwen2", "phi", "mixtral"])
def test_a_loss_of_sharded_logits_is_that_of_full_ones(kind: str, families: list[dict[str, Any]]):
    for found in (of_rank["sharded losses"][kind] for of_rank in families):
        expected, losses = found["losses"]
        assert losses == pytest.approx(expected, abs=2e-6)
        assert found["gradients"] < 2e-6
        if kind != "mixtral":  # whose experts keep as many columns
            assert max(found["kept"]) < 64  # of the vocabulary: nobody keeps its full logits
        assert found["beyond"] != found["beyond"]


@pytest.mark.parametrize("kind", ["qwen2", "phi", "mixtral"])
def test_logits_are_full_in_evaluation_and_sharded_in_training(kind: str, families: list[dict[str, Any]]):
    for found in (of_rank["sharded losses"][kind] for of_rank in families):
        assert found["types"] == ("Tensor", "DTensor")
        assert max(found["evaluated"], found["tuple"], *found["logits"]) < 2e-6


def test_dropout_is_a_ranks_own_where_activations_are_sharded_and_equal_elsewhere(families: list[dict[str, Any]]):
    first, second = (found["dropout"]["masks"] for found in families)
    for name in DROPOUTS:
        for own, other in zip(first[name], second[name], strict=True):
            assert own.equal(other) == (name != "between")
        assert not first[name][1].equal(first[name][0])
    for name in ("before", "between"):  # what is computed again ends where enough is known
        assert first[name][2].equal(first[name][1])


def test_a_step_with_dropout_is_that_of_one_process_with_the_same_masks(families: list[dict[str, Any]]):
    first, second = (found["dropout"]["masks"] for found in families)
    masks = {name: list(first[name]) for name in DROPOUTS}
    masks["between"] = [torch.cat(pair, dim=-1) for pair in zip(first["between"], second["between"], strict=True)]
    model = dropping(masks, given=True)
    loss = model.body(model.body(torch.ones(4, 8))).square().mean()
    loss.backward()
    for found in (of_rank["dropout"] for of_rank in families):
        assert found["loss"] == pytest.approx(loss.item(), abs=2e-6)
        for name, parameter in model.named_parameters():
            assert torch.allclose(found["gradients"][name], parameter.grad, atol=2e-6), name


def test_a_models_heads_drop_out_by_themselves_and_its_hidden_states_alike(families: list[dict[str, Any]]):
    first, second = (found["dropout"] for found in families)
    assert all(map(torch.equal, first["hidden"], second["hidden"]))
    for own, other in zip(first["attention"], second["attention"], strict=True):
        assert own.shape[1] == 2  # of 4 heads
        dropped = [(each == 0).tril() for each in (own, other)]
        assert 0.15 < dropped[0].sum() / torch.ones_like(own).tril().sum() < 0.45
        assert (dropped[0] ^ dropped[1]).sum() > 0.2 * torch.ones_like(own).tril().sum()  # 0.42 of unrelated ones


@pytest.mark.parametrize("layout", ["alone", "with shards"])
def test_a_model_without_values_is_sharded_first_and_each_rank_reads_its_own(layout: str, request: Any):
    results = request.getfixturevalue("families" if layout == "alone" else "meshed")
    full = {name: p.numel() for name, p in tiny_model("qwen2").named_parameters()}
    for found in (of_rank["loaded"] for of_rank in results):
        assert found["read"] == found["held"]
        assert found["report"] == ([], [], [])
        assert found["logits"] < 2e-6
    for name in full:
        shares = [found["loaded"]["read"][name] for found in results]
        is_sharded = "norm" not in name and not name.endswith("down_proj.bias")
        assert sum(shares) == full[name] * (1 if is_sharded else 2), name


# --- two ranks for the layers, two for the shards ---------------------------------------------------------------------


def batches(accelerator: Any, rows: int) -> Any:
    samples = [{"input_ids": row, "labels": row} for row in tokens(rows)]
    return accelerator.prepare(torch.utils.data.DataLoader(samples, batch_size=1))


build_qwen3 = functools.partial(tiny_model, "qwen3")


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "checkpointed": {"config": {"fsdp": {"activation_checkpointing": True}}},
    "compiled": {"dynamo_backend": "eager"},
    "bf16": {"mixed_precision": "bf16"},
}


def in_a_mesh(directory: str, folder: str, names: list[str]) -> dict[str, Any]:
    sizes = {"tp_size": 2, "dp_shard_size": 2}
    from accel_trainer.utils import set_seed

    found: dict[str, Any] = {"loaded": load_empty(sizes, folder)}
    begin = functools.partial(start, sizes=sizes, gradient_accumulation_steps=4)
    found["window"] = resume_open_window(begin, build_qwen3, tokens(8), directory)
    accelerator = begin()
    # Who reads what.
    set_seed(3)
    loader = batches(accelerator, rows=7)
    seen = [accelerator.gather_for_metrics(batch["input_ids"]) for batch in loader]
    found["metrics"] = torch.cat(seen).tolist() == tokens(7).tolist()
    found["gathered"] = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    with accelerator.split_between_processes(list(range(4))) as own:
        found["split"] = own
    found["places"] = (accelerator.data_parallel_rank, accelerator.tensor_parallel_rank, accelerator.num_processes)
    found["draw"] = torch.rand(1).item()
    # Every rank but rank 0 without values, recomputed activations, 16 bits.
    for name in dict.fromkeys([*names, "bf16"]):  # the last one is exported
        made, plain = start(sizes=sizes, **OPTIONS[name]), tiny_model("qwen3")
        model = copy.deepcopy(plain)
        model, optimizer = made.prepare(model, adamw(model))
        found[name] = (updates(model, optimizer, same_batches(), made), updates(plain, adamw(plain), same_batches()))
    model.save_pretrained(f"{directory}-export")
    exported = type(plain).from_pretrained(f"{directory}-export")
    with torch.no_grad():
        logits = [each(tokens()).logits.float() for each in (exported, made.unwrap_model(model))]
    found["export"] = (logits[0] - logits[1]).abs().max().item()
    return found


@pytest.fixture(scope="module")
def meshed(
    tmp_path_factory: pytest.TempPathFactory, weights: str, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    names = [name for name, _ in selected(request, "test_options_of_fsdp_hold_for_sharded_layers")]
    directory = str(tmp_path_factory.mktemp("mesh") / "state")
    return run_ranks(in_a_mesh, 4, directory, weights, names, timeout=150)


def test_a_window_that_is_saved_open_goes_on_with_its_gradients(meshed: list[dict[str, Any]]):
    check_open_window(meshed[0]["window"], build_qwen3(), tokens(8))


def test_ranks_that_share_layers_count_as_one_reader(meshed: list[dict[str, Any]]):
    for rank, found in enumerate(meshed):
        assert found["metrics"]
        assert found["gathered"] == [0, 1, 2, 3]
        assert found["split"] == ([0, 1] if rank < 2 else [2, 3])
        assert found["places"] == (rank // 2, rank % 2, 4)
    draws = [found["draw"] for found in meshed]
    assert draws[0] == draws[1] != draws[2] == draws[3]


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("none", 2e-6), ("bf16", 0.05), beyond(("checkpointed", 1e-5)), beyond(("compiled", 1e-5))],
)
def test_options_of_fsdp_hold_for_sharded_layers(name: str, tolerance: float, meshed: list[dict[str, Any]]):
    for found in meshed:
        trained, expected = found[name]
        assert trained == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_what_is_saved_is_read_by_from_pretrained(meshed: list[dict[str, Any]]):
    assert all(found["export"] < 0.05 for found in meshed)  # bf16 beside fp32


# --- what is refused --------------------------------------------------------------------------------------------------


class Sinks(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.sinks, self.scale = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.ones(()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


class Marked(nn.Embedding):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.mark = nn.Parameter(torch.zeros(width))


def planned(plan: dict[str, str], **changes: Any) -> nn.Module:
    model = MLP()
    model._tp_plan = plan
    for name, value in changes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (build_model("gpt2"), "^tp_size=2: GPT2LMHeadModel declares no plan .*give it one: model._tp_.*tp_plan: .la"),
        (planned({"third": "colwise"}), "declares no plan for tensor parallelism that names its modules"),
        (planned({"first": "sequence_parallel"}), "has 'sequence_parallel', whose modules take .*no style of transfo"),
        (planned({"first": "diagonal"}), "the plan of MLP has 'diagonal', and known are colwise"),
        (planned({"first": "colwise", "first.weight": "packed_colwise"}), "has 'packed_colwise', and known are"),
        (planned({"first": "packed_colwise"}), "of modules; give a fused layer 'colwise_gather_output', or set tp_s"),
        (
            planned({"first.embed": "embedding_rowwise"}, first=Tied()),
            "shards dimension 0 of first.embed.weight, and gives it none where first.head.weight is tied to it; give",
        ),
        (
            planned({"first.embed": "embedding_colwise", "first.head": "colwise_gather_output"}, first=Tied()),
            "shards dimension 0 of first.head.weight, and shards dimension 1 where first.embed.weight is tied to it",
        ),
        (
            planned({"first": "local_params", "first.sinks": "colwise"}, first=Sinks()),
            "'local_params' for first, and no style for first.scale, with which it computes; give it, or",
        ),
        (
            planned({"first": "local_params", "first.sinks": "colwise", "first.scale": "replicate"}, first=Sinks(3)),
            r"shards dimension 0 of first.sinks, and it is \(3,\), which 2 does not divide; use",
        ),
        (planned({"first": "embedding_rowwise"}, first=Marked(8, 2)), "rows of first, a Marked with mark beside its"),
        (planned({"first": "mla_kv_a_proj"}), "'mla_kv_a_proj' for first, and no qk_rope_head_dim in a MLP"),
        (
            planned(
                {"mlp.gate_proj": "colwise", "second": "replicate"},
                mlp=nn.ModuleDict({"gate_proj": nn.Linear(8, 16)}),
                config=SimpleNamespace(activation_sparsity_pattern=[0.5]),
            ),
            "keeps the largest activations of each layer .*=.0.5.., and its plan gives mlp.gate_proj shards of",
        ),
        (planned({"second": "colwise"}), r"does not divide dimension 0 of second.weight, \(1, 16\); use a size that"),
        (planned({"first": "colwise"}), "does not name second, which has parameters beside them; add it as 'repl"),
        (
            planned({"first": "colwise"}, first=nn.Sequential(nn.Linear(8, 16))),
            "shards first, which is a Sequential without a matrix; leave it out of the plan .adapters",
        ),
        (
            planned({"k_proj": "colwise"}, k_proj=nn.Linear(8, 6), config=SimpleNamespace(num_key_value_heads=3),
                    first=None, second=None),
            "does not divide num_key_value_heads=3 of MLP; use a size that does",
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_sharded_is_refused_before_it_is_touched(model: nn.Module, message: str):
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=message):
        plan_layers(model, 2, (), "tp_size=2")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            MLP(),
            "^loss_parallel=True: MLP makes no loss of its own in the way of causal language models; expected a mo",
        ),
        (build_model("gpt2"), "GPT2LMHeadModel has a full head; expected .*'colwise_gather_output'; leave loss_par"),
        (build_model("bert"), "BertForMaskedLM makes no loss of its own in the way of causal"),
    ],
)
def test_a_model_without_such_a_loss_is_refused(model: nn.Module, message: str):
    with pytest.raises(ConfigError, match=message):
        check_loss(model, {}, "loss_parallel=True")


def test_a_given_plan_comes_before_the_models_own():
    model = planned({"first": "colwise", "second": "rowwise"})
    plan = plan_layers(model, 2, (), "tp_size=2", {"first": "colwise_gather_output", "second": "rowwise_split_input"})
    assert (plan["first"].gives, plan["second"].takes) == ("join", "split")
    plan = plan_layers(planned({}), 2, (), "tp_size=2", {"first": "colwise", "second": "rowwise"})
    assert (plan["first"].gives, plan["second"].takes) == ("shard", "shard")
    with pytest.raises(ConfigError, match=r"^tp_size=2: tp_plan has 'third', and MLP has no such modules; name them"):
        plan_layers(model, 2, (), "tp_size=2", {"third": "colwise"})


def test_a_module_that_is_left_out_is_not_sharded():
    model = MLP()
    with pytest.raises(ConfigError, match=r"the plan shards first, which is left out by fsdp\.ignored_modules"):
        plan_layers(model, 2, [model.first], "tp_size=2")
