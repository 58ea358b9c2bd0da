"""examples/llama.py: its text and the program, with small models."""

import re
import subprocess
import sys

import pytest
from example_programs import EXAMPLES, loaded
from small_llamas import CONFIGS, draw, write_folder, write_gguf

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("gguf")

llama, llama_files = loaded("llama", "llama_files")


def greedy(logits):
    return int(logits.argmax())


def model_of(path):
    return llama.Llama(llama.ModelFiles(path))


def text_of(path, tokenizer=None):
    return llama_files.Text(llama_files.ModelFiles(path), tokenizer)


SPECIAL = {"<|begin|>": 270, "<|end|>": 271}
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("i", "n")]


def vocabulary():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *("".join(merge) for merge in MERGES)]
    names += [f"<unused{at}>" for at in range(len(names), 270)]
    return {name: at for at, name in enumerate(names)} | SPECIAL


def bytes_merged():
    """A small tokenizer of the kind that GPT-2 has."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary(), MERGES))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


def metadata(**more):
    names = list(vocabulary())
    return {"model": "gpt2", "pre": "gpt-2", "tokens": names,
            "merges": [" ".join(merge) for merge in MERGES],
            "token_type": [3 if name in SPECIAL else 1 for name in names], "bos_token_id": 270,
            "eos_token_id": 271, "add_bos_token": True} | more


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = CONFIGS["llama"] | {"eos_token_id": 269}
    folder = write_folder(tmp_path_factory.mktemp("llama") / "model", config, draw(config),
                          eos_token_id=[269, 271])
    tokenizer = bytes_merged()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<|begin|>", "$A"], special_tokens=[("<|begin|>", 270)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_gguf(folder.parent / "model.gguf", config, draw(config), **metadata())
    return folder


TEXTS = ["the thing in there", "12 naïve 漢字, 🎉!\n\n  x", "a<|end|>b", "", "I'm 12345\t\r\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(model, text):
    """Each behind the last of its tokens, and none in parts."""
    of_folder = text_of(model)
    ids = of_folder.tokens(text)
    pieces = list(of_folder.pieces(ids))
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text.replace("<|end|>", "")
    for at in range(len(ids)):
        whole = of_folder.tokenizer.decode(ids[:at + 1])
        if "\ufffd" not in whole:
            assert "".join(pieces[:at + 1]) == whole
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_of_a_gguf(model, text):
    by_file, by_metadata = (text_of(path) for path in (
        model, model.parent / "model.gguf"))
    assert by_metadata.tokens(text) == by_file.tokens(text)
    assert by_metadata.tokens(text)[0] == 270
    assert list(by_metadata.pieces(by_file.tokens(text))) == list(
        by_file.pieces(by_file.tokens(text)))
    other = text_of(model.parent / "model.gguf", model / "tokenizer.json")
    assert other.tokens(text) == by_file.tokens(text)


@pytest.mark.parametrize(("cut", "words", "begins"), [
    ("qwen2", ["I", "'m", " in", " ", "1", "2", "3", "4", "!\n", " x"], False),
    ("llama-bpe", ["I", "'m", " in", " ", "123", "4", "!\n", " x"], True)])
def test_words_of_other_models(cut, words, begins):
    said = {f"tokenizer.ggml.{name}": value for name, value in metadata(pre=cut).items()
            if name != "add_bos_token"}
    tokenizer = llama_files.of_metadata(said)
    cuts = tokenizer.pre_tokenizer.pre_tokenize_str("I'm in 1234!\n x")
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in cuts] == words
    assert (tokenizer.encode("x").ids[0] == 270) == begins


def test_tokens_that_end_a_text(model):
    folder, file = (llama_files.ModelFiles(path) for path in (model, model.parent / "model.gguf"))
    assert folder.end_tokens() == {269, 271} and file.end_tokens() == {271}
    for said, wanted in (({}, set()), ({"eos_token_id": 3}, {3}), ({"eos_token_id": None}, set())):
        folder.config, folder.path = said, "nothing"
        assert folder.end_tokens() == wanted


# The program.

def program(*arguments, given=None):
    return subprocess.run([sys.executable, str(EXAMPLES / "llama.py"), *map(str, arguments)],
                          input=given, capture_output=True, text=True, encoding="utf-8")


def test_the_program(model):
    """Several prompts, from the command line and from standard input, a folder and a .gguf."""
    options = ("--tokens", 20, "--temperature", 0)
    runs = [program(model, "the thing", "é", *options, "--together", 1),
            program(model, *options, given="the thing\né\n"),
            program(model.parent / "model.gguf", "the thing", "é", *options, "--together", 1)]
    texts = []
    for run in runs:
        assert run.returncode == 0 and not run.stderr, run.stderr
        first, *rest = run.stdout.removesuffix("\n> \n").split("\n> ")
        assert first.startswith("llama, 2 layers, read in ")
        assert [part.split("\n")[0] for part in rest] == ["the thing", "é"]
        texts.append([part.rsplit("\n\nprompt: ", 1)[0] for part in rest])
        for part, count in zip(rest, (5, 3)):  # the thing: begin, the, Ġ, th, in, g
            figures = part.rsplit("\n\nprompt: ", 1)[1]
            assert f"{count + (count == 5)} tokens, " in figures.split(";")[0]
            assert "; generation: " in figures and figures.count(" a second") == 2
    assert texts[0] == texts[1] == texts[2]
    prompt = llama.Prompt(text_of(model).tokens("é"), 20, greedy)
    made = list(llama.generate(model_of(model), prompt, {269, 271}))
    assert texts[0][1] == "é\n" + "".join(text_of(model).pieces(made))


def shown(run):
    """{prompt: the text behind it}, and the lines that say how fast they were."""
    assert run.returncode == 0 and not run.stderr, run.stderr
    figures = re.compile(r"\n\n(prompts?: .*)\n\n?")
    parts = figures.sub("\n", run.stdout).split("\n> ")[1:]
    return ({prompt: text.rstrip("\n") for prompt, text in (part.split("\n", 1) for part in parts)},
            figures.findall(run.stdout))


def test_prompts_together(model):
    """What one by one gives, each in one piece, and how fast all were."""
    asked = ("the thing", "é", "12", "in")
    options = ("--tokens", 20, "--temperature", 1.5, "--seed", 3)
    (wanted, each), *others = (shown(program(model, *asked, *options, "--together", most))
                               for most in (1, 2, 8))
    assert sorted(wanted) == sorted(asked) and len({*wanted.values()}) == 4 == len(each)
    for found, figures in others:
        assert found == wanted
        assert len(figures) == 1
        assert figures[0].startswith("prompts: 4, of 13 tokens; generation with them: ")
        assert figures[0].endswith(" a second")


def test_draws_do_not_depend_on_other_prompts(model):
    """Neither on what they say nor on whether they fit; elsewhere in their row it has others."""
    def text(*prompts, most=8):
        return shown(program(model, *prompts, "--tokens", 25, "--temperature", 2, "--together",
                             most))[0]["the"]

    wanted = text("12", "the", "in")
    assert wanted == text("I'm in there", "the") == text("x" * 600, "the", "y")
    assert wanted == text("12", "the", most=1) != text("the", "in")


def test_seeds_and_templates(model):
    def text(*arguments):
        return program(model, *arguments, "--tokens", 30, "--temperature", 2).stdout.partition(
            "\n> ")[2].rpartition("\n\nprompt")[0]

    first, again, other = (text("the", "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other
    assert text("<|end|>the\n 12", "--seed", 1).removeprefix("<|end|>the\n 12\n") == text(
        "the", "--template", "<|end|>{}\\n 12", "--seed", 1).removeprefix("the\n")


def test_a_prompt_that_is_too_long(model):
    run = program(model, "x" * 600, "x" * 500, "--temperature", 0, "--together", 1)
    assert run.returncode == 0
    assert "got 601 tokens, wanted 1 to 511" in run.stdout
    assert "prompt: 501 tokens" in run.stdout and "generation: 10 tokens" in run.stdout
    run = program(model, "x" * 600, "x" * 500, "--temperature", 0)
    assert f"\n> {'x' * 600}\ngot 601 tokens, wanted 1 to 511\n\n> {'x' * 500}\n" in run.stdout
    assert "prompts: 1, of 501 tokens; generation with them: 11 tokens, " in run.stdout
    run = program(model, "x" * 600, "x" * 700)
    assert run.returncode == 0 and not run.stderr
    assert run.stdout.count(" tokens, wanted 1 to 511\n") == 2


def test_caches_that_do_not_fit(tmp_path, model):
    run = program(model, "x", "--cache", "q8_0")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "cannot be used: head_dim: got 16, wanted a multiple of 32 for q8_0" in run.stderr
    config = CONFIGS["llama"] | {"max_position_embeddings": 1 << 50}
    folder = write_folder(tmp_path / "model", config, draw(config))
    for prompts in (("x",), ("x", "y")):
        run = program(folder, *prompts, "--tokens", 1 << 49, "--tokenizer",
                      model / "tokenizer.json")
        assert run.returncode == 1 and "Traceback" not in run.stderr
        assert run.stderr.startswith("fewer --tokens, or fewer prompts --together, take less memor")


def test_progress_on_a_terminal(model, capsys, monkeypatch):
    """A line that is overwritten, and gone where a text is shown."""
    prompts = [llama.Prompt([5, 6, 7], count, greedy) for count in (1, 2, 3, 1, 1)]
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer)
        made = llama.generate_together(model_of(model), prompts, most=2)
        llama.show_together(text_of(model), prompts, made)
        said, shown = capsys.readouterr()
        assert said.count("> ") >= 5 and "\r" not in said
        lines = [line.rstrip() for line in shown.split("\r") if line]
        if is_terminal:
            assert lines[:4] == ["prompts: 0 of 5; tokens: 1", "", "prompts: 1 of 5; tokens: 1",
                                 "prompts: 1 of 5; tokens: 2"]
            assert lines[-2:] == ["prompts: 5 of 5; tokens: 8", ""]
        else:
            assert not lines


@pytest.mark.parametrize(("arguments", "status", "said"), [
    (("--help",), 0, ""), ((), 2, "model"), (("x", "--top-p", "0"), 2, "--top-p: got 0.0, wanted"),
    (("x", "--temperature", "nan"), 2, "--temperature: got nan, wanted at least 0"),
    (("x", "--tokens", "0"), 2, "--tokens: got 0, wanted at least 1"),
    (("x", "--together", "0"), 2, "--together: got 0, wanted at least 1"),
    (("x", "--template", "x"), 2, "--template: got 'x', wanted {} where"),
    (("x", "--quantize", "q2"), 2, "--quantize: invalid choice: 'q2'"),
    (("nothing",), 1, "nothing cannot be used: path: got 'nothing', which does not exist"),
    (("nothing.gguf",), 1, "nothing.gguf cannot be used: [Errno 2] No such file")])
def test_help_and_wrong_arguments(arguments, status, said):
    run = program(*arguments)
    assert run.returncode == status
    assert said in run.stderr and "Traceback" not in run.stderr
    if not status:
        for name in ("--quantize", "--cache", "--temperature", "--top-k", "--top-p", "--seed",
                     "--tokens", "--template", "--tokenizer", "--together"):
            assert name in run.stdout


@pytest.mark.parametrize(("more", "without", "said"), [
    ({"model_type": "mamba"}, None,
     "got a model of type 'mamba', wanted one of llama, mistral, qwen2, qwen3, gemma3_text"),
    ({"mlp_bias": True}, None, "mlp_bias: got a feed-forward network with biases, wanted none"),
    ({"hidden_act": "relu"}, None, "hidden_act: got 'relu', wanted one of silu, gelu_pytorch_tanh"),
    ({"rms_norm_eps": None}, None, "config: got none for 'rms_norm_eps', wanted a number"),
    ({"num_hidden_layers": 3}, None, "state: got what does not fit layout 'llama'"),
    ({}, "up_proj", "got no array model.layers.0.mlp.up_proj.weight, wanted a whole"),
    ({}, "embed", "got no array embed_tokens.weight, wanted a whole")])
def test_other_models(tmp_path, model, more, without, said):
    arrays = {name: array for name, array in draw(CONFIGS["llama"]).items()
              if without is None or without not in name}
    folder = write_folder(tmp_path / "model", CONFIGS["llama"] | more, arrays)
    run = program(folder, "x", "--tokenizer", model / "tokenizer.json")
    assert run.returncode == 1 and said in run.stderr and "Traceback" not in run.stderr


def test_a_gguf_of_another_model(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"] | {"model_type": "granite"}, {})
    run = program(path, "x")
    assert run.returncode == 1 and "got a model of type 'granite', wanted one of" in run.stderr


def test_missing_and_bad_files(tmp_path, model):
    folder = write_folder(tmp_path / "model", CONFIGS["llama"], draw(CONFIGS["llama"]))
    for run, path in ((program(folder, "x"), folder / "tokenizer.json"),
                      (program(folder, "x", "--tokenizer", "nothing"), "nothing")):
        assert run.returncode == 1 and "Traceback" not in run.stderr
        assert f"got no file {path}, wanted the model's tokenizer.json there, or by" in run.stderr
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is no tokenizer.json: " in program(folder, "x").stderr
    (folder / "config.json").unlink()
    run = program(folder, "x", "--tokenizer", model / "tokenizer.json")
    assert run.returncode == 1 and "got arrays without a config, wanted a folder with" in run.stderr
    (folder / "model.safetensors").unlink()
    run = program(folder, "x", "--tokenizer", model / "tokenizer.json")
    assert run.returncode == 1 and "Traceback" not in run.stderr


@pytest.mark.parametrize(("said", "kind"), [
    (metadata(model="llama"), "'llama', 'gpt-2'"), (metadata(pre="tekken"), "'gpt2', 'tekken'"),
    ({}, "None, 'gpt-2'")])
def test_a_gguf_without_a_tokenizer_of_that_kind(tmp_path, model, said, kind):
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"], draw(CONFIGS["llama"]), **said)
    run = program(path, "x")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert f"got a tokenizer of kind {kind} in the file, wanted 'gpt2' and" in run.stderr
    assert "give the model's tokenizer.json by --tokenizer FILE" in run.stderr
    run = program(path, "x", "--tokenizer", model / "tokenizer.json", "--tokens", 3)
    assert run.returncode == 0, run.stderr
