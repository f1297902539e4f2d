"""Biases by position: transformers' own, the papers' definitions, gradients, the words of the
errors.
"""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead.layers.position_bias import ALiBi, PositionBias, RelativeBias, T5Bias

KINDS = [
    lambda: ALiBi(3),
    lambda: T5Bias(3, num_buckets=8, max_distance=20),
    lambda: T5Bias(3, num_buckets=8, max_distance=20, bidirectional=False),
    lambda: RelativeBias(3, 4),
]


# ALiBi


def _slopes_of_the_paper(n: int) -> list[float]:
    """The authors' code (ofirpress/attention_with_linear_biases), word by word."""

    def get_slopes_power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        ratio = start
        return [start * ratio**i for i in range(n)]

    if math.log2(n).is_integer():
        return get_slopes_power_of_2(n)
    closest_power_of_2 = 2 ** math.floor(math.log2(n))
    return (
        get_slopes_power_of_2(closest_power_of_2)
        + _slopes_of_the_paper(2 * closest_power_of_2)[0::2][: n - closest_power_of_2]
    )


def test_slopes_are_the_papers() -> None:
    for num_heads in range(1, 130):
        slopes = ALiBi(num_heads).slopes
        assert slopes.shape == (num_heads,) and slopes.dtype == torch.float32
        torch.testing.assert_close(
            slopes, torch.tensor(_slopes_of_the_paper(num_heads)), rtol=1e-6, atol=0.0
        )


@given(num_heads=st.integers(1, 40), length=st.integers(1, 20), offset=st.integers(0, 3000))
@settings(max_examples=50)
def test_alibi_equals_bloom_and_mpt(num_heads: int, length: int, offset: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    positions = torch.arange(offset, offset + length)
    ours = ALiBi(num_heads)(positions, positions)
    bloom = build_alibi_tensor(
        torch.ones(1, length, dtype=torch.long), num_heads, torch.float32
    ).unsqueeze(0)
    mpt = build_mpt_alibi_tensor(num_heads, length).unsqueeze(0)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    for theirs in (bloom, mpt):
        assert theirs.shape == (1, num_heads, 1, length)
        # they leave out what is the same for all keys of a row, which the softmax doesn't see
        own = theirs[..., 0, :].unsqueeze(-1)  # at the query's own position, where ours is 0
        torch.testing.assert_close(
            ours.masked_fill(later, 0.0),
            (theirs - own).masked_fill(later, 0.0),
            atol=1e-5,
            rtol=1e-5,
        )


def test_alibi_is_minus_slope_times_distance() -> None:
    queries, keys = torch.tensor([3, 0]), torch.tensor([0, 1, 2, 3, 9])
    bias = ALiBi(5)(queries, keys)
    for h, slope in enumerate(_slopes_of_the_paper(5)):
        for l, i in enumerate(queries.tolist()):
            for s, j in enumerate(keys.tolist()):
                assert math.isclose(bias[0, h, l, s], -slope * abs(i - j), rel_tol=1e-6)
    assert bias.dtype == torch.float32
    assert torch.equal(ALiBi(5).to(torch.bfloat16)(queries, keys), bias)
    far = ALiBi(8).to(torch.bfloat16)(queries, torch.tensor([1000, 1001]))
    assert torch.equal(
        far[..., 0] - far[..., 1], ALiBi(8).slopes.unsqueeze(-1).expand(8, 2)[None]
    )  # bfloat16 has no 1001
    assert not list(ALiBi(5).parameters()) and not ALiBi(5).state_dict()


# T5


@given(
    num_heads=st.integers(1, 4),
    buckets=st.sampled_from([4, 6, 8, 10, 32, 64]),
    stretch=st.integers(1, 200),
    bidirectional=st.booleans(),
    query_length=st.integers(1, 12),
    key_length=st.integers(1, 300),
    past=st.sampled_from([0, 5, 100, 290]),
)
@settings(max_examples=150)
def test_t5_equals_transformers(
    num_heads: int,
    buckets: int,
    stretch: int,
    bidirectional: bool,
    query_length: int,
    key_length: int,
    past: int,
) -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    max_distance = buckets // 2 + stretch
    config = T5Config(
        d_model=8, d_kv=2, num_heads=num_heads, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance, is_decoder=not bidirectional,
    )  # fmt: skip
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5Bias(
        num_heads, num_buckets=buckets, max_distance=max_distance, bidirectional=bidirectional
    )
    with torch.no_grad():
        theirs.relative_attention_bias.weight.normal_()
    ours.load_state_dict({"weight": theirs.relative_attention_bias.weight})
    expected = theirs.compute_bias(query_length, key_length, past_seen_tokens=past)
    assert torch.equal(
        ours(torch.arange(past, past + query_length), torch.arange(key_length)), expected
    )
    distance = torch.arange(-400, 401)
    expected_buckets = T5Attention._relative_position_bucket(
        distance, bidirectional, buckets, max_distance
    )
    assert torch.equal(ours.classes(distance), expected_buckets)
    assert set(expected_buckets.tolist()) <= set(range(buckets))


def test_t5_defaults_are_t5s() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-1000, 1001)
    assert torch.equal(T5Bias(2).classes(distance), T5Attention._relative_position_bucket(distance))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_buckets_by_the_paper(bidirectional: bool) -> None:
    # in whole numbers: with 16 single distances, max_distance 16 * 2^4 and 16 wide ones, each wide
    # one is a quarter octave
    buckets = 64 if bidirectional else 32
    bias = T5Bias(1, num_buckets=buckets, max_distance=256, bidirectional=bidirectional)
    for d in (0, 1, 15, 16, 17, 25, 40, 100, 250, 300, 10_000):
        earlier = d if d < 16 else 16 + min(15, int(4 * math.log2(d / 16)))
        assert bias.classes(torch.tensor([-d])).item() == earlier
        later = (earlier + 32 if d else 0) if bidirectional else 0
        assert bias.classes(torch.tensor([d])).item() == later


