"""Every command and every program on every page runs as written, but for what a comment before it says it needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image, ImageSequence

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "labs" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:^ *<!-- needs ([\w ]+) -->\n)?^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
YOURS = """
import torch
from minifsdp.gpt import GPT, Block
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = GPT(layers=2, width=16)
"""  # what the page calls "your model"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Code(NamedTuple):
    """A fenced block: the line it begins on, and what it holds."""

    page: Path
    line: int
    needs: str
    language: str
    text: str


def blocks() -> list[Code]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start(3)].count("\n") + 1
            found.append(Code(page, line, match[1] or "", match[3], textwrap.dedent(match[4])))
    return found


def at(code: Code) -> str:
    return f"{code.page.relative_to(ROOT)}:{code.line}"


RUN = [code for code in blocks() if not code.needs]


@pytest.mark.parametrize("code", [code for code in RUN if code.language == "bash"], ids=at)
def test_commands(code: Code, tmp_path: Path) -> None:
    """In an empty folder. This suite is itself what `make` runs, so of it only the target has to be there."""
    shutil.copy(ROOT / "README.md", tmp_path)
    lines = ["set -e"]
    for line in code.text.splitlines():
        if line.startswith("make "):
            lines.append(f"make -n -C {ROOT} {line.removeprefix('make ')}")
        elif line.startswith("jupyter lab"):  # serves until it is stopped: tests/labs/test_batch.py
            lines.append("jupyter lab --version")
        elif not line.startswith("source .venv"):
            lines.append(line)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = os.environ | {"PATH": path, "MINIFSDP_DEVICE": "cpu"}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [code for code in RUN if code.language == "python"], ids=at)
def test_programs(code: Code, tmp_path: Path) -> None:
    prelude = YOURS if "your model" in code.text else ""
    (tmp_path / "program.py").write_text(prelude + code.text)
    environ = os.environ | {"MINIFSDP_DEVICE": "cpu"}
    command = [sys.executable, "-W", "error::DeprecationWarning", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("picture", ["memory.gif", "memory.png"])
def test_pictures_are_what_the_ladder_draws_today(picture: str, ladder: Path) -> None:
    """But for a few pixels: gloo's thread may drop a message a moment later, when a buffer has been freed meanwhile."""
    drawn, shown = frames(ladder / picture), frames(ROOT / "docs" / "images" / picture)
    assert len(drawn) == len(shown)
    for one, other in zip(drawn, shown, strict=True):
        assert one.shape == other.shape
        assert np.mean((one != other).any(axis=-1)) < 1e-4


def test_pages_have_the_peaks_of_today(ladder: Path) -> None:
    record = json.loads((ladder / "ladder.json").read_text())
    peaks = {rung["name"]: max(rank["peak"] for rank in rung["bytes"]) / 2**20 for rung in record["rungs"]}
    most, least = (extreme(peaks, key=lambda name: peaks[name]) for extreme in (max, min))
    words = f"from {peaks[most]:.1f} MiB with {most} to {peaks[least]:.1f} MiB with {least}]"
    assert words in (ROOT / "README.md").read_text()
    said = re.findall(r"([\d.]+)\sMiB\swith\s`([\w-]+)`", (ROOT / "docs" / "code.md").read_text())
    assert [(f"{peaks[name]:.1f}", name) for _, name in said] == said
    assert len(said) == 6


def frames(picture: Path) -> list[np.ndarray]:
    """Colours of all pixels of a picture's frames."""
    with Image.open(picture) as image:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ladder")
    command = [Path(sys.executable).with_name("minifsdp"), "ladder", "--axis", "all", "--steps", "1", "--device", "cpu"]
    subprocess.run([*command, "--out", out], check=True, capture_output=True)
    return out


def test_all_kinds_are_known() -> None:
    """What is neither run nor needs something is output, or a file's content."""
    assert {code.language for code in RUN} <= {"bash", "python", "text", "toml"}
    assert {code.needs for code in blocks()} <= {
        *(
            "",
            "a GPU",
            "GPUs",
            "several nodes",
            "Slurm",
            "Docker",
            "a record of a GPU",
            "its imports",
            "the extra launchers",
        )
    }
    assert len(RUN) > 10
