"""The sweep of `make sweep-transformers` over the same 40 models; all of them are for the night."""

import json
import os
import subprocess
import sys

import pytest
import sweep_transformers
from sweep_table import line
from sweep_transformers import MHA_CALLED, names, shares, sweep

# Of every kind: decoders, encoders, both, images, sounds, series; those that were once different
# (ALIGN, BridgeTower, NLLB-MoE, PaliGemma, Splinter); those that attend by code of their own.
FORTY = ["align", "aria", "bamba", "bart", "beit", "bert", "bridgetower", "clip", "csm",
    "deepseek_v3", "detr", "dinov2", "gemma2", "gemma3", "git", "gpt2", "gpt_oss", "granite",
    "hubert", "llama", "llava", "longt5", "marian", "mistral", "nllb_moe", "paligemma",
    "patchtst", "phi", "phi3", "qwen2", "qwen2_vl", "qwen3_moe", "roberta", "siglip", "splinter",
    "t5", "t5gemma", "vit", "wav2vec2", "whisper"]
REFUSED = {"git", "longt5"}


def test_the_denominator_is_what_asks_for_an_implementation():
    found = names()
    assert len(found) == len(set(found)) > 350
    assert set(FORTY) <= set(found)
    assert not {"bloom", "falcon", "xlnet"} & set(found)  # whose attention is their own


def test_models_are_the_same_or_refused_by_name(tmp_path):
    """In a process of its own: JAX's threads, which other tests start, do not survive a fork."""
    found, folder = tmp_path / "found.json", os.path.dirname(sweep_transformers.__file__)
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-W", "ignore", sweep_transformers.__file__, "--json",
                           str(found), *FORTY], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(found.read_text("utf-8"))}
    assert sorted(rows) == sorted(FORTY)
    wrong = {name: row for name, row in rows.items() if row["status"] in ("different", "crash")}
    assert not wrong
    for name in FORTY:
        assert rows[name]["status"] == ("refused" if name in REFUSED else "same"), rows[name]
        assert rows[name]["calls"] > 0 or name in REFUSED
        assert not any(word.startswith("as sdpa") for word in rows[name]["checks"].values())
    eager, called = shares(list(rows.values()))
    assert eager == 1
    assert called >= MHA_CALLED


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX's, if another test has imported it
def test_a_model_that_differs_or_dies_is_a_row(monkeypatch):
    def of_name(name):
        if name == "dies":
            raise SystemExit(3)
        return {"status": "same", "class": "Model", "calls": 1, "checks": {"forward": "same"}}

    monkeypatch.setattr(sweep_transformers, "row_of", of_name)
    rows = {row["name"]: row for row in sweep(["dies", "lives"])}
    assert rows["lives"]["status"] == "same"
    assert rows["dies"]["status"] == "crash"
    assert "ended with 3" in rows["dies"]["reason"]
    assert line(rows["lives"]) == "| `lives` | same | forward | `Model` |"


@pytest.mark.parametrize(("damage", "word"), [
    (lambda output: output * 1.001, "different: by"),
    (lambda output: output[..., :0], "error: ")])
def test_what_differs_is_found(damage, word, monkeypatch):
    monkeypatch.setattr(sweep_transformers, "count_calls", lambda: None)
    compat, checks = sweep_transformers.compat, sweep_transformers.checks
    compat.register()
    function = sweep_transformers.transformers.AttentionInterface()["mha"]

    def damaged(*arguments, **options):
        output, weights = function(*arguments, **options)
        return damage(output), weights

    cls = sweep_transformers.classes("llama")[0]
    pair = sweep_transformers.Pair(cls, sweep_transformers.small_config(cls.config_class))
    sweep_transformers.transformers.AttentionInterface.register("mha", damaged)
    try:
        found = checks(pair)
    finally:
        compat.register()
    assert found["forward"].startswith(word)
    assert found["gradients"].startswith(word)
