# SPDX-License-Identifier: Apache-2.0
"""Draw a result of ``bench_nvfp4_moe.py`` as SVG: time over tokens, per shape.

python benchmarks/kernels/plot_nvfp4_moe.py \
    benchmarks/results/nvfp4_moe_h200.json docs/nvfp4-moe-h200.svg
"""

import json
import math
import sys

WIDTH, HEIGHT, LEFT, TOP = 420, 320, 56, 54
SERIES = (
    ("marlin_us", "Marlin", "#c0392b"),
    ("us", "this kernel", "#1f5fa8"),
    ("floor_us", "floor", "#777777"),
)


def panel(rows: list[dict], name: str, offset: int) -> list[str]:
    rows = [r for r in rows if r["shape"] == name]
    tokens = [r["tokens"] for r in rows]
    values = [r[key] for r in rows for key, _, _ in SERIES if key in r]
    low, high = 10 ** math.floor(math.log10(min(values))), max(values) * 1.2

    def x(token: float) -> float:
        span = math.log2(tokens[-1] / tokens[0]) or 1
        return offset + LEFT + WIDTH * math.log2(token / tokens[0]) / span

    def y(us: float) -> float:
        return TOP + HEIGHT * (1 - math.log(us / low) / math.log(high / low))

    out = [f'<text x="{offset + LEFT}" y="{TOP - 14}" font-weight="bold">{name}</text>']
    tick = low
    while tick <= high:
        for factor in (1, 2, 5):
            if tick * factor <= high:
                at = y(tick * factor)
                out.append(
                    f'<path d="M{offset + LEFT} {at:.1f}h{WIDTH}" stroke="#e4e4e4"/>'
                    f'<text x="{offset + LEFT - 6}" y="{at + 4:.1f}" '
                    f'text-anchor="end">{tick * factor:g}</text>'
                )
        tick *= 10
    for token in tokens[::2]:
        out.append(
            f'<text x="{x(token):.1f}" y="{TOP + HEIGHT + 18}" '
            f'text-anchor="middle">{token}</text>'
        )
    out.append(
        f'<text x="{offset + LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 36}" '
        'text-anchor="middle">tokens</text>'
    )
    for i, (key, label, colour) in enumerate(SERIES):
        points = [(x(r["tokens"]), y(r[key])) for r in rows if key in r]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dash = ' stroke-dasharray="5 4"' if key == "floor_us" else ""
        at = TOP + 14 + 18 * i
        out.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" '
            f'stroke-width="2"{dash}/><path d="M{offset + LEFT + 12} {at}h24" '
            f'stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{offset + LEFT + 42}" y="{at + 4}">{label}</text>'
        )
    return out


def main() -> None:
    with open(sys.argv[1]) as file:
        result = json.load(file)
    names = list(dict.fromkeys(r["shape"] for r in result["rows"]))
    step = LEFT + WIDTH + 24
    body = [s for i, n in enumerate(names) for s in panel(result["rows"], n, i * step)]
    title = f"NVFP4 SiTU experts, one K3 layer, {result['device']}: microseconds"
    with open(sys.argv[2], "w") as file:
        file.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{step * len(names)}" '
            f'height="{TOP + HEIGHT + 48}" font-family="sans-serif" font-size="12">\n'
            '<rect width="100%" height="100%" fill="white"/>\n'
            f'<text x="{LEFT}" y="14">{title}</text>\n' + "\n".join(body) + "\n</svg>\n"
        )


if __name__ == "__main__":
    main()
