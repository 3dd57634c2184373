# SPDX-License-Identifier: Apache-2.0


# fork: extend
class HummingNvFp4LinearKernel:
    quantizes_input = False
