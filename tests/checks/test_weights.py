"""A report gives the weights of each call as read out, and those of the definition."""

from __future__ import annotations

import torch
from torch import nn

import multihead
from checks.samples import Separate
from checks.seeds import load as load_wild
from checks.test_judge import RIGHT, WRONG, AddedGroups, Odd
from checks.test_public import load
from checks.test_readout import Cut


def test_those_of_a_right_module_are_equal() -> None:
    report = multihead.check(Separate())
    assert [call.call.split(" as ")[0] for call in report.calls] == [
        "with its inputs alone",
        "with a causal mask",
        "with a mask",
    ]
    assert report.weights is not None and report.weights.shape == (1, 4, 5, 5)
    for call in report.calls:
        assert call.weights is not None and call.expected is not None
        torch.testing.assert_close(call.weights, call.expected, rtol=1e-9, atol=1e-12)
    assert (report.calls[1].weights.triu(1).abs() < 1e-12).all()


def test_a_bug_is_seen_in_what_is_read_out() -> None:
    report = multihead.check(Separate(scale=1.0))
    assert report.bugs == {"missing or wrong scale"}
    assert report.weights is not None and report.expected_weights is not None
    ratio = report.weights.log().diff(dim=-1) / report.expected_weights.log().diff(dim=-1)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 6**0.5), rtol=1e-4, atol=0)


def test_without_a_match_the_nearest_definition_is_expected_of_wrong_ones() -> None:
    report = multihead.check(WRONG["queries"][0])
    assert report.weights is not None and report.expected_weights is not None
    ones = torch.ones(1, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(report.weights.sum(-2), ones)
    torch.testing.assert_close(report.expected_weights.sum(-1), ones)
    plain = multihead.check(RIGHT["plain"])
    assert plain.weights is not None and plain.expected_weights is not None
    torch.testing.assert_close(plain.weights, plain.expected_weights)


def test_what_cant_be_compared_or_read_has_a_reason() -> None:
    target = Odd(lambda s: s + target.pos_bias[: s.shape[-1]])
    target.pos_bias = torch.linspace(0, 1, 16)
    biased = multihead.check(target).calls[0]
    assert biased.weights is not None and biased.expected is None
    assert "nothing to compare with" in biased.why_no_expected
    call = multihead.check(Cut(torch.tanh)).calls[0]
    assert call.weights is None and "linear in the values" in call.why_no_weights
    assert call.expected is None and call.why_no_expected


def test_reading_out_leaves_the_module_as_it_is() -> None:
    module = Separate()
    before = {n: p.clone() for n, p in module.named_parameters()}
    state = torch.random.get_rng_state()
    report = multihead.check(module)
    assert report.weights is not None
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_torchs_layer() -> None:
    report = multihead.check(nn.MultiheadAttention(8, 2, batch_first=True))
    assert report.weights is not None and report.weights.shape == (1, 2, 5, 5)


def test_a_gate_is_part_of_both() -> None:
    report = multihead.check(load("gated"))
    assert report.ok and report.weights is not None and report.expected_weights is not None
    torch.testing.assert_close(report.weights, report.expected_weights, rtol=1e-9, atol=1e-12)
    assert (report.weights.sum(-1) < 0.99).all() and "gate" in report.calls[0].note


def test_fewer_heads_than_the_definition_has_are_next_to_all_of_its_heads() -> None:
    report = multihead.check(AddedGroups())
    assert report.bugs and report.weights is not None and report.expected_weights is not None
    assert report.weights.shape[1] == 2 and report.expected_weights.shape[1] == 8


def test_keys_that_are_not_tokens_are_read_out_and_not_compared() -> None:
    report = multihead.check(load("registers"))
    assert report.weights is not None and report.weights.shape[-1] > report.weights.shape[-2]
    assert "nothing to compare with" in report.calls[0].why_no_expected


def test_contributions_are_what_each_key_adds() -> None:
    report = multihead.check(Separate())
    call = report.calls[0]
    assert call.contributions is not None and call.rest is not None and call.weights is not None
    assert call.contributions.shape == (1, 4, 5, 5, 24) and report.contributions is not None
    norms = call.contribution_norms
    assert norms is not None and norms.shape == call.weights.shape
    # Twice the weight is twice the size, for each key.
    ratio = norms / call.weights
    torch.testing.assert_close(ratio, ratio[:, :, :1].expand_as(ratio))
    torch.testing.assert_close(call.rest, call.rest[:, :1].expand_as(call.rest))
    assert call.rest.norm() > 0  # W_O's bias


def test_weights_of_a_cache_are_next_to_those_of_one_pass() -> None:
    call = multihead.check(load_wild("rope_cache")).calls[-1]
    assert "in pieces of 4, 1 and 1 tokens" in call.call and "one pass" in call.note
    assert call.weights is not None and call.expected is not None
    assert call.weights.shape[-2:] == (6, 6) and (call.weights.triu(1) == 0).all()
    torch.testing.assert_close(call.weights, call.expected, rtol=1e-8, atol=1e-11)
