"""Models of the sizes in the FSDP paper's evaluation (arXiv 2304.11277, section 5); they are not trained to learn.

Each returns its loss, as minifsdp's GPT does. Every `Block` or `Bottleneck` becomes an FSDP unit. Dropout, most
biases, T5's position biases and DeepViT's mixing of heads are left out. Attention is one kernel and keeps no scores in
memory.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Queries from one sequence, keys and values from another; `inner` is heads * head size."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
        """[batch, context, width] -> the same shape."""
        q, k, v = (
            project(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, source in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended


class Block(nn.Module):
    """A transformer block: self-attention, cross-attention if it `crosses`, and a feed-forward network.

    Args:
        width: size of the residual stream.
        heads: number of attention heads.
        inner: heads * head size; by default `width`.
        hidden: hidden size of the feed-forward network; by default 4 * `width`.
        causal: mask self-attention to earlier positions.
        crosses: attend to an encoder's output as well.
        recomputes: keep only the input for backward, and rerun forward there (activation checkpointing).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        inner: int | None = None,
        hidden: int | None = None,
        *,
        causal: bool = False,
        crosses: bool = False,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        inner, hidden = inner or width, hidden or 4 * width
        self.causal, self.recomputes = causal, recomputes
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, inner)
        if crosses:
            self.norm_cross, self.cross = nn.LayerNorm(width), Attention(width, heads, inner)
        self.crosses = crosses
        self.norm_feed = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """[batch, context, width] -> the same shape; `memory` is the encoder's output."""
        if self.recomputes:
            again: Tensor = checkpoint(self._compute, x, memory, use_reentrant=False, preserve_rng_state=False)
            return again
        return self._compute(x, memory)

    def _compute(self, x: Tensor, memory: Tensor | None) -> Tensor:
        normal = self.norm(x)
        x = x + self.attention(normal, normal, self.causal)
        if self.crosses:
            x = x + self.cross(self.norm_cross(x), memory, False)
        change: Tensor = self.down(F.gelu(self.up(self.norm_feed(x))))
        return x + change


class Decoder(nn.Module):
    """A GPT: `layers` blocks between an embedding and a head."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True, recomputes=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: [batch, context], int64 -> the mean loss, a scalar."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class EncoderDecoder(nn.Module):
    """A T5: `layers` encoder blocks, and as many decoder blocks that attend to the encoder's output."""

    def __init__(self, layers: int, width: int, heads: int, inner: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder, self.decoder = (
            nn.ModuleList(Block(width, heads, inner, hidden, causal=last, crosses=last) for _ in range(layers))
            for last in (False, True)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: [batch, context], int64 -> the mean loss, a scalar."""
        memory, x = self.embed(tokens), self.embed(targets)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class VisionTransformer(nn.Module):
    """Transformer blocks over the patches of an image."""

    def __init__(self, layers: int, width: int, heads: int, patch: int, image: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(nn.Embedding((image // patch) ** 2, width).weight)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes, bias=False)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images: [batch, 3, image, image]; labels: [batch], int64 -> the mean loss, a scalar."""
        x = self.embed(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class Bottleneck(nn.Module):
    """RegNet's Y block: convolutions 1 x 1, 3 x 3 in groups, 1 x 1, with squeeze-and-excitation in between."""

    def __init__(self, width_in: int, width: int, group: int, stride: int) -> None:
        super().__init__()
        squeezed = width_in // 4
        self.reduce, self.norm1 = nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.grouped = nn.Conv2d(width, width, 3, stride, 1, groups=width // group, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.squeeze, self.excite = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)
        self.expand, self.norm3 = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)
        changes = stride > 1 or width_in != width
        self.skip = nn.Conv2d(width_in, width, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width_in, height, height] -> [batch, width, height / stride, height / stride]."""
        y = F.relu(self.norm1(self.reduce(x)))
        y = F.relu(self.norm2(self.grouped(y)))
        weight = F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = y * self.excite(weight).sigmoid()
        return F.relu(self.norm3(self.expand(y)) + self.skip(x))


class RegNet(nn.Module):
    """Stages of Y blocks, each with its own width; the first block of a stage halves the image's height and width."""

    def __init__(self, depths: tuple[int, ...], widths: tuple[int, ...], group: int, stem: int, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem)
        blocks, width_in = [], stem
        for depth, width in zip(depths, widths, strict=True):
            for place in range(depth):
                blocks.append(Bottleneck(width_in, width, group, stride=1 if place else 2))
                width_in = width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width_in, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images: [batch, 3, image, image]; labels: [batch], int64 -> the mean loss, a scalar."""
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)
