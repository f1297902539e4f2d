"""Terms of scores that are linear in queries and keys, by regression over several inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checks.test_judge import Odd, judged
from multihead.checks.linear_terms import count_inputs, fit_terms

N, H, L, E = count_inputs(6), 2, 5, 6
GENERATOR = torch.Generator().manual_seed(0)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


Q, K, TABLE, U = noise(N, H, L, E), noise(N, H, L, E), noise(2 * L - 1, E), noise(E)
AT = torch.arange(L)
R = TABLE[AT[:, None] - AT + L - 1]
RELATIVE = torch.einsum("nhid,ijd->nhij", Q, R)
HIDDEN = torch.ones(L, L).triu(1).bool()


@pytest.mark.parametrize("is_causal", [False, True])
def test_relative_positions_of_three_kinds(is_causal: bool) -> None:
    for scores in (Q @ K.mT + RELATIVE, (Q + U) @ K.mT + RELATIVE + R @ U, RELATIVE + Q @ K.mT):
        hidden = HIDDEN if is_causal else torch.zeros(L, L).bool()
        fit = fit_terms(Q, K, (0.3 * scores).masked_fill(hidden, -torch.inf).softmax(-1))
        assert fit.holds, fit.residual
        torch.testing.assert_close(fit.slopes, torch.full((H,), 0.3))
        assert torch.equal(fit.terms[0, 0].isnan(), hidden)


def test_terms_that_arent_linear_dont_fit() -> None:
    for scores in (Q @ K.mT + RELATIVE.square(), Q @ Q.mT, (Q @ K.mT + RELATIVE).sin()):
        assert not fit_terms(Q, K, (0.3 * scores).softmax(-1)).holds


class Relative(Odd):
    """Queries times embeddings of distances, or of something else."""

    def __init__(self, kind: str, factor: float = 1.0) -> None:
        super().__init__()
        self.kind, self.factor = kind, factor
        self.register_buffer("rel_table", noise(2 * L - 1, 8))

    def attend(self, x: Tensor, hidden: Tensor | None, late: bool = False) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, 8)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        at = torch.arange(x.shape[1])
        index = at * at[:, None] % 7 if self.kind == "product" else at - at[:, None] + L - 1
        s = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, self.rel_table[index])
        a = (self.factor * s / 8**0.5).softmax(-1)
        return x + self.o_proj((a @ v).transpose(1, 2).flatten(2))


def test_the_scale_is_judged_next_to_relative_positions() -> None:
    right = judged(Relative("distance"))
    assert not right.findings and not right.unjudged, right
    assert any("0.3536, with terms linear in q and k by i - j" in line for line in right.passed)
    (finding,) = judged(Relative("distance", 2.0)).findings
    assert finding.bug == "missing or wrong scale" and "by 0.7071 instead" in finding.message
    other = judged(Relative("product"))
    assert not other.findings and "otherwise than by the distance" in other.unjudged[0]
