"""Other programs that turn conversations into ids and masks, and chatmask itself, behind one interface.

Each contender runs in a process of its own (`python -m benchmarks.peers NAME --tokenizer DIR`), so that neither libraries nor
environment variables of one reach another. The process loads, then answers one JSON job a line with the seconds that it took,
loading and reading of the input left out. Nobody's code is copied: each adapter calls the program's own functions, also where
they are not public; the versions that this was written for stand in `requirements.txt`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import resource
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

Record = dict[str, Any]
Ids = Sequence[Any]  # one list, array or tensor of ints for each sample
SPEC = "qwen3-instruct"
IM_END = "<|im_end|>"


class Peer:
    """One contender.

    Attributes:
        name: what the tables call it.
        packages: whose versions are reported.
        needs: modules without which it is not available.
        does: what is called, for the report.
        memory, arrow: whether `in_memory` and `to_arrow` are there.
    """

    name = ""
    packages: tuple[str, ...] = ("tokenizers",)
    needs: tuple[str, ...] = ("tokenizers",)
    does = ""
    memory = True
    arrow = False
    warm: tuple[float, float] | None = None  # wall and CPU clock when `to_arrow` had started up, where it tells

    def __init__(self, tokenizer: Path, options: Mapping[str, str]) -> None:
        self.folder = tokenizer
        self.options = options

    def available(self) -> str:
        """'' when it can run here, else why not."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(missing)}" if missing else ""

    def load(self) -> None:
        """Load the tokenizer and whatever else is loaded once."""

    def prepare(self, conversations: list[Record], job: Mapping[str, Any]) -> Any:
        """What `in_memory` takes; not timed."""
        return conversations

    def in_memory(self, prepared: Any) -> tuple[Ids, Ids]:
        """Ids and masks of each sample (no masks where the contender makes none)."""
        raise NotImplementedError

    def to_arrow(self, inputs: list[Path], out: Path, job: Mapping[str, Any]) -> int | None:
        """The contender's own way from JSONL to an Arrow dataset; the number of tokens where it knows it."""
        raise NotImplementedError

    def read_arrow(self, out: Path) -> tuple[Ids, Ids]:
        """Ids and masks of what `to_arrow` wrote."""
        raise NotImplementedError


# --- the bare tokenizers -------------------------------------------------------------------------------------------------------


