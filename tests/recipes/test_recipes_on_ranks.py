"""Every recipe trains what one process trains, and holds and sends what its arithmetic says, to the byte.

All bytes at once have an upper bound, which is at most a tenth above them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import every_layout
from on_ranks import Checks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from minifsdp import comm
from minifsdp.batch import Batch
from minifsdp.build import LEARNING_RATE, build
from minifsdp.clip_grad import clip_grad_norm_
from minifsdp.cost.data_parallel import OptimizerState
from minifsdp.cost.links import Hosts, Link, talk
from minifsdp.cost.model import gpt
from minifsdp.cost.peak import peak
from minifsdp.cost.total import cost
from minifsdp.cost.traffic import Message, sent
from minifsdp.course.ladder.measure import measure_memory
from minifsdp.course.ladder.rungs import closed_form_setting
from minifsdp.ddp import DistributedDataParallel
from minifsdp.divisions import SCHEDULES
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp2 import fully_shard
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.link.emulated import EmulatedLink, HostLinks, Transfer
from minifsdp.losses import IGNORED, token_mean
from minifsdp.mesh import Mesh
from minifsdp.pipeline import split_gpt
from minifsdp.private import group_named
from minifsdp.process_groups import global_ranks
from minifsdp.recipe import Recipe
from minifsdp.tensor_parallel import parallelize_gpt
from minifsdp.trainer import Trainer
from minifsdp.zero import Zero1Optimizer

check = Checks(__name__)

SIZES: dict[str, Any] = {"vocabulary": 61, "width": 24, "layers": 4, "heads": 4, "context": 8}
ROWS = 16
DOUBLE: dict[str, Any] = {"itemsize": 8, "optimizer": OptimizerState(16, 4)}  # float64 and AdamW's two of it


def in_some_order(recipes: Sequence[str]) -> tuple[str, ...]:
    """The same on every run and rank. A process builds all of a check's recipes, one after another."""
    drawn: list[tuple[str, ...]] = []

    @settings(max_examples=4, derandomize=True, database=None, deadline=None, suppress_health_check=HealthCheck)
    @given(st.permutations(recipes))
    def draw(order: list[str]) -> None:
        drawn.append(tuple(order))

    draw()
    return drawn[-1]


ON_TWO = (
    *("dp=2,data=ddp", "dp=2,data=ddp,schedule=buckets", "dp=2,data=ddp,schedule=parameters", "dp=2,zero=1"),
    *("dp=2,zero=2", "dp=2,data=fsdp", "dp=2,data=fsdp,schedule=prefetch", "dp=2,data=fsdp,schedule=sync,reshard=no"),
    *("dp=2", "dp=2,schedule=prefetch,hold", "tp=2", "tp=2,sequence", "tp=2,sequence,regather", "pp=2"),
    *("dp=2,reshard=no", "dp=2,schedule=prefetch,reshard=no", "dp=2,data=fsdp,schedule=prefetch,depth=1"),
    *("pp=2,order=gpipe", "pp=2,order=naive", "pp=2,order=interleaved,stages=2", "pp=2,order=zb-h1", "pp=2,data=fsdp"),
)
ON_FOUR = in_some_order(
    (
        *(
            "dp=2,tp=2,data=ddp,sequence",
            "dp=2,tp=2,zero=1,sequence",
            "dp=2,tp=2,sequence",
        ),
        *("pp=2,dp=2,data=ddp", "pp=2,dp=2,zero=2", "pp=2,dp=2,data=fsdp", "pp=2,dp=2,axes=dp/pp"),
        *("pp=2,tp=2,sequence,order=gpipe", "dp=4,replicate=2", "dp=4,replicate=2,data=fsdp,reshard=no"),
        *("pp=2,tp=2,order=zb-h1", "pp=4", "pp=2,dp=2,zero=2,order=interleaved,stages=2"),
    )
)
MORE_ON_FOUR = in_some_order(
    (
        *("dp=2,tp=2,zero=2,sequence", "pp=2,dp=2,zero=1", "pp=2,dp=2", "pp=2,tp=2", "dp=4,replicate=2,data=fsdp"),
        *("pp=2,dp=2,order=interleaved,stages=2",),
    )
)
ON_EIGHT = in_some_order(
    ("pp=2,dp=2,tp=2,data=ddp,sequence,regather", "pp=2,dp=2,tp=2,zero=2", "pp=2,dp=4,replicate=2")
)
RUNGS_ON_EIGHT = ("pp=2,dp=2,tp=2,zero=1,sequence", "pp=2,dp=2,tp=2,sequence")  # CI climbs them: test_other_ladders.py
PARTS_ON_TWO = ("cp=2,zero=1", "cp=2,data=ddp,zigzag=no", "cp=2,attention=gathered", "cp=2,attention=ulysses,zero=2")
PARTS_ON_FOUR = in_some_order(
    (
        *("dp=2,cp=2", "dp=2,cp=2,replicate=2,attention=ulysses", "cp=4,zero=1", "cp=4,data=fsdp,attention=gathered"),
        *("cp=2,tp=2,sequence,zigzag=no", "cp=2,tp=2,attention=ulysses,zero=1", "pp=2,cp=2"),
        *("dp=2,cp=2,axes=cp/dp,zero=1", "pp=2,cp=2,order=interleaved,stages=2,attention=ulysses,data=ddp"),
    )
)
PARTS_ON_EIGHT = in_some_order(
    (
        *("dp=2,cp=2,tp=2,zero=1", "pp=2,dp=2,cp=2,attention=gathered", "dp=4,cp=2,replicate=2"),
        *("pp=2,dp=2,cp=2,axes=cp/pp/dp,zero=1", "pp=2,cp=2,tp=2,attention=ulysses"),
        "pp=2,cp=2,tp=2,sequence,zigzag=no",
    )
)
OTHER_SCHEDULES = [when for when in SCHEDULES["fsdp"] if when != "limit"]
LONGER_AXES_ON_EIGHT = (
    *("pp=4,tp=2", "dp=4,tp=2,zero=1", "pp=2,dp=4,zero=2", "pp=4,dp=2,data=fsdp", "dp=4,replicate=2,tp=2,sequence"),
)


