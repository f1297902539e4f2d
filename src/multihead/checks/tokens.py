"""Properties of tokens: independence of batch elements and queries, order, and sums of weights."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .arguments import TABLES
from .discover import LENGTHS
from .extras import find_mixers
from .facts import WINDOWS, Facts, find_smallest, format_shape, relative_difference
from .finding import BugName, Finding, NotApplicable, NotJudged

SUM_NAMES = (
    r"sink|bias_k$|add_zero|null_k|mem_k|s_aux|gate|sigmoid|talking|softmax_?(1|one)|add_one|"
    r"off_?by_?one"
)
VALUE_POSITION_NAMES = (
    r"^wpe$|^pos_emb\w*$|position_embedding$|^rel\w*_v(al(ue)?s?)?$|relative_positions?_v\w*$|"
    r"^pos\w*_v(al(ue)?s?)?$|^v(al(ue)?)?_pos|^(pos|posenc|pos_?enc\w*|pe)$"
)
# Functions of the scores that public code has instead of a softmax.
KERNELS = r"^(relu|relu6|gelu|silu|elu|softplus|tanh|sparsemax|entmax\w*|square)$"
SOFTMAX_NAMES = r"softmax|scaled_dot_product|sdpa|flash|^exp$|logsumexp"
# Of biases by which distant tokens count less, however many they are.
DISTANCE_NAMES = r"alibi|slope|relative|rel_|distance|decay|skew"
POSITION_TENSORS = r"inv_freq|freqs|slopes|alibi|(^|[._])(cos|sin)(_|$)|rope|rotary|relative|rel_"
RESIDUAL_NAMES = "residual|mlp|feed_forward|ffn|norm"
TOKEN_NAMES = re.compile(r"token|regist|prefix|prompt|mem(ory)?(_|$)|latent|persist|null|empty")
JOINS = r"^(cat|concat(enate)?|pack)$"
COPIES = 100


def find_mixed_batch(facts: Facts) -> list[Finding]:
    """Batch elements that change another one's output."""
    callee = facts.callee
    if callee.is_single:
        raise NotApplicable("it takes one sequence, without a batch")

    def difference(batch: int, length: int) -> float | None:
        if batch < 2:
            return None
        x, spec = callee.x(batch, length), facts.causal_spec(length)
        base, changes = callee(x, spec=spec), []
        for changed, others in ((-1, slice(-1)), (0, slice(1, None))):
            other = x.clone()
            other[changed] = callee.x(batch, length, seed=9)[changed]
            changes.append(relative_difference(callee(other, spec=spec)[others], base[others]))
        return max(changes) if max(changes) > facts.threshold else None

    if difference(callee.batch, facts.length) is None:
        return []
    x, other = callee.x(), callee.x()
    other[:, -1] = callee.x(seed=9)[:, -1]
    change = relative_difference(callee(other)[:, :-1], callee(x)[:, :-1])
    hint = ""
    if change <= facts.threshold:
        hint = (
            " Positions, on the other hand, are independent: it attends along the first axis, as a"
            " layer with batch_first=False does."
        )
    return [
        Finding(
            BugName.BATCH,
            f"Another batch element changes the output.{hint}",
            find_smallest(facts, difference),
            "The axis of the softmax, normalisations over the batch, a view that merges batch and"
            " tokens, and batch_first.",
        )
    ]


