"""User turns made of documents: summaries, questions on passages, translations, ... by the templates of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from d2sd.errors import D2SDError
from d2sd.train.data.prompts import order
from d2sd.train_recipe import Documents

#: A document's id, and its texts by the names of their fields.
Document = tuple[str, Mapping[str, str]]


def document_turns(kinds: Sequence[Documents], files: Mapping[str, Sequence[Document]]) -> list[tuple[str, str]]:
    """(id, user turn) of every turn of all kinds; `files` holds the documents of each kind's `path`.

    The kinds of one file take its documents in a random order that their ids determine, each document once: two turns
    with the same document would be near-duplicates. Raises D2SDError if a file has too few documents for its kinds.
    """
    left = {path: sorted(documents, key=lambda document: order(document[0])) for path, documents in files.items()}
    turns: list[tuple[str, str]] = []
    for kind in kinds:
        turns += _turns(kind, left)
    return turns


def _turns(kind: Documents, left: dict[str, list[Document]]) -> list[tuple[str, str]]:
    """The turns of one kind, whose documents are removed from those `left` of its file."""
    documents, shown = left[kind.path], kind.passage_fields
    leads = [document for document in documents if kind.fields | shown <= document[1].keys()][: kind.count]
    leading, beside = {name for name, _ in leads}, kind.passages - 1
    others = [document for document in documents if document[0] not in leading and shown <= document[1].keys()]
    others.sort(key=lambda document: len(document[1]))  # those with questions are kept for kinds that ask them
    if len(leads) < kind.count or len(others) < kind.count * beside:
        more = f", and {kind.count * beside:,} others with {_listed(shown)}" if beside else ""
        raise D2SDError(
            "too few documents",
            where=f"data.documents: {kind.name}",
            found=f"{len(leads):,} left with {_listed(kind.fields | shown)}, and {len(others):,} others",
            expected=f"{kind.count:,}{more}",
            fix=f"lower the counts of the kinds of {kind.path}",
        )
    used = leading | {name for name, _ in others[: kind.count * beside]}
    left[kind.path] = [document for document in documents if document[0] not in used]
    return [_turn(kind, lead, others[i * beside : (i + 1) * beside]) for i, lead in enumerate(leads)]


def _turn(kind: Documents, lead: Document, others: Sequence[Document]) -> tuple[str, str]:
    """(id, text) of a turn; the leading document is at a random place among the others."""
    name, fields = f"{kind.name}/{lead[0]}", lead[1]
    drawn = order(name)
    template = kind.templates[drawn % len(kind.templates)]
    if kind.passages > 1:
        place = drawn // len(kind.templates) % kind.passages
        numbered = enumerate([*others[:place], lead, *others[place:]], 1)
        shown = [kind.passage.format(**{**texts, "number": number}) for number, (_, texts) in numbered]
        fields = {**fields, "passages": "\n\n".join(shown)}
    return name, template.format(**fields)


def _listed(fields: set[str]) -> str:
    return ", ".join(f"{{{field}}}" for field in sorted(fields))
