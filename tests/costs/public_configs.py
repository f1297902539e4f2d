"""Entries of public configs that decide on attention, and the bytes of their caches by hand.

Where layers repeat some are left out, as the name says, since each takes its time to build. Each row:
the config; bytes a token in bfloat16 (before windows are full); bytes a sequence whatever
its length; as products of layers, 2 (keys and values), key/value heads, width and bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from multihead import cost
from multihead.costs.cost import Cost


class Row(NamedTuple):
    config: dict[str, Any]
    per_token: int
    per_sequence: int = 0
    note: str = ""  # part of one of its notes


FULL, LINEAR, SLIDING, CHUNKED, CONV = (
    f"{kind}_attention" if kind != "conv" else kind
    for kind in ("full", "linear", "sliding", "chunked", "conv")
)


def latent(kind: str, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    """The entries of DeepSeek-V3 and those who took it over."""
    return {
        "model_type": kind,
        "hidden_size": 7168,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "vocab_size": 1000,
    } | more


def plain(kind: str, width: int, heads: int, groups: int, layers: int, **more: Any) -> Any:
    """The entries that most configs have."""
    return {
        "model_type": kind,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * width,
        "vocab_size": 1000,
        "max_position_embeddings": 131072,
    } | more


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
KDA = [1, 2, 3, 5, 6, 7]
MINIMAX = plain("minimax_text_01", 6144, 64, 8, 16, head_dim=128, **LOCAL) | {
    "architectures": ["MiniMaxText01ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_minimax_text_01.MiniMaxText01ForCausalLM"},
    "attn_type_list": ([0] * 7 + [1]) * 2,
}
NEMOTRON_NAS = plain("nemotron-nas", 8192, 64, 8, 4) | {
    "architectures": ["DeciLMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
    "num_key_value_heads": None,
    "block_configs": [
        {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 2.6}},
        {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 16, "no_op": False}, "ffn": {"ffn_mult": 5.2}},
        {"attention": {"n_heads_in_group": None, "replace_with_linear": True}, "ffn": {}},
    ],
}

ROWS: dict[str, Row] = {
    # 2 layers of softmax; in the 14 others 64 states of 128 x 128
    "MiniMax-Text-01, 16 of 80 layers": Row(
        MINIMAX, 2 * 2 * 8 * 128 * 2, 14 * 64 * 128 * 128 * 2, "is counted as minimax's"
    ),
    # 2 layers with latents; in the 6 others 32 states of 128 x 128 in float32, and four inputs of
    # three convolutions
    "Kimi-Linear-48B, 8 of 27 layers": Row(
        latent("kimi_linear", 32, 8, hidden_size=2304, q_lora_rank=None, pad_token_id=0)
        | {
            "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
            "linear_attn_config": {
                "full_attn_layers": [4, 8],
                "kda_layers": KDA,
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        },
        2 * (512 + 64) * 2,
        6 * (32 * 128 * 128 * 4 + 3 * 32 * 128 * 4 * 2),
        "its own code isn't run",
    ),
    "Kimi-K2, 4 of 61 layers": Row(
        latent("kimi_k2", 64, 4) | {"architectures": ["DeepseekV3ForCausalLM"]},
        4 * (512 + 64) * 2,
        note="'kimi_k2', unknown to transformers, is counted as deepseek_v3 by its architecture",
    ),
    "DeepSeek-V3": Row(latent("deepseek_v3", 128, 61), 61 * (512 + 64) * 2),
    # and the key of an indexer in every layer
    "DeepSeek-V3.2, 4 of 61 layers": Row(
        latent("deepseek_v32", 128, 4, index_n_heads=64, index_head_dim=128, index_topk=2048),
        4 * (512 + 64 + 128) * 2,
    ),
    "GLM-5, 4 of 78 layers": Row(
        latent("glm_moe_dsa", 64, 4, hidden_size=6144, q_lora_rank=2048, qk_nope_head_dim=192)
        | {"v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048},
        4 * (512 + 64 + 128) * 2,
    ),
    "GLM-4.5": Row(
        plain("glm4_moe", 5120, 96, 8, 92, head_dim=128, n_routed_experts=4), 92 * 2 * 8 * 128 * 2
    ),
    # every fourth layer; elsewhere 32 states of 128 x 128, and 2 x 16 x 128 + 32 x 128 channels
    "Qwen3-Next-80B, 8 of 48 layers": Row(
        plain("qwen3_next", 2048, 16, 2, 8, head_dim=256, full_attention_interval=4, **MOE)
        | {
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        2 * 2 * 2 * 256 * 2,
        6 * (32 * 128 * 128 * 4 + 8192 * 4 * 2),
    ),
    # attention in every eighth layer; Mamba elsewhere: 8192 channels of 16
    "Jamba": Row(
        plain("jamba", 4096, 32, 8, 32, num_experts=4, num_experts_per_tok=2)
        | {
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        4 * 2 * 8 * 128 * 2,
        28 * 8192 * (16 * 4 + 4 * 2),
    ),
    # 3 layers use shared attention of twice the width, and every layer has Mamba-2
    "Zamba2-2.7B, 20 of 54 layers": Row(
        plain("zamba2", 2560, 32, 32, 20, attention_head_dim=160, num_mem_blocks=1)
        | {
            "hybrid_layer_ids": [6, 12, 18],
            "layers_block_type": ["hybrid" if n in (6, 12, 18) else "mamba" for n in range(20)],
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 80,
        },
        3 * 2 * 32 * 160 * 2,
        20 * (80 * 64 * 64 * 4 + (5120 + 2 * 64) * 4 * 2),
    ),
    # attention next to Mamba-2 in every layer
    "Falcon-H1-0.5B, 6 of 36 layers": Row(
        plain("falcon_h1", 1024, 8, 2, 6, head_dim=64)
        | {
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
        },
        6 * 2 * 2 * 64 * 2,
        6 * (24 * 64 * 128 * 4 + (1536 + 2 * 128) * 4 * 2),
    ),
    "Granite-4.0-H-Small, 10 of 40 layers": Row(
        plain("granitemoehybrid", 4096, 32, 8, 10, shared_intermediate_size=64, **LOCAL)
        | {
            "layer_types": ["attention" if n == 5 else "mamba" for n in range(10)],
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        1 * 2 * 8 * 128 * 2,
        9 * (128 * 64 * 128 * 4 + (8192 + 2 * 128) * 4 * 2),
    ),
    # 4 layers of attention, 24 of Mamba-2, 24 of neither
    "Nemotron-H-8B": Row(
        plain("nemotron_h", 4096, 32, 8, 52, head_dim=128)
        | {
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
        },
        4 * 2 * 8 * 128 * 2,
        24 * (128 * 64 * 128 * 4 + (8192 + 2 * 8 * 128) * 4 * 2),
    ),
    # 6 layers of attention; the others keep three inputs of a convolution
    "LFM2-1.2B": Row(
        plain("lfm2", 2048, 32, 8, 16, conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
        6 * 2 * 8 * 64 * 2,
        10 * 2048 * 3 * 2,
    ),
    "Gemma-2-9B": Row(
        plain("gemma2", 3584, 16, 8, 42, head_dim=256, sliding_window=4096), 42 * 2 * 8 * 256 * 2
    ),
    # the last 15 of 35 layers read keys and values of earlier ones
    "Gemma-3n-E4B": Row(
        plain("gemma3n_text", 2048, 8, 2, 35, head_dim=256, sliding_window=512)
        | {
            "num_kv_shared_layers": 15,
            "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
            "intermediate_size": 16384,
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
            "vocab_size_per_layer_input": 1000,
        },
        20 * 2 * 2 * 256 * 2,
    ),
    # layers that read everything have fewer, wider heads, whose keys are their values too: both
    # are kept, normalised and turned in another way
    "Gemma-4-31B": Row(
        plain("gemma4_text", 5376, 32, 16, 60, head_dim=256, global_head_dim=512)
        | {
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "layer_types": ([SLIDING] * 5 + [FULL]) * 10,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
        (50 * 2 * 16 * 256 + 10 * 2 * 4 * 512) * 2,
    ),
    "Llama-3.1-8B": Row(plain("llama", 4096, 32, 8, 32), 32 * 2 * 8 * 128 * 2),
    # chunks of 8,192 in three layers of four
    "Llama-4-Scout": Row(
        plain("llama4_text", 5120, 40, 8, 48, head_dim=128, attention_chunk_size=8192, **LOCAL)
        | {"intermediate_size_mlp": 64, "no_rope_layers": [1, 1, 1, 0] * 12},
        48 * 2 * 8 * 128 * 2,
    ),
    "gpt-oss-20b": Row(
        plain("gpt_oss", 2880, 64, 8, 24, head_dim=64, sliding_window=128, **LOCAL)
        | {"layer_types": [SLIDING, FULL] * 12},
        24 * 2 * 8 * 64 * 2,
    ),
    "Mixtral-8x7B": Row(plain("mixtral", 4096, 32, 8, 32, **LOCAL), 32 * 2 * 8 * 128 * 2),
    "Phi-3-mini": Row(
        plain("phi3", 3072, 32, 32, 32, sliding_window=2047, pad_token_id=0), 32 * 2 * 32 * 96 * 2
    ),
    "Command-R": Row(plain("cohere", 8192, 64, 64, 40), 40 * 2 * 64 * 128 * 2),
    # no attention: 80 heads of 64, states of 128
    "Mamba-2-2.7B, 6 of 64 layers": Row(
        {
            "model_type": "mamba2",
            "hidden_size": 2560,
            "num_hidden_layers": 6,
            "state_size": 128,
            "num_heads": 80,
            "head_dim": 64,
            "n_groups": 1,
            "expand": 2,
            "conv_kernel": 4,
            "vocab_size": 1000,
        },
        0,
        6 * (80 * 64 * 128 * 4 + (5120 + 2 * 128) * 4 * 2),
    ),
    # two of four layers have attention, with 8 and with 4 key/value heads
    "Nemotron-NAS": Row(
        NEMOTRON_NAS, (8 + 4) * 2 * 128 * 2, note="is counted as llama's, which has that of"
    ),
    "InternLM2-7B": Row(
        plain("internlm2", 4096, 32, 8, 32)
        | {"architectures": ["InternLM2ForCausalLM"], "auto_map": {"AutoModel": "m.InternLM2"}},
        32 * 2 * 8 * 128 * 2,
        note="is counted as llama's",
    ),
    "ChatGLM3-6B": Row(
        {
            "model_type": "chatglm",
            "architectures": ["ChatGLMModel"],
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_layers": 28,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "ffn_hidden_size": 13696,
            "padded_vocab_size": 65024,
            "seq_length": 8192,
        },
        28 * 2 * 2 * 128 * 2,
        note="is counted as llama's",
    ),
    # a model around another one
    "InternVL2-8B": Row(
        {
            "model_type": "internvl_chat",
            "architectures": ["InternVLChatModel"],
            "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
            "llm_config": plain("internlm2", 4096, 32, 8, 32)
            | {"architectures": ["InternLM2ForCausalLM"]},
            "vision_config": {"hidden_size": 1024, "model_type": "intern_vit_6b"},
        },
        32 * 2 * 8 * 128 * 2,
        note="only its llm_config is counted",
    ),
    # encoder-decoders: the cross-attention's keys and values are the source's
    "Whisper-large-v3": Row(
        {
            "model_type": "whisper",
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "max_target_positions": 448,
            "max_source_positions": 1500,
            "num_mel_bins": 128,
        },
        32 * 2 * 1280 * 2,
    ),
    "T5-base": Row(
        {
            "model_type": "t5",
            "d_model": 768,
            "num_layers": 12,
            "num_decoder_layers": 12,
            "num_heads": 12,
            "d_kv": 64,
            "d_ff": 3072,
            "vocab_size": 1000,
        },
        12 * 2 * 12 * 64 * 2,
    ),
    "BERT": Row(plain("bert", 768, 12, 12, 12) | {"max_position_embeddings": 512}, 0),
}


@cache
def public_cost(name: str) -> Cost:
    """The cost of a row at a context of one token, in bfloat16."""
    return cost(ROWS[name].config, dtype="bfloat16", context_length=1)
