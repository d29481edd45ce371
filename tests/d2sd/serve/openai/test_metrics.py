"""Gauges of what a target may have or not."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from d2sd.runtime.stats import EngineStats
from d2sd.serve.openai.metrics import Metrics


@pytest.mark.parametrize("slots", [(), (9, 3, 2)])
def test_slots_of_targets_with_a_recurrent_state(slots: tuple[int, ...]) -> None:
    stats = EngineStats(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, "chain", *slots)
    registry = Metrics(MagicMock(stats=stats), "m").registry
    names = ("d2sd_state_slots", "d2sd_state_slots_used", "d2sd_state_slots_cached")
    found = [registry.get_sample_value(name, {"model_name": "m"}) for name in names]
    assert tuple(found) == (slots or (None, None, None))
