"""The pictures: what they say of a step, where they put it, and that nothing a model writes can break them."""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import count
from pathlib import Path

import pytest
import torch
from click.testing import Result
from rich.cells import cell_len

from d2sd.plugins.trees import Branches, Draft, accept, from_candidates, from_chain
from d2sd.runtime.decode import StepTrace
from d2sd.runtime.request import Request
from d2sd.runtime.sequence import Output, Sequence
from d2sd.runtime.speculation.policy import D2SD as D2SDPolicy
from d2sd.runtime.speculation.policy import DDTree, Lookup, Off
from d2sd.runtime.text import TextStream
from d2sd.viz.layout import BOX, arrange
from d2sd.viz.nodes import DRAFTED, Node, Source, Step, read_step, token_text
from d2sd.viz.page import page
from d2sd.viz.record import Recording
from d2sd.viz.svg import inline, key, standalone
from d2sd.viz.text import asset, cut, text_markup, token_markup, visible
from d2sd.viz.words import mix, shade, story
from tests.commands import passed, run_cli
from tests.tiny import random_tree

HOSTILE = [
    "<script>alert(1)</script>",
    "]]>",
    "&amp;",
    "\"'>",
    "</svg>",
    "</a></div>",
    "<!--",
    "\x00\x1b\x7f",
    "\ud800",
    "\ufffe",
    "\u202e",
    "e\u0301",
    "\u0301",
    "日本語",
    "🙂",
    " \n\t\r",
    "",
    "x" * 300,
]
OFF, LOOKUP, DDTREE, D2SD = Off(1), Lookup(4), DDTree(16), D2SDPolicy(16, 1)
SVG = "{http://www.w3.org/2000/svg}"


def word(token: int) -> str:
    return f"t{token}"


def merged_trace(candidates: list[list[int]], choice: Callable[[int], int], *, second: bool = True) -> StepTrace:
    """One request: candidates with the anchor in front, each token of probability ½; `choice` is the target's token
    behind a token. The batch has a second row that would be found out: its tokens are 900 and more.
    """
    tokens = torch.tensor([candidates, [[900 + slot for slot in range(len(row))] for row in candidates]])
    score = math.log(0.5) * torch.arange(tokens.shape[2]).expand(tokens.shape)
    tree = from_candidates(tokens, score.clone(), 16)
    chosen = torch.tensor([[choice(token) for token in row] for row in tree.tokens.tolist()])
    first = Draft(tokens[:, 0, 1:, None], score[:, 0, 1:, None])
    branches = Branches(tokens[:, 1:, 1:], torch.zeros(2, 1), torch.zeros(2, 1)) if second else None
    sequences = (Sequence(0, Request((1,)), [1]), Sequence(1, Request((1,)), [1]))
    return StepTrace(
        sequences, D2SD if second else DDTREE, first, branches, tree, accept(tree, chosen, tokens.shape[2])
    )


def rescued() -> Step:
    """The first draft says 1 2 3, a branch 1 4 5, the target 1 4 5 9."""
    says = {0: 1, 1: 4, 4: 5, 5: 9}
    return read_step(merged_trace([[0, 1, 2, 3], [0, 1, 4, 5]], lambda t: says.get(t, 8)), 0, word)


def random_step(size: int, seed: int, texts: list[str]) -> Step:
    """A tree of any shape with a path accepted down to a leaf or less far."""
    parents = random_tree(size, seed)
    depths, nodes = [0] * size, []
    accepted = {0, next((i for i in range(1, size) if parents[i] == 0), 0)}
    for i, parent in enumerate(parents):
        depths[i] = depths[parent] + 1 if i else 0
        source: Source = "anchor" if i == 0 else ("first", "second", "copy")[i % 3]
        share = ((i * 7919 + seed) % 101) / 100
        nodes.append(Node(texts[i % len(texts)], parent, depths[i], source, i % 3, share, i in accepted, i < 2))
    last = max(accepted)
    nodes.append(Node(texts[-1], last, depths[last] + 1, "bonus", 0, 1.0, True, False))
    return Step(tuple(nodes), ("a", "b"), 0, size)


