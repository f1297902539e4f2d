"""Sums of one site: by document, with moments taken once the documents have ended."""

from __future__ import annotations

import pytest
import torch

from multihead.errors import ReadingError
from multihead.models import find_sites
from multihead.reader.accumulate import PassSettings, SiteRecord
from small import llama


def record(settings: PassSettings | None = None) -> SiteRecord:
    return SiteRecord(find_sites(llama())[0], settings or PassSettings())


def values(*rows: float) -> torch.Tensor:
    """`[B, H]` for three heads, the same number for each."""
    return torch.tensor(rows, dtype=torch.float64)[:, None].expand(-1, 3)


def test_each_row_of_a_batch_is_a_document() -> None:
    site = record()
    site.add("entropy", values(1, 2), values(1, 1), values(1, 1))
    site.close_documents()
    site.add("entropy", values(3), values(1), values(1))
    assert site.table.value("entropy").tolist() == [1.5] * 3
    assert site.so_far().value("entropy").tolist() == [2] * 3
    assert site.table.value("entropy").tolist() == [1.5] * 3, "the open document has not ended"


def test_windows_of_a_document_are_added_before_its_moments() -> None:
    """Three rows in two documents, over two passes, equal one pass over the documents."""
    settings = PassSettings(document_of=torch.tensor([0, 1, 1]), documents=2)
    windows = record(settings)
    windows.add("entropy", values(1, 2, 3), values(1, 1, 1), values(1, 1, 1))
    windows.add("entropy", values(4, 0, 0), values(1, 0, 0), values(1, 0, 0))
    windows.close_documents()
    whole = record()
    whole.add("entropy", values(5, 5), values(2, 2), values(2, 2))
    whole.close_documents()
    torch.testing.assert_close(
        torch.tensor(windows.table.sums["entropy"]), torch.tensor(whole.table.sums["entropy"])
    )


def test_the_prefix_of_the_probe() -> None:
    site = record(PassSettings(prefix="probe:"))
    site.add("induction", values(1), values(1), values(1))
    site.add("contribution:induction", values(1), values(1), values(1))
    assert set(site.so_far().sums) == {"probe:induction", "contribution:probe:induction"}


def test_a_text_that_is_nan_is_refused_by_name() -> None:
    site = record()
    site.add("entropy", values(torch.nan), values(1), values(1))
    with pytest.raises(
        ReadingError, match=r"model\.layers\.0\.self_attn .*: entropy of a text is NaN"
    ):
        site.so_far()


def test_factors_give_the_norms_of_updates_and_follow_the_weights() -> None:
    site = record()
    weight, bias, factors = site.out_weights
    x = torch.randn(5, 3, 8)
    per_head = weight.unflatten(0, (3, 8))
    want = torch.einsum("nhe,hed->nhd", x, per_head).norm(dim=-1)
    got = torch.einsum("nhe,her->nhr", x.double(), factors).norm(dim=-1)
    torch.testing.assert_close(got.float(), want)
    with torch.no_grad():
        site.site.out.weight.mul_(2)
    torch.testing.assert_close(site.out_weights.factors.abs(), 2 * factors.abs())
    assert not bool(bias.any())
