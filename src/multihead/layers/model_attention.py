"""`ModelAttention`: a layer called with the arguments of a transformers attention module."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.masks import IntervalMask, causal
from .attention import MultiHeadAttention
from .decode_step import decode_step
from .interval_tensor import IntervalTensor
from .latent import LatentAttention
from .model_cache import ModelCache
from .position_bias import PositionBias
from .rotary import Rotary

__all__ = ["ModelAttention"]

# Keywords that models pass and that change nothing here: the rate of dropout comes as `dropout`,
# windows and packed sequences are in the mask.
IGNORED = frozenset(
    {
        "position_ids",
        "sliding_window",
        "output_attentions",
        "output_hidden_states",
        "use_cache",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "cache_position",
        "num_items_in_batch",
        "return_dict",
        "output_router_logits",
        "deterministic",
        "layer_idx",
        "cache",
        "past_key_values",
        "past_key_value",
        "inputs_embeds",
        "logits_to_keep",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "token_type_ids",
        "labels",
        "position_embeddings",
        "is_training",
        "input_ids",
        "grid_thw",
    }
)
_UNCHANGING = IGNORED - {"output_attentions"}
# The arguments that are passed on, by the names that models give them.
ROLES = {
    "cache": "cache",
    "past_key_values": "cache",
    "past_key_value": "cache",
    "layer_past": "cache",
    "attention_mask": "mask",
    "mask": "mask",
    "encoder_attention_mask": "other_mask",
    "encoder_hidden_states": "other",
    "key_value_states": "other",
    "position_embeddings": "cos_sin",
    "position_ids": "position_ids",
    "position_bias": "bias",
    "is_causal": "is_causal",
}
_OF_STEPS = {"cache", "cos_sin", "position_ids", "is_causal"}


class ModelAttention(nn.Module):
    """A layer in the place of a transformers attention module, called with its arguments.

    `attention` is the layer; all parameters are its. Hidden states, the mask, the cache, rotations
    and the states of an encoder are passed on to it in its own terms. Weights aren't returned.

    Args:
        layer: what computes, with the module's weights.
        module: the transformers module; it is kept without its weights, for `restore_attention`.
        pairs: how the rotations that the model passes are arranged: "halves" (all angles, then
            all again, as in Llama), "neighbours" (each angle twice, as in Cohere).

    Raises:
        MultiheadError: in a call, arguments that the layer doesn't know, by name.
    """

    def __init__(
        self,
        layer: MultiHeadAttention | LatentAttention,
        module: nn.Module,
        *,
        pairs: str = "halves",
    ) -> None:
        super().__init__()
        # what the model reads from its attention modules: layer_idx, is_causal, head_dim, ...
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.attention = layer
        # in a dict, which hides it from the model: what restore_attention puts back
        self.kept: dict[str, nn.Module] = {}
        self._pairs = pairs
        self._kind = type(module).__name__
        self._names = _argument_names(type(module))
        self._is_latent = isinstance(layer, LatentAttention)
        self._layer_idx: Any = getattr(module, "layer_idx", None)
        self._is_causal = bool(getattr(module, "is_causal", True))
        positions = layer.positions
        self._rotates, self._counts = (
            isinstance(positions, kind) for kind in (Rotary, PositionBias)
        )
        self._half = positions.rotary_dim // 2 if isinstance(positions, Rotary) else 0
        self._shares_bias = "position_bias" in self._names  # T5: the first layer's, for all
        self.train(module.training)

    def extra_repr(self) -> str:
        return f"in place of {self._kind}"

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        if args:
            kwargs.update(zip(self._names, args, strict=False))
        states = kwargs.pop(self._names[0])
        given: dict[str, Any] = {}
        for name, value in kwargs.items():
            role = ROLES.get(name)
            if role is not None:
                if value is not None:
                    given[role] = value
            elif value is not None and value is not False and name not in _UNCHANGING:
                self._refuse(name)
        other, cache = given.get("other"), given.get("cache")
        if self._is_step(given, cache):
            cos, sin = given["cos_sin"]
            step = decode_step(self.attention, states, cos, sin, cache, self._layer_idx)
            if step is not None:
                return step, None
        mask = given.get("mask") if other is None else given.get("other_mask", given.get("mask"))
        is_causal = given.get("is_causal", self._is_causal)
        rule, added = _lower(mask, is_causal and other is None and states.shape[1] > 1)
        bias = given.get("bias")
        if bias is not None:
            if self._counts:
                self._refuse("position_bias")
            added = bias if added is None else added + bias
        options: dict[str, Any] = {}
        if self._rotates:
            options.update(self._rotation(given))
        if other is not None:
            options["key"], cache, rule = self._across(other, cache, rule)
        elif cache is not None:
            cache = getattr(cache, "self_attention_cache", cache)
            counts = self._counts or (self._rotates and not options)
            cache = ModelCache(cache, self._layer_idx, rule, counts=counts)
            rule = None
        past = cache.length if self._counts and cache is not None else 0
        out = self.attention(states, mask=rule, attn_bias=added, cache=cache, **options)
        if not self._shares_bias:
            return out, None
        if self._counts:  # the other layers add the bias of the first
            bias = self._bias(states.shape[1], past, cache, states.device)
        return out, bias, None

    def _is_step(self, given: dict[str, Any], cache: Any) -> bool:
        """Whether a call has what steps of decoding have, and no more."""
        if cache is None or self._pairs != "halves" or "cos_sin" not in given:
            return False
        return not given.keys() - _OF_STEPS and not hasattr(cache, "self_attention_cache")

    def _bias(
        self, length: int, past: int, cache: ModelCache | None, device: torch.device
    ) -> Tensor:
        """The position bias `[1, H, L, S]` of a call."""
        keys = length if cache is None else cache.num_keys
        queries = torch.arange(past, past + length, device=device)
        positions: Any = self.attention.positions
        bias: Tensor = positions(queries, torch.arange(keys, device=device))
        return bias

    def _across(
        self, other: Tensor, cache: Any, rule: IntervalMask | Tensor | None
    ) -> tuple[Tensor, Any, Any]:
        """Key, cache and mask of cross attention: keys that are stored aren't computed again."""
        if cache is None:
            return other, None, rule
        updated = getattr(cache, "is_updated", None)
        is_filled = bool(updated and updated.get(self._layer_idx))
        if updated is not None:
            updated[self._layer_idx] = True
            cache = cache.cross_attention_cache
        return (
            other[:, :0] if is_filled else other,
            ModelCache(cache, self._layer_idx, rule, is_filled=is_filled),
            None,
        )

    def _rotation(self, given: dict[str, Any]) -> dict[str, Any]:
        """The rotations that the model computed for all layers, one angle for each pair; or the
        positions.
        """
        if "cos_sin" not in given or self._is_latent or self._pairs == "unknown":
            ids = given.get("position_ids")
            if ids is None and "cos_sin" in given and not self._is_latent:
                self._refuse("position_embeddings")
            if ids is None:
                return {}
            return {"position_ids": ids[0] if ids.ndim == 2 and len(ids) == 1 else ids}
        cos, sin = given["cos_sin"]
        half = self._half
        if cos.shape[-1] != 2 * half:
            return {"cos_sin": (cos, sin)}
        if self._pairs == "halves":
            return {"cos_sin": (cos.narrow(-1, 0, half), sin.narrow(-1, 0, half))}
        return {"cos_sin": (cos[..., ::2], sin[..., ::2])}

    def _refuse(self, name: str) -> None:
        if name == "output_attentions":
            raise MultiheadError(
                f"output_attentions: the layer in place of {self._kind} returns no weights to the"
                " model; call multihead.layers.restore_attention(model) first, or the layer itself,"
                " module.attention(x, return_weights=True)"
            )
        raise MultiheadError(
            f"the model passes {name}= to {self._kind}, which the layer in its place doesn't know;"
            " without it the result might be another. Call"
            " multihead.layers.restore_attention(model), and use the model as it was"
        )


def _argument_names(cls: Any) -> list[str]:
    """Names of what the forward of a class takes, without self."""
    return list(inspect.signature(cls.forward).parameters)[1:]


def _lower(mask: Any, is_causal: bool) -> tuple[IntervalMask | Tensor | None, Tensor | None]:
    """The mask that a model passes -> a mask, and numbers that are added to the scores."""
    if mask is None:
        return (causal() if is_causal else None), None
    if isinstance(mask, IntervalTensor):
        return mask.mask, None
    if mask.dtype == torch.bool:
        return mask, None
    return None, mask
