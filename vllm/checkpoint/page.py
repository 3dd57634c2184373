# SPDX-License-Identifier: Apache-2.0
"""A `Report` as one page of HTML that needs nothing else: no script, no font, no network."""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.report import Report
from vllm.checkpoint.show import describe, human, verdict

__all__ = ["page", "write_page"]

# Okabe and Ito's palette, which people with any colour vision can tell apart.
_COLOURS = {
    "BF16": "#56b4e9",
    "F16": "#0072b2",
    "F32": "#9aa0a6",
    "NVFP4": "#009e73",
    "MXFP4": "#e69f00",
    "FP8_PB_WO": "#cc79a7",
    "FP8_BLOCK": "#b07aa1",
}
_WRONG = "#d1242f"
_OTHER = "#f0e442"
_FAMILIES = (
    "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#0072b2", "#f0e442", "#d55e00", "#9aa0a6", "#6f7d8c",
    "#7b5ea7", "#8c6d4f",
)  # fmt: skip
_CELL, _LABEL = 11, 300

_STYLE = """
:root{color-scheme:light dark;--line:color-mix(in srgb,currentColor 18%,transparent);--soft:color-mix(in srgb,
currentColor 62%,transparent);--card:color-mix(in srgb,currentColor 5%,transparent)}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1340px;padding:0 1.5rem;
background:light-dark(#fff,#14171a);color:light-dark(#1c2127,#e6e8ea)}
h1{font-size:1.45rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.05rem;margin:2.2rem 0 .6rem}
.sub{color:var(--soft);margin:.2rem 0 1.2rem}.badge{display:inline-block;padding:.1rem .7rem;border-radius:1rem;
color:#fff;font-size:.9rem;font-weight:600;vertical-align:middle;margin-left:.6rem}
.cards{display:flex;flex-wrap:wrap;gap:.8rem}.cards div{background:var(--card);border-radius:.5rem;
padding:.5rem .9rem;min-width:7.5rem}.cards b{display:block;font-size:1.15rem;font-variant-numeric:tabular-nums}
.cards span,.legend{color:var(--soft);font-size:.85rem}.problems{list-style:none;padding:0;margin:0}
.problems li{border-left:4px solid;padding:.3rem .8rem;margin:.35rem 0;background:var(--card);
overflow-wrap:anywhere;font-size:.92rem}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.22rem .8rem .22rem 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500}td:first-child,th:first-child,.l{text-align:left}
svg text{fill:currentColor;font:11px system-ui,sans-serif}i.key{display:inline-block;width:.8em;height:.8em;
border-radius:2px;margin:0 .35em 0 1em}.bad{color:#d1242f;font-weight:600}.ok{color:#1a7f37}
"""


def write_page(report: Report, path: Path) -> None:
    """Write the page.

    Raises:
        CheckpointError: The file cannot be written.
    """
    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}).") from None


def page(report: Report) -> str:
    """The page's HTML."""
    name = escape(Path(report.path).name or report.path)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{name}: {verdict(report)}</title><style>{_STYLE}</style>" + "\n".join(_sections(report)) + "</html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    colour = ("#1a7f37", "#9a6700", _WRONG)[report.exit_code]
    yield f'<h1>{escape(report.path)}<span class="badge" style="background:{colour}">{verdict(report)}</span></h1>'
    yield f'<p class="sub">{escape(report.architecture)} · {escape(report.method)}</p>'
    yield from _problems(report)
    cards = {
        "parameters": f"{report.parameters / 1e9:,.1f} B",
        "on disk": human(report.bytes),
        "tensors": f"{report.tensors:,}",
        "files": f"{report.files:,}",
        "layers": str(report.layers),
        "experts per layer": f"{report.experts:,}",
    }
    if report.stages:
        cards["weights per rank"] = human(max(stage.total for stage in report.stages))
    if report.rooms:
        cards[f"left on one {report.gpu}"] = human(min(room.left for room in report.rooms))
    yield '<div class="cards">' + "".join(f"<div><b>{v}</b><span>{escape(k)}</span></div>" for k, v in cards.items())
    yield "</div><h2>What each layer is made of</h2>" + _map(report)
    if report.stages:
        yield from _ranks(report)
    rows = [
        (
            landing.module,
            landing.modules,
            f"{landing.shape[0]} × {landing.shape[1]}",
            landing.verdict,
            f"{landing.padding[0]} rows, {landing.padding[1]} columns" if any(landing.padding) else "",
        )
        for landing in report.landings
    ]
    if rows:
        yield f"<h2>128×128 blocks at tensor parallel {report.deployment.tp}</h2>"
        yield _table(("parameter", "layers", "rows × columns per rank", "verdict", "padding"), rows)
    yield "<h2>Modules that run as one</h2>"
    yield _table(
        ("module", "shards", "stored as", "layers alike", "mixed"),
        [(n, " ".join(f.shards), describe(f.formats), f.alike, f.mixed) for n, f in report.fused.items()],
    )
    if report.scales:
        yield "<h2>Scales</h2>" + _table(
            ("name", "tensors", "values", "NaN", "infinite", "negative", "zero", "powers of two"),
            [
                (n, s.tensors, s.values, s.nan, s.infinite, s.negative, s.zero, "{} … {}".format(*s.exponents or "  "))
                for n, s in report.scales.items()
            ],
        )
    yield "<h2>Weights</h2>" + _table(
        ("kind", "stored as", "the config says", "dialect", "weights", "tensors", "bytes"),
        [
            (n, describe(k.formats), describe(k.config), describe(k.dialects), k.weights, k.tensors, human(k.bytes))
            for n, k in report.kinds.items()
        ],
    )


