"""Operators that make mutants of right attention, on its syntax tree.

Each operator takes a node and yields what takes its place: axes swapped, a factor or a term
dropped, a mask shifted or inverted, and so on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PUBLIC = Path(__file__).parent / "public"


def _copy(node: Any, **changes: Any) -> Any:
    """The node with some of its fields changed; its children are shared."""
    fields = {name: getattr(node, name, None) for name in node._fields}
    return ast.copy_location(type(node)(**{**fields, **changes}), node)


def _swapped(items: Sequence[Any]) -> Iterator[list[Any]]:
    """The items with two neighbours in each other's place."""
    for i in range(len(items) - 1):
        yield [*items[:i], items[i + 1], items[i], *items[i + 2 :]]


def _name(node: ast.AST) -> str:
    """The last part of what is called, `view` of `x.view(...)`."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _is_index(node: ast.Tuple) -> bool:
    """Whether it is what stands in brackets, x[:, None], or numbers."""
    kinds = (ast.Slice, ast.Constant, ast.UnaryOp)
    return any(isinstance(each, kinds) for each in node.elts)


def _receiver(call: ast.Call) -> ast.expr | None:
    """x of `x.f(...)`; None of `torch.f(x)`."""
    if not isinstance(call.func, ast.Attribute):
        return None
    value = call.func.value
    is_module = isinstance(value, ast.Name) and value.id in ("torch", "F", "math", "nn")
    is_module |= isinstance(value, ast.Attribute) and value.attr in ("functional", "linalg")
    return None if is_module else value


def _number(node: ast.AST | None) -> float | None:
    """The value of a number in the text, with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    return None


def _is_lowest(node: ast.AST) -> bool:
    """Whether it is a number that hides a score."""
    value = _number(node)
    if value is not None:
        return value <= -1e4
    text = ast.unparse(node)
    lowest = r"float\('-(inf|1e\d+)'\)|-(torch|math|np)\.inf|-?torch\.finfo\(.*\)\.(min|max)"
    return bool(re.fullmatch(lowest, text))


def swap_axes(node: ast.AST) -> Iterator[ast.AST]:
    """Two neighbouring sizes or axes in each other's place."""
    if isinstance(node, ast.Tuple) and _is_index(node):
        for order in _swapped(node.elts):
            yield _copy(node, elts=order)
    if not isinstance(node, ast.Call):
        return
    name, args = _name(node), node.args
    if name in ("view", "reshape", "permute", "expand", "flip") and _receiver(node) is not None:
        for order in _swapped(args):
            yield _copy(node, args=order)
    if name == "unflatten" and isinstance(args[-1], ast.Tuple):
        for order in _swapped(args[-1].elts):
            yield _copy(node, args=[*args[:-1], ast.Tuple(order, ast.Load())])
    patterns = [(i, a.value) for i, a in enumerate(args) if isinstance(a, ast.Constant)]
    for i, text in patterns:
        if name in ("einsum", "rearrange", "repeat") and isinstance(text, str) and "->" in text:
            for new in _swapped_pattern(text, is_einops=name != "einsum"):
                yield _copy(node, args=[*args[:i], ast.Constant(new), *args[i + 1 :]])


def _swapped_pattern(text: str, *, is_einops: bool) -> Iterator[str]:
    for start, end in [match.span() for match in re.finditer(r"[^,>-]+", text)]:
        part = text[start:end]
        spaced = is_einops or " " in part.strip()
        letters = re.findall(r"\S+" if spaced else r"\S", part)
        if is_einops:
            letters = re.findall(r"[\w.]+|\(\)|[()]", part)
        for order in _swapped(letters):
            new = (" " if spaced else "").join(order).replace("( ", "(").replace(" )", ")")
            if not is_einops or ")" not in new or new.find("(") < new.find(")"):
                yield (
                    f"{text[:start]} {new} {text[end:]}".strip()
                    if spaced
                    else (text[:start] + new + text[end:])
                )


def change_transpose(node: ast.AST) -> Iterator[ast.AST]:
    """A transpose left out, or of other axes."""
    if isinstance(node, ast.Attribute) and node.attr in ("mT", "T"):
        yield node.value
    if isinstance(node, ast.Call) and (x := _receiver(node)) is not None:
        if _name(node) in ("transpose", "permute", "swapaxes"):
            yield x
        if _name(node) in ("transpose", "swapaxes") and len(node.args) == 2:
            for axes in ((1, 2), (0, 1), (-1, -2)):
                yield _copy(node, args=[ast.Constant(n) for n in axes])


