"""Read what a model generates: the prompt's pass, then a pass a token with the KV cache. Without
one each pass is the whole text so far, of which only the new token counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError, ReadingError
from ..models.instrument import PassInputs, Tap, instrument
from ..models.introspect import adds_parameters, can_generate, inner_model, is_encoder_decoder
from .session import Reading

# With these options rows change places, repeat, end unseen, or are drafted and taken back.
REFUSED = {
    "num_beams",
    "num_return_sequences",
    "num_beam_groups",
    "penalty_alpha",
    "assistant_model",
    "custom_generate",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "stop_strings",
    "stopping_criteria",
    "cache_implementation",
    "return_dict_in_generate",
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "past_key_values",
}


def options_of(
    model: nn.Module, generate: int | Mapping[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """Arguments of `model.generate`: greedy decoding by default.

    Raises:
        MultiheadError: a model that can't generate, no number of tokens, or a decoding method that
            can't be followed.
    """
    generator = generator_of(model)
    if not hasattr(generator, "generate") or not can_generate(generator):
        inner = inner_model(model)
        advice = (
            "pass the model inside it, or call the model's own loop within multihead.reading(model)"
            if can_generate(inner)
            else "load the model with its head (AutoModelForCausalLM, AutoModelForSeq2SeqLM)"
        )
        raise MultiheadError(
            f"generate={generate!r}: {type(model).__name__} can't generate text; leave it out, or"
            f" {advice}"
        )
    given = {"max_new_tokens": generate} if not isinstance(generate, Mapping) else dict(generate)
    number = given.get("max_new_tokens")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise MultiheadError(
            f"generate={generate!r}: expected a number of new tokens of at least 1, or a dict with "
            "'max_new_tokens' and other arguments of model.generate"
        )
    odd = [
        f"{name}={given[name]!r}"
        for name in given
        if name in REFUSED and given[name] not in (None, 1)
    ]
    if odd:
        raise MultiheadError(
            f"generate: {', '.join(odd)} can't be read, since rows then change places, repeat or"
            " end unseen; read the finished text instead, or call model.generate within"
            " multihead.reading(model)"
        )
    config: Any = getattr(inner_model(model), "generation_config", None)
    ends = given.get("eos_token_id", getattr(config, "eos_token_id", None))
    pad = getattr(tokenizer, "pad_token_id", None)
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    if pad is None:
        pad = ends[0] if isinstance(ends, list) and ends else ends if isinstance(ends, int) else 0
    return (
        {"do_sample": False, "pad_token_id": pad}
        | given
        | {"num_beams": 1, "num_return_sequences": 1}
        | {"use_cache": given.get("use_cache") is not False}
    )


def generator_of(model: nn.Module) -> Any:
    """The module whose `generate` continues a text: the model, or that inside wrappers which add
    no parameter to it.
    """
    if hasattr(model, "generate") or adds_parameters(model):
        return model
    return inner_model(model)


def generate_under_reading(
    session: Reading, inputs: dict[str, Tensor], options: dict[str, Any]
) -> None:
    """Let the model continue the inputs, and read its steps; rows that have ended no longer count.

    The last token of each row is generated but never read, so it has no query.

    Raises:
        ReadingError: a cache that can't be followed.
    """
    model = session.model
    config: Any = getattr(inner_model(model), "generation_config", None)
    given = options.get("eos_token_id", getattr(config, "eos_token_id", None))
    ends = given if isinstance(given, list) else [given] if given is not None else []
    steps = _Steps(session, torch.tensor(ends, dtype=torch.int64, device="cpu"))
    session.tokens.announced = inputs["input_ids"]
    session.tokens.repeated.expected = True
    try:
        with session.passes(select=None), instrument(model, steps, sites=session.sites):
            generator_of(model).generate(**inputs, **options)
    finally:
        session.tokens.announced = None
        session.tokens.repeated.expected = False


class _Steps(Tap):
    """Counts only rows that haven't ended."""

    def __init__(self, session: Reading, ends: Tensor) -> None:
        self.session, self.ends = session, ends
        self.steps = 0
        self.encodes = is_encoder_decoder(session.model)
        self.ended: Tensor | None = None  # bool [B]

    def begin_pass(self, inputs: PassInputs) -> None:
        named = inputs.named()
        if self.encodes and named.get("encoder_outputs") is None:
            return  # of the encoder alone
        self.steps += 1
        if self.steps == 1:
            return  # of the prompt, in which an end token ends nothing
        ids = named.get("decoder_input_ids")
        ids = named.get("input_ids") if ids is None else ids
        if ids is None:
            raise ReadingError(
                f"generate: {type(self.session.model).__name__} isn't given token ids, so its steps"
                " can't be read; read the finished text instead"
            )
        now = torch.isin(ids[:, -1], self.ends.to(ids.device))
        self.ended = now if self.ended is None else self.ended | now
        self.session.count_only(~self.ended[:, None])

    def end_pass(self, outputs: Any) -> None:
        inputs = self.session.tokens.inputs.values()
        stacks = [
            given for given in inputs if given.ids is not None and (given.past or given.repeats)
        ]
        if self.steps > 1 and (not stacks or any(given.key_ids is None for given in stacks)):
            raise ReadingError(
                f"generate: the cache of {type(self.session.model).__name__} can't be followed, nor"
                " is it given its whole text so far in each step, so the tokens of its keys are"
                " unknown; read the finished text instead"
            )
