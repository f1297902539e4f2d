"""Mutants of right attention, made on its syntax tree, and how `check` judges them.

Each operator is applied wherever it applies in a file: axes are swapped, a factor or a term is
dropped, a mask is shifted or inverted, and so on. A mutant whose outputs are those of the original,
with the same weights, in every way of calling it, is equivalent and isn't counted.

    PYTHONPATH=src:tests python tests/checks/mutation.py --write    # the tables of docs/check.md
    PYTHONPATH=src:tests python tests/checks/mutation.py alibi      # each mutant of one file
    PYTHONPATH=src:tests python tests/checks/mutation.py --all      # each mutant of each file
"""

from __future__ import annotations

import itertools
import linecache
import math
import random
import re
import signal
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import multihead
from checks.operators import PUBLIC, Mutant, mutants
from multihead.checks.caches import PIECES, cached_runs
from multihead.checks.callee import PLAIN, Callee, CallSpec
from multihead.checks.discover import find_callee
from multihead.checks.facts import Facts, relative_difference
from multihead.checks.projections import projection_of_path
from multihead.checks.random_weights import with_large_random_weights
from multihead.errors import MultiheadError

NAMES = sorted(path.stem for path in PUBLIC.glob("*.py"))
VERDICTS = ("wrong", "partly judged", "right", "refused")
# Verdicts of those that don't count: the outputs of the original; a crash in every way of calling.
EQUIVALENT, CRASHES = "equivalent", "can't run"
PAGE = Path(__file__).parents[2] / "docs" / "check.md"
PER_FILE = 5  # that are drawn for the tables, of those that can run
SECONDS = 120  # for one mutant
SECONDS_TO_RUN = 5  # for its outputs
NUM_PLAIN = 6  # of the ways of calling it: those with the inputs alone
TOLERANCE = 1e-6


def build(name: str, source: str) -> Any:
    """What the file makes, with seeded weights."""
    module = sys.modules[f"mutant_{name}"] = types.ModuleType(f"mutant_{name}")
    linecache.cache[f"{name}.py"] = (len(source), None, source.splitlines(True), f"{name}.py")
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    torch.manual_seed(0)
    return module.make()


# ---- Equivalence: outputs of a mutant and of its original


def outputs(callee: Callee) -> Iterator[Callable[[], list[Tensor]]]:
    """Ways of calling it, each with what it returns: sizes, masks, caches, gradients."""

    def called(x: Tensor, *kv: Tensor, spec: CallSpec = PLAIN) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            out, parts = callee.call_full(x, *kv, spec=spec)
            asks = callee.weights_flag is not None and spec.arguments.get(callee.weights_flag)
            return [out, *(t for t in parts if asks and isinstance(t, Tensor))]

        return call

    batch, length = callee.batch, callee.length
    x = callee.x()
    yield called(x)
    yield called(callee.x(2, length, seed=1, size=0.5))
    yield called(callee.x(1, length, seed=2, size=1e4))
    for batch_size, size in ((2, 1), (2, length + 3), (1, length)):
        yield called(callee.x(batch_size, size, seed=3))
    if callee.form == "memory" or callee.form == "cross":
        k, v = callee.keys(callee.x(batch, length + 2, seed=4))
        yield called(x, *((k,) if callee.form == "memory" else (k, v)))
    seen = torch.rand(batch, length, length, generator=torch.Generator().manual_seed(0)) < 0.5
    seen |= torch.eye(length, dtype=torch.bool)
    if callee.mask is not None:
        yield called(x, spec=CallSpec(allowed=seen))
        yield called(x, spec=CallSpec(allowed=torch.ones(length, length).tril().bool()))
    if callee.padding is not None:
        valid = torch.arange(length) < torch.tensor([length, length - 1, length - 2])[:, None]
        by_query = "L" in callee.padding.shape
        yield called(x, spec=CallSpec(valid=valid[:, None] & seen if by_query else valid))
    for flag in (callee.causal_flag, callee.weights_flag):
        for value in (True, False) if flag else ():
            yield called(x, spec=CallSpec(arguments={str(flag): value}))
    facts = Facts(callee, None, callee.module)
    for _, run in cached_runs(callee):
        for pieces in PIECES:
            yield lambda run=run, p=pieces: [run(facts, callee.x(2, sum(p)), p)]
    yield lambda: _gradients(callee)