class Raw(Peer):
    """The `tokenizers` library on texts that are already rendered: what any program built on it pays at least."""

    name = "tokenizers"
    packages = ("tokenizers",)
    needs = ("tokenizers", "transformers")
    does = "`Tokenizer.encode_batch_fast` on rendered texts; no mask, no rendering"

    def load(self) -> None:
        """The tokenizer, and transformers to render with."""
        self.renderer = _auto(self.folder)
        self._load_backend()

    def _load_backend(self) -> None:
        from tokenizers import Tokenizer

        self.backend: Any = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def prepare(self, conversations: list[Record], job: Mapping[str, Any]) -> list[str]:
        """Rendered by transformers; with `per_turn`, one text for each assistant turn, cut behind it."""
        texts = []
        for record in conversations:
            messages = record["messages"]
            ends = [len(messages)]
            if job.get("per_turn"):
                ends = [k + 1 for k, message in enumerate(messages) if message["role"] == "assistant"]
            for end in ends:
                texts.append(
                    self.renderer.apply_chat_template(
                        messages[:end], tools=record.get("tools"), tokenize=False, enable_thinking=False
                    )
                )
        return texts

    def in_memory(self, prepared: list[str]) -> tuple[Ids, Ids]:
        """Ids only."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(prepared, add_special_tokens=False)], []


class RawFast(Raw):
    """The `fastokens` library on the same texts: the ceiling of a build that uses it."""

    name = "fastokens"
    packages = ("fastokens",)
    needs = ("fastokens", "transformers")
    does = "`Tokenizer.encode_batch_flat` on rendered texts; no mask, no rendering"

    def _load_backend(self) -> None:
        from fastokens._native import Tokenizer

        self.backend = Tokenizer.from_json_str((self.folder / "tokenizer.json").read_text(encoding="utf-8"))

    def in_memory(self, prepared: list[str]) -> tuple[Ids, Ids]:
        """Ids only."""
        import numpy as np

        ids, offsets = (
            np.frombuffer(buffer, kind)
            for buffer, kind in zip(self.backend.encode_batch_flat(prepared), (np.uint32, np.uint64), strict=True)
        )
        return [ids[a:b] for a, b in itertools.pairwise(offsets)], []


# --- peers ---------------------------------------------------------------------------------------------------------------------


class Transformers(Peer):
    """transformers' own masks; its template needs generation marks, and TRL ships one for Qwen3."""

    name = "transformers"
    packages = ("transformers", "tokenizers")
    needs = ("transformers", "trl")
    does = "`apply_chat_template(return_assistant_tokens_mask=True)` with TRL's training template"

    def load(self) -> None:
        """The tokenizer and the template."""
        self.tokenizer = _auto(self.folder)
        self.template = training_template().read_text(encoding="utf-8")

    def in_memory(self, prepared: list[Record]) -> tuple[Ids, Ids]:
        """One conversation a call, as its users do."""
        made = [
            self.tokenizer.apply_chat_template(
                record["messages"],
                tools=record.get("tools"),
                chat_template=self.template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            for record in prepared
        ]
        return [one["input_ids"] for one in made], [one["assistant_masks"] for one in made]


class Trl(Peer):
    """TRL's data path for SFT on assistant turns only."""

    name = "trl"
    packages = ("trl", "transformers", "datasets", "torch")
    needs = ("trl", "torch", "datasets")
    does = "in memory: its `_tokenize` and `build_labels`; Arrow: `SFTTrainer._prepare_dataset(assistant_only_loss)` + `save_to_disk`"
    arrow = True

    def load(self) -> None:
        """The tokenizer, the template, and TRL's functions (one of them lies inside a method)."""
        import datasets
        from trl import SFTConfig
        from trl.data_utils import _tokenize
        from trl.trainer import sft_trainer

        datasets.disable_progress_bars()
        datasets.disable_caching()
        self.tokenizer = _auto(self.folder)
        self.template = training_template().read_text(encoding="utf-8")
        self.tokenize: Callable[..., dict[str, list[int]]] = _tokenize
        self.trainer = sft_trainer.SFTTrainer
        inner = [c for c in self.trainer._prepare_dataset.__code__.co_consts if isinstance(c, types.CodeType)]
        code = next((c for c in inner if c.co_name == "build_labels"), None)
        if code is None:
            raise RuntimeError(f"trl {version('trl')}: SFTTrainer._prepare_dataset has no build_labels; this adapter is for 1.16")
        self.build_labels = types.FunctionType(code, vars(sft_trainer))
        self.config = SFTConfig(
            output_dir=str(self.folder / "unused"), assistant_only_loss=True, max_length=None, use_cpu=True, bf16=False
        )

    def in_memory(self, prepared: list[Record]) -> tuple[Ids, Ids]:
        """Ids and labels; a label of -100 is a mask of 0."""
        ids, labels = [], []
        for record in prepared:
            one = self.tokenize(
                self.tokenizer,
                record["messages"],
                return_assistant_tokens_mask=True,
                chat_template=self.template,
                tools=record.get("tools"),
            )
            ids.append(one["input_ids"])
            labels.append(self.build_labels(one, mask_columns=["assistant_masks"])["labels"])
        return ids, labels

    def to_arrow(self, inputs: list[Path], out: Path, job: Mapping[str, Any]) -> None:
        """Arguments and tools are declared as JSON; inferred types would add a null for each key that a call lacks."""
        import datasets

        text = datasets.Value("string")
        call = {"id": text, "type": text, "function": {"name": text, "arguments": datasets.Json()}}
        message = {"role": text, "content": text, "name": text, "tool_call_id": text}
        features = {}
        raw = b"".join(path.read_bytes() for path in inputs)
        if b'"tool_calls"' in raw:  # a JSON column without any value cannot be built
            message["tool_calls"] = datasets.List(call)
        if b'"tools"' in raw:
            features["tools"] = datasets.Json()
        features = datasets.Features({"messages": datasets.List(message), **features})
        files = [str(path) for path in inputs]
        data = datasets.load_dataset("json", data_files=files, features=features, split="train", cache_dir=str(out / "cache"))
        itself = types.SimpleNamespace(chat_template=self.template, _tokenizer=self.tokenizer, completion_only_loss=False)
        made = self.trainer._prepare_dataset(itself, data, self.tokenizer, self.config, False, None, "train")
        made.save_to_disk(str(out / "dataset"))

    def read_arrow(self, out: Path) -> tuple[Ids, Ids]:
        """Ids and labels."""
        import datasets

        data = datasets.load_from_disk(str(out / "dataset"))
        return list(data["input_ids"]), list(data["labels"])


class Renderers(Peer):
    """PrimeIntellect's hand-written Qwen3 renderer; with thinking on it writes what the model's own template does."""

    name = "renderers"
    packages = ("renderers", "transformers")
    needs = ("renderers", "transformers")
    does = "`build_training_sample` of its Qwen3 renderer"

    def load(self) -> None:
        """The renderer."""
        from renderers import build_training_sample, config_from_name, create_renderer

        self.sample = build_training_sample
        self.renderer = create_renderer(_auto(self.folder), type(config_from_name("qwen3"))(enable_thinking=True))

    def in_memory(self, prepared: list[Record]) -> tuple[Ids, Ids]:
        """One conversation a call."""
        made = [self.sample(self.renderer, record["messages"], tools=record.get("tools")) for record in prepared]
        return [one.token_ids for one in made], [one.loss_mask for one in made]


class _FromFolder(Peer):
    """A program that is not on the package index: its source folder is given by an option."""

    module = ""

    def available(self) -> str:
        """Whether the option was given and the module imports."""
        folder = self.options.get(self.name)
        if not folder:
            return f"not installed; give its source folder with --{self.name} DIR"
        sys.path.insert(0, folder)
        try:
            importlib.import_module(self.module)
        except Exception as error:  # whatever its import runs into is the reason
            return f"{folder}: importing {self.module} fails: {type(error).__name__}: {error}"
        return ""


class SpecForge(_FromFolder):
    """SpecForge's regular expression over rendered text, and its prefix lengths."""

    name = "specforge"
    packages = ("torch", "transformers")
    module = "specforge.data.preprocessing"
    does = "`preprocess_conversations`, template `qwen3-thinking`"

    def load(self) -> None:
        """Its function and template."""
        self.preprocess = importlib.import_module(self.module).preprocess_conversations
        self.template = importlib.import_module("specforge.data.template").TEMPLATE_REGISTRY.get("qwen3-thinking")
        self.tokenizer = _auto(self.folder)

    def in_memory(self, prepared: list[Record]) -> tuple[Ids, Ids]:
        """Without a limit of length that would cut; tools where its function takes them."""
        given: dict[str, Any] = {"max_length": 10_000_000}
        if "tools" in inspect.signature(self.preprocess).parameters:
            given["tools"] = [record.get("tools") or [] for record in prepared]
        made = self.preprocess(self.tokenizer, [record["messages"] for record in prepared], self.template, **given)
        return [ids[0].tolist() for ids in made["input_ids"]], [mask[0].tolist() for mask in made["loss_mask"]]


class Areal(_FromFolder):
    """AReaL's `swe_sft` loader in its pair mode: one sample for each assistant turn."""

    name = "areal"
    packages = ("transformers",)
    module = "areal.dataset.swe_sft"
    does = "pair mode: `_split_and_filter` and `_render_tokenize_mask` of `areal.dataset.swe_sft`"

    def available(self) -> str:
        """Also whether it has the functions (they moved between its branches)."""
        why = super().available()
        if why:
            return why
        self.code = importlib.import_module(self.module)
        wanted = ("_split_and_filter", "_render_tokenize_mask", "_detect_template_pattern")
        lacks = [name for name in wanted if not hasattr(self.code, name)]
        return f"{self.module} has no {', '.join(lacks)}" if lacks else ""

    def load(self) -> None:
        """The tokenizer."""
        self.tokenizer = _auto(self.folder)

    def in_memory(self, prepared: list[Record]) -> tuple[Ids, Ids]:
        """All pairs of each conversation."""
        ids, masks = [], []
        for record in prepared:
            tools = record.get("tools")
            pattern = self.code._detect_template_pattern(self.tokenizer, tools=tools)
            for pair in self.code._split_and_filter(record["messages"])[0]:
                _, one, mask, _ = self.code._render_tokenize_mask(pair, self.tokenizer, pattern, tools)
                ids.append(one)
                masks.append(mask)
        return ids, masks


# --- chatmask -------------------------------------------------------------------------------------------------------------------


class Chatmask(Peer):
    """chatmask.build: JSONL in, a finished dataset with its manifest out, everything that it checks included."""

    name = "chatmask"
    packages: tuple[str, ...] = ("chatmask", "tokenizers", "pyarrow")
    needs: tuple[str, ...] = ("chatmask",)
    does = "`chatmask.build` from JSONL to a finished, verified dataset"
    memory = False
    arrow = True
    backend: Literal["auto", "fast", "tokenizers"] = "tokenizers"

    def to_arrow(self, inputs: list[Path], out: Path, job: Mapping[str, Any]) -> int:
        """Build; `workers`, `parity`, `spec`, `overrides` and `per_turn` come with the job.

        `short` names files of one row that are built first: each is a part of its own, and when `progress` tells that they are done,
        loading and compiling are over and what is measured begins; with several workers the others load meanwhile. It ends with the
        finished dataset.
        """
        import chatmask

        short = [Path(path) for path in job.get("short", ())]
        self.warm = None

        def progress(done: int, _: int) -> None:
            if done == len(short):
                self.warm = (time.perf_counter(), _cpu())

        result = chatmask.build(
            [*short, *inputs],
            job.get("spec", SPEC),
            out,
            tokenizer=str(self.folder),
            overrides=job.get("overrides", ()),
            workers=job.get("workers", 1),
            parity=job.get("parity", "off"),
            policy_overrides=["split=per_turn"] if job.get("per_turn") else [],
            progress=progress,
            backend=self.backend,
        )
        if short and self.warm is None:
            raise RuntimeError(
                f"chatmask.build told no progress of {len(short)} parts, so its start-up cannot be told from its work"
            )
        return int(sum(shard["tokens"] for shard in result.manifest["shards"][len(short) :]))

    def read_arrow(self, out: Path) -> tuple[Ids, Ids]:
        """The columns of all shards, read without chatmask."""
        import pyarrow as pa

        ids: list[Any] = []
        masks: list[Any] = []
        for path in sorted(out.glob("data-*.arrow")):
            table = pa.ipc.open_stream(path.read_bytes()).read_all()
            ids += table["input_ids"].to_pylist()
            masks += table["loss_mask"].to_pylist()
        return ids, masks


class ChatmaskFast(Chatmask):
    """The same with the fast tokenizer."""

    name = "chatmask-fast"
    packages = ("chatmask", "fastokens", "pyarrow")
    needs: tuple[str, ...] = ("chatmask", "fastokens")
    does = "the same with `backend='fast'`"
    backend = "fast"


PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (Raw, RawFast, Transformers, Trl, Renderers, SpecForge, Areal, Chatmask, ChatmaskFast)
}


