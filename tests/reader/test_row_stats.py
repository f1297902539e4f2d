"""The kernels and the blocks of queries give the same sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import multihead
from multihead.ops.backends import cpu, jit
from multihead.ops.call import AttentionCall
from multihead.ops.masks import IntervalMask, causal, padding, window
from multihead.ops.slopes import AlibiBias
from multihead.reader import row_stats
from multihead.reader.context import QueryBlock, TokenContext
from multihead.reader.row_stats import (
    Capture,
    RowStatsRequest,
    RowSums,
    Sample,
    sum_by_blocks,
    sum_by_kernels,
)
from multihead.reader.statistics.masses import Duplicate, Induction
from small import IDS, llama

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)
MASKS = ("all", "causal", "window", "padding", "left", "dense")


class Most(multihead.Statistic):
    name, formula, meaning = "most", "the three largest A_ij", "reads few keys"

    def rows(self, block: QueryBlock) -> Tensor:
        return block.weights.topk(min(3, block.weights.shape[-1])).values.sum(-1)


def request_of(
    seed: int,
    dtype: torch.dtype,
    mask_name: str,
    sizes: tuple[int, ...],
    *,
    offset: int | None,
    softcap: float | None,
    biased: bool,
    sunk: bool,
) -> RowStatsRequest:
    batch, groups, share, length, keys, width, value_width = sizes
    g = torch.Generator().manual_seed(seed)
    heads = groups * share

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=dtype)

    before = keys - length if offset is None else offset
    lengths = torch.randint(0, keys + 1, (batch,), generator=g)
    mask: IntervalMask | Tensor | None = {
        "all": None,
        "causal": causal(before),
        "window": causal(before) & window(left=5).after(before),
        "padding": padding(lengths) & causal(before),
        "left": padding(valid=torch.arange(keys)[None] >= lengths[:, None]),
        "dense": torch.rand(batch, 1, length, keys, generator=g) > 0.4,
    }[mask_name]
    call = AttentionCall.lower(
        *(
            normal(*shape)
            for shape in (
                (batch, heads, length, width),
                (batch, groups, keys, width),
                (batch, groups, keys, value_width),
            )
        ),
        mask=mask,
        scale=0.7,
        bias=normal(1, heads, length, keys) if biased else None,
        softcap=softcap,
        sinks=normal(heads) if sunk else None,
        dropout=0.0,
    )
    ids = torch.randint(0, 5, (batch, keys), generator=g)
    rows = torch.arange(length).clamp(max=keys - 1) + (offset or 0)
    context = TokenContext(
        torch.rand(batch, length, generator=g) > 0.2,
        torch.ones(batch, keys, dtype=torch.bool),
        torch.zeros(batch, dtype=torch.int64),
        ids[:, rows.clamp(0, keys - 1)],
        ids,
        torch.cat([torch.full((batch, 1), -1), ids[:, :-1]], 1),
        None,
        offset,
    )
    columns = torch.cat([normal(batch, heads, keys, 1).abs(), normal(batch, heads, keys, 3)], -1)
    places = torch.stack(
        [torch.randint(-1, keys + 1, (batch, length), generator=g) for _ in range(3)], 1
    )
    pairs = [] if offset is None else [Duplicate(), Induction()]
    number = torch.arange(length) + (offset or 0)
    reaches = (
        offset is not None
        and mask_name in ("causal", "window", "padding")
        and bool((number < keys).all())
    )
    return RowStatsRequest(call, context, columns, places, pairs, reaches, None, (), [], True)


def bound_of(a: RowStatsRequest) -> dict[str, float]:
    return (
        {"rtol": 2e-5, "atol": 2e-5}
        if a.call.q.dtype == torch.float32
        else {"rtol": 1e-12, "atol": 1e-12}
    )


def same(a: RowStatsRequest) -> None:
    bound = bound_of(a)
    blocks, kernels = sum_by_blocks(a), sum_by_kernels(a)
    may = a.call.allowed()
    if may is None:
        may = torch.ones(1, 1, a.call.q.shape[2], a.call.k.shape[2], dtype=torch.bool)
    for name in ("out", "weight", "entropy", "largest", "distance", "sums", "received"):
        x, y = getattr(kernels, name), getattr(blocks, name)
        assert (x is None) == (y is None), name
        if x is not None:
            torch.testing.assert_close(
                x, y, **bound, msg=lambda words, name=name: f"{name}: {words}"
            )
    # of a place that the row may not read the two say different things, and nobody asks
    place, keys = a.places, a.call.k.shape[2]
    there = (place >= 0) & (place < keys)
    may = (
        may.expand(len(place), -1, -1, -1)[:, 0]
        .gather(2, place.clamp(0, keys - 1).transpose(1, 2))
        .transpose(1, 2)
        & there
    )
    x, y = (p.picked.transpose(0, 1) * may[:, :, None] for p in (kernels, blocks))
    torch.testing.assert_close(x, y, **bound)
    assert kernels.matching.keys() == blocks.matching.keys() == {s.name for s in a.matching}
    for name, mass in blocks.matching.items():
        assert torch.equal(
            kernels.matching[name].exists.expand_as(mass.weight), mass.exists.expand_as(mass.weight)
        ), name
        for kind in ("weight", "contribution", "even"):
            torch.testing.assert_close(
                getattr(kernels.matching[name], kind), getattr(mass, kind), **bound
            )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(MASKS),
    st.tuples(
        st.integers(1, 2),
        st.integers(1, 2),
        st.integers(1, 3),
        st.integers(1, 80),
        st.integers(1, 150),
        st.integers(1, 20),
        st.integers(1, 20),
    ),
    st.sampled_from([None, 0, 3, 70]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.booleans(),
)
def test_kernels_and_blocks_say_the_same(
    seed: int,
    mask: str,
    sizes: tuple[int, ...],
    offset: int | None,
    softcap: float | None,
    biased: bool,
    sunk: bool,
) -> None:
    same(
        request_of(
            seed,
            torch.float32,
            mask,
            sizes,
            offset=offset,
            softcap=softcap,
            biased=biased,
            sunk=sunk,
        )
    )


@pytest.mark.parametrize("mask", MASKS)
def test_in_double_precision(mask: str) -> None:
    same(
        request_of(
            7,
            torch.float64,
            mask,
            (2, 2, 2, 70, 100, 12, 9),
            offset=30,
            softcap=2.0,
            biased=True,
            sunk=True,
        )
    )


def test_where_the_largest_weight_lies() -> None:
    from multihead import attention
    from multihead.ops.backends.kernels.stats import LARGEST, LARGEST_AT

    a = request_of(
        5,
        torch.float32,
        "causal",
        (2, 2, 2, 90, 90, 12, 9),
        offset=0,
        softcap=None,
        biased=True,
        sunk=True,
    )
    call = a.call
    _, lse, stats, _ = cpu.attend_with_statistics(
        call, a.columns, a.places, 0, None, a.context.query_valid
    )
    _, want, weights = attention(
        *call[:3],
        causal(),
        bias=call.bias,
        sinks=call.sinks,
        scale=call.scale,
        return_lse=True,
        return_weights=True,
    )
    torch.testing.assert_close(stats[LARGEST], weights.amax(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(stats[LARGEST_AT].long(), weights.argmax(-1))


@pytest.mark.parametrize("mask", MASKS)
def test_one_thread_and_two_give_the_same_bits(mask: str) -> None:
    a = request_of(
        3,
        torch.float32,
        mask,
        (2, 2, 3, 150, 150, 16, 16),
        offset=0,
        softcap=None,
        biased=False,
        sunk=False,
    )
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(sum_by_kernels(a))
    finally:
        torch.set_num_threads(before)
    for x, y in zip(found[0], found[1], strict=True):
        assert not isinstance(x, Tensor) or torch.equal(x, y)  # type: ignore[arg-type]


def shown(a: RowStatsRequest, by: Callable[[RowStatsRequest], RowSums]) -> list[Tensor | None]:
    """What all that wants to see weights was shown: every block, some rows, a map, and the three
    largest of each row.
    """
    (batch, heads, length), keys = a.call.q.shape[:3], a.call.k.shape[2]
    whole, may = (
        torch.zeros(batch, heads, length, keys).to(a.call.q),
        torch.zeros(batch, heads, length, keys, dtype=torch.bool),
    )
    seen: list[slice] = []

    def watch(block: QueryBlock) -> None:
        seen.append(block.rows)
        whole[:, :, block.rows, block.keys] = block.weights
        may[:, :, block.rows, block.keys] = True if block.allowed is None else block.allowed

    g = torch.Generator().manual_seed(length)
    document, row = (
        torch.randint(0, batch, (7,), generator=g),
        torch.randint(0, length, (7,), generator=g),
    )
    sample = Sample(document, row, torch.zeros(7, heads, keys).to(a.call.q))
    capture = Capture(
        sorted({heads - 1, 0}, reverse=True),
        sorted({0, length - 1, length // 2}),
        keys=keys // 2 + 1,
    )
    every = Capture([heads // 2], None, None)
    found = by(a._replace(capture=capture, watches=(watch, sample), statistics=[Most()]))
    by(a._replace(capture=every))
    assert [rows.start for rows in seen] == [0, *(rows.stop for rows in seen[:-1])] and seen[
        -1
    ].stop == length
    torch.testing.assert_close(sample.into, whole[document, :, row])
    torch.testing.assert_close(torch.cat(every.weights, 2)[:, 0], whole[:, heads // 2])
    return [
        whole,
        may,
        *found.statistics,
        *(torch.cat(x, 2) for x in (capture.weights, capture.contributions)),
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(MASKS),
    st.tuples(
        st.integers(1, 2),
        st.integers(1, 2),
        st.integers(1, 3),
        st.integers(1, 80),
        st.integers(1, 150),
        st.integers(1, 20),
        st.integers(1, 20),
    ),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_both_show_the_same_weights(
    seed: int,
    mask: str,
    sizes: tuple[int, ...],
    softcap: float | None,
    biased: bool,
    sunk: bool,
    dtype: torch.dtype,
) -> None:
    a = request_of(seed, dtype, mask, sizes, offset=0, softcap=softcap, biased=biased, sunk=sunk)
    for x, y in zip(shown(a, sum_by_kernels), shown(a, sum_by_blocks), strict=True):
        torch.testing.assert_close(x, y, **bound_of(a))


def test_slopes_are_their_dense_bias() -> None:
    a = request_of(
        1,
        torch.float32,
        "padding",
        (2, 2, 2, 70, 150, 12, 9),
        offset=80,
        softcap=None,
        biased=False,
        sunk=True,
    )
    slopes = AlibiBias(
        torch.tensor([0.5, 0.25, 0.1, 0.01]), torch.arange(80, 150), torch.arange(150).expand(2, -1)
    )
    positions = (slopes.query_positions, slopes.key_positions)
    sloped = a._replace(
        call=a.call._replace(slopes=slopes.slopes, query_pos=positions[0], key_pos=positions[1])
    )
    same(sloped)
    thick = a._replace(call=a.call._replace(bias=slopes.dense()))
    torch.testing.assert_close(
        sum_by_kernels(sloped).sums, sum_by_kernels(thick).sums, rtol=1e-5, atol=1e-5
    )
    for x, y in zip(shown(sloped, sum_by_kernels), shown(thick, sum_by_blocks), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "low"), [(torch.float32, -88.7), (torch.float64, -1000.0)])
def test_scores_far_below_zero(dtype: torch.dtype, low: float) -> None:
    """Rows of one tile whose keys lie in different blocks: of those that a row may not read nothing
    reaches its sums.
    """
    a = request_of(
        1,
        dtype,
        "all",
        (1, 1, 1, 64, 300, 4, 4),
        offset=None,
        softcap=None,
        biased=False,
        sunk=False,
    )
    start = torch.arange(0, 256, 4)[None]
    a = a._replace(
        call=a.call._replace(
            start=start, stop=start + 4, bias=torch.full((1, 1, 1, 1), low).to(a.call.q)
        )
    )
    same(a)
    for x, y in zip(shown(a, sum_by_kernels), shown(a, sum_by_blocks), strict=True):
        torch.testing.assert_close(x, y, **bound_of(a))


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(request: RowStatsRequest) -> RowSums:
        raise AssertionError("went through blocks")

    monkeypatch.setattr(cpu, "ENOUGH", 0)
    monkeypatch.setattr(row_stats, "sum_by_blocks", none)


def test_a_reading_with_all_that_sees_weights(
    kernels_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = {"input_ids": IDS, "attention_mask": torch.arange(12) < torch.tensor([[12], [7]])}
    own = ["nearest", Most()]
    table = multihead.read(llama(), [batch], probe=False, statistics=own)
    monkeypatch.undo()
    want = multihead.read(llama(), [batch], probe=False, statistics=own)
    assert table.pairs is not None and want.pairs is not None and want.pairs.sum.any()
    np.testing.assert_allclose(table.pairs.sum, want.pairs.sum, atol=1e-5)
    np.testing.assert_array_equal(table.pairs.rows, want.pairs.rows)
    assert "most" in table.columns and table.columns == want.columns
    for column in table.columns:
        np.testing.assert_allclose(
            table.value(column), want.value(column), rtol=1e-4, atol=1e-5, err_msg=column
        )
