"""TensorRT: a `Session` over an engine, and the `ModelRunner` over a bundle's engines. **Not yet run** on a GPU.

d2sd allocates the K/V pools, and engines bind them without a copy. Embedding, head and everything between the engines
run in PyTorch on the same stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from d2sd.errors import BundleError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import DrafterRole
from d2sd.runtime.backends.exported import GraphDecoder, IOSpec, drafter_io_spec, graph_drafter, target_io_spec
from d2sd.runtime.backends.tensorrt_checks import (
    EngineFile,
    Profile,
    check_compatible,
    check_io,
    open_engine,
    this_device,
)
from d2sd.runtime.model_runner import ModelRunner
from d2sd.tensorrt_env import ALIGNMENT, ErrorLog, TensorRT


def current_stream() -> int:
    """Handle of PyTorch's stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def leave_default_stream() -> None:
    """Move this thread off the default stream, on which TensorRT synchronizes the device at every run."""
    if current_stream() == 0:
        ours = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        ours.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(ours)


class EngineSession:
    """An engine with one execution context a profile, created on first use.

    A run reads nothing back and keeps no tensor. The caching allocator reuses freed blocks in stream order, so outputs
    may be freed before the run finishes; TensorRT's auxiliary streams join the current stream before a run ends.

    A CUDA graph can capture a run: inputs and outputs are then in the graph's private pool, and the scratch memory is
    one buffer that exists as long as the session, shared by all contexts, which never run concurrently. Run each shape
    before it is captured: contexts are created, and TensorRT-RTX compiles its kernels, at first use.
    """

    def __init__(self, trt: TensorRT, engine: EngineFile, surface: IOSpec) -> None:
        """Raises `BundleError` if the engine cannot run on this machine or its inputs and outputs differ."""
        device = this_device(engine.path)
        check_compatible(trt, engine, device.capability)
        self._module, self._file, self._surface, self._device = trt.module, engine, surface, device.name
        self._errors = ErrorLog(trt.module)
        self._runtime, self._engine = open_engine(trt, engine, self._errors, device.capability)
        check_io(trt, engine, self._engine, surface)
        self._scratch_size = int(self._engine.device_memory_size_v2)
        self._scratch = torch.empty(max(self._scratch_size, 1), dtype=torch.uint8, device=device.name)
        self._contexts: dict[int, Any] = {}

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs by name. Inputs are contiguous, on the engine's device, and of its types.

        Raises `BundleError` if no profile admits their shapes.
        """
        assert {name: tensor.dtype for name, tensor in inputs.items()} == self._surface.inputs
        context = self._context(self._profile(inputs))
        for name, tensor in inputs.items():
            assert tensor.is_contiguous(), name
            assert tensor.device == self._device, name
            self._demand(context.set_input_shape(name, tuple(tensor.shape)), f"the shape of {name}")
            self._bind(context, name, tensor)
        outputs = {}
        for name, dtype in self._surface.outputs.items():
            shape = tuple(context.get_tensor_shape(name))
            assert min(shape) >= 0, f"{name} has no shape before it runs"
            size = math.prod(shape)
            memory = torch.empty(max(size, 1), dtype=dtype, device=self._device)  # an empty tensor has no address
            self._bind(context, name, memory)
            outputs[name] = memory[:size].view(shape)
        self._demand(context.execute_async_v3(current_stream()), "the run")
        return outputs

    def _bind(self, context: Any, name: str, tensor: Tensor) -> None:
        address = tensor.data_ptr()
        if address % ALIGNMENT:  # only layers of a pool: they are contiguous, and PyTorch allocates multiples of 512
            raise BundleError(
                "Tensor address is not aligned.",
                where=self._file.path,
                found=f"{name} at {address:#x}",
                expected=f"a multiple of {ALIGNMENT} bytes",
                fix="build the bundle with a larger limits.page_size",
            )
        self._demand(context.set_tensor_address(name, address), f"the address of {name}")

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            context = self._engine.create_execution_context(self._configured())
            self._demand(context is not None, "an execution context")
            context.set_device_memory(self._scratch.data_ptr(), self._scratch_size)
            # on the stream of the runs, so it completes before them
            self._demand(context.set_optimization_profile_async(profile, current_stream()), f"profile {profile}")
            self._contexts[profile] = context
        return self._contexts[profile]

    def _configured(self) -> Any:
        """Configuration of a context: scratch memory from us, and kernels specialized to its shapes.

        By default TensorRT-RTX compiles shape-specialized kernels in the background and runs generic fallbacks
        meanwhile; EAGER avoids timing or capturing the fallbacks.
        """
        managed = self._module.ExecutionContextAllocationStrategy.USER_MANAGED
        kernels = getattr(self._module, "DynamicShapesKernelSpecializationStrategy", None)
        if kernels is None:  # classic TensorRT compiles its kernels at build time
            return managed
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(managed)
        config.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
        return config

    def _profile(self, inputs: Mapping[str, Tensor]) -> int:
        """Index of the first profile that admits all shapes."""
        misfits = []
        for index, profile in enumerate(self._file.profiles):
            outside = [name for name, tensor in inputs.items() if not _admits(profile, name, tensor)]
            if not outside:
                return index
            misfits.append(outside)
        name = min(misfits, key=len)[0]  # of the profile that comes closest
        sizes = (f"{profile[name][0]} to {profile[name][2]}" for profile in self._file.profiles)
        raise BundleError(
            "The engine has no profile for inputs of these shapes.",
            where=self._file.path,
            found=f"{name} {list(inputs[name].shape)}",
            expected="; or ".join(dict.fromkeys(sizes)),
            fix="serve within the limits and the tree of the bundle's recipe, or build it with larger ones",
        )

    def _demand(self, done: bool, what: str) -> None:
        if not done:
            raise BundleError(f"TensorRT refused {what}.", where=self._file.path, found=self._errors.drain())


def _admits(profile: Profile, name: str, tensor: Tensor) -> bool:
    smallest, _, largest = profile[name]
    sizes = zip(smallest, tensor.shape, largest, strict=True)
    return all(low <= size <= high for low, size, high in sizes)


def max_requests(profiles: Sequence[Profile], rows: int) -> int:
    """The most requests of `rows` rows each that the target's profiles admit in one run."""
    shapes = [profile["embedded"] for profile in profiles]
    return max((largest[0] for smallest, _, largest in shapes if smallest[1] <= rows <= largest[1]), default=1)


