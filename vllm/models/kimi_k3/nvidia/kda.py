from vllm.model_executor.layers.divisible import check_divisible
from vllm.model_executor.layers.mamba.gdn.kda_a_log import checked_a_log_loader
from vllm.models.kimi_k3.nvidia.kda import current_workspace_manager


# fork: edit 882bf281b1d4
def a_log_weight_loader(upstream):
    # fork: instead-of return
    return checked_a_log_loader(upstream)


# fork: extend
class KimiK3DeltaAttention:
    # fork: edit d78b8ae24141
    def __init__(self, prefix: str):
        # fork: after self.num_heads
        check_divisible(prefix, "heads", [self.num_heads], self.tp_size)
        # fork: at end
        self.in_proj_qkvgfab.output_is_split = True
        self.A_log.tensor_name = f"{prefix}.A_log"

    # fork: edit a3d154d00c0a
    def _forward(self):
        # fork: before return[0]
        if self._flashkda_buffer_specs is not None:
            # A pass without metadata is the memory profile's. It has to count what
            # a prefill takes, and after graph capture nothing may grow any more.
            current_workspace_manager().get_simultaneous(*self._flashkda_buffer_specs)
