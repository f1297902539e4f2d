"""Token ids of a text: special tokens, truncation, and how many tokens a model can take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ..errors import MultiheadError
from ..models.guard import blame_checkpoint
from ..models.introspect import (
    config_of,
    find_sentence_transformer,
    is_sentence_transformer,
    num_virtual_tokens,
)
from .documents import Document, is_conversation, require_messages, words_of
from .sources import is_utf8, require_words

if TYPE_CHECKING:  # transformers is imported by models/loading.py alone
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = [
    "Encoded",
    "Encoder",
    "count_special_tokens",
    "encode_target",
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


class Encoded(NamedTuple):
    """The tokens of a document, and how many of them are special ones around it."""

    ids: list[int]
    before: int
    after: int


class Encoder:
    """Turns documents into the token ids that the model gets for them.

    A text is between the special tokens that the tokenizer sets, once each, also where they are
    written in the text (as a chat template writes the start token). A conversation goes through the
    tokenizer's chat template. A model of sentence-transformers gets what its `encode` gives it,
    with its default prompt.

    Args:
        tokenizer: the model's tokenizer.
        model: the model, if it may have prompts.
        continued: the texts are to be continued: a conversation ends with the beginning of an
            answer.

    Raises:
        MultiheadError: no tokenizer.

    >>> import multihead
    >>> _, tokenizer = multihead.load_builtin()
    >>> encoder = Encoder(tokenizer)
    >>> encoder.encode("<s>the cat", 0) == encoder.encode("the cat", 1), encoder.repeated
    (True, 1)
    """

    def __init__(
        self, tokenizer: Any, model: nn.Module | None = None, *, continued: bool = False
    ) -> None:
        require_tokenizer(tokenizer)
        self.tokenizer, self.continued = tokenizer, continued
        self.model: Any = None
        if model is not None and is_sentence_transformer(model):
            own = getattr(model, "tokenizer", None)
            self.model = model if own is tokenizer else None
        before, after = count_special_tokens(tokenizer)
        with blame_checkpoint("the tokenizer can't encode 'a'"):
            ids = tokenizer("a", verbose=False)["input_ids"]
        self.opening, self.closing = ids[:before], ids[len(ids) - after :]
        self.repeated = 0  # texts in which a special token was written that the tokenizer sets

    @property
    def prompt(self) -> str:
        """The text that a model of sentence-transformers has before each text."""
        prompts = getattr(self.model, "prompts", None) or {}
        return prompts.get(getattr(self.model, "default_prompt_name", None)) or ""

    @property
    def settings(self) -> list[Any]:
        """Settings that the ids of a document depend on besides the tokenizer (JSON values)."""
        return [self.prompt, repr(getattr(self.tokenizer, "chat_template", None)), self.continued]

    def encode(self, document: Document, number: int) -> Encoded:
        """All token ids of a document, special ones included.

        Args:
            document: a text or a conversation.
            number: its number among the texts, for the messages.

        Raises:
            TypeError: neither of them.
            MultiheadError: see `tokenize`.
        """
        if isinstance(document, str):
            name = f"texts[{number}]={_short(document)}"
            require_words(document, name)
            _require_utf8(document, name)
            ids = self._ids_of_text(document)
            if self.model is None:  # of the others `encode` repeats them
                ids = self._without_repetition(ids)
        elif is_conversation(document):
            name = f"texts[{number}]"
            require_messages(document, name)
            _require_utf8(words_of(document), name)
            ids = self._ids_of_conversation(document, name)
        else:
            raise TypeError(
                f"texts[{number}] is a {type(document).__name__}: expected a text (str), like the"
                f" ones before it{_advice(document)}"
            )
        before = len(self.opening) if ids[: len(self.opening)] == self.opening else 0
        after = len(self.closing) if ids[len(ids) - len(self.closing) :] == self.closing else 0
        if len(ids) <= before + after:
            raise MultiheadError(f"{name} gives no tokens; give one with words")
        return Encoded(ids, before, after)

    def notes(self) -> list[str]:
        """Sentences on special tokens that were written in texts."""
        if not self.repeated:
            return []
        tokens = " ".join(self.tokenizer.convert_ids_to_tokens([*self.opening, *self.closing]))
        some = "1 text holds" if self.repeated == 1 else f"{self.repeated:,} texts hold"
        return [
            f"{some} special tokens that the tokenizer sets around a text too ({tokens}), as a chat"
            " template writes them: they were read once, not twice"
        ]

    # ----

    def _ids_of_text(self, text: str) -> list[int]:
        if self.model is None or not hasattr(self.model, "preprocess"):
            with blame_checkpoint(f"the tokenizer can't encode {_short(text)}"):
                ids: list[int] = self.tokenizer(self.prompt + text, verbose=False)["input_ids"]
            return ids
        whole = {"text": {"truncation": False, "padding": False, "verbose": False}}
        features = self.model.preprocess([text], prompt=self.prompt, processing_kwargs=whole)
        found: list[int] = features["input_ids"][0].tolist()
        return found

    def _without_repetition(self, ids: list[int]) -> list[int]:
        before, after = len(self.opening), len(self.closing)
        twice_before, twice_after = self.opening * 2, self.closing * 2
        whole = len(ids)
        if before and ids[: 2 * before] == twice_before:
            ids = ids[before:]
        if after and ids[len(ids) - 2 * after :] == twice_after:
            ids = ids[: len(ids) - after]
        self.repeated += len(ids) < whole
        return ids

    def _ids_of_conversation(self, messages: Any, name: str) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise MultiheadError(
                f"{name} is a conversation, but the tokenizer has no chat_template to write its"
                " messages as the model was trained on them; set tokenizer.chat_template, or give"
                " a text"
            )
        answered = messages[-1]["role"] == "assistant"
        options = {"add_generation_prompt": True}
        if answered:
            options = {"continue_final_message": True}
        options = options if self.continued else {}
        messages = [dict(message) for message in messages]
        write = self.tokenizer.apply_chat_template
        try:
            in_parts = [m["content"] for m in messages if isinstance(m.get("content"), list)]
            if in_parts:
                text = write(messages, tokenize=False, **options)
                # a template for strings alone writes such a list as Python shows it
                if any(str(content) in text for content in in_parts):
                    messages = [m | {"content": words_of([m])} for m in messages]
            quietly = {"tokenizer_kwargs": {"verbose": False}}  # too long is cut later, with a note
            encoded = write(messages, tokenize=True, return_dict=True, **quietly, **options)
        except Exception as error:  # of a template, which can raise anything
            raise MultiheadError(
                f"{name}: the tokenizer's chat template doesn't take this conversation"
                f" ({type(error).__name__}: {error}); change its messages, or give a text"
            ) from error
        ids: list[int] = encoded["input_ids"]
        return ids


def tokenize(text: Document, number: int, tokenizer: Any) -> list[int]:
    """All token ids of a text, with the special tokens that the tokenizer adds.

    Args:
        text: the text, or a conversation: a list of messages, dicts with "role" and "content",
            which the tokenizer's chat template writes.
        number: its number among the texts, for the messages.
        tokenizer: the model's tokenizer.

    Raises:
        TypeError: not a string or a conversation.
        MultiheadError: it is empty, has no tokens but special ones, or isn't valid UTF-8; a
            conversation that the chat template doesn't take.

    >>> import multihead
    >>> _, tokenizer = multihead.load_builtin()
    >>> tokenize("the cat", 0, tokenizer) == tokenizer("the cat")["input_ids"]
    True
    """
    return Encoder(tokenizer).encode(text, number).ids


def truncate(encoded: Encoded, limit: int, side: str = "right") -> list[int]:
    """`limit` tokens of a document, the special tokens around it included: the first ones, or, with
    `side` "left", the last ones.

    >>> encoded = Encoded([0, 5, 6, 7, 1], 1, 1)
    >>> truncate(encoded, 4), truncate(encoded, 4, "left")
    ([0, 5, 6, 1], [0, 6, 7, 1])
    """
    ids, before, after = encoded
    room, end = limit - before - after, len(ids) - after
    if len(ids) <= limit:
        return ids
    body = ids[before : before + room] if side == "right" else ids[end - room : end]
    return [*ids[:before], *body, *ids[end:]]


def encode_target(text: str, tokenizer: Any, limit: int | None = None) -> list[int]:
    """The token ids of a text that an encoder-decoder should give, at most `limit`: a translator's
    tokenizer may have another vocabulary for it.
    """
    with blame_checkpoint(f"the tokenizer can't encode the target {_short(text)}"):
        ids: list[int] = tokenizer(text_target=text, verbose=False)["input_ids"]
    return ids[:limit]


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
    with blame_checkpoint("the tokenizer can't encode 'a'"):
        full = tokenizer("a", add_special_tokens=True)["input_ids"]
    with blame_checkpoint("the tokenizer can't encode 'a'"):
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
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
                positions -= (getattr(text_config, "pad_token_id", None) or 0) + 1
            bounds.append(positions)
            break
    # A tokenizer without a bound has model_max_length 10**30.
    if tokenizer is not None and 0 < tokenizer.model_max_length < 10**9:
        bounds.append(int(tokenizer.model_max_length))
    return min(bounds, default=None)


def max_tokens(model: nn.Module, tokenizer: Any = None) -> int | None:
    """`max_positions` of any model, also of one inside wrappers, or without a transformers config.
    Virtual tokens of an adapter take positions, too.
    """
    sentence_transformer = find_sentence_transformer(model)
    if sentence_transformer is not None:
        length: int | None = getattr(sentence_transformer, "max_seq_length", None)
        return length
    config = config_of(model)
    if not hasattr(config, "get_text_config"):
        return getattr(model, "max_seq_length", None)
    limit = max_positions(config, tokenizer)
    return None if limit is None else limit - num_virtual_tokens(model)


def _require_utf8(text: str, name: str) -> None:
    if not is_utf8(text):
        raise MultiheadError(
            f"{name} contains an unpaired surrogate and is not valid UTF-8; read it from its file"
            " again, without errors='surrogateescape'"
        )


def _advice(item: Any) -> str:
    """A sentence for what is often given where a text is expected."""
    is_list = isinstance(item, (list, tuple))
    if hasattr(item, "shape") or (is_list and item and isinstance(item[0], int)):
        return "; token ids are given as model inputs: {'input_ids': torch.tensor([[1, 2, 3]])}"
    if isinstance(item, bytes):
        return "; give texts.decode()"
    if is_list:
        return "; of several lists give the texts in one list"
    return ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
