"""Tables as input: every row is one record, and no row gets a key that it did not have."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chatmask
from chatmask import columns
from chatmask.conversation import normalise
from chatmask.errors import InputError, RejectedRow
from chatmask.pipeline import MAX_CHUNK, MIN_CHUNK, _chunk_bytes, build, default_directory
from chatmask.records import Record, parse, plan, read, size_of

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "Add 2 and 2."}
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"x": 2, "y": None}}}
TURNS: list[Json] = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "4"}]
KINDS = ["parquet", "dataset"]


def save(folder: Path, kind: str, table: pa.Table, rows: int = 1000, files: int = 1) -> Path:
    """A table as a Parquet file, or as a dataset directory of several files, in blocks of this many rows."""
    if kind == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=rows)
        return folder / "a.parquet"
    path = folder / "a"
    path.mkdir()
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    each = -(-len(table) // files)
    for i, name in enumerate(names):
        with pa.ipc.new_stream(path / name, table.schema) as writer:
            writer.write_table(table.slice(i * each, each), rows)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")
    return path


def records(path: Path, chunk_bytes: int = 1 << 20) -> list[Record]:
    """All records of an input, over all of its chunks."""
    return [record for chunk in plan([path], chunk_bytes)[1] for record in read(chunk)]


def written(column: pa.Array) -> list[Any]:
    """What a column becomes in the JSON of its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), "dataset", pa.table({"c": column}))
        return [parse(record)["c"] for record in records(path)]


