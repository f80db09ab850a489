"""Losses and gradients in chunks of tokens equal those of whole logits; what cannot be made so is refused by name."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from accel_trainer import Accelerator
from accel_trainer.config import LossImplementation
from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.techniques.chunked_loss import AbsentLogitsError, LossSettings, _Criterion, find_chunked_loss
from tests.cells import beyond, crossed
from tests.conformance.test_conformance import LAYOUTS, mark
from tests.ranks import preload, run_ranks

preload("transformers.models.auto.modeling_auto", "accel_trainer.accelerator")

VOCABULARY = 97
LAYERS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
# What stands between head and loss differs: nothing, a scale, soft-capping, a bias for each word, another shift.
FAMILIES: dict[str, tuple[type, str, dict[str, Any]]] = {
    "llama": (AutoModelForCausalLM, "llama", LAYERS),
    "mistral": (AutoModelForCausalLM, "mistral", LAYERS),
    "qwen2 tied": (AutoModelForCausalLM, "qwen2", {**LAYERS, "tie_word_embeddings": True}),
    "gemma2 capped": (AutoModelForCausalLM, "gemma2", {**LAYERS, "head_dim": 8, "final_logit_softcapping": 5.0}),
    "cohere": (AutoModelForCausalLM, "cohere", {**LAYERS, "logit_scale": 0.5}),
    "granite": (AutoModelForCausalLM, "granite", {**LAYERS, "logits_scaling": 3.0}),
    "phi with a bias": (AutoModelForCausalLM, "phi", LAYERS),
    "mixtral": (AutoModelForCausalLM, "mixtral", {**LAYERS, "num_local_experts": 4, "output_router_logits": True}),
    "gpt2": (AutoModelForCausalLM, "gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 4}),
    "bert": (AutoModelForMaskedLM, "bert", LAYERS),
    "t5": (AutoModelForSeq2SeqLM, "t5", {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8}),
    "bart": (
        AutoModelForSeq2SeqLM,
        "bart",
        {
            "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
        },
    ),
}  # fmt: skip
BY_ITEMS = [name for name in FAMILIES if name not in ("bert", "t5", "bart")]


def build(family: str = "llama", vocabulary: int = VOCABULARY, **changes: Any) -> Any:
    """Return a tiny model of a family, without dropout; the same values each time."""
    kind, name, options = FAMILIES[family]
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = kind.from_config(AutoConfig.for_model(name, vocab_size=vocabulary, **options, **tokens, **changes))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if family == "bart":
        model.final_logits_bias.normal_()
    return model.train()


def batch(length: int = 11) -> dict[str, Tensor]:
    """Return three rows, one of which has no label at all, and one few."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (3, length), generator=generator)
    labels = tokens.clone()
    labels[0, : length // 2] = -100
    labels[2] = -100
    return {"input_ids": tokens, "labels": labels}


def prepare(model: nn.Module, loss_chunk_tokens: int | None = 5, **config: Any) -> Any:
    """Return a model that makes its loss in chunks, of five tokens by default: 33 are no multiple of it."""
    config = {"loss": "chunked", "loss_chunk_tokens": loss_chunk_tokens, **config}
    return Accelerator(cpu=True, config=config).prepare(model)


def gradients(model: Any, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a backward, and its gradients by name."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6, nan_ok=True)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(("family", "chunk_tokens"), crossed(FAMILIES, [5, 1, None]))
def test_loss_and_gradients_are_those_of_whole_logits(family: str, chunk_tokens: int | None):
    assert_same(gradients(prepare(build(family), chunk_tokens), **batch()), gradients(build(family), **batch()))


@pytest.mark.parametrize("family", BY_ITEMS)
def test_a_loss_by_items_is_divided_by_them(family: str):
    inputs = {**batch(), "num_items_in_batch": torch.tensor(37)}
    assert_same(gradients(prepare(build(family)), **inputs), gradients(build(family), **inputs))


def test_labels_that_are_shifted_already_and_labels_by_place_count_alike():
    model, inputs = prepare(build()), batch()
    shifted = nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    expected = gradients(build(), **inputs)
    assert_same(gradients(model, **inputs, shift_labels=shifted), expected)
    with torch.no_grad():
        loss = model(inputs["input_ids"], None, None, None, None, inputs["labels"], return_dict=False)[0]
    assert loss.item() == pytest.approx(expected[0], rel=1e-6)


def test_a_row_of_no_labels_alone_gives_the_plain_result():
    inputs = {name: value[2:] for name, value in batch().items()}
    assert_same(gradients(prepare(build()), **inputs), gradients(build(), **inputs))  # NaN, and gradients of 0
    loss, found = gradients(prepare(build()), **inputs, num_items_in_batch=torch.tensor(4))
    assert loss == 0.0
    assert all(not gradient.any() for gradient in found.values())


def test_no_tensor_of_whole_logits_is_made():
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            self.numel = max(self.numel, *(x.numel() for x in [result] if isinstance(x, Tensor)), 0)
            return result

    sizes, inputs = {}, batch(32)
    for name, model in {"plain": build(), "chunked": prepare(build())}.items():
        with Largest() as largest:
            model(**inputs).loss.backward()
        sizes[name] = largest.numel
    assert sizes["plain"] == 3 * 32 * VOCABULARY
    assert sizes["chunked"] == max(VOCABULARY * 32, 3 * 32 * 64)  # the head's gradient; activations of a layer


def test_logits_are_made_in_evaluation_and_where_there_are_no_labels():
    model, reference, inputs = prepare(build()), build(), batch()
    torch.testing.assert_close(model(inputs["input_ids"]).logits, reference(inputs["input_ids"]).logits)
    model.eval()
    torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits)
    skipped = model(**inputs, skip_logits=True)  # a Trainer's evaluation for which the loss is enough
    assert skipped.loss.item() == pytest.approx(model(**inputs).loss.item(), rel=1e-6)
    assert not isinstance(skipped.logits, Tensor)


def test_a_model_that_is_left_in_eval_is_told_of_where_it_trains(caplog: pytest.LogCaptureFixture):
    """As `from_pretrained()` leaves it: no logits are spared, which nobody would see."""
    model, inputs = prepare(build("gpt2")), batch()
    message = r"loss=chunked .*: GPT2LMHeadModel is in eval\(\), .* call train\(\)"
    with torch.no_grad():
        model.eval()(**inputs)
    model.train()(**inputs)
    assert not caplog.records
    assert isinstance(model.eval()(**inputs).logits, Tensor)
    model(**inputs)
    assert [bool(re.search(message, record.getMessage())) for record in caplog.records] == [True]


def test_logits_that_were_not_made_say_so():
    outputs = prepare(build())(**batch())
    message = (
        r"logits of LlamaForCausalLM are asked for \('argmax'\), and loss=chunked .* without labels or in eval\(\)"
    )
    with pytest.raises(AbsentLogitsError, match=message):
        outputs.logits.argmax(-1)
    with pytest.raises(AbsentLogitsError, match="are asked for"):
        outputs.logits[0]
    with pytest.raises(AbsentLogitsError, match="are asked for"):
        outputs.logits * 2.0
    assert not hasattr(outputs.logits, "detach")
    assert "never made" in repr(outputs.logits)


def softened(model: Any, change: Any) -> Any:
    """Have a model's loss function get other logits."""
    inner = model.loss_function
    model.loss_function = lambda logits, labels, **options: inner(change(logits), labels, **options)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: 3.0 * torch.tanh(logits / 3.0) + 1.0,
        lambda logits: torch.tensor(0.7) * logits.tanh().contiguous() - 0.5,
        lambda logits: torch.div(torch.mul(logits, 2.0), 1.5).to(torch.float32),
        lambda logits: logits.reshape(*logits.shape)[:, :, :] + torch.linspace(-1, 1, VOCABULARY),
    ],
    ids=["capped", "by a tensor", "functions", "by words"],
)
def test_functions_of_each_logit_are_followed(change: Any):
    inputs = batch()
    assert_same(gradients(prepare(softened(build(), change)), **inputs), gradients(softened(build(), change), **inputs))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda logits: logits.softmax(-1), "softmax"),
        (lambda logits: torch.relu(logits), "relu"),
        (lambda logits: logits[..., :50], r"\[\]"),
        (lambda logits: logits + logits, r"add\(DeferredLogits\)"),
        (lambda logits: logits * nn.Parameter(torch.ones(())), r"mul\(tensor\)"),
        (lambda logits: logits + torch.ones(11, 1), r"add\(tensor\)"),
        (lambda logits: logits.view(-1), "view"),
    ],
)
def test_what_changes_logits_otherwise_is_refused(change: Any, name: str):
    with pytest.raises(ConfigError, match=rf"LlamaForCausalLM makes its loss of logits by '{name}', .* loss to plain"):
        prepare(softened(build(), change))(**batch())