def model(**others: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**SIZES | others)


@check(ranks=1, recipe=("attention=ring", "attention=gathered,zigzag=no", "attention=ulysses,data=ddp"))
@check(ranks=2, recipe=ON_TWO)
@check(ranks=4, recipe=ON_FOUR)
@check(ranks=4, recipe=MORE_ON_FOUR, slow=(4,))
@check(ranks=8, recipe=ON_EIGHT)
@check(ranks=8, recipe=RUNGS_ON_EIGHT, slow=(8,))
@check(ranks=2, recipe=PARTS_ON_TWO)
@check(ranks=4, recipe=PARTS_ON_FOUR)
@check(ranks=4, recipe=("pp=2,cp=2,order=zb-h1",), slow=(4,))
@check(ranks=8, recipe=PARTS_ON_EIGHT, slow=(8,))
@check(ranks=8, recipe=LONGER_AXES_ON_EIGHT, slow=(8,))
def trains_what_one_process_trains_and_holds_and_sends_what_is_predicted(recipe: str) -> None:
    """In float64, three steps; each rank sees the rows of its place on the axis of data parallelism.

    The first steps are the measured ones, so that each recipe is built once, and DTensors' first operators, which take
    longer than all later ones, run once. The first step counts tokens, which is no part of the arithmetic.
    """
    parsed = Recipe.parse(recipe)
    share = ROWS // parsed.mesh.dp
    first = parsed.mesh.place(dist.get_rank(), "dp") * share
    steps = steps_of_one_process()
    batches = [(tokens[first : first + share], targets[first : first + share]) for tokens, targets, _ in steps]
    trainer = holds_and_sends_what_is_predicted(parsed, batches[0])
    trainer.step(*batches[2])
    means = torch.tensor(trainer.losses, dtype=torch.float64)
    dist.all_reduce(means)
    torch.testing.assert_close(means / dist.get_world_size(), torch.stack([loss for _, _, loss in steps]))


