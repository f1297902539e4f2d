"""Costs of pruning real models: SmolLM2 on novels, MiniLM on pairs of documents. The tables of
docs/pruning.md.

    python scripts/fetch_models.py; python scripts/fetch_texts.py       models and texts, once
    OMP_WAIT_POLICY=passive python -m benchmarks.pruning chosen   30% of the heads, as prune does
    ... losses --tokens 5120        all ways to choose heads: hours; continues where it was stopped
    ... losses --only 30            of one share of heads
    ... similarity                  MiniLM on the Lee pairs
    ... latency                     time and cache without half of the groups (quiet machine)
    ... sharing                     SmolLM2's 3 key/value heads a layer become 1
    ... tuning --minutes 15         distillation of pruned models (quiet machine)
    ... write                       the tables, from everything that was measured
    ... --toy                       all of it on the built-in model, in a temporary folder

Every model's loss on every window is kept in benchmarks/measured/, for paired differences with
intervals.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multihead.data.batching import window_batches
from multihead.models.instrument import instrument
from multihead.models.loading import load_with_tokenizer
from multihead.models.site import find_sites
from multihead.pruning import gqa
from multihead.pruning.losses import Losses, compare_losses, evaluate
from multihead.pruning.plan import Plan, select_sites
from multihead.pruning.pruner import CANDIDATES, Pruner
from multihead.pruning.shared_heads import SharingOptions
from multihead.pruning.surgery import share_heads

ROOT = Path(__file__).resolve().parents[1]
MODELS, TEXTS = ROOT / "models", ROOT / "models" / "texts"
CALIBRATE, TEST = "prideprejudice", "persuasion"  # scored on one novel, tested on another
FURTHER = ("mansfieldpark", "sensesensibility")  # to tune on
KINDS = ("any", "even", "groups", "uniform")
FEWER = "\u00b0"  # marks figures of fewer tokens

# Products of float32 by oneDNN, which on processors without AMX multiplies in float32 all the same
# (7e-7 from float64 here, MKL
# 4e-7; perplexities agree to 1e-7) and takes a fifth less time than MKL on AMD. Latency is measured
# without.
torch.backends.mkldnn.matmul.fp32_precision = "bf16"


@dataclass(frozen=True)
class Setup:
    """What is measured: the models, how much text, and which plans."""

    model: Path | None = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    encoder: Path | None = MODELS / "all-MiniLM-L6-v2"
    kept: Path = ROOT / "benchmarks" / "measured"
    is_toy: bool = False
    tokens: int = 16384  # of each text
    context: int = 512
    criteria: tuple[str, ...] = CANDIDATES
    shares: tuple[int, ...] = (30, 50, 20, 10)  # per cent of the heads, the most telling first
    # heads of `uniform` plans next to a share: three heads of nine, or five
    uniform: tuple[tuple[int, int], ...] = ((30, 90), (50, 150))
    num_heads: int = 270
    seeds: int = 10
    timed: tuple[tuple[int, int], ...] = ((1, 512), (16, 128))  # batch size and tokens


SETUP = Setup()


def use_toy(folder: Path) -> None:
    """The built-in model on pages of docs/, in seconds."""
    global SETUP
    SETUP = Setup(
        None,
        None,
        folder,
        True,
        tokens=600,
        context=64,
        criteria=("taylor",),
        shares=(25,),
        uniform=((25, 8),),
        num_heads=32,
        seeds=2,
        timed=((1, 16),),
    )


class Kept:
    """Losses by window, one line a model, so that a run that was stopped goes on."""

    def __init__(self, name: str) -> None:
        SETUP.kept.mkdir(parents=True, exist_ok=True)
        self.file = SETUP.kept / f"{name}.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.found: dict[str, dict[str, Any]] = {
            told["key"]: told for told in map(json.loads, lines)
        }

    def of(self, key: str, make: Any, tokens: int = 0) -> dict[str, Any]:
        """What was measured on at least so many tokens, or is measured now."""
        if key not in self.found or sum(self.found[key].get("count", ())) < 0.99 * tokens:
            begun = time.time()
            told = make() | {"key": key, "seconds": round(time.time() - begun, 1)}
            with self.file.open("a") as file:
                file.write(json.dumps(told) + "\n")
            self.found[key] = told
            print(key, {k: v for k, v in told.items() if not isinstance(v, list)}, flush=True)
        return self.found[key]


def novel(name: str) -> str:
    if SETUP.is_toy:
        page = {CALIBRATE: "attention", TEST: "reading"}.get(name, "models")
        return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")[:12000]
    return (TEXTS / "novels" / f"{name}.txt").read_text(encoding="utf-8")


@functools.cache
def smol() -> tuple[Pruner, Any]:
    loaded = load_with_tokenizer(SETUP.model)
    pruner = Pruner(loaded.model, novel(CALIBRATE), tokenizer=loaded.tokenizer, tokens=SETUP.tokens)
    print(
        f"calibration: {sum(b.inputs['input_ids'].numel() for b in pruner.batches):,} tokens, and"
        f" held out {sum(b.inputs['input_ids'].numel() for b in pruner.held_out):,}",
        flush=True,
    )
    pruner.score(SETUP.criteria)
    return pruner, loaded.tokenizer


def judged(
    pruner: Pruner, tokenizer: Any, plan: Plan, compensate: str, tokens: int | None = None
) -> dict[str, Any]:
    """The loss on each window of the test novel without these heads (as surgery gives it: see the
    tests).
    """
    removed, tokens = plan.by_site(pruner.sites), tokens or SETUP.tokens
    with instrument(pruner.model, pruner.compensation(removed, compensate)):
        found = evaluate(
            pruner.model,
            novel(TEST)[: 10 * tokens],
            tokenizer=tokenizer,
            context=SETUP.context,
            tokens=tokens,
            batch_size=5,
        )
    return {
        "total": found.total.tolist(),
        "count": found.count.tolist(),
        "heads": sum(map(len, removed.values())),
        "perplexity": found.perplexity,
    }


def options(
    pruner: Pruner, share: int, kind: str, criterion: str, seed: int | None = None
) -> list[Plan]:
    number = round(share / 100 * pruner.num_heads)
    if kind == "uniform":
        number = dict(SETUP.uniform)[share]
    if seed is None:
        return pruner.make_plans(number, kind, criterion)
    return [pruner.random_plan(number, kind, seed)]


def best_of(pruner: Pruner, found: list[Plan], compensate: str) -> Plan:
    """Of several plans of the same size, the one that loses least on the held-out part of the
    calibration text.
    """
    if len(found) == 1:
        return found[0]
    removed = [plan.by_site(pruner.sites) for plan in found]
    return found[
        int(np.argmin([pruner.loss(pruner.compensation(gone, compensate)) for gone in removed]))
    ]


def held_out(share: int) -> dict[str, str]:
    """The criterion that prune chooses for each kind: which does best on the held-out part of the
    calibration text.
    """
    held = Kept("held-out")
    pruner, _ = smol()
    held.of("base", lambda: {"loss": pruner.base_loss})
    for kind in kinds_at(share):
        for criterion in SETUP.criteria:
            for compensate in ("refit", "mean"):
                if (key := f"{share} {kind} {criterion} {compensate}") not in held.found:
                    gone = best_of(
                        pruner, options(pruner, share, kind, criterion), compensate
                    ).by_site(pruner.sites)
                    held.of(
                        key,
                        lambda gone=gone, how=compensate: {
                            "loss": pruner.loss(pruner.compensation(gone, how))
                        },
                    )
    return {
        kind: min(
            SETUP.criteria, key=lambda name: held.found[f"{share} {kind} {name} refit"]["loss"]
        )
        for kind in kinds_at(share)
    }


def kinds_at(share: int) -> list[str]:
    return [kind for kind in KINDS if kind != "uniform" or share in dict(SETUP.uniform)]


def losses(only: list[int], tokens: int, chosen: bool = False) -> None:
    """Every way to choose heads, the most telling first; or only those that prune chooses."""
    kept = Kept("losses")
    pruner, tokenizer = smol()
    kept.of("base", lambda: judged(pruner, tokenizer, Plan(()), "none"))
    seeds = [f"random-{seed}" for seed in range(SETUP.seeds)]
    if chosen:
        jobs = [
            (share, kind, name, how)
            for share in only
            for kind, name in held_out(share).items()
            for how in ("refit", "none", "mean")
        ]
    else:
        jobs = [
            (share, kind, name, how)
            for names, how in (
                (SETUP.criteria, "refit"),
                (seeds, "refit"),
                (SETUP.criteria, "none"),
                (seeds, "none"),
                (SETUP.criteria, "mean"),
            )
            for share in only
            for kind in kinds_at(share)
            for name in names
        ]
    done: dict[
        tuple[frozenset[str], str], dict[str, Any]
    ] = {}  # criteria that agree make the same plan
    for share, kind, name, how in jobs:
        if (
            sum(kept.found.get(key := f"{share} {kind} {name} {how}", {}).get("count", ()))
            >= 0.99 * tokens
        ):
            continue
        seed = int(name.partition("-")[2]) if name.startswith("random") else None
        plan = best_of(pruner, options(pruner, share, kind, name, seed), how)

        def made(plan: Plan = plan, how: str = how) -> dict[str, Any]:
            which = frozenset(plan.remove), how
            if which not in done:
                done[which] = judged(pruner, tokenizer, plan, how, tokens)
            return done[which]

        kept.of(key, made, tokens)


def similarity() -> None:
    from multihead.pruning.similarity import embed, load_pairs

    task = toy_pairs() if SETUP.is_toy else load_pairs(TEXTS / "lee" / "pairs.jsonl")
    loaded = load_with_tokenizer(SETUP.encoder)
    if SETUP.is_toy:
        texts = novel(CALIBRATE).split("\n\n")
    else:
        lines = (TEXTS / "lee" / "background.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
    pruner = Pruner(loaded.model, texts, tokenizer=loaded.tokenizer, tokens=None)
    pruner.score(SETUP.criteria)

    def embedded(plan: Plan, compensate: str) -> Any:
        gone = plan.by_site(pruner.sites)
        with instrument(loaded.model, pruner.compensation(gone, compensate)):
            return embed(loaded.model, task.documents, tokenizer=loaded.tokenizer)

    base = embed(loaded.model, task.documents, tokenizer=loaded.tokenizer)
    rows = [{"plan": "whole", "pearson": task.agreement(base).pearson}]
    print(rows[-1], flush=True)
    for share in (50, 60):
        number = round(share / 100 * pruner.num_heads)
        for compensate in ("refit", "mean", "none"):
            random = [
                embedded(pruner.random_plan(number, "any", seed), compensate)
                for seed in range(SETUP.seeds)
            ]
            values = [task.agreement(one).pearson for one in random]
            rows.append(
                {
                    "plan": f"{share}% random",
                    "compensate": compensate,
                    "pearson": float(np.mean(values)),
                    "spread": float(np.std(values, ddof=1)),
                }
            )
            print(rows[-1], flush=True)
            for criterion in SETUP.criteria:
                plan = pruner.make_plans(number, "any", criterion)[0]
                gone = plan.by_site(pruner.sites)
                found = embedded(plan, compensate)
                change = task.compare(random, found)
                rows.append(
                    {
                        "plan": f"{share}% {criterion}",
                        "compensate": compensate,
                        "pearson": task.agreement(found).pearson,
                        "held": pruner.loss(pruner.compensation(gone, compensate)),
                        "over random": [change.mean, change.low, change.high],
                    }
                )
                print(rows[-1], flush=True)
    SETUP.kept.mkdir(parents=True, exist_ok=True)
    (SETUP.kept / "similarity.json").write_text(json.dumps(rows, indent=1))


def toy_pairs() -> Any:
    from multihead.pruning.similarity import Similarity

    documents = novel(TEST).split("\n\n")[1:7]
    pairs = np.array([[i, j] for i in range(6) for j in range(i)])
    return Similarity(documents, pairs, np.arange(float(len(pairs))))


def latency() -> None:
    """Half of SmolLM2's groups: cache bytes and time, predicted and measured."""
    from multihead.pruning.curve import multiply_adds
    from multihead.pruning.latency import measure_cache, measure_latencies

    pruner, _ = smol()
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    plan = pruner.make_plans(round(0.5 * pruner.num_heads), "groups", "flap/zscore")[0]
    smaller, _ = pruner.remove(plan, "refit")
    left, groups = (
        sum(site.slices().num_kv_heads for site in find_sites(model))
        for model in (smaller, pruner.model)
    )
    rows = []
    for tokens in (16,) if SETUP.is_toy else (512, 2048):
        whole, small = (measure_cache(model, tokens) for model in (pruner.model, smaller))
        rows.append(
            {
                "what": f"cache of {tokens:,} tokens",
                "whole": whole,
                "pruned": small,
                "predicted": left / groups,
                "measured": small / whole,
            }
        )
    for batch, tokens in SETUP.timed:
        found = measure_latencies(
            {"whole": pruner.model, "pruned": smaller}, batch=batch, tokens=tokens, repeats=5
        )
        whole, small = found["whole"], found["pruned"]
        name = f"batch {batch}, {tokens:,} tokens"
        rows.append(
            {
                "what": f"prefill, {name}",
                "whole": whole.prefill,
                "pruned": small.prefill,
                "measured": small.prefill_ratio,
                "predicted": multiply_adds(smaller, tokens) / multiply_adds(pruner.model, tokens),
            }
        )
        rows.append(
            {
                "what": f"a token more, {name}",
                "whole": whole.step,
                "pruned": small.step,
                "predicted": None,
                "measured": small.step_ratio,
            }
        )
        print(rows[-2:], flush=True)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (pruner.model, smaller)]
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    SETUP.kept.mkdir(parents=True, exist_ok=True)
    (SETUP.kept / "latency.json").write_text(
        json.dumps({"rows": rows, "parameters": sizes, "groups": left}, indent=1)
    )


