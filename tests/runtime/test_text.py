"""TextStream over a byte-level vocabulary: token i stands for one or more bytes, characters may be split anywhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, groupby, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from d2sd.runtime.text import TextStream, _StopString
from tests.runtime.helpers import STEADY


def vocabulary(*tokens: bytes) -> Callable[[list[int]], str]:
    return lambda ids: b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace")


def byte_fallback(*tokens: bytes) -> Callable[[list[int]], str]:
    """SentencePiece's: tokens of one byte that follow each other are characters together, or none of them is."""

    def decode(ids: list[int]) -> str:
        text = ""
        for single, group in groupby((tokens[i] for i in ids), lambda piece: len(piece) == 1):
            for run in [b"".join(group)] if single else group:
                try:
                    text += run.decode()
                except UnicodeDecodeError:
                    text += "\ufffd" * len(run)
        return text

    return decode


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Feed one token a piece until stopped, then flush; what each call gave."""
    stream = TextStream(vocabulary(*pieces), stop)
    given_ = []
    for token in range(len(pieces)):
        given_.append(stream.feed(token))
        if stream.stopped:
            return given_, stream
    return [*given_, stream.flush()], stream


def test_a_token_may_look_different_behind_another() -> None:
    """SentencePiece drops the space that a text starts with: tokens decoded one by one would lose all spaces."""

    def decode(ids: list[int]) -> str:
        return " ".join(("one", "two", "three")[i] for i in ids)

    stream = TextStream(decode)
    assert [stream.feed(i) for i in (0, 1, 2)] == ["one", " two", " three"]


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
@given(st.lists(alphabet, max_size=20), stops)
def test_cut_at_the_stop_string_that_is_complete_first(characters: list[bytes], stop: list[str]) -> None:
    data = b"".join(characters)
    whole = data.decode("utf-8", errors="replace")
    ends = {whole.find(s) + len(s): whole.find(s) for s in sorted(stop, key=len) if s in whole}  # the longest if equal
    pieces, stream = run([bytes([b]) for b in data], tuple(stop))
    assert "".join(pieces) == (whole[: ends[min(ends)]] if ends else whole)
    assert bool(stream.stopped) == bool(ends)


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


@STEADY
@pytest.mark.parametrize("tokenizer", [vocabulary, byte_fallback])
@given(st.lists(alphabet, max_size=40), st.sets(st.integers(0, 120)), st.lists(st.integers(1, 9), min_size=1))
def test_tokens_of_a_step_are_decoded_together(
    tokenizer: Callable[..., Callable[[list[int]], str]], characters: list[bytes], cuts: set[int], sizes: list[int]
) -> None:
    """After each step what has come out is what the tokens give one by one, and few calls of `decode` are made."""
    data = b"".join(characters)
    pieces = pieces_of(data, cuts)
    if tokenizer is byte_fallback:  # a token is a character or a byte of one
        pieces = [
            part
            for piece in (c for c in characters if len(c) > 1 or c < b"\x80")
            for part in ([piece] if len(data) % 2 else [bytes([byte]) for byte in piece])
        ]
    calls, decode = 0, tokenizer(*pieces)

    def counted(ids: list[int]) -> str:
        nonlocal calls
        calls += 1
        return decode(ids)

    together, alone, place = TextStream(counted), TextStream(decode), 0
    out = [""] * 2
    for size in cycle(sizes):
        if place == len(pieces):
            break
        step, before = [*range(place, min(place + size, len(pieces)))], calls
        new = together.feed_all(step)
        fallen_back = calls - before > 2
        out = [out[0] + new, out[1] + "".join(alone.feed(token) for token in step)]
        assert out[0] == out[1]
        whole = decode([*range(place + len(step))])
        assert not fallen_back or whole.endswith("\ufffd") or "\ufffd" in new or not decode(step)
        place += len(step)
    assert out[0] + together.flush() == out[1] + alone.flush() == decode([*range(len(pieces))])


@STEADY
@given(
    st.lists(st.one_of(alphabet, st.sampled_from([b"", b" a"])), max_size=40), st.lists(st.integers(1, 9), min_size=1)
)
@example([b"a", b"", b" a", b"\xff"], [2])
def test_what_has_come_out_is_taken_back_in_no_step(characters: list[bytes], sizes: list[int]) -> None:
    """SentencePiece's bytes beside one that forms no character show none; it drops a first space, and b""."""
    pieces = [
        part
        for n, one in enumerate(characters)
        for part in ([one] if n % 3 or one.isascii() else [bytes([b]) for b in one])
    ]

    def decode(ids: list[int]) -> str:
        return byte_fallback(*pieces)([i for i in ids if pieces[i]]).removeprefix(" ")

    together, alone, place, out = TextStream(decode), TextStream(decode), 0, [""] * 2
    for size in cycle(sizes):
        if place >= len(pieces):
            break
        step = [*range(place, min(place + size, len(pieces)))]
        out = [out[0] + together.feed_all(step), out[1] + "".join(alone.feed(token) for token in step)]
        assert out[0] == out[1]
        place += size
    assert out[0] + together.flush() == out[1] + alone.flush()


