from vllm.models.kimi_k3 import current_platform

# fork: at end
if current_platform.is_cpu():
    from .amd.model import KimiK3ForConditionalGeneration  # type: ignore[assignment]
    from .amd.mtp import KimiK3MTP  # type: ignore[assignment]
    from .cpu.linear import KimiLinearForCausalLM  # type: ignore[assignment]