def find_order_dependence(facts: Facts) -> list[Finding]:
    """Outputs that depend on the order of the tokens, without positions; or don't, with them."""
    callee = facts.callee

    def difference(batch: int, length: int) -> float | None:
        x = callee.x(batch, length)
        if facts.is_causal:  # then only the last query reads the same keys
            order = torch.tensor([*range(length - 2, -1, -1), length - 1])
            change = relative_difference(callee(x[:, order])[:, -1], callee(x)[:, -1])
        else:
            order = torch.arange(length).roll(1)
            change = relative_difference(callee(x[:, order]), callee(x)[:, order])
        return change if change > callee.tolerance() else None

    if difference(callee.batch, facts.length) is None:
        if not (names := _positions_in_use(facts)):
            taken = [
                n for n, r in callee.roles.items() if r == "positions" and callee.is_required(n)
            ]
            if taken and callee.library is None:
                raise NotJudged(f"whether {taken[0]} is meant to have an effect: it has none")
            return []
        example = format_shape(callee, 1, 3)
        return [
            Finding(
                BugName.NO_POSITIONS,
                f"It has positions ({', '.join(names[:2])}), and tokens in another order give the"
                " same outputs in that order.",
                example,
                "Whether they reach the scores: queries and keys must both be rotated, each by its"
                " own position, and a bias must be added before the softmax.",
            )
        ]
    if facts.positions:
        raise NotApplicable(f"it uses positions ({', '.join(facts.positions[:3])})")
    if mixers := facts.token_mixers:
        raise NotApplicable(f"tokens reach their neighbours in another way too ({mixers[0]})")
    if facts.window is not None:
        raise NotApplicable("queries read a window, so positions matter")
    if callee.library is not None and callee.module is not None and facts.length != LENGTHS[0]:
        raise NotApplicable("it takes windows of one length, so positions may matter")
    return [
        Finding(
            BugName.MIXED,
            "The order of the tokens changes what they read from each other, though no name in the"
            " code suggests positions.",
            find_smallest(facts, difference, min_length=2),
            "A reshape without a transpose: [B, L, H * E] viewed as [B, H, L, E], or [B, H, L, E]"
            " merged without transpose(1, 2) first; the axis of the softmax.",
        )
    ]


def _positions_in_use(facts: Facts) -> list[str]:
    """Tensors of positions that a user's code keeps, tables that are passed to it, and angles of
    which it computes sines and cosines.
    """
    callee = facts.callee
    if callee.library is not None:
        return []
    names = [n for n, role in callee.roles.items() if role in TABLES and callee.passes_tables]
    if callee.module is not None:
        tensors = [*callee.module.named_parameters(), *callee.module.named_buffers()]
        for path, module in callee.module.named_modules():
            own = ((n, t) for n, t in vars(module).items() if isinstance(t, Tensor))
            tensors += [(f"{path}.{n}".lstrip("."), t) for n, t in own]
        names += [name for name, _ in tensors if re.search(POSITION_TENSORS, name)]
    if not names and not callee.numpy and (shape := _angles_of_tokens(facts)):
        names = [f"sines and cosines of {shape}"]
    return names


class _Angles(TorchDispatchMode):
    """Notes the arguments of sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.cos.default, torch.ops.aten.sin.default):
            self.seen.append(args[0].detach().double().clone())
        elif func is torch.ops.aten.polar.default:
            self.seen.append(args[1].detach().double().clone())
        return func(*args, **(kwargs or {}))


def _angles_of_tokens(facts: Facts) -> str:
    """The shape of angles that a call makes sines and cosines of, if they grow with the number of
    tokens and don't depend on the inputs; "" if it makes none.
    """
    callee, length = facts.callee, facts.length
    runs = []
    for seed, tokens in ((0, length), (1, length), (0, length - 1)):
        with _Angles() as angles:
            callee(callee.x(1, tokens, seed=seed))
        runs.append(angles.seen)
    first, other, fewer = runs
    if not len(first) == len(other) == len(fewer):
        return ""
    for a, b, c in zip(first, other, fewer, strict=True):
        if torch.equal(a, b) and length in a.shape and length - 1 in c.shape:
            return str(list(a.shape))
    return ""


def find_wrong_sums(facts: Facts) -> list[Finding]:
    """Weights that don't sum to one: identical tokens whose output depends on their number."""
    findings = _find_dependence_on_number(facts)
    if not findings and not facts.find_names(DISTANCE_NAMES):
        findings = _find_dilution(facts)
    names = facts.find_names(SUM_NAMES)
    names += find_mixers(facts.callee.module, facts.callee.num_heads or 1)
    if findings and names:
        raise NotApplicable(f"weights may sum to something else ({', '.join(names[:2])})")
    if findings and (names := learned_tokens(facts)):
        raise NotApplicable(f"tokens that are learned may be read too ({names[0]})")
    if findings and (names := facts.find_names(VALUE_POSITION_NAMES)):
        raise NotApplicable(f"positions may be part of the values ({names[0]})")
    if findings and (names := facts.token_mixers):
        raise NotApplicable(f"tokens reach their neighbours in another way too ({names[0]})")
    if findings and (names := find_mixers(facts.callee.module, facts.callee.num_heads or 1)):
        raise NotApplicable(f"weights of heads are mixed ({names[0]})")
    if findings and not facts.find_names(SOFTMAX_NAMES) and (names := facts.find_names(KERNELS)):
        raise NotApplicable(f"another function takes the place of the softmax ({names[0]})")
    return findings


