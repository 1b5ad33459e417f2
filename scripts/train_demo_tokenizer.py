"""Train the embedded demo tokenizer from `fixtures/demo_corpus.txt`, giving the same bytes in every run.

    python scripts/train_demo_tokenizer.py [DIRECTORY]

writes `tokenizer.json` and `tokenizer_config.json` (by default into `chatmask/templates/demo/`). The tokenizer is a byte-level
BPE of 4,096 entries: the 256 bytes, merges learned from the corpus, and the control tokens of Ling-3.0 and Qwen3. It is small
enough to ship and to load in milliseconds, and like the real ones it has control tokens with and without the `special` flag.

Only the vocabulary and the merges are taken from the trainer. The file around them is written here, so that it does not change
with the version of `tokenizers`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "fixtures" / "demo_corpus.txt"
TARGET = ROOT / "chatmask" / "templates" / "demo"

ENTRIES = 4096

# Contractions; words with one leading sign or blank; single digits; runs of other signs; line ends; other white space.
SPLIT = (
    r"(?i:'(?:[sdmt]|ll|ve|re))"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# Turn markers are flagged special; the marks inside a turn are added tokens without the flag, as in Qwen3's tokenizer.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<role>", "</role>", "<|role_end|>")
NOT_SPECIAL = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
)

CONFIG: dict[str, Any] = {
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|role_end|>",
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def train(text: str) -> tuple[dict[str, int], list[str]]:
    """Learn a byte-level BPE from `text`; return its vocabulary (token to id) and its merges (`"left right"`, best first).

    Raises:
        ValueError: the text is too small for the wanted number of entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    size = ENTRIES - len(SPECIAL) - len(NOT_SPECIAL)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([text], trainer)  # in one piece: blank lines must become tokens too
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = dict(sorted(model["vocab"].items(), key=lambda entry: entry[1]))
    if len(vocab) != size:
        raise ValueError(f"{CORPUS.name}: learned {len(vocab)} entries, wanted {size}; the corpus is too small")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return vocab, merges


def tokenizer_document(vocab: dict[str, int], merges: list[str]) -> dict[str, Any]:
    """Return the content of `tokenizer.json`: no normaliser, so every text decodes to itself."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [(text, True) for text in SPECIAL] + [(text, False) for text in NOT_SPECIAL]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(vocab) + k, "content": text, **flags, "special": special} for k, (text, special) in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def main(target: Path = TARGET) -> None:
    """Train, and write both files into `target`."""
    vocab, merges = train(CORPUS.read_bytes().decode("utf-8"))
    document = json.dumps(tokenizer_document(vocab, merges), ensure_ascii=False, separators=(",", ":"))
    target.mkdir(parents=True, exist_ok=True)
    (target / "tokenizer.json").write_bytes(document.encode() + b"\n")
    (target / "tokenizer_config.json").write_bytes(json.dumps(CONFIG, indent=2).encode() + b"\n")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
