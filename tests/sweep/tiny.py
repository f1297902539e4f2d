"""Tiny random models of any kind that transformers knows, and inputs for them, by rules that go by
the names of settings.

No model has code of its own here: a setting's name says what it is (a width, a number of heads, a
    window), a forward's
signature says what it takes. Sizes differ from each other where the model lets them; where it
doesn't, a plainer recipe is tried. What still can't be built stands in docs/models.md with the
error.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]

WORDS, TEXT, DECODER, MELS = 101, 13, 11, 16  # vocabulary, lengths of texts, mel bands of sound
FIRST = 10  # the first word of every text
# Recipes, the most telling first: width, heads, key/value heads, width of a head, of a picture and
# of its patch.
RECIPES: tuple[dict[str, int], ...] = (
    dict(width=48, heads=6, groups=3, head=12, image=32, patch=8),
    dict(width=48, heads=6, groups=3, head=8, image=32, patch=8),
    dict(width=64, heads=4, groups=2, head=16, image=64, patch=16),
    dict(width=64, heads=4, groups=4, head=16, image=64, patch=4),
    dict(width=32, heads=2, groups=2, head=16, image=224, patch=32),
    dict(width=128, heads=4, groups=2, head=32, image=224, patch=32),
    dict(
        lazy=1, width=768, heads=12, groups=4, head=64, image=224, patch=16
    ),  # own widths, but few layers
)
# name of a setting -> its value, a number or the name of one in the recipe; the first that matches
# counts
RULES: tuple[tuple[str, int | str], ...] = (
    (
        r"num_channels|in_channels|in_chans|num_codebooks|n_codebooks|num_labels|audio_channels|input_channels",
        "keep",
    ),
    (
        r"first_k_dense_replace|num_dense_layers|num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers|num_first_.*|"
        r"num_last_.*|first_last_k.*|moe_layer_start_index|max_window_layers",
        1,
    ),
    (
        r"(.*_)?num_key_value_heads|num_kv_heads|n_kv_heads|num_key_value_attention_heads|multi_query_group_num",
        "groups",
    ),
    (r"mamba_n_heads|mamba_num_heads", "mamba"),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim|linear_(key|value)?_?head_dim|kda_head_dim", 8),
    (r"linear_num_key_heads|linear_num_heads", 2),
    (r"linear_num_value_heads|num_value_heads", 4),
    (r"index_n_heads", 2),
    (r"index_head_dim", 8),
    (r"index_topk", 4),
    (r"index_block_size", 4),
    (r"index_kpool", 2),
    (r"o_groups", 2),
    (
        r"(.*_)?(num_)?attention_heads|num_heads|n_heads?|heads|.*_(num_)?attention_heads|.*_num_heads|encoder_layers_heads|"
        r"(self|cross)_attn_heads|num_(self|cross)_attention_heads|.*_n_heads",
        "heads",
    ),
    (r"qk_head_dim", 12),
    (r"v_head_dim", 10),
    (r"qk_nope_head_dim", 8),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"q_lora_rank|o_lora_rank|.*lora_rank", 20),
    (r"n_(input|recurrent|output)_layers", 1),
    (
        r"head_dim|.*_head_dim|d_kv|head_size|dim_head|d_head|attention_head_size|kv_channels|key_dim",
        "head",
    ),
    (
        r"moe_intermediate_size|expert_ffn_hidden_size|.*shared_expert_intermediate_size|moe_hidden_size",
        24,
    ),
    (
        r".*intermediate_(size|dim).*|.*ffn_dim|d_ff|dff|ffn_hidden_size|.*mlp_(dim|hidden_dim)|d_inner|n_inner|.*feedforward_dim|"
        r".*dim_feedforward|dim_ff|.*linear_units|mlp_hidden_size|.*hidden_dim_ff",
        56,
    ),
    (
        r"num_experts_per_tok(en)?|moe_topk|top_k|moe_k|experts_per_token|num_selected_experts|num_experts_per_token",
        2,
    ),
    (r"topk_group", 1),
    (r"n_group|num_expert_group", 2),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts", 4),
    (r"attention_window", 4),
    (r"context_size", 8),
    (r"n_window(_infer)?", 5),
    (
        r".*sliding_window(_size)?|attention_chunk_size|local_attention|attention_window_size|local_attention_window_len",
        5,
    ),
    (
        r"sliding_window_pattern|attn_layer_period|.*_attn_every_n_layers|layer_group_size|full_attention_interval",
        2,
    ),
    (r"(attn|expert)_layer_offset", 1),
    (r"max_source_positions|max_audio_positions", 15),
    (
        r".*mel_bins|num_mels|n_mels|input_feat_size|feature_projection_input_dim|input_feat_per_channel",
        MELS,
    ),
    (
        r".*vocab_size(_per_layer_input)?|codebook_dim_vocab|entity_vocab_size|.*num_embeddings",
        WORDS,
    ),
    (r"codebook_size|num_codevectors_per_group", 16),
    (r"max_2d_position_embeddings|max_expert_positions|max_length", "keep"),
    (
        r".*max_.*positions?|.*max_.*position_embeddings|n_positions|max_seq_len(gth)?|context_length|max_seqlen|n_ctx|"
        r".*max_text_len|model_max_length|.*max_position.*",
        "positions",
    ),
    (
        r"mamba_d_state|state_size|ssm_state_size|mamba_chunk_size|chunk_size|time_step_rank|mamba_dt_rank",
        8,
    ),
    (r"image_size|img_size|pretrain_image_size|input_size_px", "image"),
    (r"patch_size|patch_kernel_size", "patch"),
    (r"num_position_embeddings", 64),
    (r"num_queries|num_query_tokens|num_latents|latent_query_num|num_object_queries", 7),
    (r"num_patches", 16),
    (r"num_conv_pos_embeddings", 5),
    (r"num_conv_pos_embedding_groups", 2),
    (r"num_frames|upsample_groups", 2),
    (
        r"n_layers_per_.*|num_stages|num_layers_per_stack|num_feature_levels|num_feat_extract_layers|conv_.*layers|num_conv_layers|"
        r"lstm_layers|num_lstm_layers|num_residual_layers|.*_feature_layer",
        "keep",
    ),
    (
        r".*num_hidden_layers|.*num_layers|n_layers?|(.*_)?(encoder|decoder|self|cross)_layers|depth|num_(encoder|decoder)_layers|"
        r"num_attention_layers|.*_depth|num_blocks|n_blocks|[lxr]_layers|.*hidden_layers|num_.*_layers|.*_num_layers|"
        r"num_self_attends_per_block|attn_layers",
        "layers",
    ),
    (
        r"hidden_size|d_model|n_embd|embed_dim|dim|model_dim|emb_dim|.*embedding_size|.*hidden_size|.*(hidden|embed|embedding|model|"
        r"projection|output|latent|feature|attention|input|fusion)_?dim|hidden_channels|.*proj(ection)?_(dim|size)|d_latents|width|"
        r"decoder_hidden|encoder_hidden_dim|lru_width|.*_hidden_size|pooler_output_size|mask_feature_size|.*_width|"
        r"linear_key_value_dim|query_dim_size|attention_hidden_size|output_dim|merged_hidden_size",
        "width",
    ),
)
# settings whose default is None, or names no attention, and that a model can't be built or run
# without
DEFAULTS: dict[str, Any] = {
    "head_dim": "head",
    "vocab_size": WORDS,
    "prediction_length": 7,
    "attn_layer_indices": [1],
    "mlp_layer_types": ["dense"] * 4,
    "pad_token_id": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "num_key_value_heads": "groups",
    "image_token_index": 82,
    "image_token_id": 82,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
# what a few model types need on top: settings that must fit each other in a way that their names
# don't tell
EXTRA: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [56] * 4,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": "groups",
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 12, "head_dim": 8},
    "emu3": {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 89, "<|visual token 000000|>": 91}},
    "chameleon": {"vocabulary_map": {"<image>": 90, "IMGIMGBSZ": 91, "IMGIMGACZ": 92}},
    "sam2_vision_model": {"backbone_channel_list": [64, 48, 32, 16]},
    "mistral4": {
        "head_dim": 12,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 8,
        "qk_head_dim": 14,
        "num_key_value_heads": "heads",
    },
    "mistral_large4_text": {"num_key_value_heads": "heads"},
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "num_attention_heads": 1,
        "blocks_per_stage": [1, 2, 1, 1],
        "global_attention_blocks": [2],
    },
    "fun_asr_nano_adaptor": {"intermediate_size": 12},
    "glm5_next_text": {"num_key_value_heads": "heads"},
}
# inputs that have another shape or meaning there than elsewhere, and so are left out
UNLIKE: dict[str, frozenset[str]] = {
    "diffusion_gemma": frozenset({"decoder_attention_mask", "attention_mask"}),
    "dia": frozenset({"decoder_input_ids", "cache"}),
}
COMPILED = tuple((re.compile(pattern), value) for pattern, value in RULES)
IDS = re.compile(
    r"(.*_)?(token_id|token_index|token_offset|_id|pad_idx|bos_index|eos_index|.*_index)$"
)
PER_LAYER = re.compile(
    r".*layer_types|layers_block_type|block_types|.*_per_layer|mlp_layer_types|indexer_types|no_rope_layers|"
    r"layer_rope_theta|moe_layers|kv_source_layers|compress_rates|attention_layers|layer_type_list"
)
STAGES = re.compile(
    r"depths|num_attention_heads|num_heads|hidden_sizes|embed_dims?|encoder_hidden_sizes|decoder_hidden_sizes|"
    r"embed_dim_per_stage|num_attention_heads_per_stage|blocks_per_stage|conv_dim|tdnn_dim|neck_hidden_sizes|"
    r"conv_channels|out_channels|stage_.*channels"
)


def config_of(cls: type[Any], recipe: dict[str, int]) -> Any:
    """A tiny config of this class. Sub-configs are shrunk too, each by the same rules."""
    return cls(**settings(cls(), recipe))


def settings(config: Any, recipe: dict[str, int]) -> dict[str, Any]:
    """The keywords that make a tiny copy of a config: what no rule speaks of keeps its default."""
    layers = 2
    found: dict[str, Any] = {}
    given = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    kinds = [
        v
        for k, v in given.items()
        if PER_LAYER.fullmatch(k)
        and isinstance(v, (list, tuple))
        and len(v) > 2
        and all(isinstance(x, str) for x in v)
    ]
    if "n_recurrent_layers" in given:
        layers = 3
    if kinds:  # as many layers as it takes for every kind of layer to be there
        layers = max(layers, *(len(set(v)) for v in kinds))
    names = inspect.signature(type(config).__init__).parameters
    usual = type(config)()
    if "num_hidden_layers" not in given and getattr(config, "out_indices", None) != getattr(
        usual, "out_indices", None
    ):
        found["out_indices"] = config.out_indices
    for name, value in given.items():
        if name not in names and "kwargs" not in names:
            continue
        if hasattr(value, "to_dict"):
            found[name] = type(value)(**settings(value, recipe))
        elif value is None and name in DEFAULTS:
            default = DEFAULTS[name]
            if name == "head_dim" and "qk_rope_head_dim" in given:
                default = 4
            default = recipe[default] if isinstance(default, str) else default
            found[name] = default[:layers] if isinstance(default, list) else default
        elif value != vars(usual).get(name, value) and (
            isinstance(value, (bool, str)) or value is None
        ):
            found[name] = value  # a part that its whole sets up otherwise than by itself
        elif isinstance(value, int):
            new = number(name, value, recipe, layers, config)
            if new != value:
                found[name] = new
        elif isinstance(value, (list, tuple)) and value:
            new_list = several(name, value, recipe, layers)
            if new_list is not None:
                found[name] = type(value)(new_list)
        elif isinstance(value, dict) and "rope" in name:
            turns = 4 if "qk_rope_head_dim" in given else recipe["head"]
            factor = given.get("partial_rotary_factor", value.get("partial_rotary_factor", 1.0))
            new_rope = rope(
                value, recipe, int(turns * (factor if isinstance(factor, float) else 1.0)) // 2
            )
            if new_rope != value:
                found[name] = new_rope
    extra = EXTRA.get(config.model_type, {})
    return found | {
        k: recipe[v] if isinstance(v, str) and v in recipe else v for k, v in extra.items()
    }


def number(name: str, value: int, recipe: dict[str, int], layers: int, config: Any) -> int:
    if IDS.fullmatch(name):
        return (
            value if 0 <= value < 10 else WORDS - 20 + sum(name.encode()) % 19
        )  # none of the words that texts use
    for pattern, new in COMPILED:
        if pattern.fullmatch(name):
            if name == "head_dim" and "qk_rope_head_dim" in vars(config):
                return 4  # there it is the width of what turns
            if new == "keep" or (recipe.get("lazy") and new not in ("layers", WORDS, 7)):
                return value
            if new == "positions":
                return min(value, recipe.get("positions", 64)) if value > 0 else value
            if new == "layers":
                return min(value, layers) if value > 0 else value
            if new == "mamba":
                return int(getattr(config, "mamba_expand", 2) * recipe["width"] // 8)
            return recipe[new] if isinstance(new, str) else min(value, new) if value > 0 else value
    return value


def several(name: str, value: Any, recipe: dict[str, int], layers: int) -> list[Any] | None:
    """A list setting: one entry a layer is cut to the layers (every kind once), one a stage is made
    small.
    """
    if PER_LAYER.fullmatch(name) and len(value) >= layers:
        if all(isinstance(x, str) for x in value):
            kinds = list(dict.fromkeys(value))
            if kinds == ["mamba"]:
                kinds = ["mamba", "attention"]
            return (kinds * layers)[:layers]
        return (
            list(range(layers)) if list(value) == list(range(len(value))) else list(value[-layers:])
        )
    if recipe.get("lazy"):
        return None
    if name == "image_size" or name == "img_size":
        return [recipe["image"]] * len(value)
    if name == "patch_size":
        return [recipe["patch"] if x > 2 else x for x in value]
    if STAGES.fullmatch(name) and all(isinstance(x, int) for x in value):
        if "depth" in name or "blocks" in name:
            return [1] * len(value)
        if "heads" in name:
            return [2 if x > 1 else 1 for x in value]
        return (
            [16 * min(n + 1, 4) if x >= 16 else x for n, x in enumerate(value)]
            if "conv" not in name
            else [16] * len(value)
        )
    if re.fullmatch(r"deepstack.*|global_attention_blocks|full_attn_idxs|.*_indexes", name):
        return [1]
    return None


def rope(value: dict[str, Any], recipe: dict[str, int], half: int) -> dict[str, Any]:
    """Rotary settings for a head of which `half` pairs turn; recipe["mrope"]: the model wants
    sections, told or not.
    """
    if recipe.get("lazy"):
        return value
    found = copy.deepcopy(value)
    if recipe.get("mrope") and "rope_theta" in found:
        found.setdefault("mrope_section", [0] * 3)
    for key, inner in found.items():
        if isinstance(inner, dict):
            found[key] = rope(inner, recipe, half)
        elif key == "mrope_section":
            third = half // 3
            found[key] = (
                [half - 2 * third, third, third]
                if len(inner) == 3
                else [half // len(inner)] * len(inner)
            )
        elif key in ("long_factor", "short_factor"):
            found[key] = [1.0 + 0.1 * n for n in range(half)]
        elif key == "original_max_position_embeddings":
            found[key] = 32
    return found


# Inputs


def numbers(*shape: int) -> torch.Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(5))


def words(texts: int, length: int) -> torch.Tensor:
    """Random words that repeat often, so that duplicates and inductions exist."""
    found = torch.randint(11, 19, (texts, length), generator=torch.Generator().manual_seed(length))
    found[:, 0] = FIRST
    return found


def with_pictures(batch: Batch, config: Any, places: int) -> Batch:
    """The texts with room for what a picture or sound turns into: `places` tokens in each."""
    kind = "audio" if not batch.keys().isdisjoint(("input_features", "input_values")) else "image"
    kind = "video" if "pixel_values_videos" in batch else kind
    tokens = [
        v
        for end in ("id", "index")
        if isinstance(v := getattr(config, f"{kind}_token_{end}", None), int)
    ]
    if not tokens:
        return batch
    token = tokens[0]
    ids = batch["input_ids"]
    ids = torch.cat([ids, ids[:, 1:7]], 1)  # so that the text isn't as long as the picture
    room = torch.full((ids.shape[0], places), token)
    return batch | {
        "input_ids": torch.cat([ids[:, :3], room, ids[:, 3:]], 1),
        "placeholders": placeholders(config),
    }


def placeholders(config: Any) -> list[int]:
    names = [
        f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")
    ]
    return [v for n in names if isinstance(v := getattr(config, n, None), int)]


def find(config: Any, *names: str, default: int = 0) -> int:
    """A setting by any of its names, here or in a sub-config."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            return int(value[0])
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    for key, sub in vars(config).items():
        if not key.startswith("_") and hasattr(sub, "to_dict") and (value := find(sub, *names)):
            return value
    return default


