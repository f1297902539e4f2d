"""Attention of modules that don't use transformers' attention interface.

While such a module is instrumented, its forward is replaced by that of its `Kind`: it lowers the
module's arguments to an `AttentionCall`, passes that on, and calls the module's own output
projection, so that hooks on it see the head outputs. Each kind is an entry of `KINDS`; every other
class whose methods call `torch.nn.functional.scaled_dot_product_attention` is a kind, too. Whatever
an entry doesn't know is refused by name.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import MultiheadError
from ..layers.latent import LatentAttention
from ..ops.call import AttentionCall, CallContext, split_mask_bias
from ..ops.convert import from_torch_mask
from ..ops.functional import attention, compute, compute_weights
from ..ops.heads import merge_heads, split_heads
from ..ops.masks import causal
from ..ops.slopes import AlibiBias
from .contexts import temporary_attributes
from .model_masks import Mask, ModelMask, fill_empty, find_readable_keys, split_mask
from .names import find_number, is_masking, names_of
from .transformers import ATTEND

Arguments = dict[str, Any]
Attend = Callable[[AttentionCall], Tensor]


class ModuleCall(NamedTuple):
    """One call of a module: the module, the forward of its class, what attends, the arguments."""

    module: Any
    forward: Callable[..., Any]
    attend: Attend
    args: tuple[Any, ...]
    kwargs: Arguments

    def named(self) -> Arguments:
        """All arguments by name, defaults included."""
        bound = inspect.signature(self.forward).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments

    def run(self) -> Any:
        return self.forward(*self.args, **self.kwargs)


class Kind(NamedTuple):
    """How modules of one class are instrumented."""

    forward: Callable[[ModuleCall], Any]
    why_not: Callable[[Any], str]  # why this one can't be read; "" where it can
    projects: bool = True  # whether its own forward calls its output projection as a module


# ---- torch.nn.MultiheadAttention, and with it nn.Transformer and its layers


def _torch(called: ModuleCall) -> Any:
    module, given = called.module, called.named()
    inputs = [given[name] for name in ("query", "key", "value")]
    padding, need_weights = given["key_padding_mask"], given["need_weights"]
    if any(x.is_nested for x in inputs):
        raise MultiheadError(
            "nn.MultiheadAttention was given nested tensors, which can't be read; give padded ones,"
            " and a key_padding_mask"
        )
    if given["is_causal"] and given["attn_mask"] is None:
        return called.run()  # which raises
    cross = is_other_sequence(inputs[0], inputs[1])
    sequence_first = inputs[0].ndim == 3 and not module.batch_first
    q, k, v = _project(module, inputs, sequence_first)
    if given["is_causal"] and padding is None and not need_weights:  # torch ignores attn_mask then
        split = ModelMask(causal())
    else:
        masks = from_torch_mask(given["attn_mask"], padding, num_heads=module.num_heads)
        split = split_mask(*masks, q.shape[2], k.shape[2])
    # add_zero_attn adds a key and value of 0: a sink whose logit is 0
    sinks = q.new_zeros(module.num_heads) if module.add_zero_attn else None
    dropout = module.dropout if module.training else 0.0
    call = AttentionCall.lower(q, k, v, split.mask, bias=split.bias, sinks=sinks, dropout=dropout)
    if padding is None:
        valid = find_valid_keys(call)
    else:
        valid = is_token(padding).reshape(-1, padding.shape[-1])
    out = _attend(called, call, split, CallContext(valid, cross=cross))
    out = module.out_proj(merge_heads(out))
    single = inputs[0].ndim == 2
    out = out.transpose(0, 1) if sequence_first else out[0] if single else out
    if not need_weights:
        return out, None
    weights = compute_weights(call)
    if module.add_zero_attn:
        weights = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], -1)
    weights = weights.mean(1) if given["average_attn_weights"] else weights
    return out, weights[0] if single else weights


def _project(module: Any, inputs: list[Tensor], sequence_first: bool) -> list[Tensor]:
    """Queries, keys and values `[B, H, L, E]` of an `nn.MultiheadAttention`."""
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    projected = []
    for x, weight, bias in zip(inputs, weights, biases, strict=True):
        x = x.transpose(0, 1) if sequence_first else x[None] if x.ndim == 2 else x
        projected.append(split_heads(F.linear(x, weight, bias), module.num_heads))
    return projected


def update_of(module: Any, output: Any) -> Tensor | None:
    """The output `[B, L, D]` of W_O, from that of an `nn.MultiheadAttention`."""
    out: Tensor = output[0]
    if out.is_nested:
        return None
    return out[None] if out.ndim == 2 else out if module.batch_first else out.transpose(0, 1)


# ---- this library's own layers, which call `multihead.attention`


def _own(called: ModuleCall) -> Any:
    module, given = called.module, called.named()
    cache, valid, key = given["cache"], given["valid"], given.get("key")
    cross = key is not None and is_other_sequence(given["query"], key)
    offset = None
    if cache is not None and not cross:
        if hasattr(cache, "left") or isinstance(cache.lengths, Tensor) or valid is not None:
            raise MultiheadError(
                f"a {type(module).__name__} with a cache that evicts keys, or whose rows have"
                " different lengths, can't be read: the index of a key isn't its position. Read"
                " each text in one piece, or without padding"
            )
        offset = cache.length

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask = None,
        *,
        bias: Tensor | AlibiBias | None = None,
        return_lse: bool = False,
        return_weights: bool = False,
        backend: str = "auto",
        **numbers: Any,
    ) -> Any:
        mask, bias = split_mask_bias(mask, bias, q)
        alibi = bias if isinstance(bias, AlibiBias) else None  # which forbids nothing
        added = bias if isinstance(bias, Tensor) else None
        split = split_mask(mask, added, q.shape[2], k.shape[2])
        call = AttentionCall.lower(q, k, v, split.mask, bias=alibi or split.bias, **numbers)
        key_valid = valid if cache is None else None
        if key_valid is None and offset is None:
            key_valid = find_valid_keys(call)
        out = _attend(called, call, split, CallContext(key_valid, offset, cross))
        return (out, compute_weights(call)) if return_weights else out

    # The absorbed form has one key/value head, whose values aren't those of any head.
    expanded = {"form": "expanded"} if isinstance(module, LatentAttention) else {}
    with temporary_attributes(module, **expanded), _Replace(attention, attend):
        return called.run()


# ---- modules that call torch's scaled_dot_product_attention: timm's, and most hand-written ones


def _sdpa(called: ModuleCall) -> Any:
    module = called.module
    cross = _attends_across(called)

    def attend(
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
        k, v = _without_copies(module, k, v)
        boolean = attn_mask is not None and attn_mask.dtype == torch.bool
        mask: Mask = causal() if is_causal else attn_mask if boolean else None
        split = split_mask(mask, None if boolean else attn_mask, q.shape[2], k.shape[2])
        call = AttentionCall.lower(
            q, k, v, split.mask, bias=split.bias, scale=scale, dropout=dropout_p
        )
        return _attend(called, call, split, CallContext(find_valid_keys(call), cross=cross))

    # timm's own switch between that function and plain products
    fused = {"fused_attn": True} if hasattr(module, "fused_attn") else {}
    with temporary_attributes(module, **fused), _Replace(F.scaled_dot_product_attention, attend):
        return called.run()


def _attend(
    called: ModuleCall, call: AttentionCall, split: ModelMask, known: CallContext
) -> Tensor:
    out = called.attend(call._replace(context=known._replace(empty=split.empty)))
    return fill_empty(out, call, split)


def _attends_across(called: ModuleCall) -> bool | None:
    """True if the keys are of another sequence: one among the arguments; None where there is none,
    and the module's name decides.
    """
    sequences = [
        x
        for name, x in called.named().items()
        if isinstance(x, Tensor)
        and x.ndim == 3
        and x.is_floating_point()
        and not re.search("mask|bias|pos|rope", name)
    ]
    others = [x for x in sequences[1:] if x.shape[0] == sequences[0].shape[0]]
    return any(is_other_sequence(sequences[0], x) for x in others) if others else None


def _without_copies(module: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values without the copies that the module made for each query head of a group."""
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
def _calls_sdpa(cls: Any) -> bool:
    """Whether a method of the class, or a function that one calls by name, calls
    scaled_dot_product_attention.
    """
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for member in vars(base).values():
            method = getattr(member, "__func__", member)  # of a static method
            if not isinstance(method, types.FunctionType):
                continue
            method = inspect.unwrap(method)
            called = [
                function
                for name in method.__code__.co_names
                if isinstance(function := method.__globals__.get(name), types.FunctionType)
            ]
            codes = [function.__code__ for function in (method, *called)]
            if any("scaled_dot_product_attention" in code.co_names for code in codes):
                return True
    return False


