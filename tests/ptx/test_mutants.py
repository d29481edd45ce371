"""Do the checks bite? Every synchronisation of the attention kernel is left out, one at a time.

Each must be a fault or give wrong numbers. What survives is listed with the reason why nothing depends on it. A
survivor that the list does not have fails, and so does one that no longer survives. The list is that of Triton 3.7.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from tests.plugins.cascade_attention.cases import Attention
from tests.plugins.kernels.calls import assert_within_budget
from tests.ptx.cases import SMALL, run
from tests.ptx.orders import in_order
from tools.ptxsim.order import Fault

SYNCHRONISATION = re.compile(r"\s*(bar\.sync|cp\.async\.wait_group|fence\.proxy\.async|wgmma\.(?:wait_group|fence))")
#: An infinite loop ends here: the kernels need less than a tenth.
LIMIT = 60_000
#: Blocks of a case at most, which run one behind the other.
LONGEST = 24
#: Kernels with the most synchronisation: loops of so many turns that each stage's buffer is filled again, an empty
#: context, a split without new rows. "D64" is a tile of two warpgroups on sm_90, "D128" of one.
CASES = {
    "D64": Attention("bf16", 64, 128, 2, contexts=(600, 70, 0), group=1),
    "D128": Attention("bf16", 128, 128, 4, contexts=(1100, 37, 0), group=1),
    "fp8": Attention("bf16", 64, 128, 2, fp8=True, contexts=(600, 70, 0), group=1),
}


_FIRST = "between the copies of the first two tiles, which go to buffers of their own"
_QUERIES = "orders the store of the queries; a later fence stands before every product that reads them"
_VALUES = "orders the store of values; the fence before the product of scores has done so"
_TURN = "behind a loop, whose last turn has a barrier behind its reads"
_BEHIND = "behind the loop; copies for tiles past the last move nothing"
#: (case, capability) -> which of its kind, counted from 0, and why nothing depends on it.
SURVIVORS: dict[tuple[str, int], dict[tuple[str, int], str]] = {
    ("D64", 80): {("bar.sync", 0): _FIRST},
    ("D64", 90): {("bar.sync", 0): _FIRST, ("fence.proxy.async", 0): _QUERIES},
    ("D128", 80): {("bar.sync", 0): _FIRST, ("cp.async.wait_group", 1): _BEHIND, ("bar.sync", 12): _TURN},
    ("D128", 90): {("bar.sync", 0): _FIRST, ("fence.proxy.async", 0): _QUERIES},
    ("fp8", 89): {("bar.sync", 0): _FIRST, ("bar.sync", 11): _TURN, ("bar.sync", 12): _FIRST},
    ("fp8", 90): {
        ("bar.sync", 0): _FIRST,
        ("bar.sync", 4): _FIRST,
        ("fence.proxy.async", 1): _VALUES,
        ("fence.proxy.async", 2): _QUERIES,
    },
}


@dataclass(frozen=True)
class Mutant:
    """A synchronisation, by its kind and its number among those."""

    kind: str
    number: int
    line: int


def mutants(ptx: str) -> list[Mutant]:
    found: list[Mutant] = []
    for line, text in enumerate(ptx.splitlines()):
        if match := SYNCHRONISATION.match(text):
            number = sum(mutant.kind == match[1] for mutant in found)
            found.append(Mutant(match[1], number, line))
    return found


def verdict(case: Attention, capability: int, *left_out: Mutant) -> str:
    """Say what becomes of the kernel without these lines: a fault's message, "wrong numbers" or "survives"."""
    without = {mutant.line for mutant in left_out}

    def edit(name: str, ptx: str) -> str:
        if name != "cascade_attention_kernel":
            return ptx
        return "\n".join(text for line, text in enumerate(ptx.splitlines()) if line not in without)

    try:
        for order in (None, "last") if case.splits > 1 else (None,):
            with in_order(order):  # by which splits also leave their share to others
                blocks = 1 if order is None else LONGEST
                found, expected, plain, _ = run(case, capability, edit=edit, limit=LIMIT * blocks)
            assert_within_budget(found, expected, plain)
    except Fault as fault:
        return str(fault)
    except AssertionError:
        return "wrong numbers"
    return "survives"


def kernel(case: Attention, capability: int) -> str:
    """PTX of the case's kernel."""
    return run(case, capability)[3][0].ptx


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "capability"),
    [pytest.param(*which, marks=[] if which[0] == "D64" else pytest.mark.full) for which in SURVIVORS],
)
def test_every_synchronisation_is_needed(name: str, capability: int) -> None:
    case = CASES[name]
    found = mutants(kernel(case, capability))
    survived = {(m.kind, m.number) for m in found if verdict(case, capability, m) == "survives"}
    assert len(found) > 10
    assert survived == set(SURVIVORS[name, capability])


@pytest.mark.parametrize("kind", ["bar.sync", "cp.async.wait_group", "fence.proxy.async", "wgmma.wait_group"])
def test_the_first_that_is_needed(kind: str) -> None:
    """A small part of the above, on the kernel of test_parity.py."""
    capability, case = SMALL[0]
    number = {"bar.sync": 2, "fence.proxy.async": 1}.get(kind, 0)
    (mutant,) = (m for m in mutants(kernel(case, capability)) if (m.kind, m.number) == (kind, number))
    said = verdict(case, capability, mutant)
    expected = {
        "bar.sync": "wgmma reads what was written since the last bar.sync",
        "cp.async.wait_group": "wgmma reads shared memory while cp.async is in flight",
        "fence.proxy.async": "wgmma reads what threads or cp.async wrote without fence.proxy.async",
        "wgmma.wait_group": "is read while wgmma in flight writes it",
    }[kind]
    assert expected in said
