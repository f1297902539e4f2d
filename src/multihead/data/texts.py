"""From texts to the tensors that a model reads: one row a text, padded on the right, real tokens
marked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import models
from ..errors import MultiheadError

if TYPE_CHECKING:  # see loading.py
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = ["Encoded", "builtin_text", "encode", "max_positions", "read_text"]

# Their first token stands at position pad_token_id + 1, so that many positions of the table are
# never used.
OFFSET_BY_PADDING = {
    "camembert", "data2vec-text", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip


@dataclass(frozen=True)
class Encoded:
    """Texts as a model takes them.

    `batches` hold `input_ids` [B, L] and `attention_mask` [B, L] (1 on real tokens), in the order
    of the texts; `notes` say what was cut.
    """

    batches: list[dict[str, Tensor]]
    notes: list[str]


def builtin_text() -> str:
    """The text that the built-in model reads unless told otherwise."""
    return (Path(models.__file__).parent / "builtin" / "text.txt").read_text(encoding="utf-8")


def read_text(source: str | Path | None = None, *, prompt: str | None = None) -> str:
    """The text in a UTF-8 file, on standard input (`source` "-"), or `prompt` itself.

    Raises:
        FileNotFoundError: no such file.
        ValueError: empty, not UTF-8, a folder, or not exactly one of the two arguments.
    """
    if (source is None) == (prompt is None):
        raise MultiheadError(f"text={source!r} and prompt={prompt!r}: give exactly one of them")
    if prompt is not None:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise MultiheadError(
                f"prompt={prompt!r} isn't UTF-8 text (at letter {error.start}); check your"
                " terminal's encoding, or put the text into a UTF-8 file and give it as text"
            ) from error
        return _not_empty(prompt, f"prompt={prompt!r}")
    named = f"text={str(source)!r}"
    if source == "-":
        content = sys.stdin.buffer.read()
        named += " (standard input)"
    else:
        path = Path(str(source)).expanduser()
        if path.is_dir():
            raise MultiheadError(f"{named} is a folder; give a text file in it")
        if not path.exists():
            raise no_such_file(source)
        content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")  # as UTF-8, without the mark that some editors put first
    except UnicodeDecodeError as error:
        raise MultiheadError(
            f"{named} is not UTF-8 text: byte {error.start:,} is 0x{content[error.start]:02x}. If"
            " it is text in another encoding, convert it, for instance: iconv -f latin1 -t utf8"
            " OLD > NEW"
        ) from error
    if "\0" in text:
        raise MultiheadError(
            f"{named} is not text: byte {content.index(0):,} is 0. Give plain text in UTF-8."
        )
    return _not_empty(text, named)


def encode(
    texts: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    limit: int | None = None,
    batch_size: int = 8,
    on_long: str = "cut",
) -> Encoded:
    """The texts as token ids, with the special tokens that the tokenizer adds.

    Args:
        texts: one text or several.
        tokenizer: the model's own.
        limit: the most tokens that a text may have, special ones included; see `max_positions`.
        batch_size: texts a batch.
        on_long: "cut" keeps the first `limit` tokens and leaves a note, "refuse" raises.

    Raises:
        ValueError: a text that is empty or, under "refuse", too long; no tokenizer; a limit that
            leaves no room.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    texts = [texts] if isinstance(texts, str) else list(texts)
    check_tokenizer(tokenizer, batch_size)
    assert tokenizer is not None
    if not texts:
        raise MultiheadError("texts=[] holds no text; give at least one")
    if on_long not in ("cut", "refuse"):
        raise MultiheadError(f"on_long={on_long!r}: expected 'cut' or 'refuse'")
    special = tokenizer.num_special_tokens_to_add()
    if limit is not None and limit <= special:
        raise no_room("limit", limit, special)
    rows, notes = [], []
    for number, text in enumerate(texts):
        tokens = tokens_of(text, number, tokenizer)
        if limit is not None and len(tokens) > limit:
            if on_long == "refuse":
                raise MultiheadError(
                    f"texts[{number}]={_short(text)} has {len(tokens):,} tokens, the model has"
                    f" {limit:,} positions; shorten or split it, or read its beginning with"
                    " on_long='cut'"
                )
            found = f"{len(tokens):,} tokens, the model has {limit:,} positions"
            notes.append(f"text {number + 1}: {found}; read the first {limit:,}")
            tokens = beginning(text, tokenizer, limit)
        rows.append(torch.tensor(tokens))
    batches = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        ids = pad_sequence(batch, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
        # Not `ids != padding`: where there is no padding token, or it is the end token, real tokens
        # have that id too.
        mask = pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
        batches.append({"input_ids": ids, "attention_mask": mask})
    return Encoded(batches, notes)


def max_positions(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> int | None:
    """The most tokens that a text may have, special ones included, or None where nothing bounds
    it.
    """
    text_config = config.get_text_config()
    bounds = []
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        positions = getattr(text_config, name, None)
        if isinstance(positions, int) and positions > 0:  # XLNet says -1 for "no end"
            if text_config.model_type in OFFSET_BY_PADDING:
                positions -= (text_config.pad_token_id or 0) + 1
            bounds.append(positions)
            break
    # A tokenizer that knows no bound says 10**30.
    if tokenizer is not None and 0 < tokenizer.model_max_length < 10**9:
        bounds.append(int(tokenizer.model_max_length))
    return min(bounds, default=None)


def tokens_of(text: str, number: int, tokenizer: Any) -> list[int]:
    """All token ids of text number `number`; `ValueError` where it is empty or has none of its
    own.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"texts[{number}] is a {type(text).__name__}: expected a text (str), as the ones"
            " before it"
        )
    _not_empty(text, f"texts[{number}]={_short(text)}")
    if text.encode("utf-8", "replace").decode() != text:
        raise MultiheadError(
            f"texts[{number}]={_short(text)} holds half a letter (a lone surrogate), which is in no"
            " UTF-8; read it from its file anew, without errors='surrogateescape'"
        )
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) <= tokenizer.num_special_tokens_to_add():
        raise MultiheadError(f"texts[{number}]={_short(text)} gives no tokens; give one with words")
    return ids


def check_tokenizer(tokenizer: Any, batch_size: int) -> None:
    """`ValueError` where there is none, or a batch would hold nothing."""
    if tokenizer is None:
        raise MultiheadError(
            "tokenizer=None: this model came without one, so it can't read text; give the"
            " tokenizer, or ready-made batches (dicts of the model's inputs)"
        )
    if batch_size < 1:
        raise MultiheadError(f"batch_size={batch_size}: expected at least 1 text a batch")


def no_room(argument: str, value: int, special: int) -> MultiheadError:
    return MultiheadError(
        f"{argument}={value} leaves no room for text: this tokenizer adds {special} special tokens;"
        f" give at least {special + 1}"
    )


def no_such_file(source: object) -> FileNotFoundError:
    return FileNotFoundError(
        f"text={str(source)!r}: there is no such file; give a text file, - for standard input, or"
        " the text itself as prompt"
    )


def _not_empty(text: str, named: str) -> str:
    if not text.strip():
        raise MultiheadError(f"{named} is empty; give a text with at least one word")
    return text


def beginning(text: str, tokenizer: Any, limit: int) -> list[int]:
    """The first tokens, closed by the special tokens that end a text. By the tokenizer itself: only
    it knows those.
    """
    side, tokenizer.truncation_side = tokenizer.truncation_side, "right"
    try:
        ids: list[int] = tokenizer(text, truncation=True, max_length=limit, verbose=False)[
            "input_ids"
        ]
    finally:
        tokenizer.truncation_side = side
    return ids


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
