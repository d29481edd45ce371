"""What each tree policy needs, stated once: recipes, the runtime, benchmarks and pictures ask here. No torch."""

from __future__ import annotations

from enum import Enum, IntEnum


class FirstPass(Enum):
    """What fills the first draft."""

    NONE = "none"
    PROMPT_LOOKUP = "prompt lookup"
    DRAFTER = "drafter"


class DrafterRole(IntEnum):
    """Index of a drafter in the model runner's list."""

    FIRST = 0
    SECOND = 1
