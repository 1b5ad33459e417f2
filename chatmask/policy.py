"""Policy: what is made of a conversation and which of its turns are trained, as data (`--policy NAME|FILE`).

A spec says how one chat template writes; a policy says what the user wants trained. Both are strict YAML with `extends`. The
defaults change nothing: one sample per record, every assistant turn trained.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import SpecError
from .templates.strict_yaml import given_file, load_yaml_file, override_pairs, parent_file, scalar, unknown_field

Places = dict[tuple[str | int, ...], str]  # `file:line` of every field by its path
Rule = Literal["train", "mask", "drop"]

WORDS = {"name", "extends", "description", "note"}  # cannot change a sample, and are not inherited


class Policy(BaseModel):
    """One declared policy. Fields, defaults and allowed values are also what the published schema says."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    extends: str | None = Field(
        None, description="policy (name, or file beside this one) whose fields hold where this one is silent"
    )
    description: str = ""
    note: str = Field("", description="what a user must know before choosing this policy")

    # samples
    split: Literal["trajectory", "per_turn", "exact", "pre_split"] = Field(
        "trajectory",
        description="trajectory: one sample with all turns; per_turn: one sample per trained turn, cut behind it; exact: the fewest "
        "samples in which every trained turn has the prefix that the server had; pre_split: each record is a sample, whose last "
        "assistant turn is trained",
    )
    tools: Literal["record", "drop"] = Field("record", description="drop: the template is given no tool definitions")
    truncate_at_notification: bool = Field(
        False,
        description="cut a conversation before a user's <task-notification>, where the assistant turn before it is text without calls",
    )

    # rules; a step is an assistant turn with the tool results behind it
    tool_error: Rule = Field(
        "train",
        description="steps with a result that says `is_error: true`. mask: the turn is not trained; drop: no sample is made in which "
        "it would be trained (per_turn, exact: its own; trajectory, pre_split: the whole record)",
    )
    empty_tool_call: Rule = Field("train", description="turns that call tools with neither text nor reasoning")
    bare_text_tool_call: Rule = Field("train", description="turns that call tools with text, but without reasoning")
    train_on: Literal["all", "last", "last_n", "all_text"] = Field(
        "all",
        description="which assistant turns, counted before flags and rules, so that these only ever take away; all_text: everything, "
        "prompts and template text included, but for messages that are flagged or ruled out",
    )
    last_n: int | None = Field(None, ge=1, description="how many turns `train_on: last_n` means")

    # reasoning
    think_tags: list[Annotated[list[str], Field(min_length=2, max_length=2)]] | None = Field(
        None,
        description="[open, close] pairs that are read as reasoning where content begins with one, besides the spec's own; mixed pairs "
        "too. They are rewritten to the spec's tags. null: <thinking>, <think> and <reasoning> under a spec with thinking on or auto, and "
        "none under one with thinking off, where such content is text",
    )
    inline_conflict: Literal["reject", "inline"] = Field(
        "reject", description="a reasoning field and an inline block that differ; inline: the block wins, counted"
    )
    strip_thinking: Literal["none", "context", "all"] = Field(
        "none", description="remove reasoning from turns that the sample does not train (context), or from every turn"
    )
    strip_blanks: bool = Field(
        False, description="where a block inside content is removed, white space at both ends of the answer goes with it (AReaL)"
    )
    strip_probability: float = Field(
        0.0, ge=0.0, le=1.0, description="remove each turn's reasoning with this probability, by seed and record"
    )
    variants: int = Field(
        1, ge=1, le=1000, description="samples made of each one: variant 0 untouched, the others randomly stripped"
    )
    empty_think: Literal["none", "target", "all"] = Field(
        "none",
        description="give turns without reasoning an empty think block: the trained ones, or every turn; never in a sample under random "
        "stripping, where its absence is what is taught",
    )
    max_no_thinking_ratio: float | None = Field(
        None,
        ge=0.0,
        description="keep at most this many samples with calls and without reasoning per sample with reasoning, over the whole build",
    )
    supervise_reasoning: bool = Field(True, description="false: reasoning is context only")
    dict_arguments: Literal["given", "ascii_json"] = Field(
        "given", description="ascii_json: tool arguments given as objects become JSON text with ASCII escapes (AReaL)"
    )

    # masks and lengths
    mask_from: Literal["prompt", "role_header"] = Field(
        "prompt",
        description="role_header: a mask begins right behind the role header, so that a think block which the server writes itself is "
        "trained too (AReaL)",
    )
    require_spans: bool = Field(
        False, description="drop a sample in which the rendering shows another number of turns than the conversation (AReaL)"
    )
    max_length: int | None = Field(None, ge=1, description="most tokens of a sample")
    overlength: Literal["error", "drop", "last_turns", "first_turns", "explode"] = Field(
        "error", description="what becomes of a longer one; cuts fall between messages only"
    )

    # the build
    dedup: bool = Field(False, description="keep the first of samples with equal ids and masks, counted")
    shuffle: bool = Field(False, description="order the rows of the whole build by seed; takes twice the disk while it builds")
    validation: float = Field(0.0, ge=0.0, lt=1.0, description="share of records, never of samples, set apart for validation")
    part: Literal["train", "validation"] = Field("train", description="which share `validation` leaves to this build")
    seed: int = Field(0, description="of stripping, balance, shuffle and validation")

    @field_validator("think_tags")
    @classmethod
    def _proper_tags(cls, value: list[list[str]] | None) -> list[list[str]] | None:
        for opening, closing in value or ():
            if not opening.strip() or not closing.strip() or opening == closing:
                raise ValueError(f"a pair is two different tags, found [{opening!r}, {closing!r}]")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Policy:
        if (self.train_on == "last_n") != (self.last_n is not None):
            raise ValueError("`train_on: last_n` and `last_n: N` go together")
        if self.variants > 1 and self.strip_probability == 0.0:
            raise ValueError("variants: without `strip_probability` all variants are equal")
        if self.train_on == "all_text":
            apart = {
                "split": self.split in ("per_turn", "exact"),
                "overlength: explode": self.overlength == "explode",
                "variants": self.variants > 1,
                "mask_from": self.mask_from != "prompt",
                "supervise_reasoning": not self.supervise_reasoning,
            }
            if wrong := next((name for name, given in apart.items() if given), None):
                raise ValueError(f"train_on: all_text trains a record's whole text once, which does not go with `{wrong}`")
        if self.split == "exact" and self.strip_thinking == "context":
            raise ValueError(
                "split `exact` keeps the prefixes that the server had, `strip_thinking: context` changes them; take `per_turn`"
            )
        return self

    @cached_property
    def tag_pairs(self) -> tuple[tuple[str, str], ...] | None:
        """`think_tags`, as pairs."""
        return None if self.think_tags is None else tuple((opening, closing) for opening, closing in self.think_tags)

    @cached_property
    def plain(self) -> bool:
        """Does it make one sample of each record, with every turn trained and nothing changed."""
        of_the_build = {
            "max_length",
            "overlength",
            "dedup",
            "shuffle",
            "validation",
            "part",
            "seed",
            "max_no_thinking_ratio",
            "require_spans",
        }
        return self.model_dump(exclude=WORDS | of_the_build) == DEFAULT.model_dump(exclude=WORDS | of_the_build)

    @property
    def sha256(self) -> str:
        """Hash of everything that can change a sample (not of names and descriptions)."""
        data = self.model_dump(exclude=WORDS)
        return hashlib.sha256(json.dumps(data, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


PolicyLike = str | Path | Policy
DEFAULT = Policy.model_validate({"name": "default", "description": "one sample per record, every assistant turn trained"})


def policies_dir() -> Path:
    """Folder of the packaged policies: inside the package when installed, at the repository's top level otherwise."""
    package = Path(__file__).resolve().parent
    inside = package / "policies"
    return inside if inside.is_dir() else package.parent / "policies"


def list_policies() -> list[str]:
    """Names of all packaged policies, sorted."""
    return sorted(path.stem for path in policies_dir().glob("*.yaml"))


def load_policy(policy: PolicyLike | None = None, overrides: Mapping[str, str] | Iterable[str] = ()) -> Policy:
    """Load and validate a policy.

    Args:
        policy: a packaged name (`areal-pair`), a YAML file, a policy object, or None for the defaults.
        overrides: `KEY=VALUE` strings or a mapping of the same, as for specs.

    Raises:
        SpecError: file, line, field, what was found and what is allowed.
    """
    pairs = override_pairs(overrides, "policy option", "split=per_turn")
    places: Places = {}
    if policy is None or isinstance(policy, Policy):
        given = DEFAULT if policy is None else policy
        if not pairs:
            return given
        data, where = given.model_dump(), given.name
    else:
        path = policy_file(policy)
        data, places = _resolve(path, ())
        where = str(path)
    data = {**data, **{key: scalar(value, f"policy option {key}") for key, value in pairs.items()}}
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        raise SpecError("\n".join(_problem(item, places, where, pairs) for item in error.errors())) from None


def policy_file(policy: str | Path) -> Path:
    """The YAML file of a packaged name, or the file itself; raises SpecError that names near matches."""
    file = given_file(policy, "policy")
    if file is not None:
        return file
    if policy in list_policies():
        return policies_dir() / f"{policy}.yaml"
    near = difflib.get_close_matches(str(policy), list_policies(), 3, 0.4)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise SpecError(f"there is no policy named {policy!r}; {hint}known: {', '.join(list_policies())}, or give a .yaml file")


def _resolve(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], Places]:
    data, lines = load_yaml_file(path)
    places = {field: f"{path}:{line}" for field, line in lines.items()}
    parent = data.get("extends")
    if parent is not None:
        seen = (*seen, path.resolve())
        base, theirs = _resolve(parent_file(path, parent, lines, "policy", seen, policy_file), seen)
        # a field that stands here hides all of the parent's, its items too
        places = {**{field: place for field, place in theirs.items() if field[:1] not in places}, **places}
        data = {**{key: value for key, value in base.items() if key not in WORDS}, **data}
    return data, places


def _problem(item: Any, places: Places, where: str, overridden: Iterable[str]) -> str:
    path = tuple(item["loc"])
    field = ".".join(str(part) for part in path) or "policy"
    text = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        text = unknown_field(str(path[-1]), list(Policy.model_fields))
    place = next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), where)
    if path and path[0] in overridden:
        place = f"policy option {path[0]}"
    found = "" if isinstance(item["input"], dict) or item["type"] == "extra_forbidden" else f", found {item['input']!r}"
    return f"{place}: {field}: {text}{found}"
