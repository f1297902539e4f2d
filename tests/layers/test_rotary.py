"""Rotary positions: transformers' pairing and scalings, the papers' formulas, the words of the
errors.
"""

import copy
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multihead.layers.rotary import Rotary, rotate

NTK = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 3.0},
    NTK,
    YARN,
    LLAMA3,
]


@given(
    head_dim=st.sampled_from([2, 6, 24, 64]),
    length=st.integers(1, 70),
    offset=st.integers(0, 5000),
    theta=st.sampled_from([10000.0, 500000.0, 37.0]),
)
@settings(max_examples=30, deadline=None)
def test_equals_llama(head_dim: int, length: int, offset: int, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    q, k = torch.randn(2, 2, 4, length, head_dim)
    positions = torch.arange(offset, offset + length)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    rotary = Rotary(head_dim, theta=theta)
    assert torch.equal(rotary(q, positions), theirs[0])
    assert torch.equal(rotary(k, positions), theirs[1])


@pytest.mark.parametrize("head_dim", [2, 10, 24, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 37.0, 10000])
def test_unscaled_angles_are_what_shipped_models_were_trained_on(
    head_dim: int, theta: float
) -> None:
    # to the bit: the definition of version 0.1, written out
    x = torch.randn(2, 3, 50, head_dim)
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32)
    angle = torch.arange(50).float().unsqueeze(-1) * (1.0 / theta ** (pairs / head_dim))
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert torch.equal(Rotary(head_dim, theta=theta)(x), expected)
    assert torch.equal(Rotary(head_dim, theta=theta, scaling={"type": "default"})(x), expected)


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 1, 1, 8).expand(
        -1, -1, -1, 9, -1
    )  # one query and one key vector, at nine positions
    scores = rotary(q) @ rotary(k).mT
    later = rotary(q, torch.arange(100, 109)) @ rotary(k, torch.arange(100, 109)).mT
    torch.testing.assert_close(scores, later, atol=1e-4, rtol=1e-4)
    for distance in range(-8, 9):
        diagonal = scores[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)
    assert scores[0, 0, 0].std() > 1e-2  # it does depend on it


def test_positions_of_each_row() -> None:
    x = torch.randn(2, 3, 5, 8)
    positions = torch.stack((torch.arange(5), torch.arange(7, 12)))
    turned = Rotary(8)(x, positions)
    for b in range(2):
        torch.testing.assert_close(turned[b : b + 1], Rotary(8)(x[b : b + 1], positions[b]))
    torch.testing.assert_close(
        Rotary(8)(x, positions[1:]), Rotary(8)(x, positions[1])
    )  # [1, L] is for every row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_half_types_are_rounded_once(dtype: torch.dtype, scaling: dict[str, Any] | None) -> None:
    # bfloat16 cannot tell positions 1000 and 1001 apart, nor hold the frequencies
    rotary = Rotary(8, scaling=scaling)
    x, positions = torch.randn(1, 1, 2, 8).to(dtype), torch.tensor([1000, 1001])
    expected = rotary(x.float(), positions).to(dtype)
    rotary.to(dtype)
    assert not rotary.state_dict() and not list(rotary.buffers())
    assert rotary(x, positions).dtype == dtype
    assert torch.equal(rotary(x, positions), expected)


def test_float64_keeps_its_digits() -> None:
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    turned = Rotary(8)(x)
    assert turned.dtype == torch.float64
    # turning keeps lengths only as well as float32 keeps cos^2 + sin^2; turning back with the same
    # angles is exact
    cos, sin = Rotary(8).cos_sin(torch.arange(5))
    norm = (cos.double() ** 2 + sin.double() ** 2).repeat(1, 2)
    torch.testing.assert_close(rotate(turned, cos, -sin), x * norm, atol=1e-14, rtol=1e-14)
    assert torch.autograd.gradcheck(Rotary(8, rotary_dim=4, interleaved=True, scaling=YARN), (x,))


# rotate


