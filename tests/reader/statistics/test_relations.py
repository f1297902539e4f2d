"""Relations are those of stored probabilities; sentences that can't be read are named; nothing else
of a table changes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multihead
from conllu_files import pieces, write
from families import FAMILIES, is_cross, model_of
from multihead.models.loading import load_with_tokenizer
from multihead.reader.conllu import Sentence, read_conllu
from multihead.reader.statistics.relations import add_relations
from multihead.reader.table import Table, load_table
from multihead.reader.words import align_words
from multihead.report.payload import payload
from oracles.eager import stored_attention
from oracles.relations import Found, add_sentence, best_offset, between_words, columns_of, word_of

SENTENCES = Path(__file__).parents[2] / "fixtures" / "sentences.conllu"
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random trees over words of one to four pieces, with multiword tokens of both kinds and a full
    stop without a space.
    """
    draw = random.Random(5)
    found = []
    for _ in range(14):
        count = draw.randint(2, 8)
        root = draw.randint(1, count)
        rows = []
        for n in range(1, count + 1):
            form = "".join(draw.choice("abcd") for _ in range(draw.randint(1, 4)))
            head = (
                0
                if n == root
                else (
                    root
                    if draw.random() < 0.5 or n - 1 == root
                    else draw.choice([root, n - 1 or root])
                )
            )
            head = root if head == n - 1 and n - 1 > root else head
            deprel = "root" if n == root else draw.choice(["nsubj", "nsubj:pass", "obj", "det"])
            rows.append(f"{n} {form} {head} {deprel}")
        if count > 3:
            first, second = rows[1].split()[1], rows[2].split()[1]
            rows.insert(1, draw.choice([f"2-3 {first}{second} _ _", "2-3 dab _ _"]))
        rows[-1] += " SpaceAfter=No"
        found.append([*rows, f"{count + 1} . {root} punct"])
    return write(tmp_path_factory.mktemp("trees") / "random.conllu", found)


def expected(
    model: Any, sentences: list[Sentence], tokenizer: Any
) -> tuple[dict[str, Found], dict[str, list[int]]]:
    """Of each site what its heads read, and of each column the distances of the arcs that some site
    may read.
    """
    sites: dict[str, Found] = defaultdict(Found)
    distances: dict[str, list[int]] = defaultdict(list)
    for sentence in sentences:
        spans = sorted({(word.start, word.stop) for word in sentence.words})
        coded = tokenizer(sentence.text, return_offsets_mapping=True, return_tensors="pt")
        owner = [word_of(tuple(token), spans) for token in coded["offset_mapping"][0].tolist()]
        if set(range(len(spans))) - set(owner):
            continue
        place = [spans.index((word.start, word.stop)) for word in sentence.words]
        arcs = [
            (place[n], place[word.head - 1], word.deprel)
            for n, word in enumerate(sentence.words)
            if word.head and place[n] != place[word.head - 1]
        ]
        given = {"input_ids": coded["input_ids"]}
        if model.config.is_encoder_decoder:
            given["decoder_input_ids"] = coded["input_ids"][:, :3]
        with stored_attention(model) as calls, torch.no_grad():
            model(**given)
        union = np.zeros((len(spans), len(spans)), bool)
        for call in calls:
            if call.site.startswith(("decoder", "model.decoder")):
                continue
            assert call.weights.shape[0] == 1
            weights, may = between_words(call.weights[0], call.allowed[0], owner, len(spans))
            add_sentence(sites[call.site], weights, may, arcs)
            union |= may
        for dependent, head, deprel in arcs:
            for column, turned in columns_of(deprel).items():
                reader, target = (head, dependent) if turned else (dependent, head)
                if union[reader, target]:
                    distances[column].append(target - reader)
    return sites, distances


