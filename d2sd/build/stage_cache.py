"""Resumable build stages, and an output that appears complete or not at all.

    <output>/                     appears at the end, by a rename
    .<output name>.building/      carries a mark, without which d2sd does not touch it
      bundle/<stage>/             files that will be renamed
      hidden/<stage>/             files that other stages need and the bundle does not
      stages/<stage>.json         a finished stage: hash of its inputs, hashes of its files
      scratch/                    while a stage runs

A stage is skipped when its marker carries the same inputs and its folder still has the same files: a build that
resumes after a kill, even by the kernel, ends in the same bytes as an uninterrupted one (except engines, which are not
reproducible).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from d2sd.bundle.files import output_path, publish
from d2sd.errors import D2SDError
from d2sd.io import claim, digest, disk_space, exclusive, hash_files, read_json, remove, write_json
from d2sd.progress import Progress

#: Writes a stage's folder and returns figures to keep in its marker.
Run = Callable[[Path], "dict[str, Any] | None"]


@dataclass(frozen=True, slots=True)
class Marker:
    """Record of a finished stage."""

    inputs: str
    files: dict[str, str]  # path in the bundle -> sha256
    result: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class StageCache:
    """The work folder of one output, next to it."""

    output: Path
    folder: Path
    progress: Progress
    finished: Callable[[str], None]

    @classmethod
    def for_output(cls, output: Path, progress: Progress, finished: Callable[[str], None]) -> StageCache:
        """Prepare the work folder of `output`. Raises `BuildError` if the existing output could not be replaced."""
        output = output_path(output)
        return cls(output, output.with_name(f".{output.name}.building"), progress, finished)

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    @property
    def internal(self) -> Path:
        return self.folder / "hidden"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Claim and lock the work folder; after an error that leaves no finished stage, delete it."""
        claim(self.folder, "build")
        with exclusive(self.folder / "lock", wait=False):
            try:
                yield
            except D2SDError:
                if not any((self.folder / "stages").glob("*.json")):
                    remove(self.folder)
                raise

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for one stage's intermediate files."""
        folder = self.folder / "scratch"
        remove(folder)  # of a run that was killed
        try:
            yield folder
        finally:
            remove(folder)

    def prune(self, stages: set[str]) -> None:
        """Drop the folders that an earlier recipe left in the unpublished bundle; a stage name may be a/b."""
        above = {stage.partition("/")[0] for stage in stages if "/" in stage}
        for path in (*self.bundle.glob("*"), *(below for name in above for below in (self.bundle / name).glob("*"))):
            if path.is_dir() and path.relative_to(self.bundle).as_posix() not in stages | above:
                remove(path)

    def stage(self, name: str, inputs: object, need: int, run: Run, *, internal: bool = False) -> Marker:
        """Return the marker of the stage writing `bundle/<name>` (`need` bytes), running it unless it is finished."""
        root = self.internal if internal else self.bundle
        folder, path = root / name, self.folder / "stages" / f"{name.replace('/', '-')}.json"
        marker = self._resume(path, root, name, digest(inputs))
        if marker is None:
            path.unlink(missing_ok=True)
            remove(folder)
            with disk_space(self.folder, need, f"stage {name}"):
                try:
                    result = run(folder)
                except BaseException:
                    remove(folder)
                    raise
                marker = Marker(digest(inputs), self._hashes(root, name), result)
                path.parent.mkdir(exist_ok=True)
                write_json(path, asdict(marker))
        self.finished(name)
        return marker

    def publish(self) -> None:
        """Rename the bundle to the output. After a kill between the renames, every stage is still finished."""
        publish(self.bundle, self.output, self.folder)

    def _resume(self, path: Path, root: Path, name: str, inputs: str) -> Marker | None:
        try:
            marker = Marker(**read_json(path))
        except (D2SDError, TypeError):
            return None  # no marker, or a damaged one: the stage runs again
        return marker if marker.inputs == inputs and marker.files == self._hashes(root, name) else None

    def _hashes(self, root: Path, name: str) -> dict[str, str]:
        files = sorted(file.relative_to(root).as_posix() for file in (root / name).rglob("*") if not file.is_dir())
        return hash_files(root, files, self.progress)
