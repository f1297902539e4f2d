"""`replace_attention`: the attention of a transformers model computed by our layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.modes import hidden
from .interval_tensor import mask_function
from .model_attention import ModelAttention
from .replaced_module import convert_unit, find_units, rebuild_unit, swap_unit

__all__ = ["replace_attention", "restore_attention"]

NAME = "multihead_layers"  # the attention implementation of a model whose attention is replaced
_BEFORE = "_multihead_before"  # attribute of such a model: the implementation that it had


def replace_attention(model: nn.Module) -> nn.Module:
    """Replace every attention module of a transformers model by a `MultiHeadAttention`, in place.

    The model is called, generates and trains as before, with equal results. Each attention module
    becomes a `ModelAttention`, which takes transformers' arguments (mask, cache, rotations) and
    whose `attention` is the layer: `model.model.layers[0].self_attn.attention`. For BERT and its
    relatives, whose output projection is outside of the attention module, that is an `nn.Identity`
    afterwards.

    A weight that the layer has unchanged is the same `nn.Parameter` as before, so optimisers and
    tied weights keep it; one that is split (GPT-2's and Phi-3's fused projections) is new. Names
    in `model.state_dict()` become those of the layer: `self_attn.o_proj.weight` is
    `self_attn.attention.out_proj.weight`. Files with these names would mean nothing to
    `from_pretrained`, so `save_pretrained` raises an error until `restore_attention(model)` has
    put transformers' modules back, with the weights as they are by then.

    Args:
        model: a transformers model, or a module that contains one.

    Returns:
        The model.

    Raises:
        MultiheadError: attention that a layer can't express, by the module's name and what is
            missing; a model without attention, or whose attention is replaced already. The model
            is then as it was.
        TypeError: anything but an `nn.Module`.

    >>> from multihead import load_builtin
    >>> model, tokenizer = load_builtin()
    >>> ids = tokenizer("the heads of a layer", return_tensors="pt")
    >>> before = model(**ids).logits
    >>> after = replace_attention(model)(**ids).logits
    >>> torch.allclose(after, before, atol=1e-4)
    True
    """
    pretrained = _find_pretrained(model)
    if any(isinstance(module, ModelAttention) for module in model.modules()):
        raise MultiheadError(
            f"the attention of {type(model).__name__} is replaced already; restore_attention(model)"
            " undoes that"
        )
    units = find_units(model)
    if not units:
        raise MultiheadError(
            f"{type(model).__name__} has no attention module, so there is nothing to replace"
        )
    made = [(unit, convert_unit(unit, model)) for unit in units]
    _register()
    before = [inner.config._attn_implementation for inner in pretrained]
    try:
        for inner in pretrained:
            inner.set_attn_implementation(NAME)
    except Exception:
        _set_implementations(pretrained, before)
        raise
    for inner, implementation in zip(pretrained, before):
        vars(inner)[_BEFORE] = implementation
        vars(inner)["save_pretrained"] = functools.partial(_refuse_to_save, type(inner).__name__)
    for unit, converted in made:
        swap_unit(unit, converted, model)
    return model


def restore_attention(model: nn.Module) -> nn.Module:
    """Put the attention modules that `replace_attention` replaced back, with the weights that the
    layers have by now, in place.

    Args:
        model: what `replace_attention` returned, or a copy of it.

    Returns:
        The model.

    Raises:
        MultiheadError: a model whose attention isn't replaced; layers whose projections were
            replaced in turn.
        TypeError: anything but an `nn.Module`.

    >>> from multihead import load_builtin
    >>> model, _ = load_builtin()
    >>> names = list(model.state_dict())
    >>> list(restore_attention(replace_attention(model)).state_dict()) == names
    True
    """
    pretrained = _find_pretrained(model)
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, ModelAttention)
    ]
    if not found:
        raise MultiheadError(
            f"the attention of {type(model).__name__} isn't replaced, so there is nothing to"
            " restore; replace_attention(model) comes first"
        )
    restored: dict[str, nn.Module] = {}
    for path, attention in found:
        parent = model.get_submodule(path.rpartition(".")[0])
        restored.update(rebuild_unit(path, attention, parent))
    for path, module in restored.items():
        model.set_submodule(path, module)
    before = [vars(inner).pop(_BEFORE, None) for inner in pretrained]
    for inner in pretrained:
        vars(inner).pop("save_pretrained", None)
    _set_implementations(pretrained, before)
    return model


# ---- the model


def _find_pretrained(model: Any) -> list[Any]:
    """The transformers models in `model`, outer ones first."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected a transformers model, as from_pretrained loads")
    from transformers import PreTrainedModel

    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not found:
        raise MultiheadError(
            f"{type(model).__name__} is no transformers model and contains none; convert its"
            " layers one by one, for instance by multihead.layers.from_torch"
        )
    return found


def _register() -> None:
    """Register the masks of such a model, and that its attention isn't computed by a function."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _refuse_to_attend)
    AttentionMaskInterface.register(NAME, model_mask)


def _refuse_to_attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise MultiheadError(
        f"{type(module).__name__} is attention that replace_attention didn't replace, in a model"
        " where it replaced all others; call multihead.layers.restore_attention(model)"
    )


def _refuse_to_save(name: str, *args: Any, **kwargs: Any) -> None:
    raise MultiheadError(
        f"{name}.save_pretrained: its attention is replaced, so the files would have names that"
        " from_pretrained doesn't know; call multihead.layers.restore_attention(model) first, or"
        " save model.state_dict()"
    )


def _set_implementations(pretrained: list[Any], before: list[Any]) -> None:
    for inner, implementation in zip(pretrained, before):
        if implementation is not None:
            inner.set_attn_implementation(implementation)


def _yes(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=key.device)


def model_mask(**given: Any) -> Tensor | None:
    """The mask as transformers asks for it: None where causal or full attention needs none, else
    two integers a query.
    """
    from transformers.masking_utils import sdpa_mask

    padding = given.get("attention_mask")
    if torch.compiler.is_compiling() or (padding is not None and hidden(padding)):
        dense: Tensor | None = sdpa_mask(**given)  # in a graph the limits of each query are unknown
        return dense
    # whether a mask can be left out is transformers' rule; this mask takes no memory
    if sdpa_mask(**(given | {"mask_function": _yes, "use_vmap": False})) is None:
        return None
    return mask_function(**given)
