"""The cache of real runs of 64 and of 256 tokens, tensor by tensor, against what is computed from
the config; the sweep does the same for every model type.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from multihead import cost
from sweep.cost import LENGTHS, held_bytes
from sweep.judge import build, classes_of
from sweep.tiny import RECIPES, config_of

# Windows, chunks, layers that share caches, keys that are values, latents with and without an
# indexer, states of all kinds, next to attention and in other layers.
KINDS = (
    "bailing_hybrid",
    "csm",
    "deepseek_v32",
    "falcon_h1",
    "gemma3n_text",
    "gemma4_text",
    "glm_moe_dsa",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama4_text",
    "mamba",
    "minimax",
    "minimax_m3_vl_text",
    "nemotron_h",
    "qwen3_next",
    "qwen4_exp_text",
    "t5",
    "unlimited_ocr",
    "whisper",
    "zamba2",
    "zaya",
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_of_a_run(kind: str) -> None:
    model, config = _model(kind)
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        if dtype is torch.bfloat16 and kind in ("t5", "whisper", "inkling_text", "csm"):
            continue  # their inputs or weights stay in float32
        found = cost(config, context_length=1, dtype=str(dtype).removeprefix("torch."))
        for length in LENGTHS:
            held = held_bytes(model, config, length)
            if held is None and dtype is torch.bfloat16:
                continue  # not run in half precision
            assert held is not None
            real, tokens, source = held
            at = replace(found, context_length=tokens, source_length=source or tokens)
            assert tokens >= length and at.cache("transformers") == real, dtype


def _model(kind: str) -> tuple[Any, Any]:
    """The first tiny model of this type that runs."""
    cls = classes_of(kind)[0]
    for recipe in RECIPES[:5]:
        try:
            config = config_of(
                cls.config_class or CONFIG_MAPPING[kind], recipe | {"positions": 512}
            )
            config.architectures = [cls.__name__]
            model = build(cls, copy.deepcopy(config))
        except Exception:  # sizes that don't fit together there
            continue
        if held_bytes(model, config, 8) is not None:
            return model, config
    raise AssertionError(f"{kind}: no recipe runs")
