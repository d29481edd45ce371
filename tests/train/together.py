"""test_world.py starts this with torchrun: all processes train both drafters. Argument: the output folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.train.dist import Dist
from d2sd.train.loop import Trainer
from d2sd.train_recipe import TrainSettings
from tests.train.helpers import exact_features, greedy_responses, new_drafter, settings, target

Said = list[dict[str, float]]


def shared_settings() -> TrainSettings:
    """Four sequences a step; some ids are sampled."""
    return settings(batch=4, steps=4, evaluate_every=3, objective={"slots": "dpace", "ce": 1, "kl": 1})


def train_both(folder: Path, dist: Dist | None = None) -> tuple[dict[str, Said], dict[str, list[int]]]:
    """The second drafter learns from the trained first. What every step said, and which steps were evaluated."""
    said: dict[str, Said] = {"first": [], "second": []}
    evaluated: dict[str, list[int]] = {"first": [], "second": []}
    first: Drafter | None = None
    for name, drafter in (("first", new_drafter()), ("second", new_drafter(0.9))):
        trainer = Trainer(target(), drafter, exact_features(greedy_responses()), shared_settings(), first, dist)
        steps = said[name]
        trainer.run(folder / name, lambda step, values: steps.append(values), evaluated[name].append)  # noqa: B023
        first = drafter
    return said, evaluated


def threads() -> int:
    """Count the threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


def main() -> None:
    folder, dist = Path(sys.argv[1]), Dist.init()
    said, evaluated = train_both(folder, dist)
    mean = dist.mean({"rank": float(dist.rank), "size": float(dist.size)})
    told: dict[str, Any] = {"said": said, "evaluated": evaluated, "mean": mean, "leads": dist.is_main}
    dist.barrier()
    before = threads()
    dist.destroy()
    told["threads"] = [before, threads()]
    (folder / f"rank{dist.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
