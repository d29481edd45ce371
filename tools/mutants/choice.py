"""Mutants from logits to tokens, of copies of earlier text, and of the handover between steps."""

from __future__ import annotations

from tools.mutants.mutant import Mutant, interpreted

DRAFTS, TOKENS, FILTERS, SEARCH = (
    f"plugins/choice/triton/{name}.py" for name in ("drafts", "tokens", "filters", "search")
)
KEPT = interpreted("filters", marks="not full")
HANDOVER, LOOKUP = "plugins/handover/triton/kernel.py", "plugins/lookup/triton/kernel.py"
CHOICES, STATES, COPIES = interpreted("candidates", "choices"), interpreted("handover"), interpreted("lookup")

MUTANTS = [
    Mutant(
        "E3 a row has the parameters of another request",
        DRAFTS,
        "request = row // ROWS",
        "request = row // SLOTS",
        CHOICES,
    ),
    Mutant(
        "noise of another place",
        DRAFTS,
        "tl.load(context_len + request) + 1 + row % SLOTS",
        "tl.load(context_len + request) + row % SLOTS",
        CHOICES,
    ),
    Mutant("noise of all branches' places", DRAFTS, "+ 1 + row % SLOTS", "+ 1 + row % ROWS", CHOICES),
    Mutant(
        "rejected tokens are places in the draft vocabulary",
        DRAFTS,
        "(known == tl.load(rejected + branch))",
        "(token == tl.load(rejected + branch))",
        CHOICES,
    ),
    Mutant(
        "a token is rejected in the slot before",
        DRAFTS,
        "tl.minimum(tl.load(prefix_len + branch), SLOTS - 1)",
        "tl.maximum(tl.load(prefix_len + branch) - 1, 0)",
        CHOICES,
    ),
    Mutant("a multiplier of Philox", TOKENS, "0xCD9E8D57", "0xCD9E8D59", CHOICES),
    Mutant(
        "the upper half of a seed is left out", TOKENS, "((seed >> 32) & 0xFFFFFFFF)", "((seed >> 32) & 0)", CHOICES
    ),
    Mutant(
        "words of noise in another order",
        TOKENS,
        "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
        CHOICES,
    ),
    Mutant(
        "a best score that is infinite is a token",
        TOKENS,
        'tl.abs(score_of(best)) < float("inf")',
        "score_of(best) == score_of(best)",
        CHOICES,
    ),
    Mutant(
        "a late row reads the row of its own number",
        HANDOVER,
        "tl.load(source + row, mask=inside & is_late, other=0)",
        "row",
        STATES,
    ),
    Mutant("filters of another request", FILTERS, "request = number // ROWS", "request = number % ROWS", KEPT),
    Mutant(
        "a listed token counts twice",
        FILTERS,
        "others += tl.where(matters, 0.0,",
        "others += tl.where(matters, 1.0,",
        KEPT,
        survives="sums only bound: where they say too much, masses are added one by one",
    ),
    Mutant(
        "of tokens without a list one too few is kept",
        FILTERS,
        "first = tl.where(reaching >= most, middle, first)",
        "first = tl.where(reaching > most, middle, first)",
        KEPT,
    ),
    Mutant("top-k keeps one token less", SEARCH, "axis=0) >= count", "axis=0) > count", KEPT),
    Mutant("top-p counts a token itself", SEARCH, "keys > middle", "keys >= middle", KEPT),
    Mutant(
        "features of a neighbouring node",
        HANDOVER,
        "(request * nodes + node) * WIDTH + column",
        "(request * nodes + g) * WIDTH + column",
        STATES,
    ),
    Mutant("rows of a request that rests are kept", HANDOVER, "(tl.load(active + request) != 0)", "True", STATES),
    Mutant(
        "positions begin one late",
        HANDOVER,
        "tl.load(context_len + request) + g",
        "tl.load(context_len + request)",
        STATES,
    ),
    Mutant("G1 an answer is one token longer", HANDOVER, "ends = length >= ", "ends = length > ", STATES),
    Mutant(
        "G2 a late row is as active as the host says",
        HANDOVER,
        "tl.where(is_late, runs, tl.load(active + row, mask=own, other=0) != 0)",
        "tl.load(active + row, mask=inside, other=0) != 0",
        STATES,
    ),
    Mutant(
        "the last stop token is not checked", HANDOVER, "tl.static_range(STOPS)", "tl.static_range(STOPS - 1)", STATES
    ),
    Mutant(
        "an earlier match of the same length",
        LOOKUP,
        "(matched << 32) | place",
        "(matched << 32) | (end - place)",
        COPIES,
    ),
    Mutant("a match is one token shorter", LOOKUP, "back < LONGEST", "back < LONGEST - 1", COPIES),
    Mutant("a copy begins at the match itself", LOOKUP, "at + 1 + slot %", "at + slot %", COPIES),
    Mutant(
        "a greedy request's scores when sampled",
        LOOKUP,
        "score = greedy + weight * (sampled - greedy)",
        "score = greedy",
        COPIES,
    ),
    Mutant("padding appends its tokens", LOOKUP, " & (tl.load(active + request) != 0)", "", COPIES),
]
