"""Packed sequences by ids, cumulative lengths and positions: as a loop over the sequences, and as
nested tensors; what flash-attn and transformers mean by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import MultiHeadAttention, attention
from multihead.layers import Rotary
from multihead.masks import IntervalMask, causal, documents, padding, prefix, window

MASKS: dict[str, IntervalMask | None] = {
    "all": None,
    "causal": causal(),
    "window": window(2, 1),
    "both": causal() & window(left=1),
    "offset": causal(offset=1),
}
LENGTHS = st.lists(st.integers(0, 4), max_size=5)


def cumulative(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def packed(total: int, heads: int) -> Tensor:
    return torch.randn(1, heads, total, 4, dtype=torch.float64, requires_grad=True)


def loop(inputs: list[Tensor], cu_q: list[int], cu_k: list[int], mask: IntervalMask | None) -> Any:
    """Each sequence alone, by flash-attn's rule: the last query is at the last key."""
    outs = []
    for i in range(len(cu_q) - 1):
        q = inputs[0][:, :, cu_q[i] : cu_q[i + 1]]
        k, v = (x[:, :, cu_k[i] : cu_k[i + 1]] for x in inputs[1:])
        length, keys = q.shape[2], k.shape[2]
        query, key = torch.arange(length)[:, None] + keys - length, torch.arange(keys)
        allowed = torch.ones(length, keys, dtype=torch.bool)
        if mask is not None and mask.low is not None:
            allowed &= key >= query + mask.low
        if mask is not None and mask.high is not None:
            allowed &= key < query + mask.high
        outs.append(attention(q, k, v, allowed))
    return torch.cat([inputs[0][:, :, :0], *outs], 2)


def equal(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(got, want)
    direction = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad((got * direction).sum(), inputs),
        torch.autograd.grad(
            (want * direction).sum(), inputs, materialize_grads=True, retain_graph=True
        ),
    ):
        torch.testing.assert_close(a, b)


@given(lengths=LENGTHS, name=st.sampled_from(sorted(MASKS)), inside=st.booleans())
@example([0, 0, 3, 0, 2, 0], "causal", True)
@example([], "all", False)
@settings(max_examples=40, deadline=None)
def test_self_attention_as_a_loop(lengths: list[int], name: str, inside: bool) -> None:
    cu, mask = cumulative(lengths), MASKS[name]
    inputs = [packed(cu[-1], heads) for heads in (4, 2, 2)]
    want = loop(inputs, cu, cu, mask)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    at = [i for n in lengths for i in range(n)]
    if inside:  # the mask of distances in it, or joined with it: the same for equal lengths
        rule = documents.from_cu_seqlens(torch.tensor(cu, dtype=torch.int32), mask=mask)
    else:
        rule = documents.from_cu_seqlens(cu, list(cu)) & (mask or IntervalMask())
    equal(attention(*inputs, rule), want, inputs)
    assert torch.equal(rule.dense(cu[-1], cu[-1]), (documents(ids) & (mask or IntervalMask())).dense(cu[-1], cu[-1]))  # fmt: skip
    by_position = documents.from_position_ids(at) & (mask or IntervalMask())
    equal(attention(*inputs, by_position), want, inputs)
    if lengths:
        split = [
            torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1), torch.tensor(cu))
            for x in inputs
        ]
        nested = attention(*(x.transpose(1, 2) for x in split), mask).transpose(1, 2).values()
        equal(nested.transpose(0, 1)[None], want, inputs)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=5),
    name=st.sampled_from(sorted(MASKS)),
)
@example([(3, 1), (0, 2), (2, 0), (1, 4)], "causal")
@settings(max_examples=40, deadline=None)
def test_other_lengths_of_keys_as_a_loop(pairs: list[tuple[int, int]], name: str) -> None:
    cu_q, cu_k = (cumulative([pair[side] for pair in pairs]) for side in (0, 1))
    inputs = [packed(cu_q[-1], 4), packed(cu_k[-1], 2), packed(cu_k[-1], 2)]
    rule = documents.from_cu_seqlens(cu_q, torch.tensor(cu_k).int(), mask=MASKS[name])
    equal(attention(*inputs, rule), loop(inputs, cu_q, cu_k, MASKS[name]), inputs)
    if len(pairs) > 0 and name == "all":
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1), torch.tensor(cu))
            for x, cu in zip(inputs, (cu_q, cu_k, cu_k))
        )
        nested = attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        equal(nested.values().transpose(0, 1)[None], attention(*inputs, rule), inputs)


