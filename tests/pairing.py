"""A tokenizer for any public template: the demo vocabulary with the template's own special-looking literals as added tokens."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import chatmask
from chatmask.errors import TemplateError
from chatmask.templates.environment import constants
from chatmask.templates.probe import AGENT, TOOLS
from chatmask.templates.tracing import ChatTemplate
from chatmask.tokenizers import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
LITERAL = re.compile(
    r"<\|[^<>|\s]{1,60}\|>|<｜[^<>｜\s]{1,60}｜>|</?[A-Za-z][^<>\s]{0,60}>|\[/?[A-Z][A-Z_]{2,40}\]|<[^<>\s]{1,60}\|>|<\|[^<>\s]{1,60}>"
    r"|\[\|[^\[\]|\s]{1,40}\|\]|\]~!?[a-z]{1,4}[\[\]]|\[e~\["
)
_CHAT = [
    {"role": "system", "content": "aa"},
    {"role": "user", "content": "bb"},
    {"role": "assistant", "content": "cc"},
    {"role": "user", "content": "dd"},
    {"role": "assistant", "content": "ee"},
]
_GIVEN = ("probe", "path", "depth", "call0")  # a template may put these into tags: `<parameter=path>` is no token
_DEMO = Path(chatmask.__file__).parent / "templates" / "demo" / "tokenizer.json"


def literals(source: str) -> list[str]:
    """Special-looking literals that a template has as constants, or puts together when it renders a chat."""
    texts = list(constants(source))
    template = ChatTemplate(source, dict(SPECIAL), "2026-01-01")
    for messages, tools in ((_CHAT, None), (_CHAT[1:], None), (AGENT, TOOLS)):
        with suppress(TemplateError):
            texts.append(template.render(messages, tools))
    found = {match for text in texts for match in LITERAL.findall(text)}
    return sorted({text for text in found if not any(word in text for word in _GIVEN)} | set(SPECIAL.values()))


def paired(source: str, name: str) -> Tokenizer:
    """The demo vocabulary, the template, and its literals as special tokens."""
    data = json.loads(_DEMO.read_bytes())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    base = len(data["model"]["vocab"])
    added = [{"id": base + i, "content": literal, **flags} for i, literal in enumerate(literals(source))]
    return Tokenizer({**data, "added_tokens": added}, source, dict(SPECIAL), name)
