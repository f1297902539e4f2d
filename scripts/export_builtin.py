#!/usr/bin/env python
"""Writes the trained model where the package keeps it, and measures what it writes.

    python scripts/export_builtin.py --run runs/builtin

Weights are rounded to bfloat16 first and measured afterwards. Written are the checkpoint as
transformers keeps one, the reading text, README.md with the recipe and every measured figure, and
for the tests a held-out sample with the counts that the bigram baseline needs to predict it.
Everything is made in a folder beside the target and moved at the end.
"""

import argparse
import json
import platform
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

import train_builtin as training
from builtin_data import HELD_OUT
from language_model import LanguageModel, LanguageModelConfig

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src/multihead/models/builtin"
TESTS = ROOT / "tests/fixtures/builtin_held_out.json"
# The reading text: a held-out passage in which people speak, and names come again.
TEXT_FROM = "Pride And Prejudice, chapter 43"
TEXT_BEGINS, TEXT_ENDS = '"And is Miss Darcy as handsome', 'that you should think so."'
SAMPLE = {
    "austen": 12000,
    "docs": 12000,
    "docstrings": 6000,
}  # characters of held-out text for the tests
SHOWN = {
    "austen": "Austen's novels",
    "docs": "Python's documentation",
    "docstrings": "standard library docstrings",
}

README = """\
# The built-in model

A causal language model of {parameters:,} parameters, {layers} layers of {heads} heads, trained by this project
for people who want to look at attention heads without fetching a model first. It is made of the library's own blocks
(`scripts/language_model.py`) and stored as an ordinary checkpoint of transformers, in bfloat16:

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

Its tokenizer puts a `<s>` before every text; a text has at most {max_length} tokens.

## The text

| source | licence | training | held out |
| --- | --- | --- | --- |
{sources}

Whole chapters, pages and modules are held out, one in {held_out} by the checksum of its name, and were never trained
on: neither the model, nor the tokenizer, nor the baselines. Fetched by `scripts/builtin_data.py` from the Debian
packages r-cran-janeaustenr 1.0.0 and python3.11-doc 3.11.2, the docstrings from Python {python}. `text.txt` is a
passage of the held-out {text_from}.

## The recipe

    python scripts/builtin_data.py --out runs/data
{commands}
    python scripts/export_builtin.py --run runs/builtin

- {config}.
- Tokenizer: byte-level BPE of {vocab_size:,} tokens, digits apart. {stream:,} training tokens.
- Muon for the matrices of the blocks, AdamW for the embedding and the norms; warm-up, constant rate, linear decay to 0.
- A share of the rows (`--repeats`) is not text but random pieces of one block of random tokens; only the tokens that can
  be known from an earlier piece count.
{help}- Seed {seed}, {steps:,} steps, {tokens:.1f} million tokens (random blocks included), {minutes:.0f} minutes on 2 CPU
  cores that other work shared. A batch follows from the seed and its number; the last bits of a sum depend on the
  machine.

## What was measured, after rounding to bfloat16 ({date})

Loss on all held-out text, in nats a token; the model sees at most {max_length} tokens, the baselines were counted on
the same training tokens. The bigram is interpolated Kneser-Ney; it is given the true previous token everywhere, while
the model begins each piece with `<s>`.

| held-out text | tokens | unigram | bigram | this model |
| --- | --- | --- | --- | --- |
{losses}

Probe: random blocks of 128 tokens said twice, rows of the second half. Mass by weight, and by pooled contribution, on
the keys whose previous token is the current one (induction) and on the previous key.

| head | by weight | by contribution |
| --- | --- | --- |
{probe}
"""

# Said only of a model that was helped.
HELP = """\
- The heads that its users look for were helped into being, and did not all come by themselves: the first block starts
  with a lean towards the previous token (`LanguageModel.reset_parameters`), and for the first {guide} steps a second loss
  told some heads where to look (`Guide` in `scripts/train_builtin.py`). In the steps after that, without it, they stayed.
"""