def training_template() -> Path:
    """TRL's training template for Qwen3: the thinking block on every turn, assistant turns between generation marks."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "chat_templates" / "qwen3_training.jinja"


def _auto(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


# --- the process ----------------------------------------------------------------------------------------------------------------


def answer(peer: Peer, job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one job.

    Args:
        peer: the contender.
        job: `op` (`memory`, `arrow`, `dump`), `inputs`, `out`, and what the contender itself reads.

    Returns:
        `seconds` and `cpu` (this process and its ended children) of the work itself, and `tokens` where they are known.
    """
    inputs = [Path(path) for path in job["inputs"]]
    out = Path(job.get("out", ""))
    if job["op"] == "dump":
        if job.get("way") == "arrow":
            peer.to_arrow(inputs, out, job)
            ids, masks = peer.read_arrow(out)
        else:
            ids, masks = peer.in_memory(peer.prepare(_read(inputs), job))
        _save(Path(job["save"]), ids, masks)
        return {"samples": len(ids)}
    prepared = peer.prepare(_read(inputs), job) if job["op"] == "memory" else None
    before, started = _cpu(), time.perf_counter()
    if job["op"] == "memory":
        made = peer.in_memory(prepared)
        tokens: int | None = None
    else:
        tokens = peer.to_arrow(inputs, out, job)
        made = ([], [])
        if peer.warm is not None:
            started, before = peer.warm
    seconds, cpu = time.perf_counter() - started, _cpu() - before
    if job["op"] == "memory":
        tokens = sum(len(ids) for ids in made[0])
    return {"seconds": seconds, "cpu": cpu, "tokens": tokens, "bytes": sum(path.stat().st_size for path in inputs)}


def _cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _read(inputs: Sequence[Path]) -> list[Record]:
    return [json.loads(line) for path in inputs for line in path.open(encoding="utf-8")]


def _save(path: Path, ids: Ids, masks: Ids) -> None:
    """Ids and masks as one JSON file; a label of -100 is a mask of 0, any other label one of 1."""
    plain = [[int(i) for i in one] for one in ids]
    if masks and any(-100 in one for one in masks):
        masks = [[int(label != -100) for label in one] for one in masks]
    path.write_text(json.dumps({"ids": plain, "masks": [[int(bit) for bit in one] for one in masks]}), encoding="utf-8")


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve jobs until the input ends; the first answer says whether the contender is available."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--specforge", default="")
    parser.add_argument("--areal", default="")
    given = parser.parse_args(arguments)
    # libraries print; answers go through a copy of standard output, everything else to standard error
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer = PEERS[given.name](given.tokenizer, {"specforge": given.specforge, "areal": given.areal})
    why = peer.available()
    if not why:
        peer.load()
    print(json.dumps({"unavailable": why, "versions": versions(peer.packages)}), file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = answer(peer, json.loads(line))
        except Exception as error:  # goes to the one who asked, who stops the benchmark with it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
