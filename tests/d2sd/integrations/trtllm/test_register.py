"""When two drafters are registered, and that everything else is linear DFlash with one line, or an error if told so."""

from __future__ import annotations

import enum
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from d2sd.convert.trtllm import llm_args as faces
from d2sd.errors import D2SDError
from d2sd.integrations.trtllm.drafters import DualDrafter
from d2sd.integrations.trtllm.probe import NEEDS, failures, probe
from d2sd.integrations.trtllm.register import SINGLE_PROCESS, register
from tests.convert.helpers import edit_json
from tests.d2sd.integrations.trtllm import fake
from tests.d2sd.integrations.trtllm.shop import draft_model, models, single_process, specification, write_bundle


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    single_process(monkeypatch)
    _, first, second = models()
    return write_bundle(tmp_path / "bundle", first, second)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    return fake.install(monkeypatch)


def untouched(modules: dict[str, Any]) -> bool:
    return not fake.BUILDERS and modules["utils"].DFlashWorker is fake.DFlashWorker


def loud_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("d2sd: LINEAR DFlash")
    return str(line)


def test_registered(bundle: Path, modules: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert register(bundle)
    assert issubclass(modules["utils"].DFlashWorker, fake.DFlashWorker)
    assert modules["dflash"].DFlashWorker is fake.DFlashWorker
    capsys.readouterr()
    drafter = draft_model(bundle, modules, specification(bundle))
    assert isinstance(drafter, DualDrafter)
    assert [len(d.model.layers) for d in (drafter.first, drafter.second)] == [2, 3]
    assert "have not run this mode" in capsys.readouterr().err


def test_other_processes_would_not_see_it(
    bundle: Path, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(SINGLE_PROCESS)
    assert not register(bundle)
    assert SINGLE_PROCESS in loud_line(capsys)
    assert untouched(modules)


def test_an_unknown_version_is_left_alone(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = fake.install(monkeypatch, "1.5.0")
    assert not register(bundle)
    assert "1.5.0" in loud_line(capsys)
    assert untouched(modules)


def test_register_raises_if_required(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = fake.install(monkeypatch, "1.5.0")
    monkeypatch.setenv("D2SD_TRTLLM", "require")
    with pytest.raises(D2SDError, match=r"1\.5\.0"):
        register(bundle)
    assert untouched(modules)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("head_dim", 16, "differ in head_dim"),
        ("rope_theta", 5.0, "differ in rope_theta"),
        ("block_size", 9, "differ in block_size"),
        ("dflash_config.mask_token_id", 1, "differ in mask_token_id"),
        ("dflash_config.target_layer_ids", [0, 2], "differ in target_layer_ids"),
        ("dflash_config.training_mode", "dflash", "variable prefixes"),
    ],
)
def test_drafters_that_do_not_fit_each_other(
    bundle: Path, modules: dict[str, Any], capsys: pytest.CaptureFixture[str], key: str, value: object, told: str
) -> None:
    edit_json(bundle / "drafter_second" / "config.json", key, value)
    assert not register(bundle)
    assert told in loud_line(capsys)
    assert untouched(modules)


def test_one_drafter(bundle: Path, modules: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "drafter_second" / "config.json").unlink()
    assert not register(bundle)
    assert "drafter_second" in loud_line(capsys)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"world_size": 2}, "more than one GPU"),
        ({"attention_backend": "TRTLLM"}, "attention_backend TRTLLM"),
        ({"speculative_model": "somewhere/else"}, "not this bundle's first drafter"),
    ],
)
def test_servers_that_two_drafters_do_not_suit(
    bundle: Path, modules: dict[str, Any], capsys: pytest.CaptureFixture[str], change: dict[str, Any], told: str
) -> None:
    assert register(bundle)
    capsys.readouterr()
    assert type(draft_model(bundle, modules, specification(bundle, **change))) is fake.DFlashForCausalLM
    assert told in loud_line(capsys)