def load(run: Path) -> tuple[LanguageModel, dict[str, Any]]:
    """The model with its weights rounded to bfloat16, kept in float32; and the state of its
    training.
    """
    path = run / "decay.pt"
    state = torch.load(path if path.exists() else run / "checkpoint.pt", weights_only=True)
    model = LanguageModel(LanguageModelConfig(**state["config"])).eval()
    model.load_state_dict(
        {name: weight.bfloat16().float() for name, weight in state["model"].items()}
    )
    return model, state


def write_checkpoint(folder: Path, model: LanguageModel, tokenizer_file: Path) -> None:
    config, weights = model.to_llama()
    ends = {
        "bos_token_id": training.BOS_ID,
        "eos_token_id": training.EOS_ID,
        "pad_token_id": training.EOS_ID,
    }
    config |= {**ends, "dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        bos_token=training.BOS,
        eos_token=training.EOS,
        pad_token=training.EOS,
        model_max_length=model.config.max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    # save_pretrained drops this entry, which tells readers of the file what the post-processor in
    # tokenizer.json does
    file = folder / "tokenizer_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "add_bos_token": True}, indent=2) + "\n"
    )


def reading_text(documents: list[dict[str, str]]) -> str:
    text = next(document["text"] for document in documents if document["name"] == TEXT_FROM)
    begin = text.index(TEXT_BEGINS)
    return text[begin : text.index(TEXT_ENDS, begin) + len(TEXT_ENDS)] + "\n"


