"""`make gpu`: all that one card can show, in parts of less than ten minutes; about 35 minutes together.

    python benchmarks/gpu/kit.py [PART ...] [--device cpu --tiny] [--rounds N] [--out FOLDER] [--again] [--write-docs]

Each part is a process of its own, writes its JSON lines and a log to FOLDER, and can run alone. One that has ended
well before is left out, so that the kit goes on where it was stopped. Nothing is installed: the package runs from this
source tree.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "gpu_figures.md"
BEGIN, END = "<!-- make gpu: begin -->\n", "<!-- make gpu: end -->\n"
# Beside torch, transformers and what they need themselves. All of their wheels together take less than 3 MiB.
NEEDED = ("hypothesis", "numpy", "packaging", "pytest", "pytest_timeout", "safetensors", "tqdm", "xxhash", "yaml")


@dataclass(frozen=True)
class Part:
    """One script, what it answers, and how long it may take on a card."""

    script: str
    limit_seconds: int
    arguments: tuple[str, ...] = field(default=())


PARTS = {
    "tests": Part("tests/gpu/test_one_gpu.py", 540, ("tests/gpu/test_card.py",)),
    "waits": Part("host_waits.py", 300),
    "speed": Part("training_speed.py", 540),
    "recompute": Part("training_speed.py", 540, ("--recompute",)),
    "techniques": Part("techniques.py", 540),
    "compiled": Part("techniques.py", 540, ("--compiled",)),
    "packing": Part("packing.py", 300),
    "peaks": Part("peaks.py", 300),
    "saving": Part("saving.py", 540),
    "copies": Part("batch_copies.py", 200),
    "ranks": Part("shared_card.py", 540),
}


def run(name: str, options: argparse.Namespace) -> bool:
    """Run a part, unless it has ended well before; return whether it ended well."""
    part, lines = PARTS[name], options.out / f"{name}.jsonl"
    if not options.again and any(line["what"] == "done" for line in read(lines)):
        print(f"{name}: done before, see {lines}")
        return True
    command = [sys.executable, str(Path(__file__).parent / part.script), "--device", options.device, *part.arguments]
    if name == "tests":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", part.script, *part.arguments]
    else:
        command += ["--tiny"] * options.tiny + ["--rounds", str(options.rounds)]
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    begin = time.monotonic()
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=part.limit_seconds,
        )  # fmt: skip
        code, output = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        code, output = -1, (error.stdout or b"").decode()
    seconds = time.monotonic() - begin
    lines.with_suffix(".log").write_text(output)
    found = [line for line in output.splitlines() if line.startswith('{"what":')]
    if name == "tests":
        found = [json.dumps({"what": "tests", "result": output.strip().splitlines()[-1] if output.strip() else ""})]
    last = {"what": "failed" if code else "done", "code": code, "seconds": round(seconds, 1), **setting(options)}
    lines.write_text("".join(f"{line}\n" for line in [*found, json.dumps(last)]))
    print(f"{name}: {last['what']} in {seconds:.0f} s")
    if code:
        print(*output.splitlines()[-60:], sep="\n")
    for line in found:
        print(f"  {line}")
    return not code


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a part; none before it has run."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """Return the date, the card and the versions that figures belong to."""
    import torch

    card = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions["python"] = platform.python_version()
    return {"date": datetime.date.today().isoformat(), "card": card, "tiny": options.tiny, **versions}


def tables(folder: Path, before: str = "") -> str:
    """Return the figures of a folder as Markdown, of each part that has run; of others those of `before` stay."""
    text = ""
    for name in PARTS:
        lines = read(folder / f"{name}.jsonl")
        if not lines:
            _, found, rest = before.partition(f"### {name}\n")
            text += f"{found}{rest.partition('### ')[0]}"
            continue
        end = lines[-1]
        text += (
            f"### {name}\n\n{end['date']}, {end['card']}, torch {end['torch']}, transformers {end['transformers']}, "
        )
        text += (
            f"Python {end['python']}{', tiny' if end['tiny'] else ''}; {end['what']} after {end['seconds']:g} s.\n\n"
        )
        text += "".join(_table([line for line in lines[:-1] if line["what"] == kind]) for kind in _kinds(lines[:-1]))
    return text


def _kinds(lines: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(line["what"] for line in lines))


def _table(lines: list[dict[str, Any]]) -> str:
    columns = [name for name in lines[0] if name != "what"]
    rows = [columns, ["---"] * len(columns), *[[_cell(line.get(name)) for name in columns] for line in lines]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {count}" for key, count in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"
    return "-" if value is None else str(value)


def write_docs(folder: Path, docs: Path = DOCS) -> None:
    """Put the tables between the marks of docs/gpu_figures.md, each in the place of that of its part."""
    text = docs.read_text()
    head, begin, rest = text.partition(BEGIN)
    before, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{docs} has no lines {BEGIN.strip()!r} and {END.strip()!r} to write the tables between")
    docs.write_text(f"{head}{BEGIN}\n{tables(folder, before)}{END}{tail}")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; default: all")
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument("--tiny", action="store_true", help="sizes that a CPU does in seconds: does every part run?")
    made.add_argument("--rounds", type=int, default=5, help="how often each way is timed; medians are given")
    made.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="where the JSON lines go")
    made.add_argument("--again", action="store_true", help="run parts that have ended well, too")
    made.add_argument("--write-docs", action="store_true", help=f"write the tables to {DOCS.relative_to(ROOT)}")
    options = made.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    missing = [name for name in ("torch", "transformers", *NEEDED) if importlib.util.find_spec(name) is None]
    if unknown:
        made.error(f"no part is called {unknown[0]!r}; they are {', '.join(PARTS)}")
    if missing:
        made.error(f"{', '.join(missing)} cannot be imported; bring the wheels and put them on PYTHONPATH")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in options.parts or PARTS if not run(name, options)]
    for name in options.parts or PARTS:
        for line in read(options.out / f"{name}.jsonl"):
            if line.get("holds") is False:
                print(f"bound missed in {name}: {json.dumps(line)}")
    if options.write_docs:
        write_docs(options.out)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; run them again by name")


if __name__ == "__main__":
    main()
