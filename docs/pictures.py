"""Draws an excerpt of one step's tree for README: `python docs/pictures.py BUNDLE`, with the bundle of smollm2-135m.

images/tree.svg is for a page of 830 pixels, images/tree-narrow.svg for a phone.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from d2sd.bundle.load import load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.text import TextStream
from d2sd.viz.nodes import Step
from d2sd.viz.record import Recording
from d2sd.viz.svg import standalone

IMAGES = Path(__file__).with_name("images")
PROMPT = "Write a Python function that checks whether a string is a palindrome."
STEP = 1  # the second: the first draft, the second pass and a copy have a part in it
#: (file, caption, deepest column, nodes, least width)
PICTURES = (
    ("tree.svg", "Step {} of {}: {} tokens in one pass of the target (part of a tree of {} rows)", 8, 36, 760),
    ("tree-narrow.svg", "Step {} of {}: part of its tree", 3, 14, 0),
)


def record(bundle: Path) -> Recording:
    """The answer to the prompt under `hybrid`, greedy."""
    loaded = load_bundle(bundle, device="cpu")
    engine = make_engine(loaded, policy="hybrid", device="cpu", max_batch=1)
    engine.record_trace = True
    engine.submit(chat_request(loaded, PROMPT, SamplingParams(temperature=0.0), 120))
    decode = loaded.tokenizer.decode
    recording = Recording(PROMPT, decode, TextStream(partial(decode, skip_special_tokens=True)))
    while engine.busy:
        for output in engine.step():
            assert engine.trace is not None
            recording.add(engine.trace, output)
    return recording


def excerpt(step: Step, depth: int, size: int) -> Step:
    """The accepted path and the nodes on the likeliest paths, as far as a column."""
    shares: list[float] = []
    for node in step.nodes:
        above = shares[node.parent] if node.parent >= 0 else 1.0
        shares.append(above * node.probability)
    ranked = sorted(range(len(shares)), key=lambda i: (not step.nodes[i].accepted, i != step.miss, -shares[i]))
    kept = sorted([i for i in ranked if step.nodes[i].depth <= depth][:size])
    index = {-1: -1} | {number: place for place, number in enumerate(kept)}
    nodes = [replace(step.nodes[i], parent=index[step.nodes[i].parent]) for i in kept]
    return replace(step, nodes=tuple(nodes))


def main() -> None:
    turns = record(Path(sys.argv[1])).turns
    step = turns[STEP].step
    for name, caption, depth, lines, least in PICTURES:
        title = caption.format(STEP + 1, len(turns), len(step.gained), step.rows)
        picture = standalone(excerpt(step, depth, lines), title, least)
        picture = re.sub("<desc>.*?</desc>", "", picture, flags=re.DOTALL)  # it would be of the excerpt
        (IMAGES / name).write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
