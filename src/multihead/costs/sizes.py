"""`Sizes`: attention by its sizes alone, in place of a model: plain, with a latent, with windows in
some of the layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from ..errors import MultiheadError
from .shape import Shape, require_even

LATENT = "rotary_dim", "q_latent_dim", "v_head_dim"  # which only a latent has


@dataclass(frozen=True)
class Sizes:
    """The arguments of `cost` in place of a model, each a whole number or None.

    >>> (layer,) = Sizes(1024, 8, kv_latent_dim=256, rotary_dim=32, head_dim=64).to_shapes()
    >>> layer.head_dim, layer.value_dim, layer.cache("bfloat16", 1)
    (96, 64, 576)
    """

    embed_dim: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    num_layers: int | None = None
    kv_latent_dim: int | None = None
    rotary_dim: int | None = None
    q_latent_dim: int | None = None
    v_head_dim: int | None = None
    num_window_layers: int | None = None

    def require_whole(self, **others: object) -> None:
        """Raise where one of them, or of other arguments, isn't a positive whole number."""
        for name, value in (asdict(self) | others).items():
            whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if value is not None and not whole:
                raise MultiheadError(f"{name}={value!r}: expected a whole number, at least 1")

    def require_none(self) -> None:
        """Raise where one of them is given next to a model."""
        for name, value in asdict(self).items():
            if value is not None:
                raise MultiheadError(
                    f"{name}={value}: goes with embed_dim, not with a model, which has its own"
                    " sizes"
                )

    def to_shapes(self, window: int | None = None) -> list[Shape]:
        """A shape for each layer; the first `num_window_layers` have the window.

        Raises:
            MultiheadError: sizes that don't go together.
        """
        layers = self.num_layers or 1
        windows = self.num_window_layers
        if windows is not None and window is None:
            raise MultiheadError(
                f"num_window_layers={windows}: give the window of these layers too, window"
            )
        if windows is not None and windows > layers:
            raise MultiheadError(
                f"num_window_layers={windows}, num_layers={layers}: there are fewer layers; give at"
                f" most {layers}"
            )
        shape = self._shape()
        windows = layers if windows is None else windows
        return [
            replace(shape, label=f"L{n}", window=window if n < windows else None)
            for n in range(layers)
        ]

    def _shape(self) -> Shape:
        """The shape of one layer, without a window."""
        embed_dim, num_heads, width = self.embed_dim or 0, self.num_heads, self.head_dim
        if num_heads is None:
            raise MultiheadError(f"embed_dim={embed_dim}: give the number of heads too, num_heads")
        if width is None and embed_dim % num_heads:
            raise MultiheadError(
                f"embed_dim={embed_dim}, num_heads={num_heads}: {num_heads} heads don't divide"
                f" {embed_dim}; give a number that does, or the width of a head, head_dim"
            )
        width = width or embed_dim // num_heads
        if self.kv_latent_dim is None:
            for name in LATENT:
                if (value := getattr(self, name)) is not None:
                    raise MultiheadError(
                        f"{name}={value}: goes with a latent; give its width too, kv_latent_dim"
                    )
            groups = self.num_kv_heads or num_heads
            require_even(num_heads, groups)
            return Shape(embed_dim, num_heads, groups, width, width)
        if self.num_kv_heads not in (None, num_heads):
            raise MultiheadError(
                f"num_kv_heads={self.num_kv_heads}, kv_latent_dim={self.kv_latent_dim}: with a"
                " latent each query head has its own key; leave out num_kv_heads"
            )
        rotary = self.rotary_dim or 0
        return Shape(
            embed_dim,
            num_heads,
            num_heads,
            width + rotary,
            self.v_head_dim or width,
            latent_dim=self.kv_latent_dim,
            rope_dim=rotary,
            query_latent_dim=self.q_latent_dim,
        )
