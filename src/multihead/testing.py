"""For other people's test suites: one line that judges the attention they wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checks.run import check

__all__ = ["assert_attention"]


def assert_attention(
    target: Any,
    *,
    causal: bool | None = None,
    heads: int | None = None,
    scale: float | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Fail, as a test does, with the whole report, unless all holds of the attention of `target`.

    Arguments are those of `multihead.check`; say `causal=True` or `False`, so that a mask that was
    lost is found out.

    Raises:
        AssertionError: something is wrong; the message says what, the smallest input that shows it,
            and where to look.
        ValueError: it can't be called, or isn't attention.

    >>> import torch
    >>> assert_attention(torch.nn.MultiheadAttention(16, 4, batch_first=True), causal=False)
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    report = check(target, causal=causal, heads=heads, scale=scale, arguments=arguments)
    if not report.ok:
        raise AssertionError(f"\n{report}")
