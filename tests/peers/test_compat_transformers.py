"""mha.compat.transformers: random small models under "mha" beside "eager" and "sdpa".

Logits and gradients are held to the gate of the design (tests/helpers/agreement.py): the error
against the
model in float64 is at most twice that of "eager" or "sdpa" in float32, or 1e-6. (What the rest of
the model rounds differs by as much: of 200 cases one had 2.5e-6 under "sdpa" and under "mha" and
1.1e-6 under "eager".) In float64 it is "sdpa", where the model has it, since the "eager" of several
models computes softmax in float32, which makes NaN of float64 queries that see no key. Such queries
of padding are left out of what is compared.
"""

import numpy as np
import pytest
import torch
import transformers
from configurations import COUNT

from mha.compat import transformers as compat

transformers.logging.set_verbosity_error()
compat.register()

FLOOR = 1e-6
VOCABULARY = 61
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def decoder(rng, **others):
    """What the configs of decoders of Llama's kind share."""
    heads, kv_heads = rng.choice([(1, 1), (2, 1), (3, 3), (4, 2), (6, 2), (6, 3), (9, 3)])
    return {**TOKENS, "num_hidden_layers": 2, "num_key_value_heads": int(kv_heads),
            "num_attention_heads": int(heads), "head_dim": 2 * int(rng.integers(2, 17)),
            "hidden_size": 36 * int(rng.integers(1, 3)), "intermediate_size": 24,
            "max_position_embeddings": 128, **others}


def windowed(rng, **others):
    layers = [str(kind) for kind in rng.permutation(["sliding_attention", "full_attention"])]
    return decoder(rng, sliding_window=int(rng.integers(2, 12)), layer_types=layers, **others)


def bert(rng):
    heads = int(rng.integers(1, 5))
    return transformers.BertConfig(
        **TOKENS, num_hidden_layers=2, num_attention_heads=heads,
        hidden_size=heads * int(rng.integers(3, 17)), intermediate_size=24)


def gpt2(rng):
    heads = int(rng.integers(1, 5))
    return transformers.GPT2Config(
        **TOKENS, n_layer=2, n_head=heads, n_embd=heads * int(rng.integers(3, 17)),
        n_positions=128, scale_attn_weights=bool(rng.integers(2)),
        scale_attn_by_inverse_layer_idx=bool(rng.integers(2)))


def t5(rng):
    return transformers.T5Config(
        **TOKENS, decoder_start_token_id=0, num_layers=2, d_ff=24, dropout_rate=0.0,
        num_heads=int(rng.integers(1, 5)), d_kv=int(rng.integers(3, 17)),
        d_model=int(rng.integers(8, 40)), relative_attention_num_buckets=8,
        relative_attention_max_distance=int(rng.integers(5, 30)))


def blenderbot(rng):
    heads = int(rng.integers(1, 5))
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", 2), ("attention_heads", heads), ("ffn_dim", 24))}
    return transformers.BlenderbotConfig(
        **TOKENS, **sizes, d_model=heads * int(rng.integers(3, 17)), max_position_embeddings=64,
        decoder_start_token_id=1)


def whisper(rng):
    heads = int(rng.integers(1, 5))
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", 2), ("attention_heads", heads), ("ffn_dim", 24))}
    return transformers.WhisperConfig(
        **TOKENS, **sizes, d_model=2 * heads * int(rng.integers(2, 9)), num_mel_bins=5,
        max_source_positions=int(rng.integers(4, 20)), max_target_positions=64,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None)


