"""The entry points' tests on other versions of torch, one throw-away environment after the other; outside CI.

    python tests/torch_versions.py 2.8.0 2.9.1 2.13.0
    python tests/torch_versions.py 2.11.0 --index-url https://download.pytorch.org/whl/cpu

It prints a row of a table for each version. Environments are made in a temporary folder, and removed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = (
    "tests/distributed/test_entry_points.py",
    "tests/distributed/test_ddp_options.py",
    "tests/distributed/test_resume.py",
    "tests/sharded/test_hsdp.py",
    "tests/sharded/test_dcp.py",
    "tests/sharded/test_reduce_scatter.py",
    "tests/sharded/test_local_steps.py",
    "tests/sharded/test_lost_rank.py",
    "tests/sharded/test_captured_steps.py",
    "tests/sharded/test_gradient_views.py",
    "tests/sharded/test_late_gradients.py",
    "tests/sharded/test_shard_keys.py",
    "tests/distributed/test_optimizer.py",
    "tests/distributed/test_unused.py",
    "tests/local/test_processes.py",
    "tests/optim/test_adaptive_processes.py",
)
PACKAGES = ("numpy", "pytest", "pytest-timeout", "hypothesis", "typer", "rich", "pydantic<3", "scipy", "scikit-learn")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    isa = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", **os.environ}
    return subprocess.run([str(part) for part in command], cwd=ROOT, env=isa, capture_output=True, text=True)


def outcome(version: str, index: list[str]) -> str:
    """A row of the table: the version, and what became of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        for packages in ((f"torch=={version}", *index), (*PACKAGES, "-e", str(ROOT))):
            done = run(python, "-m", "pip", "install", "--quiet", *packages)
            if done.returncode:
                return f"| {version} | not installed: {done.stderr.strip().splitlines()[-1]} |"
        lines = []
        for test in TESTS:
            done = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", test)
            last = (done.stdout.strip().splitlines() or ["no output"])[-1]
            lines.append(f"{Path(test).stem}: {re.sub(r' in .*', '', last).strip('= ')}")
            failed = re.findall(r"^FAILED .*$", done.stdout, re.MULTILINE)
            print("\n".join(failed), file=sys.stderr)
        return f"| {version} | {'; '.join(lines)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--index-url", default="")
    chosen = parser.parse_args()
    index = ["--index-url", chosen.index_url] if chosen.index_url else []
    print("| torch | tests |\n|---|---|")
    for version in chosen.versions:
        print(outcome(version, index), flush=True)


if __name__ == "__main__":
    main()
