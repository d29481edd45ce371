"""Engines run by a TensorRT that is none, on a CPU: the whole loop, and every reason not to open one."""

from __future__ import annotations

import inspect
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from d2sd.convert.engines.profiles import make_profiles
from d2sd.errors import BundleError
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import KVPool, PoolSizes, Rows
from d2sd.modeling.where import Where
from d2sd.plugins.cascade_attention.onnx import DOMAIN, INPUTS, TREE, VERSION
from d2sd.policies import DrafterRole
from d2sd.recipe import Builder
from d2sd.runtime.backends import tensorrt
from d2sd.runtime.backends import tensorrt_checks as tensorrt_check
from d2sd.runtime.backends.exported import GraphDrafter, IOSpec, drafter_io_spec, target_io_spec
from d2sd.runtime.backends.tensorrt import EngineSession, engine_runner
from d2sd.runtime.backends.tensorrt_checks import Device, EngineFile, incompatibility
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from d2sd.tensorrt_env import TensorRT
from tests.runtime import fake_tensorrt
from tests.runtime.fake_engines import PAGE, RECIPE, TRT, drafter_engine, flex_engine, target_engine
from tests.runtime.fake_tensorrt import GRAPHS, EngineInvalidityDiagnostics, EngineValidity, Runtime
from tests.runtime.helpers import BLOCK as SIZE
from tests.runtime.helpers import BRANCHES, BUDGET, expected, models, poison, some_requests
from tests.tiny import FLEX_CASES, policy_name, pool_for

STREAM = 77


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "this_device", lambda file: Device(torch.device("cpu"), (8, 9)))
    monkeypatch.setattr(tensorrt, "current_stream", lambda: STREAM)
    monkeypatch.setattr(tensorrt, "ALIGNMENT", 4)  # what PyTorch gives on a CPU, and parts of pools
    monkeypatch.setattr(fake_tensorrt, "_registry", fake_tensorrt.IPluginRegistry())
    GRAPHS.clear()


@pytest.fixture
def target(tmp_path: Path) -> EngineFile:
    model, first, *_ = models()
    return target_engine(tmp_path, model, first.config.target_layer_ids)


def runner(folder: Path, case: str = "") -> ModelRunner:
    target, first, second, head = deepcopy(models())
    aux_layer_ids = () if case in FLEX_CASES else first.config.target_layer_ids
    engine = target_engine(folder, target, aux_layer_ids)
    drafters: dict[DrafterRole, tuple[DraftModel, EngineFile]] = {
        DrafterRole.FIRST: (first, drafter_engine(folder, "first", first)),
        DrafterRole.SECOND: (second, drafter_engine(folder, "second", second)),
    }
    if case in FLEX_CASES:
        drafters = {DrafterRole.FIRST: (head, flex_engine(folder, head))}
    return engine_runner(TRT, (target, engine), drafters, aux_layer_ids=aux_layer_ids, page_size=PAGE)


def serve(made: ModelRunner, name: str) -> Engine:
    limits = RECIPE.limits
    policy = make_policy(policy_name(name), block_size=SIZE, branches=BRANCHES, row_budget=BUDGET)
    return Engine(made, policy, Limits(limits.max_batch, limits.max_context, PAGE, limits.prefill_chunk))


def session(engine: EngineFile, surface: IOSpec | None = None) -> EngineSession:
    body = models()[0].config.body
    return EngineSession(TRT, engine, surface or target_io_spec(body, torch.float32))


def inputs_of(batch: int, rows: int) -> dict[str, Tensor]:
    """For the target: rows without context that see themselves, over pools of 5 pages."""
    body = models()[0].config.body
    pages = torch.zeros(5, PAGE, body.num_kv_heads, body.head_dim)
    whole = torch.zeros(batch, rows, dtype=torch.int32)
    return {
        "embedded": torch.ones(batch, rows, body.hidden_size),
        "positions": whole.clone(),
        "attn_mask": torch.full((batch, rows, 1), 1, dtype=torch.int32),
        "page_table": whole[:, :1].clone(),
        "context_len": torch.zeros(batch, dtype=torch.int32),
        **{f"{kind}_pages_{layer}": pages.clone() for kind in "kv" for layer in range(body.num_layers)},
    }


