"""What a reading does beyond the plain pass: classes of tokens that a user names, and statistics that are asked for by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .copying import copying
from .inputs import lean
from .loss import Step, remove, weigh, whole_of
from .statistics import ALSO, Added

if TYPE_CHECKING:
    from .rows import Text
    from .session import Reading


def require_also(also: str | Iterable[str]) -> frozenset[str]:
    """The names, each of a statistic that is only measured on request; `ValueError` with the nearest for another."""
    names = [also] if isinstance(also, str) else list(also)
    for name in names:
        if name not in ALSO:
            near = difflib.get_close_matches(str(name), ALSO, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"also={name!r}: {hint}expected some of {', '.join(ALSO)}")
    return frozenset(names)


def classes_of(classes: Mapping[str, str] | None, tokenizer: Any) -> list[Added]:
    """A statistic `class:NAME` for each pattern: the mass on tokens in whose text the regular expression is found."""
    if not classes:
        return []
    if not isinstance(classes, Mapping) or not all(isinstance(x, str) for pair in classes.items() for x in pair):
        raise TypeError(f"classes={classes!r}: expected names of classes with a regular expression each, such as "
                        r'{"digits": r"\d"}')
    if tokenizer is None:
        raise ValueError(f"classes={dict(classes)!r} are of tokens' texts, but tokenizer is None: pass the tokenizer")
    found = []
    for name, pattern in classes.items():
        if not re.fullmatch(r"[\w.-]{1,60}", name):
            raise ValueError(f"classes: {name!r} isn't a name; expected up to 60 letters, digits, _, . or -, as in digits=\\d")
        try:
            found.append(Added(f"class:{name}", keys=_Class(re.compile(pattern), tokenizer)))
        except re.error as error:
            raise ValueError(f"classes: {name}={pattern!r} isn't a regular expression ({error}); mend it, or escape its signs "
                             "with a backslash") from error
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


def one_pass(session: Reading, batch: Mapping[str, Any], also: frozenset[str], step: Step) -> None:
    """The model runs once over a batch under reading, and what can be asked of a batch by itself is."""
    if "importance" in also:
        weigh(session, batch)
    else:
        session.model(**(whole_of if also & {"effect", "effect_mean"} else lean)(session.model, dict(batch)))
    if "effect" in also:
        remove(session, [batch], "zero", step)


def afterwards(session: Reading, batches: Sequence[Mapping[str, Any]], also: frozenset[str], step: Step) -> None:
    """What needs the whole text, or none: `batches` are needed for `effect_mean` alone."""
    if "effect_mean" in also:
        remove(session, batches, "mean", step)
    if "copying" in also:
        copying(session)
