"""The model repository, and the command that starts the server on it."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from d2sd.cli.main import main
from d2sd.errors import D2SDError
from d2sd.serve.triton import run
from d2sd.serve.triton.names import INPUTS, OUTPUTS
from d2sd.serve.triton.parameters import Parameters
from d2sd.serve.triton.repository import config_text, write_repository
from tests.commands import passed


def test_the_command_writes_a_model(tiny_bundle: Path, tmp_path: Path) -> None:
    arguments = ["triton", str(tiny_bundle), "-o", str(tmp_path / "models"), "--gpu", "0", "--gpu", "2"]
    for _ in range(2):  # its own folder is overwritten
        passed(CliRunner().invoke(main, [*arguments, "--set", "policy=chain", "--set", "max_waiting=7"]))
    model = tmp_path / "models" / "tiny"
    config = (model / "config.pbtxt").read_text()
    assert "instance_group [ { kind: KIND_GPU count: 1 gpus: [0, 2] } ]" in config
    assert f'"bundle" value {{ string_value: "{tiny_bundle.resolve()}" }}' in config
    assert '"max_waiting" value { string_value: "7" }' in config
    assert "from d2sd.serve.triton.model import TritonPythonModel" in (model / "1" / "model.py").read_text()
    assert struct.unpack("<i", (model / "warmup" / "max_tokens").read_bytes()) == (8,)


def test_the_config_declares_every_tensor() -> None:
    config = config_text("m", Parameters(bundle='/a "b"'), batched=True)
    for name, kind in INPUTS.items():
        assert f'name: "{name}" data_type: TYPE_{kind.data_type} dims: [ -1 ] optional: true' in config
    for name, data_type in OUTPUTS.items():
        assert f'name: "{name}" data_type: TYPE_{data_type} dims: [ -1 ] }}' in config
    assert "max_batch_size: 1" in config
    assert 'string_value: "/a \\"b\\""' in config
    assert "KIND_CPU" in config
    assert config.count("{") == config.count("}")


def test_parameters_survive_the_config() -> None:
    given = Parameters(bundle="/b", policy="chain", max_batch=3, drain_timeout=0.5, stream_interval=1)
    assert Parameters.read({name: {"string_value": value} for name, value in given.strings().items()}, "cpu") == given
    with pytest.raises(D2SDError, match="max_waiting"):
        Parameters.read({"bundle": {"string_value": "/b"}, "max_waiting": {"string_value": "many"}}, "cpu")


def test_a_misspelled_parameter_is_refused_and_tritons_own_is_not() -> None:
    own = {"bundle": {"string_value": "/b"}, "EXECUTION_ENV_PATH": {"string_value": "/e"}}
    assert Parameters.read(own, "cuda:1") == Parameters(bundle="/b", device="cuda:1")
    with pytest.raises(D2SDError, match="max_batchs"):
        Parameters.read(own | {"max_batchs": {"string_value": "3"}}, "cpu")


def test_another_folder_is_not_overwritten(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text("name: 'm'")
    with pytest.raises(D2SDError, match="something else"):
        write_repository(tmp_path, tiny_bundle, "m")
    for name in ("../m", "a b", ".hidden"):
        with pytest.raises(D2SDError, match="name"):
            write_repository(tmp_path, tiny_bundle, name)
    bounds = ("drain_timeout=inf", "drain_timeout=1e300", "max_waiting=1" + "0" * 23, "stream_interval=0")
    for value in ("nonsense=1", "max_batch=0", "max_batch", "tensor_parallel=0", *bounds):
        with pytest.raises(D2SDError, match=value.partition("=")[0]):
            write_repository(tmp_path, tiny_bundle, "n", [value])
    with pytest.raises(D2SDError, match="manifest"):
        write_repository(tmp_path, tmp_path)


def fake_wheel(folder: Path, *versions: str) -> Path:
    root = folder / "pytriton" / "tritonserver"
    for name in ("bin/tritonserver", *(f"python_backend_stubs/{v}/triton_python_backend_stub" for v in versions)):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
    (root / "backends" / "python").mkdir(parents=True)
    (folder / "pytriton" / "__init__.py").touch()
    return root


def test_the_server_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    with pytest.raises(D2SDError, match="not installed"):
        run.command(tmp_path, [], {})

    root = fake_wheel(tmp_path, version)
    monkeypatch.setattr(run, "_wheel", lambda: root)
    for _ in range(2):
        arguments, environment = run.command(tmp_path, ["--http-port=1"], {"PATH": "/p"})
    assert arguments[0] == str(root / "bin" / "tritonserver")
    assert set(arguments[1:]) == {
        f"--backend-directory={root / 'backends'}",
        f"--model-repository={tmp_path}",
        "--http-port=1",
        "--exit-timeout-secs=60",
    }
    assert environment["PATH"].split(":") == [f"{sys.prefix}/bin", "/p"]
    assert (root / "backends" / "python" / "triton_python_backend_stub").resolve().parent.name == version

    other = fake_wheel(tmp_path / "other", "3.8")
    monkeypatch.setattr(run, "_wheel", lambda: other)
    with pytest.raises(D2SDError, match=r"no stub for this Python(.|\n)*3\.8"):
        run.command(tmp_path, [], {})


def test_a_server_in_the_path_comes_first(tmp_path: Path) -> None:
    server = tmp_path / "tritonserver"
    server.touch(mode=0o755)
    arguments, _ = run.command(tmp_path, ["--exit-timeout-secs=9"], {"PATH": str(tmp_path)})
    assert arguments == [str(server), f"--model-repository={tmp_path}", "--exit-timeout-secs=9"]


def test_a_missing_repository_is_an_error(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "d2sd.serve.triton.run", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert found.returncode == 2
    assert "d2sd triton BUNDLE" in found.stderr
    assert "Traceback" not in found.stderr
