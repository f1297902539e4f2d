#!/usr/bin/env python
"""Trains the built-in model: a small causal language model made of the library's own blocks.

    python scripts/builtin_data.py --out runs/data
    python scripts/train_builtin.py --out runs/builtin --steps 5000             # warm-up, then a
    constant rate python scripts/train_builtin.py --out runs/builtin --decay 1000             # from
    there down to zero python scripts/export_builtin.py --run runs/builtin

The learning rate warms up, stays constant, and in a second call falls linearly to zero, so that how
long to train need not be known beforehand. Killed at any moment, the same command goes on from the
last checkpoint; batch number n is drawn from (seed, n) alone, so a resumed run sees the same text
as one that was never stopped.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from language_model import LanguageModel, LanguageModelConfig
from multihead.ops.heads import split_heads
from multihead.ops.masks import causal

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
EMBEDDING_RATE = 0.4  # AdamW's rate as a share of Muon's
GUIDED = {
    0: ("previous", [0, 1]),
    1: ("induction", [0]),
    2: ("induction", [0, 1]),
}  # layer -> what, heads
SOURCES = ("austen", "docs", "docstrings")
CONFIG = LanguageModelConfig(
    vocab_size=2048,
    embed_dim=192,
    num_layers=4,
    num_heads=8,
    hidden_dim=512,
    max_length=512,
    rope_theta=10000.0,
)


# ---- text
# -----------------------------------------------------------------------------------------------------------


def read_documents(path: Path, split: str) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return [document for document in map(json.loads, file) if document["split"] == split]


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text can be said in it, and digits stand alone. Every text begins with
    <s>.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[dict[str, str]]) -> list[np.ndarray]:
    """Each document as <s> text </s>."""
    encoded = tokenizer.encode_batch([document["text"] for document in documents])
    return [np.array([*e.ids, EOS_ID], dtype=np.int32) for e in encoded]


def prepare(data: Path, out: Path) -> tuple[Tokenizer, np.ndarray, dict[str, list[np.ndarray]]]:
    """The tokenizer, the training documents one behind the other, and the held-out documents of
    each source.
    """
    train, held_out = (
        read_documents(data / "documents.jsonl", split) for split in ("train", "held-out")
    )
    path = out / "tokenizer.json"
    if not path.exists():
        train_tokenizer((document["text"] for document in train), CONFIG.vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    # The documents in a fixed random order, so that the sources alternate.
    order = np.random.default_rng(0).permutation(len(train))
    stream = np.concatenate(encode(tokenizer, [train[i] for i in order]))
    by_source = {s: encode(tokenizer, [d for d in held_out if d["source"] == s]) for s in SOURCES}
    return tokenizer, stream, by_source


def repeated_block(
    rng: np.random.Generator, length: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of one block of random tokens, from random places in it, and the targets: only tokens
    that can be known from an earlier piece count, the others are -100.

    What comes next depends on what followed the current token before, not on how far back that was.
    (When whole blocks came again, the model learned to copy from 3, 4, 5 tokens back instead.)
    """
    size = int(np.exp(rng.uniform(np.log(4), np.log(length // 2))))
    block = rng.choice(np.arange(2, vocab_size), size, replace=False)
    tokens, targets, seen = [BOS_ID], [-100], np.zeros(size, dtype=bool)
    while len(tokens) <= length:
        start = int(rng.integers(size))
        for at in range(start, min(start + int(rng.integers(3, 4 + size)), size)):
            tokens.append(block[at])
            targets.append(block[at] if at > start and seen[at] else -100)
            seen[at] |= at > start
    return np.array(tokens[:length]), np.array(targets[1 : length + 1])


def batch(
    stream: np.ndarray, seed: int, step: int, size: int, length: int, repeats: float
) -> tuple[Tensor, Tensor]:
    """Batch number `step`: windows of the text, each behind a <s>, and a share `repeats` of
    repeated random blocks.
    """
    rng = np.random.default_rng((seed, step))
    inputs, targets = (
        np.empty((size, length), dtype=np.int64),
        np.empty((size, length), dtype=np.int64),
    )
    for row in range(size):
        if rng.random() < repeats:
            inputs[row], targets[row] = repeated_block(rng, length, CONFIG.vocab_size)
        else:
            start = int(rng.integers(0, len(stream) - length))
            targets[row] = stream[start : start + length]
            inputs[row, 0], inputs[row, 1:] = BOS_ID, targets[row, :-1]
            targets[row][
                targets[row] == BOS_ID
            ] = -100  # nothing predicts a <s>: it is put there by the tokenizer
    return torch.from_numpy(inputs), torch.from_numpy(targets)


# ---- what it is measured against
# ------------------------------------------------------------------------------------


class Bigram:
    """An interpolated Kneser-Ney bigram model (one discount, n1 / (n1 + 2 n2), as Ney et al. 1994),
    whose lower order is itself mixed with the uniform distribution; and the unigram with one added
    to each count.

    It needs of the training tokens: `pairs` {(u, v): count}, `first` how often u came first,
        `followers` how many
    different tokens followed u, `preceders` how many different tokens preceded v, `unigram` how
    often v came.
    """

    def __init__(self, stream: np.ndarray, vocab_size: int) -> None:
        code = stream[:-1].astype(np.int64) * vocab_size + stream[1:]
        codes, counts = np.unique(code[stream[1:] != BOS_ID], return_counts=True)
        self.codes, self.counts, self.vocab_size = codes, counts, vocab_size
        self.first = np.bincount(codes // vocab_size, counts, minlength=vocab_size)
        self.followers = np.bincount(codes // vocab_size, minlength=vocab_size)
        self.preceders = np.bincount(codes % vocab_size, minlength=vocab_size)
        self.unigram = np.bincount(codes % vocab_size, counts, minlength=vocab_size)
        n1, n2 = (counts == 1).sum(), (counts == 2).sum()
        self.discount = float(n1 / (n1 + 2 * n2))

    def pair_counts(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        code = u.astype(np.int64) * self.vocab_size + v
        at = np.minimum(np.searchsorted(self.codes, code), len(self.codes) - 1)
        return np.where(self.codes[at] == code, self.counts[at], 0)

    def log_prob(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        """log P(v | u), elementwise."""
        return bigram_log_prob(
            pairs=self.pair_counts(u, v),
            first=self.first[u],
            followers=self.followers[u],
            preceders=self.preceders[v],
            total=self.preceders.sum(),
            seen=int((self.preceders > 0).sum()),
            discount=self.discount,
            vocab_size=self.vocab_size,
        )

    def unigram_log_prob(self, v: np.ndarray) -> np.ndarray:
        return np.log((self.unigram[v] + 1) / (self.unigram.sum() + self.vocab_size))


def bigram_log_prob(
    *,
    pairs: np.ndarray,
    first: np.ndarray,
    followers: np.ndarray,
    preceders: np.ndarray,
    total: int,
    seen: int,
    discount: float,
    vocab_size: int,
) -> np.ndarray:
    """log P(v | u) from the counts that it needs of the training tokens (see `Bigram`); `total` and
    `seen` are the sum and the number of all `preceders` above 0.
    """
    lower = (np.maximum(preceders - discount, 0) + discount * seen / vocab_size) / total
    higher = np.maximum(pairs - discount, 0) + discount * followers * lower
    return np.log(np.where(first > 0, higher / np.maximum(first, 1), lower))


def pieces(documents: list[np.ndarray], length: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Held-out documents cut into rows of `length`, each behind a <s>; targets (-100 where there is
    none), and for each target the token before it in the document, which the bigram is given also
    where the model sees only the <s>.
    """
    inputs, targets, before = [], [], []
    for document in documents:
        for at in range(1, len(document), length):
            target = document[at : at + length]
            pad = (0, length - len(target))
            inputs.append(np.pad(np.concatenate(([BOS_ID], target[:-1])), pad))
            targets.append(np.pad(target, pad, constant_values=-100))
            before.append(np.pad(document[at - 1 : at - 1 + len(target)], pad))
    return (
        torch.from_numpy(np.stack(inputs)).long(),
        torch.from_numpy(np.stack(targets)).long(),
        np.stack(before),
    )


@torch.no_grad()
def held_out_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Mean loss a token, in nats."""
    total = sum(
        F.cross_entropy(
            model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
        ).item()
        for x, y in zip(inputs.split(16), targets.split(16), strict=True)
    )
    return total / int((targets >= 0).sum())


# ---- what its heads do
# ----------------------------------------------------------------------------------------------


@torch.no_grad()
def probe(
    model: LanguageModel, *, seed: int = 0, size: int = 128, rows: int = 4
) -> dict[str, np.ndarray]:
    """Scores [layers, heads] on random blocks said twice, over the rows of the second half: the
    mass on earlier keys whose previous token is the current one (`induction`) and on the previous
    key (`previous`), as mean weight and as pooled contribution, sum of c on the class / sum of all
    c with c_ij = A_ij * ||v_j W_O^(h)||.
    """
    block = torch.randint(
        2, model.config.vocab_size, (rows, size), generator=torch.Generator().manual_seed(seed)
    )
    tokens = torch.cat((torch.full((rows, 1), BOS_ID), block, block), 1)
    second = slice(1 + size, None)
    i, j = torch.arange(tokens.shape[1])[:, None], torch.arange(tokens.shape[1])[None]
    before = F.pad(tokens[:, :-1], (1, 0), value=-1)
    induction = (tokens[:, :, None] == before[:, None, :]) & (j < i)
    classes = {"induction": induction[:, None, second], "previous": (j == i - 1)[second]}
    scores: dict[str, list[np.ndarray]] = {}
    for weights, contributions in maps(model, tokens):
        weights, contributions = weights[:, :, second], contributions[:, :, second]
        for name, members in classes.items():
            by_weight = (weights * members).sum(-1).mean((0, 2))
            by_contribution = (contributions * members).sum((0, 2, 3)) / contributions.sum(
                (0, 2, 3)
            )
            scores.setdefault(f"{name} by weight", []).append(by_weight.numpy())
            scores.setdefault(f"{name} by contribution", []).append(by_contribution.numpy())
    return {name: np.stack(layers) for name, layers in scores.items()}


def maps(model: LanguageModel, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each layer the weights A_ij and the contributions c_ij, [B, H, L, L]."""
    later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    x = model.embedding(tokens)
    for block in model.blocks:
        layer, normed = block.attention, block.attention_norm(x)
        q = layer.positions(split_heads(layer.q_proj(normed), layer.num_heads))
        k = layer.positions(split_heads(layer.k_proj(normed), layer.num_kv_heads))
        v = split_heads(layer.v_proj(normed), layer.num_kv_heads)
        k, v = (y.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for y in (k, v))
        weights = (q @ k.mT / layer.head_dim**0.5).masked_fill(later, -math.inf).softmax(-1)
        w_o = layer.out_proj.weight.T.unflatten(0, (layer.num_heads, layer.head_dim))
        yield weights, weights * (v @ w_o).norm(dim=-1)[:, :, None]
        x = block(x, mask=causal())


# ---- training
# -------------------------------------------------------------------------------------------------------


def save(state: dict, path: Path) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def optimizers(model: LanguageModel, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding and the gains of the norms."""
    matrices = [
        weight
        for name, weight in model.named_parameters()
        if name.startswith("blocks.") and weight.dim() == 2
    ]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(
            matrices, lr=rate, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=EMBEDDING_RATE * rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def token_losses(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every token, the products in bfloat16; 0 where there is no target."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="none"
    )


class Guide:
    """For the first steps some heads are shown where to look: a part of the loss is how little of
    their weight lies there.

    `previous` on the key before, `induction` on earlier keys whose token before is the current one.
    Left to itself a model of this size finds the first within a thousand steps and the second only
    after many more; once shown, both are of use for the text, and stay without the guide.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.seen: dict[tuple[int, str], Tensor] = {}
        self.hooks = []
        for layer in GUIDED:
            for name in ("q_proj", "k_proj"):
                module = getattr(model.blocks[layer].attention, name)
                self.hooks.append(module.register_forward_hook(self.keep(layer, name)))

    def keep(self, layer: int, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: Tensor) -> None:
            self.seen[layer, name] = output

        return hook

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean over the guided heads and the rows that have such a key of -log(weight on it)."""
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        before = F.pad(tokens[:, :-1], (1, 0), value=-1)
        wanted = {
            "previous": torch.ones_like(later).tril(-1).triu(-1).expand(len(tokens), 1, -1, -1),
            "induction": (
                (tokens[:, :, None] == before[:, None, :])
                & ~later.triu(0)
                & ~torch.eye(len(later)).bool()
            )[:, None],
        }
        total = torch.zeros(())
        for layer, (kind, heads) in GUIDED.items():
            attention = self.model.blocks[layer].attention
            q, k = (
                attention.positions(
                    split_heads(self.seen[layer, name].float(), attention.num_heads)
                )[:, heads]
                for name in ("q_proj", "k_proj")
            )
            log_weights = (
                (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf).log_softmax(-1)
            )
            there = log_weights.masked_fill(~wanted[kind], -torch.inf).logsumexp(-1)
            total = total - there[wanted[kind].any(-1).expand_as(there)].mean()
        return total / len(GUIDED)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=Path("runs/data"), help="folder with documents.jsonl"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/builtin"), help="tokenizer and checkpoints"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000, help="last step of the constant phase")
    parser.add_argument("--decay", type=int, help="instead: so many steps down to a rate of 0")
    parser.add_argument("--batch", type=int, default=16, help="rows of a batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument(
        "--rate", type=float, default=4e-3, help="of Muon; the embedding learns at 0.4 of it"
    )
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument(
        "--repeats", type=float, default=0.25, help="share of rows with repeated random blocks"
    )
    parser.add_argument(
        "--guide",
        type=int,
        default=0,
        help="first steps in which some heads are shown where to look",
    )
    parser.add_argument(
        "--compile", action="store_true", help="about 1.5 times as fast; needs a C++ compiler"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--eval-minutes", type=float, default=5.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    losses_of = torch.compile(token_losses) if args.compile else token_losses
    args.out.mkdir(parents=True, exist_ok=True)

    _, stream, held_out = prepare(args.data, args.out)
    bigram = Bigram(stream, CONFIG.vocab_size)
    samples = {}
    for source, documents in held_out.items():
        inputs, targets, before = pieces(documents, CONFIG.max_length)
        some = np.random.default_rng(0).permutation(len(inputs))[:24]
        samples[source] = (inputs[some], targets[some])
        real = targets[some].numpy() >= 0
        u, v = before[some][real], targets[some].numpy()[real]
        unigram_loss, bigram_loss = (
            -bigram.unigram_log_prob(v).mean(),
            -bigram.log_prob(u, v).mean(),
        )
        print(f"{source:10}: unigram {unigram_loss:.3f}, bigram {bigram_loss:.3f} nats a token")
    print(f"{len(stream):,} training tokens", flush=True)

    torch.manual_seed(args.seed)
    model = LanguageModel(CONFIG)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters", flush=True)
    opts = optimizers(model, args.rate)
    for opt in opts:
        for group in opt.param_groups:
            group["initial_lr"] = group["lr"]
    stable, decayed = args.out / "checkpoint.pt", args.out / "decay.pt"
    start_from = decayed if args.decay and decayed.exists() else stable
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "decay_start": None, "phases": []}
    if start_from.exists():
        loaded = torch.load(start_from, weights_only=True)
        model.load_state_dict(loaded["model"])
        for opt, opt_state in zip(opts, loaded["optimizers"], strict=True):
            opt.load_state_dict(opt_state)
        state = {name: loaded[name] for name in state}
        print(f"goes on from {start_from} at step {state['step']}", flush=True)
    elif args.decay:
        parser.error(
            f"--decay {args.decay}: there is no {stable} to start from; train with --steps first"
        )
    if args.decay and state["decay_start"] is None:
        state["decay_start"] = state["step"]
    last = state["decay_start"] + args.decay if args.decay else args.steps
    # What the README of the model tells: a new phase wherever another command went on.
    phase = {
        name: getattr(args, name)
        for name in ("seed", "decay", "batch", "length", "rate", "warmup", "repeats", "guide")
    }
    if not state["phases"] or {**state["phases"][-1], "from": 0} != {**phase, "from": 0}:
        state["phases"] = [*state["phases"], {**phase, "from": state["step"]}]
    target = decayed if args.decay else stable

    def checkpoint() -> None:
        weights = {"model": model.state_dict(), "optimizers": [opt.state_dict() for opt in opts]}
        save({**state, **weights, "config": asdict(CONFIG)}, target)

    def evaluate() -> None:
        model.eval()
        losses = "  ".join(
            f"{source} {held_out_loss(model, *sample):.3f}" for source, sample in samples.items()
        )
        best = "  ".join(f"{name} {table.max():.2f}" for name, table in probe(model).items())
        print(f"   held out: {losses}\n   probe: {best}", flush=True)
        model.train()

    last_save = last_eval = last_log = time.monotonic()
    recent = {
        "text": np.zeros(2),
        "repeats": np.zeros(2),
    }  # sum of the losses and their number since the last line
    base = state["seconds"]
    began = time.monotonic()
    while state["step"] < last:
        step = state["step"]
        factor = (last - step) / args.decay if args.decay else min(1.0, (step + 1) / args.warmup)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = group["initial_lr"] * factor
        inputs, targets = batch(stream, args.seed, step, args.batch, args.length, args.repeats)
        guide = Guide(model) if step < args.guide else None
        losses = (losses_of if guide is None else token_losses)(model, inputs, targets)
        loss = losses.sum() / (targets >= 0).sum()
        if guide is not None:
            loss = loss + guide.loss(inputs)
            guide.close()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        now = time.monotonic()
        state.update(
            step=step + 1, tokens=state["tokens"] + inputs.numel(), seconds=base + now - began
        )
        real = targets >= 0
        is_text = (
            real & (real.float().mean(1) > 0.97)[:, None]
        )  # of random blocks the first copy never counts
        for kind, members in (("text", is_text), ("repeats", real & ~is_text)):
            recent[kind] += np.array(
                [losses.detach()[members.flatten()].sum().item(), members.sum().item()]
            )
        if now - last_log > 15:
            text, repeats = (total / max(count, 1) for total, count in recent.values())
            recent = {kind: np.zeros(2) for kind in recent}
            print(
                f"{time.strftime('%H:%M:%S')} step {step + 1}/{last} rate {args.rate * factor:.1e}"
                f" text {text:.3f} repeats {repeats:.3f} {state['tokens'] / 1e6:.2f} M tokens,"
                f" {state['tokens'] / state['seconds']:.0f} a second",
                flush=True,
            )
            last_log = now
        if now - last_save > 60 * args.save_minutes:
            checkpoint()
            last_save = time.monotonic()
        if now - last_eval > 60 * args.eval_minutes:
            evaluate()
            last_eval = time.monotonic()
    checkpoint()
    evaluate()


if __name__ == "__main__":
    main()
