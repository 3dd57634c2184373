# SPDX-License-Identifier: Apache-2.0
"""Tokenizer class copied into tiny multimodal checkpoints; not used from here."""

from transformers import PreTrainedTokenizerFast


class TinyK3Tokenizer(PreTrainedTokenizerFast):
    """A fast tokenizer whose chats come out as a plain list of token ids.

    That is what vLLM's Kimi K3 renderer passes on; transformers 5 returns a
    `BatchEncoding` unless told otherwise.
    """

    def apply_chat_template(self, conversation, **kwargs):
        kwargs.setdefault("return_dict", False)
        return super().apply_chat_template(conversation, **kwargs)
