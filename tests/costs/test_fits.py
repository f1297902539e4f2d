"""How much fits on a device, next to what servers printed of public models."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import multihead
from costs.public_configs import public_cost
from multihead import MultiheadError, cost
from multihead.cli import main
from multihead.costs.fits import parse_size
from multihead.costs.shape import PAGE

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
QWEN3_14B = LLAMA_8B | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "head_dim": 128,
    "num_hidden_layers": 40,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
QWEN3_235B = QWEN3_14B | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_hidden_layers": 94,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("config", "memory", "devices", "tokens", "close"),
    [
        # vllm-project/vllm#10517: kv_cache_size=3.81GiB, GPU blocks: 1952 (of 16 tokens)
        (LLAMA_8B, "3.81 GiB", 1, 31_232, 0.002),
        (LLAMA_8B, "2.89 GiB", 1, 23_648, 0.002),
        # LMCache/LMCache#1739: Available KV cache memory: 6.51 GiB, GPU KV cache size: 42,656
        (QWEN3_14B, "6.51 GiB", 1, 42_656, 0.002),
        # vllm-project/vllm#21348: the line of one of four workers; the smallest decides
        (QWEN3_235B, "8.11 GiB", 4, 178_880, 0.012),
    ],
    ids=["llama-8b", "llama-8b, less", "qwen3-14b", "qwen3-235b over 4"],
)
def test_as_many_tokens_as_a_server_printed(
    config: dict[str, Any], memory: str, devices: int, tokens: int, close: float
) -> None:
    """Their memory is rounded to 0.01 GiB, which is 0.2 % of it."""
    fit = cost(config).fit(memory, tensor_parallel=devices, weights=0)
    assert fit.max_context_length == pytest.approx(tokens, rel=close)
    assert fit.max_context_length % PAGE == 0


def test_weights_are_those_that_a_server_printed() -> None:
    """ "Loading model weights took 14.9888 GB" (the thread of Llama-8B), which is in GiB, and has a
    table of rotary angles, 131,072 positions of 128 numbers, in 2 bytes.
    """
    weights = cost(LLAMA_8B).fit().weights
    assert (weights + 131_072 * 128 * 2) / 2**30 == pytest.approx(14.9888, abs=1e-4)


@given(
    heads=st.sampled_from([(8, 8), (8, 2), (8, 1), (12, 4)]),
    layers=st.integers(1, 3),
    window=st.none() | st.integers(1, 70),
    batch=st.integers(1, 5),
    memory=st.integers(0, 3_000_000),
    devices=st.sampled_from([1, 2, 4]),
)
def test_one_token_more_fits_no_longer(
    heads: tuple[int, int], layers: int, window: int | None, batch: int, memory: int, devices: int
) -> None:
    found = cost(
        embed_dim=96,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=8,
        num_layers=layers,
        context_length=50,
        batch_size=batch,
        window=window,
    )
    fit = found.fit(memory, tensor_parallel=devices, weights=0)
    shared = max(1, heads[1] // devices)  # key/value heads of a device

    def cache(tokens: int, sequences: int) -> int:
        pages = -(-tokens // PAGE)
        if window is not None and tokens > window:
            pages = min(pages, -(-(window - 1) // PAGE) + 1)
        return sequences * layers * pages * PAGE * shared * 8 * 2 * 2

    assert fit.cache == cache(50, batch)
    longest = fit.max_context_length
    if longest is None:
        assert window is not None and cache(10**9, batch) <= memory
    else:
        assert cache(longest, batch) <= memory < cache(longest + 1, batch)
    assert fit.max_batch_size is not None
    assert cache(50, fit.max_batch_size) <= memory < cache(50, fit.max_batch_size + 1)


def test_the_parts_of_all_devices() -> None:
    """They add up to the model, but for what each of them holds: norms, and copied heads."""
    whole = cost(LLAMA_8B)
    for devices in (2, 8):
        part = whole.fit(tensor_parallel=devices)
        norms = whole.weights.vectors * 2
        assert devices * (part.weights - norms) == whole.fit().weights - norms
        assert devices * part.cache == whole.fit().cache
    over = whole.fit(tensor_parallel=16)  # more than the 8 key/value heads
    assert over.cache == whole.fit(tensor_parallel=8).cache
    key_value = 32 * 2 * 4096 * 128 * 2  # bytes of W_K and W_V of one head in all layers
    half = (whole.fit(tensor_parallel=8).weights - norms - key_value) / 2 + norms + key_value
    assert over.weights == half


def test_a_latent_is_on_every_device() -> None:
    layer = multihead.LatentAttention(64, 8, kv_latent_dim=32, rotary_dim=8, head_dim=8)
    whole = cost(layer, context_length=100)
    part = whole.fit(tensor_parallel=4)
    assert part.cache == whole.fit().cache == 7 * PAGE * (32 + 8) * 2
    alone = whole.on_device(4).parameters
    assert alone["key down"] == whole.parameters["key down"]
    assert alone["key up"] * 4 == whole.parameters["key up"]


def test_the_weights_of_files_count_as_stored(tmp_path: Path) -> None:
    import torch

    config = {
        **LLAMA_8B,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "vocab_size": 11,
        "quantization_config": {"quant_method": "awq"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MultiheadError, match=r"quantised \(awq\).*weights='14.2GiB'"):
        cost(tmp_path).fit("1GiB")
    save_file({"a": torch.zeros(5, dtype=torch.int32)}, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert cost(tmp_path).fit().weights == size
    assert cost(tmp_path, dtype="q8_0").fit().weights == size  # a dtype of the cache alone
    parameters = cost(tmp_path).weights.parameters
    assert cost(tmp_path, dtype="float32").fit().weights == 4 * parameters
    save_file({"a": torch.zeros(50)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cost(tmp_path).fit().weights == (
        (tmp_path / "model-00001-of-00001.safetensors").stat().st_size
    )


def test_sizes() -> None:
    assert parse_size("m", "1g") == parse_size("m", "1 GiB") == parse_size("m", "1024 mib") == 2**30
    assert parse_size("m", "0.5kb") == parse_size("m", "500") == parse_size("m", 500) == 500
    for wrong in ("", "80 GiBs", "-1", "1e9", "GiB", "nan", -1, True, 1.5, None):
        with pytest.raises(MultiheadError, match=r"memory=.*: expected bytes or a size"):
            parse_size("memory", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel=0: expected a number of devices"),
        ({"tensor_parallel": 2.0}, "tensor_parallel=2.0: expected a number of devices"),
        ({"tensor_parallel": 3}, "tensor_parallel=3: L0 has 8 query heads over 4 key/value heads"),
        ({"tensor_parallel": 3}, "can't share evenly; give one of 1, 2, 4, 8"),
        ({"memory": "much"}, "memory='much': expected bytes or a size such as 80GiB"),
        ({"weights": "much"}, "weights='much': expected bytes or a size such as 80GiB"),
    ],
)
def test_what_is_wrong_is_reported(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(MultiheadError) as raised:
        cost(embed_dim=64, num_heads=8, num_kv_heads=4).fit(**arguments)
    assert words in str(raised.value)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "cost.json"
    sizes = ["--embed-dim", "64", "--num-heads", "8", "--num-kv-heads", "4"]
    options = ["--memory", "1MiB", "--tensor-parallel", "2", "--weights", "0", "--json"]
    monkeypatch.setattr(sys, "argv", ["multihead", "cost", *sizes, *options, str(target)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    out = capsys.readouterr().out
    assert "a device, tensor parallel over 2" in out
    assert "longest context at a batch of 1: 16,384 tokens" in out  # 64 bytes a token
    assert "largest batch at 4,096 tokens: 4" in out
    stored = json.loads(target.read_text())["fit"]
    assert stored["max_context_length"] == 16_384 and stored["free"] == 2**20 - 4096 * 64


def test_weights_that_do_not_fit() -> None:
    text = str(cost(LLAMA_8B).fit("8GiB"))
    assert "the weights don't fit: 6.96 GiB too much" in text and "longest" not in text


def test_a_hybrid_by_hand() -> None:
    """Jamba-1.5-Mini: 4 layers of attention with 8 key/value heads, 28 of Mamba with 8192 channels,
    which hold 16 numbers in float32 and 4 inputs each, whatever the length.
    """
    found = replace(public_cost("Jamba"), context_length=4096)
    state, token = 28 * 8192 * (16 * 4 + 4 * 2), 4 * 2 * 8 * 128 * 2
    one = found.fit(10**9, weights=0)
    assert one.cache == state + 4096 * token
    assert one.max_batch_size == 10**9 // one.cache == 11
    assert one.max_context_length == (10**9 - state) // token // PAGE * PAGE == 60_016
    two = replace(found, batch_size=2).fit(10**9, weights=0)
    assert two.max_context_length == (10**9 // 2 - state) // token // PAGE * PAGE
    for devices, heads in ((4, 2), (16, 1)):  # 16 devices: each key/value head is on two of them
        part = found.fit(10**9, tensor_parallel=devices, weights=0)
        assert part.cache == state // devices + 4096 * token * heads // 8
        room = 10**9 - state // devices
        assert part.max_context_length == room // (token * heads // 8) // PAGE * PAGE
    full = found.fit(state - 1, weights=0)
    assert full.max_context_length == full.max_batch_size == 0
    assert "longest context at a batch of 1: 0 tokens\n" in str(full)


def test_attention_and_a_state_in_each_layer() -> None:
    """Falcon-H1-0.5B: 2 key/value heads of 64, next to 24 states of 64 x 128 in float32."""
    found = replace(public_cost("Falcon-H1-0.5B, 6 of 36 layers"), context_length=100)
    state = 6 * (24 * 64 * 128 * 4 + (1536 + 2 * 128) * 4 * 2)
    fit = found.fit("1GiB", tensor_parallel=4, weights=0)
    keys = 6 * 2 * 64 * 2  # of one head, a token
    assert fit.cache == state // 4 + 7 * PAGE * keys
    assert fit.max_batch_size == 2**30 // fit.cache


def test_states_alone_leave_room_for_any_length() -> None:
    found = public_cost("Mamba-2-2.7B, 6 of 64 layers")
    state = found.cache_per_sequence
    fit = found.fit(10 * state + 1, weights=0)
    assert fit.max_context_length is None and fit.max_batch_size == 10
    assert "longest context at a batch of 1: any length" in str(fit)
    assert found.fit(state - 1, weights=0).max_context_length == 0
    assert found.fit(tensor_parallel=4).cache == state // 4
