"""Running engines: a `Session` over TensorRT, and the executor of a bundle's engines. **Not yet run** on a GPU.

The K/V pools are ours and bound where they lie. Embedding, head and everything between the engines stay PyTorch's, on
one stream.
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
from d2sd.modeling.drafter import Drafter
from d2sd.runtime.backends.exported import GraphDecoder, GraphDrafter, IOSpec, drafter_surface, target_surface
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.backends.tensorrt_checks import (
    EngineFile,
    Profile,
    check_compatible,
    check_io,
    open_engine,
    this_device,
)
from d2sd.tensorrt_env import ALIGNMENT, ErrorLog, TensorRT


def current_stream() -> int:
    """Handle of PyTorch's stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def leave_default_stream() -> None:
    """Give this thread a stream of ours if it has the default one, where TensorRT waits for the device every run."""
    if current_stream() == 0:
        ours = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        ours.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(ours)


class EngineSession:
    """An engine with one execution context a profile, made when first asked for.

    A run reads nothing back and keeps no tensor. PyTorch hands memory that is let go of out again for later work on the
    same stream only, which comes after ours; streams of TensorRT's own join ours before a run ends.

    A CUDA graph can record a run: inputs and outputs then lie in the graph's pool, where nothing else comes, and the
    scratch memory is one buffer that lives as long as the session, for all contexts, which never run at once. Run
    each shape before it is recorded: contexts are made, and TensorRT-RTX compiles its kernels, at first use.
    """

    def __init__(self, trt: TensorRT, engine: EngineFile, surface: IOSpec) -> None:
        """Raises `BundleError` where the engine does not run here, or not for this graph."""
        device = this_device(engine.path)
        check_compatible(trt, engine, device.capability)
        self._module, self._file, self._surface, self._device = trt.module, engine, surface, device.name
        self._heard = ErrorLog(trt.module)
        self._runtime, self._engine = open_engine(trt, engine, self._heard, device.capability)
        check_io(trt, engine, self._engine, surface)
        self._scratch_size = int(self._engine.device_memory_size_v2)
        self._scratch = torch.empty(max(self._scratch_size, 1), dtype=torch.uint8, device=device.name)
        self._contexts: dict[int, Any] = {}

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs by name. Inputs are contiguous, on the engine's device, and of its types.

        Raises `BundleError` where no profile admits their shapes.
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
            memory = torch.empty(max(size, 1), dtype=dtype, device=self._device)  # a tensor of nothing has no address
            self._bind(context, name, memory)
            outputs[name] = memory[:size].view(shape)
        self._demand(context.execute_async_v3(current_stream()), "the run")
        return outputs

    def _bind(self, context: Any, name: str, tensor: Tensor) -> None:
        address = tensor.data_ptr()
        if (
            address % ALIGNMENT
        ):  # of pools alone, for PyTorch gives multiples of 512: a layer of theirs begins where the one before it ends
            raise BundleError(
                "TensorRT takes no tensor that lies there.", where=self._file.path, found=f"{name} at {address:#x}",
                expected=f"a multiple of {ALIGNMENT} bytes", fix="build the bundle with a larger limits.page_size",
            )  # fmt: skip
        self._demand(context.set_tensor_address(name, address), f"the address of {name}")

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            context = self._engine.create_execution_context(self._configured())
            self._demand(context is not None, "an execution context")
            context.set_device_memory(self._scratch.data_ptr(), self._scratch_size)
            # on the stream of the runs, so none of them overtakes it
            self._demand(context.set_optimization_profile_async(profile, current_stream()), f"profile {profile}")
            self._contexts[profile] = context
        return self._contexts[profile]

    def _configured(self) -> Any:
        """How a context is to run: in our scratch memory, and by kernels that were made for its shapes.

        Left to itself TensorRT-RTX makes them beside the runs, which meanwhile take slower ones: what is timed, or
        recorded in a CUDA graph, would be those.
        """
        managed = self._module.ExecutionContextAllocationStrategy.USER_MANAGED
        kernels = getattr(self._module, "DynamicShapesKernelSpecializationStrategy", None)
        if kernels is None:  # classic TensorRT made its kernels when it built
            return managed
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(managed)
        config.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
        return config

    def _profile(self, inputs: Mapping[str, Tensor]) -> int:
        """The first that admits all shapes."""
        misfits = []
        for place, profile in enumerate(self._file.profiles):
            outside = [name for name, tensor in inputs.items() if not _admits(profile, name, tensor)]
            if not outside:
                return place
            misfits.append(outside)
        name = min(misfits, key=len)[0]  # of the profile that comes closest
        sizes = (f"{profile[name][0]} to {profile[name][2]}" for profile in self._file.profiles)
        raise BundleError(
            "The engine has no profile for inputs of these shapes.", where=self._file.path,
            found=f"{name} {list(inputs[name].shape)}", expected="; or ".join(dict.fromkeys(sizes)),
            fix="serve within the limits and the tree of the bundle's recipe, or build it with larger ones",
        )  # fmt: skip

    def _demand(self, done: bool, what: str) -> None:
        if not done:
            raise BundleError(f"TensorRT refused {what}.", where=self._file.path, found=self._heard.drain())


def _admits(profile: Profile, name: str, tensor: Tensor) -> bool:
    least, _, most = profile[name]
    sizes = zip(least, tensor.shape, most, strict=True)
    return all(low <= size <= high for low, size, high in sizes)


def max_requests(profiles: Sequence[Profile], rows: int) -> int:
    """The most requests of so many rows each that a run of the target takes, by its profiles."""
    shapes = [profile["embedded"] for profile in profiles]
    return max((most[0] for least, _, most in shapes if least[1] <= rows <= most[1]), default=1)


def engine_runner(
    trt: TensorRT,
    target: tuple[Decoder, EngineFile],
    *drafters: tuple[Drafter, EngineFile],
    aux_layer_ids: tuple[int, ...],
    page_size: int,
    block_size: int = 1,
) -> ModelRunner:
    """The executor over engines: of the target and of its drafters, first and second.

    Of the models only embedding, head and draft vocabulary are used, and moved to the GPU; they are in the engines'
    type. `aux_layer_ids` are the layers whose features the target's engine returns. Without drafters blocks are of
    `block_size`.
    Raises `BundleError` where an engine does not run here.
    """
    decoder, engine = target
    device = this_device(engine.path).name
    leave_default_stream()
    dtype = decoder.embed_tokens.weight.dtype
    session = EngineSession(trt, engine, target_surface(decoder.config.body, dtype))
    drafting = [
        GraphDrafter(
            drafter,
            EngineSession(trt, engine, drafter_surface(drafter.config.body, dtype)),
            page_size,
            context_rows=max(profile["features"][2][1] for profile in engine.profiles),
        ).to(device)
        for drafter, engine in drafters
    ]
    return ModelRunner(
        GraphDecoder(decoder, aux_layer_ids, session).to(device), *drafting, block_size=block_size,
        max_prefill_requests=partial(max_requests, engine.profiles),
    )  # fmt: skip
