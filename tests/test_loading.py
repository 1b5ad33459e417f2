"""From staged shards to a loaded dataset: commit, damage, refusals, labels, collation."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import MANIFEST, REJECTS, make_dataset, make_row, make_rows, stage, tree

from chatmask import shards as shards_module
from chatmask.arrow import FEATURES
from chatmask.canonical import readable_json
from chatmask.errors import ChatmaskError, CheckFailed, DamagedDataset, MissingPackage, OptionError
from chatmask.loading import collate, labels_of, load, verify
from chatmask.manifest import (
    canonical_json,
    commit,
    differences,
    find_shard,
    fingerprint,
    finished_shard,
    read_manifest,
    read_receipt,
    receipt_path,
    seal,
    write_receipt,
)
from chatmask.shards import shard_name
from chatmask.storage import Storage, staging

SHARDS = [make_rows(5, 1), [], make_rows(8, 2)]


class Killed(BaseException):
    """Stands for a kill: no operation after it reaches the disk."""


class KillAt(Storage):
    """Dies at the n-th operation; a write that it dies in leaves half its bytes."""

    def __init__(self, at: int) -> None:
        self.left = at

    def before(self, operation: str, path: Path, size: int) -> None:
        self.left -= 1
        if self.left <= 0:
            raise Killed

    def write(self, fd: int, data: bytes | memoryview, path: Path) -> None:
        if self.left == 1:
            os.write(fd, data[: len(data) // 2])
        super().write(fd, data, path)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of three shards (one empty) with several record batches each."""
    monkeypatch.setattr(shards_module, "BATCH_ROWS", 3)
    make_dataset(tmp_path / "out", SHARDS)
    return tmp_path / "out"


def reseal(directory: Path, **changes: Any) -> None:
    """Forge a manifest: change fields and seal it again."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    (directory / "manifest.json").write_bytes(readable_json(seal({**manifest, **changes})))


def pipe_manifest(directory: Path) -> None:
    """Make a directory whose manifest is a pipe, which would block whoever opens it."""
    directory.mkdir()
    os.mkfifo(directory / "manifest.json")


# -- what is written is what is loaded


def test_rows_come_back(built: Path) -> None:
    """Rows, length, slices, negative indices and iteration agree with what was written."""
    rows = [row for shard in SHARDS for row in shard]
    data = load(built)

    assert len(data) == len(rows) == 13
    for row, got in zip(rows, data, strict=True):
        assert got["input_ids"].tolist() == row.input_ids.tolist()
        assert got["loss_mask"].tolist() == row.loss_mask.tolist()
        assert got["spans"] == row.spans
        assert got["source"] == {"file": row.file, "line": row.line}
        assert got["sample"] == {"index": row.index, "variant": row.variant}
        assert (got["input_ids"].dtype, got["loss_mask"].dtype, got["labels"].dtype) == (np.int32, np.uint8, np.int64)
    assert [row["source"] for row in data[-2:]] == [data[11]["source"], data[-1]["source"]]
    for index in (13, -14):
        with pytest.raises(IndexError):
            data[index]


def test_ids_are_views_of_the_file(built: Path) -> None:
    """Opening copies nothing: ids are read-only views, and Arrow's memory does not grow."""
    before = pa.total_allocated_bytes()
    row = load(built, verify="off")[0]

    assert not row["input_ids"].flags.writeable
    assert not row["input_ids"].flags.owndata
    assert pa.total_allocated_bytes() - before < 4096


def test_datasets_reads_the_directory_as_it_is(built: Path) -> None:
    """`datasets.load_from_disk` gives the same rows, without conversion, an empty shard included."""
    theirs, ours = datasets.load_from_disk(str(built)), load(built)

    assert len(theirs) == len(ours)
    assert theirs.features == datasets.Features.from_dict(FEATURES)
    for a, b in zip(theirs, ours, strict=True):
        assert a["input_ids"] == b["input_ids"].tolist()
        assert a["loss_mask"] == b["loss_mask"].tolist()
        assert (a["source"], a["sample"]) == (b["source"], b["sample"])