def drop_factor(node: ast.AST) -> Iterator[ast.AST]:
    """A factor or a divisor left out: a scale, a gate."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        yield node.left
        if isinstance(node.op, ast.Mult):
            yield node.right


def wrong_scale(node: ast.AST) -> Iterator[ast.AST]:
    """Division for multiplication, another exponent, no square root."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Mult):
            yield _copy(node, op=ast.Div())
        if isinstance(node.op, ast.Div):
            yield _copy(node, op=ast.Mult())
        if isinstance(node.op, ast.Pow) and (power := _number(node.right)) is not None:
            for other in {-power, 2 * power, power / 2}:
                yield _copy(node, right=ast.Constant(other))
    if isinstance(node, ast.Call) and _name(node) in ("sqrt", "rsqrt") and node.args:
        yield node.args[0]


def shift_mask(node: ast.AST) -> Iterator[ast.AST]:
    """A diagonal one further, < for <=, an index or a slice one further."""
    if isinstance(node, ast.Call) and _name(node) in ("tril", "triu"):
        own = int(_receiver(node) is None)
        given = [k for k in node.keywords if k.arg == "diagonal"]
        value = given[0].value if given else (node.args[own] if len(node.args) > own else None)
        for shift in (1, -1):
            shifted = ast.BinOp(value or ast.Constant(0), ast.Add(), ast.Constant(shift))
            yield _copy(node, args=[*node.args[:own], shifted], keywords=[])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
        if kind := other.get(type(node.ops[0])):
            yield _copy(node, ops=[kind()])
    if isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            if (end := getattr(node, name)) is not None:
                for op in (ast.Add, ast.Sub):
                    yield _copy(node, **{name: ast.BinOp(end, op(), ast.Constant(1))})


def invert_mask(node: ast.AST) -> Iterator[ast.AST]:
    """The opposite of a condition on tensors."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        yield node.operand
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        pairs: list[tuple[type[ast.cmpop], type[ast.cmpop]]] = [
            (ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.LtE, ast.Gt), (ast.GtE, ast.Lt),
            (ast.Eq, ast.NotEq), (ast.NotEq, ast.Eq),
        ]  # fmt: skip
        if kind := dict(pairs).get(type(node.ops[0])):
            yield _copy(node, ops=[kind()])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        other = {"eq": "ne", "ne": "eq", "tril": "triu", "triu": "tril", "lt": "ge", "gt": "le"}
        if name := other.get(node.func.attr):
            yield _copy(node, func=_copy(node.func, attr=name))
        if node.func.attr in ("masked_fill", "masked_fill_") and len(node.args) == 2:
            yield _copy(node, args=[ast.UnaryOp(ast.Invert(), node.args[0]), node.args[1]])


def drop_mask(node: ast.AST) -> Iterator[ast.AST]:
    """A mask that is never used."""
    if isinstance(node, ast.Call) and _name(node) in ("masked_fill", "masked_fill_", "where"):
        yield _receiver(node) or node.args[1]
    if isinstance(node, ast.If) and "mask" in ast.unparse(node.test) and not node.orelse:
        yield ast.Pass()
    if isinstance(node, ast.keyword) and node.arg in ("attn_mask", "is_causal", "mask"):
        yield ast.keyword(node.arg, ast.Constant(None if node.arg != "is_causal" else False))


def hide_by_zero(node: ast.AST) -> Iterator[ast.AST]:
    """0 in place of the number that hides a score, or that number without its sign."""
    if isinstance(node, ast.expr) and _is_lowest(node):
        yield ast.Constant(0.0)
        yield ast.UnaryOp(ast.USub(), node)


def change_dim(node: ast.AST) -> Iterator[ast.AST]:
    """A softmax, a sum, a norm or a concatenation along another axis."""
    names = ("softmax", "Softmax", "sum", "mean", "amax", "cumsum", "normalize", "cat", "stack")
    if not isinstance(node, ast.Call) or _name(node) not in (*names, "chunk", "unbind", "split"):
        return
    for i, each in enumerate(node.keywords):
        if each.arg == "dim" and (dim := _number(each.value)) is not None:
            for other in _other_dims(int(dim)):
                changed = ast.keyword("dim", ast.Constant(other))
                yield _copy(node, keywords=[*node.keywords[:i], changed, *node.keywords[i + 1 :]])
    if node.args and type(dim := _number(node.args[-1])) is int and _name(node) != "chunk":
        for other in _other_dims(dim):
            yield _copy(node, args=[*node.args[:-1], ast.Constant(other)])


def _other_dims(dim: int) -> set[int]:
    return {-1, -2, 1} - {dim} if dim < 0 else {dim - 1, dim - 2, dim + 1} - {-1}


def reuse_projection(node: ast.AST) -> Iterator[ast.AST]:
    """Keys by the projection of queries, values by that of keys, or one of them for another."""
    if isinstance(node, ast.Tuple) and 2 <= len(node.elts) <= 4 and not _is_index(node):
        for order in _swapped(node.elts):
            yield _copy(node, elts=order)
        if isinstance(node.ctx, ast.Load):
            for i in range(1, len(node.elts)):
                yield _copy(node, elts=[*node.elts[:i], node.elts[i - 1], *node.elts[i + 1 :]])
    if isinstance(node, ast.Call) and _name(node) in ("matmul", "bmm", "einsum"):
        for order in _swapped(node.args):
            yield _copy(node, args=order)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield _copy(node, left=node.right, right=node.left)


def drop_term(node: ast.AST) -> Iterator[ast.AST]:
    """A term of a sum left out: a bias, a residual, a part of a rotation."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield node.left
        yield node.right


