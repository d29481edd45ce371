"""The tree policies and the drafters each one needs, for recipes, runtime and benchmarks. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Literal, get_args

PolicyName = Literal["off", "lookup", "chain", "reanchor", "d2sd", "ddtree", "hybrid", "flex_parallel"]
NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
#: A policy whose drafts copies of earlier text compete with: `LOOKUP` behind the name. Without it copies compete where
#: a recipe says so (`tree.lookup`), and in benchmarks and statistics, which name what ran, they do not.
CopyingName = Literal["auto+lookup", "ddtree+lookup", "hybrid+lookup"]
#: A drafter in files, logs and messages: the `key` of its role.
DrafterName = Literal["first", "second"]
#: A use of a drafter there: the `key` of a `DraftUse`.
UseName = Literal["first", "second", "chain", "reanchor", "d2sd"]

#: Nodes of the largest tree: its mask has N² entries a request, and larger trees never repay their verification.
MAX_NODES = 1024
#: Tokens of the longest block; published drafters have 8 to 16.
MAX_BLOCK_SIZE = 128


class FirstPass(Enum):
    """The source of the first draft."""

    NONE = "none"
    PROMPT_LOOKUP = "prompt lookup"
    DRAFTER = "drafter"
    CARRIED = "drafter, in the step before"


class DrafterRole(IntEnum):
    """A place for a drafter in a bundle; its checkpoint says of which kind it is (`d2sd.convert.kinds`)."""

    FIRST = 0
    SECOND = 1

    @property
    def key(self) -> DrafterName:
        """The name in recipes, manifests and messages."""
        return DRAFTER_NAMES[self]

    @property
    def folder(self) -> str:
        """The name of a drafter's stage of a build, of its folder in a bundle, and of its graph and engines."""
        return f"drafter_{self.key}"


DRAFTER_NAMES: tuple[DrafterName, ...] = get_args(DrafterName)
USE_NAMES: tuple[UseName, ...] = get_args(UseName)


class DraftUse(IntEnum):
    """A use of a drafter that is right at rates of its own, and the index of its parameters in a calibration.

    The first two are uses in trees of likeliest paths, and have the numbers of their roles.
    """

    FIRST = 0
    SECOND = 1  # behind nodes of the first pass; in a bundle without a second drafter, the first's
    CHAIN = 2  # the first drafter, of which only the likeliest tokens are taken
    REANCHOR = 3  # the same drafter again, behind a token presumed rejected
    D2SD = 4  # the second drafter, behind a token presumed rejected

    @property
    def key(self) -> UseName:
        """The name in files and messages."""
        return USE_NAMES[self]

    @property
    def role(self) -> DrafterRole:
        """The drafter that it is made for."""
        return DrafterRole(self.like)

    @property
    def like(self) -> DraftUse:
        """The use that is nearest to it of those that every calibration has."""
        return _LIKE.get(self, self)

    @property
    def is_behind_rejected(self) -> bool:
        """Whether it drafts behind a rejected token of the first draft."""
        return self in (DraftUse.REANCHOR, DraftUse.D2SD)


_LIKE = {DraftUse.CHAIN: DraftUse.FIRST, DraftUse.REANCHOR: DraftUse.FIRST, DraftUse.D2SD: DraftUse.SECOND}


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """Static properties of a policy."""

    first_pass: FirstPass = FirstPass.DRAFTER
    second_pass: DrafterRole | None = None  # the drafter of the branches; None: no second pass
    first_use: DraftUse = DraftUse.FIRST  # of the first draft's probabilities
    second_use: DraftUse | None = None  # of those of the branches
    #: Drafts the branches in a bundle without the drafter of `second_pass`; None: the policy needs that drafter.
    fallback: DrafterRole | None = None
    grows: bool = False  # its tree can use more nodes than one block
    copies: bool = False  # copies of earlier text may compete with its drafts (`tree.lookup`)
    proven: bool = False  # a build compares its answers with plain decoding's
    #: The policy whose recorded trees forecast its tokens a step; None: `auto` never chooses it.
    forecast_by: PolicyName | None = None

    def among(self, roles: Collection[DrafterRole]) -> PolicyFacts:
        """The facts in a bundle with these drafters: where it lacks that of the second pass, `fallback` makes it."""
        if self.second_pass is None or self.fallback is None or self.second_pass in roles or self.fallback not in roles:
            return self
        return replace(self, second_pass=self.fallback)

    @property
    def drafters(self) -> tuple[DrafterRole, ...]:
        """The drafters that it runs, in their order; a bundle must have them. See `among`."""
        if self.first_pass in (FirstPass.NONE, FirstPass.PROMPT_LOOKUP):
            return ()
        second = self.second_pass
        return (DrafterRole.FIRST,) if second in (None, DrafterRole.FIRST) else (DrafterRole.FIRST, second)


FACTS: Mapping[PolicyName, PolicyFacts] = MappingProxyType(
    {
        "off": PolicyFacts(FirstPass.NONE),
        "lookup": PolicyFacts(FirstPass.PROMPT_LOOKUP),
        "chain": PolicyFacts(first_use=DraftUse.CHAIN, proven=True, forecast_by="ddtree"),
        "reanchor": PolicyFacts(
            second_pass=DrafterRole.FIRST, first_use=DraftUse.CHAIN, second_use=DraftUse.REANCHOR, grows=True
        ),
        # with the first drafter in place of the second it would be reanchor
        "d2sd": PolicyFacts(
            second_pass=DrafterRole.SECOND, first_use=DraftUse.CHAIN, second_use=DraftUse.D2SD, grows=True, proven=True
        ),
        "ddtree": PolicyFacts(grows=True, copies=True, forecast_by="ddtree"),
        "hybrid": PolicyFacts(
            second_pass=DrafterRole.SECOND,
            fallback=DrafterRole.FIRST,
            second_use=DraftUse.SECOND,
            grows=True,
            copies=True,
            proven=True,
            forecast_by="hybrid",
        ),
        "flex_parallel": PolicyFacts(FirstPass.CARRIED, first_use=DraftUse.CHAIN, proven=True, forecast_by="ddtree"),
    }
)
#: Policies that a calibration forecasts.
_FORECAST: dict[PolicyName, PolicyFacts] = {
    name: facts for name, facts in FACTS.items() if facts.forecast_by is not None
}


#: Written behind a policy: copies of earlier text compete with its drafts.
LOOKUP = "+lookup"


def parse_method(method: str) -> tuple[str, bool]:
    """The policy, and whether copies of earlier text compete with its drafts, of `hybrid` or `hybrid+lookup`."""
    policy = method.removesuffix(LOOKUP)
    return policy, policy != method


def with_branches(name: str, branches: int) -> str:
    """The key of the tokens a step of a policy with fewer branches than its recipe's: `hybrid/1`."""
    return f"{name}/{branches}"


def policy_of(role: DrafterRole) -> PolicyName:
    """The first policy, of those that a calibration forecasts, whose last drafter is this one."""
    return next(name for name, facts in _FORECAST.items() if facts.drafters[-1] is role)


def trees_of(roles: Collection[DrafterRole]) -> list[PolicyName]:
    """The fewest policies that together run these drafters, each with the largest trees of its drafters."""
    runs = {name: set(facts.drafters) for name, facts in _FORECAST.items() if facts.forecast_by == name}
    runs = {name: drafters for name, drafters in runs.items() if drafters <= set(roles)}
    return [name for name, drafters in runs.items() if not any(drafters < others for others in runs.values())]