MODELS = {
    "bert": (transformers.BertForMaskedLM, bert),
    "gpt2": (transformers.GPT2LMHeadModel, gpt2),
    "llama": (transformers.LlamaForCausalLM,
              lambda rng: transformers.LlamaConfig(**decoder(rng))),
    "qwen3": (transformers.Qwen3ForCausalLM,
              lambda rng: transformers.Qwen3Config(**decoder(rng))),
    "gemma2": (transformers.Gemma2ForCausalLM,
               lambda rng: transformers.Gemma2Config(**windowed(
                   rng, attn_logit_softcapping=float(rng.uniform(0.5, 5)),
                   query_pre_attn_scalar=int(rng.integers(4, 40))))),
    "gemma3": (transformers.Gemma3ForCausalLM,
               lambda rng: transformers.Gemma3TextConfig(**windowed(
                   rng, query_pre_attn_scalar=int(rng.integers(4, 40))))),
    "gpt_oss": (transformers.GptOssForCausalLM,
                lambda rng: transformers.GptOssConfig(**windowed(
                    rng, num_local_experts=3, num_experts_per_tok=2))),
    "t5": (transformers.T5ForConditionalGeneration, t5),
    "blenderbot": (transformers.BlenderbotForConditionalGeneration, blenderbot),
    "whisper": (transformers.WhisperForConditionalGeneration, whisper),
}


def build(name, rng):
    """A model whose numbers, biases and norms included, are all random, under "eager"."""
    cls, config_of = MODELS[name]
    config = config_of(rng)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(int(rng.integers(2**31)))
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5 if parameter.ndim < 2 else parameter.shape[-1]**-0.5)
    return model.eval()


def inputs_of(name, model, rng, padding):
    """The arguments of a call, and which of its logits count; padding: "left", "right", None."""
    batch, length = int(rng.integers(1, 4)), int(rng.integers(1, 24))
    tokens = torch.from_numpy(rng.integers(3, VOCABULARY, (batch, length)))
    if name == "whisper":
        frames = 2 * model.config.max_source_positions
        features = rng.standard_normal((batch, 5, frames)).astype(np.float32)
        return ({"input_features": torch.from_numpy(features), "decoder_input_ids": tokens},
                torch.ones_like(tokens, dtype=torch.bool))
    real = torch.ones_like(tokens)
    if padding is not None and rng.random() < 0.7:
        for row, lost in enumerate(rng.integers(0, length, batch)):
            real[row, :lost] = 0
        if padding == "right":
            real = real.flip(-1)
    arguments = {"input_ids": tokens, "attention_mask": real}
    if name in ("t5", "blenderbot"):
        answer = torch.from_numpy(rng.integers(3, VOCABULARY, (batch, int(rng.integers(1, 12)))))
        return {**arguments, "decoder_input_ids": answer}, torch.ones_like(answer).bool()
    return arguments, real.bool()


def results(model, implementation, dtype, arguments, counted):
    """Logits, and the gradients of their weighed sum by all parameters, in one vector."""
    model.set_attn_implementation(implementation)
    model.to(dtype).zero_grad()
    arguments = {name: argument.to(dtype) if argument.is_floating_point() else argument
                 for name, argument in arguments.items()}
    logits = model(**arguments, use_cache=False).logits[counted]
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape)
    (logits * weights.to(dtype)).sum().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()
                           if parameter.grad is not None])
    return logits.detach().double(), gradients.double()


def assert_within_the_gate(ours, peers, exact):
    for got, wanted, *others in zip(ours, exact, *peers, strict=True):
        largest = wanted.abs().max()
        error, *errors = (float((each - wanted).abs().max() / largest) for each in (got, *others))
        assert error <= max(2 * max(errors), FLOOR), (error, errors)


def peer(model):
    return "sdpa" if model._supports_sdpa else "eager"


@pytest.mark.parametrize("seed", range(COUNT))
def test_logits_and_gradients_agree_with_eager(seed):
    rng = np.random.default_rng(seed)
    name = list(MODELS)[seed % len(MODELS)]
    model = build(name, rng)
    padding = rng.choice(["left", "right"]) if name != "gemma2" else None
    arguments, counted = inputs_of(name, model, rng, padding)
    ours, *peers = (results(model, implementation, torch.float32, arguments, counted)
                    for implementation in ("mha", "eager", peer(model)))
    exact, precise = (results(model, implementation, torch.float64, arguments, counted)
                      for implementation in (peer(model), "mha"))
    assert_within_the_gate(ours, peers, exact)
    assert_within_the_gate(precise, peers, exact)


