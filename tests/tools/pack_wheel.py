"""A wheel's files compressed by zopfli, to 0.97 of what zlib makes of them; wheels.sh starts it.

    python tests/tools/pack_wheel.py WHEEL
"""

import sys
import zipfile
from pathlib import Path

from zopfli import zlib


class Compressor:
    """What zipfile asks of zlib.compressobj."""

    def __init__(self, *_):
        self.data = b""

    def compress(self, data):
        self.data += data
        return b""

    def flush(self):
        return zlib.compress(self.data, numiterations=5)[2:-4]  # without zlib's header and sum


def main(wheel):
    packed = wheel.with_suffix(".packed")
    assert zipfile._get_compressor  # private: it takes no other compressor than its own otherwise
    zipfile._get_compressor = Compressor
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(packed, "w") as new:
        for member in old.infolist():
            new.writestr(member, old.read(member))
    packed.replace(wheel)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
