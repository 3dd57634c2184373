# SPDX-License-Identifier: Apache-2.0
"""What is known about a Kimi K3 checkpoint before it is loaded, from config and headers.

`build` is a pure function of both; the command line, the page and the check before
serving show the same `Report`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from vllm.checkpoint.formats import CT, INPUT_SCALES, Dialect, closest, dialects
from vllm.checkpoint.gpus import GPUS, kernel
from vllm.checkpoint.headers import Entry
from vllm.checkpoint.model import Model
from vllm.checkpoint.ranks import Deployment, Landing, Stage, expert_width, landings, stages
from vllm.checkpoint.tensors import TEXT_PREFIX

__all__ = ["Fused", "Kind", "Problem", "Report", "Room", "Scales", "build"]

# What a checkpoint may hold beside the model: scales of the KV cache.
BESIDE = ("k_scale", "v_scale")
UTILISATION = 0.92  # the engine's default share of a GPU's memory
SHOWN = 200  # problems of one sort that are kept; all are counted


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        sort: ``"missing"``, ``"unexpected"``, ``"dtype"``, ``"shape"``, ``"config"``,
            ``"placement"``, ``"memory"`` or ``"values"``.
        text: One sentence, with the tensor, what was found and what was expected.
        error: The engine cannot load it; else it can, with a loss.
    """

    sort: str
    text: str
    error: bool = True


@dataclass
class Kind:
    """All tensors of one role.

    Attributes:
        formats: Weights by format, as the files hold them.
        dialects: Quantised weights by dialect.
        config: Weights by what the config says.
    """

    parameters: int = 0
    weights: int = 0
    tensors: int = 0
    bytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    dialects: Counter[str] = field(default_factory=Counter)
    config: Counter[str] = field(default_factory=Counter)


@dataclass
class Fused:
    """A fused module of the engine: its shards, and how many layers' shards are stored alike."""

    shards: tuple[str, ...]
    alike: int = 0
    mixed: int = 0
    formats: Counter[str] = field(default_factory=Counter)