def test_every_argument_of_t5_changes_the_result() -> None:
    positions = torch.arange(40)
    weight = torch.randn(8, 3)

    def of(**change: Any) -> torch.Tensor:
        bias = T5Bias(3, **{"num_buckets": 8, "max_distance": 20, **change})
        with torch.no_grad():
            bias.weight.copy_(weight[: bias.num_buckets])
        return bias(positions, positions)

    for change in ({"num_buckets": 6}, {"max_distance": 35}, {"bidirectional": False}):
        assert not torch.equal(of(**change), of())


# RelativeBias


@given(
    queries=st.lists(st.integers(-50, 50), min_size=1, max_size=5),
    keys=st.lists(st.integers(-50, 50), min_size=1, max_size=5),
    num_heads=st.integers(1, 3),
    max_distance=st.integers(1, 60),
)
def test_relative_bias_reads_one_row_a_distance(
    queries: list[int], keys: list[int], num_heads: int, max_distance: int
) -> None:
    bias = RelativeBias(num_heads, max_distance)
    assert bias.weight.shape == (2 * max_distance + 1, num_heads)
    got = bias(torch.tensor(queries), torch.tensor(keys))
    assert got.shape == (1, num_heads, len(queries), len(keys))
    for l, i in enumerate(queries):
        for s, j in enumerate(keys):
            row = max_distance + max(-max_distance, min(max_distance, j - i))
            assert torch.equal(got[0, :, l, s], bias.weight[row])


