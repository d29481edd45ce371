"""Mutants of branches, of the growth and the merge of trees, and of acceptance."""

from __future__ import annotations

from tools.mutants.mutant import Mutant, interpreted

BRANCHES, GROWTH, NODES = (f"plugins/trees/triton/{name}.py" for name in ("branches", "growth", "nodes"))
OF_BRANCHES, GROWN = interpreted("branches"), interpreted("trees", k="growth or sources or certain")
ACCEPTED, MERGED = interpreted("trees", k="accept"), interpreted("trees", k="test_chain")

MUTANTS = [
    Mutant(
        "a node behind a token beside the chain counts as one of the chain",
        BRANCHES,
        "tl.max(tl.where(seen, differs[None, :], 0), axis=1) == 0",
        "differs == 0",
        OF_BRANCHES,
    ),
    Mutant(
        "the root is a node to restart from",
        BRANCHES,
        "mask=inside, other=0) != 0) & (level > 0)",
        "mask=inside, other=0) != 0)",
        OF_BRANCHES,
    ),
    Mutant(
        "no boundary at the last slot",
        BRANCHES,
        "best = largest(tl.where(i < S, pack_entry",
        "best = largest(tl.where(i < S - 1, pack_entry",
        OF_BRANCHES,
    ),
    Mutant(
        "a boundary's own probability is left out",
        BRANCHES,
        "pack_entry(reached * -expm1(here), i)",
        "pack_entry(reached, i)",
        OF_BRANCHES,
    ),
    Mutant(
        "a block keeps one token less",
        BRANCHES,
        "mask=(g > 0) & (g <= length)",
        "mask=(g > 0) & (g < length)",
        OF_BRANCHES,
    ),
    Mutant(
        "the branch is certain of its boundary",
        BRANCHES,
        "again + tl.where(slot == length, rejected, 0.0)",
        "again",
        OF_BRANCHES,
    ),
    Mutant(
        "merged nodes are owned by the last branch",
        BRANCHES,
        "        e = C - 1 - back\n",
        "        e = back\n",
        OF_BRANCHES,
    ),
    Mutant(
        "of equal scores the later place",
        GROWTH,
        "tl.min(tl.where(front == best, front_place, LAST), axis=0)",
        "tl.max(tl.where(front == best, front_place, -1), axis=0)",
        GROWN,
    ),
    Mutant(
        "growth stops one node early",
        GROWTH,
        "while (count < N) & (best > NOTHING):",
        "while (count < N - 1) & (best > NOTHING):",
        GROWN,
    ),
    Mutant(
        "a child has the score of its candidate alone",
        GROWTH,
        "own = _order(value_of(best) + logprob)",
        "own = _order(logprob)",
        GROWN,
    ),
    Mutant(
        "the next child of a parent is the first of its equals",
        GROWTH,
        "((others == best) & (c > candidate))",
        "((others == best) & (c != candidate))",
        GROWN,
    ),
    Mutant("nodes of another level", GROWTH, "of_child = ((level + 1) << LEVEL)", "of_child = (level << LEVEL)", GROWN),
    Mutant(
        "F2 acceptance ignores valid",
        NODES,
        " & (n > 0) & (tl.load(valid + at, mask=inside, other=0) != 0)",
        " & (n > 0)",
        ACCEPTED,
    ),
    Mutant(
        "acceptance of one row more than a request verifies",
        NODES,
        "agrees & (n < tl.load(rows + request))",
        "agrees & (n <= tl.load(rows + request))",
        ACCEPTED,
    ),
    Mutant("all keep to the first request's rows", NODES, "tl.load(rows + request)", "tl.load(rows)", ACCEPTED),
    Mutant(
        "acceptance compares a node with its own choice",
        NODES,
        "chosen + request * N + above, mask=inside",
        "chosen + request * N + n, mask=inside",
        ACCEPTED,
    ),
    Mutant(
        "a path is one token shorter",
        NODES,
        "while node < NP and count < G:",
        "while node < NP and count < G - 1:",
        ACCEPTED,
    ),
    Mutant(
        "F3 ancestors see one step less",
        NODES,
        "tl.static_range((STEPS - 1).bit_length())",
        "tl.static_range((STEPS - 1).bit_length() - 1)",
        GROWN,
    ),
    Mutant(
        "a row sees one ancestor less",
        NODES,
        "for _ in range(tl.max(depth, axis=0)):",
        "for _ in range(tl.max(depth, axis=0) - 1):",
        MERGED,
    ),
    Mutant(
        "padding of a merged tree is valid",
        NODES,
        "real, mask=n < N)\n    tl.store(num_merged + request, tokens",
        "n >= 0, mask=n < N)\n    tl.store(num_merged + request, tokens",
        OF_BRANCHES,
    ),
]
