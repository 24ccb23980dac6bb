"""`fully_shard` trains as torch's does, to the last bit where two ranks add up, to 1e-12 on three and four."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import beside_torch
import pytest
import torch
import torch.distributed as dist
from beside_torch import assert_same, batch, compare, ours, shard_blocks, theirs, tolerance, train, whole
from on_ranks import TORCH, Checks, mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from minifsdp import comm
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp2 import clip_grad_norm_
from minifsdp.fsdp2.view import InPlaceView
from minifsdp.gpt import Block
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.local_parts import local_of

check = Checks(__name__)
ANY, ALL = (2, 3), (2, 3, 4)
UNEVEN = (3,)
"""Left to `make test-full` where the shards' sizes do not matter to what a check is about: others have uneven ones."""
gpt = partial(beside_torch.gpt, layers=2)


# Wrapping


@check(ranks=ALL)
def blocks_and_the_rest() -> None:
    """Three blocks and three steps; what follows shows its property with two."""
    mine, reference = compare(lambda: gpt(layers=3), shard_blocks, steps=3)
    for (name, p), q in zip(mine.named_parameters(), reference.parameters(), strict=True):
        assert (p.placements, p.shape, p.stride(), p.dtype) == (q.placements, q.shape, q.stride(), q.dtype), name
        assert p.to_local().shape == q.to_local().shape, name


@check(ranks=ANY, slow=UNEVEN)
def the_flat_unit_trains_alike() -> None:
    mine, flat = shard_blocks(ours, gpt()), FullyShardedDataParallel(gpt(), auto_wrap_policy={Block})
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (mine, flat)]
    for step in range(3):
        losses = [model(*batch(step)) for model in (mine, flat)]
        assert losses[0].item() == losses[1].item()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@check(ranks=ANY)
def the_root_alone() -> None:
    compare(gpt, lambda lib, model: lib.fully_shard(model))


@check(ranks=ANY, slow=UNEVEN)
def nested_units_and_a_list_of_modules() -> None:
    def nest(lib: Any, model: Any) -> Any:
        for block in model.blocks:
            lib.fully_shard(block.up)
            lib.fully_shard([block.down, block.norm2])
            lib.fully_shard(block)
        lib.fully_shard([model.norm, model.head])
        return lib.fully_shard(model)

    compare(gpt, nest)


@check(ranks=ANY)
def a_tied_parameter_is_one() -> None:
    mine, _ = compare(lambda: gpt(tied=True), shard_blocks)
    assert mine.head.weight is mine.embed.weight
    mine.unshard()
    assert mine.head.weight is mine.embed.weight
    assert not isinstance(mine.head.weight, DTensor)
    mine.reshard()
    assert mine.head.weight is mine.embed.weight


@check(ranks=ALL, slow=(4,), dim={"last": -1, "second": 1})
def a_dimension_of_the_user_s(dim: int) -> None:
    ranks = dist.get_world_size()

    def place(p: nn.Parameter) -> Shard | None:
        return Shard(dim) if p.ndim == 2 and p.shape[dim] % ranks == 0 else None

    def apply(lib: Any, model: Any) -> Any:
        return shard_blocks(lib, model, shard_placement_fn=place)

    mine, _ = compare(lambda: gpt(width=12, heads=2), apply)
    assert mine.blocks[0].down.weight.placements == (Shard(1),)
    mine(*batch(7)).backward()
    assert all(p.to_local().is_contiguous() and p.grad.to_local().is_contiguous() for p in mine.parameters())


@check(ranks=ANY)
def ignored_parameters_stay_plain_and_are_not_reduced() -> None:
    mine = gpt()
    head = mine.head.weight
    ours.fully_shard(mine, ignored_params={head})
    assert mine.head.weight is head
    mine(*batch(0)).backward()
    gradients = comm.gather_objects(head.grad, comm.world())
    assert any(not torch.equal(gradients[0], other) for other in gradients[1:])


WHOLE_NUMBERS = torch.int64 if TORCH >= (2, 12) else torch.bfloat16  # torch 2.11 does not shard integers


