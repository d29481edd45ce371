"""Applies every mutant to a copy of this checkout and runs the tests that must notice.

    python -m tools.mutants [PART OF A NAME OR FILE] ...

Those that were as expected, and of which nothing has changed since (`kept`), are left out, unless they are named.
Prints one line a mutant. Ends with 1 if one survives that the table does not explain, if an explained one dies, if its
text is no longer there, or if a proof fails without any mutant.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tools.cuda import guard
from tools.mutants import kept
from tools.mutants.mutant import Mutant, Proof
from tools.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
#: Seconds: what takes longer hangs, as a search without an end does. Proofs need a tenth.
TIMEOUT = 400
WORKERS = int(os.environ.get("WORKERS", os.cpu_count() or 2))


def main(*wanted: str) -> int:
    start = time.perf_counter()
    known = kept.Kept.read()
    named = [m for m in MUTANTS if not wanted or any(part in f"{m.name} {m.file}" for part in wanted)]
    chosen = [m for m in named if wanted or not known.holds(m)]
    stale = 0
    for mutant in chosen:
        try:
            mutant.apply((ROOT / mutant.file).read_text())
        except ValueError as error:
            print(f"UNAPPLIABLE  {error}", flush=True)
            stale += 1
    if stale:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        guard.build(Path(folder))
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(WORKERS):
            trees.put(copied(Path(folder) / f"tree{number}"))
        lock, bad = threading.Lock(), []

        def said(line: str, fine: bool) -> None:
            with lock:
                print(line, flush=True)
                bad.extend([] if fine else [line])

        @contextmanager
        def tree() -> Iterator[Path]:
            """One that no other worker uses."""
            mine = trees.get()
            try:
                yield mine
            finally:
                trees.put(mine)

        def unchanged(proof: Proof) -> None:
            with tree() as here:
                passed, seconds, output = holds(proof, here, Path(folder))
                files = list_of(here, Path(folder)).read_text("utf-8").splitlines()
            with lock:
                known.files.pop(kept.title(proof), None)  # a proof that fails says nothing of its mutants
                if passed:
                    known.files[kept.title(proof)] = files
            if passed:
                said(f"holds        {seconds:4.0f} s  without a mutant: {' '.join(proof.arguments)}", True)
            else:
                said(f"FAILS        without a mutant: {' '.join(proof.arguments)}\n{output[-3000:]}", False)

        def changed(mutant: Mutant) -> None:
            with tree() as here:
                file = here / mutant.file
                source = file.read_text()
                file.write_text(mutant.apply(source))
                try:
                    survived, seconds, _ = holds(mutant.proof, here, Path(folder))
                finally:
                    file.write_text(source)
            fine = survived == bool(mutant.survives)
            with lock:
                known.mutants.pop(mutant.name, None)
                if fine and (key := known.key(mutant)):
                    known.mutants[mutant.name] = key
                known.write()
            verdict = "survives" if survived else "killed"
            note = f" ({mutant.survives})" if mutant.survives and fine else "" if fine else "  <-- unexpected"
            said(f"{verdict:<12} {seconds:4.0f} s  {mutant.file}: {mutant.name}{note}", fine)

        with ThreadPoolExecutor(WORKERS) as workers:
            list(workers.map(unchanged, dict.fromkeys(mutant.proof for mutant in chosen)))
            list(workers.map(changed, chosen))
    explained, unchanged_since = sum(bool(mutant.survives) for mutant in named), len(named) - len(chosen)
    print(
        f"{len(named)} mutants, {explained} of them explained survivors, {unchanged_since} unchanged since they ran;"
        f" {time.perf_counter() - start:.0f} s"
    )
    print(f"{len(bad)} not as expected" if bad else "all as expected")
    return bool(bad)


def list_of(tree: Path, folder: Path) -> Path:
    """The list of the files that the last proof in this copy has run."""
    return folder / f"{tree.name}.txt"


def copied(tree: Path) -> Path:
    """The checkout, without what git ignores; large folders that no mutant is in are links."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    tree.mkdir()
    for name in listed:
        source, to = ROOT / name, tree / name
        if name.startswith("models/") or not (source.exists() or source.is_symlink()):
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to, follow_symlinks=False)
    (tree / "models").symlink_to(ROOT / "models")
    return tree


def holds(proof: Proof, tree: Path, folder: Path) -> tuple[bool, float, str]:
    """Whether the tests pass, how long they took, and what they said."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "tools.mutants.kept",
        "--no-showlocals",
        "--tb=line",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file that is changed twice a second has one date
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": str(int(proof.interpreted)),
        "D2SD_CUDA_GUARD": str(folder),
        kept.VARIABLE: str(list_of(tree, folder)),
    }
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, *proof.arguments],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, TIMEOUT, "no end"
    said = done.stdout + done.stderr
    if done.returncode > 1 or (done.returncode == 0 and " passed" not in done.stdout):
        raise RuntimeError(f"no test ran: {' '.join(proof.arguments)}\n{said[-3000:]}")
    return done.returncode == 0, time.perf_counter() - start, said


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
