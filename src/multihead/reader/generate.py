"""Reading what a model writes: the prompt's pass, then a pass a token with the cache, under the
same reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError, ReadingError

if TYPE_CHECKING:
    from .session import Reading

# Rows would change places, come twice, end unseen, or be guessed and taken back.
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
    "use_cache",
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
    """What `model.generate` is called with: greedily, unless told otherwise.

    Raises:
        ValueError: a model that can't generate, no number of tokens, or a way of generating that
            can't be followed.
    """
    if not getattr(model, "can_generate", lambda: False)():
        raise MultiheadError(
            f"generate={generate!r}: {type(model).__name__} can't generate text; leave it out, or"
            " load the model with its head (AutoModelForCausalLM, AutoModelForSeq2SeqLM)"
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
            f"generate: {', '.join(odd)} can't be read, for then rows change places, come several"
            " times or end unseen; read the finished text instead, or generate yourself under"
            " multihead.reading(model)"
        )
    config: Any = model.generation_config
    ends = given.get("eos_token_id", config.eos_token_id)
    pad = getattr(tokenizer, "pad_token_id", None)
    pad = config.pad_token_id if pad is None else pad
    if pad is None:
        pad = ends[0] if isinstance(ends, list) and ends else ends if isinstance(ends, int) else 0
    return (
        {"do_sample": False, "pad_token_id": pad}
        | given
        | {"num_beams": 1, "use_cache": True, "num_return_sequences": 1}
    )


def write_on(session: Reading, inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    """Let the model write behind the inputs, and count its steps; rows that have ended don't count
    any more.

    The last token of each row is written but never read, so it has no row.

    Raises:
        ReadingError: a cache that can't be followed.
    """
    model: Any = session.model
    given = options.get("eos_token_id", model.generation_config.eos_token_id)
    ends = torch.tensor(
        given if isinstance(given, list) else [given] if given is not None else [],
        dtype=torch.int64,
    )
    steps = 0
    ended: Tensor | None = None

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal steps, ended
        if session.check.passing:
            return
        steps += 1
        if steps == 1:
            return  # of the prompt: an end token in it ends nothing
        ids = (
            kwargs.get("decoder_input_ids")
            if kwargs.get("decoder_input_ids") is not None
            else kwargs.get("input_ids")
        )
        if ids is None or ids.shape[1] != 1:
            raise ReadingError(
                f"generate: {type(model).__name__} isn't given one new token a step, so its steps"
                " can't be read; read the finished text instead"
            )
        now = torch.isin(ids[:, 0], ends.to(ids.device))
        ended = now if ended is None else ended | now
        session.select = ~ended[:, None]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        stacks = [
            given for given in session.inputs.values() if given.ids is not None and given.past
        ]
        if (
            steps > 1
            and not session.check.passing
            and (not stacks or any(given.key_ids is None for given in stacks))
        ):
            raise ReadingError(
                f"generate: the cache of {type(model).__name__} can't be followed, so the tokens of"
                " its keys aren't known; read the finished text instead"
            )

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    ]
    try:
        model.generate(**inputs, **options)
    finally:
        session.select = None
        for handle in handles:
            handle.remove()
