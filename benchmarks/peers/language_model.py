"""The training of examples/train_language_model.py at the size of a Work."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent.parent / "examples"))
from train_language_model import Settings, Text, Training


def training_of(work):
    batch, length, width, heads, blocks = work.shape
    settings = Settings(batch=batch, context=length, width=width, heads=heads, blocks=blocks,
                        dropout=work.dropout)
    return Training(settings, Text())