# -- what is read from a step ------------------------------------------------------------------------------------------


def test_a_step_is_read_as_it_happened() -> None:
    step = rescued()
    assert [(n.text, n.parent, n.depth, n.source, n.accepted) for n in step.nodes] == [
        ("t0", -1, 0, "anchor", True),
        ("t1", 0, 1, "first", True),
        ("t2", 1, 2, "first", False),
        ("t3", 2, 3, "first", False),
        ("t4", 1, 2, "second", True),
        ("t5", 4, 3, "second", True),
        ("t9", 5, 4, "bonus", True),
    ]
    assert [n.probability for n in step.nodes[1:-1]] == pytest.approx([0.5] * 5)
    assert [n.chain for n in step.nodes] == [True, True, True, True, False, False, False]
    assert step.draft == ("t1", "t2", "t3")
    assert [n.text for n in step.gained] == ["t1", "t4", "t5", "t9"]
    assert (step.right, step.saved, step.saver, step.miss, step.rows) == (1, 2, "second", 2, 16)
    assert story(step) == (
        "The first draft was right for 1 of its 3 tokens; a branch of the second pass was right for 2 more. "
        "The target added “t9”."
    )


def test_another_row_of_the_batch_is_another_request() -> None:
    step = read_step(merged_trace([[0, 1, 2, 3], [0, 1, 4, 5]], lambda t: t + 1), 1, word)
    assert [n.text for n in step.gained] == ["t901", "t902", "t903", "t904"]
    assert (step.right, step.saved, step.miss) == (3, 0, None)
    assert story(step) == "The first draft was right to its end. The target added “t904”."


def test_what_is_behind_the_end_of_the_answer_is_not_there() -> None:
    """1 4 are accepted and 4 ends the answer; then 1 does, to which the first draft was right."""
    says = {0: 1, 1: 4, 4: 5, 5: 9}
    trace = merged_trace([[0, 1, 2, 3], [0, 1, 4, 5]], lambda t: says.get(t, 8))
    step = read_step(trace, 0, word, 2)
    assert [n.text for n in step.nodes] == ["t0", "t1", "t2", "t3", "t4"]
    assert [n.text for n in step.gained] == [n.text for n in step.accepted] == ["t1", "t4"]
    assert (step.bonus, step.right, step.saved, step.draft) == (None, 1, 1, ("t1", "t2", "t3"))
    assert story(step).endswith("; a branch of the second pass was right for 1 more. The answer ends with “t4”.")
    assert "Accepted: 't1', 't4'. The answer ends with it." in html.unescape(inline(step, ""))
    step = read_step(trace, 0, word, 1)
    assert [n.text for n in step.nodes] == ["t0", "t1"]
    assert (step.right, step.saved, step.draft, step.miss) == (1, 0, ("t1",), None)
    assert story(step) == "The first draft was right to its end. The answer ends with “t1”."
    assert read_step(trace, 0, word, 4) == rescued(), "the bonus token ends the answer"


def test_shares_of_policies() -> None:
    assert mix(["d2sd", "d2sd"]) == "d2sd"
    assert mix(["off", "ddtree", "ddtree", "ddtree"]) == "ddtree 75%, off 25%"


def test_a_step_that_another_guess_saved_is_not_the_second_pass_s() -> None:
    trace = merged_trace([[0, 1, 2, 3], [0, 1, 4, 5]], lambda t: {0: 1, 1: 4, 4: 6}.get(t, 8), second=False)
    step = read_step(trace, 0, word)
    picture = standalone(step, "")
    assert 'class="halo by-first"' in picture
    assert "another guess saved the step here" in picture
    assert "second" not in picture.partition("</style>")[2]
    assert "the second pass saved the step here" in standalone(rescued(), "")
    assert {n.source for n in step.nodes} == {"anchor", "first", "bonus"}
    assert (step.right, step.saved, step.saver) == (1, 1, "first")
    assert "another guess of the first draft was right for 1 more" in story(step)


