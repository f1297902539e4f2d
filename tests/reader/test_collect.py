"""The output of an attention call and its statistics, against stored weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multihead.masks import causal, padding, window
from multihead.ops.call import AttentionCall
from multihead.reader.collect import FUSED, AllowedKeys, collect_row_stats, value_norms
from multihead.reader.context import QueryBlock, TokenContext
from multihead.reader.statistics import resolve_statistics
from multihead.reader.statistics.columns import STATISTICS
from user_statistics import statistic

BATCH, HEADS, GROUPS, LENGTH, KEYS, WIDTH = 2, 4, 2, 7, 9, 5
MASKS = ("all", "causal", "window", "padding", "dense", "dense by head")


def call_of(mask: str) -> AttentionCall:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    before = KEYS - LENGTH
    chosen = {
        "all": None,
        "causal": causal(before),
        "window": causal(before) & window(left=2).after(before),
        "padding": padding(torch.tensor([9, 4])) & causal(before),
        "dense": torch.rand(BATCH, 1, LENGTH, KEYS, generator=g) > 0.6,
        "dense by head": torch.rand(1, HEADS, LENGTH, KEYS, generator=g) > 0.6,
    }[mask]
    return AttentionCall.lower(
        normal(BATCH, HEADS, LENGTH, WIDTH),
        normal(BATCH, GROUPS, KEYS, WIDTH),
        normal(BATCH, GROUPS, KEYS, WIDTH),
        chosen,
    )


def allowed_of(call: AttentionCall) -> Tensor:
    allowed = call.allowed()
    if allowed is None:
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return allowed.expand(BATCH, HEADS, LENGTH, KEYS)


def weights_of(call: AttentionCall) -> Tensor:
    k = call.k.repeat_interleave(HEADS // GROUPS, 1)
    scores = (call.q @ k.mT * call.scale).masked_fill(~allowed_of(call), -torch.inf)
    return scores.softmax(-1).nan_to_num(0)  # a query without keys: 0


def context_of() -> TokenContext:
    ids = torch.tensor([[5, 6, 5, 7, 6, 5, 6, 7, 7], [1, 1, 2, 1, 3, 2, 1, 3, 1]])
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    valid[1, -2:] = False
    return TokenContext(
        valid,
        torch.ones(BATCH, KEYS, dtype=torch.bool),
        torch.tensor([0, 1]),
        ids[:, KEYS - LENGTH :],
        ids,
        torch.nn.functional.pad(ids[:, :-1], (1, 0), value=-1),
        ids == 6,
        KEYS - LENGTH,
    )


def factors_of() -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(HEADS, WIDTH, WIDTH, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("mask", MASKS)
def test_allowed_keys_are_those_of_the_dense_mask(mask: str) -> None:
    call, context = call_of(mask), context_of()
    allowed = allowed_of(call)
    columns = torch.rand(BATCH, HEADS, KEYS, 3, generator=torch.Generator().manual_seed(2)).double()
    keys = AllowedKeys(call, columns)

    def same(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found.expand_as(wanted), wanted)

    same(keys.count, allowed.sum(-1))
    same(keys.total(), torch.einsum("bhlk,bhkc->cbhl", allowed.double(), columns))
    same(
        keys.count_readers(context.query_valid),
        (allowed & context.query_valid[:, None, :, None]).sum(2),
    )
    assert context.special is not None
    same(keys.any(context.special), (allowed & context.special[:, None, None]).any(-1))
    position = torch.arange(KEYS)
    same(keys.latest(), torch.where(allowed, position, -1).amax(-1))
    which = torch.tensor([[-1, 0, 3, 8, 9, 2, 5], [4, 4, 4, -3, 20, 0, 8]])
    inside = (which[..., None] == position)[:, None]
    same(keys.allows(which), (allowed & inside).any(-1))


@pytest.mark.parametrize("mask", MASKS)
def test_every_statistic_of_the_weights_is_that_of_stored_weights(mask: str) -> None:
    call, context, factors = call_of(mask), context_of(), factors_of()
    weights, allowed = weights_of(call), allowed_of(call)
    total = statistic("total", rows=lambda block: block.weights.square().sum(-1))
    value = statistic("value", key_values=lambda context: context.key_ids.double())
    out, rows = collect_row_stats(call, context, factors, [*resolve_statistics(), total, value])
    v = call.v.repeat_interleave(HEADS // GROUPS, 1)
    torch.testing.assert_close(out, weights @ v)
    norms = (v @ factors).norm(dim=-1)  # [B, H, S]
    torch.testing.assert_close(value_norms(call.v, factors, HEADS), norms)
    contributions = weights * norms[:, :, None]
    uniform = allowed / allowed.sum(-1, keepdim=True).clamp(min=1) * norms[:, :, None]
    torch.testing.assert_close(rows.contribution, contributions.sum(-1))
    torch.testing.assert_close(rows.even, uniform.sum(-1))
    torch.testing.assert_close(
        rows.received, (weights * context.query_valid[:, None, :, None]).sum(2)
    )
    assert context.query_ids is not None and context.key_ids is not None
    assert context.previous_ids is not None and context.special is not None
    position, query = torch.arange(KEYS), torch.arange(LENGTH)[:, None] + KEYS - LENGTH
    earlier = position < query
    members = {
        "previous": (position == query - 1).expand(BATCH, -1, -1),
        "self": (position == query).expand(BATCH, -1, -1),
        "next": (position == query + 1).expand(BATCH, -1, -1),
        "first": (position == context.first_key[:, None])[:, None].expand(-1, LENGTH, -1),
        "special": context.special[:, None].expand(-1, LENGTH, -1),
        "duplicate": earlier & (context.key_ids[:, None] == context.query_ids[..., None]),
        "induction": earlier & (context.previous_ids[:, None] == context.query_ids[..., None]),
    }
    assert members.keys() == rows.masses.keys()
    for name, member in members.items():
        readable, mass = member[:, None] & allowed, rows.masses[name]
        wanted = {
            "exists": readable.any(-1),
            "weight": (weights * readable).sum(-1),
            "contribution": (contributions * readable).sum(-1),
            "even": (uniform * readable).sum(-1),
        }
        for part, x in wanted.items():
            found = getattr(mass, part).expand_as(x)
            torch.testing.assert_close(found, x, msg=lambda m, p=part, n=name: f"{n} {p}: {m}")
    block = QueryBlock(weights, slice(0, LENGTH), slice(0, KEYS), allowed, context)
    for name in FUSED:
        values, exists = rows.means[name]
        wanted = STATISTICS[name].rows(block)
        torch.testing.assert_close(
            torch.where(exists, values, 0), torch.where(exists, wanted, 0), msg=name
        )
    torch.testing.assert_close(rows.means["total"].values, weights.square().sum(-1))
    by_id = (weights * context.key_ids.double()[:, None, None]).sum(-1)
    torch.testing.assert_close(rows.means["value"].values, by_id)


def test_only_what_is_asked_for_is_measured() -> None:
    _, rows = collect_row_stats(call_of("causal"), context_of(), factors_of())
    assert not rows.masses and not rows.means


def test_a_graph_and_dropout_leave_the_output_to_the_operator() -> None:
    call, context, factors = call_of("causal"), context_of(), factors_of()
    plain, _ = collect_row_stats(call, context, factors)
    call.q.requires_grad_(True)
    tracked, _ = collect_row_stats(call, context, factors)
    assert tracked.requires_grad and not plain.requires_grad
    torch.testing.assert_close(tracked.detach(), plain)
    calls = []
    other = collect_row_stats(
        call, context, factors, compute=lambda c: calls.append(c) or plain.clone()
    )
    torch.testing.assert_close(other[0], plain)
    assert len(calls) == 1, "another tap sees the call"
