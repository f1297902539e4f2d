"""Changes of basis that keys allow, and the moments that their errors cost."""

from __future__ import annotations

import pytest
import torch

from multihead.models.site import find_sites
from multihead.pruning.basis import align_heads, key_moments
from multihead.pruning.shared_heads import _key_basis as key_basis_of
from pruning.small_models import SHAPES, TURNING, held_at, make, outputs


@pytest.mark.parametrize("name", TURNING)
def test_what_turns_together_is_found_by_looking(name: str) -> None:
    model = make(name)
    site = find_sites(model)[1]
    shape = key_basis_of(held_at(model, site))
    pairs, free = SHAPES[type(site.module).__name__](site.head_dim)
    assert [tuple(p) for p in shape.pairs.tolist()] == pairs and shape.free.tolist() == free


@pytest.mark.parametrize("name", TURNING)
@torch.no_grad()
def test_changes_of_basis_leave_the_output_as_it_is(name: str) -> None:
    model = make(name)
    site = find_sites(model)[0]
    before = outputs(model)
    held = held_at(model, site)
    shape, rows = key_basis_of(held), site.slices()
    w_out = site.out_weight()[0].double().view(site.num_heads, site.head_dim, -1)
    parts = [
        align_heads(moment.sum(0), 4).transpose(0, 1)
        for moment, _ in key_moments(held.calls, shape, range(4), range(4), w_out)
    ]
    turns = shape.to_matrix(parts, site.head_dim)
    assert (turns - torch.eye(site.head_dim)).abs().max() > 0.1
    back = torch.linalg.inv(turns)
    for r, maps in ((rows.k, turns), (rows.q, back.mT)):
        bias = r.bias()
        r.put(
            maps.mT @ r.weight().double(),
            None if bias is None else (bias.double()[:, None] @ maps)[:, 0],
        )
    torch.testing.assert_close(outputs(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_moments_are_covariances_of_keys_within_rows(name: str) -> None:
    """Row by row, from the definition: weights half as the row reads, half even over the keys that
    it may read.
    """
    model = make(name)
    site = find_sites(model)[0]
    held = held_at(model, site)
    call, shape = held.calls[0], key_basis_of(held)
    w_out = site.out_weight()[0].double().view(4, site.head_dim, -1).detach()
    moment, query = key_moments([call], shape, [0, 2], [2], w_out[[2]])[0]
    q, k = (
        shape.to_blocks(call.q[0, 2])[0],
        shape.to_blocks(call.k[0, [0, 2]])[0],
    )  # [L, blocks, e], [2, S, blocks, e]
    scores = (call.q[0, 2] @ call.k[0, 2].T * call.scale).double()
    wanted, queries = torch.zeros_like(moment[0]), torch.zeros_like(query[0])
    for i in range(len(q)):
        p = 0.5 * scores[i, : i + 1].softmax(-1) + 0.5 / (i + 1)
        values = call.v[0, 2, : i + 1].double() @ w_out[2]
        spread = (p[:, None] * (values - p @ values).square()).sum()
        for block in range(q.shape[1]):
            keys = k[:, : i + 1, block].transpose(0, 1).flatten(1).to(moment.dtype)
            keys = keys - (p[:, None] * keys).sum(0)
            size = q[i, block].abs().square().sum() if query.is_complex() else 1.0
            wanted[block] += size * spread * (keys.mH @ (p[:, None] * keys))
            queries[block] += spread * q[i, block][:, None].conj() @ q[i, block][None]
    torch.testing.assert_close(moment[0], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    if not query.is_complex():
        torch.testing.assert_close(
            query[0], queries, rtol=1e-4, atol=1e-4 * float(queries.abs().max())
        )
