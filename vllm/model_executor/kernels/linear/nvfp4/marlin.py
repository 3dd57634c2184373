# SPDX-License-Identifier: Apache-2.0


# fork: extend
class MarlinNvFp4LinearKernel:
    quantizes_input = False
