# fork: edit f9b278b1f006
def get_mla_prefill_backend(vllm_config, current_platform):
    # fork: before device_capability
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.mla.prefill.cpu import CPUMLAPrefillBackend

        return CPUMLAPrefillBackend
