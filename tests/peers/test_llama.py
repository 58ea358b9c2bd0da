"""examples/llama.py against models of transformers with small random weights, in float32."""


import numpy as np
import pytest
import torch
import transformers
from example_programs import loaded

llama, = loaded("llama")

transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")  # the framework's own

SHARED = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 256,
          "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}
CASES = {
    "llama": ("Llama", {"rope_parameters": LLAMA_3}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", {**GEMMA, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "gemma3_wide": ("Gemma3", {**GEMMA, "head_dim": 32, "num_key_value_heads": 1}),
}
PROMPT = np.random.default_rng(3).integers(300, size=21).tolist()


def config_of(name, options):
    kind = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    return kind(**SHARED | options)


def build(case):
    name, options = CASES[case]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config_of(name, options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:  # small embeddings: else a tied model repeats its last token
                size = 0.03 if "embed" in key else 1.5 / parameter.shape[1]**0.5
                parameter.normal_(0, size)
    return model


@torch.no_grad()
def compare(path, theirs):
    """Forty tokens, which are beyond every window here, each the likeliest behind all before it."""
    model, calls = llama.Llama(llama.ModelFiles(path)), []
    next_logits = model.next_logits
    model.next_logits = lambda *given: calls.append(next_logits(*given)) or calls[-1]
    prompt = llama.Prompt(PROMPT, 40, lambda logits: int(logits.argmax()))
    made = list(llama.generate(model, prompt))
    whole = theirs(torch.tensor([PROMPT + made]), use_cache=False).logits[0].numpy()
    wanted = whole[len(PROMPT) - 1:-1]
    assert made == wanted.argmax(-1).tolist() and len(set(made)) > 10
    assert np.abs(calls - wanted).max() < 1e-5 * np.abs(wanted).max()
    together = list(llama.generate_together(model, [prompt._replace(tokens=[1, 2, 3]), prompt]))
    assert [token for number, token in together if number == 1] == [*made, None]


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_as_the_model_does(tmp_path, case):
    theirs = build(case)
    theirs.save_pretrained(tmp_path, max_shard_size="100KB" if case == "qwen3" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (case == "qwen3")
    compare(tmp_path, theirs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_halves(tmp_path, case, dtype):
    """Stored as halves, computed in float32 by both."""
    build(case).to(dtype).save_pretrained(tmp_path)
    theirs = getattr(transformers, f"{CASES[case][0]}ForCausalLM").from_pretrained(
        tmp_path, dtype=torch.float32)
    compare(tmp_path, theirs)


def test_the_text_model_of_one_that_sees_too(tmp_path):
    """Of Gemma 3's larger models: names and config are inside others."""
    from safetensors.numpy import load_file, save_file

    theirs = build("gemma3")
    theirs.save_pretrained(tmp_path)
    config = transformers.Gemma3Config(text_config=theirs.config.to_dict())
    config.save_pretrained(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{name}": array for name, array in arrays.items()},
              tmp_path / "model.safetensors")
    compare(tmp_path, theirs)
