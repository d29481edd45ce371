"""The grammars of one decode step: drafts are led along them, trees stay inside them, and every node gets its mask.

Only requests with a grammar are touched. For those the host reads the draft and the tree before the target runs, and
walks the tree's inner nodes; on a GPU it walks the leaves while the target verifies. A step without a grammar reads
nothing back and can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from d2sd.plugins.trees import Branches, Draft, Tree, replace_rows
from d2sd.runtime.grammar.grammar import PathWalker, forced, has
from d2sd.runtime.sequence import Sequence

# Shape letters: B requests, C of them with a grammar, K branches, S slots, M candidates a slot, N nodes, V vocabulary,
# W = ceil(V / 32) words of a mask.

#: Candidates of every slot that are offered to a grammar, of which the policy's number is kept.
OFFERED = 16
#: Times the policy's nodes that are offered to a grammar, of which the policy's number is kept.
SPARE = 2

Path = tuple[int, ...]
#: Node index of every path, without the anchor, of the trees of constrained requests, by row of the batch.
TreePaths = dict[int, dict[Path, int]]


class StepGrammar:
    """The matchers of the requests of one decode step, by their row in the batch."""

    def __init__(self, walkers: dict[int, PathWalker]) -> None:
        self._walkers = walkers

    @staticmethod
    def of(sequences: SequenceOf[Sequence]) -> StepGrammar | None:
        """None if no request of the batch has a grammar."""
        matchers = {row: s.matcher for row, s in enumerate(sequences) if s.matcher is not None}
        return StepGrammar({row: PathWalker(m) for row, m in matchers.items()}) if matchers else None

    def guide(self, draft: Draft, width: int, branches: Branches | None = None) -> Draft:
        """Lead a draft [B, (K,) S, M] along the grammars and keep the best `width` candidates of every slot.

        Each slot of a constrained request loses the candidates that the grammar excludes after the best allowed path
        to it, and probabilities are divided by what is left. Where the grammar allows one token only, that token is
        the candidate, with probability 1. Nothing follows a slot without a candidate or the end of the answer.
        """
        width = min(width, draft.tokens.shape[-1])
        best = _best(draft, width)
        tokens, logprob, behind = best.tokens, best.logprob, best.behind
        rows = torch.tensor(list(self._walkers), device=tokens.device)
        blocks = (
            len(rows),
            -1,
            *draft.tokens.shape[-2:],
        )  # [C, K, S, M]; a first pass is one branch that keeps nothing
        offered = zip(draft.tokens[rows].view(blocks).tolist(), draft.logprob[rows].view(blocks).tolist(), strict=True)
        kept_paths: list[list[Path]] = [[()] for _ in self._walkers] if branches is None else _prefixes(branches, rows)
        led = [
            [_lead(walker, *branch, width) for branch in zip(prefixes, *both, strict=True)]
            for walker, prefixes, both in zip(self._walkers.values(), kept_paths, offered, strict=True)
        ]
        for column, place in ((tokens, 0), (logprob, 1)):
            values = [[branch[place] for branch in request] for request in led]
            column[rows] = torch.tensor(values, dtype=column.dtype, device=column.device).view(column[rows].shape)
        if behind is not None:  # what is led along one path has one probability, whatever is before it
            behind[rows] = logprob[rows][..., None, :].expand_as(behind[rows])
        return Draft(tokens, logprob, behind)

    def prune(self, tree: Tree, larger: Tree) -> tuple[Tree, TreePaths]:
        """`tree` [B, N] with other trees of constrained requests: the first N nodes of `larger` that can be accepted.

        These have been proposed (their score is finite), and the grammar allows their path. Reads from the device.
        """
        rows = torch.tensor(list(self._walkers), device=tree.tokens.device)
        proposed = larger.valid[rows] & (larger.score[rows] > -math.inf)
        columns = torch.stack([larger.tokens[rows], larger.parent[rows], proposed.long()], 1).tolist()  # [C, 3, F]
        kept_nodes, paths = torch.zeros(proposed.shape, dtype=torch.bool), TreePaths()
        for number, ((row, walker), nodes) in enumerate(zip(self._walkers.items(), columns, strict=True)):
            inside = _inside(walker, nodes, tree.tokens.shape[1])
            kept_nodes[number, list(inside)] = True
            paths[row] = {path: node for node, path in enumerate(inside.values())}
        return replace_rows(tree, rows, larger, kept_nodes.to(rows.device)), paths

    def mask(self, paths: TreePaths, batch: int, nodes: int, vocab_size: int) -> Tensor:
        """The tokens that may follow every node: [B, N, W] int32 on the host, a bit for a token, the lowest first.

        All bits are set where nothing is constrained: for other requests, for padding and behind the end of an answer.
        """
        words = -(-vocab_size // 32)
        mask = torch.full((batch, nodes, words), -1, dtype=torch.int32)
        for row, walker in self._walkers.items():
            for path, node in sorted(paths[row].items()):  # depth first: a path is followed by its continuations
                if bits := walker.allowed(path):  # empty after an end token
                    padded = bytearray(bits[: 4 * words].ljust(4 * words, b"\0"))
                    mask[row, node] = torch.frombuffer(padded, dtype=torch.int32)
            walker.reset()
        return mask


class NoGrammar(StepGrammar):
    """A grammar of no request: a step takes the way of those with grammars, and is not changed."""

    def __init__(self) -> None:
        super().__init__({})

    def guide(self, draft: Draft, width: int, branches: Branches | None = None) -> Draft:
        return _best(draft, width)

    def prune(self, tree: Tree, larger: Tree) -> tuple[Tree, TreePaths]:
        return tree, {}


def _best(draft: Draft, width: int) -> Draft:
    """A copy of the best candidates of every slot."""
    behind = None if draft.behind is None else draft.behind[..., : 1 + width, :width].clone()
    return Draft(draft.tokens[..., :width].clone(), draft.logprob[..., :width].clone(), behind)


def _inside(walker: PathWalker, nodes: list[list[int]], budget: int) -> dict[int, Path]:
    """Paths of the first `budget` proposed nodes that the grammar allows, by their index, in its order.

    `nodes` holds the tokens, the parents' indices, and whether they have been proposed.
    """
    tokens, parents, proposed = nodes
    paths: dict[int, Path] = {0: ()}
    for node in range(1, len(tokens)):
        if len(paths) == budget:
            break
        path = paths.get(parents[node])
        if path is not None and proposed[node] and has(walker.allowed(path), tokens[node]):
            paths[node] = (*path, tokens[node])
    return paths


def _prefixes(branches: Branches, rows: Tensor) -> list[list[Path]]:
    """Kept tokens of every branch of these requests."""
    lengths = branches.prefix_len[rows].tolist()
    return [
        [tuple(tokens[:length]) for tokens, length in zip(of_request, branch_lengths, strict=True)]
        for of_request, branch_lengths in zip(branches.tokens[rows].tolist(), lengths, strict=True)
    ]


def _lead(
    walker: PathWalker, prefix: Path, tokens: list[list[int]], logprob: list[list[float]], width: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Lead the slots [S, M] behind `prefix` along the grammar; the slots of the prefix are left as they are."""
    kept_tokens = [slot[:width] for slot in tokens]
    kept_logprob = [slot[:width] for slot in logprob]
    path: Path | None = prefix
    for slot in range(len(prefix), len(tokens)):
        bits = b"" if path is None else walker.allowed(path)
        only = forced(bits)
        if only is not None:
            best = [(0.0, only)]
        else:
            fits = [(p, t) for p, t in zip(logprob[slot], tokens[slot], strict=True) if p > -math.inf and has(bits, t)]
            total = _logsumexp([p for p, _ in fits])
            best = [(min(p - total, 0.0), t) for p, t in fits[:width]]  # rounded: a child must not exceed its parent
        missing = width - len(best)
        kept_tokens[slot] = [t for _, t in best] + [0] * missing
        kept_logprob[slot] = [p for p, _ in best] + [-math.inf] * missing
        path = (*path, best[0][1]) if path is not None and best else None
    return kept_tokens, kept_logprob


def _logsumexp(values: list[float]) -> float:
    most = max(values, default=0.0)
    return most + math.log(sum(math.exp(value - most) for value in values)) if values else 0.0
