"""The one table of attribute names: what one verb finds the others find, write and count, and
families can be added from outside.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import multihead
from multihead.checks.signature import read_number
from multihead.errors import MultiheadError
from multihead.models import find_sites, names, register_family
from multihead.models.head_layout import HeadLayout
from multihead.models.names import NAMES, find_number, is_masking, names_of, projection_role
from multihead.models.resize import resize_heads

SOURCE = Path(multihead.__file__).parent


@pytest.fixture(autouse=True)
def forget_families() -> Iterator[None]:
    before = dict(names._FAMILIES)
    yield
    names._FAMILIES.clear()
    names._FAMILIES.update(before)


class Attention(nn.Module):
    """Hand-written attention of four heads of six, over two key/value heads, with chosen names."""

    def __init__(self, **chosen: str) -> None:
        super().__init__()
        roles = dict(num_heads="num_heads", num_kv_heads="num_kv_heads")
        roles |= dict(q="q_proj", k="k_proj", v="v_proj", out="o_proj") | chosen
        self.roles = roles
        setattr(self, roles["num_heads"], 4)
        setattr(self, roles["num_kv_heads"], 2)
        for role, size in (("q", 24), ("k", 12), ("v", 12), ("out", 24)):
            setattr(self, roles[role], nn.Linear(24, size))

    def __getitem__(self, role: str) -> Any:
        return getattr(self, self.roles[role])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self[role](x).unflatten(-1, (self[count], -1)).transpose(1, 2)
            for role, count in (("q", "num_heads"), ("k", "num_kv_heads"), ("v", "num_kv_heads"))
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self["out"](y.transpose(1, 2).flatten(2))


class OddAttention(Attention):
    """Names that no table has."""

    def __init__(self) -> None:
        odd = dict(num_heads="voices", num_kv_heads="choirs", q="ask", k="offer", v="give")
        super().__init__(**odd, out="blend")


@pytest.mark.parametrize(
    ("role", "name"),
    [
        (role, name)
        for role in ("num_heads", "num_kv_heads", "q", "k", "v", "out")
        for name in getattr(NAMES, role)
        if name != "q_b_proj"
    ],
)
def test_every_verb_knows_every_name(role: str, name: str) -> None:
    """A name that reading finds is written by surgery, counted by costs and known to check."""
    model = nn.Sequential(Attention(**{role: name}))
    (site,) = find_sites(model)
    assert (site.num_heads, site.num_kv_heads, site.head_dim) == (4, 2, 6)
    (shape,) = multihead.cost(model).shapes
    projections = sum(p.numel() for p in model.parameters())
    assert sum(shape.parameters.values()) == projections and not shape.extras
    assert read_number(model[0], NAMES.num_heads) == 4
    assert read_number(model[0], NAMES.num_kv_heads) == 2
    resize_heads(model, site, HeadLayout((1, 3), (0, 1), (0, 1), (1, 3), 4))
    assert (model[0]["num_heads"], model[0]["num_kv_heads"]) == (2, 2)
    (smaller,) = find_sites(model)
    assert (smaller.num_heads, smaller.num_kv_heads, smaller.head_dim) == (2, 2, 6)
    assert model(torch.randn(1, 5, 24)).shape == (1, 5, 24)


def test_the_patterns_give_each_name_its_role() -> None:
    for role in ("q", "k", "v", "kv", "qkv", "out"):
        for name in getattr(NAMES, role):
            expected = "qkv" if name == "c_attn" else role
            assert projection_role(name) == projection_role(name.lower()) == expected, name
    for name in ("q_norm", "dropout", "rotary_emb", "layernorm", "k_norm", "num_heads"):
        assert projection_role(name) is None, name


def test_no_other_file_lists_the_same_names() -> None:
    """Two names of one role in one literal are a second table."""
    roles = [set(getattr(NAMES, role)) for role in ("num_heads", "num_kv_heads", "group_size")]
    roles += [set(NAMES.q) - {"q"}, set(NAMES.k) - {"k"}, set(NAMES.v) - {"v"}, set(NAMES.out)]
    tables = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name == "names.py" or not isinstance(node, (ast.Tuple, ast.List, ast.Set)):
                continue
            literals = {part.value for part in node.elts if isinstance(part, ast.Constant)}
            if any(len(role & literals) > 1 for role in roles):
                tables.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not tables


def test_a_family_from_outside_is_read_pruned_and_counted() -> None:
    model, x = nn.Sequential(OddAttention()), torch.randn(2, 7, 24)
    with pytest.raises(MultiheadError, match=r"register_family\('OddAttention', out='its name'\)"):
        find_sites(model)
    register_family(
        OddAttention, num_heads="voices", num_kv_heads="choirs", q="ask", k=["offer"], v="give",
        out="blend",
    )  # fmt: skip
    table = multihead.read(model, [{"input": x}])
    assert [head.head for head in table.heads] == [f"L0.H{h}" for h in range(4)]
    assert [head.group for head in table.heads] == [0, 0, 1, 1]
    assert multihead.cost(model).shapes[0].parameters == {
        "query": 25 * 24,
        "key": 25 * 12,
        "value": 25 * 12,
        "output": 25 * 24,
    }
    (site,) = find_sites(model)
    resize_heads(model, site, HeadLayout((0, 1), (0,), (0, 0), (0, 1), 4))
    assert (model[0].voices, model[0].choirs) == (2, 1) and model(x).shape == x.shape


def test_a_family_covers_subclasses_and_no_other_class() -> None:
    register_family("OddAttention", num_heads="voices")

    class Finer(OddAttention):
        pass

    assert names_of(Finer()).num_heads[0] == "voices"
    assert names_of(Finer()).num_heads[1:] == NAMES.num_heads
    assert names_of(Attention()) is NAMES


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(attention=3), TypeError, "attention=3: expected a class or the name of one"),
        (dict(num_head="n"), MultiheadError, "num_head='n': .*did you mean 'num_heads'"),
        (dict(q=""), MultiheadError, "q='': expected an attribute name"),
        (dict(q=[1]), TypeError, r"q=\[1\]: expected an attribute name"),
        (dict(qkv="x", layout="rows"), MultiheadError, "layout='rows': expected one of blocks"),
        (dict(layout="heads"), MultiheadError, "layout='heads': give the fused"),
    ],
)
def test_a_family_that_makes_no_sense_is_refused(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = dict(names._FAMILIES)
    with pytest.raises(error, match=words):
        register_family(**{"attention": "Some", **arguments})
    assert before == names._FAMILIES


def test_numbers_are_positive_integers() -> None:
    module = nn.Module()
    module.num_heads, module.n_heads, module.heads = True, 0, 3
    assert find_number(module, NAMES.num_heads) == 3
    assert find_number(nn.Module(), NAMES.num_heads) is None


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def shapes_of(x: torch.Tensor) -> list[torch.Tensor]:
    """A mask `[L, S]` with every set of axes, expanded and copied."""
    every = [x, x[None], x[None, None], x.expand(1, 2, *x.shape), x.expand(3, 1, *x.shape)]
    every += [x.expand(3, 2, *x.shape), x.expand(6, *x.shape)]
    return [*every, *(y.clone() for y in every), x.mT.contiguous().mT]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low", [-1e4, -1e5, -1e9, "lowest", "half", "twice", -torch.inf])
def test_numbers_that_mean_may_not_read(low: Any, dtype: torch.dtype) -> None:
    """Whatever the axes are, and where a bias was added to them, or two of them to each other."""
    lowest = torch.finfo(dtype).min
    number = {"lowest": lowest, "half": lowest / 2, "twice": -torch.inf}.get(low, low)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask = torch.where(hidden, torch.tensor(number, dtype=torch.float64), 0.0).to(dtype)
    for given in (mask, mask + mask, mask + torch.linspace(-30, 30, 25).view(5, 5).to(dtype)):
        for x in shapes_of(given):
            assert torch.equal(is_masking(x), hidden.expand_as(x)), x.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_may_be_as_low_as_such_numbers(dtype: torch.dtype) -> None:
    """Slopes times distances come down to -10000 by small steps; a mask that was added to them is
    seen even so.
    """
    slopes = torch.tensor([0.5, 0.25]).view(1, 2, 1, 1)
    bias = (-slopes * torch.arange(24000.0).flip(0)).to(dtype)
    assert not bool(is_masking(bias).any())
    hidden = torch.arange(24000) % 3 == 0
    for low in (-1e6, torch.finfo(dtype).min, -torch.inf):
        masked = bias.masked_fill(hidden, low if low > torch.finfo(dtype).min else -torch.inf)
        assert torch.equal(is_masking(masked), hidden.expand_as(bias))
    small = torch.tensor([0.0, -30.0, -400.0, -9000.0], dtype=dtype)  # T5's, Swin's
    assert not bool(is_masking(small).any())


def test_whole_numbers_that_forbid() -> None:
    assert is_masking(torch.tensor([0, -100, -10000])).tolist() == [False, False, True]
    assert is_masking(torch.empty(0, 3)).shape == (0, 3)
