"""ONNX export by both exporters: the values of the operator, layers and blocks at other lengths than
those of the export, by the standard Attention operator where it has the call.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from multihead import MultiHeadAttention, TransformerBlock, attention, masks
from multihead.layers.position_bias import ALiBi, RelativeBias, T5Bias
from multihead.layers.rotary import Rotary
from multihead.masks import causal, window
from multihead.ops.modes import is_exporting_onnx

B, L, S = (torch.export.Dim(name, min=1, max=1024) for name in "BLS")
AXES = {B: "B", L: "L", S: "S"}
EXPORTERS = {"dynamo, opset 23": (True, 23), "dynamo": (True, None), "tracing": (False, 17)}
exporters = pytest.mark.parametrize("exporter", ["dynamo, opset 23", "tracing"])
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporters

Maker = Callable[[int, int, int], list[Tensor]]


def export(
    module: nn.Module, make: Maker, axes: list[dict[int, Any]], exporter: str
) -> onnx.ModelProto:
    dynamo, opset = EXPORTERS[exporter]
    inputs = tuple(make(2, 5, 7))
    with torch.no_grad():
        if dynamo:
            program = torch.onnx.export(
                module.eval(),
                inputs,
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=(tuple(axes),),
                verbose=False,
            )
            return program.model_proto
        file, names = io.BytesIO(), [f"x{n}" for n in range(len(inputs))]
        torch.onnx.export(
            module.eval(),
            inputs,
            file,
            dynamo=False,
            opset_version=opset,
            input_names=names,
            dynamic_axes={
                name: {axis: AXES[dim] for axis, dim in dims.items()}
                for name, dims in zip(names, axes)
            },
        )
        return onnx.load_from_string(file.getvalue())


def check(
    module: nn.Module, make: Maker, axes: list[dict[int, Any]], exporter: str
) -> Counter[str]:
    """Compare outputs at several sizes; the number of operators of each kind in the graph."""
    model = export(module, make, axes, exporter)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for sizes in ((2, 5, 7), (1, 1, 9), (3, 11, 4), (1, 33, 33)):
        inputs = make(*sizes)
        with torch.no_grad():
            want = module(*inputs)
        want = want if isinstance(want, tuple) else (want,)
        fed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs)}
        for n, (a, b) in enumerate(zip(session.run(None, fed), want, strict=True)):
            assert torch.allclose(torch.from_numpy(a), b, atol=2e-5), (n, sizes)
    assert not is_exporting_onnx()
    return Counter(node.op_type for node in model.graph.node)


class Several(nn.Module):
    """Modules of the same inputs in one graph, since each export takes seconds."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.several = nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = [module(*inputs) for module in self.several]
        return tuple(x for y in found for x in (y if isinstance(y, tuple) else (y,)))


class Operator(nn.Module):
    def __init__(self, options: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.options = options

    def forward(self, *inputs: Tensor) -> Any:
        q, k, v, *more = inputs
        return attention(q, k, v, **self.options(*more))


def qkv(batch: int, length: int, keys: int, groups: int = 2, values: int = 8) -> list[Tensor]:
    g = torch.Generator().manual_seed(batch * 1000 + length)
    sizes = [(4, length, 8), (groups, keys, 8), (groups, keys, values)]
    return [torch.randn(batch, *size, generator=g) for size in sizes]


QKV_AXES: list[dict[int, Any]] = [{0: B, 2: L}, {0: B, 2: S}, {0: B, 2: S}]
G = torch.Generator().manual_seed(1)
SINKS, SLOPES = torch.randn(4, generator=G), torch.tensor([1.0, 0.5, 0.25, 0.1])
# options, and whether the standard operator has the call
OPTIONS: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "plain": (dict, True),
    "causal": (lambda: {"mask": causal()}, True),
    "after": (lambda: {"mask": causal(2)}, True),
    "window": (lambda: {"mask": causal() & window(2)}, True),
    "window that leaves rows empty": (lambda: {"mask": window(1, 0, offset=-1)}, True),
    "prefix": (lambda: {"mask": masks.prefix(3)}, True),
    "scale": (lambda: {"scale": 0.3, "mask": causal()}, True),
    "softcap": (lambda: {"softcap": 2.0, "mask": causal()}, False),
    "sinks": (lambda: {"sinks": SINKS, "mask": causal()}, False),
    "results": (lambda: {"return_lse": True, "return_weights": True}, False),
}