def test_the_bias_of_keys_has_no_gradient():
    """Blenderbot's k_proj.bias adds the same number to all scores of a query, which softmax does
    not see: zero in float64, rounding alone in float32, in which no two implementations agree.
    Every other gradient is as near to float64's as theirs."""
    rng = np.random.default_rng(0)
    model = build("blenderbot", rng)
    arguments, counted = inputs_of("blenderbot", model, rng, "right")
    found = {}
    for dtype in (torch.float64, torch.float32):
        for implementation in ("eager", "mha"):
            results(model, implementation, dtype, arguments, counted)
            found[implementation, dtype] = {
                name: parameter.grad.to(torch.float64, copy=True)
                for name, parameter in model.named_parameters()}
    exact, exact_too = found["eager", torch.float64], found["mha", torch.float64]
    largest = max(gradient.abs().max() for gradient in exact.values())
    biases = [name for name in exact if name.endswith("k_proj.bias")]
    assert len(biases) == 6
    for name, wanted in exact.items():
        assert (exact_too[name] - wanted).abs().max() <= 1e-14 * largest
        ours, eagers = (found[implementation, torch.float32][name]
                        for implementation in ("mha", "eager"))
        errors = [(gradient - wanted).abs().max() for gradient in (ours, eagers)]
        assert errors[0] <= max(2 * errors[1], FLOOR * largest), name
        if name in biases:
            assert wanted.abs().max() <= 1e-14 * largest
            assert (ours - eagers).abs().max() > 0.1 * eagers.abs().max()  # of what is rounding


@pytest.mark.parametrize("seed", range(COUNT))
def test_generated_tokens_are_those_of_sdpa(seed):
    rng = np.random.default_rng(1000 + seed)
    name = [name for name in MODELS if name != "bert"][seed % (len(MODELS) - 1)]
    model = build(name, rng)
    arguments, _ = inputs_of(name, model, rng, "left")
    arguments.pop("decoder_input_ids", None)
    cache = rng.choice([None, "static"])
    found = []
    for implementation in ("mha", peer(model)):
        model.set_attn_implementation(implementation)
        try:
            found.append(model.generate(
                **arguments, max_new_tokens=int(5 + seed % 11), do_sample=False,
                cache_implementation=cache, disable_compile=True).tolist())
        except IndexError as error:  # of Whisper, whose first token may be the last
            assert name == "whisper"
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_halves_are_as_near_as_eagers(name, dtype):
    rng = np.random.default_rng(7)
    model = build(name, rng)
    arguments, counted = inputs_of(name, model, rng, None)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    ours, eagers = (results(model, implementation, dtype, arguments, counted)
                    for implementation in ("mha", "eager"))
    exact = results(model, "eager", torch.float32, arguments, counted)
    for got, eager, wanted in zip(ours, eagers, exact, strict=True):
        error, eager_error = ((each - wanted).norm() for each in (got, eager))
        assert error <= 1.25 * eager_error


@pytest.mark.parametrize("name", [name for name in MODELS if name != "bert"])
def test_a_cache_in_pieces_gives_the_logits_of_one_call(name):
    """Prefill, a piece of several tokens, single tokens: with the dynamic cache of generation; an
    encoder has none."""
    rng = np.random.default_rng(3)
    model = build(name, rng).double()
    model.set_attn_implementation("mha")
    tokens = torch.from_numpy(rng.integers(3, VOCABULARY, (2, 20)))
    others, key = {}, "input_ids"
    if name in ("t5", "blenderbot"):
        key, others = "decoder_input_ids", {"input_ids": tokens}
    if name == "whisper":
        key, others = "decoder_input_ids", {"input_features": torch.randn(
            2, 5, 2 * model.config.max_source_positions, dtype=torch.float64)}
    with torch.no_grad():
        whole = model(**others, **{key: tokens}, use_cache=False).logits
        found, cache, start = [], None, 0
        for length in (9, 6, 1, 1, 3):
            piece = {key: tokens[:, start:start + length]}
            step = model(**others, **piece, past_key_values=cache, use_cache=True)
            cache, start = step.past_key_values, start + length
            found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-5, atol=1e-6)