class _Replace(TorchFunctionMode):
    """Calls `replacement` where `function` is called, in this thread."""

    def __init__(self, function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.replacement = function, replacement

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        called = self.replacement if function is self.function else function
        return called(*args, **(kwargs or {}))


def _why_not_own(layer: Any) -> str:
    if layer.shard is not None:
        return "its heads are divided among ranks; read it before parallelize_module divides them"
    has_key = getattr(layer, "bias_k", None) is not None
    return "its bias_kv adds a key that is no token's" if has_key else ""


# ---- the table

KINDS = {
    "torch.nn.modules.activation.MultiheadAttention": Kind(
        _torch,
        lambda m: "" if m.bias_k is None else "its add_bias_kv adds a key that is no token's",
        projects=False,
    ),
    "multihead.layers.attention.MultiHeadAttention": Kind(_own, _why_not_own),
    "multihead.layers.latent.LatentAttention": Kind(_own, _why_not_own),
}
SDPA = Kind(_sdpa, lambda m: "")


class PatchedForward:
    """A module's forward while it is instrumented: passes its attention to the module's taps."""

    def __init__(self, module: nn.Module) -> None:
        kind = kind_of(module)
        assert isinstance(kind, Kind)
        self.module, self.kind = module, kind
        self.forward = functools.partial(type(module).forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attend = vars(self.module).get(ATTEND, compute)
        hook: Any = getattr(self.module, "_hf_hook", None)  # accelerate's, which fetches weights
        if hook is not None:
            args, kwargs = hook.pre_forward(self.module, *args, **kwargs)
        out = self.kind.forward(ModuleCall(self.module, self.forward, attend, args, kwargs))
        return out if hook is None else hook.post_forward(self.module, out)


def kind_of(module: nn.Module) -> Kind | str | None:
    """The kind of a module; or the reason why it can't be read; or None where it holds no attention
    that is known here.

    >>> isinstance(kind_of(nn.MultiheadAttention(4, 2)), Kind), kind_of(nn.Linear(2, 2))
    (True, None)
    >>> kind_of(nn.MultiheadAttention(4, 2, add_bias_kv=True))
    "its add_bias_kv adds a key that is no token's"
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
    offloaded = hasattr(module, "_hf_hook") and getattr(module, "_old_forward", None) == (
        types.MethodType(cls.forward, module)
    )
    if forward is not None and not offloaded and not isinstance(forward, PatchedForward):
        return "its forward was replaced on this one object, so what it computes isn't known"
    return kind.why_not(module) or kind


def has_elementwise_gate(module: Any) -> bool:
    """Whether an elementwise gate or norm is known to lie between the heads and W_O.

    A reading detects others; a LayerNorm, which moves zeros, is known only from here.
    """
    if type(module).__module__.startswith("timm."):
        norm = getattr(module, "norm", nn.Identity())
        return not isinstance(norm, nn.Identity) or getattr(module, "gate", None) is not None
    return isinstance(kind_of(module), Kind) and getattr(module, "gate", None) == "elementwise"


# ---- masks, padding and arguments of other libraries


def find_valid_keys(call: AttentionCall) -> Tensor | None:
    """Mask of the keys that are tokens and not padding, bool `[B, S]`; None where the mask is the
    same for all batch elements, and so doesn't show it.
    """
    limits = call.start if call.mask is None else call.mask
    if limits is None or call.q.shape[0] == 1 or limits.shape[0] == 1:
        return None
    return find_readable_keys(call)


def is_other_sequence(query: Tensor, key: Tensor) -> bool:
    """Whether the keys are another sequence than the queries."""
    return key is not query and (key.shape != query.shape or not torch.equal(key, query))


def is_token(padding: Tensor) -> Tensor:
    """Mask of the positions that are tokens, bool, from a padding mask of torch: True, or a large
    negative number, at padding.
    """
    return ~padding if padding.dtype == torch.bool else ~is_masking(padding)


def find_decoder_tokens(arguments: Mapping[str, Any]) -> Tensor | None:
    """Mask `[B, L]` of the positions of a decoder that are tokens, from torch's
    `tgt_key_padding_mask`.
    """
    padding = arguments.get("tgt_key_padding_mask")
    return is_token(padding) if isinstance(padding, Tensor) and padding.ndim == 2 else None


def flatten_features(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module, with those inside a dict of features, as the modules of
    sentence-transformers take them.
    """
    inside = [
        value
        for value in arguments.values()
        if isinstance(value, Mapping) and not hasattr(value, "to_tuple")
    ]
    return {**arguments, **{key: value for features in inside for key, value in features.items()}}
