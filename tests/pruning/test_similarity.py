"""Correlations against NumPy's and ranks counted one by one; embeddings against a mean taken by
hand; intervals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.test_tokenizing import small_tokenizer
from families import FAMILIES, model_of
from multihead.outside import clean
from multihead.pruning import similarity
from multihead.pruning.similarity import Similarity, embed, load_pairs
from small import llama

TEXTS = ["a b c a a b", "c", "b a c b a a c c b"]
BY_NAME = {family.name: family for family in FAMILIES}


def task_of(documents: int, random: np.random.Generator, vectors: Any) -> Similarity:
    """All pairs, judged by people who see the vectors through some noise."""
    pairs = np.array([[i, j] for i in range(documents) for j in range(i)])
    scores = (vectors[pairs[:, 0]] * vectors[pairs[:, 1]]).sum(1) + random.normal(
        0, 0.3, len(pairs)
    )
    return Similarity([str(n) for n in range(documents)], pairs, scores)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(4, 12))
def test_correlations_are_what_they_are_called(seed: int, documents: int) -> None:
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(documents, 3)).round(1) + 0.01
    task = task_of(documents, random, vectors)
    scores = task.scores.round(0)
    if np.ptp(scores) == 0:
        return
    task = Similarity(task.documents, task.pairs, scores)
    unit = [v / np.sqrt(v @ v) for v in vectors]
    cosines = np.array([unit[i] @ unit[j] for i, j in task.pairs])

    def ranks(values: Any) -> list[float]:
        return [sum(v < w for v in values) + sum(v == w for v in values) / 2 for w in values]

    mine = similarity._ranks(scores)
    assert np.allclose(mine - mine.mean(), np.array(ranks(scores)) - np.mean(ranks(scores)))
    found = task.agreement(vectors)
    assert found.pearson == pytest.approx(np.corrcoef(cosines, scores)[0, 1])
    assert found.spearman == pytest.approx(
        np.corrcoef(similarity._ranks(task._cosines(vectors)), ranks(scores))[0, 1]
    )


def test_the_difference_is_of_pearsons_and_against_the_mean_of_several() -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(30, 5))
    task = task_of(30, random, vectors)
    worse = [vectors + random.normal(size=vectors.shape) for _ in range(3)]
    found = task.compare(worse, vectors)
    expected = task.agreement(vectors).pearson - np.mean(
        [task.agreement(one).pearson for one in worse]
    )
    assert found.mean == pytest.approx(expected) and found.documents == 30
    assert 0 < found.low < found.mean < found.high
    assert found == task.compare(np.stack(worse), vectors)
    same = task.compare(vectors, vectors)
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    back = task.compare(vectors, worse[0])
    assert back.mean == pytest.approx(-task.compare(worse[0], vectors).mean)


def test_intervals_know_that_pairs_share_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spread of the difference over fresh documents, which drawing pairs would understate: so
    must the interval be.
    """
    monkeypatch.setattr(similarity, "RESAMPLES", 300)
    random, means, widths = np.random.default_rng(1), [], []
    for _ in range(60):
        vectors = random.normal(size=(20, 4))
        task = task_of(20, random, vectors)
        change = task.compare(
            vectors + random.normal(size=vectors.shape), vectors + random.normal(size=vectors.shape)
        )
        means.append(change.mean)
        widths.append((change.high - change.low) / 3.92)
    assert 0.75 < np.mean(widths) / np.std(means) < 1.6


def test_a_pair_counts_as_often_as_both_its_documents_were_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(similarity, "RESAMPLES", 40)
    random = np.random.default_rng(3)
    vectors = random.normal(size=(12, 4))
    task, other, drawn = (
        task_of(12, random, vectors),
        vectors + random.normal(size=vectors.shape),
        [],
    )
    for times in np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=40):
        documents = np.repeat(np.arange(12), times)
        which = [
            n
            for n, (i, j) in enumerate(task.pairs)
            for x in documents
            for y in documents
            if (x, y) == (i, j)
        ]
        x, y = (
            np.corrcoef(task._cosines(v)[which], task.scores[which])[0, 1] for v in (other, vectors)
        )
        drawn.append(y - x)
    found = task.compare(other, vectors)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))))


def test_pairs_that_share_no_document_are_drawn_themselves() -> None:
    random = np.random.default_rng(2)
    vectors = random.normal(size=(80, 4))
    pairs = np.arange(80).reshape(-1, 2)
    task = Similarity(
        [""] * 80, pairs, (vectors[::2] * vectors[1::2]).sum(1) + random.normal(size=40)
    )
    other = vectors + random.normal(size=vectors.shape)
    found = task.compare(other, vectors)
    drawn = []
    for _ in range(2000):
        which = random.integers(40, size=40)
        x, y = (task._cosines(v)[which] for v in (other, vectors))
        drawn.append(
            np.corrcoef(y, task.scores[which])[0, 1] - np.corrcoef(x, task.scores[which])[0, 1]
        )
    assert (found.low, found.high) == pytest.approx(
        tuple(np.quantile(drawn, (0.025, 0.975))), abs=0.05
    )


