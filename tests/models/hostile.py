"""Checkpoints that were made to do harm, each a change of a small good one, for tests of loading."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.checkpoints import edit

Change = Callable[[Path], None]
LINK = "\x1b]8;;http://evil\x1b\\x\x1b]8;;\x1b\\"
CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
COLOUR = "\x1b[31mred\x1b[0m\u202e\nnew line\x00[red]markup[/red]"
LONG = "x" * 10_000_000
DEEP = "[" * 200_000 + "]" * 200_000


def config(**entries: Any) -> Change:
    """A change of config.json; None removes an entry."""
    return lambda folder: edit(folder / "config.json", **entries)


def null(name: str) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, name: None}))

    return change


def raw(name: str, content: str | bytes) -> Change:
    """Another content of a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: void((folder / name).write_bytes(data))


def void(*_: object) -> None:
    pass


def settings(**entries: Any) -> Change:
    """A change of tokenizer_config.json."""
    return lambda folder: edit(folder / "tokenizer_config.json", **entries)


def tokenizer(**entries: Any) -> Change:
    """A change of tokenizer.json."""
    return lambda folder: edit(folder / "tokenizer.json", **entries)


def index(content: Any) -> Change:
    """An index in place of the weights, which become a.safetensors."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def entry(value: Any) -> Change:
    """An index with one entry that isn't the name of a file in the folder."""
    return index({"metadata": {}, "weight_map": {"lm_head.weight": value}})


def pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def link(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def folder_named(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def header(content: Any, data: bytes = b"\0" * 64, length: int | None = None) -> Change:
    """Weights with another header."""

    def change(folder: Path) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        size = struct.pack("<Q", len(text) if length is None else length)
        (folder / "model.safetensors").write_bytes(size + text + data)

    return change


def cut(name: str, keep: int) -> Change:
    return lambda folder: void((folder / name).write_bytes((folder / name).read_bytes()[:keep]))


def tensor(dtype: str = "F32", shape: Any = (4, 4), offsets: Any = (0, 64)) -> dict[str, Any]:
    return {"lm_head.weight": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def template(token: str) -> dict[str, Any]:
    """A post-processor that panics as soon as a text is encoded."""
    single = [
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}


CODE = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
UNKNOWN = {"model_type": "evil", "architectures": ["Evil"]}

# --- texts from a checkpoint that reach the terminal through a message ---
TEXTS: dict[str, Change] = {
    f"{what} with {kind}": change(text)
    for kind, text in {"a link": LINK, "the clipboard": CLIPBOARD, "colours": COLOUR}.items()
    for what, change in {
        "a model type": lambda text: config(model_type=text),
        "an architecture": lambda text: config(architectures=[text], model_type="evil"),
        "code": lambda text: config(**UNKNOWN, auto_map={"AutoModel": text}),
        "an index entry": lambda text: entry(text),
        "a missing weight": lambda text: entry(text.replace("/", "").replace("\0", "").strip()),
        "an activation": lambda text: config(hidden_act=text),
        "a width": lambda text: config(hidden_size=text),
        "a kind of rope": lambda text: config(rope_parameters={"rope_type": text}),
        "a tokenizer's class": lambda text: settings(tokenizer_class=text),
        "a regular expression": lambda text: tokenizer(pre_tokenizer=split(f"({text}")),
        "a model of a tokenizer": lambda text: tokenizer(model={"type": text}),
        "a tensor": lambda text: header({text: tensor(dtype=text)["lm_head.weight"]}),
        "a tensor's dtype": lambda text: header(tensor(dtype=text)),
        "a pruned module": lambda text: config(multihead={"version": 1, "sites": {text: {}}}),
        "a version": lambda text: config(multihead={"version": text}),
    }.items()
}
TEXTS |= {
    "a model type of ten million letters": config(model_type=LONG),
    "an architecture of ten million letters": config(architectures=[LONG], model_type="evil"),
    "an index entry of ten million letters": entry(LONG),
    "code of ten million letters": config(**UNKNOWN, auto_map={"AutoModel": LONG}),
    "an adapter's task": both(
        raw("adapter_config.json", json.dumps({"peft_type": COLOUR})),
        raw("adapter_model.safetensors", b"\0" * 8),
    ),
}

# --- wrong types and values in config.json ---
CONFIGS: dict[str, Change] = {
    "architectures a number": config(architectures=3),
    "architectures a text": config(architectures="LlamaForCausalLM"),
    "architectures named values": config(architectures={"a": 1}),
    "architectures of numbers": config(architectures=[3]),
    "an abstract class": config(architectures=["PreTrainedModel"]),
    "a class of another family": config(architectures=["BertModel"]),
    "auto_map a text": config(**UNKNOWN, auto_map="evil.Evil"),
    "auto_map a list": config(**UNKNOWN, auto_map=["evil.Evil"]),
    "auto_map of numbers": config(**UNKNOWN, auto_map={"AutoModel": 3}),
    "auto_map of another repository": config(
        **UNKNOWN, auto_map={"AutoModel": "other/repo--evil.Evil"}
    ),
    "code": config(**UNKNOWN, auto_map=CODE),
    "code of the tokenizer": settings(auto_map={"AutoTokenizer": ["evil.Evil", None]}),
    "code of the tokenizer elsewhere": settings(
        auto_map={"AutoTokenizer": ["other/repo--evil.Evil", None]}
    ),
    "model_type a number": config(model_type=3),
    "model_type a list": config(model_type=["llama"]),
    "nested brackets": raw("config.json", DEEP),
    "nested objects": raw("config.json", '{"a":' * 100_000 + "1" + "}" * 100_000),
    "nested brackets under a name": lambda folder: void(
        (folder / "config.json").write_text(
            (folder / "config.json").read_text().rstrip()[:-1] + f', "rope_scaling": {DEEP}}}'
        )
    ),
    "an empty file": raw("config.json", b""),
    "a list": raw("config.json", "[1]"),
    "a text": raw("config.json", '"llama"'),
    "bytes that aren't UTF-8": raw("config.json", b'{"model_type": "\xff\xfe"}'),
    "a byte order mark": raw("config.json", b'\xef\xbb\xbf{"model_type": "llama"}'),
    "UTF-16": raw("config.json", '{"model_type": "llama"}'.encode("utf-16")),
    "zeros": raw("config.json", b"\0" * 100),
    "a number of 5,000 digits": raw("config.json", '{"vocab_size": ' + "9" * 5000 + "}"),
    "a list where a config is": config(rope_parameters=[1, 2]),
    "rope of 10^30": config(rope_parameters={"rope_type": "linear", "factor": 10**30}),
    "rope theta a text": config(rope_parameters={"rope_type": "default", "rope_theta": "x"}),
    "rope without its factor": config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
    "rope factors of the wrong length": config(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1],
            "long_factor": [1] * 1000,
        }
    ),
    "an unknown rope": config(rope_parameters={"rope_type": "evil", "rope_theta": 1e4}),
    "rope_scaling a number": config(rope_scaling=10**30),
    "an unknown activation": config(hidden_act="evil"),
    "an activation that is a list": config(hidden_act=["silu"]),
    "layer_types of another length": config(layer_types=["full_attention"] * 7),
    "layer_types that don't exist": config(layer_types=["evil", "evil"]),
    "epsilon a text": config(rms_norm_eps="x"),
    "dropout a text": config(attention_dropout="x"),
    "a pad token a text": config(pad_token_id="x"),
    "a pad token outside of the vocabulary": config(pad_token_id=10**6),
    "quantised by nothing": config(quantization_config={"quant_method": "evil"}),
    "quantised by a number": config(quantization_config=3),
    "quantised without its package": config(
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}
    ),
    "dtype unknown": both(config(dtype="evil"), config(torch_dtype="evil")),
    "pruned by a list": config(multihead=[1]),
    "pruned sites a number": config(multihead={"version": 1, "sites": 3}),
    "pruned modules that don't exist": config(multihead={"version": 1, "sites": {"a.b": {}}}),
}
CONFIGS |= {
    f"{name} is {value!r}": config(**{name: value})
    for name, values in {
        "num_attention_heads": (0, -1, 10**9, 2.5, "2", True, [2]),
        "num_key_value_heads": (0, -1, 10**9, 2.5, "1", 3),
        "num_hidden_layers": (-1, 0, 10**6, 10**9, 10**30, 2.5, "2"),
        "hidden_size": (0, -16, 10**9, 10**30, 15.5, "16"),
        "head_dim": (0, -1, 10**9, 7, "8"),
        "intermediate_size": (0, -1, 10**12, "24"),
        "vocab_size": (0, -1, 10**12, 10**30, "20", 2),
        "num_labels": (10**9,),
    }.items()
    for value in values
}
CONFIGS |= {
    f"{name} is null": null(name)
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
}
PRUNED = {"heads": [0], "kv": [0], "reads": [0], "numbers": [0], "of": 2}
CONFIGS |= {
    f"pruned to {key} {value!r}"[:60]: config(
        multihead={"version": 1, "sites": {"model.layers.0.self_attn": {**PRUNED, key: value}}}
    )
    for key, value in {
        "heads": [99],
        "kv": [-5],
        "reads": [7],
        "numbers": "x",
        "of": 10**9,
        "layout": "evil",
        "evil": 1,
    }.items()
} | {
    "pruned by numbers": config(multihead={"version": 1, "sites": {"model.layers.0.self_attn": 3}})
}

