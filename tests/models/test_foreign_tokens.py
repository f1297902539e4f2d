"""What a reading knows of the rows, the tokens and the kinds of attention in modules of any
make.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multihead
from language_model import LanguageModel, LanguageModelConfig
from multihead.models import suspend
from multihead.reader.statistics import columns
from oracles.compare import differences
from twins import sharpened, torch_call, twin, watched

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True"
)
IDS = torch.randint(3, 12, (3, 9), generator=torch.Generator().manual_seed(0))
PAD = torch.arange(9) >= torch.tensor([9, 7, 8])[:, None]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.empty(shape, dtype=torch.float64).normal_(
        generator=torch.Generator().manual_seed(seed)
    )


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, 4, 32, 0.0, batch_first=True), layers
    )


class Pooled(nn.Module):
    """Takes the mean of all rows, padding too: there torch's fused path gives zeros, and its other
    one doesn't.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(17, 24), encoder(), nn.Linear(24, 5)

    def forward(self, tokens: Tensor, pad: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=pad).mean(1))


@pytest.mark.parametrize("training", [False, True])
def test_what_is_made_of_padding_stops_no_reading(training: bool) -> None:
    model = sharpened(Pooled()).train(training)
    with torch.no_grad():
        plain = model(IDS, PAD)
        with multihead.reading(model, special_ids=set()) as reading:
            model(IDS, PAD)
        assert torch.equal(model(IDS, PAD), plain)
    with watched(model, nn.MultiheadAttention) as seen, torch.no_grad():
        model.eval()(IDS, PAD)
    want = twin(
        [
            (path, torch_call(m, args, kwargs, ids=IDS, special=frozenset()))
            for path, m, args, kwargs in seen
        ]
    )
    assert not differences(reading.table(), want)


def test_as_it_came_is_the_forward_of_its_class() -> None:
    model = encoder()
    attention = model.layers[0].self_attn
    with multihead.reading(model):
        assert "forward" in vars(attention) and not model.use_nested_tensor
        with suspend(model, keep_changes=True):
            assert "forward" not in vars(attention) and model.use_nested_tensor
        assert "forward" in vars(attention) and not model.use_nested_tensor
    assert "forward" not in vars(attention) and model.use_nested_tensor


def test_the_librarys_language_model_reads_as_llama_does() -> None:
    import transformers as tf

    config = LanguageModelConfig(
        vocab_size=17, embed_dim=24, num_layers=2, num_heads=6, num_kv_heads=2, hidden_dim=32
    )
    model = LanguageModel(config)
    for name, weight in model.named_parameters():
        weight.data *= 6 if "q_proj" in name or "k_proj" in name else 1
    theirs, weights = model.to_llama()
    llama = tf.LlamaForCausalLM(
        tf.LlamaConfig(**{k: v for k, v in theirs.items() if k != "architectures"})
    ).eval()
    llama.load_state_dict(weights, strict=False)
    ours = multihead.read(model, [{"tokens": IDS}], special_ids={3})
    want = multihead.read(llama, [{"input_ids": IDS}], special_ids={3}, probe=False)
    assert [h.head for h in ours.heads] == [h.head for h in want.heads]
    assert [h.group for h in ours.heads] == [h.group for h in want.heads]
    for column in (c for c in columns() if c != "logit"):  # its unembedding is no module
        np.testing.assert_allclose(
            ours.value(column), want.value(column), rtol=1e-4, atol=1e-5, err_msg=column
        )
    with pytest.raises(ValueError, match="LanguageModel isn't a causal text model"):
        multihead.read(model, [{"tokens": IDS}], probe=True)


