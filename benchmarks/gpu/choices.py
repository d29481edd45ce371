"""The kernels from logits to tokens and of trees: equal to the PyTorch functions of the runtime, timed beside them.

    sh benchmarks/gpu_suite.sh --parts choices

Each is checked at the very inputs it is timed at, and on some made to trip it: ties, -inf, NaN, padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.call import Wrong
from benchmarks.gpu.cases import Case, Note
from benchmarks.gpu.timing import Times
from d2sd.plugins import choice, dispatch, trees
from d2sd.plugins.choice import candidates
from d2sd.plugins.trees import Accepted, Branches, Draft, Source, Tree, from_candidates, from_chain
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.accept import sample_target

# Shape letters as in d2sd.runtime.speculation. A block of 16 and 7 branches; hybrid's width and the default budget.

BATCHES = (1, 8, 32)
VOCABS = (151_936, 32_000)
SIZE, BRANCHES, WIDTH, NODES = 16, 7, 16, 64
SLOTS = SIZE - 1
#: Largest difference of log-probabilities: numbers up to 64 are subtracted, of which fp32 holds 4e-6.
SCORE = 8e-6
#: Most tokens of sampled drafts that may differ: near-ties, where a logarithm differs in its last bit.
NEAR_TIES = 1e-3


@dataclass(frozen=True)
class Both:
    """One function, as the specification runs it and over kernels."""

    run: Callable[[], Any]
    compare: Callable[[Any, Any], dict[str, float]]


@contextmanager
def on_kernels(on: bool, *, stable: bool = False) -> Iterator[None]:
    """Kernels or specification; `stable`: `topk` takes the first of equal values, which it leaves open."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(dispatch, "use_kernels", lambda *_, **__: on))
        if stable:
            stack.enter_context(patch.object(Tensor, "topk", _first_of_equals))
        yield


def _first_of_equals(x: Tensor, k: int, dim: int = -1) -> Any:
    found = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)))


def same(expected: Tree | Accepted, found: Tree | Accepted) -> dict[str, float]:
    """Equal to the bit."""
    for field in fields(expected):
        if field.name == "row":  # a form of the others
            continue
        one, other = getattr(expected, field.name), getattr(found, field.name)
        if one is other is None:  # rows of a tree that may be accepted whole
            continue
        if not torch.equal(one, other):
            raise Wrong(f"{field.name}: {int((one != other).sum())} of {one.numel()} differ")
    return {}


def same_draft(near: float, expected: Draft, found: Draft) -> dict[str, float]:
    """Tokens equal but for a share `near`; log-probabilities of the equal ones within SCORE."""
    proposed = expected.logprob > float("-inf")
    differ = (expected.tokens != found.tokens) & proposed
    share = float(differ.float().mean())
    error = (expected.logprob - found.logprob).where(proposed & ~differ, 0).abs().max()
    if share > near or not float(error) <= SCORE:
        raise Wrong(f"{int(differ.sum())} of {differ.numel()} tokens differ, scores by {float(error)}")
    return {"tokens_differ": int(differ.sum()), "score_error": float(error)}


def same_path(expected: Accepted, found: Accepted) -> dict[str, float]:
    """Equal up to the end of the path; what is behind it is unused."""
    used = torch.arange(expected.path.shape[1], device=expected.path.device) < expected.count[:, None]
    for name in ("count", "accepted_branch"):
        if not torch.equal(getattr(expected, name), getattr(found, name)):
            raise Wrong(f"{name} differs")
    for name in ("path", "tokens"):
        if not torch.equal(getattr(expected, name).where(used, 0), getattr(found, name).where(used, 0)):
            raise Wrong(f"{name} differ")
    return {"accepted": float(expected.count.float().mean())}


class Inputs:
    """Random tensors on the device, the same each time."""

    def __init__(self, batch: int, device: str, seed: int = 1) -> None:
        self.batch, self.device = batch, device
        self._draw = torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._draw, device=self.device)

    def tokens(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self._draw, device=self.device)

    def logprob(self, *shape: int, ties: bool) -> Tensor:
        """With ties one of three numbers; one in eight -inf."""
        values = -self.tokens(3, *shape) / 2 if ties else self.uniform(*shape).log()
        return values.masked_fill(self.uniform(*shape) < 0.125, float("-inf"))

    def logits(self, *shape: int, ties: bool) -> Tensor:
        """bf16, so many are equal; with ties one row of -inf but for a token, and one of zeros of both signs."""
        x = torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0, 3, generator=self._draw)
        rows = x.view(-1, shape[-1])
        if not ties:
            return x
        rows[0, :-1] = float("-inf")
        if len(rows) > 1:
            rows[1, ::2], rows[1, 1::2] = 0.0, -0.0
        return x

    def sampling(self, params: SamplingParams, vocab: int) -> Sampling:
        return Sampling.of([params] * self.batch, vocab, self.device)

    def context(self) -> Tensor:
        return self.tokens(4096, self.batch)


def growth(inputs: Inputs, ties: bool, branches: int) -> Both:
    """hybrid's tree: two passes, or its first alone."""
    batch = inputs.batch
    siblings = inputs.uniform(batch, branches + 1, SLOTS, 2 * WIDTH).argsort(-1)[..., :WIDTH]
    logprob = inputs.logprob(batch, branches + 1, SLOTS, WIDTH, ties=ties)
    first = Draft(siblings[:, 0], logprob[:, 0])
    anchor = inputs.tokens(2 * WIDTH, batch)
    if not branches:
        return Both(lambda: trees.best_first_tree(anchor, [Source(first)], NODES), same)
    kept = first.top1[:, None].expand(-1, branches, -1).contiguous()
    length = inputs.tokens(SLOTS + 1, batch, branches)
    behind = Branches(kept, length, torch.full_like(length, -1))
    second = Draft(siblings[:, 1:].contiguous(), logprob[:, 1:].contiguous())
    sources = [Source(first), Source(second, behind, replaces=True)]
    return Both(lambda: trees.best_first_tree(anchor, sources, NODES), same)