def sharing() -> None:
    """Three key/value heads a layer become one, in all layers and in one."""
    kept = Kept("sharing")
    loaded = load_with_tokenizer(SETUP.model)

    def of(model: Any) -> dict[str, Any]:
        found = evaluate(
            model,
            novel(TEST),
            tokenizer=loaded.tokenizer,
            context=SETUP.context,
            tokens=SETUP.tokens,
            batch_size=2,
        )
        return {
            "total": found.total.tolist(),
            "count": found.count.tolist(),
            "perplexity": found.perplexity,
        }

    kept.of("base", lambda: of(loaded.model))
    for layers in (["1"],) if SETUP.is_toy else (None, ["6"], ["0"]):
        for method, refit in (
            ("svd", True),
            ("mean", False),
            ("svd", False),
            ("aligned", False),
            ("first", False),
        ):

            def made(
                method: str = method, refit: bool = refit, layers: Any = layers
            ) -> dict[str, Any]:
                model = shared(loaded, method, refit, layers)
                return of(model) | {"parameters": sum(p.numel() for p in model.parameters())}

            kept.of(
                f"{'all' if layers is None else layers[0]} {method}{' refit' if refit else ''}",
                made,
            )


def shared(loaded: Any, method: str, refit: bool, layers: Any) -> Any:
    """The model with one key/value head a layer; "first" and "random" keep one head of each group,
    baselines that the library doesn't offer.
    """
    model, texts = loaded.model, novel(CALIBRATE)
    if method in gqa.METHODS:
        return gqa.share(
            model,
            texts,
            tokenizer=loaded.tokenizer,
            num_kv_heads=1,
            method=method,
            refit=refit,
            layers=layers,
            tokens=SETUP.tokens // 2,
        ).model
    draw = torch.Generator().manual_seed(0)

    def keep_one(n: int) -> torch.Tensor:
        pick = int(torch.randint(n, (), generator=draw)) if method == "random" else 0
        return torch.eye(n, dtype=torch.float64)[pick]

    sites = find_sites(model) if layers is None else select_sites(find_sites(model), layers)
    batches = window_batches(
        model, texts, loaded.tokenizer, context=gqa.CONTEXT, tokens=SETUP.tokens // 2
    )
    options = SharingOptions("mean", refit=refit, pool=keep_one)
    return share_heads(
        model, gqa.share_layers(model, sites, 1, batches, options), batches[0].inputs
    )


