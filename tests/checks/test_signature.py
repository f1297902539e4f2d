"""Parameters, required names and stated numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from multihead.checks.signature import (
    CannotCall,
    library_of,
    parameters_of,
    read_number,
    required_names,
    takes_any_keyword,
)


def test_parameters() -> None:
    def attention(q: Any, k: Any, *rest: Any, scale: float = 1.0, **more: Any) -> None: ...

    assert list(parameters_of(attention)) == ["q", "k", "scale"]
    assert takes_any_keyword(attention) and not takes_any_keyword(nn.Linear(1, 1))
    assert list(parameters_of(lambda *args: None)) == ["args"]
    assert list(parameters_of(nn.functional.scaled_dot_product_attention))[:3] == [
        "query",
        "key",
        "value",
    ]
    assert required_names(nn.MultiheadAttention) == "embed_dim, num_heads"
    with pytest.raises(CannotCall, match="takes no arguments"):
        parameters_of(lambda: None)


def test_libraries_and_numbers() -> None:
    assert library_of(nn.Linear(1, 1)) == "torch" and library_of(test_parameters) is None
    module = SimpleNamespace(n_head=True, config=SimpleNamespace(num_attention_heads=3))
    assert read_number(module, ("n_head", "num_attention_heads")) == 3
    assert read_number(module, ("d_model",)) is None
