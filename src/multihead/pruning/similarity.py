"""Agreement of a model's text similarities with human ones: a task for encoders, which have no loss
on a text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.batch import collate
from ..data.tokenizing import max_tokens
from ..data.windows import Windower
from ..errors import MultiheadError
from ..io import read_regular_file
from ..models.contexts import evaluation
from ..models.introspect import (
    device_of,
    find_sentence_transformer,
    forward_kwargs,
    is_encoder_decoder,
    is_sentence_transformer,
    unwrap,
)
from .losses import Difference, percentile_interval

__all__ = ["Agreement", "Similarity", "embed", "load_pairs"]

Floats = NDArray[np.float64]
RESAMPLES = 2000
NAMES = ("a", "b", "score")


@dataclass(frozen=True)
class Agreement:
    """Correlation of a model's similarities with human ones: of the values (Pearson), and of their
    ranks (Spearman).

    >>> Agreement(pearson=0.62, spearman=0.58).pearson
    0.62
    """

    pearson: float
    spearman: float


@dataclass(frozen=True, eq=False)
class Similarity:
    """Documents, and human scores of the similarity of some pairs of them. `load_pairs` reads it
    from a file.

    Args:
        documents: the texts.
        pairs: int64 `[P, 2]`, numbers of documents.
        scores: float64 `[P]`, higher is more similar.

    Raises:
        MultiheadError: shapes that don't fit, fewer than 3 pairs, equal or non-finite scores.

    >>> pairs, scores = np.array([[0, 1], [0, 2], [1, 2]]), np.array([0.9, 0.2, 0.1])
    >>> task = Similarity(["a cat", "the cat", "a bill"], pairs, scores)
    >>> near, far = np.array([[1, 0.1], [1, 0], [0, 1.0]]), np.array([[0, 1.0], [1, 0], [0.1, 1]])
    >>> task.agreement(near).pearson > 0.9 > task.agreement(far).pearson
    True
    """

    documents: Sequence[str]
    pairs: NDArray[np.int64]
    scores: Floats

    def __post_init__(self) -> None:
        shape = np.shape(self.pairs)
        if len(shape) != 2 or shape[1] != 2 or np.shape(self.scores) != shape[:1]:
            raise MultiheadError(
                f"pairs {list(shape)} and scores {list(np.shape(self.scores))}: expected [P, 2] and"
                " [P], two documents' numbers and a score for each pair"
            )
        if shape[0] < 3 or np.ptp(self.scores) == 0:
            raise MultiheadError(
                f"scores of {shape[0]} pairs hold {len(np.unique(self.scores))} different values:"
                " expected at least 3 pairs, not all with one score, as nothing correlates with a"
                " constant"
            )
        if np.min(self.pairs) < 0 or np.max(self.pairs) >= len(self.documents):
            raise MultiheadError(
                f"pairs name documents {np.min(self.pairs)} to {np.max(self.pairs)}; there are "
                f"{len(self.documents)}, numbered from 0"
            )
        if not np.isfinite(self.scores).all():
            raise MultiheadError(
                "scores hold a value that isn't a finite number; leave its pair out"
            )

    def agreement(self, embeddings: Floats) -> Agreement:
        """Pearson's and Spearman's correlation of the cosines of embeddings `[documents, D]` with
        the scores.
        """
        cosines, scores = self._cosines(embeddings), np.asarray(self.scores, float)
        even = np.ones(len(scores))
        return Agreement(
            float(_correlation(cosines, scores, even)),
            float(_correlation(_ranks(cosines), _ranks(scores), even)),
        )

    def compare(self, a: Floats | Sequence[Floats], b: Floats) -> Difference:
        """The correlation (Pearson) of `b` minus that of `a`, or the mean of several, with a 95%
        interval.

        Args:
            a: embeddings `[documents, D]`, or several such, for instance of random plans: `b` is
                compared with the mean of their correlations.
            b: embeddings `[documents, D]`.

        The interval is the percentile bootstrap with a fixed seed, paired: documents are drawn
            again and a pair counts as
        often as both its documents were drawn, so that it is known that pairs share documents.
        Where no document is in two pairs, pairs are drawn.
        """
        others = [a] if isinstance(a, np.ndarray) and a.ndim == 2 else list(a)
        if not others:
            raise MultiheadError("a=[] is empty: expected the embeddings of at least one model")
        cosines, scores = (
            [self._cosines(one) for one in [*others, b]],
            np.asarray(self.scores, float),
        )

        def change(weights: Floats) -> Floats:
            each = [_correlation(values, scores, weights) for values in cosines]
            return each[-1] - np.mean(each[:-1], axis=0)

        random, number = np.random.default_rng(0), len(self.documents)
        apart = np.bincount(np.ravel(self.pairs), minlength=number).max() == 1
        units = len(self.pairs) if apart else number
        drawn = []
        for start in range(0, RESAMPLES, step := max(1, 2**22 // max(units, len(scores)))):
            times = random.multinomial(
                units, np.full(units, 1 / units), size=min(step, RESAMPLES - start)
            ).astype(float)
            drawn.append(
                change(times if apart else times[:, self.pairs[:, 0]] * times[:, self.pairs[:, 1]])
            )
        return Difference(
            float(change(np.ones(len(scores)))),
            *percentile_interval(np.concatenate(drawn), number),
            number,
        )

    def _cosines(self, embeddings: Floats) -> Floats:
        found = np.asarray(embeddings, float)
        if found.ndim != 2 or len(found) != len(self.documents):
            raise MultiheadError(
                f"embeddings {list(found.shape)}: expected one row for each of the"
                f" {len(self.documents)} documents, as embed(model, task.documents,"
                " tokenizer=tokenizer) gives"
            )
        if not np.isfinite(found).all():
            raise MultiheadError(
                "embeddings hold values that aren't finite numbers; load the model with"
                " dtype='float32', and check the weights if that doesn't help"
            )
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return (found[self.pairs[:, 0]] * found[self.pairs[:, 1]]).sum(1)


def load_pairs(path: str | Path) -> Similarity:
    """Read pairs of texts from a file of JSON lines, an object a line: `{"a": "one text", "b":
    "another", "score": 0.4}`.

    A text that is in several lines is one document. Empty lines are left out.

    Raises:
        FileNotFoundError: no such file.
        MultiheadError: a line that is something else, with its number; too few pairs.

    >>> import tempfile
    >>> lines = [f'{{"a": "text {n}", "b": "text {n + 1}", "score": {n}}}' for n in range(3)]
    >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    ...     _ = file.write("\\n".join(lines)), file.flush()
    ...     task = load_pairs(file.name)
    >>> len(task.documents), task.pairs.tolist()
    (4, [[0, 1], [1, 2], [2, 3]])
    """
    file = Path(path).expanduser()
    if not file.exists():
        raise FileNotFoundError(
            f"similarity={str(path)!r}: there is no such file; give JSON lines with"
            f" {', '.join(NAMES)}"
        )
    content = read_regular_file(file, f"similarity={str(path)!r}")
    number: dict[str, int] = {}
    pairs, scores = [], []
    for line_number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line.decode("utf-8-sig"))
            a, b, score = (entry[name] for name in NAMES)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _bad_line(path, line_number, line) from None
        texts = isinstance(a, str) and isinstance(b, str) and a.strip() and b.strip()
        if not texts or isinstance(score, bool) or not isinstance(score, (int, float)):
            raise _bad_line(path, line_number, line)
        pairs.append([number.setdefault(text, len(number)) for text in (a, b)])
        scores.append(float(score))
    return Similarity(list(number), np.array(pairs, np.int64).reshape(-1, 2), np.array(scores))


def _bad_line(path: str | Path, line_number: int, line: bytes) -> MultiheadError:
    shown = line[:60].decode("utf-8", "replace") + ("…" if len(line) > 60 else "")
    return MultiheadError(
        f"similarity={str(path)!r}, line {line_number:,}: {shown}: expected two texts and a number,"
        f" such as "
        '{"a": "one text", "b": "another", "score": 0.4}'
    )


def embed(
    model: nn.Module, documents: Sequence[str], *, tokenizer: Any = None, batch_size: int = 8
) -> Floats:
    """Embed documents as vectors of length 1, float64 `[documents, D]`: the mean of the last layer
    over all tokens, without padding.

    Models of sentence-transformers of this kind are trained for that; one of the library's classes
    pools as it does. Longer documents are cut to the model's positions.

    Args:
        model: an encoder, in the class that AutoModel loads. It is put in evaluation mode and
            restored.
        documents: the texts.
        tokenizer: the model's tokenizer; not needed for sentence-transformers.
        batch_size: documents a pass.

    Raises:
        TypeError: not a model.
        MultiheadError: no document, an empty one, no tokenizer, a model without a vector for each
            token.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> vectors = embed(model, ["the cat sat", "a dog ran"], tokenizer=tokenizer)
    >>> len(vectors), bool(np.allclose((vectors**2).sum(1), 1))
    (2, True)
    """
    model = unwrap(model)
    is_sentence = is_sentence_transformer(model)
    if tokenizer is None and (holder := find_sentence_transformer(model)) is not None:
        tokenizer = holder.tokenizer
    stack: Any = getattr(model, "base_model", model)
    if is_encoder_decoder(model):
        stack = stack.get_encoder()
    if not documents:
        raise MultiheadError("texts=[] holds no text; give at least one")
    windower = Windower(tokenizer, limit=max_tokens(model, tokenizer), model=model)
    windows = [window for text in documents for window in windower.cut(text)]
    device = device_of(model)
    parts = []
    with evaluation(model), torch.no_grad():
        for start in range(0, len(windows), batch_size):
            batch = collate(windows[start : start + batch_size], tokenizer).to(device).inputs
            output = model(batch) if is_sentence else stack(**forward_kwargs(stack, batch))
            if is_sentence:
                parts.append(output["sentence_embedding"].double().cpu())
                continue
            hidden = getattr(output, "last_hidden_state", None)
            if not isinstance(hidden, Tensor) or hidden.shape[:2] != batch["input_ids"].shape:
                raise MultiheadError(
                    f"{type(model).__name__} gives no last_hidden_state, a vector for each token,"
                    " to take the mean of; give an encoder as AutoModel.from_pretrained(folder)"
                    " loads it"
                )
            valid = batch["attention_mask"][..., None].double()
            parts.append(((hidden.double() * valid).sum(1) / valid.sum(1)).cpu())
    vectors = torch.cat(parts)
    return (vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-12)).numpy()


def _correlation(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Pearson's correlation of `[P]` values with weights `[..., P]`; NaN if one is constant."""
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = weights / weights.sum(-1, keepdims=True)
        x, y = x - (weights @ x)[..., None], y - (weights @ y)[..., None]
        return (weights * x * y).sum(-1) / np.sqrt(
            (weights * x * x).sum(-1) * (weights * y * y).sum(-1)
        )


def _ranks(values: Floats) -> Floats:
    """Ranks; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
