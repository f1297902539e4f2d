"""`Finding`: one defect that a check reports; the names of the bugs; and `NotApplicable`."""

from __future__ import annotations

from dataclasses import dataclass, field

# Among a finding's `found_by`: it was reproduced by recomputing; it shows in the weights that were
# read out.
DEFINITION = "the definition"
READ_OUT = "the weights that were read out"


class BugName:
    """Names of the bugs, in the report, the table of docs/check.md and `Bug.explains`."""

    MIXED = "tokens and heads mixed"
    SLICES = "heads read each other's slices"
    SCALE = "missing or wrong scale"
    AXIS = "softmax over the wrong axis"
    SECOND_SOFTMAX = "a second softmax over heads"
    NOT_NORMALISED = "weights don't sum to one"
    MASK_AFTER_SOFTMAX = "mask after softmax, not renormalised"
    MASK_AS_ZERO = "masked scores set to 0"
    MASK_IGNORED = "mask ignored"
    MASK_INVERTED = "inverted mask"
    MASK_LEAKS = "mask doesn't hide keys"
    PADDING_LEAKS = "padding changes real tokens"
    EMPTY_ROW_NAN = "fully masked rows give NaN"
    EMPTY_ROW_LEAKS = "fully masked rows leak"
    NEGATIVE = "weights are negative"
    SAME_HEADS = "all heads have the same weights"
    FIXED = "weights don't depend on the input"
    ADDED = "a group's queries are added up"
    CAP = "missing or wrong soft cap"
    BIAS = "bias by distance is wrong"
    BATCH_SHARED = "batch elements share weights"
    NO_QUERIES = "weights don't depend on queries"
    NO_KEYS = "weights don't depend on keys"
    FUTURE = "attends to future tokens"
    NEXT_TOKEN = "attends to the next token"
    NOT_ITSELF = "can't attend to itself"
    CAP_AFTER_MASK = "soft cap after the mask"
    TILED = "grouped heads tiled"
    ROTARY = "rotary positions are wrong"
    NO_POSITIONS = "positions have no effect"
    LATENT_NORM = "latent isn't normalised"
    ROTARY_KEY = "rotary key isn't shared"
    VALUES_FROM_KEYS = "values projected by W_K"
    NO_OUTPUT = "W_O missing"
    BATCH = "batch elements influence each other"
    CACHE = "cache differs from the full pass"
    CACHE_POSITIONS = "positions restart at the cache"
    CACHE_ALIGNMENT = "top-left instead of offset alignment"
    GRADIENTS_CUT = "gradients don't reach a projection"
    GRADIENTS_NAN = "gradients become NaN"
    DROPOUT = "dropout active in evaluation"
    WEIGHTS_FLAG = "output depends on requested weights"
    CHANGED = "inputs are changed in place"
    STRIDES = "non-contiguous inputs fail"
    DIFFERS = "differs from the definition"
    PROJECTIONS = "projections are swapped"
    PROJECTION_TWICE = "a projection is used twice"
    SIZES = "fails with other numbers of tokens"
    OVERFLOW = "softmax overflows"
    HALF = "half-precision softmax overflow"
    HALF_FILL = "mask value doesn't fit float16"


class NotApplicable(Exception):
    """Raised by a property that can't be tested on this callable; the message is the reason.

    >>> str(NotApplicable("it takes no mask"))
    'it takes no mask'
    """


class NotJudged(Exception):
    """Raised by a property that applies and couldn't be tested; the message is the reason.

    >>> str(NotJudged("its cache couldn't be tried"))
    "its cache couldn't be tried"
    """


@dataclass
class Finding:
    """One defect: its name, a description, the smallest input that shows it, and where to look.

    Attributes:
        bug: name of the bug.
        message: what goes wrong, with the numbers.
        example: the smallest input that shows it.
        look: where to look in the code, and what is right there.
        found_by: "the definition" and the names of the properties that failed.
        is_policy: whether this is a matter of taste: a note then, and a defect only if `check` is
            strict.
        known: why a library's module does this on purpose; it isn't counted as a defect then.

    >>> Finding("missing or wrong scale", "It is 1.", "x [1, 2, 8]", "1 / sqrt(E)").certain
    False
    """

    bug: str
    message: str
    example: str
    look: str
    found_by: list[str] = field(default_factory=list)
    is_policy: bool = False
    known: str = ""

    @property
    def certain(self) -> bool:
        """True if the definition with this one bug reproduces the output."""
        return DEFINITION in self.found_by

    @property
    def certainty(self) -> str:
        """How it is known, in a few words."""
        if self.certain:
            return "certain: the definition with this change gives the same output"
        return f"judged by {READ_OUT if READ_OUT in self.found_by else 'a property'}"
