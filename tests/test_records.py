"""Reading files: nothing is lost or moved, damage is loud, and each bad line has its own reason."""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmask.errors import InputError, RejectedRow, RejectReason
from chatmask.records import Record, loads, parse, plan, read

LINES = [b'{"a": %d, "text": "%s"}' % (i, b"x" * (i * 7 % 50)) for i in range(400)]
CONTENT = b"\n".join(LINES) + b"\n"


def zstd(data: bytes) -> bytes:
    """One zstd frame."""
    return pa.compress(data, codec="zstd", asbytes=True)


def write(folder: Path, name: str, data: bytes) -> Path:
    """A file with this content."""
    path = folder / name
    path.write_bytes(data)
    return path


def read_all(path: Path, chunk_bytes: int = 1 << 20) -> list[Record]:
    """All records of a file, over all of its chunks."""
    return [record for chunk in plan([path], chunk_bytes)[1] for record in read(chunk)]


def raws(path: Path, chunk_bytes: int = 1 << 20) -> list[bytes]:
    """The lines of a file."""
    return [record.raw for record in read_all(path, chunk_bytes)]


def reason(raw: bytes) -> RejectReason:
    """Why a line is rejected."""
    with pytest.raises(RejectedRow) as caught:
        parse(Record("f.jsonl", 1, 0, raw))
    return caught.value.reason


# --- properties -------------------------------------------------------------------------------------------------------

pieces = st.lists(st.sampled_from([b"{}", b"ab", b"", b" ", b"\r", b"\n", b"\r\n", b"\xe2\x80\xa8", b"\xff", b"\xef\xbb\xbf"]))


@given(pieces, st.integers(1, 12), st.sampled_from(["plain", "gzip", "zstd"]))
@settings(max_examples=250, deadline=None)
def test_every_byte_is_in_one_record(parts: list[bytes], chunk_bytes: int, kind: str) -> None:
    """Chunks tile the file, borders never change what is read, and each record is found again at its offset."""
    data = b"".join(parts)
    stored = {"plain": data, "gzip": gzip.compress(data), "zstd": zstd(data)}[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), "f.jsonl", stored)
        files, chunks = plan([path], chunk_bytes)
        records = [record for chunk in chunks for record in read(chunk)]
        assert records == read_all(path)
    assert files[0].bytes == len(stored) and files[0].sha256 == hashlib.sha256(stored).hexdigest()
    position = 0
    for index, chunk in enumerate(chunks):
        assert (chunk.index, chunk.offset) == (index, position)
        position += chunk.bytes
    assert position == len(data)
    text = data.removeprefix(b"\xef\xbb\xbf")
    expected = text.split(b"\n") if text else [b""] * bool(data)
    if text.endswith(b"\n"):
        expected.pop()
    ended = [True] * len(expected)
    if ended and not text.endswith(b"\n"):
        ended[-1] = False
    assert [r.raw for r in records] == [
        line.removesuffix(b"\r") if end else line for line, end in zip(expected, ended, strict=True)
    ]
    assert [r.line for r in records] == list(range(1, len(expected) + 1)) and sum(c.lines for c in chunks) == len(expected)
    for record in records:
        assert data[record.offset : record.offset + len(record.raw)] == record.raw


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab":\\\n\u2028é{', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab":\\', max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(values, st.booleans())
@settings(max_examples=300, deadline=None)
def test_what_the_standard_library_writes_is_read_back(value: Any, ascii_only: bool) -> None:
    """The fast reading gives the same value as the standard library, whatever quotes and colons the strings hold."""
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert loads(raw) == json.loads(raw) == value


@given(st.dictionaries(st.text('ab":\\ ', max_size=3), values, min_size=1, max_size=4), st.data())
@settings(max_examples=200, deadline=None)
def test_a_repeated_key_is_always_found(value: dict[str, Any], data: st.DataObject) -> None:
    """A key that stands twice is found at any depth, also where strings are full of quotes and colons."""
    key = data.draw(st.sampled_from(sorted(value)))
    spaces = data.draw(st.sampled_from(["", " ", "\t "]))
    body = json.dumps(value)[:-1] + f", {json.dumps(key)}{spaces}: {json.dumps(data.draw(values))}" + "}"
    for _ in range(data.draw(st.integers(0, 3))):
        body = '{"x": ":\\"", "y": [' + body + "]}"
    assert reason(body.encode()) is RejectReason.DUPLICATE_KEY


@given(st.binary(max_size=40) | st.text('{}[]":,\\u0d8aN1e9 ', max_size=30).map(str.encode))
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_a_value_or_a_reason(raw: bytes) -> None:
    """Whatever a line holds, the outcome is an object or a RejectedRow."""
    try:
        assert isinstance(parse(Record("f", 1, 0, raw)), dict)
    except RejectedRow as error:
        assert error.reason.advice in str(error)


