"""The only module that touches the disk for output.

Every change of the disk is one of nine primitive operations of `Storage` (open, write, fsync, close, replace, unlink, mkdir,
rmdir, fsync_dir). Each calls `Storage.before` first, so a test can fail, kill or count any single operation by subclassing.
The helpers (`write_atomic`, `write_parts`, `rmtree`, `lock`, `discard`) are made of these primitives.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import BuildLocked, ChatmaskError, StorageError

STAGING = ".chatmask-build"
"""Name of the hidden folder in which a build keeps its work until the commit."""

# Some network file systems cannot sync a directory and say so with one of these; there is nothing left to do there.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)
_LOCK_ATTEMPTS = 100


def staging(directory: Path) -> Path:
    """Return the staging folder of a dataset directory."""
    return directory / STAGING


class Storage:
    """Primitive disk operations and the few helpers that are built from them.

    Every failing operation raises `StorageError`, which names the path and the number of bytes.
    """

    def before(self, operation: str, path: Path, size: int) -> None:
        """Called before each primitive operation; does nothing. A subclass may raise here.

        Args:
            operation: `open`, `write`, `fsync`, `close`, `replace`, `unlink`, `mkdir`, `rmdir` or `fsync_dir`.
            path: the file or directory that is about to change (for `replace`: the new name).
            size: bytes about to be written, else 0.
        """

    @contextmanager
    def _operation(self, operation: str, path: Path, size: int = 0) -> Iterator[None]:
        try:
            self.before(operation, path, size)
            yield
        except OSError as error:
            if isinstance(error, ChatmaskError):
                raise
            raise _storage_error(operation, path, size, error) from error

    # -- primitives

    def open(self, path: Path) -> int:
        """Create `path` as a new file and return its descriptor; a leftover of that name is removed first."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with self._operation("open", path):
            try:
                return os.open(path, flags, 0o644)
            except FileExistsError:
                # Never opened in place: the leftover may be a link or a pipe that leads elsewhere.
                os.unlink(path)
                return os.open(path, flags, 0o644)

    def write(self, fd: int, data: bytes | memoryview, path: Path) -> None:
        """Write all of `data`; `path` is only for the message."""
        view = memoryview(data).cast("B")
        with self._operation("write", path, len(view)):
            while view:
                view = view[os.write(fd, view) :]

    def fsync(self, fd: int, path: Path) -> None:
        """Wait until the file's bytes are on the disk."""
        with self._operation("fsync", path):
            os.fsync(fd)

    def close(self, fd: int, path: Path) -> None:
        """Close a descriptor that `open` returned."""
        with self._operation("close", path):
            os.close(fd)

    def replace(self, source: Path, target: Path) -> None:
        """Rename within one file system; `target` is replaced in one step if it exists."""
        with self._operation("replace", target):
            os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file or link; a missing one is fine."""
        with self._operation("unlink", path):
            path.unlink(missing_ok=True)

    def mkdir(self, path: Path) -> bool:
        """Make one directory; return False if it is there already. A link in its place is refused."""
        with self._operation("mkdir", path):
            try:
                os.mkdir(path)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise
                return False
            return True

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        with self._operation("rmdir", path):
            os.rmdir(path)

    def fsync_dir(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk."""
        with self._operation("fsync_dir", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError as error:
                if error.errno not in _NO_DIRECTORY_SYNC:
                    raise
            finally:
                os.close(fd)

    # -- helpers

    def write_atomic(self, path: Path, data: bytes, temporary: Path | None = None) -> None:
        """Write a whole file so that `path` holds either the old bytes or all of the new ones, also after a power cut.

        Args:
            path: the file to write.
            data: its bytes.
            temporary: name to write under first, on the same file system (default: hidden, beside `path`).
        """
        self.write_parts(path, [data], temporary)

    def write_parts(self, path: Path, parts: Iterable[bytes], temporary: Path | None = None) -> tuple[int, str]:
        """As `write_atomic`, for bytes that come in parts; returns their total length and SHA-256 (hex)."""
        temporary = temporary or path.with_name(f".{path.name}.tmp")
        digest, size = hashlib.sha256(), 0
        fd = self.open(temporary)
        try:
            for part in parts:
                self.write(fd, part, temporary)
                digest.update(part)
                size += len(part)
            self.fsync(fd, temporary)
        finally:
            self.close(fd, temporary)
        self.replace(temporary, path)
        self.fsync_dir(path.parent)
        return size, digest.hexdigest()

    def rmtree(self, path: Path) -> None:
        """Remove a directory with all that is in it; links are removed, never followed. A missing one is fine."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            self.unlink(path)
            return
        try:
            entries = sorted(path.iterdir())
        except OSError as error:
            raise _storage_error("rmdir", path, 0, error) from error
        for entry in entries:
            self.rmtree(entry)
        self.rmdir(path)

    @contextmanager
    def lock(self, directory: Path) -> Iterator[tuple[Path, ...]]:
        """Hold a directory for one build, creating it (and its parents) if it is missing.

        The lock is an exclusive `flock` on the directory itself: there is no lock file to clean up, and the kernel frees it
        when the process dies. A process forked while the lock is held shares it until it ends, so the directory
        stays locked as long as any such worker could still write.

        Args:
            directory: the dataset directory.

        Yields:
            The directories that did not exist before, deepest first; hand them to `discard` if the build fails.

        Raises:
            BuildLocked: another process holds the directory.
            StorageError: it cannot be created or locked.
        """
        fd, created = self._acquire(directory)
        owner = os.getpid()
        try:
            yield created
        finally:
            if os.getpid() == owner:
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _acquire(self, directory: Path) -> tuple[int, tuple[Path, ...]]:
        created: tuple[Path, ...] = ()
        for _ in range(_LOCK_ATTEMPTS):
            created = tuple(dict.fromkeys((*self._make_directories(directory), *created)))
            try:
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _storage_error("open", directory, 0, error) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder before us may have removed the directory: then this descriptor locks nothing that has a name.
                if _same_file(fd, directory):
                    return fd, created
            except BlockingIOError:
                os.close(fd)
                raise BuildLocked(
                    f"{directory}: another build holds this directory; nothing was changed. Wait for it to end, "
                    "or choose another output directory"
                ) from None
            except OSError as error:
                os.close(fd)
                raise _storage_error("lock", directory, 0, error) from error
            os.close(fd)
        raise BuildLocked(f"{directory}: the directory was removed {_LOCK_ATTEMPTS} times while it was being locked; try again")

    def _make_directories(self, directory: Path) -> tuple[Path, ...]:
        missing = []
        for path in (directory, *directory.parents):
            if os.path.isdir(path):
                break
            missing.append(path)
        made = [path for path in reversed(missing) if self.mkdir(path)]
        for path in made:
            self.fsync_dir(path.parent)
        return tuple(reversed(made))

    def discard(self, directory: Path, created: Sequence[Path] = ()) -> None:
        """Undo a build that must leave nothing visible: remove its staging folder, and what `lock` created if it is empty.

        Call this while the lock is held. Not for a full disk or a kill: there the staging folder is what resumes.

        Args:
            directory: the dataset directory.
            created: what `lock` yielded; a directory that was there before the build stays.
        """
        self.rmtree(staging(directory))
        for path in created:
            if any(path.iterdir()):
                return
            self.rmdir(path)


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _storage_error(operation: str, path: Path, size: int, cause: OSError) -> StorageError:
    what = f"{operation} of {size} bytes" if operation == "write" else operation
    if cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "free space or raise the limit, then run the same command again: finished shards are kept"
    else:
        advice = "make the output directory writable, or choose another one, then run the same command again"
    error = StorageError(f"{path}: {what} failed: {cause.strerror or cause}; {advice}")
    error.errno = cause.errno
    return error