def merge(inputs: Inputs, ties: bool) -> Both:
    """d2sd's tree; with `ties` over two tokens, so that most candidates meet."""
    tokens = inputs.tokens(2 if ties else 9, inputs.batch, BRANCHES + 1, SIZE)
    tokens[..., 0] = 5
    score = inputs.logprob(*tokens.shape, ties=False).cumsum(-1)
    return Both(lambda: from_candidates(tokens, score, NODES), same)


def chain(inputs: Inputs, ties: bool) -> Both:
    tokens, score = inputs.tokens(9, inputs.batch, SIZE), inputs.logprob(inputs.batch, SIZE, ties=ties)
    score[:, 0] = 0
    score = score.cumsum(-1)
    return Both(lambda: from_chain(tokens, score), same)


def acceptance(inputs: Inputs, ties: bool) -> Both:
    with on_kernels(False):
        tree = merge(inputs, ties).run()
    chosen = tree.tokens.roll(-1, 1) if ties else inputs.tokens(9, inputs.batch, NODES)
    return Both(lambda: trees.accept(tree, chosen, SIZE), same)


def draft(inputs: Inputs, ties: bool, vocab: int, width: int, params: SamplingParams) -> Both:
    """The second pass's candidates. The specification takes an fp32 copy, as it does today."""
    logits = inputs.logits(inputs.batch, BRANCHES, SLOTS, vocab, ties=ties)
    sampling, context = inputs.sampling(params, vocab), inputs.context()

    def run() -> Draft:
        given = logits if choice.reads_any_type(logits) else logits.float()
        return candidates(given, context, sampling, width)

    return Both(run, partial(same_draft, 0.0 if sampling.is_argmax else NEAR_TIES))


def target(inputs: Inputs, ties: bool, vocab: int, params: SamplingParams) -> Both:
    """The target's choice along a tree that agrees with it here and there; the specification's copy as above."""
    with on_kernels(False):
        tree = merge(inputs, False).run()
    logits = inputs.logits(inputs.batch, NODES, vocab, ties=ties)
    likely = torch.where(inputs.uniform(*tree.tokens.shape) < 0.8, tree.tokens.roll(-1, 1), 1)
    logits.scatter_(2, likely[..., None], 30.0)
    sampling, context = inputs.sampling(params, vocab), inputs.context()

    def run() -> Accepted:
        given = logits if choice.reads_any_type(logits) else logits.float()
        return sample_target(tree, given, context, sampling, SIZE)

    return Both(run, same_path)


GREEDY, SAMPLED = SamplingParams(), SamplingParams(1.0, seed=2**63 + 11)
NUCLEUS = SamplingParams(0.8, seed=7, top_p=0.9, top_k=40)


def cases() -> Iterator[Case]:
    """Trees first: they do not depend on the vocabulary."""
    of_trees: dict[str, Callable[..., Both]] = {
        "accept": acceptance,
        "chain 16": chain,
        f"merge {BRANCHES + 1}x{SIZE} to {NODES}": merge,
        f"grow {NODES}": partial(growth, branches=0),
        f"grow {NODES} of {BRANCHES} branches": partial(growth, branches=BRANCHES),
    }
    for name, make in of_trees.items():
        for batch in BATCHES:
            yield (
                f"choices/{name} x{batch}",
                partial(measure, [partial(make, ties=ties) for ties in (False, True)], batch),
            )
    for vocab in VOCABS:
        made: dict[str, Callable[..., Both]] = {
            "choose greedy": partial(target, vocab=vocab, params=GREEDY),
            "choose T=1": partial(target, vocab=vocab, params=SAMPLED),
            "choose top-p": partial(target, vocab=vocab, params=NUCLEUS),
            "draft top 1": partial(draft, vocab=vocab, width=1, params=GREEDY),
            f"draft top {WIDTH}": partial(draft, vocab=vocab, width=WIDTH, params=GREEDY),
            "draft T=1": partial(draft, vocab=vocab, width=WIDTH, params=SAMPLED),
            "draft top-p": partial(draft, vocab=vocab, width=WIDTH, params=NUCLEUS),
        }
        for name, build in made.items():
            for batch in BATCHES:
                both = [partial(build, ties=ties) for ties in (False, True)]
                yield f"choices/{name} V={vocab} x{batch}", partial(measure, both, batch)


def measure(make: Sequence[Callable[[Inputs], Both]], batch: int, _: Note, device: str = "cuda") -> dict[str, Any]:
    """Compare on every input; time on the first."""
    errors: dict[str, float] = {}
    pairs = [one(Inputs(batch, device, seed)) for seed, one in enumerate(make, start=1)]
    with torch.inference_mode():
        for both in pairs:
            with on_kernels(False, stable=True):
                expected = both.run()
            with on_kernels(True):
                errors |= both.compare(expected, both.run())
        times = Times()
        for name, on in (("ours", True), ("pytorch", False)):
            times.add(name, partial(_run, pairs[0], on))
        times.again()
    return errors | {"times": times.figures()}


def _run(both: Both, on: bool) -> Any:
    with on_kernels(on):
        return both.run()