def makers(config: Any) -> dict[str, Any]:
    """How to make an input, by its name."""
    image = find(config, "image_size", "img_size", default=32)
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    bins = find(
        config,
        "num_mel_bins",
        "n_mels",
        "num_mels",
        "input_feat_per_channel",
        "feature_size",
        default=MELS,
    )
    frames = max(2, find(config, "num_frames", "frames_per_clip", default=2))
    width = find(config, "hidden_size", "d_model", "n_embd", "embed_dim", default=48)
    source = find(config, "max_source_positions", default=15)
    boxes = torch.randint(0, 50, (2, TEXT, 2), generator=torch.Generator().manual_seed(3))
    return {
        "input_ids": lambda: words(2, TEXT),
        "decoder_input_ids": lambda: words(2, DECODER),
        "pixel_values": lambda: numbers(2, channels, image, image),
        "pixel_values_videos": lambda: numbers(2, frames, channels, image, image),
        "input_features": lambda: numbers(2, bins, 2 * source),
        "input_values": lambda: 0.1 * numbers(2, 4000),
        "inputs_embeds": lambda: numbers(2, TEXT, width),
        "hidden_states": lambda: numbers(2, TEXT, width),
        "bbox": lambda: torch.cat([boxes, boxes + 9], -1),
        "encoder_hidden_states": lambda: numbers(
            2, 9, find(config, "encoder_hidden_size", "hidden_size", "d_model", default=48)
        ),
        "query_embeds": lambda: numbers(2, 7, width),
        "inputs": lambda: words(2, TEXT),
        "image_hidden_states": lambda: numbers(2, 9, width),
        "attention_mask": lambda: torch.ones(2, TEXT, dtype=torch.long),
        "langs": lambda: torch.zeros(2, TEXT, dtype=torch.long),
        "entity_ids": lambda: words(2, 3),
        "visual_feats": lambda: numbers(2, 5, find(config, "visual_feat_dim", default=2048)),
        "visual_pos": lambda: numbers(2, 5, find(config, "visual_pos_dim", default=4)),
        "past_values": lambda: numbers(2, find(config, "context_length", default=32) + 7),
        "input_features_mask": lambda: torch.ones(2, 2 * source, dtype=torch.long),
        "qformer_input_ids": lambda: words(2, 5),
        "actions": lambda: numbers(2, 6, find(config, "act_dim", default=4)),
        "states": lambda: numbers(2, 6, find(config, "state_dim", default=17)),
        "rewards": lambda: numbers(2, 6, 1),
        "returns_to_go": lambda: numbers(2, 6, 1),
        "timesteps": lambda: torch.arange(6).expand(2, -1),
        "feature_lens": lambda: torch.tensor([2 * source] * 2),
    }


