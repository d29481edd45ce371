"""Fixtures that every test folder shares, and what is made once a run however many workers there are."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from d2sd.io import cache_folder
from d2sd.plugins.cpu import compiler
from tests.wheel import build_smollm2, build_wheel, install_wheel

# Tiny matrices gain nothing from threads, and threads that wait for each other on a busy machine cost a hundredfold.
torch.set_num_threads(1)
if "PYTEST_XDIST_WORKER" in os.environ:  # the same for processes that tests start, next to another worker
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# nohup and shells that run the tests in their background ignore signals, and so would all servers that tests start.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# What collection creates lives until the end: the garbage collector would go through it again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


_CASES = Counter[tuple[Path, str]]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every nth case of a test with the mark `sampled(n)` runs where the test does, the others in `make engines`."""
    if (mark := item.get_closest_marker("sampled")) and isinstance(item, pytest.Function):
        case = item.path, item.originalname
        if _CASES[case] % mark.args[0]:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.full)
        _CASES[case] += 1


@pytest.hookimpl(trylast=True)  # -m and -k have removed theirs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a longer time limit go first: no worker may end with one while the others have nothing left to do.

    xdist gives each worker an equal part of the list, in its order, and lets those that are done take from the others'
    ends. The first worker begins with the test that builds SmolLM2's bundle, and the others with the rest of the long
    tests, the ones that need the bundle last: no worker waits for it.
    """

    def rank(item: pytest.Item) -> tuple[int, float]:
        needed: list[str] = getattr(item, "fixturenames", [])
        limit = item.get_closest_marker("timeout")
        place = 0 if "wheel_bundle" in needed else 2 if {"smollm2_bundle", "smollm2_dir"} & set(needed) else 1
        return place, -limit.args[0] if limit else 0

    long = sorted((item for item in items if rank(item) != (1, 0)), key=rank)
    rest = [item for item in items if rank(item) == (1, 0)]
    others = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) - 1
    builds = sum(rank(item)[0] == 0 for item in long) if others else len(long)
    share = len(items) // (others + 1)
    items.clear()
    for begin in (long[:builds], *(long[builds + number :: others] for number in range(others))):
        count = max(0, share - len(begin))
        items += begin + rest[:count]
        del rest[:count]
    items += rest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder with the user's downloads and CPU kernels: tests neither read nor keep step times in the user's.

    Other programs' caches, such as matplotlib's, stay.
    """
    folder, user = tmp_path_factory.mktemp("cache"), cache_folder()
    (folder / "d2sd").mkdir()
    for path in Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").glob("*"):
        if path.name != "d2sd":
            (folder / path.name).symlink_to(path)
    kernels = compiler.build()  # in a folder of its own where the cache cannot be written
    for path in {*user.glob("*"), *([kernels] if isinstance(kernels, Path) else [])}:
        if not path.name.startswith("step-times"):
            place = folder / "d2sd" / path.name  # a library that is a link is not loaded
            shutil.copy2(path, place) if path.suffix == ".so" else place.symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv("D2SD_CACHE", raising=False)
        yield


def fuse_anywhere(patch: pytest.MonkeyPatch) -> None:
    """Let models on a CPU be fused too; their ops are the specifications."""
    patch.setattr("d2sd.plugins.dispatch.use_fused_layers", lambda *_, unlike, **__: unlike is None)
    patch.setattr("torch.cuda.empty_cache", lambda: None)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `fuse_anywhere`."""
    fuse_anywhere(monkeypatch)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 64 positions in batch-invariant attention: contexts of a few dozen tokens have several."""
    from d2sd.plugins.cascade_attention.triton import exact

    monkeypatch.setattr(exact, "SPAN", 64)
    exact.attention_constants.cache_clear()


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """A server that a test sets up in this process must not take the logs of the tests behind it."""
    logger = logging.getLogger("d2sd")
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


#: Builds what a name stands for into an empty folder, once a run, and returns the folder.
Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Once:
    """`once(name, make)` calls `make(folder)` in the first worker that asks; the others wait and share the folder.

    A `make` that fails fails for every worker anew. Whoever changes what it finds there works on a copy.
    """
    base = tmp_path_factory.getbasetemp()
    # not by the environment: a session that a worker's test starts inherits that, and would share with all runs
    shared = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "once"
    shared.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # a maker that failed may have left a part
                folder.mkdir(parents=True)
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def wheel(once: Once) -> Path:
    """The wheel of this checkout."""
    return next((once("wheel", build_wheel) / "out").glob("*.whl"))


@pytest.fixture(scope="session")
def python(wheel: Path, once: Once) -> Path:
    """The interpreter of an environment with d2sd from its wheel."""
    return once("venv", lambda folder: install_wheel(wheel, folder)) / "bin" / "python"


@pytest.fixture(scope="session")
def wheel_bundle(python: Path, once: Once) -> Path:
    """The bundle of the shipped SmolLM2 recipe, built by the installed wheel."""
    return once("smollm2", lambda folder: build_smollm2(python, folder)) / "bundles" / "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2_bundle(request: pytest.FixtureRequest) -> Path:
    """The bundle of the shipped SmolLM2 recipe: D2SD_SMOLLM2_BUNDLE, or `wheel_bundle`."""
    if value := os.environ.get("D2SD_SMOLLM2_BUNDLE"):
        return Path(value)  # a wrong path is a mistake of whoever set it: the tests that use it fail
    bundle: Path = request.getfixturevalue("wheel_bundle")
    return bundle


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_bundle: Path) -> Path:
    """Directory of the SmolLM2-135M-Instruct checkpoint in Hugging Face's layout."""
    return smollm2_bundle / "target"


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines, of modules with the mark `anyio`, run in asyncio's loop."""
    return "asyncio"


@pytest.fixture
def hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, in which modules lie that no process of d2sd may run."""
    folder, ran = tmp_path / "downloaded", tmp_path / "ran"
    folder.mkdir()
    names = ("d2sd", "jinja2", "json", "llguidance", "numpy", "pip", "pkgutil", "resource", "runpy", "torch", "ziglang")
    for name in names:
        code = f"from pathlib import Path; Path({str(ran)!r}).write_text({name!r}); raise SystemExit(9)"
        (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    yield folder
    assert not ran.exists(), ran.read_text()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package index of the tests' own."""
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"