def test_later_queries() -> None:
    """`after`, as documents(ids) does it: queries at later positions of the packed sequence."""
    rule, ids = documents.from_cu_seqlens([0, 3, 3, 5]), documents([0, 0, 0, 1, 1])
    for offset in (1, 3, torch.tensor([0, 3]), -1):
        assert torch.equal(rule.after(offset).dense(2, 5), ids.after(offset).dense(2, 5))
    both = rule & padding([4, 5]) & prefix(2)
    assert torch.equal(both.dense(5, 5), (ids & padding([4, 5]) & prefix(2)).dense(5, 5))


def test_as_transformers_packs_them() -> None:
    from transformers import DataCollatorWithFlattening
    from transformers.masking_utils import find_packed_sequence_indices

    texts = [{"input_ids": list(range(n))} for n in (3, 1, 4)]
    for first in (0, 2):
        collate = DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=first
        )
        batch = collate(texts)
        rules = (
            documents.from_position_ids(batch["position_ids"]),
            documents.from_cu_seqlens(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"]),
            documents(batch["seq_idx"]),
        )
        theirs = find_packed_sequence_indices(batch["position_ids"])
        same = (theirs[:, None, :, None] == theirs[:, None, None, :]) & causal().dense(8, 8)
        for rule in rules:
            assert torch.equal((rule & causal()).dense(8, 8), same)
    rows = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    assert torch.equal(
        documents.from_position_ids(rows).dense(4, 4),
        documents([[0, 0, 0, 1], [0, 1, 1, 1]]).dense(4, 4),
    )


def test_layers_take_packed_sequences() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 2, positions=Rotary(6))
    lengths, parts = [3, 0, 5], [torch.randn(1, n, 12) for n in (3, 0, 5)]
    rule = documents.from_cu_seqlens(cumulative(lengths)) & causal()
    x = torch.cat(parts, 1)
    want = torch.cat([layer(part, mask=causal()) for part in parts], 1)
    at = torch.cat([torch.arange(n) for n in lengths])
    torch.testing.assert_close(layer(x, mask=rule, position_ids=at), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer(x, mask=rule), want, atol=1e-5, rtol=1e-4)  # distances alone
    plain = MultiHeadAttention(12, 2)
    keys = [torch.randn(1, n, 12) for n in (2, 3, 1)]
    rule = documents.from_cu_seqlens(cumulative(lengths), [0, 2, 5, 6])
    want = torch.cat([plain(a, b) for a, b in zip(parts, keys)], 1)
    torch.testing.assert_close(plain(x, torch.cat(keys, 1), mask=rule), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["self", "cross", "positions"])
def test_compiles_as_one_graph_for_any_lengths(kind: str) -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        if kind == "self":
            mask = documents.from_cu_seqlens(cu_q) & causal()
        elif kind == "cross":
            mask = documents.from_cu_seqlens(cu_q, cu_k, mask=causal())
        else:
            mask = documents.from_position_ids(cu_q) & causal()
        return attention(q, k, k, mask)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    q = torch.randn(1, 2, 6, 4)
    k = torch.randn(1, 2, 8, 4) if kind == "cross" else q
    cases = [([0, 2, 6], [0, 5, 8]), ([0, 0, 6], [0, 7, 8])]
    if kind == "positions":
        cases = [([0, 1, 0, 1, 2, 3], [0]), ([0, 1, 2, 0, 0, 1], [0])]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for case in cases:
            cu_q, cu_k = map(torch.tensor, case)
            torch.testing.assert_close(compiled(q, k, cu_q, cu_k), attend(q, k, cu_q, cu_k))
    if kind == "cross":
        with pytest.raises(RuntimeError, match="decreases"):
            compiled(q, k, torch.tensor([0, 7, 6]), cu_k)
        with pytest.raises(RuntimeError, match="cu_seqlens_k doesn't end"):
            compiled(q, k, cu_q, torch.tensor([0, 7, 9]))


