# SPDX-License-Identifier: Apache-2.0

from vllm.model_executor.models.config import KimiK3ForConditionalGenerationConfig

# The text model alone reads the same files.
# fork: append
MODELS_CONFIG_MAP = {"KimiLinearForCausalLM": KimiK3ForConditionalGenerationConfig}