@given(
    half=st.integers(0, 4),
    rest=st.integers(0, 3),
    length=st.integers(0, 4),
    batch=st.integers(1, 3),
    shape=st.sampled_from(["L", "1L", "BL"]),
    interleaved=st.booleans(),
)
def test_rotate_is_multiplication_by_a_complex_number(
    half: int, rest: int, length: int, batch: int, shape: str, interleaved: bool
) -> None:
    x = torch.randn(batch, 2, length, 2 * half + rest, dtype=torch.float64)
    lead = {"L": (), "1L": (1,), "BL": (batch,)}[shape]
    angle = torch.randn(*lead, length, half, dtype=torch.float64)
    out = rotate(x, angle.cos(), angle.sin(), interleaved=interleaved)
    assert out.shape == x.shape and out.dtype == x.dtype
    expected = x.clone()
    for b in range(batch):
        for i in range(length):
            row = angle[i] if shape == "L" else angle[0 if shape == "1L" else b, i]
            for p in range(half):
                first, second = (2 * p, 2 * p + 1) if interleaved else (p, p + half)
                turned = torch.complex(x[b, :, i, first], x[b, :, i, second]) * torch.exp(
                    1j * row[p]
                )
                expected[b, :, i, first], expected[b, :, i, second] = turned.real, turned.imag
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotate_computes_in_float32_or_better(dtype: torch.dtype) -> None:
    x, angle = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(5, 4)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos.float(), sin.float()).to(dtype))
    exact = rotate(x, angle.double().cos(), angle.double().sin())
    assert exact.dtype == dtype
    assert torch.equal(
        exact, rotate(x.double(), angle.double().cos(), angle.double().sin()).to(dtype)
    )


def test_interleaved_equals_cohere() -> None:
    from transformers import CohereConfig
    from transformers.models.cohere.modeling_cohere import (
        CohereRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    config = CohereConfig(
        hidden_size=32,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    q, positions = torch.randn(2, 4, 7, 8), torch.arange(30, 37)
    theirs, _ = apply_rotary_pos_emb(q, q, *CohereRotaryEmbedding(config)(q, positions[None]))
    torch.testing.assert_close(
        Rotary(8, interleaved=True)(q, positions), theirs, atol=1e-6, rtol=1e-6
    )
    assert not torch.allclose(Rotary(8)(q, positions), theirs, atol=0.1)


def test_interleaved_scores_equal_deepseek() -> None:
    # DeepSeek leaves the pairs apart in its result: another order of the components, but the same
    # scores
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    rotary = Rotary(16, interleaved=True, scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5})
    q, k = torch.randn(2, 2, 3, 9, 16)
    cos, sin = rotary.cos_sin(torch.arange(9))
    q_theirs, k_theirs = apply_rotary_pos_emb_interleave(
        q, k, cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]
    )
    torch.testing.assert_close(
        rotary(q) @ rotary(k).mT, q_theirs @ k_theirs.mT, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        rotary(q), torch.stack(q_theirs.chunk(2, dim=-1), dim=-1).flatten(-2)
    )


@pytest.mark.parametrize(("head_dim", "share"), [(16, 0.25), (20, 0.4), (24, 0.5), (8, 1.0)])
def test_partial_equals_gpt_neox(head_dim: int, share: float) -> None:
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import (
        GPTNeoXRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    parameters = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": share}
    config = GPTNeoXConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters=dict(parameters)
    )
    q, positions = torch.randn(2, 2, 7, head_dim), torch.arange(30, 37)
    theirs, _ = apply_rotary_pos_emb(q, q, *GPTNeoXRotaryEmbedding(config)(q, positions[None]))
    by_width = Rotary(head_dim, theta=5000.0, rotary_dim=int(head_dim * share))
    assert torch.equal(by_width(q, positions), theirs)
    by_mapping = Rotary(head_dim, scaling=parameters)
    assert torch.equal(by_mapping(q, positions), theirs)
    assert by_mapping.theta == 5000.0 and by_mapping.rotary_dim == int(head_dim * share)
    assert torch.equal(theirs[..., by_width.rotary_dim :], q[..., by_width.rotary_dim :])


# scaling


