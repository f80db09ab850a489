"""The user's own model out of the wrappers of prepare, data parallelism and torch.compile."""

from __future__ import annotations

from torch import nn

from accel_trainer.precision import remove_autocast
from accel_trainer.runtime.model_wrappers import is_compiled_module, unwrap_module
from accel_trainer.runtime.torch_private import ORIGINAL_MODULE


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's own model from whatever was put around it; a model that was never wrapped comes back as it is.

    Args:
        keep_fp32_wrapper: False also takes mixed precision off, and restores the model's own forward.
        keep_torch_compile: keep the outermost wrapper of `torch.compile`, around the extracted model.
        recursive: also unwrap the modules inside of the model, in place.
    """
    extracted = unwrap_module(model)
    if recursive:
        for module in list(extracted.modules()):
            for name, child in list(module.named_children()):
                setattr(module, name, unwrap_module(child))
    if not keep_fp32_wrapper:
        restore_forward(extracted)
    if keep_torch_compile and is_compiled_module(model):
        setattr(model, ORIGINAL_MODULE, extracted)
        return model
    return extracted


def restore_forward(model: nn.Module) -> None:
    """Take mixed precision off a model: ours, and a forward that its user replaced and kept as `_original_forward`."""
    remove_autocast(model)
    original = model.__dict__.pop("_original_forward", None)
    if getattr(original, "__func__", None) is type(model).forward:
        model.__dict__.pop("forward", None)
    elif original is not None:
        model.forward = original
