"""A runner that checks every tree before it is verified: inside the grammar, and unchanged for requests without one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from functools import cache

import torch

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.joining import Joining
from d2sd.plugins.choice.reference import gumbel
from d2sd.plugins.lookup import find_copy
from d2sd.plugins.trees import Branches, Draft, Tree
from d2sd.policies import FirstPass
from d2sd.runtime.batch import Batch
from d2sd.runtime.decode import sources_of
from d2sd.runtime.grammar.grammar import has
from d2sd.runtime.model_runner import Verified
from d2sd.runtime.request import Request
from d2sd.runtime.speculation.calibration import default_scores
from d2sd.runtime.speculation.policy import Policy
from tests.runtime.cheating import CheatingRunner
from tests.runtime.grammar.tokens import END, vocab_size
from tests.runtime.oracle import allowed
from tests.tiny import full_logits, of_case, tiny_decoder, tiny_drafter, tiny_flex


@cache
def models() -> tuple[Decoder, Drafter, Drafter, FlexHead]:
    target = tiny_decoder("qwen3", layers=2, vocab=vocab_size())
    first = tiny_drafter(target.config, block_size=5, layers=1)
    second = tiny_drafter(target.config, block_size=5, layers=1, role="variable_prefix", seed=2)
    return target, first, second, tiny_flex(target, block_size=5)


class WatchedRunner(CheatingRunner):
    """Set `policy` before the first step. `requests` have the seeds of `texts`."""

    policy: Policy

    def __init__(
        self, requests: Sequence[Request], texts: Mapping[int, Sequence[int]], errors: float = 0.3, case: str = ""
    ) -> None:
        target, *drafters = deepcopy(models())
        super().__init__(target, *of_case(case, *drafters), texts, first_errors=errors, second_errors=errors)
        self._requests = {request.seed: request for request in requests}
        self._branches: Branches | None = None
        self.inside = self.outside = 0  # drafted nodes of constrained requests

    def _redrafted(self, honest: Draft, batch: Batch, branches: Branches, *others: object) -> Draft:
        self._branches = branches
        return super()._redrafted(honest, batch, branches, *others)

    def verify(self, batch: Batch, tree: Tree, joining: Joining | None = None) -> Verified:
        self._watch(batch, tree)
        return super().verify(batch, tree, joining)

    def _watch(self, batch: Batch, tree: Tree) -> None:
        usual = None
        if self.policy.first_pass not in (FirstPass.PROMPT_LOOKUP, FirstPass.CARRIED):
            drafts = (self._first, self._second) if self._first else (None, None)
            width = self.policy.topk
            first, second = (d and Draft(d.tokens[..., :width], d.logprob[..., :width]) for d in drafts)
            copy = None
            if first is not None and self.policy.lookup:
                text = self.text(batch)
                scores = default_scores(self.block_size - 1, "cpu")
                copy = find_copy(text, first, scores, batch.sampling.temperature)
            usual = self.policy.build(batch, sources_of(first, self._branches, second, copy))
        for row, known, start, _ in self._known(batch, "unused"):
            request = self._requests[int(batch.sampling.seed[row])]
            if request.grammar is not None:
                self._count(tree, row, request, known[len(request.prompt) : start + 1])
            elif usual is not None:
                for field in fields(Tree)[:-1]:  # its rows are the batch's
                    assert getattr(tree, field.name)[row].equal(getattr(usual, field.name)[row]), field.name

    def _count(self, tree: Tree, row: int, request: Request, answer: Sequence[int]) -> None:
        for path in drafted(tree, row):
            fits = is_inside(request, answer, path)
            self.inside += fits
            self.outside += not fits


def drafted(tree: Tree, row: int) -> list[list[int]]:
    """Paths of a request's nodes, without the root."""
    tokens, parents = tree.tokens[row].tolist(), tree.parent[row].tolist()
    paths: list[list[int]] = [[]]
    for node in range(1, int(tree.valid[row].sum())):
        paths.append([*paths[parents[node]], tokens[node]])
    return paths[1:]


def is_inside(request: Request, answer: Sequence[int], path: Sequence[int]) -> bool:
    """Whether the grammar allows `path` after `answer`, by a fresh matcher."""
    assert request.grammar is not None
    matcher = request.grammar.matcher()
    assert all(matcher.consume(token) for token in answer)
    *before, last = path
    return all(token != END and matcher.consume(token) for token in before) and has(matcher.allowed(), last)


def constrained_text(decoder: Decoder, request: Request) -> list[int]:
    """The answer of plain decoding, where only tokens that the grammar allows have a probability."""
    text, params = list(request.prompt), request.sampling
    while len(text) < len(request.prompt) + request.max_new_tokens:
        logits = full_logits(decoder, torch.tensor([text]))[0, -1]
        if request.grammar is not None:
            matcher = request.grammar.matcher()
            assert all(matcher.consume(token) for token in text[len(request.prompt) :])
            bits = matcher.allowed()
            logits = torch.tensor([p if has(bits, t) else -math.inf for t, p in enumerate(logits.tolist())])
        if params.temperature == 0:
            text.append(int(logits.argmax()))
        else:
            noise = gumbel(torch.tensor([params.seed or 0]), torch.tensor([[len(text)]]), len(logits))[0, 0].tolist()
            kept = {t: p for t, p in allowed(logits.tolist(), params).items() if p}
            text.append(max(kept, key=lambda t: math.log(kept[t]) + noise[t]))
        if text[-1] == END:
            break
    return text[len(request.prompt) :]
