"""`LanguageModel`, a small causal language model of the library's blocks: the architecture of the
built-in model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.errors import MultiheadError
from multihead.layers.block import TransformerBlock
from multihead.layers.rotary import Rotary
from multihead.masks import causal

__all__ = ["LanguageModel", "LanguageModelConfig"]


@dataclass(frozen=True)
class LanguageModelConfig:
    """The sizes of a `LanguageModel`; `head_dim` is `embed_dim / num_heads` unless given.

    >>> LanguageModelConfig(vocab_size=100, embed_dim=8, num_layers=2, num_heads=2, hidden_dim=24).num_kv_heads
    2
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    num_kv_heads: int = 0
    head_dim: int = 0
    max_length: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        if not self.head_dim:
            if self.embed_dim % self.num_heads:
                raise MultiheadError(
                    f"embed_dim={self.embed_dim} is not divisible by num_heads={self.num_heads};"
                    " change one of them, or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.embed_dim // self.num_heads)


# Ours -> the names that transformers' LlamaForCausalLM gives to the same weights.
_LLAMA_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.out_proj": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate_proj": "mlp.gate_proj",
    "feed_forward.up_proj": "mlp.up_proj",
    "feed_forward.down_proj": "mlp.down_proj",
}


class LanguageModel(nn.Module):
    """Embedding, `num_layers` causal `TransformerBlock`s with rotary positions, a final norm, and
    the embedding again as the unembedding (tied weights): the architecture that transformers calls
    Llama.

    Shapes: `tokens` [B, L], integers below V -> logits [B, L, V], where row i is about token i + 1.

    Raises:
        MultiheadError: more tokens than `max_length`, with both numbers.

    >>> config = LanguageModelConfig(vocab_size=100, embed_dim=8, num_layers=2, num_heads=2, hidden_dim=24)
    >>> LanguageModel(config)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 100])
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(
            config.vocab_size, config.embed_dim, device=device, dtype=dtype
        )
        rotary = Rotary(config.head_dim, theta=config.rope_theta)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                config.embed_dim,
                config.num_heads,
                hidden_dim=config.hidden_dim,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                positions=rotary,
                norm_eps=config.norm_eps,
                device=device,
                dtype=dtype,
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.embed_dim, eps=config.norm_eps, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights: normal, with a deviation of 1 / sqrt(inputs), much less for the
        projections that write to the residual stream, and an embedding whose vectors share a
        common part.

        The heads of the first block are biased towards the previous token: the common part of the
        embedding, through the two fastest rotary pairs, gives the key one position back the largest
        score. Training may keep or drop this bias; without it, previous-token heads formed in the
        last blocks, where no induction head can use them.
        """
        c = self.config
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                nn.init.ones_(weight)
            elif name == "embedding.weight":
                nn.init.normal_(weight, mean=0.05, std=0.1)
            elif name.endswith(("out_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.3 * (2 * c.num_layers * weight.shape[1]) ** -0.5)
            else:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        first: Any = self.blocks[0].attention
        lean = torch.zeros(1, 1, 1, c.head_dim)
        lean[..., :2] = 0.8 * c.embed_dim**-0.5
        turned = first.positions(
            lean, torch.tensor([1])
        )  # one place back, q R(-1) k is then largest
        with torch.no_grad():
            first.q_proj.weight.unflatten(0, (-1, c.head_dim)).add_(lean.view(-1, 1))
            first.k_proj.weight.unflatten(0, (-1, c.head_dim)).add_(turned.view(-1, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        if length > self.config.max_length:
            raise MultiheadError(
                f"tokens has length {length}, but the model takes at most"
                f" max_length={self.config.max_length}; shorten or split the text"
            )
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask=causal())
        return F.linear(self.norm(x), self.embedding.weight)

    def to_llama(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The model in the form of transformers' `LlamaForCausalLM`: the entries of its
        config.json that follow from the sizes, and the weights under its names. The tied
        unembedding is stored once, as the embedding.
        """
        c = self.config
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": c.vocab_size,
            "hidden_size": c.embed_dim,
            "intermediate_size": c.hidden_dim,
            "num_hidden_layers": c.num_layers,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "max_position_embeddings": c.max_length,
            "rms_norm_eps": c.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
        }
        names = self._llama_names()
        return config, {names[name]: weight.detach() for name, weight in self.named_parameters()}

    @classmethod
    def from_llama(cls, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LanguageModel:
        """The model from the result of `to_llama`: `config` as read from a config.json, `weights` as
        from its safetensors.

        Raises:
            MultiheadError: a config with something that `LanguageModel` lacks (another
                activation, biases, scaled rotary positions, an unembedding of its own), or weights
                that are missing, left over or of other shapes.
        """
        rope = config.get("rope_parameters") or {}
        wants = {
            "model_type": (config.get("model_type"), "llama"),
            "hidden_act": (config.get("hidden_act"), "silu"),
            "attention_bias": (config.get("attention_bias", False), False),
            "mlp_bias": (config.get("mlp_bias", False), False),
            "tie_word_embeddings": (config.get("tie_word_embeddings", False), True),
            "rope_parameters.rope_type": (rope.get("rope_type", "default"), "default"),
        }
        for name, (found, wanted) in wants.items():
            if found != wanted:
                raise MultiheadError(
                    f"{name}={found!r} in the config, but LanguageModel has only {wanted!r}; "
                    "open this checkpoint with transformers' AutoModelForCausalLM"
                )
        model = cls(
            LanguageModelConfig(
                vocab_size=config["vocab_size"],
                embed_dim=config["hidden_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=config["num_attention_heads"],
                hidden_dim=config["intermediate_size"],
                num_kv_heads=config.get("num_key_value_heads") or 0,
                head_dim=config.get("head_dim") or 0,
                max_length=config["max_position_embeddings"],
                rope_theta=rope.get("rope_theta", 10000.0),
                norm_eps=config["rms_norm_eps"],
            )
        )
        ours = {theirs: name for name, theirs in model._llama_names().items()}
        if differ := sorted(ours.keys() ^ weights.keys()):
            raise MultiheadError(
                f"weights and config don't agree on {', '.join(differ[:4])} ({len(differ)} names in"
                " all)"
            )
        own = dict(model.named_parameters())
        with torch.no_grad():
            for theirs, name in ours.items():
                weight = weights[theirs]
                if weight.shape != own[name].shape:
                    raise MultiheadError(
                        f"{theirs}{list(weight.shape)}, but the config makes it"
                        f" {list(own[name].shape)}"
                    )
                own[name].copy_(weight)
        return model

    def _llama_names(self) -> dict[str, str]:
        names = {
            "embedding.weight": "model.embed_tokens.weight",
            "norm.weight": "model.norm.weight",
        }
        for layer in range(self.config.num_layers):
            for ours, theirs in _LLAMA_NAMES.items():
                names[f"blocks.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
        return names
