"""Packed rows: every token once, the same plan everywhere, batches that hold what documents are, models that fit."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_trainer.data.packing import pack_lengths
from accel_trainer.data_loader import PackingCollator, check_packing, pack_dataset
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from tests.cells import crossed
from tests.number_sets import prepare

STRATEGIES = ("bfd", "bfd_split", "wrapped")


class Documents(Dataset):
    """Document i has `lengths[i]` tokens, which are all different from those of others."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = list(range(100 * index, 100 * index + self.lengths[index]))
        return {"input_ids": tokens, "labels": [token + 7 for token in tokens]}


class Stream(IterableDataset):
    def __init__(self, lengths: list[int]) -> None:
        self.documents = Documents(lengths)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.documents[index] for index in range(len(self.documents)))


def rows_of(lengths: list[int], *args: Any, **options: Any) -> list[list[tuple[int, int, int]]]:
    pieces, counts = pack_lengths(np.array(lengths, np.int64), *args, **options)
    rest = iter(pieces.tolist())
    return [[tuple(piece) for piece in islice(rest, count)] for count in counts.tolist()]


def some_lengths(count: int = 60, longest: int = 30) -> list[int]:
    return torch.randint(1, longest, (count,), generator=torch.Generator().manual_seed(4)).tolist()


# --- the plan ---------------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, max_length=st.integers(1, 25), strategy=st.sampled_from(STRATEGIES), window=st.integers(1, 80))
def test_every_token_is_in_one_row(lengths: list[int], max_length: int, strategy: str, window: int) -> None:
    rows = rows_of(lengths, max_length, strategy, window=window)

    tokens = Counter((document, at) for row in rows for document, begin, end in row for at in range(begin, end))
    kept = [min(length, max_length) if strategy == "bfd" else length for length in lengths]
    assert tokens == Counter({(document, at): 1 for document, length in enumerate(kept) for at in range(length)})
    sums = [sum(end - begin for _, begin, end in row) for row in rows]
    assert all(0 < total <= max_length for total in sums)
    if strategy == "wrapped":
        assert all(total == max_length for total in sums[:-1])


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, max_length=st.integers(1, 40))
def test_bfd_is_the_best_fit_of_a_plain_search(lengths: list[int], max_length: int) -> None:
    rows = rows_of(lengths, max_length, "bfd")

    bins: list[list[int]] = []
    for length in sorted((min(length, max_length) for length in lengths if length), reverse=True):
        fitting = [each for each in bins if sum(each) + length <= max_length]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            bins.append([length])
    assert len(rows) == len(bins)
    assert sorted(sum(end - begin for _, begin, end in row) for row in rows) == sorted(map(sum, bins))


def test_documents_of_half_a_row_and_less_fill_it() -> None:
    packed = pack_dataset(Documents(some_lengths(2000, 60)), 128)

    assert packed.num_tokens / (len(packed) * 128) > 0.99


def test_the_order_of_packing_follows_the_seed() -> None:
    rows = [[packed[index] for index in range(len(packed))] for packed in
            (pack_dataset(Documents(some_lengths()), 32, seed=seed) for seed in (0, 0, 1))]  # fmt: skip

    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tables_of_datasets_give_the_rows_of_a_plain_set(strategy: str) -> None:
    plain = Documents(some_lengths())
    table = datasets.Dataset.from_list([plain[index] for index in range(len(plain))])
    shuffled = table.select(range(59, -1, -1)).select(range(59, -1, -1))

    expected = pack_dataset(plain, 24, strategy)
    for dataset in (table, shuffled):
        packed = pack_dataset(dataset, 24, strategy)
        assert packed.__getitems__(range(len(packed))) == [expected[index] for index in range(len(expected))]


