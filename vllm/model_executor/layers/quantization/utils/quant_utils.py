# SPDX-License-Identifier: Apache-2.0

import torch


# fork: edit adcc71b81eac
def get_and_maybe_dequant_weights(layer, out_dtype: torch.dtype):
    # fork: before weight[0]
    # A method that can dequantise its weight exactly is asked first: what goes
    # through a kernel depends on the kernel's packing and rounding.
    dequantize = getattr(layer.quant_method, "dequantized_weight", None)
    if dequantize is not None:
        return dequantize(layer, out_dtype)