def test_a_lookup_ends_where_it_found_nothing_more() -> None:
    score = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    tree = from_chain(torch.tensor([[5, 6, 0, 0]]), score)
    first = Draft(torch.tensor([[[6], [0], [0]]]), score[:, 1:, None])
    done = accept(tree, torch.tensor([[7, 0, 0, 0]]), 4)
    step = read_step(StepTrace((), LOOKUP, first, None, tree, done), 0, word)
    assert [n.text for n in step.nodes] == ["t5", "t6", "t7"]
    assert (step.draft, step.right) == (("t6",), 0)
    assert [n.source for n in step.nodes] == ["anchor", "copy", "bonus"]
    assert story(step) == "The copy of earlier text was wrong at once. The target added “t7”."
    assert "first wrong token of the copy" in key([step])
    assert "first draft" not in standalone(step, "")


@pytest.mark.parametrize(
    ("sources", "right", "saver", "told"),
    [
        (["copy", "copy"], 2, None, "was right to its end; a copy of earlier text (dashed) agreed on 2."),
        (
            ["second", "copy"],
            2,
            None,
            "; the second pass (violet) agreed on 1; a copy of earlier text (dashed) agreed on 1.",
        ),
        (["first", "copy"], 1, "copy", "was right for 1 of its 2 tokens; a copy of earlier text was right for 1 more."),
        (["second", "first"], 0, "second", "was wrong at once; a branch of the second pass was right for 2 more."),
    ],
)
def test_a_story_names_who_is_drawn(sources: list[Source], right: int, saver: str | None, told: str) -> None:
    """A token that the first draft shares with the second pass or a copy is drawn as theirs, which its story says."""
    drafts = [Node(f"t{i}", i, i + 1, source, 0, 0.5, True, i < right) for i, source in enumerate(sources)]
    nodes = (Node("r", -1, 0, "anchor", 0, 1.0, True, True), *drafts, Node("e", 2, 3, "bonus", 0, 1.0, True, False))
    step = Step(nodes, ("t0", "t1" if right == 2 else "t9"), right, 8)
    assert step.saver == saver
    assert told in story(step)
    assert shade(step) == (f" saved by-{saver}" if saver else "")
    picture = inline(step, "")
    assert picture.count("halo") == (saver is not None) == picture.count(f"halo by-{saver}")
    assert f"of {len(sources)} drafted tokens" in picture


def test_plain_decoding_is_an_anchor_and_a_bonus() -> None:
    tree = from_chain(torch.tensor([[5]]), torch.zeros(1, 1))
    step = read_step(StepTrace((), OFF, None, None, tree, accept(tree, torch.tensor([[7]]), 1)), 0, word)
    assert [(n.text, n.source) for n in step.nodes] == [("t5", "anchor"), ("t7", "bonus")]
    assert (step.draft, step.right, step.saved, step.miss, shade(step)) == ((), 0, 0, None, " plain")
    assert story(replace(step, end=True)) == "Nothing was drafted: the target ended the answer."
    assert "+1" in "".join(ET.fromstring(inline(step, "")).itertext())


def test_a_token_keeps_the_blank_that_a_tokenizer_drops_in_front() -> None:
    show = token_text(lambda ids: "".join(" w" if i else "\ufffd" for i in ids).lstrip())
    assert show(1) == " w"
    assert show(0) == "\ufffd"
    assert token_text(lambda ids: "")(3) == ""


