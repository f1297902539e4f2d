"""Attention in modules of any make: how its calls are reached where they don't go through
transformers' interface.

Each kind of module is one entry of `KINDS`: what takes the place of its forward for as long as a
reading lasts. That builds the `AttentionCall`, hands it on, and has the module's own output projection
called, so that hooks on it see what the heads gave. What an entry doesn't know is refused by name.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import MultiheadError
from ..ops.call import AttentionCall, CallContext
from ..ops.convert import from_torch_mask
from ..ops.functional import compute, compute_weights
from ..ops.heads import merge_heads, split_heads
from ..ops.masks import causal
from ..ops.slopes import AlibiBias
from .calls import Mask, apart, settled, text_of, valid_keys
from .names import find_number, names_of
from .transformers import ATTEND, having

Given = dict[str, Any]
Attend = Callable[[AttentionCall], Tensor]


class Kind(NamedTuple):
    """How modules of one kind are read."""

    forward: Callable[
        [Any, Callable[..., Any], Attend, tuple[Any, ...], Given], Any
    ]  # module, its own forward, what attends
    refuses: Callable[[Any], str]  # why this one can't be read; "" where it can
    projects: bool = True  # whether its own forward calls its output projection as a module


# ---- torch.nn.MultiheadAttention, and with it nn.Transformer and its layers


def _torch(
    module: Any, forward: Callable[..., Any], attend: Attend, args: tuple[Any, ...], kwargs: Given
) -> Any:
    given = _bound(forward, args, kwargs)
    query, key, value = inputs = [given[name] for name in ("query", "key", "value")]
    attn_mask, padded, need_weights = (
        given[name] for name in ("attn_mask", "key_padding_mask", "need_weights")
    )
    if any(x.is_nested for x in inputs):
        raise MultiheadError(
            "nn.MultiheadAttention was given nested tensors, which can't be read; give padded ones,"
            " and a key_padding_mask"
        )
    if given["is_causal"] and attn_mask is None:
        return forward(*args, **kwargs)  # which refuses it
    cross = apart(query, key)
    turned = query.ndim == 3 and not module.batch_first
    query, key, value = (
        x.transpose(0, 1) if turned else x[None] if x.ndim == 2 else x for x in inputs
    )
    heads = module.num_heads
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        split_heads(F.linear(x, w, b), heads)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    mask: Mask
    if (
        given["is_causal"] and padded is None and not need_weights
    ):  # torch then leaves attn_mask aside
        mask, bias = causal(), None
    else:
        mask, bias = settled(*from_torch_mask(attn_mask, padded, num_heads=heads), q, k)
    sinks = (
        q.new_zeros(heads) if module.add_zero_attn else None
    )  # a key that is 0 and reads 0: a sink whose logit is 0
    call = AttentionCall.lower(
        q, k, v, mask, bias=bias, sinks=sinks, dropout=module.dropout if module.training else 0.0
    )
    valid = valid_keys(call) if padded is None else text_of(padded).reshape(-1, padded.shape[-1])
    out = module.out_proj(
        merge_heads(attend(call._replace(context=CallContext(valid, cross=cross))))
    )
    out = out.transpose(0, 1) if turned else out[0] if given["query"].ndim == 2 else out
    if not need_weights:
        return out, None
    found = compute_weights(call)
    if module.add_zero_attn:
        found = torch.cat([found, 1 - found.sum(-1, keepdim=True)], -1)
    found = found.mean(1) if given["average_attn_weights"] else found
    return out, found[0] if given["query"].ndim == 2 else found


def left(module: Any, output: Any) -> Tensor | None:
    """What left the output projection, `[B, L, D]`, from what an `nn.MultiheadAttention`
    returned.
    """
    out: Tensor = output[0]
    if out.is_nested:
        return None
    return out[None] if out.ndim == 2 else out if module.batch_first else out.transpose(0, 1)


# ---- this library's own layers


def _own(
    module: Any, forward: Callable[..., Any], attend: Attend, args: tuple[Any, ...], kwargs: Given
) -> Any:
    given = _bound(forward, args, kwargs)
    cache, valid, key = given["cache"], given["valid"], given["key"]
    cross = key is not None and apart(given["query"], key)
    offset = None
    if cache is not None and not cross:
        if hasattr(cache, "left") or isinstance(cache.lengths, Tensor) or valid is not None:
            raise MultiheadError(
                "a MultiHeadAttention with a cache that lets keys go, or whose rows have different"
                " lengths, can't be read: a key's place isn't its position. Read each text in one"
                " piece, or without padding"
            )
        offset = cache.length

    def operator(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        bias: Tensor | AlibiBias | None,
        softcap: float | None,
        sinks: Tensor | None,
        dropout: float,
        return_lse: bool,
        return_weights: bool,
    ) -> Any:
        if not isinstance(bias, AlibiBias):  # which say nothing of what may be read
            mask, bias = settled(mask, bias, q, k)
        elif isinstance(mask, Tensor):
            mask, _ = settled(mask, None, q, k)
        call = AttentionCall.lower(
            q, k, v, mask, bias=bias, softcap=softcap, sinks=sinks, dropout=dropout
        )
        key_valid = valid if cache is None else None
        if key_valid is None and offset is None:
            key_valid = valid_keys(call)
        out = attend(call._replace(context=CallContext(key_valid, offset, cross)))
        return (out, compute_weights(call)) if return_weights else out

    with having(module, operator=operator):
        return forward(*args, **kwargs)


# ---- whatever calls torch's scaled_dot_product_attention: timm's, and most that are written by
# hand


def _sdpa(
    module: Any, forward: Callable[..., Any], attend: Attend, args: tuple[Any, ...], kwargs: Given
) -> Any:
    def instead(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.ndim != 4:
            raise MultiheadError(
                f"{type(module).__name__} can't be read: it calls scaled_dot_product_attention with"
                f" q{list(query.shape)}, and which heads these are isn't known; expected [B, H,"
                " L, E]"
            )
        batch = max(query.shape[0], key.shape[0])
        q, k, v = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
        k, v = _shared(module, k, v)
        boolean = attn_mask is not None and attn_mask.dtype == torch.bool
        mask: Mask = causal() if is_causal else attn_mask if boolean else None
        mask, bias = settled(mask, None if boolean else attn_mask, q, k)
        call = AttentionCall.lower(q, k, v, mask, bias=bias, scale=scale, dropout=dropout_p)
        return attend(call._replace(context=CallContext(valid_keys(call), cross=cross)))

    # Another sequence among the arguments is what the keys are of; where there is none, the
    # module's name tells.
    given = [
        x
        for name, x in _bound(forward, args, kwargs).items()
        if isinstance(x, Tensor)
        and x.ndim == 3
        and x.is_floating_point()
        and not re.search("mask|bias|pos|rope", name)
    ]
    others = [x for x in given[1:] if x.shape[0] == given[0].shape[0]]
    cross = any(apart(given[0], x) for x in others) if others else None
    fused = (
        {"fused_attn": True} if hasattr(module, "fused_attn") else {}
    )  # timm's own switch between it and plain products
    with having(module, **fused), _Instead(instead):
        return forward(*args, **kwargs)


class _Instead(TorchFunctionMode):
    """Calls something else where torch's scaled_dot_product_attention is called."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            return self.function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _shared(module: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values without the copies that the module made, one for each query head of a
    group.
    """
    groups = find_number(module, names_of(module).num_kv_heads) or k.shape[1]
    if 0 < groups < k.shape[1] and k.shape[1] % groups == 0:
        first = [x.unflatten(1, (groups, -1))[:, :, :1] for x in (k, v)]
        if all(
            torch.equal(f.expand(-1, -1, x.shape[1] // groups, -1, -1).flatten(1, 2), x)
            for f, x in zip(first, (k, v))
        ):
            k, v = (x[:, :, 0] for x in first)
    return k, v


@functools.cache
def _calls_sdpa(kind: Any) -> bool:
    """Whether a method of the class, or a function that one calls by name, calls
    scaled_dot_product_attention.
    """
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for member in vars(base).values():
            method = getattr(member, "__func__", member)  # of a static method
            if not isinstance(method, types.FunctionType):
                continue
            method = inspect.unwrap(method)
            called = [
                f
                for name in method.__code__.co_names
                if isinstance(f := method.__globals__.get(name), types.FunctionType)
            ]
            if any(
                "scaled_dot_product_attention" in f.__code__.co_names for f in (method, *called)
            ):
                return True
    return False


def _bound(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Given) -> Given:
    """All of a call's arguments by name, those that were left out too."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


