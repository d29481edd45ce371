"""Do the checks bite? Every synchronisation of the attention kernel is left out, one at a time.

Each must be a fault or give wrong numbers. What survives is listed with the reason why nothing depends on it. A
survivor that the list does not have fails, and so does one that no longer survives. The list is that of Triton 3.7.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from ptxsim.order import Fault
from tests.plugins.cascade_attention.cases import Attention
from tests.plugins.kernels.calls import assert_within_budget
from tests.ptx.cases import SMALL, run

SYNCHRONISATION = re.compile(r"\s*(bar\.sync|cp\.async\.wait_group|fence\.proxy\.async|wgmma\.(?:wait_group|fence))")
#: An infinite loop ends here: the kernels need less than a tenth.
LIMIT = 60_000
#: Kernels with the most synchronisation: two stages of copies in a loop of several turns, an empty context.
#: Two turns of the loop over new rows, and a split that has none.
CASES = {
    "D64": Attention("bf16", 64, 64, 2, contexts=(300, 70, 0), group=1),
    "D128": Attention("bf16", 128, 64, 2, contexts=(150, 37, 0), group=1),
    "fp8": Attention("bf16", 64, 64, 2, fp8=True, contexts=(300, 70, 0), group=1),
}


_QUERIES = "orders the store of the queries; a later fence stands before every product that reads them"
_WEIGHTS = "for weights in shared memory, but they stay in registers, and the values were fenced with the keys"
_EXIT = "behind the context's loop; the loop over new rows, and the end of a split, begin with a barrier"
_LAST = "waits for the copies behind the last turn, to a buffer that nothing touches any more"
#: (case, capability) -> which of its kind, counted from 0, and why nothing depends on it.
SURVIVORS: dict[tuple[str, int], dict[tuple[str, int], str]] = {
    ("D64", 80): {("bar.sync", 2): _EXIT},
    ("D64", 90): {("fence.proxy.async", 0): _QUERIES, ("fence.proxy.async", 3): _WEIGHTS, ("bar.sync", 2): _EXIT},
    ("D128", 80): {},
    ("D128", 90): {("fence.proxy.async", 0): _QUERIES, ("fence.proxy.async", 3): _WEIGHTS, ("bar.sync", 2): _EXIT},
    ("fp8", 89): {("cp.async.wait_group", 1): _LAST},
    ("fp8", 90): {
        ("fence.proxy.async", 1): _WEIGHTS,
        ("fence.proxy.async", 3): _WEIGHTS,
        ("bar.sync", 2): _EXIT,
        ("cp.async.wait_group", 1): _LAST,
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
        found, expected, plain, _ = run(case, capability, edit=edit, limit=LIMIT)
        assert_within_budget(found, expected, plain)
    except Fault as fault:
        return str(fault)
    except AssertionError:
        return "wrong numbers"
    return "survives"


def kernel(case: Attention, capability: int) -> str:
    """Its PTX."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["D64", pytest.param("D128", marks=pytest.mark.full)])
def test_of_two_barriers_behind_the_loop_one_is_needed(name: str) -> None:
    """`_EXIT` gives the reason: if both barriers are left out, there is a race."""
    found = {(m.kind, m.number): m for m in mutants(kernel(CASES[name], 90))}
    said = verdict(CASES[name], 90, found["bar.sync", 2], found["bar.sync", 3])
    assert said.startswith("shared race: write after another warp's read")


@pytest.mark.parametrize("kind", ["bar.sync", "cp.async.wait_group", "fence.proxy.async", "wgmma.wait_group"])
def test_the_first_that_is_needed(kind: str) -> None:
    """A small part of the above, on the kernel of test_parity.py."""
    capability, case = SMALL[0]
    number = 1 if kind == "fence.proxy.async" else 0
    (mutant,) = (m for m in mutants(kernel(case, capability)) if (m.kind, m.number) == (kind, number))
    said = verdict(case, capability, mutant)
    expected = {
        "bar.sync": "wgmma reads what was written since the last bar.sync",
        "cp.async.wait_group": "wgmma reads shared memory while cp.async is in flight",
        "fence.proxy.async": "wgmma reads what threads or cp.async wrote without fence.proxy.async",
        "wgmma.wait_group": "is read while wgmma in flight writes it",
    }[kind]
    assert expected in said
