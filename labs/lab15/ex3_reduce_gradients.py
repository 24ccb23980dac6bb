"""Exercise 15.3: Which gradients are summed over which group."""

from collections.abc import Collection, Mapping

from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device
from minifsdp.mesh import Mesh

from .shared import EXACT, randn


@reference(
    "15.3",
    hints=(
        "Which ranks have seen other samples, and which other tokens of the same samples? A loss that is a mean over "
        "samples needs a mean over the first. The tokens of a sequence are all in one loss: their contributions to a "
        "gradient add up.",
        "For each name: if it is in `summands`, `comm.all_reduce(gradient, tp).wait()`. Then, for every gradient, "
        "`comm.all_reduce(gradient, dp, comm.MEAN).wait()`.",
    ),
)
def reduce_gradients(gradients: Mapping[str, Tensor], summands: Collection[str], tp: Group, dp: Group) -> None:
    """Make the gradients of a step those of one process with the entire batch, in place.

    `comm.all_reduce(tensor, group).wait()` sums over a group, and `comm.all_reduce(tensor, group, comm.MEAN).wait()`
    averages.

    Args:
        gradients: this rank's gradients by the name of their parameter, after its backward pass. All ranks have the
            same names, in the same order.
        summands: names of replicated parameters that each rank of `tp` has applied to its own part of the sequences,
            such as norms. Each rank may have them in another order. For all other parameters, tensor parallelism
            leaves nothing to do.
        tp: the ranks with the same samples. The loss of the samples is the same number on all of them.
        dp: the ranks with different samples, as many on each; the loss of the batch is the mean of their losses.
    """
    for name, gradient in gradients.items():
        if name in summands:
            comm.all_reduce(gradient, tp).wait()
        comm.all_reduce(gradient, dp, comm.MEAN).wait()


NAMES = ("embed.weight", "norm1.weight", "qkv.weight", "norm1.bias", "down.weight")
SUMMANDS = {"norm1.weight", "norm1.bias"}
MESHES = (Mesh(dp=2, tp=2), Mesh(tp=3, dp=2, axes=("tp", "dp")), Mesh(dp=3, tp=2))
ORDER = "`summands` has another order on each rank; iterate over `gradients`, whose order is the same on all ranks"


class InAnyOrder(frozenset[str]):
    """A set that odd ranks iterate over backwards: ranks started one by one hash their strings differently."""

    def __iter__(self):
        return iter(sorted(super().__iter__(), reverse=comm.world().rank() % 2 == 1))


def gradient_of(name, mesh, rank, variant):
    """This rank's; sizes differ from name to name."""
    shape = (variant.size, 2) if "weight" in name else (variant.size,)
    return randn(*shape, seed=17 * variant.seed + NAMES.index(name), rank=rank)


def observe_reduction(answer, mesh, variant):
    rank, device = comm.world().rank(), rank_device()
    groups = {axis: each.get_group() for axis, each in mesh.device_meshes(device.type, ("dp", "tp")).items()}
    axes = {group.group_name: axis for axis, group in groups.items()}
    gradients = {name: gradient_of(name, mesh, rank, variant).to(device) for name in NAMES}
    with comm.record() as calls:
        answer(gradients, InAnyOrder(SUMMANDS), groups["tp"], groups["dp"])
    sent = {axis: sum(call.wire for call in calls if axes.get(call.group) == axis) for axis in ("tp", "dp")}
    strange = [call.op for call in calls if call.group not in axes]
    return gradients, sent, strange


@check("15.3")
def check_reduce_gradients(answer, variant):
    """Summands are summed over the tensor-parallel ranks; all gradients are averaged over the data-parallel ones."""
    for mesh in (*MESHES, Mesh(dp=variant.ranks, tp=2)):
        where = f"dp={mesh.dp}, tp={mesh.tp}"
        found = on_ranks(mesh.ranks, observe_reduction, answer, mesh, variant, slip=ORDER)
        for rank, (gradients, _, _) in enumerate(found):
            expect(
                f"names, {where}",
                [*gradients],
                [*NAMES],
                rank=rank,
                slip="the dict is the caller's: change its tensors",
            )
        for name in sorted(NAMES, key=lambda name: name in SUMMANDS):
            kind = "a part of the sequence" if name in SUMMANDS else "sharded or complete"
            for rank, (gradients, _, _) in enumerate(found):
                right, slips = reducing(name, mesh, rank, variant)
                EXACT(f"gradient of {name} ({kind}), {where}", gradients[name], right, rank=rank, slips=slips)
        for rank, (_, sent, strange) in enumerate(found):
            expect(f"collectives of other groups, {where}", strange, [], rank=rank, slip="use `tp` and `dp` only")
            sizes = {name: gradient_of(name, mesh, 0, variant).nbytes for name in NAMES}
            wanted = {
                "tp": 2 * (mesh.tp - 1) / mesh.tp * sum(sizes[name] for name in SUMMANDS),
                "dp": 2 * (mesh.dp - 1) / mesh.dp * sum(sizes.values()),
            }
            slip = "reduce each gradient once per group" if any(sent.values()) else UNSEEN
            expect(f"bytes sent by axis, {where}", sent, wanted, rank=rank, slip=slip)


UNSEEN = "the gradients are right, but the check counts calls of `comm`: use `comm.all_reduce`"


def reducing(name, mesh, rank, variant):
    """The right gradient, and those that mistakes give, by their explanation."""
    every = [gradient_of(name, mesh, other, variant) for other in range(mesh.ranks)]
    mine = every[rank]
    over_dp = sum(every[other] for other in mesh.peers(rank, "dp"))
    over_tp = sum(every[other] for other in mesh.peers(rank, "tp"))
    total = sum(every)
    if name in SUMMANDS:
        return total / mesh.dp, {
            "the mean over `dp` is right, but each rank of `tp` has the contribution of its own tokens only: sum them "
            "first": over_dp / mesh.dp,
            "this is a mean over all ranks; ranks of `tp` have parts of the same samples, and their contributions add "
            "up": total / mesh.ranks,
            "this is a sum over all ranks; the loss is a mean over samples, so take the mean over `dp`": total,
            "`tp` and `dp` have changed places: this is the sum over `dp`, and the mean over `tp`": total / mesh.tp,
            "the sum over `tp` is there, the mean over `dp` is missing": over_tp,
            "this gradient is unchanged": mine,
            "the gradient is reduced twice over `tp`": total * mesh.tp / mesh.dp,
        }
    return over_dp / mesh.dp, {
        "ranks of `tp` have different parts of this parameter: their gradients belong to different elements": (
            total / mesh.dp
        ),
        "a mean over all ranks adds up gradients of different parts of this parameter": total / mesh.ranks,
        "a sum over all ranks adds up gradients of different parts of this parameter": total,
        "gradients are added up; the loss is a mean over samples, so divide by the number of ranks of `dp`": over_dp,
        "divide by the number of ranks of `dp`, not of all ranks": over_dp / mesh.ranks,
        "`dp` need not have 2 ranks: divide by `dp.size()`": over_dp / 2,
        "this is the mean over `tp`: it mixes different parts of this parameter": over_tp / mesh.tp,
        "this gradient is unchanged: ranks of `dp` have different samples, so take their mean": mine,
    }
