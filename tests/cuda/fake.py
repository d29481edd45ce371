"""Decode steps on fake CUDA tensors: shapes, types and devices are those of a GPU, and there are no numbers.

FakeTensorMode refuses operators that mix devices and everything that reads a value: `item`, `tolist`, `bool`, masks as
indices. `Watch` reports what it lets pass, copies between devices, and counts launches: operators that are no views,
and Triton kernels. Kernels inside an operator of PyTorch count as one. What kernels compute is in tests/ptx.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from benchmarks.gpu.traffic import launches
from d2sd.modeling import product
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, FlexConfig, Role, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.head_configs import HeadConfig
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import make_fp8
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.layers import Rotary
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.where import Where
from d2sd.plugins import dispatch
from d2sd.plugins.trees import Draft
from d2sd.policies import DrafterRole, DraftUse
from d2sd.runtime import model_runner
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import Link
from d2sd.runtime.cuda_graphs.steps import Handover, captured_step
from d2sd.runtime.drafting.window import Window
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import Policy, make_policy
from tests.tiny import of_case, policy_name

BLOCK, BRANCHES, NODES, VOCABULARY = 16, 4, 64, 512

GREEDY, HOT, NARROW = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2),
)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Launches by stage, and copies between host and device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.copies: list[str] = []
        self.current = "other"

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The timer of `decode_step`."""
        before, self.current = self.current, name
        yield
        self.current = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The one operator of the step that has no fake form.
        out = kwargs["out"] if str(func) == "aten._scaled_mm.out" and kwargs else func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        devices = {x.device.type for x in (*given, *made)}
        if "cuda" in devices and launches(func, given, made):
            self.launches[self.current] += 1
        if len(devices) > 1 and any(x.device.type == "cpu" and (x.dim() or x in made) for x in (*given, *made)):
            self.copies.append(f"{func} in {self.current}")
        return out


