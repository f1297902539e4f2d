"""A model inside wrappers is read as the model itself: adapters, parallel copies, user-defined
modules with other arguments and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch import nn

import multihead
from data.test_tokenizing import small_tokenizer
from multihead.models.introspect import fingerprint
from multihead.reader.table import Table
from small import IDS, llama

TEXTS = ["a b c a b", "c", "b b a a b c"]
MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0


def gpt2() -> Any:
    torch.manual_seed(1)
    sizes = dict(n_embd=24, n_head=3, n_layer=2, n_positions=64, vocab_size=50)
    return tf.GPT2LMHeadModel(tf.GPT2Config(initializer_range=0.5, **sizes)).eval()


def bert() -> Any:
    torch.manual_seed(1)
    sizes = dict(hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=32)
    config = tf.BertConfig(
        vocab_size=50, max_position_embeddings=64, initializer_range=0.5, **sizes
    )
    return tf.BertForMaskedLM(config).eval()


FAMILIES: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "bert": bert}


def same(got: Table, want: Table) -> None:
    """Equal in all but the paths of the sites and the names of notes."""
    assert [head.head for head in got.heads] == [head.head for head in want.heads]
    assert got.columns == want.columns
    for column in want.columns:
        assert got.count(column).tolist() == want.count(column).tolist(), column
        assert got.value(column) == pytest.approx(
            want.value(column), rel=1e-5, abs=1e-6, nan_ok=True
        ), column
        assert got.error(column) == pytest.approx(
            want.error(column), rel=1e-4, abs=1e-6, nan_ok=True
        ), column
    for name in ("model", "documents", "tokens"):
        assert got.meta[name] == want.meta[name], name


# ---- wrappers


class Plain(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner


class Forwarding(Plain):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class OfX(Plain):
    def forward(self, x: Any) -> Any:
        return self.inner(x)


class Renaming(Plain):
    def forward(self, tokens: Any, attention_mask: Any = None) -> Any:
        return self.inner(input_ids=tokens, attention_mask=attention_mask)


class GivingLogits(Plain):
    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return self.inner(input_ids, attention_mask=attention_mask).logits


class GivingTuple(Plain):
    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return self.inner(input_ids, attention_mask=attention_mask, return_dict=False)


class GivingLoss(Plain):
    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return self.inner(input_ids, attention_mask=attention_mask, labels=input_ids).loss


class WithDecoder(nn.Module):
    """An attribute that is the name of something else."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.vision_encoders = nn.ModuleList([inner])
        self.config = inner.config

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return self.vision_encoders[0](input_ids, attention_mask=attention_mask)


