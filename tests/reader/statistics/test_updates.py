"""Statistics of what the heads add."""

from __future__ import annotations

import numpy as np
import torch

import multihead


def test_a_head_may_pull_against_its_site_so_its_share_has_no_least() -> None:
    (share,) = [s for s in multihead.reader.list_statistics() if s.name == "share"]
    assert share.range_text == "any number"
    attention, x = torch.nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(1, 5, 4)
    with torch.no_grad():  # the second head does what the first does, turned round and halved
        rows = attention.in_proj_weight.view(3, 2, 2, 4)
        rows[:, 1] = rows[:, 0]
        attention.out_proj.weight[:, 2:] = attention.out_proj.weight[:, :2] / -2
    table = multihead.read(attention, [{"query": x, "key": x, "value": x}])
    np.testing.assert_allclose(table.value("share"), [2, -1], rtol=1e-3)
