"""Context parallelism: every rank has a part of each sequence, and attention is what they do together.

Everything else in a transformer computes each token by itself. Three ways to attend to the tokens of other ranks:

    ring_attention.py        keys and values go round                       2 r Q (c - 1) / c elements sent
    gathered_attention.py    keys and values are gathered                   2 r Q (c - 1) / c
    ulysses.py               parts of the sequence become parts of heads    (2 + 2 r) (Q / c) (c - 1) / c

by each rank in forward, for c ranks, r = h_kv / h and Q = b s h d of the whole sequence. cut.py says which tokens a
rank has, blocks.py is the sum of parts of a softmax.
"""

from minifsdp.context_parallel.cut import Cut, SequencePart
from minifsdp.context_parallel.gathered_attention import GatheredAttention
from minifsdp.context_parallel.ring_attention import RingAttention
from minifsdp.context_parallel.ulysses import UlyssesAttention

__all__ = ["Cut", "GatheredAttention", "RingAttention", "SequencePart", "UlyssesAttention"]