def _problems(report: Report) -> Iterator[str]:
    if not report.problems:
        yield '<p class="ok">Headers fit the config; nothing to report.</p>'
        return
    yield f"<h2>Problems: {escape(describe(report.counts))}</h2>" '<ul class="problems">'
    for problem in sorted(report.problems, key=lambda p: not p.error):
        colour = _WRONG if problem.error else "#9a6700"
        yield f'<li style="border-color:{colour}">{escape(problem.text)}</li>'
    yield "</ul>"


def _colour(label: str) -> str:
    if label in ("missing", "mixed") or label.endswith("?"):
        return _WRONG
    return _COLOURS.get(label, _OTHER)


def _map(report: Report) -> str:
    """Layers from left to right, modules from top to bottom, coloured by format."""
    layers = [layer for layer in report.grid if layer.isdigit()]
    modules = list(dict.fromkeys(module for layer in layers for module in report.grid[layer]))
    rest = report.grid.get("", {})
    width, height = _LABEL + len(layers) * _CELL + 10, (len(modules) + len(rest) + 3) * (_CELL + 2)
    parts = [f'<div class="scroll"><svg width="{width}" height="{height}" role="img">']
    for column in range(0, len(layers), 10):
        parts.append(f'<text x="{_LABEL + column * _CELL}" y="10">{layers[column]}</text>')
    for row, module in enumerate(modules):
        y = 16 + row * (_CELL + 2)
        parts.append(f'<text x="{_LABEL - 8}" y="{y + 9}" text-anchor="end">{escape(module)}</text>')
        for column, layer in enumerate(layers):
            label = report.grid[layer].get(module)
            if label is not None:
                parts.append(
                    f'<rect x="{_LABEL + column * _CELL}" y="{y}" width="{_CELL - 1}" height="{_CELL}" '
                    f'fill="{_colour(label)}"><title>layer {layer} {escape(module)}: {escape(label)}</title></rect>'
                )
    for row, (module, label) in enumerate(rest.items(), len(modules) + 1):
        y = 16 + row * (_CELL + 2)
        parts.append(f'<text x="{_LABEL - 8}" y="{y + 9}" text-anchor="end">{escape(module)}</text>')
        parts.append(
            f'<rect x="{_LABEL}" y="{y}" width="{_CELL * 4 - 1}" height="{_CELL}" fill="{_colour(label)}">'
            f"<title>{escape(label)}</title></rect>"
        )
    parts.append("</svg></div>")
    labels = dict.fromkeys(label for row in report.grid.values() for label in row.values())
    keys = "".join(f'<i class="key" style="background:{_colour(label)}"></i>{escape(label)}' for label in labels)
    return "".join(parts) + f'<p class="legend">{keys}</p>'


def _ranks(report: Report) -> Iterator[str]:
    deployment = report.deployment
    experts = "whole" if deployment.ep else "split"
    yield (
        f"<h2>Bytes on the fullest rank: tensor parallel {deployment.tp}, pipeline parallel {deployment.pp}, experts "
        f"{experts}</h2>"
    )
    families = list(dict.fromkeys(f for stage in report.stages for f, _ in stage.bytes.most_common()))
    usable = max((room.usable for room in report.rooms), default=0)
    most = max([usable, *(stage.total for stage in report.stages)]) or 1
    width = 1000
    yield f'<div class="scroll"><svg width="{_LABEL + width + 20}" height="{len(report.stages) * 30 + 24}" role="img">'
    for row, stage in enumerate(report.stages):
        x, y = float(_LABEL), row * 30 + 4
        label = f"layers {stage.layers[0]}–{stage.layers[1] - 1}: {human(stage.total)}"
        yield f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{label}</text>'
        for number, family in enumerate(families):
            part = stage.bytes[family] / most * width
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{part:.1f}" height="22" fill="{_FAMILIES[number % len(_FAMILIES)]}">'
                f"<title>{escape(family)}: {human(stage.bytes[family])}</title></rect>"
            )
            x += part
    if usable:
        x, bottom = _LABEL + usable / most * width, len(report.stages) * 30
        yield f'<line x1="{x}" x2="{x}" y1="0" y2="{bottom}" stroke="currentColor" stroke-dasharray="4 3"/>'
        yield f'<text x="{x}" y="{bottom + 14}" text-anchor="end">92 % of one {report.gpu}: {human(usable)}</text>'
    yield "</svg></div>"
    keys = (
        f'<i class="key" style="background:{_FAMILIES[n % len(_FAMILIES)]}"></i>{escape(family)} '
        f"{human(max(stage.bytes[family] for stage in report.stages))}"
        for n, family in enumerate(families)
    )
    yield f'<p class="legend">{"".join(keys)}</p>'
    stage = report.stages[0]
    lines = [f"{human(stage.cache_per_token)} of BF16 cache per token"]
    lines.append(f"{human(stage.state_per_request)} of state per request")
    if report.rooms:
        lines.append(f"what is left holds {min(room.tokens or 0 for room in report.rooms):,} tokens of cache")
    if report.kernels:
        lines.append("kernels: " + ", ".join(f"{name} {kernel}" for name, kernel in report.kernels.items()))
    yield "<p>" + "; ".join(map(escape, lines)) + ".</p>"


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    def cell(value: object) -> str:
        text = f"{value:,}" if isinstance(value, int) else escape(str(value))
        bad = isinstance(value, str) and (value.endswith("?") or value in ("missing", "mixed", "refused"))
        left = ' class="l"' if isinstance(value, str) and not value[:1].isdigit() else ""
        return f"<td{left}>" + (f'<span class="bad">{text}</span>' if bad else text) + "</td>"

    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{escape(h)}</th>" for h in head)}</tr>{body}</table></div>'
