"""`multihead.read`: a model and texts in, a table of heads out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from ..models.interface import evaluation
from .also import afterwards, classes_of, one_pass, require_also
from .inputs import lean
from .session import Reading, reading, require_model
from .statistics import PROBED
from .table import Table

PROBE_BLOCK = 48  # random tokens in a block
PROBE_BATCH = 4  # blocks, each said twice
PROBE_SEED = 0

Batch = dict[str, Any]
Progress = Callable[[int, int], None]  # sites read, sites to read in all batches


def read(
    model: nn.Module,
    texts: str | Sequence[str] | Batch | Iterable[Batch],
    *,
    tokenizer: Any = None,
    batch_size: int = 8,
    special_ids: Iterable[int] | None = None,
    probe: bool | None = None,
    classes: Mapping[str, str] | None = None,
    also: str | Iterable[str] = (),
    progress: Progress | None = None,
) -> Table:
    r"""What each head of a model does on some text.

    Args:
        model: a transformers model whose attention goes through transformers' attention interface. It is put in
            evaluation mode for the reading and is afterwards as it was.
        texts: one text, several (an encoder-decoder reads them on both sides), or batches of ready-made model inputs
            (dicts of tensors; the model's own 2-D `attention_mask` says which rows are real).
        tokenizer: needed for texts. Texts longer than the model's positions are cut, and `table.meta["notes"]` says so.
        batch_size: texts in one pass.
        special_ids: token ids that count as special; by default the tokenizer's, else those the config names.
        probe: also run the probe (random tokens said twice), which alone shows induction. None: for causal text models.
        classes: names of classes of tokens, each with a regular expression that is searched for in a token's text, such as
            {"digits": r"\d"}; gives the masses `class:digits`.
        also: statistics that cost more than a pass: "copying", "importance", "effect", "effect_mean", "nearest".
            `multihead.statistics()` says what they are and cost.
        progress: called as each site of each batch was read, with the number so far and the total (0 where it isn't known).

    Returns:
        The table: `rows()`, `value(column)`, `to_pandas()`, `save(path)`; tables of one model add up.

    Raises:
        ValueError: an empty text, texts without a tokenizer, a model that can't be reached.
        ReadingError: a model that would be read wrongly, naming the first site that differs.

    >>> import multihead
    >>> model, tokenizer = multihead.builtin()
    >>> table = multihead.read(model, "the cat sat on the mat and the cat sat", tokenizer=tokenizer)
    >>> len(table.heads) == len(table.rows())
    True
    """
    require_model(model)
    asked_also, named = require_also(also), classes_of(classes, tokenizer)
    notes: list[str] = []
    batches, number = prepare(model, texts, tokenizer, batch_size, notes)
    if special_ids is None and tokenizer is not None:
        special_ids = special_of(tokenizer)
    with evaluation(model), torch.no_grad(), reading(model, special_ids=special_ids) as session:
        session.added += named
        for name in asked_also:
            session.reasons.pop(name)  # "only on request"
        done = itertools.count(1)
        removals = len(asked_also & {"effect", "effect_mean"}) * sum(site.num_heads for site in session.sites)

        total = number * (len(session.sites) + removals)

        def step() -> None:
            if progress is not None:  # a site may run several times a pass
                progress(min(next(done), total) if total else next(done), total)

        session.on_site = step
        used = False
        kept = []
        for batch in batches:
            one_pass(session, batch, asked_also, step)
            if "effect_mean" in asked_also:
                kept.append(batch)
            used |= "input_ids" in batch
        afterwards(session, kept, asked_also, step)
        if progress is not None and total and next(done) <= total:  # or not at all
            progress(total, total)
        if not session.documents:
            raise ValueError("texts is empty: expected at least one text or one batch of inputs to read")
        asked = probe
        if probe and not _text_model(model):
            raise ValueError(f"probe=True: {type(model).__name__} isn't a causal text model, and the probe is of random tokens")
        if probe is None:
            probe = bool(session.causal) and used and _text_model(model)
        if probe:
            run_probe(session, tokenizer)
            session.reasons.clear()
        else:
            why = "the probe runs on causal text models" if asked is None else "the probe was turned off"
            session.reasons.update({f"probe:{mass}": why for mass in PROBED})
    table = session.table()
    table.meta |= {"dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    table.meta["notes"] = notes + table.meta["notes"]
    return table


def run_probe(session: Reading, tokenizer: Any = None) -> None:
    """Random tokens said twice: the rows of the second saying show induction where chance can't (Olsson et al. 2022)."""
    ids, select = probe_ids(session.model, session.special, tokenizer)
    device = next(session.model.parameters()).device
    session.prefix, session.select, session.on_site = "probe:", select, None  # progress is of the text
    try:
        session.model(**lean(session.model, {"input_ids": ids.to(device)}))
    finally:
        session.prefix, session.select = "", None


def probe_ids(model: nn.Module, special: Iterable[int], tokenizer: Any = None) -> tuple[Tensor, Tensor]:
    """Ids `[PROBE_BATCH, (1 +) 2 * block]` (the start token first where the tokenizer sets one), and the rows that count."""
    from ..models.texts import max_positions

    config = _text_config(model)
    start = []
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        start = [i for i in tokenizer("a")["input_ids"][:1] if i == tokenizer.bos_token_id]
    limit = max_positions(model.config, tokenizer) or 10**9
    block = max(2, min(PROBE_BLOCK, (limit - len(start)) // 2))
    draw = torch.Generator().manual_seed(PROBE_SEED)
    size = min(config.vocab_size, len(tokenizer) if tokenizer is not None else config.vocab_size)
    allowed = torch.ones(size)
    allowed[[i for i in special if i < size]] = 0
    block = min(block, int(allowed.sum()))
    said = torch.stack([torch.multinomial(allowed, block, generator=draw) for _ in range(PROBE_BATCH)])
    ids = torch.cat([torch.tensor(start, dtype=torch.int64).expand(PROBE_BATCH, -1), said, said], 1)
    select = torch.zeros_like(ids, dtype=torch.bool)
    select[:, len(start) + block :] = True
    return ids, select


def special_of(tokenizer: Any) -> set[int]:
    """The tokenizer's special ids, without padding and unknown (which stand for no place in the text)."""
    return set(tokenizer.all_special_ids) - {tokenizer.pad_token_id, tokenizer.unk_token_id} | {
        i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
        if i is not None}


def prepare(model: nn.Module, texts: Any, tokenizer: Any, batch_size: int,
            notes: list[str]) -> tuple[Iterable[Batch], int]:
    """Texts or batches -> batches on the model's device, and their number (0 where it isn't known)."""
    if isinstance(texts, Mapping):
        texts = [texts]
    if isinstance(texts, str):
        texts = [texts]
    if isinstance(texts, Iterable) and isinstance(texts, Sized):  # a list, a tuple, an array, a column of a data frame
        texts = list(texts)
    if isinstance(texts, list) and all(isinstance(t, str) for t in texts):
        if not texts:
            raise ValueError("texts=[] is empty: expected at least one text to read")
        if tokenizer is None:
            raise ValueError("texts are strings but tokenizer is None: pass tokenizer=AutoTokenizer.from_pretrained(...), "
                             "or batches of ready-made model inputs (dicts of tensors)")
        if isinstance(tokenizer, str) or not callable(tokenizer):
            raise TypeError(f"tokenizer={tokenizer!r} is a {type(tokenizer).__name__}: expected a tokenizer, such as "
                            "AutoTokenizer.from_pretrained(folder) gives")
        if getattr(model, "main_input_name", "input_ids") != "input_ids" and hasattr(model, "config"):
            raise ValueError(f"{type(model).__name__} takes {model.main_input_name}, not text; pass ready-made model inputs "
                             f"(dicts of tensors) from Python: multihead.read(model, [{{{model.main_input_name!r}: ...}}])")
        from ..models.texts import encode, max_positions

        encoded = encode([str(t) for t in texts], tokenizer, limit=max_positions(model.config, tokenizer), batch_size=batch_size)
        notes += encoded.notes
        device = next(model.parameters()).device
        ready = [{k: v.to(device) for k, v in batch.items()} for batch in encoded.batches]
        if getattr(model.config, "is_encoder_decoder", False):
            notes.append("an encoder-decoder reads the text on both sides: the decoder is given it as what it should say")
            ready = [batch | _decoder_inputs(model, batch) for batch in ready]
        return ready, len(ready)
    if not isinstance(texts, Iterable):
        raise TypeError(f"texts is a {type(texts).__name__}: expected a string, a list of strings, or batches of model inputs")
    return _checked(texts), len(texts) if isinstance(texts, Sized) else 0


def _decoder_inputs(model: nn.Module, batch: Batch) -> Batch:
    """The text as a decoder is taught it: one place to the right, behind the start token."""
    config: Any = model.config
    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return {"decoder_input_ids": torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1),
            "decoder_attention_mask": torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], 1)}


def _checked(batches: Iterable[Any]) -> Iterable[Batch]:
    for n, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise TypeError(f"texts[{n}] is a {type(batch).__name__}: expected a list of strings (with tokenizer=), or dicts of "
                            "model inputs such as {'input_ids': ..., 'attention_mask': ...}, and not both")
        yield dict(batch)


def _text_model(model: nn.Module) -> bool:
    config = _text_config(model)
    return isinstance(getattr(config, "vocab_size", None), int) and not getattr(config, "is_encoder_decoder", False)


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
