"""`State`: what a layer keeps of a sequence in place of keys and values, of the same size whatever
the length: linear attention, delta rules, state spaces (Mamba), short convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .shape import Arithmetic, Kept

NONE = Kept(0)


@dataclass(frozen=True)
class State:
    """One module that mixes tokens through a state of constant size.

    A token updates the recurrent state and reads it (a multiply-add each for every number; a delta
    rule reads it once more), whatever the number of tokens before it. Chunked algorithms for
    prefills do more arithmetic in larger products, which isn't counted.

    >>> lightning = State(recurrent=Kept(64 * 128 * 128), products=6144 * 8192 * 5)
    >>> lightning.cache("bfloat16"), lightning.prefill(10).mixing
    (2097152, 41943040)
    """

    recurrent: Kept = NONE
    convolution: Kept = NONE  # the newest inputs of its convolution
    products: int = 0  # weights that each token is multiplied with, those of convolutions included
    # All numbers of the module; 0 where it is part of an attention module, which counts them.
    parameters: int = 0
    uses: int = 2  # of the state by a token: update and read
    kind: str = "linear attention"  # or "state space", "short convolution"
    label: str = "L0"
    name: str = ""  # module path

    def cache(self, dtype: str) -> int:
        """Bytes of one sequence, where other caches have this dtype."""
        return self.recurrent.bytes(dtype) + self.convolution.bytes(dtype)

    def on_device(self, devices: int) -> State:
        """The part of one device of tensor parallelism: a share of the heads or channels."""
        return replace(
            self,
            recurrent=self.recurrent._replace(numbers=-(-self.recurrent.numbers // devices)),
            convolution=self.convolution._replace(numbers=-(-self.convolution.numbers // devices)),
            products=-(-self.products // devices),
            parameters=-(-self.parameters // devices),
        )

    def prefill(self, tokens: int) -> Arithmetic:
        """Operations of a pass over one sequence; with one token, of decoding it."""
        mixing = self.uses * self.recurrent.numbers
        return Arithmetic(2 * tokens * self.products, 0, 2 * tokens * mixing)