class Adapted(nn.Module):
    """A frozen base in bf16, of odd sizes, a table of integers, and an adapter that is trained: three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randint(0, 5, (7, 3)).to(WHOLE_NUMBERS), requires_grad=False)
        self.base = nn.Linear(12, 11, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(12, 11, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        frozen = nn.functional.linear(x.to(self.base.weight.dtype), self.base.weight, self.base.bias)
        return (frozen.double() + self.adapter(x.to(self.adapter.weight.dtype))).pow(2).mean() * self.table.sum()


def some_rows(step: int, micro: int) -> tuple[Tensor]:
    return (
        torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())),
    )


@check(ranks=ALL, cut={"rows": None, "columns": lambda p: Shard(1) if p.shape == (11, 12) else None})
def several_dtypes_travel_together(cut: Any) -> None:
    """As bytes, in one gather; what is trained has one dtype."""

    def apply(lib: Any, model: Any) -> Any:
        return lib.fully_shard(model, shard_placement_fn=cut, reshard_after_forward=True)

    if cut is not None and 12 % dist.get_world_size():
        return
    mine, _ = compare(Adapted, apply, data=some_rows)
    with comm.record() as calls:
        mine(*some_rows(0, 0))
    assert [call.op for call in calls] == ["all_gather"]
    assert [p.dtype for p in mine.parameters()] == [WHOLE_NUMBERS, *[torch.bfloat16] * 2, *[torch.float64] * 2]


@check()
def several_dtypes_in_mixed_precision() -> None:
    """Integers are not cast."""

    def apply(lib: Any, model: Any) -> Any:
        return lib.fully_shard(model, mp_policy=lib.MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    compare(Adapted, apply, data=some_rows)


@check()
def trained_parameters_have_one_dtype() -> None:
    for lib in (ours, theirs):
        model = lib.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)))
        with pytest.raises(AssertionError, match="uniform original parameter dtype"):
            model(torch.ones(2, 4))


class FrozenFirst(nn.Module):
    """Whose frozen weight is read last in backward, after the trained one has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.trained = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(torch.tanh(self.frozen(x)))


def two_forwards_of_frozen(wrap: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*(FrozenFirst() for _ in range(3))).double())
    x = torch.full((2, 3), 1.0 + dist.get_rank(), dtype=torch.float64)
    (model(x).pow(2).sum() + model(x + 1).pow(2).sum()).backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


