"""The peers' own test files, run with our classes in the place of theirs.

A file is read where its package or the package's sdist has it, and never copied. What it cannot ask
of ours is listed with the reason; a test in such a list must fail, or it would be left out for
nothing, and must exist.
"""

import contextlib
import os
import re
import subprocess
import sys
import tarfile
import types
import unittest
from importlib.metadata import version
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mha-tests")


class Names:
    """A module of the peer's, some of its names ours."""

    def __init__(self, module, **ours):
        self._module = module
        vars(self).update(ours)

    def __getattr__(self, name):
        return getattr(self._module, name)


class AnyWords:
    """Errors of ours are ValueError and TypeError, in words of ours; so are warnings."""

    def assertRaisesRegex(  # noqa: N802
            self, error, pattern, *arguments, **options):
        assert issubclass(ValueError, error), error
        return self.assertRaises(  # noqa: PT027
            (ValueError, TypeError), *arguments, **options)

    def assertWarnsRegex(  # noqa: N802
            self, category, pattern, *arguments, **options):
        return self.assertWarns(category, *arguments, **options)


def cases(source, path, ours, *mixins):
    """{"Class.test": a case to run} of a test file's text, in which these names are ours, and the
    methods of the mixins."""
    module = types.ModuleType(Path(path).stem)
    exec(compile(source, path, "exec"), vars(module))
    missing = ours.keys() - vars(module).keys()
    assert not missing, f"{path} does not have {missing}"
    vars(module).update(ours)
    found = {}
    for name, thing in list(vars(module).items()):
        if isinstance(thing, type) and issubclass(thing, unittest.TestCase) and (
                thing.__module__ == module.__name__):
            own = type(name, (*mixins, AnyWords, thing), {"__module__": module.__name__})
            for test in unittest.defaultTestLoader.getTestCaseNames(own):
                found[f"{name}.{test}"] = own(test)
    return found


def run(case):
    """Run one; one that skips itself is to be left out, with the reason."""
    result = unittest.TestResult()
    case.run(result)
    assert not result.skipped, result.skipped[0][1]
    problems = [text for _, text in [*result.failures, *result.errors]]
    assert result.testsRun == 1 and not problems, problems[0] if problems else "it did not run"


def reason_of(left_out, name):
    """Why a test is left out: the list has its name, or the beginning of those of its variants."""
    return next((reason for beginnings, reason in left_out.items()
                 for beginning in beginnings.split()
                 if re.fullmatch(rf"{re.escape(beginning)}(\d+|_.*|)", name)), None)


def parameters(found, left_out):
    """(those that run, those that are left out) as pytest.param's."""
    run_here = [pytest.param(case, id=name) for name, case in found.items()
                if reason_of(left_out, name) is None]
    elsewhere = [pytest.param(case, id=name) for name, case in found.items()
                 if reason_of(left_out, name) is not None]
    return run_here, elsewhere


def stale(found, left_out):
    """The names in the list that no test has any more."""
    return [name for names in left_out for name in names.split()
            if not any(reason_of({name: ""}, test) is not None for test in found)]


def assert_fails(case):
    with pytest.raises(AssertionError):
        run(case)


def of_sdist(package, *paths):
    """The texts of these files in the sdist of the installed version, which pip downloads once; a
    skip of the module where it cannot."""
    installed = version(package)
    archive = CACHE / f"{package}-{installed}.tar.gz"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
             "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--dest", CACHE,
             f"{package}=={installed}"], capture_output=True, text=True)
        if not archive.exists():
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            pytest.skip(f"{package}'s sdist cannot be had: {reason}", allow_module_level=True)
    with tarfile.open(archive) as opened:
        texts = []
        for path in paths:
            with contextlib.closing(
                    opened.extractfile(f"{package}-{installed}/{path}")) as file:
                texts.append(file.read().decode())
    return texts
