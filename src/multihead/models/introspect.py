"""Facts about a model of any library that don't depend on its attention: what its config states,
its fingerprint, its special tokens, how its forward is called, and how far two computations of it
may differ.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = [
    "config_fingerprint",
    "config_of",
    "find_special_ids",
    "fingerprint",
    "forward_kwargs",
    "is_encoder_decoder",
    "is_sentence_transformer",
    "padding_mask",
    "require_model",
    "select_valid",
    "text_config",
    "tolerance",
]

SAMPLED = 64  # numbers of each parameter that enter the fingerprint
# Of a config: what its model computes is known from elsewhere.
NOT_COMPUTING = {"dtype", "torch_dtype", "transformers_version"}
# Relative to the largest value: two computations of one thing by a whole model.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def require_model(model: object) -> None:
    """Raise `TypeError` for anything but a module, such as the name of a folder.

    >>> require_model("gpt2")
    Traceback (most recent call last):
    TypeError: model is a str: expected a model, such as AutoModel.from_pretrained(folder) ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a model, such as"
            " AutoModel.from_pretrained(folder) returns (the command line takes folders)"
        )


def config_of(model: Any) -> Any:
    """A model's config; of a config itself, and None for a module that has none."""
    return model if hasattr(model, "get_text_config") else getattr(model, "config", None)


def text_config(model: Any) -> Any:
    """The config of the part that reads text, of a model or a config; the config itself where it
    has no such part, None without one.
    """
    config = config_of(model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def is_encoder_decoder(model: Any) -> bool:
    """Whether the config states an encoder and a decoder that reads it, of a model or a config."""
    return bool(getattr(config_of(model), "is_encoder_decoder", False))


def tolerance(dtype: torch.dtype, factor: float = 1.0) -> float:
    """The largest difference, relative to the largest value, between two computations of one thing.

    Args:
        dtype: of the values that are compared.
        factor: below 1 for a stricter comparison, such as that of one layer, above 1 for a looser
            one. It applies to float32 and float64 alone: the half-precision types leave no room.

    >>> tolerance(torch.float32), tolerance(torch.float32, 0.1), tolerance(torch.bfloat16, 0.1)
    (0.0001, 1e-05, 0.06)
    """
    base = TOLERANCE.get(dtype, 6e-2)
    return base * factor if dtype in (torch.float32, torch.float64) else base


def is_sentence_transformer(model: nn.Module) -> bool:
    """Whether it is a model of sentence-transformers: these hold their tokenizer, and take one dict
    of features.
    """
    return any(base.__module__.startswith("sentence_transformers.") for base in type(model).__mro__)


def find_special_ids(model: nn.Module, tokenizer: Any = None) -> set[int]:
    """The ids of special tokens: those of the tokenizer, without padding and unknown, which mark no
    place in a text; by default those that the model's config names.
    """
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    if tokenizer is not None:
        placed = {getattr(tokenizer, name) for name in names} - {None}
        every = set(tokenizer.all_special_ids)
        return every - {tokenizer.pad_token_id, tokenizer.unk_token_id} | placed
    config, ids = text_config(model), set[int]()
    for name in names:
        value = getattr(config, name, None)
        ids.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    return ids


def forward_kwargs(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    logits: Literal["last", "all"] = "last",
    cache: bool = False,
) -> dict[str, Any]:
    """The batch as keyword arguments of `model.forward`, with nothing computed that isn't needed.

    Args:
        model: any module.
        batch: model inputs by name; a `use_cache` in it is kept.
        logits: "last" asks for the logits of the last position only, where the model can do that
            and isn't given labels; "all" for those of every position.
        cache: whether the output needs a KV cache.

    >>> import multihead
    >>> model, _ = multihead.load_builtin()
    >>> forward_kwargs(model, {"input_ids": torch.tensor([[5, 6]])}).keys()
    dict_keys(['use_cache', 'logits_to_keep', 'input_ids'])
    """
    names = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": cache}
    if logits == "last":
        options["logits_to_keep"] = 1
    else:
        batch = {name: value for name, value in batch.items() if name != "logits_to_keep"}
    kept = {k: v for k, v in options.items() if k in names and "labels" not in batch}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    if getattr(config_of(model), "return_dict", None) is False and (
        takes_any or "return_dict" in names
    ):
        kept["return_dict"] = True  # outputs are found by their names
    return {**kept, **batch}


def padding_mask(inputs: Mapping[str, Any], stack: str = "") -> Tensor | None:
    """The padding mask in a model's inputs, bool `[B, L]` (True is text), or None without one.

    Args:
        inputs: arguments of the model's forward by name.
        stack: "decoder" for the mask of the decoder's own sequence, where it has one.
    """
    name = "attention_mask"
    if stack == "decoder" and "decoder_attention_mask" in inputs:
        name = "decoder_attention_mask"
    mask = inputs.get(name)
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def select_valid(x: Tensor, mask: Tensor | None) -> Tensor:
    """The rows `[n, D]` of x `[B, L, D]` that are no padding by `mask` bool `[B, L]`; all rows
    where the mask is None or has another shape.
    """
    if mask is not None and mask.shape == x.shape[:2]:
        return x[mask.to(x.device)]
    return x.flatten(0, -2)


def fingerprint(model: nn.Module) -> str:
    """Hash of a model: names, shapes, dtypes and sampled values of its parameters, and its config.

    The same model has the same fingerprint wherever it was loaded from. 16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().flatten()
        # Offloaded and sharded parameters enter by their shape alone.
        if type(flat) is Tensor and not flat.is_meta:
            sample = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED]
            digest.update(sample.double().cpu().numpy().tobytes())
    digest.update(config_fingerprint(getattr(model, "config", None)).encode())
    return digest.hexdigest()[:16]


def config_fingerprint(config: Any) -> str:
    """The part of a transformers config on which the computation depends, as JSON; "" for None."""

    def computing(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                str(name): computing(inner)
                for name, inner in value.items()
                if name not in NOT_COMPUTING and not str(name).startswith("_")
            }
        return [computing(v) for v in value] if isinstance(value, (list, tuple)) else value

    if not hasattr(config, "to_dict"):
        return ""
    return json.dumps(computing(config.to_dict()), sort_keys=True, default=str)
