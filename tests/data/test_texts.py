"""Texts to tensors: what is padded, cut and marked, and the words of every refusal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from multihead.data.texts import builtin_text, encode, max_positions, read_text

WORDS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "?": 5}


def small_tokenizer(special: bool = True, **settings: Any) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(WORDS, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    if special:
        ends = [("<s>", 0), ("</s>", 1)]
        words.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", **settings)


# --- reading ---


def test_text_from_a_file_a_prompt_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffWörter\r\n".encode())
    assert read_text(file) == read_text(str(file)) == "Wörter\r\n"
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO("Größe".encode()), encoding="latin1")
    )
    assert read_text("-") == "Größe"
    assert read_text(prompt="-") == "-"


def test_built_in_text_is_there() -> None:
    assert len(builtin_text().split()) > 50


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; give a text with at least one word"),
        (b" \n\t ", "is empty"),
        (
            "Größe".encode("latin1"),
            "is not UTF-8 text: byte 2 is 0xf6. If it is text in another encoding, convert it",
        ),
        (b"ab\0c", "is not text: byte 2 is 0"),
    ],
)
def test_files_that_are_no_text(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_text(tmp_path / "text")
    assert f"text={str(tmp_path / 'text')!r} {words}" in str(caught.value)


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"text='missing.txt': there is no such file; give a text file"
    ):
        read_text("missing.txt")
    with pytest.raises(ValueError, match="is a folder; give a text file in it"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match=r"prompt='  ' is empty"):
        read_text(prompt="  ")
    with pytest.raises(ValueError, match="text=None and prompt=None: give exactly one"):
        read_text()
    with pytest.raises(ValueError, match="text='a' and prompt='b': give exactly one"):
        read_text("a", prompt="b")


# --- encoding ---


def test_batches_are_padded_on_the_right_and_real_tokens_marked() -> None:
    encoded = encode(
        ["a", "a b c", "b b"], small_tokenizer(pad_token="c", padding_side="left"), batch_size=2
    )
    first, second = encoded.batches
    assert first["input_ids"].tolist() == [[0, 2, 1, 4, 4], [0, 2, 3, 4, 1]]
    assert first["attention_mask"].tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1],
    ]  # the "c" of the second text is real
    assert second["input_ids"].tolist() == [[0, 3, 3, 1]]
    assert {tensor.dtype for batch in encoded.batches for tensor in batch.values()} == {torch.int64}
    assert encoded.notes == []


def test_tokenizer_without_padding_token() -> None:
    (batch,) = encode(["a b", "a"], small_tokenizer(special=False)).batches
    assert batch["input_ids"].tolist() == [[2, 3], [2, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_one_text_is_not_taken_for_its_letters() -> None:
    (batch,) = encode("a b c", small_tokenizer()).batches
    assert batch["input_ids"].tolist() == [[0, 2, 3, 4, 1]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_long_text_is_cut_at_the_limit_and_said(side: str) -> None:
    tokenizer = small_tokenizer(truncation_side=side)
    encoded = encode(["c " * 1232, "a b c"], tokenizer, limit=4)
    (batch,) = encoded.batches
    assert batch["input_ids"].tolist() == [[0, 4, 4, 1], [0, 2, 3, 1]]
    assert encoded.notes == [
        "text 1: 1,234 tokens, the model has 4 positions; read the first 4",
        "text 2: 5 tokens, the model has 4 positions; read the first 4",
    ]
    assert tokenizer.truncation_side == side
    assert encode("a b", tokenizer, limit=4).notes == []


def test_long_text_is_refused_on_request() -> None:
    with pytest.raises(ValueError) as caught:
        encode(["a", "a b c"], small_tokenizer(), limit=4, on_long="refuse")
    assert "texts[1]='a b c' has 5 tokens, the model has 4 positions; shorten or split it" in str(
        caught.value
    )
    assert "on_long='cut'" in str(caught.value)
    assert len(encode(["a", "a b"], small_tokenizer(), limit=4, on_long="refuse").batches) == 1


@pytest.mark.parametrize(
    ("texts", "settings", "words"),
    [
        ([], {}, "texts=[] holds no text"),
        (["a", " \n"], {}, r"texts[1]=' \n' is empty"),
        (["a", "a \ud800"], {}, "texts[1]='a \\ud800' holds half a letter"),
        ("a", {"batch_size": 0}, "batch_size=0: expected at least 1"),
        ("a", {"on_long": "chop"}, "on_long='chop': expected 'cut' or 'refuse'"),
        (
            "a",
            {"limit": 2},
            (
                "limit=2 leaves no room for text: this tokenizer adds 2 special tokens; give at"
                " least 3"
            ),
        ),
        ("a", {"tokenizer": None}, "tokenizer=None: this model came without one"),
    ],
)
def test_bad_arguments(texts: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        encode(texts, **{"tokenizer": small_tokenizer(), **settings})
    assert words in str(caught.value)


def test_text_without_tokens(minilm_dir: Path) -> None:
    with pytest.raises(ValueError, match="gives no tokens"):
        encode(
            "\u200b", AutoTokenizer.from_pretrained(minilm_dir)
        )  # a space of no width: BERT drops it


def test_real_tokenizer(minilm_dir: Path) -> None:
    # Its file asks for padding to 128 tokens and for truncation there; neither may happen unasked.
    tokenizer = AutoTokenizer.from_pretrained(minilm_dir)
    config = AutoConfig.from_pretrained(minilm_dir)
    encoded = encode(
        ["the head", "head " * 700], tokenizer, limit=max_positions(config, tokenizer), batch_size=1
    )
    assert [batch["input_ids"].shape[1] for batch in encoded.batches] == [4, 512]
    assert encoded.batches[1]["input_ids"][0, [0, -1]].tolist() == [
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
    ]
    assert encoded.notes == ["text 2: 702 tokens, the model has 512 positions; read the first 512"]


# --- positions ---

SIZES: dict[str, Any] = dict(
    vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
)
TABLES = {
    "bert": SIZES, "electra": SIZES | {"embedding_size": 8}, "roberta": SIZES, "camembert": SIZES,
    "xlm-roberta": SIZES, "xlm-roberta-xl": SIZES, "roberta-prelayernorm": SIZES, "data2vec-text": SIZES,
    "ibert": SIZES, "mpnet": SIZES, "lilt": SIZES | {"hidden_size": 24},
    "xmod": SIZES | {"languages": ["en"], "default_language": "en"},
    "markuplm": SIZES, "layoutlmv3": SIZES | {"visual_embed": False, "coordinate_size": 2, "shape_size": 0},
    "luke": SIZES | {"entity_vocab_size": 5, "entity_emb_size": 8},
    "gpt2": dict(vocab_size=50, n_embd=8, n_layer=1, n_head=1, n_positions=12),
    "opt": SIZES | {"word_embed_proj_dim": 8, "ffn_dim": 8},
    "distilbert": dict(vocab_size=50, dim=8, n_layers=1, n_heads=1, hidden_dim=8),
}  # fmt: skip


@pytest.mark.parametrize("family", TABLES)
def test_number_of_positions_is_what_the_model_can_take(family: str) -> None:
    config = AutoConfig.for_model(family, **TABLES[family])
    if family != "gpt2":
        config.max_position_embeddings = 12
    config.intermediate_size = 8
    model = AutoModel.from_config(config).eval()
    limit = max_positions(config)
    assert limit is not None
    with torch.no_grad():
        model(input_ids=torch.full((1, limit), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, limit + 1), 7))


def test_number_of_positions_from_config_and_tokenizer() -> None:
    long, short = small_tokenizer(), small_tokenizer(model_max_length=100)
    config = transformers.LlamaConfig(max_position_embeddings=200)
    assert max_positions(config) == max_positions(config, long) == 200
    assert max_positions(config, short) == 100
    endless = transformers.T5Config()
    assert max_positions(endless, long) is None
    assert max_positions(endless, short) == 100
    assert max_positions(transformers.XLNetConfig()) is None  # its config says -1
    assert max_positions(transformers.LlavaConfig(text_config=config)) == 200
