"""Labels of the rows and keys of a map: the text of their tokens, and the words that they make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..data.token_text import TokenGroup, TokenText
from ..errors import MultiheadError

if TYPE_CHECKING:
    from torch import Tensor

PADDING = "<pad>"
VIRTUAL = "<virtual>"  # a position that the model added, as prompt tuning does


def label_tokens(
    ids: Tensor | None, valid: Tensor | None, positions: Iterable[int], tokenizer: Any
) -> list[str]:
    """The token at each position: its text; its id without a tokenizer; its number without ids.

    Tokens that make one character together are labelled by it, as "😀 1/3".

    Args:
        ids: `[S]` as the model was given them.
        valid: bool `[S]`; what is no token is labelled as padding.
        positions: the positions to label.
        tokenizer: the model's tokenizer, or None.

    >>> import torch
    >>> label_tokens(torch.tensor([5, 6]), torch.tensor([True, False]), range(2), None)
    ['5', '<pad>']
    """
    padding = _padding_label(tokenizer)
    known = [] if ids is None else ids.tolist()
    texts = list(map(str, known)) if tokenizer is None else TokenText(tokenizer).labels(known)
    labels = []
    for n in positions:
        if valid is not None and n < len(valid) and not bool(valid[n]):
            labels.append(padding)
        elif n < len(known) and known[n] == -1:
            labels.append(VIRTUAL)
        else:
            labels.append(texts[n] if n < len(texts) else str(n))
    return labels


def group_tokens(
    ids: Tensor | None, valid: Tensor | None, number: int, tokenizer: Any
) -> list[TokenGroup]:
    """The words of `number` positions, in order; each position is one by itself without ids.

    Args:
        ids, valid, tokenizer: as for `label_tokens`.
        number: of positions.

    >>> import multihead, torch
    >>> _, tokenizer = multihead.load_builtin()
    >>> ids = torch.tensor(tokenizer("a zebra")["input_ids"])
    >>> [group.text for group in group_tokens(ids, None, len(ids), tokenizer)]
    ['<s>', 'a', 'zebra']
    """
    if ids is None or tokenizer is None:
        labels = label_tokens(ids, valid, range(number), tokenizer)
        return [TokenGroup(n, n + 1, label) for n, label in enumerate(labels)]
    shown = ids if valid is None else ids.masked_fill(~valid, -1)
    groups, padding = TokenText(tokenizer).words(shown.tolist()[:number]), _padding_label(tokenizer)
    for n, group in enumerate(groups):
        if int(shown[group.start]) < 0:
            is_real = valid is None or bool(valid[group.start])
            groups[n] = group._replace(text=VIRTUAL if is_real else padding)
    return groups + [TokenGroup(n, n + 1, str(n)) for n in range(len(ids), number)]


def require_unit(by: str) -> None:
    """Raise `MultiheadError` unless `by` is "token" or "word".

    >>> require_unit("word")
    """
    if by not in ("token", "word"):
        raise MultiheadError(f"by={by!r}: expected 'token' or 'word'")


def _padding_label(tokenizer: Any) -> str:
    """The tokenizer's padding token, unless it means something else in a text, too."""
    pad = getattr(tokenizer, "pad_token", None)
    names = ("eos_token", "bos_token", "unk_token", "sep_token", "cls_token", "mask_token")
    others = {getattr(tokenizer, name, None) for name in names}
    return pad if isinstance(pad, str) and pad not in others else PADDING
