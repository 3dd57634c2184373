import torch


# fork: edit 2328614fed6a
def dispatch_cpu_unquantized_gemm(layer):
    # fork: at start
    if getattr(layer, "reads_weight_directly", False):
        # Other code reads this weight: neither repack nor empty it.
        layer.cpu_linear = torch.nn.functional.linear
        return
