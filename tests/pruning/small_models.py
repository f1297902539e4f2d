"""Small models without grouped heads, whose attention is far from uniform, for tests of sharing."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

from multihead.data.batch import Batch
from multihead.models.site import Site
from multihead.pruning.layerwise import run_layerwise
from multihead.pruning.shared_heads import SharedHeads, SharingOptions, fit_shared_heads

BATCHES = [
    {"input_ids": torch.randint(2, 12, (1, 24), generator=torch.Generator().manual_seed(seed))}
    for seed in range(4)
]


SMALL = dict(
    hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, vocab_size=17
)


MAKE = {
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**SMALL, head_dim=8, num_key_value_heads=4)
    ),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(**SMALL | {"hidden_size": 32}, rotary_pct=0.5)
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=24, n_head=4, n_layer=2, n_positions=32, vocab_size=17)
    ),
    "cohere": lambda: tf.CohereForCausalLM(
        tf.CohereConfig(**SMALL, num_key_value_heads=4, pad_token_id=0)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(
        tf.Qwen3Config(**SMALL, head_dim=8, num_key_value_heads=4)
    ),
}


def make(name: str, seed: int = 0) -> Any:
    """A small model without groups whose attention is far from even, with biases where the family
    has them.
    """
    torch.manual_seed(seed)
    model = MAKE[name]().eval()
    for key, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in key and "wte" not in key:
            weight.data = (
                torch.randn_like(weight) * 1.3 * (weight.shape[0 if "gpt2" in name else 1]) ** -0.5
            )
        elif key.endswith("bias"):
            weight.data = 0.2 * torch.randn_like(weight)
    return model


def held_at(model: Any, site: Site) -> Any:
    with run_layerwise(model, [Batch(b) for b in BATCHES], [site]) as runner:
        return runner.capture(site)


def copies(site: Site, of: list[int], turn: bool) -> None:
    """Gives each key/value head m the keys and values of head of[m]; turned and scaled, in a way
    that changes no output.
    """
    rows, shape = site.slices(), None
    generator = torch.Generator().manual_seed(5)
    k, v, w = (
        rows.k.weight()[of].clone(),
        rows.v.weight()[of].clone(),
        site.out_weight()[0].view(site.num_heads, site.head_dim, -1),
    )
    kb, vb = (None if r.bias() is None else r.bias()[of].clone() for r in (rows.k, rows.v))  # type: ignore[index]
    q, qb = rows.q.weight().clone(), rows.q.bias()
    qb = None if qb is None else qb.clone()
    w = w.clone()
    if turn:
        shape = SHAPES[type(site.module).__name__](site.head_dim)
        for m in range(len(of)):
            if of[m] == m:
                continue
            basis = (
                torch.linalg.qr(torch.randn(site.head_dim, site.head_dim, generator=generator))[0]
                * 1.7
            )
            v[m], w[m] = basis.T @ v[m], torch.linalg.inv(basis) @ w[m]
            vb = vb if vb is None else torch.cat([vb[:m], (vb[m] @ basis)[None], vb[m + 1 :]])
            pairs, free = shape
            turns = torch.zeros(site.head_dim, site.head_dim)
            for a, b in pairs:
                angle, scale = torch.rand(2, generator=generator) * torch.tensor(
                    [6.0, 0.0]
                ) + torch.tensor([0.0, 0.6])
                turns[a, a] = turns[b, b] = scale * angle.cos()
                turns[a, b], turns[b, a] = scale * angle.sin(), -scale * angle.sin()
            if free:
                turns[torch.tensor(free)[:, None], torch.tensor(free)] = (
                    0.6 * torch.linalg.qr(torch.randn(len(free), len(free), generator=generator))[0]
                )
            k[m], q[m] = turns.T @ k[m], torch.linalg.inv(turns) @ q[m]
            kb = kb if kb is None else torch.cat([kb[:m], (kb[m] @ turns)[None], kb[m + 1 :]])
            qb = (
                qb
                if qb is None
                else torch.cat([qb[:m], (qb[m] @ torch.linalg.inv(turns).T)[None], qb[m + 1 :]])
            )
    rows.q.put(q, qb)
    rows.k.put(k, kb)
    rows.v.put(v, vb)
    weight = site.out.weight.data if type(site.out).__name__ == "Conv1D" else site.out.weight.data.T
    weight.copy_(w.flatten(0, 1))


# Which numbers of a head turn together, and which are free: known of the family, not found by
# looking.
SHAPES: dict[str, Any] = {
    "LlamaAttention": lambda e: ([(i, i + e // 2) for i in range(e // 2)], []),
    "CohereAttention": lambda e: ([(2 * i, 2 * i + 1) for i in range(e // 2)], []),
    "GPTNeoXAttention": lambda e: (
        [(i, i + e // 4) for i in range(e // 4)],
        list(range(e // 2, e)),
    ),
    "GPT2Attention": lambda e: ([], list(range(e))),
}


TURNING = ("llama", "cohere", "gpt_neox", "gpt2")


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(**batch).logits for batch in BATCHES])


def one(site: Site, model: Any, n: int = 2, **options: Any) -> SharedHeads:
    with run_layerwise(model, [Batch(b) for b in BATCHES], [site]) as runner:
        return fit_shared_heads(site, n, lambda: runner.capture(site), SharingOptions(**options))
