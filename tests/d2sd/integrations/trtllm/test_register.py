"""When the tree is registered, and that everything else is refused by name before a server starts."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.trtllm import llm_args as faces
from d2sd.errors import D2SDError
from d2sd.integrations.trtllm import __main__ as launcher
from d2sd.integrations.trtllm import register as registration
from d2sd.integrations.trtllm import tree_drafters
from d2sd.integrations.trtllm.contract import NEEDS, Need, failures, probe
from d2sd.integrations.trtllm.register import SINGLE_PROCESS, register
from d2sd.manifest import load_manifest
from d2sd.plugins import dispatch
from tests.d2sd.integrations.trtllm.shop import Shop, make_shop, registered, single_process
from tests.d2sd.integrations.trtllm.standin import modules as standin
from tests.d2sd.integrations.trtllm.standin import worker
from tests.d2sd.integrations.trtllm.standin.batcher import Request, Server, Settings
from tests.d2sd.integrations.trtllm.test_tree_slots import FIELDS

Modules = dict[str, Any]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return make_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Modules:
    single_process(monkeypatch)
    return standin.install(monkeypatch)


def untouched(modules: Modules) -> bool:
    stock = worker.Eagle3OneModelDynamicTreeWorker
    return not standin.BUILDERS and modules["utils"].Eagle3OneModelDynamicTreeWorker is stock


def test_registered(shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    modules = registered(monkeypatch, shop.bundle)
    made = modules["utils"].Eagle3OneModelDynamicTreeWorker
    assert issubclass(made, worker.Eagle3OneModelDynamicTreeWorker)
    assert modules["eagle3_dynamic_tree"].Eagle3OneModelDynamicTreeWorker is worker.Eagle3OneModelDynamicTreeWorker
    server = shop.server(modules, Settings())
    assert type(server.worker) is made
    assert server.drafters.model_config.pretrained_config.num_hidden_layers == 1, "no K/V is wasted on it"
    assert "trees of hybrid+lookup of 64 rows and 4 branches. Not yet run on a GPU" in capsys.readouterr().err


def test_other_draft_models_are_tensorrt_llms(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = registered(monkeypatch, shop.bundle)
    spec = SimpleNamespace(speculative_model="elsewhere", spec_dec_mode=None)
    made = modules["modeling_speculative"].get_draft_model(SimpleNamespace(spec_config=spec), None, None, None)
    assert isinstance(made, torch.nn.Identity)
    arguments = shop.arguments()[0]
    config = SimpleNamespace(**arguments, tokens_per_gen_step=64, _max_batch_size=2)
    other = modules["utils"].get_spec_worker(config, None, None)
    with pytest.raises(NotImplementedError, match="Eagle's own drafting"):
        other.prepare_1st_drafter_inputs(*[None] * 6, draft_model=made)
    with pytest.raises(NotImplementedError, match="Eagle's own drafting"):
        other._forward_draft_loop(None, None, None, made, *[None] * 7)


@pytest.mark.parametrize(
    ("version", "environment", "told"),
    [
        ("1.4.0rc1", {SINGLE_PROCESS: ""}, SINGLE_PROCESS),  # other processes would not see it
        ("1.5.0", {}, r"(?s)1\.5\.0.*llm_args\.dflash\.yaml"),
        *(
            ("1.4.0rc1", {registration.POLICY: name}, "hybrid")
            for name in ("flex_parallel", "off", "lookup", "nonsense")
        ),
    ],
)
def test_refused(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, version: str, environment: dict[str, str], told: str
) -> None:
    single_process(monkeypatch)
    modules = standin.install(monkeypatch, version)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(D2SDError, match=told):
        register(shop.bundle)
    assert untouched(modules)


def test_an_old_triton_on_hopper(shop: Shop, modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatch, "triton_version", lambda: Version("3.7.0"))
    for capability, refused in (((8, 9), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert bool(registration.environment_faults()) == refused
    with pytest.raises(D2SDError, match=r"triton 3\.7\.0"):
        register(shop.bundle)
    assert untouched(modules)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_dynamic_tree": False}, "use_dynamic_tree"),
        ({"dynamic_tree_max_topK": 1}, "dynamic_tree_max_topK"),
        ({"max_draft_len": 3}, "max_draft_len is 3, and the trees are 4 deep"),
        ({"max_total_draft_tokens": 3}, "max_total_draft_tokens is 3"),
        ({"sa_config": {}}, "sa_config"),
    ],
)
def test_arguments_that_do_not_suit(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], told: str
) -> None:
    modules = registered(monkeypatch, shop.bundle)
    arguments = shop.arguments()[0] | change
    with pytest.raises(D2SDError, match=told):
        Server(modules, shop.decoder, arguments, 96, Settings())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"sliding_window": 128}, "a sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding window"),
        ({"layer_types": ["linear_attention"]}, "layers without attention"),
        ({"hybrid_override_pattern": "M*"}, "layers without attention"),
        ({"hidden_size": 4096}, "hidden_size is 4096, the bundle's 32"),
        ({"num_hidden_layers": 36}, "num_hidden_layers is 36"),
    ],
)
def test_targets_that_have_no_trees(shop: Shop, change: dict[str, Any], told: str) -> None:
    manifest = load_manifest(shop.bundle)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 24}

    def faults(world_size: int = 1, **config: Any) -> list[str]:
        model = SimpleNamespace(
            pretrained_config=SimpleNamespace(**sizes | config), mapping=SimpleNamespace(world_size=world_size)
        )
        return registration.target_faults(model, manifest)

    assert faults() == []
    assert faults(sliding_window=4096, use_sliding_window=False) == [], "Qwen3's configs name a window that is off"
    assert any(told in fault for fault in faults(**change))
    assert faults(2) == ["the target has more than one GPU"]


def first_step(shop: Shop, monkeypatch: pytest.MonkeyPatch, change: Callable[[Server], None]) -> None:
    server = shop.server(registered(monkeypatch, shop.bundle), Settings())
    change(server)
    server.run([Request([1, 2, 3], 4)])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", [*FIELDS, "all_ids_buf"])
@pytest.mark.parametrize("what", ["type", "size", "absence"])
def test_a_changed_tensor_of_the_slots(shop: Shop, monkeypatch: pytest.MonkeyPatch, name: str, what: str) -> None:
    def change(server: Server) -> None:
        found = getattr(server.storage, name)
        monkeypatch.setattr(server.storage, "fill_all_slot_ids", lambda *args: None)
        monkeypatch.setattr(server.metadata, "update_spec_dec_param", lambda **arguments: None)
        if what == "absence":
            delattr(server.storage, name)
        else:
            changed = found.to(torch.int16) if what == "type" else torch.cat([found, found], dim=-1)
            setattr(server.storage, name, changed)

    # where the number of slots changes, it is every other tensor that differs
    with pytest.raises(D2SDError, match="packed_mask" if (name, what) == ("has_tree", "size") else name):
        first_step(shop, monkeypatch, change)


def long(name: str) -> Callable[[Server], None]:
    return lambda server: setattr(server.worker, name, getattr(server.worker, name).long())


def cached(name: str, value: object) -> Callable[[Server], None]:
    return lambda server: setattr(server.cache, name, value)


BUFFERS = ("_accepted_tokens_buf", "_num_accepted_tokens_buf", "_accepted_draft_indices_tensor")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        *((long(name), f"{name} is torch.int64") for name in BUFFERS),
        (cached("enable_block_reuse", True), "enable_block_reuse"),
        (cached("num_kv_heads_per_layer", [2, 1]), "numbers of K/V heads"),
        (cached("max_attention_window_vec", [32]), "an attention window"),
        (lambda server: setattr(server.spec_metadata, "layers_to_capture", [1]), "layers_to_capture"),
        (None, "5 slots of 96 tokens"),
    ],
)
def test_a_first_step_that_does_not_suit(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, change: Callable[[Server], None] | None, told: str
) -> None:
    if change is None:
        monkeypatch.setattr(tree_drafters, "free_memory", lambda device: 10_000)
    with pytest.raises(D2SDError, match=told):
        first_step(shop, monkeypatch, change or (lambda server: None))


def test_context_is_as_long_as_the_server_was_told(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first step, which TensorRT-LLM measures memory by, has little K/V."""
    server = shop.server(registered(monkeypatch, shop.bundle), Settings())
    server.cache.max_seq_len = 16
    server.run([Request([1, 2, 3], 4)])
    assert server.drafters._table.shape == (5, 24), "pages of 4 tokens"


