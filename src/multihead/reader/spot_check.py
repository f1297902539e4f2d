"""A reading compared with the model as it came at a tenth of a pass.

Of a long input two things are enough. **The head**: the whole model runs on a few of the tokens,
with its own attention and with this library's, which shows that masks reach attention and that what
comes before and after is the same. **The rows**: at full length, at each site, the outputs of a few
queries are computed by the model's own attention function, from the same queries, keys and values
and their rows of the model's own mask, and compared with what the model gets under reading. That
shows a wrong scale, group, soft cap, sink or bias, and a mask that is wrong beyond a window.

The rows that aren't compared are only seen where a whole pass runs again: short inputs, and
whatever isn't text for a transformers model with sdpa or eager attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..data.token_range import count_tokens, cut_tokens
from ..models.instrument import PassInputs
from ..models.introspect import is_encoder_decoder
from ..models.own_attention import OwnAttention, find_function
from ..models.site import Site

LONG = 256  # tokens from which on the head and rows are compared
HEAD = 32  # tokens of the head: the weights are read twice, whatever their number
GROUPS, ROWS = 4, 16  # rows of a call that are compared, the last row among them


def can_compare_rows(sites: Sequence[Site]) -> bool:
    """Whether each site computes by an attention function of transformers, row by row."""
    return all(find_function(site.module) is not None for site in sites)


def cut_head(inputs: PassInputs) -> PassInputs | None:
    """The same pass on a few of its tokens; None where the inputs are short, or aren't only tokens
    and their masks and positions.
    """
    named = inputs.named()
    length = count_tokens(named)
    if length is None or length < LONG or is_encoder_decoder(inputs.model):
        return None
    size = HEAD
    # with padding on the left the last tokens, so that each sequence has some
    mask = named.get("attention_mask")
    left = mask is not None and bool((mask[:, 0] == 0).any())
    return PassInputs(inputs.model, (), cut_tokens(named, length - size if left else 0, size))


class RowComparison:
    """Compares rows of each call of attention in one pass; `missing` are the sites without one."""

    def __init__(self, sites: Sequence[Site], compare: Callable[..., None]) -> None:
        self.missing = {site.name for site in sites}
        self.compare = compare

    def attended(self, site: Site, own: OwnAttention, out: Tensor) -> None:
        self.missing.discard(site.name)
        ranges = _row_groups(out.shape[1])
        expected, some = own.rows(*ranges)
        got = torch.cat([out[:, start:stop] for start, stop in ranges], 1).reshape(expected.shape)
        who = f"{site.name} ({type(site.module).__name__})"
        what = " attends otherwise under reading than before"
        self.compare(expected[some], got[some], who, what)


def _row_groups(length: int) -> list[tuple[int, int]]:
    """
    >>> _row_groups(1000), _row_groups(20)
    ([(234, 250), (484, 500), (734, 750), (984, 1000)], [(0, 20)])
    """
    if length <= GROUPS * ROWS:
        return [(0, length)]
    ends = [length * (n + 1) // GROUPS for n in range(GROUPS)]
    return [(end - ROWS, end) for end in ends]
