# SPDX-License-Identifier: Apache-2.0
"""The `vllm checkpoint` command: tools for checkpoints that need no engine."""

import argparse
import json
import logging
import sys
import typing
from pathlib import Path

from vllm.entrypoints.cli.types import CLISubcommand

if typing.TYPE_CHECKING:
    from vllm.checkpoint.tiny import Summary
    from vllm.utils.argparse_utils import FlexibleArgumentParser
else:
    FlexibleArgumentParser = argparse.ArgumentParser

_SHAPE_OPTIONS = (
    ("--layers", "one letter per layer, K (KDA) or M (MLA), or a number of layers"),
    ("--hidden", "hidden size"),
    ("--heads", "attention heads"),
    ("--head-dim", "width of a head"),
    ("--q-lora", "rank of MLA queries"),
    ("--dense-width", "width of the dense MLP in layer 0"),
    ("--experts", "routed experts"),
    ("--top-k", "experts per token"),
    ("--expert-width", "width of an expert"),
    ("--latent", "input size of the routed experts"),
    ("--shared-experts", "shared experts"),
    ("--attn-res-block", "layers per attention-residual block"),
    ("--vocab", "vocabulary size"),
)


def _add_make_tiny(verbs: argparse._SubParsersAction) -> None:
    from vllm.checkpoint.tiny import ARCHITECTURES, ATTENTIONS, FORMATS, TinyShape

    parser = verbs.add_parser(
        "make-tiny",
        help="Write a tiny random Kimi K3 checkpoint.",
        description="Write a tiny random Kimi K3 checkpoint with real tensor names, "
        "tokenizer and chat template, to try out serving without downloads.",
        usage="vllm checkpoint make-tiny OUT [options]",
        prog="vllm checkpoint make-tiny",
    )
    parser.add_argument("out", metavar="OUT", help="folder to create")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0])
    parser.add_argument("--arch", choices=tuple(ARCHITECTURES), default="text")
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        help="block FP8 or BF16 attention linears (default: as the format is published)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a checkpoint")
    parser.add_argument("--json", action="store_true", help="end with the summary as one line of JSON")
    parser.add_argument(
        "--w3-scale-ratio",
        type=float,
        default=1.0,
        metavar="R",
        help="tensor scale of an expert's w3 over that of its w1 (default: 1, as in the published checkpoint)",
    )
    defaults = TinyShape()
    for flag, text in _SHAPE_OPTIONS:
        default = getattr(defaults, flag[2:].replace("-", "_"))
        parser.add_argument(
            flag,
            type=type(default),
            default=default,
            metavar="N" if isinstance(default, int) else "PATTERN",
            help=f"{text} (default: {default})",
        )
    parser.set_defaults(verb_function=_make_tiny)


def _make_tiny(args: argparse.Namespace) -> None:
    from vllm.checkpoint import tiny
    from vllm.checkpoint.errors import CheckpointError

    sizes = {name: getattr(args, name) for name in (flag[2:].replace("-", "_") for flag, _ in _SHAPE_OPTIONS)}
    sizes["layers"] = tiny.layer_pattern(sizes["layers"])
    try:
        summary = tiny.make_tiny(
            args.out,
            format=args.format,
            arch=args.arch,
            attention=args.attention,
            shape=tiny.TinyShape(**sizes),
            seed=args.seed,
            force=args.force,
            w3_scale_ratio=args.w3_scale_ratio,
            progress=not args.json,
        )
    except (CheckpointError, OSError) as error:
        sys.exit(f"vllm checkpoint make-tiny: {error}")
    if args.json:
        # One line, since vLLM logs to standard output too.
        print(json.dumps(tiny.asdict(summary)))
    else:
        print(_table(summary))


def _table(summary: "Summary") -> str:
    rows = [(family, row["parameters"], row["tensors"], row["bytes"]) for family, row in summary.families.items()]
    rows.append(("total", summary.parameters, summary.tensors, summary.bytes))
    lines = [
        f"{summary.path}: {summary.architecture}, {summary.format}, {summary.shards} shards, seed {summary.seed}",
        f"{'':12}{'parameters':>14}{'tensors':>10}{'bytes':>14}",
    ]
    lines += [f"{n:12}{p:14,}{t:10,}{b:14,}" for n, p, t, b in rows]
    return "\n".join(lines)


