"""A reading of every family agrees with transformers' own eager attention, and leaves the outputs
alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from families import (
    FAMILIES,
    SOME,
    SPECIAL,
    WORDS,
    Batch,
    Family,
    batches_of,
    call_of,
    is_cross,
    model_of,
    real_outputs,
    sequences,
    stored_calls,
    twin,
)
from multihead.reader.statistics.updates import Received, ReceivedAt
from oracles.compare import differences
from oracles.statistics import NAMES, OFFSETS, OWN, RECEIVED, TOKENS, Call, Statistics, statistics

BY_NAME = {family.name: family for family in FAMILIES}
CASES = [
    pytest.param(family, padding, id=f"{family.name}-{padding}")
    for family in FAMILIES
    for padding in family.paddings()
]
PIECES = (
    (0, 4),
    *((n, n + 1) for n in range(4, 9)),
    (9, 99),
)  # of a text that is read with a cache


READERS = 6  # of a key that counts in `received`: texts are short here
ALL = (*NAMES, *RECEIVED, *OWN)


class Numerals:
    """A tokenizer of sorts: what each token says is its number."""

    all_special_ids: tuple[int, ...] = ()
    pad_token_id = unk_token_id = bos_token_id = eos_token_id = cls_token_id = sep_token_id = None

    def decode(self, ids: list[int], **options: Any) -> str:
        return str(*ids)


class Number(multihead.Statistic):
    name, formula, meaning = "number", "sum_j A_ij cos(j + 3b)", "a value for each key"

    def key_values(self, context: Any) -> torch.Tensor:
        texts, keys = context.key_valid.shape
        return torch.cos(torch.arange(keys) + 3.0 * torch.arange(texts)[:, None])


class Squares(multihead.Statistic):
    """On two rows of three."""

    name, formula, meaning = "squares", "sum_j A_ij^2 cos(j)", "a value for each query"

    def rows(self, block: Any) -> torch.Tensor:
        keys = torch.arange(block.keys.start, block.keys.stop)
        found = (block.weights.square() * keys.cos()).sum(-1)
        third = torch.arange(block.rows.start, block.rows.stop) % 3 == 0
        return found.masked_fill(third, torch.nan)


@cache
def expected(family: Family, padding: str) -> dict[str, Statistics]:
    return twin(family, model_of(family), batches_of(family, padding), readers=READERS)


@cache
def table_of(family: Family, padding: str) -> Any:
    own = [Number(), Squares(), Received(readers=READERS), ReceivedAt(readers=READERS)]
    return read(
        family,
        batches_of(family, padding),
        tokenizer=Numerals(),
        classes={"some": f"^({'|'.join(map(str, SOME))})$"},
        statistics=own,
    )


def read(family: Family, batches: list[Batch], **options: Any) -> Any:
    special = {} if family.inputs == "image" else {"special_ids": set(SPECIAL)}
    return multihead.read(model_of(family), batches, **({"probe": False} | special | options))


@pytest.mark.parametrize(("family", "padding"), CASES)
def test_outputs_are_those_without_reading(family: Family, padding: str) -> None:
    model = model_of(family)
    before = model.config._attn_implementation
    for batch in batches_of(family, padding):
        plain = real_outputs(model, batch)
        with multihead.reading(model, verify=False):  # this test compares, not the reading itself
            under_reading = real_outputs(model, batch)
        np.testing.assert_allclose(under_reading, plain, rtol=0, atol=1e-4 * np.abs(plain).max())
        np.testing.assert_array_equal(real_outputs(model, batch), plain)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(("family", "padding"), CASES)
def test_statistics_are_those_of_stored_probabilities(family: Family, padding: str) -> None:
    table = table_of(family, padding)
    # What is special among an encoder's tokens is left open where a decoder reads them.
    own = {site: found for site, found in expected(family, padding).items() if not is_cross(site)}
    across = {site: found for site, found in expected(family, padding).items() if is_cross(site)}
    found = differences(table, own, ALL) + differences(
        table, across, [name for name in ALL if "special" not in name]
    )
    found = [line for line in found if "only on one side" not in line]
    sites = {(row["site"], row["index"]) for row in table.rows()}
    assert sites == {
        (site, index)
        for site, s in (own | across).items()
        for index in range(len(s.counts["norm"]))
    }
    assert not found, "\n".join([f"{len(found)} differences", *found[:20]])


@pytest.mark.parametrize(("family", "padding"), CASES)
def test_shares_of_a_site_add_up_to_one(family: Family, padding: str) -> None:
    shares: dict[str, float] = defaultdict(float)
    for row in table_of(family, padding).rows():
        shares[row["site"]] += row["share"]
    assert shares.keys() == expected(family, padding).keys()
    for share in shares.values():
        assert share == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_loop_of_ones_own_gives_the_same_table(family: Family) -> None:
    batches = batches_of(family, family.paddings()[-1])
    options = {} if family.inputs == "image" else {"special_ids": set(SPECIAL)}
    with multihead.reading(model_of(family), **options) as reading, torch.no_grad():
        for batch in batches:
            model_of(family)(**batch)
    own, whole = reading.table().rows(), table_of(family, family.paddings()[-1]).rows()
    assert len(own) == len(whole)
    for mine, theirs in zip(own, whole, strict=True):
        assert (mine["head"], mine["site"]) == (theirs["head"], theirs["site"])
        for name in NAMES:
            assert mine[name] == (
                pytest.approx(theirs[name], rel=1e-6, abs=1e-8)
                if theirs[name] is not None
                else None
            )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_places_of_heads(family: Family) -> None:
    """The label, the key/value head and the kind of every head, from the stored calls."""
    batches = batches_of(family, "none")[:1]
    rows = {(row["site"], row["index"]): row for row in table_of(family, "none").rows()}
    labels = set()
    for stored, _ in stored_calls(model_of(family), batches):
        heads, groups = stored.query.shape[1], stored.key.shape[1]
        layer = next(int(part) for part in stored.site.split(".") if part.isdigit())
        part = "encoder." if family.inputs in ("both", "sound") else ""
        part = "decoder." if part and "decoder." in stored.site else part
        for head in range(heads):
            row = rows[stored.site, head]
            assert row["group"] == head // (heads // groups)
            assert row["kind"] == ("cross" if is_cross(stored.site) else "self")
            assert row["layer"] == layer
            if family.inputs != "image and text":
                cross = "cross." if is_cross(stored.site) else ""
                assert row["head"] == f"{part}L{layer}.{cross}H{head}"
            labels.add(row["head"])
    assert len(labels) == len(rows)


@pytest.mark.parametrize("name", ["bart", "whisper", "vit", "clip"])
def test_what_has_no_meaning_is_empty_with_its_reason(name: str) -> None:
    """Offsets and tokens in cross-attention, tokens in images and sound: None, on no row, and the
    table says why.
    """
    family = BY_NAME[name]
    batches = batches_of(family, "none")
    table = table_of(family, "none")
    for number, row in enumerate(table.rows()):
        cross = row["kind"] == "cross"
        tokens = sequences(row["site"], batches[0])[1] != "none" and not cross
        empty = (
            ("distance", *OFFSETS, "duplicate", "induction", "class:some")
            if cross
            else ()
            if tokens
            else TOKENS
        )
        empty = (set(empty) | {"logit"}) & set(row)
        for statistic in empty:
            assert row[statistic] is None
            assert table.count(statistic)[number] == 0
            assert table.reasons.get(f"{row['site']} {statistic}", table.reasons.get(statistic)), (
                row,
                statistic,
            )


@pytest.mark.parametrize(("name", "pad"), [("llama", 0), ("gpt_neox", 9), ("mistral", 0)])
def test_received_needs_64_readers(name: str, pad: int) -> None:
    """Key j of n is read by n - j rows, so only the first keys count; in a window of 5 none
    does.
    """
    family = BY_NAME[name]
    ids = torch.randint(2, 12, (2, 80 + pad), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    batches = [{"input_ids": ids, "attention_mask": mask}]
    table = read(family, batches)
    assert not differences(table, twin(family, model_of(family), batches), RECEIVED)
    assert set(table.count("received").tolist()) == (
        {0} if name == "mistral" else {80 + pad - 63 + 80 - 63}
    )
    if name == "mistral":
        assert "64 queries" in table.reasons["received"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2", "gpt_oss", "llama4"])
def test_probe(name: str) -> None:
    """The probe's own inputs, found as the model receives them, put to the oracle on the rows of
    the second saying.
    """
    family = BY_NAME[name]
    model, batches = model_of(family), batches_of(family, "none")
    seen: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if not any(ids.shape == batch["input_ids"].shape for batch in batches):
            seen.append(ids.clone())

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        table = read(family, batches, probe=True)
    finally:
        hook.remove()
    probes = list({tuple(ids.flatten().tolist()): ids for ids in seen}.values())
    assert probes
    calls: dict[str, list[Call]] = {}
    for stored, batch in stored_calls(model, [{"input_ids": ids} for ids in probes]):
        ids = batch["input_ids"]
        length = next(
            n
            for n in range(ids.shape[1] // 2, 0, -1)
            if torch.equal(ids[:, -n:], ids[:, -2 * n : -n])
        )
        assert length >= 4
        call = call_of(family, model, stored, batch)
        second = np.broadcast_to(np.arange(ids.shape[1]) >= ids.shape[1] - length, ids.shape)
        calls.setdefault(stored.site, []).append(replace(call, real_queries=second))
    twins = {site: statistics(site_calls) for site, site_calls in calls.items()}
    probed = ("induction", "duplicate", "previous")
    names = [f"{kind}{mass}" for kind in ("", "contribution:", "even:") for mass in probed]
    assert not differences(table, twins, names, prefix="probe:")
    assert not differences(table, expected(family, "none")), (
        "the probe's rows belong to no other statistic"
    )


@pytest.mark.filterwarnings(
    "ignore:.past_key_values. is deprecated"
)  # the name that older transformers know
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mistral", "gemma3", "gpt_oss", "llama4", "deepseek_v3"]
)
def test_a_text_read_in_pieces_with_a_cache(name: str, padding: str) -> None:
    """The rows of a text are the same whether they come at once or piece by piece."""
    family = BY_NAME[name]
    model = model_of(family)
    with multihead.reading(model, special_ids=set(SPECIAL)) as reading, torch.no_grad():
        for batch in batches_of(family, padding):
            cache = tf.DynamicCache(config=model.config)
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            for start, stop in (piece for piece in PIECES if piece[0] < ids.shape[1]):
                until = {} if mask is None else {"attention_mask": mask[:, :stop]}
                model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True, **until)
    found = differences(reading.table(), expected(family, padding))
    assert not found, "\n".join([f"{len(found)} differences", *found[:20]])


@pytest.mark.filterwarnings(
    "ignore:.past_key_values. is deprecated"
)  # the name that older transformers know
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_a_decoder_read_in_pieces_with_a_cache(name: str, padding: str) -> None:
    """The same for a decoder that reads an encoder, whose own rows are counted when they come, and
    only then.
    """
    family = BY_NAME[name]
    model = model_of(family)
    with multihead.reading(model, special_ids=set(SPECIAL)) as reading, torch.no_grad():
        for batch in batches_of(family, padding):
            whole = {key: value for key, value in batch.items() if not key.startswith("decoder_")}
            ids, mask = batch["decoder_input_ids"], batch.get("decoder_attention_mask")
            cache = tf.EncoderDecoderCache(tf.DynamicCache(), tf.DynamicCache())
            for start, stop in (piece for piece in PIECES if piece[0] < ids.shape[1]):
                until = {} if mask is None else {"decoder_attention_mask": mask[:, :stop]}
                piece = dict(
                    decoder_input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True
                )
                out = model(**whole, **piece, **until)
                whole = {key: whole[key] for key in ("attention_mask",) if key in whole}
                whole["encoder_outputs"] = (out.encoder_last_hidden_state,)
    wanted = expected(family, padding)
    across = {site: found for site, found in wanted.items() if is_cross(site)}
    found = differences(reading.table(), wanted, [name for name in NAMES if "special" not in name])
    found += differences(
        reading.table(), {s: f for s, f in wanted.items() if s not in across}, NAMES
    )
    found = [line for line in found if "only on one side" not in line]
    assert not found, "\n".join([f"{len(found)} differences", *found[:20]])


def bloom() -> tf.PreTrainedModel:
    return tf.BloomForCausalLM(
        tf.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=WORDS)
    )


def falcon() -> tf.PreTrainedModel:
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=WORDS)
    return tf.FalconForCausalLM(tf.FalconConfig(**sizes))


def gpt_neo() -> tf.PreTrainedModel:
    sizes = dict(
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        vocab_size=WORDS,
        attention_types=[[["global"], 1]],
    )
    return tf.GPTNeoForCausalLM(tf.GPTNeoConfig(**sizes))


def mpt() -> tf.PreTrainedModel:
    return tf.MptForCausalLM(tf.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=WORDS))


@pytest.mark.parametrize("make", [bloom, falcon, gpt_neo, mpt])
def test_refused_by_name(make: Any) -> None:
    model = make().eval()
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    plain = real_outputs(model, inputs)
    with pytest.raises(ValueError, match=type(model).__name__):
        multihead.read(model, [inputs])
    np.testing.assert_array_equal(real_outputs(model, inputs), plain)
