"""Token-weighted losses: sequences of different lengths, and every token of an update counts the same.

    python examples/by_feature/token_weighted_loss.py
    accel-trainer launch --cpu --num_processes 2 examples/by_feature/token_weighted_loss.py

The mean of means over micro-batches and ranks would give the tokens of short sequences more weight. The result here is
that of one process with the global batch, to rounding.
"""

from __future__ import annotations

import torch
from digits import options_parser
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, DataLoaderConfiguration, set_seed

VOCABULARY, IGNORED = 16, -100


def build_sequences() -> list[Tensor]:
    """Return 96 sequences of 2 to 30 tokens; each token is the last one plus one."""
    generator = torch.Generator().manual_seed(0)
    begins = torch.randint(0, VOCABULARY, (96,), generator=generator)
    lengths = torch.randint(2, 31, (96,), generator=generator)
    return [(begin + torch.arange(length)) % VOCABULARY for begin, length in zip(begins, lengths, strict=True)]


def collate(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, shape (B, L); labels behind the end of a sequence are ignored."""
    inputs = nn.utils.rnn.pad_sequence([sequence[:-1] for sequence in sequences], batch_first=True)
    labels = [sequence[1:] for sequence in sequences]
    return inputs, nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def main() -> None:
    options = options_parser(__doc__, epochs=4, batch_size=8).parse_args()
    set_seed(0)
    # split_batches: the batch size is that of all ranks together.
    accelerator = Accelerator(
        cpu=options.cpu or None,
        gradient_accumulation_steps=3,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    loader = DataLoader(build_sequences(), batch_size=options.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
    for epoch in range(options.epochs):
        sums = torch.zeros(2, device=accelerator.device)
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
                tokens = (labels != IGNORED).sum()
                accelerator.backward(accelerator.global_token_mean(loss, tokens))
                optimizer.step()
                optimizer.zero_grad()
            sums += torch.stack([loss.detach(), tokens])
        total, tokens = accelerator.reduce(sums, "sum").tolist()
        accelerator.print(f"epoch {epoch}: loss {total / tokens:.4f} over {tokens:.0f} tokens")
    accelerator.end_training()


if __name__ == "__main__":
    main()