def _gradients(callee: Callee) -> list[Tensor]:
    assert callee.module is not None
    with torch.enable_grad():
        callee.module.zero_grad()
        callee(callee.x()).square().sum().backward()
    named = sorted(callee.module.named_parameters(), key=lambda item: item[0])
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in named]
    # In any order of the rows, with any sign.
    return [grad.flatten().abs().sort().values for grad in grads]


def _result(call: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    """What a call returns; None where it fails."""
    try:
        return [t.detach().double() for t in call()]
    except Exception:
        return None


def compare(original: nn.Module, mutant: nn.Module) -> str:
    """`EQUIVALENT`, `CRASHES` or "" by the outputs of both with the weights of the original.

    Each is called with masks of the form that it takes: where a name leaves open what True means,
    either is right. So is either order of queries, keys and values within one matrix, the sign of
    a learned bias, and the order of the entries of a table of them: initial weights stay as likely.
    """
    callee = find_callee(original, {}, None)
    twin = with_large_random_weights(mutant)
    assert callee.module is not None
    other = replace(callee, function=twin, module=twin)
    try:
        own = find_callee(mutant, {}, None)
        other = replace(other, mask=own.mask, padding=own.padding, causal_flag=own.causal_flag)
    except MultiheadError:
        own = other
    pairs = zip(outputs(callee), outputs(other), strict=False)
    # The original may take one number of tokens alone.
    if any(_result(a) and not _result(b) for a, b in itertools.islice(pairs, NUM_PLAIN)):
        if own.layout == callee.layout or not own.is_single:
            return CRASHES
        # It takes single sequences alone: so is the original called.
        callee = replace(own, function=callee.module, module=callee.module)
        other = replace(own, function=twin, module=twin)
    for weights in _orders(dict(callee.module.named_parameters())):
        try:
            twin.load_state_dict(weights, strict=False)
        except RuntimeError:  # a parameter of another shape
            return ""
        if _are_same(callee, other):
            return EQUIVALENT
    return ""


def _are_same(callee: Callee, other: Callee) -> bool:
    for a, b in itertools.zip_longest(outputs(callee), outputs(other)):
        if a is None or b is None:  # it takes a mask less
            return False
        expected = _result(a)
        if expected is not None and not _are_equal(expected, _result(b)):
            return False
    return True


def _orders(weights: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The weights; with the sign of a bias changed or the entries of a table in another order; and
    with the thirds or halves of fused matrices in another order.
    """
    yield weights
    for name, t in weights.items():
        if projection_of_path(re.sub(r"\.?bias$", "", name)) is None and "bias" in name:
            yield weights | {name: -t}
            if "table" in name or t.ndim == 2:
                yield weights | {name: t.flip(0)}
                # Of each offset in a square, row after row or counted backwards in each row.
                if (size := math.isqrt(len(t))) ** 2 == len(t):
                    square = t.unflatten(0, (size, size))
                    yield weights | {name: square.transpose(0, 1).flatten(0, 1)}
                    yield weights | {name: square.flip(1).flatten(0, 1).roll(1 - size, 0)}
    for name, t in weights.items():  # fewer heads of keys and values than of queries
        kv_width, rest = divmod(len(t) - t.shape[-1], 2)
        if "qkv" in name and t.ndim == 2 and not rest and 0 < kv_width < t.shape[1]:
            q, k, v = t.split([t.shape[1], kv_width, kv_width])
            yield weights | {name: torch.cat([q, v, k])}
    for parts, pattern in ((3, r"qkv|c_attn|query_key_value"), (2, r"(?<!q)kv")):
        fused = [n for n in weights if re.search(pattern, n) and len(weights[n]) % parts == 0]
        for order in itertools.permutations(range(parts)) if fused else ():
            chunks = {n: weights[n].chunk(parts) for n in fused}
            yield weights | {n: torch.cat([c[i] for i in order]) for n, c in chunks.items()}


def _are_equal(a: list[Tensor], b: list[Tensor] | None) -> bool:
    if b is None or [t.shape for t in a] != [t.shape for t in b]:
        return False
    return all(_difference(s, t) <= TOLERANCE for s, t in zip(a, b, strict=True))


def _difference(a: Tensor, b: Tensor) -> float:
    return relative_difference(b, a) if a.numel() else 0.0


# ---- Verdicts


@dataclass(frozen=True)
class Judged:
    """A mutant with its verdict, and what the check found or said."""

    mutant: Mutant
    verdict: str
    found: str


def judge(mutant: Mutant) -> Judged:
    """The verdict of `check`, `EQUIVALENT` or `CRASHES`."""

    kind = kind_of(mutant)
    if kind == CRASHES:
        return Judged(mutant, kind, "")
    with at_most(SECONDS):
        causal = is_causal(mutant.name)
        module = build(mutant.name, mutant.source)
        try:
            report = multihead.check(module, causal=causal)
        except MultiheadError as error:
            return Judged(mutant, kind or "refused", str(error))
        except Exception as error:
            return Judged(mutant, "failed", f"{type(error).__name__}: {error}")
    found = sorted(report.bugs) or report.unjudged or report.notes
    if kind == EQUIVALENT:
        return Judged(mutant, kind, f"{report.verdict}: {', '.join(found)}")
    return Judged(mutant, report.verdict, ", ".join(found))


def kind_of(mutant: Mutant) -> str:
    """`EQUIVALENT`, `CRASHES` or ""."""
    original = build(mutant.name, (PUBLIC / f"{mutant.name}.py").read_text())
    try:
        with at_most(SECONDS_TO_RUN):
            return compare(original, build(mutant.name, mutant.source))
    except Exception:
        return CRASHES


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """A time limit.

    Raises:
        TimeoutError: it has passed.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"over {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@cache
def is_causal(name: str) -> bool | None:
    """What the user states of the original: True where it is causal, else nothing."""
    module = build(name, (PUBLIC / f"{name}.py").read_text())
    with torch.no_grad():
        return Facts(find_callee(module, {}, None), None, module).is_causal or None


def judge_all(some: Sequence[Mutant], jobs: int = 2) -> list[Judged]:
    """The verdicts of these mutants, which are printed as they come."""
    results = []
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for each in pool.map(judge, some):
            print(f"{each.verdict:14}{each.mutant}\n{'':16}{each.found[:300]}", flush=True)
            results.append(each)
    return results


def draw(name: str, count: int = PER_FILE) -> list[Mutant]:
    """Some mutants of a file that can run, the same in each run."""
    some = mutants(name)
    order = random.Random(name).sample(some, len(some))
    return list(itertools.islice((m for m in order if kind_of(m) != CRASHES), count))


COLUMNS = ("mutants", *VERDICTS, EQUIVALENT)


def table(results: Sequence[Judged], title: str, key: Callable[[Mutant], str]) -> str:
    """A table of verdicts, a row a key, and the sum."""
    rows: dict[str, Counter[str]] = {}
    for each in results:
        for row in (key(each.mutant), "all"):
            rows.setdefault(row, Counter()).update((each.verdict, "mutants"))
    rows["all"] = rows.pop("all")
    lines = [f"| {title} | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    for name, counts in rows.items():
        lines.append(f"| {name} | {' | '.join(str(counts[c]) for c in COLUMNS)} |")
    return "\n".join(lines)


def tables(results: Sequence[Judged]) -> str:
    """Both tables of docs/check.md: by operator, and by file."""
    by_operator = table(results, "operator", lambda mutant: mutant.operator)
    return f"{by_operator}\n\n{table(results, 'file', lambda mutant: mutant.name)}"


def write_page(results: Sequence[Judged]) -> None:
    """Put the tables in the place of those of docs/check.md."""
    text = PAGE.read_text()
    before, header, rest = text.partition("| operator |")
    after = rest.partition("\n| all |")[2].partition("\n| all |")[2].partition("\n")[2]
    assert header, f"{PAGE} lacks a table of operators"
    PAGE.write_text(f"{before}{tables(results)}\n{after}")


def main(arguments: Sequence[str]) -> None:
    names = [name for name in arguments if name in NAMES]
    if names or "--all" in arguments:
        drawn = [mutants(name) for name in names or NAMES]
    else:
        drawn = [draw(name) for name in NAMES]
    results = judge_all([mutant for some in drawn for mutant in some])
    print(tables(results))
    if "--write" in arguments:
        write_page(results)


if __name__ == "__main__":
    main(sys.argv[1:])
