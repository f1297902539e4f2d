"""The sweep of models.py for pruning: a group of heads taken out of every layer of a tiny
model of each type.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from multihead.models.resize import head_layout, unprunable_reason
from multihead.models.site import find_sites
from multihead.pruning.surgery import remove_heads, survey_sites
from sweep.judge import brief

Batch = dict[str, Tensor]


def judge(model: nn.Module, batch: Batch, names: Any, *, as_eager: bool = False) -> dict[str, Any]:
    """ "read" stands for pruned: the copy without heads gave what the model gives whose heads are
    zero.
    """
    batch = {name: value for name, value in batch.items() if name in names}
    with torch.no_grad():
        model(**batch)  # inputs that it doesn't take raise here
    taken: dict[str, list[int]] = {}
    sites = find_sites(model)
    whole = {site.label: why for site in sites if (why := unprunable_reason(site))}
    if len(whole) == len(sites):
        return {
            "verdict": "refused",
            "reason": brief(ValueError(next(iter(whole.values())))),
            "sites": len(sites),
            "reached": 0,
        }
    reached, _ = survey_sites(model, [site for site in sites if site.label not in whole], batch)
    for site in sites:
        if site.label in whole or site.name not in reached:  # `prune` leaves these as they are, too
            continue
        reads = head_layout(site).reads
        last = [h for h in range(site.num_heads) if reads[h] == max(reads)]
        some = last if max(reads) else last[1:]
        if some:
            taken[site.name] = some
    try:
        remove_heads(model, taken, batch)
    except ValueError as error:  # a SurgeryError too
        return {"verdict": "refused", "reason": brief(error), "sites": len(taken), "reached": 0}
    notes = [f"stays whole: {why}" for why in list(whole.values())[:1]]
    return {"verdict": "read", "sites": len(sites), "reached": len(taken), "notes": notes}


def page(found: dict[str, dict[str, Any]], version: str) -> str:
    """docs/pruning-models.md."""
    counts = Counter(one["verdict"] for one in found.values())
    lines = [
        "# Which models can be pruned",
        "",
        (f"Written by `make sweep-pruning` against transformers {version}: from"),
        (
            "every layer of a tiny random model of each type, the last group of query heads with"
            " its key/value head was taken out (of"
        ),
        (
            "multi-query models all query heads but one), and the outputs compared with those of"
            " the model whose heads are zero."
        ),
        (
            "**Pruned** means that they are equal to 1e-5; **refused**, that pruning stops with the"
            " message given here and changes"
        ),
        "nothing.",
        "",
        "| result | model types |",
        "| --- | --- |",
        f"| pruned | {counts['read']} |",
        f"| refused | {counts['refused']} |",
        f"| no attention | {counts['no attention']} |",
        f"| not built | {counts['not built']} |",
        "",
        "| refused | class | why |",
        "| --- | --- | --- |",
    ]
    for name, one in sorted(found.items()):
        if one["verdict"] == "refused":
            why = " ".join(one.get("reason", "").replace("|", "/").split()).partition(
                " Models that do"
            )[0][:300]
            lines.append(f"| {name} | {one.get('class', '')} | {why} |")
    pruned = sorted(name for name, one in found.items() if one["verdict"] == "read")
    return "\n".join([*lines, "", f"Pruned: {', '.join(pruned)}."]) + "\n"
