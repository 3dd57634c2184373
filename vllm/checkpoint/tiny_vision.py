# SPDX-License-Identifier: Apache-2.0
"""The vision side of a tiny multimodal checkpoint: config entries and helper files.

vLLM builds the image processor of a `KimiK3ForConditionalGeneration` checkpoint even
when only text is served, and expects its tokenizer to render chats to token ids. The
checkpoint brings both as Python files, as the published one does, so it is served with
``--trust-remote-code``.
"""

import json
from pathlib import Path
from typing import Any

from vllm.checkpoint import tiny_tokenizer

__all__ = ["config_entries", "write_files"]

PATCH, MERGE = 14, 2
HIDDEN, HEADS, LAYERS, WIDTH = 64, 2, 2, 128
PATCHES_PER_SIDE = 16

# Source in this package -> module name in the checkpoint.
_MODULES = {
    "tiny_remote_image_processor.py": "image_processing_tiny_k3.py",
    "tiny_remote_tokenizer.py": "tokenization_tiny_k3.py",
}


def config_entries(text_hidden: int, vocab_size: int) -> dict[str, Any]:
    """Top-level entries of ``config.json`` beside ``text_config``."""
    return {
        "media_placeholder_token_id": tiny_tokenizer.token_id("<|media_pad|>", vocab_size),
        "image_placeholder": tiny_tokenizer.IMAGE_PLACEHOLDER,
        "vision_config": {
            "model_type": "kimi_k3_vision",
            "patch_size": PATCH,
            "init_pos_emb_height": PATCHES_PER_SIDE,
            "init_pos_emb_width": PATCHES_PER_SIDE,
            "init_pos_emb_time": 4,
            "vt_num_attention_heads": HEADS,
            "vt_num_hidden_layers": LAYERS,
            "vt_hidden_size": HIDDEN,
            "vt_intermediate_size": WIDTH,
            "qkv_hidden_size": HIDDEN,
            "merge_kernel_size": [MERGE, MERGE],
            "norm_type": "rmsnorm",
            "mm_projector_type": "patchmergerv2",
            "attn_bias": False,
            "linear_bias": False,
            "patch_embed_proj_bias": False,
            "text_hidden_size": text_hidden,
        },
    }


def write_files(folder: Path) -> None:
    """Write the preprocessor config and the two modules; point the tokenizer at its."""
    here = Path(__file__).parent
    for source, target in _MODULES.items():
        (folder / target).write_text((here / source).read_text(encoding="utf-8"))
    preprocessor = {
        "auto_map": {"AutoImageProcessor": "image_processing_tiny_k3.TinyK3ImageProcessor"},
        "image_processor_type": "TinyK3ImageProcessor",
        "media_proc_cfg": {
            "patch_size": PATCH,
            "merge_kernel_size": MERGE,
            "in_patch_limit": PATCHES_PER_SIDE**2,
            "patch_limit_on_one_side": PATCHES_PER_SIDE,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n")
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["tokenizer_class"] = "TinyK3Tokenizer"
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "tokenization_tiny_k3.TinyK3Tokenizer"]}
    path.write_text(json.dumps(tokenizer, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
