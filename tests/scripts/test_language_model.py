"""The language model: transformers' LlamaForCausalLM gives the same logits; it goes there and back;
errors' words.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from language_model import LanguageModel, LanguageModelConfig

SIZES = [
    LanguageModelConfig(vocab_size=97, embed_dim=24, num_layers=2, num_heads=4, hidden_dim=60),
    LanguageModelConfig(
        vocab_size=50, embed_dim=42, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=10, hidden_dim=33,
        max_length=70, rope_theta=500.0, norm_eps=1e-2,
    ),
]  # fmt: skip


def make(config: LanguageModelConfig) -> LanguageModel:
    """Weights so large that attention is far from even, gains that are not 1."""
    torch.manual_seed(0)
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10) if weight.dim() > 1 else weight.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("config", SIZES)
def test_logits_equal_transformers(config: LanguageModelConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model = make(config)
    llama, weights = model.to_llama()
    (tmp_path / "config.json").write_text(json.dumps(llama))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert isinstance(theirs, LlamaForCausalLM)
    tokens = torch.randint(config.vocab_size, (2, 63))
    with torch.no_grad():
        expected = theirs(tokens).logits
        got = model(tokens)
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("config", SIZES)
def test_there_and_back(config: LanguageModelConfig) -> None:
    model = make(config)
    again = LanguageModel.from_llama(*model.to_llama())
    assert again.config == config
    for (name, weight), (name_again, weight_again) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == name_again
        assert torch.equal(weight, weight_again)


def test_no_row_sees_a_later_token() -> None:
    model = make(SIZES[0])
    tokens = torch.randint(97, (1, 20))
    changed = tokens.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 97
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :11], after[:, :11])
    assert not torch.allclose(before[:, 11:], after[:, 11:])


def test_words_of_errors() -> None:
    with pytest.raises(ValueError, match=r"embed_dim=10.*num_heads=4.*head_dim"):
        LanguageModelConfig(vocab_size=5, embed_dim=10, num_layers=1, num_heads=4, hidden_dim=8)
    model = make(SIZES[1])
    with pytest.raises(ValueError, match=r"71.*max_length=70"):
        model(torch.zeros(1, 71, dtype=torch.long))
    config, weights = model.to_llama()
    with pytest.raises(ValueError, match=r"hidden_act='gelu'.*'silu'.*AutoModelForCausalLM"):
        LanguageModel.from_llama({**config, "hidden_act": "gelu"}, weights)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=False"):
        LanguageModel.from_llama({**config, "tie_word_embeddings": False}, weights)
    with pytest.raises(ValueError, match=r"rope_type='yarn'"):
        LanguageModel.from_llama({**config, "rope_parameters": {"rope_type": "yarn"}}, weights)
    missing = {name: weight for name, weight in weights.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"model\.norm\.weight \(1 names"):
        LanguageModel.from_llama(config, missing)
    with pytest.raises(ValueError, match=r"model\.norm\.weight\[3\].*\[42\]"):
        LanguageModel.from_llama(config, {**weights, "model.norm.weight": torch.ones(3)})
