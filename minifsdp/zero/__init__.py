"""ZeRO (arXiv 1910.02054): data parallelism without the redundancy, one stage at a time.

With Adam in fp32, every rank of DDP keeps 4Ψ bytes of parameters, 4Ψ of gradients and 8Ψ of state, and all N ranks
compute the same update. But the update works element by element, so each rank can update only 1 / N of the elements:

    stage    sharded                    bytes per rank at rest
    1        optimizer state            4Ψ + 4Ψ   + 8Ψ/N
    2        and gradients              4Ψ + 4Ψ/N + 8Ψ/N
    3        and parameters (fsdp/)    (4Ψ + 4Ψ   + 8Ψ)/N

Stages 1 and 2 need no more traffic than DDP, whose all-reduce of the gradients is a reduce-scatter followed by an
all-gather (ring.py), 2 (N - 1) / N of 4Ψ. ZeRO puts the update between the two, and gathers updated parameters instead
of gradients (section 7.1 of the paper). In addition, ZeRO sends the padding to a multiple of N, and 4 bytes per
parameter tensor with which the ranks agree on the parameters that have a gradient.
"""

from minifsdp.zero.stage1 import Zero1Optimizer
from minifsdp.zero.stage2 import Zero2Optimizer

__all__ = ["Zero1Optimizer", "Zero2Optimizer"]
