"""What the scripts of this folder share: handwritten digits of 8 x 8 pixels, a small classifier, and the options."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_EVAL = 297


def options_parser(description: str | None, *, epochs: int = 2, batch_size: int = 32) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the data (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=batch_size, help="samples per rank (default: %(default)s)")
    parser.add_argument("--learning_rate", type=float, default=1e-2, help="default: %(default)s")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    return parser


def build_loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return loaders for training (1500 digits) and evaluation (297 digits)."""
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train = TensorDataset(pixels[:-NUM_EVAL], labels[:-NUM_EVAL])
    evaluation = TensorDataset(pixels[-NUM_EVAL:], labels[-NUM_EVAL:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(evaluation, batch_size=batch_size)


def build_model() -> nn.Module:
    """Return a classifier with the same weights in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
