"""What people do with a model of transformers, under "mha" beside "eager": pipelines, a step of
Trainer, torch.compile, continuous batching."""

import warnings

import numpy as np
import pytest
import torch
import transformers
from test_compat_transformers import MODELS, VOCABULARY, build, inputs_of
from tokenizers import Tokenizer, models, pre_tokenizers

from mha.compat import transformers as compat

transformers.logging.set_verbosity_error()
compat.register()


def tokenizer():
    """A word a token: w3 is token 3."""
    specials = ["[PAD]", "[BOS]", "[MASK]"]
    vocabulary = {word: token for token, word in enumerate(
        [*specials, *(f"w{token}" for token in range(3, VOCABULARY))])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", bos_token="[BOS]", mask_token="[MASK]",
        unk_token="[PAD]", padding_side="left")


def under_both(name, use):
    """What use(model) gives under "eager" and under "mha"."""
    found = []
    for implementation in ("eager", "mha"):
        model = build(name, np.random.default_rng(11))
        model.set_attn_implementation(implementation)
        found.append(use(model))
    return found


PROMPTS = ["w5 w17 w3", "w40 w8 w8 w21 w33 w9 w12", "w6"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_pipeline_writes_the_same_text(name):
    def use(model):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer())
        return pipe(PROMPTS, batch_size=3, max_new_tokens=8, min_new_tokens=8, do_sample=False)

    eagers, ours = under_both(name, use)
    assert ours == eagers
    assert all(len(text[0]["generated_text"].split()) > 5 for text in ours)


def test_pipelines_fill_masks_and_give_features():
    def fill(model):
        pipe = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer())
        return [(guess["token"], guess["score"]) for guess in pipe("w4 w9 [MASK] w7", top_k=5)]

    def features(model):
        pipe = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer())
        return np.array(pipe(PROMPTS[1]))

    for eagers, ours in (under_both("bert", fill), under_both("bert", features)):
        np.testing.assert_allclose(ours, eagers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_step_of_trainer_makes_the_same_parameters(name, tmp_path):
    rng = np.random.default_rng(3)
    texts = [{"input_ids": tokens, "labels": tokens, "attention_mask": np.ones_like(tokens)}
             for tokens in rng.integers(3, VOCABULARY, (4, 9))]

    def use(model):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, use_cpu=True,
            optim="sgd", learning_rate=0.1, report_to=[], save_strategy="no", disable_tqdm=True,
            max_grad_norm=0.0, seed=5)
        before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        model.config.hidden_dropout_prob = 0.0
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        transformers.Trainer(model=model, args=arguments, train_dataset=texts).train()
        after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert not torch.equal(before, after)
        return after

    eagers, ours = under_both(name, use)
    torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)


# Not gpt-oss, whose loop over experts breaks it eleven times, whatever attends.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss"])
def test_torch_compile_does_not_break_the_graph(name):
    arguments, counted = inputs_of(name, build(name, np.random.default_rng(11)),
                                   np.random.default_rng(2), "right")

    def use(model):
        torch._dynamo.reset()
        with torch.no_grad():
            explained = torch._dynamo.explain(model)(**arguments, use_cache=False)
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="aot_eager")
            logits = compiled(**arguments, use_cache=False).logits[counted]
            plain = model(**arguments, use_cache=False).logits[counted]
        torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
        return explained.graph_break_count

    assert under_both(name, use) == [0, 0]


def test_a_compiled_model_has_the_gradients():
    def use(model):
        torch._dynamo.reset()
        tokens = torch.arange(3, 27).view(2, 12)
        torch.compile(model, backend="aot_eager")(tokens).logits.square().sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    eagers, ours = under_both("llama", use)
    torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-4 * float(eagers.abs().max()))


@pytest.mark.parametrize("implementation", ["mha", "paged|mha"])
def test_continuous_batching_is_refused_by_name(implementation):
    """transformers itself takes none but its own implementations there."""
    model = build("llama", np.random.default_rng(11))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "paged|" is no longer needed
        model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=r"Implementation mha is not supported for continuous"):
        model.generate_batch([[5, 6, 7], [8, 9]], max_new_tokens=3)
