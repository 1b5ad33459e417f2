"""Tokenizers: finding one, knowing its control tokens, and encoding text that cannot become one.

Ids come from the `tokenizers` library on the tokenizer's own `tokenizer.json`. The transformers object is made only when
somebody asks for it (`Tokenizer.transformers`): importing it costs two seconds that `build` need not spend.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as hf

from .errors import TokenizerError
from .storage import Storage
from .templates.environment import constants

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
Ids = np.ndarray[Any, np.dtype[np.int32]]


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
        """The tokenizer as it is; added tokens in text become their ids."""
        return hf.Tokenizer.from_str(json.dumps(self.data))

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
        return hashlib.sha256(
            json.dumps(canonical, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
        ).hexdigest()

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
    for text in [*_PROBE, *(f"a{literal} b" for literal in list(tokenizer.added)[:16])]:
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
    return Tokenizer(json.loads(backend.to_str()), template, special, name, source=tokenizer)


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
        return json.loads(path.read_bytes())
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


# --- control tokens -----------------------------------------------------------------------------------------------------------


def control_tokens(tokenizer: Tokenizer, template: str, named: Iterable[str] = ()) -> dict[str, int]:
    """Control tokens by literal: tokens flagged special, and added tokens that the template can write by itself.

    Args:
        tokenizer: whose added tokens count.
        template: the Jinja text; its string constants are searched.
        named: literals that the spec names (headers, tags, end tokens); added tokens inside them count too.
    """
    written = [*constants(template), *named]
    return {
        token.content: token.id
        for token in tokenizer.added.values()
        if token.content and (token.special or any(token.content in text for text in written))
    }


def matcher(literals: Iterable[str]) -> re.Pattern[str]:
    """One pattern for all literals, longest first where one begins another (as the `tokenizers` library matches)."""
    ordered = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


# --- encoding -----------------------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes text in which the positions of control tokens are known.

    Control tokens are written by id; the text between them is encoded by a copy of the tokenizer that has no control tokens, so
    text cannot become one. On text without quoted control tokens the ids equal the tokenizer's own (proven at load on
    `_PROBE`, and on a sample of every build).

    Some tokenizers do not let text be cut: a SentencePiece-like one puts a space before the first piece only, an added token may
    swallow the white space beside it. Then the whole text is encoded as it is.

    Attributes:
        whole_only: '' when text may be cut; else why not. Rows that quote control tokens must then be refused.
    """

    def __init__(self, tokenizer: Tokenizer, control: dict[str, int]) -> None:
        self.tokenizer = tokenizer
        self.control = control
        self.pattern = matcher(control)
        data = dict(tokenizer.data)
        data["added_tokens"] = [item for item in data.get("added_tokens") or () if item["content"] not in control]
        data["truncation"] = data["padding"] = data["post_processor"] = None
        self.plain = hf.Tokenizer.from_str(json.dumps(data))
        self.control_ids = np.array(sorted(control.values()), dtype=np.int32)
        self._real_ids = self._renumbering()
        self.whole_only = ""
        self.whole_only = self._first_difference()

    def _renumbering(self) -> Ids | None:
        """Ids of the copy -> ids of the tokenizer. The library numbers added tokens by their place in the list, so with the control
        tokens taken out the ordinary ones that are left may count otherwise. None where nothing differs."""
        kept = [token for token in self.tokenizer.added.values() if token.content not in self.control]
        moved = {self.plain.token_to_id(token.content): token.id for token in kept}
        if all(copy == real for copy, real in moved.items()):
            return None
        size = max(self.plain.get_vocab().values()) + 1
        table = np.arange(size, dtype=np.int32)
        for copy, real in moved.items():
            table[copy] = real
        return table

    def cut(self, text: str) -> list[tuple[int, int, int]]:
        """(start, end, id) of every control token in text that the template alone has written."""
        return [(match.start(), match.end(), self.control[match.group()]) for match in self.pattern.finditer(text)]

    def encode(self, text: str, controls: Sequence[tuple[int, int, int]], borders: Iterable[int] = ()) -> tuple[Ids, Ids, Ids]:
        """Encode one text.

        Args:
            text: the final text.
            controls: (start, end, id) of the control tokens in it, ascending.
            borders: character offsets at which the caller needs to know token positions.

        Returns:
            int32 `[tokens]` each: the ids, and the character offsets at which each token starts and ends. Offsets are exact for
            control tokens and in pieces that hold a border; elsewhere they are those of the piece.
        """
        if self.whole_only:
            encoding = self.tokenizer.whole.encode(text, add_special_tokens=False)
            offsets = np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2)
            return np.asarray(encoding.ids, dtype=np.int32), offsets[:, 0].copy(), offsets[:, 1].copy()
        pieces: list[tuple[int, int]] = []
        position = 0
        for start, end, _ in controls:
            pieces.append((position, start))
            position = end
        pieces.append((position, len(text)))
        exact = _pieces_with_border(pieces, sorted(set(borders)))
        texts = [text[start:end] for start, end in pieces]
        fast = [i for i, piece in enumerate(texts) if piece and i not in exact]
        slow = sorted(exact)
        encoded: dict[int, Any] = dict(
            zip(fast, self.plain.encode_batch_fast([texts[i] for i in fast], add_special_tokens=False), strict=True)
        )
        encoded.update(zip(slow, self.plain.encode_batch([texts[i] for i in slow], add_special_tokens=False), strict=True))
        ids: list[int] = []
        counts: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        for i, (start, end) in enumerate(pieces):
            if i in encoded:
                got = encoded[i].ids if self._real_ids is None else self._real_ids[encoded[i].ids].tolist()
                ids += got
                if i in exact:
                    for a, b in encoded[i].offsets:
                        starts.append(start + a)
                        ends.append(start + b)
                    counts += [1] * len(got)
                else:
                    starts.append(start)
                    ends.append(end)
                    counts.append(len(got))
            if i < len(controls):
                ids.append(controls[i][2])
                starts.append(controls[i][0])
                ends.append(controls[i][1])
                counts.append(1)
        repeats = np.asarray(counts, dtype=np.int64)
        return (
            np.asarray(ids, dtype=np.int32),
            np.repeat(np.asarray(starts, dtype=np.int32), repeats),
            np.repeat(np.asarray(ends, dtype=np.int32), repeats),
        )

    def foreign_control_ids(self, ids: Ids, controls: Sequence[tuple[int, int, int]]) -> int:
        """How many control ids stand in `ids` beyond those written on purpose (promise 3: always none)."""
        return int(np.isin(ids, self.control_ids).sum()) - len(controls)

    def differs_from_whole(self, text: str, ids: Ids) -> str:
        """'' when the tokenizer gives the whole text these ids, else the first difference (the check on a sample of a build)."""
        whole = self.tokenizer.whole.encode(text, add_special_tokens=False).ids
        if whole == ids.tolist():
            return ""
        at = next((k for k, (a, b) in enumerate(zip(whole, ids.tolist(), strict=False)) if a != b), min(len(whole), len(ids)))
        return f"token {at}: {whole[at : at + 4]} in the whole text, {ids[at : at + 4].tolist()} in pieces"

    def _first_difference(self) -> str:
        odd = [t for t in self.tokenizer.added.values() if t.content in self.control and (t.lstrip or t.rstrip or t.single_word)]
        joined = _PROBE + [
            f"{a}{literal}{b}" for literal in list(self.control)[:64] for a, b in (("a", "b"), (" ", " "), ("\n", "\n\n"))
        ]
        ordinary = [token for token in self.tokenizer.added.values() if token.content not in self.control]
        joined += [f"x {token.content} y" for token in [*odd, *ordinary[:64], *ordinary[-64:]]]
        for text in joined:
            whole = self.tokenizer.whole.encode(text, add_special_tokens=False).ids
            ids, _, _ = self.encode(text, self.cut(text))
            if whole != ids.tolist():
                return f"{text!r} is {whole[:8]} as a whole and {ids.tolist()[:8]} cut at control tokens"
        return ""


def _pieces_with_border(pieces: Sequence[tuple[int, int]], borders: Sequence[int]) -> set[int]:
    found = set()
    i = 0
    for border in borders:
        while i < len(pieces) and pieces[i][1] <= border:
            i += 1
        if i < len(pieces) and pieces[i][0] < border < pieces[i][1]:
            found.add(i)
    return found


_PROBE = [
    "Hello world",
    " leading space",
    "trailing space ",
    "two  spaces\n\nand lines\n",
    "\n",
    "user\nWhat is 2+2?",
    "assistant\n\n  indented code:\n\tif x:\n\t\treturn 1234567\n",
    "naïve café, 日本語テスト, русский текст, مرحبا",
    "👩‍👩‍👧 and 🇩🇪 flags",
    "e\u0301 combining, \u00bd half, \ufb01 ligature",
    '{"name": "get_weather", "arguments": {"city": "Zürich"}}',
    "it's they'll I'd don't",
    "नमस्ते दुनिया, ภาษาไทย น้ำ, 한국어 문장",
    "x = [1, 2, 3]  # 12345 + 3.14e-10\r\n",
]
