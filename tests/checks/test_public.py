"""Right attention as public code has it, written anew: none is wrong, and what isn't judged is said."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import multihead

PUBLIC = Path(__file__).parent / "public"
CALLED = {  # how each is called, and what is judged of it beside its output
    "alibi": ("causal", "causality"),
    "audio": ("f(x)", "masks hide"),
    "buckets": ("f(x)", "masks hide"),
    "cache_object": ("causal", "KV cache"),
    "cosine": ("f(x)", "token order"),
    "detection": ("f(x, memory)", "padding"),
    "differential": ("f(x)", "weights sum to one"),
    "einops_context": ("f(x, memory)", "masks hide"),
    "einops_vit": ("f(x)", "token order"),
    "gated": ("f(x, memory)", "independent queries"),
    "grouped_rotary": ("causal", "causality"),
    "heads_third": ("masks as attn_bias[B, 1, L, S], -inf added", "no dropout in evaluation"),
    "incremental": ("[L, B, D]", "requested weights"),
    "layer_past": ("causal", "KV cache"),
    "low_rank": ("f(x)", "token order"),
    "multi_query": ("causal", "KV cache"),
    "null_key": ("masks as mask[B, S], True may read", "padding"),
    "partial_rotary": ("causal", "causality"),
    "post_norm": ("masks as mask[B, L, S], True may read", "masks hide"),
    "query_memory": ("key_padding_mask[B, S], True is hidden", "independent queries"),
    "registers": ("f(x)", "token order"),
    "relative_values": ("f(x)", "gradients"),
    "resampler": ("f(x, memory)", "gradients"),
    "score_mod": ("causal", "causality"),
    "segment_biases": ("causal", "gradients"),
    "shared_linear": ("f(q, k, v)", "masks hide"),
    "sinks": ("causal", "causality"),
    "skewed": ("causal", "causality"),
    "softmax_one": ("f(x)", "large scores"),
    "speech": ("masks as mask[B, L, S], True may read", "fully masked rows"),
    "static_cache": ("causal", "KV cache"),
    "talking_heads": ("f(x)", "token order"),
    "windows": ("f(x)", "gradients"),
}
PARTLY = {"registers", "resampler"}


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"public_{name}", PUBLIC / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()


@pytest.mark.parametrize("name", sorted(path.stem for path in PUBLIC.glob("*.py")))
def test_no_right_one_is_wrong(name: str) -> None:
    report = multihead.check(load(name))
    called, judged = CALLED[name]
    assert not report.findings, str(report)
    assert called in report.called and judged in report.passed, str(report)
    assert report.verdict == ("partly judged" if name in PARTLY else "right"), str(report)
