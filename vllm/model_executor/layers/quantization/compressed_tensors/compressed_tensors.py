# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.block_fp8 import (
    CompressedTensorsBlockFp8LinearMethod,
    is_block_fp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.compressed_tensors.names import (
    find_target,
)


# fork: extend
class CompressedTensorsConfig:
    # fork: edit 32b2b58e4d0d
    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        # fork: at start
        if (
            isinstance(layer, LinearBase)
            and self.transform_config is None
            and is_block_fp8(self.get_scheme_dict(layer, prefix))
        ):
            return CompressedTensorsBlockFp8LinearMethod(self)

    # fork: edit 688eb7716932
    def get_scheme_dict(
        self, layer: torch.nn.Module, upstream, layer_name: str | None = None
    ):
        # fork: at start
        # Shard by shard, so that one ignored shard of two is an error.
        target = find_target(
            layer_name or "",
            layer.__class__.__name__,
            self.target_scheme_map,
            self.ignore,
            self.packed_modules_mapping,
        )
        # fork: instead-of if[0]
        if target is None:
            ...
        # fork: instead-of matched_target
        matched_target = target  # noqa: F841