@check(ranks=ANY)
def two_forwards_and_a_backward_read_frozen_parameters() -> None:
    """Each call of a unit waits for its inputs' gradients: those of the first forward count, too."""

    def by(lib: Any) -> Any:
        def wrap(model: Any) -> Any:
            for each in model:
                lib.fully_shard(each)
            return lib.fully_shard(model)

        return wrap

    def flat(model: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that frozen parameters cost gradient memory
            return FullyShardedDataParallel(model, auto_wrap_policy={FrozenFirst}, use_orig_params=True)

    mine, torchs = (two_forwards_of_frozen(by(lib)) for lib in (ours, theirs))
    for one, other in zip(mine, torchs, strict=True):
        assert torch.allclose(one.to_local(), other.to_local(), rtol=1e-12)
    assert len(two_forwards_of_frozen(flat)) == 6


# Memory


@check(ranks=ANY, slow=UNEVEN, after={"True": True, "False": False, "None": None})
def after_forward(after: bool | None) -> None:
    mine, reference = compare(gpt, lambda lib, model: shard_blocks(lib, model, reshard_after_forward=after))
    for model in (mine, reference):
        model(*batch(5))
    for (name, p), q in zip(mine.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p, DTensor) == isinstance(q, DTensor), f"{name} between forward and backward"


@check(ranks=ANY, slow=UNEVEN)
def among_one_rank_is_not_at_all() -> None:
    """The integer 1: whole from forward to backward."""
    mine, reference = compare(gpt, lambda lib, model: shard_blocks(lib, model, reshard_after_forward=1))
    with comm.record() as log:
        losses = [model(*batch(5)) for model in (mine, reference)]
        assert not any(isinstance(p, DTensor) for model in (mine, reference) for p in model.parameters())
        losses[0].backward()
    assert sum(call.op == "all_gather" for call in log) == 3


@check(ranks=4)
def parameters_that_extend_the_gather_are_gathered_from_all() -> None:
    model = ours.fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
    model.weight._local_tensor.fsdp_pre_all_gather = model.weight._local_tensor.fsdp_post_all_gather = None
    with pytest.raises(NotImplementedError, match="reshard_after_forward has to be True or False"):
        model(torch.ones(2, 4))


@check(ranks=4)
def backward_gathers_among_fewer_ranks() -> None:
    """An integer: one gather a unit over all ranks in forward, one over two of them in backward."""
    mine, _ = compare(gpt, lambda lib, model: shard_blocks(lib, model, reshard_after_forward=2))
    with comm.record() as log:
        loss = mine(*batch(5))
    assert [call.ranks for call in log if call.op == "all_gather"] == [4] * 3
    with comm.record() as log:
        loss.backward()
    assert [call.ranks for call in log if call.op == "all_gather"] == [2] * 3


@check(ranks=4, started=(False, True))
def a_bool_ends_gathers_among_fewer_ranks(started: bool) -> None:
    """From the next forward on, whether the model has run before or not."""
    mine = shard_blocks(ours, gpt(), reshard_after_forward=2)
    if started:
        mine(*batch(5)).backward()
    mine.set_reshard_after_forward(True)
    with comm.record() as log:
        mine(*batch(5)).backward()
    assert [call.ranks for call in log if call.op == "all_gather"] == [4] * 6


@check(ranks=ANY)
def freed_memory_is_freed() -> None:
    mine = shard_blocks(ours, gpt())
    for _ in train(mine):
        pass
    for module in mine.modules():
        if isinstance(module, ours.FSDPModule):
            (unit,) = module._units(False)
            assert unit.unsharded.full.untyped_storage().nbytes() == 0
            assert not unit.gradients.held


@check(ranks=2)
def frozen_parameters_cost_no_gradient_memory_and_no_bytes() -> None:
    sent, peaks = [], []
    for frozen in (False, True):
        with Ledger() as ledger:
            model = gpt()
            for name, p in model.named_parameters():
                p.requires_grad_(not frozen or "up.weight" in name)
            shard_blocks(ours, model)
            ledger.watch(model)
            with comm.record() as log:
                model(*batch(0)).backward()
            sent.append([call.payload for call in log if call.op == "reduce_scatter"])
            peaks.append(ledger.peak_of("gradients"))
    assert sent[1] == [8 * 40 * 10] * 2
    assert len(sent[0]) == 3
    assert peaks[1] < peaks[0] / 2


# Runs


@check(ranks=ALL, slow=(4,), sync={"reduced once": True, "reduced each time": False})
def micro_batches(sync: bool) -> None:
    def between(model: Any, micro: int) -> None:
        model.set_requires_gradient_sync(micro == 2 or not sync)

    with comm.record() as log:
        compare(gpt, shard_blocks, micros=3, between=between)
    reductions = sum(call.op == "reduce_scatter" for call in log)
    assert reductions == 2 * (3 if sync else 9)


@check(ranks=ANY, slow=UNEVEN)
def only_some_modules_sync() -> None:
    def between(model: Any, micro: int) -> None:
        model.blocks[1].set_requires_gradient_sync(micro == 1)

    compare(gpt, shard_blocks, micros=2, between=between)


@check(ranks=ANY, slow=UNEVEN)
def whole_from_micro_batch_to_micro_batch() -> None:
    def between(model: Any, micro: int) -> None:
        model.set_reshard_after_backward(micro == 2)
        model.set_is_last_backward(micro == 2)

    compare(gpt, lambda lib, m: shard_blocks(lib, m, reshard_after_forward=False), micros=3, between=between)
    mine = shard_blocks(ours, gpt(), reshard_after_forward=False)
    for micro in range(3):
        between(mine, micro)
        with comm.record() as log:
            mine(*batch(0, micro)).backward()
        assert sum(call.op == "all_gather" for call in log) == (0 if micro else 3)


@check(ranks=ANY, slow=UNEVEN)
def backwards_of_two_forwards_in_the_other_order() -> None:
    gradients = []
    for lib in (ours, theirs):
        model: Any = shard_blocks(lib, gpt())
        one, two = model(*batch(1)), model(*batch(2))
        two.backward()
        one.backward()
        gradients.append([whole(p.grad) for p in model.parameters()])
    for mine, reference in zip(*gradients, strict=True):
        assert (mine - reference).abs().max() <= tolerance()


class Twice(nn.Module):
    """A unit called twice, once more without grad, and one that is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = (nn.Linear(5, 5, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            scale = self.a(x).norm()
        return self.b(self.a(self.a(x))).square().sum() / scale


def shard_parts(lib: Any, model: Any) -> Any:
    for part in (model.a, model.b, model.unused):
        lib.fully_shard(part)
    return lib.fully_shard(model)


def rows(step: int, micro: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    return (torch.randn(3, 5, generator=generator, dtype=torch.float64),)


@check(ranks=ANY, slow=UNEVEN)
def called_twice_and_unused() -> None:
    compare(Twice, shard_parts, data=rows)


class Routed(nn.Module):
    """Each rank uses the expert of its number, so that no two ranks reach the same units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(3))
        self.gate = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        outputs = [each(self.gate(x)) for each in self.experts]
        return outputs[expert].square().mean()


