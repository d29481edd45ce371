"""TextStream over a byte-level vocabulary: token i stands for one or more bytes, characters may be split anywhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2sd.runtime.text import TextStream
from tests.runtime.helpers import STEADY


def vocabulary(*tokens: bytes) -> Callable[[list[int]], str]:
    return lambda ids: b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace")


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Feed one token a piece until stopped, then flush; what each call gave."""
    stream = TextStream(vocabulary(*pieces), stop)
    given_ = []
    for token in range(len(pieces)):
        given_.append(stream.feed(token))
        if stream.stopped:
            return given_, stream
    return [*given_, stream.flush()], stream


def test_text_comes_as_it_is_certain() -> None:
    assert run([b"Hel", b"lo ", b"you"])[0] == ["Hel", "lo ", "you", ""]


def test_a_character_split_over_tokens_comes_once_it_is_whole() -> None:
    euro = "€".encode()
    assert run([b"a", euro[:1], euro[1:2], euro[2:] + b"b"])[0] == ["a", "", "", "€b", ""]
    assert run([b"a" + euro[:2], euro[2:]])[0] == ["", "a€", ""]


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    assert run([b"a", "€".encode()[:2]])[0] == ["a", "", "\ufffd"]
    assert run([b"\xff", b"b"])[0] == ["", "\ufffdb", ""]


def test_a_token_without_text_changes_nothing() -> None:
    assert run([b"a", b"", b"b", b""])[0] == ["a", "", "b", "", ""]


def test_a_token_may_look_different_behind_another() -> None:
    """SentencePiece drops the space that a text starts with: tokens decoded one by one would lose all spaces."""

    def decode(ids: list[int]) -> str:
        return " ".join(("one", "two", "three")[i] for i in ids)

    stream = TextStream(decode)
    assert [stream.feed(i) for i in (0, 1, 2)] == ["one", " two", " three"]


def test_stop_string_inside_a_token() -> None:
    pieces, stream = run([b"abc", b"dEFg", b"h"], ("EF",))
    assert pieces == ["abc", "d"]
    assert stream.stopped


def test_stop_string_over_tokens_is_held_back_and_left_out() -> None:
    pieces, stream = run([b"ab<", b"st", b"op>c"], ("<stop>",))
    assert pieces == ["ab", "", ""]
    assert stream.stopped


def test_a_beginning_that_comes_to_nothing_is_released() -> None:
    pieces, stream = run([b"ab<", b"st", b"air>"], ("<stop>",))
    assert pieces == ["ab", "", "<stair>", ""]
    assert not stream.stopped


def test_a_beginning_at_the_end_is_released_by_flush() -> None:
    pieces, stream = run([b"ab<st"], ("<stop>",))
    assert pieces == ["ab", "<st"]
    assert not stream.stopped
    assert stream.flush() == ""


def test_a_beginning_inside_a_beginning() -> None:
    """After "aab" fails to become "aac", its tail may still."""
    assert run([b"a", b"a", b"a", b"c", b"x"], ("aac",))[0] == ["", "", "a", ""]
    assert run([b"a", b"a", b"b", b"x"], ("aac",))[0] == ["", "", "aab", "x", ""]


def test_several_stop_strings() -> None:
    assert run([b"1 EN", b"D STOP"], ("STOP", "END"))[0] == ["1 ", ""]  # the first in the text, not in the list
    assert run([b"x\n", b"\nUs", b"er:"], ("\n\nUser:", "User"))[0] == ["x", "", ""]
    pieces, stream = run([b"ab", b"cd", b"e"], ("cdx", "bcdy"))  # the longer hold wins, then both are let go
    assert pieces == ["a", "", "bcde", ""]
    assert not stream.stopped


def test_stop_string_of_split_characters() -> None:
    stop = "né"
    pieces, stream = run([b"on", stop.encode()[:2], stop.encode()[2:], b"z"], (stop,))
    assert pieces == ["o", "", "n"]
    assert stream.stopped