# -- the loop ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["chain", "hybrid", "flex"])
def test_greedy_and_sampled_text_are_the_targets_own(tmp_path: Path, policy: str) -> None:
    """In the profiles that a build makes of the recipe, page 0 poisoned."""
    engine = serve(runner(tmp_path, policy), policy)
    poison(engine.runner, 0)
    sequences = engine.generate(some_requests())
    assert [s.answer for s in sequences] == [expected(s.request) for s in sequences]
    assert any(s.stats.tau > 1 for s in sequences), "random drafters hit now and then"
    assert all(launch.stream == STREAM for graph in GRAPHS.values() for launch in graph.launches)
    profiles = {launch.profile for launch in GRAPHS["target"].launches}
    assert profiles >= {0, 1, 2}, "one, two and four requests"


def test_prompts_are_packed_as_the_profiles_admit(tmp_path: Path) -> None:
    """Several requests in the profiles of decoding, of at most 14 rows; one in the profile of long chunks."""
    long = RECIPE.model_copy(update={"limits": RECIPE.limits.model_copy(update={"prefill_chunk": 32})})
    for builder in get_args(Builder):
        profiles = make_profiles(long, builder, models()[0].config)
        assert [tensorrt.max_requests(profiles, rows) for rows in (1, BUDGET, BUDGET + 1, 32)] == [4, 4, 1, 1]
    engine = serve(runner(tmp_path), "off")
    engine.generate(Request((n,) * 3, 1, SamplingParams(seed=n)) for n in range(3))
    first, *_ = GRAPHS["target"].launches
    assert first.shapes["embedded"][:2] == (4, 2), "two rows of three prompts, and padding"


def test_pools_are_bound_where_they_lie(tmp_path: Path) -> None:
    """Every layer of every pool, in every launch but those that compute K/V alone."""
    made = runner(tmp_path)
    serve(made, "d2sd").generate(some_requests()[:3])
    pools = {"target": made.pools[0], "first": made.pools[1], "second": made.pools[2]}
    _check_bound(pools)
    for graph in GRAPHS.values():
        graph.launches.clear()
    made = runner(tmp_path, "flex")
    serve(made, "flex").generate(some_requests()[:3])
    _check_bound({"target": made.pools[0], "flex": made.pools[0].from_layer(1)})


def _check_bound(pools: dict[str, KVPool]) -> None:
    for name, pool in pools.items():
        bound = [launch.addresses for launch in GRAPHS[name].launches if launch.shapes["k_pages_0"][0] > 2]
        assert len(bound) > 5
        for kind, pages in (("k", pool.k), ("v", pool.v)):
            for layer in range(len(pages)):
                assert {address[f"{kind}_pages_{layer}"] for address in bound} == {pages[layer].data_ptr()}


@pytest.mark.parametrize("current", [0, STREAM])
def test_engines_leave_the_default_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    """Behind what it was asked before; a stream that the caller chose is kept."""
    done: list[tuple[str, object]] = []
    ours = SimpleNamespace(wait_stream=lambda other: done.append(("waits for", other)))
    monkeypatch.setattr(tensorrt, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: ours)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: done.append(("serves on", stream)))
    runner(tmp_path)
    assert done == ([] if current else [("waits for", "default"), ("serves on", ours)])


def test_a_profile_has_one_context_and_all_share_their_memory(tmp_path: Path, target: EngineFile) -> None:
    opened = session(target)
    for batch in (1, 2, 1, 2):
        opened.run(inputs_of(batch, 1))
    contexts = [launch.context for launch in GRAPHS["target"].launches]
    assert {launch.stream for launch in GRAPHS["target"].launches} == {STREAM}
    assert contexts[:2] == contexts[2:]
    assert contexts[0] is not contexts[1]
    assert {context._scratch for context in contexts} == {opened._scratch.data_ptr()}


# -- drafters, and pages that somebody reads ---------------------------------------------------------------------------


def drafting(tmp_path: Path, **changes: Any) -> GraphDrafter:
    first = models()[1]
    engine = drafter_engine(tmp_path, "first", first)
    return GraphDrafter(first, session(engine, drafter_io_spec(first.config, torch.float32)), PAGE, **changes)


def test_drafting_and_injecting_write_to_no_page(tmp_path: Path) -> None:
    """Page 0 aside, which nobody reads."""
    first, graph = models()[1], drafting(tmp_path)
    pool, table = pool_for(first.config.body, 2, 16, page_size=PAGE)
    pool.k.normal_()
    pool.v.normal_()
    before = pool.k.clone(), pool.v.clone()
    embedded, features = torch.randn(2, SIZE, 32), torch.randn(1, 6, first.fc.in_features)
    rows = Rows.chain(SIZE, Where(table, torch.tensor([3, 9])))
    torch.testing.assert_close(graph.draft(embedded, rows, pool), first.draft(embedded, rows, pool))
    graph.context_keys_values(features, torch.arange(6)[None])
    assert torch.equal(pool.k[:, 1:], before[0][:, 1:])
    assert torch.equal(pool.v[:, 1:], before[1][:, 1:])
    injected = GRAPHS["first"].launches[-1]
    assert not {injected.addresses[f"{kind}_pages_0"] for kind in "kv"} & {pool.k.data_ptr(), pool.v.data_ptr()}
    assert graph._scratch_pool is not None
    scratch = graph._scratch_pool
    assert not scratch.k[:, 1:].any(), "nor anywhere else"
    graph.context_keys_values(features, torch.arange(6)[None])
    assert graph._scratch_pool is scratch, "made once"


def test_new_context_is_written_behind_the_committed(tmp_path: Path) -> None:
    first, graph = models()[1], drafting(tmp_path)
    pool, table = pool_for(first.config.body, 1, 16, page_size=PAGE)
    features, places = torch.randn(1, 3, first.fc.in_features), torch.arange(3)[None]
    rows = Rows(
        2 + torch.arange(SIZE)[None], torch.ones(1, SIZE, SIZE, dtype=torch.bool), Where(table, torch.tensor([0]))
    )
    found = graph.draft_with_new_context(torch.ones(1, SIZE, 32), rows, pool, features, places, torch.tensor([2]))
    k, v = first.context_keys_values(features, places)
    committed, _ = pool_for(first.config.body, 1, 16, page_size=PAGE)
    committed.write(k, v, (table,), places, torch.tensor([[True, True, False]]))
    after = replace(rows, where=rows.where.after(2))
    torch.testing.assert_close(found, first.draft(torch.ones(1, SIZE, 32), after, committed))
    torch.testing.assert_close(pool.k[:, table[0]], committed.k[:, table[0]], equal_nan=True)


def test_long_context_is_computed_in_parts(tmp_path: Path) -> None:
    first, graph = models()[1], drafting(tmp_path, context_rows=4)
    features, places = torch.randn(1, 10, first.fc.in_features), torch.arange(10)[None] * 3
    for found, wanted in zip(
        graph.context_keys_values(features, places), first.context_keys_values(features, places), strict=True
    ):
        torch.testing.assert_close(found, wanted)
    assert [launch.shapes["features"][1] for launch in GRAPHS["first"].launches] == [4, 4, 2]
    made = runner(tmp_path)
    of_first = made.drafters[DrafterRole.FIRST]
    assert isinstance(of_first, GraphDrafter)
    assert of_first._context_rows == max(p["features"][2][1] for p in GRAPHS["first"].profiles)


def test_what_a_drafter_passes_lies_on_its_device() -> None:
    """Any device but the CPU shows it: PyTorch's meta tensors stand for a GPU's."""

    class Asked:
        def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            assert {tensor.device.type for tensor in inputs.values()} == {"meta"}
            assert {name: tensor.dtype for name, tensor in inputs.items()} == dict(surface.inputs)
            assert all(tensor.is_contiguous() for tensor in inputs.values())
            return dict.fromkeys(("hidden", "k", "v"), inputs["embedded"])

    first = models()[1]
    body, width = first.config.body, first.fc.in_features
    surface = drafter_io_spec(first.config, torch.float32)
    graph = GraphDrafter(first, Asked(), PAGE)  # type: ignore[arg-type]
    with torch.device("meta"):
        table, lengths = torch.zeros(3, 2, dtype=torch.long).t(), torch.zeros(2, dtype=torch.long)
        pool = KVPool(body, PoolSizes(3, PAGE), torch.float32, "meta")
        graph.draft(torch.zeros(2, SIZE, 32), Rows.chain(SIZE, Where(table, lengths)), pool)
        graph.context_keys_values(torch.zeros(1, 4, width), torch.zeros(4, 1, dtype=torch.long).t())


# -- one run -----------------------------------------------------------------------------------------------------------


def test_shapes_that_no_profile_admits(target: EngineFile) -> None:
    opened = session(target)
    with pytest.raises(BundleError, match=r"no profile[\s\S]*embedded \[5, 3, 32\][\s\S]*\[4, 14, 32\]"):
        opened.run(inputs_of(5, 3))
    assert not GRAPHS["target"].launches
    opened.run(inputs_of(1, 14))
    assert GRAPHS["target"].launches[-1].profile == 0


@pytest.mark.parametrize("refused", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_refusals_of_tensorrt_are_reported(target: EngineFile, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    def refuse(context: Any, *_: object) -> bool:
        context._logger.log(1, "out of memory")
        return False

    monkeypatch.setattr(fake_tensorrt.IExecutionContext, refused, refuse)
    opened = session(target)
    for _ in range(2):  # an earlier error is not told again
        with pytest.raises(BundleError, match=r"TensorRT refused[\s\S]*target.engine[\s\S]*found: out of memory$"):
            opened.run(inputs_of(1, 1))


@pytest.mark.parametrize("fault", ["strided", "typed", "missing"])
def test_inputs_that_cannot_be_bound(target: EngineFile, fault: str) -> None:
    opened, given = session(target), inputs_of(2, 3)
    if fault == "strided":
        given["positions"] = given["positions"].t().contiguous().t()
    elif fault == "typed":
        given["positions"] = given["positions"].long()
    else:
        del given["context_len"]
    with pytest.raises(AssertionError):
        opened.run(given)


def test_pools_whose_layers_lie_unevenly(target: EngineFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "ALIGNMENT", 1 << 60)
    with pytest.raises(BundleError, match=r"address is not aligned[\s\S]*embedded at 0x[\s\S]*limits.page_size"):
        session(target).run(inputs_of(1, 1))


def test_an_output_of_nothing_has_an_address(tmp_path: Path) -> None:
    """A target that no drafter reads has no features."""
    out = session(target_engine(tmp_path, models()[0], ())).run(inputs_of(1, 2))
    assert out["features"].shape == (1, 2, 0)
    assert out["hidden"].shape == (1, 2, 32)


# -- reasons not to open one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "found", "wanted"),
    [
        ({"plugin_abi": "0"}, "plugin ABI 0", f"expected: {VERSION}"),
        ({"version": "1.6.1.120"}, "tensorrt-rtx 1.6.1.120", "expected: tensorrt-rtx 1.7.1.116"),
        ({"builder": "tensorrt"}, "found: tensorrt 1.7.1.116", "or install tensorrt 1.7.1.116"),
        ({"compute": "sm120"}, "compute capability 12.0", r"expected: compute capability 8.9[\s\S]*\[sm89\]"),
    ],
)
def test_engines_of_elsewhere(target: EngineFile, changes: dict[str, Any], found: str, wanted: str) -> None:
    with pytest.raises(BundleError, match=rf"target.engine[\s\S]*{found}[\s\S]*{wanted}[\s\S]*"):
        session(replace(target, **changes))


@pytest.mark.parametrize(
    ("compute", "capability", "other"),
    [
        ("sm89", (8, 9), None),
        ("sm89", (9, 0), "8.9"),
        ("sm120", (12, 0), None),
        ("sm120", (12, 1), "12.0"),
        ("sm80", (8, 6), "8.0"),
        ("portable", (9, 0), None),
        ("portable", (7, 5), None),
        ("native", (9, 0), None),
    ],
)
def test_what_runs_where(compute: str, capability: tuple[int, int], other: str | None) -> None:
    assert incompatibility(compute, capability) == other


def test_tensorrt_judges_a_portable_engine(target: EngineFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that no engine can be built for by name; a suboptimal engine is opened."""
    portable = replace(target, compute="portable")
    monkeypatch.setattr(tensorrt, "this_device", lambda file: Device(torch.device("cpu"), (9, 0)))
    for verdict in (EngineValidity.VALID, EngineValidity.SUBOPTIMAL):
        monkeypatch.setattr(Runtime, "_validity", (verdict, 0))
        session(portable)
    reasons = EngineInvalidityDiagnostics.UNSUPPORTED_CC | EngineInvalidityDiagnostics.OLD_CUDA_DRIVER
    monkeypatch.setattr(Runtime, "_validity", (EngineValidity.INVALID, int(reasons)))
    said = r"cannot run[\s\S]*found: UNSUPPORTED_CC, OLD_CUDA_DRIVER\n[\s\S]*9\.0[\s\S]*serve the bundle with PyTorch"
    with pytest.raises(BundleError, match=said):
        session(portable)


def test_classic_tensorrt_is_not_asked_what_it_does_not_know(
    target: EngineFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Runtime, "get_engine_validity")
    monkeypatch.delattr(fake_tensorrt, "DynamicShapesKernelSpecializationStrategy")
    classic = TensorRT("tensorrt", fake_tensorrt, "10.14.1")
    engine = replace(target, builder="tensorrt", version="10.14.1", compute="native")
    EngineSession(classic, engine, target_io_spec(models()[0].config.body, torch.float32)).run(inputs_of(1, 1))


def test_a_file_that_is_no_engine(target: EngineFile) -> None:
    target.path.write_text("something else", "utf-8")
    with pytest.raises(BundleError, match=r"cannot open[\s\S]*target.engine[\s\S]*found: magic tag\n"):
        session(target)


@pytest.mark.parametrize("left", ["nothing", "an empty file"])
def test_an_engine_that_is_not_there(target: EngineFile, left: str) -> None:
    target.path.unlink()
    if left == "an empty file":
        target.path.touch()
    with pytest.raises(BundleError, match=r"missing[\s\S]*target.engine"):
        session(target)


def test_a_graph_of_another_d2sd(target: EngineFile) -> None:
    surface = target_io_spec(models()[0].config.body, torch.float32)
    more = IOSpec({**surface.inputs, "slopes": torch.float32}, {**surface.outputs, "hidden": torch.float16})
    said = r"found: output hidden torch.float32\n  expected: input slopes torch.float32, output hidden torch.float16"
    with pytest.raises(BundleError, match=said):
        session(target, more)
    with pytest.raises(BundleError, match=r"number of optimisation profiles[\s\S]*found: 4\n  expected: 1"):
        session(replace(target, profiles=target.profiles[:1]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(target: EngineFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "this_device", tensorrt_check.this_device)
    with pytest.raises(BundleError, match=r"NVIDIA GPU[\s\S]*target.engine"):
        session(target)


# -- the real one ------------------------------------------------------------------------------------------------------


def test_the_fake_has_nothing_that_tensorrt_lacks() -> None:
    """Our code calls the fake; so whatever it calls exists, and takes as many arguments."""
    real = pytest.importorskip("tensorrt_rtx", reason="the extra engines is not installed")
    names = [n for n, o in vars(fake_tensorrt).items() if getattr(o, "__module__", "") == fake_tensorrt.__name__]
    public = [name for name in names if not name.startswith("_")]
    assert len(public) == 20
    for name in public:
        fake, true = getattr(fake_tensorrt, name), getattr(real, name)
        members = {member for member in vars(fake) if not member.startswith("_")}
        for member in members | _set_by(fake):
            assert hasattr(true, member), f"{name}.{member}"
            if inspect.isfunction(getattr(fake, member, None)):
                wanted = len(inspect.signature(getattr(fake, member)).parameters)
                assert wanted in _arguments(getattr(true, member)), f"{name}.{member}"


def _set_by(fake: Any) -> set[str]:
    """Public attributes that instances get."""
    code = inspect.getsource(fake) if inspect.isclass(fake) else ""
    return set(re.findall(r"self\.([a-z]\w*) = ", code))


def _arguments(method: Any) -> set[int]:
    """How many arguments, `self` included, pybind11 says that it takes: all, or those without a default."""
    counts = set()
    for listed in re.findall(rf"^(?:\d+\. )?{method.__name__}\((.*)\) ->", method.__doc__, re.MULTILINE):
        arguments = re.findall(r"\w+: ", listed)
        counts |= {len(arguments), len(arguments) - listed.count(" = ")}
    return counts


def test_all_plugins_are_known_before_an_engine_is_opened(target: EngineFile) -> None:
    session(target)
    registry = fake_tensorrt.get_plugin_registry()
    for name in INPUTS:
        creator = registry.get_creator(name, VERSION, DOMAIN)
        ours = creator.create_plugin("layer", None, fake_tensorrt.TensorRTPhase.RUNTIME)
        assert (ours.plugin_name, ours.plugin_version, ours.plugin_namespace) == (name, VERSION, DOMAIN)


def test_a_plugin_runs_when_it_serves_and_not_while_it_is_built(
    target: EngineFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from d2sd.plugins.cascade_attention.tensorrt import enqueue

    ran = []
    monkeypatch.setattr(enqueue, "run", lambda *asked: ran.append(asked))
    session(target)
    creator = fake_tensorrt.get_plugin_registry().get_creator(TREE, VERSION, DOMAIN)
    for phase in fake_tensorrt.TensorRTPhase:
        plugin = creator.create_plugin("layer", None, phase).attach_to_context(None)
        plugin.enqueue([], [], [1], [2], 0, STREAM)
    assert ran == [(TREE, [], [1], 2, STREAM)]
