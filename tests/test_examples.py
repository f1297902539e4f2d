"""The examples run as they are, and the readable definition in them is the layer's."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multihead import MultiHeadAttention, attention
from multihead.ops import merge_heads, split_heads

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES[0].with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_runs_and_agrees_with_itself(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    differences = [float(x) for x in re.findall(r"difference[^:]*: ([0-9.e+-]+)", done.stdout)]
    assert differences and max(differences) < 1e-5, done.stdout


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (1, 1, 8)])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_the_textbook_equals_the_layer(shape: tuple[int, ...], heads: int) -> None:
    random = np.random.default_rng(0)
    x, weights = random.normal(size=shape), [random.normal(size=(8, 8)) for _ in range(4)]
    layer = MultiHeadAttention(8, heads, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for module, weight in zip(
            (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj), weights, strict=True
        ):
            module.weight.copy_(torch.from_numpy(weight).T)
        want = layer(torch.from_numpy(x.reshape(-1, *shape[-2:])))
    got = load("textbook").multi_head_attention(x, *weights, heads)
    assert isinstance(got, np.ndarray) and got.shape == shape
    assert np.allclose(got.reshape(want.shape), want, atol=1e-12)


def test_the_textbook_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"n_heads=3.*width 8.*\[2, 8\]"):
        load("textbook").multi_head_attention(np.zeros((2, 8)), *[np.zeros((8, 8))] * 4, 3)


def test_shapes_of_the_walk_and_what_a_wrong_flattening_does() -> None:
    """B = 2, n = 3, d = 8, H = 2, step by step."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 8), torch.randn(8, 8)
    q = x @ w
    assert q.shape == (2, 3, 8)
    cut = q.unflatten(-1, (2, 4))
    assert cut.shape == (2, 3, 2, 4)
    first = split_heads(q, 2)
    assert first.shape == (2, 2, 3, 4) and torch.equal(first, cut.transpose(1, 2))
    scores = first @ first.transpose(-1, -2)
    assert scores.shape == (2, 2, 3, 3)
    out, weights = attention(first, first, first, return_weights=True)
    assert torch.allclose(weights, (scores / 2).softmax(-1), atol=1e-6)  # 2 = sqrt(4)
    assert merge_heads(out).shape == (2, 3, 8)
    flattened = out.reshape(2, 3, 8)  # heads first, flattened as they lie: the right shape
    assert not torch.allclose(flattened, merge_heads(out), atol=1e-2)
    for head in range(2):
        assert torch.equal(merge_heads(out)[..., 4 * head : 4 * head + 4], out[:, head])