@pytest.mark.parametrize(
    "name",
    ["bert", "roberta", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "llama4", "t5", "bart"],
)
def test_relations_are_those_of_stored_probabilities(name: str, trees: Path) -> None:
    family = BY_NAME[name]
    model, tokenizer = model_of(family), pieces(ends=family.inputs != "decoder")
    sites, distances = expected(model, read_conllu(trees), tokenizer)
    table = multihead.reader.read_relations(
        model, trees, tokenizer=tokenizer, batch_size=5, least=1
    )
    assert set(table.columns) == set(distances) == set(table.meta["relations"])
    assert len(distances) > 8
    some = False
    for n, head in enumerate(table.heads):
        for column in table.columns:
            if head.site not in sites or not sites[head.site].documents[column]:
                assert table.count(column)[n] == 0 and np.isnan(table.value(column)[n])
                assert table.reasons[f"{head.site} {column}"]
                continue
            found = sites[head.site]
            assert table.count(column)[n] == found.arcs(column)[head.index], (head.head, column)
            assert table.value(column)[n] == pytest.approx(
                found.accuracy(column)[head.index], abs=1e-12
            ), (head.head, column)
            some |= 0 < table.value(column)[n] < 1
            x, y = np.array(
                [(right[head.index], arcs[head.index]) for right, arcs in found.documents[column]]
            ).T
            if len(x) > 1:
                spread = (
                    np.sqrt(((x - x.sum() / y.sum() * y) ** 2).sum() * len(x) / (len(x) - 1))
                    / y.sum()
                )
                assert table.error(column)[n] == pytest.approx(spread, abs=1e-9)
    assert some
    for column, apart in distances.items():
        offset, accuracy = best_offset(apart)
        found = table.meta["relations"][column]
        assert (found["offset"], found["accuracy"], found["arcs"]) == (
            offset,
            pytest.approx(accuracy),
            len(apart),
        ), column


def test_a_narrow_window_counts_the_arcs_that_it_lets_read(tmp_path: Path) -> None:
    rows = [f"{n} ab {7 if n < 7 else 0} {'obj' if n < 7 else 'root'}" for n in range(1, 8)]
    path = write(tmp_path / "x.conllu", [rows])
    table = multihead.reader.read_relations(
        model_of(BY_NAME["mistral"]), path, tokenizer=pieces(ends=False), least=1
    )
    window = model_of(BY_NAME["mistral"]).config.sliding_window
    assert set(table.count("relation:^obj")) == {window - 1} and window < 7
    assert table.meta["relations"]["relation:^obj"]["arcs"] == window - 1


def test_batches_and_their_padding_change_nothing(trees: Path) -> None:
    for name in ("bert", "llama"):
        model = model_of(BY_NAME[name])
        one, many = (
            multihead.reader.read_relations(
                model, trees, tokenizer=pieces(), batch_size=size, least=1
            )
            for size in (1, 14)
        )
        assert one.columns == many.columns and one.meta == many.meta
        for column in one.columns:
            np.testing.assert_array_equal(one.sums[column], many.sums[column])


