"""Whether plain transformers will load the result is known, and said, before any work."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as tf

import multihead
from multihead.errors import MultiheadWarning
from multihead.models.site import find_sites
from multihead.pruning.plain import foresee_pruned, foresee_shared, warn_unless_plain

LLAMA_8B: dict[str, Any] = dict(
    hidden_size=4096, intermediate_size=64, num_attention_heads=32, num_key_value_heads=8
)
TEXT = "One head attends to the previous word, and another one to itself. " * 20


def on_meta(name: str, **changes: Any) -> Any:
    """A model of any size, which takes no memory."""
    with torch.device("meta"):
        kind = getattr(tf, f"{name}ForCausalLM")
        config = getattr(tf, f"{name}Config")
        return kind(config(**LLAMA_8B | {"num_hidden_layers": 2, "vocab_size": 9} | changes))


def remark(model: Any, amount: int, **options: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_unless_plain(model, amount, **options)
    return " ".join(str(w.message) for w in caught if issubclass(w.category, MultiheadWarning))


def test_llama_3_8b_names_the_nearest_share() -> None:
    llama = on_meta("Llama")
    assert remark(llama, 32) == ""
    assert remark(llama, 16) == (
        "kind='uniform' with 24 of 32 heads left in each layer (25% removed): plain transformers"
        " won't load the checkpoint, only multihead.load: hidden_size 4096 is not a multiple of 24"
        " heads; the nearest share that it loads is 50% (16 of 32 heads left in each layer)"
    )


def test_a_bias_is_named_only_where_it_is_in_the_way() -> None:
    qwen = on_meta("Qwen2")
    assert remark(qwen, 16, compensate="none") == ""
    assert "o_proj.bias replaces removed heads" in remark(qwen, 16, compensate="mean")
    assert "compensate='none' needs none" in remark(qwen, 16)


def test_where_no_share_does_it_is_said() -> None:
    neox = on_meta("GPTNeoX", num_attention_heads=8)
    assert "; no other share does either" in remark(neox, 8)


def test_sharing() -> None:
    assert foresee_shared(on_meta("Llama"), 2).config.num_key_value_heads == 2
    with torch.device("meta"):
        opt = foresee_shared(tf.OPTModel(tf.OPTConfig(num_hidden_layers=1)), 2)
    assert opt.reason == "OPTConfig has no number of key/value heads, and its 12 heads read 2"
    neox = foresee_shared(on_meta("GPTNeoX"), 2)
    assert "query_key_value stores keys and values by head" in neox.reason


def test_prune_warns_before_any_work() -> None:
    """The text is too short to prune on, and the warning came before that."""
    model, tokenizer = multihead.load_builtin()
    with (
        pytest.warns(MultiheadWarning, match="hidden_size 192 is not a multiple of 7 heads"),
        pytest.raises(ValueError),
    ):
        multihead.prune(model, "a", tokenizer=tokenizer, remove=4, kind="uniform")


def test_what_is_foreseen_comes_true() -> None:
    model, tokenizer = multihead.load_builtin()
    options: dict[str, Any] = {"criterion": "weights", "context": 32, "compensate": "mean"}
    for remove in (4, 8):
        kept = {site.name: range(8 - remove // 4) for site in find_sites(model)}
        foreseen = foresee_pruned(model, kept, has_bias=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pruned = multihead.prune(
                model, TEXT, tokenizer=tokenizer, remove=remove, kind="uniform", **options
            )
        assert pruned.loads_in_transformers == bool(foreseen)
        assert pruned.why_not_plain == foreseen.reason
    assert pruned.loads_in_transformers
