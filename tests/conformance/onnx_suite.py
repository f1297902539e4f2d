"""The cases that the ONNX project judges runtimes by, and the adapter that runs them on this
library.

Nobody here wrote the inputs, the expected outputs or the tolerances; `Case` holds one of them,
`attention`, `rotary` and `scatter` translate the words of the ONNX specification into ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx.backend.test.case.node import _NodeTestCases
from onnx.backend.test.runner import Runner
from torch import Tensor

import multihead
from multihead.ops.backends import reference

Outputs = dict[str, Tensor]

# The suite's own load_node_model_tests() builds the cases of all 200 operators, which would cost
# every collection of tests five
# seconds. Importing the module of an operator builds those of that one; a test compares the two
# lists.
for operator in ("attention", "rotaryembedding", "tensorscatter"):
    import_module(f"onnx.backend.test.case.node.{operator}")


class Case(NamedTuple):
    name: str
    inputs: dict[str, Tensor]
    attributes: dict[str, Any]
    outputs: dict[str, NDArray[Any]]
    rtol: float
    atol: float

    def check(self, found: Outputs) -> None:
        """Shapes, dtypes and values by the suite's own comparison and tolerances, which hold
        bfloat16 to 2**-6.
        """
        for name, value in found.items():
            Runner.assert_similar_outputs(
                [self.outputs[name]], [_array(value)], self.rtol, self.atol
            )


def cases(prefix: str) -> list[Case]:
    """The cases whose name starts so, without the twins that spell the same operator out in smaller
    ones.
    """
    found = [
        case
        for case in _NodeTestCases
        if case.name.startswith(prefix) and "_expanded" not in case.name
    ]
    return [_case(case) for case in found]


def _case(case: Any) -> Case:
    (node,), ((inputs, outputs),) = case.model.graph.node, case.data_sets
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    # An operand that was left out has an empty name, and no array.
    names, results = filter(None, node.input), filter(None, node.output)
    return Case(
        case.name,
        {name: _tensor(x) for name, x in zip(names, inputs, strict=True)},
        attributes,
        dict(zip(results, outputs, strict=True)),
        case.rtol,
        case.atol,
    )


def _tensor(x: NDArray[Any]) -> Tensor:
    # NumPy has no bfloat16 of its own, and torch doesn't read that of ml_dtypes.
    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype.name == "bfloat16"
        else torch.from_numpy(x)
    )


def _array(x: Tensor) -> NDArray[Any]:
    if x.dtype != torch.bfloat16:
        return x.numpy()
    return (
        x.contiguous()
        .view(torch.int16)
        .numpy()
        .view(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
    )


def attention(case: Case, backend: str) -> Outputs:
    """Runs a case of Attention; the intermediate scores, which the operator doesn't give, come with
    "reference" only.
    """
    attributes, inputs = case.attributes, case.inputs
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    flat = q.ndim == 3
    if flat:
        q = multihead.ops.split_heads(q, attributes["q_num_heads"])
        k, v = (multihead.ops.split_heads(x, attributes["kv_num_heads"]) for x in (k, v))
    found: Outputs = {}
    if "past_key" in inputs:
        k, v = torch.cat((inputs["past_key"], k), 2), torch.cat((inputs["past_value"], v), 2)
        found = {"present_key": k, "present_value": v}
    options = dict(
        _masks(case, q.shape[2], k.shape[2]),
        scale=attributes.get("scale"),
        softcap=attributes.get("softcap") or None,
    )  # 0 says "none" there, and is refused here
    if "qk_matmul_output" in case.outputs:
        mode = attributes.get("qk_matmul_output_mode", 0)
        if mode == 3 and backend not in ("sdpa", "cpu"):
            _, found["qk_matmul_output"] = multihead.attention(
                q, k, v, **options, backend=backend, return_weights=True
            )
        elif backend == "reference":
            found["qk_matmul_output"] = _scores(q, k, v, options, mode)
    out = multihead.attention(q, k, v, **options, backend=backend)
    assert isinstance(out, Tensor)
    return {"Y": multihead.ops.merge_heads(out) if flat else out, **found}


def _masks(case: Case, length: int, keys: int) -> dict[str, Any]:
    """`mask` and `bias` of a case: what the specification defines by positions as intervals, the
    rest as it is given.
    """
    attributes, inputs = case.attributes, case.inputs
    lengths, offset = inputs.get("nonpad_kv_seqlen"), 0
    if "past_key" in inputs:
        offset = inputs["past_key"].shape[2]
    elif lengths is not None:
        offset = lengths - length
    rules = []
    if attributes.get("is_causal"):
        rules.append(multihead.masks.causal(offset))
    left, right = (
        None if n < 0 else n
        for n in (attributes.get(f"{s}_window_size", -1) for s in ("left", "right"))
    )
    if (left, right) != (None, None):
        rules.append(multihead.masks.window(left, right, offset=offset))
    if lengths is not None:
        rules.append(multihead.masks.padding(lengths))
    mask: Any = None
    for rule in rules:
        mask = rule if mask is None else mask & rule
    given = inputs.get("attn_mask")
    if given is None:
        return {"mask": mask}
    off = False if given.dtype == torch.bool else -torch.inf
    given = F.pad(
        given, (0, keys - given.shape[-1]), value=off
    )  # keys beyond the end of the given mask are padding
    if given.dtype != torch.bool:
        return {"mask": mask, "bias": given}
    return {"mask": given if mask is None else given & mask.dense(length, keys)}


def _scores(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], mode: int) -> Tensor:
    """Scores after the product (0), the soft cap (1), or bias and mask (2): the same call with the
    later steps left out.
    """
    left_out = [("softcap", "bias", "mask"), ("bias", "mask"), ()][mode]
    options = {name: None if name in left_out else value for name, value in options.items()}
    if isinstance(options["mask"], multihead.masks.IntervalMask):
        options["mask"] = options["mask"].dense(q.shape[2], k.shape[2])
    plain = {
        name: x.double().numpy() if isinstance(x, Tensor) else x for name, x in options.items()
    }
    scores = reference.attend_reference(q.double(), k.double(), v.double(), **plain).scores
    return torch.from_numpy(scores).to(q.dtype)


def rotary(case: Case) -> Outputs:
    from multihead.layers.rotary import rotate

    x, cos, sin = (case.inputs[name] for name in ("input", "cos_cache", "sin_cache"))
    if "position_ids" in case.inputs:
        cos, sin = cos[case.inputs["position_ids"]], sin[case.inputs["position_ids"]]
    flat = x.ndim == 3
    if flat:
        x = multihead.ops.split_heads(x, case.attributes["num_heads"])
    # rotary_embedding_dim needs no translation: it is the width of cos and sin
    out = rotate(x, cos, sin, interleaved=bool(case.attributes.get("interleaved", 0)))
    return {"output": multihead.ops.merge_heads(out) if flat else out}


def scatter(case: Case) -> Outputs:
    from multihead.layers.visible_keys import write_tokens

    buffer, new = case.inputs["past_cache"].clone(), case.inputs["update"]
    flat = buffer.ndim == 3  # [B, C, E]: no axis of heads
    buffers = buffer.unsqueeze(1) if flat else buffer
    write_tokens(
        buffers,
        new.unsqueeze(1) if flat else new,
        case.inputs["write_indices"],
        circular=case.attributes.get("mode") == b"circular",
    )
    return {"present_cache": buffer}