def test_dropout_acts_in_training_alone():
    rng = np.random.default_rng(0)
    model = build("gpt2", rng)
    model.set_attn_implementation("mha")
    for block in model.transformer.h:
        block.attn.attn_dropout.p, block.attn.resid_dropout.p, block.mlp.dropout.p = 0.5, 0.0, 0.0
    model.transformer.drop.p = 0.0
    tokens = torch.from_numpy(rng.integers(3, VOCABULARY, (2, 15)))
    quiet = model(tokens).logits
    model.train()
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model(tokens).logits)
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])
    assert not torch.allclose(draws[0], quiet)


class Module(torch.nn.Module):
    is_causal = True


def forward(implementation, query, key, value, mask=None, is_causal=False, **options):
    """"sdpa" would ask the module where is_causal is None; mha takes it for False."""
    options["is_causal"] = is_causal
    function = {"mha": compat.attention_forward,
                "sdpa": transformers.AttentionInterface()["sdpa"]}[implementation]
    return function(Module(), query, key, value, mask, **options)[0]


def heads(*lengths):
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, 8, dtype=torch.float64) for length in lengths]


@pytest.mark.parametrize(("query_len", "key_len"), [(6, 6), (1, 9), (4, 9), (1, 1)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("mask", [None, "bool", "float", "position_bias", "both"])
def test_the_function_means_what_sdpas_means(query_len, key_len, is_causal, mask):
    inputs = heads(query_len, key_len, key_len)
    scores = (2, 1, query_len, key_len)
    options = {"is_causal": is_causal, "scaling": 0.4}
    if mask in ("bool", "both"):
        options["mask"] = torch.rand(scores) < 0.6
    if mask == "float":
        options["mask"] = torch.randn(scores, dtype=torch.float64)
    if mask in ("position_bias", "both"):
        options["position_bias"] = torch.randn((1, 3, query_len, key_len), dtype=torch.float64)
    given = options.pop("mask", None)
    ours = forward("mha", *inputs, given, **options)
    assert ours.is_contiguous()
    if mask == "both":  # sdpa's lowest number, where bool hides, is not quite -inf in empty rows
        seen = given.any(-1).transpose(1, 2)
        ours = ours * seen[..., None]
        torch.testing.assert_close(ours, forward("sdpa", *inputs, given, **options)
                                   * seen[..., None])
    else:
        torch.testing.assert_close(ours, forward("sdpa", *inputs, given, **options))


@pytest.mark.parametrize(("query_len", "key_len", "is_causal"), [
    (9, 9, True), (9, 9, False), (1, 9, True)])
def test_a_window_without_a_mask_is_applied(query_len, key_len, is_causal):
    inputs = heads(query_len, key_len, key_len)
    distance = torch.arange(key_len) - torch.arange(query_len)[:, None] - (key_len - query_len)
    mask = (distance > -4) & (distance < (1 if is_causal else 4))
    torch.testing.assert_close(
        forward("mha", *inputs, sliding_window=4, is_causal=is_causal),
        forward("sdpa", *inputs, mask.expand(2, 1, query_len, key_len)))


def test_a_dropout_of_1_gives_zeros_and_gradients_of_zeros():
    for implementation in ("mha", "sdpa"):
        inputs = [tensor.requires_grad_() for tensor in heads(4, 9, 9)]
        output = forward(implementation, *inputs, dropout=1.0, is_causal=False)
        output.sum().backward()
        assert not output.any() and not any(tensor.grad.any() for tensor in inputs)


@pytest.mark.parametrize("flag", [1, 0, np.True_])
def test_is_causal_may_be_a_number(flag):
    inputs = heads(5, 5, 5)
    assert torch.equal(forward("mha", *inputs, is_causal=flag),
                       forward("mha", *inputs, is_causal=bool(flag)))


def test_masks_bound_what_is_computed_and_change_no_bit():
    for window in (None, 7):
        options = {"local_size": window}
        if window is not None:
            options["mask_function"] = (
                transformers.masking_utils.sliding_window_causal_mask_function(window))
        real = torch.ones(2, 20, dtype=torch.bool)
        real[0, :3] = False
        mask = compat.attention_mask(2, 12, 20, q_offset=8, attention_mask=real, **options)
        assert getattr(mask, compat._BOUNDS) == (8, window and (window - 1, None), False)
        query, key, value = heads(12, 20, 20)
        assert torch.equal(forward("mha", query, key, value, mask),
                           forward("mha", query, key, value, mask.clone()))


@pytest.mark.parametrize("is_causal", [True, False, "unsaid"])
def test_the_mask_decides_whatever_the_module_says(is_causal):
    """Where "sdpa" does without a mask and asks the module: decoders of NLLB-MoE say False, what
    attends both ways in BridgeTower True, and encoders of ALIGN and Splinter nothing."""
    module = torch.nn.Module()
    if is_causal != "unsaid":
        module.is_causal = is_causal
    inputs = heads(6, 6, 6)
    mask = compat.attention_mask(2, 6, 6)
    assert torch.equal(mask, torch.ones(6, 6).tril().bool().expand(2, 1, 6, 6))
    none = compat.attention_mask(2, 6, 6, allow_is_causal_skip=False,
                                 allow_is_bidirectional_skip=True)
    assert none is None
    for given, causal in ((mask, True), (None, False)):
        torch.testing.assert_close(compat.attention_forward(module, *inputs, given)[0],
                                   forward("sdpa", *inputs, is_causal=causal))


def test_attentions_are_returned_where_they_are_asked_for():
    rng = np.random.default_rng(5)
    model = build("llama", rng)
    tokens = torch.from_numpy(rng.integers(3, VOCABULARY, (2, 9)))
    with torch.no_grad():
        eagers = model(tokens, output_attentions=True).attentions
        model.set_attn_implementation("mha")
        ours = model(tokens, output_attentions=True).attentions
    for weights, wanted in zip(ours, eagers, strict=True):
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)


def test_a_compiled_model_is_the_model():
    rng = np.random.default_rng(5)
    model = build("llama", rng)
    model.set_attn_implementation("mha")
    tokens = torch.from_numpy(rng.integers(3, VOCABULARY, (2, 9)))
    real = torch.ones_like(tokens)
    real[0, :4] = 0
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens, attention_mask=real).logits[1],
                                   model(tokens, attention_mask=real).logits[1])


