"""How a callable is called is found out by trying, or the message names what is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multihead
from checks.samples import Separate
from multihead.checks.discover import find_callee


def test_heads_without_names() -> None:
    class Unnamed(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(24, 24) for _ in range(4))
            self.size = scale

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (6, 4)).transpose(1, 2) for f in (self.a, self.b, self.c))
            return self.d(((q @ k.mT * self.size).softmax(-1) @ v).transpose(1, 2).flatten(2))

    assert any("6 heads" in line for line in multihead.check(Unnamed(0.5)).passed)
    assert multihead.check(Unnamed(0.25)).bugs == {"missing or wrong scale"}
    assert multihead.check(Unnamed(0.5), num_heads=6).ok


def test_numpy_functions_of_one_sequence() -> None:
    def attention(Q: Any, K: Any, V: Any) -> Any:
        scores = Q @ K.T / np.sqrt(K.shape[1])
        e = np.exp(scores - scores.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True) @ V

    report = multihead.check(attention)
    assert report.ok and "in NumPy" in report.called and "NumPy has no gradients" in str(report)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (nn.Linear(8, 8), ["Linear", "isn't attention", "no output depends on another token"]),
        (nn.MultiheadAttention, ["is a class", "embed_dim, num_heads", "--args"]),
        (nn.LSTM(8, 8), ["LSTM", "isn't attention"]),
        (lambda x: x.mean(1, keepdim=True).expand_as(x), ["isn't attention", "linear"]),
        (lambda x, table: x, ["table", "arguments={'table': ...}"]),
        (lambda: 1, ["no arguments"]),
        ("attention", ["str can't be called"]),
        (nn.TransformerDecoderLayer(16, 2), ["several attentions", "self_attn, multihead_attn"]),
        (lambda q, k, v: "text", ["returned str"]),
    ],
)
def test_what_cant_be_called_is_asked_for_in_words(target: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        multihead.check(target)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_further_arguments() -> None:
    def attention(x: Tensor, table: float) -> Tensor:
        return (x @ x.mT * table).softmax(-1) @ x

    assert not multihead.check(attention, arguments={"table": 0.2}).findings
    with pytest.raises(ValueError, match=r"takes no argument 'tabel'; it takes x, table"):
        multihead.check(attention, arguments={"tabel": 0.2})


class Required(nn.Module):
    """A mask that has to be given, in one of many forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.num_heads, self.form = 4, form
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        scores, mask = q @ k.mT / 8**0.5, attention_mask
        if self.form == "hides":
            scores = scores.masked_fill(mask, -10000.0)
        elif self.form == "hides by key":
            scores = scores.masked_fill(mask[:, None, None, :], -1e9)
        elif self.form == "reads":
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        elif self.form == "reads by key":
            scores = scores + (1.0 - mask[:, None, None, :]) * -1e9
        else:
            scores = scores + mask
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("form", ["hides", "hides by key", "reads", "reads by key", "added"])
def test_a_mask_that_has_to_be_given(form: str) -> None:
    report = multihead.check(Required(form))
    assert report.ok and "masks as attention_mask" in report.called, str(report)
    assert any("fully masked rows leak" in note for note in report.notes) or form == "added"
    strict = multihead.check(Required(form), strict=True).bugs
    assert ("inverted mask" in strict) == form.startswith("hides")


def test_sequence_first_is_found_by_trying() -> None:
    class TimeFirst(Separate):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
            t, b, d = query.shape
            q, k, v = (
                f(x).reshape(x.shape[0], b * 4, d // 4).transpose(0, 1)
                for f, x in ((self.q, query), (self.k, key), (self.v, value))
            )
            weights = (q @ k.mT * (d // 4) ** -0.5).softmax(-1)
            return self.o((weights @ v).transpose(0, 1).reshape(t, b, d))

    class BatchFirst(TimeFirst):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
            B, _, _ = query.shape
            assert B
            return super().forward(query, key, value)

    report = multihead.check(TimeFirst())
    assert report.ok and "[L, B, D]" in report.called, str(report)
    # Here the code says that the batch is first.
    assert multihead.check(BatchFirst()).bugs == {"batch elements influence each other"}


def test_forms_and_layouts() -> None:
    def memory(x: Tensor, context: Tensor) -> Tensor:
        return (x @ context.mT).softmax(-1) @ context

    def by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    for target, form, layout in [
        (Separate(), "self", "[B, L, D]"),
        (nn.MultiheadAttention(16, 2), "cross", "[L, B, D]"),
        (nn.MultiheadAttention(16, 2, batch_first=True), "cross", "[B, L, D]"),
        (memory, "memory", "[B, L, D]"),
        (by_length, "heads", "[B, L, H, E]"),
        (nn.functional.scaled_dot_product_attention, "heads", "[B, H, L, E]"),
        (lambda a, b, c: (a @ b.mT).softmax(-1) @ c, "heads", "[B, H, L, E]"),
    ]:
        with torch.no_grad():
            callee = find_callee(target, {}, None)
        assert (callee.form, callee.layout) == (form, layout), callee


def test_a_first_argument_h_is_the_hidden_states() -> None:
    def attention(h: Tensor) -> Tensor:
        return (h @ h.mT).softmax(-1) @ h

    assert not multihead.check(attention).findings


def test_widths_are_those_of_attributes_and_weights() -> None:
    with torch.no_grad():
        callee = find_callee(nn.MultiheadAttention(16, 2, kdim=6, vdim=10), {}, None)
    assert callee.embed_dim == 16 and callee.kv_dims == (6, 10) and callee.num_heads == 2