class Across(nn.Module):
    """Attention by hand that reads whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.q, self.k, self.v, self.out = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        made = (self.q(x), self.k(memory), self.v(memory))
        q, k, v = (y.unflatten(-1, (3, -1)).transpose(1, 2) for y in made)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        )


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Across()
        self.config = SimpleNamespace(vocab_size=17)  # as many have one that isn't transformers'

    def forward(self, x: Tensor, memory: Tensor, **more: Any) -> Tensor:
        return self.attend(x, memory, **more)


def test_an_argument_of_its_own_makes_it_cross_attention() -> None:
    """Also where both sequences are of one length, and no name says so."""
    model, x = sharpened(Holder()), numbers(3, 9, 24)
    table = multihead.read(model, [dict(x=x, memory=numbers(3, 9, 24, seed=2))])
    assert {row["kind"] for row in table.rows()} == {
        "cross"
    } and "another sequence" in table.reasons["previous"]
    table = multihead.read(
        model, [dict(x=x, memory=x.clone(), bias=numbers(3, 9, 9, seed=2)[:, None])]
    )
    assert {row["kind"] for row in table.rows()} == {"self"} and (
        table.count("previous") == 24
    ).all()
    table = multihead.read(model, [dict(x=x, memory=x, bias=numbers(3, 9, 9)[:1])])
    assert {row["kind"] for row in table.rows()} == {"self"}


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = (
            nn.Embedding(17, 24),
            nn.Transformer(24, 4, 1, 1, 32, 0.0, batch_first=True),
        )

    def forward(self, tokens: Tensor, said: Tensor, pad: Tensor) -> Tensor:
        return self.body(
            self.embed(tokens),
            self.embed(said),
            src_key_padding_mask=pad,
            memory_key_padding_mask=pad,
        )


def test_of_two_texts_neither_is_taken_for_the_other() -> None:
    """No padding or token of the source counts as one of the target, whatever their lengths."""
    model, said = sharpened(Translator()), IDS.flip(1)
    for length in (6, 9):
        table = multihead.read(model, [dict(tokens=IDS, said=said[:, :length], pad=PAD)])
        rows = {row["head"][:-3]: n for n, row in enumerate(table.rows())}
        assert table.count("norm")[
            [rows["encoder.L0"], rows["decoder.L0"], rows["decoder.L0.cross"]]
        ].tolist() == [24, 3 * length, 3 * length]
        assert table.count("duplicate").max() == 0
        assert (
            "no token ids"
            in table.reasons[
                "decoder.layers.0.self_attn duplicate".replace("decoder", "body.decoder")
            ]
        )


def test_a_part_of_a_sequential() -> None:
    model = sharpened(nn.Sequential(nn.Embedding(17, 24), encoder(), nn.Linear(24, 5)))
    table = multihead.read(model, [dict(input=IDS)])
    assert [row["head"] for row in table.rows()[::4]] == ["L0.H0", "L1.H0"] and (
        table.count("duplicate") > 0
    ).all()


def test_under_autocast() -> None:
    torch.manual_seed(0)
    model, x = encoder().eval(), numbers(3, 9, 24).float()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
        multihead.reading(model) as reading,
    ):
        model(x, src_key_padding_mask=PAD)
    want = multihead.read(model, [dict(src=x, src_key_padding_mask=PAD)])
    assert reading.table().value("entropy") == pytest.approx(want.value("entropy"), abs=0.05)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = encoder().layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_what_a_backward_pass_computes_again_isnt_counted() -> None:
    model = sharpened(Checkpointed()).requires_grad_(True).train()
    with multihead.reading(model) as reading:
        for _ in range(2):
            model(numbers(3, 9, 24)).square().sum().backward()
    assert reading.table().count("norm").tolist() == [54] * 8 and not reading.table().meta["notes"]


def test_a_pool_of_torchs_inside_of_transformers_is_a_site_too() -> None:
    import transformers as tf

    sizes = dict(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=16,
        patch_size=4,
    )
    model = tf.SiglipVisionModel(tf.SiglipVisionConfig(**sizes)).eval()
    pixels = numbers(2, 3, 16, 16).float()
    with watched(model, nn.MultiheadAttention) as seen, torch.no_grad():
        plain = model(pixels).pooler_output
    table = multihead.read(model, [{"pixel_values": pixels}])
    with torch.no_grad():
        assert torch.equal(model(pixels).pooler_output, plain)
    assert [row["head"] for row in table.rows()[::3]] == ["L0.H0", "L1.H0", "head.attention.H0"]
    assert (table.heads[6].kind, table.heads[6].layer) == ("cross", None)
    want = twin([(path, torch_call(m, args, kwargs)) for path, m, args, kwargs in seen])[
        "head.attention"
    ]
    assert table.value("norm")[6:] == pytest.approx(want.values["norm"], rel=1e-4)
    assert table.value("entropy")[6:] == pytest.approx(want.values["entropy"], rel=1e-4)


class Speaker(nn.Module):
    """A causal language model of torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(17, 24), encoder(), nn.Linear(24, 17)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(
            input_ids.shape[1], dtype=torch.float64
        )
        return {"logits": self.head(self.encoder(self.embed(input_ids), mask=mask, is_causal=True))}


def test_what_a_head_does_for_the_loss() -> None:
    model = sharpened(Speaker())
    table = multihead.read(
        model, [{"input_ids": IDS}], statistics=["effect", "importance", "copying"]
    )

    def loss() -> float:
        with torch.no_grad():
            logits = model(IDS)["logits"]
        return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))

    plain, out = loss(), model.encoder.layers[1].self_attn.out_proj.weight
    before = out.clone()
    out[:, 12:18] = 0  # head 2
    assert table.value("effect")[6] == pytest.approx(loss() - plain, abs=1e-6)
    out.copy_(before)
    assert (table.value("importance") > 0).all() and "linear unembedding" in table.reasons[
        "copying"
    ]
