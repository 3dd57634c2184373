# SPDX-License-Identifier: Apache-2.0
"""Draw a benchmark's result as SVG: time over tokens, a panel for each shape.

For ``bench_nvfp4_moe.py`` and ``bench_block_fp8_linear.py``.

    python benchmarks/kernels/plot.py benchmarks/results/nvfp4_moe_h200.json docs/nvfp4-moe-h200.svg \\
        --title "NVFP4 SiTU experts, one K3 layer"
"""

import argparse
import json
import math

WIDTH, HEIGHT, LEFT, TOP = 420, 320, 56, 54
COLUMNS = 3  # panels side by side
SERIES = (
    ("marlin", "Marlin", "#c0392b"),
    ("cutlass", "CUTLASS", "#c0392b"),
    ("bf16", "BF16", "#2e8b57"),
    ("ours", "this kernel", "#1f5fa8"),
    ("floor", "floor", "#777777"),
)


def microseconds(row: dict) -> dict[str, float]:
    """Tokens and what each series took, from a row of either benchmark."""
    found = {"tokens": row["tokens"]}
    for key, _, _ in SERIES:
        value = row.get(f"{key}_us", row.get(key))
        if isinstance(value, dict):
            value = value["us"]
        if value is not None:
            found[key] = value
    if "us" in row:
        found["ours"] = row["us"]
    return found


def panel(rows: list[dict], name: str) -> list[str]:
    rows = [microseconds(r) for r in rows if r["shape"] == name]
    tokens = [r["tokens"] for r in rows]
    series = [entry for entry in SERIES if any(entry[0] in r for r in rows)]
    values = [r[key] for r in rows for key, _, _ in series if key in r]
    low, high = 10 ** math.floor(math.log10(min(values))), max(values) * 1.2

    def x(token: float) -> float:
        span = math.log2(tokens[-1] / tokens[0]) or 1
        return LEFT + WIDTH * math.log2(token / tokens[0]) / span

    def y(us: float) -> float:
        return TOP + HEIGHT * (1 - math.log(us / low) / math.log(high / low))

    out = [f'<text x="{LEFT}" y="{TOP - 14}" font-weight="bold">{name}</text>']
    tick = low
    while tick <= high:
        for factor in (1, 2, 5):
            if tick * factor <= high:
                at = y(tick * factor)
                out.append(
                    f'<path d="M{LEFT} {at:.1f}h{WIDTH}" stroke="#e4e4e4"/>'
                    f'<text x="{LEFT - 6}" y="{at + 4:.1f}" '
                    f'text-anchor="end">{tick * factor:g}</text>'
                )
        tick *= 10
    for token in [t for t in tokens if math.log2(t) % 2 == 0]:
        out.append(
            f'<text x="{x(token):.1f}" y="{TOP + HEIGHT + 18}" '
            f'text-anchor="middle">{token}</text>'
        )
    out.append(
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 36}" '
        'text-anchor="middle">tokens</text>'
    )
    for i, (key, label, colour) in enumerate(series):
        points = [(x(r["tokens"]), y(r[key])) for r in rows if key in r]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dash = ' stroke-dasharray="5 4"' if key == "floor" else ""
        at = TOP + 14 + 18 * i
        out.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" '
            f'stroke-width="2"{dash}/><path d="M{LEFT + 12} {at}h24" '
            f'stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{LEFT + 42}" y="{at + 4}">{label}</text>'
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", help="JSON of the benchmark")
    parser.add_argument("svg", help="file to write")
    parser.add_argument("--title", required=True)
    parser.add_argument("--shapes", nargs="+", help="panels to draw (default: all)")
    args = parser.parse_args()
    with open(args.result) as file:
        result = json.load(file)
    names = args.shapes or list(dict.fromkeys(r["shape"] for r in result["rows"]))
    across, down = LEFT + WIDTH + 24, TOP + HEIGHT + 48
    columns = min(COLUMNS, len(names))
    body = []
    for i, name in enumerate(names):
        body.append(f'<g transform="translate({i % columns * across} {i // columns * down})">')
        body += [*panel(result["rows"], name), "</g>"]
    size = f'width="{across * columns}" height="{down * -(-len(names) // columns)}"'
    with open(args.svg, "w") as file:
        file.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
            '<rect width="100%" height="100%" fill="white"/>\n'
            f'<text x="{LEFT}" y="14">{args.title}, {result["device"]}: microseconds</text>\n'
            + "\n".join(body) + "\n</svg>\n"
        )  # fmt: skip


if __name__ == "__main__":
    main()