def _numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


ORIGINAL = st.sampled_from([16, 100, 2048, 8192, 40960])
FACTOR = st.one_of(st.sampled_from([1.0, 2.0, 4, 8.0, 40.0]), _numbers(1.0, 64.0))
YARN_EXTRA = st.fixed_dictionaries(
    {},
    optional={
        "attention_factor": _numbers(0.5, 2.0),
        "beta_fast": _numbers(8.0, 64.0),
        "beta_slow": _numbers(0.5, 8.0),
        "mscale": st.one_of(st.just(0.0), _numbers(0.25, 2.0)),
        "mscale_all_dim": st.one_of(st.just(0.0), _numbers(0.25, 2.0)),
        "truncate": st.booleans(),
    },
)


@st.composite
def scalings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["linear", "dynamic", "yarn", "llama3"]))
    scaling: dict[str, Any] = {"rope_type": kind, "factor": draw(FACTOR)}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = draw(ORIGINAL)
    if kind == "yarn":
        scaling.update(draw(YARN_EXTRA))
    if kind == "llama3":
        scaling["low_freq_factor"] = draw(_numbers(0.5, 2.0))
        scaling["high_freq_factor"] = draw(_numbers(2.5, 32.0))
    return scaling


def _config(head_dim: int, theta: float, scaling: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    parameters = {**scaling, "rope_theta": theta}
    trained = scaling.get("original_max_position_embeddings", 2048)
    if scaling["rope_type"] == "dynamic":
        del parameters[
            "original_max_position_embeddings"
        ]  # transformers reads max_position_embeddings instead
    return LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=trained,
        rope_parameters=parameters,
    )  # fmt: skip


@given(
    scaling=scalings(),
    head_dim=st.sampled_from([4, 8, 24, 64, 128]),
    theta=st.sampled_from([10000.0, 500000.0, 100.0]),
    longest=st.integers(1, 100_000),
)
@example(
    {**YARN, "beta_fast": 3.0, "beta_slow": 3.0, "truncate": False}, 64, 10000.0, 1
)  # a ramp of no width
@settings(max_examples=200, deadline=None)
def test_frequencies_equal_transformers(
    scaling: dict[str, Any], head_dim: int, theta: float, longest: int
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = _config(head_dim, theta, scaling)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=longest)
    rotary = Rotary(head_dim, theta=theta, scaling=scaling)
    got = rotary.frequencies(torch.tensor([0, longest - 1]))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0.0)
    assert math.isclose(rotary.attention_factor, attention_factor, rel_tol=1e-12)


