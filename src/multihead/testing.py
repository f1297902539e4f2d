"""For the test suites of other projects: `assert_attention`, `check` as a one-line assertion."""

from __future__ import annotations

from typing import Any

from .checks.run import check

__all__ = ["assert_attention"]


def assert_attention(target: Any, *, partial: bool = False, **options: Any) -> None:
    """Fail with the whole report unless `multihead.check` finds the attention of `target` right.

    Args:
        target: a module, function or object, as in `multihead.check`.
        partial: whether "partly judged" is enough: no bug was found, but not everything could be
            judged.
        options: those of `multihead.check`. Pass `causal=True` or `False`, so that a causal mask
            that got lost is found.

    Raises:
        AssertionError: something is wrong, or couldn't be judged; the message lists the bugs, the
            smallest input that shows each, and where to look.
        MultiheadError: it can't be called, or isn't attention.
        TypeError: an option that `multihead.check` doesn't have.

    >>> import torch
    >>> assert_attention(torch.nn.MultiheadAttention(16, 4, batch_first=True), causal=False)
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    report = check(target, **options)
    if report.ok is False or (report.ok is None and not partial):
        raise AssertionError(f"\n{report}")
