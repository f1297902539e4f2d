"""The model that ships: its size, equal logits in transformers, and what it has learned, measured
independently.
"""

import importlib.util
import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import multihead
from language_model import LanguageModel

ROOT = Path(__file__).parents[2]
FOLDER = Path(multihead.__file__).parent / "models/builtin"
SAMPLE = json.loads((ROOT / "tests/fixtures/builtin_held_out.json").read_text())
PAIR_COUNTS = {(u, v): count for u, v, count in SAMPLE["pairs"]}


@cache
def transformers_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def own_model() -> LanguageModel:
    weights = load_file(FOLDER / "model.safetensors")
    return LanguageModel.from_llama(
        json.loads((FOLDER / "config.json").read_text()), weights
    ).eval()


@cache
def training() -> ModuleType:
    """scripts/train_builtin.py, which is no package."""
    spec = importlib.util.spec_from_file_location(
        "train_builtin", ROOT / "scripts/train_builtin.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def sample() -> list[list[int]]:
    return [
        [*tokenizer()(document["text"])["input_ids"], tokenizer().eos_token_id]
        for document in SAMPLE["texts"]
    ]


def test_size() -> None:
    weights = load_file(FOLDER / "model.safetensors")
    assert 1e6 <= sum(weight.numel() for weight in weights.values()) <= 3e6
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8e6
    assert own_model().config.num_layers >= 4
    assert own_model().config.num_heads == 8


def test_opens_as_llama_with_equal_logits() -> None:
    assert type(transformers_model()).__name__ == "LlamaForCausalLM"
    tokens = torch.tensor([ids[:200] for ids in sample() if len(ids) >= 200])
    with torch.no_grad():
        expected, got = transformers_model()(tokens).logits, own_model()(tokens)
    assert expected.std() > 1  # far from nothing
    torch.testing.assert_close(got, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)


def test_tokenizer_puts_a_bos_before_every_text() -> None:
    text = "def f(x): return 12.5  # naïve\n"
    ids = tokenizer()(text)["input_ids"]
    assert ids[0] == tokenizer().bos_token_id == transformers_model().config.bos_token_id
    assert tokenizer().decode(ids[1:]) == text
    assert tokenizer()(text, add_special_tokens=False)["input_ids"] == ids[1:]
    assert json.loads((FOLDER / "tokenizer_config.json").read_text())["add_bos_token"] is True
    assert tokenizer().model_max_length == own_model().config.max_length


def test_reading_text_fits() -> None:
    text = (FOLDER / "text.txt").read_text()
    assert 200 <= len(tokenizer()(text)["input_ids"]) <= own_model().config.max_length


def bigram_loss(pairs: np.ndarray) -> np.ndarray:
    """The bigram baseline on (u, v) pairs, from the counts of the training tokens that ship with
    the sample.
    """
    u, v = ([SAMPLE["tokens"][str(token)] for token in side] for side in pairs.T)
    return -training().bigram_log_prob(
        pairs=np.array([PAIR_COUNTS[pair] for pair in map(tuple, pairs.tolist())]),
        first=np.array([counts[0] for counts in u]),
        followers=np.array([counts[1] for counts in u]),
        preceders=np.array([counts[2] for counts in v]),
        total=SAMPLE["total"],
        seen=SAMPLE["seen"],
        discount=SAMPLE["discount"],
        vocab_size=SAMPLE["vocab_size"],
    )


def test_held_out_loss_is_clearly_below_the_bigrams() -> None:
    pairs = np.array([pair for ids in sample() for pair in pairwise(ids)])
    unigram = np.array([SAMPLE["tokens"][str(v)][3] for v in pairs[:, 1]])
    unigram_loss = -np.log((unigram + 1) / (SAMPLE["unigram_total"] + SAMPLE["vocab_size"])).mean()
    losses = []
    for ids in sample():
        for at in range(1, len(ids), 511):  # each piece behind a <s>, as in use
            target = torch.tensor(ids[at : at + 511])
            inputs = torch.cat((torch.tensor([tokenizer().bos_token_id]), target[:-1]))
            with torch.no_grad():
                losses.append(
                    F.cross_entropy(own_model()(inputs[None])[0], target, reduction="none")
                )
    ours = torch.cat(losses).mean().item()
    bigram = bigram_loss(pairs).mean()
    assert bigram < unigram_loss - 1  # a baseline that is worth beating
    assert ours < bigram - 0.3


def test_the_bigram_is_a_distribution_and_learns() -> None:
    stream = np.random.default_rng(0).zipf(1.5, 5000).clip(1, 49)
    stream[1::2] = (stream[::2] * 7) % 49 + 1  # every second token follows from the one before it
    bigram = training().Bigram(stream, 50)
    u = np.repeat(np.arange(1, 50), 50)
    table = np.exp(bigram.log_prob(u, np.tile(np.arange(50), 49))).reshape(49, 50)
    np.testing.assert_allclose(table.sum(1), 1)
    assert (
        -bigram.log_prob(stream[:-1], stream[1:]).mean()
        < -bigram.unigram_log_prob(stream[1:]).mean() - 0.2
    )


def probe_scores() -> dict[str, np.ndarray]:
    """Previous-token and induction scores, [layers, heads], from transformers' own attentions: a
    random block said twice, rows of the second half, by weight and by pooled contribution.
    """
    config = transformers_model().config
    size = 60
    block = torch.randint(
        2, config.vocab_size, (2, size), generator=torch.Generator().manual_seed(7)
    )
    tokens = torch.cat((torch.zeros(2, 1, dtype=torch.long), block, block), 1)
    assert config.bos_token_id == 0
    values = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(
            lambda _module, _inputs, out: values.append(out)
        )
        for layer in transformers_model().model.layers
    ]
    with torch.no_grad():
        attentions = transformers_model()(tokens, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    width, found = (
        config.head_dim,
        {name: [] for name in ("induction", "previous", "induction c", "previous c")},
    )
    for layer, weights, value in zip(
        transformers_model().model.layers, attentions, values, strict=True
    ):
        w_o = layer.self_attn.o_proj.weight.detach()
        for h in range(config.num_attention_heads):
            update = value[..., h * width : (h + 1) * width] @ w_o[:, h * width : (h + 1) * width].T
            on = dict.fromkeys(found, 0.0)
            total = 0.0
            for b in range(2):
                for i in range(1 + size, 1 + 2 * size):
                    contribution = weights[b, h, i] * update[b].norm(dim=-1)
                    total += contribution.sum()
                    before = [j for j in range(1, i) if tokens[b, j - 1] == tokens[b, i]]
                    for name, keys in (("induction", before), ("previous", [i - 1])):
                        on[name] += weights[b, h, i, keys].sum() / (2 * size)
                        on[f"{name} c"] += contribution[keys].sum()
            for name, amount in on.items():
                found[name].append(float(amount / total if name.endswith(" c") else amount))
    return {
        name: np.reshape(scores, (config.num_hidden_layers, -1)) for name, scores in found.items()
    }


@pytest.fixture(scope="module")
def scores() -> dict[str, np.ndarray]:
    return probe_scores()


@pytest.mark.parametrize("name", ["induction", "induction c", "previous", "previous c"])
def test_has_the_head(scores: dict[str, np.ndarray], name: str) -> None:
    assert scores[name].max() > 0.4


def test_the_scripts_probe_measures_the_same(scores: dict[str, np.ndarray]) -> None:
    own = training().probe(own_model(), seed=3, size=60)
    for name, theirs in (("induction", scores["induction"]), ("previous", scores["previous"])):
        np.testing.assert_allclose(own[f"{name} by weight"], theirs, atol=0.05)
        np.testing.assert_allclose(own[f"{name} by contribution"], scores[f"{name} c"], atol=0.08)