@given(st.integers(), st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_integers_are_exact(number: int, zeros: int) -> None:
    """Integers beyond 64 bits keep every digit."""
    number *= 10**zeros
    assert loads(b'{"n": %d}' % number) == {"n": number}


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("a.jsonl", CONTENT),
        ("a.jsonl.gz", gzip.compress(CONTENT)),
        ("members.jsonl.gz", gzip.compress(CONTENT[:5000]) + gzip.compress(CONTENT[5000:])),
        ("a.jsonl.zst", zstd(CONTENT)),
        ("frames.jsonl.zst", zstd(CONTENT[:5000]) + b"\x50\x2a\x4d\x18\x02\0\0\0ab" + zstd(b"") + zstd(CONTENT[5000:])),
        ("misnamed.jsonl", gzip.compress(CONTENT)),
    ],
)
def test_compression_makes_no_difference(tmp_path: Path, name: str, stored: bytes) -> None:
    """Plain, gzip and zstd files, of one or many members, read alike in chunks of any size and in any order."""
    path = write(tmp_path, name, stored)
    for chunk_bytes in (1, 999, 4096, 1 << 20):
        chunks = plan([path], chunk_bytes)[1]
        assert [record.raw for chunk in chunks for record in read(chunk)] == LINES
        backwards = [[record.raw for record in read(chunk)] for chunk in reversed(chunks)]
        assert [raw for lines in reversed(backwards) for raw in lines] == LINES


def test_a_cut_compressed_file_never_ends_in_silence(tmp_path: Path) -> None:
    """Wherever a gzip or zstd file is cut, also between two frames' headers, the plan fails and names the file."""
    for suffix, one in ((".gz", gzip.compress(CONTENT, mtime=0)), (".zst", zstd(CONTENT))):
        stored = one + one
        for length in [*range(0, 12), *range(12, len(stored), 61), *range(len(one) + 1, len(one) + 5), len(stored) - 1]:
            path = write(tmp_path, f"cut.jsonl{suffix}", stored[:length])
            if length != len(one):
                with pytest.raises(InputError, match=r"cut\.jsonl"):
                    plan([path])


def test_garbage_after_a_compressed_file_is_damage(tmp_path: Path) -> None:
    """Bytes behind the last member or frame are not passed over."""
    for suffix, stored in ((".gz", gzip.compress(CONTENT)), (".zst", zstd(CONTENT))):
        with pytest.raises(InputError, match="damaged"):
            plan([write(tmp_path, f"a.jsonl{suffix}", stored + b"garbage!")])


def test_a_file_that_changed_after_the_plan_is_refused(tmp_path: Path) -> None:
    """A chunk whose lines are no longer there, or no longer as many, raises instead of giving fewer records."""
    for name, pack in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)):
        for after in (CONTENT[:-40], CONTENT.replace(b"\n", b" ", 3), b""):
            path = write(tmp_path, name, pack(CONTENT))
            chunks = plan([path], 4096)[1]
            write(tmp_path, name, pack(after) if after else b"")
            with pytest.raises(InputError, match=r"a\.jsonl"):
                for chunk in chunks:
                    list(read(chunk))


def test_bad_paths_are_named(tmp_path: Path) -> None:
    """Missing files, directories, repeated and foreign files are refused by name, each with what to do."""
    good = write(tmp_path, "a.jsonl", CONTENT)
    for paths, text in (
        ([tmp_path / "none.jsonl"], "none.jsonl: cannot be opened"),
        ([tmp_path], "is a directory; give the files in it"),
        ([good, tmp_path / "." / "a.jsonl"], "is the same file as"),
        ([write(tmp_path, "a.parquet", b"PAR1\0\0")], "a.parquet: cannot be read"),
        ([write(tmp_path, "b.parquet", CONTENT)], "does not begin as Parquet"),
        ([write(tmp_path, "a.parquet.gz", gzip.compress(b"PAR1\0\0"))], "looks like compressed Parquet"),
        ([write(tmp_path, "a.bin", b"\x01\0\0")], "binary file of unknown kind"),
        ([write(tmp_path, "a.json", b'[\n {"a": 1},\n {"a": 2}\n]\n')], "jq -c"),
        ([write(tmp_path, "b.json", b'[{"a": 1}]')], "jq -c"),
    ):
        with pytest.raises(InputError, match=text):
            plan(paths)


