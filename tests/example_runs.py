"""Runs of the scripts in examples/ at a tiny size, in a rank of their own; tests/examples looks at what came out."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_trainer.config.dialects.environment import LAUNCH_VARIABLE
from tests.ranks import preload, run_ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

preload(
    "accel_trainer.trainer",
    "datasets",
    "evaluate",
    "tokenizers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)

TINY = [
    *("--hidden_size", "32", "--layers", "2", "--vocab_size", "400", "--max_length", "32"),
    *("--global_batch_size", "16", "--cpu"),
]
"""Options of every example: a model of about 30,000 parameters."""

# Number of processes of each layout; one process runs without a launcher.
LAYOUTS = {"single": 1, "ddp": 2, "fsdp2": 2}

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ExampleRun:
    """What one rank returned and printed."""

    result: Any
    out: str
    err: str

    @property
    def table(self) -> dict[str, str]:
        """The rows of the table at the end."""
        lines = self.out.rpartition("---\n")[2].strip().splitlines()
        return dict(line.split("  ", 1) for line in lines) if "---\n" in self.out else {}


def run_example(
    name: str,
    argv: Sequence[object],
    *,
    num_processes: int = 1,
    num_machines: int = 1,
    timeout: float = 100,
    file: str = "",
    **env: str,
) -> list[ExampleRun]:
    """Call `main` of `examples/NAME.py` with these arguments on every rank, launched with a configuration `file`."""
    env |= {LAUNCH_VARIABLE: json.dumps({"config_file": file, "flags": {}})} if file else {}

    def env_of(rank: int) -> dict[str, str | None]:
        if num_processes == 1:
            return env | dict.fromkeys(_LAUNCHER_VARIABLES)
        size = num_processes // num_machines
        return env | {"LOCAL_RANK": str(rank % size), "LOCAL_WORLD_SIZE": str(size)}

    argv = [str(argument) for argument in argv]
    return run_ranks(_run, num_processes, name, argv, env=env_of, timeout=timeout)


def _run(name: str, argv: list[str]) -> ExampleRun:
    sys.path.insert(0, str(EXAMPLES))  # as for a script
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            example = importlib.import_module(name)
            if hasattr(example, "load_sources"):
                example.load_sources = functools.partial(_short_sources, example.load_sources)
            result = example.main(argv)
        except SystemExit as ended:
            result = ended.code
    return ExampleRun(result, out.getvalue(), err.getvalue())


def _short_sources(load_sources: Callable[[], list[Any]]) -> list[Any]:
    """Return the short files of the standard library: 180 kB. Tokens of all 4 MB take each rank 3 s."""
    return [source for source in load_sources() if len(source.text) < 4000]


def save_tiny_texts(folder: Path) -> Path:
    """Write a dataset of sentence pairs as a hub would serve it; return where."""
    return run_ranks(_save_texts, 1, str(folder))[0]


def _save_texts(folder: str) -> str:
    from datasets import ClassLabel, Dataset, Features, Value

    kinds = Features(
        {"first": Value("string"), "second": Value("string"), "label": ClassLabel(names=["other", "same"])}
        | {"idx": Value("int32")}
    )
    words = ["red", "green", "blue", "white", "black", "brown", "grey", "pink"]
    for split, num_rows in (("train", 70), ("validation", 21)):
        pairs = [(words[i % 8], words[(i * (1 + i % 2)) % 8]) for i in range(num_rows)]
        rows = {
            "first": [a for a, _ in pairs],
            "second": [b for _, b in pairs],
            "label": [int(a == b) for a, b in pairs],
            "idx": list(range(num_rows)),
        }
        Dataset.from_dict(rows, features=kinds).to_parquet(f"{folder}/{split}-00000-of-00001.parquet")
    return folder


def save_tiny_pretrained(folder: Path) -> Path:
    """Write a BERT without a classifier, and its tokenizer, as a hub would serve them; return where."""
    return run_ranks(_save_pretrained, 1, str(folder))[0]


def _save_pretrained(folder: str) -> str:
    sys.path.insert(0, str(EXAMPLES))
    from stdlib_text import train_tokenizer
    from transformers import BertConfig, BertForMaskedLM

    tokenizer = train_tokenizer(["red green blue white black brown grey pink"], 300, 32)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