@cache
def steps_of_one_process() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, targets and loss of each; the first two have the same tokens."""
    alone, generator = model().double(), torch.Generator().manual_seed(1)
    one = Trainer(alone, AdamW(alone.parameters(), LEARNING_RATE))
    first, last = torch.randint(SIZES["vocabulary"], (2, 2, ROWS, SIZES["context"]), generator=generator)
    return [(*batch, one.step(*batch)) for batch in (first, first, last)]


@dataclass
class Remembering(Trainer):
    """Remembers its losses; counts the tokens of the first step alone."""

    losses: list[float] = field(default_factory=list)

    def step(self, *given: Any) -> Tensor:
        loss = super().step(*given)
        self.losses.append(float(loss))
        self.loss_of = None
        return loss


def holds_and_sends_what_is_predicted(
    recipe: Recipe, batch: Batch | None = None, context: int = SIZES["context"], **others: Any
) -> Remembering:
    """Bytes by category and in all, and calls by axis, operation and size; on this rank. One rank sends nothing.

    Args:
        recipe: for as many ranks as there are.
        batch: this rank's; None: some batch.
        context: its length.
        **others: sizes of the model.

    Returns:
        the trainer, two steps on.
    """
    rank, where = dist.get_rank(), rank_device()
    rows = torch.zeros(ROWS // recipe.mesh.dp, context, dtype=torch.int64, device=where)
    trainer: Remembering | None = None

    def fresh() -> Trainer:
        nonlocal trainer
        trainer = Remembering(**vars(build(model(**others).to(where).double(), recipe)))
        return trainer

    found = measure_memory(fresh, (rows, rows) if batch is None else batch, where)
    setting = replace(closed_form_setting(dist.get_world_size()), batch=ROWS, context=context, **DOUBLE)
    numbers = gpt(**SIZES | others)
    predicted = asdict(cost(numbers, recipe, rank, setting))
    assert {key: found["bytes"][key] for key in predicted} == predicted
    bound = peak(numbers, recipe, rank, setting)
    assert found["bytes"]["peak"] <= bound <= 1.1 * found["bytes"]["peak"]
    calls: list[comm.Call] = [call for call in found["calls"] if call.op != "recv" and call.ranks > 1]
    axis_of = partial(recipe.mesh.axis_of, rank=rank)
    axes = {name: axis_of(global_ranks(group_named(name))) for name in {call.group for call in calls}}
    logged = Counter(Message(axes[call.group], call.op, call.payload) for call in calls)
    assert logged == +sent(numbers, recipe, rank, setting)
    order = [(axes[call.group], call.op, call.payload) for call in calls]
    every = comm.gather_objects(order, comm.world())
    assert all(every[peer] == order for peer in recipe.mesh.peers(rank, "dp")), "replicas call the same in one order"
    assert trainer is not None
    return trainer


@check(ranks=8, recipe=every_layout(8), slow=(8,))
def every_layout_holds_and_sends_what_is_predicted(recipe: str) -> None:
    """With a layer, and a head, for each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "context", 16)  # in two parts for each of eight ranks
        holds_and_sends_what_is_predicted(Recipe.parse(recipe), context=16, layers=8, heads=8)


