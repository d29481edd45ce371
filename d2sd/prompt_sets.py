"""The public prompt sets that recipes, benchmarks and tests name below `data/`, copied from a folder by hash."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from d2sd.errors import D2SDError
from d2sd.io import atomic_write, sha256
from d2sd.recipe import SHA256, Part, Positive
from d2sd.schema import validated
from d2sd.yaml_reader import read_yaml

LIST = Path(__file__).with_name("prompt_sets.yaml")


class PromptSet(Part):
    """One file of prompts or documents, and its origin."""

    #: path below `data/`
    file: str
    #: number of prompts, or of documents
    prompts: Positive
    #: what a line is: a prompt, or a document that a training recipe makes prompts of
    kind: Literal["prompts", "documents"] = "prompts"
    license: str
    #: public repository of the original, and the file in it
    source: str
    #: how the file was made from the original
    made: str
    sha256: SHA256


class _List(Part):
    sets: list[PromptSet]


def prompt_sets() -> list[PromptSet]:
    """Every set in `prompt_sets.yaml`."""
    return validated(_List, read_yaml(LIST), LIST, error=D2SDError).sets


def present(data: Path) -> set[str]:
    """Names of the sets in `data` whose hash matches."""
    return {prompt_set.file for prompt_set in prompt_sets() if _is(data / prompt_set.file, prompt_set)}


def fill(data: Path, source: Path) -> None:
    """Copy the sets in the folder `source` to `data`, those that it has.

    Raises D2SDError for a file of a set's name with another hash; it is not copied.
    """
    if not source.is_dir():
        raise D2SDError("There is no such folder of prompt sets.", where=source)
    for prompt_set in prompt_sets():
        original, copy = source / prompt_set.file, data / prompt_set.file
        if not original.is_file():
            continue
        if not _is(original, prompt_set):
            raise D2SDError(
                "This is not the prompt set of that name.",
                where=original,
                found=sha256(original),
                expected=prompt_set.sha256,
                fix=f"make it from {prompt_set.source}: {prompt_set.made}",
            )
        if not _is(copy, prompt_set):
            copy.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(copy) as partial:
                shutil.copyfile(original, partial)


def _is(path: Path, prompt_set: PromptSet) -> bool:
    return path.is_file() and sha256(path) == prompt_set.sha256