def _add_inspect(verbs: argparse._SubParsersAction) -> None:
    from vllm.checkpoint.gpus import GPUS

    parser = verbs.add_parser(
        "inspect",
        help="Say what a Kimi K3 checkpoint holds and whether it will load.",
        description="Compare a Kimi K3 checkpoint's headers with its config and with a deployment. Exit status: 0 "
        "clean, 1 warnings, 2 will not load.",
        usage="vllm checkpoint inspect PATH [options]",
        prog="vllm checkpoint inspect",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="folder of the checkpoint")
    parser.add_argument("--tp", type=_positive, default=1, metavar="N", help="tensor parallel size (default: 1)")
    parser.add_argument("--pp", type=_positive, default=1, metavar="N", help="pipeline parallel size (default: 1)")
    parser.add_argument("--ep", action="store_true", help="experts whole on a rank instead of split")
    parser.add_argument("--gpu", choices=tuple(GPUS), help="what is left for the cache there, and which kernels run")
    parser.add_argument("--scan-scales", action="store_true", help="also read all scales, for impossible ones")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as a self-contained page")
    parser.set_defaults(verb_function=_inspect)


def _add_convert(verbs: argparse._SubParsersAction) -> None:
    from vllm.checkpoint.convert import ATTENTIONS, TARGETS

    parser = verbs.add_parser(
        "convert",
        help="Rewrite a Kimi K3 checkpoint in another format.",
        description="Rewrite a Kimi K3 checkpoint in another format, shard by shard. A run that was stopped goes on "
        "where it was when the same command is given again.",
        usage="vllm checkpoint convert IN OUT --to FORMAT [options]",
        prog="vllm checkpoint convert",
    )
    parser.add_argument("source", metavar="IN", type=Path, help="folder of the checkpoint")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to create")
    parser.add_argument("--to", choices=TARGETS, required=True, help="format of the experts")
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        help="attention linears: as they are, in FP8 with a scale per 128x128 block, or BF16 (default: as they are)",
    )
    parser.add_argument("--json", action="store_true", help="end with the provenance as one line of JSON")
    parser.set_defaults(verb_function=_convert)


def _convert(args: argparse.Namespace) -> None:
    from vllm.checkpoint.convert import convert

    provenance = convert(args.source, args.out, args.to, args.attention, progress=not args.json)
    if args.json:
        print(json.dumps(provenance))
        return
    loss = provenance["loss"]
    print(f"{args.out}: {provenance['source_format']} to {args.to}")
    if loss["gaps"]:
        gaps = ", ".join(f"{gap}: {count}" for gap, count in loss["gaps"].items())
        print(f"MXFP4 blocks by powers of two below the largest: {gaps}")
    for name, count in loss["lost"].items():
        print(f"  {name}: {count} values changed")
    print(
        f"{loss['lost_tensors']} tensors lost bits to exponents, {loss['rounded']} values were rounded, "
        f"{loss['inexact_scales']} tensor scales have no exact reciprocal"
    )


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 4096:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 4096")
    return number


def _inspect(args: argparse.Namespace) -> None:
    from vllm.checkpoint.headers import read_headers
    from vllm.checkpoint.model import read_model
    from vllm.checkpoint.ranks import Deployment
    from vllm.checkpoint.report import build

    model = read_model(args.path)
    entries = read_headers(args.path)
    report = build(model, entries, Deployment(args.tp, args.pp, args.ep), args.gpu)
    if args.scan_scales:
        from vllm.checkpoint.scan import scan_scales

        scan_scales(model, entries, report, progress=not args.json)
    if args.html:
        from vllm.checkpoint.page import write_page

        write_page(report, args.html)
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        from rich.console import Console

        from vllm.checkpoint.show import print_report

        print_report(report, Console(width=None if sys.stdout.isatty() else 120, highlight=False))
    sys.exit(report.exit_code)


class CheckpointSubcommand(CLISubcommand):
    """The `checkpoint` subcommand for the vLLM CLI."""

    name = "checkpoint"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        args.verb_function(args)

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name,
            help="Inspect, convert and make checkpoints without starting the engine.",
            description="Tools for checkpoints that need no engine.",
            usage="vllm checkpoint VERB [options]",
            prog="vllm checkpoint",
        )
        # vLLM's own parser class answers --help with a list of config groups.
        verbs = parser.add_subparsers(required=True, dest="verb", metavar="VERB", parser_class=argparse.ArgumentParser)
        for add in (_add_inspect, _add_convert, _add_make_tiny):
            add(verbs)
        return parser


def main() -> None:
    """Run `vllm checkpoint` alone: the other commands take twice as long to import."""
    from vllm.entrypoints.cli.errors import run_or_explain

    logging.getLogger("vllm").setLevel(logging.WARNING)  # standard output is for reports
    parser = argparse.ArgumentParser(prog="vllm")
    CheckpointSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    run_or_explain(CheckpointSubcommand.cmd, parser.parse_args())


def cmd_init() -> list[CLISubcommand]:
    return [CheckpointSubcommand()]
