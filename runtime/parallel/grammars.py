"""Grammars of a step of several ranks: rank 0 has the matchers, and sends their results to the others."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from d2sd.modeling.tensor_parallel import Group
from d2sd.modeling.where import mapped
from d2sd.plugins.trees import Branches, Draft, Tree
from d2sd.runtime.grammar.step import StepGrammar, TreePaths
from d2sd.runtime.parallel.messages import receive, send

T = TypeVar("T", Draft, Tree)
U = TypeVar("U")


class SendingGrammar(StepGrammar):
    """The matchers of rank 0."""

    def __init__(self, matchers: StepGrammar, group: Group) -> None:
        self._matchers, self._group = matchers, group

    def guide(self, draft: Draft, width: int, branches: Branches | None = None) -> Draft:
        guided = self._matchers.guide(draft, width, branches)
        send(self._group, "guided", guided)
        return guided

    def prune(self, tree: Tree, larger: Tree) -> tuple[Tree, TreePaths]:
        inside, paths = self._matchers.prune(tree, larger)
        send(self._group, "pruned", inside)
        return inside, paths

    def mask(self, paths: TreePaths, batch: int, nodes: int, vocab_size: int) -> Tensor:
        mask = self._matchers.mask(paths, batch, nodes, vocab_size)
        send(self._group, "mask", mask)
        return mask


class ReceivingGrammar(StepGrammar):
    """In the other ranks, the results of those matchers."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def guide(self, draft: Draft, width: int, branches: Branches | None = None) -> Draft:
        return _moved(self._next("guided", Draft), draft)

    def prune(self, tree: Tree, larger: Tree) -> tuple[Tree, TreePaths]:
        return _moved(self._next("pruned", Tree), tree), TreePaths()

    def mask(self, paths: TreePaths, batch: int, nodes: int, vocab_size: int) -> Tensor:
        return self._next("mask", Tensor)

    def _next(self, expected: str, of: type[U]) -> U:
        kind, (value,) = receive(self._group)
        assert kind == expected, kind
        assert isinstance(value, of)
        return value


def _moved(value: T, like: Draft | Tree) -> T:
    """The value with all its tensors on the device of those of another."""
    return mapped(value, lambda tensor: tensor.to(like.tokens.device))
