"""Shards: what is written comes back, equal rows give equal bytes, and no row that breaks a rule is written or accepted."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import make_row, make_rows

from chatmask import shards as shards_module
from chatmask.arrow import FEATURES, SCHEMA, Columns, batch_of
from chatmask.errors import CheckFailed, DamagedDataset, StorageError
from chatmask.example import Row, Span
from chatmask.shards import ShardInfo, ShardWriter, check_shard, read_shard
from chatmask.storage import Storage

SPANS = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=6)
ROWS = st.lists(SPANS.map(lambda spans: make_row([*spans, (2, True)], len(spans))), max_size=12)


def write(path: Path, rows: list[Row]) -> ShardInfo:
    with ShardWriter(Storage(), path) as writer:
        for row in rows:
            writer.add(row)
    return writer.info


def write_unchecked(path: Path, batches: list[pa.RecordBatch]) -> ShardInfo:
    """Write batches as they are, as someone would who forges a shard and its entry."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    data = path.read_bytes()
    columns = [Columns.of(batch) for batch in batches]
    tokens, ones = sum(len(c.ids) for c in columns), sum(int(np.count_nonzero(c.mask)) for c in columns)
    return ShardInfo(path.name, sum(b.num_rows for b in batches), tokens, ones, len(data), hashlib.sha256(data).hexdigest())


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_rows_come_back_and_counts_are_true(rows: list[Row]) -> None:
    """Any valid rows pass the full check and come back with the same ids, mask, spans and counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data-00000-of-00001.arrow"
        info = write(path, rows)
        check_shard(path, info, full=True)
        table = read_shard(path)

        assert os.listdir(folder) == [path.name]
        assert (info.rows, info.tokens) == (len(rows), sum(len(row.input_ids) for row in rows))
        assert info.supervised_tokens == sum(int(row.loss_mask.sum()) for row in rows)
        assert table.column("input_ids").to_pylist() == [row.input_ids.tolist() for row in rows]
        assert table.column("loss_mask").to_pylist() == [row.loss_mask.tolist() for row in rows]
        for batch in table.to_batches():
            assert [Columns.of(batch).spans(row) for row in range(batch.num_rows)] == [row.spans for row in rows]


def test_equal_rows_give_equal_bytes_in_any_process(tmp_path: Path) -> None:
    """Three processes with different hash seeds write the same bytes, whatever memory the rows were cut from."""
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); from rows import Storage, make_rows, stage\n"
        "print(stage(Storage(), Path(sys.argv[1]), [make_rows(700)])[0].sha256)"
    )
    hashes = set()
    for seed in ("0", "1", "random"):
        command = [sys.executable, "-c", program, str(tmp_path / seed), str(Path(__file__).parent)]
        hashes.add(subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True).stdout)
    rows = make_rows(700)
    joined = np.concatenate([row.input_ids for row in rows])
    cuts = np.cumsum([0, *(len(row.input_ids) for row in rows)])
    sliced = [replace(row, input_ids=joined[cuts[index] : cuts[index + 1]]) for index, row in enumerate(rows)]

    assert hashes == {write(tmp_path / "data-here", sliced).sha256 + "\n"}


def test_batches_end_by_rows_and_by_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record batch ends at the row limit or at the row that reaches the token limit."""
    monkeypatch.setattr(shards_module, "BATCH_ROWS", 4)
    monkeypatch.setattr(shards_module, "BATCH_TOKENS", 100)
    sizes = [1, 1, 1, 1, 1, 150, 60, 60, 1]
    write(tmp_path / "shard", [make_row([(size, True)]) for size in sizes])

    assert [batch.num_rows for batch in read_shard(tmp_path / "shard").to_batches()] == [4, 2, 2, 1]


def test_the_schema_is_what_datasets_writes(tmp_path: Path) -> None:
    """Types and metadata are byte for byte those that `datasets` itself would save for these features."""
    features = datasets.Features.from_dict(FEATURES)

    assert features.arrow_schema.equals(SCHEMA, check_metadata=True)


