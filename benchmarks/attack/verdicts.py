"""Judges what an attack has left behind. Every function returns faults as text: none for a server that has held."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.attack.neighbours import Visit
from benchmarks.attack.send import NO_ANSWER, Sent

#: Statuses above 499 that a server may answer: it cannot do this, or not now.
_ALLOWED = {"501", "503"}
#: Exit codes after SIGTERM: done, or ended by the signal once all answers were.
_CLEAN = (0, -15, 143)
#: What two servers answer differently to the same request: names, times, what speculation counts, and seeds that they
#: draw. A rank may change where two log-probabilities differ by less than a prompt's chunks make.
_OF_ONE_SERVER = {
    *("id", "seed", "rank", "created", "created_at", "completed_at", "item_id", "call_id", "system_fingerprint"),
    *("completion_tokens_details", "prompt_tokens_details", "input_tokens_details", "output_tokens_details"),
}
#: Of a class a stall is a delay above this many times the limit.
_STALL = 3
#: Difference of two log-probabilities that rounding may make.
_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Delays:
    """Times to the first token of honest clients, in seconds."""

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    worst: float = 0.0

    @staticmethod
    def of(visits: Sequence[Visit]) -> Delays:
        """The p99 is the smallest delay that at least 99 % of the visits do not exceed: of few visits the worst."""
        found = sorted(visit.delay for visit in visits)
        if not found:
            return Delays()
        p90, p99 = (found[math.ceil(share * len(found)) - 1] for share in (0.9, 0.99))
        return Delays(len(found), median(found), p90, p99, found[-1])


def during(visits: Sequence[Visit], begin: float, end: float) -> list[Visit]:
    """The visits that waited for their first token in an interval."""
    return [visit for visit in visits if visit.sent < end and visit.sent + visit.delay > begin]


def of_statuses(sent: Sequence[Sent]) -> list[str]:
    """5xx other than 501 and 503, or 504 without a deadline; no answer; refusals that are not OpenAI's errors."""
    faults = []
    for one in sent:
        late = one.outcome == "504" and "deadline" in one.case.asked()
        if one.outcome.isdigit() and int(one.outcome) >= 500 and one.outcome not in _ALLOWED and not late:
            faults.append(f"{one.where}: status {one.outcome}")
        elif one.fault and not (one.outcome == NO_ANSWER and one.by_right):
            faults.append(f"{one.where}: {one.fault}")
    return faults


def of_delays(where: str, delays: Delays, limit: float) -> list[str]:
    """Honest clients of a whole attack that waited too long (p99), or that were not served at all."""
    if not delays.count:
        return [f"{where}: no honest client was served"]
    if delays.p99 <= limit:
        return []
    return [f"{where}: honest clients wait {delays.p99:.2f} s for their first token (p99), {limit:.2f} s are allowed"]


def of_class(where: str, delays: Delays, limit: float) -> list[str]:
    """Honest clients that wait too long beside a class: many of them (p90), or one for several times the limit.

    Of the few visits of one class the p99 is the worst, which chance makes long in some class of many.
    """
    if not delays.count or delays.p90 > limit or delays.worst > _STALL * limit:
        return of_delays(where, replace(delays, p99=max(delays.p90, delays.worst)), limit)
    return []


def of_visits(visits: Sequence[Visit], texts: Sequence[str]) -> list[str]:
    """Honest answers that are wrong or broken off; `texts` are those of plain decoding, by body."""
    faults = []
    for visit in visits:
        if visit.error:
            faults.append(f"honest client, prompt {visit.body}: {visit.error}")
        elif visit.complete and visit.text != texts[visit.body]:
            faults.append(f"honest client, prompt {visit.body}: {visit.text!r} instead of {texts[visit.body]!r}")
    return faults


def of_memory(start: int, peak: int, end: int, factor: float) -> list[str]:
    """Resident bytes above `factor` times those at the start."""
    return [
        f"memory: {size >> 20} MiB {when}, {start >> 20} MiB at the start"
        for when, size in (("at its peak", peak), ("at the end", end))
        if size > factor * start
    ]


def of_pages(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Pages in use, or requests left, of an idle server; a pool of another size than at the start."""
    names = ("d2sd_kv_pages_used", "d2sd_num_requests_running", "d2sd_num_requests_waiting")
    faults = [f"idle, but {name} is {after[name]:g}" for name in names if after[name]]
    if after["d2sd_kv_pages"] != before["d2sd_kv_pages"]:
        faults.append(f"d2sd_kv_pages is {after['d2sd_kv_pages']:g}, {before['d2sd_kv_pages']:g} at the start")
    return faults


def of_series(before: int, after: int, most: int) -> list[str]:
    """Series of /metrics that clients have made: labels that they choose."""
    return [f"/metrics has {after} series, {before} at the start"] if after > before + most else []


def of_exit(code: int | None) -> list[str]:
    """An end that is not clean."""
    return [] if code in _CLEAN else [f"exit code {code} after SIGTERM"]


def of_log(lines: Sequence[str]) -> list[str]:
    """The errors of a log by their last lines, each with the number of times that it is there."""
    counts = Counter(map(_said, lines))
    return [f"in the log, {count} times: {said}" for said, count in counts.items()]


def _said(line: str) -> str:
    """The message of a log line, without times and names of requests."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line[:300]
    if entry.get("event") == "request":
        return f"status {entry.get('status')} of {entry.get('path')}"
    return f"{entry.get('message')}: {str(entry.get('error', '')).strip().rpartition(chr(10))[2]}"[:300]


def of_answer(where: str, answer: bytes, plain: bytes | None) -> list[str]:
    """An answer that is not that of plain decoding."""
    if plain is None:
        return [f"{where}: plain decoding does not answer this request"]
    found = _difference(_comparable(answer), _comparable(plain))
    return [f"{where}: differs from plain decoding at {found}"] if found else []


def _comparable(answer: bytes) -> Any:
    """An answer's JSON; of a stream, the text, finish reason and seed of every choice, or its last event's response."""
    if answer.startswith(b"event: "):
        return json.loads(answer.rstrip().rpartition(b"data: ")[2]).get("response")
    if not answer.startswith(b"data: "):
        return json.loads(answer)
    choices: dict[int, dict[str, Any]] = {}
    for line in answer.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                one = choices.setdefault(choice["index"], {"text": ""})
                one["text"] += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
                one["finish_reason"] = choice.get("finish_reason") or one.get("finish_reason")
    return choices


def _difference(found: Any, plain: Any, where: str = "") -> str:
    """Path of the first difference of two JSON values; "" if there is none."""
    if isinstance(found, dict) and isinstance(plain, dict):
        names = (found.keys() | plain.keys()) - _OF_ONE_SERVER
        pairs = [(f"{where}.{name}", found.get(name), plain.get(name)) for name in sorted(names, key=str)]
    elif isinstance(found, list) and isinstance(plain, list) and len(found) == len(plain):
        pairs = [(f"{where}[{n}]", *pair) for n, pair in enumerate(zip(found, plain, strict=True))]
    elif isinstance(found, float) and isinstance(plain, float):
        return (
            "" if math.isclose(found, plain, rel_tol=_ROUNDING, abs_tol=_ROUNDING) else f"{where}: {found} not {plain}"
        )
    else:
        return "" if found == plain else f"{where}: {found!r:.80} not {plain!r:.80}"
    return next((one for pair in pairs if (one := _difference(pair[1], pair[2], pair[0]))), "")
