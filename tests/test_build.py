"""The build as users run it: ledger, exit codes, resume, determinism, locks, refusals."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from click.testing import CliRunner

import chatmask
from chatmask import pipeline
from chatmask.cli import main
from chatmask.records import Chunk
from chatmask.storage import Storage, staging

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "fixtures" / "swe_raw.jsonl"
GOOD = {
    "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4.", "reasoning_content": "Add."}]
}


def lines(path: Path, *rows: Any) -> Path:
    """A JSONL file; bytes are written as they are."""
    path.write_bytes(
        b"".join((row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode()) + b"\n" for row in rows)
    )
    return path


def tree(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder, by relative name."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def run(*arguments: object) -> Any:
    """The command line, in this process."""
    return CliRunner().invoke(main, [str(a) for a in arguments])


def last_json(result: Any) -> dict[str, Any]:
    """The object in the last line of standard output."""
    return json.loads(result.stdout.splitlines()[-1])


class TestLedger:
    def test_json_has_the_contract_keys_and_the_equation_holds(self, tmp_path: Path) -> None:
        """`build --json` ends with one object whose lines equal kept + rejected + dropped + blanks."""
        path = lines(tmp_path / "a.jsonl", GOOD, b"", GOOD, b"   ", {"messages": []}, b"{bad")
        result = run(
            "build", "--spec", "ling-3.0-thinking", "--demo", path, "--out", tmp_path / "d", "--bad-rows", "skip", "--json"
        )

        value = last_json(result)
        assert result.exit_code == 0
        assert {
            "dataset", "spec", "lines", "blanks", "kept", "rejects", "dropped", "samples", "tokens", "supervised_tokens", "turns",
            "trained_turns", "untrained", "rewritten", "content_dropped", "control_text", "straddles", "shards", "seconds",
        } <= set(value)  # fmt: skip
        assert (
            value["lines"]
            == 6
            == value["kept"] + sum(value["rejects"].values()) + sum(value["dropped"].values()) + value["blanks"]
        )
        assert value["rejects"] == {"empty_messages": 1, "invalid_json": 1}
        assert value["rewritten"] == {"context": 0, "emission": 0}
        assert len(result.stdout.splitlines()) == 1

    def test_rejects_file_points_back_into_the_input(self, tmp_path: Path) -> None:
        """Each reject names source, line, byte offset and the hash of the line, and holds no content unless asked."""
        bad = b'{"messages": "secret"}'
        path = lines(tmp_path / "a.jsonl", GOOD, bad, GOOD)
        for keep in (False, True):
            out = tmp_path / f"d{keep}"
            chatmask.build(path, "ling-3.0-thinking", out, demo=True, bad_rows="skip", keep_rejected=keep)
            (entry,) = map(json.loads, (out / "rejects.jsonl").read_text().splitlines())

            assert (entry["source"], entry["line"], entry["reason"]) == (str(path), 2, "no_messages")
            assert path.read_bytes()[entry["offset"] :].startswith(bad)
            assert entry["sha256"] == hashlib.sha256(bad).hexdigest()
            assert ("secret" in json.dumps(entry)) == keep

    @pytest.mark.parametrize("compress", [gzip.compress, lambda data: pa.compress(data, "zstd", asbytes=True)])
    def test_compressed_input_gives_the_same_rows(self, tmp_path: Path, compress: Any) -> None:
        """gzip and zstd inputs give the ids of the plain file."""
        packed = tmp_path / "raw.jsonl.packed"
        packed.write_bytes(compress(RAW.read_bytes()))
        plain = chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "a", demo=True)
        other = chatmask.build(packed, "ling-3.0-thinking", tmp_path / "b", demo=True)

        assert plain.ledger == other.ledger
        for a, b in zip(
            chatmask.load(plain.dataset, allow_demo=True), chatmask.load(other.dataset, allow_demo=True), strict=True
        ):
            assert a["input_ids"].tolist() == b["input_ids"].tolist()

    @pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "fixtures" / "conversations").iterdir()))
    def test_every_input_shape_builds(self, tmp_path: Path, name: str) -> None:
        """OpenAI, ShareGPT, nested conversations and SWE-agent trajectories build with nothing rejected."""
        result = chatmask.build(ROOT / "fixtures" / "conversations" / name, "ling-3.0-auto", tmp_path / "d", demo=True)

        assert result.ledger.kept == result.ledger.lines - result.ledger.blanks > 0
        assert result.ledger.supervised_tokens > 0


class TestExitCodes:
    def test_broken_lines_fail_by_name_and_leave_nothing(self, tmp_path: Path) -> None:
        """By default a rejected row exits 3, names file and line, and leaves no directory behind (B52)."""
        cut = json.dumps(GOOD).encode()[:-9]
        path = lines(tmp_path / "a.jsonl", GOOD, b"{bad", b"[]", b"42", b'{"messages": "\xff"}', GOOD)
        path.write_bytes(path.read_bytes() + cut)
        result = run("build", "--spec", "ling-3.0-thinking", "--demo", path, "--out", tmp_path / "d", "--json")

        assert result.exit_code == 3
        assert f"{path}:2: invalid_json" in result.stderr
        assert last_json(result)["rejects"] == {"invalid_json": 2, "invalid_utf8": 1, "not_an_object": 2}
        assert not (tmp_path / "d").exists()
        again = run(
            "build", "--spec", "ling-3.0-thinking", "--demo", path, "--out", tmp_path / "d", "--bad-rows", "skip", "--json"
        )
        assert (again.exit_code, last_json(again)["kept"], sum(last_json(again)["rejects"].values())) == (0, 2, 5)

    def test_reasoning_under_a_spec_without_thinking_is_never_a_silent_zero(self, tmp_path: Path) -> None:
        """`ling-3.0` on reasoning data names row, message, expected and found text, and exits 3."""
        result = run("build", "--spec", "ling-3.0", "--demo", lines(tmp_path / "a.jsonl", GOOD), "--out", tmp_path / "d")

        assert result.exit_code == 3
        for part in ("a.jsonl:1", "message 1", "reasoning_in_no_think_spec", r"<think></think>", "<think>Add.</think>"):
            assert part in result.stderr

    def test_a_build_that_supervises_nothing_names_the_spec(self, tmp_path: Path) -> None:
        """When every row is set aside, skipping bad rows does not make an empty dataset: exit 1."""
        flagged = {"messages": [GOOD["messages"][0], {**GOOD["messages"][1], "train": False}]}
        path = lines(tmp_path / "a.jsonl", flagged)
        result = run("build", "--spec", "ling-3.0-thinking", "--demo", path, "--out", tmp_path / "d", "--bad-rows", "skip")

        assert result.exit_code == 1
        assert "ling-3.0-thinking supervises nothing" in result.stderr
        assert "zero_supervision" in result.stderr
        assert not (tmp_path / "d").exists()

    def test_wrong_spec_for_the_tokenizer_fails_before_data_is_read(self, tmp_path: Path) -> None:
        """`qwen3-instruct` on a Ling template fails in the probe (exit 2) even when the input file does not exist."""
        spec = tmp_path / "wrong.yaml"
        spec.write_text("name: wrong\nextends: qwen3-instruct\ndemo_template: ling-3.0.jinja\n")
        result = run("build", "--spec", spec, "--demo", tmp_path / "missing.jsonl", "--out", tmp_path / "d")

        assert result.exit_code == 2
        assert "does not fit" in result.stderr
        assert "expected" in result.stderr
        assert "<role>ASSISTANT</role>" in result.stderr

    def test_usage_errors_exit_2(self, tmp_path: Path) -> None:
        """Unknown spec (with the nearest name), missing input and empty input exit 2."""
        assert "did you mean ling-3.0" in run("build", "--spec", "ling-3.O", "--demo", RAW).stderr
        for path in (tmp_path / "no.jsonl", lines(tmp_path / "empty.jsonl")):
            assert run("build", "--spec", "ling-3.0-thinking", "--demo", path, "--out", tmp_path / "d").exit_code == 2

    def test_unreachable_tokenizer_names_the_two_ways_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without hub and cache the command fails at once with exit 2 and names --tokenizer DIR and --demo."""
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        script = f"import sys; from chatmask.cli import main; sys.argv = ['chatmask', 'build', '--spec', 'ling-3.0-thinking', {str(RAW)!r}]; main()"
        environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )

        assert done.returncode == 2
        assert "--tokenizer DIR" in done.stderr
        assert "--demo" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_second_build_into_the_same_directory_exits_75(self, tmp_path: Path) -> None:
        """While one build holds the directory another one gives way with exit 75 and changes nothing."""
        with Storage().lock(tmp_path / "d"):
            result = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "chatmask",
                    "build",
                    "--spec",
                    "ling-3.0-thinking",
                    "--demo",
                    str(RAW),
                    "--out",
                    str(tmp_path / "d"),
                ],
                capture_output=True,
                text=True,
            )

        assert result.returncode == 75
        assert "another build holds" in result.stderr


