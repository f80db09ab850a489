"""`accel-trainer merge-weights` and `accel-trainer ckpt export`: weights of a checkpoint for `from_pretrained`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["add_export_options", "add_format_option", "run_export", "run_merge_weights"]


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add what both commands take."""
    parser.add_argument("source", type=Path, metavar="IN", help="a checkpoint, or a directory of sharded weights")
    parser.add_argument("target", type=Path, metavar="OUT", help="the directory to write to")
    parser.add_argument("--unit", type=int, default=0, metavar="N", help="which of several models; default: 0")
    parser.add_argument(
        "--max_shard_size", "--max-shard-size", default="10GB", metavar="SIZE", help="of a file; default: 10GB"
    )
    parser.add_argument(
        "--unsafe_serialization",
        "--unsafe-serialization",
        action="store_true",
        help="write pytorch_model.bin, a pickle, instead of safetensors",
    )
    parser.add_argument(
        "--verify", default="full", choices=("full", "size", "off"), help="compare files with their checksums"
    )


def add_format_option(parser: argparse.ArgumentParser) -> None:
    """Add what only `ckpt export` takes."""
    parser.add_argument(
        "--format",
        default="weights",
        choices=("weights", "fsdp-full", "fsdp-sharded"),
        help="weights for from_pretrained (the default), or all that transformers' own Trainer resumes from under FSDP "
        "with FULL_STATE_DICT or SHARDED_STATE_DICT",
    )


def run_export(arguments: argparse.Namespace) -> int:
    """Write what was asked for, and print what was written."""
    if getattr(arguments, "format", "weights") == "weights":
        from accel_trainer.checkpoint.interop.export import export_weights

        names = export_weights(
            arguments.source,
            arguments.target,
            unit=arguments.unit,
            max_shard_size=arguments.max_shard_size,
            safe_serialization=not arguments.unsafe_serialization,
            verify=arguments.verify,
        )
    else:
        from accel_trainer.checkpoint.interop.hf_fsdp_export import export_hf_fsdp

        is_sharded = arguments.format == "fsdp-sharded"
        names = export_hf_fsdp(
            arguments.source, arguments.target, is_sharded=is_sharded, unit=arguments.unit, verify=arguments.verify
        )
    size = sum((arguments.target / name).stat().st_size for name in names)
    print(f"{arguments.target}: {len(names)} file(s), {size / 2**20:,.1f} MiB")
    return 0


def run_merge_weights(words: Sequence[str]) -> int:
    """Run `accel-trainer merge-weights IN OUT`."""
    parser = argparse.ArgumentParser(
        "accel-trainer merge-weights",
        description="Write the weights of a checkpoint as safetensors that from_pretrained reads: of save_state, of "
        "torch.distributed.checkpoint, or in shards of Hugging Face accelerate and its Trainer.",
        allow_abbrev=False,
    )
    add_export_options(parser)
    return run_export(parser.parse_args(words))
