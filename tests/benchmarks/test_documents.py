"""Documents of textbooks: passages are whole paragraphs, and questions go to the passage with their words."""

from __future__ import annotations

from benchmarks.prompts.documents import _FUNCTION, Repository, _book

LONG = "Sleep restores the energy that animals spend during the day in winter. " * 8
MODULE = f"""<document xmlns="http://cnx.rice.edu/cnxml"><title>Sleep</title><content>
<para>{LONG} (<link target-id="figure"/>)</para>
<section><title>Dreams</title>
<para>As <link target-id="figure"/> shows, this refers to a figure.</para>
<para>Dreams <term>occur</term> in every phase.<note>Watch this.</note></para>
<para>{LONG} Psychologists interpret <emphasis>dreams</emphasis> as wishes.</para>
<note><para>{LONG}</para></note></section>
<exercise><problem><para>Why do psychologists interpret dreams as wishes?</para></problem></exercise>
</content></document>"""


class _Module(Repository):
    def __init__(self) -> None:
        self.paths = ["modules/m1/index.cnxml", "README.md"]

    def text(self, path: str) -> str:
        assert path == self.paths[0]
        return MODULE


def test_passages_and_questions_of_a_module() -> None:
    first, second = _book(_Module(), "osbooks-introduction-health")
    assert first == {"id": "health/m1/0", "title": "Sleep", "text": LONG.strip()}
    assert second["title"] == "Dreams"
    assert second["text"] == f"Dreams occur in every phase.\n{LONG}Psychologists interpret dreams as wishes."
    assert second["question"] == "Why do psychologists interpret dreams as wishes?"


CODE = '''def first(
    x: int, y: float = 0.5
) -> list[int]:
    """Adds.

    >>> first(1)
    """
    return []


class A:
    def method(self) -> None:
        """Is none of them."""


def bare(x):
    return x


async def other() -> None:
    """Is not found."""
'''


def test_functions_end_with_their_docstring() -> None:
    (found,) = _FUNCTION.finditer(CODE)
    assert found["name"] == "first"
    assert found[0] == CODE.split("\n    return []")[0]
