"""What lies between values and W_O, and what the output has beside them, is measured and named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead
from checks.samples import facts_of
from checks.unusual import HEAD, WIDTH, Usual, split
from multihead.checks.leftover import explain_output
from multihead.checks.readers import open_reader
from multihead.checks.readout import CannotRead


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Beside(Usual):
    """What the output has beside the weighted values."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__()

    def make(self) -> None:
        super().make()
        self.gamma = nn.Parameter(torch.rand(WIDTH))
        self.resweight = nn.Parameter(torch.tensor(0.3))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def finish(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        g = self.gate(y).sigmoid()
        return {
            "nothing": lambda: out,
            "input": lambda: x + out,
            "normed": lambda: y + out,
            "half": lambda: (x + out) / 2,
            "scaled": lambda: x + self.gamma * out,
            "rezero": lambda: x + self.resweight * out,
            "gated": lambda: x + g * out,
            "highway": lambda: g * out + (1 - g) * x,
            "tanh": lambda: out.tanh(),
        }[self.kind]()


READ, GATE = "the weighted values through W_O", "times sigmoid of gate"
BESIDE = {
    "nothing": (f"the output is {READ}", True),
    "input": (f"the output is {READ} plus the input", True),
    "normed": (f"the output is {READ} plus the normed input", True),
    "half": (f"the output is {READ} times 0.5 plus the input times 0.5", False),
    "scaled": (f"the output is {READ} times gamma for each feature plus the input", True),
    "rezero": (f"the output is {READ} times resweight plus the input", True),
    "gated": (f"the output is the input plus {READ} {GATE}", True),
    "highway": (f"the output is the input plus {READ} {GATE} plus minus the input {GATE}", True),
    "tanh": (None, False),
}


@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.usefixtures("without_gradients")
def test_what_an_output_has_beside_the_values(kind: str) -> None:
    reader = open_reader(facts_of(Beside(kind)).callee)
    inputs = [reader.callee.x(1, size=0.5, seed=seed) for seed in range(3)]
    found = explain_output(reader, inputs, [reader.read(x) for x in inputs])
    words, is_judged = BESIDE[kind]
    assert (found and found.words) == words
    assert found is None or found.is_judged == is_judged


class Between(Usual):
    """What lies between W_V and the weights, or between these and W_O."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__()

    def make(self) -> None:
        super().make()
        self.gate, self.alpha = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.v_norm, self.sub_norm = nn.LayerNorm(HEAD), nn.RMSNorm(HEAD)
        self.inner, self.mixer = nn.LayerNorm(WIDTH), nn.Sequential(nn.Softmax(-1))
        self.taps = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=1)

    def project(self, y: Tensor) -> Any:
        q, k, v = super().project(y)
        if self.kind == "convolved":
            v = split(self.taps(v.transpose(1, 2).flatten(2).mT).mT)
        change = {"silu": nn.functional.silu, "v_norm": self.v_norm, "softmax": self.mixer}
        return q, k, change.get(self.kind, lambda v: v)(v)

    def output(self, z: Tensor, y: Tensor) -> Tensor:
        z = self.sub_norm(z) if self.kind == "sub_norm" else z
        z = z.transpose(1, 2).flatten(2)
        if self.kind == "inner":
            z = self.inner(z)
        elif self.kind == "gate":
            z = z * nn.functional.silu(self.gate(y))
        elif self.kind == "alpha":
            z = z * self.alpha
        elif self.kind == "unknown gate":
            z = z * (2 + torch.sin(self.gate(y)))
        elif self.kind == "tanh":
            z = z.tanh()
        return self.o_proj(z)


BETWEEN = {
    "silu": "values pass silu before",
    "v_norm": "values pass v_norm (LayerNorm) before",
    "convolved": "values pass taps (Conv1d) before",
    "sub_norm": "heads' outputs pass sub_norm (RMSNorm) after",
    "inner": "heads' outputs pass inner (LayerNorm) after",
    "gate": "multiplied by silu of gate",
    "alpha": "multiplied by alpha",
}


@pytest.mark.parametrize("kind", [*BETWEEN, "unknown gate", "softmax"])
@pytest.mark.usefixtures("without_gradients")
def test_what_lies_between_values_and_output(kind: str) -> None:
    reader = open_reader(facts_of(Between(kind)).callee)
    x = reader.callee.x(1, size=0.5)
    readout = reader.read(x)
    reader.callee(x)
    used = reader.callee.module.used[0]
    torch.testing.assert_close(readout.weights, used, rtol=1e-6, atol=1e-8)
    bias = readout.rest - x[0]
    torch.testing.assert_close(bias, bias[:1].expand_as(bias))
    if kind in BETWEEN:
        assert BETWEEN[kind] in readout.passed[0] and not readout.unjudged
    else:
        assert readout.unjudged and not readout.passed


@pytest.mark.usefixtures("without_gradients")
def test_a_function_of_the_heads_outputs_is_refused() -> None:
    with pytest.raises(CannotRead, match="linear"):
        open_reader(facts_of(Between("tanh")).callee)


def test_the_verdict_of_the_whole_check() -> None:
    gated, unknown = Between("gate"), Between("unknown gate")
    for target in (gated, unknown):
        for name in ("alpha", "v_norm", "sub_norm", "inner", "mixer", "taps"):
            setattr(target, name, None)  # what isn't used
    assert multihead.check(gated).verdict == "right"
    assert multihead.check(unknown).verdict == "partly judged"
