# SPDX-License-Identifier: Apache-2.0


# fork: extend
class NvFp4LinearKernel:
    # Whether activations are rounded to NVFP4, so that input scales are read.
    quantizes_input = True
    # Whether the shards of a fused layer keep their own tensor scales.
    scales_shards_apart = False
