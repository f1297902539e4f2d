"""Influence, mask forms and the order of axes are found by trying."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from checks.samples import Separate, facts_of
from multihead.checks.callee import CallSpec
from multihead.checks.probing import measure_influence
from multihead.checks.signature import CannotCall

TRIANGLE = torch.ones(5, 5).tril().bool()


@torch.no_grad()
def test_influence_is_that_of_the_mask() -> None:
    full = measure_influence(facts_of(Separate()).callee, 5)
    causal = measure_influence(facts_of(Separate(causal=True)).callee, 5)
    assert (full > 1e-6).all()
    assert torch.equal(causal > 1e-9, TRIANGLE)
    masked = measure_influence(facts_of(Separate()).callee, 5, CallSpec(allowed=TRIANGLE))
    torch.testing.assert_close(masked > 1e-9, TRIANGLE)


@pytest.mark.parametrize(
    ("encoding", "apply"),
    [
        ("True is hidden", lambda s, m: s.masked_fill(m, -torch.inf)),
        ("True may read", lambda s, m: s.masked_fill(~m, -torch.inf)),
        ("-inf added", lambda s, m: s + m.double()),
        ("1 is hidden", lambda s, m: s.masked_fill(m.double() == 1, -torch.inf)),
    ],
)
@torch.no_grad()
def test_the_meaning_of_a_mask(encoding: str, apply: object) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return (scores if mask is None else apply(scores, mask)).softmax(-1) @ v  # type: ignore[operator]

    form = facts_of(attention).callee.mask
    assert form is not None and form.leak == 0.0
    is_boolean = encoding.startswith(("1", "True"))
    meaning = encoding.partition(" ")[2]
    assert form.encoding == encoding or (is_boolean and form.encoding.endswith(meaning)), form


@torch.no_grad()
def test_a_mask_that_leaks_is_found_with_its_leak() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return (scores if mask is None else scores - 2.0 * mask).softmax(-1) @ v

    form = facts_of(attention).callee.mask
    assert form is not None and form.encoding.endswith("is hidden") and 0.01 < form.leak < 0.9


@torch.no_grad()
def test_what_is_no_attention_is_rejected() -> None:
    with pytest.raises(CannotCall, match="no output depends on another token"):
        facts_of(lambda x: F.relu(x))
    with pytest.raises(CannotCall, match="linear in its input"):
        facts_of(lambda x: x.cumsum(1))