# -- text --------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_seen_becomes_a_sign() -> None:
    assert visible(" a\n\tb\r") == "·a⏎⇥b␍"
    assert visible("\x1b\ud800\u202e\xa0") == "␛‹D800›‹202E›‹A0›"
    assert visible("\u0301") == "◌\u0301"
    assert visible("") == "∅"
    assert text_markup("a\n <b>\x00\u202e") == "a\n &lt;b&gt;␀‹202E›"
    assert token_markup("<" * 20, 4) == "&lt;&lt;&lt;…"
    assert (cell_len("日本"), cell_len("e\u0301"), cut("日本語", 5), cut("abc", 3)) == (4, 1, "日本…", "abc")


def test_every_character_is_fit_for_xml() -> None:
    everything = "".join(map(chr, range(0x30000)))
    for shown in (token_markup(everything), text_markup(everything)):
        ET.fromstring(f"<a>{shown}</a>".encode())


# -- trees -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_boxes_lie_apart_and_inside(seed: int) -> None:
    step = random_step(64, seed, ["a", " word", "日本語", "x" * 40])
    layout = arrange(step)
    places = list(zip(layout.boxes, step.nodes, strict=True))
    for box, node in places:
        assert box.x >= 8
        assert box.x + box.width <= layout.width - 8
        assert 16 <= box.y <= layout.height - BOX - 8
        assert box.width >= min(cell_len(visible(node.text)), 16) * 7.2 + 16 + 28 * (node.source in DRAFTED)
        if node.parent >= 0:
            parent = layout.boxes[node.parent]
            assert box.x >= parent.x + parent.width + 20, "no room for the edge"
    for i, (box, node) in enumerate(places):
        for other, another in places[:i]:
            if node.depth == another.depth:
                assert box.x == other.x
                assert abs(box.y - other.y) >= BOX + 4
            elif box.y == other.y:
                assert box.x + box.width < other.x or other.x + other.width < box.x


@pytest.mark.parametrize("seed", range(12))
def test_edges_do_not_cross(seed: int) -> None:
    """Each subtree has lines of its own, and a parent stands on the first of them."""
    step = random_step(64, seed, ["a"])
    tops = [box.y for box in arrange(step).boxes]
    spans = [[top] for top in tops]
    for i in range(len(tops) - 1, 0, -1):
        spans[step.nodes[i].parent] += spans[i]
    for i, node in enumerate(step.nodes):
        assert min(spans[i]) == tops[i]
        for j, other in enumerate(step.nodes[:i]):
            if node.depth == other.depth:
                assert max(spans[i]) < min(spans[j]) or max(spans[j]) < min(spans[i])


def test_the_best_chain_is_the_straight_line_and_others_follow_by_probability() -> None:
    nodes = [Node("r", -1, 0, "anchor", 0, 1.0, True, True)]
    for text, share, on_chain in (("low", 0.1, False), ("high", 0.6, False), ("chain", 0.3, True)):
        nodes.append(Node(text, 0, 1, "first", 0, share, on_chain, on_chain))
    nodes.append(Node("end", 3, 2, "first", 0, 0.9, False, True))
    nodes.append(Node("bonus", 3, 2, "bonus", 0, 1.0, True, False))
    step = Step(tuple(nodes), ("chain", "end"), 1, 8)
    tops = dict(zip((n.text for n in nodes), (b.y for b in arrange(step).boxes), strict=True))
    assert tops["r"] == tops["chain"] == tops["bonus"]
    assert tops["bonus"] < tops["end"] < tops["high"] < tops["low"]


