from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import current_platform
from vllm.models.kimi_k3.cpu.kda import kda_forward
from vllm.models.kimi_k3.cpu.kda_metadata import CPUKDABackend
from vllm.v1.attention.backend import AttentionBackend


# fork: extend
class KimiGatedDeltaNetAttention:
    def get_attn_backend(self) -> type[AttentionBackend]:
        if current_platform.is_cpu():
            return CPUKDABackend
        return super().get_attn_backend()

    # fork: edit 203c3adfc828
    def _forward(self, mixed_qkv, g1, g2, beta, core_attn_out):
        # fork: at start
        if current_platform.is_cpu():
            kda_forward(self, mixed_qkv, g1, g2, beta, core_attn_out)
            return
