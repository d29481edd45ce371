"""What the runtime must agree with, written again the slow way: scalars, dictionaries and loops.

Only the noise is the runtime's own, and test_noise.py compares that with the integers below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from d2sd.modeling.decoder import Decoder
from d2sd.runtime.noise import gumbel
from d2sd.runtime.request import SamplingParams
from tests.tiny import full_logits

_WORD = 2**32


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 as the paper writes it: S-box of two 32 x 32 -> 64 bit products, keys bumped between the rounds."""
    left, right, l1, r1 = counter[0], counter[2], counter[1], counter[3]
    for turn in range(10):
        k0, k1 = (key[0] + turn * 0x9E3779B9) % _WORD, (key[1] + turn * 0xBB67AE85) % _WORD
        a, b = divmod(0xD2511F53 * left, _WORD), divmod(0xCD9E8D57 * right, _WORD)
        left, l1, right, r1 = b[0] ^ l1 ^ k0, b[1], a[0] ^ r1 ^ k1, a[1]
    return left, l1, right, r1


def noise_word(seed: int, position: int, token: int) -> int:
    """The 32 random bits of one token at one position."""
    return philox((seed % _WORD, seed // _WORD), (token // 4, position, 0, 0))[token % 4]


def allowed(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Tokens that temperature, then top-k, then top-p leave, and their probabilities."""
    ranked = sorted(range(len(logits)), key=lambda t: -logits[t])
    ranked = ranked[: params.top_k or len(ranked)]
    weights = [math.exp((logits[t] - logits[ranked[0]]) / params.temperature) for t in ranked]
    kept, reached = 0, 0.0
    while kept < len(ranked) and (kept == 0 or params.top_p == 1 or reached < params.top_p):
        reached += weights[kept] / sum(weights)
        kept += 1
    return {t: w / sum(weights[:kept]) for t, w in zip(ranked[:kept], weights[:kept], strict=True)}


def plain_text(decoder: Decoder, prompt: Sequence[int], params: SamplingParams, length: int) -> list[int]:
    """`length` tokens of plain decoding, the whole text computed anew for each."""
    text = list(prompt)
    signed = params.seed - 2**64 if params.seed >= 2**63 else params.seed
    for _ in range(length):
        logits = full_logits(decoder, torch.tensor([text]))[0, -1]
        if params.temperature == 0:
            text.append(int(logits.argmax()))
            continue
        noise = gumbel(torch.tensor([signed]), torch.tensor([[len(text)]]), len(logits))[0, 0].tolist()
        kept = allowed(logits.tolist(), params)
        text.append(max(kept, key=lambda t: math.log(kept[t]) + noise[t]))
    return text[len(prompt) :]


@dataclass(frozen=True)
class SlowTree:
    """Columns of a draft tree, one entry a node."""

    tokens: list[int]
    parent: list[int]
    depth: list[int]
    origin: list[int]
    visible: list[list[bool]]
    nodes: int  # the rest is padding


def slow_tree(candidates: Sequence[Sequence[int]], budget: int) -> SlowTree:
    """A dictionary of paths, filled candidate by candidate; what comes after the budget is forgotten."""
    number: dict[tuple[int, ...], int] = {}
    found: list[tuple[int, int, int, int]] = []  # token, parent, depth, origin
    for origin, candidate in enumerate(candidates):
        for depth, token in enumerate(candidate):
            path = tuple(candidate[: depth + 1])
            if path not in number:
                number[path] = len(found)
                found.append((token, number.get(path[:-1], 0), depth, origin))
    found = found[:budget]
    padding = budget - len(found)
    visible = [[False] * budget for _ in range(budget)]
    for node in range(budget):
        visible[node][node] = True
        if node < len(found):
            ancestor = node
            while ancestor:
                ancestor = found[ancestor][1]
                visible[node][ancestor] = True
    tokens, parent, depth_, origin_ = ([row[i] for row in found] + [0] * padding for i in range(4))
    return SlowTree(tokens, parent, depth_, origin_, visible, len(found))


def walk(tree: SlowTree, chosen: Sequence[int]) -> list[int]:
    """The accepted path: from the root to the child that holds the target's choice, as long as there is one."""
    path = [0]
    while True:
        here = path[-1]
        step = [n for n in range(1, tree.nodes) if tree.parent[n] == here and tree.tokens[n] == chosen[here]]
        if not step:
            return path
        (child,) = step
        path.append(child)


def chi_square_p(observed: dict[tuple[int, ...], int], probability: dict[tuple[int, ...], float]) -> float:
    """Probability of a worse fit. Outcomes expected fewer than 5 times share a cell; impossible ones must not occur."""
    assert abs(sum(probability.values()) - 1) < 1e-6
    assert observed.keys() <= probability.keys(), observed.keys() - probability.keys()
    total = sum(observed.values())
    rare_seen, rare_expected, statistic, cells = 0, 0.0, 0.0, 0
    for outcome, p in probability.items():
        seen, expected = observed.get(outcome, 0), total * p
        if expected < 5:
            rare_seen, rare_expected = rare_seen + seen, rare_expected + expected
        else:
            statistic, cells = statistic + (seen - expected) ** 2 / expected, cells + 1
    if rare_expected > 0:
        statistic, cells = statistic + (rare_seen - rare_expected) ** 2 / rare_expected, cells + 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