def test_sample(
    tokenizer: Any, bigram: training.Bigram, documents: list[dict[str, str]]
) -> dict[str, Any]:
    """Beginnings of held-out documents, and of the training counts what it takes to predict them
    with the bigram: the token pairs of the sample with their counts, and the counts of each of its
    tokens.
    """
    texts = []
    for source, size in SAMPLE.items():
        for document in sorted(
            (d for d in documents if d["source"] == source), key=lambda d: -len(d["text"])
        )[:4]:
            texts.append({**document, "text": document["text"][: size // 4]})
    ids = [[*tokenizer.encode(document["text"]).ids, training.EOS_ID] for document in texts]
    pairs = np.array(sorted({pair for document in ids for pair in pairwise(document)}))
    tokens = np.unique(pairs)
    return {
        "texts": [
            {name: document[name] for name in ("source", "name", "text")} for document in texts
        ],
        "discount": bigram.discount,
        "vocab_size": bigram.vocab_size,
        "total": int(bigram.preceders.sum()),
        "seen": int((bigram.preceders > 0).sum()),
        "unigram_total": int(bigram.unigram.sum()),
        "pairs": [
            [int(u), int(v), int(c)]
            for (u, v), c in zip(pairs, bigram.pair_counts(*pairs.T), strict=True)
        ],
        "tokens": {
            int(t): [
                int(table[t])
                for table in (bigram.first, bigram.followers, bigram.preceders, bigram.unigram)
            ]
            for t in tokens
        },
    }


def measure(
    model: LanguageModel, bigram: training.Bigram, held_out: dict[str, list[np.ndarray]]
) -> dict[str, list[float]]:
    """For each source and for all together: tokens, and the losses of unigram, bigram and model."""
    rows = {}
    for source, documents in held_out.items():
        inputs, targets, before = training.pieces(documents, model.config.max_length)
        real = targets.numpy() >= 0
        u, v = before[real], targets.numpy()[real]
        baselines = [-bigram.unigram_log_prob(v).mean(), -bigram.log_prob(u, v).mean()]
        rows[source] = [len(v), *baselines, training.held_out_loss(model, inputs, targets)]
    table = np.array(list(rows.values()))
    count = table[:, 0]
    return {**rows, "all": [count.sum(), *(table[:, 1:] * count[:, None]).sum(0) / count.sum()]}


def phases(state: dict[str, Any]) -> str:
    """The commands that trained it, one a phase."""
    ends = [*(phase["from"] for phase in state["phases"][1:]), state["step"]]
    lines = []
    for phase, end in zip(state["phases"], ends, strict=True):
        words = [f"--decay {phase['decay']}" if phase["decay"] else f"--steps {end}"]
        words += [
            f"--{name} {phase[name]}" for name in ("batch", "length", "rate", "warmup", "repeats")
        ]
        words += [f"--guide {phase['guide']}"] if phase.get("guide") else []
        lines.append(
            f"    python scripts/train_builtin.py --out runs/builtin --compile {' '.join(words)}"
        )
    return "\n".join(lines)


def readme(
    model: LanguageModel,
    state: dict[str, Any],
    losses: dict[str, list[float]],
    documents: dict[str, list[dict[str, str]]],
    stream: int,
) -> str:
    c = model.config
    licences = {"austen": "public domain", "docs": "PSF", "docstrings": "PSF"}
    sizes = {
        (split, source): (
            sum(
                len(document["text"].encode()) for document in found if document["source"] == source
            )
            / 1e6
        )
        for split, found in documents.items()
        for source in licences
    }
    tables = training.probe(model, seed=1)
    shown = {}
    for kind in ("previous", "induction"):
        by_weight, by_contribution = tables[f"{kind} by weight"], tables[f"{kind} by contribution"]
        for at in np.argsort(-by_contribution, axis=None)[:3]:
            layer, head = divmod(int(at), c.num_heads)
            shown[f"L{layer}.H{head}, {kind}"] = (
                by_weight[layer, head],
                by_contribution[layer, head],
            )
    return README.format(
        parameters=sum(weight.numel() for weight in model.parameters()),
        layers=c.num_layers,
        heads=c.num_heads,
        max_length=c.max_length,
        held_out=HELD_OUT,
        sources="\n".join(
            f"| {SHOWN[source]} | {licence} | {sizes['train', source]:.2f} MB |"
            f" {sizes['held-out', source]:.2f} MB |"
            for source, licence in licences.items()
        ),
        python=platform.python_version(),
        text_from=TEXT_FROM.replace("And", "and"),
        commands=phases(state),
        config=(
            f"Width {c.embed_dim}, heads of {c.head_dim}, SwiGLU of {c.hidden_dim}, RMS norms"
            f" before sub-layers, rotary positions (theta {c.rope_theta:g}), tied embedding"
        ),
        help=(
            HELP.format(guide=guided)
            if (guided := max(phase.get("guide", 0) for phase in state["phases"]))
            else ""
        ),
        vocab_size=c.vocab_size,
        stream=stream,
        seed=state["phases"][-1]["seed"],
        steps=state["step"],
        tokens=state["tokens"] / 1e6,
        minutes=state["seconds"] / 60,
        date=time.strftime("%Y-%m-%d"),
        losses="\n".join(
            f"| {SHOWN.get(source, source)} | {int(n):,} | {unigram:.3f} | {bigram:.3f} |"
            f" **{ours:.3f}** |"
            for source, (n, unigram, bigram, ours) in losses.items()
        ),
        probe="\n".join(f"| {name} | {a:.2f} | {b:.2f} |" for name, (a, b) in shown.items()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("runs/data"))
    parser.add_argument("--run", type=Path, default=Path("runs/builtin"))
    args = parser.parse_args()
    model, state = load(args.run)
    tokenizer, stream, held_out = training.prepare(args.data, args.run)
    path = args.data / "documents.jsonl"
    documents = {split: training.read_documents(path, split) for split in ("train", "held-out")}
    bigram = training.Bigram(stream, model.config.vocab_size)
    losses = measure(model, bigram, held_out)
    TARGET.mkdir(parents=True, exist_ok=True)
    TESTS.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent) as temporary:
        folder = Path(temporary)
        write_checkpoint(folder, model, args.run / "tokenizer.json")
        (folder / "text.txt").write_text(reading_text(documents["held-out"]))
        (folder / "README.md").write_text(readme(model, state, losses, documents, len(stream)))
        sample = test_sample(tokenizer, bigram, documents["held-out"])
        (folder / TESTS.name).write_text(json.dumps(sample, separators=(",", ":")) + "\n")
        (folder / TESTS.name).replace(TESTS)
        for path in sorted(folder.iterdir()):
            path.chmod(0o644)  # safetensors makes its file readable by its owner alone
            path.replace(TARGET / path.name)
    print((TARGET / "README.md").read_text())


if __name__ == "__main__":
    main()