def test_marks_say_who_drafted_and_what_became_of_it() -> None:
    root = ET.fromstring(standalone(rescued(), "Step 1 of 2").encode())
    groups = {g.findtext(f"{SVG}text"): g for g in root.iter(f"{SVG}g") if g.find(f"{SVG}title") is not None}
    assert {text: g.get("class") for text, g in groups.items()} == {
        "t0": "anchor",
        "t1": "first yes",
        "t2": "first miss",
        "t3": "first",
        "t4": "second yes",
        "t5": "second yes",
        "t9": "bonus",
    }
    told = groups["t4"].findtext(f"{SVG}title")
    assert told == "'t4'\nbranch 1 of the second pass, accepted\nprobability given its parent: 50.0%"
    assert [text.text for text in groups["t4"].iter(f"{SVG}text")] == ["t4", "50%"]
    edges = [p.get("class", "") for p in root.iter(f"{SVG}path")]
    assert edges == [f"edge {kind}" for kind in ("first", "first", "first yes", "second yes", "second yes", "bonus")]
    (halo,) = (r for r in root.iter(f"{SVG}rect") if r.get("class") == "halo by-second")
    box = groups["t4"].find(f"{SVG}rect")
    assert box is not None
    assert [float(halo.get(at, "")) + 5 for at in "xy"] == [float(box.get(at, "")) for at in "xy"], (
        "not behind its node"
    )
    assert root.findtext(f"{SVG}title") == "Step 1 of 2"
    assert root.findtext(f"{SVG}desc") == (
        "A tree of 5 drafted tokens after the anchor 't0'. Accepted: 't1', 't4', 't5'. Bonus token: 't9'."
    )


@pytest.mark.parametrize("size", [1, 2, 64])
def test_a_picture_is_well_formed_whole_and_still(size: int) -> None:
    step = random_step(size, 3, HOSTILE)
    text = standalone(step, "<&>")
    root = ET.fromstring(text.encode())
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for rect in root.iter(f"{SVG}rect"):
        left, top = float(rect.get("x", "")), float(rect.get("y", ""))
        assert left >= 0 <= top
        assert left + float(rect.get("width", "")) <= width
        assert top + float(rect.get("height", "")) <= height
    assert not list(root.iter(f"{SVG}script"))
    assert text == standalone(random_step(size, 3, HOSTILE), "<&>")


# -- the page ----------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Collects what a page holds, and fails where tags are not balanced."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}  # by class, or by name where an element has none
        self._open: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append((tag, dict(attrs).get("class") or tag))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for name in {name for _, name in self._open}:
            self.texts[name] = self.texts.get(name, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def recording(prompt: str, tokens: list[str]) -> Recording:
    """An answer of one rescued step, t1 t4 t5 t9, and a last one; both say what `tokens` say in turn."""
    texts = dict(zip((1, 4, 5, 9), tokens, strict=False))

    def decode(ids: list[int]) -> str:
        return "".join(texts.get(i, word(i)) for i in ids)

    says = {0: 1, 1: 4, 4: 5, 5: 9}
    trace = merged_trace([[0, 1, 2, 3], [0, 1, 4, 5]], lambda t: says.get(t, 8))
    made = Recording(prompt, decode, TextStream(decode))
    owner = trace.sequences[0]
    owner.stats.record(4, 1, 16, "d2sd")
    made.add(trace, Output(owner, (1, 4, 5, 9), decode([1, 4, 5, 9]), None))
    owner.stats.record(4, 1, 16, "d2sd")  # two of them behind the end: τ counts them, in every table and picture
    made.add(trace, Output(owner, (1, 4), decode([1]), "stop"))  # a stop string ended the answer behind its token
    return made


def test_the_page_tells_the_answer_and_its_steps() -> None:
    read = Reader(page([recording("Why?", ["Be", "cause", " it", " is"])]))
    assert read.texts["prompt"] == "Why?"
    assert read.texts["answer"] == "Because it isBe"
    assert re.fullmatch(
        r"d2sdpolicy6tokens2steps4.00tokens a step, τ[\d.]+tokens a second100%steps rescued16rows a step",
        read.texts["figures"].strip(),
    )
    spans = [a.get("class") for a in read.all("span") if a.get("class") in ("first", "second", "bonus")]
    assert spans == ["first", "second", "second", "bonus", "first", "second"]
    assert [a.get("class") for a in read.all("i")][:4] == ["first", "second", "second", "bonus"]
    assert [d["class"] for d in read.all("details")] == ["step saved by-second"] * 2
    assert "The answer ends with “cause”." in read.texts["p"]
    assert [i.get("class") for i in read.all("i")][4:6] == ["first", "second"], "a bar of what is behind the end"
    assert read.texts["by-second"] == "Violet shade"
    assert "mark" not in read.texts, "a shade that no step has"
    assert read.texts["badge"] == "a branch of the second pass saved 2a branch of the second pass saved 1"
    fates = [td.get("class") for td in read.all("td")][:9]
    assert fates == [None, "right", "wrong", "moot", "first", "second", "second", "bonus", None]


@pytest.mark.parametrize("kept", [3, 4])
def test_the_token_that_ends_an_answer_is_counted_and_marked(kept: int) -> None:
    """The last token is a draft or the target's own, and has no text."""
    says = {0: 1, 1: 4, 4: 5, 5: 9}
    trace = merged_trace([[0, 1, 2, 3], [0, 1, 4, 5]], lambda t: says.get(t, 8))
    owner, last = trace.sequences[0], (1, 4, 5, 9)[kept - 1]
    owner.request = Request((1,), stop_tokens=frozenset({last}))
    made = Recording("", lambda ids: "".join(map(word, ids)), TextStream(lambda ids: "t" * len([*ids][: kept - 1])))
    made.add(trace, Output(owner, (1, 4, 5, 9)[:kept], "t" * (kept - 1), "stop"))
    read = Reader(page([made]))
    source = {3: "second", 4: "bonus"}[kept]
    (last_span,) = (a for a in read.all("span") if (a.get("class") or "").endswith(" end"))
    assert last_span["class"] == f"{source} end"
    assert "∎" in read.texts["hint"]
    assert f"{kept}tokens1steps" in read.texts["figures"]
    told = {3: "The last accepted token ends the answer.", 4: "The target ended the answer."}[kept]
    assert read.texts["p"].count(told) == 1


@pytest.mark.parametrize("source", ["first", "second", "copy", "bonus"])
def test_a_source_looks_the_same_wherever_a_token_is_shown(source: str) -> None:
    """In the answer, in a bar, in a step's tokens, in its table and in its tree; the first draft has no underline."""
    web, tree = asset("page.css"), asset("tree.css")
    shown = [f"i.{source} {{", f"td.{source} {{", *([f".turn .{source},", f"code.{source} {{"] * (source != "first"))]
    assert [rule for rule in shown if rule not in web] == []
    if source in ("second", "copy"):
        assert f".tree .{source} rect.box" in tree
        assert f".tree .yes.{source} rect.box" in tree, "an accepted one has the border of another source"


def test_the_first_steps_and_the_rescued_ones_are_open() -> None:
    made = recording("", ["a"] * 4)
    plain = read_step(merged_trace([[0, 1, 2, 3], [0, 1, 4, 5]], lambda t: 7), 0, word)
    turn = type(made.turns[0])(plain, ("x",), "d2sd", 1.0)
    made.turns = [turn] * 5 + [made.turns[0]] + [turn]
    steps = Reader(page([made])).all("details")
    assert ["open" in step for step in steps] == [True] * 3 + [False, False, True, False]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_that_was_written_becomes_markup(hostile: str) -> None:
    tame = Reader(page([recording("a", ["a"] * 4)]))
    text = page([recording(hostile, [hostile] * 4)])
    text.encode()  # no lone surrogate is left
    read = Reader(text)
    assert [tag for tag, _ in read.tags] == [tag for tag, _ in tame.tags]
    assert read.texts.get("prompt", "") == html.unescape(text_markup(hostile))


def test_the_page_needs_nothing_and_runs_nothing_else() -> None:
    text = page([recording("<script>a</script>", ["a"] * 4), recording("b", ["b"] * 4)])
    read = Reader(text)
    assert text.replace("http://www.w3.org/2000/svg", "").count("://") == 0
    assert not {"link", "img", "iframe", "use", "image"} & {tag for tag, _ in read.tags}
    assert not [a for _, attributes in read.tags for a in attributes if a == "src" or a.startswith("on")]
    ids = [a["id"] for _, a in read.tags if "id" in a]
    assert len(ids) == len(set(ids)) == 2 + 4
    links = {str(a["href"]) for a in read.all("a")}
    assert links == {f"#a{article}s{step}" for article in (1, 2) for step in (1, 2)}
    assert {link[1:] for link in links} <= set(ids)
    (security,) = (str(m["content"]) for m in read.all("meta") if "http-equiv" in m)
    digest = base64.b64encode(hashlib.sha256(read.texts["script"].encode()).digest()).decode()
    assert security == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_pictures_need_no_torch() -> None:
    program = "import sys, d2sd.viz.page, d2sd.io; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


# -- the command -------------------------------------------------------------------------------------------------------


def run(bundle: Path, *arguments: object) -> Result:
    return run_cli("generate", bundle, "--raw", "--max-new-tokens", 12, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["off", "chain", "d2sd"])
def test_generate_draws_what_it_wrote(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    files = [tmp_path / name for name in ("a.svg", "a.html", "b.svg", "b.html")]
    plain = run(built, "-p", "w1 w5 w9", "--policy", policy)
    for svg, web in (files[:2], files[2:]):
        monkeypatch.setattr("d2sd.viz.record.perf_counter", count().__next__)
        result = passed(run(built, "-p", "w1 w5 w9", "--policy", policy, "--tree-svg", svg, "--html", web))
        assert result.stdout == plain.stdout
    assert [f.read_bytes() for f in files[:2]] == [f.read_bytes() for f in files[2:]]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    read = Reader(files[1].read_text("utf-8"))
    assert read.texts["prompt"] == "w1 w5 w9"
    assert read.texts["answer"] == plain.stdout.removesuffix("\n")
    assert read.texts["figures"].strip().startswith(f"{policy}policy12tokens")
    tau = 12 / len(read.all("details"))
    assert f"{tau:.2f}tokens a step, τ{tau:.1f}tokens a second" in read.texts["figures"], "a step takes a second here"
    caption = ET.parse(files[0]).findtext(f"{SVG}title") or ""
    most = max(int(str(link["title"]).split(": ")[1].split()[0]) for link in read.all("a"))
    assert f": {most} token" in caption


def test_a_stop_string_is_no_part_of_the_answer(built: Path, tmp_path: Path) -> None:
    sampled = ("-p", "w1 w5 w9", "--temperature", 1, "--seed", 3)  # greedy, the tiny model repeats itself
    whole = run(built, *sampled).stdout
    stop = " ".join(whole.split()[3:5])
    expected = whole[: whole.index(stop)]
    assert len(expected) > 3
    stopped = run(built, *sampled, "--stop", stop, "--html", tmp_path / "a.html")
    assert stopped.stdout == expected + "\n"
    assert Reader((tmp_path / "a.html").read_text("utf-8")).texts["answer"] == expected


@pytest.mark.slow
def test_several_prompts_have_a_section_each(built: Path, tmp_path: Path) -> None:
    result = run(built, "-p", "w1 w2", "-p", "w7", "--html", tmp_path / "a.html")
    read = Reader((tmp_path / "a.html").read_text("utf-8"))
    assert [a["id"] for a in read.all("article")] == ["a1", "a2"]
    assert read.texts["prompt"] == "w1 w2w7"
    alone = [run(built, "-p", prompt).stdout.removesuffix("\n") for prompt in ("w1 w2", "w7")]
    assert read.texts["answer"] == "".join(alone)
    passed(result)


@pytest.mark.parametrize("option", ["--tree-svg", "--html"])
def test_an_unwritable_path_is_refused_before_the_run(built: Path, tmp_path: Path, option: str) -> None:
    for path, told in ((tmp_path / "none" / "a", "No such file or directory"), (tmp_path, "Is a directory")):
        result = run(built, "-p", "w1", option, path)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr == f"error: {told}\n  where: {path}\n"
    assert list(tmp_path.iterdir()) == []
