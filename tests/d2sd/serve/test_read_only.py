"""A bundle on a read-only volume: every face starts from it and answers, and nothing is written next to its files."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from d2sd import LLM, SamplingParams
from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.serve.dynamo.engine import DynamoEngine, WorkerSettings
from d2sd.serve.triton.parameters import Parameters
from d2sd.serve.triton.repository import write_repository
from tests.d2sd.serve.dynamo import fakes
from tests.d2sd.serve.http import serving
from tests.d2sd.serve.triton import fake

PROMPT, TOKENS = "w3 w4", 8
_NOBODY = 65534


def python(bundle: Path, work: Path, patch: pytest.MonkeyPatch) -> str:
    with LLM(bundle) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=TOKENS))[0].text


def serve(bundle: Path, work: Path, patch: pytest.MonkeyPatch) -> str:
    with serving(bundle) as server:
        return server.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=TOKENS).choices[0].text


def triton(bundle: Path, work: Path, patch: pytest.MonkeyPatch) -> str:
    assert (write_repository(work / "repository", bundle) / "config.pbtxt").is_file()
    patch.setitem(sys.modules, "triton_python_backend_utils", fake.pb_utils())
    patch.delitem(sys.modules, "d2sd.serve.triton.model", raising=False)
    module = import_module("d2sd.serve.triton.model")
    patch.setattr(module, "end_with_parent", lambda: None)
    model = module.TritonPythonModel()
    model.initialize(fake.arguments(Parameters(bundle=str(bundle), drain_timeout=5)))
    try:
        request = fake.Request(text_input=PROMPT, max_tokens=TOKENS)
        model.execute([request])
        return str(request.all()["text_output"])
    finally:
        model.finalize()


def worker(bundle: Path, work: Path, patch: pytest.MonkeyPatch) -> str:
    loaded = load_bundle(bundle)

    async def answer() -> list[int]:
        made = DynamoEngine(WorkerSettings(model="tiny"), lambda: (loaded, make_engine(loaded)), fakes.sdk())
        await made.start(1)
        sent = {"token_ids": loaded.tokenizer(PROMPT).input_ids, "stop_conditions": {"max_tokens": TOKENS}}
        try:
            return [token async for chunk in made.generate(sent, fakes.Context()) for token in chunk["token_ids"]]
        finally:
            await made.cleanup()

    return str(loaded.tokenizer.decode(asyncio.run(answer())))


@contextmanager
def read_only(bundle: Path) -> Iterator[None]:
    """Take the write permission from all of the bundle and, from root, the right to ignore that."""
    root = os.geteuid() == 0
    for path in (bundle, *bundle.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        if root:
            os.seteuid(_NOBODY)
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in (bundle, *bundle.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder that every user can enter and write to, unlike pytest's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("face", [python, serve, triton, worker])
def test_a_bundle_is_served_from_a_read_only_volume(
    face: Callable[[Path, Path, pytest.MonkeyPatch], str],
    tiny_bundle: Path,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # first where all is permitted: the modules that it needs are imported before the rights are gone
    expected = face(tiny_bundle, work / "first", monkeypatch)
    bundle = Path(shutil.copytree(tiny_bundle, work / tiny_bundle.name))
    with read_only(bundle):
        with pytest.raises(PermissionError):
            (bundle / "target" / "new").touch()
        before = {path: path.stat().st_mtime_ns for path in (bundle, *bundle.rglob("*"))}
        assert face(bundle, work / "second", monkeypatch) == expected
        assert {path: path.stat().st_mtime_ns for path in (bundle, *bundle.rglob("*"))} == before
