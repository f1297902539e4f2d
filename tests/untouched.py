"""Everything of a model that instrumentation touches, to compare before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def snapshot(model: nn.Module) -> dict[str, Any]:
    """State by name: values of the state dict, attributes, hooks and modes of every module, configs
    and torch's global switches. Equal dicts compare equal.
    """
    state: dict[str, Any] = {
        f"value of {name}": value.detach().clone().view(torch.uint8).numpy().tobytes()
        if value.numel() and value.ndim
        else value.tolist()
        for name, value in model.state_dict().items()
    }
    for name, module in model.named_modules():
        own = {key: id(value) for key, value in vars(module).items() if not key.startswith("_")}
        state[f"attributes of {name}"] = own
        state[f"names in {name}"] = sorted(vars(module))
        state[f"class of {name}"] = type(module)
        state[f"mode of {name}"] = module.training
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            state[f"{hooks} of {name}"] = list(getattr(module, hooks).values())
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            state[f"config of {name}"] = config.to_dict()
            state[f"attention of {name}"] = config._attn_implementation_internal
    state["torch's fused layers"] = torch.backends.mha.get_fastpath_enabled()
    return state


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    changed = {
        key: (before.get(key), after.get(key))
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
    }
    assert not changed, changed
