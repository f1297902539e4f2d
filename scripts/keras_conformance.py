#!/usr/bin/env python3
"""Runs Keras' own tests of dot_product_attention on this library's operator.

    python scripts/keras_conformance.py [FOLDER]

The tests come with the Keras package, which is no dependency of this library; so they run in a
virtual environment of their own, .venv-keras unless another folder is given. The first run makes
it, later ones find it there.

Their queries and keys are so large that the softmax picks one key: they judge layout, masks,
    grouped heads and dtypes, but
would let a lost bias or scale pass. tests/conformance/test_onnx.py wouldn't.

Then Keras' own layers, and its operator as it comes, go through `multihead.check`: no false alarms.

This file is both the command and the pytest plugin that puts the operator in the place of Keras'
and counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KERAS = "keras==3.15.1"
# What Keras needs and this project doesn't is pinned here, the rest by constraints.txt. This
# library isn't among them: it
# comes by PYTHONPATH, since its operator needs nothing but torch and NumPy.
REQUIREMENTS = [
    KERAS,
    "absl-py==2.5.1",
    "h5py==3.16.0",
    "namex==0.1.0",
    "optree==0.20.0",
    "ml_dtypes==0.6.0",
    "torch",
    "numpy",
    "pytest",
    "lazy_loader",
]
# How many tests of 3.15.1 run, and how often they call. 13 more are skipped: 12 want a flash kernel
# on CUDA, one wants JAX.
# Two of the tests work on symbolic tensors, and so never call.
RUN, CALLS = 33, 31


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-keras").resolve()
    python = make(folder)
    environment = {
        **os.environ,
        "KERAS_BACKEND": "torch",
        "KERAS_HOME": str(folder / "keras"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)]),
    }
    # An empty configuration: this project's own is for its own tests.
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "--disable-warnings",
        "-p",
        Path(__file__).stem,
        "--pyargs",
        "keras.src.ops.nn_test",
        "-k",
        "dot_product_attention or DotProductAttention",
    ]
    tests = subprocess.run(command, cwd=folder, env=environment).returncode
    checks = [
        python,
        "-W",
        "ignore",
        "-c",
        f"import {Path(__file__).stem} as it; it.check_layers()",
    ]
    return tests or subprocess.run(checks, cwd=folder, env=environment).returncode


def make(folder: Path) -> Path:
    """Python of the environment in `folder`, which is made unless it's there with the same
    requirements.
    """
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join([*REQUIREMENTS, (ROOT / "constraints.txt").read_text()])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    if folder.exists() and not stamp.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} was not made by this script; give another folder")
    venv.create(folder, with_pip=True, clear=True)
    stamp.write_text("")  # ours, but not ready: the next run starts over if this one ends here
    (folder / ".gitignore").write_text("*\n")
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "-c",
            ROOT / "constraints.txt",
            *REQUIREMENTS,
        ],
        check=True,
    )
    stamp.write_text(wanted)
    return python


def check_layers() -> None:
    """Exits with 1 and the report where something of Keras' is called wrong, or the definition
    doesn't give its output.
    """
    import keras
    import torch

    import multihead

    layers = [
        keras.layers.MultiHeadAttention(4, 8, dropout=0.1),
        keras.layers.GroupQueryAttention(8, 4, 2),
        keras.layers.MultiHeadAttention(3, 5, use_bias=False, output_shape=20),
    ]
    for layer in layers:
        layer(
            torch.zeros(1, 2, 32), torch.zeros(1, 2, 32)
        )  # its weights are made by the first call
    for what in (*layers, keras.ops.dot_product_attention):
        report = multihead.check(what)
        known = (
            f", known differences: {', '.join(f.bug for f in report.known)}" if report.known else ""
        )
        if not report.ok or not any(line.startswith("recomputed") for line in report.passed):
            sys.exit(f"{report}\nThis of {KERAS} should pass.")
        print(
            f"{KERAS}: multihead.check of {report.name}: all properties hold, recomputed by the"
            f" definition{known}"
        )


calls = 0
outcomes = {"passed": 0, "failed": 0, "skipped": 0}


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Any:
    """Keras' arguments, `[B, T, N, H]`, on the operator. `flash_attention` chooses a kernel, never
    a result.
    """
    from keras.src import backend

    import multihead

    global calls
    calls += 1
    dtype = backend.result_type(*(x.dtype for x in (query, key, value)))
    q, k, v = (
        backend.convert_to_tensor(x, dtype=dtype).transpose(1, 2) for x in (query, key, value)
    )
    may: Any = multihead.masks.causal() if is_causal else None
    if mask is not None:
        mask = backend.convert_to_tensor(mask, dtype="bool")
        may = mask & may.dense(q.shape[2], k.shape[2]) if is_causal else mask
    if bias is not None:
        bias = backend.convert_to_tensor(bias, dtype=dtype)
    return multihead.attention(
        q, k, v, may, bias=bias, scale=scale, softcap=attn_logits_soft_cap
    ).transpose(1, 2)


def pytest_configure() -> None:
    from keras.src import backend, testing

    # Behind keras.src.ops.nn.dot_product_attention, which keeps its part: what a symbolic tensor's
    # shape becomes.
    backend.nn.dot_product_attention = dot_product_attention
    skip = testing.TestCase.skipTest

    def skip_test(self: Any, reason: str) -> None:
        if (
            "`mask` and `bias`" not in reason
        ):  # torch's function can't do both at once; this operator can
            skip(self, reason)

    testing.TestCase.skipTest = skip_test


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.outcome] += 1


def pytest_sessionfinish(session: Any) -> None:
    if outcomes["passed"] + outcomes["failed"] < RUN or calls < CALLS:
        session.exitstatus = session.exitstatus or 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ran = outcomes["passed"] + outcomes["failed"]
    terminalreporter.write_line(
        f"{KERAS}: {ran} tests of dot_product_attention ran (at least {RUN} expected), "
        f"{outcomes['failed']} failed, {outcomes['skipped']} skipped; "
        f"multihead.attention was called {calls} times (at least {CALLS} expected)"
    )


if __name__ == "__main__":
    sys.exit(main())
