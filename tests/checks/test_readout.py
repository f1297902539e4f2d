"""The weights that are read out are those of the definition, of modules and of arrays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checks.samples import Separate, facts_of
from checks.seeds import load
from multihead.checks.callee import CallSpec
from multihead.checks.projections import assignments, find_matrices, possible_head_counts
from multihead.checks.readers import find_reader
from multihead.checks.readout import CannotRead, WeightReader

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def reader_of(target: Any, num_heads: int | None = None) -> WeightReader:
    callee = facts_of(target, num_heads=num_heads).callee
    counts = possible_head_counts(callee, callee.num_heads, find_matrices(callee))
    return find_reader(callee, list(assignments(callee, counts)), counts)


def test_weights_are_those_of_the_definition() -> None:
    reader = reader_of(Separate())
    x = reader.callee.x(1, size=0.5)
    module = reader.callee.module
    q, k = (getattr(module, n)(x).unflatten(-1, (4, 6)).transpose(1, 2)[0] for n in "qk")
    expected = (q @ k.mT / 6**0.5).softmax(-1)
    before = {n: p.clone() for n, p in module.named_parameters()}
    readout = reader.read(x)
    torch.testing.assert_close(readout.weights, expected, rtol=1e-9, atol=1e-12)
    assert readout.kv_heads == (0, 1, 2, 3) and readout.spread < 1e-9
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    allowed = torch.ones(5, 5).tril().bool()
    masked = reader.read(x, CallSpec(allowed=allowed)).weights
    assert (masked.abs() > 1e-9).equal(allowed.expand(4, -1, -1))


@pytest.mark.parametrize(
    "name",
    [
        *("annotated", "cross", "gqa", "llama", "nanogpt", "numpy_class", "rope_cache", "sdpa"),
        *("slices", "softcap", "textbook_numpy", "time_first", "vit_fused"),
    ],
)
def test_attention_as_people_write_it(name: str) -> None:
    reader = reader_of(load(name))
    readout = reader.read(reader.callee.x(1, size=0.5))
    assert (readout.weights.sum(-1) - 1).abs().max() < 1e-6 and readout.weights.min() > -1e-9
    heads = range(len(readout.weights))
    groups = len(set(readout.kv_heads))
    assert readout.kv_heads == tuple(h // (len(heads) // groups) for h in heads)
    assert (readout.rest - readout.rest[0]).abs().max() < 1e-5  # a bias alone


class Cut(Separate):
    """The value path after the weights is changed by `change`, or the values aren't used."""

    def __init__(self, change: Any = None, values: str = "v") -> None:
        super().__init__()
        self.change, self.values = change, values

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (
            getattr(self, n)(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for n in ("q", "k", self.values)
        )
        y = (q @ k.mT / 6**0.5).softmax(-1) @ v
        y = y.transpose(1, 2).flatten(2)
        return self.o(self.change(y) if self.change else y)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Cut(torch.tanh), "isn't linear in the values"),
        (Cut(lambda y: torch.cat([y[..., ::2], y[..., 1::2].roll(1, 1)], -1)), "reach others"),
        (Cut(values="k"), "v has no influence"),
    ],
)
def test_what_isnt_attention_of_the_values_is_refused(target: nn.Module, words: str) -> None:
    with pytest.raises(CannotRead, match=words):
        reader_of(target)


@pytest.mark.parametrize("change", [lambda y: y + y.flip(-1), lambda y: y * torch.arange(1, 25)])
def test_an_unknown_factor_is_undone_and_not_judged(change: Any) -> None:
    reader = reader_of(Cut(change))
    readout = reader.read(reader.callee.x(1, size=0.5))
    plain = reader_of(Cut())
    assert readout.unjudged and "a gate or a norm" in readout.unjudged[0]
    torch.testing.assert_close(readout.weights.sum(-1), torch.ones(4, 5).double())
    assert not plain.read(plain.callee.x(1, size=0.5)).unjudged


def test_heads_of_one_feature_dont_hide_a_gate() -> None:
    target = Cut(lambda y: y * torch.arange(1, 25))
    del target.num_heads
    assert reader_of(target).num_heads == 4 and reader_of(target).undoes_factors
    target.change = None
    assert reader_of(target).num_heads == 4  # the coarsest division that can be read
