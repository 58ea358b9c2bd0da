"""Formulas as MathML, which browsers draw by themselves: no script, no network."""

import re

from docutils import nodes
from latex2mathml.converter import convert

# Browsers know no other variants of letters than those that are letters of their own.
FIRST = {"bold": {"A": 0x1D400, "a": 0x1D41A, "0": 0x1D7CE},
         "double-struck": {"A": 0x1D538, "a": 0x1D552, "0": 0x1D7D8}}
OLDER = dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ", strict=True))  # of the double-struck ones


def mathml(tex, display):
    made = convert(tex.replace("\\\n", " "), display=display)  # at a line's end it is a blank
    return re.sub(r'<m([ino]) mathvariant="(bold|double-struck)">(.*?)</m', _with_letters, made)


def _with_letters(found):
    kind, variant, text = found.groups()
    return f"<m{kind} mathvariant=\"normal\">{''.join(_letter(one, variant) for one in text)}</m"


def _letter(letter, variant):
    if variant == "double-struck" and letter in OLDER:
        return OLDER[letter]
    for first, code in FIRST[variant].items():
        if first <= letter <= chr(ord(first) + (9 if first == "0" else 25)):
            return chr(code + ord(letter) - ord(first))
    return letter


def inline(translator, node):
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(translator, node):
    translator.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode
