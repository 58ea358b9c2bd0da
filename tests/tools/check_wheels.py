"""What can be seen of wheels without running them; tests/tools/wheels.sh starts it. Prints their
sizes.

    python tests/tools/check_wheels.py WHEEL ...
    python tests/tools/check_wheels.py --audit WHEEL FILE     FILE: what `auditwheel show --json`
    printed
"""

import io
import json
import re
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from macholib.MachO import MachO
from macholib.SymbolTable import SymbolTable

LARGEST = 1_500_000  # bytes
SETS = {"x86_64": {b"baseline", b"avx2", b"avx512"}, "aarch64": {b"baseline", b"neon"}}
OF_LINUX = {"x86_64": {b"amx"}}
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-aarch64.so.1",  # glibc
             "libc.musl-x86_64.so.1", "libc.musl-aarch64.so.1",
             "/usr/lib/libSystem.B.dylib"}
MACH_O_MACHINES = {0x01000007: "x86_64", 0x0100000c: "aarch64"}
SHOWN = {"PyInit__core", "mha_extension_get_num_threads", "mha_extension_set_num_threads"}
OF_THE_LINKER = {"__dso_handle", "_mh_dylib_header", "_init", "_fini"}
ANY_LIBRARY = (0, 0xfe)  # what macOS looks for everywhere: as zig's linker writes it, and Apple's


def look_at_elf(data):
    """(machine, libraries that it loads, names that it shows, names that it looks for)."""
    file = ELFFile(io.BytesIO(data))
    machine = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}[file["e_machine"]]
    tags = list(file.get_section_by_name(".dynamic").iter_tags())
    assert not [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH", "DT_TEXTREL")]
    needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    symbols = [symbol for symbol in file.get_section_by_name(".dynsym").iter_symbols()
               if symbol.name and symbol["st_info"]["bind"] != "STB_LOCAL"]
    shown = {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"}
    return machine, needed, shown, {symbol.name for symbol in symbols} - shown


def look_at_mach_o(path):
    """The same; of what it looks for only what no library of its own is said to have."""
    [header] = MachO(str(path)).headers
    machine = MACH_O_MACHINES[header.header.cputype]
    needed = {name for _, _, name in header.walkRelocatables()}
    table = SymbolTable(MachO(str(path)))
    shown = {name.decode()[1:] for _, name in table.extdefsyms}
    sought = {name.decode()[1:] for symbol, name in table.undefsyms
              if symbol.n_desc >> 8 & 0xff in ANY_LIBRARY}
    return machine, needed, shown, sought


def check(wheel, folder):
    size = wheel.stat().st_size
    platform = wheel.stem.split("-")[-1]
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if re.fullmatch(r"mha/_core\..*\.so", name)]
        path = Path(files.extract(name, folder))
    data = path.read_bytes()
    look = look_at_mach_o(path) if platform.startswith("macosx") else look_at_elf(data)
    machine, needed, shown, sought = look
    wanted = platform.replace("arm64", "aarch64")
    assert wanted.endswith(machine), (platform, machine)
    assert needed <= LIBRARIES, needed
    assert shown - OF_THE_LINKER == SHOWN, shown
    of_python = {name for name in sought if name.startswith(("Py", "_Py"))}
    assert of_python, "nothing of Python's"
    if platform.startswith("macosx"):
        assert sought == of_python, sought - of_python
    sets = SETS[machine] | (OF_LINUX.get(machine, set()) if "linux" in platform else set())
    missing = {name for name in sets if b"\0" + name + b"\0" not in data}
    assert not missing, f"kernels that are not there: {missing}"
    print(f"{wheel.name}: {size:,} bytes, extension {len(data):,}")
    assert size < LARGEST, f"{size:,} bytes, wanted less than {LARGEST:,}"


def check_audit(wheel, audit):
    """The libraries of the system that it needs are those of its name, or older ones."""
    family, version, machine = re.search(
        r"-((?:many|musl)linux)_(\d+_\d+)_(\w+)\.whl", wheel.name).groups()
    found = audit["overall_tag"]
    runs_on = re.fullmatch(rf"{family}_(\d+)_(\d+)_{machine}", found)
    assert runs_on, f"{wheel.name} is {found}"
    assert tuple(map(int, runs_on.groups())) <= tuple(map(int, version.split("_"))), found
    assert not audit["unsupported_isa"] and not audit["external_libs"], audit
    print(f"{wheel.name}: {found} or newer")


if __name__ == "__main__":
    import tempfile

    if sys.argv[1] == "--audit":
        check_audit(Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
    else:
        for argument in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                check(Path(argument), folder)
