"""The first stages of `d2sd train`: user turns written by the target, decontamination, and the target's responses.

Every process of a training runs its share of the prompts in one engine and appends to files of its own. The remaining
prompts are determined from the files on disk, so all processes read before any of them writes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pydantic import BaseModel, Field, JsonValue, NonNegativeInt, RootModel

from d2sd.bundle.chat import render_chat
from d2sd.bundle.load import Bundle
from d2sd.bundle.requests import chat_request, make_request
from d2sd.bundle.serving import make_engine
from d2sd.errors import D2SDError
from d2sd.io import write_json
from d2sd.progress import Progress
from d2sd.prompts import read_documents, read_prompts, read_turns
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.schema import read_model
from d2sd.train.data import prompts, responses
from d2sd.train.data.decontaminate import PromptFilter
from d2sd.train.data.documents import document_turns
from d2sd.train.data.jsonl import append_row, append_to, own_file
from d2sd.train.data.prompts import Job, order, plan_prompts, take_turns
from d2sd.train.data.responses import Response, append_response, finished_ids, match_responses, read_responses
from d2sd.train.dist import Dist
from d2sd.train.pipeline.log import Say, paced
from d2sd.train_recipe import Data, TrainRecipe

Item = TypeVar("Item")
#: Appends the outcome of a finished request to the process's file.
Append = Callable[[TextIO, str, Sequence], None]
#: Placeholder for the user's turn, to find the text that the chat template puts before it.
_SPLIT = "\x00"
#: File with the settings that, together with its prompt, determine a turn or a response.
ASKED = "asked.json"
SCREENED = "screened.json"


class Screened(BaseModel):
    """`screened.json`: numbers of prompts planned, run, and dropped by reason."""

    planned: NonNegativeInt
    asked: NonNegativeInt
    left_out: dict[str, NonNegativeInt] = Field(alias="left out")


def read_screened(work: Path) -> Screened | None:
    """None if the prompts are not filtered yet. Raises D2SDError for a damaged file."""
    path = work / SCREENED
    return (
        read_model(Screened, path, error=D2SDError, what="record of filtered prompts", fix="delete it")
        if path.is_file()
        else None
    )


def planned_jobs(recipe: TrainRecipe) -> list[Job]:
    """All prompts and openings, before decontamination. Raises D2SDError."""
    files: list[tuple[list[tuple[str, str]], int | None]] = [
        (read_prompts(recipe.path(source.path)), source.count) for source in recipe.data.prompts
    ]
    documents = {kind.path: read_documents(recipe.path(kind.path)) for kind in recipe.data.documents}
    return plan_prompts([*files, (document_turns(recipe.data.documents, documents), None)], recipe.data)


#: `asked.json`: settings by name.
_Settings = RootModel[dict[str, JsonValue]]
_FIX = "restore the recipe's data, or train into another --work folder"


@dataclass(frozen=True)
class ResponseGenerator:
    """Generates the target's responses to the recipe's prompts."""

    recipe: TrainRecipe
    bundle: Bundle
    work: Path
    dist: Dist
    progress: Progress
    say: Say

    def all(self) -> list[Response]:
        """Responses to every prompt that stays, in the order of the plan. Says how many were left out, and why."""
        jobs, reasons = self._jobs()
        planned = len(jobs) + reasons.total()
        requests = self._requests(jobs)
        self._answer(dict(self._share(list(requests.items()))))
        if self.dist.is_main:
            reasons.update(["longer than data.max_prompt_tokens"] * (len(jobs) - len(requests)))
            reasons.update(reason for name, reason in finished_ids(self.work).items() if reason and name in requests)
            for reason, count in reasons.most_common():
                self.say(f"prompts left out: {count:,} ({reason})")
            write_json(self.work / SCREENED, {"planned": planned, "asked": len(requests), "left out": dict(reasons)})
        return match_responses({name: request.prompt for name, request in requests.items()}, self._read())

    def write(self) -> None:
        """Write the responses, for which each process prepares its own prompts alone."""
        self._answer(self._requests(self._share(self._jobs()[0])))

    def written(self) -> list[Response]:
        """Answers on disk, in the order of the plan; prompts that are not answered are left out."""
        self._check_settings()
        return sorted(self._read(), key=lambda response: order(response.id))

    def _jobs(self) -> tuple[list[Job], Counter[str]]:
        """The prompts to answer, with the turns that are written here if they are not on disk; and why others are not,
        with the number of each reason.
        """
        self._check_settings()
        paths = self.recipe.data.exclude
        excluded = [turn for path in paths for _, turns in read_turns(self.recipe.path(path)) for turn in turns]
        jobs = planned_jobs(self.recipe)
        self._write_turns([job for job in take_turns(jobs, self.work)[0] if job.kind is not None])
        jobs, unwritten = take_turns(jobs, self.work)
        added = self.bundle.tokenizer.added_tokens_decoder.values()
        jobs, screened = PromptFilter(excluded, [token.content for token in added if token.special]).judge(jobs)
        return jobs, Counter([*unwritten.values(), *screened.values()])

    def _answer(self, requests: Mapping[str, Request]) -> None:
        """Run this process's requests that are not answered on disk."""
        done = finished_ids(self.work)

        def append(out: TextIO, name: str, sequence: Sequence) -> None:
            append_response(out, name, sequence.request.prompt, sequence.answer)

        self._run(responses.KIND, {name: request for name, request in requests.items() if name not in done}, append)

    def _read(self) -> list[Response]:
        data = self.recipe.data
        return read_responses(
            self.work,
            vocab_size=self.bundle.target.config.vocab_size,
            max_tokens=data.max_prompt_tokens + data.max_new_tokens,
        )

    def _share(self, items: list[Item]) -> list[Item]:
        """The process's part."""
        return items[self.dist.rank :: self.dist.size]

    def _check_settings(self) -> None:
        """Raise D2SDError if the responses on disk were generated with other settings than the recipe's."""
        data, path = self.recipe.data, self.work / ASKED
        limits = ("max_tokens", "temperature", "end")
        now: dict[str, Any] = {"max_new_tokens": data.max_new_tokens} | {
            f"self_written.{kind.name}.{key}": getattr(kind, key) for kind in data.self_written for key in limits
        }
        if data.sampled is not None:
            now |= {f"sampled.{key}": value for key, value in data.sampled.model_dump().items()}
        settings = (
            read_model(_Settings, path, error=D2SDError, what="record of settings", fix=_FIX)
            if path.is_file()
            else _Settings({})
        )
        then = settings.root
        if changed := [key for key in now if key in then and then[key] != now[key]]:
            raise D2SDError(
                "the sampling settings of the target changed since this training began",
                where=path,
                found={key: now[key] for key in changed},
                expected={key: then[key] for key in changed},
                fix=_FIX,
            )
        self.dist.barrier()
        if self.dist.is_main:
            write_json(path, then | now)

    def _write_turns(self, jobs: list[Job]) -> None:
        by_name = {job.id: job for job in self._share(jobs)}
        before = self._before_turns() if by_name else ""

        def append(out: TextIO, name: str, sequence: Sequence) -> None:
            if sequence.finish == "stop":  # at a stop token, or at the recipe's `end`
                text = by_name[name].text + self._continuation(sequence, by_name[name])
                append_row(out, {"id": name, "text": text})
            else:
                append_row(out, {"id": name, "dropped": "turn not finished within max_tokens"})

        self._run(prompts.KIND, {name: self._opening(job, before) for name, job in by_name.items()}, append)

    def _run(self, kind: str, requests: dict[str, Request], append: Append) -> None:
        """Run this process's `requests`, appending each to its file as it ends."""
        self.dist.barrier()
        mine = sorted(requests, key=lambda name: len(requests[name].prompt))  # batches are padded to the longest prompt
        if mine:
            engine = self._engine
            with (
                self.progress(kind, len(mine)) as advance,
                paced(self.work, kind, self.dist.size) if self.dist.is_main else nullcontext(lambda _: None) as count,
                append_to(own_file(self.work, kind, self.dist.rank)) as out,
            ):
                running = {engine.submit(requests[name]).id: name for name in mine}
                while engine.busy:
                    for output in engine.step():
                        if output.finish is not None:
                            append(out, running.pop(output.sequence.id), output.sequence)
                            advance(1)
                            count(1)
        self.dist.barrier()

    @cached_property
    def _engine(self) -> Engine:
        """For turns and responses: on a GPU it takes seconds to start."""
        return make_engine(self.bundle, policy="off", device=self.dist.device)

    def _requests(self, jobs: list[Job]) -> dict[str, Request]:
        """Requests by job id, without those whose prompt is too long."""
        data, requests = self.recipe.data, {}
        with self.progress("prompts", len(jobs)) as advance:
            for job in jobs:
                request = chat_request(self.bundle, job.text, response_sampling(job.id, data), data.max_new_tokens)
                if len(request.prompt) <= data.max_prompt_tokens:
                    requests[job.id] = request
                advance(1)
        return requests

    def _before_turns(self) -> str:
        """Return what the chat template puts before a user's turn."""
        tokenizer = self.bundle.tokenizer
        if not tokenizer.chat_template:
            raise D2SDError("self-written turns need a chat template; the target has none", where="data.self_written")
        turns = [{"role": "user", "content": _SPLIT}]
        template = self.bundle.recipe.target.template
        text = render_chat(tokenizer, turns, template, f"{self.bundle.path}: chat_template", generation_prompt=False)
        return text.split(_SPLIT)[0]

    def _opening(self, job: Job, before: str) -> Request:
        """A request that completes the opening of a user turn, behind what the template puts `before` it."""
        kind = job.kind
        assert kind is not None
        ids = self.bundle.tokenizer(before + job.text, add_special_tokens=False).input_ids
        ends = () if kind.end is None else (kind.end,)
        sampling = SamplingParams(kind.temperature, seed=zlib.crc32(job.id.encode()), stop=ends)
        return make_request(self.bundle, ids, sampling, kind.max_tokens)

    def _continuation(self, sequence: Sequence, job: Job) -> str:
        """The target's text after the opening, special tokens included: the prompt filter looks for them."""
        ids, stops = sequence.answer, self.bundle.stop_token_ids
        text: str = self.bundle.tokenizer.decode(ids[:-1] if ids[-1] in stops else ids)
        end = job.kind.end if job.kind else None
        return text[: text.index(end) + len(end)] if end and end in text else text


def response_sampling(name: str, data: Data) -> SamplingParams:
    """How the prompt of this id is answered: greedily, or sampled. It depends on the id alone."""
    number = int.from_bytes(blake2b(f"sampled/{name}".encode(), digest_size=4).digest(), "big")
    if data.sampled is None or number >= data.sampled.share * 2**32:
        return SamplingParams()
    return SamplingParams(data.sampled.temperature, seed=number)