def test_blocks_of_rows_change_nothing(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bert", "llama"):
        model = model_of(BY_NAME[name])
        one = multihead.reader.read_relations(model, trees, tokenizer=pieces(), least=1)
        monkeypatch.setattr("multihead.ops.backends.blocks.rows_per_block", lambda *_: 3)
        many = multihead.reader.read_relations(model, trees, tokenizer=pieces(), least=1)
        monkeypatch.undo()
        assert one.meta == many.meta
        for column in one.columns:
            np.testing.assert_array_equal(one.sums[column], many.sums[column])


def test_an_encoder_decoder_reads_them_in_its_encoder_and_says_why_nowhere_else(
    trees: Path,
) -> None:
    table = multihead.reader.read_relations(
        model_of(BY_NAME["bart"]), trees, tokenizer=pieces(), least=1
    )
    for n, head in enumerate(table.heads):
        assert (table.count("relation:all")[n] > 0) == head.head.startswith("encoder."), head
        if head.kind == "cross":
            assert "another sequence" in table.reasons[f"{head.site} relation:all"]
        elif head.head.startswith("decoder."):
            assert "aren't the sentence's tokens" in table.reasons[f"{head.site} relation:all"]
    assert any(is_cross(head.site) for head in table.heads)


def test_within_an_open_reading_nothing_else_is_touched(trees: Path) -> None:
    model, ids = model_of(BY_NAME["llama"]), torch.tensor([[0, 3, 4, 5, 6, 3, 4]])
    with multihead.reading(model, special_ids={0}) as session, torch.no_grad():
        model(ids)
        plain = session.table()
        steps: list[tuple[int, int, str]] = []
        with session.passes(on_site=lambda: pytest.fail("this belongs to the text")):
            read = add_relations(
                session, trees, pieces(), 4, least=1, progress=lambda *step: steps.append(step)
            )
        table = session.table()
    found = [a for s in read_conllu(trees) if (a := align_words(s, pieces()))]
    assert read == (len(found), sum(len(a.ids) for a in found)) and len(found) == 13, (
        "in one, words share a token"
    )
    assert steps == [(n, 8, "reading relations") for n in range(1, 9)]
    assert session.settings.counting and not session.watchers
    assert (table.meta["documents"], table.meta["tokens"]) == (1, 7)
    assert [c for c in table.columns if not c.startswith("relation:")] == plain.columns
    for column in plain.columns:
        np.testing.assert_array_equal(table.sums[column], plain.sums[column])
    alone = multihead.reader.read_relations(model, trees, tokenizer=pieces(), least=1)
    for column in alone.columns:
        np.testing.assert_array_equal(table.sums[column], alone.sums[column])
    assert (alone.meta["documents"], alone.meta["tokens"]) == read and np.isnan(
        alone.value("entropy")
    ).all()
    assert "only relations were read" in alone.reasons["entropy"]
    assert table.meta["relations"] == alone.meta["relations"]


def test_an_error_on_the_way_leaves_the_reading_as_it_was(trees: Path) -> None:
    model = model_of(BY_NAME["llama"])
    hook = model.model.layers[1].mlp.register_forward_hook(
        lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with multihead.reading(model, verify=False) as session:
        with pytest.raises(KeyboardInterrupt):
            add_relations(session, trees, pieces())
        hook.remove()
        assert (
            session.settings.counting
            and not session.watchers
            and not any(record.table.sums for record in session.records)
        )
    assert not model.training


def test_tables_of_two_files_add_up(trees: Path, tmp_path: Path) -> None:
    blocks = trees.read_text().split("\n\n")
    model, found = model_of(BY_NAME["bert"]), []
    for n, part in enumerate((blocks[:5], blocks[5:])):
        (tmp_path / f"{n}.conllu").write_text("\n\n".join(part) + "\n")
        found.append(
            multihead.reader.read_relations(
                model, tmp_path / f"{n}.conllu", tokenizer=pieces(), least=1
            )
        )
    both, whole = (
        found[0] + found[1],
        multihead.reader.read_relations(model, trees, tokenizer=pieces(), least=1),
    )
    assert set(both.columns) == set(whole.columns)
    assert both.meta["relations"] == whole.meta["relations"] and both.meta["documents"] == 13
    for column in whole.columns:
        np.testing.assert_allclose(both.sums[column], whole.sums[column])
        np.testing.assert_array_equal(both.value(column), [row[column] for row in both.rows()])


def test_a_saved_table_is_the_same(trees: Path, tmp_path: Path) -> None:
    table = multihead.reader.read_relations(
        model_of(BY_NAME["bert"]), trees, tokenizer=pieces(), least=1
    )
    table.save(tmp_path / "x.json")
    again = load_table(tmp_path / "x.json")
    assert again.columns == table.columns and again.meta == table.meta
    np.testing.assert_array_equal(again.value("relation:^nsubj"), table.value("relation:^nsubj"))
    assert list(table.to_pandas()["relation:^nsubj"]) == [
        row["relation:^nsubj"] for row in table.rows()
    ]
    table.save(tmp_path / "x.csv")
    assert "relation:nsubj:pass" in (tmp_path / "x.csv").read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"relation:^all": [[', '"relation:<b>": [['),
        ('"offset": ', '"offset": 7'),
        ('"hits": [', '"hits": [0, '),
        ('"arcs": ', '"arcs": -'),
        ('"arcs": ', '"arcs": 0, "x": '),
        ('"arcs": ', '"arcs": 0.5, "x": '),
        ('"relations": {', '"relations": {"all": 3, '),
    ],
)
def test_a_file_with_wrong_relations_is_refused(
    old: str, new: str, trees: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    multihead.reader.read_relations(
        model_of(BY_NAME["bert"]), trees, tokenizer=pieces(), least=1
    ).save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match="isn't a table of heads"):
        load_table(path)


def test_few_arcs_are_left_out_and_counted(trees: Path) -> None:
    table = multihead.reader.read_relations(
        model_of(BY_NAME["bert"]), trees, tokenizer=pieces(), least=13
    )
    counts = {column: int(table.count(column)[0]) for column in table.columns}
    assert "relation:all" in counts and "relation:punct" in counts and min(counts.values()) >= 13
    assert "relation:nsubj:pass" not in counts
    note = table.meta["notes"][-1]
    assert note.startswith(
        f"relations of which fewer than least=13 arcs of {trees} can be read are left out:"
        " relation:"
    )
    assert np.isnan(table.value("relation:nsubj:pass")).all()
    with pytest.raises(KeyError, match="no statistic named 'relation:X'"):
        table.value("relation:X")


def test_a_table_says_which_head_is_best_beside_which_distance() -> None:
    model, tokenizer = multihead.load_builtin()
    table = multihead.reader.read_relations(model, SENTENCES, tokenizer=tokenizer)
    text = str(table)
    best = int(np.nanargmax(table.value("relation:obj")))
    fixed = table.meta["relations"]["relation:obj"]
    shown = [
        table.heads[best].head,
        f"{table.value('relation:obj')[best]:.2f}",
        f"{table.error('relation:obj')[best]:.2f}",
        "21",
        f"{fixed['accuracy']:.2f}",
        f"{fixed['offset']:+d}",
    ]
    assert next(line.split() for line in text.splitlines() if line.startswith("obj ")) == [
        "obj",
        *shown,
    ]
    assert "mixed" not in text and "The best of many heads is optimistic" in text
    assert "<td>^nsubj</td>" in table._repr_html_()
    both = str(multihead.read(model, "the cat sat on the mat", tokenizer=tokenizer) + table)
    assert "mixed" in both and "\n^nsubj " in both
    assert (
        payload(table, [], 10**6)["statistics"]["relation:^det"]["meaning"]
        == "the head reads its dependent"
    )


# Words and tokens.


def test_sentences_that_do_not_fit_are_counted_in_a_note(tmp_path: Path) -> None:
    good = ["1 a 2 det", "2 b 0 root"]
    shared = ["1-2 ab _ _", "1 a 2 det", "2 b 0 root"]
    long = [f"{n} a {n - 1} {'root' if n == 1 else 'conj'}" for n in range(1, 80)]
    path = write(tmp_path / "x.conllu", [good, shared, good, shared, long])
    model = model_of(BY_NAME["bert"])
    table = multihead.reader.read_relations(model, path, tokenizer=pieces(), least=1)
    assert (
        table.count("relation:all").tolist() == [2] * len(table.heads)
        and table.meta["documents"] == 2
    )
    notes = table.meta["notes"]
    assert (
        "relations: left out 2 sentences in which two words share a token or a word has none; the"
        f" first in line 4 of {path}" in notes
    )
    positions = model.config.max_position_embeddings
    assert (
        f"relations: left out 1 sentence of more than 512 words or the model's {positions}"
        f" positions; the first in line 15 of {path}" in notes
    )
    with pytest.raises(ValueError) as error:
        multihead.reader.read_relations(model, write(path, [shared]), tokenizer=pieces())
    assert str(path) in str(
        error.value
    ) and "has no arc that can be read with this tokenizer" in str(error.value)
    with pytest.raises(ValueError, match="a single word each"):
        multihead.reader.read_relations(model, write(path, [["1 a 0 root"]]), tokenizer=pieces())


class Slow:
    is_fast = False

    def __call__(self, *_: Any) -> None:
        raise AssertionError


def test_what_can_not_read_words_is_refused(trees: Path, tmp_path: Path) -> None:
    model = model_of(BY_NAME["bert"])
    with pytest.raises(ValueError, match="tokenizer=None: words are aligned"):
        multihead.reader.read_relations(model, trees, tokenizer=None)
    with pytest.raises(
        ValueError,
        match=r"tokenizer \(Slow\) has no character offsets .*is_fast is False.*tokenizer.json",
    ):
        multihead.reader.read_relations(model, trees, tokenizer=Slow())
    with pytest.raises(ValueError, match="least=0: expected 1 or more"):
        multihead.reader.read_relations(model, trees, tokenizer=pieces(), least=0)
    with pytest.raises(ValueError, match="batch_size=0: expected 1 or more"):
        multihead.reader.read_relations(model, trees, tokenizer=pieces(), batch_size=0)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.conllu'.*no such file"):
        multihead.reader.read_relations(model, tmp_path / "nowhere.conllu", tokenizer=pieces())
    with pytest.raises(ValueError, match="takes pixel_values, not text"):
        multihead.reader.read_relations(model_of(BY_NAME["vit"]), trees, tokenizer=pieces())
    with pytest.raises(TypeError, match="model is a str"):
        multihead.reader.read_relations("bert", trees, tokenizer=pieces())  # type: ignore[arg-type]


# Real models.


@pytest.mark.models
@pytest.mark.parametrize(
    "name", ["minilm_dir", pytest.param("smollm2_gguf", marks=pytest.mark.slow)]
)
def test_real_heads_read_relations_better_than_any_distance(
    name: str, request: pytest.FixtureRequest
) -> None:
    loaded = load_with_tokenizer(request.getfixturevalue(name))
    table: Table = multihead.reader.read_relations(
        loaded.model, SENTENCES, tokenizer=loaded.tokenizer
    )
    assert table.meta["documents"] == 24, table.meta["notes"]
    column, head = {
        "minilm_dir": ("relation:^obj", "L1.H7"),
        "smollm2_gguf": ("relation:obj", "L10.H1"),
    }[name]
    best = int(np.nanargmax(table.value(column)))
    assert table.heads[best].head == head
    assert table.value(column)[best] > table.meta["relations"][column]["accuracy"] + 0.15