@exporters
@pytest.mark.parametrize("standard", [True, False])
def test_the_operator(standard: bool, exporter: str) -> None:
    chosen = [Operator(options) for options, has in OPTIONS.values() if has == standard]
    kinds = check(Several(chosen), qkv, QKV_AXES, exporter)
    expected = len(chosen) if standard and exporter == "dynamo, opset 23" else 0
    assert kinds["Attention"] == expected


def with_inputs(*more: Callable[[int, int, int], Tensor], **options: Any) -> Maker:
    return lambda b, n, s: [*qkv(b, n, s, **options), *(make(b, n, s) for make in more)]


def random_bool(*size: int) -> Tensor:
    return torch.rand(*size, generator=torch.Generator().manual_seed(0)) > 0.6


def lengths(b: int, n: int, s: int) -> Tensor:
    return torch.arange(b) % (s + 1)  # the first sequence has no token


def ids(b: int, n: int, s: int) -> Tensor:
    return torch.arange(n).expand(b, n) // 2 % 3  # from 6 tokens on, documents in several pieces


INPUTS: dict[str, tuple[Maker, list[dict[int, Any]], Callable[..., dict[str, Any]]]] = {
    "dense mask": (
        with_inputs(lambda b, n, s: random_bool(b, 1, n, s)),
        [{0: B, 2: L, 3: S}],
        lambda mask: {"mask": mask},
    ),
    "bias": (
        with_inputs(lambda b, n, s: torch.randn(4, n, s)),
        [{1: L, 2: S}],
        lambda bias: {"bias": bias, "mask": causal()},
    ),
    "bias that forbids": (
        with_inputs(
            lambda b, n, s: torch.zeros(b, 1, n, s).masked_fill(random_bool(b, 1, n, s), -torch.inf)
        ),
        [{0: B, 2: L, 3: S}],
        lambda bias: {"mask": bias},
    ),
    "lengths": (with_inputs(lengths), [{0: B}], lambda n: {"mask": masks.padding(n) & causal()}),
    "packed": (
        with_inputs(
            lambda b, n, s: torch.tensor([0, n // 2, n]),
            lambda b, n, s: torch.tensor([0, s // 3, s]),
            lambda b, n, s: torch.arange(s).expand(b, s) % 4,
        ),
        [{}, {}, {0: B, 1: S}],
        lambda q, k, at: {
            "mask": masks.documents.from_cu_seqlens(q, k, mask=causal()),
            "bias": masks.documents.from_position_ids(at).dense(1, at.shape[1]).float(),
        },
    ),
    "valid": (
        with_inputs(lambda b, n, s: random_bool(b, s)),
        [{0: B, 1: S}],
        lambda valid: {"mask": masks.padding(valid=valid)},
    ),
}


@exporters
@pytest.mark.parametrize("name", INPUTS)
def test_masks_as_inputs(name: str, exporter: str) -> None:
    make, axes, options = INPUTS[name]
    if name == "valid":  # with holes: eagerly it must be given as a dense mask

        class Valid(Operator):
            def forward(self, *inputs: Tensor) -> Any:
                if is_exporting_onnx():
                    return super().forward(*inputs)
                return attention(*inputs[:3], inputs[3][:, None, None])

        module: nn.Module = Valid(options)
    else:
        module = Operator(options)
    kinds = check(module, make, [*QKV_AXES, *axes], exporter)
    assert kinds["Attention"] == (exporter == "dynamo, opset 23")


@exporters
def test_heads_and_widths(exporter: str) -> None:
    def narrow(b: int, n: int, s: int) -> list[Tensor]:
        return qkv(b, n, s, groups=4, values=6)

    kinds = check(Operator(lambda: {"mask": causal()}), narrow, QKV_AXES, exporter)
    assert kinds["Attention"] == (exporter == "dynamo, opset 23")


def test_the_judge_of_the_standard() -> None:
    """The graph in onnx's reference, which isn't onnxruntime."""
    module = Operator(lambda: {"mask": window(1, 0, offset=-1)})
    model = export(module, qkv, QKV_AXES, "dynamo, opset 23")
    inputs = qkv(3, 6, 4)
    names = [x.name for x in model.graph.input]
    feed = {name: x.numpy() for name, x in zip(names, inputs)}
    (out,) = ReferenceEvaluator(model).run(None, feed)
    assert torch.allclose(torch.from_numpy(out), module(*inputs), atol=1e-5)


class Model(nn.Module):
    """A layer or a block with a causal mask and the padding of each sequence."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, *inputs: Tensor) -> Any:
        x, n = inputs
        return self.layer(x, mask=causal() & masks.padding(n), **self.options)


def tokens(b: int, n: int, s: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(b * 1000 + n)
    return [torch.randn(b, n, 24, generator=g), torch.arange(b) % n + 1]


LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 3.0],
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "grouped": lambda: Model(MultiHeadAttention(24, 4, num_kv_heads=2, positions=Rotary(6))),
    "length": lambda: Model(MultiHeadAttention(24, 4, positions=Rotary(6, scaling=LONG))),
    "weights": lambda: Model(MultiHeadAttention(24, 4), return_weights=True),
    "everything": lambda: Model(
        MultiHeadAttention(
            24,
            4,
            num_kv_heads=2,
            qk_norm="layer",
            softcap=3.0,
            sinks=True,
            gate="head",
            bias_kv=True,
        )
    ),
    "alibi": lambda: Model(MultiHeadAttention(24, 4, positions=ALiBi(4))),
    "t5": lambda: Model(MultiHeadAttention(24, 4, positions=T5Bias(4))),
    "relative": lambda: Model(
        TransformerBlock(24, 4, hidden_dim=32, positions=RelativeBias(4, 3), norm="layer")
    ),
    "block": lambda: Model(
        TransformerBlock(
            24,
            4,
            hidden_dim=32,
            num_kv_heads=2,
            positions=Rotary(6, interleaved=True),
            norm="layer",
        )
    ),
}


PLAIN = ("weights", "everything")  # without the standard operator


@exporters
@pytest.mark.parametrize("standard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_and_blocks(standard: bool, exporter: str) -> None:
    torch.manual_seed(0)
    chosen = [make() for name, make in LAYERS.items() if (name not in PLAIN) == standard]
    kinds = check(Several(chosen), tokens, [{0: B, 1: L}, {0: B}], exporter)
    expected = len(chosen) if standard and exporter == "dynamo, opset 23" else 0
    assert kinds["Attention"] == expected


def test_rms_norm_needs_the_newer_exporter() -> None:
    """torch's exporter by tracing has no RMSNorm, and names it; the other one exports it."""
    module = Model(TransformerBlock(24, 4, hidden_dim=32))
    check(module, tokens, [{0: B, 1: L}, {0: B}], "dynamo, opset 23")
    with pytest.raises(Exception, match="rms_norm"):
        export(module, tokens, [{0: B, 1: L}, {0: B}], "tracing")


def test_the_default_opset() -> None:
    names = ("causal", "window that leaves rows empty", "softcap")
    chosen = Several(Operator(OPTIONS[name][0]) for name in names)
    assert not check(chosen, qkv, QKV_AXES, "dynamo")["Attention"]


def test_compiled_graphs_are_whole() -> None:
    """The question whether an exporter records doesn't break the graph of torch.compile."""
    q, k, v = qkv(2, 5, 7)
    for options in ({}, {"mask": masks.padding([7, 3])}, {"softcap": 2.0}, {"return_lse": True}):
        module = Operator(lambda options=options: options)
        whole = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
        for a, b in zip(whole(q, k, v), module(q, k, v)):
            assert torch.allclose(a, b, atol=1e-5)
        for strict in (False, True):
            exported = torch.export.export(module, (q, k, v), strict=strict).module()
            for a, b in zip(exported(q, k, v), module(q, k, v)):
                assert torch.allclose(a, b, atol=1e-5)
