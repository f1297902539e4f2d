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

from torch import Tensor

from ..models.instrument import PassInputs
from ..models.introspect import is_encoder_decoder
from ..models.own_attention import OwnAttention, find_function
from ..models.site import Site

LONG = 256  # tokens from which on the head and rows are compared
HEAD = 64  # tokens of the head, at most; a sixteenth of the input where that is less, but 32
GROUPS, ROWS = 4, 16  # rows of a call that are compared, the last row among them
ALONG = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
PLAIN = (
    *("use_cache", "return_dict", "logits_to_keep", "output_hidden_states", "output_attentions"),
    "labels",
)


def can_compare_rows(sites: Sequence[Site]) -> bool:
    """Whether each site computes by an attention function of transformers, row by row."""
    return all(find_function(site.module) is not None for site in sites)


def cut_head(inputs: PassInputs) -> PassInputs | None:
    """The same pass on a few of its tokens; None where the inputs are short, or aren't only tokens
    and their masks and positions.
    """
    named = {name: value for name, value in inputs.named().items() if value is not None}
    along = {name: value for name, value in named.items() if name in ALONG}
    tokens = along.get("input_ids", along.get("inputs_embeds"))
    if tokens is None or tokens.ndim < 2 or tokens.shape[1] < LONG:
        return None
    length = tokens.shape[1]
    plain = {name: value for name, value in named.items() if name in PLAIN and name != "labels"}
    fits = all(
        isinstance(v, Tensor) and v.ndim >= 2 and v.shape[1] == length for v in along.values()
    )
    mask = along.get("attention_mask")
    flat = mask is None or mask.ndim == 2
    other = [name for name in named if name not in ALONG and name not in PLAIN]
    if other or not fits or not flat or is_encoder_decoder(inputs.model):
        return None
    if any(isinstance(value, Tensor) for value in plain.values()):
        return None
    size = max(HEAD // 2, min(HEAD, length // 16))
    # with padding on the left the last tokens, so that each sequence has some
    left = mask is not None and bool((mask[:, 0] == 0).any())
    begin = length - size if left else 0
    cut = {name: value.narrow(1, begin, size) for name, value in along.items()}
    return PassInputs(inputs.model, (), cut | plain)


class RowComparison:
    """Compares rows of each call of attention in one pass; `missing` are the sites without one."""

    def __init__(self, sites: Sequence[Site], compare: Callable[..., None]) -> None:
        self.missing = {site.name for site in sites}
        self.compare = compare

    def attended(self, site: Site, own: OwnAttention, out: Tensor) -> None:
        self.missing.discard(site.name)
        for start, stop in _row_groups(out.shape[1]):
            expected, some = own.rows(start, stop)
            got = out[:, start:stop].reshape(expected.shape)
            self._compare(site, expected[some], got[some])

    def _compare(self, site: Site, expected: Tensor, got: Tensor) -> None:
        who = f"{site.name} ({type(site.module).__name__})"
        self.compare(expected, got, who, " attends otherwise under reading than before")


def _row_groups(length: int) -> list[tuple[int, int]]:
    """
    >>> _row_groups(1000), _row_groups(20)
    ([(234, 250), (484, 500), (734, 750), (984, 1000)], [(0, 20)])
    """
    if length <= GROUPS * ROWS:
        return [(0, length)]
    ends = [length * (n + 1) // GROUPS for n in range(GROUPS)]
    return [(end - ROWS, end) for end in ends]
