import os


# fork: extend
class CpuPlatform:
    # Ray has no accelerator of this name; nodes declare slots by --num-gpus.
    ray_device_key = "GPU"

    # fork: edit a941ae52a85b
    def check_and_update_config(cls, vllm_config, compilation_config, CompilationMode):
        # Chunked prefill and prefix caching stay on for MLA: the CPU prefill
        # takes context from the cache.
        # fork: instead-of if[-1]
        if compilation_config.mode == CompilationMode.NONE:
            # Without this, helpers under torch.compile still build C++ in the
            # workers: 14 s at the first request that asks for log-probs.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
