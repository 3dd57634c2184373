# SPDX-License-Identifier: Apache-2.0
"""A `Report` on a terminal."""

from collections import Counter
from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from vllm.checkpoint.report import Report

__all__ = ["describe", "human", "print_report", "verdict"]

PROBLEMS = 20  # lines; the page and the JSON have more


def human(size: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def describe(counts: Mapping[str, int]) -> str:
    """``"BF16"`` if there is one key, else ``"BF16 3, MXFP4 1"``."""
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{key} {count}" for key, count in Counter(counts).most_common())


def verdict(report: Report) -> str:
    """One sentence for the exit code."""
    return {0: "clean", 1: "loads, with warnings", 2: "will not load"}[report.exit_code]


def print_report(report: Report, console: Console) -> None:
    """Print everything, problems first."""
    for part in _parts(report):
        console.print(part)


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    return table


def _parts(report: Report) -> Iterator[RenderableType]:
    colour = ("green", "yellow", "red")[report.exit_code]
    yield f"[bold]{escape(report.path)}[/]: [{colour}]{verdict(report)}[/]"
    yield (
        f"{escape(report.architecture)}, {escape(report.method)}; {report.layers} layers, {report.experts} experts; "
        f"{report.parameters:,} parameters, {report.tensors:,} tensors in {report.files} files, {human(report.bytes)}"
    )
    for problem in sorted(report.problems, key=lambda p: not p.error)[:PROBLEMS]:
        yield f"[{'red]error' if problem.error else 'yellow]warning'}[/]  {escape(problem.text)}"
    if sum(report.counts.values()) > PROBLEMS:
        yield f"… of {sum(report.counts.values()):,} in all: {describe(report.counts)}"
    yield _kinds(report)
    if report.fused:
        table = _table("Modules that run as one", "module", "shards", "formats", "layers alike", "mixed", left=3)
        for name, fused in report.fused.items():
            mixed = f"[red]{fused.mixed}[/]" if fused.mixed else "0"
            table.add_row(name, " ".join(fused.shards), describe(fused.formats), str(fused.alike), mixed)
        yield table
    if report.aliases:
        yield f"Names in quantized_layers: {describe(report.aliases)}"
    if report.draft_tensors:
        yield f"{report.draft_tensors} tensors of draft layers, which the model does not load"
    if report.landings:
        title = f"128x128 blocks at tensor parallel {report.deployment.tp}"
        table = _table(title, "parameter", "layers", "rows x columns per rank", "verdict", "padding")
        for landing in report.landings:
            rows, columns = landing.padding
            padding = f"{rows} rows, {columns} columns" if any(landing.padding) else ""
            style = {"exact": "green", "padded": "yellow", "refused": "red"}[landing.verdict]
            size = f"{landing.shape[0]} x {landing.shape[1]}"
            table.add_row(landing.module, str(landing.modules), size, f"[{style}]{landing.verdict}[/]", padding)
        yield table
    if report.scales:
        table = _table("Scales", "name", "tensors", "values", "NaN", "infinite", "negative", "zero", "2^")
        for name, scales in report.scales.items():
            counts = (scales.nan, scales.infinite, scales.negative, scales.zero)
            exponents = "{}…{}".format(*scales.exponents) if scales.exponents else ""
            table.add_row(name, f"{scales.tensors:,}", f"{scales.values:,}", *map(str, counts), exponents)
        yield table
        if report.w3_over_w1:
            yield f"Tensor scale of w3 over that of w1: {describe(report.w3_over_w1)}"
    if report.stages:
        yield _ranks(report)
    if report.kernels:
        yield f"Kernels on {report.gpu}: " + ", ".join(f"{name}: {kernel}" for name, kernel in report.kernels.items())


def _kinds(report: Report) -> Table:
    table = _table("Weights", "kind", "stored as", "the config says", "dialect", "weights", "tensors", "bytes", left=4)
    for name, kind in report.kinds.items():
        stored = describe(kind.formats)
        agrees = not any(label.endswith("?") or label == "missing" for label in kind.formats)
        table.add_row(
            name,
            escape(stored) if agrees else f"[red]{escape(stored)}[/]",
            describe(kind.config),
            describe(kind.dialects),
            f"{kind.weights:,}",
            f"{kind.tensors:,}",
            human(kind.bytes),
        )
    return table


def _ranks(report: Report) -> Table:
    families = list(dict.fromkeys(family for stage in report.stages for family in stage.bytes))
    deployment = report.deployment
    title = f"Bytes on the fullest rank: tensor parallel {deployment.tp}, pipeline parallel {deployment.pp}, experts "
    title += "whole" if deployment.ep else "split"
    table = _table(title, "", *(f"layers {s.layers[0]}–{s.layers[1] - 1}" for s in report.stages))
    for family in families:
        table.add_row(family, *(human(stage.bytes[family]) for stage in report.stages))
    table.add_section()
    table.add_row("weights", *(f"[bold]{human(stage.total)}[/]" for stage in report.stages))
    table.add_row("cache per token, BF16", *(human(stage.cache_per_token) for stage in report.stages))
    table.add_row("state per request", *(human(stage.state_per_request) for stage in report.stages))
    if report.rooms:
        table.add_row(f"92 % of one {report.gpu}", *(human(room.usable) for room in report.rooms))
        table.add_row("left for cache and activations", *(human(room.left) for room in report.rooms))
        table.add_row("tokens of cache in that", *(f"{room.tokens or 0:,}" for room in report.rooms))
    return table
