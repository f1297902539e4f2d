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

from ..errors import MultiheadError
from .model_masks import find_read_rows

__all__ = [
    "IDS",
    "PLAIN_IDS",
    "adds_parameters",
    "can_generate",
    "config_fingerprint",
    "config_of",
    "device_of",
    "find_sentence_transformer",
    "find_special_ids",
    "fingerprint",
    "forward_kwargs",
    "inner_model",
    "is_encoder_decoder",
    "is_sentence_transformer",
    "list_inner_models",
    "model_name",
    "num_virtual_tokens",
    "padding_mask",
    "require_model",
    "select_valid",
    "takes_padding",
    "text_config",
    "text_inputs",
    "tolerance",
    "unwrap",
]

# Arguments of a forward that are token ids, and those that are where they are integers.
IDS = ("input_ids", "token_ids", "tokens", "ids", "idx")
PLAIN_IDS = ("x", "input", "inputs")

SAMPLED = 64  # numbers of each parameter that enter the fingerprint
# Of a config: what its model computes is known from elsewhere.
NOT_COMPUTING = {"dtype", "torch_dtype", "transformers_version"}
# Relative to the largest value: two computations of one thing by a whole model.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def require_model(model: object) -> Any:
    """The model without `DataParallel` or `DistributedDataParallel` around it, which compute what
    it computes.

    Raises:
        TypeError: anything but a module, such as the name of a folder.
        MultiheadError: copies of the model on several devices.

    >>> require_model("gpt2")
    Traceback (most recent call last):
    TypeError: model is a str: expected a model, such as AutoModel.from_pretrained(folder) ...
    >>> require_model(nn.DataParallel(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a model, such as"
            " AutoModel.from_pretrained(folder) returns (the command line takes folders)"
        )
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise MultiheadError(
                f"model is a DataParallel on {len(model.device_ids)} devices: it computes with"
                " copies, which can't be reached; pass model.module"
            )
        model = model.module
    return model


# ---- wrappers


def inner_model(model: nn.Module) -> Any:
    """The transformers model inside wrappers (adapters, user-defined modules); the module itself
    where it is one, holds none, or holds several.

    >>> import multihead
    >>> model, _ = multihead.load_builtin()
    >>> inner_model(nn.Sequential(model)) is model
    True
    """
    found = list_inner_models(model)
    return found[0] if len(found) == 1 else model


def list_inner_models(model: nn.Module) -> list[Any]:
    """The transformers models that a module is or holds, without those inside one of them."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()

    def search(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if _is_of(module, "transformers.modeling_utils", "PreTrainedModel"):
            found[id(module)] = module
            return
        for child in module.children():
            search(child)

    search(model)
    return list(found.values())


def _is_of(module: nn.Module, package: str, name: str = "") -> bool:
    """Whether its class, or one that it inherits from, is of a package, which isn't imported."""
    return any(
        f"{base.__module__}.".startswith(f"{package}.") and name in ("", base.__name__)
        for base in type(module).__mro__
    )


def find_sentence_transformer(model: nn.Module) -> Any:
    """The model of sentence-transformers that a module is or holds, or None: these hold their
    tokenizer, and take one dict of features.
    """
    if _is_of(model, "transformers.modeling_utils", "PreTrainedModel"):
        return None
    return next((m for m in model.modules() if _is_of(m, "sentence_transformers")), None)


def adds_parameters(model: nn.Module) -> bool:
    """Whether wrappers around the model inside have parameters, such as a soft prompt."""
    inner = inner_model(model)
    return {id(p) for p in model.parameters()} != {id(p) for p in inner.parameters()}


def unwrap(model: object) -> Any:
    """The model inside wrappers that add no parameter, else what `require_model` gives.

    >>> import multihead
    >>> model, _ = multihead.load_builtin()
    >>> unwrap(nn.DataParallel(nn.Sequential(model))) is model
    True
    """
    given: nn.Module = require_model(model)
    if adds_parameters(given) or is_sentence_transformer(given):
        return given
    return inner_model(given)


def can_generate(model: nn.Module) -> bool:
    """Whether the model has a head for generating text."""
    return bool(getattr(inner_model(model), "can_generate", lambda: False)())


def is_sentence_transformer(model: nn.Module) -> bool:
    """Whether the module is or holds a model of sentence-transformers."""
    return find_sentence_transformer(model) is not None


def num_virtual_tokens(model: nn.Module) -> int:
    """How many rows or keys without a token an adapter of peft (prompt or prefix tuning) puts
    before a text; 0 for other models.
    """
    if _is_of(model, "transformers.modeling_utils", "PreTrainedModel"):
        return 0
    for module in model.modules():
        if _is_of(module, "peft.peft_model", "PeftModel"):
            adapter: Any = module.active_peft_config
            if getattr(adapter, "is_prompt_learning", False):
                return int(getattr(adapter, "num_virtual_tokens", None) or 0)
    return 0


def model_name(model: nn.Module) -> str:
    """The name under which a model was loaded, else that of its class; of a model inside wrappers
    its own.
    """
    name = getattr(config_of(model), "_name_or_path", "")
    return name or type(inner_model(model)).__name__


# ---- configs


def config_of(model: Any) -> Any:
    """A model's config, or that of the model inside wrappers; a config itself; None for a module
    without one.
    """
    if hasattr(model, "get_text_config") and not isinstance(model, nn.Module):
        return model
    own = getattr(model, "config", None)
    if hasattr(own, "get_text_config") or not isinstance(model, nn.Module):
        return own
    return getattr(inner_model(model), "config", own)


def text_config(model: Any) -> Any:
    """The config of the part that reads text, of a model or a config; the config itself where it
    has no such part, None without one.
    """
    config = config_of(model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def is_encoder_decoder(model: Any) -> bool:
    """Whether it has an encoder and a decoder that reads it, of a model or a config. A model's
    forward must take both sequences: an encoder alone may have the config of the whole.
    """
    stated = bool(getattr(config_of(model), "is_encoder_decoder", False))
    if not stated or not isinstance(model, nn.Module):
        return stated
    names = inspect.signature(inner_model(model).forward).parameters
    return any(name.startswith("decoder_") for name in names)


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


def device_of(model: nn.Module) -> torch.device:
    """The device on which a model takes its inputs: that of its first parameter in memory.

    Where accelerate keeps parameters elsewhere, that on which it executes the model.

    >>> device_of(nn.Linear(2, 2))
    device(type='cpu')
    """
    tensors = (x.device for part in (model.parameters, model.buffers) for x in part())
    found = next((device for device in tensors if device.type != "meta"), None)
    for module in model.modules() if any(p.is_meta for p in model.parameters()) else ():
        where = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if where is not None:
            return torch.device(where)
    return torch.device("cpu") if found is None else found


def find_special_ids(model: nn.Module, tokenizer: Any = None) -> set[int]:
    """The ids of special tokens: those of the tokenizer, without padding and unknown, which mark no
    place in a text; by default those that the model's config names.
    """
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    if tokenizer is not None:
        placed = {getattr(tokenizer, name) for name in names} - {None}
        every = set(tokenizer.all_special_ids)
        return every - {tokenizer.pad_token_id, tokenizer.unk_token_id} | placed
    ids = set[int]()
    for config in map(text_config, list_inner_models(model) or [model]):
        for name in names:
            value = getattr(config, name, None)
            ids.update(
                [value] if isinstance(value, int) else value if isinstance(value, list) else []
            )
    return ids


def takes_padding(model: nn.Module) -> bool:
    """Whether `text_inputs` can give the model an attention mask, so that texts may be padded."""
    names = inspect.signature(model.forward).parameters
    return (
        "attention_mask" in names
        or is_sentence_transformer(model)
        or any(p.kind == p.VAR_KEYWORD for p in names.values())
    )


def text_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Tokenized texts, under the names that the model's forward has for them.

    Args:
        model: any module, such as a wrapper whose forward takes ids as `x`.
        inputs: `input_ids`, `attention_mask` and the like.

    Raises:
        MultiheadError: it isn't known which argument the ids are.

    >>> class Wrapper(nn.Module):
    ...     def forward(self, x): ...
    >>> text_inputs(Wrapper(), {"input_ids": 1, "attention_mask": 2})
    {'x': 1}
    """
    names = inspect.signature(model.forward).parameters
    if is_sentence_transformer(model):
        return {next(iter(names)): dict(inputs)}
    if type(inner_model(model)).__name__.endswith("ForMultipleChoice"):  # each text is one choice
        return {
            name: x[:, None] if isinstance(x, Tensor) and x.ndim == 2 else x
            for name, x in inputs.items()
        }
    if "input_ids" in names and "attention_mask" in names:
        return dict(inputs)
    if any(p.kind == p.VAR_KEYWORD for p in names.values()):
        return dict(inputs)
    ids = next((name for name in (*IDS, *PLAIN_IDS) if name in names), None)
    if ids is None:
        inner = inner_model(model)
        path = next((name for name, module in model.named_modules() if module is inner), "")
        raise MultiheadError(
            f"{type(model).__name__}.forward({', '.join(names)}) has no argument that is known to"
            f" be token ids ({', '.join((*IDS, *PLAIN_IDS))}): give ready-made inputs (dicts of its"
            f" arguments) in place of texts"
            + (f", or the model inside it, model.{path}" if path else "")
        )
    given = {name: value for name, value in inputs.items() if name in names}
    return given | {ids: inputs["input_ids"]}


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
    mask, ids = inputs.get(name), inputs.get("input_ids")
    if isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.ndim == ids.ndim == 3:
        mask = mask.flatten(0, 1)  # of several choices, which the model reads as sequences
    if isinstance(mask, Tensor) and mask.ndim == 4:  # queries that may read nothing are padding
        rows = find_read_rows(mask)
        batch = len(ids) if isinstance(ids, Tensor) else len(mask)
        return rows if rows is None else rows.expand(batch, -1)
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

    The same model has the same fingerprint wherever it was loaded from, and in a wrapper that adds
    no parameter. 16 hexadecimal digits.
    """
    if not adds_parameters(model):
        model = inner_model(model)
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        # Offloaded, sharded and quantised parameters enter by their shape alone.
        if type(parameter.data) is Tensor and not parameter.is_meta:
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED]
            digest.update(sample.double().cpu().numpy().tobytes())
    digest.update(config_fingerprint(config_of(model)).encode())
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
