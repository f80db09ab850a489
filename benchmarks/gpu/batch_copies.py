"""What copying batches ahead of their use is worth: a step that computes about as long as its batch takes to arrive."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch.utils.data import DataLoader, TensorDataset
from workload import clock, emit, median, parse, parser


def _seconds(options: Namespace, ahead: bool, width: int, num_batches: int) -> float:
    from accel_trainer import Accelerator, DataLoaderConfiguration

    loading = DataLoaderConfiguration(prefetch_to_device=ahead)
    accelerator = Accelerator(cpu=options.device == "cpu", dataloader_config=loading)
    data = TensorDataset(torch.ones(num_batches, width, width))
    loader = accelerator.prepare(DataLoader(data, batch_size=1, pin_memory=options.device == "cuda"))
    square = torch.full((width, width), 1 / width, device=accelerator.device)
    begin = 0.0
    for index, (batch,) in enumerate(loader):
        if index == 2:
            begin = clock(options)
        torch.mm(batch[0], square)
    return clock(options) - begin


def main() -> None:
    options = parse(parser(__doc__))
    width, num_batches = (64, 6) if options.tiny else (4096, 40)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(options.rounds + 1):
        for ahead in (True, False):
            times[ahead].append(_seconds(options, ahead, width, num_batches))
    ahead, when_used = (median(times[key][1:]) for key in (True, False))
    emit(what="copies", ahead_s=ahead, when_used_s=when_used, ratio=ahead / when_used, mib=4 * width**2 / 2**20)


if __name__ == "__main__":
    main()