def inputs_for(model: nn.Module, config: Any) -> Iterator[Batch]:
    """Inputs that may suit a model's forward, the likeliest first; without padding."""
    without = UNLIKE.get(getattr(config, "model_type", ""), frozenset())
    names = {
        n: p for n, p in inspect.signature(model.forward).parameters.items() if n not in without
    }
    make = makers(config)
    needed = [
        n
        for n, p in names.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and n in make
    ]
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    text = [n for n in ("input_ids", "bbox") if n in names]
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in names else []
    pictures = [
        n
        for n in ("pixel_values", "pixel_values_videos", "input_features", "input_values")
        if n in names
    ]
    chosen: list[list[str]] = []
    if "input_ids" in names and main == "input_ids":
        chosen += [[*text, *needed, *decoder, picture] for picture in pictures]
    chosen += [
        [main, *needed, *decoder],
        [main, *needed, *text, *decoder],
        [*text, *needed, *decoder],
    ]
    chosen += [[p, *text, *needed, *decoder] for p in pictures] + [[p, *needed] for p in pictures]
    chosen += [["states", "actions", "rewards", "returns_to_go", "timesteps"]]
    chosen += [
        needed,
        ["inputs_embeds", *needed],
        ["hidden_states"],
        ["encoder_hidden_states", *text, *needed],
    ]
    grid = next(
        (n for n in ("grid_thw", "image_grid_thw") if n in names and "input_ids" not in names), None
    )
    if grid is not None:
        first = next(iter(names))
        flat = patches(config)
        yield {first: flat, grid: GRID}
        side = find(config, "patch_size", default=8)
        yield {first: flat.view(len(flat), -1, side, side), grid: GRID}
        return
    if "pixel_position_ids" in names:
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1)
        yield {
            "pixel_values": numbers(2, 16, 3 * find(config, "patch_size", default=8) ** 2),
            "pixel_position_ids": places,
        }
    if "image_grid_thw" in names and "input_ids" in names:
        yield {
            "input_ids": words(2, TEXT),
            "pixel_values": patches(config)[:32],
            "image_grid_thw": GRID[[0, 0]],
        }
    seen: list[frozenset[str]] = []
    for group in chosen:
        known = frozenset(n for n in group if n in make and n in names)
        if not known or known in seen:
            continue
        seen.append(known)
        batch = {n: make[n]() for n in names if n in known}
        yield batch
        if "pixel_values" in batch and "input_ids" in known:
            yield batch | {"pixel_values": batch["pixel_values"][:, None]}
        if "pixel_values" in batch and not known & {"input_ids"}:
            yield batch | {
                "pixel_values": (
                    batch["pixel_values"][:, None].repeat(
                        1, max(2, find(config, "num_frames")), 1, 1, 1
                    )
                )
            }
        if (
            "input_features" in batch
            and "input_features_mask" in names
            and "input_features_mask" not in batch
        ):
            yield batch | {"input_features_mask": make["input_features_mask"]()}
        if "input_features" in batch:
            bins = batch["input_features"].shape[1]
            yield batch | {"input_features": numbers(2, 32, bins)}
            yield batch | {"input_features": numbers(2, 1, 64, 64)}
        if "input_values" in batch:
            yield batch | {"input_values": 0.1 * numbers(2, 1, 4000)}
            frames = find(config, "max_length", default=1024)
            yield batch | {
                "input_values": numbers(2, frames, find(config, "num_mel_bins", default=MELS))
            }


