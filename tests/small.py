"""A small Llama whose attention is far from even, and a text for it: what most tests of readings
need.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        **options,
    )
    model = tf.LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 30
    return model
