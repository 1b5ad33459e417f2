"""Tokenizers: finding one, knowing its control tokens, and encoding text that cannot become one.

Ids come from the `tokenizers` library on the tokenizer's own `tokenizer.json`. The transformers object is made only when
somebody asks for it (`Tokenizer.transformers`): importing it costs two seconds that `build` need not spend.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import tokenizers as hf

from .encoding import PROBE_TEXTS, Encoder, Ids
from .errors import TokenizerError
from .storage import Storage

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class AddedToken:
    """One entry of the tokenizer's `added_tokens`."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as chatmask sees it.

    Attributes:
        data: the parsed `tokenizer.json`.
        chat_template: Jinja text, or None.
        special_tokens: template variables such as `eos_token`.
        name: what to call it in messages (a directory, a hub id, `demo`).
        demo: True for the embedded demo tokenizer.
        source: what `AutoTokenizer.from_pretrained` takes, or a loaded transformers tokenizer.
    """

    data: dict[str, Any] = field(repr=False)
    chat_template: str | None = field(repr=False)
    special_tokens: dict[str, str]
    name: str
    demo: bool = False
    source: Any = field(default=None, repr=False)

    @cached_property
    def whole(self) -> hf.Tokenizer:
        """The tokenizer as it is; added tokens in text become their ids. Nothing is cut, padded or put around, and offsets are whole."""
        data = {**self.data, "truncation": None, "padding": None, "post_processor": None}
        return hf.Tokenizer.from_str(orjson.dumps(data).decode())

    @cached_property
    def added(self) -> dict[str, AddedToken]:
        """All added tokens by content."""
        known = set(AddedToken.__dataclass_fields__)
        tokens = (AddedToken(**{k: v for k, v in item.items() if k in known}) for item in self.data.get("added_tokens") or ())
        return {token.content: token for token in tokens}

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that decides ids, whatever the file's formatting."""
        canonical = {k: v for k, v in self.data.items() if k not in ("version", "truncation", "padding", "post_processor")}
        return hashlib.sha256(orjson.dumps(canonical, option=orjson.OPT_SORT_KEYS)).hexdigest()

    @cached_property
    def _encoders(self) -> dict[frozenset[str], Encoder]:
        return {}

    def encoder(self, control: dict[str, int]) -> Encoder:
        """The encoder for a set of control tokens; made once for each set (it takes the time of loading the tokenizer)."""
        key = frozenset(control)
        if key not in self._encoders:
            self._encoders[key] = Encoder(self, control)
        return self._encoders[key]

    @property
    def template_sha256(self) -> str | None:
        """Hash of the chat template's text."""
        return None if self.chat_template is None else hashlib.sha256(self.chat_template.encode()).hexdigest()

    @cached_property
    def transformers(self) -> Any:
        """The transformers tokenizer (imports transformers)."""
        if not isinstance(self.source, (str, Path)):
            return self.source
        loaded = _auto_tokenizer(str(self.source))
        if self.demo:
            loaded.chat_template = self.chat_template
        return loaded

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Text of some ids, control tokens included, nothing tidied."""
        return str(self.whole.decode([int(i) for i in ids], skip_special_tokens=False))


def load_tokenizer(source: Any, revision: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        source: a directory, a hub id, a loaded transformers tokenizer, or a Tokenizer.
        revision: hub revision, for ids.

    Raises:
        TokenizerError: it cannot be found, has no `tokenizer.json`, or is a slow (pure Python) tokenizer.
    """
    if isinstance(source, Tokenizer):
        return source
    if not isinstance(source, (str, Path)):
        return _from_transformers(source)
    path = Path(source)
    if path.is_dir():
        return _from_directory(path, str(source))
    if path.exists() or str(source).startswith((".", "/", "~")):
        raise TokenizerError(f"{source}: not a directory; give the folder that holds tokenizer.json")
    return _from_directory(_from_hub(str(source), revision), str(source))


def demo_tokenizer(template: str) -> Tokenizer:
    """The embedded demo tokenizer (a byte-level BPE of a few thousand entries) with the given chat template's text."""
    folder = Path(__file__).parent / "templates" / "demo"
    loaded = _from_directory(folder, "demo")
    return Tokenizer(loaded.data, template, loaded.special_tokens, "demo", demo=True, source=str(folder))


def fingerprint_of(tokenizer: Any) -> dict[str, str | None]:
    """`{"sha256", "template_sha256"}` of anything that `load_tokenizer` takes; what a manifest is compared with."""
    loaded = load_tokenizer(tokenizer)
    return {"sha256": loaded.sha256, "template_sha256": loaded.template_sha256}


def _from_directory(folder: Path, name: str) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{name}: no tokenizer.json; save the fast tokenizer there first: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    data = _json(file)
    if not isinstance(data, dict) or "model" not in data:
        raise TokenizerError(f"{file}: not a tokenizer.json of the `tokenizers` library")
    config = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    extra = _json(folder / "special_tokens_map.json") if (folder / "special_tokens_map.json").is_file() else {}
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
    special = {}
    for key in _TOKEN_NAMES:
        value = config.get(key, extra.get(key))
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            special[key] = value
    loaded = Tokenizer(data, _default_template(template, name), special, name, source=str(folder))
    if config.get("tokenizer_class") not in _PLAIN_CLASSES:
        _compare_with_auto(loaded, folder, config)
    return loaded