@dataclass
class Scales:
    """All scales of one name: counts of tensors and values, and binary exponents of those that are not zero."""

    tensors: int = 0
    values: int = 0
    nan: int = 0
    infinite: int = 0
    zero: int = 0
    negative: int = 0
    exponents: tuple[int, int] | None = None

    def see(self, least: int, most: int) -> None:
        """Widen the range of exponents."""
        low, high = self.exponents or (least, most)
        self.exponents = (min(low, least), max(high, most))

    def add(self, other: "Scales") -> None:
        """Add the counts of `other`."""
        for name in ("tensors", "values", "nan", "infinite", "zero", "negative"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.exponents:
            self.see(*other.exponents)


@dataclass(frozen=True)
class Room:
    """Memory of one rank on a GPU, in bytes.

    Attributes:
        usable: The engine's default share of it.
        left: For KV cache, activations and CUDA graphs; negative if weights do not fit.
        tokens: BF16 MLA cache that would fill what is left, without any KDA state.
    """

    usable: int
    weights: int
    left: int
    tokens: int | None


@dataclass
class Report:
    """See the module's docstring.

    Attributes:
        grid: Layer -> module -> format, for layers and experts alike.
        aliases: Root or spelling -> keys of ``quantized_layers`` that use it.
        kernels: Format -> the engine's kernel on the GPU.
        scales: By name, if they were read.
        w3_over_w1: Ratio of an expert's tensor scales -> experts, the commonest.
    """

    path: str
    architecture: str
    method: str
    layers: int
    experts: int
    deployment: Deployment
    gpu: str | None
    files: int = 0
    tensors: int = 0
    bytes: int = 0
    parameters: int = 0
    kinds: dict[str, Kind] = field(default_factory=dict)
    fused: dict[str, Fused] = field(default_factory=dict)
    grid: dict[str, dict[str, str]] = field(default_factory=dict)
    aliases: Counter[str] = field(default_factory=Counter)
    draft_tensors: int = 0
    landings: list[Landing] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    rooms: list[Room] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    scales: dict[str, Scales] = field(default_factory=dict)
    w3_over_w1: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        return [problem.text for problem in self.problems if problem.error]

    @property
    def exit_code(self) -> int:
        """0 clean, 1 warnings, 2 will not load."""
        return 2 if self.errors else 1 if self.problems else 0

    def add(self, sort: str, text: str, error: bool = True) -> None:
        """Note a problem; the first `SHOWN` of a sort are kept."""
        self.counts[sort] += 1
        if self.counts[sort] <= SHOWN:
            self.problems.append(Problem(sort, text, error))

    def as_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, texts and numbers."""
        content = _plain(self)
        for stage, plain in zip(self.stages, content["stages"], strict=True):
            plain["total"] = stage.total
        return content | {"exit_code": self.exit_code}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):  # asdict would make nonsense of a Counter
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def build(
    model: Model, entries: Mapping[str, Entry], deployment: Deployment | None = None, gpu: str | None = None
) -> Report:
    """Compare what files hold with what the config says and a deployment needs.

    Args:
        model: The config, read.
        entries: All tensors of the files.
        deployment: Default: one rank.
        gpu: A key of `GPUS`.
    """
    report = Report(
        path=str(model.folder),
        architecture=str(model.config["architectures"][0]),
        method=model.method,
        layers=model.text["num_hidden_layers"],
        experts=model.experts,
        deployment=deployment or Deployment(),
        gpu=gpu,
        files=len({entry.file for entry in entries.values()}),
        tensors=len(entries),
        bytes=sum(entry.nbytes for entry in entries.values()),
    )
    for text in model.refused:
        report.add("config", text)
    if model.algos is None:
        report.add(
            "config",
            f"quant_method {model.method} is not described here: only files and index were checked.",
            error=False,
        )
    else:
        _compare(report, model, entries)
    _spellings(report, model)
    _deploy(report, model)
    return report


def _label(algo: str | None) -> str:
    return (algo or "unquantised").removeprefix(CT)


def _compare(report: Report, model: Model, entries: Mapping[str, Entry]) -> None:
    left = dict(entries)
    held = {name.rpartition(".")[2] for name in entries if name.endswith(("input_scale", "input_global_scale"))}
    algos = model.algos or {}
    layers = f"{TEXT_PREFIX if any(n.startswith(TEXT_PREFIX) for n in model.specs) else ''}model.layers."
    found: dict[str, str] = {}
    for name, spec in model.specs.items():
        algo = algos.get(name)
        prefix, _, leaf = name.rpartition(".")
        choices = dialects(algo, spec.shape, leaf)
        kind = report.kinds.setdefault(spec.kind, Kind())
        banks = [prefix]
        if spec.kind.startswith("expert."):
            head, tail = prefix.split(".experts.0.")
            banks = [f"{head}.experts.{expert}.{tail}" for expert in range(model.experts)]
        kind.weights += len(banks)
        kind.parameters += len(banks) * _count(spec.shape)
        kind.config[_label(algo)] += len(banks)
        input_scale = INPUT_SCALES.get(algo or "")
        if input_scale in held:
            # A weight-only file has no input scales; any other has one for every expert.
            scale = {input_scale: (("F32",), ((), (1,)))}
            choices = [Dialect(choice.name, {**choice.tensors, **scale}) for choice in choices]
        for module in banks:
            stored, dialect = _take(module, choices, left)
            if dialect is None:  # a format that is not described: whatever lies there
                for other in [n for n in left if n.startswith(module + ".")]:
                    stored[other] = left.pop(other)
            elif not _fits(report, stored, module, dialect, spec.zero_tail_axis, _says(algo)):
                dialect = None
            kind.tensors += len(stored)
            kind.bytes += sum(entry.nbytes for entry in stored.values())
            label = _label(algo)
            if dialect is None and choices:
                entry = stored.get(f"{module}.{leaf}") or next(iter(stored.values()), None)
                label = f"{entry.dtype}?" if entry else "missing"
            elif algo is None and stored:
                label = next(iter(stored.values())).dtype
            kind.formats[label] += 1
            if algo is not None and dialect is not None:
                kind.dialects[dialect.name] += 1
            place = module if leaf == "weight" else f"{module}.{leaf}"
            if found.setdefault(prefix if leaf == "weight" else place, label) != label:
                found[prefix] = "mixed"
    report.parameters = sum(kind.parameters for kind in report.kinds.values())
    for module, label in found.items():
        layer, _, inner = module.removeprefix(layers).partition(".") if module.startswith(layers) else ("", "", module)
        inner = inner.replace(".experts.0.", ".experts.")
        if not module.startswith(("vision_tower.", "mm_projector.")):
            report.grid.setdefault(layer, {})[inner] = label
    for module, fused in model.fused.items():
        row = report.fused.setdefault(fused.name, Fused(fused.shards))
        parent = module.rpartition(".")[0]
        labels = Counter(found.get(f"{parent}.{shard}", "missing") for shard in fused.shards)
        row.formats += labels
        if len(labels) == 1:
            row.alike += 1
        else:
            row.mixed += 1
    for name, entry in left.items():
        if is_draft(name, report.layers):
            report.draft_tensors += 1
        elif name.rpartition(".")[2] not in BESIDE and "rotary_emb" not in name.split("."):
            report.add("unexpected", f"{name} in {entry.file}: the model has no such tensor")


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _says(algo: str | None) -> str:
    return f" (the config says {algo})" if algo else " (the config says not quantised)"


def _take(
    module: str, choices: list[Dialect], left: dict[str, Entry]
) -> tuple[dict[str, Entry], Dialect | None]:
    """Move a module's tensors out of `left`, in the dialect that fits them best."""
    if not choices:
        return {}, None
    dialect = closest(module, choices, left)
    stored = {}
    for leaf in dialect.tensors:
        entry = left.pop(f"{module}.{leaf}", None)
        if entry is not None:
            stored[f"{module}.{leaf}"] = entry
    return stored, dialect


def _fits(
    report: Report, stored: Mapping[str, Entry], module: str, dialect: Dialect, zero_tail_axis: int | None, says: str
) -> bool:
    """Whether stored tensors are those of the dialect; notes what is not."""
    fits = True
    for leaf, (dtypes, shapes) in dialect.tensors.items():
        name = f"{module}.{leaf}"
        entry = stored.get(name)
        if entry is None:
            report.add("missing", f"{name}: missing; expected {'/'.join(dtypes)} {list(shapes[0])}{says}")
            fits = False
            continue
        if entry.dtype not in dtypes:
            expected = " or ".join(dtypes)
            report.add("dtype", f"{name} in {entry.file}: dtype {entry.dtype}, expected {expected}{says}")
            fits = False
        if entry.shape not in shapes and not _longer_on(zero_tail_axis, entry.shape, shapes[0]):
            report.add(
                "shape", f"{name} in {entry.file}: shape {list(entry.shape)}, expected {list(shapes[0])}{says}"
            )
            fits = False
    return fits


def _longer_on(axis: int | None, shape: tuple[int, ...], want: tuple[int, ...]) -> bool:
    return axis is not None and len(shape) == len(want) and all(
        n >= w if i == axis else n == w for i, (n, w) in enumerate(zip(shape, want))
    )


def is_draft(name: str, layers: int) -> bool:
    """Whether a tensor belongs to draft layers behind the last one, which the model drops."""
    parts = name.removeprefix(TEXT_PREFIX).split(".")
    return parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdigit() and int(parts[2]) >= layers


def _spellings(report: Report, model: Model) -> None:
    for key in (model.quant or {}).get("quantized_layers") or {}:
        root = next((r for r in ("language_model.model.", "language_model.", "model.") if key.startswith(r)), "no root")
        report.aliases[root] += 1
        for spelling in ("block_sparse_moe", "mlp"):
            if spelling in key.split("."):
                report.aliases[spelling] += 1
        if key.rpartition(".")[2] in {fused.name for fused in model.fused.values()}:
            report.aliases["fused name"] += 1


def _deploy(report: Report, model: Model) -> None:
    deployment = report.deployment
    report.landings = landings(model, deployment)
    # What single layers say of a size that the whole model refuses only follows from it.
    refused = list(_refusals(model, deployment)) or [
        f"{landing.module}: {landing.why}" for landing in report.landings if landing.verdict == "refused"
    ]
    for text in refused:
        report.add("placement", text)
    width = int(model.text.get("moe_intermediate_size") or 0)
    padded = expert_width(model, width, deployment)
    if width and not deployment.ep and padded * deployment.tp > width:
        share = width // deployment.tp
        report.add(
            "placement",
            f"experts: {share} of {width} columns per rank are padded to {padded}: "
            f"{padded / max(share, 1) - 1:.0%} more memory than with whole experts per rank (--ep).",
            error=False,
        )
    if not refused:
        report.stages = stages(model, deployment)
    gpu = GPUS.get(report.gpu or "")
    if gpu is None:
        return
    algos = {None, *(model.algos or {}).values()}
    report.kernels = {_label(algo): kernel(algo, gpu) for algo in sorted(algos, key=str)}
    usable = int(gpu.mib * UTILISATION) << 20
    for number, stage in enumerate(report.stages):
        room = usable - stage.total
        tokens = room // stage.cache_per_token if room > 0 and stage.cache_per_token else None
        report.rooms.append(Room(usable, stage.total, room, tokens))
        if room < 0:
            report.add(
                "memory",
                f"stage {number}: weights take {stage.total / 2**30:.1f} GiB per rank, one {report.gpu} gives "
                f"{usable / 2**30:.1f} GiB ({UTILISATION:.0%} of its memory). Use more ranks.",
            )


def _refusals(model: Model, deployment: Deployment) -> Iterator[str]:
    tp, pp = deployment.tp, deployment.pp
    linear = model.text["linear_attn_config"]
    for key, heads in (
        ("num_attention_heads", model.text["num_attention_heads"]),
        ("linear_attn_config.num_heads", linear["num_heads"]),
    ):
        if heads % tp:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            yield f"tensor parallel size {tp} does not divide {key} = {heads}; sizes that do: {fits}."
    if pp > model.text["num_hidden_layers"]:
        yield f"pipeline parallel size {pp} exceeds num_hidden_layers = {model.text['num_hidden_layers']}."
    if deployment.ep and model.experts % tp:
        fits = [n for n in range(1, min(model.experts, 256) + 1) if model.experts % n == 0]
        yield f"expert parallel size {tp} does not divide num_experts = {model.experts}; sizes that do: {fits}."
