"""Statistics that are measured on request: each costs more than a forward pass, or needs a file.

They are declared here, so that they can be listed without loading torch; each imports the module
that measures it when it runs.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import MultiheadError
from .base import Run, Statistic

Batch = Mapping[str, Any]
Forward = Callable[[Batch], Any]
LOSS_TOKENS = "tokens with a loss"


class OnRequest(Statistic):
    on_request = True


class Copying(OnRequest):
    """OV circuit of a head (Elhage et al. 2021, "A Mathematical Framework for Transformer
    Circuits").
    """

    name, formula = "copying", "sum(lambda) / sum(|lambda|), eigenvalues of W_E W_V W_O W_U"
    meaning = "from its weights: raises the logits of the tokens that it reads"
    source, range = "Elhage et al. 2021", (-1.0, 1.0)
    queries = "none: weights alone"
    cost = "one short pass and D x D products"

    def finish(self, run: Run) -> None:
        from .copying import measure_copying

        measure_copying(run)


class Importance(OnRequest):
    """First-order effect of a head on the loss (Michel et al. 2019, arXiv:1905.10650)."""

    name, formula = "importance", "|O_i . dL/dO_i|"
    meaning = "first-order effect of the head on the loss"
    unit, source, range = "nats a token", "Michel et al. 2019", (0.0, None)
    cost = "one backward pass"
    needs_logits = True

    def run_pass(self, run: Run, batch: Batch, forward: Forward) -> Any:
        from .gradient import run_with_importance

        return run_with_importance(run, batch, forward)


class Effect(OnRequest):
    """Ablation of one head at a time (Michel et al. 2019, arXiv:1905.10650)."""

    name, formula = "effect", "loss without the head - loss"
    meaning = "increase of the loss when the head's update is zero"
    unit, source, queries = "nats a token", "Michel et al. 2019", LOSS_TOKENS
    cost = "one forward pass a head"
    needs_logits, passes_per_head = True, 1

    def run_pass(self, run: Run, batch: Batch, forward: Forward) -> Any:
        from .gradient import add_ablation_effect

        output = forward(batch)
        add_ablation_effect(run, batch, {})
        return output


class EffectMean(OnRequest):
    """Mean ablation of one head at a time."""

    name, formula = "effect_mean", "loss with the head's mean - loss"
    meaning = "increase of the loss when the head's update is its mean over the text"
    unit, queries = "nats a token", LOSS_TOKENS
    cost = "one forward pass a head, and one for the means"
    needs_logits, passes_per_head, needs_all_texts = True, 1, True

    def begin(self, run: Run) -> None:
        self.passes: list[Any] = []

    def run_pass(self, run: Run, batch: Batch, forward: Forward) -> Any:
        from .gradient import RecordedPass

        recorded = RecordedPass.of(run, batch)
        output = forward(batch)
        self.passes.append(recorded)
        return output

    def finish(self, run: Run) -> None:
        from .gradient import add_mean_ablation_effects

        add_mean_ablation_effects(run, self.passes)


class Nearest(OnRequest):
    """Clusters of heads by their attention (Clark et al. 2019, arXiv:1906.04341).

    Args:
        rows: queries of each document that are compared.
        seed: of their choice.
    """

    name, formula = "nearest", "min over heads of JS(A_i, A'_i)"
    meaning = "divergence from the most similar head"
    unit, source, range = "nats", "Clark et al. 2019", (0.0, math.log(2))
    queries = "up to 32 queries of a document"
    cost = "every pair of heads on sampled queries"

    def __init__(self, rows: int = 32, seed: int = 0) -> None:
        if rows < 1:
            raise MultiheadError(f"rows={rows}: expected 1 or more")
        self.rows_per_document, self.seed = rows, seed

    def begin(self, run: Run) -> None:
        from .nearest import HeadDivergences

        run.watchers.append(HeadDivergences(run, self.rows_per_document, self.seed))

    def settings(self) -> Any:
        return self.name, self.rows_per_document, self.seed


class Relations(OnRequest):
    """Dependency relations that heads follow: the columns `relation:NAME` and `relation:^NAME`
    (Clark et al. 2019, arXiv:1906.04341).

    Args:
        path: a CoNLL-U file.
        tokenizer: the model's own, with offsets ("fast").
        batch_size: sentences in one pass.
    """

    has_column = False
    name, formula = "relations", "how often the word read most is the one a dependency arc names"
    meaning, source = "reads along dependency arcs", "Clark et al. 2019"
    cost = "a run over the CoNLL-U file"

    def __init__(self, path: str | os.PathLike[str], tokenizer: Any, batch_size: int = 8) -> None:
        if tokenizer is None:
            raise MultiheadError(
                f"relations={str(path)!r} concern words, but tokenizer is None: pass the tokenizer"
            )
        if Path(path).is_dir():
            raise MultiheadError(f"relations={str(path)!r} is a folder; give a CoNLL-U file in it")
        if not Path(path).exists():
            raise FileNotFoundError(
                f"relations={str(path)!r}: there is no such file; give a CoNLL-U file"
            )
        self.path, self.tokenizer, self.batch_size = Path(path), tokenizer, batch_size

    def settings(self) -> Any:
        return self.name, hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]

    def finish(self, run: Run) -> None:
        from .relations import add_relations

        add_relations(run, self.path, self.tokenizer, self.batch_size)