class ValueHead(Plain):
    """As for reinforcement learning: more parameters than the model's own."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.value = nn.Linear(24, 1)

    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        out = self.inner(
            input_ids, attention_mask=attention_mask, output_hidden_states=True, **kwargs
        )
        return out.logits, self.value(out.hidden_states[-1])


def lora(model: Any) -> Any:
    import peft

    names = [
        n for n in ("q_proj", "c_attn", "query") if any(n in m for m, _ in model.named_modules())
    ]
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=names)).eval()


def prepared(model: Any) -> Any:
    import accelerate

    return accelerate.Accelerator(cpu=True, mixed_precision="no").prepare_model(
        model, evaluation_mode=True
    )


def compiled(model: Any) -> Any:
    return Forwarding(torch.compile(model, backend="eager"))


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DataParallel": nn.DataParallel,
    "accelerate": prepared,
    "Sequential": nn.Sequential,
    "LoRA": lora,
    "compiled inside": compiled,
    "twice": lambda model: OfX(nn.DataParallel(Forwarding(model))),
} | {
    kind.__name__: kind
    for kind in (
        Forwarding,
        OfX,
        Renaming,
        GivingLogits,
        GivingTuple,
        GivingLoss,
        WithDecoder,
        ValueHead,
    )
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_texts_under_a_wrapper_give_the_table_without(wrapper: str, family: str) -> None:
    """Cut at the positions of the model inside, with probe, logits and special tokens."""
    texts = [*TEXTS, "a b c " * 40]
    tokenizer = small_tokenizer(pad_token="c", model_max_length=10**9)
    want = multihead.read(FAMILIES[family](), texts, tokenizer=tokenizer)
    got = multihead.read(WRAPPERS[wrapper](FAMILIES[family]()), texts, tokenizer=tokenizer)
    same(got, want)
    if wrapper != "LoRA":  # its layers have other names
        assert got.meta["notes"] == want.meta["notes"]
    assert any("positions; read the first 64" in note for note in got.meta["notes"])
    assert got.columns == want.columns and ("logit" in got.columns) == (family != "bert")
    assert ("probe:induction" in got.columns) == (family != "bert")


def call(model: Any, wrapper: str) -> None:
    if wrapper in ("OfX", "Sequential", "twice"):
        model(IDS)
    elif wrapper == "Renaming":
        model(IDS, MASK)
    else:
        model(input_ids=IDS, attention_mask=MASK)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_loop_under_a_wrapper_gives_the_table_without(wrapper: str, family: str) -> None:
    masked = wrapper not in ("OfX", "Sequential", "twice")
    model = FAMILIES[family]()
    with multihead.reading(model) as plain, torch.no_grad():
        model(input_ids=IDS, attention_mask=MASK if masked else None)
    wrapped = WRAPPERS[wrapper](FAMILIES[family]())
    with multihead.reading(wrapped) as reading, torch.no_grad():
        call(wrapped, wrapper)
    assert reading.verifier is not None and reading.verifier.kinds
    same(reading.table(), plain.table())
    assert reading.table().meta["notes"] == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_model_inside_may_be_called_itself(wrapper: str) -> None:
    """A pass begins wherever sites are reached, whichever object was handed over."""
    model = llama()
    with multihead.reading(model) as plain, torch.no_grad():
        model(input_ids=IDS, attention_mask=MASK)
    inner = llama()
    wrapped = WRAPPERS[wrapper](inner)
    with multihead.reading(wrapped) as reading, torch.no_grad():
        inner(input_ids=IDS, attention_mask=MASK)
    assert reading.verifier is not None and reading.verifier.kinds
    same(reading.table(), plain.table())
    inner = llama()
    wrapped = WRAPPERS[wrapper](inner)
    if wrapper not in ("OfX", "Sequential", "twice"):
        with multihead.reading(inner) as reading, torch.no_grad():
            call(wrapped, wrapper)
        same(reading.table(), plain.table())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_maps_and_ablated_heads_under_a_wrapper(wrapper: str) -> None:
    tokenizer, model = small_tokenizer(), llama()
    wrapped = WRAPPERS[wrapper](llama())
    want = multihead.read_maps(model, TEXTS[0], ["L0.H1", "L1.H2"], tokenizer=tokenizer)
    got = multihead.read_maps(wrapped, TEXTS[0], ["L0.H1", "L1.H2"], tokenizer=tokenizer)
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        assert one.weights == pytest.approx(other.weights, abs=1e-6)
        assert one.contributions == pytest.approx(other.contributions, rel=1e-4, abs=1e-6)
    over = [{"input_ids": IDS, "attention_mask": MASK}]
    names = {"Renaming": "tokens", "OfX": "x", "Sequential": "input", "twice": "x"}
    ids = names.get(wrapper, "input_ids")
    mine = [{ids: IDS} | ({} if ids in ("x", "input") else {"attention_mask": MASK})]
    if ids in ("x", "input"):
        over = [{"input_ids": IDS}]
    tables = []
    for one, batches in ((model, over), (wrapped, mine)):
        with multihead.ablate_heads(one, "L0.H1", mode="mean", over=batches):
            tables.append(multihead.read(one, TEXTS[:1], tokenizer=tokenizer, probe=False))
    same(tables[1], tables[0])


@pytest.mark.parametrize(
    "wrapper", ["DataParallel", "Sequential", "LoRA", "Forwarding", "OfX", "GivingLogits", "twice"]
)
def test_generated_text_under_a_wrapper(wrapper: str) -> None:
    tokenizer = small_tokenizer(pad_token="c")
    options = dict(tokenizer=tokenizer, generate={"max_new_tokens": 5, "eos_token_id": None})
    want = multihead.read(llama(), TEXTS, **options)
    got = multihead.read(WRAPPERS[wrapper](llama()), TEXTS, **options)
    same(got, want)


@pytest.mark.parametrize("wrapper", ["GivingLogits", "GivingTuple", "ValueHead", "OfX"])
def test_losses_under_a_wrapper(wrapper: str) -> None:
    options: dict[str, Any] = dict(tokenizer=small_tokenizer(pad_token="c"), probe=False)
    options["statistics"] = ["importance", "effect"]
    same(
        multihead.read(WRAPPERS[wrapper](llama()), TEXTS, **options),
        multihead.read(llama(), TEXTS, **options),
    )


def test_a_wrapper_with_parameters_and_no_generate_says_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"ValueHead can't generate text.*pass the model inside it"
    ):
        multihead.read(
            ValueHead(llama()), TEXTS, tokenizer=small_tokenizer(pad_token="c"), generate=3
        )


@contextmanager
def one_process(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_distributed_data_parallel(tmp_path: Any) -> None:
    tokenizer, model = small_tokenizer(pad_token="c"), llama()
    want = multihead.read(model, TEXTS, tokenizer=tokenizer)
    with one_process(tmp_path):
        wrapped = nn.parallel.DistributedDataParallel(llama())
        same(multihead.read(wrapped, TEXTS, tokenizer=tokenizer), want)
        with multihead.reading(wrapped) as reading:
            wrapped(IDS).logits.sum().backward()
    assert reading.table().meta["tokens"] == IDS.numel()


def test_a_wrapper_of_several_devices_is_refused() -> None:
    wrapped = nn.DataParallel(llama())
    wrapped.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"on 2 devices.*pass model\.module"):
        multihead.read(wrapped, [{"input_ids": IDS}])


def test_tables_of_a_model_and_of_its_wrapper_add_up() -> None:
    model, tokenizer = llama(), small_tokenizer(pad_token="c")
    one = multihead.read(model, TEXTS[:1], tokenizer=tokenizer)
    two = multihead.read(OfX(model), TEXTS[1:], tokenizer=tokenizer)
    assert (one + two).meta["documents"] == 3
    assert fingerprint(ValueHead(model)) != fingerprint(model) == fingerprint(GivingLoss(model))


class OfBatch(Plain):
    def forward(self, batch: Any) -> Any:
        return self.inner(**batch)


def test_a_wrapper_of_unknown_arguments_says_what_to_do() -> None:
    inputs = {"input_ids": IDS}
    with pytest.raises(ValueError, match=r"OfBatch\.forward\(batch\).*ready-made.*model\.inner"):
        multihead.read(OfBatch(llama()), TEXTS, tokenizer=small_tokenizer())
    same(
        multihead.read(OfBatch(llama()), [{"batch": inputs}], probe=False),
        multihead.read(llama(), [inputs], probe=False),
    )


# ---- wrappers that call the model several times, or several models


class Twice(Plain):
    def forward(self, first: Any, second: Any) -> Any:
        return self.inner(first).logits, self.inner(second).logits


def test_a_wrapper_that_calls_the_model_twice_reads_two_documents() -> None:
    model = llama()
    with multihead.reading(model) as plain, torch.no_grad():
        model(IDS[:1])
        model(IDS[1:, :7])
    wrapped = Twice(llama())
    with multihead.reading(wrapped) as reading, torch.no_grad():
        wrapped(IDS[:1], IDS[1:, :7])
    same(reading.table(), plain.table())
    assert reading.table().meta["notes"] == []
    with pytest.raises(ValueError, match="the model around it calls it several times"):
        multihead.read_maps(wrapped, {"first": IDS[:1], "second": IDS[:1]}, "L0.H0")


class Writing(Plain):
    def forward(self, prompt: Any) -> Any:
        return self.inner.generate(
            prompt, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
        )


def test_a_wrapper_that_generates_in_its_forward() -> None:
    model = llama()
    ids = Writing(model)(IDS)
    with multihead.reading(model) as plain, torch.no_grad():
        model(ids[:, :-1])
    wrapped = Writing(llama())
    with multihead.reading(wrapped) as reading, torch.no_grad():
        wrapped(IDS)
    same(reading.table(), plain.table())


class Dual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = bert().bert, bert().bert

    def forward(self, query: Any, document: Any) -> Any:
        first = self.query(query).last_hidden_state[:, 0]
        return first @ self.document(document).last_hidden_state[:, 0].T


def test_two_models_in_one_wrapper() -> None:
    model, alone = Dual().eval(), bert().bert
    with multihead.reading(model) as reading, torch.no_grad():
        model(IDS, IDS[:, :9])
    with multihead.reading(alone) as plain, torch.no_grad():
        alone(IDS)
    got, want = reading.table(), plain.table()
    for column in want.columns:
        assert got.value(column)[:6] == pytest.approx(want.value(column), rel=1e-5, nan_ok=True)


# ---- parts


def test_an_encoder_alone_is_called_as_its_forward_says() -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3)
    tokenizer = small_tokenizer(pad_token="c")
    whole = tf.UMT5Model(tf.UMT5Config(decoder_start_token_id=0, **sizes)).eval()
    encoder = tf.UMT5EncoderModel(whole.config).eval()
    encoder.load_state_dict(whole.state_dict(), strict=False)
    tables = [
        multihead.read(model, TEXTS, tokenizer=tokenizer)
        for model in (encoder, whole.get_encoder(), nn.DataParallel(encoder))
    ]
    for table in tables[1:]:
        for column in tables[0].columns:
            assert table.value(column) == pytest.approx(
                tables[0].value(column), rel=1e-5, abs=1e-6, nan_ok=True
            )
    both = multihead.read(whole, TEXTS, tokenizer=tokenizer)
    assert tables[0].value("entropy") == pytest.approx(both.value("entropy")[:6], rel=1e-5)
    assert tables[0].meta["tokens"] == both.meta["tokens"]


def test_a_part_of_a_model_is_verified_and_counted() -> None:
    model = llama()
    with multihead.reading(model) as whole, torch.no_grad():
        model(IDS)
    with multihead.reading(model) as reading, torch.no_grad():
        model.model(IDS)
    assert reading.verifier is not None and reading.verifier.kinds
    got, want = reading.table(), whole.table()
    for column in got.columns:
        assert got.value(column) == pytest.approx(want.value(column), rel=1e-5, nan_ok=True)
    assert got.meta["tokens"] == 24 and got.meta["documents"] == 2
    assert got.meta["notes"] == ["only a part of the model was called: model"]
    assert got.reasons["logit"] == "only a part of the model was called"
    same(multihead.read(model.model, [{"input_ids": IDS}], probe=False), got_of(model.model))


def got_of(model: Any) -> Table:
    with multihead.reading(model) as reading, torch.no_grad():
        model(IDS)
    return reading.table()


def test_a_single_layer_is_a_pass() -> None:
    model = llama()
    layer, x = model.model.layers[0], torch.randn(1, 6, 24)
    places = model.model.rotary_emb(x, torch.arange(6)[None])
    with multihead.reading(layer) as alone, torch.no_grad():
        layer(x, position_embeddings=places)
    with multihead.reading(model) as inside, torch.no_grad():
        layer(x, position_embeddings=places)
    assert alone.verifier is not None and alone.verifier.kinds
    assert alone.table().meta["tokens"] == inside.table().meta["tokens"] == 6
    assert alone.table().value("entropy") == pytest.approx(inside.table().value("entropy")[:3])


def test_a_difference_in_a_part_is_found() -> None:
    """An encoder that is called alone is compared, too."""
    model = llama()
    from multihead.models.instrument import Tap, instrument
    from multihead.ops.functional import compute

    class Wrong(Tap):
        def attend(self, site: Any, call: Any, compute: Any) -> Any:
            return compute(call) * 1.01

    assert compute is not None
    with (
        pytest.raises(multihead.errors.ReadingError, match="gives another output under reading"),
        multihead.reading(model),
        instrument(model, Wrong()),
        torch.no_grad(),
    ):
        model.model(IDS)


def test_an_encoder_that_ran_alone_begins_the_documents() -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=3)
    model = tf.T5ForConditionalGeneration(tf.T5Config(decoder_start_token_id=0, **sizes)).eval()
    with multihead.reading(model) as whole, torch.no_grad():
        model(input_ids=IDS, decoder_input_ids=IDS[:, :5])
    with multihead.reading(model) as parts, torch.no_grad():
        encoded = model.get_encoder()(IDS)
        model(encoder_outputs=encoded, decoder_input_ids=IDS[:, :5])
    same(parts.table(), whole.table())


def test_a_pass_that_failed_leaves_no_trace() -> None:
    model = llama()
    wrapped = OfX(model)
    with multihead.reading(wrapped) as reading, torch.no_grad():
        with pytest.raises(IndexError):
            wrapped(IDS + 1000)
        model.model(IDS)  # a pass of its own, not one inside the pass that failed
    assert reading.table().meta["tokens"] == 24


def test_recomputed_layers_are_no_passes() -> None:
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with multihead.reading(model) as reading:
        model(IDS, use_cache=False).logits.sum().backward()
    assert reading.table().meta["tokens"] == 24
    assert reading.table().meta["documents"] == 2