def without_nulls(value: Any) -> Any:
    """A value without the keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


# --- values -----------------------------------------------------------------------------------------------------------

leaves = st.none() | st.text('a"\\\n\u2028é\U0001f600', max_size=4)
# One shape for all rows, as Arrow wants it: texts in structs in lists in structs.
inner = st.dictionaries(st.sampled_from(["p", "q", 'k"ey']), leaves, max_size=3)
values = st.fixed_dictionaries(
    {},
    optional={
        "text": leaves,
        "list": st.none() | st.lists(st.none() | inner, max_size=3),
        "struct": st.none() | inner,
        "number": st.none() | st.integers(-(2**63), 2**63 - 1),
        "float": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.none() | st.booleans(),
    },
)


@given(st.lists(values, min_size=1, max_size=6), st.integers(0, 3), st.sampled_from(KINDS))
@settings(max_examples=100, deadline=None)
def test_no_row_gets_a_key_that_it_did_not_have(data: list[Json], sliced: int, kind: str) -> None:
    """A row comes back as it was given, without nulls in its structs, whatever keys the rows beside it have."""
    text, number = pa.string(), pa.int64()
    struct = pa.struct([("p", text), ("q", text), ('k"ey', text)])
    fields = [("text", text), ("list", pa.list_(struct)), ("struct", struct), ("number", number), ("float", pa.float64())]
    column = pa.array(data, pa.struct([*fields, ("flag", pa.bool_())])).slice(sliced)
    with tempfile.TemporaryDirectory() as folder:
        found = [parse(record) for record in records(save(Path(folder), kind, pa.table({"c": column}), rows=2), 1)]
    assert found == [{"c": without_nulls(value)} for value in data[sliced:]]


def test_nulls_stay_where_none_are_invented() -> None:
    """A null column, element of a list and entry of a map stay; a null key of a struct goes, at any depth."""
    kind = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.struct([("c", pa.int64())])))])
    assert written(pa.array([None, {"a": None, "b": [None, {"c": None}]}], kind)) == [None, {"b": [None, {}]}]
    maps = pa.array([[("x", None), ("y", 1)], None, [("z", 2)], []], pa.map_(pa.string(), pa.int64()))
    assert written(maps) == [{"x": None, "y": 1}, None, {"z": 2}, {}]
    assert written(maps.slice(1, 2)) == [None, {"z": 2}]
    assert written(pa.nulls(2)) == [None, None]
    assert written(pa.array([{}, None], pa.struct([]))) == [{}, None]


@pytest.mark.parametrize(
    "kind",
    [
        pa.map_(pa.string(), pa.int64()),
        pa.list_(pa.int64()),
        pa.list_view(pa.int64()),
        pa.list_(pa.int64(), 2),
        pa.struct([("a", pa.list_(pa.int64()))]),
        pa.dictionary(pa.int8(), pa.int64()),
    ],
    ids=str,
)
def test_long_blocks_are_cut_at_the_right_values(kind: pa.DataType) -> None:
    """In a block of many more rows than are decoded at a time, each row keeps its own values."""
    numbers = [None if i % 5 == 0 else [i, i + 1] for i in range(3 * columns.BATCH_ROWS + 1)]
    given: list[Any] = list(numbers)
    expected: list[Any] = list(numbers)
    if pa.types.is_map(kind):
        given = [pair and [(str(n), n) for n in pair] for pair in numbers]
        expected = [pair and {str(n): n for n in pair} for pair in numbers]
    elif pa.types.is_struct(kind):
        given = expected = [pair and {"a": pair} for pair in numbers]
    elif pa.types.is_dictionary(kind):
        given = expected = [pair and pair[0] % 9 for pair in numbers]
    assert written(pa.array(given, kind)) == expected


def test_json_inside_a_table_stands_as_it_was_written() -> None:
    """Values that Arrow knows as JSON are taken over with their nulls and digits, also inside structs and lists."""
    texts = pa.array(['{"a": null, "n": 123456789012345678901234567890}', None, "null", "no JSON", '{"a": 1, "a": 2}'])
    kind = pa.ExtensionArray.from_storage(pa.json_(), texts)
    expected = [{"a": None, "n": 123456789012345678901234567890}, None, None, "no JSON"]
    assert written(kind.slice(0, 4)) == expected
    nested = pa.ListArray.from_arrays(pa.array([0, 4]), pa.StructArray.from_arrays([kind], ["j"]))
    assert written(nested) == [[{"j": expected[0]}, {}, {"j": None}, {"j": "no JSON"}]]
    with pytest.raises(RejectedRow, match="duplicate_key"):
        written(kind)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
        (pa.array(["é"], pa.large_string()), ["é"]),
        (pa.array(["é"], pa.string_view()), ["é"]),
        (pa.array([[1], None, [2, 3]], pa.large_list(pa.uint8()))[1:], [None, [2, 3]]),
        (pa.array([[1, 1], None, [2, 3]], pa.list_(pa.int8(), 2))[1:], [None, [2, 3]]),
        (pa.array([[1], None, [2, 3]], pa.list_view(pa.int8()))[1:], [None, [2, 3]]),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (pa.array([0.5], pa.float16()), [0.5]),
        (pa.array([0.1, float("nan"), None]), [0.1, None, None]),
        (pa.array([decimal.Decimal("1.20")]), [1.2]),
        (pa.array([datetime.date(2024, 2, 29)]), ["2024-02-29"]),
        (pa.array([datetime.datetime(2024, 2, 29, 1, 2, 3)], pa.timestamp("ns")), ["2024-02-29 01:02:03.000000000"]),
        (pa.array([{"t": [datetime.time(1, 2)]}], pa.struct([("t", pa.list_(pa.time32("s")))])), [{"t": ["01:02:00"]}]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else None,
)
def test_types_with_a_json_form(column: pa.Array, expected: list[Any]) -> None:
    """Each type has the value that JSON has for it, whatever the array's offset."""
    assert written(column) == expected


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([[("x", 1), ("x", 1)]], pa.map_(pa.string(), pa.int64())), "duplicate_key"),
        (pa.array([math.inf]), "not_finite"),
        (pa.array([{"a": math.nan}]), "not_finite"),
        (pa.array([[math.nan]]), "not_finite"),
        (pa.Array.from_buffers(pa.string(), 1, pa.array([b'a"\xff\xed\xa0\x80']).buffers()), "invalid_utf8"),
    ],
)
def test_a_bad_value_rejects_its_row_by_name(column: pa.Array, reason: str) -> None:
    """What JSON lines may not hold, a table may not hold either; the rows beside are read."""
    with pytest.raises(RejectedRow, match=reason):
        written(column)


def test_a_bad_row_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    """Of three rows the one with broken text is rejected, and the others are read."""
    column = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"b"]).buffers())
    good, bad, also_good = records(save(tmp_path, "parquet", pa.table({"c": column})))
    assert (parse(good), parse(also_good)) == ({"c": "a"}, {"c": "b"})
    with pytest.raises(RejectedRow, match="invalid_utf8"):
        parse(bad)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (pa.table({"image": [b"x"]}), "column `image` has values of type binary"),
        (pa.table({"a": [{"b": [b"x"]}]}), "column `a` has values of type binary"),
        (pa.table({"a": pa.array([[(1, "x")]], pa.map_(pa.int64(), pa.string()))}), "keys that are int64"),
        (pa.table({"a": [datetime.timedelta(1)]}), "column `a` has values of type duration"),
        (pa.table([pa.array([1]), pa.array([2])], ["a", "a"]), "two columns `a`"),
        (pa.table({"s": pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])}), "two fields `a`"),
    ],
)
def test_columns_without_a_json_form_are_named(tmp_path: Path, table: pa.Table, text: str) -> None:
    """A column that cannot be written as JSON is refused before anything is built, by name."""
    with pytest.raises(InputError, match=text):
        plan([save(tmp_path, "dataset", table)])