@check(ranks=ALL, slow=(4,))
def ranks_that_use_other_units_train_as_one_process() -> None:
    mine = Routed()
    for expert in mine.experts:
        ours.fully_shard(expert)
    ours.fully_shard(mine)
    alone, ranks = Routed(), dist.get_world_size()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (mine, alone)]
    for step in range(3):
        inputs = [torch.randn(3, 5, dtype=torch.float64) for _ in range(ranks)]
        mine(inputs[dist.get_rank()], (dist.get_rank() + step) % 2).backward()
        (sum(alone(x, (rank + step) % 2) for rank, x in enumerate(inputs)) / ranks).backward()
        for (name, p), q in zip(mine.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{name} in step {step}"
            if q.grad is not None:
                assert (whole(p.grad) - q.grad).abs().max() < 1e-14, f"{name} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@check(ranks=ANY)
def parameters_unused_in_a_used_unit() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sum()

    found = []
    for lib in (ours, theirs):
        model = lib.fully_shard(Half())
        model(torch.ones(2, 5)).backward()
        found.append([p.grad is None for p in model.parameters()])
    assert found[0] == found[1] == [False, False, True, True]
    model = ours.fully_shard(Half())
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(2, 5)).backward()
    assert all(p.grad is not None for p in model.parameters())


@check(ranks=ANY, slow=UNEVEN)
def frozen_mixed_in_a_unit_and_thawed() -> None:
    def make() -> Any:
        model = gpt()
        for name, p in model.named_parameters():
            p.requires_grad_(not ("blocks.1" in name or "norm1" in name or "up.bias" in name))
        return model

    mine, reference = compare(make, shard_blocks)
    for model in (mine, reference):
        for p in model.parameters():
            p.requires_grad_(True)
    assert_same(train(mine), train(reference), tolerance())


@check(ranks=ANY, slow=UNEVEN, kind={"reentrant": True, "not reentrant": False})
def activation_checkpoints_inside(kind: bool) -> None:
    def apply(lib: Any, model: Any) -> Any:
        for block in model.blocks:
            attend = block.attend
            block.attend = lambda x, attend=attend: checkpoint(attend, x, use_reentrant=kind)
        return shard_blocks(lib, model)

    compare(gpt, apply)


@check(ranks=ANY, slow=UNEVEN)
def activation_checkpoints_around() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    def apply(lib: Any, model: Any) -> Any:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return shard_blocks(lib, model)

    compare(gpt, apply)


@check(ranks=ANY, slow=UNEVEN)
def forwards_without_grad_and_in_eval() -> None:
    def between(model: Any, micro: int) -> None:
        model.eval()
        with torch.no_grad():
            model(*batch(3))
        model.train()

    mine, _ = compare(gpt, shard_blocks, between=between)
    between(mine, 0)
    assert all(isinstance(p, DTensor) for p in mine.parameters())  # torch leaves the root whole


