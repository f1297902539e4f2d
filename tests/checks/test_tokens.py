"""Order, batch and sums of weights, tested from outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import multihead
from checks.samples import Separate, facts_of
from multihead.checks import NotApplicable
from multihead.checks.finding import NotJudged
from multihead.checks.tokens import (
    find_dependent_queries,
    find_mixed_batch,
    find_order_dependence,
    find_wrong_sums,
)


def test_a_softmax_over_queries_is_found_without_projections_too() -> None:
    class Low(nn.Module):
        def __init__(self, axis: int) -> None:
            super().__init__()
            self.down, self.up, self.axis = nn.Linear(24, 8), nn.Linear(8, 24), axis

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(self.down(x))
            return (y @ y.mT / 10).softmax(self.axis) @ x

    assert multihead.check(Low(-1)).verdict == "partly judged"
    report = multihead.check(Low(-2))
    assert report.bugs == {"weights don't sum to one"} and "among 100 copies" in str(report)


def test_a_wrapper_of_torchs_layer_that_forgot_batch_first() -> None:
    class Wrapper(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    report = multihead.check(Wrapper(False))
    assert report.bugs == {"batch elements influence each other"} and "batch_first" in str(report)
    assert multihead.check(Wrapper(True)).ok


@torch.no_grad()
def test_each_property_holds_for_a_correct_layer_and_names_a_wrong_one() -> None:
    class Mixing(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + x.mean(0, keepdim=True))

    right, mixed = facts_of(Separate()), facts_of(Separate(mixed=True))
    for find in (find_mixed_batch, find_order_dependence, find_wrong_sums):
        assert not find(right)
    (finding,) = find_mixed_batch(facts_of(Mixing()))
    assert finding.bug == "batch elements influence each other" and "[2, 1, 24]" in finding.example
    (finding,) = find_order_dependence(mixed)
    assert finding.bug == "tokens and heads mixed"
    (finding,) = find_wrong_sums(mixed) or [None]
    assert finding is None or finding.bug == "weights don't sum to one"
    with pytest.raises(NotApplicable, match="come from one input"):
        find_dependent_queries(right)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_positions_that_have_no_effect(used: bool, causal: bool) -> None:
    class Biased(Separate):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.1, 0.05]))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            at = torch.arange(x.shape[1])
            q, k, v = (
                f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
            )
            s = q @ k.mT / 6**0.5
            if used:
                s = s - self.slopes[:, None, None] * (at[:, None] - at).abs()
            s = s.masked_fill(at > at[:, None], -torch.inf) if causal else s
            return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

    facts = facts_of(Biased())
    if used:
        with pytest.raises(NotApplicable, match="it uses positions"):
            find_order_dependence(facts)
    else:
        (finding,) = find_order_dependence(facts)
        assert finding.bug == "positions have no effect" and "(slopes)" in finding.message


class Turned(Separate):
    """Queries and keys turned by angles of their positions, or of one position for all."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        if at == "kept":
            self.cos = torch.ones(99, 3)  # a tensor that is no buffer

    def turn(self, x: Tensor, at: Tensor) -> Tensor:
        angle = torch.outer(at, 10.0 ** -torch.arange(3, dtype=torch.float64))
        turned = torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous())
        return torch.view_as_real(turned * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (f(x).unflatten(-1, (4, 6)).transpose(1, 2) for f in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1], dtype=torch.float64)
        if self.at == "input":
            q = x.flatten(0, 1)[:1, :6].cos() * q
        elif self.at not in ("kept", "ids"):
            at = at if self.at == "own" else torch.full_like(at, 3.0)
            q, k = self.turn(q, at), self.turn(k, at)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_angles_that_cancel() -> None:
    for at, words in (("one", "cosines of [5, 3]"), ("kept", "(cos)")):
        (finding,) = find_order_dependence(facts_of(Turned(at)))
        assert finding.bug == "positions have no effect" and words in finding.message
    with pytest.raises(NotJudged, match="position_ids"):
        find_order_dependence(facts_of(Turned("ids")))
    with pytest.raises(NotApplicable):
        find_order_dependence(facts_of(Turned("own")))


@torch.no_grad()
def test_queries_that_change_each_other() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / key.shape[-1] ** 0.5).softmax(-2) @ value

    (finding,) = find_dependent_queries(facts_of(attention))
    assert finding.bug == "softmax over the wrong axis"


class Neighbours(Separate):
    """Values that reach their neighbours before the weights, or next to them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.taps = nn.Conv1d(24, 24, 3, groups=24, padding=1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        near = self.taps(v.mT).mT
        v = near if self.kind == "convolved" else v
        q, k, v = (t.unflatten(-1, (4, 6)).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = y.transpose(1, 2).flatten(2)
        return self.o(y + near if self.kind == "added" else y)


class Shifted(Separate):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward((x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]) / 2, mask)


@pytest.mark.parametrize("target", [Neighbours("convolved"), Neighbours("added"), Shifted()])
def test_tokens_that_reach_their_neighbours_arent_a_bug(target: nn.Module) -> None:
    report = multihead.check(target)
    assert not report.findings, str(report)
    assert "token order" in report.skipped and "neighbours" in report.skipped["token order"]


def rectify(s: Tensor, mix: nn.Module) -> Tensor:
    return s.relu() / 16


def mix_heads(s: Tensor, mix: nn.Module) -> Tensor:
    return mix(s.softmax(-1))


class Purpose(Separate):
    """Weights that don't sum to one on purpose, or values that have positions."""

    def __init__(self) -> None:
        super().__init__()
        self.mix: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (f(x).unflatten(-1, (4, 6)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.attend(q @ k.mT / 6**0.5) @ v
        return self.o(y.transpose(1, 2).flatten(2))

    def attend(self, s: Tensor) -> Tensor:
        return rectify(s, self.mix)


class Mixed(Purpose):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 1)

    def attend(self, s: Tensor) -> Tensor:
        return mix_heads(s, self.mix)


class Placed(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.pos_v = nn.Parameter(torch.randn(64, 24))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + self.o(self.pos_v[: x.shape[1]])


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Purpose(), "place of the softmax"),
        (Mixed(), "heads are mixed|something else"),
        (Placed(), "values"),
    ],
)
@torch.no_grad()
def test_weights_that_dont_sum_to_one_on_purpose(target: nn.Module, words: str) -> None:
    with pytest.raises(NotApplicable, match=words):
        find_wrong_sums(facts_of(target))


class Windowed(Separate):
    """Causal, of eight tokens: wider than the sequences that are tried first."""

    sliding_window = 8

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        i = torch.arange(x.shape[1])
        distance = i[:, None] - i
        return super().forward(x, (distance >= 0) & (distance < self.sliding_window))


@torch.no_grad()
def test_a_wide_window_sums_to_one() -> None:
    assert not find_wrong_sums(facts_of(Windowed()))


def test_an_input_for_values_that_isnt_read() -> None:
    class FromKeys(Crossing):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return super().forward(query, key, key)

    assert not find_dependent_queries(facts_of(Crossing()))
    with pytest.raises(NotJudged, match="input for values has no influence"):
        find_dependent_queries(facts_of(FromKeys()))


class Crossing(Separate):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        pairs = ((self.q, query), (self.k, key), (self.v, value))
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f, x in pairs)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))
