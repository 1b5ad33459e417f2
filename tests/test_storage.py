"""The disk seam: atomic writes, errors that name path and bytes, and the lock."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chatmask.errors import BuildLocked, StorageError
from chatmask.storage import STAGING, Storage, staging

HOLDER = """
import sys, time
from pathlib import Path
from chatmask.errors import BuildLocked
from chatmask.storage import Storage
try:
    with Storage().lock(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except BuildLocked as error:
    sys.exit(error.exit_code)
"""


class FailAt(Storage):
    """Raises `error` at the n-th operation, and at every later one if `dead`."""

    def __init__(self, at: int, error: BaseException, dead: bool = False) -> None:
        self.at, self.error, self.dead, self.seen = at, error, dead, 0

    def before(self, operation: str, path: Path, size: int) -> None:
        self.seen += 1
        if self.seen == self.at or (self.dead and self.seen > self.at):
            raise self.error


def hold(directory: Path, seconds: float = 30) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(directory), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_write_atomic_leaves_old_or_new_at_every_failing_operation(tmp_path: Path) -> None:
    """Whichever operation fails, the file holds either the old bytes or all of the new ones."""
    path = tmp_path / "file"
    for at in range(1, 50):
        path.write_bytes(b"old")
        storage = FailAt(at, OSError(errno.EIO, "broken"), dead=True)
        try:
            storage.write_atomic(path, b"new bytes")
        except StorageError as error:
            assert str(tmp_path) in str(error)
            assert path.read_bytes() in (b"old", b"new bytes")
        else:
            assert path.read_bytes() == b"new bytes"
            assert at > 5
            return
    pytest.fail("never got through")


def test_errors_name_path_bytes_and_keep_errno(tmp_path: Path) -> None:
    """A full disk becomes a StorageError with path, bytes and errno, which can travel between processes."""
    storage = FailAt(2, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    with pytest.raises(StorageError, match=r"file.*write of 7 bytes failed: No space left.*run the same command again") as caught:
        storage.write_atomic(tmp_path / "file", b"1234567")

    assert caught.value.errno == errno.ENOSPC
    assert caught.value.exit_code == 2
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_real_file_size_limit_is_reported(tmp_path: Path) -> None:
    """What the system itself refuses (a file size limit) is reported, and the target is not touched."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(StorageError, match="write of 5000 bytes"):
            Storage().write_atomic(tmp_path / "file", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)

    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "file"])
def test_a_leftover_in_place_of_the_temporary_is_never_written_through(tmp_path: Path, kind: str) -> None:
    """A link or pipe under the temporary name is removed, not followed."""
    victim, leftover = tmp_path / "victim", tmp_path / ".file.tmp"
    victim.write_bytes(b"mine")
    if kind == "symlink":
        leftover.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(leftover)
    else:
        leftover.write_bytes(b"longer than the new text")

    Storage().write_atomic(tmp_path / "file", b"new")

    assert victim.read_bytes() == b"mine"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not leftover.exists()


def test_write_parts_returns_length_and_hash(tmp_path: Path) -> None:
    """Parts are joined; their length and SHA-256 come back."""
    size, sha256 = Storage().write_parts(tmp_path / "file", [b"a", b"", b"bc"])

    assert (size, sha256) == (3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_rmtree_does_not_follow_links(tmp_path: Path) -> None:
    """A link inside the removed tree goes; what it leads to stays."""
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    outside.mkdir()
    (outside / "keep").write_bytes(b"1")
    (tree / "deep" / "link").symlink_to(outside)

    Storage().rmtree(tree)
    Storage().rmtree(tree)

    assert not tree.exists()
    assert (outside / "keep").exists()


def test_mkdir_refuses_a_link(tmp_path: Path) -> None:
    """A link in place of the staging folder is refused, so output cannot be led elsewhere."""
    (tmp_path / "other").mkdir()
    (tmp_path / STAGING).symlink_to(tmp_path / "other")

    with pytest.raises(StorageError):
        Storage().mkdir(staging(tmp_path))


def test_lock_makes_one_holder_and_leaves_no_file(tmp_path: Path) -> None:
    """The second holder gets BuildLocked with the path; afterwards the directory is free and empty."""
    directory = tmp_path / "a" / "b"
    with Storage().lock(directory) as created:
        assert created == (directory, directory.parent)
        with pytest.raises(BuildLocked, match=str(directory)), Storage().lock(directory):
            pass
    with Storage().lock(directory) as created:
        assert created == ()
        assert list(directory.iterdir()) == []


def test_lock_over_processes_and_after_kill(tmp_path: Path) -> None:
    """Another process is refused with exit code 75 at once; after kill -9 of the holder the directory is free."""
    directory = tmp_path / "out"
    holder = hold(directory)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    start = time.monotonic()
    others = [hold(directory, 0) for _ in range(3)]

    assert [other.wait(10) for other in others] == [75, 75, 75]
    assert time.monotonic() - start < 5
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    with Storage().lock(directory):
        pass


def test_lock_refuses_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """A file under the directory's name is an error that names it."""
    (tmp_path / "out").write_bytes(b"")

    with pytest.raises(StorageError, match="out"), Storage().lock(tmp_path / "out"):
        pass


def test_lock_survives_removal_by_the_last_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the directory is removed between opening and locking, the lock is taken on a new directory."""
    directory, real = tmp_path / "out", fcntl.flock
    calls: list[int] = []

    def flock(fd: int, how: int) -> None:
        if not calls:
            directory.rmdir()
        calls.append(how)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Storage().lock(directory) as created:
        assert directory.is_dir()
        assert created == (directory,)
    assert len(calls) == 3


def test_discard_leaves_what_was_there_before(tmp_path: Path) -> None:
    """Discard removes staging and the directories that the build made, and nothing that was there before or is not empty."""
    storage, new, old, used = Storage(), tmp_path / "x" / "new", tmp_path / "old", tmp_path / "used"
    old.mkdir()
    for directory in (new, old, used):
        with storage.lock(directory) as created:
            storage.mkdir(staging(directory))
            storage.write_atomic(staging(directory) / "part", b"1")
            if directory == used:
                storage.write_atomic(directory / "note", b"1")
            storage.discard(directory, created)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "used"]
    assert list(old.iterdir()) == []
    assert [path.name for path in used.iterdir()] == ["note"]