def learned_tokens(facts: Facts) -> list[str]:
    """Parameters `[.., n, D]` (or of a head's width) that no child module has: registers, prefixes,
    memories.
    """
    callee = facts.callee
    if callee.module is None:
        return []
    widths = {callee.embed_dim, callee.head_dim}
    return [
        name
        for name, p in callee.module.named_parameters()
        if TOKEN_NAMES.search(name) and p.ndim >= 2 and p.shape[-1] in widths
    ]


def _to_finding(message: str, example: str) -> Finding:
    return Finding(
        BugName.NOT_NORMALISED,
        f"{message}, so the weights of a query don't sum to one.",
        example,
        "The axis of the softmax (-1 of [.., L, S], the keys), a mask multiplied in after it, a"
        " second softmax, and rotary positions applied to the values.",
    )


def _find_dependence_on_number(facts: Facts) -> list[Finding]:
    callee = facts.callee
    x = callee.x(1, 1, size=0.4)
    lengths = [n for n in (1, 2, 3, facts.length) if _runs(facts, n)]

    def copies(length: int) -> Tensor:
        tokens = x.expand(1, length, -1).contiguous()
        return callee(tokens, spec=facts.causal_spec(length))

    first = copies(lengths[0])[:, -1:]

    def difference(batch: int, length: int) -> float | None:
        change = relative_difference(copies(length), first.expand(1, length, -1))
        return change if not change <= 1e2 * facts.threshold else None

    for length in lengths:
        if difference(1, length) is not None and first.isfinite().all():
            message = (
                "Identical tokens should read the same whatever their number; here the output"
                " changes with it"
            )
            return [_to_finding(message, find_smallest(facts, difference))]
    return []


