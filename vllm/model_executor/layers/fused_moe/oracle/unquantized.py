# SPDX-License-Identifier: Apache-2.0

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
)
from vllm.model_executor.layers.fused_moe.situ import check_situ_config


# fork: edit 89a607bc5f18
def backend_to_kernel_cls(
    backend: UnquantizedMoeBackend, upstream
) -> list[type[mk.FusedMoEExperts]]:
    # fork: instead-of return[6]
    from vllm.model_executor.layers.fused_moe.experts.cpu_torch_moe import (
        CPUTorchUnquantizedExperts,
    )

    return [*upstream, CPUTorchUnquantizedExperts]


# fork: edit 2ebc3857848e
def select_unquantized_moe_backend(
    moe_config: FusedMoEConfig,
) -> tuple[UnquantizedMoeBackend, type[mk.FusedMoEExperts] | None]:
    # fork: at start
    check_situ_config(moe_config, "unquantised")
