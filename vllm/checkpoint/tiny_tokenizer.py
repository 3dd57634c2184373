# SPDX-License-Identifier: Apache-2.0
"""A small byte-level BPE tokenizer and chat template for tiny checkpoints.

The vocabulary is written down rather than trained, so it is the same with every
version of the tokenizers library: 256 bytes, merges that spell a list of common
words, Kimi K3's marker tokens, and reserved tokens up to the wanted size.
"""

import json
from pathlib import Path

__all__ = ["EOS", "MARKERS", "PAD", "min_vocab_size", "token_id", "write_tokenizer"]

BOS, EOS, PAD = "[BOS]", "[EOS]", "[PAD]"
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

# Markers that vLLM's Kimi K3 parsers and its image preprocessing look up by name.
MARKERS = (
    BOS,
    EOS,
    PAD,
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
    IMAGE_PLACEHOLDER,
)

_WORDS = (
    "the and for that with this from have not are you was but all one can has will "
    "message user assistant system think response tools call argument key type role "
    "number string word time into more what when which there how out about over new "
    "layer model token expert weight scale block"
).split()

# Chat turns in K3's marker language: every element opens with <|open|>NAME<|sep|>
# and closes with <|close|>NAME<|sep|>. The reply starts inside the think element
# unless thinking is off, in which case it starts inside the response element.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string %}{{ content }}
{%- else %}{% for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}
{%- endif %}
{%- endmacro -%}
{%- for message in messages -%}
<|open|>message role="{{ message.role }}"<|sep|>{{ text(message.content) }}\
<|close|>message<|sep|><|end_of_msg|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|open|>message role="assistant"<|sep|><|open|>\
{{ 'response' if thinking is defined and not thinking else 'think' }}<|sep|>
{%- endif -%}
"""


def _byte_alphabet() -> list[str]:
    """One printable character per byte value, as byte-level BPE spells bytes.

    Bytes that are printable in Latin-1 stand for themselves; the others take the
    code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, extra = [], 0
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(256 + extra))
            extra += 1
    return alphabet


def _merges(alphabet: list[str]) -> list[tuple[str, str]]:
    """Merges that build each word, with and without a leading space, left to right."""
    space = alphabet[ord(" ")]
    merges: list[tuple[str, str]] = []
    known: set[str] = set(alphabet)
    for word in (w for base in _WORDS for w in (base, space + base)):
        left = word[0]
        for char in word[1:]:
            if left + char not in known:
                merges.append((left, char))
                known.add(left + char)
            left += char
    return merges


def min_vocab_size() -> int:
    """Smallest vocabulary: the bytes and the markers, no merges."""
    return 256 + len(MARKERS)


def _vocabulary(vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    if vocab_size < min_vocab_size():
        raise ValueError(
            f"vocabulary of {vocab_size} is too small: 256 byte tokens and "
            f"{len(MARKERS)} markers need {min_vocab_size()}."
        )
    alphabet = _byte_alphabet()
    merges = _merges(alphabet)[: vocab_size - min_vocab_size()]
    tokens = alphabet + [left + right for left, right in merges]
    reserved = vocab_size - len(tokens) - len(MARKERS)
    tokens += [f"<|reserved_{i}|>" for i in range(reserved)]
    tokens += MARKERS
    return {token: index for index, token in enumerate(tokens)}, merges


def token_id(token: str, vocab_size: int) -> int:
    """Id of a marker in a vocabulary of `vocab_size`; markers come last."""
    return vocab_size - len(MARKERS) + MARKERS.index(token)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat template.

    Raises:
        ValueError: `vocab_size` is below `min_vocab_size`.
    """
    vocab, merges = _vocabulary(vocab_size)
    special = [t for t in vocab if t in MARKERS or t.startswith("<|reserved_")]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in special
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [t for t in MARKERS if t not in (BOS, EOS, PAD)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
    ):
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