def test_a_quantized_head(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = registered(monkeypatch, shop.bundle)
    drafters = shop.server(modules, Settings()).drafters
    tables = SimpleNamespace(
        model=SimpleNamespace(embed_tokens=shop.decoder.embed_tokens),
        lm_head=SimpleNamespace(weight=shop.decoder.head.to(torch.float8_e4m3fn)),
    )
    with pytest.raises(D2SDError, match="bf16 or fp16"):
        drafters.load_weights_from_target_model(tables)


def test_the_bundles_module_registers(shop: Shop, modules: Modules) -> None:
    """The module is imported as by TensorRT-LLM."""
    folder = shop.bundle / faces.FOLDER / faces.MODULE
    folder.mkdir(parents=True)
    source = Path(faces.__file__).with_name(f"{faces.MODULE}.py")
    (folder / "__init__.py").write_text(source.read_text())
    _run(folder / "__init__.py", faces.MODULE)
    assert not untouched(modules)


def test_tritons_model_registers(shop: Shop, modules: Modules, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Next to TensorRT-LLM's own model, under the name that docs/tensorrt-llm.md gives it."""
    (tmp_path / "llmapi_model.py").write_text("class TritonPythonModel:\n    ours = False\n")
    (tmp_path / "model.py").write_text(Path(faces.__file__).with_name("triton_model.py").read_text())
    monkeypatch.delenv("D2SD_BUNDLE", raising=False)
    with pytest.raises(D2SDError, match="D2SD_BUNDLE"):
        _run(Path(faces.__file__).with_name("triton_model.py"), "model")
    assert untouched(modules)
    monkeypatch.setenv("D2SD_BUNDLE", str(shop.bundle))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "llmapi_model", raising=False)
    model = _run(tmp_path / "model.py", "model")
    assert not model.TritonPythonModel.ours
    assert not untouched(modules)


def _run(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the contract ------------------------------------------------------------------------------------------------------


READ = ("1.3.0rc27", "1.3.0", "1.4.0rc1", "1.4.0rc1+cu13")
NOT_READ = ("1.4.0rc2", "1.4.0", "2.0.0", "1.3.0rc26", "1.2.1", "no version")


@pytest.mark.parametrize("version", [*READ, *NOT_READ])
def test_versions_whose_sources_were_read(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Another one is refused though every name fits."""
    standin.install(monkeypatch, version)
    rows = probe()
    assert len(rows) == 1 + len(NEEDS)
    assert [version in reason for reason in failures(rows)] == [True] * (version in NOT_READ)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    (reason,) = failures(probe())
    assert "cannot be imported" in reason


def test_the_folder_of_attention_was_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = standin.install(monkeypatch)
    for name in ("attention", "attention.backends", "attention.backends.trtllm"):
        module: Any = ModuleType(f"{standin.PACKAGE}.{name}")
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.TrtllmAttentionMetadata = modules["trtllm"].TrtllmAttentionMetadata
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("attention_backend", "attention_backend.trtllm"):
        monkeypatch.delitem(sys.modules, f"{standin.PACKAGE}.{name}")
    assert failures(probe()) == []


def _owner(need: Need) -> tuple[Any, str]:
    *parents, name = need.name.split(".")
    owner: Any = sys.modules[need.modules[0]]
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def without(owner: Any, name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(owner, type) and issubclass(owner, int):  # an enumeration keeps its members
        monkeypatch.setattr(sys.modules[f"{standin.PACKAGE}.speculative.interface"], owner.__name__, None)
    elif name in vars(owner):
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, None)


def with_another_parameter(owner: Any, name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = getattr(owner, name)
    parameters = list(inspect.signature(value).parameters.values())
    extra = inspect.Parameter(lost, inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs)

    changed.__signature__ = inspect.Signature([extra, *parameters])  # type: ignore[attr-defined]
    monkeypatch.setattr(owner, name, changed)


def without_word(owner: Any, name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, value = inspect.getsource, getattr(owner, name)
    monkeypatch.setattr(
        inspect, "getsource", lambda found: source(found).replace(lost, "gone") if found is value else source(found)
    )


def without_field(owner: Any, name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [one.name for one in fields(getattr(owner, name)) if one.name != lost]
    monkeypatch.setattr(owner, name, make_dataclass(name, kept))


def another_object(owner: Any, name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, type("Another", (getattr(owner, name),), {}))


Break = Callable[[Any, str, str, pytest.MonkeyPatch], None]
BROKEN: list[tuple[Need, Break, str]] = [
    *((need, without, "") for need in NEEDS),
    *((need, with_another_parameter, "more") for need in NEEDS if need.parameters),
    *((need, without_word, word) for need in NEEDS for word in need.mentions),
    *((need, without_field, field) for need in NEEDS for field in need.fields),
    *((need, another_object, "another object") for need in NEEDS if need.same_as),
]


@pytest.mark.parametrize(
    ("need", "change", "lost"), BROKEN, ids=lambda x: getattr(x, "label", getattr(x, "__name__", x))
)
def test_each_name_that_changed_is_named(need: Need, change: Break, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(monkeypatch)
    change(*_owner(need), lost, monkeypatch)
    reasons = [reason for reason in failures(probe()) if reason.startswith(need.label)]
    assert reasons
    assert lost in reasons[0]


def test_a_launcher_for_servers_that_import_no_modules(
    shop: Shop, modules: Modules, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m d2sd.integrations.trtllm BUNDLE MODULE ...`, as Dynamo's worker is started."""
    (tmp_path / "pretend_server.py").write_text("import sys\nprint(__name__, *sys.argv[1:])\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["d2sd", str(shop.bundle), "pretend_server", "--model-path", "target"])
    launcher.main()
    assert capsys.readouterr().out == "__main__ --model-path target\n"
    assert not untouched(modules)
    monkeypatch.setattr(sys, "argv", ["d2sd", str(tmp_path), "pretend_server"])
    with pytest.raises(SystemExit) as end:
        launcher.main()
    assert end.value.code == 2
    assert "Not a bundle" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["d2sd", str(shop.bundle)])
    with pytest.raises(SystemExit, match="usage"):
        launcher.main()


def test_dynamos_worker_is_started_with_options_that_it_has(shop: Shop) -> None:
    """Options are those of `DynamoTrtllmConfig` in Dynamo 1.4.2's reference, each with its variable DYN_TRTLLM_..."""
    documented = {"--model-path", "--max-batch-size", "--max-num-tokens", "--max-seq-len", "--extra-engine-args"}
    values, _ = faces.tree_arguments(HFConfig.read(shop.bundle / "drafter_first"), shop.recipe)
    words = faces.dynamo_command(values)
    assert {word for word in words if word.startswith("--")} == documented
    start = [*faces.ENVIRONMENT.split(), "PYTHONSAFEPATH=1", "python", "-m", "d2sd.integrations.trtllm", "."]
    assert words[: len(start)] == start  # nothing of the bundle's folder is imported
    assert words[words.index("--extra-engine-args") + 1] == "trtllm/llm_args.d2sd_tree.yaml"
