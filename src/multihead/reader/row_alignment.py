"""The token of each row of a stack, where a model adds rows to the tokens that it was given.

Soft prompts, class tokens and pictures that are expanded inside a model make more rows than there
are token ids. What the stack was given tells them: the embeddings `[B, R, D]` of its rows. A row
whose embedding is that of the next token is this token; the others are no tokens of the text.
"""

from __future__ import annotations

from difflib import SequenceMatcher

import torch
from torch import Tensor, nn

__all__ = ["align_rows"]


@torch.no_grad()
def align_rows(ids: Tensor, rows: Tensor, embed: nn.Module) -> Tensor | None:
    """The number of the token that each row is, int64 `[B, R]`, -1 for rows that are none; None
    where the rows don't show the tokens in their order.

    Args:
        ids: `[B, L]`.
        rows: what the stack was given, `[B, R, D]`.
        embed: the embedding, from ids `[B, L]` to `[B, L, D]`. Hooks on it aren't called.

    >>> embed = nn.Embedding(9, 2)
    >>> ids = torch.tensor([[4, 5, 4]])
    >>> align_rows(ids, torch.cat([torch.randn(1, 2, 2), embed(ids)], 1), embed).tolist()
    [[-1, -1, 0, 1, 2]]
    """
    tokens = type(embed).forward(embed, ids)
    if tokens.ndim != 3 or tokens.shape[::2] != rows.shape[::2]:
        return None
    length, count = tokens.shape[1], rows.shape[1]
    for start in (count - length, 0):  # most put their rows before the text, some after it
        if start >= 0 and torch.equal(rows[:, start : start + length], tokens):
            number = torch.arange(count, device=ids.device) - start
            number = number.masked_fill((number < 0) | (number >= length), -1)
            return number.expand(len(ids), -1)
    found = [_align_text(*pair) for pair in zip(ids, tokens, rows, strict=True)]
    if any(numbers is None for numbers in found):
        return None
    return torch.stack([numbers for numbers in found if numbers is not None])


def _align_text(ids: Tensor, tokens: Tensor, rows: Tensor) -> Tensor | None:
    """The same of one text. Tokens without a row must be of one kind, such as the placeholder of a
    picture.
    """
    codes = torch.unique(torch.cat([tokens, rows]), dim=0, return_inverse=True)[1].tolist()
    given, made = codes[: len(tokens)], codes[len(tokens) :]
    numbers = [-1] * len(made)
    for block in SequenceMatcher(None, given, made, autojunk=False).get_matching_blocks():
        for n in range(block.size):
            numbers[block.b + n] = block.a + n
    missing = set(range(len(given))) - set(numbers)
    if len(missing) == len(given) or len({int(ids[n]) for n in missing}) > 1:
        return None
    return torch.tensor(numbers, device=ids.device)