@check(ranks=4, recipe=("dp=2,tp=2,zero=1,axes=tp/dp",), per_host=(2,))
@check(ranks=8, recipe=("pp=2,dp=2,tp=2,zero=1,sequence",), per_host=(4,))
@check(ranks=8, recipe=("pp=2,dp=2,tp=2,zero=1,axes=tp/pp/dp", "pp=4,tp=2", "cp=4,dp=2"), per_host=(2, 4), slow=(8,))
def messages_take_the_links_that_are_predicted(recipe: str, per_host: int) -> None:
    """By axis and link as many as arithmetic says, and across hosts only on axes whose ranks are on several."""
    parsed, rank = Recipe.parse(recipe), dist.get_rank()
    with quick_links(per_host) as links:
        transfers = transfers_of_a_step(parsed, links)
    counts: Counter[tuple[str, bool]] = Counter(
        (axis, transfer.op.endswith("across")) for axis, transfer in transfers if not transfer.op.startswith("recv")
    )
    setting = replace(closed_form_setting(dist.get_world_size()), batch=ROWS, **DOUBLE)
    predicted = talk(gpt(**SIZES), parsed, rank, setting, Hosts(Link(0.0, 1.0), Link(0.0, 1.0), per_host))
    assert counts == {(each.axis, each.across): each.messages for each in predicted}
    for axis, across in counts:
        hosts = {peer // per_host for peer in parsed.mesh.lines(rank)[axis]}
        assert across <= (len(hosts) > 1)


@check(ranks=8)
def groups_of_an_axis_talk_at_the_same_time_and_so_do_a_rank_s_two_links() -> None:
    """By the clocks of the links, which are this machine's: no message of one group waits for another group's."""
    recipe, rank = Recipe.parse("pp=2,dp=2,tp=2,zero=1"), dist.get_rank()
    with HostLinks(EmulatedLink(0.02, 1e12), EmulatedLink(0.1, 1e12), per_host=4) as links:
        mine = transfers_of_a_step(recipe, links)
    every = comm.gather_objects(mine, comm.world())
    spans = {who: [(t.start, t.end) for axis, t in found if axis == "dp"] for who, found in enumerate(every)}
    assert recipe.mesh.peers(0, "dp") != recipe.mesh.peers(1, "dp")
    assert overlaps(spans[0], spans[1])
    if recipe.mesh.place(rank, "pp") == 0:  # activations travel to the other host while the next ones are computed
        to_stage = [(t.start, t.end) for axis, t in mine if axis == "pp" and t.op == "send across"]
        assert overlaps(to_stage, [(t.start, t.end) for axis, t in mine if axis == "tp"])


def overlaps(ones: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> int:
    """Pairs of spans that share a moment."""
    return sum(max(one[0], other[0]) < min(one[1], other[1]) for one in ones for other in others)


def quick_links(per_host: int) -> HostLinks:
    return HostLinks(EmulatedLink(0.0, 1e12), EmulatedLink(0.0, 1e12), per_host)


def transfers_of_a_step(recipe: Recipe, links: HostLinks) -> list[tuple[str, Transfer]]:
    """This rank's messages in its second step on open links, with their axes; groups of one rank send nothing."""
    trainer = replace(build(model().double(), recipe), loss_of=None)
    rows = torch.zeros(ROWS // recipe.mesh.dp, SIZES["context"], dtype=torch.int64)
    trainer.step(rows, rows)
    comm.all_reduce(torch.zeros(1), comm.world()).wait()
    before = links.transfers[-1].end
    trainer.step(rows, rows)
    groups = {each.group: global_ranks(group_named(each.group)) for each in links.transfers}
    axis_of = partial(recipe.mesh.axis_of, rank=dist.get_rank())
    found = [(axis_of(groups[each.group]), each) for each in links.transfers if each.start >= before]
    return [(axis, each) for axis, each in found if axis and len(groups[each.group]) > 1]


@check(ranks=2, recipe=("dp=2,zero=1", "tp=2", "pp=2,micro=4", "cp=2"))
@check(ranks=4, recipe=("dp=2,cp=2", "pp=2,dp=2,data=ddp", "cp=2,tp=2,sequence,zigzag=no", "cp=4,attention=ulysses"))
@check(ranks=8, recipe=("pp=2,cp=2,tp=2", "pp=2,dp=2,tp=2,sequence,zero=1", "dp=4,replicate=2,cp=2"), slow=(8,))
def a_token_counts_as_much_wherever_it_is(recipe: str) -> None:
    """Ranks, micro-batches and parts of sequences with other numbers of targets that count, and some with none."""
    parsed, generator = Recipe.parse(recipe), torch.Generator().manual_seed(2)
    alone = model().double()
    one = Trainer(alone, AdamW(alone.parameters(), LEARNING_RATE), loss_of=token_mean)
    ours = build(model().double(), parsed)
    share = ROWS // parsed.mesh.dp
    first = parsed.mesh.place(dist.get_rank(), "dp") * share
    often = torch.linspace(-0.3, 1, ROWS)[:, None] * torch.linspace(1, 0, SIZES["context"])  # first rows: never
    for _ in range(3):
        tokens, targets = torch.randint(SIZES["vocabulary"], (2, ROWS, SIZES["context"]), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) > often] = IGNORED
        loss = one.step(tokens, targets)
        mean = ours.step(tokens[first : first + share], targets[first : first + share]).double().reshape(1)
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), loss.reshape(1), rtol=1e-9, atol=1e-9)