# all of them


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "shapes", [("L", "S"), ("BL", "S"), ("L", "BS"), ("BL", "BS"), ("1L", "BS"), ("BL", "1S")]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_every_row_has_its_own_positions(
    make: Any, shapes: tuple[str, str], dtype: torch.dtype
) -> None:
    bias = make()
    lead = {"": (), "B": (2,), "1": (1,)}
    queries = torch.randint(0, 40, (*lead[shapes[0][:-1]], 4), dtype=dtype)
    keys = torch.randint(0, 40, (*lead[shapes[1][:-1]], 6), dtype=dtype)
    got = bias(queries, keys)
    batch = 2 if "B" in "".join(shapes) else 1
    assert got.shape == (batch, 3, 4, 6) and got.is_floating_point()
    for b in range(batch):
        q, k = (x.long() if x.dim() == 1 else x[min(b, len(x) - 1)].long() for x in (queries, keys))
        torch.testing.assert_close(got[b : b + 1], bias(q, k))


@pytest.mark.parametrize("make", KINDS)
def test_moves_with_the_text_and_takes_what_is_empty(make: Any) -> None:
    bias, positions = make(), torch.arange(7)
    assert torch.equal(bias(positions, positions), bias(positions + 1000, positions + 1000))
    assert bias(positions[:0], positions).shape == (1, 3, 0, 7)
    assert bias(positions, positions[:0]).shape == (1, 3, 7, 0)


@pytest.mark.parametrize("make", KINDS[1:])
def test_gradients_reach_each_number_that_was_read(make: Any) -> None:
    bias = make()
    queries, keys = torch.arange(3), torch.arange(9)
    pull = torch.randn(1, 3, 3, 9)
    (bias(queries, keys) * pull).sum().backward()
    expected = torch.zeros_like(bias.weight)
    classes = bias.classes(keys[None, :] - queries[:, None])
    for l in range(3):
        for s in range(9):
            expected[classes[l, s]] += pull[0, :, l, s]
    assert bias.weight.requires_grad and expected.abs().sum() > 0
    torch.testing.assert_close(bias.weight.grad, expected)


@pytest.mark.parametrize("make", KINDS[1:])
def test_tables_start_small_and_follow_the_module(make: Any) -> None:
    torch.manual_seed(0)
    bias = make()
    before = bias.weight.detach().clone()
    assert 0.01 < before.std() < 0.04
    bias.reset_parameters()
    assert not torch.equal(bias.weight, before)
    assert bias.to(torch.bfloat16)(torch.arange(3), torch.arange(3)).dtype == torch.bfloat16
    assert list(bias.state_dict()) == ["weight"]


@pytest.mark.parametrize("make", KINDS)
def test_is_the_bias_of_attention(make: Any) -> None:
    from multihead import attention

    q, k, v = torch.randn(3, 2, 3, 5, 8)
    bias = make()(torch.arange(5), torch.arange(5))
    weights = (q @ k.mT / math.sqrt(8) + bias).softmax(-1)
    torch.testing.assert_close(attention(q, k, v, bias=bias), weights @ v)


