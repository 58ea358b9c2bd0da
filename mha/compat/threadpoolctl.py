"""mha's threads among those that threadpoolctl shows and limits.

    import mha.compat.threadpoolctl
    threadpoolctl.threadpool_info()             # has an entry of mha
    with threadpoolctl.threadpool_limits(1):    # limits mha too; user_api="mha" mha alone
        ...

Importing this registers it, once. The limit is the process's, that of `mha.set_num_threads`; within
`with mha.threads(n)` calls use n all the same. Needs the package threadpoolctl, 3.3 or later.
"""

from __future__ import annotations

try:
    import threadpoolctl
except ImportError as error:
    raise ImportError("mha.compat.threadpoolctl needs threadpoolctl: pip install threadpoolctl"
                      ) from error

from mha._base.runtime import instruction_set
from mha._version import __version__

__all__ = ["MhaController"]


class MhaController(threadpoolctl.LibController):
    """Finds mha's extension among the loaded libraries by its file's name and functions.

    Source: threadpoolctl 3.3, "Add support for other libraries".
    """

    user_api = "mha"
    internal_api = "mha"
    filename_prefixes = ("_core",)
    check_symbols = ("mha_extension_get_num_threads", "mha_extension_set_num_threads")

    def get_num_threads(self) -> int | None:
        found = self._get_symbol("mha_extension_get_num_threads")
        return None if found is None else int(found())

    def set_num_threads(self, num_threads: int) -> None:
        change = self._get_symbol("mha_extension_set_num_threads")
        if change is not None:
            change(min(max(1, num_threads), 2**31 - 1))  # a C int

    def get_version(self) -> str:
        return __version__

    def set_additional_attributes(self) -> None:
        self.architecture = instruction_set()


threadpoolctl.register(MhaController)
