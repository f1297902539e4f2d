"""Which heads read a word's dependency relations: from a CoNLL-U file (Clark et al. 2019, "What
does BERT look at?").

The weights of a head between two words are its weights between their tokens, summed over the pieces
of the word that is read and averaged over the pieces of the word that reads. Special tokens, and
the word itself, are left out; the word read most is the one with the largest weight of the rest.
`relation:nsubj` is the share of arcs nsubj on which the dependent (the subject) reads its head (the
verb) most; `relation:^nsubj` is the same arc turned round: the head reads its dependent.
An arc counts, as one row, where the mask lets a piece of the one word read a piece of the other:
    under a causal mask, where
the target is earlier. A subtype (`nsubj:pass`) counts under its own name and under that of its
base; `relation:all` is all arcs but the root's. Beside each stands its baseline, the fixed distance
that is right most often on the same arcs.

A word that has several such dependents can read one of them most, so a turned relation needs not be
able to reach 1.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.batch import collate, decoder_inputs
from ...data.tokenizing import max_positions
from ...data.windows import Window
from ...errors import MultiheadError
from ...io import Progress
from ...models.introspect import forward_kwargs, is_encoder_decoder
from ...models.site import Site
from ...models.transformers import evaluation
from ...ops.call import AttentionCall
from ..baseline import OFFSETS, baseline, pooled
from ..conllu import read_conllu
from ..context import Text, Watch, Weights
from ..moments import TERMS, Sums, Y, terms
from ..words import Aligned, align, require_offsets

LEAST = 20  # arcs
MOST_WORDS = 512  # of a sentence: a batch holds a matrix of words by words for each head of a site
FEW = 6  # that a note names
DECODER = "its rows aren't the sentence's tokens, one by one"


def add_relations(
    session: Any,
    path: str | os.PathLike[str],
    tokenizer: Any,
    batch_size: int = 8,
    *,
    least: int = LEAST,
    progress: Progress | None = None,
) -> tuple[int, int]:
    """The same within an open reading, behind its text: columns and notes are added to its table,
    and nothing else of it is touched. See `relations` for arguments and errors. Returns the number
    of sentences and of tokens that were read.
    """
    require_offsets(tokenizer)
    for name, value in (("batch_size", batch_size), ("least", least)):
        if value < 1:
            raise MultiheadError(f"{name}={value}: expected 1 or more")
    model = session.model
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise MultiheadError(
            f"{type(model).__name__} takes {model.main_input_name}, not text, so it reads no words;"
            " give a model that reads text"
        )
    sentences = _aligned(session, path, tokenizer)
    names = list(
        dict.fromkeys(name for s in sentences for _, _, deprel in s.arcs for name in _names(deprel))
    )
    counted = Counter(name for s in sentences for _, _, deprel in s.arcs for name in _names(deprel))
    names.sort(key=lambda name: (name != "all", -counted[name], name))
    watcher = _Relations([f"relation:{turned}{name}" for name in names for turned in ("", "^")])
    total = -(-len(sentences) // batch_size) * len(session.sites)
    done = itertools.count(1)
    session.watchers.append(watcher)
    on_site = (lambda: progress(next(done), total, "reading relations")) if progress else None
    try:
        with evaluation(model), torch.no_grad(), session.passes(counting=False, on_site=on_site):
            for start in range(0, len(sentences), batch_size):
                batch = watcher.begin(
                    sentences[start : start + batch_size],
                    tokenizer,
                    next(model.parameters()).device,
                )
                if is_encoder_decoder(model):
                    batch |= decoder_inputs(model, batch)
                model(**forward_kwargs(model, batch))
                watcher.end()
    finally:
        session.watchers.remove(watcher)
    _report(session, watcher, least, path)
    return len(sentences), sum(len(s.ids) for s in sentences)


def _names(deprel: str) -> set[str]:
    return {"all", deprel, deprel.partition(":")[0]}


def _aligned(session: Any, path: str | os.PathLike[str], tokenizer: Any) -> list[Aligned]:
    """The file's sentences in tokens, short ones first (so that little is padded); notes say which
    can't be read.
    """
    limit = max_positions(session.model.config, tokenizer)
    found: list[Aligned] = []
    lost: dict[str, list[int]] = {}
    for sentence in read_conllu(path):
        aligned = align(sentence, tokenizer)
        if aligned is None:
            lost.setdefault("in which two words share a token or a word has none", []).append(
                sentence.line
            )
        elif aligned.words > MOST_WORDS or (limit is not None and len(aligned.ids) > limit):
            lost.setdefault(
                f"of more than {MOST_WORDS} words or the model's {limit} positions", []
            ).append(sentence.line)
        else:
            found.append(aligned)
    notes = [
        f"relations: left out {len(lines)} sentence{'s' if len(lines) > 1 else ''} {why}; the first"
        f" in line {lines[0]} of {path}"
        for why, lines in lost.items()
    ]
    if not any(s.arcs for s in found):
        raise MultiheadError(
            f"path={str(path)!r} holds no arc that can be read with this tokenizer"
            f" ({'; '.join(notes) or 'its sentences have a single word each'}); expected sentences"
            " of several words"
        )
    session.notes += notes
    return sorted(found, key=lambda s: len(s.ids))


def _report(session: Any, watcher: _Relations, least: int, path: str | os.PathLike[str]) -> None:
    """What was found goes to the reading's table: relations with enough arcs, all, and why a site
    has none.
    """
    arcs = watcher.hits.sum(1)
    found = {
        column: baseline(hits[:-1].tolist(), int(hits.sum()))
        for column, hits in zip(watcher.columns, watcher.hits)
        if hits.sum()
        >= (1 if column.removeprefix("relation:^").removeprefix("relation:") == "all" else least)
    }
    session.meta["relations"] = pooled(session.meta.get("relations", {}), found)
    few = [
        f"{watcher.columns[n]} ({arcs[n]})"
        for n in np.argsort(-arcs, kind="stable")
        if watcher.columns[n] not in found
    ]
    if few:
        more = f" and {len(few) - FEW} more" if len(few) > FEW else ""
        session.notes.append(
            f"relations of which fewer than least={least} arcs of {path} can be read are left out: "
            f"{', '.join(few[:FEW])}{more}"
        )
    for record in session.records:
        site = record.site.name
        for n, column in enumerate(watcher.columns):
            sums = watcher.sums.get(site)
            if column in found and sums is not None and sums[n, :, Y].any():
                record.table.add_sums(column, sums[n])
                session.reasons.pop(f"{site} {column}", None)
            elif column in found and column not in record.table.sums and record.reached:
                session.reasons[f"{site} {column}"] = watcher.skipped.get(
                    site, "no such arc whose target may be read here"
                )


class _Relations:
    """Looks at the weights between tokens on the way past, and keeps those between words until a
    site is done.
    """

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns
        self.number = {column: n for n, column in enumerate(columns)}
        self.sums: dict[str, Sums] = {}  # site -> [columns, heads, 7]
        self.hits = np.zeros(
            (len(columns), len(OFFSETS) + 1), np.int64
        )  # arcs at each offset, at any other last
        self.skipped: dict[str, str] = {}

    def begin(
        self, sentences: list[Aligned], tokenizer: Any, device: torch.device
    ) -> dict[str, Tensor]:
        """The inputs of one batch, padded on the right."""
        size, length, words = (
            len(sentences),
            max(len(s.ids) for s in sentences),
            max(s.words for s in sentences),
        )
        batch = collate([Window(s.ids, 0, len(s.ids)) for s in sentences], tokenizer).to(device)
        self.ids, self.mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        member = torch.zeros(size, length, words)  # 1 where a token is a piece of a word
        arcs: list[tuple[int, int, int, int]] = []  # sentence, reading word, read word, column
        for b, s in enumerate(sentences):
            pieces = [(n, word) for n, word in enumerate(s.word_of) if word >= 0]
            member[b, [n for n, _ in pieces], [word for _, word in pieces]] = 1
            for dependent, head, deprel in s.arcs:
                for name in sorted(_names(deprel)):
                    arcs.append((b, dependent, head, self.number[f"relation:{name}"]))
                    arcs.append((b, head, dependent, self.number[f"relation:^{name}"]))
        self.member = member.to(device)
        self.arcs = torch.tensor(arcs, dtype=torch.int64, device=device).reshape(-1, 4).T
        self.readable = torch.zeros(
            size, words, words, dtype=torch.bool, device=device
        )  # at any site
        return batch.inputs

    def at(self, site: Site, call: AttentionCall, text: Text) -> Watch | None:
        """A site's call begins: sum its weights over the words' pieces, block by block."""
        if reason := self._another(site, text):
            self.skipped[site.name] = reason
            return None
        size, words = self.member.shape[0], self.member.shape[2]
        work = torch.promote_types(call.q.dtype, torch.float32)
        member = self.member.to(work)[:, None]  # [B, 1, L, W]
        weights = member.new_zeros(size, call.q.shape[1], words, words)
        may = member.new_zeros(size, 1, words, words)

        def watch(block: Weights) -> None:
            nonlocal weights, may
            keys, rows = member[:, :, block.keys], member[:, :, block.rows]
            # a sum over the reading word's pieces is their mean times a number that is the same for
            # every target
            weights += rows.mT @ (block.weights @ keys)
            allowed = block.weights.new_ones(1) if block.allowed is None else block.allowed.to(work)
            allowed = allowed.expand(
                torch.broadcast_shapes(allowed.shape, (1, 1, rows.shape[2], keys.shape[2]))
            )
            may = may + rows.mT @ (allowed @ keys)
            if block.rows.stop == member.shape[2]:
                self._score(site, weights, may > 0)

        return watch

    def _another(self, site: Site, text: Text) -> str:
        """Why a site doesn't read this batch's tokens, "" where it does."""
        if site.kind == "cross":
            return "cross-attention: the keys are another sequence's"
        if text.ids is None:
            return text.reason
        same = text.ids.shape == self.ids.shape and bool(
            ((text.ids == self.ids) | (self.mask == 0)).all()
        )
        return "" if same else DECODER

    def _score(self, site: Site, weights: Tensor, may: Tensor) -> None:
        """weights `[B, H, W, W]` and may `[B, 1 or H, W, W]`: which word does each read most, and
        is it the arc's?
        """
        heads = weights.shape[1]
        may = may & ~torch.eye(may.shape[-1], dtype=torch.bool, device=may.device)
        self.readable |= may.any(1)
        most = weights.masked_fill(~may, -1).argmax(-1)
        b, reader, target, column = self.arcs
        counts = may.expand(-1, heads, -1, -1)[b, :, reader, target]  # [arcs, H]
        right = counts & (most[b, :, reader] == target[:, None])
        documents, which = torch.stack([b, column]).unique(dim=1, return_inverse=True)
        x, y = (
            torch.zeros(documents.shape[1], heads, device=b.device)
            .index_add_(0, which, found.float())
            .double()
            .cpu()
            .numpy()
            for found in (right, counts)
        )
        some = y.any(1)  # a sentence in which no such arc counts is no document of its column
        sums = self.sums.setdefault(site.name, np.zeros((len(self.columns), heads, TERMS + 1)))
        np.add.at(sums, documents[1].cpu().numpy()[some], terms(x[some], y[some], y[some]))

    def end(self) -> None:
        """The batch is read: count its arcs by distance, those that some head could read."""
        b, reader, target, column = self.arcs
        apart = (target - reader)[counts := self.readable[b, reader, target]]
        place = torch.full_like(apart, len(OFFSETS))
        for n, offset in enumerate(OFFSETS):
            place[apart == offset] = n
        np.add.at(self.hits, (column[counts].cpu().numpy(), place.cpu().numpy()), 1)
