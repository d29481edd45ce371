"""A tiny training project on disk, and the command run on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from click.testing import Result

from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.io import MARKER
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.train.data.responses import Response, read_responses
from d2sd.viz.training import Curve
from tests.commands import passed, run_cli, succeeds
from tests.convert.helpers import edit_json, edit_yaml, tree_bytes, write_target_dir
from tests.tiny import tiny_decoder

PROMPTS = 9
STOP = 37
TEMPLATE = "{% for m in messages %}w60 {{ m['content'] }} w61 {% endfor %}{% if add_generation_prompt %}w62 {% endif %}"
SETTINGS: dict[str, Any] = {
    "steps": 4,
    "objective": {"ce": 0.3, "kl": 0.7},
    "batch": 2,
    "blocks": 4,
    "learning_rate": 5e-3,
    "save_every": 2,
    "evaluate_every": 3,
    "frequent": 32,
    "negatives": 8,
}


def write_training(folder: Path) -> Path:
    """A target with a chat template that stops now and then, prompts, and a training recipe."""
    write_target_dir(folder / "target", tiny_decoder())
    settings = folder / "target" / "tokenizer_config.json"
    edit_json(settings, "chat_template", TEMPLATE)
    for token in ("eos_token", "unk_token"):  # a special token is found inside longer words, as w2 is in w20
        edit_json(settings, token, f"w{STOP}")
    (folder / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}))
    lines = [{"id": f"p{i}", "turns": [f"w{i} w{i + 20} w{i + 40}", "ignored"]} for i in range(PROMPTS)]
    lines.append({"id": "long", "turns": [" ".join(f"w{i}" for i in range(20, 0, -1))]})
    lines.append({"id": "again", "turns": ["w51 w52 w53"]})
    lines.append({"id": "once more", "turns": ["W51, W52 w53!"]})
    lines.append({"id": "asked", "turns": ["w10 w11 w12"]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = {"id": "k", "turns": ["w54 w55 w56", "w9 w10 w11 w12 w13"]}  # second turns are asked too
    (folder / "asked.jsonl").write_text(json.dumps(asked) + "\n")
    recipe = {
        "d2sd_train": 1,
        "name": "tiny",
        "target": {"path": "target"},
        "precision": "fp32",
        "max_batch": 4,
        "drafter": {"layers": 1, "block_size": 4, "mask_token_id": 63, "target_layer_ids": [0, 1]},
        "data": {
            "prompts": [{"path": "prompts.jsonl"}],
            "exclude": ["asked.jsonl"],
            "self_written": [{"name": "kind", "count": 8, "openings": ["w7 ", "w8 w9 "], "max_tokens": 9}],
            "max_prompt_tokens": 16,
            "max_new_tokens": 8,
            "held_out": 3,
        },
        "first": SETTINGS,
        "second": SETTINGS,
        "evaluation": {"prompts": 2, "max_new_tokens": 8},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def add_documents_and_heads(project: Path) -> None:
    """Turns of two passages and a question, half of the answers sampled, and pair heads behind the drafters."""
    lines = [{"id": f"d{i}", "text": f"w{i} w{i + 9}", "question": f"w{i + 20}"} for i in range(12)]
    (project / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = {"name": "found", "path": "texts.jsonl", "count": 2, "passages": 2, "templates": ["{passages} {question}"]}
    edit(project, "data.documents", [asked])
    edit(project, "data.sampled", {"share": 0.5, "temperature": 1.0})
    edit(project, "head", {"rank": 4, "candidates": 6, "steps": 3, "batch": 2, "blocks": 4, "unseen": 2})


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Instead of a picture, which takes a second, what is to be seen in it: all but times."""
    cells = [curve.evaluations for curve in curves]
    path.write_text(repr([(curve.drafter, curve.steps) for curve in curves]) + repr(cells))


def edit(project: Path, key: str, value: object) -> None:
    """Set a dotted key of the recipe; ... deletes it."""
    edit_yaml(project / "train.yaml", key, value)


def arguments(project: Path) -> list[str]:
    return ["train", f"{project}/train.yaml", "--work", f"{project}/work", "--out", f"{project}/out"]


def train(project: Path, *more: str) -> Result:
    return run_cli(*arguments(project), *more)


def trained(project: Path) -> dict[str, bytes]:
    passed(train(project))
    return tree_bytes(project / "out")


def rows(project: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project / "work" / name).read_text().splitlines()]


#: Steps of a drafter's log, and whether the drafter is evaluated there.
LOGGED = [(1, False), (2, False), (3, False), (3, True), (4, False), (4, True)]


def logged(project: Path, name: str) -> list[tuple[int, bool]]:
    return [(row["step"], "cells" in row) for row in rows(project, f"{name}.jsonl")]


def read(project: Path) -> list[Response]:
    return read_responses(project / "work", vocab_size=64)


def bundled(project: Path, *, second: bool = True, calibrated: bool = True, **tree: object) -> Path:
    """A bundle of the trained drafters, by `project/bundle.yaml`."""
    made = ["first", *(["second"] if second else []), *(["calibration.json"] if calibrated else [])]
    recipe = {
        "d2sd": 1,
        "name": "tiny",
        "target": {"path": "target"},
        "limits": {"max_context": 64},
        "checks": {"count": 1, "tokens": 4},  # a drafter of four steps is accepted by chance, under any reading
        "drafters": {name.removesuffix(".json"): {"path": f"out/{name}"} for name in made},
        "tree": {"block_size": 4, "branches": 3, **tree},
        "sampling": {"max_new_tokens": 8},
    }
    (project / "bundle.yaml").write_text(yaml.safe_dump(recipe))
    succeeds("build", project / "bundle.yaml", "--out", project / "bundle")
    return project / "bundle"


def selector_of_first(project: Path) -> PolicySelector:
    """The policy selector of a bundle of the trained first drafter."""
    selector = make_engine(load_bundle(bundled(project, second=False, policy="auto", row_budget=8))).selector
    assert selector is not None
    return selector


def nth_time(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The real function, interrupted as by Ctrl-C at its nth call."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    return call


def undo(project: Path, what: str) -> None:
    """Removes a stage's files, so that training begins it again."""
    shutil.rmtree(project / "out", ignore_errors=True)
    shutil.rmtree(project / "work" / what, ignore_errors=True)
    for path in (project / "work").glob(f"{what}.*"):
        path.unlink()


def script(project: Path, before: str = "") -> Path:
    """A program that runs the command without pictures."""
    path = project / "program.py"
    path.write_text(f"""
import os, signal, torch, d2sd.train.pipeline.run
from d2sd.cli.main import main
from d2sd.train.loop import Trainer
d2sd.train.pipeline.run.plot_training = lambda curves, path: None
torch.set_num_threads(1)
{before}
main({arguments(project)})
""")
    return path


def refusal(project: Path) -> str:
    result = train(project)
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert tree_bytes(project / "out").keys() <= {MARKER}
    return result.stderr
