"""Code for a pruned checkpoint whose config has no place for its heads: by it plain transformers,
and what builds on it (pipelines, sentence-transformers), opens the checkpoint where multihead is
installed and code of checkpoints is trusted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .pruned import MODULE, restore_original_class
from .resize import resize_as_configured
from .transformers import NAME

__all__ = ["loadable", "write_pruned_code"]

TEXT = '''"""Opens this checkpoint with the attention heads that are left in each layer.

transformers runs it, given trust_remote_code=True, where multihead is installed.
"""

from multihead.models.pruned_code import loadable

{lines}
'''


def write_pruned_code(model: Any, folder: Path) -> str | None:
    """Add code to a checkpoint that opens it with its heads, as the automatic classes find it.

    Returns:
        The automatic class that opens the whole model; None where there is none, or the checkpoint
        has code already, and nothing is written.
    """
    from transformers.models.auto import modeling_auto

    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    kind = type(model)
    if content.get("auto_map") or not kind.__module__.startswith("transformers.models."):
        return None
    found: dict[str, Any] = {}
    for name, auto in vars(modeling_auto).items():
        if name.startswith("AutoModel") and hasattr(auto, "_model_mapping"):
            known = auto._model_mapping.get(type(model.config), ())
            if kind is known or (isinstance(known, tuple) and kind in known):
                found[name] = f"Pruned{kind.__name__}"
    if not found:
        return None
    whole = min(found, key=len)
    lines = [f'Pruned{kind.__name__} = loadable("{kind.__name__}")']
    base = type(getattr(model, model.base_model_prefix, None))
    if (
        "AutoModel" not in found
        and modeling_auto.MODEL_MAPPING.get(type(model.config), None) is base
    ):
        found["AutoModel"] = f"Pruned{base.__name__}"
        lines.append(f'Pruned{base.__name__} = loadable("{base.__name__}", whole=False)')
    content["auto_map"] = {name: f"{MODULE}.{named}" for name, named in found.items()}
    text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True)
    file.write_text(f"{text}\n", encoding="utf-8")
    (folder / f"{MODULE}.py").write_text(TEXT.format(lines="\n".join(lines)), encoding="utf-8")
    return whole


def loadable(name: str, whole: bool = True) -> Any:
    """A subclass of a class of transformers, whose `from_pretrained` builds a model with the heads
    that the config lists and returns it as one of the class itself.

    Args:
        name: of the class.
        whole: whether the config lists the heads by the names of this class' modules; else by those
            of a class around it.
    """
    import transformers

    kind: Any = getattr(transformers, name)

    class Loadable(kind):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            sites: Mapping[str, Any] = getattr(config, NAME)["sites"]
            start = "" if whole else f"{self.base_model_prefix}."
            inside = {
                site.removeprefix(start): layout
                for site, layout in sites.items()
                if site.startswith(start)
            }
            resize_as_configured(self, inside)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            found = super().from_pretrained(*args, **kwargs)
            restore_original_class(found[0] if isinstance(found, tuple) else found, kind)
            return found

    Loadable.__name__ = kind.__name__
    # transformers finds the names of weights in its own classes' checkpoints by the module
    Loadable.__module__ = kind.__module__
    return Loadable