def mean_of_rows(logits: Any, labels: Tensor, **_: Any) -> Tensor:
    losses = nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), reduction="none")
    return losses.mean()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (mean_of_rows, r"by \"cross_entropy\(reduction='none', target of \(33,\)\)\""),
        (lambda *_, **__: torch.ones(()), "makes its loss of something else than cross_entropy of its head's logits"),
    ],
)
def test_other_losses_than_a_mean_or_a_sum_of_the_logits_are_refused(function: Any, message: str):
    model = build()
    model.loss_function = function
    with pytest.raises(ConfigError, match=message):
        prepare(model)(**batch())


def test_smoothed_labels_give_the_loss_of_whole_logits():
    inputs = batch()
    shifted = nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    for family in ("llama", "gemma2 capped"):
        reference, model = build(family), prepare(build(family))
        logits = reference(inputs["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), label_smoothing=0.1)
        loss.backward()
        expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        chunked = find_chunked_loss(model)
        assert chunked is not None
        chunked.label_smoothing = 0.1
        assert_same(gradients(model, **inputs), (loss.item(), expected))


def test_frozen_heads_and_frozen_bodies_get_no_gradients():
    inputs = batch()
    for names in (("lm_head",), ("model.",)):
        models = {"plain": build(), "chunked": build()}
        for model in models.values():
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(names))
        assert_same(gradients(prepare(models["chunked"]), **inputs), gradients(models["plain"], **inputs))


@pytest.mark.parametrize("family", ["llama", "gemma2 capped", "gpt2"])
def test_bf16_is_as_near_to_fp32_as_with_whole_logits(family: str):
    inputs = batch()
    exact = gradients(build(family), **inputs)
    plain = Accelerator(cpu=True, mixed_precision="bf16").prepare(build(family))
    found = {
        "plain": gradients(plain, **inputs),
        "chunked": gradients(prepare(build(family), mixed_precision="bf16"), **inputs),
    }
    assert found["chunked"][0] == pytest.approx(found["plain"][0], rel=2e-3)
    for name, gradient in exact[1].items():
        errors = {
            way: (result[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-6) for way, result in found.items()
        }
        assert errors["chunked"] < 1.5 * errors["plain"] + 2e-3, name


def test_models_of_16_bits_keep_their_gradients_in_them():
    _, found = gradients(prepare(build().to(torch.bfloat16)), **batch())
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}


def test_gradients_of_windows_add_up():
    model, reference, inputs = prepare(build()), build(), batch()
    for each in (model, reference):
        for factor in (1.0, 0.5):
            (factor * each(**inputs).loss).backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_a_second_backward_is_refused():
    loss = prepare(build())(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match=r"backward\(\) was called a second time on a loss in chunks"):
        loss.backward()


def test_a_prepared_model_can_be_copied_and_pickled():
    model, inputs = prepare(build()), batch()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(gradients(other, **inputs), gradients(build(), **inputs))
        assert not isinstance(other(**inputs).logits, Tensor)


def test_another_accelerator_may_make_the_loss_of_whole_logits_again():
    model = Accelerator(cpu=True).prepare(prepare(build()))
    assert isinstance(model(**batch()).logits, Tensor)
    assert not isinstance(prepare(model)(**batch()).logits, Tensor)


@pytest.mark.parametrize(("family", "regional"), [("gemma2 capped", False), ("llama", True)])
def test_compiled_models_make_their_loss_in_chunks(family: str, regional: bool):
    # Half of the tracing would be that of a cache, which no training reads.
    model = prepare(build(family, use_cache=False), compile={"backend": "aot_eager", "regional": regional})
    assert_same(gradients(model, **batch()), gradients(build(family), **batch()))
    assert not isinstance(model(**batch()).logits, Tensor)


class Adapted(nn.Linear):
    """A head that is more than its weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * 2.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss": "chunky"}, r"loss in the config dict is 'chunky'; expected one of 'plain', 'chunked', 'liger'"),
        ({"loss_chunk_tokens": 0}, r"loss_chunk_tokens in the config dict is 0; expected a whole number of at least 1"),
        ({"loss": "plain", "loss_chunk_tokens": 8}, r"loss_chunk_tokens=8 .* contradicts loss=plain"),
        ({"loss": "liger", "loss_chunk_tokens": 8}, r"loss_chunk_tokens=8 .* contradicts loss=liger"),
    ],
)
def test_options_that_mean_nothing_are_refused(config: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, config=config)


def test_a_number_of_tokens_alone_asks_for_chunks():
    accelerator = Accelerator(cpu=True, config={"loss_chunk_tokens": 8})
    assert accelerator.config.loss == "chunked"
    assert accelerator.resolved.describe("loss") == "loss=chunked (from the config dict)"


def test_models_without_a_plain_head_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"loss=chunked .*: Linear has no head by get_output_embeddings\(\)"):
        prepare(nn.Linear(2, 2))
    model = build()
    model.lm_head = Adapted(32, VOCABULARY)
    with pytest.raises(ConfigError, match=r"the head of LlamaForCausalLM is a .*\.Adapted, and a torch.nn.Linear is"):
        prepare(model)
    with pytest.raises(ConfigError, match=r"compile.fullgraph=true .* contradicts loss=chunked"):
        prepare(build(), compile={"backend": "aot_eager", "fullgraph": True})
    # Nobody makes a loss of models that are there to be evaluated.
    Accelerator(cpu=True, config={"loss": "chunked"}).prepare_model(nn.Linear(2, 2), evaluation_mode=True)


def test_liger_says_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(MissingExtraError, match=r"loss=liger .* needs liger-kernel, .* pip install liger-kernel"):
        Accelerator(cpu=True, config={"loss": "liger"}).prepare(build())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"loss=liger .* needs a GPU, and this process computes on cpu; use chunked"):
        Accelerator(cpu=True, config={"loss": "liger"}).prepare(build())


def liger_fused_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, softcap: float | None, **options: Any
) -> Tensor:
    """Compute what Liger's function of this name (0.8.5) promises, of whole logits."""
    assert options.pop("accum_dtype") is torch.float32
    logits = nn.functional.linear(hidden, weight, bias)
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return nn.functional.cross_entropy(capped, target, **options)


@pytest.mark.parametrize("family", ["llama", "gemma2 capped", "cohere", "granite", "phi with a bias"])
def test_liger_gets_the_scale_and_the_cap_of_the_logits(monkeypatch: pytest.MonkeyPatch, family: str):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", sys.modules[__name__])
    model, other = prepare(build(family)), prepare(build("bart"))
    for each in (model, other):
        chunked = find_chunked_loss(each)
        assert chunked is not None
        chunked.settings = LossSettings(LossImplementation.LIGER, None)
    assert_same(gradients(model, **batch()), gradients(build(family), **batch()))
    with pytest.raises(ConfigError, match=r"loss=liger has a kernel for .* this model's are changed by 'add', too"):
        other(**batch())


CAP = (("div", 3.0), ("tanh", None), ("mul", 3.0), ("to", torch.float32))


def head() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states (9, 8), a head (12, 8) with its bias, and targets, two of which do not count."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((9, 8), (12, 8), (12,)))
    target = torch.arange(9) % 12
    target[[2, 7]] = -100
    return hidden.requires_grad_(), weight, bias, target


SHARED_HEADS = {
    "bare": ((), 0.0), "bare, smoothed": ((), 0.1), "capped": (CAP, 0.0), "capped, smoothed": (CAP, 0.1),
}  # fmt: skip


def sums_of_shards(changes: Any, smoothing: float) -> list[Tensor]:
    """Return the sum, and its gradients, of a head of which each rank has half the words; NaN for no word at all."""
    rank, (hidden, weight, bias, target) = dist.get_rank(), head()
    weight, bias = (x[6 * rank : 6 * rank + 6].clone().requires_grad_() for x in (weight, bias))
    settings = LossSettings(LossImplementation.CHUNKED, 4)
    criterion = _Criterion(settings, changes, -100, smoothing, dist.group.WORLD, wants_gradients=True)
    total = criterion.of_tensors(hidden, weight, bias, target)
    total.backward()
    dist.all_reduce(hidden.grad)
    target[0] = 12
    with torch.no_grad():
        assert criterion.of_tensors(hidden, weight, bias, target).isnan()
    return [total.detach(), hidden.grad, weight.grad, bias.grad]


def sums_of_all_shards() -> dict[str, list[Tensor]]:
    dist.init_process_group("gloo")
    return {name: sums_of_shards(*how) for name, how in SHARED_HEADS.items()}


@pytest.fixture(scope="module")
def shared_sums() -> list[dict[str, list[Tensor]]]:
    return run_ranks(sums_of_all_shards, 2, timeout=100)


@pytest.mark.parametrize("name", SHARED_HEADS)
def test_ranks_that_share_the_words_find_the_loss_of_all(name: str, shared_sums: list[dict[str, list[Tensor]]]):
    changes, smoothing = SHARED_HEADS[name]
    hidden, weight, bias, target = head()
    weight.requires_grad_(), bias.requires_grad_()
    logits = nn.functional.linear(hidden, weight, bias)
    logits = 3.0 * torch.tanh(logits / 3.0) if changes else logits
    total = nn.functional.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
    total.backward()
    for rank, found in enumerate(shared_sums):
        own = slice(6 * rank, 6 * rank + 6)
        expected = [total.detach(), hidden.grad, weight.grad[own], bias.grad[own]]
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


# Heads that a family ties, scales, caps or gives a bias, in the shards of each engine that has some.
HEADS = ("qwen2 tied", "gemma2 capped", "cohere", "phi with a bias")
ENGINES = ("tp", "fsdp2", "hsdp", "tp_shards", "sp", "zero3")
SHARED_WORDS = 96
SMOOTHING = {"cohere": 0.1, "gemma2 capped": 0.2}


def shared_rows() -> tuple[Tensor, Tensor]:
    """Return four rows with equally many labels."""
    tokens = torch.randint(3, SHARED_WORDS, (4, 12), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    labels[:, 1:5] = -100
    return tokens, labels


def steps_of_shards(engine: str) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Return the loss of all rows and, on rank 0, the full weights after a step of size 1, by family."""
    found = {}
    for family in HEADS:
        accelerator = LAYOUTS[engine].accelerator({"loss": "chunked", "loss_chunk_tokens": 5})
        model = build(family, SHARED_WORDS)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        chunked = find_chunked_loss(model)
        assert chunked is not None
        chunked.label_smoothing = SMOOTHING.get(family, 0.0)
        tokens, labels = (
            rows.chunk(accelerator.readers.world_size)[accelerator.readers.rank] for rows in shared_rows()
        )
        loss = model(input_ids=tokens, labels=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        found[family] = accelerator.reduce(loss.detach(), "mean").item(), state
        accelerator.free_memory()
    return found


@pytest.mark.multirank
@pytest.mark.parametrize("engine", [mark(name) if name == "tp" else beyond(mark(name)) for name in ENGINES])
def test_sharded_heads_of_families_give_the_step_of_whole_logits(engine: str):
    found = run_ranks(steps_of_shards, LAYOUTS[engine].world_size, engine, timeout=150)[0]
    tokens, labels = shared_rows()
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    for family, (loss, state) in found.items():
        model = build(family, SHARED_WORDS)
        expected = nn.functional.cross_entropy(
            model(tokens).logits.flatten(0, 1), shifted.flatten(), label_smoothing=SMOOTHING.get(family, 0.0)
        )
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-6), family
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                state[name], parameter.detach() - parameter.grad, rtol=1e-5, atol=1e-6,
                msg=lambda text, n=f"{family} {name}": f"{n}: {text}",
            )  # fmt: skip


def test_no_tokens_have_gradients_of_zero():
    hidden, weight, bias, target = head()
    weight.requires_grad_()
    criterion = _Criterion(LossSettings(LossImplementation.CHUNKED, None), (), -100, 0.0, None, wants_gradients=True)
    criterion.of_tensors(hidden[:0], weight, bias, target[:0]).backward()
    assert not weight.grad.any()
