"""Short labels for attention modules, such as "L12" or "decoder.L0.cross", from their paths."""

from __future__ import annotations

import re

from torch import nn

CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_decoder", re.IGNORECASE)
STACKS = re.compile("encoder|decoder|vision|text|audio|visual|tower")


def stack_of(path: str) -> str:
    """The stack of layers that a module path leads into: "decoder", "encoder", the first part that
    names a tower ("vision_model"), or "".

    >>> [stack_of(f"model.{name}.layers.0.encoder_attn") for name in ("decoder", "vision", "lm")]
    ['decoder', 'vision', '']
    """
    parts = path.split(".")
    parts = parts[: next((n for n, part in enumerate(parts) if part.isdigit()), len(parts) - 1)]
    for stack in ("decoder", "encoder"):
        if any(stack in part for part in parts):
            return stack
    return next((part for part in parts if STACKS.search(part)), "")


def is_cross(path: str, module: nn.Module) -> bool:
    """Whether an attention module reads another sequence, by its attributes, class or path."""
    return bool(
        getattr(module, "is_cross_attention", False)
        or CROSS.search(type(module).__name__)
        or any(CROSS.search(part) for part in path.split(".")[-2:])
    )


def label_paths(paths: list[str]) -> list[str]:
    """A label for each module path, unique among them: the first number is the layer, and stacks
    and kinds are named where there are several.

    >>> label_paths(["encoder.layers.0.attn", "decoder.layers.0.attn", "decoder.layers.0.cross"])
    ['encoder.L0', 'decoder.L0', 'decoder.L0.cross']
    """
    numbered = {path for path in paths if any(map(str.isdigit, path.split(".")))}
    if 0 < len(numbered) < len(paths):  # a pooling layer at the end goes by its path
        labels = iter(label_paths([path for path in paths if path in numbered]))
        return [next(labels) if path in numbered else path for path in paths]
    paths_in = _without_part(paths)
    parts = [_describe(path) for path in paths_in]
    several = len({stack for stack, _, _ in parts}) > 1
    short = [
        ".".join(word for word in (stack if several else "", layer, cross) if word)
        for stack, layer, cross in parts
    ]
    if len(set(short)) == len(short):
        return short
    # Several sites in one layer (windowed and global, for instance) differ in what follows the
    # number of the layer.
    long = [re.sub(r"(?:\w+\.)*?(\d+)\.", r"L\1.", path, count=1) for path in paths_in]
    return long if len(set(long)) == len(long) else paths_in


def _without_part(paths: list[str]) -> list[str]:
    """Drop the leading number where one part of an nn.Sequential holds all the layers."""
    first = {path.partition(".")[0] for path in paths}
    rest = [path.partition(".")[2] for path in paths]
    layered = all(re.search(r"(^|\.)\d+\.", path) for path in rest)
    return rest if len(first) == 1 and first.pop().isdigit() and layered else paths


def _describe(path: str) -> tuple[str, str, str]:
    """A path's first stack, its layer and "cross" or ""."""
    parts = path.split(".")
    number = next((n for n, part in enumerate(parts) if part.isdigit()), None)
    stack = next((part for part in parts[:number] if STACKS.search(part)), "")
    cross = "cross" if CROSS.search(".".join(parts[-2:])) else ""
    return stack, "L0" if number is None else f"L{parts[number]}", cross
