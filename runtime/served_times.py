"""Step times as served, against those that were measured when the engine was made.

Other work on the machine, grammars, penalties and sampling change how long a step takes. What it took over what was
measured is a product: the machine's speed, which plain decoding shows, a factor of its kind, and an error of its policy
and batch size. All three are learned from every step that is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from math import inf
from typing import NamedTuple

import numpy as np

from d2sd.runtime.acceptance import Array
from d2sd.runtime.speculation.policy import Policy

# Shape letters: P policies.

#: EMA windows in steps: of plain decoding, which is the speed of the machine, and of other kinds against it, which a
#: few steps show.
_PLAIN_WINDOW, _KIND_WINDOW = 32, 8
#: The same for the steps of one policy and batch size, of which one may have been measured in a bad moment.
_STEP_WINDOW = 16
#: Largest factor that one step can show: a step during which the machine did something else says nothing.
_MOST_FACTOR = 2.0
#: Share of a step's time for which the host waits for its tokens, below which the time is the host's own.
_HIDDEN = 0.1
#: Steps of plain decoding until a correction decays back and speculation is retried: a retry has a cost, which is less
#: than that of acceptance, because step times are learned in fewer steps.
TIME_DECAY_STEPS = 256


class StepKind(IntEnum):
    """Kinds of steps whose times are wrong together."""

    PLAIN = 0
    COPIES = 1  # no drafter runs
    DRAFTS = 2


class Choice(NamedTuple):
    """A step whose policy has been chosen."""

    policy: Policy
    seconds: float  # that it should take, uncorrected
    bucket: int  # of its requests
    temperature: float  # their mean
    rows: tuple[int, ...] | None = None  # most nodes of each request's tree; None: those of the policy
    tokens: float = 1.0  # of each request in the mean, that it should bring


def kind_of(policy: Policy) -> StepKind:
    """The kind of a policy's steps."""
    if policy.drafters:
        return StepKind.DRAFTS
    return StepKind.COPIES if policy.copies else StepKind.PLAIN


class ServedTimes:
    """Corrections of measured step times, by the steps that were served."""

    def __init__(self, policies: Sequence[Policy], clock: Callable[[], float]) -> None:
        """Nothing is corrected yet; `clock` gives seconds."""
        self._clock = clock
        self._places = {policy: place for place, policy in enumerate(policies)}
        self.kinds = np.array([kind_of(policy) for policy in policies])  # [P], `StepKind`
        self.plain = 1.0  # seconds of a step without a drafter, observed over measured
        self.by_kind = np.ones(len(StepKind))  # the same of each kind, over `plain`; of plain decoding always 1
        self.host = 0.0  # seconds of the host's own work between two steps' ends
        self._errors: dict[int, Array] = {}  # [P] by bucket
        self._ended = -inf  # when the step before did
        self._ahead = False  # whether a step was launched before that

    def errors(self, bucket: int) -> Array:
        """Errors of each policy [P] in batches of this size, which `plain` and `by_kind` leave; changed in place."""
        return self._errors.setdefault(bucket, np.ones(len(self.kinds)))

    def scale_of(self, policy: Policy) -> float:
        """Observed over measured seconds of all steps of the policy's kind."""
        return float(self.plain * self.by_kind[kind_of(policy)])

    def between_ends(self, seconds: Array) -> Array:
        """Seconds from the end of a step to that of the next, which takes so many by what was measured."""
        seconds = self.plain * seconds
        return np.maximum(seconds, self.host) if self._ahead else seconds + self.host

    def observe(self, seconds: float, began: float | None, waited: float | None) -> tuple[float | None, bool]:
        """Note that a step ends now, which should take so many `seconds`; see `PolicySelector.update`.

        Returns the factor that it took of them, if that is known, and whether the host's own work hid the step.
        """
        last, self._ended = self._ended, self._clock()
        if began is None:
            return None, False
        took = self._ended - max(began, last)
        factor = min(max(took / seconds, 1 / _MOST_FACTOR), _MOST_FACTOR)
        if waited is None or last == -inf:
            return factor, False
        self._ahead = began <= last
        own = min(took - waited if self._ahead else began - last, _MOST_FACTOR * max(self.host, seconds))
        self.host += (own - self.host) / _KIND_WINDOW
        hidden = self._ahead and waited < _HIDDEN * took  # the device had ended before
        return None if hidden else factor, hidden

    def correct(self, choice: Choice, factor: float) -> None:
        """Correct the times of steps like this one, which took `factor` of what was measured: of all of its kind, and
        of its policy and batch size by what is left.
        """
        kind, errors = kind_of(choice.policy), self.errors(choice.bucket)
        place, whole = self._places[choice.policy], choice.rows is None
        scale, error = self.scale_of(choice.policy), errors[place] if whole else 1.0
        errors += (1 - errors) / TIME_DECAY_STEPS  # others are forgotten, so that they are tried again
        if whole:
            errors[place] = error + (factor / scale - error) / _STEP_WINDOW
        if kind is StepKind.PLAIN:
            self.plain += float(factor / error - self.plain) / _PLAIN_WINDOW
        else:
            self.by_kind[kind] += (factor / error / self.plain - self.by_kind[kind]) / _KIND_WINDOW

    def forget(self) -> None:
        """Forget a little of every kind, in a step that shows nothing of drafts."""
        self.by_kind += (1 - self.by_kind) / TIME_DECAY_STEPS