def test_a_visible_stop_string_stays_and_what_follows_it_does_not() -> None:
    stream = TextStream(vocabulary(b"a", b" EN", b"D b"), ("END", "D"), stop_visible=True)
    assert [stream.feed(token) for token in range(3)] == ["a", " ", "END"]
    assert (stream.stopped, stream.flush()) == ("END", "")


def test_text_that_may_not_stop_is_not_searched() -> None:
    """Nor held back; a stop string that begins in it is not one."""
    stream = TextStream(vocabulary(b"xEN", b"D", b"END"), ("END",))
    assert [stream.feed(0, may_stop=False), stream.feed(1), stream.feed(2)] == ["xEN", "D", ""]
    assert stream.stopped


class Slices:
    """The stop strings of a text that comes in parts, by searching and slicing all of it each time."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop, self._held, self.stopped = stop, "", ""

    def release(self, new: str, may_stop: bool) -> str:
        text, self._held = self._held + new, ""
        if not may_stop:
            return text
        found = [(at, at + len(s)) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            start, end = min(found)
            self.stopped = text[start:end]
            return text[:start]
        hold = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


periodic = st.one_of(
    st.text("ab", min_size=1, max_size=7),
    st.builds(
        lambda part, times, end: part * times + end,
        st.text("ab", min_size=1, max_size=3),
        st.integers(1, 5),
        st.text("abc", max_size=2),
    ),
)


@pytest.mark.slow
@settings(STEADY, max_examples=400)
@given(st.lists(periodic, max_size=4), st.lists(st.tuples(st.text("abc", max_size=9), st.integers(0, 9)), max_size=30))
def test_every_part_is_what_a_search_of_all_text_gives(stop: list[str], parts: list[tuple[str, int]]) -> None:
    """Repeating strings over two letters, whose beginnings lie inside each other; some parts may not stop."""
    stream = TextStream(lambda ids: "".join(parts[i][0] for i in ids), tuple(stop))
    slices = Slices(tuple(stop))
    for token, (text, dice) in enumerate(parts):
        may_stop = dice > 0
        expected = slices.release(text, may_stop) if text else ""
        assert (stream.feed(token, may_stop=may_stop), stream.stopped) == (expected, slices.stopped)
        if stream.stopped:
            return


class Counted(str):
    """A text that counts the characters that are looked at one by one."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        Counted.looks += 1 if isinstance(key, int) else len(range(*key.indices(len(self))))
        return super().__getitem__(key)


@pytest.mark.parametrize("end", ["b", "c"])
def test_a_long_stop_string_costs_as_much_as_a_short_one(end: str) -> None:
    """Each token looks at a few characters of it, though the text nearly is it, again and again."""
    looks = []
    for length in (40, 4000):
        stream = TextStream(lambda ids: ("aaaa", "aab")[ids[-1]] if ids else "", ())
        stream._stop = [_StopString(Counted("a" * length + end))]
        Counted.looks = 0
        for token in range(2000):
            stream._release("aaaa" if token % 50 else "aabaa")
        looks.append(Counted.looks)
    assert max(looks) < 8 * 4 * 2000


@pytest.mark.parametrize("token", [b"\xff", b""])
def test_tokens_that_form_no_text_are_not_decoded_for_ever(token: bytes) -> None:
    decode, longest = vocabulary(b"a", token), 0

    def counted(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    stream = TextStream(counted)
    text = "".join(stream.feed(number) for number in [0] + [1] * 500 + [0]) + stream.flush()
    assert text == decode([0] + [1] * 500 + [0])
    assert longest < 50


@STEADY
@given(
    st.lists(st.sampled_from([b"\xff", "é".encode(), "€".encode(), "🙂".encode(), b"\xe2", b""]), max_size=60),
    st.integers(0, 40),
)
def test_no_character_is_cut_where_the_window_is(characters: list[bytes], filler: int) -> None:
    """Bytes one by one, behind as many that form no character as fill a window up to anywhere in them."""
    data = b"\xff" * filler + b"".join(characters)
    assert "".join(run([data[i : i + 1] for i in range(len(data))])[0]) == data.decode("utf-8", errors="replace")
