"""Imports the test modules that pytest has collected: in the server of the ranks, or each rank imports its own anew.

What else each rank would do at its begin is done here once. A rank that builds a model and steps took 51 ms of a core,
and takes 34: large pages are 13 of the difference, a first step the rest.
"""

import contextlib
import ctypes
import importlib
import os
import sys
from pathlib import Path

from tests.ranks import COLLECTED

_COLLAPSE, _LARGE = 25, 2**21
"""Linux's MADV_COLLAPSE, and the size of a large page."""


def take_a_step() -> None:
    """Do what torch and transformers do at a first step, without a backward: behind one no fork could do another."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # those of OpenMP would be missing in a fork
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        tokens = torch.ones(1, 8, dtype=torch.long)
        model(input_ids=tokens, labels=tokens)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(num_threads)


def use_large_pages() -> None:
    """Have Linux, from 6.1 on, move this process's memory to large pages, of which a fork copies one entry each."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split()
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) // _LARGE * _LARGE for address in addresses.split("-"))
            if begin + _LARGE < end:
                advise(begin + _LARGE, end - begin - _LARGE, _COLLAPSE)


for name in os.environ.pop(COLLECTED, "").split():
    with contextlib.suppress(BaseException):  # one that is skipped as a whole; a rank that needs it says what is wrong
        importlib.import_module(name)

# What the first save or load of a model of transformers makes, in a tenth of a second of each rank.
if (conversions := sys.modules.get("transformers.conversion_mapping")) is not None:
    conversions.get_checkpoint_conversion_mapping("")
if "transformers.models.llama.modeling_llama" in sys.modules and not sys.modules["torch"].cuda.is_available():
    take_a_step()  # else some layer may ask for the card, and start CUDA
if sys.platform == "linux":
    use_large_pages()