def negate(node: ast.AST) -> Iterator[ast.AST]:
    """- in place of +, and no sign in place of -."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        other = ast.Sub if isinstance(node.op, ast.Add) else ast.Add
        yield _copy(node, op=other())
    is_negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    if is_negative and _number(node.operand) is None and not _is_lowest(node):
        yield node.operand


def drop_call(node: ast.AST) -> Iterator[ast.AST]:
    """A function of one tensor left out: a norm, a gate's sigmoid, an embedding, a softmax."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return
    kept = ("view", "reshape", "permute", "transpose", "masked_fill", "size", "cat", "stack",
            "Linear", "register_buffer", "super", "range", "len", "float", "einsum", "matmul",
            "Parameter", "tril", "triu", "chunk", "split", "Dropout", "device")  # fmt: skip
    x = _receiver(node)
    is_own = isinstance(x, ast.Name) and x.id == "self"
    if _name(node) in kept or (is_own and re.search("lin|proj|fc|w_?[qkvo]|out", _name(node))):
        return
    if x is not None and not is_own:
        yield x
    elif node.args and (is_own or x is None):
        yield node.args[0]


def pair_heads(node: ast.AST) -> Iterator[ast.AST]:
    """Groups of heads tiled instead of repeated, and the reverse."""
    if not isinstance(node, ast.Call) or _name(node) != "repeat_interleave":
        return
    if (x := _receiver(node)) is not None:
        rest = [*node.args[1:], *(each.value for each in node.keywords)]
        copies = ast.BinOp(ast.List([x], ast.Load()), ast.Mult(), node.args[0])
        yield ast.Call(ast.parse("torch.cat", mode="eval").body, [copies, *rest], [])


def keep_dropout(node: ast.AST) -> Iterator[ast.AST]:
    """Dropout that doesn't end with training."""
    if isinstance(node, ast.Call) and re.search("drop", _name(node)) and node.args:
        dropout = ast.parse("torch.nn.functional.dropout", mode="eval").body
        yield ast.Call(dropout, [node.args[0], ast.Constant(0.1)], [])
    if isinstance(node, ast.keyword) and node.arg == "training":
        yield ast.keyword("training", ast.Constant(True))
    if isinstance(node, ast.keyword) and node.arg == "dropout_p":
        yield ast.keyword("dropout_p", ast.Constant(0.1))


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    each.__name__.replace("_", " "): each
    for each in (
        swap_axes, change_transpose, drop_factor, wrong_scale, shift_mask, invert_mask, drop_mask,
        hide_by_zero, change_dim, reuse_projection, drop_term, negate, drop_call, pair_heads,
        keep_dropout,
    )
}  # fmt: skip


# ---- Mutants


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        name: of the file.
        operator: that made it.
        line: of the change.
        change: the text before and after.
        source: the changed file.
    """

    name: str
    operator: str
    line: int
    change: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}:{self.line}: {self.operator}: {self.change}"


def mutants(name: str, folder: Path = PUBLIC) -> list[Mutant]:
    """Every mutant of a file, each text once, in the order of the file."""
    tree = ast.parse((folder / f"{name}.py").read_text())
    found: dict[str, Mutant] = {}
    original = ast.unparse(tree)
    constructors = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    for owner, attribute, index, node in list(_places(tree)):
        for operator, apply in OPERATORS.items():
            if apply is reuse_projection and node.lineno in constructors:
                continue  # attributes of other names: another module, right too
            for new in apply(node):
                _put(owner, attribute, index, new)
                try:
                    source = ast.unparse(ast.fix_missing_locations(tree))
                finally:
                    _put(owner, attribute, index, node)
                if source != original and source not in found:
                    change = f"{ast.unparse(node)} -> {ast.unparse(new)}"
                    change = " ".join(change.split())
                    found[source] = Mutant(name, operator, node.lineno, change, source)
    return list(found.values())


def _places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Nodes that operators apply to, with where they are; not what makes the example."""
    todo: list[ast.AST] = [n for n in tree.body if getattr(n, "name", "") != "make"]
    while todo:
        owner = todo.pop(0)
        for attribute, value in ast.iter_fields(owner):
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                # A tuple of results has no order that a caller couldn't know.
                is_result = isinstance(owner, ast.Return) and isinstance(node, ast.Tuple)
                if isinstance(node, ast.expr | ast.stmt | ast.keyword) and not is_result:
                    yield owner, attribute, index, node
                if isinstance(node, ast.AST):
                    todo.append(node)


def _put(owner: ast.AST, attribute: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(owner, attribute, node)
    else:
        getattr(owner, attribute)[index] = node