# --- conversations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_of_either_form(tmp_path: Path, kind: str) -> None:
    """Messages as structs lose the keys of their neighbours; messages and tools as JSON text keep every null."""
    other = [USER, {"role": "assistant", "content": "x", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"default": None}}}]
    table = pa.table({"messages": [TURNS, other], "tools": [json.dumps(tools), None]})
    found = [normalise(parse(record)) for record in records(save(tmp_path, kind, table))]
    calls = [{**CALL, "function": {"name": "add", "arguments": {"x": 2}}}]
    assert found[0].messages == [USER, {"role": "assistant", "content": None, "tool_calls": calls}, TURNS[2]]
    assert found[0].tools == tools and found[1].tools is None
    assert found[1].messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    as_text = pa.table({"messages": [json.dumps(TURNS)], "tools": [json.dumps(tools)]})
    (tmp_path / "text").mkdir()
    (record,) = records(save(tmp_path / "text", kind, as_text))
    assert (normalise(parse(record)).messages, normalise(parse(record)).tools) == (TURNS, tools)


def test_what_the_datasets_library_saves(tmp_path: Path) -> None:
    """A dataset as that library writes it is read alike from its directory and from its Parquet file; splits are named."""
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [USER, {"role": "assistant", "content": f"{i}", "weight": i % 2}]} for i in range(5)]
    rows[2]["messages"][0] = {**USER, "name": "n"}
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(tmp_path / "all", num_shards=2)
    dataset.to_parquet(tmp_path / "all.parquet")
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "splits")
    for path in (tmp_path / "all", tmp_path / "all.parquet", tmp_path / "splits" / "train"):
        assert [parse(record) for record in records(path)] == rows
    with pytest.raises(InputError, match="splits/train"):
        plan([tmp_path / "splits"])
    dataset.select([]).save_to_disk(tmp_path / "none")
    assert plan([tmp_path / "none"])[1] == []


# --- files ------------------------------------------------------------------------------------------------------------

NUMBERS = pa.table({"n": list(range(500)), "text": ["x" * (i % 90) for i in range(500)]})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 7, 100, 500])
@pytest.mark.parametrize("chunk_bytes", [1, 999, 8192, 1 << 20])
def test_every_row_is_in_one_chunk(tmp_path: Path, kind: str, block: int, chunk_bytes: int) -> None:
    """Chunks tile the rows in order, whatever the size of blocks and chunks, and can be read in any order."""
    path = save(tmp_path, kind, NUMBERS, block, files=3)
    chunks = plan([path], chunk_bytes)[1]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    read_backwards = {chunk.index: list(read(chunk)) for chunk in reversed(chunks[:60])}
    for chunk in chunks[:60]:
        assert [r.line for r in read_backwards[chunk.index]] == list(range(chunk.line, chunk.line + chunk.lines))
        assert [parse(r)["n"] for r in read_backwards[chunk.index]] == [r.line - 1 for r in read_backwards[chunk.index]]
    assert [chunk.line for chunk in chunks] == [1 + sum(c.lines for c in chunks[:i]) for i in range(len(chunks))]
    assert sum(chunk.lines for chunk in chunks) == 500 and all(chunk.lines for chunk in chunks)
    if chunk_bytes == 1 << 20:
        assert len(chunks) == 1
    elif chunk_bytes == 8192:
        assert len(chunks) > 1


def test_the_hash_is_over_all_files(tmp_path: Path) -> None:
    """A Parquet file has its own hash; that of a directory changes with each of its files, and with their order."""
    parquet = save(tmp_path, "parquet", NUMBERS)
    (file,) = plan([parquet])[0]
    assert (file.bytes, file.sha256) == (parquet.stat().st_size, hashlib.sha256(parquet.read_bytes()).hexdigest())
    path = save(tmp_path, "dataset", NUMBERS, files=2)
    (whole,) = plan([path])[0]
    assert whole.path == str(path) and whole.bytes == sum(part.stat().st_size for part in path.iterdir())
    shutil.copytree(path, tmp_path / "copy")
    assert plan([tmp_path / "copy"])[0][0].sha256 == whole.sha256
    (path / "dataset_info.json").write_text('{"description": ""}')
    assert plan([path])[0][0].sha256 != whole.sha256


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_is_cut_or_changed_is_refused(tmp_path: Path, kind: str) -> None:
    """Wherever a file is cut, the plan fails and names it; a table that has other rows than planned is not read."""
    path = save(tmp_path, kind, NUMBERS, 100)
    chunks = plan([path], 4096)[1]
    file = path if kind == "parquet" else path / "data-00000-of-00001.arrow"
    stored = file.read_bytes()
    for length in [*range(0, 9), *range(9, len(stored), 997), len(stored) - 1]:
        file.write_bytes(stored[:length])
        with pytest.raises(InputError, match=r"a(/data-|\.parquet)"):
            plan([path])
        with pytest.raises(InputError, match=r"a(/data-|\.parquet)"):
            list(read(chunks[0]))
    file.unlink()
    with pytest.raises(InputError, match="a"):
        list(read(chunks[0]))
    shutil.rmtree(path, ignore_errors=True)
    save(tmp_path, kind, NUMBERS.slice(1), 100)
    with pytest.raises(InputError, match="changed since it was planned"):
        list(read(chunks[0]))


