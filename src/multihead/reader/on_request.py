"""What a reading does beyond the plain pass: classes of tokens that a user names, and statistics
that are asked for by name.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..models.ablate import collect_head_means
from ..models.introspect import forward_kwargs
from .loss import remove, weigh, whole_of
from .nearest import Nearest
from .statistics import ADDED, Added, require_also

if TYPE_CHECKING:
    from .row_stats import Text
    from .session import Reading


def classes_of(classes: Mapping[str, str] | None, tokenizer: Any) -> list[Added]:
    """A statistic `class:NAME` for each pattern: the mass on tokens in whose text the regular
    expression is found.
    """
    if not classes:
        return []
    if not isinstance(classes, Mapping) or not all(
        isinstance(x, str) for pair in classes.items() for x in pair
    ):
        raise TypeError(
            f"classes={classes!r}: expected names of classes with a regular expression each,"
            " such as "
            r'{"digits": r"\d"}'
        )
    if tokenizer is None:
        raise MultiheadError(
            f"classes={dict(classes)!r} are of tokens' texts, but tokenizer is None: pass the"
            " tokenizer"
        )
    found = []
    for name, pattern in classes.items():
        if not re.fullmatch(r"[\w.-]{1,60}", name):
            raise MultiheadError(
                f"classes: {name!r} isn't a name; expected up to 60 letters, digits, _, . or -, as"
                " in digits=\\d"
            )
        try:
            found.append(Added(f"class:{name}", keys=_Class(re.compile(pattern), tokenizer)))
        except re.error as error:
            raise MultiheadError(
                f"classes: {name}={pattern!r} isn't a regular expression ({error}); mend it, or"
                " escape its signs with a backslash"
            ) from error
    return found


class _Class:
    """Which keys are in the class: each token that turns up is looked at once."""

    def __init__(self, pattern: re.Pattern[str], tokenizer: Any) -> None:
        self.pattern, self.tokenizer = pattern, tokenizer
        self.known: dict[int, bool] = {-1: False}

    def __call__(self, text: Text) -> Tensor | None:
        if text.key_ids is None:
            return None
        ids, place = text.key_ids.unique(return_inverse=True)
        members = [self._member(i) for i in ids.tolist()]
        return torch.tensor(members, device=place.device)[place]

    def _member(self, token: int) -> bool:
        if token not in self.known:
            said = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
            self.known[token] = self.pattern.search(said) is not None
        return self.known[token]


class Beyond:
    """What one reading does beyond plain passes."""

    def __init__(
        self,
        classes: Mapping[str, str] | None,
        also: str | Iterable[str],
        relations: str | os.PathLike[str] | None,
        tokenizer: Any,
    ) -> None:
        self.also = require_also(also)
        self.removing = self.also & {"effect", "effect_mean"}
        self.named = classes_of(classes, tokenizer)
        self.classes, self.relations = dict(classes or {}), relations
        if relations is not None and Path(relations).is_dir():
            raise MultiheadError(
                f"relations={str(relations)!r} is a folder; give a CoNLL-U file in it"
            )
        if relations is not None and not Path(relations).exists():
            raise FileNotFoundError(
                f"relations={str(relations)!r}: there is no such file; give a CoNLL-U file"
            )
        file = (
            None
            if relations is None
            else hashlib.sha256(Path(relations).read_bytes()).hexdigest()[:16]
        )
        self.told = [
            sorted(self.also),
            self.classes,
            sorted(ADDED),
            file,
        ]  # what the numbers depend on
        self.kept: list[_Kept] = []  # for `effect_mean`

    def begin(self, session: Reading) -> None:
        session.added += self.named
        if self.classes:
            session.meta["classes"] = self.classes
        for name in self.also:
            session.reasons.pop(name)  # "only on request"
        if "nearest" in self.also:
            session.watchers.append(Nearest(session))

    def removals(self, session: Reading) -> int:
        """Passes a batch that leave a head out."""
        return len(self.removing) * sum(site.num_heads for site in session.sites)

    def one_pass(self, session: Reading, batch: Mapping[str, Any]) -> None:
        """The model runs once over a batch under reading, and what can be asked of a batch by
        itself is.
        """
        if "importance" in self.also:
            weigh(session, batch)
        else:
            session.model(
                **(whole_of if self.removing else forward_kwargs)(session.model, dict(batch))
            )
        if "effect" in self.also:
            remove(session, batch, {})
        if "effect_mean" in self.also:
            self.kept.append(_Kept(batch, session.document_of, session.opened, session.select))

    def close(self) -> None:
        """The documents of the last passes are at their end."""
        if self.kept:
            self.kept[-1] = self.kept[-1]._replace(ends=True)

    def end(self, session: Reading) -> None:
        """All texts were read: `effect_mean`, for which the means of all of them are needed."""
        if not self.kept:
            return
        with session.aside():
            means = collect_head_means(
                session.model,
                session.sites,
                [whole_of(session.model, kept.batch) for kept in self.kept],
            )
        for kept in self.kept:
            session.open(kept.document_of, kept.documents)
            session.select = kept.select
            remove(session, kept.batch, means)
            if kept.ends:
                for observer in session.observers:
                    observer.close()
        session.open(None)
        session.select = None


class _Kept(NamedTuple):
    """A pass, and whose rows its rows were."""

    batch: Mapping[str, Any]
    document_of: Tensor | None
    documents: int
    select: Tensor | None
    ends: bool = False
