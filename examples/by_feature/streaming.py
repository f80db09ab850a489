"""A stream of parquet files that stops in the middle and goes on at its file and row, on as many workers as you like.

    python examples/by_feature/streaming.py
    accel-trainer launch --cpu --num_processes 2 examples/by_feature/streaming.py

Files may lie at any address of fsspec (s3://, gs://). A Trainer does the same by `resume_from_checkpoint=True`.
"""

from __future__ import annotations

import torch
from datasets import Dataset, load_dataset
from digits import build_model, options_parser
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, DataLoaderConfiguration, set_seed

NUM_FILES = 8


def write_files(folder: str) -> None:
    """Write the digits as parquet files."""
    digits = load_digits()
    table = Dataset.from_dict({"pixels": (digits.data / 16).tolist(), "digit": digits.target.tolist()})
    for index in range(NUM_FILES):
        table.shard(NUM_FILES, index).to_parquet(f"{folder}/{index}.parquet")


def main() -> None:
    parser = options_parser(__doc__, epochs=1, batch_size=32)
    parser.add_argument("--folder", default="digits", help="of the files (default: %(default)s)")
    parser.add_argument("--num_workers", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--stop_after", type=int, default=20, help="steps before the stop (default: %(default)s)")
    options = parser.parse_args()
    set_seed(0)
    resumes = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=options.cpu or None, dataloader_config=resumes)
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            write_files(options.folder)
    stream = load_dataset("parquet", data_files=f"{options.folder}/*.parquet", split="train", streaming=True)
    stream = stream.shuffle(seed=0, buffer_size=200).with_format("torch")
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    loader = DataLoader(stream, options.batch_size, num_workers=options.num_workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train(steps: int | None) -> int:
        seen = 0
        for step, batch in enumerate(loader, 1):
            accelerator.backward(F.cross_entropy(model(batch["pixels"].float()), batch["digit"]))
            optimizer.step()
            optimizer.zero_grad()
            seen += len(accelerator.gather_for_metrics(batch["digit"]))
            if step == steps:
                break
        return seen

    for epoch in range(options.epochs):
        before = train(options.stop_after)
        accelerator.save_state("stream_state")
        accelerator.load_state("stream_state")  # or another run, on other workers and processes
        after = train(None)
        accelerator.print(f"epoch {epoch}: {before} digits, a stop, {after} digits, {before + after} in all")
    accelerator.end_training()


if __name__ == "__main__":
    main()
