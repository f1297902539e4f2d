"""Documents: a text, or a conversation (a list of messages), and the forms in which they are given.

Wherever texts are expected, `each_document` takes one or many of them: strings, conversations, and
rows of a data set with a "text" or "messages" each, or with a "source" and its "target". The labels
and targets of rows stay with their texts (`Example`), for what measures a loss.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeAlias

from ..errors import MultiheadError

__all__ = [
    "FIELDS",
    "Document",
    "Example",
    "each_document",
    "encode_document",
    "is_conversation",
    "is_document",
    "is_message",
    "require_messages",
    "several",
    "take_row",
    "words_of",
]

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
Document: TypeAlias = str | Conversation
FIELDS = ("text", "messages")  # of a row, which hold its document
PAIR = ("source", "target")  # of a row for an encoder-decoder
LABELS = ("label", "labels")  # of a row for a classifier
MESSAGE = '{"role": "user", "content": "..."}'


class Example(str):
    """A text with what a model should give for it; to what measures no loss it is a text.

    Attributes:
        target: the text that an encoder-decoder should give, if it is known.
        label: the class (a number, or its name in the model's config), the number or the list of
            numbers that a classifier should give, if it is known.

    >>> example = Example("a text", label=1)
    >>> example, example.label, example.target
    ('a text', 1, None)
    """

    target: str | None
    label: Any

    def __new__(cls, text: str, *, target: str | None = None, label: Any = None) -> Example:
        example = super().__new__(cls, text)
        example.target, example.label = target, label
        return example


def is_message(item: Any) -> bool:
    """Whether it is one message of a conversation: a dict with a role.

    >>> is_message({"role": "user", "content": "Hello"}), is_message({"input_ids": [[1, 2]]})
    (True, False)
    """
    return isinstance(item, Mapping) and isinstance(item.get("role"), str)


def is_conversation(item: Any) -> bool:
    """Whether it is a list that begins with a message."""
    return isinstance(item, (list, tuple)) and bool(item) and is_message(item[0])


def is_document(item: Any) -> bool:
    """Whether it is a text or a conversation."""
    return isinstance(item, str) or is_conversation(item)


def require_messages(conversation: Conversation, name: str) -> None:
    """Raise `MultiheadError` for an item of a conversation that is no message."""
    for number, message in enumerate(conversation):
        if not is_message(message):
            kind = type(message).__name__
            has = f"a dict with {', '.join(map(repr, message))}" if kind == "dict" else f"a {kind}"
            raise MultiheadError(
                f"{name}[{number}] is {has}: expected a message, such as {MESSAGE}, like the ones"
                " before it"
            )


def take_row(item: Any) -> Any:
    """The document of a data set's row ({"text": ...}, perhaps with a "label", {"source": ...,
    "target": ...} or {"messages": [...]}); anything else as it is.

    >>> take_row({"source": "Ein Satz.", "target": "A sentence."}).target
    'A sentence.'
    """
    if isinstance(item, Mapping) and not is_message(item):
        text, messages = (item.get(field) for field in FIELDS)
        source, target = (item.get(field) for field in PAIR)
        if isinstance(source, str) and isinstance(target, str):
            return Example(source, target=target)
        if isinstance(text, str):
            label = next((item[name] for name in LABELS if item.get(name) is not None), None)
            return text if label is None else Example(text, label=label)
        if is_conversation(messages):
            return messages
    return item


def _take_column(rows: Mapping[str, Any]) -> list[Any]:
    """The documents of several rows in one dict, as a data set gives a slice of itself ({"text":
    [...]} or {"messages": [[...], ...]}); none of anything else.
    """
    columns = (rows.get(field) for field in FIELDS)
    return next(
        (
            list(column)
            for column in columns
            if isinstance(column, (list, tuple)) and column and all(map(is_document, column))
        ),
        [],
    )


def several(texts: Any) -> list[Any] | Iterator[Any]:
    """One text, conversation or batch of model inputs as a list of it; several of them as a list
    too, or, where their number isn't known, an iterator.

    Raises:
        TypeError: neither of these.
    """
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, Mapping):
        return [[texts]] if is_message(texts) else _take_column(texts) or [take_row(texts)]
    if hasattr(texts, "columns") and hasattr(texts, "iloc"):
        raise TypeError(
            f"texts is a {type(texts).__name__} with the columns"
            f" {', '.join(map(repr, texts.columns))}: give the column that holds the texts, such as"
            f" texts[{next(iter(texts.columns), 'text')!r}]"
        )
    if isinstance(texts, (bytes, bytearray)):
        raise TypeError("texts is bytes: expected a string; give texts.decode()")
    if not isinstance(texts, Iterable):
        raise TypeError(
            f"texts is a {type(texts).__name__}: expected a string, a list of strings, or batches"
            " of model inputs"
        )
    listed: Any = list(texts) if isinstance(texts, Sized) else iter(texts)
    first = list(itertools.islice(iter(listed), 1))
    if not isinstance(listed, list):
        listed = itertools.chain(first, listed)
    if first and is_message(first[0]):  # one conversation
        return [list(listed)]
    if isinstance(listed, list):
        return [take_row(item) for item in listed]
    return map(take_row, listed)


def each_document(texts: Any) -> Iterator[Any]:
    """The documents of one text or conversation, or of several.

    Raises:
        TypeError: see `several`.

    >>> chat = [{"role": "user", "content": "Hello"}]
    >>> list(each_document("a text")), list(each_document(chat)) == [chat]
    (['a text'], True)
    >>> list(each_document([{"text": "one"}, {"messages": chat}, "two"])) == ["one", chat, "two"]
    True
    """
    return iter(several(texts))


def words_of(document: Document) -> str:
    """The text of a document, of a conversation the contents of its messages, one a line.

    >>> words_of([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}])
    'Hello\\nHi'
    """
    return document if isinstance(document, str) else "\n".join(map(_content, document))


def encode_document(document: Document) -> bytes:
    """Bytes that two documents share only where they are equal."""
    text = document if isinstance(document, str) else json.dumps(document, default=str)
    return text.encode("utf-8", "surrogatepass")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else []
    return " ".join(str(p["text"]) for p in parts if isinstance(p, Mapping) and "text" in p)
