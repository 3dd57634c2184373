from vllm.platforms import current_platform


# fork: extend
class KimiDecoderLayer:
    # fork: edit c20f9436fafc
    def __init__(self, upstream):
        # The shared layer has the full-rank gate too, and the CPU kernels.
        # fork: instead-of if[1]
        if upstream and not current_platform.is_cpu():
            ...