def test_a_stop_string_that_only_the_end_completes() -> None:
    """The last token ends in half a character, so its text is decided by flush."""
    pieces, stream = run([b"ab END\xe2"], (" END",))
    assert "".join(pieces) == "ab"
    assert stream.stopped


alphabet = st.sampled_from([b"a", b"b", b"<", "é".encode(), "€".encode(), "🙂".encode(), b"\xff", b"\xe2"])
stops = st.lists(st.text("ab<é€", min_size=1, max_size=4), max_size=3, unique=True)


def pieces_of(data: bytes, cuts: set[int]) -> list[bytes]:
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


@STEADY
@given(st.lists(alphabet, max_size=16), st.sets(st.integers(0, 60)))
def test_all_text_comes_out_whatever_the_tokens(characters: list[bytes], cuts: set[int]) -> None:
    data = b"".join(characters)
    assert "".join(run(pieces_of(data, cuts))[0]) == data.decode("utf-8", errors="replace")


@STEADY
@given(st.lists(alphabet, max_size=20), st.text("ab<é€", min_size=1, max_size=4), st.sets(st.integers(0, 60)))
def test_cut_at_the_first_stop_string(characters: list[bytes], stop: str, cuts: set[int]) -> None:
    data = b"".join(characters)
    whole = data.decode("utf-8", errors="replace")
    pieces, stream = run(pieces_of(data, cuts), (stop,))
    assert "".join(pieces) == whole.split(stop)[0]
    assert stream.stopped == (stop in whole)


@STEADY
@given(st.lists(alphabet, max_size=20), stops)
def test_cut_at_the_stop_string_that_is_complete_first(characters: list[bytes], stop: list[str]) -> None:
    data = b"".join(characters)
    whole = data.decode("utf-8", errors="replace")
    ends = {whole.find(s) + len(s): whole.find(s) for s in sorted(stop, key=len) if s in whole}  # the longest if equal
    pieces, stream = run([bytes([b]) for b in data], tuple(stop))
    assert "".join(pieces) == (whole[: ends[min(ends)]] if ends else whole)
    assert stream.stopped == bool(ends)


@STEADY
@given(st.lists(alphabet, max_size=20), stops, st.sets(st.integers(0, 60)))
def test_nothing_is_taken_back_or_held_longer_than_needed(
    characters: list[bytes], stop: list[str], cuts: set[int]
) -> None:
    """After every token all is out but half characters and what could grow into a stop string."""
    data = b"".join(characters)
    pieces = pieces_of(data, cuts)
    stream = TextStream(vocabulary(*pieces), tuple(stop))
    out, fed = "", b""
    for token, piece in enumerate(pieces):
        out, fed = out + stream.feed(token), fed + piece
        if stream.stopped:
            return
        sure = fed.decode("utf-8", errors="replace")
        assert sure.startswith(out)
        rest = sure[len(out) :]
        assert rest.endswith("\ufffd") or rest == "" or any(s.startswith(rest) for s in stop)


def test_a_visible_stop_string_stays_and_what_follows_it_does_not() -> None:
    stream = TextStream(vocabulary(b"a", b" EN", b"D b"), ("END", "D"), stop_visible=True)
    assert [stream.feed(token) for token in range(3)] == ["a", " ", "END"]
    assert (stream.stopped, stream.flush()) == (True, "")


def test_text_that_may_not_stop_is_not_searched() -> None:
    """Nor held back; a stop string that begins in it is not one."""
    stream = TextStream(vocabulary(b"xEN", b"D", b"END"), ("END",))
    assert [stream.feed(0, may_stop=False), stream.feed(1), stream.feed(2)] == ["xEN", "D", ""]
    assert stream.stopped


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_flush_of_nothing(stop: tuple[str, ...]) -> None:
    assert TextStream(vocabulary(), stop).flush() == ""
