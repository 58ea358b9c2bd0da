"""How many random configurations each adapter is compared with its framework on."""

import os

# 20 for every change, 200 at night (.ci/nightly).
COUNT = int(os.environ.get("MHA_CONFIGURATIONS", "20"))
