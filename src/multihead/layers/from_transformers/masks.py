"""The mask of every call of a module. Its model makes it: it's read from attributes, and from the
file of the module's class.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from inspect import getsource, signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.masks import IntervalMask, causal, window
from .positions import layer_type, setting
from .trial import MEMORY
from .twin import refuse, signature_of

SLIDING = ("sliding_attention", "local", "sliding")
FULL = ("full_attention", "global", "attention", "full", "hybrid")
DECODERS, OTHERS = ("ForCausalLM", "LMHeadModel"), ("ForMaskedLM", "ForConditionalGeneration")


def mask_of(
    module: nn.Module, inner: nn.Module, seen: dict[str, Any], is_causal: bool | None
) -> IntervalMask | None:
    """The mask of a module whose attention is in `inner` and passes `seen` to its attention
    function.

    Raises:
        MultiheadError: a kind of mask that isn't a band, and what only the model knows.
    """
    reads_back = _reads_back_only(module, inner, seen) if is_causal is None else is_causal
    kind = layer_type(inner)
    if kind is not None and kind not in SLIDING + FULL:
        raise refuse(module, f"layer_type={kind!r}")
    size = _window(inner, kind, seen)
    if kind in FULL or not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return causal() if reads_back else None
    if reads_back:
        return causal() & window(left=size - 1)
    # Of both sides, where the module may have one more than its config, for flash attention.
    size = setting(inner, "sliding_window") or size
    names = _names(inner)
    if "create_bidirectional_sliding_window_mask" in names:
        return window(left=size, right=size)
    if "_bidirectional_window_overlay" in names:
        return window(left=size - 1, right=size - 1)
    raise refuse(module, f"sliding_window={size} to both sides, in its model's way")


def _window(inner: nn.Module, kind: str | None, seen: dict[str, Any]) -> Any:
    if seen.get("sliding_window") is not None:
        return seen["sliding_window"]
    for name in ("sliding_window", "window_size"):
        if hasattr(inner, name):
            return getattr(inner, name)
    if kind in SLIDING:
        return setting(inner, "sliding_window") or setting(inner, "window_size")
    is_on = kind is None and setting(inner, "use_sliding_window") is not False
    return setting(inner, "sliding_window") if is_on else None


def _reads_back_only(module: nn.Module, inner: nn.Module, seen: dict[str, Any]) -> bool:
    """Whether queries read no later keys."""
    unknown = refuse(
        module,
        "nothing in it shows whether its queries read later keys",
        "give is_causal=True or is_causal=False",
    )
    config = getattr(inner, "config", None)
    users = _models_of(type(config).__name__, type(inner).__module__)
    if any("is_decoder" in signature(cls.forward).parameters for cls in users):
        raise unknown  # the call of the model decides, as in BLIP
    if _hides_causality(inner):
        raise unknown
    if "Text" in type(config).__name__ and _mask_makers(users) == {"create_causal_mask"}:
        return True  # CLIP's text model, whose modules don't know of it
    own = [getattr(inner, name, None) for name in ("is_causal", "is_decoder")]
    for value in (own[0], seen.get("is_causal"), own[1]):
        if isinstance(value, bool):
            return value
    if setting(inner, "is_decoder") is True or any(_is_lower(x) for x in inner._buffers.values()):
        return True
    names = _names(inner)
    decodes, encodes = (any(x.endswith(kinds) for x in names) for kinds in (DECODERS, OTHERS))
    if decodes and encodes:
        raise unknown
    return decodes


def _names(module: nn.Module) -> list[str]:
    """The names in the file that defines the module's class."""
    file = sys.modules.get(type(module).__module__)
    return [] if file is None else list(vars(file))


def _models_of(config: str, file: str) -> list[type[nn.Module]]:
    """The models in a file whose constructors take this class of config."""
    found = []
    for value in vars(sys.modules[file]).values() if file in sys.modules else ():
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == file:
            hint = getattr(value.__init__, "__annotations__", {}).get("config")
            name = hint if isinstance(hint, str) else getattr(hint, "__name__", "")
            if name == config and hasattr(value, "config_class"):
                found.append(value)
    return found


def _mask_makers(models: list[type[nn.Module]]) -> set[str]:
    """The functions that make masks in these models' forward."""
    found = set()
    for cls in models:
        code = getattr(unwrap(cls.forward), "__code__", None)
        names = () if code is None else code.co_names
        found |= {name for name in names if name.startswith("create_") and "mask" in name}
    return found


def _hides_causality(inner: nn.Module) -> bool:
    """Whether one class serves self and cross attention of a decoder, and no argument of its
    constructor names which, as in LED and PEGASUS-X.
    """
    takes = signature_of(inner)
    is_open = any(name in takes and takes[name].default is None for name in MEMORY)
    is_decoder = getattr(inner, "is_decoder", None) is True
    if not is_open or not is_decoder or getattr(inner, "is_causal", None):
        return False
    cls: Any = type(inner)
    return not _is_told(cls)


@lru_cache
def _is_told(cls: Any) -> bool:
    """Whether some call of a class in its file passes `is_causal`."""
    try:
        source = getsource(sys.modules[cls.__module__])
    except (KeyError, OSError, TypeError):  # of a notebook, for instance
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and cls.__name__ in ast.unparse(node.func):
            for keyword in node.keywords:
                if keyword.arg == "is_causal" and ast.unparse(keyword.value) != "False":
                    return True
    return False


def _is_lower(x: Tensor | None) -> bool:
    """Whether a buffer is a causal mask."""
    if x is None or x.ndim < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] < 2:
        return False
    flags = x[(0,) * (x.ndim - 2)].bool()
    return bool(torch.equal(flags, flags.tril()) and flags.diagonal().all())
