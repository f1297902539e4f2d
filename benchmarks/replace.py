"""Generation by SmolLM2-135M on our layers, against the same model as transformers has it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from benchmarks.turns import TOY, Turns, ratios
from multihead.layers import replace_attention
from multihead.models import register_attention

MODELS = Path(__file__).parents[1] / "models"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS, TOKENS = (512, 2048), 32


def load(toy: bool) -> Any:
    if not toy:
        return tf.AutoModelForCausalLM.from_pretrained(MODELS, dtype=torch.float32, gguf_file=FILE)
    sizes: dict[str, Any] = dict(hidden_size=48, intermediate_size=64, num_attention_heads=6)
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(vocab_size=100, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    )


@torch.no_grad()
def tables(toy: bool = False) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    torch.manual_seed(0)
    register_attention()
    models = {"sdpa": load(toy).eval()}
    models["multihead"], models["replaced"] = (copy.deepcopy(models["sdpa"]) for _ in "ab")
    models["sdpa"].set_attn_implementation("sdpa")
    models["multihead"].set_attn_implementation("multihead")
    replace_attention(models["replaced"])
    rows, turns = [], TOY if toy else Turns(longest=60.0)
    prompts, tokens = ((24,), 6) if toy else (PROMPTS, TOKENS)
    for prompt in prompts:
        ids = torch.randint(3, 90 if toy else 40000, (1, prompt))

        def generate(model: Any, count: int, ids: torch.Tensor = ids) -> torch.Tensor:
            found: torch.Tensor = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            return found

        def ways(count: int) -> dict[str, Callable[[], Any]]:
            # first the replaced one: ratios are then how much longer the others take
            return {
                name: lambda model=models[name]: generate(model, count)  # noqa: B023
                for name in ("replaced", "sdpa", "multihead")
            }

        want = generate(models["sdpa"], tokens)
        for model in models.values():
            assert torch.equal(generate(model, tokens), want), "nothing is timed"
        for what, count in ((f"{tokens} tokens", tokens), ("the first token", 1)):
            seconds, ratio = ratios(ways(count), turns)
            rows.append(
                {
                    "prompt": f"{prompt:,}",
                    "generated": what,
                    **{
                        f"{name}, tokens/s": f"{count / seconds[name]:.1f}"
                        for name in ("sdpa", "multihead", "replaced")
                    },
                    "replaced / sdpa": f"{ratio['sdpa']:.2f}",
                    "replaced / multihead": f"{ratio['multihead']:.2f}",
                }
            )
    yield (
        "A trained model on our layers: SmolLM2-135M, float32, greedy generation",
        rows,
        (
            "Goal: never below 1. transformers' own attention with `sdpa` and with"
            ' `set_attn_implementation("multihead")`, and the model after'
            " `replace_attention(model)`; ratios are of tokens a second, of whole calls of"
            " `generate`, which begin with the prompt."
        ),
    )