@given(
    scaling=scalings(),
    head_dim=st.sampled_from([8, 24]),
    offset=st.integers(0, 300),
    batch=st.sampled_from([None, 1, 3]),
)
@settings(max_examples=60, deadline=None)
def test_turns_as_llama_with_scaling(
    scaling: dict[str, Any], head_dim: int, offset: int, batch: int | None
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    q = torch.randn(batch or 2, 2, 6, head_dim)
    positions = torch.arange(offset, offset + 6)
    if batch is not None:  # the rows of the batch at different places
        positions = positions + 5 * torch.arange(batch).unsqueeze(-1)
    theirs = LlamaRotaryEmbedding(
        _config(head_dim, 10000.0, scaling)
    )  # fresh: "dynamic" there remembers lengths
    cos, sin = theirs(q, positions if batch else positions[None])
    rotary = Rotary(head_dim, scaling=scaling)
    # an angle of 300 radians has float32 steps of 3e-5
    torch.testing.assert_close(
        rotary(q, positions), apply_rotary_pos_emb(q, q, cos, sin)[0], atol=5e-4, rtol=1e-5
    )


def test_yarn_equals_gpt_oss() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    config = GptOssConfig()
    theirs = GptOssRotaryEmbedding(config)
    parameters = dict(config.rope_parameters)
    assert parameters["rope_type"] == "yarn" and parameters["truncate"] is False
    positions = torch.arange(40)
    cos, sin = theirs(torch.randn(1), positions[None])
    ours = Rotary(config.head_dim, scaling=parameters).cos_sin(positions)
    torch.testing.assert_close(ours[0], cos[0], atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(ours[1], sin[0], atol=2e-6, rtol=1e-6)


def _by_the_papers(
    scaling: dict[str, Any], head_dim: int, theta: float, length: int
) -> list[float]:
    """One frequency a pair, in Python's numbers, each formula as its source prints it."""
    kind, factor, trained = (
        scaling["rope_type"],
        scaling["factor"],
        scaling.get("original_max_position_embeddings", 0),
    )
    if kind == "dynamic":  # a larger base
        n = max(length, trained)
        theta = theta * (factor * n / trained - (factor - 1)) ** (head_dim / (head_dim - 2))
    result = []
    for p in range(head_dim // 2):
        f = theta ** (-2 * p / head_dim)
        turns = trained * f / (2 * math.pi)
        if kind == "linear":
            f /= factor
        elif kind == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if turns < low:
                f /= factor
            elif turns <= high:
                smooth = (turns - low) / (high - low)
                f = (1 - smooth) * f / factor + smooth * f
        elif kind == "yarn":
            fast, slow = scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)
            assert (
                scaling["truncate"] is False
            )  # without rounding, a pair is between the ends if its turns are
            if turns <= slow:
                f /= factor
            elif turns < fast:
                kept = math.log(turns / slow) / math.log(
                    fast / slow
                )  # even in p, thus in the logarithm of the turns
                f = f / factor * (1 - kept) + f * kept
        result.append(f)
    return result


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "truncate": False, "beta_fast": 20.0,
         "beta_slow": 3.0},
        {**LLAMA3, "original_max_position_embeddings": 8192},
    ],
)  # fmt: skip
@pytest.mark.parametrize("length", [10, 64, 65, 1000])
def test_frequencies_by_the_papers(scaling: dict[str, Any], length: int) -> None:
    expected = torch.tensor(_by_the_papers(scaling, 64, 10000.0, length))
    got = Rotary(64, scaling=scaling).frequencies(torch.arange(length))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0.0)


def test_dynamic_leaves_the_trained_length_alone_and_remembers_nothing() -> None:
    rotary, plain, x = Rotary(8, scaling=NTK), Rotary(8), torch.randn(1, 1, 16, 8)
    assert torch.equal(rotary(x), plain(x))
    assert not torch.allclose(
        rotary(x, torch.arange(1, 17)), plain(x, torch.arange(1, 17))
    )  # 17 positions seen
    assert torch.equal(rotary(x), plain(x))
    assert rotary(x[:, :, :0]).shape == (1, 1, 0, 8)
    with_small_integers = rotary(x, torch.arange(200, 216, dtype=torch.uint8))
    assert torch.equal(with_small_integers, rotary(x, torch.arange(200, 216)))


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 5.0}, {"original_max_position_embeddings": 1000}, {"attention_factor": 1.5}, {"beta_fast": 4.0},
        {"beta_slow": 3.0}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"truncate": False}, {"rope_theta": 500.0},
        {"partial_rotary_factor": 0.5},
    ],
)  # fmt: skip
def test_every_key_of_yarn_changes_the_result(change: dict[str, Any]) -> None:
    x, positions = torch.randn(1, 1, 8, 32), torch.arange(30, 38)
    before = Rotary(32, scaling=YARN)(x, positions)
    assert not torch.allclose(Rotary(32, scaling=YARN | change)(x, positions), before, atol=1e-3)


@pytest.mark.parametrize(
    ("scaling", "change"),
    [
        (SCALINGS[1], {"factor": 4.0}),
        (NTK, {"factor": 5.0}), (NTK, {"original_max_position_embeddings": 20}),
        (LLAMA3, {"factor": 2.0}), (LLAMA3, {"original_max_position_embeddings": 300}),
        (LLAMA3, {"low_freq_factor": 0.1}), (LLAMA3, {"high_freq_factor": 30.0}),
    ],
)  # fmt: skip
def test_every_key_of_the_others_changes_the_result(
    scaling: dict[str, Any], change: dict[str, Any]
) -> None:
    x, positions = torch.randn(1, 1, 8, 32), torch.arange(30, 38)
    before = Rotary(32, scaling=scaling)(x, positions)
    assert not torch.allclose(Rotary(32, scaling=scaling | change)(x, positions), before, atol=1e-3)