def test_equal_builds_are_equal_bytes(built: Path, tmp_path: Path) -> None:
    """The same shards give the same directory under another name, with nothing else in it."""
    make_dataset(tmp_path / "other", SHARDS)

    assert tree(built) == tree(tmp_path / "other")
    names = [shard_name(index, 3) for index in range(3)]
    assert sorted(tree(built)) == sorted([*names, "dataset_info.json", "manifest.json", "rejects.jsonl", "state.json"])
    assert (built / "rejects.jsonl").read_bytes() == b"".join(REJECTS)


def test_a_dataset_can_go_to_worker_processes(built: Path) -> None:
    """A pickled dataset reopens its files; it is refused if the directory was built anew in between."""
    sent = pickle.dumps(load(built, shift="labels"))
    again = pickle.loads(sent)
    assert len(sent) < 1000
    assert again[3]["labels"].tolist() == load(built, shift="labels")[3]["labels"].tolist()

    make_dataset(built, [make_rows(4, 9)])
    with pytest.raises(DamagedDataset, match="built anew"):
        pickle.loads(sent)


# -- damage


def test_every_bit_flip_is_refused(built: Path) -> None:
    """200 single bit flips over all files, and one in each file's first and last byte, are all found by a plain load."""
    rng, files = random.Random(7), sorted(tree(built))
    flips: list[tuple[str, int | None]] = [(name, place) for name in files for place in (0, -1)]
    flips += [(name, None) for name in rng.choices(files, k=200)]
    for name, place in flips:
        path = built / name
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data)) if place is None else place] ^= 1 << rng.randrange(8)
        original = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(DamagedDataset, match=name):
            load(built)
        path.write_bytes(original)
    load(built)


def test_every_cut_is_refused(built: Path) -> None:
    """A file cut at a record batch border (where Arrow notices nothing) or anywhere else is refused, even unverified."""
    rng = random.Random(3)
    for name in sorted(tree(built)):
        data = (built / name).read_bytes()
        cuts = [rng.randrange(len(data)) for _ in range(20)]
        if name.endswith(".arrow"):
            reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(data))
            borders = [0]
            for message in reader:
                borders.append(borders[-1] + len(message.serialize()))
            assert borders[-1] == len(data) - 8
            cuts += borders
        for cut in cuts:
            (built / name).write_bytes(data[:cut])
            for level in ("fast", "off") if name.endswith((".arrow", "manifest.json")) else ("fast",):
                with pytest.raises(DamagedDataset, match=name):
                    load(built, verify=level)
        (built / name).write_bytes(data + b"\0")
        with pytest.raises(DamagedDataset, match=name):
            load(built)
        (built / name).write_bytes(data)
    assert verify(built)["rows"] == 13


@pytest.mark.parametrize("damage", ["deleted", "swapped", "copied over", "extra copy", "link"])
def test_deleted_swapped_and_doubled_shards_are_refused(built: Path, damage: str) -> None:
    """Whole shards in the wrong place are found."""
    first, last = built / shard_name(0, 3), built / shard_name(2, 3)
    a, b = first.read_bytes(), last.read_bytes()
    if damage == "deleted":
        last.unlink()
    elif damage == "swapped":
        first.write_bytes(b), last.write_bytes(a)
    elif damage == "copied over":
        last.write_bytes(a)
    elif damage == "extra copy":
        (built / shard_name(3, 4)).write_bytes(a)
    else:
        last.rename(built / "elsewhere")
        last.symlink_to(built / "elsewhere")

    for check in (load, verify):
        with pytest.raises(DamagedDataset, match=r"data-0000\d-of"):
            check(built)