class TestSameBytes:
    def test_workers_hash_seeds_and_repeats_give_one_tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One, two and three workers, and another hash seed, write the same bytes."""
        monkeypatch.setattr(pipeline, "MIN_CHUNK", 8_000)
        one = chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "1", demo=True)
        trees = [tree(one.dataset)]
        for workers in (2, 3):
            trees.append(
                tree(chatmask.build(RAW, "ling-3.0-thinking", tmp_path / str(workers), demo=True, workers=workers).dataset)
            )
        script = (
            "import sys, chatmask; from chatmask import pipeline; pipeline.MIN_CHUNK = 8000;"
            "chatmask.build(sys.argv[1], 'ling-3.0-thinking', sys.argv[2], demo=True)"
        )
        seed = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C", "TOKENIZERS_PARALLELISM": "true"}
        subprocess.run([sys.executable, "-c", script, str(RAW), str(tmp_path / "seed")], check=True, env=seed, cwd=tmp_path)
        trees.append(tree(tmp_path / "seed"))

        assert one.summary["shards"] > 3
        assert all(other == trees[0] for other in trees)

    def test_a_killed_build_resumes_to_the_same_bytes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a kill in the middle `load` refuses; the same command then builds only the rest, to the same bytes."""
        monkeypatch.setattr(pipeline, "MIN_CHUNK", 8_000)
        whole = tree(chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "whole", demo=True).dataset)
        real, done = pipeline.build_shard, []

        def killed(parser: Any, storage: Any, directory: Any, chunk: Chunk, *rest: Any) -> Any:
            if chunk.index == 2:
                raise KeyboardInterrupt
            done.append(chunk.index)
            return real(parser, storage, directory, chunk, *rest)

        monkeypatch.setattr(pipeline, "build_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "cut", demo=True)
        with pytest.raises(chatmask.DamagedDataset, match="unfinished"):
            chatmask.load(tmp_path / "cut", allow_demo=True)
        monkeypatch.setattr(pipeline, "build_shard", real)
        result = chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "cut", demo=True)

        assert result.resumed_shards == len(done) == 2
        assert tree(tmp_path / "cut") == whole

    def test_receipts_of_another_run_do_not_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A build that was stopped under other options is not continued."""
        monkeypatch.setattr(pipeline, "MIN_CHUNK", 8_000)
        monkeypatch.setattr(pipeline, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True)
        monkeypatch.undo()
        monkeypatch.setattr(pipeline, "MIN_CHUNK", 8_000)
        assert chatmask.build(RAW, "ling-3.0-auto", tmp_path / "d", demo=True).resumed_shards == 0

    def test_a_finished_dataset_is_kept_or_named(self, tmp_path: Path) -> None:
        """The same build again exits 0 and does nothing; another one says what differs and needs --force (B45)."""
        spec = tmp_path / "own.yaml"
        spec.write_text("name: own\nextends: ling-3.0-thinking\n")
        arguments = ["build", "--demo", str(RAW), "--out", str(tmp_path / "d"), "--json"]
        first = run(*arguments, "--spec", spec)
        before = tree(tmp_path / "d")
        again = run(*arguments, "--spec", spec)
        changed = run(*arguments, "--spec", spec, "--set", "straddle=include")
        assert (first.exit_code, again.exit_code, changed.exit_code) == (0, 0, 2)
        assert last_json(again)["already_built"] is True
        assert {**last_json(again), "seconds": 0, "already_built": False} == {**last_json(first), "seconds": 0}
        assert "straddle" in changed.stderr
        assert "--force" in changed.stderr
        assert tree(tmp_path / "d") == before
        forced = run(*arguments, "--spec", spec, "--set", "straddle=include", "--force")
        assert forced.exit_code == 0
        assert tree(tmp_path / "d") != before

    def test_other_peoples_files_are_not_touched(self, tmp_path: Path) -> None:
        """A directory that holds something else is refused."""
        (tmp_path / "notes.txt").write_text("mine")
        result = run("build", "--spec", "ling-3.0-thinking", "--demo", RAW, "--out", tmp_path)

        assert result.exit_code == 2
        assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


class TestDataset:
    def test_default_directory_is_named_for_input_and_spec(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without --out the dataset is ./<input name>.<spec>/."""
        monkeypatch.chdir(tmp_path)
        assert run("build", "--spec", "ling-3.0-thinking", "--demo", RAW).exit_code == 0
        assert (tmp_path / "swe_raw.ling-3.0-thinking" / "manifest.json").is_file()
        assert not staging(tmp_path / "swe_raw.ling-3.0-thinking").exists()

    def test_demo_datasets_need_consent(self, tmp_path: Path) -> None:
        """`load` refuses a dataset of the demo tokenizer without allow_demo=True."""
        chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True)
        with pytest.raises(chatmask.ChatmaskError, match="allow_demo"):
            chatmask.load(tmp_path / "d")
        assert len(chatmask.load(tmp_path / "d", allow_demo=True)) == 12

    def test_hugging_face_datasets_reads_the_directory(self, tmp_path: Path) -> None:
        """`datasets.load_from_disk` gives the same ids and masks as `chatmask.load`."""
        datasets = pytest.importorskip("datasets")
        chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True)
        theirs, ours = datasets.load_from_disk(str(tmp_path / "d")), chatmask.load(tmp_path / "d", allow_demo=True)

        assert len(theirs) == len(ours)
        for a, b in zip(theirs, ours, strict=True):
            assert a["input_ids"] == b["input_ids"].tolist()
            assert a["loss_mask"] == b["loss_mask"].tolist()

    def test_every_row_is_what_the_parser_says(self, tmp_path: Path) -> None:
        """Rows on disk equal `parser.parse` of the line that they name."""
        chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True)
        parser = chatmask.load_parser("ling-3.0-thinking", demo=True)
        raw = RAW.read_text().splitlines()
        for row in chatmask.load(tmp_path / "d", allow_demo=True):
            example = parser.parse(json.loads(raw[row["source"]["line"] - 1]))
            assert example.input_ids == row["input_ids"].tolist()
            assert example.loss_mask == row["loss_mask"].tolist()

    def test_manifest_holds_no_host_time_or_output_path(self, tmp_path: Path) -> None:
        """Nothing in the manifest depends on where, when or by how many workers it was built."""
        text = (
            chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "somewhere", demo=True)
            .dataset.joinpath("manifest.json")
            .read_text()
        )
        assert "somewhere" not in text
        assert not {"seconds", "time", "host", "workers"} & set(json.loads(text))


@pytest.mark.parametrize("helpers", [1, 3])
def test_chunks_come_back_in_order_whoever_works_on_them(helpers: int) -> None:
    """What the process itself and its helpers give comes in the order of the input, and of two failures the first one in it."""
    chunks: Any = list(range(20))

    def work(chunk: int, own: object = None) -> int:
        time.sleep(0.002 * (chunk * 7 % 5))
        if chunk >= failing:
            raise ValueError(chunk)
        return chunk

    failing = 99
    with ThreadPoolExecutor(helpers) as pool:
        given = pipeline._shared_out(cast(Any, pool), helpers, chunks, work, cast(Any, None))
        assert list(given) == chunks
        failing = 6
        seen = []
        with pytest.raises(ValueError, match="6"):
            for one in pipeline._shared_out(cast(Any, pool), helpers, chunks, work, cast(Any, None)):
                seen.append(one)
        assert seen == chunks[:6]
