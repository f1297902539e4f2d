#!/usr/bin/env python3
"""Compare `multihead cost` of SmolLM2-135M with the model: bytes of its cache, and operations that
torch counts.

    PYTHONPATH=tests scripts/measure_cost.py             # prints the table
    PYTHONPATH=tests scripts/measure_cost.py --write     # and puts it into docs/cost.md

The prediction is made from the settings in the GGUF file, without weights; then the model is run
with eager attention.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(os.environ.get("MULTIHEAD_MODELS", ROOT / "models")) / "SmolLM2-135M-Instruct.Q4_1.gguf"
PAGE, BEGIN, END = ROOT / "docs" / "cost.md", "<!-- measured -->\n", "<!-- end -->\n"
RUNS = ((1, 64, "float32"), (2, 128, "float32"), (1, 300, "float32"), (1, 64, "bfloat16"))


def attention_operations(model: Any, **inputs: Any) -> tuple[int, Any]:
    """Operations inside the attention modules during a pass, and its output."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = model(**inputs)
    return (
        sum(
            sum(ops.values())
            for name, ops in counter.get_flop_counts().items()
            if name.endswith(".self_attn")
        ),
        out,
    )


def rows() -> list[list[str]]:
    import torch

    from measured import cache_bytes
    from multihead import cost
    from multihead.models.loading import load_with_tokenizer

    model: Any = load_with_tokenizer(FILE).model
    model.set_attn_implementation("eager")
    found = []
    for batch, tokens, dtype in RUNS:
        model.to(getattr(torch, dtype))
        predicted = cost(FILE, context_length=tokens, batch_size=batch, dtype=dtype)
        ids = torch.randint(0, 40000, (batch, tokens), generator=torch.Generator().manual_seed(0))
        prefill, out = attention_operations(model, input_ids=ids, use_cache=True)
        held = cache_bytes(out.past_key_values)
        one, _ = attention_operations(
            model, input_ids=ids[:, :1], cache=out.past_key_values, use_cache=True
        )
        pairs = (
            (predicted.cache("transformers"), held),
            (predicted.prefill(full=True).total, prefill),
            (predicted.decode().total, one),
        )
        found.append(
            [
                f"{batch}",
                f"{tokens:,}",
                dtype,
                *(f"{number:,}" for pair in pairs for number in pair),
            ]
        )
        print(" | ".join(found[-1]), flush=True)
    return found


def main() -> None:
    head = [
        "sequences",
        "tokens",
        "dtype",
        "cache, predicted",
        "measured",
        "prefill, predicted",
        "counted",
        "one token, predicted",
        "counted",
    ]
    lines = [
        f"| {' | '.join(head)} |",
        "| --- " * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in rows()),
    ]
    if "--write" in sys.argv:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
