"""Token ids of a text: special tokens, truncation, and how many tokens a model can take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import MultiheadError
from ..models.introspect import is_sentence_transformer
from .sources import is_utf8, require_words

if TYPE_CHECKING:  # transformers is imported by models/loading.py alone
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = [
    "count_special_tokens",
    "max_positions",
    "max_tokens",
    "require_tokenizer",
    "tokenize",
    "truncate",
]

# Model types whose first token has position pad_token_id + 1: that many positions of their table
# are never used.
OFFSET_BY_PADDING = {
    "camembert", "data2vec-text", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm",
    "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip


def tokenize(text: str, number: int, tokenizer: Any) -> list[int]:
    """All token ids of a text, with the special tokens that the tokenizer adds.

    Args:
        text: the text.
        number: its number among the texts, for the messages.
        tokenizer: the model's tokenizer.

    Raises:
        TypeError: not a string.
        MultiheadError: it is empty, has no tokens but special ones, or isn't valid UTF-8.

    >>> import multihead
    >>> _, tokenizer = multihead.load_builtin()
    >>> tokenize("the cat", 0, tokenizer) == tokenizer("the cat")["input_ids"]
    True
    """
    if not isinstance(text, str):
        raise TypeError(
            f"texts[{number}] is a {type(text).__name__}: expected a text (str), like the ones"
            " before it"
        )
    name = f"texts[{number}]={_short(text)}"
    require_words(text, name)
    if not is_utf8(text):
        raise MultiheadError(
            f"{name} contains an unpaired surrogate and is not valid UTF-8; read it from its file"
            " again, without errors='surrogateescape'"
        )
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) <= tokenizer.num_special_tokens_to_add():
        raise MultiheadError(f"{name} gives no tokens; give one with words")
    return ids


def truncate(text: str, tokenizer: Any, limit: int) -> list[int]:
    """The first `limit` tokens of a text, the special tokens at its end included."""
    side, tokenizer.truncation_side = tokenizer.truncation_side, "right"
    try:
        encoded = tokenizer(text, truncation=True, max_length=limit, verbose=False)
    finally:
        tokenizer.truncation_side = side
    ids: list[int] = encoded["input_ids"]
    return ids


def require_tokenizer(tokenizer: Any, batch_size: int = 1) -> None:
    """Raise where there is no tokenizer, or a batch would hold nothing."""
    if tokenizer is None:
        raise MultiheadError(
            "tokenizer=None: this model came without one, so it can't read text; give the"
            " tokenizer, or ready-made batches (dicts of the model's inputs)"
        )
    if batch_size < 1:
        raise MultiheadError(f"batch_size={batch_size}: expected at least 1 text in a batch")


def count_special_tokens(tokenizer: Any) -> tuple[int, int]:
    """The number of special tokens that the tokenizer puts before a text, and after it."""
    full, bare = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    before = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), 0)
    return before, tokenizer.num_special_tokens_to_add() - before


def max_positions(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> int | None:
    """The largest number of tokens in a text, special ones included; None where nothing bounds it.

    Args:
        config: a transformers config.
        tokenizer: the model's tokenizer, which may have a lower bound.

    Raises:
        AttributeError: not a transformers config.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> max_positions(model.config, tokenizer)
    512
    """
    text_config = config.get_text_config()
    bounds = []
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        positions = getattr(text_config, name, None)
        if isinstance(positions, int) and positions > 0:  # XLNet's config has -1 for "no end"
            if text_config.model_type in OFFSET_BY_PADDING:
                positions -= (text_config.pad_token_id or 0) + 1
            bounds.append(positions)
            break
    # A tokenizer without a bound has model_max_length 10**30.
    if tokenizer is not None and 0 < tokenizer.model_max_length < 10**9:
        bounds.append(int(tokenizer.model_max_length))
    return min(bounds, default=None)


def max_tokens(model: nn.Module, tokenizer: Any = None) -> int | None:
    """`max_positions` of any model, also of one without a transformers config."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config") and not is_sentence_transformer(model):
        return max_positions(config, tokenizer)
    length: Any = getattr(model, "max_seq_length", None)
    return length


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
