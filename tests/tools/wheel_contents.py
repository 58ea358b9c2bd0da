"""What takes the bytes of a wheel: kernels by set and type, the rest of C by folder, Python by
folder. Each as it is packed: files as the wheel has them, objects of C by themselves, so that these
are shares of the extension rather than its bytes. Run by wheels.sh.

    python tests/tools/wheel_contents.py WHEEL FOLDER_OF_OBJECTS
"""

import re
import sys
import zipfile
import zlib
from collections import Counter
from pathlib import Path

from elftools.elf.elffile import ELFFile

ALLOCATED = 2  # SHF_ALLOC: a section that is there when the program runs


def packed_size(path):
    with path.open("rb") as file:
        sections = [section for section in ELFFile(file).iter_sections()
                    if section["sh_flags"] & ALLOCATED and section["sh_type"] != "SHT_NOBITS"]
        return len(zlib.compress(b"".join(section.data() for section in sections), 9))


def part_of_object(path, folder):
    """The group that an object is counted in."""
    kernels = re.fullmatch(r"kernels_(float\d+)_(\w+)", path.stem)
    if kernels:
        return "kernels, {1}, {0}".format(*kernels.groups())
    return "/".join(path.relative_to(folder).parts[:-1])


def part_of_file(name):
    folders = name.split("/")[:-1]
    return "Python, " + ("/".join(folders[:2]) or ".")


def main(wheel, folder):
    objects, files, extension = Counter(), Counter(), 0
    for path in Path(folder).rglob("*.o"):
        objects[part_of_object(path, Path(folder))] += packed_size(path)
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if "/_core." in info.filename and info.filename.endswith(".so"):
                extension += info.compress_size
            else:
                files[part_of_file(info.filename)] += info.compress_size
    total = extension + sum(files.values())
    print(f"{Path(wheel).name}: {total:,} bytes, {extension:,} of them the extension, made of")
    for part, size in objects.most_common():
        print(f"{size:12,}  {part}")
    print("and of Python")
    for part, size in files.most_common():
        print(f"{size:12,}  {part}")


if __name__ == "__main__":
    main(*sys.argv[1:])
