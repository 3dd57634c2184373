import argparse

from vllm.checkpoint.preflight import check_before_serving
from vllm.engine.arg_utils import FlexibleArgumentParser


# fork: extend
class EngineArgs:
    checkpoint_preflight: bool = True

    # fork: edit db177533b261
    @staticmethod
    def add_cli_args(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        # fork: at start
        parser.add_argument(
            "--checkpoint-preflight",
            action=argparse.BooleanOptionalAction,
            default=EngineArgs.checkpoint_preflight,
            help="Compare a local Kimi K3 checkpoint's headers with its config before weights are allocated.",
        )

    # fork: edit 00ce2b83be40
    def create_engine_config(self):
        # fork: at start
        check_before_serving(self)