def test_old_and_empty_entries_of_a_config() -> None:
    x = torch.randn(1, 1, 8, 32)
    old = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": None,
        "rope_theta": 10000,
    }
    assert torch.equal(Rotary(32, scaling=old)(x), Rotary(32, scaling=YARN)(x))
    assert torch.equal(
        Rotary(32, scaling={**old, "rope_type": "yarn"})(x), Rotary(32, scaling=YARN)(x)
    )
    given_once = {"type": "linear", "factor": 2.0, "rope_theta": 500.0}
    for rotary in (Rotary(32, scaling=given_once), Rotary(32, theta=500.0, scaling=given_once)):
        assert torch.equal(
            rotary(x), Rotary(32, theta=500.0, scaling={"type": "linear", "factor": 2.0})(x)
        )
    assert given_once == {
        "type": "linear",
        "factor": 2.0,
        "rope_theta": 500.0,
    }  # the caller's mapping is left as it was


def test_says_what_it_is() -> None:
    assert repr(Rotary(8)) == "Rotary(head_dim=8, theta=10000.0)"
    text = repr(
        Rotary(8, rotary_dim=4, interleaved=True, scaling={"type": "linear", "factor": 2.0})
    )
    assert (
        text
        == "Rotary(head_dim=8, theta=10000.0, rotary_dim=4, interleaved=True, scaling={'rope_type':"
        " 'linear', 'factor': 2.0})"
    )
    assert repr(copy.deepcopy(Rotary(8, scaling=YARN))) == repr(Rotary(8, scaling=YARN))


