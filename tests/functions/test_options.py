"""The options of attention are named once: here, in C, in signatures, docstrings and documents."""

import inspect
import typing
from pathlib import Path

import pytest
import write_options

import mha
from mha import _core
from mha._functions import options
from mha._functions.options import ATTENTION, OPTIONS, AttentionOptions

ROOT = Path(__file__).parents[2]


def test_the_cores_list_is_this_one():
    assert _core.OPTIONS == ATTENTION == tuple(OPTIONS)


def test_keywords_for_type_checkers_are_the_fields():
    fields = typing.get_type_hints(AttentionOptions)
    assert typing.get_type_hints(options.AttentionKeywords) == fields
    for keywords, names in ((options.LayerKeywords, options.LAYER),
                            (options.AdditiveKeywords, options.ADDITIVE),
                            (options.VarlenKeywords, options.VARLEN)):
        hints = typing.get_type_hints(keywords)
        assert hints == {name: fields[name] for name in names}


@pytest.mark.parametrize("name", ["scaled_dot_product_attention"])
def test_the_references_signature_is_made_of_them(name):
    parameters = inspect.signature(getattr(mha.reference, name)).parameters
    defaults = {option: parameters[option].default for option in ATTENTION}
    assert defaults == AttentionOptions._field_defaults
    assert set(parameters) - set(ATTENTION) == {
        "query", "key", "value", "return_weights", "return_lse"}


def test_every_option_has_its_paragraph_where_it_is_shown():
    text = inspect.getdoc(mha.scaled_dot_product_attention)
    for name, option in OPTIONS.items():
        assert f"\n{name} : {option.type}\n" in text
        assert " ".join(option.meaning.split()) in " ".join(text.split())
        assert option.meaning.endswith(".") and option.source


def test_the_document_is_written_from_them():
    """If not: python tests/tools/write_options.py > docs/options.md"""
    assert (ROOT / "docs/options.md").read_text() == write_options.document()


def test_a_record_is_made_of_what_a_call_gives():
    def call():
        """Whose keyword is named in the error."""

    assert options.attention_options(call, {}) is options.DEFAULTS == AttentionOptions()
    assert options.attention_options(call, {"causal": True}) == AttentionOptions(causal=True)
    for wrong in ({"cls": 1}, {"_cls": 1}, {"causal": True, "casual": 1}):
        with pytest.raises(TypeError, match=f"{list(wrong)[-1]}: got a keyword that"):
            options.attention_options(call, wrong)
    with pytest.raises(TypeError, match="bias: got a keyword that"):
        options.some_options(call, {"bias": 1}, options.ADDITIVE)