def tuning(minutes: float) -> None:
    """A model of each kind at 30%, tuned for so long; steps are how many that takes, found out in
    the first ones.
    """
    from multihead.pruning.tune import tune

    kept = Kept("tuning")
    pruner, tokenizer = smol()
    chosen = held_out(SETUP.shares[0])

    def of(model: Any) -> dict[str, Any]:
        found = evaluate(
            model,
            novel(TEST),
            tokenizer=tokenizer,
            context=SETUP.context,
            tokens=SETUP.tokens,
            batch_size=2,
        )
        return {
            "total": found.total.tolist(),
            "count": found.count.tolist(),
            "perplexity": found.perplexity,
        }

    kept.of("base", lambda: of(pruner.model))
    for kind in ("groups",) if SETUP.is_toy else ("groups", "any", "even", "uniform"):

        def made(kind: str = kind) -> dict[str, Any]:
            model, _ = pruner.remove(
                best_of(pruner, options(pruner, SETUP.shares[0], kind, chosen[kind]), "refit"),
                "refit",
            )
            before = of(model)
            text = "".join(novel(name) for name in (CALIBRATE, *FURTHER))
            begun = time.time()
            first = tune(model, pruner.model, text[:200_000], tokenizer=tokenizer, steps=4)
            steps = max(4, int(minutes * 60 / (time.time() - begun) * 4) - 4)
            done = tune(model, pruner.model, text, tokenizer=tokenizer, steps=steps)
            minutes_taken = (time.time() - begun) / 60
            return of(model) | {
                "before": before,
                "steps": steps + 4,
                "tokens": first.tokens + done.tokens,
                "minutes": minutes_taken,
            }

        kept.of(f"{kind} {minutes:g}", made)


def as_losses(told: dict[str, Any]) -> Losses:
    return Losses(np.array(told["total"]), np.array(told["count"]))


def ratio(base: Losses, told: dict[str, Any]) -> str:
    """Perplexity over the base's, with its interval, on as many windows as it was measured on;
    marked if those are fewer.
    """
    number = len(told["count"])
    change = compare_losses(Losses(base.total[:number], base.count[:number]), as_losses(told))
    mark = FEWER if number < len(base.count) else ""
    return (
        f"{math.exp(change.mean):.3f} [{math.exp(change.low):.3f},"
        f" {math.exp(change.high):.3f}]{mark}"
    )


def mean_ratio(base: Losses, told: dict[str, Any]) -> float:
    number = len(told["count"])
    return math.exp(
        as_losses(told).mean - float(base.total[:number].sum() / base.count[:number].sum())
    )


def chosen_table() -> Iterator[str]:
    """30% of the heads as prune takes them, before and after tuning."""
    kept, held, tuned = (Kept(name).found for name in ("losses", "held-out", "tuning"))
    lines = [
        (
            "| kind | criterion chosen | refit | random plans, refit | tuned | minutes, 2 cores |"
            " tokens read |"
        ),
        "| --- " * 7 + "|",
    ]
    for kind in KINDS:
        tried = {
            key.split()[2]: told["loss"]
            for key, told in held.items()
            if key.startswith(f"{SETUP.shares[0]} {kind} ") and key.endswith(" refit")
        }
        name = min(tried, key=tried.__getitem__)
        base, told = as_losses(kept["base"]), kept[f"{SETUP.shares[0]} {kind} {name} refit"]
        drawn = [
            mean_ratio(base, told)
            for key, told in kept.items()
            if key.startswith(f"{SETUP.shares[0]} {kind} random-") and key.endswith(" refit")
        ]
        after = next((told for key, told in tuned.items() if key.startswith(f"{kind} ")), None)
        cells = (
            ["", "", ""]
            if after is None
            else [ratio(base, after), f"{after['minutes']:.1f}", f"{after['tokens']:,}"]
        )
        lines.append(
            f"| {kind} | {name} | {ratio(base, told)} | {np.mean(drawn):.3f} (sd"
            f" {np.std(drawn, ddof=1):.3f}) | {' | '.join(cells)} |"
        )
    yield "\n".join(
        [
            "### 30% of the heads (uniform: 33%), by the criterion that `prune` chooses",
            "",
            (
                "Perplexity over the whole model's; tuned on three novels, none of them the one"
                " that is tested on."
            ),
            "",
            *lines,
        ]
    )


def loss_tables() -> Iterator[str]:
    kept, held = Kept("losses").found, Kept("held-out").found
    if "base" not in kept:
        return
    base = as_losses(kept["base"])
    yield (
        "SmolLM2-135M-Instruct (Q4_1, 30 layers of 9 heads over 3), scored on"
        f" {SETUP.tokens:,} tokens of *Pride and Prejudice*, tested on"
        f" {int(base.count.sum()):,} of *Persuasion* in windows of {SETUP.context}: perplexity"
        f" {base.perplexity:.2f}. Figures are perplexities over the whole model's, with 95%"
        f" intervals over windows; those with {FEWER} on the first windows alone."
    )
    yield from chosen_table()
    for share in SETUP.shares:
        for kind in KINDS:
            there = {key: told for key, told in kept.items() if key.startswith(f"{share} {kind} ")}
            if not there:
                continue
            heads = next(iter(there.values()))["heads"]
            lines = [
                f"### {heads} of {SETUP.num_heads} heads ({heads / SETUP.num_heads:.0%}), {kind}",
                "",
                "| criterion | none | mean | refit | held-out loss, refit |",
                "| --- | --- | --- | --- | --- |",
            ]
            for criterion in SETUP.criteria:
                cells = [
                    (
                        ratio(base, there[key])
                        if (key := f"{share} {kind} {criterion} {how}") in there
                        else ""
                    )
                    for how in ("none", "mean", "refit")
                ]
                tried = held.get(f"{share} {kind} {criterion} refit", {}).get("loss")
                if any(cells):
                    lines.append(
                        f"| {criterion} | {' | '.join(cells)} |"
                        f" {'' if tried is None else f'{tried:.4f}'} |"
                    )
            cells = []
            for how in ("none", "mean", "refit"):
                drawn = [
                    mean_ratio(base, told)
                    for key, told in there.items()
                    if key.startswith(f"{share} {kind} random-") and key.endswith(how)
                ]
                spread = (
                    f" (sd {np.std(drawn, ddof=1):.3f}, {len(drawn)} seeds)"
                    if len(drawn) > 1
                    else ""
                )
                cells.append(f"{np.mean(drawn):.3f}{spread}" if drawn else "")
            if any(cells):
                lines.append(f"| random | {' | '.join(cells)} | |")
            yield "\n".join(lines)


def held_out_tables() -> Iterator[str]:
    """All criteria and kinds, on the part of the calibration text that prune chooses by."""
    held = Kept("held-out").found
    for share in SETUP.shares:
        there = {key: told["loss"] for key, told in held.items() if key.startswith(f"{share} ")}
        if not there:
            continue
        kinds = [kind for kind in KINDS if any(key.startswith(f"{share} {kind} ") for key in there)]
        lines = [
            f"### All criteria at {share}% (uniform: the nearest), on the held-out part",
            "",
            (
                "Perplexity over the whole model's on the last fifth of the calibration text (3,072"
                " tokens), by which `prune` chooses; `refit` / `mean`."
            ),
            "",
            f"| criterion | {' | '.join(kinds)} |",
            "| --- " * (len(kinds) + 1) + "|",
        ]
        for criterion in SETUP.criteria:
            cells = [
                " / ".join(
                    f"{math.exp(there[key] - held['base']['loss']):.3f}"
                    for how in ("refit", "mean")
                    if (key := f"{share} {kind} {criterion} {how}") in there
                )
                for kind in kinds
            ]
            lines.append(f"| {criterion} | {' | '.join(cells)} |")
        yield "\n".join(lines)


def similarity_table() -> Iterator[str]:
    file = SETUP.kept / "similarity.json"
    if not file.exists():
        return
    first, *rows = json.loads(file.read_text())
    lines = [
        (
            "MiniLM (all-MiniLM-L6-v2, 6 layers of 12 heads) on the Lee pairs, 50 documents and"
            f" 1,225 human similarities: Pearson {first['pearson']:.3f} at base. Heads ranked on"
            " 300 other documents; the difference is paired, to the mean of ten random plans with"
            " the same compensation."
        ),
        "",
        "| plan | compensation | Pearson | over random, 95% interval | held-out loss |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        over = row.get("over random")
        lines.append(
            f"| {row['plan']} | {row['compensate']} | {row['pearson']:.3f}"
            + (f" (sd {row['spread']:.3f})" if "spread" in row else "")
            + f" | {'' if over is None else f'{over[0]:+.3f} [{over[1]:+.3f}, {over[2]:+.3f}]'} | "
            + (f"{row['held']:.4f} |" if "held" in row else "|")
        )
    yield "\n".join(lines)


def latency_table() -> Iterator[str]:
    file = SETUP.kept / "latency.json"
    if not file.exists():
        return
    told = json.loads(file.read_text())
    whole, small = told["parameters"]
    lines = [
        (
            f"Half of SmolLM2's groups taken out (45 of 90; {whole:,} parameters become {small:,}),"
            " 2 cores, medians of paired turns. Predicted is the cache that is left, and the"
            " multiply-adds that are left."
        ),
        "",
        "| what | whole | pruned | predicted ratio | measured ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in told["rows"]:
        show = (
            (lambda x: f"{x:,} bytes")
            if "cache" in row["what"]
            else (lambda x: f"{x * 1000:,.1f} ms")
        )
        guess = "" if row["predicted"] is None else f"{row['predicted']:.3f}"
        lines.append(
            f"| {row['what']} | {show(row['whole'])} | {show(row['pruned'])} | {guess} |"
            f" {row['measured']:.3f} |"
        )
    yield "\n".join(lines)


def sharing_table() -> Iterator[str]:
    kept = Kept("sharing").found
    if "base" not in kept:
        return
    base = as_losses(kept["base"])
    lines = [
        (
            "SmolLM2 with one key/value head a layer in place of three, without training;"
            f" perplexity over the whole model's {base.perplexity:.2f}, 95% intervals."
        ),
        "",
        "| layers | method | perplexity | over the whole model's |",
        "| --- | --- | --- | --- |",
    ]
    for key, told in kept.items():
        if key != "base":
            layers, _, method = key.partition(" ")
            lines.append(
                f"| {layers} | {method} | {told['perplexity']:,.2f} | {ratio(base, told)} |"
            )
    yield "\n".join(lines)


def write() -> None:
    """Write the tables to docs/pruning.md, after the line MARK; of a toy run, print them."""
    file, mark = ROOT / "docs" / "pruning.md", "## Measured\n"
    parts = [
        *loss_tables(),
        *held_out_tables(),
        *similarity_table(),
        *sharing_table(),
        *latency_table(),
    ]
    if SETUP.is_toy:
        print("\n\n".join(parts))
        return
    from benchmarks.run import machine

    text = file.read_text().partition(mark)[0]
    parts = [text.rstrip(), mark.rstrip(), f"By `benchmarks/pruning.py`, {machine()}.", *parts]
    file.write_text("\n\n".join(parts) + "\n")


def main() -> None:
    jobs = ("chosen", "losses", "similarity", "latency", "sharing", "tuning", "write")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", help=", ".join(jobs))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--tokens", type=int, help="of the test novel, for losses")
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--toy", action="store_true", help="the built-in model, in seconds")
    chosen = parser.parse_args()
    if not set(chosen.what) <= set(jobs) or not (chosen.what or chosen.toy):
        parser.error(f"expected one or several of {', '.join(jobs)}")
    with tempfile.TemporaryDirectory() as folder:
        if chosen.toy:
            use_toy(Path(folder))
        tokens = chosen.tokens or SETUP.tokens
        work: dict[str, Any] = {
            "chosen": lambda: losses([SETUP.shares[0]], SETUP.tokens, chosen=True),
            "losses": lambda: losses(chosen.only or list(SETUP.shares), tokens),
            "similarity": similarity,
            "latency": latency,
            "sharing": sharing,
            "tuning": lambda: tuning(0 if chosen.toy else chosen.minutes),
            "write": write,
        }
        for what in chosen.what or jobs:
            work[what]()


if __name__ == "__main__":
    main()
