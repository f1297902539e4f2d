"""`Frame`: what all pages share. One HTML file with its style, its scripts and its data inline, and
a content policy that allows these alone and no network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ..outside import clean_lines

# in JSON: an escaped backslash, or a direction mark
ESCAPES = re.compile(r"\\(?:\\|(u(?:061c|200[ef]|202[a-e]|206[6-9])))")


class Frame:
    """A page without its data: a template of `web/` that extends `frame.html.jinja`.

    Args:
        template: its file.
        scripts: files of `web/`, in order.
        style: further rules of style, after those of `page.css`.
        parts: variables of the template; shown escaped, without control characters and direction
            marks.
    """

    def __init__(
        self, template: str, scripts: Sequence[str], *, style: str = "", **parts: Any
    ) -> None:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from markupsafe import Markup

        style, script = read_web_file("page.css") + style, "".join(map(read_web_file, scripts))
        environment = Environment(
            autoescape=True,
            finalize=_harmless,
            undefined=StrictUndefined,
            trim_blocks=True,
            loader=FunctionLoader(read_web_file),
        )
        self._template = environment.get_template(template)
        self._parts = parts | {
            "style": Markup(style),
            "script": Markup(script),
            "style_hash": _hash(style),
            "script_hash": _hash(script),
        }

    @property
    def size(self) -> int:
        """Bytes of the page without data."""
        return len(self._render("").encode())

    def render(self, data: dict[str, Any]) -> str:
        """The whole page."""
        return self._render(as_json(data))

    def _render(self, data: str) -> str:
        from markupsafe import Markup

        return self._template.render(self._parts | {"data": Markup(data)})  # no "<" in it


def as_json(data: dict[str, Any]) -> str:
    """JSON without "<", so that no token's text can end the <script> that holds it, and without
    direction marks, which reorder what the page shows around a token.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return ESCAPES.sub(lambda found: "\\ufffd" if found[1] else found[0], text)


def read_web_file(name: str) -> str:
    """The text of a file in `web/`."""
    return files(__package__).joinpath("web", name).read_text(encoding="utf-8")


def _harmless(value: Any) -> Any:
    from markupsafe import Markup

    return clean_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _hash(text: str) -> str:
    """The hash by which the page's content policy allows this script or style, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
