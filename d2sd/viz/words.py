"""The captions and explanations of the pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from d2sd.policies import FirstPass
from d2sd.viz.nodes import Step
from d2sd.viz.text import visible

if TYPE_CHECKING:
    from d2sd.runtime.speculation.policy import Policy

_CHECKED = (
    "The target model checks the whole tree in one pass and keeps the path that it would have written itself (green), "
    "then adds one token of its own (amber), so the answer is word for word the target's, in fewer steps."
)


def introduction(policies: Collection[Policy]) -> str:
    """Explanation of speculation for the policies that generated the answers."""
    first = {policy.first_pass for policy in policies}
    if first == {FirstPass.NONE}:
        return (
            "Plain decoding: nothing is drafted, and every pass of the target model gives one token. "
            "This is what speculation is measured against."
        )
    if FirstPass.DRAFTER not in first:
        return (
            "At each step the text that followed the last occurrence of the latest tokens is the draft (dashed). "
            f"{_CHECKED}"
        )
    drafted = (
        "At each step a diffusion drafter predicts the next tokens in parallel (grey boxes), each "
        "without conditioning on the others"
    )
    if any(policy.second_pass is not None for policy in policies):
        drafted += "; where it is likely to go wrong, a second pass drafts again from there (violet)"
    if any(policy.copies for policy in policies):
        drafted += "; copies of earlier text compete with the drafts (dashed)"
    return f"{drafted}. {_CHECKED}"


def counted(count: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def mix(policies: Iterable[str]) -> str:
    """The names of the steps' policies with their shares, the commonest first; one name stands alone."""
    steps = Counter(policies)
    if len(steps) == 1:
        return next(iter(steps))
    return ", ".join(f"{name} {count / steps.total():.0%}" for name, count in steps.most_common())


#: What rescues a step, by `Step.saver`.
_SAVERS = {
    "first": "another guess of the first draft",
    "second": "a branch of the second pass",
    "copy": "a copy of earlier text",
}


def rescue(step: Step) -> str:
    """Says what saved how many tokens; empty if the first draft's top-1 chain gave as many."""
    return f"{_SAVERS[step.saver]} saved {step.saved}" if step.saver else ""


def shade(step: Step) -> str:
    """Classes of the stretch of text that a step wrote, each after a space."""
    if not step.draft:
        return " plain"
    return f" saved by-{step.saver}" if step.saver else ""


def caption(step: Step, number: int, steps: int) -> str:
    """One line above a tree."""
    return f"Step {number} of {steps}: {gain(step)}"


def gain(step: Step) -> str:
    """How many tokens a step gave, and what rescued it."""
    return ", ".join(filter(None, (counted(len(step.gained), "token"), rescue(step))))


def story(step: Step) -> str:
    """A description of a step."""
    if not step.draft:
        return f"Nothing was drafted: the target {'ended the answer' if step.end else 'wrote one token'}."
    return f"{_fate(step)}. {_ending(step)}."


def _fate(step: Step) -> str:
    """Result of the first draft and of its rivals."""
    begun = f"The {'copy of earlier text' if step.copied else 'first draft'} was "
    if step.right == len(step.draft):
        begun += "right to its end"
    elif step.right:
        begun += f"right for {step.right} of its {counted(len(step.draft), 'token')}"
    else:
        begun += "wrong at once"
    if not step.copied:  # tokens that the draft shares with a rival are drawn as the rival's
        shared: Counter[str] = Counter(node.source for node in step.accepted[: step.right])
        rivals = (("second", "the second pass (violet)"), ("copy", "a copy of earlier text (dashed)"))
        begun += "".join(f"; {who} agreed on {shared[source]}" for source, who in rivals if shared[source])
    return f"{begun}; {_SAVERS[step.saver]} was right for {step.saved} more" if step.saver else begun


def _ending(step: Step) -> str:
    if step.end:
        return "The target ended the answer" if step.bonus else "The last accepted token ends the answer"
    if step.bonus is None:
        return f"The answer ends with “{visible(step.gained[-1].text)}”"
    return f"The target added “{visible(step.bonus.text)}”"
