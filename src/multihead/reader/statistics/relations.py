"""`relation:NAME`: heads that follow dependency arcs of a CoNLL-U file (Clark et al. 2019, "What
Does BERT Look At?").

The weight of a head between two words is its weight between their tokens, summed over the tokens of
the word that is read and averaged over the tokens of the word that reads. Special tokens, and the
word itself, are left out; the word read most is the one with the largest weight of the rest.
`relation:nsubj` is the share of nsubj arcs on which the dependent (the subject) reads its head (the
verb) most; `relation:^nsubj` reverses the arc: the head reads its dependent. An arc counts where
the mask allows a token of the one word to read a token of the other: under a causal mask, where the
target is earlier. A subtype (`nsubj:pass`) counts under its own name and that of its base;
`relation:all` is every arc but the root's. Each has a baseline, the fixed distance that is right
most often on the same arcs.

A word that has several such dependents can read only one of them most, so a reversed relation may
be unable to reach 1.
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
from ...data.tokenizing import max_tokens
from ...data.windows import Window
from ...errors import MultiheadError
from ...io import Progress
from ...models.contexts import evaluation
from ...models.introspect import (
    device_of,
    forward_kwargs,
    inner_model,
    is_encoder_decoder,
    text_inputs,
)
from ...models.site import Site
from ...ops.call import AttentionCall
from ..baseline import OFFSETS, baseline, pooled
from ..conllu import read_conllu
from ..context import QueryBlock, TokenContext, Watch
from ..moments import TERMS, Sums, Y, terms
from ..words import AlignedSentence, align_words, require_offsets
from .base import CROSS, Run

LEAST = 20  # arcs
MOST_WORDS = 512  # of a sentence: a batch has a matrix of words by words for each head of a site
FEW = 6  # relations that a note names
OTHER_TOKENS = "its queries aren't the sentence's tokens"


def add_relations(
    run: Run,
    path: str | os.PathLike[str],
    tokenizer: Any,
    batch_size: int = 8,
    *,
    least: int = LEAST,
    progress: Progress | None = None,
) -> tuple[int, int]:
    """Add columns of relations, and notes, to an open reading; nothing else of it changes.

    Arguments and errors are those of `read_relations`. Returns the number of sentences and of
    tokens that were read.
    """
    require_offsets(tokenizer)
    for name, value in (("batch_size", batch_size), ("least", least)):
        if value < 1:
            raise MultiheadError(f"{name}={value}: expected 1 or more")
    model = run.model
    inner = inner_model(model)
    if getattr(inner, "main_input_name", "input_ids") != "input_ids":
        raise MultiheadError(
            f"{type(inner).__name__} takes {inner.main_input_name}, not text, so it has no words;"
            " give a model that reads text"
        )
    sentences = _align_sentences(run, path, tokenizer)
    counts = Counter(name for s in sentences for _, _, deprel in s.arcs for name in _names(deprel))
    names = sorted(counts, key=lambda name: (name != "all", -counts[name], name))
    scorer = _ArcScorer([f"relation:{reverse}{name}" for name in names for reverse in ("", "^")])
    total = -(-len(sentences) // batch_size) * len(run.sites)
    done = itertools.count(1)
    run.watchers.append(scorer)
    on_site = (lambda: progress(next(done), total, "reading relations")) if progress else None
    device = device_of(model)
    try:
        with evaluation(model), torch.no_grad(), run.passes(counting=False, on_site=on_site):
            for start in range(0, len(sentences), batch_size):
                batch = scorer.begin(sentences[start : start + batch_size], tokenizer, device)
                if is_encoder_decoder(model):
                    batch |= decoder_inputs(model, batch)
                model(**forward_kwargs(model, text_inputs(model, batch)))
                scorer.end()
    finally:
        run.watchers.remove(scorer)
    _add_to_table(run, scorer, least, path)
    return len(sentences), sum(len(s.ids) for s in sentences)


def _names(deprel: str) -> set[str]:
    return {"all", deprel, deprel.partition(":")[0]}


def _align_sentences(
    run: Run, path: str | os.PathLike[str], tokenizer: Any
) -> list[AlignedSentence]:
    """The sentences of the file as tokens, short ones first, so that little is padded; notes count
    those that are left out.
    """
    model: Any = run.model
    limit = max_tokens(model, tokenizer)
    sentences: list[AlignedSentence] = []
    left_out: dict[str, list[int]] = {}  # why -> lines
    for sentence in read_conllu(path):
        aligned = align_words(sentence, tokenizer)
        if aligned is None:
            why = "in which two words share a token or a word has none"
        elif aligned.words > MOST_WORDS or (limit is not None and len(aligned.ids) > limit):
            why = f"of more than {MOST_WORDS} words or the model's {limit} positions"
        else:
            sentences.append(aligned)
            continue
        left_out.setdefault(why, []).append(sentence.line)
    notes = [
        f"relations: left out {len(lines)} sentence{'s' if len(lines) > 1 else ''} {why}; the first"
        f" in line {lines[0]} of {path}"
        for why, lines in left_out.items()
    ]
    if not any(s.arcs for s in sentences):
        raise MultiheadError(
            f"path={str(path)!r} has no arc that can be read with this tokenizer"
            f" ({'; '.join(notes) or 'its sentences have a single word each'}); expected sentences"
            " of several words"
        )
    run.notes += notes
    return sorted(sentences, key=lambda s: len(s.ids))


def _add_to_table(run: Run, scorer: _ArcScorer, least: int, path: str | os.PathLike[str]) -> None:
    """Add relations with enough arcs (`all` with one) to the table, with their baselines, and the
    reasons where a site has none.
    """
    arcs = scorer.offsets.sum(1)
    baselines = {
        column: baseline(counts[:-1].tolist(), int(counts.sum()))
        for column, counts in zip(scorer.columns, scorer.offsets)
        if counts.sum() >= (1 if column in ("relation:all", "relation:^all") else least)
    }
    run.meta["relations"] = pooled(run.meta.get("relations", {}), baselines)
    few = [
        f"{scorer.columns[n]} ({arcs[n]})"
        for n in np.argsort(-arcs, kind="stable")
        if scorer.columns[n] not in baselines
    ]
    if few:
        more = f" and {len(few) - FEW} more" if len(few) > FEW else ""
        run.notes.append(
            f"relations of which fewer than least={least} arcs of {path} can be read are left out: "
            f"{', '.join(few[:FEW])}{more}"
        )
    for record in run.records:
        site = record.site.name
        sums = scorer.sums.get(site)
        for n, column in enumerate(scorer.columns):
            if column not in baselines:
                continue
            if sums is not None and sums[n, :, Y].any():
                record.table.add_sums(column, sums[n])
                run.reasons.pop(f"{site} {column}", None)
            elif column not in record.table.sums and record.reached:
                run.reasons[f"{site} {column}"] = scorer.skipped.get(
                    site, "no such arc whose target may be read here"
                )


class _ArcScorer:
    """Watches the weights between tokens, sums those between words, and scores the arcs once a site
    is complete.
    """

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns
        self.number = {column: n for n, column in enumerate(columns)}
        self.sums: dict[str, Sums] = {}  # by site: [columns, heads, 7]
        # number of arcs at each of OFFSETS, and at any other distance last: [columns, offsets + 1]
        self.offsets = np.zeros((len(columns), len(OFFSETS) + 1), np.int64)
        self.skipped: dict[str, str] = {}  # site -> why

    def begin(
        self, sentences: list[AlignedSentence], tokenizer: Any, device: torch.device
    ) -> dict[str, Tensor]:
        """The model inputs of one batch, padded on the right."""
        size, length = len(sentences), max(len(s.ids) for s in sentences)
        words = max(s.words for s in sentences)
        batch = collate([Window(s.ids, 0, len(s.ids)) for s in sentences], tokenizer).to(device)
        self.ids, self.mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        member = torch.zeros(size, length, words, device="cpu")  # 1 where a token belongs to a word
        arcs: list[tuple[int, int, int, int]] = []  # sentence, reading word, read word, column
        for b, s in enumerate(sentences):
            for token, word in enumerate(s.word_of):
                if word >= 0:
                    member[b, token, word] = 1
            for dependent, head, deprel in s.arcs:
                for name in sorted(_names(deprel)):
                    arcs.append((b, dependent, head, self.number[f"relation:{name}"]))
                    arcs.append((b, head, dependent, self.number[f"relation:^{name}"]))
        self.member = member.to(device)
        self.arcs = torch.tensor(arcs, dtype=torch.int64, device=device).reshape(-1, 4).T
        # whether some head of some site may read the one word from the other
        self.readable = torch.zeros(size, words, words, dtype=torch.bool, device=device)
        return batch.inputs

    def at(self, site: Site, call: AttentionCall, context: TokenContext) -> Watch | None:
        """A call of a site begins: sum its weights over the tokens of words, block by block."""
        if reason := self._why_skipped(site, context):
            self.skipped[site.name] = reason
            return None
        size, _, words = self.member.shape
        work = torch.promote_types(call.q.dtype, torch.float32)
        member = self.member.to(work)[:, None]  # [B, 1, L, W]
        weights = member.new_zeros(size, call.q.shape[1], words, words)
        readable = member.new_zeros(size, 1, words, words)

        def watch(block: QueryBlock) -> None:
            nonlocal weights, readable
            keys, rows = member[:, :, block.keys], member[:, :, block.rows]
            # a sum over the tokens of the reading word is their mean times a factor that is the
            # same for every target
            weights += rows.mT @ (block.weights @ keys)
            allowed = block.weights.new_ones(1) if block.allowed is None else block.allowed.to(work)
            shape = torch.broadcast_shapes(allowed.shape, (1, 1, rows.shape[2], keys.shape[2]))
            readable = readable + rows.mT @ (allowed.expand(shape) @ keys)
            if block.rows.stop == member.shape[2]:
                self._score(site, weights, readable > 0)

        return watch

    def _why_skipped(self, site: Site, context: TokenContext) -> str:
        """Why a site doesn't read the tokens of this batch, "" where it does."""
        if site.kind == "cross":
            return CROSS
        if context.query_ids is None:
            return context.ids_reason
        same = context.query_ids.shape == self.ids.shape and bool(
            ((context.query_ids == self.ids) | (self.mask == 0)).all()
        )
        return "" if same else OTHER_TOKENS

    def _score(self, site: Site, weights: Tensor, readable: Tensor) -> None:
        """True where the word that each reads most is the arc's, from weights `[B, H, W, W]` and
        bool `[B, 1 or H, W, W]`.
        """
        heads = weights.shape[1]
        readable = readable & ~torch.eye(
            readable.shape[-1], dtype=torch.bool, device=readable.device
        )
        self.readable |= readable.any(1)
        most = weights.masked_fill(~readable, -1).argmax(-1)
        b, reader, target, column = self.arcs
        counts = readable.expand(-1, heads, -1, -1)[b, :, reader, target]  # [arcs, H]
        right = counts & (most[b, :, reader] == target[:, None])
        documents, which = torch.stack([b, column]).unique(dim=1, return_inverse=True)
        zeros = torch.zeros(documents.shape[1], heads, device=b.device)
        x, y = (
            zeros.index_add(0, which, arcs.float()).double().cpu().numpy()
            for arcs in (right, counts)
        )
        some = y.any(1)  # a sentence without such an arc is no document of the column
        sums = self.sums.setdefault(site.name, np.zeros((len(self.columns), heads, TERMS + 1)))
        np.add.at(sums, documents[1].cpu().numpy()[some], terms(x[some], y[some], y[some]))

    def end(self) -> None:
        """Count the arcs of the batch by distance, those that some head may read."""
        b, reader, target, column = self.arcs
        counts = self.readable[b, reader, target]
        distance = (target - reader)[counts]
        place = torch.full_like(distance, len(OFFSETS))
        for n, offset in enumerate(OFFSETS):
            place[distance == offset] = n
        np.add.at(self.offsets, (column[counts].cpu().numpy(), place.cpu().numpy()), 1)