@pytest.mark.parametrize("masked", [True, False])
def test_sinks_of_each_query_take_their_share(masked):
    """As Inkling 2 has them: one more score of each query, which softmax sees, without a value."""
    inputs = [tensor.requires_grad_() for tensor in heads(5, 9, 9)]
    sinks = torch.randn(2, 3, 5, 1, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 1, 5, 9) < 0.7 if masked else None
    if masked:
        mask[0, 0, 2] = False  # zeros: the sink takes all
    found, shown = compat.attention_forward(Module(), *inputs, mask, scaling=0.4, sinks=sinks,
                                            output_attentions=True)
    query, key, value = inputs
    scores = query @ key.mT * 0.4
    if masked:
        scores = scores.masked_fill(~mask, -1e300)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    wanted = (weights @ value).transpose(1, 2)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(shown, weights.detach())
    upstream = torch.randn_like(wanted)
    for ours, exact in zip(torch.autograd.grad(found, [*inputs, sinks], upstream),
                           torch.autograd.grad(wanted, [*inputs, sinks], upstream), strict=True):
        torch.testing.assert_close(ours, exact)


def test_what_is_not_supported_is_an_error():
    inputs = heads(3, 3, 3)
    with pytest.raises(NotImplementedError, match="cache: got"):
        forward("mha", *inputs, cache=object())


def test_register_under_another_name():
    compat.register("mha_again")
    config = MODELS["llama"][1](np.random.default_rng(0))
    config._attn_implementation = "mha_again"
    tokens = torch.ones(1, 5, dtype=torch.long)
    assert MODELS["llama"][0](config)(tokens).logits.shape == (1, 5, VOCABULARY)
    automatic = transformers.AutoModel.from_config(config, attn_implementation="mha")
    assert automatic.config._attn_implementation == "mha"
