"""What a model is called with, in every way that people call one: caches that change, inputs by
position, odd masks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from multihead.reader.statistics.columns import MASSES
from small import IDS, llama

TEXT = torch.tensor([[5, 9, 7, 5, 9, 8, 7, 5, 9, 6, 7, 5]])


def counts_and_values(reading: Any) -> dict[str, Any]:
    table = reading.table()
    return {
        c: (table.count(c).tolist(), table.value(c))
        for c in (*MASSES, "entropy", "distance", "norm")
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for column, (count, value) in a.items():
        assert count == b[column][0], column
        assert value == pytest.approx(b[column][1], rel=1e-5, abs=1e-7, nan_ok=True), column


def read_whole(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    with multihead.reading(model) as reading, torch.no_grad():
        model(input_ids=ids)
    return counts_and_values(reading)


# ---- caches


def test_a_cache_that_was_cut_goes_on_with_what_is_left() -> None:
    """Assisted decoding: some tokens are tried, cut off, and others come."""
    model = llama()
    cache = tf.DynamicCache(config=model.config)
    with multihead.reading(model) as reading, torch.no_grad():
        model(input_ids=TEXT[:, :8], past_key_values=cache)
        first = counts_and_values(reading)
        cache.crop(-4)
        model(input_ids=TEXT[:, [9, 9, 9]], past_key_values=cache)
    cut = torch.cat([TEXT[:, :4], TEXT[:, [9, 9, 9]]], 1)
    whole = read_whole(model, cut)
    with multihead.reading(model) as head, torch.no_grad():
        model(input_ids=cut[:, :4])
    start = counts_and_values(head)
    got = counts_and_values(reading)
    for column in ("duplicate", "induction"):
        rows = [a - b for a, b in zip(got[column][0], first[column][0], strict=True)]
        assert rows == [a - b for a, b in zip(whole[column][0], start[column][0], strict=True)], (
            column
        )
    assert got["duplicate"][0] != first["duplicate"][0]


def test_beams_are_followed() -> None:
    """Rows of the cache change places and are copied; ids go with them."""
    model, cache = llama(), tf.DynamicCache()
    two = torch.cat([TEXT[:, :6], TEXT[:, :6].flip(1)])
    order = torch.tensor([1, 1])
    with multihead.reading(model) as reading, torch.no_grad():
        model(input_ids=two, past_key_values=cache)
        before = counts_and_values(reading)
        cache.reorder_cache(order)
        model(input_ids=two[order][:, -1:], past_key_values=cache)
        got = counts_and_values(reading)
    full = torch.cat([two[order], two[order][:, -1:]], 1)
    want, start = read_whole(model, full), read_whole(model, full[:, :-1])
    for column in ("duplicate", "induction"):
        rows = [a - b for a, b in zip(got[column][0], before[column][0], strict=True)]
        assert rows == [a - b for a, b in zip(want[column][0], start[column][0], strict=True)], (
            column
        )


def test_generating_with_beams_reads_no_wrong_ids() -> None:
    model = llama()
    with multihead.reading(model) as reading:
        model.generate(
            TEXT[:, :6], num_beams=3, max_new_tokens=6, do_sample=False, eos_token_id=None
        )
    table = reading.table()
    assert table.count("entropy")[0] > table.count("duplicate")[0] > 0


def test_a_cache_that_holds_another_text_has_no_ids() -> None:
    model = llama()
    cache = tf.StaticCache(config=model.config, max_cache_len=20)
    with multihead.reading(model) as reading, torch.no_grad():
        model(input_ids=TEXT[:, :6], past_key_values=cache)
        before = reading.table().count("duplicate").tolist()
        other = tf.StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            model.model(input_ids=TEXT[:, 6:], past_key_values=other)
        for layer, source in zip(cache.layers, other.layers, strict=True):
            layer.keys.copy_(source.keys)
            layer.values.copy_(source.values)
        middle = reading.table().count("duplicate").tolist()
        model(input_ids=TEXT[:, :2], past_key_values=cache)
    table = reading.table()
    assert before[0] and table.count("duplicate").tolist() == middle
    assert table.count("entropy")[0] == 6 + 6 + 2


def test_a_mask_longer_than_the_text_so_far() -> None:
    model = llama()
    mask = torch.zeros(1, 20, dtype=torch.long)
    mask[:, :12] = 1
    cache = tf.StaticCache(config=model.config, max_cache_len=20)
    with multihead.reading(model) as reading, torch.no_grad():
        model(input_ids=TEXT, attention_mask=mask, past_key_values=cache)
    same(counts_and_values(reading), read_whole(model, TEXT))


# ---- ways of calling


def test_inputs_by_position_are_those_by_name() -> None:
    model, mask = llama(attn_implementation="eager"), torch.ones_like(IDS)
    mask[0, :4] = 0
    with multihead.reading(model) as by_name, torch.no_grad():
        model(input_ids=IDS, attention_mask=mask)
    cache = tf.DynamicCache()
    with multihead.reading(model) as by_place, torch.no_grad():
        model(IDS, mask, None, cache)
    assert cache.get_seq_length() == 12  # the check writes into a cache of its own
    same(counts_and_values(by_place), counts_and_values(by_name))


def test_embeddings_have_no_ids_and_say_so() -> None:
    model = llama()
    with multihead.reading(model) as reading, torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(IDS))
    table = reading.table()
    assert table.count("self").all() and not table.count("duplicate").any()
    assert "no token ids" in table.reasons["duplicate"]


def test_packed_texts_do_not_see_each_other() -> None:
    ids = torch.tensor(
        [[5, 6, 7, 8, 7, 9]]
    )  # no token comes again within a text; 7 stands before 8 only across them
    with multihead.reading(llama()) as reading, torch.no_grad():
        reading.model(
            input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False
        )
    assert (
        not reading.table().count("induction").any()
        and not reading.table().count("duplicate").any()
    )


def test_a_part_of_a_model_says_that_it_was_not_compared() -> None:
    model = llama()
    with multihead.reading(model) as reading, torch.no_grad():
        for _ in range(2):
            model.model(input_ids=IDS)
    (note,) = reading.table().meta["notes"]  # and not that its layers are shared
    assert "only a part" in note


def test_modules_keep_the_mode_that_each_was_in() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    with multihead.reading(model), torch.no_grad():
        model(IDS)
    multihead.read(model, [{"input_ids": IDS}])
    multihead.read_maps(model, {"input_ids": IDS[:1]}, "L0.H0")
    with multihead.ablate_heads(model, "L0.H0", mode="mean", over=[{"input_ids": IDS}]):
        pass
    assert [m.training for m in model.modules()] == modes


def test_a_model_made_for_inference_only() -> None:
    with torch.inference_mode():
        model = llama()
        table = multihead.read(model, [{"input_ids": IDS}], probe=False)
    assert table.count("norm").all()


def test_a_compiled_model_is_refused_with_the_way_out() -> None:
    with (
        pytest.raises(ValueError, match=r"pass model\._orig_mod"),
        multihead.reading(torch.compile(llama(), backend="eager")),
    ):
        pass


def test_stored_weights_are_not_silently_left_out() -> None:
    model = llama(attn_implementation="eager")
    with (
        pytest.raises(multihead.errors.ReadingError, match=r"attentions.*multihead\.read_maps"),
        multihead.reading(model),
        torch.no_grad(),
    ):
        model(IDS, output_attentions=True)


# ---- masks and modules


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 8), (1, 1, 8, 8), (1, 4, 8, 8), (8, 8), (1, 8)], ids=str
)
@pytest.mark.parametrize("way", ["bool", "bias"])
def test_dense_masks_of_every_shape(shape: tuple[int, ...], way: str) -> None:
    """Rows that may not read a copy don't count it, whatever the mask's shape, and whether it is
    said by -inf.
    """
    from multihead.models.transformers import ATTEND, forward

    torch.manual_seed(0)
    may = torch.ones(shape, dtype=torch.bool)
    may[..., 0] = False
    seen: list[Any] = []
    module = torch.nn.Linear(1, 1)
    setattr(module, ATTEND, lambda call: seen.append(call) or call.q)
    q = torch.randn(1, 4, 8, 6)
    bias = torch.zeros(shape).masked_fill(~may, -torch.inf)
    extra = (
        {"position_bias": bias.expand(1, 4, 8, 8) if bias.ndim == 4 else bias}
        if way == "bias"
        else {}
    )
    forward(module, q, q, q, may if way == "bool" else None, is_causal=False, **extra)
    from multihead.reader.collect import collect_row_stats
    from multihead.reader.context import TokenContext
    from multihead.reader.statistics import resolve_statistics

    ids = torch.tensor([[5, 5, 6, 5, 7, 5, 6, 8]])
    every = torch.ones(1, 8, dtype=torch.bool)
    context = TokenContext(
        every,
        every,
        torch.zeros(1, dtype=torch.long),
        ids,
        ids,
        torch.nn.functional.pad(ids[:, :-1], (1, 0), value=-1),
        torch.zeros(1, 8, dtype=torch.bool),
        0,
    )
    factors = torch.eye(6).expand(4, 6, 6)
    out, rows = collect_row_stats(seen[0], context, factors, resolve_statistics())
    weights = (q @ q.mT * 6**-0.5).masked_fill(torch.arange(8) == 0, -torch.inf).softmax(-1)
    assert torch.allclose(out, weights @ q, atol=1e-5)
    copies = (
        (ids[:, None, :] == ids[:, :, None])
        & torch.ones(8, 8, dtype=torch.bool).tril(-1)
        & (torch.arange(8) != 0)
    )
    duplicate = rows.masses["duplicate"]
    assert torch.equal(duplicate.exists.expand(1, 4, 8), copies.any(-1)[:, None].expand(1, 4, 8))
    assert torch.allclose(duplicate.weight, (weights * copies[:, None]).sum(-1), atol=1e-6)
    assert (rows.allowed == 7).all()


def test_layers_that_share_their_weights_say_so() -> None:
    config = tf.AlbertConfig(
        vocab_size=50,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=32,
    )
    model = tf.AlbertModel(config).eval()
    table = multihead.read(model, [{"input_ids": IDS}])
    assert table.count("norm").tolist() == [3 * 24] * 4
    assert any("L0 runs 3 times a pass" in note for note in table.meta["notes"])
    with pytest.raises(ValueError, match="runs several times a pass"):
        multihead.read_maps(model, {"input_ids": IDS[:1]}, "L0.H1")


def test_keys_of_another_length_without_a_cache_have_no_places() -> None:
    """Latents that read a longer context, or keys of two sequences in one: offsets and ids have no
    meaning there.
    """
    model = llama()
    from multihead.ops.call import AttentionCall
    from multihead.reader.session import Reading

    session = Reading(model)
    q, k = torch.randn(1, 3, 4, 8), torch.randn(1, 1, 6, 8)
    call = AttentionCall.lower(q, k, k)
    context = session.tokens.locate(session.sites[0], "self", call)
    assert (
        context.offset is None
        and context.query_ids is None
        and (context.first_key == -1).all()
        and "6 keys for 4 queries" in context.ids_reason
    )


def test_places_for_pictures_are_no_copies_of_each_other() -> None:
    model = llama()
    model.config.image_token_id = 9
    ids = torch.tensor([[5, 9, 9, 9, 9, 7, 8, 5]])
    with multihead.reading(model) as reading, torch.no_grad():
        model(input_ids=ids)
    table = reading.table()
    assert table.count("duplicate").tolist() == [1] * 6  # the last token's
    assert table.count("induction").tolist() == [1] * 6  # what followed the first


def test_a_text_read_in_pieces_is_one_document() -> None:
    """Sums of the pieces are added before second moments are taken, so errors are those of reading
    each text at once.
    """
    model = llama()
    with multihead.reading(model) as whole, torch.no_grad():
        model(input_ids=IDS)
    with multihead.reading(model) as pieces, torch.no_grad():
        cache = None
        for part in (slice(0, 5), slice(5, 6), slice(6, 12)):
            cache = model(input_ids=IDS[:, part], past_key_values=cache).past_key_values
            pieces.table()  # looking in between changes nothing
    want, got = whole.table(), pieces.table()
    assert got.meta["documents"] == 2 and got.meta["tokens"] == 24
    assert np.isfinite(want.error("self")).all()
    for column in want.columns:
        assert got.error(column) == pytest.approx(
            want.error(column), rel=1e-4, abs=1e-7, nan_ok=True
        ), column
        assert got.sums[column][:, -1].tolist() == want.sums[column][:, -1].tolist(), column


def test_rows_that_changed_places_are_other_documents() -> None:
    model, cache = llama(), tf.DynamicCache()
    with multihead.reading(model) as reading, torch.no_grad():
        model(input_ids=IDS[:, :6], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        model(input_ids=IDS[[1, 0], 6:], past_key_values=cache)
    assert reading.table().sums["entropy"][:, -1].tolist() == [4] * 6


@pytest.mark.parametrize("mixed", [True, False], ids=["some layers slide", "all slide"])
def test_texts_that_end_alike_are_told_apart_behind_a_sliding_cache(mixed: bool) -> None:
    """What the first layer's cache still holds is the same in every row; what the whole text was
    isn't.
    """
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        head_dim=8,
        num_key_value_heads=1,
        max_position_embeddings=64,
        sliding_window=4,
        query_pre_attn_scalar=8,
    )
    kinds = ["sliding_attention", "full_attention" if mixed else "sliding_attention"]
    model = tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(layer_types=kinds, **sizes)).eval()
    text = torch.tensor([[5, 6, 7, 30, 31, 32, 33, 5, 6, 7], [8, 9, 5, 30, 31, 32, 33, 5, 6, 7]])

    def read(order: list[int]) -> Any:
        cache = tf.DynamicCache(config=model.config)
        with multihead.reading(model) as reading, torch.no_grad():
            model(input_ids=text[:, :7], past_key_values=cache)
            cache.reorder_cache(torch.tensor(order))
            model(input_ids=text[order, 7:8], past_key_values=cache)
            model(input_ids=text[order, 8:], past_key_values=cache)
        return reading.table()

    with multihead.reading(model) as each, torch.no_grad():
        for row in text:
            model(input_ids=row[None], past_key_values=tf.DynamicCache(config=model.config))
    table, apart = read([0, 1]), each.table()
    assert table.meta["documents"] == apart.meta["documents"] == 2
    for column in ("entropy", "duplicate", "induction"):
        assert table.count(column).tolist() == apart.count(column).tolist(), column
        np.testing.assert_allclose(
            table.value(column), apart.value(column), rtol=1e-4, atol=1e-6, err_msg=column
        )
        np.testing.assert_allclose(
            table.error(column), apart.error(column), rtol=1e-3, atol=1e-6, err_msg=column
        )
        turned = read([1, 0])
        assert turned.count(column).tolist() == apart.count(column).tolist(), column
        np.testing.assert_allclose(
            turned.value(column), apart.value(column), rtol=1e-4, atol=1e-6, err_msg=column
        )