# ---- the table

KINDS = {
    "torch.nn.modules.activation.MultiheadAttention": Kind(
        _torch,
        lambda m: "" if m.bias_k is None else "its add_bias_kv adds a key that stands for no token",
        projects=False,
    ),
    "multihead.layers.attention.MultiHeadAttention": Kind(
        _own,
        lambda m: "" if m.bias_k is None else "its bias_kv adds a key that stands for no token",
    ),
}
SDPA = Kind(_sdpa, lambda m: "")


class PatchedForward:
    """A module's forward while it is instrumented: hands its attention to the module's taps."""

    def __init__(self, module: nn.Module) -> None:
        kind = kind_of(module)
        assert isinstance(kind, Kind)
        self.module, self.kind = module, kind
        self.forward = functools.partial(type(module).forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attend = vars(self.module).get(ATTEND, compute)
        return self.kind.forward(self.module, self.forward, attend, args, kwargs)


def kind_of(module: nn.Module) -> Kind | str | None:
    """How the module is read; or the reason why it can't be; or None, where it holds no attention
    that is known here.

    >>> isinstance(kind_of(nn.MultiheadAttention(4, 2)), Kind), kind_of(nn.Linear(2, 2))
    (True, None)
    >>> kind_of(nn.MultiheadAttention(4, 2, add_bias_kv=True))
    'its add_bias_kv adds a key that stands for no token'
    """
    cls: Any = type(module)
    if cls.__module__.startswith("transformers."):  # reached through its interface, or not at all
        return None
    named = ((base, KINDS.get(f"{base.__module__}.{base.__qualname__}")) for base in cls.__mro__)
    base, kind = next(
        ((b, k) for b, k in named if k is not None), (cls, SDPA if _calls_sdpa(cls) else None)
    )
    if kind is None:
        return None
    if cls.forward is not base.forward:
        return f"its forward isn't that of {base.__name__}, so what it computes isn't known"
    forward = vars(module).get("forward")
    if forward is not None and not isinstance(forward, PatchedForward):
        return "its forward was replaced on this one object, so what it computes isn't known"
    return kind.refuses(module) or kind


def has_elementwise_gate(module: Any) -> bool:
    """Whether a gate or norm of each number by itself is known to stand between the heads and W_O.

    Others are found by observation; a LayerNorm, which moves zeros, only here.
    """
    if type(module).__module__.startswith("timm."):
        return (
            not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity)
            or getattr(module, "gate", None) is not None
        )
    return isinstance(kind_of(module), Kind) and getattr(module, "gate", None) == "elementwise"
