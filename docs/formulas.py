"""Formulas as MathML, which browsers draw by themselves: no script, no network."""

from docutils import nodes
from latex2mathml.converter import convert


def inline(translator, node):
    translator.body.append(convert(node.astext(), display="inline"))
    raise nodes.SkipNode


def block(translator, node):
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode
