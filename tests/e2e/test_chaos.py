"""scripts/chaos, for a short while: many streams, and processes that die one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "scripts" / "chaos"
SECONDS = 400  # until it counts as hanging; it takes a fraction of it


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        (["--minutes", "0.5", "--streams", "32", "--every", "2"], ["--device", "simulated"]),
        (["--minutes", "0.2", "--streams", "4", "--tokens", "24", "--every", "3"], []),
    ],
    ids=["simulated", "real"],
)
def test_chaos(model_dir: Path, options: list[str], flags: list[str]) -> None:
    # Patient: whatever else this machine has to do, nobody is missing for as long as is too long.
    command = [
        sys.executable,
        str(CHAOS),
        "--patient",
        *options,
        "--",
        "--model",
        str(model_dir),
        *flags,
    ]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stdout
    found = re.search(r"(\d+) requests, (\d+) deaths", run.stdout)
    assert found, run.stdout
    requests, deaths = map(int, found.groups())
    assert deaths > 0
    assert requests > 0
