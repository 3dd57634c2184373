import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation


# fork: extend
class TrtLlmNvFp4ExpertsBase:
    # fork: edit c835e21b9c7b
    def __init__(self, moe_config):
        # fork: instead-of if[0]
        self.is_situ = moe_config.activation == MoEActivation.SITU
        self.g1_scale_c = self._compute_g1_scale_c()

    # fork: edit eaf0e2d2b64d
    def process_weights_after_loading(self, g1_scale_c):
        # fork: instead-of if[0]
        g1_scale_c = self._compute_g1_scale_c()

    # fork: add after process_weights_after_loading
    def _compute_g1_scale_c(self) -> torch.Tensor:
        """Factor the kernel applies to the activation's result, per expert.

        It always requantises for the second GEMM (``a2_gscale``). SwiGLU is
        linear in its up half, so that half's dequantisation (``g1_alphas``) may
        ride along. SiTU is linear in neither half: the kernel dequantises both
        with ``g1_alphas`` before the tanh, and once more would be once too often.

        Returns:
            float32 ``[local experts]``, a tensor of its own.
        """
        a2_gscale, g1_alphas = self.quant_config.a2_gscale, self.quant_config.g1_alphas
        assert a2_gscale is not None and g1_alphas is not None
        if self.is_situ or not self.moe_config.is_act_and_mul:
            return a2_gscale.clone()
        return g1_alphas * a2_gscale
