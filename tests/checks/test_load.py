"""The command's FILE.py:NAME and its arguments, and what it prints and returns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from multihead import MultiheadError, cli
from multihead.checks.load import load_target

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

def same(x):
    return (x @ x.mT).softmax(-1) @ x

from multihead import LatentAttention

def padded(q, k, v, key_padding_mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None], float("-inf"))
    return scores.softmax(-1) @ v

def latent():
    return LatentAttention(24, 4, kv_latent_dim=10, rotary_dim=4, head_dim=8)
"""
LATENT = "24, 4, kv_latent_dim=10, rotary_dim=4, head_dim=8"


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
        (["a.py:Attention", "--args", "24, num_heads=3"], 0, ["all held", "3 heads"]),
        (["a.py:ready"], 0, ["all held"]),
        (["a.py:latent"], 0, ["from the latent of kv_down_proj"]),
        (["a.py:LatentAttention", "--args", LATENT], 0, ["from the latent of kv_down_proj"]),
        (["a.py:LatentAttention", "--args", LATENT, "--scale", "0.5"], 1, ["wrong scale"]),
        (["a.py:Attention", "--args", "24, 3", "--causal"], 1, ["attends to future tokens"]),
        (["a.py:Attention", "--args", "24, 3", "--scale", "0.5"], 1, ["missing or wrong scale"]),
        (["a.py:by_heads", "--args", "extra=1.0"], 0, ["by heads"]),
        (["a.py:padded"], 0, ["all held", "fully masked rows give NaN (an error if strict)"]),
        (["a.py:padded", "--strict"], 1, ["1 found: fully masked rows give NaN"]),
        (["a.py:same"], 3, ["partly judged", "not judged", "can't be read"]),
        (["a.py:by_heads"], 2, ["extra", "arguments="]),
        (["a.py:by_heads", "--args", "1.0"], 2, ["--args '1.0'", "by name"]),
        (["a.py:Attention"], 2, ["Attention(dim, num_heads)", "--args"]),
        (["a.py:Attention", "--args", "24, 5"], 2, ["can't be called"]),
        (["a.py:Attention", "--args", "24, open('x')"], 2, ["--args", "as in a call"]),
        (["a.py:Atention"], 2, ["'Atention'", "did you mean 'Attention'?"]),
        (
            ["a.py:zzz"],
            2,
            ["has no 'zzz'", "Attention, ready, by_heads, Table, same, padded, latent"],
        ),
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


def test_a_crash_of_the_check_is_no_bug_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("lost")

    (tmp_path / "a.py").write_text(RIGHT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("multihead.checks.run.find_callee", fail)
    code, out, err = call(monkeypatch, capsys, "a.py:ready")
    assert code == 2 and not out and "KeyError: 'lost'" in err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['multihead', 'check', '--help']\nfrom multihead.cli import"
        " main\ntry:\n    main()\nexcept SystemExit:\n    pass\nprint({'torch', 'numpy',"
        " 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_targets_and_their_arguments(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(RIGHT)
    module, further = load_target(f"{file}:Attention", "24, num_heads=3")
    assert module.num_heads == 3 and further == {}
    assert type(load_target(f"{file}:ready")[0]).__name__ == "Attention"
    function, further = load_target(f"{file}:by_heads", "extra=1.0")
    assert function.__name__ == "by_heads" and further == {"extra": 1.0}
    with pytest.raises(MultiheadError, match="--args 'a b': expected arguments as in a call"):
        load_target(f"{file}:by_heads", "a b")


@pytest.mark.parametrize("code", ["0", "3", "'done'"])
@pytest.mark.parametrize("where", ["__init__", "forward"])
def test_a_module_that_ends_the_program_is_no_verdict(
    code: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "self, x" if where == "forward" else "self"
    file = tmp_path / "ending.py"
    file.write_text(
        "import sys, torch\nclass A(torch.nn.Module):\n"
        f"    def {where}({arguments}):\n        sys.exit({code})\n"
    )
    monkeypatch.setattr(sys, "argv", ["multihead", "check", f"{file}:A"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