@pytest.mark.parametrize("make", KINDS)
def test_compiles_as_one_graph(make: Any) -> None:
    torch._dynamo.reset()
    bias = make()
    compiled = torch.compile(bias, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for offset in (0, 3, 70):  # other values: the same graph
            positions = torch.arange(offset, offset + 5), torch.arange(9).expand(2, 9)
            torch.testing.assert_close(compiled(*positions), bias(*positions))
    if list(bias.parameters()):
        compiled(torch.arange(5), torch.arange(9).expand(2, 9)).sum().backward()
        assert bias.weight.grad.sum() == 2 * 3 * 5 * 9


@pytest.mark.parametrize("make", KINDS)
def test_exports_for_any_length(make: Any) -> None:
    bias = make()
    length, keys = torch.export.Dim("length"), torch.export.Dim("keys")
    program = torch.export.export(
        bias,
        (torch.arange(5), torch.arange(18).view(2, 9)),
        dynamic_shapes=({0: length}, {1: keys}),
    )
    positions = torch.arange(30, 50), torch.arange(66).view(2, 33)
    torch.testing.assert_close(program.module()(*positions), bias(*positions))


@pytest.mark.parametrize("make", KINDS)
def test_maps(make: Any) -> None:
    bias = make()
    queries, keys = torch.randint(0, 40, (3, 5)), torch.randint(0, 40, (3, 2, 9))
    mapped = torch.vmap(bias)(queries, keys)
    torch.testing.assert_close(mapped, torch.stack([bias(q, k) for q, k in zip(queries, keys)]))
    torch.testing.assert_close(
        torch.vmap(bias, in_dims=(None, 0))(queries[0], keys),
        torch.stack([bias(queries[0], k) for k in keys]),
    )


def test_says_what_it_is() -> None:
    assert repr(ALiBi(3)) == "ALiBi(num_heads=3)"
    assert (
        repr(T5Bias(3))
        == "T5Bias(num_heads=3, num_buckets=32, max_distance=128, bidirectional=True)"
    )
    assert repr(RelativeBias(3, 4)) == "RelativeBias(num_heads=3, max_distance=4)"


I, J = torch.arange(3), torch.arange(4)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ALiBi(0), ValueError, ["num_heads=0", "at least 1"]),
        (lambda: ALiBi(2.0), TypeError, ["num_heads=2.0", "integer"]),
        (lambda: T5Bias(-1), ValueError, ["num_heads=-1", "at least 1"]),
        (lambda: RelativeBias(True, 3), TypeError, ["num_heads=True", "integer"]),
        (lambda: RelativeBias(2, 0), ValueError, ["max_distance=0", "at least 1"]),
        (lambda: RelativeBias(2, "3"), TypeError, ["max_distance='3'", "integer"]),
        (lambda: T5Bias(2, num_buckets=0), ValueError, ["num_buckets=0", "at least 1"]),
        (
            lambda: T5Bias(2, num_buckets=2),
            ValueError,
            ["num_buckets=2", "bidirectional=True", "even number, at least 4"],
        ),
        (
            lambda: T5Bias(2, num_buckets=7),
            ValueError,
            ["num_buckets=7", "bidirectional=True", "even number"],
        ),
        (
            lambda: T5Bias(2, num_buckets=1, bidirectional=False),
            ValueError,
            ["num_buckets=1", "=False", "at least 2"],
        ),
        (lambda: T5Bias(2, num_buckets=8.0), TypeError, ["num_buckets=8.0", "integer"]),
        (
            lambda: T5Bias(2, max_distance=8),
            ValueError,
            ["max_distance=8", "num_buckets=32", "0 to 7", "at least 9"],
        ),
        (
            lambda: T5Bias(2, max_distance=16, bidirectional=False),
            ValueError,
            ["max_distance=16", "0 to 15", "at least 17"],
        ),
        (lambda: T5Bias(2, max_distance=1.5), TypeError, ["max_distance=1.5", "integer"]),
        (
            lambda: ALiBi(2)(I.float(), J),
            TypeError,
            ["query_positions", "float32", "integers", "long()"],
        ),
        (lambda: ALiBi(2)(I, J > 1), TypeError, ["key_positions", "bool", "integers"]),
        (
            lambda: ALiBi(2)(I.view(1, 1, 3), J),
            ValueError,
            ["query_positions[1, 1, 3]", "[L] or [B, L]"],
        ),
        (lambda: ALiBi(2)(I, J[0]), ValueError, ["key_positions[]", "[S] or [B, S]"]),
        (
            lambda: ALiBi(2)(I.expand(2, 3), J.expand(5, 4)),
            ValueError,
            ["query_positions[2, 3]", "key_positions[5, 4]", "one batch size"],
        ),
        (
            lambda: PositionBias(2)(I, J),
            NotImplementedError,
            ["PositionBias", "define of_distance"],
        ),
    ],
)
def test_words_of_errors(make: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error, match=".*".join(map(re.escape, words))):
        make()
