"""Judge whether anything explains that the definition doesn't reproduce an output.

A module whose tensors are all those of the definition, and in whose code no word names attention of
another kind, must give the output of the definition: if it doesn't, it is wrong, be the bug known
or not. Else what was found is a reason, and the module is partly judged.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from .extras import GATES, INPUT_NORMS, SINKS
from .facts import Facts, format_shape
from .finding import BugName, Finding
from .projections import projection_of_path
from .signature import library_of

# Words of a user's code that name something that the definition lacks.
KINDS = re.compile(
    r"elu|relu|(^|_)phi(_|$)|feature_map|kernel|perform|normalize|cos(ine)?_?(sim|att)|cdist|tanh|"
    r"cap(_|$|ping)|sigmoid|silu|entmax|sparsemax|gumbel|topk|sort|conv|pool|unfold|roll|shift|"
    r"skew|window|local|sliding|spars|dilat|stride|block|hash|bucket|landmark|cumsum|fft|decay|"
    r"gamma|lamb|diff|talk|mix|residual|norm|rel(_|ative)|pos(_|ition|$)|rot|rope|freq|distance|"
    r"mem(_|ory)|prefix|prompt|regist|token|latent|temp(erature|_|$)|logit_scale|tau|score_mod|"
    r"softmax_?(1|one)|off_?by|expert|route|interp|focal|sink|null|gate|add_zero",
    re.IGNORECASE,
)
KNOWN_TENSORS = re.compile(
    r"(bias|null|mem)_(k|v|kv)|(^|_)(slopes|alibi\w*)|inv_freq|freqs\w*|cos|sin"
)


def has_projections(target: Any) -> bool:
    """Whether it is a user's module with projections of queries, keys and values, by name."""
    if not isinstance(target, nn.Module) or library_of(target) is not None:
        return False
    found = {projection_of_path(name) for name, _ in target.named_parameters()}
    return {"q", "k", "v"} <= {letter for who in found if who for letter in who}


def find_reasons(facts: Facts) -> list[str]:
    """Names of tensors and words of the code that make it attention of another kind; what the
    definition has, such as sinks and rotary angles, isn't one.
    """
    module = facts.callee.module
    if module is None or facts.callee.library is not None:
        return [facts.callee.name]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if not has_projections(module):
        return ["which matrix is which"]
    others = [name for name, t in tensors if not _is_known(name, t)]
    # Words of the parts that the definition has been tried with.
    tried = {n.lower() for n, _ in module.named_children() if INPUT_NORMS.fullmatch(n.lower())}
    expected = "norm|" if tried else ""
    for pattern, its_words in (
        (GATES, "gate|sigmoid|"),
        (SINKS, "sink|"),
        (KNOWN_TENSORS, "null|"),
    ):
        parts = [re.sub(r"\.(weight|bias)$", "", name).rpartition(".")[2] for name, _ in tensors]
        expected += its_words if any(pattern.fullmatch(part.lower()) for part in parts) else ""
    words = [n for n in facts.find_names(KINDS.pattern) if n not in facts.callee.parameters]
    return others + [n for n in words if not (expected and re.search(expected[:-1], n, re.I))]


def _is_known(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a projection, a mask, or a part that the definition may have."""
    if projection_of_path(name) is not None:
        return True
    path = re.sub(r"\.(weight|bias)$", "", name)
    last = path.rpartition(".")[2].lower()
    if any(pattern.fullmatch(last) for pattern in (GATES, INPUT_NORMS, SINKS, KNOWN_TENSORS)):
        return True
    values = set(tensor.detach().double().unique().tolist()) if tensor.numel() < 1e6 else set()
    return not tensor.requires_grad and values <= {0.0, 1.0, float("-inf")}


def to_finding(facts: Facts, what: str) -> Finding:
    """The finding where nothing explains it."""
    return Finding(
        BugName.DIFFERS,
        f"{what}. It has the matrices of queries, keys, values and output alone, and no word of its"
        " code names attention of another kind, so nothing explains the difference.",
        format_shape(facts.callee, 1, facts.length),
        "The axes of every view, transpose and product; which tensor is q, k and v at each step;"
        " what is added or multiplied besides.",
        ["recomputing"],
    )
