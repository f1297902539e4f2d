"""Caches: steps of any size give what one pass gives, whatever the heads, the mask, the positions
and the padding.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from multihead import MultiHeadAttention
from multihead.layers.cache import Cache, WindowCache
from multihead.layers.position_bias import ALiBi, RelativeBias, T5Bias
from multihead.layers.rotary import Rotary
from multihead.layers.visible_keys import write_tokens
from multihead.masks import causal, padding, prefix, window

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
POSITIONS: dict[str, Any] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(6),
    "alibi": lambda: ALiBi(4),
    "t5": lambda: T5Bias(4, bidirectional=False),
    "relative": lambda: RelativeBias(4, 5),
}


def layer(
    kv_heads: int = 2, positions: str = "rotary", dtype: torch.dtype = torch.float32, **options: Any
) -> MultiHeadAttention:
    torch.manual_seed(kv_heads)
    made = MultiHeadAttention(
        24, 4, num_kv_heads=kv_heads, positions=POSITIONS[positions](), **options
    ).to(dtype)
    nn.init.normal_(made.q_proj.weight, std=0.5)  # attention far from even
    for parameter in made.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter)
    if made.positions is not None:
        for parameter in made.positions.parameters():
            nn.init.normal_(parameter)
    return made


def chunks(total: int, sizes: list[int]) -> list[slice]:
    found, at = [], 0
    for size in sizes:
        found.append(slice(at, min(at + size, total)))
        at += size
    return [*found, *(slice(i, i + 1) for i in range(at, total))]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    positions=st.sampled_from(list(POSITIONS)),
    left=st.sampled_from([None, 0, 2, 30]),
    kind=st.sampled_from(["grows", "reserved", "window", "sinks"]),
    sizes=st.lists(st.integers(0, 7), max_size=4),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    bias_kv=st.booleans(),
)
@settings(max_examples=25)
def test_steps_equal_one_pass(
    dtype: torch.dtype,
    kv_heads: int,
    positions: str,
    left: int | None,
    kind: str,
    sizes: list[int],
    softcap: float | None,
    sinks: bool,
    bias_kv: bool,
) -> None:
    model = layer(kv_heads, positions, dtype, softcap=softcap, sinks=sinks, bias_kv=bias_kv)
    x = torch.randn(2, 13, 24, dtype=dtype)
    mask: Any = causal() if left is None else causal() & window(left=left)
    whole: Any = mask
    caches: dict[str, Any] = {
        "grows": Cache,
        "reserved": lambda: Cache(13),
        "window": lambda: WindowCache(4),
        "sinks": lambda: WindowCache(3, sinks=2),
    }
    cache = caches[kind]()
    if kind == "window":
        whole = mask & window(left=4)
    elif kind == "sinks":
        near = (mask & window(left=3)).dense(13, 13)
        whole = near | mask.dense(13, 13) & (torch.arange(13) < 2)
    want, want_weights = model(x, mask=whole, return_weights=True)
    with torch.no_grad():
        steps = [
            model(x[:, part], mask=mask, cache=cache, return_weights=True)
            for part in chunks(13, sizes)
        ]
    got = torch.cat([out for out, _ in steps], 1)
    assert torch.allclose(got, want, atol=TOLERANCE[dtype])
    assert all(
        torch.allclose(w.sum(-1), want_weights[:, :, part].sum(-1), atol=TOLERANCE[dtype])
        for part, (_, w) in zip(chunks(13, sizes), steps)
    )
    assert cache.length == 13
    if kind in ("window", "sinks"):
        assert (
            cache.nbytes == 2 * 2 * kv_heads * 6 * (6 if kind == "sinks" else 5) * x.element_size()
        )


@given(
    seed=st.integers(0, 2**31),
    side=st.sampled_from(["left", "right", "both"]),
    kind=st.sampled_from(["grows", "reserved", "window", "sinks"]),
    positions=st.sampled_from(list(POSITIONS)),
)
@settings(max_examples=25)
def test_rows_of_different_lengths(seed: int, side: str, kind: str, positions: str) -> None:
    """A padded first chunk, then chunks of which each row takes its own part: as each row alone,
    token by token in one pass.
    """
    g = torch.Generator().manual_seed(seed)
    model = layer(2, positions)
    rows, calls = 3, int(torch.randint(1, 4, (), generator=g))
    cache = {
        "grows": Cache,
        "reserved": lambda: Cache(24),
        "window": lambda: WindowCache(3),
        "sinks": lambda: WindowCache(2, sinks=2),
    }[kind]()
    texts: list[list[Tensor]] = [[] for _ in range(rows)]
    outputs: list[list[Tensor]] = [[] for _ in range(rows)]
    for _ in range(calls):
        length = int(torch.randint(1, 7, (), generator=g))
        start = torch.zeros(rows, 1, dtype=torch.int64)
        stop = torch.full((rows, 1), length)
        if side != "right":
            start = torch.randint(0, length + 1, (rows, 1), generator=g)
        if side != "left":
            stop = torch.maximum(start, torch.randint(0, length + 1, (rows, 1), generator=g))
        valid = (torch.arange(length) >= start) & (torch.arange(length) < stop)
        x = torch.randn(rows, length, 24, generator=g)
        with torch.no_grad():
            out = model(x, mask=causal(), cache=cache, valid=valid)
        assert out.isfinite().all()
        for row in range(rows):
            texts[row].append(x[row, valid[row]])
            outputs[row].append(out[row, valid[row]])
    with torch.no_grad():  # then one more token for all rows at once
        x = torch.randn(rows, 1, 24, generator=g)
        out = model(x, mask=causal(), cache=cache)
    for row in range(rows):
        text = torch.cat([*texts[row], x[row]])[None]
        mask: Any = causal()
        if kind == "window":
            mask = mask & window(left=3)
        elif kind == "sinks":
            n = text.shape[1]
            mask = (mask & window(left=2)).dense(n, n) | mask.dense(n, n) & (torch.arange(n) < 2)
        want = model(text, mask=mask)[0]
        assert torch.allclose(torch.cat([*outputs[row], out[row]]), want, atol=1e-5)


def test_reorder_and_crop() -> None:
    model, g = layer(), torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 24, generator=g)
    for cache in (Cache(), Cache(12), WindowCache(9), WindowCache(3, sinks=1)):
        with torch.no_grad():
            model(x, mask=causal(), cache=cache)
            cache.reorder(torch.tensor([2, 0]))
            more = torch.randn(2, 2, 24, generator=g)
            got = model(more, mask=causal(), cache=cache)
        text = torch.cat([x[[2, 0]], more], 1)
        mask: Any = causal()
        if isinstance(cache, WindowCache):
            near = (mask & window(left=cache.left)).dense(8, 8)
            mask = near | mask.dense(8, 8) & (torch.arange(8) < cache.sinks)
        assert torch.allclose(got, model(text, mask=mask)[:, 6:], atol=1e-5)
    for cache in (Cache(), Cache(12), WindowCache(9)):
        with torch.no_grad():
            model(x, mask=causal(), cache=cache)
            cache.crop(4)
            got = model(x[:, 4:], mask=causal(), cache=cache)
            assert (
                torch.allclose(got, model(x, mask=causal())[:, 4:], atol=1e-5) and cache.length == 6
            )
            cache.crop(torch.tensor([0, 6, 2]))  # row 0 starts another text, row 2 goes back
            new = torch.randn(3, 2, 24, generator=g)
            got = model(new, mask=causal(), cache=cache)
            for row, kept in enumerate([0, 6, 2]):
                want = model(
                    torch.cat([x[row : row + 1, :kept], new[row : row + 1]], 1), mask=causal()
                )
                assert torch.allclose(got[row], want[0, kept:], atol=1e-5)


def test_gradients_flow_through_memory_that_grows() -> None:
    model, x = (
        layer(dtype=torch.float64),
        torch.randn(1, 7, 24, dtype=torch.float64, requires_grad=True),
    )
    cache = Cache()
    steps = torch.cat(
        [model(x[:, i : i + 2], mask=causal(), cache=cache) for i in range(0, 7, 2)], 1
    )
    want = model(x, mask=causal())
    learned = [x, *model.parameters()]
    for a, b in zip(
        torch.autograd.grad(steps.square().sum(), learned),
        torch.autograd.grad(want.square().sum(), learned),
    ):
        assert torch.allclose(a, b, atol=1e-10)


def test_memory_that_grows_doubles() -> None:
    """One step at a time copies what is there a few times in all, and not at every step."""
    cache, k = Cache(), torch.zeros(1, 1, 1, 4)
    sizes = set()
    for _ in range(100):
        cache.update(k, k)
        sizes.add(cache.nbytes)
    assert len(sizes) <= 8 and cache.nbytes == 2 * 4 * 4 * 128


def test_a_memory_of_fixed_length_is_read_by_every_step() -> None:
    """Cross attention: keys of a memory stored once, and read by calls that bring none."""
    model, cache = layer(positions="none", kdim=5, vdim=5), Cache()
    memory, x = torch.randn(2, 9, 5), torch.randn(2, 4, 24)
    with torch.no_grad():
        first = model(x[:, :1], memory, cache=cache)
        rest = model(x[:, 1:], memory[:, :0], cache=cache)
    assert (
        torch.allclose(torch.cat([first, rest], 1), model(x, memory), atol=1e-5)
        and cache.length == 9
    )


def test_write_follows_counts_and_goes_round() -> None:
    buffer, new = torch.zeros(2, 1, 4, 1), torch.arange(1.0, 7.0).view(2, 1, 3, 1)
    write_tokens(buffer, new, torch.tensor([0, 2]), count=torch.tensor([3, 1]))
    assert buffer[..., 0].tolist() == [[[1, 2, 3, 0]], [[0, 0, 4, 0]]]
    write_tokens(buffer, new, torch.tensor([3, 1]), circular=True)
    assert buffer[..., 0].tolist() == [[[2, 3, 3, 1]], [[0, 4, 5, 6]]]


K = torch.zeros(2, 1, 3, 4)


def full(cache: Cache, *more: Any) -> Cache:
    cache.update(K, K, *more)
    return cache


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: full(full(Cache(5))), ValueError, ["holds 3", "max_length=5", "3 more", "make 6"]),
        (
            lambda: full(Cache()).update(K[:1], K[:1]),
            ValueError,
            ["k[1, 1, 3, 4]", "[2, 1, 3, 4]", "separate cache"],
        ),
        (lambda: full(Cache()).update(K.double(), K.double()), ValueError, ["float64", "float32"]),
        (lambda: Cache().update(K, K[:, :, :2]), ValueError, ["k[2, 1, 3, 4]", "v[2, 1, 2, 4]"]),
        (lambda: Cache(0), ValueError, ["max_length=0", "at least 1"]),
        (lambda: WindowCache(-1), ValueError, ["left=-1", "at least 0"]),
        (lambda: WindowCache(1, sinks=0.5), ValueError, ["sinks=0.5"]),
        (lambda: full(Cache()).crop(4), ValueError, ["length=4", "3 tokens"]),
        (lambda: full(Cache()).crop(-1), ValueError, ["length=-1"]),
        (lambda: full(Cache()).crop(1.0), TypeError, ["length=1.0", "[B]"]),
        (
            lambda: full(full(WindowCache(1))).crop(2),
            ValueError,
            ["crop(2)", "evicts tokens", "crop(0)"],
        ),
        (lambda: full(Cache()).reorder(torch.tensor([0, 2])), ValueError, ["rows=[0, 2]", "0..1"]),
        (lambda: full(WindowCache(2)).crop(2), ValueError, ["crop(2)", "full sequence"]),
        (lambda: full(Cache()).reorder([[0], [1, 0]]), TypeError, ["rows is a list", "[B]"]),
        (lambda: full(Cache()).reorder(torch.tensor([0.0])), TypeError, ["rows", "float32"]),
        (
            lambda: full(Cache(), torch.ones(2, 2, dtype=torch.bool)),
            ValueError,
            ["valid", "[2, 2]", "[2, 3]"],
        ),
        (
            lambda: full(Cache(), torch.tensor([[True, False, True]] * 2)),
            ValueError,
            ["holes", "left", "right"],
        ),
        (
            lambda: write_tokens(K.clone(), K, torch.tensor([1, 0])),
            ValueError,
            ["start=[1, 0]", "3 tokens", "3 slots"],
        ),
        (
            lambda: full(Cache()).crop(torch.tensor([1, 1, 1])),
            ValueError,
            ["length=[1, 1, 1]", "2 sequences"],
        ),
        (lambda: full(Cache()).crop(torch.tensor([1])), ValueError, ["length=[1]", "2 sequences"]),
        (lambda: full(Cache()).crop("all"), TypeError, ["length is a str", "or an int"]),
    ],
)
def test_words(make: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kind", ["window", "rows"])
def test_masks_of_single_keys_have_no_meaning_where_places_are_no_positions(kind: str) -> None:
    model, x = layer(positions="none"), torch.randn(2, 4, 24)
    cache = WindowCache(3) if kind == "window" else Cache()
    valid = None if kind == "window" else torch.tensor([[False, True, True, True], [True] * 4])
    for options in (
        {"mask": torch.ones(4, 4).tril().bool()},
        {"mask": torch.zeros(4, 4)},
        {"attn_bias": torch.zeros(4, 4)},
        {"mask": prefix(2)},
        {"mask": causal() & padding(torch.tensor([4, 4]))},
    ):
        with pytest.raises(ValueError, match="mask of distances"):
            model(x, cache=cache, valid=valid, **options)
        assert cache.length == 0


def test_a_call_that_fails_stores_nothing() -> None:
    model, x = layer(), torch.randn(2, 9, 24)
    for cache in (Cache(), Cache(9), WindowCache(3), WindowCache(2, sinks=1)):
        with torch.no_grad():
            before = model(x[:, :7], mask=causal(), cache=cache)
            held = cache.length, cache._k.clone(), cache._v.clone()
            for part in (x[:, 7:8], x[:, 7:9]):
                with pytest.raises(ValueError, match=r"mask|bias"):
                    model(part, mask=torch.ones(3, 3).bool(), cache=cache)
                assert cache.length == held[0]
            after = model(x[:, 7:], mask=causal(), cache=cache)
            again = type(cache)(
                *((cache.left,) if isinstance(cache, WindowCache) else ()),
                **({"sinks": cache.sinks} if isinstance(cache, WindowCache) else {}),
            )
            assert torch.equal(model(x[:, :7], mask=causal(), cache=again), before)
            assert torch.allclose(model(x[:, 7:], mask=causal(), cache=again), after, atol=1e-6)


def test_the_same_tensor_given_three_times_is_self_attention() -> None:
    for positions in ("rotary", "alibi", "t5"):
        model, x, cache = layer(positions=positions), torch.randn(2, 6, 24), Cache()
        with torch.no_grad():
            steps = [model(y, y, y, mask=causal(), cache=cache) for y in x.split(2, 1)]
        assert torch.allclose(torch.cat(steps, 1), model(x, mask=causal()), atol=1e-5)


def test_another_key_with_a_cache_needs_to_know_where_its_rows_are() -> None:
    model, x, memory = layer(), torch.randn(2, 3, 24), torch.randn(2, 9, 24)
    with pytest.raises(ValueError, match="give position_ids="):
        model(x, memory, cache=Cache())
    cache = Cache()
    with torch.no_grad():
        steps = [
            model(
                x[:, i : i + 1],
                memory if not i else memory[:, :0],
                cache=cache,
                position_ids=torch.tensor([i]),
            )
            for i in range(3)
        ]
    assert torch.allclose(torch.cat(steps, 1), model(x, memory), atol=1e-5)
    with pytest.raises(ValueError, match="mask is one of distances"):
        model(x, memory, cache=Cache(), position_ids=torch.arange(3), mask=causal())
    with pytest.raises(ValueError, match="leave position_ids= out"):
        layer(positions="alibi")(x, cache=Cache(), position_ids=torch.arange(3))


def test_a_window_is_causal_by_itself() -> None:
    model, x = layer(), torch.randn(2, 9, 24)
    want = model(x, mask=causal() & window(left=2))
    for sizes in ([9], [1] * 9, [4, 1, 4]):
        cache = WindowCache(2)
        with torch.no_grad():
            got = torch.cat([model(part, cache=cache) for part in x.split(sizes, 1)], 1)
        assert torch.allclose(got, want, atol=1e-5)


def test_columns_of_weights_are_where_the_cache_says() -> None:
    model, x = layer(), torch.randn(2, 9, 24)
    mask = causal() & window(left=2)
    dense = mask.dense(9, 9) | causal().dense(9, 9) & (torch.arange(9) < 1)
    want = model(x, mask=dense, return_weights=True)[1]
    cache = WindowCache(2, sinks=1)
    with torch.no_grad():
        for i in range(9):
            weights = model(x[:, i : i + 1], cache=cache, return_weights=True)[1]
            at = cache.key_positions
            columns = (
                torch.zeros(2, 4, 9).index_add_(
                    2, at[0].clamp(min=0), weights[:, :, 0, -at.shape[1] :] * (at[0] >= 0)
                )
                if weights.shape[-1] == at.shape[1]
                else weights[:, :, 0]
            )
            assert torch.allclose(columns[..., : i + 1], want[:, :, i, : i + 1], atol=1e-5)
    grown = Cache()
    grown.update(K, K, torch.tensor([[True, True, False], [False, True, False]]))
    assert grown.key_positions.tolist() == [[0, 1], [0, -1]]


def test_one_row_of_a_window_is_freed() -> None:
    model, g = layer(), torch.Generator().manual_seed(0)
    x, new = torch.randn(2, 8, 24, generator=g), torch.randn(2, 5, 24, generator=g)
    cache = WindowCache(2)
    with torch.no_grad():
        model(x, cache=cache)
        cache.crop(torch.tensor([0, 8]))
        got = torch.cat([model(new[:, i : i + 1], cache=cache) for i in range(5)], 1)
    mask = causal() & window(left=2)
    assert torch.allclose(got[0], model(new[:1], mask=mask)[0], atol=1e-5)
    assert torch.allclose(
        got[1], model(torch.cat([x[1:], new[1:]], 1), mask=mask)[0, 8:], atol=1e-5
    )


def test_lengths_are_reordered_with_their_rows() -> None:
    cache = Cache()
    cache.update(K, K, torch.tensor([[True, True, True], [False, False, True]]))
    kept = torch.tensor([2, 1])
    cache.crop(kept)
    kept -= 1  # the caller's tensor is the caller's
    cache.reorder(torch.tensor([1, 0, 1]))
    assert cache.lengths.tolist() == [1, 2, 1] and cache.update(
        K[[0, 0, 0]], K[[0, 0, 0]]
    ).lengths.tolist() == [4, 5, 4]


@pytest.mark.parametrize("kind", ["padded", "reserved", "window"])
def test_gradients_flow_through_every_cache(kind: str) -> None:
    model, x = (
        layer(dtype=torch.float64),
        torch.randn(1, 7, 24, dtype=torch.float64, requires_grad=True),
    )
    cache = {"padded": Cache, "reserved": lambda: Cache(9), "window": lambda: WindowCache(3)}[
        kind
    ]()
    first = {"valid": torch.ones(1, 3, dtype=torch.bool)} if kind == "padded" else {}
    steps = torch.cat(
        [
            model(part, mask=causal(), cache=cache, **(first if not i else {}))
            for i, part in enumerate(x.split([3, 1, 1, 1, 1], 1))
        ],
        1,
    )
    want = model(x, mask=causal() & window(left=3) if kind == "window" else causal())
    learned = [x, *model.parameters()]
    for a, b in zip(
        torch.autograd.grad(steps.square().sum(), learned),
        torch.autograd.grad(want.square().sum(), learned),
    ):
        assert torch.allclose(a, b, atol=1e-9)


def test_filled_in_inference_mode_and_used_outside() -> None:
    model, x = layer(), torch.randn(1, 6, 24)
    for cache in (Cache(), Cache(9), WindowCache(7)):
        with torch.inference_mode():
            steps = [
                model(x[:, :3], mask=causal(), cache=cache),
                model(x[:, 3:4], mask=causal(), cache=cache),
            ]
        with torch.no_grad():
            steps += [model(x[:, i : i + 1], mask=causal(), cache=cache) for i in (4, 5)]
        assert torch.allclose(
            torch.cat([s.clone() for s in steps], 1), model(x, mask=causal()), atol=1e-5
        )


def test_a_cache_belongs_to_one_layer() -> None:
    first, second, x = layer(), layer(), torch.randn(1, 3, 24)
    cache = Cache()
    first(x, cache=cache)  # with gradients
    with pytest.raises(ValueError, match="another layer"):
        second(x, cache=cache)
    copied = copy.deepcopy(cache)
    assert copied.length == 3 and pickle.loads(pickle.dumps(cache)).length == 3  # noqa: S301
    second(x, cache=copied)
    assert (cache.length, copied.length) == (3, 6)


def test_an_offset_that_the_layer_counts_itself_is_refused() -> None:
    model, x, cache = layer(), torch.randn(1, 6, 24), Cache()
    with torch.no_grad():
        model(x[:, :4], mask=causal(), cache=cache)
        with pytest.raises(ValueError, match=r"causal\(offset=4\).*give causal\(\)"):
            model(x[:, 4:], mask=causal(offset=4), cache=cache)


def test_a_decoding_step_compiles() -> None:
    model, x = layer(), torch.randn(1, 9, 24)
    for cache in (Cache(), Cache(9)):
        torch._dynamo.reset()
        step = torch.compile(
            lambda y, c: model(y, mask=causal() & window(left=4), cache=c),
            fullgraph=True,
            backend="eager",
        )
        with torch.no_grad():
            got = torch.cat([step(x[:, i : i + 1], cache) for i in range(9)], 1)
        assert torch.allclose(got, model(x, mask=causal() & window(left=4)), atol=1e-5)


def test_a_refused_update_changes_nothing() -> None:
    cache = full(Cache(5))
    with pytest.raises(ValueError, match="max_length"):
        cache.update(K, K)
    assert cache.length == 3
    cache.update(K[:, :, :2], K[:, :, :2])
    assert cache.length == 5
