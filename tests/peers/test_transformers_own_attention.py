"""Models of transformers that attend by code of their own, when they are asked for "mha".

They ask for no registered function, so that what "mha" gives them are its masks alone, which their
code adds to scores: BLOOM and CodeGen then saw future keys. They keep what they have unasked.
"""

import importlib
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from configurations import COUNT
from test_compat_transformers import MODELS, build
from transformers import PreTrainedModel

from mha.compat import transformers as compat
from mha.compat._shared.own_attention import own_attention

transformers.logging.set_verbosity_error()
compat.register()

BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20}
ATTEND_THEMSELVES = {
    "Bloom": GPT, "CodeGen": {**GPT, "n_head": 4, "rotary_dim": 4}, "Deberta": BERT,
    "Falcon": BERT,
    "FSMT": {**BART, "langs": ["en", "de"], "src_vocab_size": 50, "tgt_vocab_size": 50},
    "GPTNeo": {"hidden_size": 16, "num_layers": 2, "num_heads": 2,
               "attention_types": [[["global", "local"], 1]]},
    "LED": {**BART, "attention_window": 4}, "MPNet": BERT,
    "Mpt": {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}, "RoFormer": BERT,
    "XGLM": {"d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 20}}


def built(name, implementation):
    """A model of random numbers, asked for this implementation from the start."""
    config = getattr(transformers, f"{name}Config")(vocab_size=50, **ATTEND_THEMSELVES[name])
    model = getattr(transformers, f"{name}Model")._from_config(
        config, attn_implementation=implementation)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


@pytest.mark.parametrize("name", ATTEND_THEMSELVES)
def test_what_attends_itself_stays_what_it_is_and_is_named(name):
    with pytest.warns(UserWarning, match=rf"got 'mha' for {name}Model, which attends by code of"):
        asked = built(name, "mha")
    unasked = built(name, None)
    assert asked.config._attn_implementation == unasked.config._attn_implementation != "mha"
    tokens = torch.arange(5, 17).view(2, 6)
    real = torch.ones_like(tokens)
    real[0, :2] = 0
    with torch.no_grad():
        found, wanted = (model(tokens, attention_mask=real)[0][real.bool()]
                         for model in (asked, unasked))
    assert torch.equal(found, wanted)
    asked.set_attn_implementation("mha")  # which transformers itself refuses, and logs
    assert asked.config._attn_implementation == unasked.config._attn_implementation


@pytest.mark.parametrize("name", MODELS)
def test_what_asks_for_a_function_takes_it_without_a_warning(name):
    model = build(name, np.random.default_rng(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = type(model)._from_config(model.config, attn_implementation="mha")
        model.set_attn_implementation("mha")
    assert model.config._attn_implementation == again.config._attn_implementation == "mha"


def model_classes(*modules):
    for name in modules:
        module = importlib.import_module(f"transformers.models.{name}")
        yield from (found for found in vars(module).values() if isinstance(found, type)
                    and issubclass(found, PreTrainedModel) and found.__module__ == module.__name__)


def test_no_model_that_transformers_cannot_set_is_taken():
    """Of every model, where there is time for it: transformers searches its source for words."""
    names = ["bloom.modeling_bloom", "fsmt.modeling_fsmt", "wavlm.modeling_wavlm",
             "reformer.modeling_reformer", "falcon.modeling_falcon", "yoso.modeling_yoso"]
    if COUNT > 100:
        names = [f"{path.parent.name}.{path.stem}" for path in sorted(
            Path(transformers.models.__path__[0]).glob("*/modeling_*.py"))
            if path.stem != "modeling_higgs_audio_v2_tokenizer"]  # needs torchaudio
    refused = [found for found in model_classes(*names)
               if not found._can_set_attn_implementation()]
    assert len(refused) > 20
    assert [found for found in refused if not own_attention(found, "mha")] == []


def test_where_both_kinds_are_in_one_file_the_masks_decide():
    """Gemma 4 hears by code of its own and reads by a registered function; LongT5 and CLAP attend
    in both ways with one kind of mask, which is not that of "sdpa"."""
    models = transformers.models
    gemma, longt5 = models.gemma4.modeling_gemma4, models.longt5.modeling_longt5
    assert own_attention(gemma.Gemma4AudioModel, "mha") == ["Gemma4AudioAttention"]
    assert own_attention(gemma.Gemma4TextModel, "mha") == []
    assert own_attention(longt5.LongT5Model, "mha") == [
        "LongT5LocalAttention", "LongT5TransientGlobalAttention"]
    assert own_attention(models.clap.modeling_clap.ClapModel, "mha") == ["ClapAudioSelfAttention"]
    assert own_attention(models.git.modeling_git.GitModel, "mha") == ["GitSelfAttention"]
    inkling = models.inkling2.modeling_inkling2  # attends over layers, without a mask
    assert own_attention(inkling.Inkling2ForCausalLM, "mha") == []
    assert own_attention(models.rt_detr.modeling_rt_detr.RTDetrModel, "mha") == []


def test_a_class_without_a_source_is_judged_by_what_it_does():
    """As a notebook has it, where transformers finds no words to search for."""
    for asks in (True, False):
        there = types.ModuleType("of_a_notebook")
        code = ("lambda self, *inputs: ALL.get_interface('mha', None)(self, *inputs)" if asks else
                "lambda self, query, key, value: (query @ key.mT).softmax(-1) @ value")
        exec("from torch import nn\n"
             "from transformers import PreTrainedModel\n"
             "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ALL\n"
             f"class OwnAttention(nn.Module):\n    forward = {code}\n"
             "class Model(PreTrainedModel):\n    pass\n", vars(there))
        sys.modules[there.__name__] = there
        try:
            assert own_attention(there.Model, "mha") == ([] if asks else ["OwnAttention"])
        finally:
            del sys.modules[there.__name__]
