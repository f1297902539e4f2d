"""Roles of argument names, and masks in every form."""

from __future__ import annotations

import pytest
import torch

from multihead.checks.arguments import (
    KEY_SHAPES,
    QUERY_KEY_SHAPES,
    MaskForm,
    candidate_forms,
    conventional_encoding,
    role_of,
)


@pytest.mark.parametrize(
    ("names", "role"),
    [
        ("key_padding_mask src_key_padding_mask valid_lens lengths padding_mask", "padding"),
        ("is_causal causal use_causal_mask", "causal"),
        ("mask attn_mask attention_mask attn_bias tgt_mask", "mask"),
        ("need_weights output_attentions return_attn", "weights"),
        ("num_heads n_head nhead", "num_heads"),
        ("num_kv_heads n_kv groups", "num_kv_heads"),
        ("past_key_value kv_cache cache layer_past", "cache"),
        ("start_pos offset cache_position", "start"),
        ("position_ids positions", "positions"),
        ("cos freqs_cos", "cos"),
        ("freqs_cis", "freqs_cis"),
        ("w_q weight_query q_proj", "q weight"),
        ("context encoder_hidden_states memory", "memory"),
        ("q query xq tgt", "query"),
        ("v values value_states", "value"),
        ("x hidden_states src inputs", "x"),
    ],
)
def test_roles(names: str, role: str) -> None:
    assert {name: role_of(name) for name in names.split()} == dict.fromkeys(names.split(), role)


def test_forms_encode_one_mask() -> None:
    allowed = torch.tensor([[[True, False], [True, True]]])
    forms = candidate_forms("mask", QUERY_KEY_SHAPES)
    assert len(forms) == 25 and len({form.description for form in forms}) == 25
    by_encoding = {form.encoding: form for form in forms if form.shape == "[L, S]"}
    for encoding, expected in {
        "True may read": allowed[0],
        "True is hidden": ~allowed[0],
        "-inf added": torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]).double(),
        "1 may read": allowed[0].double(),
        "1 is hidden": (~allowed[0]).double(),
    }.items():
        assert torch.equal(by_encoding[encoding].encode(allowed, 4, torch.float64), expected)
    shapes = {
        form.shape: list(form.encode(allowed, 4, torch.float64).shape)
        for form in forms
        if form.encoding == "True may read"
    }
    assert shapes == {
        "[B, 1, L, S]": [1, 1, 2, 2],
        "[B, L, S]": [1, 2, 2],
        "[L, S]": [2, 2],
        "[B, H, L, S]": [1, 4, 2, 2],
        "[B * H, L, S]": [4, 2, 2],
    }
    lengths = candidate_forms("valid_lens", KEY_SHAPES)[-1]
    assert lengths.encode(torch.tensor([[True, True, False]]), 1, torch.float64).tolist() == [2]


def test_meanings_of_true_that_libraries_agree_on() -> None:
    assert conventional_encoding("mask") is None
    usual = MaskForm("attention_mask", "[B, S]", "1 may read")
    inverted = MaskForm("attention_mask", "[B, S]", "True is hidden")
    assert not usual.contradicts and inverted.contradicts == "True may read"
    assert not MaskForm("attention_mask", "[B, 1, L, S]", "-inf added").contradicts
    assert not MaskForm("mask", "[L, S]", "True is hidden").contradicts
