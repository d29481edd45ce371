"""TensorRT as far as our code calls it, on a CPU: engines are Python functions over tensors found by their addresses.

A file holds the name of one of GRAPHS. What is public here has TensorRT's names, so that a test can hold it against the
real one; what is not begins with an underscore.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.onnx import BLOCK, DOMAIN, TREE, VERSION
from d2sd.runtime.backends.tensorrt_checks import TYPES, Profile

Dims = tuple[int | str, ...]


@dataclass(slots=True)
class _Graph:
    """The network of a fake engine; a dimension that is a name is one size wherever it stands."""

    inputs: dict[str, Dims]
    outputs: dict[str, Dims]
    types: dict[str, torch.dtype]
    profiles: Sequence[Profile]
    compute: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    launches: list[_Launch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Launch:
    context: IExecutionContext
    profile: int
    stream: int
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]


GRAPHS: dict[str, _Graph] = {}


class TensorIOMode(Enum):
    INPUT, OUTPUT = 1, 2


class DataType(Enum):
    FLOAT, HALF, BF16, INT32, INT64 = range(5)


class ExecutionContextAllocationStrategy(Enum):
    USER_MANAGED = 2


class EngineValidity(IntEnum):
    VALID, SUBOPTIMAL, INVALID = 0, 1, 2


class EngineInvalidityDiagnostics(IntEnum):
    VERSION_MISMATCH, UNSUPPORTED_CC, OLD_CUDA_DRIVER = 1, 2, 4


class TensorRTPhase(Enum):
    BUILD, RUNTIME = 0, 1


class ILogger:
    ERROR, WARNING = 1, 2

    def log(self, severity: int, msg: str) -> None:
        raise NotImplementedError


class IPluginV3: ...


class IPluginV3OneCore: ...


class IPluginV3OneBuild: ...


class IPluginV3OneRuntime: ...


class IPluginCreatorV3One: ...


class PluginFieldCollection:
    def __init__(self, fields: list[Any]) -> None:
        assert not fields


class IPluginRegistry:
    def __init__(self) -> None:
        self._creators: dict[tuple[str, str, str], Any] = {}

    def get_creator(self, type: str, version: str, plugin_namespace: str) -> Any:
        return self._creators.get((type, version, plugin_namespace))

    def register_creator(self, creator: Any, plugin_namespace: str) -> bool:
        self._creators[creator.name, creator.plugin_version, plugin_namespace] = creator
        return True


_registry = IPluginRegistry()


def get_plugin_registry() -> IPluginRegistry:
    return _registry


class Runtime:
    _validity: tuple[int, int] = EngineValidity.VALID, 0  # what a test wants it to say

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def get_engine_validity(self, buffer: Any) -> tuple[int, int]:
        assert bytes(buffer)
        return self._validity

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        name = bytes(serialized_engine).decode()
        self._logger.log(ILogger.WARNING, "slow")
        if name not in GRAPHS:
            self._logger.log(ILogger.ERROR, "magic tag")
        elif any(_registry.get_creator(plugin, VERSION, DOMAIN) is None for plugin in (TREE, BLOCK)):
            self._logger.log(ILogger.ERROR, "no such plugin")
        else:
            return ICudaEngine(GRAPHS[name], self._logger)
        return None


class ICudaEngine:
    def __init__(self, graph: _Graph, logger: ILogger) -> None:
        self._graph, self._logger = graph, logger
        self.num_io_tensors = len(graph.types)
        self.num_optimization_profiles = len(graph.profiles)
        self.device_memory_size_v2 = 1024

    def get_tensor_name(self, index: int) -> str:
        return list(self._graph.types)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._graph.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        (kind,) = (kind for kind, dtype in TYPES.items() if dtype == self._graph.types[name])
        return DataType[kind]

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(
        self, runtime_config: IRuntimeConfig | ExecutionContextAllocationStrategy
    ) -> IExecutionContext:
        if isinstance(runtime_config, IRuntimeConfig):
            assert runtime_config._managed
            assert runtime_config.dynamic_shapes_kernel_specialization_strategy is _EAGER
        else:
            assert runtime_config is ExecutionContextAllocationStrategy.USER_MANAGED
        return IExecutionContext(self._graph, self._logger)


class DynamicShapesKernelSpecializationStrategy(Enum):
    LAZY, EAGER = range(2)


_EAGER = DynamicShapesKernelSpecializationStrategy.EAGER


class IRuntimeConfig:
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
    _managed = False

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self._managed = strategy is ExecutionContextAllocationStrategy.USER_MANAGED


class IExecutionContext:
    def __init__(self, graph: _Graph, logger: ILogger) -> None:
        self._graph, self._logger = graph, logger
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._profile, self._scratch = -1, 0

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size == 1024
        self._scratch = memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle
        self._profile = profile_index
        return profile_index < len(self._graph.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self._graph.profiles[self._profile][name]
        self._shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """-1 where an input's shape is still to come."""
        sizes: dict[int | str, int] = {}
        for given, shape in self._shapes.items():
            for dim, size in zip(self._graph.inputs[given], shape, strict=True):
                assert sizes.setdefault(dim, size) == size, f"{given} {shape}: {dim} is {sizes[dim]} elsewhere"
        return tuple(dim if isinstance(dim, int) else sizes.get(dim, -1) for dim in self._graph.outputs[name])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return bool(memory) and name in self._graph.types

    def execute_async_v3(self, stream_handle: int) -> bool:
        graph = self._graph
        assert self._scratch, "no memory was given"
        if self._shapes.keys() != graph.inputs.keys() or self._addresses.keys() != graph.types.keys():
            self._logger.log(ILogger.ERROR, "not all tensors are bound")
            return False
        given = {name: _at(self._addresses[name], self._shapes[name], graph.types[name]) for name in graph.inputs}
        for name, tensor in graph.compute(given).items():
            _at(self._addresses[name], self.get_tensor_shape(name), graph.types[name]).copy_(tensor)
        graph.launches.append(_Launch(self, self._profile, stream_handle, dict(self._shapes), dict(self._addresses)))
        self._addresses.clear()  # what a later run forgets to bind is noticed
        return True


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor at the address."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
