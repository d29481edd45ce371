"""Several processes: two under torchrun train what one trains alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d2sd.train.dist import Dist
from tests.train.together import shared_settings, train_both

ROOT = Path(__file__).parents[2]


def test_one_process_is_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun's variables nothing is joined, and nobody is waited for."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    dist = Dist.init()
    assert (dist.rank, dist.size) == (0, 1)
    assert [dist.is_main, *(Dist(rank, 3).is_main for rank in range(3))] == [True, True, False, False]
    assert not torch.distributed.is_initialized()
    assert dist.mean({"loss": 2.5}) == {"loss": 2.5}
    dist.barrier()
    dist.destroy()


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    """A sequence at a time, so that both ways add up the same numbers: what is left is the order of a sum of four.

    The values that steps report agree to 1e-5. Weights agree to a hundredth of four steps of the rate: AdamW takes
    steps of the rate's size out of gradients of any, so rounding of a gradient near zero counts.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [*command, "-m", "tests.train.together", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["leads"] for one in told] == [True, False]
    assert all(one["mean"] == {"rank": 0.5, "size": 2.0} for one in told)
    assert all(one["evaluated"] == {"first": [3, 4], "second": [3, 4]} for one in told), "evaluations are everybody's"
    assert told[1]["said"] == {"first": [], "second": []}, "one of them speaks"

    # gloo's threads that held Python tensors are gone, not left to meet the end of Python
    assert all(after < before for before, after in (one["threads"] for one in told))

    alone, _ = train_both(tmp_path / "alone")
    for name, steps in alone.items():
        assert len(steps) == 4
        for mine, theirs in zip(steps, told[0]["said"][name], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-5)
        expected = load_file(tmp_path / "alone" / name / "state.safetensors")
        found = load_file(tmp_path / name / "state.safetensors")
        bound = 0.01 * shared_settings().steps * shared_settings().learning_rate
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=bound, msg=f"{name}: {key}")
