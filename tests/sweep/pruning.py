"""The sweep of models.py for pruning: a group of heads taken out of every layer of a tiny
model of each type.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from multihead.models.names import HEADS_ENTRY, KV_HEADS_ENTRY
from multihead.models.plain import Plain, find_plain_config, set_entries
from multihead.models.resize import head_layout, unprunable_reason
from multihead.models.site import Site, find_sites
from multihead.pruning.plan import query_groups
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
    found = {"verdict": "read", "sites": len(sites), "reached": len(taken), "notes": notes}
    return found | plain_of(model, [site for site in sites if site.name in reached], batch)


def plain_of(model: nn.Module, sites: list[Site], batch: Batch) -> dict[str, str]:
    """Whether plain transformers loads the model with equal layers, by several numbers of heads,
    and with a first layer that differs.
    """
    sizes = {site.name: kept_sizes(site) for site in sites}
    options: dict[int, list[int]] = {}  # numbers that all layers with as many heads can keep
    for site in sites:
        before = options.get(site.num_heads, list(sizes[site.name]))
        options[site.num_heads] = [n for n in before if n in sizes[site.name]]
    tried: list[Plain] = []
    for share in (1.0, 0.5, 0.0):
        kept = {
            site.name: sizes[site.name][of[round(share * (len(of) - 1))]]
            for site in sites
            if (of := options[site.num_heads])
        }
        if kept:
            tried.append(without_others(model, sites, kept, batch))
    against = [plain.reason for plain in tried if not plain]
    first = next((plain for plain in tried if plain), None)
    if first is not None and not against and (reason := reason_by_number(model, first)):
        against = [reason]
    verdict = "no" if first is None else "some numbers" if against else "yes"
    uneven = "no"
    if len(sites) > 1 and verdict != "no":
        of = sizes[sites[0].name]
        ways = {tuple(of[n]) for n in list(of)[-1:]} | {tuple(kept_sizes(sites[0], even=True))}
        for heads in filter(None, ways):
            if without_others(model, sites, {sites[0].name: list(heads)}, batch):
                uneven = "yes"
    return {"plain": verdict, "against": against[0] if against else "", "uneven": uneven}


def kept_sizes(site: Site, *, even: bool = False) -> Any:
    """For each number of heads that the site can keep in groups of one size, these heads; with
    `even`, the heads that are left if each group loses one.
    """
    groups = query_groups(site)
    size = min(map(len, groups))
    if even:
        return [h for group in groups for h in group[: size - 1]]
    found = {}
    for each in range(1, size + 1):
        for count in range(1, len(groups) + 1):
            if each * count < site.num_heads:
                found[each * count] = [h for group in groups[:count] for h in group[:each]]
    return dict(sorted(found.items()))


def without_others(
    model: nn.Module, sites: list[Site], kept: dict[str, list[int]], batch: Batch
) -> Plain:
    """Whether plain transformers loads the model with these heads alone, where it is named."""
    removed = {
        site.name: [h for h in range(site.num_heads) if h not in kept[site.name]]
        for site in sites
        if site.name in kept
    }
    try:
        return find_plain_config(remove_heads(model, removed, batch), batch)
    except ValueError as error:
        return Plain(reason=brief(error))


def reason_by_number(model: Any, plain: Plain) -> str:
    """Why the config that was found can't have seven heads, which no tiny model's width is a
    multiple of.
    """
    changes = {
        (path, name): 7 if type(value) is int else [7] * len(value)
        for (path, name), value in plain.changes.items()
        if (HEADS_ENTRY.search(name) or KV_HEADS_ENTRY.search(name)) and not isinstance(value, dict)
    }
    config = copy.deepcopy(plain.config)
    set_entries(config, changes)
    try:
        with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
            config.save_pretrained(folder)
            type(model)(type(config).from_pretrained(folder))
    except Exception as error:
        return "not with 7: " + re.sub(r"^.*ValueError: ", "", brief(error))
    return ""


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
    pruned = {name: one for name, one in sorted(found.items()) if one["verdict"] == "read"}
    plain = Counter(one.get("plain", "") for one in pruned.values())
    lines += [
        "",
        "## Which plain transformers loads",
        "",
        "Those that are pruned, again with the most, a middle and the least number of heads left in every layer (`--kind",
        "uniform`, without a bias for compensation). The config that was found was written and read back, plain",
        "transformers built and filled the model, and its outputs were compared with the pruned one's. **Some numbers**",
        "means that it loads the model with some numbers of heads, **no** that it does with none of these; the reason",
        "is that of the first number with which it doesn't. The third column is about a model whose first layer alone was",
        "pruned: its config has a form for numbers that differ by layer.",
        "",
        "| plain with uniform pruning | model types |",
        "| --- | --- |",
        *(f"| {verdict} | {plain[verdict]} |" for verdict in ("yes", "some numbers", "no")),
        "",
        "| pruned | plain with uniform pruning | plain if layers differ |",
        "| --- | --- | --- |",
    ]
    for name, one in pruned.items():
        reason = " ".join(one.get("against", "").replace("|", "/").split())[:200]
        why = f": {reason}" if reason else ""
        lines.append(f"| {name} | {one.get('plain', '')}{why} | {one.get('uneven', '')} |")
    return "\n".join(lines) + "\n"
