"""`multihead cost`: its options reach `multihead.cost`; the rest is tested with the costs."""

from __future__ import annotations

import pytest

import multihead
from cli.commands import call


def test_options_are_the_arguments_of_the_function(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"embed_dim": 96, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "num_layers": 3}
    sizes |= {"context_length": 50, "batch_size": 2, "window": 16}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    code, out, err = call(monkeypatch, capsys, "cost", *options, "--dtype", "float16")
    assert code == 0, err
    assert out == f"{multihead.cost(**sizes, dtype='float16')}\n"