# --- weight files ---
WEIGHTS: dict[str, Change] = {
    "an index that is a list": index([1]),
    "an index without weight_map": index({}),
    "an index whose weight_map is a list": index({"weight_map": ["a.safetensors"]}),
    "an index whose weight_map is empty": index({"weight_map": {}}),
    "an index of numbers": entry(3),
    "an index of nulls": entry(None),
    "an index of lists": entry([["a"]]),
    "an index of nested brackets": both(
        index({}), raw("model.safetensors.index.json", '{"weight_map": ' + DEEP + "}")
    ),
    "an entry outside of the folder": entry("../plain/model.safetensors"),
    "an entry outside, later": entry("a/../../plain/model.safetensors"),
    "an entry outside, as on Windows": entry("..\\plain\\model.safetensors"),
    "an absolute entry": entry("/etc/passwd"),
    "an entry on a drive": entry("C:\\model.safetensors"),
    "an empty entry": entry(""),
    "an entry that is the folder": entry("."),
    "an entry with a NUL": entry("a\0.safetensors"),
    "an entry that is a pickle": both(entry("a.bin"), raw("a.bin", b"\x80\x04.")),
    "entries that are safetensors and called pickles": lambda folder: void(
        index({"metadata": {}, "weight_map": dict.fromkeys(("lm_head.weight", "b"), "a.bin")})(
            folder
        ),
        (folder / "a.safetensors").rename(folder / "a.bin"),
    ),
    "entries without an ending": lambda folder: void(
        index({"metadata": {}, "weight_map": {"lm_head.weight": "a"}})(folder),
        (folder / "a.safetensors").rename(folder / "a"),
    ),
    "an entry that is a pipe": both(entry("p.safetensors"), pipe("p.safetensors")),
    "an entry that is a device": both(entry("z.safetensors"), link("z.safetensors", "/dev/zero")),
    "weights named by the config, outside": config(
        transformers_weights="../plain/model.safetensors"
    ),
    "weights named by the config, a pickle": config(transformers_weights="adapter_model.bin"),
    "weights named by the config, a number": config(transformers_weights=3),
    "weights that are a pipe": pipe("model.safetensors"),
    "weights that are a device": link("model.safetensors", "/dev/zero"),
    "weights that are a folder": folder_named("model.safetensors"),
    "weights that link to themselves": link("model.safetensors", "model.safetensors"),
    "weights that are empty": raw("model.safetensors", b""),
    "weights of zeros": raw("model.safetensors", b"\0" * 4096),
    "weights that are a pickle": raw("model.safetensors", b"\x80\x04cos\nsystem\n."),
    "a header of 2^63 bytes": header(tensor(), length=1 << 63),
    "a header of 2^64 - 1 bytes": header(tensor(), length=(1 << 64) - 1),
    "a header that isn't JSON": header(b"{" * 50),
    "a header of nested brackets": header(DEEP.encode()),
    "a header that is a list": header([1]),
    "offsets beyond the file": header(tensor(offsets=(0, 1 << 40))),
    "offsets that go back": header(tensor(offsets=(64, 0))),
    "offsets that are negative": header(tensor(offsets=(-64, 0))),
    "offsets that overlap": header({**tensor(), "b": tensor()["lm_head.weight"]}),
    "a dtype that doesn't exist": header(tensor(dtype="F13")),
    "a shape whose product overflows": header(tensor(shape=(1 << 40, 1 << 40))),
    "a shape of texts": header(tensor(shape=("a",))),
    "a shape larger than its bytes": header(tensor(shape=(400, 400))),
    "weights of a scalar": header(
        {"lm_head.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 64]}}
    ),
    "truncated weights": cut("model.safetensors", 1000),
    "truncated in the length": cut("model.safetensors", 5),
}

# --- files that are something else, and files of the tokenizer ---
FILES: dict[str, Change] = {
    "config.json a folder": folder_named("config.json"),
    "config.json a pipe": pipe("config.json"),
    "config.json a device": link("config.json", "/dev/zero"),
    "config.json a link to itself": link("config.json", "config.json"),
    "generation_config.json a pipe": pipe("generation_config.json"),
    "generation_config.json of nested brackets": raw("generation_config.json", DEEP),
    "generation_config.json a list": raw("generation_config.json", "[1]"),
    "generation_config.json with texts": raw(
        "generation_config.json", '{"max_new_tokens": "x", "num_beams": "y"}'
    ),
    "tokenizer.json a pipe": pipe("tokenizer.json"),
    "tokenizer.json a device": link("tokenizer.json", "/dev/zero"),
    "tokenizer.json a folder": folder_named("tokenizer.json"),
    "tokenizer.json of nested brackets": raw("tokenizer.json", DEEP),
    "tokenizer.json empty": raw("tokenizer.json", b""),
    "tokenizer.json a list": raw("tokenizer.json", "[]"),
    "tokenizer.json a number": raw("tokenizer.json", "3"),
    "tokenizer.json not UTF-8": raw("tokenizer.json", b"\xff\xfe{}"),
    "tokenizer.json without a model": raw("tokenizer.json", "{}"),
    "a vocabulary of texts": tokenizer(
        model={"type": "WordLevel", "vocab": {"a": "b"}, "unk_token": "a"}
    ),
    "a vocabulary of negative ids": tokenizer(
        model={"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}
    ),
    "a vocabulary beyond the embeddings": tokenizer(
        model={"type": "WordLevel", "vocab": {"<unk>": 4_000_000_000}, "unk_token": "<unk>"}
    ),
    "merges of numbers": tokenizer(model={"type": "BPE", "vocab": {"a": 0}, "merges": [3]}),
    "merges that don't exist": tokenizer(
        model={"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}
    ),
    "a regular expression that can't be parsed": tokenizer(pre_tokenizer=split("(((")),
    "a template that panics": tokenizer(post_processor=template("evil")),
    "added tokens of numbers": tokenizer(added_tokens=[3]),
    "added tokens a number": tokenizer(added_tokens=3),
    "tokenizer_config.json a list": raw("tokenizer_config.json", "[1]"),
    "tokenizer_config.json of nested brackets": raw("tokenizer_config.json", DEEP),
    "tokenizer_config.json a pipe": pipe("tokenizer_config.json"),
    "tokenizer_class a number": settings(tokenizer_class=3),
    "a tokenizer's longest text in letters": settings(model_max_length="lots" + COLOUR),
    "a tokenizer's longest text a list": settings(model_max_length=[512]),
    "a tokenizer's longest text true": settings(model_max_length=True),
    "a side of padding that doesn't exist": settings(padding_side="up" + COLOUR),
    "a pad token that is a list": settings(pad_token=[1], eos_token={"content": 3}),
    "a tokenizer file outside of the folder": settings(
        fast_tokenizer_files=["../plain/tokenizer.4.0.0.json"]
    ),
    "decoder of added tokens by letters": settings(added_tokens_decoder={"x": {"content": "a"}}),
    "special_tokens_map.json a list": raw("special_tokens_map.json", "[1]"),
    "a chat template that is a pipe": pipe("chat_template.jinja"),
    "an adapter of another model": raw(
        "adapter_config.json", '{"base_model_name_or_path": "other/repo", "peft_type": "LORA"}'
    ),
    "an adapter that is a pickle": both(
        raw("adapter_config.json", '{"base_model_name_or_path": "x", "peft_type": "LORA"}'),
        raw("adapter_model.bin", b"\x80\x04cos\nsystem\n."),
    ),
    "an adapter of nested brackets": both(
        raw("adapter_config.json", DEEP), raw("adapter_model.safetensors", b"")
    ),
}
