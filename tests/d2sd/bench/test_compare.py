"""Two results side by side."""

from __future__ import annotations

import pytest

from d2sd.bench.compare import compare
from d2sd.bench.result import Cell, ResultError
from tests.d2sd.bench.helpers import PROVENANCE, SETTINGS, cell, result

PROMPTS = [[2], [4], [2], [4], [2], [4]]


def better(factor: int) -> list[list[int]]:
    return [[n * factor for n in steps] for steps in PROMPTS]


def lines(text: str) -> list[list[str]]:
    return [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_ratios_of_the_common_cells_with_marks() -> None:
    off = cell("off", *PROMPTS, wall_seconds=2.0)
    a = result(cell("d2sd", *better(2)), cell("chain", *PROMPTS), cell("chain", *PROMPTS, set="mbpp"), off)
    b = result(
        off.model_copy(update={"wall_seconds": 4.0}),
        cell("chain", *better(3), wall_seconds=2.0),
        cell("d2sd", *PROMPTS),
        cell("chain", *PROMPTS, set="mbpp"),
    )
    text = compare(a, b)
    assert lines(text) == [
        ["off", "1", "gsm8k", "0", "1", "6 of 6", "3.00", "3.00", "1.000", "1.000 – 1.000", "0.50"],
        ["chain", "8", "gsm8k", "0", "1", "6 of 6", "3.00", "9.00", "3.000", "3.000 – 3.000 ▲", "1.50"],
        ["chain", "8", "mbpp", "0", "1", "6 of 6", "3.00", "3.00", "1.000", "1.000 – 1.000", "1.00"],
        ["d2sd", "8", "gsm8k", "0", "1", "6 of 6", "6.00", "3.00", "0.500", "0.500 – 0.500 ▼", "0.50"],
    ]
    tau, speed = (3 * 1 * 0.5) ** (1 / 3), (1.5 * 1 * 0.5) ** (1 / 3)
    assert f"**Geometric mean over 3 cells: τ {tau:.3f}, tokens/s {speed:.3f}**" in text  # plain decoding left out
    assert "Only in" not in text
    assert "Differs between" not in text


OTHERS = [{"id": name, "accepted": [4], "tokens": 4} for name in "xyz"]


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (cell("d2sd", [2], [4]), cell("d2sd", [4], [2]), ["2 of 2", "3.00", "3.00", "1.000", "0.500 – 2.000"]),
        (cell("d2sd", [2], [2], [9]), cell("d2sd", [3], [3]), ["2 of 3", "2.00", "3.00", "1.500", "1.500 – 1.500 ▲"]),
        (cell("d2sd", [2], [2]), cell("d2sd", requests=OTHERS), ["0 of 2", "2.00", "4.00", "2.000", "–"]),
    ],
    ids=["an interval around one is not marked", "shared prompts", "none shared"],
)
def test_a_ratio_is_of_the_shared_prompts(a: Cell, b: Cell, told: list[str]) -> None:
    assert lines(compare(result(a), result(b)))[0][5:10] == told


def test_cells_of_one_result_only_are_listed() -> None:
    common = cell("chain", [2], [2])
    a = result(common, cell("d2sd", [2], rows=64), cell("d2sd", [2], rows=16))
    b = result(common, cell("chain", [2], temperature=0.7), cell("chain", [2], concurrency=8))
    text = compare(a, b)
    assert (
        "Only in A:\n\n- d2sd, 16 rows, gsm8k, T = 0, 1 in flight\n- d2sd, 64 rows, gsm8k, T = 0, 1 in flight" in text
    )
    assert "Only in B:\n\n- chain, 8 rows, gsm8k, T = 0, 8 in flight\n- chain, 8 rows, gsm8k, T = 0.7, 1 in" in text
    assert len(lines(text)) == 1


def test_differing_settings_are_listed() -> None:
    b = result(
        cell(),
        settings=SETTINGS.model_copy(update={"max_new_tokens": 128}),
        provenance=PROVENANCE.model_copy(
            update={"device": "cuda", "date": "later", "machine": {"cpu": "EPYC", "gpu": "H200"}}
        ),
    )
    text = compare(result(cell()), b)
    told = "max_new_tokens (64 | 128), device (cpu | cuda), machine cores (2 | –), machine gpu (– | H200)"
    assert f"Differs between A | B: {told}.\n" in text


def test_plain_decoding_alone_has_no_mean() -> None:
    assert "Geometric" not in compare(result(cell("off", [1])), result(cell("off", [1])))


def test_responses_without_tokens_have_no_speed_ratio() -> None:
    empty = cell(requests=[{"id": "0", "accepted": [2], "tokens": 0}])
    text = compare(result(empty), result(empty))
    assert lines(text)[0][-1] == "–"
    assert "**Geometric mean over 1 cells: τ 1.000**" in text


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(ResultError, match="no cell in common") as raised:
        compare(result(cell("chain"), cell("off")), result(cell("d2sd")))
    assert "A has off, 1 rows, gsm8k, T = 0, 1 in flight and 1 more; B has d2sd, 8 rows" in str(raised.value)
