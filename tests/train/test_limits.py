"""Limits of the operating system: what a process may open, and how long a file may be."""

import subprocess
import sys

import pytest

from training_fixtures import DIGITS

WORDS = [word for override in (*DIGITS, "train.epochs=1") for word in ("--set", override)]


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limits")
@pytest.mark.parametrize("files", [14, 16, 20])
def test_ranks_that_could_open_too_few_files_are_refused(tmp_path, files):
    """The command ended in a traceback of gloo, of the store, or of Python's fork server."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n"
    code += "from gradwire_lab.command import run; run()"
    words = [sys.executable, "-c", code, "train", "digits", "--workers", "2", "--folder", str(tmp_path / "run"), *WORDS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert f"may open {files} files" in done.stderr and "ulimit -n" in done.stderr