def test_pyarrow_reads_the_stream_to_its_end(tmp_path: Path) -> None:
    """The stream is a plain Arrow IPC stream, with its end marker as the last 8 bytes."""
    write(tmp_path / "shard", make_rows(3))
    data = (tmp_path / "shard").read_bytes()

    assert data.endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")
    assert pa.ipc.open_stream(data).read_all().num_rows == 3


GOOD = make_row([(3, False), (2, True), (1, False), (2, True)])
BROKEN = {
    "mask beyond the spans": replace(GOOD, loss_mask=np.array([1, 0, 0, 1, 1, 0, 1, 1], dtype=np.uint8)),
    "mask short of the spans": replace(GOOD, loss_mask=np.array([0, 0, 0, 1, 1, 0, 1, 0], dtype=np.uint8)),
    "mask value": replace(GOOD, loss_mask=np.array([0, 0, 0, 1, 1, 0, 1, 2], dtype=np.uint8)),
    "negative id": replace(GOOD, input_ids=np.array([1, 2, 3, -100, 5, 6, 7, 8], dtype=np.int32)),
    "span outside": replace(GOOD, spans=(*GOOD.spans[:3], Span(3, 6, 9, True, ""))),
    "span before": replace(GOOD, spans=(Span(0, -1, 3, False, "x"), *GOOD.spans[1:])),
    "span reversed": replace(GOOD, spans=(Span(0, 3, 2, False, "x"), *GOOD.spans[1:])),
    "spans overlap": replace(GOOD, spans=(Span(0, 0, 4, False, "x"), *GOOD.spans[1:])),
    "spans out of order": replace(GOOD, spans=(GOOD.spans[1], GOOD.spans[0], *GOOD.spans[2:])),
    "no supervision": replace(GOOD, loss_mask=np.zeros(8, dtype=np.uint8), spans=(Span(0, 0, 8, False, "flag"),)),
    "empty": make_row([]),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("before", [0, 5])
def test_a_row_that_breaks_a_rule_is_never_written_nor_accepted(tmp_path: Path, name: str, before: int) -> None:
    """The writer refuses the row and leaves no file; a forged shard with a true hash fails the full check; both name the row."""
    rows = [*make_rows(before), replace(BROKEN[name], line=4711), *make_rows(2)]
    with pytest.raises(CheckFailed, match=r"chats\.jsonl:4711"):
        write(tmp_path / "shard", rows)
    assert list(tmp_path.iterdir()) == []

    info = write_unchecked(tmp_path / "forged", [batch_of(rows)])
    check_shard(tmp_path / "forged", info, full=False)
    with pytest.raises(DamagedDataset, match=r"forged.*chats\.jsonl:4711"):
        check_shard(tmp_path / "forged", info, full=True)


@pytest.mark.parametrize("change", ["int64 ids", "bool mask", "lengths", "two dimensions"])
def test_wrong_arrays_are_refused_at_once(tmp_path: Path, change: str) -> None:
    """Arrays of another type or shape are refused by `add`, with the row's place."""
    row = {
        "int64 ids": replace(GOOD, input_ids=GOOD.input_ids.astype(np.int64)),
        "bool mask": replace(GOOD, loss_mask=GOOD.loss_mask.astype(bool)),
        "lengths": replace(GOOD, loss_mask=GOOD.loss_mask[:-1]),
        "two dimensions": replace(GOOD, input_ids=GOOD.input_ids[None], loss_mask=GOOD.loss_mask[None]),
    }[change]
    with pytest.raises(CheckFailed, match=r"chats\.jsonl:1.*int32"), ShardWriter(Storage(), tmp_path / "shard") as writer:
        writer.add(row)


def test_other_columns_and_nulls_are_refused(tmp_path: Path) -> None:
    """A forged shard with another schema, or with a null, is refused."""
    other = pa.record_batch({"input_ids": [[1]]})
    with pa.OSFile(str(tmp_path / "other"), "wb") as sink, pa.ipc.new_stream(sink, other.schema) as stream:
        stream.write_batch(other)
    with pytest.raises(DamagedDataset, match="columns are not chatmask's"):
        read_shard(tmp_path / "other")

    batch = batch_of([GOOD])
    source = pa.array([{"file": None, "line": 1}], type=SCHEMA.field("source").type)
    info = write_unchecked(
        tmp_path / "null", [pa.RecordBatch.from_arrays([*batch.columns[:3], source, batch.column(4)], schema=SCHEMA)]
    )
    with pytest.raises(DamagedDataset, match="source holds 1 nulls"):
        check_shard(tmp_path / "null", info, full=True)


def test_offsets_that_lead_outside_are_found(tmp_path: Path) -> None:
    """Offsets beyond the values, which Arrow itself accepts, are found by the full check before they are used."""
    offsets = pa.array(np.array([0, 900, 8], dtype=np.int64))
    values = [None, offsets.buffers()[1]]
    bad = pa.Array.from_buffers(pa.large_list(pa.int32()), 2, values, children=[pa.array(GOOD.input_ids)])
    columns = batch_of([make_row([(4, True)])] * 2).columns
    batch = pa.RecordBatch.from_arrays([bad, *columns[1:]], schema=SCHEMA)
    with pa.OSFile(str(tmp_path / "bad"), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as stream:
        stream.write_batch(batch)
    data = (tmp_path / "bad").read_bytes()
    info = ShardInfo("bad", 2, 8, 8, len(data), hashlib.sha256(data).hexdigest())

    with pytest.raises(DamagedDataset, match="Arrow data is not valid"):
        check_shard(tmp_path / "bad", info, full=True)


@pytest.mark.parametrize("kind", ["missing", "symlink", "fifo", "directory"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    """A missing file, link, pipe or directory is refused before any open (a pipe would block)."""
    info = write(tmp_path / "real", [GOOD])
    path = tmp_path / "shard"
    if kind == "symlink":
        path.symlink_to(tmp_path / "real")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()

    with pytest.raises(DamagedDataset, match="shard"):
        check_shard(path, info, full=True)


def test_a_failing_disk_leaves_no_shard_under_its_name(tmp_path: Path) -> None:
    """Whichever operation fails, either the shard is whole or there is none of that name."""

    class FailOnce(Storage):
        def __init__(self, at: int) -> None:
            self.left = at

        def before(self, operation: str, path: Path, size: int) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "No space left on device")

    reference = write(tmp_path / "shard", make_rows(5))
    for at in range(1, 30):
        path = tmp_path / str(at) / "shard"
        path.parent.mkdir()
        try:
            with ShardWriter(FailOnce(at), path) as writer:
                for row in make_rows(5):
                    writer.add(row)
        except StorageError:
            if path.exists():
                check_shard(path, reference, full=True)
            continue
        assert writer.info == reference
        assert at > 6
        return
    pytest.fail("never got through")


def test_shard_info_reads_back_and_refuses_other_things() -> None:
    """A ShardInfo survives its dict; missing, extra or mistyped fields are refused."""
    info = ShardInfo("data-00000-of-00001.arrow", 1, 2, 1, 100, "0" * 64)

    assert ShardInfo.from_dict(info.to_dict()) == info
    for change in ({"rows": -1}, {"rows": True}, {"rows": "1"}, {"file": 3}, {"more": 1}):
        with pytest.raises(ValueError, match="shard"):
            ShardInfo.from_dict({**info.to_dict(), **change})
    nonsense: list[object] = [None, [], {}]
    for value in nonsense:
        with pytest.raises(ValueError, match="shard entry"):
            ShardInfo.from_dict(value)
