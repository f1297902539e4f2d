"""The operator, rotary positions and cache writes, judged by the ONNX suite at its own
tolerances.
"""

from __future__ import annotations

import pytest
from onnx.backend.test.loader import load_node_model_tests

from conformance.onnx_suite import Case, Outputs, attention, cases, rotary, scatter
from multihead.ops.backends import jit

ATTENTION, ROTARY, SCATTER = (
    cases("test_attention_"),
    cases("test_rotary_embedding"),
    cases("test_tensorscatter"),
)
BACKENDS = ("reference", "torch", "sdpa", "auto", *(() if jit.MISSING else ("cpu",)))
SDPA_AT_LEAST = 76  # all but those with a soft cap, and those in float16


def names(case: Case) -> str:
    return case.name.removeprefix("test_")


def run(case: Case, backend: str) -> Outputs | None:
    """None where the backend says that it doesn't serve this input."""
    try:
        return attention(case, backend)
    except ValueError as error:
        if not str(error).startswith(f"backend={backend!r} "):
            raise
        return None


@pytest.mark.parametrize("case", ATTENTION, ids=names)
def test_attention(case: Case) -> None:
    for backend in BACKENDS:
        found = run(case, backend)
        if found is None:
            assert backend == "sdpa"
            continue
        # all that the case asks for, but only the reference has the scores of every step
        assert backend != "reference" or found.keys() == case.outputs.keys()
        case.check(found)


# RuntimeWarnings are of the cases of other operators, as they are built
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_case_is_lost() -> None:
    assert (len(ATTENTION), len(ROTARY), len(SCATTER)) == (93, 8, 3)
    assert sum("qk_matmul_output" in case.outputs for case in ATTENTION) == 18
    public = {case.name for case in load_node_model_tests() if "_expanded" not in case.name}
    assert {case.name for case in (*ATTENTION, *ROTARY, *SCATTER)} == {
        name
        for name in public
        if name.startswith(("test_attention_", "test_rotary_embedding", "test_tensorscatter"))
    }
    served = {
        backend: sum(run(case, backend) is not None for case in ATTENTION) for backend in BACKENDS
    }
    print(f"of {len(ATTENTION)} cases each backend serves: {served}")
    assert served["reference"] == served["torch"] == served["auto"] == len(ATTENTION)
    assert served["sdpa"] >= SDPA_AT_LEAST and served.get("cpu", len(ATTENTION)) == len(ATTENTION)


@pytest.mark.parametrize("case", ROTARY, ids=names)
def test_rotary(case: Case) -> None:
    case.check(rotary(case))


@pytest.mark.parametrize("case", SCATTER, ids=names)
def test_scatter(case: Case) -> None:
    case.check(scatter(case))
