"""The model that the course trains: a small GPT on bytes.

Its default sizes are odd on purpose: neither a block's nor the root's number of elements is divisible by 2, 3 or 4, so
sharding has to pad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from minifsdp.context_parallel.cut import SequencePart
from minifsdp.losses import Loss, cross_entropy

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of q, k and v, each [batch, heads, tokens, width / heads], the same shape; what lies between `qkv` and `out`."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token attends to itself and to those before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Attention, then a feed-forward network, each pre-normalized and residual: the unit of wrapping policies.

    Holds 12 * width² + 13 * width elements.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention: Attention = causal_attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, context, width] -> the same shape."""
        x = x + self.attend(self.norm1(x))
        change: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + change

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention, [batch, context, width] -> the same shape."""
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [batch, context, 3, heads, width / heads]
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, width / heads]
        mixed = self.attention(q, k, v)
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended


class GPT(nn.Module):
    """A decoder-only transformer that ends in its loss (GPT-2's arrangement, with learned positions).

    Args:
        vocabulary: number of tokens: by default the 256 bytes and an end-of-text mark.
        width: size of the residual stream.
        layers: number of blocks.
        heads: attention heads per block, a divisor of `width`; by default the largest up to 8.
        context: the longest sequence, in tokens.
        tied: whether the head uses the embedding's weight.

    Attributes:
        part: which tokens of each sequence it is given; all, without context parallelism.

    Raises:
        ValueError: a size is below one, or `heads` does not divide `width`.
    """

    def __init__(
        self,
        vocabulary: int = 257,
        width: int = 175,
        layers: int = 6,
        heads: int | None = None,
        context: int = 24,
        tied: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "width": width, "layers": layers, "heads": heads, "context": context}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} = {size}: a GPT needs at least 1")
        heads = heads or usual_heads(width)
        if width % heads:
            raise ValueError(f"width {width} cannot be divided into {heads} heads: choose a divisor of {width}")

        self.part = SequencePart()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=0.02)  # small, so that even a tied head starts near uniform
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor, loss: Loss = cross_entropy) -> Tensor:
        """The loss of predicting `targets` from `tokens`.

        Args:
            tokens: [batch, context] int64; may be shorter than the model's context.
            targets: [batch, context] int64, the token that follows each of `tokens`; `IGNORED` where none counts.
            loss: of logits and targets; by default the mean cross-entropy of these tokens (losses.py has others).

        Returns:
            A scalar in nats per token, in float32 or the parameters' wider dtype.

        Raises:
            ValueError: the sequences are longer than the model's context.
        """
        x = embedded(tokens, self.embed, self.position, self.part)
        for block in self.blocks:
            x = block(x)
        return loss(self.head(self.norm(x)), targets)


def usual_heads(width: int) -> int:
    """The most up to eight that the width allows."""
    return max(heads for heads in range(1, 9) if width % heads == 0)


class GPTStage(nn.Module):
    """Consecutive blocks of a GPT, under their names in the whole model.

    Args:
        model: whole, perhaps on "meta".
        blocks: numbers.
        is_first: it also embeds the tokens.
        is_last: it also has the head.
    """

    def __init__(self, model: GPT, blocks: Sequence[int], is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last, self.part = is_first, is_last, model.part
        if is_first:
            self.embed, self.position = model.embed, model.position
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        if is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, s] in the first stage, else activations [b, s, h] -> activations; in the last logits [b, s, V].

        Raises:
            ValueError: the sequences are longer than the model's context.
        """
        if self.is_first:
            x = embedded(x, self.embed, self.position, self.part)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def embedded(tokens: Tensor, embed: nn.Embedding, position: nn.Embedding, part: SequencePart) -> Tensor:
    """A part of the sequences [batch, tokens] -> [batch, tokens, width].

    Raises:
        ValueError: the sequences are longer than the model's context.
    """
    length, longest = tokens.shape[1] * part.cut.ranks, position.num_embeddings
    if length > longest:
        raise ValueError(f"sequences of {length} tokens in a model with context {longest}: shorten them")
    x: Tensor = embed(tokens) + position(part.positions(tokens.shape[1], tokens.device))
    return x


def blocks_of(model: GPT | GPTStage) -> list[Block]:
    """The blocks of a model, or of one stage of it."""
    found = model.blocks
    return list(found.values() if isinstance(found, nn.ModuleDict) else found)  # type: ignore[arg-type]
