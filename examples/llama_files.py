"""What the files of a language model hold, for llama.py: arrays, config, tokenizer. A model is a
folder as Hugging Face has it (config.json, *.safetensors, tokenizer.json) or a .gguf of llama.cpp.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

import mha

MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")


class Names(NamedTuple):
    """Of arrays, without the ".weight" at their ends."""

    embedding: str
    last_norm: str
    logits: str
    layer: str      # what stands before the names of a layer
    attention: str  # and what stands before those of its attention, behind it
    # Before attention, behind it, before the feed-forward network, behind it.
    norms: tuple[str | None, ...]
    feed_forward: tuple[str, str, str]  # gate, up, down


OF_FOLDERS = Names("embed_tokens", "norm", "lm_head", "layers.{}.", "self_attn.",
                   ("input_layernorm", None, "post_attention_layernorm", None),
                   ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
OF_GGUF = Names("token_embd", "output_norm", "output", "blk.{}.", "",
                ("attn_norm", None, "ffn_norm", None), ("ffn_gate", "ffn_up", "ffn_down"))
# Gemma 3 norms what attention and feed-forward network give, too.
NORMS_OF_GEMMA = {
    OF_FOLDERS: ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm"),
    OF_GGUF: ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")}

# How text is cut into words before bytes are merged, by the names that a .gguf has for it.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CUTS = {"llama-bpe": WORDS.replace("{DIGITS}", "{1,3}"), "qwen2": WORDS.replace("{DIGITS}", ""),
        "gpt-2": None}  # as the tokenizers package does by itself
CONTROL, OF_USER = 3, 4  # types of tokens that are found in a text before it is cut


def floats(array):
    """As float32. NumPy alone has no bfloat16: its bits are the upper half of a float32's."""
    if array.dtype.itemsize == 2 and array.dtype != np.float16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


class ModelFiles:
    """A model's arrays, read one at a time, its config and its `names` of arrays."""

    def __init__(self, path):
        self.path, self.is_gguf = path, str(path).lower().endswith(".gguf")
        self.arrays = mha.parameters.open(path)
        config = self.arrays.config or {}
        self.config = config.get("text_config") or config
        kind = self.config.get("model_type", None if not self.is_gguf
                               else self.arrays.metadata.get("general.architecture"))
        if kind not in MODELS:
            raise ValueError(
                "got arrays without a config, wanted a folder with the model's config.json, too"
                if kind is None and not self.is_gguf else
                f"got a model of type {kind!r}, wanted one of {', '.join(MODELS)}")
        if self.config.get("mlp_bias"):
            raise ValueError("mlp_bias: got a feed-forward network with biases, wanted none")
        for name in ("num_hidden_layers", "rms_norm_eps"):
            if self.config.get(name) is None:
                raise ValueError(f"config: got none for {name!r}, wanted a number")
        self.is_gemma = kind.startswith("gemma")
        names = OF_GGUF if self.is_gguf else OF_FOLDERS
        # What stands before all names differs by class: "model.", "language_model.model.", ...
        embedding = f"{names.embedding}.weight"
        roots = [name.removesuffix(embedding) for name in self.arrays if name.endswith(embedding)]
        if not roots:
            raise ValueError(f"got no array {embedding}, wanted a whole language model")
        root = roots[0]
        self.names = names._replace(
            embedding=root + names.embedding, last_norm=root + names.last_norm,
            layer=root + names.layer,
            norms=NORMS_OF_GEMMA[names] if self.is_gemma else names.norms)

    def __getitem__(self, name):
        if f"{name}.weight" not in self.arrays:
            raise ValueError(f"got no array {name}.weight, wanted a whole language model")
        return self.arrays[f"{name}.weight"]

    def get(self, name, default):
        return self.arrays.get(f"{name}.weight", default)

    def norm(self, name):
        """What a norm multiplies by, (width,): of Gemma 1 + the array."""
        return floats(self[name]) + np.float32(self.is_gemma)

    def end_tokens(self):
        """Those that end a text, by config.json and generation_config.json, or a .gguf."""
        if self.is_gguf:
            return {self.arrays.metadata.get(f"tokenizer.ggml.{name}_token_id")
                    for name in ("eos", "eot")} - {None}
        generation = Path(self.path, "generation_config.json")
        found = set()
        for said in (self.config, json.loads(generation.read_text(encoding="utf-8"))
                     if generation.is_file() else {}):
            token = said.get("eos_token_id")
            found.update(token if isinstance(token, list) else [token])
        return found - {None}


class Text:
    """A model's tokenizer: that of a tokenizer.json, or what a .gguf says of its own."""

    def __init__(self, files, tokenizer=None):
        if importlib.util.find_spec("tokenizers") is None:
            sys.exit("missing: tokenizers. Install what the examples need with\n"
                     "    pip install --no-deps -r examples/requirements.txt")
        if tokenizer is None and files.is_gguf:
            self.tokenizer = of_metadata(files.arrays.metadata)
        else:
            self.tokenizer = of_file(Path(tokenizer or Path(files.path, "tokenizer.json")))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def tokens(self, prompt):
        """A list of ints, with those that every text of the model begins with."""
        return self.tokenizer.encode(prompt).ids

    def pieces(self, tokens):
        """Yields for each token the text that it adds: "" where a character is not yet whole."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        for token in tokens:
            yield stream.step(self.tokenizer, token) or ""


def of_file(path):
    from tokenizers import Tokenizer

    if not path.is_file():
        raise ValueError(f"got no file {path}, wanted the model's tokenizer.json there, or by"
                         " --tokenizer FILE")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path} is no tokenizer.json: {error}") from error


def of_metadata(metadata):
    """A tokenizer by byte-pair encoding (Radford et al. 2019, section 2.2), from a .gguf."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        processors,
    )

    def said(name, default=None):
        return metadata.get(f"tokenizer.ggml.{name}", default)

    kind, cut, tokens = said("model"), said("pre", "gpt-2"), said("tokens")
    if kind != "gpt2" or cut not in CUTS or not tokens or said("merges") is None:
        raise ValueError(f"got a tokenizer of kind {kind!r}, {cut!r} in the file, wanted 'gpt2' and"
                         f" one of {', '.join(CUTS)}: give the model's tokenizer.json by"
                         " --tokenizer FILE")
    tokenizer = Tokenizer(models.BPE(
        {token: number for number, token in enumerate(tokens)},
        [tuple(merge.split(" ", 1)) for merge in said("merges")],
        ignore_merges=cut == "llama-bpe"))
    tokenizer.pre_tokenizer = _cutter(CUTS[cut])
    tokenizer.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)
                          for token, kind in zip(tokens, said("token_type", ()))
                          if kind in (CONTROL, OF_USER)])
    first = said("bos_token_id")
    if first is not None and said("add_bos_token", cut == "llama-bpe"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[first], "$A"], special_tokens=[(tokens[first], first)])
    return tokenizer


def _cutter(words):
    from tokenizers import Regex, pre_tokenizers

    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    return as_bytes if words is None else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), as_bytes])