def patches(config: Any) -> torch.Tensor:
    """Two pictures of 4 x 4 and 4 x 8 patches, for the models that take them as rows of flattened
    patches with their grids.
    """
    vision = getattr(config, "vision_config", config)
    side, time = (
        find(vision, "patch_size", default=8),
        find(vision, "temporal_patch_size", "patch_temporal", default=1),
    )
    return numbers(
        48, find(vision, "in_channels", "num_channels", "in_chans", default=3) * time * side * side
    )


GRID = torch.tensor([[1, 4, 4], [1, 4, 8]])


def variants(batch: Batch, names: Any) -> Iterator[tuple[str, Batch]]:
    """The same batch unpadded, padded right and left, and with packed positions, as far as the
    forward takes it.
    """
    yield "plain", batch
    if "input_ids" not in batch or "attention_mask" not in names:
        return
    for side in ("right", "left"):
        padded = dict(batch)
        for prefix in ("", "decoder_"):
            if f"{prefix}input_ids" in batch and f"{prefix}attention_mask" in names:
                texts, length = batch[f"{prefix}input_ids"].shape[:2]
                mask = torch.ones(texts, length, dtype=torch.long)
                mask[-1, slice(length - 3, length) if side == "right" else slice(3)] = 0
                padded[f"{prefix}attention_mask"] = mask
        if len(padded) > len(batch):
            yield side, padded
    if (
        "position_ids" in names
        and not {"cache", "past_key_values"}.isdisjoint(names)
        and set(batch) == {"input_ids"}
    ):
        positions = torch.cat([torch.arange(5), torch.arange(TEXT - 5)]).expand(
            batch["input_ids"].shape[0], -1
        )
        yield "packed", batch | {"position_ids": positions}
