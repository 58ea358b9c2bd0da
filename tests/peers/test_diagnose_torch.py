"""`diagnose` on what learners write in PyTorch: right modules pass, mistakes get their names."""

import copy
import functools
import math
import types

import learners_torch
import numpy as np
import pytest
import torch
import transformers
from torch import nn

from mha.testing import diagnose


@pytest.fixture(autouse=True)
def _failures_are_not_passed_over(monkeypatch):
    monkeypatch.setenv("MHA_DIAGNOSE_RAISES", "1")


def made(source, name="Layer"):
    names = {"torch": torch, "nn": nn, "F": nn.functional, "math": math, "copy": copy}
    exec(source, names)
    return names[name]


@pytest.mark.parametrize("source", learners_torch.RIGHT.values(), ids=learners_torch.RIGHT)
def test_a_right_module_is_correct(source):
    found = diagnose(made(source))
    assert found, found


@pytest.mark.parametrize("mistake", learners_torch.MISTAKES, ids=lambda mistake: mistake.name[:40])
def test_a_mistake_in_a_module_gets_its_name(mistake):
    found = diagnose(made(mistake.source(mistake.wrong)))
    assert not found
    assert mistake.name in "\n".join(found.problems), found


@pytest.mark.parametrize("module", [
    nn.MultiheadAttention(32, 4), nn.MultiheadAttention(32, 4, batch_first=True, bias=False),
    nn.MultiheadAttention(32, 4, batch_first=True, kdim=16, vdim=24), nn.MultiheadAttention,
    nn.MultiheadAttention(32, 4, dtype=torch.float64).eval(),
    nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.bfloat16),
    nn.functional.scaled_dot_product_attention])
def test_pytorchs_own_are_correct(module):
    assert diagnose(module), diagnose(module)


def test_the_layers_of_transformers_are_correct():
    gpt = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=1, attn_implementation="eager")
    bert = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1,
                                   attn_implementation="eager")
    found = diagnose(transformers.GPT2Model(gpt).h[0].attn)
    assert not found.problems
    found = diagnose(transformers.BertModel(bert).encoder.layer[0].attention.self)
    assert len(found.problems) == 1
    assert "there is no output projection W_o" in found.problems[0]  # it stands in another module


def test_parts_and_functions_of_a_module_are_tested_alone():
    attend = made(learners_torch.LENGTHS, "DotProductAttention")
    assert diagnose(attend)
    assert diagnose(attend(dropout=0.5))  # which is switched off
    assert diagnose(made(learners_torch.HEAD_BY_HEAD, "Head"))
    assert diagnose(made(learners_torch.BY_HEAD, "scaled_dot_product"))
    assert diagnose(made(learners_torch.W_Q_TO_W_O)(32, 4).forward)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(("change", "words"), [
    (lambda layer: layer.to("meta"), "its parameters are on the device meta"),
    (torch.jit.script, "torch.jit made it; diagnose the module that it was made from")])
def test_modules_without_numbers_are_refused_in_words(change, words):
    problem, = diagnose(change(nn.MultiheadAttention(32, 4))).problems
    assert words in problem
    assert "SimpleNamespace" not in problem


def test_a_compiled_module_stands_for_its_own():
    layer = made(learners_torch.VISION)(32, 4)
    compiled = torch.compile(layer, backend="eager")
    assert str(diagnose(compiled)) == str(diagnose(layer))


def test_halves_are_tested_in_float32():
    found = diagnose(made(learners_torch.GPT.replace("config.", "")
                          .replace("(self, config)", "(self, n_embd, n_head, bias, dropout,"
                                   " block_size)"))(32, 4, True, 0.1, 16).bfloat16())
    assert found
    assert "tested was a copy of the layer in float32" in found.notes


def test_an_instance_is_not_changed():
    module = made(learners_torch.FOUR_LINEARS)(4, 32)
    module(torch.ones(1, 3, 32), torch.ones(1, 3, 32), torch.ones(1, 3, 32))  # keeps its weights
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert diagnose(module)
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Unreadable(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha, self.beta, self.gamma, self.delta = (nn.Linear(32, 32) for _ in range(4))
        self.lens = nn.Linear(32, 8)

    def forward(self, x, more):
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2)
                   for part in (self.alpha, self.beta, self.gamma))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.delta(attended.transpose(1, 2).flatten(2)) * more


def test_what_cannot_be_read_is_told_with_the_wrapper_to_write():
    layer = Unreadable()
    problem, = diagnose(layer).problems
    assert "found no parameter W_q" in problem
    assert "its parameters are alpha.weight, alpha.bias, beta.weight" in problem
    assert "types.SimpleNamespace(W_q=layer.a, W_k=layer.b" in problem
    assert "functools.partial(layer.forward, name=value)" in problem
    wrapped = types.SimpleNamespace(W_q=layer.alpha, W_k=layer.beta, W_v=layer.gamma,
                                    W_o=layer.delta, num_heads=4,
                                    forward=functools.partial(layer.forward, more=1.0))
    assert diagnose(wrapped), diagnose(wrapped)
    wrapped.W_k, wrapped.W_v = wrapped.W_v, wrapped.W_k
    assert "the matrices of key and value are swapped" in str(diagnose(wrapped))


def test_parameters_that_were_not_read_are_named():
    source = learners_torch.VISION.replace("nn.Identity(), nn.Identity()",
                                           "nn.LayerNorm(dim // num_heads), nn.Identity()")
    assert "arrays that were taken for no weight: q_norm.weight, q_norm.bias" in str(
        diagnose(made(source)))


def test_a_function_of_arrays_in_a_file_with_torch_stays_one():
    def attention(q, k, v):
        scores = q @ np.swapaxes(k, -1, -2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v

    assert diagnose(attention).problems == ("forgot to divide by sqrt(d_k)",)
