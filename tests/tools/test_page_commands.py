"""Every command and every program on every page runs as written, but for what a comment before it says it needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

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
    assert (ladder / picture).read_bytes() == (ROOT / "docs" / "images" / picture).read_bytes()


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ladder")
    command = [Path(sys.executable).with_name("minifsdp"), "ladder", "--ranks", "4", "--steps", "1", "--device", "cpu"]
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
