"""`read_relations`: how often each head reads the word that a dependency arc names."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from ..io import Progress
from ..models.contexts import evaluation
from ..models.introspect import fingerprint, require_model
from .session import reading
from .statistics.columns import STATISTICS
from .statistics.relations import LEAST, add_relations
from .table import Table
from .words import require_offsets


def read_relations(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any,
    batch_size: int = 8,
    least: int = LEAST,
    progress: Progress | None = None,
) -> Table:
    """Measure how often each head reads the word that a dependency arc names, and the best fixed
    distance.

    Args:
        model: a transformers model that reads text. Afterwards it is as it was before.
        path: a CoNLL-U file, https://universaldependencies.org/format.html.
        tokenizer: the model's own, with character offsets ("fast").
        batch_size: sentences in one pass.
        least: relations with fewer arcs that some head may read are left out; a note names some.
        progress: called after each site of each batch with the number so far, the total, and
            "reading relations".

    Returns:
        A table with a column for each relation and direction (docs/reading.md, Relations): `value`
        is the accuracy, `count` the number of arcs, and a document is a sentence.
        `table.meta["relations"]` has the baseline of each column, `{"offset": words, negative to
        the left, "accuracy", "arcs", "hits"}`. Tables of two files add up, baselines included.

    Raises:
        FileNotFoundError: no such file.
        MultiheadError: not CoNLL-U; a tokenizer without character offsets; no sentence that can be
            read; a model that doesn't read text.
        ReadingError: a model that would be read wrongly; names the first site that differs.

    >>> import multihead, tempfile
    >>> from pathlib import Path
    >>> tree = ["1 The _ _ _ _ 2 det _ _", "2 cat _ _ _ _ 3 nsubj _ _", "3 sat _ _ _ _ 0 root _ _"]
    >>> file = Path(tempfile.mkdtemp()) / "one.conllu"
    >>> _ = file.write_text("\\n".join(tree).replace(" ", "\\t"))
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.reader.read_relations(model, file, tokenizer=tokenizer, least=1)
    >>> table.columns, table.meta["relations"]["relation:^det"]["offset"]
    (['relation:^all', 'relation:^det', 'relation:^nsubj'], -1)
    """
    model = require_model(model)
    require_offsets(tokenizer)
    with evaluation(model), reading(model) as session:
        session.count(
            *add_relations(session, path, tokenizer, batch_size, least=least, progress=progress)
        )
        session.reasons |= dict.fromkeys(
            STATISTICS, "only relations were read; multihead.read reads it"
        )
    table = session.table()
    table.meta |= {
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "text": str(path),
        "fingerprint": fingerprint(model),
    }
    return table