@contextmanager
def fake_gpu(watch: Watch, capability: tuple[int, int] = (9, 0)) -> Iterator[FakeTensorMode]:
    """An H100 in all that the code asks PyTorch and Triton for; Triton kernels are counted instead of launched."""

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for value in (part for arg in args for part in (arg if isinstance(arg, tuple) else (arg,))):
            if isinstance(value, Tensor):
                assert value.device.type == "cuda", kernel.__name__
            else:
                assert value is None or isinstance(value, (int, float)), f"{kernel.__name__}: {type(value)}"
        assert all(isinstance(size, int) and size > 0 for size in grid), grid
        watch.launches[watch.current] += 1

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=False) as mode:
        _device_constructors()  # knows operators by identity: made before one is patched
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
        patch.setattr(torch, "frombuffer", lambda buffer, *, dtype: zeros(len(buffer) // dtype.itemsize, dtype=dtype))
        patch.setattr(model_runner, "CudaGraphs", lambda device: None)  # steps run one by one
        patch.setattr(dispatch, "use_kernels", lambda op, x, **_: x.device.type == "cuda")
        patch.setattr(product, "_equal", lambda scales: True)
        patch.setattr(JITFunction, "run", launched)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        patch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
        yield mode


def runner(
    layers: int,
    drafter_layers: int,
    *,
    fp8: bool,
    exact: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    roles: Collection[DrafterRole] = tuple(DrafterRole),
    case: str = "",
    scored: HeadConfig | None = None,
    **changes: Any,
) -> ModelRunner:
    """Narrow models of this depth: launches do not depend on widths. `fp8`: all linear layers but the head.

    `scored`: a head of both drafters. `case`: in place of the first a FlexDraft head, if it is one of `FLEX_CASES`.
    `changes` are of the target's body, without a FlexDraft head.
    """
    body = BodyConfig(
        hidden_size=64,
        intermediate_size=128,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        max_positions=4096,
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
    )

    def drafter(role: Role) -> Drafter:
        return Drafter(
            DrafterConfig(
                body=replace(body, num_layers=drafter_layers),
                vocab_size=VOCABULARY,
                block_size=BLOCK,
                mask_token_id=VOCABULARY - 1,
                target_layer_ids=(0, layers - 1),
                num_target_layers=layers,
                role=role,
                prefix_weight_base=None if role == "first" else 0.9,
                head=scored,
            )
        )

    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            target = Decoder(DecoderConfig("qwen3", replace(body, **changes), VOCABULARY, False))
            deep = replace(body, num_layers=min(drafter_layers, layers - 1))
            head = FlexHead(FlexConfig("qwen3", deep, VOCABULARY, BLOCK, layers, 16))
            drafting: list[DraftModel] = [drafter("first"), drafter("variable_prefix"), head]
            for model in (target, *drafting):
                linears = [n for n, part in model.named_modules() if isinstance(part, nn.Linear) and n != "lm_head"]
                if fp8 and model is not head:
                    make_fp8(model, linears, cache=False)
                for part in model.modules():  # frequencies are made on the CPU and follow their model
                    if isinstance(part, Rotary):
                        part.to("cuda")
                model.eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    if not changes:
        head.join(target)
    if scored is not None:
        for one in drafting[:2]:
            cast("Drafter", one).join(target)
    drafters = {
        role: drafter
        for role, drafter in zip(DrafterRole, of_case(case, *drafting), strict=True)
        if drafter and role in roles
    }
    prepare_for_inference(target, drafters.values(), exact=exact)
    return ModelRunner(target, drafters, block_size=BLOCK)


def batch_of(size: int, kinds: tuple[SamplingParams, ...], *, states: bool = False) -> Batch:
    """Requests of 100 tokens in up to 16 pages; with `states`, of a target that has some."""
    params = [kinds[row % len(kinds)] for row in range(size)]
    batch = Batch.dummy(Where.scratch(size, 16, 100, states=states), VOCABULARY, "cuda")
    return replace(batch, sampling=Sampling.pack(params, VOCABULARY, "cuda")).to("cuda")


def policy_of(name: str, *, lookup: bool = False) -> Policy:
    return make_policy(policy_name(name), block_size=BLOCK, branches=BRANCHES, row_budget=NODES, lookup=lookup)


def steps(
    name: str,
    kinds: tuple[SamplingParams, ...],
    *,
    size: int = 3,
    layers: int = 2,
    drafter_layers: int = 2,
    fp8: bool = False,
    exact: bool = False,
    calibrated: bool = False,
    lookup: bool = False,
    window: Window | None = None,
    **changes: Any,
) -> Watch:
    """The second of two decode steps: the first one moves tables of positions to the device, once.

    As a graph holds them: with what takes the state of the step before and leaves it to the next, under "handover".
    """
    watch = Watch()
    with fake_gpu(watch):
        policy, calibration = policy_of(name, lookup=lookup), None
        made = runner(layers, drafter_layers, fp8=fp8, exact=exact, roles=policy.drafters, case=name, **changes)
        made.allocate(PoolSizes(64, 16, states=1 + size))
        made.window = window
        if policy.copies:
            made.keep_text()
        if calibrated:
            shape = 2, len(DraftUse), BLOCK - 1, 2
            slope, offset = torch.ones(shape), torch.zeros(shape)
            calibration = Calibration(slope, offset).to(made.device)
        batch, draft = batch_of(size, kinds, states=made.state_bytes > 0), None
        if policy.drafts_on_host:
            draft = policy.host_draft(made, [], size)
            draft = Draft(draft.tokens.to("cuda"), draft.logprob.to("cuda"))
        handover, packed = Handover(size, made.device), Link.pack([], size)
        link = Link(*(getattr(packed, field.name).to("cuda") for field in fields(Link)))
        requests, pages = batch.where.pages.shape
        made.context.reserve(requests, pages, BLOCK)
        for _ in range(2):
            with watch:
                watch.launches.clear()
                watch.copies.clear()
                captured_step(made, policy, batch, link, handover, calibration, draft, watch.stage)
    return watch