@pytest.mark.parametrize("name", ["bert", "roberta", "llama", "t5"])
def test_embeddings_are_means_over_real_tokens(name: str) -> None:
    model = llama() if name == "llama" else model_of(BY_NAME[name])
    tokenizer = small_tokenizer(pad_token="c")
    found = embed(model, TEXTS, tokenizer=tokenizer, batch_size=2)
    for text, vector in zip(TEXTS, found):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            stack = model.get_encoder() if name == "t5" else model.base_model
            mean = (
                stack(input_ids=ids, attention_mask=torch.ones_like(ids))
                .last_hidden_state[0]
                .double()
                .mean(0)
                .numpy()
            )
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-5)


def test_the_mode_of_the_model_stays_and_long_documents_are_read_to_its_positions() -> None:
    model, tokenizer = llama().train(), small_tokenizer(pad_token="c")
    long, cut = embed(model, ["a b " * 50, "a b " * 31], tokenizer=tokenizer)
    assert model.training
    np.testing.assert_allclose(long, cut, atol=1e-6)


# --- files ---


def test_pairs_from_a_file(tmp_path: Path) -> None:
    lines = [
        {"a": "x", "b": "y\nz", "score": 1},
        {"a": "y\nz", "b": "w", "score": 0.5},
        {"b": "x", "a": "w", "score": -1},
    ]
    (tmp_path / "pairs.jsonl").write_text(
        "\ufeff" + "\n\n".join(json.dumps(line) for line in lines)
    )
    task = load_pairs(tmp_path / "pairs.jsonl")
    assert task.documents == ["x", "y\nz", "w"]
    assert task.pairs.tolist() == [[0, 1], [1, 2], [2, 0]] and task.scores.tolist() == [1, 0.5, -1]


@pytest.mark.parametrize(
    "line",
    [
        '{"a": "x", "b": "y"}',
        '{"a": "x", "b": " ", "score": 1}',
        '{"a": 1, "b": "y", "score": 1}',
        '{"a": "x", "b": "y", "score": "1"}',
        '{"a": "x", "b": "y", "score": true}',
        "x\ty\t1",
        "[1]",
    ],
)
def test_a_line_that_is_no_pair(line: str, tmp_path: Path) -> None:
    good = '{"a": "x", "b": "y", "score": 1}\n'
    (tmp_path / "pairs.jsonl").write_text(good + line + "\n" + good)
    with pytest.raises(ValueError) as caught:
        load_pairs(tmp_path / "pairs.jsonl")
    assert f"pairs.jsonl', line 2: {clean(line)}: expected two texts and a number, such as" in str(
        caught.value
    )


def test_bad_tasks(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="there is no such file; give JSON lines with a, b, score"
    ):
        load_pairs(tmp_path / "pairs.jsonl")
    pairs, scores, three = (
        np.array([[0, 1], [1, 2], [0, 2]]),
        np.array([1.0, 2, 3]),
        ["a", "b", "c"],
    )
    (tmp_path / "one.jsonl").write_text('{"a": "x", "b": "y", "score": 1}\n')
    task = Similarity(three, pairs, scores)
    for words, call in [
        (
            "scores of 1 pairs hold 1 different values: expected at least 3 pairs",
            lambda: load_pairs(tmp_path / "one.jsonl"),
        ),
        ("hold 1 different values", lambda: Similarity(three, pairs, np.ones(3))),
        (
            "pairs [3, 2] and scores [2]: expected [P, 2] and [P]",
            lambda: Similarity(three, pairs, scores[:2]),
        ),
        ("pairs name documents 0 to 2; there are 2", lambda: Similarity(three[:2], pairs, scores)),
        (
            "scores hold a value that isn't a finite number",
            lambda: Similarity(three, pairs, np.array([1, 2, np.nan])),
        ),
        (
            "embeddings [2, 4]: expected one row for each of the 3",
            lambda: task.agreement(np.ones((2, 4))),
        ),
        (
            "embeddings hold values that aren't finite",
            lambda: task.agreement(np.full((3, 4), np.nan)),
        ),
        ("a=[] is empty", lambda: task.compare([], np.ones((3, 4)))),
        (
            "texts=[] holds no text",
            lambda: embed(llama(), [], tokenizer=small_tokenizer(pad_token="c")),
        ),
    ]:
        with pytest.raises(ValueError) as caught:
            call()
        assert words in str(caught.value)


def test_minilm_finds_alike_what_is_alike(minilm_dir: Path) -> None:
    from multihead.models.loading import load_with_tokenizer

    loaded = load_with_tokenizer(minilm_dir)
    texts = ["A cat sleeps.", "The kitten is asleep.", "Taxes will rise in May."]
    cat, kitten, tax = embed(loaded.model, texts, tokenizer=loaded.tokenizer)
    assert cat @ kitten > 0.6 > 0.3 > cat @ tax
