# SPDX-License-Identifier: Apache-2.0
"""The `vllm checkpoint` command: tools for checkpoints that need no engine."""

import argparse
import json
import sys
import typing

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


class CheckpointSubcommand(CLISubcommand):
    """The `checkpoint` subcommand for the vLLM CLI."""

    name = "checkpoint"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        args.verb_function(args)

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name,
            help="Make checkpoints without starting the engine.",
            description="Tools for checkpoints that need no engine.",
            usage="vllm checkpoint VERB [options]",
            prog="vllm checkpoint",
        )
        # vLLM's own parser class answers --help with a list of config groups.
        verbs = parser.add_subparsers(required=True, dest="verb", metavar="VERB", parser_class=argparse.ArgumentParser)
        _add_make_tiny(verbs)
        return parser


def cmd_init() -> list[CLISubcommand]:
    return [CheckpointSubcommand()]
