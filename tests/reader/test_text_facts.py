"""An empty column says why: each cause by itself, and what each piece of advice leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import multihead
from multihead.reader.context import TokenContext
from multihead.reader.text_facts import TextFacts
from small import llama

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
)


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    return tf.BertModel(tf.BertConfig(**SIZES, **options)).eval()


def masked(allowed: torch.Tensor) -> torch.Tensor:
    return torch.zeros(allowed.shape)[None, None].masked_fill(
        ~allowed, torch.finfo(torch.float32).min
    )


def reasons(model: Any, special: Any = None, **inputs: Any) -> Any:
    with multihead.reading(model, special_ids=special, verify=False) as session, torch.no_grad():
        model(**inputs)
    return session.table().reasons


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers])


def test_facts_add_up_over_calls() -> None:
    facts = TextFacts()
    true = torch.ones(1, 3, dtype=torch.bool)
    for row, special, copied, repeated in (
        ((3, 4, 5), False, False, False),
        ((3, 3, 5), False, True, False),
        ((3, -1, -1), True, True, False),  # padding has no copies
        ((3, 4, 3), False, True, True),
        ((3, 4, 5), False, True, True),
    ):
        marks = torch.tensor([[special, False, False]])
        context = TokenContext(
            true, true, torch.zeros(1), ids(*row), ids(*row), ids(*row), marks, 0
        )
        facts.add(context, torch.ones(1, 1, 3))
        assert (facts.copied, facts.repeated) == (copied, repeated)
    assert facts.any_query and facts.special and facts.longest == facts.most_queries == 3
    thrice = TextFacts()
    row = ids(3, 3, 3)
    thrice.add(
        TokenContext(true, true, torch.zeros(1), row, row, row, None, 0), torch.zeros(1, 1, 3)
    )
    assert thrice.repeated and not thrice.any_query and not thrice.special


# --- special tokens


def test_special_tokens_that_are_not_known() -> None:
    model, text = bert(), ids(1, 5, 9, 2)
    why = reasons(model, input_ids=text)["special"]
    assert "the ids of special tokens aren't known" in why and "special_ids=" in why
    # the advice, followed
    assert "special" not in reasons(model, [1, 2], input_ids=text)
    tokenizer = multihead.load_builtin()[1]
    assert "special" not in reasons(model, tokenizer.all_special_ids, input_ids=ids(0, 5, 9))
    table = multihead.read(model, [{"input_ids": ids(0, 5, 9)}], tokenizer=tokenizer)
    assert table.count("special").all()


def test_special_tokens_that_are_not_there_or_masked() -> None:
    model = llama()
    assert reasons(model, [1], input_ids=ids(5, 9))["special"] == "no special token is in this text"
    allowed = torch.eye(4, dtype=torch.bool)
    allowed[3, 3], allowed[3, 2] = False, True  # the last key is special, and nothing may read it
    why = reasons(model, [7], input_ids=ids(5, 9, 6, 7), attention_mask=masked(allowed))["special"]
    assert why == "special tokens are in this text, but the mask lets no query read one"


def test_embeddings_have_no_ids() -> None:
    model = llama()
    why = reasons(model, [1], inputs_embeds=torch.randn(1, 4, 24))
    for name in ("special", "duplicate", "induction"):
        assert "no token ids" in why[name], name


# --- copies


@pytest.mark.parametrize(
    ("text", "duplicate", "induction"),
    [
        (
            ids(5, 6, 7),
            "no token is in this text twice",
            "no token is in this text twice, with one in between",
        ),
        (ids(5, 5, 7), None, "no token is in this text twice, with one in between"),
        (ids(5, 6, 5), None, None),
        (ids(5, 5, 5), None, None),
    ],
)
def test_tokens_without_copies(text: Any, duplicate: str | None, induction: str | None) -> None:
    why = reasons(llama(), [1], input_ids=text)
    assert why.get("duplicate") == duplicate and why.get("induction") == induction


def test_copies_that_the_mask_hides() -> None:
    band = torch.ones(6, 6).tril().triu(-1).bool()
    why = reasons(llama(), [1], input_ids=ids(5, 6, 7, 5, 6, 7), attention_mask=masked(band))
    expected = "tokens are in this text twice, but the mask lets no query read that far back"
    assert why["duplicate"] == why["induction"] == expected
    assert "previous" not in why


# --- neighbours


def test_one_token_has_no_neighbours() -> None:
    why = reasons(llama(), [1], input_ids=ids(5))
    for name in ("previous", "entropy_ratio", "logit"):
        assert why[name] == "each text is one token long", name
    assert reasons(bert(), [1], input_ids=ids(5))["next"] == "each text is one token long"


def test_neighbours_that_the_mask_hides() -> None:
    alone = torch.eye(4, dtype=torch.bool)
    why = reasons(llama(), [1], input_ids=ids(5, 6, 7, 5), attention_mask=masked(alone))
    assert why["previous"] == "the mask forbids it: no query may read the token before it"
    assert why["entropy_ratio"] == "the mask forbids it: no query may read two keys or more"
    others = torch.ones(4, 4).tril(-1).bool()
    others[0, 1] = True
    why = reasons(llama(), [1], input_ids=ids(5, 6, 7, 5), attention_mask=masked(others))
    assert why["self"] == "the mask forbids it: no query may read itself"
    none_first = torch.ones(4, 4).tril().triu(0).bool()
    none_first[0] = torch.tensor([False, True, False, False])
    why = reasons(llama(), [1], input_ids=ids(5, 6, 7, 5), attention_mask=masked(none_first))
    assert "no query may read the first token" in why["first"]


def test_the_next_token_of_a_causal_model() -> None:
    assert "causal" in reasons(llama(), [1], input_ids=ids(5, 6, 7))["next"]


def test_received_names_how_many_queries_there_are() -> None:
    why = reasons(llama(), [1], input_ids=ids(*range(5, 15)))["received"]
    assert why.startswith("no key has 64 queries in one pass: the texts, or the windows")
    band = torch.ones(64, 64).tril().triu(-3).bool()
    text = torch.randint(3, 50, (1, 64))
    why = reasons(llama(), [1], input_ids=text, attention_mask=masked(band))["received"]
    assert why == "the mask lets fewer than 64 queries read any one key"


# --- queries


def test_queries_that_are_all_padding() -> None:
    mask = torch.zeros(1, 4, dtype=torch.int64)
    why = reasons(bert(), [1], input_ids=ids(5, 6, 7, 5), attention_mask=mask)
    assert why["entropy"] == why["duplicate"] == why["special"]
    assert why["entropy"] == "no query counts here: all are padding, or may read nothing"


def test_heads_that_are_replaced_contribute_nothing() -> None:
    model = llama()
    every = [f"L{layer}.H{head}" for layer in range(2) for head in range(3)]
    with multihead.ablate_heads(model, every):
        why = reasons(model, [1], input_ids=ids(5, 6, 7, 5))
    for name in ("cancellation", "contribution:self", "reach"):
        assert why[name] == "the contributions of all keys are 0, or the heads are replaced", name
    assert "self" not in why


# --- the probe, and what is asked for


def why_no_probe(model: Any, texts: Any, **options: Any) -> str:
    return multihead.read(model, texts, **options).reasons["probe:induction"]


def test_why_there_was_no_probe() -> None:
    model, tokenizer = multihead.load_builtin()
    assert "turned off (probe=False)" in why_no_probe(
        model, "the cat", tokenizer=tokenizer, probe=False
    )
    assert "BertModel isn't: queries read later" in why_no_probe(bert(), {"input_ids": [5, 6, 7]})
    assert "no text of two tokens" in why_no_probe(llama(), {"input_ids": [5]})
    embedded = {"inputs_embeds": torch.randn(1, 4, 24)}
    assert "the model was given none; probe=True runs it" in why_no_probe(llama(), embedded)
    probed = multihead.read(llama(), embedded, probe=True)  # the advice, followed
    assert probed.count("probe:induction").all()
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    assert "TransformerEncoderLayer is none" in why_no_probe(layer, {"src": torch.randn(1, 4, 8)})
    t5 = tf.T5Model(
        tf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    given = {"input_ids": [5, 6], "decoder_input_ids": [5, 6]}
    assert "T5Model is none" in why_no_probe(t5, given)


def test_the_probe_that_a_reading_in_a_loop_leaves_out() -> None:
    why = reasons(llama(), [1], input_ids=ids(5, 6, 7))["probe:induction"]
    assert why == "the probe was not run; multihead.read runs it on causal text models"
    assert multihead.read(llama(), {"input_ids": [5, 6, 7]}).count("probe:induction").all()
    assert "isn't" in reasons(bert(), [1], input_ids=ids(5, 6, 7))["probe:induction"]


def test_why_there_is_no_copying() -> None:
    def why(model: Any, *numbers: int) -> str:
        table = multihead.read(
            model, {"input_ids": list(numbers)}, statistics="copying", probe=False
        )
        return table.reasons["copying"]

    assert "no text of two tokens or more" in why(llama(), 5)
    masked_model = tf.BertForMaskedLM(tf.BertConfig(**SIZES)).eval()
    assert why(masked_model, 5, 6, 7)
    headless = tf.LlamaModel(llama().config).eval()
    assert why(headless, 5, 6) == "the model has no linear unembedding: no language-modelling head"


@pytest.mark.parametrize("name", ["copying", "importance", "effect", "effect_mean", "nearest"])
def test_what_is_on_request_is_had_on_request(name: str) -> None:
    model, tokenizer = multihead.load_builtin()
    table = multihead.read(model, "the cat and the dog", tokenizer=tokenizer, probe=False)
    assert f"multihead.read(..., statistics=[{name!r}])" in table.reasons[name]
    asked = multihead.read(
        model, "the cat and the dog", tokenizer=tokenizer, probe=False, statistics=[name]
    )
    assert asked.count(name).any() and name not in asked.reasons


# --- flags of a config


FLAGS = [
    {"output_attentions": True, "attn_implementation": "eager"},
    {"output_hidden_states": True},
    {"return_dict": False},
    {"output_attentions": True, "return_dict": False, "attn_implementation": "eager"},
]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_flags_of_the_config_change_nothing(kind: str, flags: dict[str, Any]) -> None:
    if kind == "llama":  # transformers itself can't run it with return_dict=False
        flags = {name: flag for name, flag in flags.items() if name != "return_dict"}
    make = {"bert": bert, "llama": llama}[kind]
    plain, model = make(), make(**flags)
    text = {"input_ids": ids(1, 5, 9, 7, 5, 9)}
    want = multihead.read(plain, [text], special_ids=[1])
    table = multihead.read(model, [text], special_ids=[1])
    for column in want.columns:
        assert table.value(column) == pytest.approx(
            want.value(column), rel=1e-4, abs=1e-6, nan_ok=True
        )
    assert table.reasons == want.reasons
    assert any("output_attentions=True" in note for note in table.meta["notes"]) == (
        "output_attentions" in flags
    )
    found = multihead.read_maps(model, text, "L0.H0").weights
    assert found == pytest.approx(multihead.read_maps(plain, text, "L0.H0").weights, abs=1e-5)
    with multihead.reading(model, special_ids=[1]) as session, torch.no_grad():
        model(**text)
    assert session.table().value("self") == pytest.approx(want.value("self"), rel=1e-4)
    assert model.config.output_attentions is flags.get("output_attentions", False)


def test_flags_leave_losses_generation_and_caches_right() -> None:
    tokenizer = multihead.load_builtin()[1]
    sizes = SIZES | {"vocab_size": len(tokenizer), "is_decoder": True}
    model = tf.BertLMHeadModel(tf.BertConfig(**sizes, bos_token_id=0, eos_token_id=1)).eval()
    text = "the cat and the dog and the cat sat on the mat"
    options: dict[str, Any] = {"tokenizer": tokenizer, "probe": False}
    names = ["importance", "effect"]
    want = multihead.read(model, text, statistics=names, **options)
    steps = multihead.read(model, text, generate=3, **options)
    losses = multihead.pruning.evaluate(model, text, tokenizer=tokenizer)
    model.config.return_dict = False
    table = multihead.read(model, text, statistics=names, **options)
    for name in names:
        assert table.value(name) == pytest.approx(want.value(name), rel=1e-4, abs=1e-6)
    again = multihead.read(model, text, generate=3, **options)
    assert again.value("duplicate") == pytest.approx(steps.value("duplicate"), rel=1e-5)
    assert multihead.pruning.evaluate(model, text, tokenizer=tokenizer).mean == losses.mean
    # a loop of a user's own, in two pieces with a cache: tuples are followed
    numbers = torch.tensor([tokenizer(text)["input_ids"]])
    with multihead.reading(model) as session, torch.no_grad():
        _, cache = model(numbers[:, :5], use_cache=True)[:2]
        model(numbers[:, 5:], past_key_values=cache)
    assert session.table().count("duplicate").all()


def test_weights_asked_for_in_the_call_are_refused_with_what_helps() -> None:
    model, text = bert(attn_implementation="eager"), {"input_ids": ids(1, 5, 9)}
    session = multihead.reading(model)
    with (
        session,
        torch.no_grad(),
        pytest.raises(ValueError, match="leave output_attentions=True out"),
    ):
        model(**text, output_attentions=True)
    with multihead.reading(model) as other, torch.no_grad():  # both pieces of advice, followed
        model(**text)
    assert other.table().count("self").all()
    found = multihead.read_maps(model, text | {"output_attentions": True}, "L0.H0")
    assert found.weights.shape == (3, 3)


def test_half_precision_gets_the_hint_at_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.reader.verify import require_equal

    wrong = torch.ones(4)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=r"load the model with dtype=torch\.float32"):
            require_equal(wrong.to(dtype), 2 * wrong.to(dtype), "attn", " differs")
    with pytest.raises(ValueError) as caught:
        require_equal(wrong, 2 * wrong, "attn", " differs")
    assert "float32" not in str(caught.value) and "please report" in str(caught.value)


def test_an_unknown_keyword_is_no_reason_to_use_eager_while_reading(tmp_path: Path) -> None:
    from multihead.models.transformers import ATTEND, forward

    module, x = torch.nn.Module(), torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="Use attn_implementation='eager' for this model"):
        forward(module, x, x, x, None, strange=1)
    module.__dict__[ATTEND] = lambda call: None
    with pytest.raises(ValueError, match="So this model can't be read; please report it"):
        forward(module, x, x, x, None, strange=1)
