#!/usr/bin/env bash
# A program that PyInstaller froze draws the page, and attention in it gives what it gives here.
#     tests/tools/frozen.sh PYTHON        a Python with PyInstaller and the wheel
set -euo pipefail
python=$(realpath -s "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat >program.py <<'PROGRAM'
import sys

import numpy as np

import mha

x = np.random.default_rng(0).standard_normal((2, 3, 16))
output, weights = mha.MultiHeadAttention(16, 2, rng=0)(x, causal=True, return_weights=True)
mha.view.heads(weights, ["The", "cat", "sat"]).save(sys.argv[1])
print(output.tobytes().hex())
print(mha.plot.text(weights[0, 0], ["The", "cat", "sat"]))
PROGRAM
"$python" program.py expected.html >expected.txt
"$python" -m PyInstaller --log-level ERROR --onedir program.py
dist/program/program page.html >printed.txt
cmp expected.html page.html
cmp expected.txt printed.txt
echo "frozen: passed"
