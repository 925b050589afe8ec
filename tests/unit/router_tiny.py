"""Tiny tokenizers as Hugging Face-style directories, for the router's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS, IM_START, IM_END = 297, 298, 299
VOCAB_SIZE = 300


def byte_characters() -> list[str]:
    """The 256 characters of byte-level BPE, by byte: as the library has them."""
    shown = pre_tokenizers.ByteLevel.alphabet()
    order = sorted(ord(c) for c in shown)
    direct = [c for c in order if c < 0x100]
    shifted = iter(c for c in order if c >= 0x100)
    return [chr(byte) if byte in direct else chr(next(shifted)) for byte in range(256)]


def byte_level_tokenizer() -> Tokenizer:
    """All bytes are tokens 0-255, some pairs 256-296, and three special tokens: 300 in all."""
    letters = byte_characters()
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    merges = []
    for pair in ("th", "he", "in", "er", " t", " a", "é", "世"[:1], "ll", "o ", "\n\n"):
        raw = pair.encode()[:2]
        merge = (letters[raw[0]], letters[raw[1]])
        if "".join(merge) not in vocab:
            vocab["".join(merge)] = len(vocab)
            merges.append(merge)
    while len(vocab) < EOS:
        vocab[f"unused{len(vocab)}"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|eos|>", "<|im_start|>", "<|im_end|>")]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama 2's way: words with ▁ for spaces, and <0xNN> for bytes that no word has."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in ("▁", "▁a", "▁the", "a", "b", "e", "ll", "▁he", "é", ".", "▁▁"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_model(directory: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> Path:
    """A directory with all that the router reads of a model."""
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(directory / "tokenizer.json"))
    config = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": 512}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, IM_END]}))
    tokenizer_config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|eos|>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory
