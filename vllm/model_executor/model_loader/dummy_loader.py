# SPDX-License-Identifier: Apache-2.0

import torch.nn as nn

from vllm.model_executor.layers.quantization.utils.unloaded import set_dummy_scales


# fork: extend
class DummyModelLoader:
    # fork: edit 4719e5842c4b
    def load_weights(self, model: nn.Module):
        # fork: at end
        set_dummy_scales(model)
