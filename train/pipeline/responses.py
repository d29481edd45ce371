"""The first stages of `d2sd train`: turns that the target writes itself, screening, and its answers to what is left.

Every process of a training runs its share in flight and appends to files of its own. What is asked depends on what is
on disk, so all read before anyone writes.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from d2sd.convert.bundle.load import Bundle
from d2sd.convert.bundle.serving import chat_request, make_engine
from d2sd.errors import D2SDError
from d2sd.io import write_json
from d2sd.progress import Progress
from d2sd.prompts import read_prompts, read_turns
from d2sd.runtime.request import Request, SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.train.data import prompts
from d2sd.train.data import responses as answers
from d2sd.train.data.decontaminate import Screen
from d2sd.train.data.jsonl import append_to, own_file
from d2sd.train.data.prompts import Job, Turn, append_turn, plan_prompts, take_turns
from d2sd.train.data.responses import Answer, answers_to, append_answer, finished_ids, read_answers
from d2sd.train.dist import Dist
from d2sd.train.pipeline.log import paced
from d2sd.train_recipe import TrainRecipe

#: Writes what became of a request.
Keep = Callable[[TextIO, str, Sequence], None]
#: Stands for the user's turn, to see what the chat template puts before it.
_SPLIT = "\x00"
#: What decides a turn or an answer beside its prompt.
ASKED = "asked.json"
#: How many prompts were planned, how many asked, and why the others were not.
SCREENED = "screened.json"


def planned_jobs(recipe: TrainRecipe) -> list[Job]:
    """Everything that is to be asked, before screening. Raises D2SDError."""
    files = [(read_prompts(recipe.path(source.path)), source.count) for source in recipe.data.prompts]
    return plan_prompts(files, recipe.data)


@dataclass(frozen=True, slots=True)
class Answering:
    """The target answers what the recipe asks."""

    recipe: TrainRecipe
    bundle: Bundle
    work: Path
    dist: Dist
    progress: Progress

    def all(self) -> list[Answer]:
        """Answers to every prompt that stays, in the order of the plan. Tells how many prompts were left out, and why.

        An engine may repack the weights that it runs: afterwards the bundle's target serves, and does nothing else.
        """
        data = self.recipe.data
        self._pin()
        excluded = [turn for path in data.exclude for _, turns in read_turns(self.recipe.path(path)) for turn in turns]
        jobs = planned_jobs(self.recipe)
        planned = len(jobs)
        self._write_turns([job for job in take_turns(jobs, self.work)[0] if job.kind is not None])
        jobs, unwritten = take_turns(jobs, self.work)
        jobs, screened = Screen(excluded, self._markers()).judge(jobs)
        requests = self._requests(jobs)
        done = finished_ids(self.work)

        def keep(out: TextIO, name: str, sequence: Sequence) -> None:
            append_answer(out, name, sequence.request.prompt, sequence.answer)

        self._ask(answers.KIND, {name: request for name, request in requests.items() if name not in done}, keep)
        if self.dist.is_main:
            reasons = Counter([*unwritten.values(), *screened.values()])
            reasons.update(["longer than data.max_prompt_tokens"] * (len(jobs) - len(requests)))
            reasons.update(reason for name, reason in finished_ids(self.work).items() if reason and name in requests)
            for reason, count in reasons.most_common():
                click.echo(f"prompts left out: {count:,} ({reason})")
            write_json(self.work / SCREENED, {"planned": planned, "asked": len(requests), "left out": dict(reasons)})
        found = read_answers(
            self.work, vocab_size=self.bundle.target.config.vocab_size,
            max_tokens=data.max_prompt_tokens + data.max_new_tokens,
        )  # fmt: skip
        return answers_to({name: request.prompt for name, request in requests.items()}, found)

    def _pin(self) -> None:
        """Raise D2SDError if what is on disk was asked otherwise than the recipe says now."""
        data, path = self.recipe.data, self.work / ASKED
        limits = ("max_tokens", "temperature", "end")
        now: dict[str, Any] = {"max_new_tokens": data.max_new_tokens} | {
            f"self_written.{kind.name}.{key}": getattr(kind, key) for kind in data.self_written for key in limits
        }
        then = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if changed := [key for key in now if key in then and then[key] != now[key]]:
            raise D2SDError(
                "how the target is asked changed since this training began",
                where=path, found={key: now[key] for key in changed}, expected={key: then[key] for key in changed},
                fix="restore the recipe's data, or train into another --work folder",
            )  # fmt: skip
        self.dist.barrier()
        if self.dist.is_main:
            write_json(path, then | now)

    def _write_turns(self, jobs: list[Job]) -> None:
        by_name = {job.id: job for job in jobs}

        def keep(out: TextIO, name: str, sequence: Sequence) -> None:
            if sequence.finish == "stop":  # the turn came to its own end, or to the one it was told
                append_turn(out, Turn(name, by_name[name].text + self._said(sequence, by_name[name])))
            else:
                append_turn(out, Turn(name, dropped="a turn without an end"))

        self._ask(prompts.KIND, {job.id: self._opening(job) for job in jobs}, keep)

    def _ask(self, kind: str, requests: dict[str, Request], keep: Keep) -> None:
        """Run this process's share of `requests` in flight, each kept as it ends."""
        self.dist.barrier()
        mine = list(requests)[self.dist.rank :: self.dist.size]
        mine.sort(key=lambda name: len(requests[name].prompt))  # a batch is as wide as its longest
        if mine:
            engine = make_engine(self.bundle, policy="off", device=self.dist.device)
            with (
                self.progress(kind, len(mine)) as advance,
                paced(self.work, kind, self.dist.size) if self.dist.is_main else nullcontext(_ignored) as count,
                append_to(own_file(self.work, kind, self.dist.rank)) as out,
            ):
                running = {engine.submit(requests[name]).id: name for name in mine}
                while engine.busy:
                    for output in engine.step():
                        if output.finish is not None:
                            keep(out, running.pop(output.sequence.id), output.sequence)
                            advance(1)
                            count(1)
        self.dist.barrier()

    def _requests(self, jobs: list[Job]) -> dict[str, Request]:
        """What the engine is asked, by job; those with too long a prompt are left out."""
        data, found = self.recipe.data, {}
        with self.progress("prompts", len(jobs)) as advance:
            for job in jobs:
                request = chat_request(self.bundle, job.text, SamplingParams(), data.max_new_tokens)
                if len(request.prompt) <= data.max_prompt_tokens:
                    found[job.id] = request
                advance(1)
        return found

    def _opening(self, job: Job) -> Request:
        """To go on with the opening of a user's turn."""
        wanted, tokenizer = job.kind, self.bundle.tokenizer
        assert wanted is not None
        if not tokenizer.chat_template:
            raise D2SDError("the target has no chat template to write user turns in", where="data.self_written")
        turns = [{"role": "user", "content": _SPLIT}]
        template = self.bundle.recipe.target.template
        before = tokenizer.apply_chat_template(turns, tokenize=False, **template).split(_SPLIT)[0]
        ids = tokenizer(before + job.text, add_special_tokens=False).input_ids
        sampling = SamplingParams(wanted.temperature, seed=zlib.crc32(job.id.encode()))
        stops = frozenset(self.bundle.stop_token_ids)
        return Request(tuple(ids), wanted.max_tokens, sampling, stops, () if wanted.end is None else (wanted.end,))

    def _said(self, sequence: Sequence, job: Job) -> str:
        """What the target wrote behind the opening, as it stands: the screen looks for markers in it."""
        ids, stops = sequence.answer, self.bundle.stop_token_ids
        said: str = self.bundle.tokenizer.decode(ids[:-1] if ids[-1] in stops else ids)
        end = job.kind.end if job.kind else None
        return said[: said.index(end) + len(end)] if end and end in said else said

    def _markers(self) -> list[str]:
        """Texts that the tokenizer takes for a token with a meaning of its own."""
        return [token.content for token in self.bundle.tokenizer.added_tokens_decoder.values() if token.special]


def _ignored(count: int) -> None:
    """All processes go as fast as the first, which counts."""
