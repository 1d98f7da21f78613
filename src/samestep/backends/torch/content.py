"""What stands for PyTorch's objects in the recipe (samestep/content.py): layers with their settings, tensors as numbers."""

from __future__ import annotations

from typing import Any

import torch

from samestep.content import Model

# Where a module keeps its tensors and layers, which are told in their own way, and what follows from them.
HIDDEN = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}


def content(thing: Any, weights: bool) -> Any:
    if isinstance(thing, torch.jit.ScriptModule):
        return ["ScriptModule", thing.code, [_told(t, weights) for t in thing.state_dict().values()]]
    if isinstance(thing, torch.nn.Module):
        if isinstance(given := thing._modules.get("_orig_mod"), torch.nn.Module):
            return ["torch.compile", given]
        own = [(name, _told(p, weights)) for name, p in thing._parameters.items()]
        passing = thing._non_persistent_buffers_set
        own += [(name, _told(b, weights or name in passing)) for name, b in thing._buffers.items()]
        return Model.of(thing, HIDDEN, own, thing._modules)
    if isinstance(thing, torch.Tensor):
        return _told(thing, weights or not isinstance(thing, torch.nn.Parameter))
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, torch.utils.hooks.RemovableHandle):
        return "hook"  # its number counts those of a process
    if isinstance(thing, torch.device):
        return f"device {thing.type}"  # processes of one run have different ones
    if isinstance(thing, torch.optim.Optimizer):
        groups = [{**group, "params": [_told(p, False) for p in group["params"]]} for group in thing.param_groups]
        plain = (bool, int, float, str, torch.optim.Optimizer)
        return [type(thing), groups, {name: value for name, value in vars(thing).items() if isinstance(value, plain)}]
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        return [type(thing), {**vars(thing), "optimizer": None}, thing.optimizer]
    return None


def _told(tensor: torch.Tensor | None, values: bool) -> Any:
    if tensor is None:
        return None
    about = [str(tensor.dtype), list(tensor.shape), tensor.requires_grad]
    if not values:
        return about
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return [*about, repr(tensor)]
    return [*about, tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()]
