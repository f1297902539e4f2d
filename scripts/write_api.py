#!/usr/bin/env python3
"""Write docs/api.md, the list of the public names, from their docstrings.

scripts/write_api.py             # write the page
scripts/write_api.py --check     # exit code 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
# Where public names are imported from; a name is listed under the first place that has it.
PLACES = (
    *("", "masks", "ops", "layers", "models", "data", "reader", "pruning", "costs", "checks"),
    *("testing", "errors"),
)
WIDTH = 100  # of a signature
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
HEAD = """# API

Written by `scripts/write_api.py` from the docstrings. The front door `multihead` has the names that most programs need;
the others are in the submodules `multihead.masks`, `ops`, `layers`, `models`, `data`, `reader`, `pruning`, `costs`, `checks`,
`testing` and `errors`.

Shapes: `B` batch, `L` queries, `S` keys, `D` model width (`embed_dim`), `H` query heads (`num_heads`), `G` key/value heads
(`num_kv_heads`), `E` width of a head (`head_dim`), `Ev` width of its values, `V` vocabulary.
"""


def public_names() -> dict[str, list[tuple[str, Any]]]:
    """Names and values by place, each value once."""
    seen: set[int] = set()
    found: dict[str, list[tuple[str, Any]]] = {}
    for place in PLACES:
        path = f"multihead.{place}".rstrip(".")
        module = importlib.import_module(path)
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            if inspect.ismodule(value) or isinstance(value, str) or id(value) in seen:
                continue
            seen.add(id(value))
            found.setdefault(path, []).append((name, value))
    return found


def signature(name: str, value: Any) -> str:
    """`name(arguments) -> result`, on one line or with one argument a line."""
    try:
        call = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    arguments: list[str] = []
    is_keyword_only = False
    for parameter in call.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_keyword_only = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            arguments.append("*")
        arguments.append(argument(parameter))
    result = "" if inspect.isclass(value) else annotation(call.return_annotation, " -> ")
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {text}," for text in arguments), f"){result}"])


def argument(parameter: inspect.Parameter) -> str:
    """`name: type = default`, with stars."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}{annotation(parameter.annotation, ': ')}"
    if parameter.default is parameter.empty:
        return text
    default = repr(parameter.default)
    if inspect.isfunction(parameter.default) or " at 0x" in default or "factory" in default:
        default = getattr(parameter.default, "__name__", "...").replace("<lambda>", "...")
    return f"{text} = {default}" if ": " in text else f"{text}={default}"


def annotation(value: Any, before: str) -> str:
    if value is inspect.Signature.empty:
        return ""
    return before + (value if isinstance(value, str) else getattr(value, "__name__", str(value)))


def render_docstring(text: str) -> list[str]:
    """A docstring as Markdown: sections as lists, examples as code."""
    lines: list[str] = []
    in_section = in_example = False
    for line in inspect.cleandoc(text).splitlines():
        is_example = line.lstrip().startswith((">>>", "...")) or (in_example and line.strip())
        if is_example and not in_example:
            lines.append("```python")
        elif in_example and not is_example:
            lines.append("```")
        in_example = bool(is_example)
        if in_example:
            lines.append(line)
        elif SECTION.match(line):
            in_section = True
            lines += ["", f"**{line.rstrip(':')}**", ""]
        elif in_section and re.match(r"    \S", line):
            lines.append(re.sub(r"^([\w*, ./]+?):(\s|$)", r"- `\1`:\2", line.strip()))
        else:
            in_section = in_section and (not line or line.startswith(" "))
            lines.append(f"  {line.strip()}".rstrip() if in_section else line)
    return lines + ["```"] * in_example


def methods(value: type) -> list[tuple[str, Any]]:
    """Public methods and properties that a class defines and documents."""
    found = []
    for name, member in vars(value).items():
        inner = getattr(member, "__func__", member)
        is_callable = inspect.isfunction(inner) or isinstance(member, property)
        if not name.startswith("_") and is_callable and inspect.getdoc(inner):
            found.append((name, member))
    return found


def render_entry(name: str, value: Any, level: str) -> list[str]:
    lines = [f"{level} {name}", ""]
    if isinstance(value, property):
        return [*lines, *render_docstring(value.__doc__ or ""), ""]
    value = getattr(value, "__func__", value)
    if callable(value):
        lines += ["```python", signature(name.rpartition(".")[2], value), "```", ""]
    documented = value if callable(value) else None
    return [*lines, *render_docstring(inspect.getdoc(documented) or ""), ""]


def render_page() -> str:
    lines = [HEAD]
    for path, names in public_names().items():
        summary = (inspect.getdoc(importlib.import_module(path)) or "").partition("\n\n")[0]
        lines += [f"## {path}", "", summary, ""]
        for name, value in names:
            if not callable(value):
                lines += [
                    f"### {name}",
                    "",
                    f"A {type(value).__name__} of {len(value)} entries.",
                    "",
                ]
                continue
            lines += render_entry(name, value, "###")
            is_own = type(value).__module__.startswith("multihead.")  # an object that is called
            if inspect.isclass(value) or is_own:
                for method, member in methods(value if inspect.isclass(value) else type(value)):
                    lines += render_entry(f"{name}.{method}", member, "####")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare the page")
    is_check = parser.parse_args().check
    text = render_page()
    if not is_check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/api.md is out of date; run: scripts/write_api.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