def test_paths_keep_the_form_in_which_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path stays relative, so that equal builds in two places are equal."""
    write(tmp_path, "a.jsonl", CONTENT)
    monkeypatch.chdir(tmp_path)
    files, chunks = plan(["./a.jsonl"])
    assert files[0].path == chunks[0].path == "./a.jsonl"


def test_documents_are_one_record(tmp_path: Path) -> None:
    """Trajectories, and a `.json` of one object over many lines, are one record; `.json` lines stay lines."""
    whole = json.dumps({"history": [{"role": "user"}]}, indent=2).encode()
    for name in ("a.traj", "a.traj.json", "a.json"):
        assert raws(write(tmp_path, name, whole + b"\n"), chunk_bytes=8) == [whole]
    assert raws(write(tmp_path, "b.traj.gz", gzip.compress(whole)), chunk_bytes=8) == [whole]
    assert raws(write(tmp_path, "lines.json", CONTENT)) == LINES
    assert raws(write(tmp_path, "bad.json", b"{bad\n" + CONTENT)) == [b"{bad", *LINES]


def test_an_empty_file_has_no_chunk_and_blank_lines_are_records(tmp_path: Path) -> None:
    """Blank lines are yielded and known as blank, so that the ledger can count them."""
    assert plan([write(tmp_path, "empty.jsonl", b"")])[1] == []
    records = read_all(write(tmp_path, "a.jsonl", b"\n{}\n \t\r\n\n{}"))
    assert [record.blank for record in records] == [True, False, True, True, False]


def test_an_overlong_line_is_cut_and_the_next_is_whole(tmp_path: Path) -> None:
    """A line one byte over the limit is oversize, a line at the limit is not, and reading goes on after it."""
    for end in (b"\n", b"\r\n"):
        data = end.join([b"a" * 2000, b"b" * 2001, b"c" * 3_000_000, b"{}", b"d" * 2001])
        path = write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + data)
        records = list(read(plan([path])[1][0], max_line_bytes=2000))
        assert [r.oversize for r in records] == [False, True, True, False, True]
        assert [len(r.raw) for r in records] == [2000, 1024, 1024, 2, 1024]
        with pytest.raises(RejectedRow, match="line_too_long"):
            parse(records[1])
    document = list(read(plan([write(tmp_path, "a.traj", b"x\n" * 5000)])[1][0], max_line_bytes=2000))
    assert [(r.oversize, len(r.raw)) for r in document] == [(True, 1024)]


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"{bad", "invalid_json"),
        (b"", "invalid_json"),
        (b'{"messages": [{"role": "us', "invalid_json"),
        (b'{"a": 1} {"b": 2}', "invalid_json"),
        (b'{"a": 1}\x00', "invalid_json"),
        (b'{"a": "\x01"}', "invalid_json"),
        (b"{'a': 1}", "invalid_json"),
        (b'{"a": 1,}', "invalid_json"),
        (b'\xef\xbb\xbf{"a": 1}', "invalid_json"),
        ('{"a": "é"}'.encode("utf-16"), "invalid_json"),
        ('{"a": "é"}'.encode("utf-16-be"), "invalid_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"a": "\xff"}', "invalid_utf8"),
        (b'{"a": "\xed\xa0\xbd\xed\xb8\x80"}', "invalid_utf8"),
        (b'{"a": "\\ud800"}', "lone_surrogate"),
        (b'{"\\udfff": 1}', "lone_surrogate"),
        (b'{"a": 1, "a": 1}', "duplicate_key"),
        (b'{"a": 1, "\\u0061": 2}', "duplicate_key"),
        (b'{"k\\\\": 1, "k\\\\" : 2}', "duplicate_key"),
        (b'{"a": "\\u0022\\u0022", "b": 1, "b": 1}', "duplicate_key"),
        (b'{"a": NaN}', "not_finite"),
        (b'{"a": -Infinity}', "not_finite"),
        (b'{"a": 1e999}', "not_finite"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "too_deep"),
        (b"[" * 100_000, "too_deep"),
        (b"[]", "not_an_object"),
        (b"42", "not_an_object"),
        (b'"{}"', "not_an_object"),
        (b"null", "not_an_object"),
    ],
)
def test_each_kind_of_bad_line_has_its_reason(raw: bytes, expected: str) -> None:
    """The reason of a rejected line is the right one, not merely one."""
    assert reason(raw).value == expected


def test_unusual_but_right_lines_are_read() -> None:
    """Surrogate pairs, NUL escapes, raw U+2028, a carriage return, 64 levels and a meant null are no mistakes."""
    for raw, value in (
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"a": "\\u0000\\ud83d\\ude00\\u0022"}', {"a": '\0\U0001f600"'}),
        ('{"a": "x\u2028y"}'.encode(), {"a": "x\u2028y"}),
        (b'{"a": ""}\r', {"a": ""}),
        (b'{"a": null, "b": 1e300}', {"a": None, "b": 1e300}),
    ):
        assert parse(Record("f", 1, 0, raw)) == value
    parse(Record("f", 1, 0, b'{"a":' * 64 + b"1" + b"}" * 64))


def test_malformed_lines_among_good_ones_are_counted_one_by_one(tmp_path: Path) -> None:
    """Two good lines and five bad ones stay seven records, and the bad ones are told apart."""
    path = write(tmp_path, "a.jsonl", b'{"a": 1}\n{bad\n[]\n42\n{"a": "\xff"}\n{"a": 2}\n{"a": "cu')
    outcomes = []
    for record in read_all(path):
        try:
            outcomes.append(str(parse(record)["a"]))
        except RejectedRow as error:
            outcomes.append(error.reason.value)
    assert outcomes == ["1", "invalid_json", "not_an_object", "not_an_object", "invalid_utf8", "2", "invalid_json"]
