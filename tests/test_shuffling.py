"""`shuffle: true`: the same rows in a seeded order, whatever the workers, and whenever the build was killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import chatmask
from chatmask import pipeline, shuffling
from chatmask.storage import Storage

RAW = Path(__file__).resolve().parent.parent / "fixtures" / "swe_raw.jsonl"


class Killed(BaseException):
    """What a killed process would be: no handler of the build may catch it."""


class KilledAt(Storage):
    """The process dies before its n-th operation on the disk that is past the point where `armed` was set."""

    def __init__(self) -> None:
        self.armed, self.left = False, 0

    def before(self, operation: str, path: Path, size: int) -> None:
        if self.armed:
            self.left -= 1
            if self.left < 0:
                raise Killed


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards from a small file."""
    monkeypatch.setattr(pipeline, "MIN_CHUNK", 9_000)


def build(out: Path, *options: str, **more: Any) -> Any:
    """The fixture, one sample a turn, with the policy options given."""
    return chatmask.build(
        RAW, "ling-3.0-thinking", out, demo=True, parity="off", policy_overrides=["split=per_turn", *options], **more
    )


def contents(out: Path) -> list[tuple[Any, ...]]:
    """Every row of a dataset, with what it says of its source, in order."""
    return [
        (
            row["source"]["line"],
            row["sample"]["variant"],
            row["sample"]["index"],
            tuple(row["input_ids"]),
            tuple(row["loss_mask"]),
            str(row["spans"]),
        )
        for row in chatmask.load(out, allow_demo=True)
    ]


def files(out: Path) -> dict[str, bytes]:
    """Bytes of every file of a dataset."""
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_the_rows_are_the_same_in_another_order(tmp_path: Path) -> None:
    """Shuffled rows are those of the unshuffled build, source and sample with them, mixed over all shards; the ledger is the same."""
    plain, mixed = build(tmp_path / "plain"), build(tmp_path / "mixed", "shuffle=true")
    before, after = contents(plain.dataset), contents(mixed.dataset)
    assert sorted(before) == sorted(after)
    assert before != after
    assert mixed.ledger.to_dict() == plain.ledger.to_dict()
    names = [shard["file"] for shard in mixed.manifest["shards"]]
    assert names == [shard["file"] for shard in plain.manifest["shards"]]
    rows = [shard["rows"] for shard in mixed.manifest["shards"]]
    assert len(rows) > 3
    assert max(rows) - min(rows) <= 1
    assert all(len({line for line, *_ in after[i : i + rows[0]]}) > 3 for i in range(0, len(after) - rows[0], rows[0]))
    chatmask.verify(mixed.dataset)


def test_the_order_is_by_seed(tmp_path: Path) -> None:
    """One seed gives one order, another seed another, and what else a policy does leaves ranks alone."""
    first = contents(build(tmp_path / "a", "shuffle=true", "seed=1").dataset)
    other = contents(build(tmp_path / "b", "shuffle=true", "seed=2").dataset)
    assert first != other
    assert sorted(first) == sorted(other)


def test_the_bytes_do_not_depend_on_workers(tmp_path: Path) -> None:
    """One worker and two write the same shuffled files."""
    assert files(build(tmp_path / "1", "shuffle=true").dataset) == files(build(tmp_path / "2", "shuffle=true", workers=2).dataset)


def test_a_build_killed_at_any_operation_of_the_last_pass_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before any operation on the disk from the first dealt shard to the end of the commit, the same command ends with the
    same bytes and builds no part again; until then there is no dataset."""
    whole = files(build(tmp_path / "whole", "shuffle=true").dataset)
    deal = shuffling.deal
    killed, at = 0, 0
    while True:
        out, storage = tmp_path / f"at{at}", KilledAt()

        def armed(*arguments: Any, storage: KilledAt = storage, at: int = at, **named: Any) -> Any:
            storage.armed, storage.left = True, at
            return deal(*arguments, **named)

        monkeypatch.setattr(pipeline, "deal", armed)
        try:
            build(out, "shuffle=true", storage=storage)
            break
        except Killed:
            killed += 1
        monkeypatch.setattr(pipeline, "deal", deal)
        if not (out / "manifest.json").exists():
            with pytest.raises(chatmask.DamagedDataset, match="unfinished"):
                chatmask.load(out, allow_demo=True)
        again = build(out, "shuffle=true")
        assert again.already_built or again.resumed_shards == len(again.manifest["shards"])
        assert files(out) == whole
        at += 7  # every 7th operation: coprime to the operations of a shard, so all kinds are met
    assert killed > 8


def test_a_damaged_part_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that was changed on the disk between two runs is not dealt from: it is built again."""
    whole = files(build(tmp_path / "whole", "shuffle=true").dataset)
    monkeypatch.setattr(pipeline, "deal", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        build(tmp_path / "cut", "shuffle=true")
    part = next((tmp_path / "cut").glob(".chatmask-build/part-00001-*.arrow"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    monkeypatch.undo()
    monkeypatch.setattr(pipeline, "MIN_CHUNK", 9_000)
    again = build(tmp_path / "cut", "shuffle=true")
    assert again.resumed_shards == len(again.manifest["shards"]) - 1
    assert files(tmp_path / "cut") == whole


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts there are, only `OPEN_PARTS` are mapped at once, and the bytes are the same."""
    whole = files(build(tmp_path / "whole", "shuffle=true").dataset)
    monkeypatch.setattr(shuffling, "OPEN_PARTS", 1)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    assert files(build(tmp_path / "one", "shuffle=true").dataset) == whole
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2
