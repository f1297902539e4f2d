"""What `multihead.check` says, of what can't be called, what is known, and of two bugs at once; the
command; the helper.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import multihead
from checks.test_variants import Low
from multihead import cli
from multihead.testing import assert_attention

RIGHT = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

class Attention(torch.nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)

    def forward(self, x):
        B, L, D = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(sdpa(q, k, v).transpose(1, 2).reshape(B, L, D))

def ready():
    return Attention(24, 3)

def by_heads(q, k, v, extra):
    return sdpa(q, k, v) * extra

class Table:
    pass
"""


class Separate(nn.Module):
    """The plainest layer, with what differs between the tests as arguments."""

    def __init__(self, dim: int = 24, heads: int = 4, **changes: Any) -> None:
        super().__init__()
        self.num_heads, self.changes = heads, changes
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            scale=self.changes.get("scale"),
            is_causal=self.changes.get("causal", False),
        )
        y = y if self.changes.get("mixed") else y.transpose(1, 2)
        return self.o(y.reshape(batch, length, -1))


def test_a_report_says_what_is_wrong_the_smallest_input_and_where_to_look() -> None:
    report = multihead.check(Separate(scale=1.0))
    words = str(report)
    assert not report.ok and not report and report.bugs == {"missing or wrong scale"}
    for piece in (
        "missing or wrong scale (certain",
        "Scores aren't scaled",
        "Smallest input that shows it: x [1, 2, 24]",
        "Where to look: Scores are multiplied by 1 / sqrt(E)",
        "Found by: the definition",
        "W_Q is q",
        "4 heads",
        "not applicable:",
        "KV cache: no cache was recognised",
    ):
        assert piece in " ".join(words.split()), words
    assert max(map(len, words.splitlines())) < 200


def test_a_scale_that_is_meant_and_causality_that_is_said() -> None:
    assert multihead.check(Separate(scale=1.0), scale=1.0).ok
    assert multihead.check(Separate(), causal=False).ok
    report = multihead.check(Separate(causal=True), causal=False)
    assert report.ok  # a mask can be more than was asked for


def test_a_causal_mask_that_was_lost_is_found_where_it_is_said() -> None:
    class Plain(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    assert multihead.check(Plain()).ok and multihead.check(Plain(causal=True), causal=True).ok
    assert multihead.check(Plain(), causal=True).bugs == {"attends to future tokens"}


def test_two_bugs_are_both_named() -> None:
    report = multihead.check(Separate(scale=1.0, mixed=True))
    assert report.bugs == {"missing or wrong scale", "tokens and heads mixed"} and all(
        f.certain for f in report.findings
    )


def test_tiny_weights_hide_no_bug() -> None:
    layer = Separate(mixed=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=1e-4)
    before = {n: p.clone() for n, p in layer.named_parameters()}
    assert multihead.check(layer).bugs == {"tokens and heads mixed"}
    assert (
        all(torch.equal(p, before[n]) for n, p in layer.named_parameters()) and layer.training
    )  # it worked on a copy


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


def test_without_readable_projections_scale_is_not_judged() -> None:
    report = multihead.check(Low())
    assert (
        report.ok
        and "not judged" in str(report)
        and "were not judged" in " ".join(str(report).split())
    )


def test_a_softmax_over_queries_is_found_without_projections_too() -> None:
    class Low(nn.Module):
        def __init__(self, axis: int) -> None:
            super().__init__()
            self.down, self.up, self.axis = nn.Linear(24, 8), nn.Linear(8, 24), axis

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(self.down(x))
            return (y @ y.mT / 10).softmax(self.axis) @ x

    assert multihead.check(Low(-1)).ok
    report = multihead.check(Low(-2))
    assert report.bugs == {"weights don't sum to one"} and "among 100 copies" in str(report)


@pytest.mark.parametrize("kind", ["module", "number"])
def test_dropout_of_rate_0_is_found_active_too(kind: str) -> None:
    class Dropping(Separate):
        def __init__(self) -> None:
            super().__init__()
            if kind == "module":
                self.drop = nn.Dropout(0.0)
            else:
                self.attn_dropout = 0.0

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(
                F.dropout(x, self.drop.p if kind == "module" else self.attn_dropout)
            )

    assert multihead.check(Dropping()).bugs == {"dropout active in evaluation"}


def test_a_single_head_without_an_output_projection_is_no_bug() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(20, 20) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.query(x) @ self.key(x).mT / 20**0.5).softmax(-1) @ self.value(x)

    assert multihead.check(Single()).ok


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

    assert multihead.check(attention, arguments={"table": 0.2}).ok
    with pytest.raises(ValueError, match=r"takes no argument 'tabel'; it takes x, table"):
        multihead.check(attention, arguments={"tabel": 0.2})


