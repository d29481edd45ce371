"""CUDA graphs on a CPU: the operators of a function, recorded with the memory they use and repeated in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d2sd.runtime.engine import Engine
from d2sd.runtime.staging import Staging

T = TypeVar("T")


class RecordedGraph(TorchDispatchMode):
    """Writes down every operator, and which memory is the function's own. What the host computed meanwhile is frozen,
    as in a CUDA graph.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self.replays, self.dirty = 0, True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_address(t) for t in _tensors((args, kwargs))}
        made = [t for t in _tensors(out) if _address(t) not in given]
        if func._schema.is_mutable or made:
            self.operators.append((func, args, kwargs or {}, [] if func._schema.is_mutable else _tensors(out)))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays, self.dirty = self.replays + 1, True
        for func, args, kwargs, outputs in self.operators:
            values = _tensors(func(*args, **kwargs))
            for memory, value in zip(outputs, values, strict=False):  # none of an operator in place
                memory.copy_(value)

    @torch.inference_mode()
    def poison(self) -> None:
        """Overwrite all memory of the graph: who still refers to it computes garbage."""
        for *_, outputs in self.operators:
            for tensor in outputs:
                tensor.fill_(_garbage(tensor.dtype))
        self.dirty = False


class RerunGraph:
    """Runs the function again, several times faster, and copies its result to where it was: the only memory it has."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self.out = run, run()
        self._memory = _parts(self.out)
        self.replays, self.dirty = 0, True

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays, self.dirty = self.replays + 1, True
        for memory, value in zip(self._memory, _parts(self._run()), strict=True):
            memory.copy_(value)

    @torch.inference_mode()
    def poison(self) -> None:
        for tensor in self._memory:
            tensor.fill_(_garbage(tensor.dtype))
        self.dirty = False


class RecordedGraphs:
    """A `Capture`. Between two steps of `guard`'s engine, the memory of all graphs and their inputs is overwritten."""

    def __init__(self, *, rerun: bool = False) -> None:
        """`rerun` makes graphs that run their function again."""
        self.graphs: list[RecordedGraph | RerunGraph] = []
        self._rerun = rerun

    def __call__(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        run()
        graph: RecordedGraph | RerunGraph
        if self._rerun:
            graph = RerunGraph(run)
            out = graph.out
        else:
            graph = RecordedGraph()
            with graph:
                out = run()
        self.graphs.append(graph)
        graph.poison()
        return out, graph.replay

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        copy = tensor.clone()
        return lambda: copy

    def mark(self) -> Callable[[], None]:
        return lambda: None

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)

    def guard(self, engine: Engine, *, prefills: bool = False) -> Engine:
        """The engine with captured steps; `prefills`: and with captured passes over prompts."""
        engine.runner.capture, engine.runner.static_shapes = self, True
        engine.runner.staging = Staging("cpu", self.mark)
        for capture in engine.steps.prefills.warm_ups() if prefills else ():
            capture()
        step = engine.step

        def poisoned() -> Any:
            outputs = step()
            for graph in self.graphs:
                if graph.dirty:
                    graph.poison()
            for inputs in engine.steps._inputs.values():
                inputs._device.fill_(0xA5)
            for prefill in engine.steps.prefills._graphs.values():
                for tensor in prefill.inputs:
                    tensor.fill_(_garbage(tensor.dtype))
            return outputs

        engine.step = poisoned  # type: ignore[method-assign]
        return engine


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _parts(state: Any) -> list[Tensor]:
    """The tensors of a step's result."""
    if isinstance(state, Tensor):  # one of what is repeated by a stride of 0
        return [state[tuple(slice(None if step else 1) for step in state.stride())]]
    if is_dataclass(state):
        return [t for field in fields(state) for t in _parts(getattr(state, field.name))]
    return [t for part in state for t in _parts(part)] if isinstance(state, tuple) else []


def _garbage(dtype: torch.dtype) -> float:
    """NaN; for integers the largest one, out of range as an index."""
    return torch.nan if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
