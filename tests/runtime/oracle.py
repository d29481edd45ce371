"""The runtime must agree with this oracle, written the slow way: scalars, dictionaries and loops.

Only the noise is the runtime's own, and test_noise.py compares that with the integers below.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

import torch

from d2sd.modeling.decoder import Decoder
from d2sd.plugins.choice.reference import gumbel
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.thought import Markers
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


def gumbel_of(word: int) -> float:
    """The 23 highest bits as a number in (0, 1), and that one's Gumbel quantile."""
    return -math.log(-math.log((word // 2**9 + 0.5) / 2**23))


def changed(
    logits: Sequence[float],
    params: SamplingParams,
    text: Sequence[int],
    prompt_len: int,
    stop_tokens: Collection[int] = (),
    markers: Markers | None = None,
) -> list[float]:
    """Logits of the token after `text`, by bias, bad words, min_tokens, budget and penalties."""
    scores, answer = list(logits), list(text[prompt_len:])
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    words = [[*word] for word in params.bad_words_token_ids]
    banned = [word[-1] for word in words if [*text[len(text) - len(word) + 1 :]] == word[:-1]]
    banned += stop_tokens if len(answer) < params.min_tokens else []
    for token in banned:
        scores[token] = -math.inf
    end = forced(text, prompt_len, params.thinking_token_budget, markers)
    if end is not None and scores[end] > -math.inf:
        scores = [score if token == end else -math.inf for token, score in enumerate(scores)]
    for token in set(text):
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in set(answer):
        scores[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    return scores


def forced(text: Sequence[int], prompt_len: int, budget: int | None, markers: Markers | None) -> int | None:
    """The end of a thought that goes on and has taken as many tokens as its budget."""
    if budget is None or markers is None:
        return None
    last, answer = text[:prompt_len][-2:], list(text[prompt_len:])
    begun = markers.begin_id in last and markers.end_id not in last
    starts = [0] if begun else [place + 1 for place, token in enumerate(answer[:2]) if token == markers.begin_id]
    spent = any(len(answer) - start == budget and markers.end_id not in answer[start:] for start in starts)
    return markers.end_id if spent else None


def allowed(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Tokens that temperature, then min-p, then top-k, then top-p leave, and their probabilities."""
    ranked = sorted((t for t in range(len(logits)) if logits[t] > -math.inf), key=lambda t: -logits[t])
    least = logits[ranked[0]] + params.temperature * math.log(params.min_p) if params.min_p else -math.inf
    ranked = [t for t in ranked if logits[t] >= least]
    ranked = ranked[: params.top_k or len(ranked)]
    weights = [math.exp((logits[t] - logits[ranked[0]]) / params.temperature) for t in ranked]
    kept, reached = 0, 0.0
    while kept < len(ranked) and (kept == 0 or params.top_p == 1 or reached < params.top_p):
        reached += weights[kept] / sum(weights)
        kept += 1
    return {t: w / sum(weights[:kept]) for t, w in zip(ranked[:kept], weights[:kept], strict=True)}


def plain_text(
    decoder: Decoder,
    prompt: Sequence[int],
    params: SamplingParams,
    length: int,
    stop_tokens: Collection[int] = (),
    markers: Markers | None = None,
) -> list[int]:
    """`length` tokens of plain decoding, the whole text computed anew for each; stop tokens do not end it."""
    text = list(prompt)
    number = params.seed or 0
    signed = number - 2**64 if number >= 2**63 else number
    for _ in range(length):
        logits = full_logits(decoder, torch.tensor([text]))[0, -1]
        scores = changed(logits.tolist(), params, text, len(prompt), stop_tokens, markers)
        if params.temperature == 0:
            text.append(max(range(len(scores)), key=lambda t: scores[t]))
            continue
        noise = gumbel(torch.tensor([signed]), torch.tensor([[len(text)]]), len(logits))[0, 0].tolist()
        kept = allowed(scores, params)
        text.append(max(kept, key=lambda t: math.log(kept[t]) + noise[t]))
    return text[len(prompt) :]


Path = tuple[int, ...]

#: Candidates (token, log-probability) slot by slot.
Slots = Sequence[Sequence[tuple[int, float]]]


class Node(NamedTuple):
    """One node of a draft tree. Its path begins with the anchor and says who its parent and its ancestors are."""

    path: Path
    branch_id: int
    score: float


def from_candidates(
    candidates: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], rows: int
) -> tuple[list[Node], int]:
    """A dictionary of paths, filled candidate by candidate; also how many tokens found their path there already. A
    candidate ends where its score is -inf.
    """
    found: dict[Path, Node] = {}
    merged = 0
    for branch_id, (candidate, score) in enumerate(zip(candidates, scores, strict=True)):
        for depth in range(next((n for n, told in enumerate(score) if told == -math.inf), len(candidate))):
            path = tuple(candidate[: depth + 1])
            merged += path in found
            found.setdefault(path, Node(path, branch_id, score[depth]))
    return list(found.values())[:rows], merged


def best_first(
    anchor: int,
    first: Slots,
    rows: int,
    behind: Sequence[tuple[Path, Slots]] = (),
    beside: Sequence[tuple[Slots, Sequence[tuple[Path, Slots]]]] = (),
) -> list[Node]:
    """The heap of DDTree: take out the likeliest path, put in all its children.

    `behind` are the second pass's branches, (kept tokens, candidates). A path's children come from the deepest branch
    whose kept tokens it begins with, the first of equals; where there is none, from the first pass. `beside` are other
    passes and their branches: a path has children from each, and of two with one token the likelier.
    """
    lanes, number = [], 0
    for slots, branches in ((first, behind), *beside):
        lanes.append([(number + n, *branch) for n, branch in enumerate([((), slots), *branches])])
        number += len(lanes[-1])
    heap: list[tuple[float, Path, int]] = [(0.0, (anchor,), 0)]
    found: list[Node] = []
    while heap and len(found) < rows:
        cost, path, branch_id = heappop(heap)
        found.append(Node(path, branch_id, -cost))
        drafted = path[1:]
        if len(drafted) == len(first):
            continue
        children: dict[int, tuple[float, int]] = {}
        for lane in lanes:
            passed = [(len(kept), -row, slots) for row, kept, slots in lane if kept == drafted[: len(kept)]]
            passed = [one for one in passed if one[0] or -one[1] == lane[0][0]]  # nothing kept, nothing added
            _, source, slots = max(passed, key=lambda one: one[:2])
            for token, logprob in slots[len(drafted)]:
                if token not in children or logprob > children[token][0]:
                    children[token] = logprob, -source
        for token, (logprob, source) in children.items():
            if logprob > -math.inf:
                heappush(heap, (cost - logprob, (*path, token), source))
    return found


def chain_worth(first: Slots) -> list[float]:
    """Probability that exactly i of the best candidates are accepted, i = 0 .. S - 1."""
    worth, reached = [], 1.0
    for slot in first:
        accepted = math.exp(slot[0][1])
        worth.append(reached * (1 - accepted))
        reached *= accepted
    return worth


def tree_worth(first: Slots) -> dict[Path, float]:
    """Return the worth of a second pass behind each path of the first pass's tree; paths are without the anchor.

    Along the best chain the probability that it ends there, elsewhere the probability of getting there. There is no
    restart at the anchor, and none where nothing is left to draft.
    """
    best = tuple(slot[0][0] for slot in first)
    worth: dict[Path, float] = {}
    for size in range(1, len(first)):
        for picked in product(*first[:size]):
            path = tuple(token for token, _ in picked)
            reached = math.exp(sum(logprob for _, logprob in picked))
            if reached > 0:
                worth[path] = reached * (1 - math.exp(first[size][0][1])) if path == best[:size] else reached
    return worth


def calibrated(logprob: float, slope: float, offset: float) -> float:
    """Log-probability whose log-odds are slope · log-odds + offset; closer to certainty than 1e-6 nothing goes in."""
    if logprob == -math.inf:
        return logprob
    logprob = min(logprob, -1e-6)
    odds = slope * (logprob - math.log(-math.expm1(logprob))) + offset
    return min(odds, 0.0) - math.log1p(math.exp(-abs(odds)))


def walk(nodes: Sequence[Node], chosen: Sequence[int]) -> list[int]:
    """The accepted path: from the root to the child that holds the target's choice, as long as there is one."""
    number = {node.path: n for n, node in enumerate(nodes)}
    path = [0]
    while (child := number.get((*nodes[path[-1]].path, chosen[path[-1]]))) is not None:
        path.append(child)
    return path


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