Q, K = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 8, 4)
CROSS = ([0, 2, 6], [0, 5, 8])
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "start": (lambda: documents.from_cu_seqlens([1, 6]), ValueError, ["cu_seqlens=[1, 6]", "start at 0"]),
    "decreases": (
        lambda: documents.from_cu_seqlens([0, 6], torch.tensor([0, -2])),
        ValueError, ["cu_seqlens_k=[0, -2] decreases", "cumsum"],
    ),
    "lengths": (
        lambda: documents.from_cu_seqlens([0, 3, 2, *range(4, 20)]),
        ValueError, ["[0, 3, 2, 4, 5, 6, 7, 8, ...] decreases"],
    ),
    "empty": (lambda: documents.from_cu_seqlens([]), ValueError, ["cu_seqlens is empty", "[B + 1]"]),
    "floats": (
        lambda: documents.from_cu_seqlens(torch.tensor([0.0, float("nan")])),
        TypeError, ["cu_seqlens is torch.float32 [2]", "integers"],
    ),
    "axes": (lambda: documents.from_cu_seqlens([[0, 6]]), TypeError, ["[1, 2]", "[B + 1]"]),
    "nothing": (lambda: documents.from_cu_seqlens(None), TypeError, ["cu_seqlens is a NoneType"]),
    "numbers": (
        lambda: documents.from_cu_seqlens([0, 6], [0, 2, 8]),
        ValueError, ["cu_seqlens has 1 sequences and cu_seqlens_k has 2"],
    ),
    "queries": (
        lambda: attention(Q, K, K, documents.from_cu_seqlens([0, 2, 5], CROSS[1])),
        ValueError, ["cu_seqlens=[0, 2, 5] ends at 5", "6 queries, L"],
    ),
    "keys": (
        lambda: attention(Q, K, K, documents.from_cu_seqlens(CROSS[0], [0, 5, 9])),
        ValueError, ["cu_seqlens_k=[0, 5, 9] ends at 9", "8 keys, S"],
    ),
    "keys of self": (
        lambda: attention(Q, Q, Q, documents.from_cu_seqlens([0, 7])),
        ValueError, ["cu_seqlens=[0, 7] ends at 7", "6 keys, S"],
    ),
    "queries of self": (
        lambda: attention(K, Q, Q, documents.from_cu_seqlens([0, 6])),
        ValueError, ["cu_seqlens=[0, 6] ends at 6", "8 queries, L"],
    ),
    "joined": (
        lambda: documents.from_cu_seqlens(*CROSS) & causal(),
        ValueError, ["cu_seqlens_k differs", "mask=causal()"],
    ),
    "joined first": (
        lambda: prefix(2) & documents.from_cu_seqlens(*CROSS, mask=causal()),
        ValueError, ["cu_seqlens_k differs", "prefix(...)"],
    ),
    "later": (
        lambda: documents.from_cu_seqlens(*CROSS, mask=causal()) & window(1).after(torch.tensor([1])),
        ValueError, ["cu_seqlens_k differs"],
    ),
    "mask": (lambda: documents.from_cu_seqlens([0, 6], mask=True), TypeError, ["mask is a bool", "causal()"]),
    "rules": (
        lambda: documents.from_cu_seqlens([0, 6], mask=padding([3])),
        ValueError, ["single keys", "from_cu_seqlens(...) & mask"],
    ),
    "positions": (
        lambda: documents.from_position_ids(torch.zeros(3)), TypeError, ["position_ids is torch.float32"],
    ),
    "positions of axes": (
        lambda: documents.from_position_ids(torch.zeros(3, 1, 4).long()), TypeError, ["[3, 1, 4]", "[S] or"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_words_of_errors(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=".*".join(map(re.escape, words))):
        call()


def test_masks_of_keys_join() -> None:
    rule = documents.from_cu_seqlens(*CROSS, mask=causal()) & padding([7])
    assert not rule.dense(6, 8)[..., 7].any() and rule.dense(6, 8)[..., 6].any()
    assert "from_cu_seqlens" in repr(documents)