def test_lengths_are_those_of_the_transformed_documents() -> None:
    def end(rows: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [[*ids, 1] for ids in rows["input_ids"]]}

    table = datasets.Dataset.from_dict({"input_ids": [[2] * length for length in some_lengths()]})
    transformed = table.with_transform(end)
    packed = pack_dataset(transformed, 32)

    read = [document["input_ids"] for row in packed.__getitems__(range(len(packed))) for document in row]
    assert sorted(read) == sorted(transformed[index]["input_ids"] for index in range(60))


def test_lengths_that_are_given_are_not_counted() -> None:
    class Unread(Documents):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError

    lengths = some_lengths()
    assert len(pack_dataset(Unread(lengths), 32, lengths=lengths)) == len(pack_dataset(Documents(lengths), 32))
    with pytest.raises(ConfigError, match="59 lengths were given for 60 documents; give one for each"):
        pack_dataset(Unread(lengths), 32, lengths=lengths[1:])


def test_long_documents_are_told_of_once_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pack_dataset(Documents([5, 40, 50, 60]), 40)
        list(pack_dataset(Stream([5, 50, 60]), 40))
        list(pack_dataset(Stream([5, 50, 60]), 40, "bfd_split"))

    assert [record.getMessage().split(", and")[0].split(":")[0] for record in caplog.records] == [
        "2 of 4 documents are longer than max_length=40",
        "a document of 50 tokens is longer than max_length=40",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing_strategy": "ffd"}, "packing_strategy='ffd' is none of bfd, bfd_split, wrapped; choose one"),
        ({"max_length": 0}, "max_length=0 was given to packing, which needs an integer of 1 or more"),
        ({"buffer_size": 0}, "buffer_size=0 was given to packing"),
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pack_dataset(Documents([3]), **{"max_length": 8, **options})


def test_text_is_refused_with_its_columns() -> None:
    with pytest.raises(ConfigError, match="has columns text, label, and packing counts the tokens in its 'input_ids'"):
        pack_dataset([{"text": "a", "label": 1}], 8)


def test_a_row_that_there_is_not_is_an_index_error() -> None:
    packed = pack_dataset(Documents([3, 4]), 8)

    assert packed[-1] == packed[len(packed) - 1]
    with pytest.raises(IndexError, match="row 1 of 1 packed rows"):
        packed[1]


# --- the batch --------------------------------------------------------------------------------------------------------

ROWS = [
    [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}],
    [{"input_ids": [6, 7], "labels": [6, 7]}],
]


def as_lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in batch.items()}


def test_a_batch_has_positions_that_begin_with_each_document_and_no_first_labels() -> None:
    assert as_lists(PackingCollator(pad_token_id=9)(ROWS)) == {
        "input_ids": [[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]],
        "labels": [[-100, 2, 3, -100, 5], [-100, 7, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]],
        "use_cache": False,
    }


def test_without_padding_all_documents_are_one_row_with_the_bounds_that_flash_attention_takes() -> None:
    batch = PackingCollator(padding_free=True, return_flash_attn_kwargs=True)(ROWS)

    assert batch["cu_seq_lens_q"].dtype is torch.int32
    assert as_lists(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7]],
        "labels": [[-100, 2, 3, -100, 5, -100, 7]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1]],
        "use_cache": False,
        "cu_seq_lens_q": [0, 3, 5, 7],
        "cu_seq_lens_k": [0, 3, 5, 7],
        "max_length_q": 3,
        "max_length_k": 3,
    }


@pytest.mark.parametrize("as_tensors", [False, True])
def test_plain_samples_are_rows_of_one_document(as_tensors: bool) -> None:
    samples = [{"input_ids": [1, 2, 3], "weights": [0.5, 1.0, 2.0]}, {"input_ids": [4], "weights": [3.0]}]
    if as_tensors:
        samples = [{name: torch.tensor(value) for name, value in sample.items()} for sample in samples]

    assert as_lists(PackingCollator(pad_to_multiple_of=4)(samples)) == {
        "input_ids": [[1, 2, 3, 0], [4, 0, 0, 0]],
        "weights": [[0.5, 1.0, 2.0, 0.0], [3.0, 0.0, 0.0, 0.0]],
        "labels": [[-100, 2, 3, -100], [-100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0], [0, 0, 1, 2]],
        "use_cache": False,
    }