def test_the_examples_of_the_page() -> None:
    text = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    example, additions = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["report"].bugs == {"missing or wrong scale"}
    exec(additions, names)
    layer, bug, claim = names["Doubled"](), names["doubled"], names["moderate"]
    assert multihead.check(layer, bugs=[bug]).bugs == {"head outputs doubled"}
    assert multihead.check(layer).ok  # not a known bug, and no property is violated
    assert "moderate outputs" in multihead.check(layer, properties=[claim]).passed


def test_the_helper_fails_with_the_report() -> None:
    assert_attention(Separate(), causal=False)
    with pytest.raises(AssertionError, match="missing or wrong scale"):
        assert_attention(Separate(scale=1.0))


def test_runs_repeat_and_leave_no_trace() -> None:
    layer, threads = Separate(mixed=True), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        state = torch.get_rng_state()
        assert str(multihead.check(layer)) == str(multihead.check(layer))
        assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["multihead", "check", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["a.py:Attention", "--args", "24, num_heads=3"], 0, ["all properties hold", "3 heads"]),
        (["a.py:ready"], 0, ["all properties hold"]),
        (["a.py:Attention", "--args", "24, 3", "--causal"], 1, ["attends to future tokens"]),
        (["a.py:Attention", "--args", "24, 3", "--scale", "0.5"], 1, ["missing or wrong scale"]),
        (["a.py:by_heads", "--args", "extra=1.0"], 0, ["by heads"]),
        (["a.py:by_heads"], 2, ["extra", "arguments="]),
        (["a.py:by_heads", "--args", "1.0"], 2, ["--args '1.0'", "by name"]),
        (["a.py:Attention"], 2, ["Attention(dim, num_heads)", "--args"]),
        (["a.py:Attention", "--args", "24, 5"], 2, ["can't be called"]),
        (["a.py:Attention", "--args", "24, open('x')"], 2, ["--args", "as in a call"]),
        (["a.py:Atention"], 2, ["'Atention'", "did you mean 'Attention'?"]),
        (["a.py:zzz"], 2, ["has no 'zzz'", "Attention, ready, by_heads, Table"]),
        (["a.py:Table"], 2, ["Table can't be called"]),
        (["none.py:Attention"], 2, ["none.py", "no such file"]),
        (["a.py"], 2, ["FILE.py:NAME"]),
        (["broken.py:x"], 2, ["broken.py can't be run", "line 2", "ZeroDivisionError"]),
        (["syntax.py:x"], 2, ["syntax.py can't be run", "SyntaxError"]),
    ],
)
def test_the_command(
    arguments: list[str],
    code: int,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.py").write_text(RIGHT)
    (tmp_path / "broken.py").write_text("y = 1\nx = 1 / 0\n")
    (tmp_path / "syntax.py").write_text("def x(:\n")
    monkeypatch.chdir(tmp_path)
    found, out, err = call(monkeypatch, capsys, *arguments)
    assert found == code, out + err
    assert all(word in (err if code == 2 else out) for word in words), out + err
    assert "Traceback" not in err and (code != 2 or not out)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['multihead', 'check', '--help']\nfrom multihead.cli import"
        " main\ntry:\n    main()\nexcept SystemExit:\n    pass\nprint({'torch', 'numpy',"
        " 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_an_output_that_is_cut_off() -> None:
    class Cut(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x).detach()

    assert multihead.check(Cut()).bugs == {"gradients don't reach a projection"}
    assert multihead.check(Cut().requires_grad_(False)).ok
