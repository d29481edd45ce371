"""The result file: what is written is read, and what is damaged is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from d2sd.bench.result import Key, ResultError, load_result, save
from d2sd.errors import D2SDError
from tests.d2sd.bench.helpers import bins, cell, result


def written(folder: Path, change: Callable[[dict[str, Any]], object] = lambda values: None) -> Path:
    path = folder / "result.json"
    full = cell("d2sd", [3, 1], [2], calibration={"first": bins(b3=(2, 0.7, 1))}, boundary_rank={"0": 1, "none": 2})
    save(result(full, cell("off", [1, 1], [1])), path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return path


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    loaded = load_result(written(tmp_path))
    assert [c.method for c in loaded.cells] == ["d2sd", "off"]
    assert loaded.cells[0].key == Key("d2sd", 8, "gsm8k", 0.0, 1)
    assert str(loaded.cells[0].key) == "d2sd, 8 rows, gsm8k, T = 0, 1 in flight"
    assert [r.accepted for r in loaded.cells[0].requests] == [[3, 1], [2]]
    assert loaded.cells[0].calibration["first"][3] == (2, 0.7, 1)
    save(loaded, tmp_path / "again.json")
    assert load_result(tmp_path / "again.json") == loaded
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.json", "result.json"]  # no partial file stays


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda v: v.update(d2sd_bench=2), "d2sd_bench\n  found: 2\n  expected: 1"),
        (lambda v: v.pop("d2sd_bench"), "no key d2sd_bench"),
        (lambda v: v.update(cells=[]), "cells"),
        (lambda v: v["provenance"].update(place="here"), "provenance.place"),
        (lambda v: v["settings"].update(per_set=0), "settings.per_set"),
        (lambda v: v["cells"][1].update(temperature="warm"), "cells.1.temperature"),
        (lambda v: v["cells"][0]["requests"][1].update(accepted=[]), "cells.0.requests.1.accepted"),
        (lambda v: v["cells"][0]["requests"][0].update(accepted=[0]), "cells.0.requests.0.accepted.0"),
        (lambda v: v["cells"][0]["calibration"]["first"].pop(), "cells.0.calibration.first"),
        (lambda v: v["cells"][0].update(wall_seconds=0), "cells.0.wall_seconds"),
        (lambda v: v["cells"][0].update(wall_seconds=float("nan")), "cells.0.wall_seconds"),
        (lambda v: v["cells"][0]["requests"][1].update(id="0"), "d2sd, 8 rows, gsm8k, T = 0, 1 in flight has two"),
        (lambda v: v["cells"].append(v["cells"][1]), "2 cells are off, 1 rows, gsm8k"),
        (
            lambda v: v["cells"][0]["differences"].append({"request": 2, "token": 0, "gap": 0.0, "excused": True}),
            "difference in a request that is not there",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], named: str) -> None:
    path = written(tmp_path, change)
    with pytest.raises(ResultError) as raised:
        load_result(path)
    assert str(path) in str(raised.value)
    assert named in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\udcff"])
def test_what_is_no_result_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(D2SDError, match=r"The result is damaged\."):
        load_result(path)


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="cannot be read") as raised:
        load_result(tmp_path / "none.json")
    assert "No such file" in str(raised.value)
    with pytest.raises(ResultError, match="cannot be read"):
        load_result(tmp_path)
    with pytest.raises(ResultError, match="cannot be written"):
        save(result(cell()), tmp_path / "none" / "result.json")