def pad_and_mask(samples: list[Any]) -> dict[str, Tensor]:
    (sample,) = samples
    ids = torch.tensor([*sample["input_ids"], 0])
    return {"input_ids": ids[None], "labels": ids[None] + 1, "attention_mask": (ids > 0).long()[None]}


def test_a_collate_function_of_ones_own_makes_the_documents() -> None:
    collate = PackingCollator(columns=["input_ids"], collate_document=pad_and_mask)

    batch = collate([[{"input_ids": [5, 6], "text": "x"}]])

    assert batch["input_ids"].tolist() == [[5, 6]]
    assert batch["labels"].tolist() == [[-100, 7]]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "a document of 2 tokens has padding, by its attention_mask"),
        ({"input_ids": [1, 2], "attention_mask": torch.tensor([1, 0])}, "tokenize with padding=False"),
        ({"input_ids": [1, 2], "text": "ab", "label": 3}, "has label, text without a value for each token"),
        ({"input_ids": torch.tensor([1, 2]), "id": torch.tensor(7)}, "a document of 2 tokens has id without a value"),
        ([1, 2], "a sample to be packed has list, and packing counts"),
    ],
)
def test_samples_that_are_no_documents_are_refused(sample: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackingCollator()([[sample]])


def test_documents_of_other_columns_are_refused_by_the_column() -> None:
    row = [{"input_ids": [1, 2], "token_type_ids": [0, 0]}, {"input_ids": [3]}]

    with pytest.raises(ConfigError, match="some documents of a batch have token_type_ids, and others have none"):
        PackingCollator()([row])


@pytest.mark.parametrize(
    "ids", [np.array([1, 2], "uint8"), np.array([1, 2], "uint16"), torch.tensor([1, 2], dtype=torch.int32)]
)
def test_tokens_of_any_integers_and_documents_without_tokens_make_a_batch_of_int64(ids: Any) -> None:
    for rows in ([[{"input_ids": [3]}, {"input_ids": ids}]], [{"input_ids": []}, {"input_ids": ids}]):
        batch = PackingCollator()(rows)

        assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
        assert batch["labels"].max() == 2
        assert batch["labels"].min() == -100


def test_an_empty_document_leaves_other_columns_the_type_of_the_others() -> None:
    rows = [{"input_ids": [], "token_type_ids": []}, {"input_ids": [1, 2], "token_type_ids": [1, 1]}]

    assert PackingCollator()(rows)["token_type_ids"].tolist() == [[0, 0], [1, 1]]
    assert PackingCollator()(rows)["token_type_ids"].dtype is torch.int64


# --- ranks, workers and resumes ---------------------------------------------------------------------------------------

GLOBAL_BATCH = 12


def build(strategy: str, ranks: int, workers: int, *, is_stream: bool = False) -> list[Any]:
    """Return the prepared loaders of all ranks, which read rows of the same data in global batches of 12."""
    lengths = some_lengths(150)
    loaders = []
    for rank in range(ranks):
        packed = pack_dataset((Stream if is_stream else Documents)(lengths), 32, strategy, seed=5, buffer_size=20)
        options = {"shuffle": True, "num_workers": workers} if not is_stream else {}
        loader = DataLoader(packed, GLOBAL_BATCH // ranks, collate_fn=PackingCollator(), **options)
        loaders.append(prepare(loader, rank, ranks, use_stateful_dataloader=True))
    return loaders


def tokens_of(loaders: list[Any], steps: int | None = None) -> list[bytes]:
    """Return the documents of each global step, of the rows that count, in the order of one process."""
    found = []
    for batches in zip(*loaders, strict=True):
        text = []
        for rank, batch in enumerate(batches):
            for row in range(loaders[rank].rows.rows[rank]):
                ids, positions, labels = (batch[name][row].tolist() for name in ("input_ids", "position_ids", "labels"))
                filled = max((at + 1 for at, label in enumerate(labels) if label != -100), default=0)
                text.append((ids[:filled], positions[:filled], labels[:filled]))
        found.append(repr(text).encode())
        if len(found) == steps:
            break
    return found


@functools.cache
def tokens_of_one_process(strategy: str, is_stream: bool) -> list[bytes]:
    return tokens_of(build(strategy, 1, 0, is_stream=is_stream))


def test_a_plan_has_one_hash() -> None:
    """The rows of a seed are the same on every machine and release: a resumed run depends on it."""
    rows = rows_of(some_lengths(150), 32, "bfd", seed=5, window=40)

    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == "6875330ae5cd1559"


@settings(max_examples=15, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES),
    ranks=st.sampled_from([1, 2, 3, 4]),
    workers=st.sampled_from([0, 0, 0, 2]),
    kill=st.integers(0, 5),
    ranks_after=st.sampled_from([1, 2, 3, 4]),
    workers_after=st.sampled_from([0, 0, 0, 2]),
    is_stream=st.booleans(),
)
def test_the_tokens_of_an_epoch_are_the_same_on_any_ranks_workers_and_after_a_kill(
    strategy: str, ranks: int, workers: int, kill: int, ranks_after: int, workers_after: int, is_stream: bool
) -> None:
    loaders = build(strategy, ranks, workers, is_stream=is_stream)
    read = tokens_of(loaders, kill) if kill else []
    state = loaders[0].state_dict()
    resumed = build(strategy, ranks_after, workers_after, is_stream=is_stream)
    for loader in resumed:
        loader.load_state_dict(state)

    assert read + tokens_of(resumed) == tokens_of_one_process(strategy, is_stream)


def test_rows_of_a_stream_that_are_packed_otherwise_are_no_resume() -> None:
    documents = datasets.Dataset.from_dict({"input_ids": [[index] * (index % 7 + 1) for index in range(1, 41)]})

    def loader_of(max_length: int) -> Any:
        packed = pack_dataset(documents.to_iterable_dataset(), max_length)
        return prepare(DataLoader(packed, 1, collate_fn=PackingCollator()), 0, 1, use_stateful_dataloader=True)

    begun = loader_of(8)
    state = next(begun.state_dict() for step, _ in enumerate(begun) if step == 3)
    message = r"in rows of \{'max_length': 8,.*, and these are packed by \{'max_length': 16, .* resume with those"
    for max_length in (8, 16):
        resumed = loader_of(max_length)
        with nullcontext() if max_length == 8 else pytest.raises(IncompatibleCheckpointError, match=message):
            resumed.load_state_dict(state)
            assert next(iter(resumed))["input_ids"].shape[1] <= 8


# --- the model --------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}


def causal(kind: str, attention: str | None = None, **options: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def loss_sum(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    logits = model(**{name: value for name, value in batch.items() if name != "labels"})["logits"]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize(
    ("kind", "attention", "strategy", "padding_free"),
    crossed([("llama", "sdpa"), ("gpt2", "eager"), ("gpt2", "sdpa"), ("llama", "eager")], STRATEGIES, [False, True]),
)
def test_packed_loss_and_gradients_are_those_of_documents_alone(
    kind: str, attention: str, strategy: str, padding_free: bool
) -> None:
    model = causal(kind, attention, **(SIZES if kind == "llama" else GPT2)).double().eval()
    generator = torch.Generator().manual_seed(1)
    documents = [{"input_ids": torch.randint(64, (length,), generator=generator)} for length in (9, 5, 3, 17, 4, 7)]
    packed = pack_dataset(documents, 16, strategy)
    rows = [packed[index] for index in range(len(packed))]
    results = []
    for batches in ([rows], [[[document]] for row in rows for document in row]):
        model.zero_grad()
        collate = PackingCollator(padding_free=padding_free)
        total = torch.stack([loss_sum(model, collate(batch)) for batch in batches]).sum()
        total.backward()
        results.append([total.detach(), *(parameter.grad.clone() for parameter in model.parameters())])

    tolerance = 1e-12 if attention == "sdpa" else 2e-6  # eager takes the softmax in fp32
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def moved(model: nn.Module) -> nn.Module:
    """Return the model with positions that run on behind the first document."""
    inner = model.forward

    def forward(input_ids: Tensor, position_ids: Tensor, **options: Any) -> Any:
        starts = (position_ids == 0).cumsum(-1)
        return inner(input_ids=input_ids, position_ids=position_ids + 100 * starts, **options)

    model.forward = forward
    return model


GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "a window": ("mistral", {**SIZES, "sliding_window": 3}),
    "soft caps": ("gemma2", {**SIZES, "head_dim": 8}),
    "experts": ("mixtral", {**SIZES, "num_local_experts": 4}),
    "absolute positions": ("gpt2", GPT2),
    "rotary": ("gptj", {**GPT, "rotary_dim": 8}),
    "local layers": ("gpt_neo", {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                                 "attention_types": [[["global", "local"], 1]], "window_size": 4}),
}  # fmt: skip
MIXING: dict[str, tuple[str, dict[str, Any]]] = {
    "alibi": ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "a state space": ("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "a recurrence": ("rwkv", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}),
    "short convolutions": ("lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}),
    "linear attention": ("minimax", {**SIZES, "head_dim": 8, "num_local_experts": 2,
                                     "layer_types": ["linear_attention", "full_attention"]}),
    "a state space in one layer of two": (
        "jamba", {**SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8,
                  "use_mamba_kernels": False}),
}  # fmt: skip


@pytest.mark.parametrize(("family", "padding_free"), crossed(FAMILIES, [False, True]))
def test_models_that_tell_documents_apart_are_taken_as_they_were(family: str, padding_free: bool) -> None:
    kind, options = FAMILIES[family]
    model = causal(kind, **options).train()
    model.get_input_embeddings().eval()
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]

    check_packing(model, PackingCollator(padding_free=padding_free))

    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", MIXING)
def test_models_that_mix_documents_are_refused_by_name(family: str) -> None:
    kind, options = MIXING[family]
    model = causal(kind, **options)
    message = f"{type(model).__name__} cannot be trained on packed documents: what it comput"
    with pytest.raises(ConfigError, match=message):
        check_packing(model)


def test_a_model_for_which_documents_are_elsewhere_is_refused() -> None:
    message = "what it computes of a document depends on where it is in the row; leave pack"
    with pytest.raises(ConfigError, match=message):
        check_packing(moved(causal("gpt2", **{**GPT2, "n_positions": 512})))


def test_flex_attention_is_refused_on_cpus_before_its_first_batch() -> None:
    model = causal("llama", "flex_attention", **SIZES)
    with pytest.raises(ConfigError, match=r"Llama.* has attn_implementation='flex_attention', .* with 'sdpa'"):
        check_packing(model)


def test_a_model_without_positions_is_refused() -> None:
    class Bag(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    with pytest.raises(ConfigError, match="Bag takes no position_ids, by which packed documents are told apart; leave"):
        check_packing(Bag())


def test_prepare_refuses_a_model_beside_a_loader_of_packed_rows() -> None:
    from accel_trainer import Accelerator

    model = causal("lfm2", **MIXING["short convolutions"][1])
    documents = [{"input_ids": [3, 4, 5]}] * 4
    plain = DataLoader(documents, 2)
    loader = DataLoader(pack_dataset(documents, 8), 2, collate_fn=PackingCollator())

    Accelerator(cpu=True).prepare(model, plain)
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM cannot be trained on packed documents"):
        Accelerator(cpu=True).prepare(model, loader)
    Accelerator(cpu=True).prepare(nn.Linear(2, 2), loader)  # takes no tokens