# compiled, exported, mapped


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_compiles_as_one_graph(scaling: dict[str, Any] | None, interleaved: bool) -> None:
    torch._dynamo.reset()
    rotary = Rotary(8, rotary_dim=6, interleaved=interleaved, scaling=scaling)
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 5, 8)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for offset in (
            0,
            20,
            90,
            3,
        ):  # other values, within the trained length and beyond it: the same graph
            positions = torch.arange(offset, offset + 5)
            torch.testing.assert_close(
                compiled(x, positions), rotary(x, positions), atol=1e-6, rtol=1e-6
            )
    torch.testing.assert_close(compiled(x), rotary(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_exports_for_any_length(scaling: dict[str, Any] | None) -> None:
    rotary = Rotary(8, scaling=scaling)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    program = torch.export.export(
        rotary, (torch.randn(2, 3, 5, 8), torch.arange(10).view(2, 5)),
        dynamic_shapes=({0: batch, 2: length}, {0: batch, 1: length}),
    )  # fmt: skip
    x, positions = torch.randn(4, 3, 30, 8), torch.arange(120).view(4, 30)
    torch.testing.assert_close(program.module()(x, positions), rotary(x, positions))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_maps(scaling: dict[str, Any] | None) -> None:
    rotary = Rotary(8, scaling=scaling)
    x, positions = (
        torch.randn(3, 2, 1, 5, 8),
        torch.tensor([0, 14, 50]).unsqueeze(-1) + torch.arange(5),
    )
    mapped = torch.vmap(rotary)(x, positions)
    torch.testing.assert_close(mapped, torch.stack([rotary(a, p) for a, p in zip(x, positions)]))
    per_row = torch.vmap(rotary, in_dims=(0, None))(x, positions[:2])
    torch.testing.assert_close(per_row, torch.stack([rotary(a, positions[:2]) for a in x]))


# bad input

X = torch.randn(2, 3, 5, 8)
COS = torch.ones(5, 4)


def _scaled(**change: Any) -> dict[str, Any]:
    return {key: value for key, value in {**YARN, **change}.items() if value != "gone"}


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Rotary(7), ValueError, ["head_dim=7", "even"]),
        (lambda: Rotary(0), ValueError, ["head_dim=0", "at least 1"]),
        (lambda: Rotary("8"), TypeError, ["head_dim='8'", "integer"]),
        (lambda: Rotary(8, theta=0.0), ValueError, ["theta=0.0", "positive"]),
        (lambda: Rotary(8, theta=float("nan")), ValueError, ["theta=nan", "positive"]),
        (lambda: Rotary(8, theta=math.inf), ValueError, ["theta=inf", "positive"]),
        (lambda: Rotary(8, theta="10000"), TypeError, ["theta='10000'", "number"]),
        (lambda: Rotary(8, rotary_dim=3), ValueError, ["rotary_dim=3", "even", "head_dim=8"]),
        (lambda: Rotary(8, rotary_dim=10), ValueError, ["rotary_dim=10", "at most head_dim=8"]),
        (lambda: Rotary(8, rotary_dim=0), ValueError, ["rotary_dim=0", "at least 1"]),
        (lambda: Rotary(8, rotary_dim=4.0), TypeError, ["rotary_dim=4.0", "integer"]),
        (lambda: Rotary(8)(torch.randn(1, 1, 2, 6)), ValueError, ["6 wide", "head_dim=8", "split"]),
        (
            lambda: Rotary(8)(X, torch.arange(4)),
            ValueError,
            ["positions[4]", "L=5", "[2, 3, 5, 8]"],
        ),
        (
            lambda: Rotary(8)(X, torch.zeros(3, 5, dtype=torch.long)),
            ValueError,
            ["positions[3, 5]", "B=2", "L=5"],
        ),
        (
            lambda: Rotary(8)(X, torch.zeros(1, 1, 5, dtype=torch.long)),
            ValueError,
            ["positions[1, 1, 5]", "[L] or [B, L]"],
        ),
        (
            lambda: Rotary(8)(X, torch.arange(5.0)),
            TypeError,
            ["positions", "float32", "integers", "long()"],
        ),
        (
            lambda: Rotary(8)(X, torch.ones(5, dtype=torch.bool)),
            TypeError,
            ["positions", "bool", "integers"],
        ),
        (lambda: rotate(X[0], COS, COS), ValueError, ["x[3, 5, 8]", "[B, H, L, E]"]),
        (lambda: rotate(X.long(), COS, COS), TypeError, ["x is torch.int64", "floating"]),
        (lambda: rotate(X, COS.long(), COS), TypeError, ["cos is torch.int64", "floating"]),
        (lambda: rotate(X, COS, COS.long()), TypeError, ["sin is torch.int64", "floating"]),
        (lambda: rotate(X, COS, COS[:, :3]), ValueError, ["cos[5, 4]", "sin[5, 3]", "one shape"]),
        (lambda: rotate(X, COS[:4], COS[:4]), ValueError, ["cos[4, 4]", "L=5", "x[2, 3, 5, 8]"]),
        (
            lambda: rotate(X, COS.expand(3, 5, 4), COS.expand(3, 5, 4)),
            ValueError,
            ["cos[3, 5, 4]", "B=2"],
        ),
        (lambda: rotate(X, COS[0], COS[0]), ValueError, ["cos[4]", "[L, R/2]"]),
        (
            lambda: rotate(X, COS.repeat(1, 2), COS.repeat(1, 2)),
            ValueError,
            ["cos[5, 8]", "width of at least 16", "E=8", "each pair"],
        ),
        (lambda: Rotary(8, scaling="yarn"), TypeError, ["scaling='yarn'", "mapping", "rope_type"]),
        (lambda: Rotary(8, scaling={"factor": 2.0}), ValueError, ["no 'rope_type'", "linear"]),
        (
            lambda: Rotary(8, scaling=_scaled(rope_type="YaRM")),
            ValueError,
            ["'YaRM'", "did you mean 'yarn'", "llama3"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(rope_type="llama")),
            ValueError,
            ["'llama'", "did you mean 'llama3'"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(rope_type="axial")),
            ValueError,
            ["'axial'", "expected one of default, linear"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(type="linear")),
            ValueError,
            ["rope_type='yarn'", "type='linear'", "only one"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(beta_fats=3)),
            ValueError,
            ["'beta_fats'=3", "did you mean 'beta_fast'"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(low_freq_factor=1.0)),
            ValueError,
            ["'low_freq_factor'", "'yarn' doesn't use"],
        ),
        (
            lambda: Rotary(8, scaling={"type": "default", "factor": 2.0}),
            ValueError,
            ["'factor'", "'default' doesn't use"],
        ),
        (
            lambda: Rotary(8, scaling={"type": "linear", "factors": 2.0}),
            ValueError,
            ["'factors'", "did you mean 'factor'"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(factor="gone")),
            ValueError,
            ["lacks 'factor'", "'yarn'"],
        ),
        (lambda: Rotary(8, scaling=_scaled(factor=None)), ValueError, ["lacks 'factor'", "'yarn'"]),
        (
            lambda: Rotary(8, scaling={"type": "dynamic", "factor": 2.0}),
            ValueError,
            ["lacks 'original_max_position_embeddings'", "'dynamic'", "max_position_embeddings"],
        ),
        (
            lambda: Rotary(8, scaling={**LLAMA3, "low_freq_factor": None}),
            ValueError,
            ["lacks 'low_freq_factor'", "'llama3'"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(factor=0.25)),
            ValueError,
            ["['factor']=0.25", "at least 1"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(factor=math.inf)),
            ValueError,
            ["['factor']=inf", "at least 1"],
        ),
        (lambda: Rotary(8, scaling=_scaled(factor="4")), TypeError, ["['factor']='4'", "number"]),
        (lambda: Rotary(8, scaling=_scaled(factor=True)), TypeError, ["['factor']=True", "number"]),
        (
            lambda: Rotary(8, scaling=_scaled(original_max_position_embeddings=0)),
            ValueError,
            ["embeddings']=0", "at least 1"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(original_max_position_embeddings=64.0)),
            TypeError,
            ["embeddings']=64.0", "integer"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(attention_factor=0.0)),
            ValueError,
            ["['attention_factor']=0.0", "positive"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(mscale=-1.0)),
            ValueError,
            ["['mscale']=-1.0", "0 (as if absent) or above"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(truncate=1)),
            TypeError,
            ["['truncate']=1", "True or False"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(beta_fast=0.5)),
            ValueError,
            ["['beta_slow']=1", "['beta_fast']=0.5"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(beta_slow=0.0)),
            ValueError,
            ["['beta_slow']=0.0", "positive"],
        ),
        (
            lambda: Rotary(8, scaling={**LLAMA3, "low_freq_factor": 4.0}),
            ValueError,
            ["['low_freq_factor']=4.0", "below", "=4.0"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(rope_theta=-1.0)),
            ValueError,
            ["['rope_theta']=-1.0", "positive"],
        ),
        (
            lambda: Rotary(8, theta=500.0, scaling=_scaled(rope_theta=1e6)),
            ValueError,
            ["theta=500.0", "1000000.0", "only one"],
        ),
        (lambda: Rotary(8, theta=1.0, scaling=YARN), ValueError, ["theta=1.0", "above 1"]),
        (
            lambda: Rotary(8, scaling=_scaled(partial_rotary_factor=1.5)),
            ValueError,
            ["factor']=1.5", "at most 1"],
        ),
        (
            lambda: Rotary(8, scaling=_scaled(partial_rotary_factor=0.4)),
            ValueError,
            ["rotary_dim=3", "even"],
        ),
        (
            lambda: Rotary(8, rotary_dim=6, scaling=_scaled(partial_rotary_factor=0.5)),
            ValueError,
            ["rotary_dim=6", "partial_rotary_factor']=0.5", "is 4", "only one"],
        ),
        (
            lambda: Rotary(8, rotary_dim=2, scaling=NTK),
            ValueError,
            ["rotary_dim=2", "dynamic", "at least 4"],
        ),
    ],
)
def test_words_of_errors(make: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error, match=".*".join(map(re.escape, words))):
        make()