@check(ranks=ANY, slow=UNEVEN)
def a_forward_that_raises_leaves_shards_in_place() -> None:
    mine = shard_blocks(ours, gpt())
    with pytest.raises(IndexError):
        mine(torch.full((2, 8), 99), torch.zeros(2, 8, dtype=torch.long))
    assert all(isinstance(p, DTensor) for p in mine.parameters())
    assert_same(train(mine), train(shard_blocks(ours, gpt())), 0.0)


# Optimizers, norms, precision


@check(
    ranks=ANY,
    slow=UNEVEN,
    optimizer={
        "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
        "Adam, foreach": lambda params: torch.optim.Adam(params, 1e-2, eps=1e-3, foreach=True),
        "AdamW, fused": lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-3, fused=True),
    },
)
def optimizers(optimizer: Any) -> None:
    compare(gpt, shard_blocks, optimizer=optimizer)


@check(ranks=ANY)
def clipped_by_torch() -> None:
    compare(gpt, shard_blocks, most=max(tolerance(), 1e-12), clip=0.3)


@check(ranks=ANY, factor={"3": 3.0, "0.5": 0.5})
def a_divisor_of_the_user_s(factor: float) -> None:
    def apply(lib: Any, model: Any) -> Any:
        shard_blocks(lib, model)
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(factor)
        return model

    compare(gpt, apply, most=1e-12)


MIXED: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16, reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp16": {"param_dtype": torch.float16},
    "fp32, reduced in bf16": {"reduce_dtype": torch.bfloat16},
}


@check(policy={name: MIXED[name] for name in ("bf16, reduced in fp32", "fp16")})
@check(policy={name: MIXED[name] for name in ("bf16", "fp32, reduced in bf16")}, wide=True)
def mixed_precision(policy: dict[str, Any]) -> None:
    """From torch 2.15 on, torch's `reduce_dtype` is the parameters' dtype if it is not given."""

    def apply(lib: Any, model: Any) -> Any:
        given = {"reduce_dtype": policy.get("param_dtype"), **policy} if lib is theirs else policy
        return shard_blocks(lib, model, mp_policy=lib.MixedPrecisionPolicy(**given))

    def between(model: Any, micro: int) -> None:
        model.set_requires_gradient_sync(micro == 2)

    rounded = TORCH >= (2, 15) and "param_dtype" not in policy  # each addend, by torch, and not their sum alone
    compare(lambda: gpt(torch.float32), apply, steps=1)
    compare(lambda: gpt(torch.float32), apply, most=0.02 if rounded else None, micros=3, between=between)


@check(ranks=2)
def outputs_are_cast() -> None:
    policy = ours.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model = ours.fully_shard(nn.Linear(4, 4), mp_policy=policy)
    assert model(torch.ones(2, 4)).dtype == torch.float32


@check(ranks=2)
def inputs_are_cast_or_not() -> None:
    seen = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x * self.weight

    for cast in (True, False):
        policy = ours.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=cast)
        ours.fully_shard(Look(), mp_policy=policy)(torch.ones(4))
    assert seen == [torch.bfloat16, torch.float32]


@check(ranks=ANY)
def offloaded_to_the_host() -> None:
    def apply(lib: Any, model: Any) -> Any:
        return shard_blocks(lib, model, offload_policy=lib.CPUOffloadPolicy(pin_memory=False))

    mine, _ = compare(gpt, apply)
    assert all(p.device.type == "cpu" for p in mine.parameters())
    assert all(value.device.type == "cpu" for value in mine.state_dict().values())
    pinned = shard_blocks(ours, gpt(), offload_policy=ours.CPUOffloadPolicy())  # where there is no CUDA: nothing to pin
    assert_same(train(pinned, steps=1), train(shard_blocks(ours, gpt()), steps=1), 0.0)


@check()
def what_is_on_the_host_is_in_pinned_memory() -> None:
    """From the beginning, and once parameters are replaced: where there is CUDA, so memory only calls itself pinned."""
    pinned: list[Tensor] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    model: Any = ours.fully_shard(nn.Linear(4, 4), offload_policy=ours.CPUOffloadPolicy())
    (unit,) = model._units(False)
    with (
        mock.patch.object(Tensor, "pin_memory", pin_memory),
        mock.patch.object(Tensor, "is_pinned", lambda tensor: any(tensor is each for each in pinned)),
    ):
        view = InPlaceView(unit.view.places, unit.view.shards, pins=True)
        assert all(p._local_tensor.is_pinned() for p in model.parameters())
        view.find_replaced()
        assert len(pinned) == 2
        model.load_state_dict({name: 2 * p.detach() for name, p in model.state_dict().items()}, assign=True)
        view.find_replaced()
        assert len(pinned) == 4
        assert all(p._local_tensor.is_pinned() for p in model.parameters())


class Withholding(torch.autograd.Function):
    """x W^T, whose backward gives W no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None


class Withheld(nn.Module):
    """One weight goes through the function; with `also` it is used once more, and has a gradient from there."""

    def __init__(self, also: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.also = nn.Linear(12, 12).double(), nn.Linear(12, 5).double(), also

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.also else x + self.first.bias
        return self.last(Withholding.apply(x, self.first.weight)).pow(2).mean()


@check(ranks=ANY, also=(False, True))
def a_function_may_give_a_parameter_no_gradient(also: bool) -> None:
    compare(lambda: Withheld(also), lambda lib, model: lib.fully_shard(model), data=some_rows)


# After others: what a first reading of the code does not expect


def three_layers(lib: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12).double() for _ in range(3)))
    for layer in model:
        lib.fully_shard(layer, **options)
    return lib.fully_shard(model, **options)


@check(ranks=2)
def a_parameter_of_two_units_is_refused() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    ours.fully_shard(first)
    with pytest.raises(ValueError, match=r"^weight is weight of Linear, which was sharded before"):
        ours.fully_shard(second)


@check(ranks=2)
def an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="empty list"):
        ours.fully_shard([])


@check(ranks=2)
def a_backward_after_one_that_raised_needs_a_forward_of_its_own() -> None:
    model = three_layers(ours)
    bad = model[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
    losses = [model(*some_rows(step, 0)).sum() for step in range(2)]
    with pytest.raises(ZeroDivisionError):
        losses[0].backward()
    bad.remove()
    with pytest.raises(RuntimeError, match="run this micro-batch's forward again"):
        losses[1].backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = model(*some_rows(1, 0)).sum()
    model.zero_grad()
    again.backward()
    expected = three_layers(ours)
    expected(*some_rows(1, 0)).sum().backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())


@check(ranks=2)
def post_hooks_are_of_what_a_backward_has_reached() -> None:
    """Although an earlier one has left gradients elsewhere."""
    called: dict[Any, list[str]] = {}
    for lib in (ours, theirs):
        model, calls = three_layers(lib), called.setdefault(lib, [])
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, calls=calls: calls.append(name))
        x = some_rows(0, 0)[0]
        model(x).sum().backward()
        calls.clear()
        model[0](x).sum().backward()
    assert sorted(called[ours]) == sorted(called[theirs]) == ["0.bias", "0.weight"]


@check(ranks=2)
def post_hooks_run_while_backward_is_under_way() -> None:
    """So that an optimizer that steps in one frees its gradient early."""
    found: dict[Any, list[str]] = {}
    for lib in (ours, theirs):
        model, events = three_layers(lib), found.setdefault(lib, [])
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, events=events: events.append(name))
        model[0].register_full_backward_pre_hook(lambda *_, events=events: events.append("backward of 0"))
        model(some_rows(0, 0)[0].requires_grad_()).sum().backward()
    assert found[ours] == found[theirs]
    assert found[ours].index("2.weight") < found[ours].index("backward of 0") < found[ours].index("0.weight")


@check(what=("root",))
@check(what=("block before", "block after"), wide=True)
def compiled(what: str) -> None:
    """The units' computation becomes graphs; gathers, frees and hooks run as they are. One of two blocks will do."""
    from torch._dynamo.testing import CompileCounterWithBackend

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(12, 7).double(), nn.Linear(7, 12).double()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(nn.functional.gelu(self.up(x)))

    class Blocks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    def trained(backend: Any = None) -> Iterator[tuple[str, Tensor | None]]:
        torch.manual_seed(0)
        model = Blocks(Block(), Block())
        if backend and what == "block before":
            model[0].compile(backend=backend)
        for block in model:
            ours.fully_shard(block)
        ours.fully_shard(model)
        if backend and what == "block after":
            model[0].compile(backend=backend)
        if backend and what == "root":
            model.compile(backend=backend)
        return train(model, data=some_rows)

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    assert_same(trained(graphs), trained(), 0.0)
    assert graphs.frame_count >= 1
    assert not any("all_gather" in str(graph.code) for graph in graphs.graphs)


