"""Training curves: that they draw what was logged, and that a training that has hardly begun can be drawn too."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from d2sd.runtime.evaluation import Evaluation
from d2sd.viz import plot_style as style
from d2sd.viz.training import Curve, averaged, plot_training
from tests.d2sd.bench.helpers import bins
from tests.d2sd.bench.test_plots import curves, points

STEPS = [(step, {"loss": 9.0 - step, "ce": 10.0 - step, "kl": 8.0 - step}) for step in (1, 2, 3, 4)]


def evaluation(drafter: str, method: str, *accepted: int, drafts: bool = True) -> Evaluation:
    found = {drafter: bins(b2=(10, 2.5, 1), b9=(4, 3.8, 4))} if drafts else {}
    requests = [{"id": "0", "accepted": accepted}]
    return Evaluation.model_validate({"method": method, "rows": 8, "requests": requests, "calibration": found})


FIRST = Curve("first", STEPS, [(2, [evaluation("first", "chain", 3, 1)]), (4, [evaluation("first", "chain", 4, 2)])])
SECOND = Curve(
    "second", STEPS[:3], [(3, [evaluation("second", "reanchor", 2, drafts=False), evaluation("second", "d2sd", 4)])]
)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Axes]:
    """Panels of both drafters, row by row."""
    kept: list[Figure] = []
    monkeypatch.setattr(style, "finish", lambda figure, title, path: kept.append(figure))
    plot_training([FIRST, SECOND], tmp_path / "curves.png")
    return kept[0].axes


def test_loss_and_its_terms(drawn: list[Axes]) -> None:
    for panel, curve in zip(drawn[:2], (FIRST, SECOND), strict=True):
        assert panel.get_title(loc="left") == f"{curve.drafter} drafter"
        legend = panel.get_legend()
        assert legend is not None
        names = [text.get_text() for text in legend.get_texts()]
        assert names == ["loss", "ce", "kl"]
        for name, line in zip(names, panel.lines, strict=True):
            assert points(line) == ([step for step, _ in curve.steps], [said[name] for _, said in curve.steps])


def test_tau_by_step(drawn: list[Axes]) -> None:
    assert curves(drawn[2]) == {"chain, 8 rows": ([2, 4], [2, 3])}
    assert curves(drawn[3]) == {"reanchor, 8 rows": ([3], [2]), "d2sd, 8 rows": ([3], [4])}
    assert drawn[2].get_ylim() == drawn[3].get_ylim(), "what the second adds is seen at a glance"


def test_one_evaluation_is_shown_on_the_steps_of_the_training(drawn: list[Axes]) -> None:
    for panel, last in zip(drawn, (4, 3, 4, 3), strict=True):
        assert panel.get_xlim() == pytest.approx((0, 1.03 * last))


def test_a_picture_one_can_read(tmp_path: Path) -> None:
    plot_training([FIRST, Curve("second", [], [])], tmp_path / "curves.png")
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[1] == 1200
    assert pixels.std() > 0.05, "an empty figure"


def test_before_the_first_evaluation_and_the_first_step(tmp_path: Path) -> None:
    plot_training([Curve("first", [], [])], tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []
    plot_training([Curve("first", STEPS[:1], [])], tmp_path / "curves.png")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_long_curves_are_averaged() -> None:
    steps = [(step, float(step % 2)) for step in range(1, 1802)]
    found = averaged(steps, 200)
    assert len(found) == 181
    assert found[0] == (5.5, 0.5)
    assert found[-1] == (1801.0, 1.0)
    assert averaged(steps[:3], 200) == [(1.0, 1.0), (2.0, 0.0), (3.0, 1.0)]