_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # these load tokenizer.json as it is


def _auto_tokenizer(source: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that torch is missing, which is no news here
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def _compare_with_auto(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Refuse a folder that `AutoTokenizer` reads otherwise than its own tokenizer.json says.

    With some values of `tokenizer_class` transformers builds a pre-tokenizer of its own (DeepSeek, MiniMax, Qwen3.5; without a
    warning in 5.12.1), so a trainer or server would see other ids than the model was trained on. The answer is remembered by
    what it depends on, since importing transformers takes seconds.

    Raises:
        TokenizerError: the first text that differs, and how to mend the folder.
    """
    parts = (tokenizer.sha256, json.dumps(config, sort_keys=True), (folder / "config.json").is_file(), version("transformers"))
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    memory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chatmask" / f"auto-{key[:32]}"
    if memory.is_file():
        return
    auto = _auto_tokenizer(str(folder))
    for text in [*PROBE_TEXTS, *(f"a{literal} b" for literal in list(tokenizer.added)[:16])]:
        own = tokenizer.whole.encode(text, add_special_tokens=False).ids
        theirs = [int(i) for i in auto(text, add_special_tokens=False)["input_ids"]]
        if own != theirs:
            raise TokenizerError(
                f"{tokenizer.name}: AutoTokenizer (transformers {version('transformers')}) gives other ids than the folder's own "
                f'tokenizer.json: {text!r} is {theirs[:8]} instead of {own[:8]}. Set "tokenizer_class": "PreTrainedTokenizerFast" in '
                f"{folder / 'tokenizer_config.json'}, so that trainers and servers read it right too"
            )
    with suppress(OSError):  # nowhere to remember it: the next load compares again
        storage = Storage()
        for folder in reversed([p for p in (memory.parent, *memory.parent.parents) if not p.is_dir()]):
            storage.mkdir(folder)
        storage.write_atomic(memory, b"")


def _from_transformers(tokenizer: Any) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(
            f"{type(tokenizer).__name__} is not a tokenizer that chatmask can read; give a directory, a hub id or a fast "
            "transformers tokenizer (one with `backend_tokenizer`)"
        )
    special = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if k in _TOKEN_NAMES}
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    template = _default_template(getattr(tokenizer, "chat_template", None), name)
    return Tokenizer(orjson.loads(backend.to_str()), template, special, name, source=tokenizer)


def _default_template(template: Any, name: str) -> str | None:
    """Configs hold one template, or several by name; the default is the one that a plain call renders."""
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}
    if isinstance(template, dict):
        if "default" not in template:
            raise TokenizerError(
                f"{name}: has chat templates {sorted(template)} but no default; name one with `template:` in the spec"
            )
        template = template["default"]
    return template if isinstance(template, str) else None


def _json(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {error}") from None


_WAYS_ON = "give a local folder with --tokenizer DIR, or use --demo for the embedded demo tokenizer"


def _from_hub(repo: str, revision: str | None) -> Path:
    """Folder with the files of a hub repository: the local hub cache first, then the network with little patience."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants as hub
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = [try_to_load_from_cache(repo, file, revision=revision) for file in _FILES]
    except HFValidationError:
        raise TokenizerError(f"{repo!r} is neither a folder nor a hub id; {_WAYS_ON}") from None
    if isinstance(cached[0], str):
        return Path(cached[0]).parent
    why = "HF_HUB_OFFLINE is set" if hub.HF_HUB_OFFLINE else _unreachable(hub.ENDPOINT)
    if why:
        raise TokenizerError(
            f"the tokenizer {repo!r} is not in the local hub cache and the hub cannot be reached ({why}); {_WAYS_ON}"
        )
    try:
        folder = Path(hf_hub_download(repo, _FILES[0], revision=revision)).parent
        for file in _FILES[1:]:
            try:
                hf_hub_download(repo, file, revision=revision)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                continue  # not every repository has all of them
    except (HfHubHTTPError, EntryNotFoundError, OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise TokenizerError(f"the tokenizer {repo!r} could not be downloaded: {first}; {_WAYS_ON}") from None
    return folder


def _unreachable(endpoint: str, patience: float = 4.0) -> str:
    """Why the hub does not answer within `patience` seconds, or '' when it does. (The hub's own client retries for half a
    minute, and a name server may take as long to say no.)"""
    answer = ["no answer"]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=patience).close()  # noqa: S310
            answer[0] = ""
        except urllib.error.HTTPError:
            answer[0] = ""  # it answers, whatever it says to this request
        except (OSError, ValueError) as error:
            answer[0] = str(getattr(error, "reason", error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience + 1)
    return answer[0]
