"""`d2sd train` in two processes, through torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.helpers import tree_bytes
from tests.d2sd.cli.train.helpers import rows, script


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.subprocess
def test_two_processes_train_a_pair(project: Path, whole: Path) -> None:
    """Through torchrun: each answers its share, both train on theirs, one writes."""
    (project / "work").mkdir()
    shutil.copytree(whole / "work" / "target", project / "work" / "target")
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script(project)],
        check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert tree_bytes(project / "out").keys() == tree_bytes(whole / "out").keys() - {"curves.png"}
    assert ended.stdout.count("tokens a step on 2 held-out prompts") == 3, "one process tells"
    for kind in ("turns", "answers"):
        shares = [{line["id"] for line in rows(project, f"{kind}{rank}.jsonl")} for rank in ("", "-1")]
        assert min(map(len, shares)) >= 3
        assert not shares[0] & shares[1]
    for name in ("first", "second"):
        ours, alone = ([row for row in rows(folder, f"{name}.jsonl") if "loss" in row] for folder in (project, whole))
        assert [row["step"] for row in ours] == [1, 2, 3, 4]
        assert ours[0]["loss"] == pytest.approx(alone[0]["loss"], rel=0.01), "the same sequences"
