"""Reading: time and memory against transformers' own passes over the same text, at several lengths.

Each way runs in a process of its own where memory is told, so that peaks don't mix; times are taken
in one process, in turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.turns import TOY, Turns, ratios

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"
GGUF = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTHS = (512, 2048, 8192)
STORED = 2048  # tokens that are also read from stored weights
IN_TURNS = (
    4096  # tokens: of longer texts one run each is timed, in the process whose memory is told
)
LONG = (32_768, 65_536, 131_072)
DOCUMENTS = 1000
BATCH = 32
GIB = 2**30
ON_REQUEST = ("copying", "importance", "nearest", "effect")


def words(letters: int) -> str:
    """So much of Python's own documentation."""
    import pydoc_data.topics

    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return (text * (1 + letters // len(text)))[:letters]


def load(length: int, name: str = "smollm2") -> tuple[Any, dict[str, Any]]:
    """A model and inputs of so many tokens, with the logits of the last one only: 8,192 rows of
    logits would hide all else.

    Args:
        name: "smollm2", "builtin" (the library's small model) or "random" (two layers of four
            heads, small enough for very long sequences).
    """
    if name == "random":
        return random_model(length)
    from multihead.models.loading import load_with_tokenizer

    if name == "smollm2" and not GGUF.exists():
        sys.exit(f"{GGUF} is missing; run: python scripts/fetch_models.py")
    loaded = load_with_tokenizer(GGUF if name == "smollm2" else None)
    tokens = loaded.tokenizer(words(8 * length), return_tensors="pt", verbose=False).input_ids
    ids = tokens[:, :length]
    assert ids.shape[1] == length
    return loaded.model, {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}


def plain(model: Any, inputs: dict[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        return model(**inputs).logits


def reading(model: Any, inputs: dict[str, Any], probe: bool = False) -> Any:
    """The call that users make, with all that it does by default but the probe, whose time doesn't
    depend on the text."""
    import multihead

    table = multihead.read(model, [inputs], probe=probe)
    assert table.count("received").all()
    return table


def logits_under_reading(model: Any, inputs: dict[str, Any]) -> Any:
    import torch

    import multihead

    with torch.no_grad(), multihead.reading(model):
        return model(**inputs).logits


def stored(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Eager attention with `output_attentions`, and the statistics of a reading from the weights, a
    layer at a time.
    """
    import torch

    ids = inputs["input_ids"]
    values: dict[int, Any] = {}
    handles = [
        layer.self_attn.v_proj.register_forward_hook(
            lambda m, a, out, n=n: values.__setitem__(n, out)
        )
        for n, layer in enumerate(model.model.layers)
    ]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
        found = {
            n: of_layer(model, n, a[0], values[n][0], ids[0]) for n, a in enumerate(attentions)
        }
    model.set_attn_implementation("sdpa")
    for handle in handles:
        handle.remove()
    return found


def of_layer(model: Any, n: int, a: Any, values: Any, ids: Any) -> dict[str, Any]:
    """a `[H, L, L]`, values `[L, G*E]`: means over rows by weight and pooled by contribution, as
    one would write them down.
    """
    import torch

    heads, length, _ = a.shape
    out = model.model.layers[n].self_attn.o_proj.weight.T.unflatten(0, (heads, -1))  # [H, E, D]
    v = (
        values.unflatten(-1, (-1, out.shape[1]))
        .transpose(0, 1)
        .repeat_interleave(heads // (values.shape[1] // out.shape[1]), 0)
    )
    update = (a @ v) @ out  # [H, L, D]
    c = a * (v @ out).norm(dim=-1)[:, None]
    i = torch.arange(length)
    same = (ids[:, None] == ids[None]) & (i[None] < i[:, None])
    follows = torch.nn.functional.pad(ids[:, None] == ids[None, :-1], (1, 0)) & (
        i[None] < i[:, None]
    )
    found = {
        "entropy": -(a * a.clamp(min=1e-38).log()).sum(-1).mean(-1),
        "confidence": a.amax(-1).mean(-1),
        "distance": (a * (i[:, None] - i[None]).abs()).sum(-1).mean(-1),
        "received": (a.sum(1) / (length - i))[:, : length - 63].amax(-1),
        "norm": update.norm(dim=-1).mean(-1),
        "share": ((update * update.sum(0)).sum(-1) / update.sum(0).square().sum(-1)).mean(-1),
        "cancellation": (update.norm(dim=-1) / c.sum(-1)).mean(-1),
    }
    for name, k in (("previous", -1), ("self", 0), ("first", None)):
        for kind, x in (("", a), ("contribution:", c)):
            found[kind + name] = (x[..., 0] if k is None else x.diagonal(k, dim1=1, dim2=2)).mean(
                -1
            )
    for name, which in (("duplicate", same), ("induction", follows)):
        for kind, x in (("", a), ("contribution:", c)):
            found[kind + name] = (x * which).sum((-1, -2)) / which.any(-1).sum()
    return found


def random_model(length: int) -> tuple[Any, dict[str, Any]]:
    """Two layers of four heads with random weights, and random tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )
    return LlamaForCausalLM(config).eval(), {
        "input_ids": torch.randint(256, (1, length)),
        "use_cache": False,
        "logits_to_keep": 1,
    }


WAYS: dict[str, Callable[..., Any]] = {"plain": plain, "reading": reading, "stored": stored}


def peak(way: str, model_name: str, length: int) -> None:
    """In a process of its own: the highest resident memory of one pass, and its seconds."""
    model, inputs = load(length, model_name)
    WAYS[way](
        model, {**inputs, "input_ids": inputs["input_ids"][:, :128]}
    )  # libraries load and threads start
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    start = time.perf_counter()
    WAYS[way](model, inputs)
    seconds = time.perf_counter() - start
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps([int(status["VmHWM"].split()[0]) * 1024, seconds]))


def peak_of(way: str, model_name: str, length: int) -> tuple[float, float]:
    """Bytes at the peak, and seconds, of one pass in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.reading", way, model_name, str(length)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    highest, seconds = json.loads(done.stdout.splitlines()[-1])
    return highest, seconds


def smollm2(toy: bool) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    name = "builtin" if toy else "smollm2"
    goals = {512: "1.4, 0.1 GiB", 2048: "1.25, 0.2 GiB", 8192: "1.25, 0.5 GiB"}
    rows, peaks_at = [], {}
    for length in (128,) if toy else LENGTHS:
        peaks = {way: peak_of(way, name, length) for way in ("plain", "reading")}
        memory = {way: peak[0] for way, peak in peaks.items()}
        peaks_at |= {(length, way): highest for way, highest in memory.items()}
        if length > IN_TURNS:
            seconds = {way: peak[1] for way, peak in peaks.items()}
            ratio = {"reading": seconds["reading"] / seconds["plain"]}
        else:
            model, inputs = load(length, name)
            want, got = plain(model, inputs), logits_under_reading(model, inputs)
            assert (want - got).abs().max() <= 1e-4 * want.abs().max(), (
                "reading changes the model's outputs: nothing is timed"
            )
            ways = {way.__name__: partial(way, model, inputs) for way in (plain, reading)}
            ways["probed"] = partial(reading, model, inputs, probe=True)
            seconds, ratio = ratios(ways, TOY if toy else Turns(fewest=5))
        rows.append(
            {
                "tokens": f"{length:,}",
                "plain (sdpa)": f"{seconds['plain']:.2f} s",
                "`multihead.read`": f"{seconds['reading']:.2f} s",
                "time / plain": f"{ratio['reading']:.2f}",
                "with the probe": f"{seconds['probed']:.2f} s" if "probed" in seconds else "-",
                "memory beyond plain": f"{(memory['reading'] - memory['plain']) / GIB:.2f} GiB",
                "goal": goals.get(length, "-"),
            }
        )
    yield (
        (
            "`multihead.read` of one text by SmolLM2-135M (30 layers of 9 heads), float32,"
            " defaults but for the probe"
        ),
        rows,
        (
            "The whole call is timed: hooks, factors of W_O, the comparison with the model as it"
            ' came, pass and table; "with the probe" is the call without any option. Memory is the'
            " peak of a process of its own. Times of 8,192 tokens are one run each."
        ),
    )
    length = 128 if toy else STORED
    model, inputs = load(length, name)
    seconds, ratio = ratios(
        {"stored": lambda: stored(model, inputs), "reading": lambda: reading(model, inputs)},
        TOY if toy else Turns(fewest=3),
    )
    memory = {way: peaks_at[length, way] for way in ("plain", "reading")}
    memory["stored"] = peak_of("stored", name, length)[0]
    beyond = {way: memory[way] - memory["plain"] for way in ("stored", "reading")}
    yield (
        f"The same from stored weights: eager with `output_attentions`, {length:,} tokens",
        [
            {
                "way": "eager, statistics from its weights",
                "time": f"{seconds['stored']:.2f} s",
                "memory beyond plain": f"{beyond['stored'] / GIB:.2f} GiB",
            },
            {
                "way": "reading",
                "time": f"{seconds['reading']:.2f} s",
                "memory beyond plain": f"{beyond['reading'] / GIB:.2f} GiB",
            },
            {
                "way": "eager / reading (goal: 3, 20)",
                "time": f"{1 / ratio['reading']:.1f}",
                "memory beyond plain": f"{beyond['stored'] / max(1, beyond['reading']):.0f}",
            },
        ],
        "",
    )


def long(toy: bool) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    rows = []
    for length in (512,) if toy else LONG:
        whole, seconds = peak_of("reading", "random", length)
        own, alone = peak_of("plain", "random", length)
        rows.append(
            {
                "tokens": f"{length:,}",
                "plain (sdpa)": f"{alone:.0f} s",
                "reading": f"{seconds:.0f} s",
                "time / plain": f"{seconds / alone:.2f}",
                "peak of the process": f"{whole / GIB:.2f} GiB",
                "beyond plain": f"{(whole - own) / GIB:.2f} GiB",
                "a token": f"{(whole - own) / length / 1024:.1f} KiB",
            }
        )
    yield (
        (
            "`multihead.read` (without the probe) of a small model (2 layers of 4 heads, width 128)"
            " where its weights would take 32 to 512 GiB"
        ),
        rows,
        "Goal: within 12 GiB, in proportion to the length. One run each.",
    )


def documents(toy: bool) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    """1,000 sentences through MiniLM: batches, tokenizer and all."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    import multihead

    number = 20 if toy else DOCUMENTS
    folder = MODELS / "all-MiniLM-L6-v2"
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).eval(),
    )
    texts = [
        " ".join(p.split())[:400] for p in words(2_000_000).split("\n\n") if len(p.split()) > 5
    ][:number]
    assert len(texts) == number

    def encode() -> Any:
        """As sentence encoders do: by length, in batches, mean of the real tokens."""
        order = sorted(range(len(texts)), key=lambda n: -len(texts[n]))
        found = []
        for start in range(0, len(texts), BATCH):
            some = [texts[n] for n in order[start : start + BATCH]]
            batch = tokenizer(some, padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                state, real = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            found.append((state * real).sum(1) / real.sum(1))
        return torch.cat(found)

    def read() -> Any:
        return multihead.read(model, texts, tokenizer=tokenizer, batch_size=BATCH)

    assert encode().shape[0] == read().meta["documents"] == number
    seconds, ratio = ratios({"encode": encode, "read": read}, TOY if toy else Turns(fewest=3))
    tokens = sum(map(len, tokenizer(texts)["input_ids"]))
    yield (
        (
            f"{number:,} short documents through MiniLM (6 layers of 12 heads), {tokens:,}"
            f" tokens, batches of {BATCH}"
        ),
        [
            *(
                {
                    "way": name,
                    "time": f"{seconds[way]:.2f} s",
                    "documents a second": f"{number / seconds[way]:.0f}",
                }
                for way, name in (("encode", "sentence encoding"), ("read", "`multihead.read`"))
            ),
            {
                "way": "reading / encoding (goal: 0.8)",
                "time": "",
                "documents a second": f"{1 / ratio['read']:.2f}",
            },
        ],
        "",
    )


def on_request(toy: bool) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    """What the statistics on request add to `multihead.read`."""
    import multihead

    model, inputs = load(16, "builtin") if toy else load(256)
    batch = {"input_ids": inputs["input_ids"]}

    def run(*also: str) -> float:
        start = time.perf_counter()
        multihead.read(model, [batch], probe=False, statistics=also)
        return time.perf_counter() - start

    run()
    base = min(run() for _ in range(1 if toy else 3))
    taken = {
        name: min(run(name) for _ in range(1 if name == "effect" else 2))
        for name in (ON_REQUEST[:3] if toy else ON_REQUEST)
    }
    rows = [
        {"statistic": name, "beyond a reading without it": f"{seconds - base:.1f} s"}
        for name, seconds in taken.items()
    ]
    yield (
        "What is asked for beyond a reading: SmolLM2, 270 heads, 256 tokens",
        rows,
        "Goal for copying: under 60 s.",
    )


def tables(toy: bool = False) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    for part in (smollm2, long, documents, on_request):
        yield from part(toy)


if __name__ == "__main__":
    peak(sys.argv[1], sys.argv[2], int(sys.argv[3]))
