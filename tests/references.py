"""What each spec was verified on, laid out as a tokenizer directory: a vocabulary with a public chat template in its place.

Where the model's own vocabulary is not published, another one stands in for it: the template's control tokens that it lacks are
added to it, so that they are one id each, as they are in the model's own.

``python -m tests.references SPEC...`` prints the directory of each spec (name or file);
``python -m tests.references --root DIR`` lays out a link ``DIR/<spec name>`` for every spec.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import chatmask
from chatmask.templates.spec import TemplateSpec
from tests import assets
from tests.assets import AssetUnavailable
from tests.pairing import SPECIAL, literals
from tests.vocabularies import FLAGS, vocabulary

# Tokens that end a turn, the likeliest first: a stand-in takes as its eos the first one that the template writes.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end_of_turn|>", "<|end|>", "<|endoftext|>", "<end_of_turn>")


@cache
def directory(vocabulary_name: str, template: str | None, own: bool) -> Path:
    """Return a vocabulary's directory with a public template in place of its own.

    Raises:
        KeyError: there is no such vocabulary, or no such template.
        AssetUnavailable: the package index does not serve one of them.
    """
    folder = vocabulary(vocabulary_name)
    if own and template is None:
        return folder
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    config = json.loads(files["tokenizer_config.json"])
    if template is not None:
        config.pop("chat_template", None)
        files["chat_template.jinja"] = _template(template).encode()
    source = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else str(config["chat_template"])
    if not own:
        files["tokenizer.json"] = _with_controls(json.loads(files["tokenizer.json"]), source, config)
    files["tokenizer_config.json"] = assets.as_json(config)
    name = re.sub(r"[^A-Za-z0-9.]+", "-", template.rpartition("/")[2] if template else "own")[:60].lower()
    return assets.lay_out(f"{vocabulary_name}-{name}{'' if own else '-standin'}", files)


def for_spec(spec: TemplateSpec) -> Path:
    """Return the directory of what a spec says it was verified on.

    Raises:
        ValueError: the spec does not say.
    """
    if spec.reference is None:
        raise ValueError(
            f"spec {spec.name} has no `reference`: name the vocabulary (tests/vocabularies.py) and the public template"
        )
    return directory(spec.reference.vocabulary, spec.reference.template, spec.reference.own)


def _template(key: str) -> str:
    templates = assets.templates()
    if key not in templates:
        words = key.rpartition("/")[2].lower()[:8]
        near = [name for name in templates if words in name.lower()][:8]
        raise KeyError(f"no public template is called {key}; similar: {', '.join(near) or 'none'}")
    return templates[key]


def _with_controls(tokenizer: dict[str, Any], source: str, config: dict[str, Any]) -> bytes:
    """Add the template's control tokens that a stand-in lacks, and set its special tokens so that the template can write them."""
    written = [text for text in literals(source) if text not in SPECIAL.values() or text in source]
    added: list[dict[str, Any]] = tokenizer["added_tokens"]
    known = {token["content"] for token in added}
    # The end token is one that the template writes itself. A template that only writes the variables gets the vocabulary's pair
    # where it has both tokens, else the classic one.
    pair = (_text(config.get("bos_token")), _text(config.get("eos_token")))
    own_bos, own_eos = pair if all(pair) else (SPECIAL["bos_token"], SPECIAL["eos_token"])
    bos = own_bos if re.search(r"\bbos_token\b", source) else None
    eos = "<|endoftext|>" if "<|endoftext|>" in known and not re.search(r"\beos_token\b", source) else own_eos
    eos = next((end for end in _ENDS if end in source), eos)

    vocabulary = dict(
        tokenizer["model"]["vocab"]
    )  # a text that is an entry already keeps its id, as the `tokenizers` library has it
    following = max([*vocabulary.values(), *(token["id"] for token in added)]) + 1
    for text in dict.fromkeys([*([bos] if bos else []), eos, *written]):
        if text not in known:
            added.append({"id": vocabulary.get(text, following), "content": text, **FLAGS, "special": True})
            following += text not in vocabulary
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "unk_token"):
        config.pop(key, None)  # the vocabulary's own; `tokenizer.json` says what is special
    config.update(bos_token=bos, eos_token=eos, pad_token="<|endoftext|>" if "<|endoftext|>" in known else eos)
    return assets.as_json(tokenizer)


def _text(token: str | dict[str, Any] | None) -> str | None:
    """The text of a special token, which configs also write as an object."""
    return str(token["content"]) if isinstance(token, dict) else token


def main(arguments: list[str] | None = None) -> int:
    """Print the directories of specs, or link them below a directory; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.references", description="What each spec was verified on.")
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="name or file of a spec; none means all")
    parser.add_argument("--root", type=Path, help="directory in which to lay out one link per spec")
    parser.add_argument("--vocabulary", help="print the folder of this vocabulary instead, with --template in it")
    parser.add_argument("--template", help="key of a public template (tests.assets.templates())")
    parser.add_argument("--stand-in", action="store_true", help="add the template's control tokens to the vocabulary")
    options = parser.parse_args(arguments)
    try:
        if options.vocabulary:
            print(directory(options.vocabulary, options.template, not options.stand_in))
            return 0
        specs = [chatmask.load_spec(name) for name in options.specs or chatmask.list_specs()]
    except (chatmask.ChatmaskError, AssetUnavailable, KeyError) as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 1
    failed = 0
    for spec in specs:
        try:
            folder = for_spec(spec)
        except (AssetUnavailable, KeyError, ValueError) as error:
            print(f"error: {spec.name}: {error.args[0]}", file=sys.stderr)
            failed += 1
            continue
        if options.root is not None:
            link = options.root / spec.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.is_symlink():
                link.unlink()
            link.symlink_to(folder)
        print(f"{spec.name}\t{folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
