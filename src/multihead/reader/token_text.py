"""The text of tokens: labels of the rows and keys of a map, and what token classes match."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PADDING = "<pad>"


def token_text(token: int, tokenizer: Any) -> str:
    """The text of one token id; the number itself where the tokenizer has no such token.

    >>> import multihead
    >>> _, tokenizer = multihead.load_builtin()
    >>> token_text(tokenizer(" cat")["input_ids"][-1], tokenizer), token_text(-100, tokenizer)
    (' cat', '-100')
    """
    if token < 0:
        return str(token)
    try:
        return str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    except Exception:  # each library of tokenizers raises another for an id outside its vocabulary
        return str(token)


def label_tokens(
    ids: Tensor | None, valid: Tensor | None, positions: Iterable[int], tokenizer: Any
) -> list[str]:
    """The token at each position: its text; its id without a tokenizer; its number without ids.

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
    labels = []
    for n in positions:
        if valid is not None and n < len(valid) and not bool(valid[n]):
            labels.append(padding)
        elif ids is None or n >= len(ids):
            labels.append(str(n))
        elif tokenizer is None:
            labels.append(str(int(ids[n])))
        else:
            labels.append(token_text(int(ids[n]), tokenizer))
    return labels


def _padding_label(tokenizer: Any) -> str:
    """The tokenizer's padding token, unless it means something else in a text, too."""
    pad = getattr(tokenizer, "pad_token", None)
    names = ("eos_token", "bos_token", "unk_token", "sep_token", "cls_token", "mask_token")
    others = {getattr(tokenizer, name, None) for name in names}
    return pad if isinstance(pad, str) and pad not in others else PADDING
