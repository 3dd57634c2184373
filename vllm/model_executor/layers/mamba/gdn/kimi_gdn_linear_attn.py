from vllm.model_executor.layers.divisible import check_divisible
from vllm.model_executor.layers.mamba.gdn.kda_a_log import checked_a_log_loader
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import current_platform
from vllm.v1.attention.backend import AttentionBackend


# fork: edit 882bf281b1d4
def a_log_weight_loader(upstream):
    # fork: instead-of return
    return checked_a_log_loader(upstream)


# fork: extend
class KimiGatedDeltaNetAttention:
    # fork: edit de121ed2a3a1
    def __init__(self, prefix: str):
        # fork: after self.num_heads
        check_divisible(prefix, "heads", [self.num_heads], self.tp_size)
        # fork: at end
        self.A_log.tensor_name = f"{prefix}.A_log"

    # The model package imports this module: its CPU kernels are imported late.
    def get_attn_backend(self) -> type[AttentionBackend]:
        if not current_platform.is_cpu():
            return super().get_attn_backend()
        from vllm.models.kimi_k3.cpu.kda_metadata import CPUKDABackend

        return CPUKDABackend

    # fork: edit 203c3adfc828
    def _forward(self, mixed_qkv, g1, g2, beta, core_attn_out):
        # fork: at start
        if current_platform.is_cpu():
            from vllm.models.kimi_k3.cpu.kda import kda_forward

            kda_forward(self, mixed_qkv, g1, g2, beta, core_attn_out)
            return
