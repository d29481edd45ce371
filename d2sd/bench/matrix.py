"""The cells of a benchmark: methods x node budgets x prompt sets x temperatures x concurrencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from d2sd.bench.result import Key
from d2sd.errors import D2SDError
from d2sd.policies import FACTS, LOOKUP, parse_method
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.recipe import Policy

#: Methods whose tree grows with the node budget; the others have a fixed size.
GROWING = tuple(name for name, facts in FACTS.items() if facts.grows)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The axes. Plain decoding is always included, as the baseline.

    A method written `name:rows` runs with this node budget only.
    """

    methods: Sequence[str]
    rows: Sequence[int]
    sets: Sequence[str]
    temperatures: Sequence[float]
    concurrencies: Sequence[int]
    block_size: int

    def keys(self) -> list[Key]:
        """Every cell once; plain decoding first in each set, the lowest concurrency first."""
        cells = (
            Key(method, rows, name, temperature, concurrency)
            for temperature in self.temperatures
            for concurrency in sorted(self.concurrencies)
            for name in self.sets
            for method, rows in (("off", 1), *self._trees())
        )
        return list(dict.fromkeys(cells))

    def plan(self, sets: Mapping[str, Sequence[object]], repeat: int) -> str:
        """The cells with the prompts of their sets, a line each, and how many answers they make."""
        keys = self.keys()
        lines = [f"{key}: {len(sets[key.set])} prompts" for key in keys]
        answers = sum(len(sets[key.set]) for key in keys) * repeat
        return "\n".join([*lines, f"{len(keys)} cells, {answers} answers"])

    def _trees(self) -> Iterator[tuple[str, int]]:
        for written in self.methods:
            method, _, pinned = written.partition(":")
            rows = (int(pinned),) if pinned else self.rows
            policy, _ = parse_method(method)
            if policy in GROWING:
                yield from ((method, budget) for budget in rows)
            elif policy == "auto":
                yield method, max(rows)
            elif policy != "off":
                yield method, min(self.block_size, max(rows))


def with_copies(policies: Sequence[Policy]) -> list[str]:
    """The policies, each that may copy earlier text also with copies; `auto` with them alone, as it is served."""
    methods: list[str] = []
    for name in policies:
        if name == "auto":
            methods.append(name + LOOKUP)
        else:
            methods += [name, name + LOOKUP] if FACTS[name].copies else [name]
    return methods


def read_sets(prompts: tuple[Path, ...], per_set: int) -> dict[str, list[tuple[str, str]]]:
    """(id, text) of the first `per_set` prompts of every set, by name: from JSONL files, folders of them, or our own.

    Raises D2SDError for two sets with the same name, an empty set, or two prompts with the same id.
    """
    files: list[Path] = []
    for path in prompts or (OWN_PROMPTS,):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    sets = {path.stem: read_prompts(path)[:per_set] for path in files}
    if not sets or len(sets) < len(files) or not all(sets.values()):
        raise D2SDError(
            "Every prompt set needs a unique name and at least one prompt.",
            where=", ".join(map(str, prompts)),
            found=", ".join(f"{path.name}: {len(sets[path.stem])} prompts" for path in files) or "no *.jsonl",
        )
    for path in files:
        names = Counter(name for name, _ in sets[path.stem])
        if twice := [name for name, count in names.items() if count > 1]:
            raise D2SDError("Two prompts have the same id.", where=path, found=", ".join(sorted(twice)))
    return sets
