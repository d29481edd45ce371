"""The tree policies and the drafters each one needs, for recipes, runtime and benchmarks. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Literal, get_args

PolicyName = Literal[
    "off",
    "lookup",
    "chain",
    "reanchor",
    "d2sd",
    "ddtree",
    "hybrid",
    "flex",
    "flex_tree",
    "flex_parallel",
]
NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
#: A drafter in files, logs and messages; `DrafterRole` is the index of the first two.
DrafterName = Literal["first", "second", "flex"]

#: Nodes of the largest tree: its mask has N² entries a request, and larger trees never repay their verification.
MAX_NODES = 1024
#: Tokens of the longest block; published drafters have 8 to 16.
MAX_BLOCK_SIZE = 128


class FirstPass(Enum):
    """The source of the first draft."""

    NONE = "none"
    PROMPT_LOOKUP = "prompt lookup"
    DRAFTER = "drafter"
    FLEX = "FlexDraft"
    CARRIED = "FlexDraft, in the step before"


class DrafterRole(IntEnum):
    """Index of a drafter in the model runner's list, and of its parameters in a calibration; FLEX has these alone."""

    FIRST = 0
    SECOND = 1
    FLEX = 2


#: First drafts that a FlexDraft head makes.
BY_FLEX = frozenset({FirstPass.FLEX, FirstPass.CARRIED})


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """Static properties of a policy."""

    first_pass: FirstPass = FirstPass.DRAFTER
    second_pass: DrafterRole | None = None  # the drafter of the branches; None: no second pass
    grows: bool = False  # its tree can use more nodes than one block
    proven: bool = False  # a build compares its answers with plain decoding's
    #: The policy whose recorded trees forecast its tokens a step; None: `auto` never chooses it.
    forecast_by: PolicyName | None = None

    @property
    def roles(self) -> tuple[DrafterRole, ...]:
        """The drafters that a bundle must have for it."""
        return (DrafterRole.FLEX,) if self.first_pass in BY_FLEX else self.required_drafters

    @property
    def first_drafter(self) -> DrafterRole:
        """The drafter whose calibration maps the probabilities of the first draft."""
        return DrafterRole.FLEX if self.first_pass in BY_FLEX else DrafterRole.FIRST

    @property
    def required_drafters(self) -> tuple[DrafterRole, ...]:
        """The drafters that run, the first one first."""
        if self.first_pass is not FirstPass.DRAFTER:
            return ()
        if self.second_pass is DrafterRole.SECOND:
            return DrafterRole.FIRST, DrafterRole.SECOND
        return (DrafterRole.FIRST,)


FACTS: Mapping[PolicyName, PolicyFacts] = MappingProxyType(
    {
        "off": PolicyFacts(FirstPass.NONE),
        "lookup": PolicyFacts(FirstPass.PROMPT_LOOKUP),
        "chain": PolicyFacts(proven=True, forecast_by="ddtree"),
        "reanchor": PolicyFacts(second_pass=DrafterRole.FIRST, grows=True),
        "d2sd": PolicyFacts(second_pass=DrafterRole.SECOND, grows=True, proven=True),
        "ddtree": PolicyFacts(grows=True, forecast_by="ddtree"),
        "hybrid": PolicyFacts(second_pass=DrafterRole.SECOND, grows=True, proven=True, forecast_by="hybrid"),
        "flex": PolicyFacts(FirstPass.FLEX, proven=True, forecast_by="flex_tree"),
        "flex_tree": PolicyFacts(FirstPass.FLEX, grows=True, proven=True, forecast_by="flex_tree"),
        "flex_parallel": PolicyFacts(FirstPass.CARRIED, proven=True, forecast_by="flex_tree"),
    }
)