def engine_runner(
    trt: TensorRT,
    target: tuple[Decoder, EngineFile],
    drafters: Mapping[DrafterRole, tuple[DraftModel, EngineFile]],
    *,
    aux_layer_ids: tuple[int, ...],
    page_size: int,
    block_size: int | None = None,
) -> ModelRunner:
    """The `ModelRunner` over engines of the target and of drafters.

    Of the PyTorch models only what stands around the layers is used, and moved to the GPU, in the engines' type.
    `aux_layer_ids` are the layers whose features the target's engine returns; `block_size` is the runner's.
    Raises `BundleError` if an engine cannot run on this machine.
    """
    decoder, file = target
    device = this_device(file.path).name
    leave_default_stream()
    dtype = decoder.embed_tokens.weight.dtype
    session = EngineSession(trt, file, target_io_spec(decoder.config.body, dtype))
    graphs = {}
    for role, (drafter, engine) in drafters.items():
        drafter_session = EngineSession(trt, engine, drafter_io_spec(drafter.config, dtype))
        rows = max((profile["features"][2][1] for profile in engine.profiles), default=0) if drafter.has_context else 0
        graphs[role] = graph_drafter(drafter, drafter_session, page_size, rows).to(device)
    graph = GraphDecoder(decoder, aux_layer_ids, session, partial(max_requests, file.profiles))
    runner = ModelRunner(graph.to(device), graphs, block_size=block_size)
    # A step runs one context with several shapes. What TensorRT prepares on the host when a shape changes is missing in
    # a graph, and whether a replay then reads the right shapes is not known.
    runner.capture = None
    return runner