def import_module_of(bundle: Path) -> None:
    """As TensorRT-LLM imports it."""
    folder = bundle / faces.FOLDER / faces.MODULE
    folder.mkdir(parents=True)
    source = Path(faces.__file__).with_name(f"{faces.MODULE}.py")
    (folder / "__init__.py").write_text(source.read_text())
    spec = importlib.util.spec_from_file_location(faces.MODULE, folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_bundles_module_registers(bundle: Path, modules: dict[str, Any]) -> None:
    import_module_of(bundle)
    assert not untouched(modules)


def test_without_d2sd_the_bundles_module_says_so(
    bundle: Path, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "d2sd.integrations.trtllm.register", None)
    import_module_of(bundle)
    assert "d2sd cannot be imported" in loud_line(capsys)
    assert untouched(modules)
    monkeypatch.setenv("D2SD_TRTLLM", "require")
    with pytest.raises(ImportError):
        import_module_of(bundle.parent / "again")


def test_it_needs_nothing_of_the_build_side() -> None:
    """It runs where TensorRT-LLM's dependencies are installed, not d2sd's."""
    program = (
        "import sys, d2sd.integrations.trtllm.register\n"
        "names = {name.partition('.')[0] for name in sys.modules} | set(sys.modules)\n"
        "print(sorted(names & {'d2sd.convert', 'd2sd.recipe', 'pydantic', 'transformers', 'click', 'rich', 'yaml'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


Modules = dict[str, ModuleType]


def test_known_good(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch)
    rows = probe()
    assert failures(rows) == []
    assert len(rows) == 1 + len(NEEDS)


@pytest.mark.parametrize("version", ["1.3.0rc22", "1.3.0", "1.4.0rc1", "1.4.0rc1+cu13"])
def test_versions_whose_sources_were_read(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake.install(monkeypatch, version)
    assert failures(probe()) == []


@pytest.mark.parametrize("version", ["1.4.0rc2", "1.4.0", "2.0.0", "1.3.0rc21", "1.2.1", "no version"])
def test_another_version_is_refused_though_every_name_fits(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake.install(monkeypatch, version)
    (reason,) = failures(probe())
    assert version in reason


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    (reason,) = failures(probe())
    assert "cannot be imported" in reason


def renamed_class(modules: Modules) -> None:
    vars(modules["modeling_dflash"])["DFlash2ForCausalLM"] = vars(modules["modeling_dflash"]).pop("DFlashForCausalLM")


def changed_signature(modules: Modules) -> None:
    class DFlashForCausalLM(fake.DFlashForCausalLM):
        def dflash_forward(self, noise_embedding: Any, query_positions: Any, cache: Any) -> Any:  # type: ignore[override]
            return None

    vars(modules["modeling_dflash"])["DFlashForCausalLM"] = DFlashForCausalLM


def parameters_in_another_order(modules: Modules) -> None:
    def get_spec_worker(
        model_config: Any, spec_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False
    ) -> Any:
        return fake.DFlashWorker

    vars(modules["utils"])["get_spec_worker"] = get_spec_worker


def missing_enum(modules: Modules) -> None:
    vars(modules["interface"])["SpeculativeDecodingMode"] = enum.IntEnum("SpeculativeDecodingMode", ["PARD"])


def hook_no_longer_called(modules: Modules) -> None:
    class DFlashWorker(fake.DFlashWorker):
        def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
            return self.prepare_1st_drafter_inputs(*args, **kwargs)

    vars(modules["dflash"])["DFlashWorker"] = vars(modules["utils"])["DFlashWorker"] = DFlashWorker


def another_worker_is_used(modules: Modules) -> None:
    vars(modules["utils"])["DFlashWorker"] = type("DFlashWorker", (fake.DFlashWorker,), {})


def module_gone(modules: Modules) -> None:
    sys.modules[f"{fake.PACKAGE}.models.modeling_utils"] = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (renamed_class, "DFlashForCausalLM"),
        (changed_signature, "dflash_forward: (self, noise_embedding, query_positions, cache)"),
        (parameters_in_another_order, "get_spec_worker: (model_config, spec_config"),
        (missing_enum, "DFLASH"),
        (hook_no_longer_called, "_forward_impl: no longer mentions _refine_block_logits"),
        (another_worker_is_used, "utils: DFlashWorker: another object"),
        (module_gone, "modeling_utils"),
    ],
)
def test_a_changed_version_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Modules], None], complaint: str
) -> None:
    change(fake.install(monkeypatch))
    reasons = failures(probe())
    assert any(complaint in reason for reason in reasons), reasons