HOSTILE = {
    "parent": "../data-00000-of-00001.arrow",
    "inner parent": "a/../b.arrow",
    "absolute": "/etc/passwd",
    "folder": "a/b.arrow",
    "backslash": "a\\b.arrow",
    "NUL": "data\0.arrow",
    "empty": "",
    "dot": ".",
    "dots": "..",
    "hidden": ".data.arrow",
    "long": "x" * 300,
    "newline": "data.arrow\n",
    "not ASCII": "dat\u0430.arrow",
    "number": 3,
    "none": None,
    "manifest itself": "Manifest.json",
    "twice": shard_name(0, 3),
    "case twin": shard_name(0, 3).upper(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_names_are_refused_before_any_open(built: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A well sealed manifest with a hostile file name is refused, and nothing but the manifest was opened."""
    shards = read_manifest(built)["shards"]
    reseal(built, shards=[*shards[:2], {**shards[2], "file": HOSTILE[kind]}])
    opened: list[Any] = []
    monkeypatch.setattr("builtins.open", lambda *args, **kwargs: opened.append(args))
    monkeypatch.setattr(pa, "memory_map", lambda *args, **kwargs: opened.append(args))
    for level in ("fast", "off"):
        with pytest.raises(DamagedDataset, match=r"manifest\.json"):
            load(built, verify=level)

    assert opened == []


@pytest.mark.parametrize("kind", ["fifo", "symlink", "device"])
def test_a_named_file_that_is_no_file_is_refused(built: Path, kind: str) -> None:
    """A pipe, link or device under a shard's or side file's name is refused at once, unverified too."""
    for name in (shard_name(2, 3), "rejects.jsonl"):
        (built / name).rename(built / "kept")
        if kind == "fifo":
            os.mkfifo(built / name)
        else:
            (built / name).symlink_to("/dev/zero" if kind == "device" else built / "kept")
        for level in ("fast", "off") if name.endswith("arrow") else ("fast",):
            with pytest.raises(DamagedDataset, match="not a regular file"):
                load(built, verify=level)
        (built / name).unlink()
        (built / "kept").rename(built / name)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.write_bytes(b"1"), "not a directory"),
        (lambda path: path.mkdir(), r"not a finished chatmask dataset"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_bytes(b"{")), "changed or cut"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_bytes(b"[" * 99_999)), "changed or cut"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_bytes(b"\xff")), "changed or cut"),
        (lambda path: (path.mkdir(), (path / "manifest.json").symlink_to("/dev/zero")), "not a regular file"),
        (pipe_manifest, "not a regular file"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_bytes(readable_json(seal({})))), "format_version is None"),
    ],
)
def test_what_is_no_dataset_says_what_it_is(tmp_path: Path, prepare: Callable[[Path], None], message: str) -> None:
    """Missing, unfinished and broken directories are told apart."""
    prepare(tmp_path / "out")

    with pytest.raises(DamagedDataset, match=message):
        load(tmp_path / "out")


@pytest.mark.parametrize(
    "changes", [{"shards": None}, {"files": []}, {"rows": 12}, {"tokens": "many"}, {"files": {"state.json": 1}}, {"shards": [{}]}]
)
def test_sealed_nonsense_is_a_damaged_dataset(built: Path, changes: dict[str, Any]) -> None:
    """A manifest with a true seal but fields that make no sense gives a DamagedDataset, no other error."""
    reseal(built, **changes)

    with pytest.raises(DamagedDataset, match=r"manifest\.json"):
        load(built)


def test_verify_counts(built: Path) -> None:
    """Verification returns the counts of what it checked."""
    rows = [row for shard in SHARDS for row in shard]

    assert verify(built) == {
        "rows": 13,
        "tokens": sum(len(row.input_ids) for row in rows),
        "supervised_tokens": sum(int(row.loss_mask.sum()) for row in rows),
        "shards": 3,
        "files": 7,
        "bytes": sum(len(data) for name, data in tree(built).items() if name != "manifest.json"),
    }


# -- what is whole and still refused


def test_zero_supervision_is_refused_at_commit_and_at_load(built: Path, tmp_path: Path) -> None:
    """A dataset that supervises nothing cannot be finished, and a forged one cannot be loaded."""
    storage = Storage()
    infos = stage(storage, tmp_path / "empty", [[]])
    with pytest.raises(CheckFailed, match="not one supervised token"):
        commit(storage, tmp_path / "empty", infos, MANIFEST, [])

    shards = [{**shard, "supervised_tokens": 0} for shard in read_manifest(built)["shards"]]
    reseal(built, shards=shards, supervised_tokens=0)
    with pytest.raises(CheckFailed, match="not one supervised token"):
        load(built, verify="off")
    reseal(built, shards=[{**shards[0], "supervised_tokens": 30}, *shards[1:]], supervised_tokens=30)
    with pytest.raises(CheckFailed, match=r"data-00002.*8 rows but only 0 supervised"):
        load(built, verify="off")


def test_demo_datasets_need_a_word(tmp_path: Path) -> None:
    """A dataset of the demo tokenizer loads only with allow_demo=True; verify does not ask."""
    make_dataset(tmp_path / "out", SHARDS, tokenizer={"sha256": "a", "demo": True})

    with pytest.raises(CheckFailed, match=r"demo tokenizer.*allow_demo=True"):
        load(tmp_path / "out")
    assert len(load(tmp_path / "out", allow_demo=True)) == verify(tmp_path / "out")["rows"]


def test_another_tokenizer_or_template_is_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tokenizer and template that the dataset was built with are accepted."""
    fake: Any = types.ModuleType("chatmask.tokenizers")
    fake.fingerprint_of = lambda tokenizer: tokenizer
    monkeypatch.setitem(sys.modules, "chatmask.tokenizers", fake)
    same = {"sha256": "a" * 64, "template_sha256": "b" * 64}

    assert len(load(built, tokenizer=same)) == 13
    with pytest.raises(CheckFailed, match="another tokenizer"):
        load(built, tokenizer={**same, "sha256": "c" * 64})
    with pytest.raises(CheckFailed, match="another chat template"):
        load(built, tokenizer={**same, "template_sha256": "c" * 64})
    reseal(built, template={})
    with pytest.raises(DamagedDataset, match=r"no template\.sha256"):
        load(built, tokenizer=same)


def test_unknown_options_and_missing_torch_are_named(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown values list the known ones; format='torch' without torch gives the install line."""
    for option in ("format", "shift", "verify"):
        with pytest.raises(OptionError, match=rf"{option}='x'.*choose one of"):
            load(built, **{option: "x"})  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackage, match="pip install torch"):
        load(built, format="torch")


# -- commit, receipts


def test_a_kill_at_any_operation_leaves_nothing_or_all_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every n: killed at the n-th operation, load refuses or all is there; the next commit gives the same tree."""
    monkeypatch.setattr(shards_module, "BATCH_ROWS", 3)
    make_dataset(tmp_path / "whole", SHARDS)
    whole = tree(tmp_path / "whole")
    for at in range(1, 200):
        out = tmp_path / str(at)
        infos = stage(Storage(), out, SHARDS)
        for info in infos:
            write_receipt(Storage(), receipt_path(out, info.file), {"fingerprint": "run", "shard": info.to_dict()})
        try:
            commit(KillAt(at), out, infos, MANIFEST, REJECTS)
        except Killed:
            if (out / "manifest.json").exists():
                verify(out)
            else:
                with pytest.raises(DamagedDataset, match="unfinished"):
                    load(out)
                assert all(finished_shard(out, info.file, "run") for info in infos)
            commit(Storage(), out, infos, MANIFEST, REJECTS)
            assert tree(out) == whole
        else:
            assert tree(out) == whole
            assert at > 25
            return
    pytest.fail("never got through")


def test_a_kill_while_replacing_an_older_dataset_never_mixes_the_two(tmp_path: Path) -> None:
    """Building over a dataset: after a kill the directory is the old one, the new one or none, and resumes to the new one."""
    new, old = [make_rows(3, 5), make_rows(2, 6)], [make_rows(4, 7), make_rows(1, 8)]
    for at in range(1, 200):
        out = tmp_path / str(at)
        make_dataset(out, [*old, make_rows(3)])
        make_dataset(out, old)
        before = tree(out)
        infos = stage(Storage(), out, new)
        try:
            sealed = commit(KillAt(at), out, infos, MANIFEST, [])
        except Killed:
            if (out / "manifest.json").exists():
                verify(out)
                assert at == 1 or tree(out).items().isdisjoint({("manifest.json", before["manifest.json"])})
            sealed = commit(Storage(), out, infos, MANIFEST, [])
        else:
            assert at > 20
            return
        assert verify(out)["rows"] == sealed["rows"] == 5
        assert len(tree(out)) == 6
    pytest.fail("never got through")


def test_commit_refuses_wrong_totals_and_lost_shards(tmp_path: Path) -> None:
    """Totals that disagree with the shards, foreign or doubled names, and a lost shard, are refused."""
    storage, out = Storage(), tmp_path / "out"
    infos = stage(storage, out, [make_rows(3), make_rows(2)])
    with pytest.raises(CheckFailed, match="says rows 6"):
        commit(storage, out, infos, {**MANIFEST, "rows": 6}, [])
    with pytest.raises(CheckFailed, match="stands twice"):
        commit(storage, out, [infos[0], infos[0]], MANIFEST, [])
    (staging(out) / infos[1].file).unlink()
    with pytest.raises(DamagedDataset, match="data-00001-of-00002"):
        commit(storage, out, infos, MANIFEST, [])
    with pytest.raises(DamagedDataset, match="unfinished"):
        load(out)


def test_a_receipt_counts_only_if_whole_and_of_this_run(tmp_path: Path) -> None:
    """A receipt that is missing, cut, flipped or of another run, or whose shard is changed, means: build the shard again."""
    storage, out = Storage(), tmp_path
    info = stage(storage, out, [make_rows(3)])[0]
    path = receipt_path(out, info.file)
    assert read_receipt(path) is None
    write_receipt(storage, path, {"fingerprint": "run", "shard": info.to_dict(), "rejects": 2})
    good = path.read_bytes()

    assert (
        finished_shard(out, info.file, "run")
        == read_receipt(path)
        == {"fingerprint": "run", "shard": info.to_dict(), "rejects": 2}
    )
    assert finished_shard(out, info.file, "another") is None
    for index in range(len(good)):
        path.write_bytes(good[:index])
        assert read_receipt(path) is None
        path.write_bytes(good[:index] + bytes([good[index] ^ 4]) + good[index + 1 :])
        assert read_receipt(path) is None
    path.write_bytes(good)
    (staging(out) / info.file).write_bytes(b"")
    assert find_shard(out, info) is None
    assert finished_shard(out, info.file, "run") is None


# -- fingerprints

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4))
def test_canonical_json_is_one_text_for_one_value(value: dict[str, Any]) -> None:
    """Key order does not matter, the text reads back, and nothing differs from itself."""
    turned = dict(reversed(value.items()))

    assert canonical_json(turned) == canonical_json(value)
    assert json.loads(canonical_json(value)) == value
    assert canonical_json(value).count(b"\n") == 1
    assert fingerprint(turned) == fingerprint(value)
    assert differences(value, turned) == []


def test_canonical_json_refuses_what_json_cannot_hold() -> None:
    """NaN, infinities, lone surrogates and objects are errors, not text."""
    for value in (float("nan"), float("inf"), "\ud800"):
        with pytest.raises(ValueError):
            canonical_json(value)
    with pytest.raises(TypeError):
        canonical_json({"path": Path("x")})


def test_differences_say_what_changed() -> None:
    """Each changed, added and removed value is one line with its dotted path; hashes are shortened."""
    old = {"template": {"sha256": "a" * 64}, "options": {"split": "trajectory", "max_length": None}, "inputs": [{"bytes": 1}]}
    new = {"template": {"sha256": "b" * 64}, "options": {"split": "trajectory", "seed": 1}, "inputs": [{"bytes": 2}]}

    assert differences(old, new) == [
        "inputs[0].bytes: changed (1 -> 2)",
        "options.max_length: removed (null)",
        "options.seed: added (1)",
        "template.sha256: changed (aaaaaaaaaaaa.. -> bbbbbbbbbbbb..)",
    ]
    assert differences({"a": 1}, {"a": True}) == ["a: changed (1 -> true)"]
    assert differences({"a": {}}, {"a": []}) == ["a: changed ({} -> [])"]


# -- labels and batches


def test_labels_of_five_tokens_by_hand() -> None:
    """Ids 10 to 14, mask 0 0 1 1 0: unshifted labels stand at their tokens, shifted ones one place earlier."""
    ids, mask = np.array([10, 11, 12, 13, 14], dtype=np.int32), np.array([0, 0, 1, 1, 0], dtype=np.uint8)

    assert labels_of(ids, mask).tolist() == [-100, -100, 12, 13, -100]
    assert labels_of(ids, mask, "labels").tolist() == [-100, 12, 13, -100, -100]
    assert labels_of(ids[:0], mask[:0], "labels").tolist() == []


def test_load_shifts_once(tmp_path: Path) -> None:
    """The shift option changes labels only; ids and mask stay."""
    row = make_row([(2, False), (2, True), (1, False)], seed=3)
    make_dataset(tmp_path / "out", [[row]])
    plain, shifted = load(tmp_path / "out")[0], load(tmp_path / "out", shift="labels")[0]
    ids = row.input_ids.tolist()

    assert plain["labels"].tolist() == [-100, -100, ids[2], ids[3], -100]
    assert shifted["labels"].tolist() == [-100, ids[2], ids[3], -100, -100]
    assert plain["input_ids"].tolist() == shifted["input_ids"].tolist() == ids
    assert plain["loss_mask"].tolist() == shifted["loss_mask"].tolist() == [0, 0, 1, 1, 0]


def test_collate_keeps_a_real_eos_when_pad_is_eos() -> None:
    """With pad = eos the row's own supervised eos keeps its label, and padding has none."""
    rows = [
        {"input_ids": np.array(ids), "loss_mask": np.array(mask), "labels": labels_of(np.array(ids), np.array(mask))}
        for ids, mask in (([5, 6, 2], [0, 1, 1]), ([7, 2], [0, 1]))
    ]
    batch = collate(rows, 2, pad_to_multiple_of=4)

    assert batch["input_ids"].tolist() == [[5, 6, 2, 2], [7, 2, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 2, -100], [-100, 2, -100, -100]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]


def test_collate_keeps_every_supervised_token(built: Path) -> None:
    """Over a whole dataset, a batch has as many labels as its rows, and unpads to them."""
    rows = load(built)[:]
    batch = collate(rows, 0, pad_to_multiple_of=8)

    assert batch["input_ids"].shape[1] % 8 == 0
    for index, row in enumerate(rows):
        real = batch["attention_mask"][index] == 1
        for name in ("input_ids", "labels", "loss_mask"):
            assert batch[name][index][real].tolist() == row[name].tolist()
        assert (batch["labels"][index][~real] == -100).all()


def test_collate_refuses_nonsense(built: Path) -> None:
    """No rows, no pad id, a bad multiple and uneven rows are errors that say what to give."""
    row = load(built)[0]
    for arguments in (
        ([], 0, 1),
        ([row], None, 1),
        ([row], -1, 1),
        ([row], True, 1),
        ([row], 0, 0),
        ([{**row, "labels": []}], 0, 1),
    ):
        with pytest.raises(OptionError):
            collate(arguments[0], arguments[1], pad_to_multiple_of=arguments[2])  # type: ignore[arg-type]


def test_torch_rows_and_batches(built: Path) -> None:
    """In torch format rows and batches are tensors with the numpy format's values."""
    torch = pytest.importorskip("torch")
    rows, ours = load(built, format="torch")[:], load(built)
    batch = collate(rows, 0)

    assert rows[0]["input_ids"].dtype == rows[0]["labels"].dtype == torch.int64
    assert [row["labels"].tolist() for row in rows] == [row["labels"].tolist() for row in ours]
    assert torch.is_tensor(batch["labels"])
    assert batch["loss_mask"].sum().item() == read_manifest(built)["supervised_tokens"]


def test_all_errors_have_one_root() -> None:
    """Every error that loading raises is a ChatmaskError, and the standard exception that it stands for."""
    assert issubclass(DamagedDataset, CheckFailed) and issubclass(CheckFailed, ChatmaskError)
    assert issubclass(OptionError, ValueError) and issubclass(MissingPackage, ImportError)
