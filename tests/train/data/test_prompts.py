"""The plan of prompts, and the turns that the target writes: one set, whatever the interruptions and the processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from d2sd.errors import D2SDError
from d2sd.train.data.decontaminate import PromptFilter
from d2sd.train.data.jsonl import append_row, append_to, own_file
from d2sd.train.data.prompts import KIND, Job, Turn, plan_prompts, take_turns
from d2sd.train_recipe import Data, SelfWritten

FILE = [(f"p{i}", f"turn {i}") for i in range(30)]
OTHER = [(f"q{i}", f"turn {i}") for i in range(30)]
OWN = SelfWritten(name="own", count=10, openings=["Write", ""])


def data(**keys: object) -> Data:
    return Data.model_validate({"prompts": []} | keys)


def test_a_plan_is_a_shuffle() -> None:
    jobs = plan_prompts([(FILE, 20), (FILE[:0], None)], data(self_written=[OWN]))
    assert jobs == plan_prompts([(FILE, 20), ([], None)], data(self_written=[OWN]))
    written = [job for job in jobs if job.kind is None]
    assert len({job.id for job in written}) == 20
    assert {(job.id, job.text) for job in written} <= set(FILE)
    assert {job.id for job in written} != {name for name, _ in FILE[:20]}, "they are drawn"
    openings = [job for job in jobs if job.kind is not None]
    assert sorted(job.id for job in openings) == sorted(f"self/own/{i}" for i in range(10))
    assert {job.text for job in openings} == {"Write", ""}
    assert any(job.kind is not None for job in jobs[:15]), "kinds are mixed"


def test_more_prompts_leave_those_already_planned_as_they_were() -> None:
    """An interrupted run whose counts are raised asks for what is missing, and for nothing a second time."""
    before = plan_prompts([(FILE, 10)], data(self_written=[OWN]))
    more = data(self_written=[OWN.model_copy(update={"count": 25})])
    after = plan_prompts([(OTHER, 7), (list(reversed(FILE)), 20)], more)
    assert len(after) == 7 + 20 + 25
    known = {job.id for job in before}
    assert [(job.id, job.text) for job in after if job.id in known] == [(job.id, job.text) for job in before]


def test_counts_and_shared_ids() -> None:
    """No count means all prompts, and too large a count too; an id that two share is refused."""
    assert len(plan_prompts([(FILE, None)], data())) == 30
    assert len(plan_prompts([(FILE, 99)], data())) == 30
    with pytest.raises(D2SDError, match=r"same id(.|\n)*p0"):
        plan_prompts([(FILE, None), (FILE[:1], None)], data())


# --- Turns -----------------------------------------------------------------------------------------------------------

PLAN = [Job("a", "How", OWN), Job("p", "Whole."), Job("b", "", OWN)]


def write(folder: Path, rank: int, *turns: Turn) -> None:
    with append_to(own_file(folder, KIND, rank)) as out:
        for turn in turns:
            append_row(out, turn.model_dump(exclude_none=True))


def test_openings_become_turns_in_the_order_of_the_plan(tmp_path: Path) -> None:
    assert take_turns(PLAN, tmp_path) == (PLAN, {})
    write(tmp_path, 1, Turn(id="b", text="Lo,\nbehold: “ü”"))
    assert take_turns(PLAN, tmp_path)[0] == [*PLAN[:2], Job("b", "Lo,\nbehold: “ü”")]
    write(tmp_path, 0, Turn(id="a", dropped="unfinished"), Turn(id="stranger", text="of another plan"))
    assert take_turns(PLAN, tmp_path) == ([PLAN[1], Job("b", "Lo,\nbehold: “ü”")], {"a": "unfinished"})


def test_a_cut_turn_is_written_again(tmp_path: Path) -> None:
    write(tmp_path, 0, Turn(id="b", text="One."), Turn(id="a", text="How now?"))
    path = tmp_path / "turns.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    assert [job.id for job in take_turns(PLAN, tmp_path)[0] if job.kind is not None] == ["a"]
    write(tmp_path, 0, Turn(id="a", text="How now?"))
    assert [job.text for job in take_turns(PLAN, tmp_path)[0]] == ["How now?", "Whole.", "One."]


def test_a_turn_behind_another_opening_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, Turn(id="b", text="One."), Turn(id="a", text="Why now?"))
    with pytest.raises(D2SDError, match=r"another opening\n  where: .*turns\.jsonl:2\n  found: Why now\?\n(.|\n)*How"):
        take_turns(PLAN, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '"dropped"',
        '{"id": "a"}',
        '{"id": 1, "text": "How"}',
        '{"id": "a", "text": null}',
        '{"id": "a", "dropped": 1}',
        '{"text": "How"}',
    ],
)
def test_a_line_that_is_no_turn_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path, 2, Turn(id="b", text="One."))
    with (tmp_path / "turns-2.jsonl").open("a") as out:
        out.write(line + "\n")
    with pytest.raises(
        D2SDError, match=r"not one of the turns\n(  also: .*\n)*  where: .*turns-2\.jsonl:2(: [\w.]+)?\n"
    ):
        take_turns(PLAN, tmp_path)


def test_prompts_kept_do_not_depend_on_the_order_of_the_turns_or_their_writer(tmp_path: Path) -> None:
    """The near-duplicate earlier in the plan stays, not the one written first."""
    own = SelfWritten(name="own", count=40, openings=["Tell me at length about"])
    plan = plan_prompts([(FILE, None)], data(self_written=[own]))
    says = {f"self/own/{i}": f"Tell me at length about the number {i // 2} and the moon" for i in range(40)}
    results = []
    for name, ranks, step in (("one", 1, 1), ("three", 3, -1)):
        folder = tmp_path / name
        folder.mkdir()
        for number, (key, said) in enumerate(list(says.items())[::step]):
            write(folder, number % ranks, Turn(id=key, text=said))
        jobs, _ = take_turns(plan, folder)
        results.append(PromptFilter([]).judge(jobs))
    assert results[0] == results[1]
    kept, dropped = results[0]
    assert sum(reason == "nearly the same as another" for reason in dropped.values()) == 20
    place = {job.id: index for index, job in enumerate(plan)}
    for i in range(0, 40, 2):
        first = min(f"self/own/{i}", f"self/own/{i + 1}", key=place.__getitem__)
        assert first in {job.id for job in kept}
