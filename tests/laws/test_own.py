"""``--own`` runs the laws of the file that the environment names, and no others."""

import os
import subprocess
import sys
from pathlib import Path

from gradwire_lab.cli.new import file_text

ROOT = Path(__file__).parent.parent.parent


def collected(imported: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pytest", "tests/laws/test_codec_laws.py", "--own", "--collect-only", "-q"]
    environment = {**os.environ, "GRADWIRE_IMPORT": imported}
    return subprocess.run([*words, "-p", "no:cacheprovider"], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_only_laws_of_the_imported_file_run(tmp_path: Path) -> None:
    path = tmp_path / "tern.py"
    path.write_text(file_text("codec", "tern"))
    done = collected(str(path))
    specs = [line.partition("[")[2] for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0 and "tern]" in specs and "hadamard | tern]" in specs, done.stdout
    assert not [spec for spec in specs if "terngrad" in spec and "tern]" not in spec]


def test_without_a_file_there_is_nothing_to_run() -> None:
    done = collected("")
    assert done.returncode != 0 and "GRADWIRE_IMPORT=FILE.py" in done.stderr + done.stdout
