"""Exact maps of chosen heads: weights and contributions of each query and key."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..data.batching import first_batch
from ..data.token_text import TokenGroup
from ..errors import MultiheadError
from ..models.contexts import evaluation
from ..models.foreign import flatten_features
from ..models.instrument import instrument
from ..models.introspect import find_sentence_transformer, require_model
from ..models.site import Site, select_heads
from .pictures import PatchGrids, Picture, draw_patches, find_pictures, places_of
from .row_stats import Capture
from .session import Reading
from .token_text import group_tokens, label_tokens, require_unit

TEXT = ("input_ids", "inputs_embeds", "decoder_input_ids")  # inputs with an axis of texts


@dataclass(frozen=True)
class HeadMap:
    """Weights and contributions of one head for some queries of one text.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> head_map = multihead.read_maps(model, "a cat and a cat", "L1.H0", tokenizer=tokenizer)
    >>> head_map.weights.shape[1] == len(head_map.tokens)
    True
    """

    head: str  # label, as in the table
    tokens: list[str]  # text of the S keys
    rows: list[int]  # numbers of the query rows, among the keys where it is self-attention
    row_tokens: list[str]  # text of those rows
    weights: NDArray[np.float32]  # [rows, S]: A_ij
    contributions: (
        NDArray[np.float32] | None
    )  # [rows, S]: A_ij * ||v_j W_O^(h)||; None where a gate forbids it
    # the words that the keys make, and those of all queries; empty without a tokenizer
    words: list[TokenGroup] = field(default_factory=list)
    row_words: list[TokenGroup] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)  # patches among the keys

    def on_picture(
        self, row: int, picture: int = 0, *, contributions: bool = False
    ) -> NDArray[np.float32]:
        """The weights, or the contributions, of one query on the patches of a picture, `[rows,
        columns]` of its grid.

        Args:
            row: number of the query, as in `rows`; -1 is the last one.
            picture: number of the picture.
            contributions: in place of the weights.

        Raises:
            MultiheadError: no such query, no such picture, or no contributions.

        >>> found = HeadMap("L0.H0", list("abc"), [0], ["a"], np.array([[0.5, 0.2, 0.3]]), None)
        >>> found = replace(found, pictures=[Picture([1, 2], (1, 2))])
        >>> found.on_picture(0).tolist()
        [[0.2, 0.3]]
        """
        values = self.contributions if contributions else self.weights
        if values is None:
            raise MultiheadError(
                f"{self.head} has no contributions: there is an operation between the heads and"
                " their output projection; take the weights"
            )
        wanted = self.rows[row] if -len(self.rows) <= row < 0 else row
        if wanted not in self.rows:
            raise MultiheadError(
                f"row={row}: expected one of the map's queries, {self.rows[0]} to {self.rows[-1]},"
                " or -1 for the last one"
            )
        if not 0 <= picture < len(self.pictures):
            raise MultiheadError(
                f"picture={picture}: {len(self.pictures)} pictures whose patches are known are"
                f" among the keys of {self.head}; tokens of a resampler, of tiles with separators"
                " and of windows have no grid, and keys= may have cut it"
            )
        chosen = self.pictures[picture]
        return values[self.rows.index(wanted), chosen.keys].reshape(chosen.shape)

    def save_picture(
        self,
        path: str | os.PathLike[str],
        row: int,
        picture: int = 0,
        *,
        image: Any = None,
        contributions: bool = False,
    ) -> None:
        """Draw `on_picture` as PNG, SVG or PDF, over the image if it is given (`[height, width, 3]`
        or a PIL image). Needs matplotlib ('multihead[plot]').

        Raises:
            MultiheadError: as `on_picture` does; matplotlib is missing.

        >>> found = HeadMap("L0.H0", list("abc"), [0], ["a"], np.array([[0.5, 0.2, 0.3]]), None)
        >>> found = replace(found, pictures=[Picture([1, 2], (1, 2))])
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found.save_picture(f"{folder}/map.png", 0)
        """
        grid = self.on_picture(row, picture, contributions=contributions)
        of = self.row_tokens[self.rows.index(self.rows[row] if row < 0 else row)]
        what = "contributions" if contributions else "weights"
        draw_patches(grid, Path(path), f"{self.head}: {what} of query {of!r}", image)

    def by_word(self) -> HeadMap:
        """The map between words: summed over the tokens of the word that is read, and averaged over
        those of the word that reads (Clark et al. 2019), so that rows still add up to 1.

        Rows are then numbers of words. A word of which only some tokens are among the rows or keys
        is taken by those.

        >>> import multihead
        >>> model, tokenizer = multihead.load_builtin()
        >>> found = multihead.read_maps(model, "a zebra", "L1.H0", tokenizer=tokenizer)
        >>> found.tokens, found.by_word().tokens
        (['<s>', 'a', ' z', 'e', 'b', 'r', 'a'], ['<s>', 'a', 'zebra'])
        """
        if not self.words:
            raise MultiheadError(
                "by='word': which tokens make a word is known by their tokenizer alone; give"
                " tokenizer= to read_maps"
            )
        place = {row: n for n, row in enumerate(self.rows)}
        rows = [[place[n] for n in range(w.start, w.stop) if n in place] for w in self.row_words]
        kept = [n for n, inside in enumerate(rows) if inside]
        number = self.weights.shape[1]
        keys = [word for word in self.words if word.start < number]

        def merge(values: NDArray[np.float32]) -> NDArray[np.float32]:
            summed = np.stack([values[:, w.start : w.stop].sum(1) for w in keys], 1)
            return np.stack([summed[rows[n]].mean(0) for n in kept]).astype(np.float32)

        words = [TokenGroup(n, n + 1, word.text) for n, word in enumerate(keys)]
        row_words = [TokenGroup(n, n + 1, word.text) for n, word in enumerate(self.row_words)]
        return HeadMap(
            self.head,
            [word.text for word in keys],
            kept,
            [self.row_words[n].text for n in kept],
            merge(self.weights),
            None if self.contributions is None else merge(self.contributions),
            words,
            row_words,
            _move_pictures(self.pictures, keys),
        )


@overload
def read_maps(
    model: nn.Module,
    text: str | Mapping[str, Any],
    heads: str,
    *,
    rows: Sequence[int] | None = ...,
    keys: int | None = ...,
    tokenizer: Any = ...,
    by: str = ...,
) -> HeadMap: ...
@overload
def read_maps(
    model: nn.Module,
    text: str | Mapping[str, Any],
    heads: list[str],
    *,
    rows: Sequence[int] | None = ...,
    keys: int | None = ...,
    tokenizer: Any = ...,
    by: str = ...,
) -> list[HeadMap]: ...
def read_maps(
    model: nn.Module,
    text: str | Mapping[str, Any],
    heads: str | list[str],
    *,
    rows: Sequence[int] | None = None,
    keys: int | None = None,
    tokenizer: Any = None,
    by: str = "token",
) -> HeadMap | list[HeadMap]:
    """Exact weights and contributions of one head (a label) or several (a list of labels) on one
    text.

    Args:
        model: as for `multihead.read`; the same checks are made.
        text: a string (with `tokenizer`), or model inputs of batch size 1.
        heads: "L12.H3", or a list of such labels. Memory is rows x keys for each.
        rows: query rows, such as `range(10)` or `[5]`; all by default.
        keys: the first so many keys only; all by default.
        tokenizer: turns the text into ids, and ids into the labels of rows and keys.
        by: "word" merges the tokens of a word, see `HeadMap.by_word`; `rows` and `keys` then count
            words.

    Raises:
        ValueError: a head that doesn't exist, a row outside the text, more than one text.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> found = multihead.read_maps(model, "the cat and the cat", "L0.H0", tokenizer=tokenizer)
    >>> bool(abs(found.weights.sum(-1) - 1).max() < 1e-5)
    True
    """
    model = require_model(model)
    if rows is not None and (isinstance(rows, (int, str)) or not len(rows)):
        raise MultiheadError(
            f"rows={rows!r}: expected numbers of query rows, such as range(10) or [5], or None"
            " for all"
        )
    if keys is not None and keys < 1:
        raise MultiheadError(
            f"keys={keys}: expected a number of keys of at least 1, or None for all"
        )
    if isinstance(heads, tuple) or not isinstance(heads, (str, list)):
        raise TypeError(f"heads={heads!r}: expected a label such as 'L2.H3', or a list of labels")
    require_unit(by)
    batch, tokenizer = one_text(model, text, tokenizer)
    labels = [heads] if isinstance(heads, str) else list(heads)
    chosen: list[tuple[Site, int]] = []
    by_site: dict[str, Capture] = {}

    def rows_of_words(capture: Capture, length: int) -> list[int]:
        words = group_tokens(capture.ids, capture.valid, length, tokenizer)
        outside = [n for n in rows or () if not 0 <= n < len(words)]
        if outside:
            raise MultiheadError(
                f"rows: {outside[0]} isn't a word of this text; its words are 0 to {len(words) - 1}"
            )
        return [n for w in rows or () for n in range(words[w].start, words[w].stop)]

    wanted: Any = None if rows is None else rows_of_words if by == "word" else list(rows)

    def captures(sites: list[Site]) -> dict[str, Capture]:
        chosen.extend(select_heads(sites, labels))
        for site, head in chosen:
            capture = by_site.setdefault(
                site.name, Capture([], rows=wanted, keys=None if by == "word" else keys)
            )
            if head not in capture.heads:
                capture.heads.append(head)
        return by_site

    session, patches = Reading(model, captures=captures), PatchGrids()
    with (
        evaluation(model),
        torch.no_grad(),
        session.running(),
        instrument(model, patches, sites=session.sites),
    ):
        model(**batch)
    found = []
    for (site, h), label in zip(chosen, labels, strict=True):
        capture = by_site[site.name]
        if not capture.weights:
            raise MultiheadError(
                f"head {label!r} read nothing of this text: its site {site.name} wasn't reached"
            )
        at = capture.heads.index(h)
        numbers = capture.numbers or []
        queries = label_tokens(capture.ids, capture.valid, numbers, tokenizer)
        weights = torch.cat(capture.weights, 2)[0, at]
        contributions = (
            torch.cat(capture.contributions, 2)[0, at] if capture.contributions else None
        )
        head_map = HeadMap(
            label,
            label_tokens(capture.key_ids, capture.key_valid, range(weights.shape[-1]), tokenizer),
            numbers,
            queries,
            weights.float().cpu().numpy(),
            None if contributions is None else contributions.float().cpu().numpy(),
            *_words_of(capture, weights.shape[-1], tokenizer),
            _pictures_of(model, batch, capture, patches, session.tokens.placeholders),
        )
        found.append(_first_keys(head_map.by_word(), keys) if by == "word" else head_map)
    return found[0] if isinstance(heads, str) else found


def one_text(model: nn.Module, text: Any, tokenizer: Any = None) -> tuple[dict[str, Any], Any]:
    """The model's inputs of one text, and its tokenizer.

    Raises:
        MultiheadError: more than one text.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> one_text(model, "the cat", tokenizer)[0]["input_ids"].shape
    torch.Size([1, 4])
    """
    if tokenizer is None and (holder := find_sentence_transformer(model)) is not None:
        tokenizer = holder.tokenizer
    batch, number = first_batch(model, text, tokenizer)
    if number != 1:
        raise MultiheadError(f"text holds {number} texts: expected one, for a map is of one text")
    given = {
        name: value.shape[0]
        for name, value in flatten_features(batch).items()
        if isinstance(value, torch.Tensor) and value.ndim >= 2
    }
    # of several pictures in one text, or patches one after another, the first axis is another
    sizes = {given[name] for name in TEXT if name in given} or set(given.values())
    if sizes != {1} and hasattr(
        model, "config"
    ):  # users' modules may have other axes: the call itself is checked
        raise MultiheadError(
            f"text holds {max(sizes, default=0)} texts: expected one, for a map is of one text"
        )
    return batch, tokenizer


def _pictures_of(
    model: nn.Module,
    batch: Mapping[str, Any],
    capture: Capture,
    patches: PatchGrids,
    placeholders: list[int],
) -> list[Picture]:
    """The pictures of which all patches are among the keys of a capture."""
    if capture.key_valid is None:
        return []
    places = places_of(capture.key_ids, capture.key_valid, placeholders)
    number = len(capture.key_valid)
    found = find_pictures(model, batch, patches.grids, number, places)
    return [p for p in found if capture.keys is None or max(p.keys) < capture.keys]


def _move_pictures(pictures: list[Picture], words: list[TokenGroup]) -> list[Picture]:
    """Pictures among words: each patch is a word by itself."""
    place = {word.start: n for n, word in enumerate(words)}
    return [
        Picture([place[key] for key in picture.keys], picture.shape)
        for picture in pictures
        if all(key in place for key in picture.keys)
    ]


def _words_of(
    capture: Capture, keys: int, tokenizer: Any
) -> tuple[list[TokenGroup], list[TokenGroup]]:
    """The words of the keys, and of all queries."""
    if tokenizer is None or capture.valid is None or capture.key_valid is None:
        return [], []
    number = max(keys, len(capture.key_valid))
    words = group_tokens(capture.key_ids, capture.key_valid, number, tokenizer)
    return words, group_tokens(capture.ids, capture.valid, len(capture.valid), tokenizer)


def _first_keys(head_map: HeadMap, keys: int | None) -> HeadMap:
    contributions = head_map.contributions
    return replace(
        head_map,
        tokens=head_map.tokens[:keys],
        weights=head_map.weights[:, :keys],
        contributions=None if contributions is None else contributions[:, :keys],
        words=head_map.words[:keys],
        pictures=[p for p in head_map.pictures if keys is None or max(p.keys) < keys],
    )
