"""`RepeatedText`: passes that are the last pass's text again with one token more, as generation
without a KV cache makes them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RepeatedText:
    """Compares the token ids of each stack of a model with those of the pass before.

    Attributes:
        expected: whether a pass may repeat the last one; None: where the model is called with
            `use_cache=False`.
    """

    def __init__(self) -> None:
        self.expected: bool | None = None
        self._uncached = False
        self._before: dict[str, Tensor | None] = {}  # ids of the last pass, by stack

    def begin_pass(self) -> None:
        self._uncached = False

    def count(self, stack: str, ids: Tensor | None, *, past: int, use_cache: bool | None) -> int:
        """The number of leading positions that the last pass had, too; 0 for another text.

        Args:
            stack: name of the stack that is called.
            ids: its token ids `[B, L]`.
            past: positions in its cache.
            use_cache: its argument of that name; False holds for all stacks of a pass.

        >>> import torch
        >>> repeated, ids = RepeatedText(), torch.tensor([[5, 6, 7]])
        >>> [repeated.count("", ids[:, :n], past=0, use_cache=False) for n in (2, 3)]
        [0, 2]
        """
        self._uncached |= use_cache is False
        before, self._before[stack] = self._before.get(stack), ids
        if not (self._uncached if self.expected is None else self.expected):
            return 0
        if before is None or ids is None or past or before.ndim != 2 or ids.ndim != 2:
            return 0
        length = before.shape[1]
        is_longer = ids.shape == (len(before), length + 1)
        return length if is_longer and torch.equal(ids[:, :length], before) else 0
