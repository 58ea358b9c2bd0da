"""What the kernels of the wider instructions use is emulated: tests/c/emulated_*.h have every
intrinsic, so that a machine without them can compile and test these kernels. Read from the text,
on any machine."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
EMULATIONS = {"avx512": ["emulated_avx512.h"], "amx": ["emulated_avx512.h", "emulated_tiles.h"]}
OF_AVX2_TOO = {"_mm256_storeu_si256", "_mm256_set1_epi16"}  # and what the kernels of AVX2 use


def files_of(instruction_set):
    """The wrappers of a kernel set and what they include of the kernels, once each."""
    found = list(CSRC.glob(f"kernels/kernels_float*_{instruction_set}.c"))
    for path in found:  # grows
        named = re.findall(r'^#include "(kernels/.+)"', path.read_text(), re.MULTILINE)
        found += {CSRC / name for name in named} - set(found)
    return found


def intrinsics_of(instruction_set):
    text = "\n".join(path.read_text() for path in files_of(instruction_set))
    without_comments = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return set(re.findall(r"\b_(?:mm\d*|tile|k\w+)_\w+", without_comments))


def emulated(instruction_set):
    text = "\n".join((ROOT / "tests/c" / name).read_text() for name in EMULATIONS[instruction_set])
    return set(re.findall(r"^#define (_\w+)", text, re.MULTILINE))


@pytest.mark.parametrize(("instruction_set", "at_least"), [("avx512", 50), ("amx", 15)])
def test_every_intrinsic_is_emulated(instruction_set, at_least):
    used = intrinsics_of(instruction_set)
    assert len(used) > at_least  # none is overlooked
    missing = used - emulated(instruction_set) - intrinsics_of("avx2") - OF_AVX2_TOO
    assert not missing, f"emulate them in tests/c/{EMULATIONS[instruction_set][-1]}, as `#define`"