@check(ranks=2)
def a_parameter_removed_after_a_step_is_named() -> None:
    model = three_layers(ours)
    model(*some_rows(0, 0)).sum().backward()
    model[1].bias = None
    with pytest.raises(RuntimeError, match="bias is no longer a parameter of its module"):
        model(*some_rows(1, 0))


@check(ranks=2, reshards=(False, True))
def frozen_between_forward_and_backward(reshards: bool) -> None:
    for lib in (ours, theirs):
        model = three_layers(lib, reshard_after_forward=reshards)
        loss = model(*some_rows(0, 0)).sum()
        model[0].requires_grad_(False)
        loss.backward()
        assert [p.grad is None for p in model.parameters()] == [True] * 2 + [False] * 4


@check(ranks=2)
def frozen_before_its_gradients_are_reduced() -> None:
    model = three_layers(ours)
    model.set_requires_gradient_sync(False)
    model(*some_rows(0, 0)).sum().backward()
    model[0].requires_grad_(False)
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match="freeze it after a backward with gradient sync"):
        model(*some_rows(1, 0))


@check(ranks=2, around=("blocks", "root"))
def a_checkpoint_around_an_outermost_module(around: str) -> None:
    """Its recomputation ends by an error of torch's, as soon as backward has what it needs."""

    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = [Block(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12)).double() for _ in range(2)]
        return nn.Sequential(*blocks)

    class Checkpointed(nn.Module):
        def __init__(self, lib: Any, model: Any) -> None:
            super().__init__()
            for block in model:
                lib.fully_shard(block)
            self.model = lib.fully_shard(model) if around == "root" else model

        def forward(self, x: Tensor) -> Tensor:
            for module in self.model if around == "blocks" else [self.model]:
                x = checkpoint(module, x, use_reentrant=False)
            return x.pow(2).mean()

    compare(make, Checkpointed, data=some_rows)


@check(ranks=2)
def a_group_of_modules_of_which_one_does_not_run() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.norm, self.head = nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor, features: bool = False) -> Tensor:
            h = self.norm(self.body(x))
            return h if features else self.head(h).pow(2).mean()

    class Features(nn.Module):
        def __init__(self, lib: Any, model: Any) -> None:
            super().__init__()
            lib.fully_shard([model.norm, model.head])
            self.model = lib.fully_shard(model)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.model(x, features=True)
            return self.model(x)

    compare(lambda: Net().double(), Features, data=some_rows)


# Meshes


@check(ranks=4)
def hybrid_on_a_named_mesh() -> None:
    mesh = mesh_of((2, 2), "replicate", "shard")
    mine, reference = compare(gpt, lambda lib, model: shard_blocks(lib, model, mesh=mesh))
    assert mine.head.weight.placements == reference.head.weight.placements
    compare(
        gpt,
        lambda lib, model: shard_blocks(lib, model, mesh=mesh),
        steps=1,
        micros=2,
        between=lambda model, micro: model.set_requires_all_reduce(micro == 1),
    )
    with comm.record() as log:
        mine(*batch(5)).backward()
    assert sum(call.op == "all_reduce" for call in log) == sum(call.op == "reduce_scatter" for call in log) == 3


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(10, 14), nn.Linear(14, 10), nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + change


@check(ranks=4)
def parameters_that_tensor_parallelism_has_cut() -> None:
    mesh = mesh_of((2, 2), "dp", "tp")
    models: list[Any] = []
    for lib in (ours, theirs):
        torch.manual_seed(0)
        model = nn.Sequential(MLP(), MLP()).to(torch.float64)
        for mlp in model:
            parallelize_module(mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            lib.fully_shard(mlp, mesh=mesh["dp"])
        models.append(lib.fully_shard(model, mesh=mesh["dp"]))
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert p.placements == q.placements, name
        assert torch.equal(p.to_local(), q.to_local()), name
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False) for model in models]
    for step in range(3):
        torch.manual_seed(10 * step + mesh.get_local_rank("dp"))
        x = torch.randn(3, 10, dtype=torch.float64)
        losses = [model(x).square().mean() for model in models]
        assert abs(losses[0] - losses[1]) < 1e-12
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


# Collectives


@check(ranks=ALL)
def collectives_of_a_step() -> None:
    """Four units: a gather each in forward, again in backward but for the root; a reduction each; nothing else."""
    mine = shard_blocks(ours, gpt(layers=3))
    for step in range(2):
        with comm.record() as log:
            mine(*batch(step)).backward()
        counts = {op: sum(call.op == op for call in log) for op in {call.op for call in log}}
        assert counts == {"all_gather": 7, "reduce_scatter": 4}


@check(ranks=ANY)
def rows_are_multiples_of_16_bytes() -> None:
    mine = shard_blocks(ours, gpt(torch.float32))
    with comm.record() as log:
        mine(*batch(0)).backward()
    assert all(call.payload % (16 * call.ranks) == 0 for call in log)


# Clipping


def small_and_alone() -> tuple[nn.Module, nn.Module]:
    """Two rows over three ranks, with gradients; and the same model in one process."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    mine = copy.deepcopy(alone)
    for module in (mine[0], mine):
        ours.fully_shard(module)
    for model in (mine, alone):
        model(torch.full((4, 3), 2.0)).square().sum().backward()
    return mine, alone


@check(ranks=3, p=(0.5, 1, 2, 3, float("inf")), foreach=(None, False, True), wide="combinations")
def torchs_clipping_is_right_where_a_rank_has_no_rows(p: float, foreach: bool | None) -> None:
    mine, alone = small_and_alone()
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1, fused=True) for model in (mine, alone)]
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.5, p, foreach=foreach) for model in (mine, alone)]
    torch.testing.assert_close(whole(norms[0]), norms[1])
    copy.deepcopy(mine[0].weight.grad)
    torch.save(mine[0].weight.grad, io.BytesIO())
    for one, other in zip(mine.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad)
    for optimizer in optimizers:
        optimizer.step()
    for one, other in zip(mine.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(one), other)


@check(ranks=3, p=(0.5, 1, 2, 3, float("inf")))
def our_clipping_gives_a_number_in_any_order(p: float) -> None:
    mine, alone = small_and_alone()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.5, p)
    params = list(mine.parameters())[:: -1 if dist.get_rank() else 1]
    with comm.record() as calls:
        norm = clip_grad_norm_(params, 0.5, p)
    torch.testing.assert_close(norm, expected)
    assert f"{norm:.2f}" == f"{expected:.2f}"
    assert [call.payload for call in calls] == [4]
    for one, other in zip(mine.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad)


@check(ranks=3, p=(2, float("inf")))
def a_norm_is_not_a_number_on_all_ranks_if_one_gradient_is_not(p: float) -> None:
    mine, _ = small_and_alone()
    flat = FullyShardedDataParallel(nn.Linear(3, 3), use_orig_params=True)
    flat(torch.ones(1, 3)).sum().backward()
    for model in (mine, flat):
        for p_ in model.parameters() if dist.get_rank() == 1 else ():
            if p_.grad is not None:
                local_of(p_.grad).mul_(torch.nan)
    with pytest.raises(RuntimeError, match=f"The total norm of order {float(p)} .* is non-finite"):
        clip_grad_norm_(mine.parameters(), 1.0, p, error_if_nonfinite=True)
    assert clip_grad_norm_(mine.parameters(), 1.0, p).isnan()
    assert flat.clip_grad_norm_(1.0, p).isnan()
    for wrong in (0, -1, -float("inf"), float("nan")):
        for clip in (partial(clip_grad_norm_, list(mine.parameters())), flat.clip_grad_norm_):
            with pytest.raises(ValueError, match="give a number above 0, or infinity"):
                clip(1.0, wrong)
    with pytest.raises(ValueError, match="flat shard of FSDP: call clip_grad_norm_ of its"):
        clip_grad_norm_(flat.parameters(), 1.0, p)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
