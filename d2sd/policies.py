"""What each tree policy needs, stated once: recipes, the runtime, benchmarks and pictures ask here. No torch."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Literal

#: A drafter in files, logs and messages; `DrafterRole` is its index.
DrafterName = Literal["first", "second"]


class FirstPass(Enum):
    """What fills the first draft."""

    NONE = "none"
    PROMPT_LOOKUP = "prompt lookup"
    DRAFTER = "drafter"


class DrafterRole(IntEnum):
    """Index of a drafter in the model runner's list."""

    FIRST = 0
    SECOND = 1
