"""Lists and NumPy arrays where tensors are expected are taken or refused by name; what is kept is
a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multihead import attention, masks
from multihead.layers.position_bias import ALiBi, T5Bias
from multihead.layers.rotary import Rotary, rotate
from multihead.ops import AlibiBias, merge_heads, split_heads
from multihead.ops.tensors import as_plain_int, copied, require_tensor, to_integers, to_tensor

TRUE, FALSE = True, False
X = torch.randn(2, 2, 3, 8)

# what is built from an argument, and the argument as nested lists
KEPT: dict[str, tuple[Callable[[Any], masks.IntervalMask], list[Any]]] = {
    "padding": (masks.padding, [2, 3]),
    "padding valid": (lambda x: masks.padding(valid=x), [[TRUE, TRUE, FALSE], [FALSE, TRUE, TRUE]]),
    "documents": (masks.documents, [4, 4, 7]),
    "documents by row": (masks.documents, [[4, 4, 7], [1, 2, 2]]),
    "prefix": (masks.prefix, [2, 1]),
    "causal": (masks.causal, [1, 0]),
    "window": (lambda x: masks.window(1, 0, offset=x), [1, 0]),
    "after": (lambda x: (masks.causal() & masks.prefix(1)).after(x), [0, 1]),
    "intervals start": (
        lambda x: masks.intervals(x, torch.full((2, 3), 3)),
        [[0, 1, 2], [1, 1, 1]],
    ),
    "intervals stop": (lambda x: masks.intervals([[0, 0, 0]], x), [[1, 2, 2]]),
    "joined": (lambda x: masks.causal() & masks.padding(x), [2, 3]),
}


def forms(given: list[Any]) -> dict[str, Any]:
    array = np.array(given)
    readonly = array.copy()
    readonly.flags.writeable = False
    return {
        "list": copy.deepcopy(given),
        "tuple": tuple(copy.deepcopy(given)),
        "array": array,
        "read-only array": readonly,
        "array of another layout": np.array(given, order="F"),
        "list of arrays": [np.array(x) for x in given],
        "list of tensors": [torch.tensor(x) for x in given],
        "tensor": torch.tensor(given),
    }


def spoil(x: Any) -> None:
    """Change what was given, in place."""
    if isinstance(x, Tensor):
        x.logical_not_() if x.dtype == torch.bool else x.add_(1)
    elif isinstance(x, np.ndarray):
        x.flags.writeable = True
        x[...] = ~x if x.dtype == bool else x + 1
    elif isinstance(x, list):
        for part in x:
            spoil(part)
        x[:] = [not part if isinstance(part, bool) else 0 for part in x]


@pytest.mark.parametrize("name", KEPT)
def test_masks_take_any_form_and_own_it(name: str) -> None:
    build, plain = KEPT[name]
    want = build(torch.tensor(plain)).dense(3, 3)
    for kind, given in forms(plain).items():
        mask = build(given)
        spoil(given)
        assert torch.equal(mask.dense(3, 3), want), kind
        start, stop = mask.bounds(3, 3)
        assert torch.equal(masks.intervals(start, stop).dense(3, 3), want), kind


@pytest.mark.parametrize("name", KEPT)
def test_masks_of_inference_mode_can_be_trained_with(name: str) -> None:
    build, plain = KEPT[name]
    with torch.inference_mode():
        mask = build(torch.tensor(plain))
    q = X.clone().requires_grad_()
    attention(q, q, q, mask, backend="torch").sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("part", ["slopes", "query_positions", "key_positions"])
def test_alibi_owns_its_tensors(part: str) -> None:
    given = dict(
        slopes=torch.tensor([0.5, 0.25]),
        query_positions=torch.arange(3),
        key_positions=torch.arange(3),
    )
    bias = AlibiBias(**given)
    want = bias.dense()
    given[part].add_(1)
    assert torch.equal(bias.dense(), want)
    with torch.inference_mode():
        made = AlibiBias(torch.tensor([0.5, 0.25]), [0, 1, 2], np.arange(3))
    q = X.clone().requires_grad_()
    attention(q, X, X, bias=made, backend="torch").sum().backward()
    assert torch.equal(made.dense(), want)


def test_converted_masks_own_their_numbers() -> None:
    bias = torch.zeros(3, 3)
    forbidden = torch.tensor([[False, True, False]])
    mask, add = masks.from_torch_mask(bias, forbidden)
    assert mask is not None and add is not None
    bias.fill_(7)
    forbidden.fill_(True)
    assert not add.any() and mask[0, 0, 0].tolist() == [True, False, True]
    rows = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    found = masks.from_dense(rows)
    assert isinstance(found, masks.IntervalMask)
    rows.fill_(True)
    assert found.dense(3, 3)[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    lists = masks.from_dense([[[[True, False], [True, True]]]])
    assert isinstance(lists, masks.IntervalMask)
    assert masks.from_torch_mask([[False, True], [False, False]])[0] is not None
    same = masks.from_function(lambda b, h, i, j: (j <= i).numpy(), 3, 3)
    assert isinstance(same, masks.IntervalMask)


@pytest.mark.parametrize("backend", ["torch", "sdpa", "reference"])
def test_the_operator_takes_masks_in_any_form(backend: str) -> None:
    allowed = [[True, False, False], [True, True, False], [False, True, True]]
    add = [[0.0, -1.5, 0.25], [0.5, 0.75, -2.0], [3.0, 0.5, 1.0]]
    for plain in (allowed, add):
        want = attention(X, X, X, torch.tensor(plain), backend=backend)
        for kind, given in forms(plain).items():
            got = attention(X, X, X, given, backend=backend)
            assert torch.allclose(got, want, atol=1e-6), kind
    with pytest.raises(TypeError, match=r"mask is torch.int64.*mask.bool\(\)"):
        attention(X, X, X, [[1, 0, 0], [1, 1, 0], [1, 1, 1]])


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "q": (lambda: attention(X.numpy(), X, X), r"q is a ndarray.*torch\.from_numpy\(q\)"),
    "k": (lambda: attention(X, X.tolist(), X), r"k is a list.*torch\.tensor\(k\)"),
    "v": (lambda: attention(X, X, None), r"v is a NoneType: expected a torch tensor"),
    "mask": (lambda: attention(X, X, X, {}), r"mask is a dict: expected an interval mask"),
    "ragged mask": (lambda: attention(X, X, X, [[True], []]), r"mask is a list that isn't a rect"),
    "bias": (lambda: attention(X, X, X, bias=np.zeros(3)), r"bias is a ndarray.*from_numpy\(bias"),
    "bias and floating mask": (
        lambda: attention(X, X, X, torch.randn(3, 3), bias=[[0.0]]),
        r"bias is a list.*torch\.tensor\(bias\)",
    ),
    "sinks": (lambda: attention(X, X, X, sinks=[0.0, 1.0]), r"sinks is a list.*torch\.tensor"),
    "lengths": (lambda: masks.padding("33"), r"lengths is a str: expected integers of shape \[B\]"),
    "lengths floating": (lambda: masks.padding(np.ones(2)), r"lengths is torch.float64 \[2\]"),
    "objects": (lambda: masks.padding(np.array([1, None])), r"lengths is a NumPy array of object"),
    "ids": (lambda: masks.documents({0, 1}), r"ids is a set: .*\[S\] or \[B, S\]"),
    "ids floating": (lambda: masks.documents([0.5, 1.0]), r"ids is torch.float32 \[2\]"),
    "valid": (lambda: masks.padding(valid=[[1, 0]]), r"valid is torch.int64.*valid\.bool\(\)"),
    "start": (lambda: masks.intervals(3, [[1]]), r"start is a int: expected integers"),
    "n": (lambda: masks.prefix("a"), r"n is a str: expected integers of shape \[B\], or an int"),
    "offset": (lambda: masks.causal(None), r"offset=None: expected an int"),
    "from_dense": (lambda: masks.from_dense("a"), r"mask is a str: expected bool"),
    "from_dense shape": (lambda: masks.from_dense([[True]]), r"mask is torch.bool \[1, 1\]"),
    "attn_mask": (lambda: masks.from_torch_mask(object()), r"attn_mask is a object: expected"),
    "split": (lambda: split_heads([[1.0]], 1), r"x is a list: .*torch\.tensor\(x\)"),
    "merge": (lambda: merge_heads(X.numpy()), r"x is a ndarray: .*torch\.from_numpy\(x\)"),
    "rotate": (lambda: rotate(X, [[1.0]], [[0.0]]), r"cos is a list"),
    "rotary x": (lambda: Rotary(8)(X.tolist()), r"x is a list"),
    "rotary positions": (
        lambda: Rotary(8)(X, "abc"),
        r"positions is a str: expected integers \[L\]",
    ),
    "bias positions": (lambda: ALiBi(2)([0, 1], None), r"key_positions is a NoneType"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_things_are_refused_by_name(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(TypeError, match=words):
        call()


def test_positions_in_any_form() -> None:
    rotary, bias = Rotary(8), T5Bias(2)
    want = rotary(X, torch.tensor([4, 5, 9])), bias(torch.tensor([0, 4]), torch.tensor([1, 2, 3]))
    for kind, at in forms([4, 5, 9]).items():
        assert torch.equal(rotary(X, at), want[0]), kind
        assert torch.equal(rotate(X, *rotary.cos_sin(at)), want[0]), kind
    for at, key_at in zip(forms([0, 4]).values(), forms([1, 2, 3]).values()):
        assert torch.equal(bias(at, key_at), want[1])
    assert torch.equal(Rotary(8)(X, range(4, 7)), Rotary(8)(X, torch.arange(4, 7)))


def test_numbers_of_numpy_are_numbers() -> None:
    one = np.int64(1)
    assert as_plain_int(one) == 1 and as_plain_int(1.5) == 1.5 and as_plain_int(True) is True
    for a, b in (
        (masks.causal(one), masks.causal(1)),
        (masks.window(one, np.int32(0)), masks.window(1, 0)),
        (masks.prefix(np.uint8(2)), masks.prefix(2)),
    ):
        assert torch.equal(a.dense(3, 3), b.dense(3, 3))


def test_lists_without_elements_and_other_devices() -> None:
    assert masks.padding([]).dense(0, 3).shape == (0, 1, 0, 3)
    assert to_tensor("valid", [[], []], "bool", empty=torch.bool).dtype == torch.bool
    assert masks.documents([[]]).dense(0, 0).shape == (1, 1, 0, 0)
    assert to_tensor("ids", [1, 2], "integers", device="meta").is_meta
    meta = X.to("meta")
    mask = [[True, False, True]]
    assert attention(meta, meta, meta, mask).is_meta
    with torch.device("meta"):  # a default device isn't that of the data
        assert masks.padding([2, 3]).dense(3, 3, "cpu")[0, 0, 0].tolist() == [True, True, False]


def test_the_helpers_alone() -> None:
    ids = torch.tensor([1, 2])
    assert to_tensor("ids", ids, "integers") is ids
    assert to_integers("ids", ids, "[S]", (1,)) is not ids
    with torch.inference_mode():
        made = copied(torch.arange(3))
    assert not made.is_inference()
    with pytest.raises(TypeError, match="bias is a float: expected a tensor"):
        require_tensor("bias", 0.5, "a tensor")
    with pytest.raises(TypeError, match="ids is a list that isn't a rectangle"):
        to_tensor("ids", [2**70], "integers")