def _find_dilution(facts: Facts) -> list[Finding]:
    """One token among many copies of another should read nearly only the copies, whatever the
    scores are.
    """
    callee = facts.callee
    # With a residual connection a row holds its own token too.
    is_residual = callee.form == "self" and facts.find_names(RESIDUAL_NAMES)
    if is_residual or facts.window is not None or not _runs(facts, COPIES + 1):
        return []
    if facts.find_names(WINDOWS) and not _reads_first(facts, COPIES // 4 + 1):
        return []  # a window that is wider than what the influence was measured on

    def last(*tokens: Tensor) -> Tensor:
        x = torch.cat(tokens, 1)
        return callee(x, spec=facts.causal_spec(x.shape[1]))[:, -1]

    def deviation(seed: int) -> float:
        size = 0.5
        for _ in range(24):  # until scores are moderate, so that two tokens share nearly evenly
            a, b = callee.x(1, 1, seed=seed, size=size), callee.x(1, 1, size=size)
            alone, expected = last(a), last(b, b)
            off_center = (last(b, a) - (alone + expected) / 2).norm()
            if off_center < 0.4 * (alone - expected).norm() / 2:
                few, many = (
                    relative_difference(last(b.expand(1, n, -1), a), expected)
                    for n in (COPIES // 4, COPIES)
                )
                # Correct attention comes closer as the copies grow in number.
                return many if few < 1.3 * many else 0.0
            size *= 0.8
        return 0.0

    change = min(deviation(3), deviation(4))
    if change < 0.15:
        return []
    message = (
        f"One token among {COPIES} copies of another should read nearly what a copy reads; it"
        f" differs by {change:.2g} of its size"
    )
    return [_to_finding(message, format_shape(callee, 1, COPIES + 1))]


def _reads_first(facts: Facts, length: int) -> bool:
    """Whether the last of `length` tokens reads the first."""
    callee, spec = facts.callee, facts.causal_spec(length)
    x = callee.x(1, length, size=0.2)
    other = x.clone()
    other[:, 0] = callee.x(1, 1, seed=8, size=0.2)[:, 0]
    change = relative_difference(callee(other, spec=spec)[:, -1], callee(x, spec=spec)[:, -1])
    return change > 1e-3 * facts.threshold


def _runs(facts: Facts, length: int) -> bool:
    callee = facts.callee
    try:
        out = callee(callee.x(1, length), spec=facts.causal_spec(length))
    except Exception:
        return False
    return bool(out.isfinite().any())


def _reads_both(facts: Facts) -> bool:
    """Whether keys may be of the memory and of the queries, one after the other."""
    callee = facts.callee
    if not facts.find_names(JOINS):
        return False
    q, memory = callee.x(1, 2, size=0.5), callee.keys(callee.x(1, 3, seed=2, size=0.5))[0]
    if memory.shape[-1] != q.shape[-1]:
        return False
    swapped = q.flip(1)
    return relative_difference(callee(swapped, memory), callee(q, memory).flip(1)) <= 1e-9


def find_dependent_queries(facts: Facts) -> list[Finding]:
    """Queries that change other queries' outputs, and keys whose order matters."""
    callee = facts.callee
    if callee.form == "self":
        raise NotApplicable("queries, keys and values come from one input")
    if facts.is_causal:
        raise NotApplicable("it's causal by itself, so queries and keys have one order")
    q, (k, v) = callee.x(1, 4), callee.keys(callee.x(1, 7, seed=2))
    keys: tuple[Any, ...] = (k,) if callee.form == "memory" else (k, v)
    try:
        base = callee(q, *keys)
    except Exception as error:
        raise NotApplicable(
            f"it can't attend from 4 tokens to 7 ({type(error).__name__})"
        ) from None
    example, findings = f"q {list(q.shape)}, k and v {list(k.shape)}", []
    other, rest = q.clone(), [0, 1, 3]
    other[:, 2] = callee.x(1, 4, seed=8)[:, 2]
    if relative_difference(callee(other, *keys)[:, rest], base[:, rest]) > facts.threshold:
        if callee.form == "memory" and _reads_both(facts):
            raise NotApplicable("queries read each other too, next to the memory")
        findings.append(
            Finding(
                BugName.AXIS,
                "Another query changes a query's output: they aren't independent.",
                example,
                "The axis of the softmax: over the keys, the last of [B, H, L, S]; and every"
                " reshape without a transpose.",
            )
        )
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    change = relative_difference(callee(q, *(t[:, order] for t in keys)), base)
    if not facts.positions and change > callee.tolerance():
        findings.append(
            Finding(
                BugName.MIXED,
                "Keys and values in another order change the output, though no name in the code"
                " suggests positions.",
                example,
                "A reshape of keys or values without a transpose.",
            )
        )
    if not findings and callee.form != "memory":
        others = callee.keys(callee.x(1, 7, seed=9))
        for who, inputs in (("keys", (others[0], v)), ("values", (k, others[1]))):
            if relative_difference(callee(q, *inputs), base) <= facts.threshold:
                raise NotJudged(
                    f"the input for {who} has no influence: if it must be the same as another one,"
                    " take one argument for both; else the wrong input is projected"
                )
    return findings
