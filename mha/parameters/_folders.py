"""Where a path leads to: a file of arrays, the index of several, or the folder of a model; and the
config that a path stands for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from mha._base.arguments import printable
from mha.parameters._files import Arrays, Npz, Safetensors
from mha.parameters._gguf import Gguf
from mha.parameters._regular_files import (
    CONVERT,
    each_name_once,
    open_regular,
    read_json,
    wrong,
)

KINDS: dict[str, Callable[[str], Arrays]] = {".safetensors": Safetensors, ".npz": Npz,
                                             ".gguf": Gguf}
INDEX = ".index.json"
OF_TORCH = (".bin", ".pt", ".pth", ".ckpt")
FIRST = "model.safetensors"  # of a folder, whatever else is there, as transformers does
CONFIGS = ("config.json", "params.json")  # the second of Meta and Mistral AI


class Sharded(Arrays):
    """The arrays of several .safetensors files, by the index that says where each is."""

    _names: Mapping[str, Arrays]

    def __init__(self, path: str) -> None:
        super().__init__(path)
        files = read_json(path, each_name_once).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise wrong(path, "no weight_map of names and files", "the index of a model's shards")
        folder = os.path.dirname(path)
        shards = {file: _shard(path, folder, file) for file in sorted(set(files.values()))}
        self._names = {name: shards[file] for name, file in files.items()}
        for name, file in files.items():
            if name not in shards[file]:
                raise wrong(path, f"{name} in {file}, which has no such array",
                            "shards that belong to the index")

    def _read(self, name: str, where: Arrays) -> Any:
        return where[name]


def _shard(index: str, folder: str, file: str) -> Arrays:
    """A file beside the index: it may name no other place."""
    if os.path.basename(file) != file or "\\" in file or not file.endswith(".safetensors"):
        torch = f"; to convert: {CONVERT}" * file.endswith(OF_TORCH)
        raise wrong(index, f"the shard {file!r}", f".safetensors files beside the index{torch}")
    return Safetensors(os.path.join(folder, file))


def opened(path: str | os.PathLike[str]) -> Arrays:
    """`mha.parameters.open`."""
    name = _as_text(path, "path")
    if os.path.isdir(name):
        arrays = _opened_file(os.path.join(name, _file_in(name)))
        config = _config_in(name)
        arrays.of_folder = None if config is None else read_json(config)
        return arrays
    return _opened_file(name)


def _opened_file(name: str) -> Arrays:
    lower = name.lower()
    if lower.endswith(".safetensors" + INDEX):
        return Sharded(name)
    kind = os.path.splitext(lower.removesuffix(INDEX))[1]
    shown = printable(name)
    if kind in OF_TORCH:
        raise ValueError(f"path: got {shown!r}, a pickle of PyTorch's, which may run any code when"
                         f" it is read, wanted .safetensors or .npz; to convert it: {CONVERT}; a"
                         " model of transformers: model.save_pretrained(folder)")
    if kind not in KINDS:
        missing = "" if os.path.exists(name) else ", which does not exist"
        raise ValueError(f"path: got {shown!r}{missing}, wanted a folder, or a name that ends with"
                         f" {', '.join(KINDS)} or .safetensors{INDEX}")
    with open_regular(name):  # the system's own error, where it may not be read
        pass
    return KINDS[kind](name)


def _file_in(folder: str) -> str:
    """Of a model's folder the file of its arrays, or their index."""
    names = sorted(os.listdir(folder))
    if FIRST in names:
        return FIRST
    for ending in (".safetensors" + INDEX, ".safetensors"):
        found = [name for name in names if name.endswith(ending)]
        if len(found) == 1:
            return found[0]
        if found:
            raise wrong(folder, f"a folder with {', '.join(found[:12])}", "the path of one of them")
    of_torch = next((name for name in names if name.endswith(OF_TORCH)), None)
    if of_torch is not None:
        raise wrong(folder, f"a folder with {of_torch} and no .safetensors",
                    f"the same as .safetensors; to convert it: {CONVERT}")
    raise wrong(folder, "a folder without .safetensors", "the folder of a model")


def config_at(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The config in a file, or in the folder of a model."""
    name = _as_text(path, "config")
    if not os.path.isdir(name):
        return read_json(name)
    found = _config_in(name)
    if found is None:
        raise wrong(name, f"a folder without {' or '.join(CONFIGS)}", "the folder of a model")
    return read_json(found)


def _config_in(folder: str) -> str | None:
    paths = (os.path.join(folder, name) for name in CONFIGS)
    return next((path for path in paths if os.path.lexists(path)), None)


def _as_text(path: Any, argument: str) -> str:
    name = os.fspath(path) if hasattr(path, "__fspath__") else path
    if not isinstance(name, str):
        raise TypeError(f"{argument}: got {type(name).__name__}, wanted text or a path")
    return name
