"""The captions and explanations of the pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from d2sd.policies import DrafterRole, FirstPass
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
    if {role for policy in policies for role in policy.drafters} == {DrafterRole.FLEX}:
        return (
            "At each step the last layers of the target model itself predict the next tokens in parallel (grey boxes), "
            f"each without conditioning on the others. {_CHECKED}"
        )
    if FirstPass.DRAFTER not in first:
        return f"At each step the text that followed the last occurrence of the latest tokens is the draft. {_CHECKED}"
    drafted = (
        "At each step a small diffusion drafter predicts the next tokens in parallel (grey boxes), each "
        "without conditioning on the others"
    )
    if any(policy.second_pass is not None for policy in policies):
        return f"{drafted}; where it is likely to go wrong, a second pass drafts again from there (violet). {_CHECKED}"
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


def rescue(step: Step) -> str:
    """Says which pass saved how many tokens; empty if the first draft's top-1 chain gave as many."""
    if not step.saved:
        return ""
    if step.by_copy:
        return f"a copy of earlier text saved {step.saved}"
    return f"{'second pass' if step.by_second else 'another guess of the first pass'} saved {step.saved}"


def caption(step: Step, number: int, steps: int) -> str:
    """One line above a tree."""
    text = f"Step {number} of {steps}: {counted(len(step.gained), 'token')}"
    return f"{text}, {rescue(step)}" if step.saved else text


def story(step: Step) -> str:
    """A description of a step."""
    if not step.draft:
        return "Nothing was drafted: the target wrote one token."
    if step.right == len(step.draft):
        begun = "The first draft was right to its end"
    elif step.right:
        begun = f"The first draft was right for {step.right} of its {counted(len(step.draft), 'token')}"
    else:
        begun = "The first draft was wrong at once"
    if step.saved:
        which = "a branch of the second pass" if step.by_second else "another guess of the first pass"
        begun += f"; {'a copy of earlier text' if step.by_copy else which} was right for {step.saved} more"
    if step.bonus is None:
        return f"{begun}. The answer ends with “{visible(step.gained[-1].text)}”."
    return f"{begun}. The target added “{visible(step.bonus.text)}”."