@check(ranks=4, recipe=("dp=2,cp=2,data=ddp", "pp=2,dp=2,data=ddp", "dp=2,tp=2,data=ddp"))
def counting_tokens_is_one_message_of_a_number(recipe: str) -> None:
    """To the ranks with different tokens, before all others of a step."""
    parsed = Recipe.parse(recipe)
    rows = torch.zeros(ROWS // parsed.mesh.dp, SIZES["context"], dtype=torch.int64)
    counting = build(model(), parsed)
    silent = replace(build(model(), parsed), loss_of=None)
    logs = []
    for trainer in (counting, silent):
        trainer.step(rows, rows)
        with comm.record() as log:
            trainer.step(rows, rows)
        logs.append([(call.op, call.payload, call.ranks) for call in log])
    assert logs[0] == [("all_reduce", 8, parsed.mesh.dp * parsed.mesh.cp), *logs[1]]


@check(ranks=2, recipe=("cp=2,zero=1", "cp=2,zero=1,zigzag=no", "cp=2,attention=gathered", "cp=2,attention=ulysses"))
@check(ranks=4, recipe=("cp=4,data=ddp", "cp=4,zigzag=no,zero=1", "cp=4,attention=ulysses"))
def long_sequences_hold_and_send_what_is_predicted(recipe: str) -> None:
    """Where attention's blocks have most of the bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "context", 64)
        holds_and_sends_what_is_predicted(Recipe.parse(recipe), context=64)


@check(ranks=2, recipe=("dp=2", "tp=2,sequence", "pp=2"))
def shorter_sequences_have_the_bytes_that_are_predicted(recipe: str) -> None:
    parsed = Recipe.parse(recipe)
    holds_and_sends_what_is_predicted(parsed, context=SIZES["context"] // 2)


@check(ranks=2, recipe=("dp=2,data=ddp", "dp=2,data=ddp,schedule=buckets", "dp=2,zero=1", "dp=2,zero=2"))
@check(ranks=4, recipe=("dp=2,tp=2,zero=2,sequence", "pp=2,dp=2,zero=2"))
@check(
    ranks=4, recipe=("dp=2,tp=2,zero=1", "dp=2,tp=2,zero=2", "pp=2,dp=2,zero=2,order=interleaved,stages=2"), slow=(4,)
)
@check(ranks=8, recipe=("pp=2,dp=2,tp=2,zero=2,sequence",), slow=(8,))
def several_buckets_have_the_bytes_that_are_predicted(recipe: str) -> None:
    """Gradients may come before their bucket's turn: tensor parallelism has buckets apart."""
    parsed = Recipe.parse(recipe)
    for cap in (2**12, 2**15):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minifsdp.build.BUCKET_MB", cap / 2**20)
            patch.setattr("minifsdp.cost.total.CAP", cap)
            holds_and_sends_what_is_predicted(parsed)


@check(ranks=4, recipe=("dp=2,pp=2,data=fsdp,schedule=limit", "dp=2,pp=2,data=fsdp,order=interleaved,stages=2,micro=2"))
@check(ranks=4, recipe=tuple(f"dp=2,pp=2,data=fsdp,schedule={when}" for when in OTHER_SCHEDULES), slow=(4,))
def stages_of_several_blocks_have_the_bytes_that_are_predicted(recipe: str) -> None:
    """A unit is freed and reduced while other micro-batches have yet to come back to it."""
    parsed = Recipe.parse(recipe)
    holds_and_sends_what_is_predicted(parsed, layers=7)


@check(ranks=2, recipe=("dp=2,data=ddp", "dp=2,zero=2", "dp=2,data=fsdp", "dp=2", "tp=2", "tp=2,sequence"))
def tied_weights_have_the_bytes_that_are_predicted(recipe: str) -> None:
    parsed = Recipe.parse(recipe)
    holds_and_sends_what_is_predicted(parsed, tied=True)


@check(ranks=2)
def a_mesh_is_for_all_ranks() -> None:
    assert Mesh().device_meshes("cpu") == {}
    with pytest.raises(ValueError, match="has 4 ranks, and there are 2: choose other sizes"):
        Mesh(dp=4).device_meshes("cpu")
    with pytest.raises(ValueError, match="also=foo: choose from pp, dp"):
        Mesh(dp=2).device_meshes("cpu", ("foo",))


@check(ranks=4)
def ranks_with_other_recipes_or_models_are_refused_by_all() -> None:
    """In one line, before anything is divided; what follows works."""
    recipe, rank = Recipe.parse("dp=4"), dist.get_rank()
    with pytest.raises(ValueError, match=r"^recipes differ: dp=4,data=zero1 on ranks 1, 3, dp=4,data=fsdp2 on the oth"):
        build(model(), Recipe.parse("dp=4,zero=1") if rank % 2 else recipe)
    with pytest.raises(ValueError, match=r"^recipes differ: 'dp=4' on rank 2, dp=4,data=fsdp2 on the others; give"):
        build(model(), "dp=4" if rank == 2 else recipe)  # type: ignore[arg-type]
    for others in ({"width": 28}, {"layers": 2}, {"heads": 2}):
        with pytest.raises(ValueError, match=r"^models differ in .*: GPT \w+ on rank 3, GPT \w+ on the others; give"):
            build(model(**others) if rank == 3 else model(), recipe)
    with pytest.raises(ValueError, match=r"^models differ in .* on rank 0, "):
        build(model().to("meta") if rank == 0 else model(), recipe)
    rows = torch.zeros(4, SIZES["context"], dtype=torch.int64)
    build(model(), recipe).step(rows, rows)


WRAPPED: dict[str, Any] = {
    "minifsdp's DDP has the model": DistributedDataParallel,
    "minifsdp's FullyShardedDataParallel has the model": FullyShardedDataParallel,
    "minifsdp's fully_shard has the model": fully_shard,
    "torch's DDP has the model": torch.nn.parallel.DistributedDataParallel,
    "torch's fully_shard has the model": torch_fsdp.fully_shard,
    "embed.weight is a DTensor": lambda gpt: parallelize_gpt(gpt, init_device_mesh("cpu", (2,))),
}


@check(ranks=2, says=tuple(WRAPPED), recipe=("dp=2,data=ddp", "tp=2", "pp=2"))
def a_model_that_is_wrapped_is_refused(says: str, recipe: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}.* already: give build a plain GPT") as told:
        build(WRAPPED[says](model()), Recipe.parse(recipe))
    assert "\n" not in str(told.value)


@check(ranks=2)
def rows_that_make_no_micro_batches_are_refused_before_a_step() -> None:
    """On all ranks; a step of other rows follows."""
    trainer = build(model(), Recipe.parse("pp=2,micro=4"))
    rows = torch.zeros(6, SIZES["context"], dtype=torch.int64)
    with pytest.raises(ValueError, match="6 rows make no 4 equal micro-batches: give a multiple of 4"):
        trainer.step(rows, rows)
    trainer.step(rows[:4], rows[:4])


@check(ranks=8)
def ranks_of_an_earlier_tensor_axis_may_be_those_of_another() -> None:
    """They have different shards of all parameters now, and nothing to compare; other groups still have."""
    for recipe in map(Recipe.parse, ("pp=2,dp=2,tp=2", "pp=2,dp=2,tp=2,axes=tp/pp/dp")):
        rows = torch.zeros(ROWS // 2, SIZES["context"], dtype=torch.int64)
        build(model(), recipe).step(rows, rows)


@check(ranks=4)
def axes_of_the_same_ranks_have_the_same_group() -> None:
    """Whatever else their meshes have, as torch takes such axes for one."""
    found = [
        Recipe.parse(text).mesh.device_meshes("cpu") for text in ("pp=2,tp=2", "dp=2,tp=2", "tp=2,dp=2,axes=tp/dp")
    ]
    first, second, third = [{axis: mesh.get_group() for axis, mesh in meshes.items()} for meshes in found]
    assert first["tp"] is second["tp"] is third["dp"]
    assert first["pp"] is second["dp"] is third["tp"]


@check(ranks=4)
def ranks_agree_on_meshes_that_torch_takes_for_one() -> None:
    """Of parameters on two equal meshes, torch answers that some are on the first: on each rank for other shapes.

    The pipeline's ranks have seen other shapes, so a bucket or a norm for each group would be of other parameters.
    """
    first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    parallelize_gpt(split_gpt(model(), 2, first["pp"].get_local_rank()), first["tp"])
    second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours, alone = parallelize_gpt(model(), second["tp"]), model()
    rows = torch.zeros(ROWS, SIZES["context"], dtype=torch.int64)
    optimizer = Zero1Optimizer(ours.parameters(), AdamW, second["dp"].get_group())
    for each in (ours, alone):
        each(rows, rows).backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    torch.testing.assert_close(clip_grad_norm_(ours.parameters(), 1e9), norm)
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), norm)


@check(ranks=2, recipe=("dp=2,precision=bf16", "dp=2,data=fsdp,precision=bf16"))
def computes_in_its_precision(recipe: str) -> None:
    """Units are gathered in bfloat16; what the optimizer has stays in float32."""
    trainer = build(model(), Recipe.parse(recipe))
    rows = torch.zeros(2, SIZES["context"], dtype=torch.int64)
    with comm.record() as log:
        trainer.step(rows, rows)
    assert {call.dtype for call in log if call.op == "all_gather"} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_recipe_for_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from minifsdp.instruments.launch import launch

    with pytest.raises(Exception, match="the recipe dp=2,data=fsdp2 is for 2 ranks, and there are 1"):
        launch(lambda: build(model(), Recipe.parse("dp=2")), 1)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
