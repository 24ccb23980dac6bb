"""The course's text and batches, and the model that reads them."""

from __future__ import annotations

import errno
import os
import sysconfig
from math import log
from pathlib import Path

import pytest
import torch
from torch import nn

from minifsdp.course.ladder import data
from minifsdp.course.ladder.data import END_OF_TEXT, Corpus, batches, load_text, shard
from minifsdp.course.ladder.outline import count_elements, outline
from minifsdp.gpt import GPT, Block


@pytest.fixture(scope="module")
def library() -> Corpus:
    return load_text()


def text_file(folder: Path, text: bytes = bytes(range(256)) * 4) -> Path:
    path = folder / "some.txt"
    path.write_bytes(text)
    return path


# Text


def test_the_default_is_the_standard_librarys_source(library: Corpus) -> None:
    assert library.name.startswith("Python 3.")
    assert library.name.endswith("standard library")
    assert library.bytes == data.DEFAULT_BYTES
    assert library.tokens.dim() == 1
    assert int(library.tokens.max()) == END_OF_TEXT
    assert int(library.tokens.min()) >= 0
    marks = (library.tokens == END_OF_TEXT).nonzero().flatten().tolist()
    assert library.tokens.numel() == library.bytes + len(marks)
    first = Path(sysconfig.get_path("stdlib"), "__future__.py").read_bytes()
    assert bytes(library.tokens[: marks[0]].tolist()) == first, "whole files, in the order of their names"


def test_loading_twice_gives_the_same(library: Corpus) -> None:
    assert torch.equal(load_text().tokens, library.tokens)


def test_tests_and_installed_packages_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("b.py", "a/z.py", "a/test/x.py", "site-packages/x.py", "idlelib/x.py", "a/__pycache__/x.py", "note.txt")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.py").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    tokens = load_text().tokens.tolist()
    assert tokens == [*b"b.py", END_OF_TEXT, *b"a/z.py"]

    monkeypatch.setattr(data, "DEFAULT_BYTES", 6)
    assert load_text().tokens.tolist() == [*b"b.py", END_OF_TEXT, *b"a/"]


def test_a_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"no source text .* name a file"):
        load_text()


def test_any_file_is_text(tmp_path: Path) -> None:
    corpus = load_text(text_file(tmp_path))
    assert (corpus.name, corpus.bytes) == ("some.txt", 1024)
    assert corpus.tokens.tolist() == list(range(256)) * 4


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.txt: no such file; name a file"):
        load_text(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="is a directory: name one file"):
        load_text(tmp_path)
    with pytest.raises(ValueError, match=r"some\.txt is empty: name a file with text"):
        load_text(text_file(tmp_path, b""))
    with pytest.raises(ValueError, match="cannot be read"):
        load_text(text_file(tmp_path) / "below")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a regular file"):
        load_text(tmp_path / "pipe")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    path = text_file(tmp_path)
    monkeypatch.setattr(Path, "open", refuse)  # the mode bits would not keep root out
    with pytest.raises(ValueError, match=r"some\.txt cannot be read \(Permission denied\): name a file"):
        load_text(path)


# Batches


def test_targets_follow_tokens(library: Corpus) -> None:
    for tokens, targets in batches(library, batch=3, context=7, seed=0, steps=5):
        assert tokens.shape == targets.shape == (3, 7)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_batches_depend_on_the_seed_alone(library: Corpus) -> None:
    def drawn(seed: int) -> torch.Tensor:
        torch.rand(seed + 1)  # whatever else draws numbers
        return torch.stack([torch.stack(batch) for batch in batches(library, 4, 8, seed, steps=3)])

    first = drawn(0)
    assert first.shape == (3, 2, 4, 8)
    assert torch.equal(first, drawn(0))
    assert not torch.equal(first, drawn(1))
    assert not torch.equal(first[0], first[1])


def test_ranks_share_the_rows(library: Corpus) -> None:
    batch = next(batches(library, batch=12, context=4, seed=0, steps=1))
    for ranks in (1, 2, 3, 4):
        shards = [shard(batch, rank, ranks) for rank in range(ranks)]
        for whole, parts in zip(batch, zip(*shards, strict=True), strict=True):
            assert {part.shape[0] for part in parts} == {12 // ranks}
            assert torch.equal(torch.cat(parts), whole)
    with pytest.raises(ValueError, match="12 sequences cannot be shared equally by 5 ranks: choose a multiple"):
        shard(batch, 0, 5)


def test_the_shortest_text_is_one_batch(tmp_path: Path) -> None:
    corpus = load_text(text_file(tmp_path, b"abcdefgh"))
    seen = {bytes(row) for tokens, _ in batches(corpus, 2, 3, seed=0, steps=50) for row in tokens.tolist()}
    assert seen == {b"abc", b"bcd", b"cde", b"def", b"efg"}, "any place in the text"
    with pytest.raises(ValueError, match=r"some\.txt is shorter than one batch: 8 tokens, .* 3 \+ 1 take 12; give a"):
        batches(corpus, 3, 3, seed=0, steps=1)  # at once, before the first is drawn
    with pytest.raises(ValueError, match="both must be at least 1"):
        batches(corpus, 0, 3, seed=0, steps=1)


# The model


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_default_sizes_make_sharding_pad() -> None:
    with torch.device("meta"):
        model = GPT()
    blocks = [numel(module) for module in model.modules() if isinstance(module, Block)]
    root = numel(model) - sum(blocks)
    assert len(blocks) == 6
    assert numel(model) > 1_000_000
    for size in (blocks[0], root):
        assert all(size % n for n in (2, 3, 4))
    width = model.embed.embedding_dim
    assert blocks == [12 * width**2 + 13 * width] * 6
    assert model.embed.num_embeddings == 257
    assert width % model.blocks[0].heads == 0


def test_an_outline_has_the_model_s_shapes_and_draws_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device torch imports its compiler for `normal_`, which takes half a second."""
    sizes: dict[str, int] = {"width": 6, "context": 3, "heads": 2}
    model = GPT(layers=2, **sizes)
    monkeypatch.setattr(torch.Tensor, "normal_", lambda *_, **__: pytest.fail("numbers were drawn"))
    drawn = outline(layers=2, **sizes)
    assert [p.shape for p in drawn.parameters()] == [p.shape for p in model.parameters()]
    assert all(p.is_meta for p in drawn.parameters())
    assert count_elements(2, **sizes) == numel(model)
    assert count_elements(10**6, **sizes) - count_elements(10**6 - 1, **sizes) == numel(model.blocks[0])
    with pytest.raises(ValueError, match="cannot be divided into 5 heads"):
        outline(width=6, heads=5)


def test_tied_weights_are_one_parameter() -> None:
    with torch.device("meta"):
        apart, tied = GPT(), GPT(tied=True)
    assert tied.head.weight is tied.embed.weight
    assert numel(apart) - numel(tied) == apart.embed.weight.numel()


@pytest.mark.parametrize("tied", [False, True])
def test_an_untrained_model_is_undecided_and_learns(library: Corpus, tied: bool) -> None:
    torch.manual_seed(0)
    model = GPT(width=32, layers=2, context=16, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens, targets in batches(library, 8, 16, seed=0, steps=20):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(log(257), rel=0.15)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_a_token_sees_only_those_before_it() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=5, width=8, layers=1, context=6)
    hidden: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda head, args, out: hidden.append(out))
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    for last in (1, 2):
        tokens[0, -1] = last
        model(tokens, tokens)
    same = (hidden[0] == hidden[1]).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False]


def test_the_loss_is_the_mean_over_rows() -> None:
    """So the mean over ranks with equally many rows is the mean over the whole batch."""
    torch.manual_seed(0)
    model = GPT(vocabulary=11, width=6, layers=1, context=4)
    tokens, targets = torch.randint(11, (2, 4, 4)).unbind()
    halves = [model(*shard((tokens, targets), rank, 2)) for rank in range(2)]
    torch.testing.assert_close(torch.stack(halves).mean(), model(tokens, targets))


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="width 9 cannot be divided into 2 heads: choose a divisor of 9"):
        GPT(width=9, heads=2)
    for name in ("vocabulary", "width", "layers", "heads", "context"):
        with pytest.raises(ValueError, match=f"{name} = 0: a GPT needs at least 1"):
            GPT(**{name: 0})
    model = GPT(width=4, layers=1, context=3)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="sequences of 4 tokens in a model with context 3"):
        model(tokens, tokens)


@pytest.mark.parametrize(("width", "heads"), [(125, 5), (175, 7), (64, 8), (13, 1), (4, 4)])
def test_default_heads(width: int, heads: int) -> None:
    with torch.device("meta"):
        assert GPT(width=width, layers=1).blocks[0].heads == heads


def test_texts_of_one_size_have_checksums_of_their_own(tmp_path):
    for name, text in (("a", "text" * 100), ("b", "next" * 100), ("c", "text" * 100)):
        (tmp_path / name).write_text(text)
    sums = [load_text(tmp_path / name).checksum for name in "abc"]
    assert sums[0] == sums[2] != sums[1]
