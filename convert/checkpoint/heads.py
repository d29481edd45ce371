"""The kinds of heads that score candidates behind their parents, as checkpoints have them: a row each.

A config names a drafter's head by the size of one (`HeadLayout.mark`), and by its architecture or its projector. A
config in which these disagree, or that has keys of a head that the drafter does not have, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from d2sd.convert.checkpoint.dflash2 import DFLASH2
from d2sd.convert.checkpoint.dspark import DSPARK
from d2sd.convert.checkpoint.dspine import DSPINE
from d2sd.convert.checkpoint.head_layout import HeadLayout, Places
from d2sd.convert.checkpoint.pair import PAIR
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DrafterConfig
from d2sd.modeling.drafters.head_configs import HeadConfig

if TYPE_CHECKING:
    from torch import Tensor

HEADS = (DSPARK, DFLASH2, DSPINE, PAIR)
#: The architecture of a drafter without a head.
PLAIN = "DFlashDraftModel"
#: Keys of config.json that `find_head` checks, wherever they are; and those of the rows that propose.
_SLOTS = ("sample_from_anchor", "shift_label")  # the second is ModelOpt's
KEYS = frozenset(_SLOTS).union(*(layout.keys for layout in HEADS))
#: Architectures of drafters, with a head or without.
ARCHITECTURES = frozenset({PLAIN}).union(*(layout.architectures for layout in HEADS))
#: Patterns of a head's modules, which checkpoints hold in 16 bits.
UNQUANTIZED = tuple(pattern for layout in HEADS for pattern in layout.unquantized)
_OFF = (None, 0, False, "none")
_RENAMED = {theirs: ours for layout in HEADS for theirs, ours in layout.renamed.items()}
#: Tensors of any type: as they are written -> our names, None for those that are not read.
LOOSE = {theirs: ours for layout in HEADS for theirs, ours in layout.loose.items()}


def find_head(places: Places) -> HeadLayout | None:
    """The kind of a drafter's head, from the parts of its config; raises `CheckpointError` naming file and key."""
    marked = [layout for layout in HEADS if places.value(layout.mark) not in _OFF]
    if len(marked) > 1:
        raise places.home(marked[1].mark).refuse("The drafter has two heads.", marked[1].mark, "no such key")
    found = marked[0] if marked else None
    for layout in HEADS:
        if layout is found:
            continue
        if places.value(layout.mark) is None and _names(layout, places):
            raise CheckpointError(
                f"The size of the {layout.name} head is missing.",
                where=f"{places.home(layout.mark).where}: {layout.mark}",
                expected="that of its tensors",
            )
        for key in sorted(layout.keys - (found.keys if found else set())):
            if places.value(key) not in _OFF:
                what = f"This key belongs to a {layout.name} head, which the drafter does not have."
                raise places.home(key).refuse(what, key, f"{layout.mark}, or no such key")
    projector = found.projector if found else None
    if places.value("projector_type") not in (*_OFF, projector):
        expected = f"{projector}, or no such key" if projector else "no such key"
        raise places.home("projector_type").refuse("This head is not supported.", "projector_type", expected)
    return found


def _names(layout: HeadLayout, places: Places) -> bool:
    """Whether a config names a head of this kind in other ways than by its keys."""
    architectures = places.value("architectures")
    named = isinstance(architectures, list) and any(name in layout.architectures for name in architectures)
    return named or (layout.projector is not None and places.value("projector_type") == layout.projector)


def read_slots(places: Places, layout: HeadLayout | None) -> bool:
    """Whether the anchor's row proposes, of a drafter with a head of this kind or none."""
    said = [key for key in _SLOTS if places.value(key) is not None]
    values = [places.home(key).get(key, bool) for key in said]
    if len(set(values)) > 1:
        raise places.home(said[1]).refuse(f"{said[1]} contradicts {said[0]}.", said[1], values[0])
    return values[0] if values else layout is not None and layout.sample_from_anchor


def layout_of(head: HeadConfig) -> HeadLayout:
    """The row of a head's kind."""
    return next(layout for layout in HEADS if isinstance(head, layout.config))


def token_rows(config: DrafterConfig) -> tuple[str, ...]:
    """Tensors of a head with a row for each token: of the target's here, in speculators of those that it drafts."""
    return layout_of(config.head).token_rows if config.head else ()


def all_rows(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors over the draft vocabulary, with rows of zeros for the other tokens, which are not drafted."""
    ids = config.draft_vocabulary
    found: dict[str, Tensor] = {}
    for name in token_rows(config) if ids else ():
        found[name] = tensors[name].new_zeros(config.vocab_size, *tensors[name].shape[1:])
        found[name][list(ids or ())] = tensors[name]
    return found


def drafted_rows(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors over the draft vocabulary alone, as speculators has them."""
    ids = config.draft_vocabulary
    return {name: tensors[name][list(ids or ())] for name in (token_rows(config) if ids else ())}


def our_name(name: str) -> str | None:
    """Our module's name of a drafter's tensor; None: it has none."""
    if name in LOOSE:
        return LOOSE[name]
    pairs = ((theirs, ours) for theirs, ours in _RENAMED.items() if name.startswith(theirs))
    return next((ours + name.removeprefix(theirs) for theirs, ours in pairs), name)