def test_damaged_data_of_a_sound_file_is_named(tmp_path: Path) -> None:
    """Parquet pages that cannot be decompressed raise an InputError, not fewer rows."""
    path = save(tmp_path, "parquet", NUMBERS)
    stored = bytearray(path.read_bytes())
    stored[40:400] = b"\xff" * 360
    path.write_bytes(stored)
    with pytest.raises(InputError, match=r"a\.parquet"):
        records(path)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("{", "does not list data files"),
        ("[]", "does not list data files"),
        ('{"_data_files": [{"filename": "../b.arrow"}]}', "outside of the directory"),
        ('{"_data_files": [{"filename": 1}]}', "outside of the directory"),
        ('{"_data_files": [{"filename": "none.arrow"}]}', "none.arrow"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}', "index of an old release"),
    ],
)
def test_a_bad_dataset_directory_is_named(tmp_path: Path, state: str, text: str) -> None:
    """A directory whose list of files is damaged, or leads out of it, is refused."""
    (tmp_path / "state.json").write_text(state)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(InputError, match=text):
        plan([tmp_path])


def test_overlong_rows_are_cut(tmp_path: Path) -> None:
    """A row whose JSON is longer than a line may be is oversize, and the next is whole."""
    path = save(tmp_path, "parquet", pa.table({"c": ["x" * 5000, "y"]}))
    first, second = read(plan([path])[1][0], max_line_bytes=2000)
    assert (first.oversize, len(first.raw), second.oversize, second.raw) == (True, 1024, False, b'{"c":"y"}')


def test_few_rows_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a row group is, its rows are decoded a few at a time."""
    seen: list[int] = []
    encode = columns._json_rows
    monkeypatch.setattr(columns, "_json_rows", lambda batch, name: seen.append(len(batch)) or encode(batch, name))
    for kind in KINDS:
        path = save(tmp_path, kind, NUMBERS, 500)
        assert len(records(path)) == 500
    assert max(seen) == columns.BATCH_ROWS and sum(seen) == 1000


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_builds_the_rows_that_its_json_lines_build(tmp_path: Path, kind: str) -> None:
    """A build from a table has the ids and masks of one from the same records as JSON lines, and both count every row."""
    chats = [[USER, {"role": "assistant", "content": f"It is {n}."}] for n in range(3)]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    table = save(tmp_path, kind, pa.table({"messages": [json.dumps(chat) for chat in chats]}))
    built = [build(path, "ling-3.0", tmp_path / name, demo=True) for path, name in ((lines, "d1"), (table, "d2"))]
    assert [result.summary["kept"] for result in built] == [3, 3]
    rows = [
        [(r["input_ids"].tolist(), r["loss_mask"].tolist()) for r in chatmask.load(b.dataset, allow_demo=True)] for b in built
    ]
    assert rows[0] == rows[1]


def test_the_size_of_a_directory_is_that_of_its_files(tmp_path: Path) -> None:
    """A dataset directory counts with its files when the length of shards is chosen; what is no input counts nothing."""
    path = save(tmp_path, "dataset", pa.table({"c": list(range(1000))}))
    assert size_of(path) == sum(part.stat().st_size for part in path.iterdir()) == plan([path])[0][0].bytes
    assert (size_of(tmp_path), size_of(tmp_path / "none")) == (0, 0)
    with open(path / "data-00000-of-00001.arrow", "ab") as file:
        file.truncate(MIN_CHUNK * 64 + 64)  # sparse
    assert MIN_CHUNK < _chunk_bytes([path]) < MAX_CHUNK


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.traj", "a.traj.json", "a", "x/a/"])
def test_the_default_directory_drops_every_known_ending(name: str) -> None:
    """A dataset is named for its input without the ending of any kind that is read."""
    assert default_directory(name, "s") == Path("a.s")
