"""Training data: by default the source text of Python's standard library, which every learner has.

A token is a byte, 0 to 255; 256 marks the end of a text. Batches are drawn for the whole world, the same on every rank
and for every number of ranks, and each rank takes its rows: so N ranks see what one process would.
"""

from __future__ import annotations

import os
import platform
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minifsdp.batch import Batch as Batch
from minifsdp.batch import shard as shard
from minifsdp.batch import to_device as to_device
from minifsdp.losses import IGNORED

END_OF_TEXT = 256
DEFAULT_BYTES = 4 * 2**20  # of the standard library, in the order of its paths; the last file is cut

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


@dataclass(frozen=True)
class Corpus:
    """Text as tokens.

    Attributes:
        name: for messages and reports.
        tokens: [n], uint8 (one file) or int16 (several, with `END_OF_TEXT` between them).
        bytes: size of the text, without the marks.
    """

    name: str
    tokens: Tensor
    bytes: int

    @property
    def checksum(self) -> str:
        """CRC-32 of evenly spaced tokens: all of a short text, else at least 65,536."""
        spread = self.tokens[:: max(1, self.tokens.numel() // 2**16)].contiguous()
        return f"{zlib.crc32(spread.numpy().tobytes()):08x}"


def load_text(path: Path | None = None) -> Corpus:
    """The text of one file, or, without a path, of the running Python's standard library.

    A file is mapped into memory, not read, so that its size costs nothing until batches are drawn from it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a directory or a device, unreadable or empty; or this Python has no source text.
    """
    return _standard_library() if path is None else _file(Path(path))


def batches(corpus: Corpus, batch: int, context: int, seed: int, steps: int) -> Iterator[Batch]:
    """`steps` batches of sequences that begin anywhere in the text, the same for the same `seed`.

    Raises:
        ValueError: at once: the text is shorter than one batch, batch * (context + 1) tokens, or a size is below one.
    """
    if batch < 1 or context < 1:
        raise ValueError(f"a batch of {batch} sequences of {context} tokens: both must be at least 1")
    have, need = corpus.tokens.numel(), batch * (context + 1)
    if have < need:
        raise ValueError(
            f"{corpus.name} is shorter than one batch: {have:,} tokens, and {batch} sequences of {context} + 1 take "
            f"{need:,}; give a longer file, or a smaller batch or context"
        )
    generator = torch.Generator().manual_seed(seed)
    return (draw(corpus, batch, context, generator) for _ in range(steps))


def draw(corpus: Corpus, batch: int, context: int, generator: torch.Generator) -> Batch:
    """The next batch; the generator's state is the place in the data."""
    places = torch.randint(corpus.tokens.numel() - context, (batch, 1), generator=generator) + torch.arange(context)
    return corpus.tokens[places].long(), corpus.tokens[places + 1].long()


def up_to_line_ends(batch: Batch) -> Batch:
    """The same sequences, each counted up to the end of its first line only: some have no token that counts."""
    tokens, targets = batch
    is_over = (tokens == ord("\n")) | (tokens == END_OF_TEXT)
    return tokens, targets.masked_fill(is_over.cumsum(1) > 0, IGNORED)


def _file(path: Path) -> Corpus:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ValueError(f"{path} is {kind}: name one file of text")
        path.open("rb").close()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; name a file of text of any kind") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a file that you may read") from None
    if not status.st_size:
        raise ValueError(f"{path} is empty: name a file with text in it")
    tokens = torch.from_file(str(path), shared=False, size=status.st_size, dtype=torch.uint8)
    return Corpus(path.name, tokens, status.st_size)


def _standard_library() -> Corpus:
    """Converted at once: with several threads, a conversion of each file takes 15 times as long."""
    root = sysconfig.get_path("stdlib")
    read, ends = bytearray(), []
    left = DEFAULT_BYTES
    for path in _sources(root):
        text = path.read_bytes()[:left]
        if text:
            read += text + b"\0"
            ends.append(len(read) - 1)
            left -= len(text)
        if not left:
            break
    if not ends:
        raise ValueError(f"this Python has no source text of its standard library in {root}: name a file of text")
    tokens = torch.frombuffer(read, dtype=torch.uint8).to(torch.int16)
    tokens[ends] = END_OF_TEXT
    return Corpus(f"Python {platform.python_version()} standard library", tokens[:-1], DEFAULT_BYTES - left)


def _sources(root: str) -> Iterator[Path]:
    for folder, inside, files in os.walk(root):
        inside[:] = sorted(name for name in inside if name not in _LEFT_OUT)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
