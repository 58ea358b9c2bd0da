"""Reads the compiled kernels: their hot loops must keep every sum in a register.

    python benchmarks/spills.py object.o ...

A hot loop is an innermost one in a straight line with at least 8 vector multiply-adds; tiles that
a mask makes rare jump in between, calls are of what is rare, and exponentials (which shift into the
exponent) have more constants than there are registers. It spills if it stores a vector on the
stack; the half of an xmm register is an address that found no other place.
"""

import re
import subprocess
import sys
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
STACK = re.compile(r"^-?(0x)?[0-9a-f]*\((%rsp|%rbp)[,)]")
ADDRESSES = ("vmovd", "vmovq", "vmovlps", "vmovhps")
FEWEST_MULTIPLY_ADDS = 8


def functions(path):
    """name -> [(address, mnemonic, operands)] of an object file."""
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(path)], check=True,
                          capture_output=True, text=True).stdout
    found, current = {}, None
    for line in text.splitlines():
        if header := FUNCTION.match(line):
            current = found.setdefault(header[1], [])
        elif current is not None and (instruction := INSTRUCTION.match(line)):
            current.append((int(instruction[1], 16), instruction[2], instruction[3]))
    return found


def innermost_loops(instructions):
    """Runs of instructions from the target of a backward jump to the jump, without another one."""
    at = {address: index for index, (address, _, _) in enumerate(instructions)}
    loops = []
    for index, (_, mnemonic, operands) in enumerate(instructions):
        if mnemonic.startswith("j") and (target := re.match(r"([0-9a-f]+)", operands)):
            begin = at.get(int(target[1], 16), index + 1)
            if begin <= index:
                loops.append((begin, index))
    return [(begin, end) for begin, end in loops
            if not any(begin <= other and last <= end and (other, last) != (begin, end)
                       for other, last in loops)]


def report(path):
    """Prints the hot loops of a file; the number of those that spill."""
    spilling = 0
    for name, instructions in functions(path).items():
        for begin, end in innermost_loops(instructions):
            loop = instructions[begin:end + 1]
            multiply_adds = sum(mnemonic.startswith("vfmadd") and mnemonic.endswith(("ps", "pd"))
                                for _, mnemonic, _ in loop)
            jumps = sum(mnemonic.startswith("j") for _, mnemonic, _ in loop)
            stack = [operands for _, mnemonic, operands in loop
                     if mnemonic.startswith("vmov") and mnemonic not in ADDRESSES
                     and STACK.search(operands.split(",", 1)[1])]
            exponentials = any(mnemonic.startswith("vpsll") for _, mnemonic, _ in loop)
            calls = any(mnemonic.startswith("call") for _, mnemonic, _ in loop)
            if multiply_adds < FEWEST_MULTIPLY_ADDS or jumps > 1 or exponentials or calls:
                continue
            spilling += bool(stack)
            print(f"{Path(path).name} {name}: {multiply_adds} multiply-adds in {len(loop)} "
                  f"instructions, {len(stack)} spills")
    return spilling


def main():
    spilling = sum(report(path) for path in sys.argv[1:])
    if spilling:
        sys.exit(f"{spilling} hot loops spill: a tile is too large for the registers")


if __name__ == "__main__":
    main()
