"""CoNLL-U files are read; anything else is refused with its file, its line and what was expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihead.reader.conllu import parse_conllu, read_conllu

SENTENCES = Path(__file__).parents[1] / "fixtures" / "sentences.conllu"
VALID = SENTENCES.read_bytes()


def tree(*rows: str) -> bytes:
    """Rows of "ID FORM HEAD DEPREL [MISC]"; a row that begins with # or holds a tab is kept as
    it is.
    """
    lines = []
    for row in rows:
        if row.startswith("#") or "\t" in row or not row:
            lines.append(row)
            continue
        id_, form, head, deprel, misc = (row + " _").split()[:5]
        lines.append("\t".join([id_, form, "_", "_", "_", "_", head, deprel, "_", misc]))
    return ("\n".join(lines) + "\n").encode()


GOOD = ("1 Cats 2 nsubj", "2 sleep 0 root SpaceAfter=No", "3 . 2 punct")


def test_the_sentences_of_the_test_file() -> None:
    sentences = read_conllu(SENTENCES)
    assert len(sentences) == 24
    first = sentences[0]
    assert first.text == "The cat chased the small mouse." and first.line == 1
    assert [(w.form, w.head, w.deprel) for w in first.words[1:3]] == [
        ("cat", 3, "nsubj"),
        ("chased", 0, "root"),
    ]
    for sentence in sentences:
        for word in sentence.words:
            assert sentence.text[word.start : word.stop] == word.form


def test_words_of_a_multiword_token_share_it_or_have_their_own_letters() -> None:
    joined = parse_conllu(
        tree("1 I 4 nsubj", "2-3 don't _ _", "2 do 4 aux", "3 n't 4 advmod", "4 sleep 0 root")
    )[0]
    assert joined.text == "I don't sleep"
    assert [(w.start, w.stop) for w in joined.words] == [(0, 1), (2, 4), (4, 7), (8, 13)]
    apart = parse_conllu(
        tree(
            "1-2 du _ _ SpaceAfter=No", "1 de 3 case SpaceAfter=Yes", "2 le 3 det", "3 nord 0 root"
        )
    )[0]
    assert apart.text == "dunord"
    assert [(w.start, w.stop) for w in apart.words] == [(0, 2), (0, 2), (2, 6)]


def test_empty_nodes_have_no_letters_and_no_number_of_their_own() -> None:
    found = parse_conllu(
        tree("0.1 I _ _", "1 sleep 0 root", "1.1 and _ _", "1.2 and _ _", "2 here 1 advmod")
    )[0]
    assert found.text == "sleep here" and [w.head for w in found.words] == [0, 1]


def test_what_the_format_leaves_open() -> None:
    """A byte order mark, Windows line ends, several empty lines, no line end after the last word,
    spaces in a form.
    """
    content = (
        b"\xef\xbb\xbf"
        + b"\n\n"
        + tree(*GOOD).replace(b"\n", b"\r\n")
        + b"\r\n\r\n"
        + tree(*GOOD).rstrip(b"\n")
    )
    assert [s.text for s in parse_conllu(content)] == ["Cats sleep."] * 2
    spaced = parse_conllu(
        tree("# text = 100 000 sheep", "1\t100 000\t_\t_\t_\t_\t2\tnummod\t_\t_", "2 sheep 0 root")
    )[0]
    assert spaced.words[0].form == "100 000"
    odd = parse_conllu(tree("1\ta\x85b\u2028c\t_\t_\t_\t_\t0\troot\t_\t_"))[0]
    assert odd.words[0].form == "a\x85b\u2028c", "only a line feed ends a line"


def rows(changed: str, at: int = 1) -> bytes:
    """GOOD with one row replaced."""
    return tree(*GOOD[: at - 1], changed, *GOOD[at:])


REFUSED = {
    "empty": (b"", 1, r"the file ends without a sentence; expected CoNLL-U: ten columns a word"),
    "empty lines": (b"\n\n\n", 4, r"the file ends without a sentence"),
    "not UTF-8": (
        tree(*GOOD) + b"# caf\xe9\n",
        4,
        r"byte 0xe9 isn't UTF-8; convert the file, for instance: iconv",
    ),
    "nine columns": (
        rows("1\tCats\t_\t_\t_\t_\t2\tnsubj\t_"),
        1,
        r"'1\\tCats.* has 9 columns, expected 10 with a tab between",
    ),
    "eleven columns": (
        rows("2\tsleep\t_\t_\t_\t_\t0\troot\t_\t_\t_", 2),
        2,
        r".* has 11 columns, expected 10",
    ),
    "spaces": (
        b"1   Cats  _ _ _ _ 2 nsubj _ _\n",
        1,
        r".* has 1 column, .*DEPS MISC; its columns are separated by spaces",
    ),
    "a line of a space": (tree(*GOOD, "") + b" \n", 5, r"' ' has 1 column, expected 10"),
    "an empty column": (
        rows("1\tCats\t\t_\t_\t_\t2\tnsubj\t_\t_"),
        1,
        r"LEMMA is '', expected something .* or _ for nothing",
    ),
    "a space at the end": (
        rows("1\tCats\t_\t_\t_\t_\t2\tnsubj\t_\t_ "),
        1,
        r"MISC is '_ ', expected something without spaces",
    ),
    "an ID left out": (
        rows("4 . 2 punct", 3),
        3,
        r"ID is '4', expected 3: the words of a sentence are numbered 1, 2, 3",
    ),
    "an ID twice": (
        rows("1 sleep 0 root", 2),
        2,
        r"ID is '1', expected 2: .*, with an empty line between sentences",
    ),
    "an ID of zero": (rows("0 Cats 2 nsubj"), 1, r"ID is '0', expected 1"),
    "an ID of letters": (rows("one Cats 2 nsubj"), 1, r"ID is 'one', expected 1"),
    "an ID of other digits": (rows("١ Cats 2 nsubj"), 1, r"ID is '١', expected 1"),
    "an empty node misnumbered": (
        tree(GOOD[0], "1.2 and _ _", *GOOD[1:]),
        2,
        r"ID is '1\.2' after word 1, expected 1\.1",
    ),
    "an empty node elsewhere": (
        tree(GOOD[0], "3.1 and _ _", *GOOD[1:]),
        2,
        r"ID is '3\.1' after word 1, expected 1\.1",
    ),
    "a range that ends before": (
        tree("1-1 Cats _ _", *GOOD),
        1,
        r"ID is '1-1' after word 0; expected a multiword token to",
    ),
    "a range elsewhere": (
        tree("2-3 Cats _ _", *GOOD),
        1,
        r"ID is '2-3' after word 0; expected .* at the next word, to hold two",
    ),
    "ranges that overlap": (
        tree("1-2 Catsleep _ _", GOOD[0], "2-3 sleep. _ _", *GOOD[1:]),
        3,
        r"ID is '2-3' after word 1 inside the multiword token of line 1; expected .* share none",
    ),
    "a range beyond the end": (
        tree(*GOOD[:2], "3-4 .. _ _", GOOD[2]),
        3,
        (
            r"the multiword token ends with word 4, but the sentence ends with word 3; expected"
            r" all its"
        ),
    ),
    "no head": (
        rows("1 Cats _ nsubj"),
        1,
        r"HEAD is '_', expected the number of the word that 'Cats' depends on, or 0",
    ),
    "a negative head": (rows("1 Cats -1 nsubj"), 1, r"HEAD is '-1', expected the number"),
    "a head of many digits": (
        rows(f"1 Cats {'9' * 5000} nsubj"),
        1,
        r"HEAD is '9+\.\.\.', expected the number",
    ),
    "a head out of range": (
        rows("1 Cats 4 nsubj"),
        1,
        r"HEAD is 4, expected another word of the sentence, 1 to 3, or 0",
    ),
    "its own head": (
        rows("1 Cats 1 nsubj"),
        1,
        r"HEAD is 1, expected another word of the sentence, 1 to 3",
    ),
    "two roots": (
        rows("3 . 0 root", 3),
        3,
        r"HEAD is 0 as in line 2; expected one root a sentence",
    ),
    "a circle": (
        tree("1 a 2 dep", "2 b 3 dep", "3 c 2 dep", "4 d 0 root"),
        1,
        r"HEAD leads round a cycle \(2 -> 3 -> 2\); " r"expected every word to lead to the root",
    ),
    "no root": (tree("1 a 2 dep", "2 b 1 dep"), 1, r"HEAD leads round a cycle \(1 -> 2 -> 1\)"),
    "no relation": (
        rows("1 Cats 2 _"),
        1,
        r"DEPREL is '_', expected a relation in lower case, such as nsubj or nsubj:pass",
    ),
    "a relation in capitals": (rows("1 Cats 2 NSUBJ"), 1, r"DEPREL is 'NSUBJ', expected"),
    "a relation with markup": (rows("1 Cats 2 <b>"), 1, r"DEPREL is '<b>', expected"),
    "a relation called all": (rows("1 Cats 2 all"), 1, r"DEPREL is 'all', expected"),
    "a root with a head": (
        rows("1 Cats 2 root"),
        1,
        r"HEAD is 2 and DEPREL is 'root'; expected root where HEAD is 0, and only",
    ),
    "a root by another name": (rows("2 sleep 0 nsubj", 2), 2, r"HEAD is 0 and DEPREL is 'nsubj'"),
    "a comment in a sentence": (
        tree(GOOD[0], "# so", *GOOD[1:]),
        2,
        r"the comment '# so' is among the words of a sentence",
    ),
    "comments alone": (
        tree(*GOOD, "", "# newdoc", "", *GOOD),
        5,
        r"a sentence without words; expected comments before",
    ),
    "another text": (
        tree("# sent_id = 1", "# text = Cats slept.", *GOOD),
        2,
        (
            r"text has 'pt\.' where the words have 'ep\.' \(character 9\); expected the same: check"
            r" FORM, and SpaceAfter"
        ),
    ),
    "a space too many": (
        tree("# text = Cats sleep .", *GOOD),
        1,
        r"text has ' \.' where the words have '\.' \(character 11\)",
    ),
    "two texts": (
        tree("# text = Cats sleep.", "#text= Cats sleep.", *GOOD),
        2,
        r"text is given a second time, after line 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    content, line, words = REFUSED[case]
    with pytest.raises(ValueError) as error:
        parse_conllu(content, "some.conllu")
    assert re.match(rf"some\.conllu, line {line}: {words}", str(error.value)), str(error.value)
    assert len(str(error.value)) < 400


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"path='.*x\.conllu': there is no such file; give a CoNLL-U file"
    ):
        read_conllu(tmp_path / "x.conllu")
    with pytest.raises(ValueError, match=r"is a folder; give a CoNLL-U file in it"):
        read_conllu(tmp_path)


def test_a_long_chain_is_quickly_no_circle() -> None:
    count = 20_000
    chain = tree(*(f"{n} a {n + 1} dep" for n in range(1, count)), f"{count} a 0 root")
    assert len(parse_conllu(chain)[0].words) == count


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A few sentences of the test file, with bytes, fields and lines changed, moved or left out."""
    content = b"\n\n".join(
        draw(st.lists(st.sampled_from(VALID.split(b"\n\n")), min_size=1, max_size=3))
    )
    for _ in range(draw(st.integers(1, 4))):
        separator = draw(st.sampled_from([b"\n", b"\t", None]))
        parts = content.split(separator) if separator else [bytes([byte]) for byte in content]
        if not parts:
            break
        at = draw(st.integers(0, len(parts) - 1))
        other = draw(
            st.one_of(
                st.sampled_from(parts),
                st.sampled_from(
                    [
                        b"",
                        b"_",
                        b"0",
                        b"1",
                        b"7",
                        b"2-3",
                        b"1-2",
                        b"1.1",
                        b"root",
                        b"#",
                        b"# text = ",
                        b"SpaceAfter=No",
                        b"\xff",
                        b"\r",
                        b"-1",
                        b"99999999999999999999",
                    ]
                ),
                st.binary(max_size=3),
            )
        )
        parts[at : at + draw(st.integers(0, 1))] = [other] if draw(st.booleans()) else []
        content = (separator or b"").join(parts)
    return content


@given(mutated())
def test_whatever_a_file_holds_it_is_read_or_refused_with_its_line(content: bytes) -> None:
    refused, sentences = "", []
    try:
        sentences = parse_conllu(content, "x")
    except ValueError as error:
        refused = str(error)
    match = re.match(r"x, line (\d+): .{10,}", refused, re.DOTALL)
    assert bool(match) != bool(sentences), refused
    assert match is None or 1 <= int(match[1]) <= content.count(b"\n") + 1
    for sentence in sentences:
        assert sum(word.head == 0 for word in sentence.words) == 1
        assert all(0 <= word.head <= len(sentence.words) for word in sentence.words)
        for a, b in zip(sentence.words, sentence.words[1:]):
            assert (a.start, a.stop) == (b.start, b.stop) or a.stop <= b.start
