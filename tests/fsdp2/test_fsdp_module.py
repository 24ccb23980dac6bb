"""What `fully_shard` makes of a module: its class, its methods, its state; and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside_torch import assert_same, batch, compare, gpt, local, ours, shard_blocks, theirs, train, whole
from on_ranks import Checks, shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from minifsdp import comm, device
from minifsdp.fsdp2.hooks import state_of
from minifsdp.fsdp2.prefetch import ListedPrefetch

check = Checks(__name__)
ANY = (2, 3)
UNEVEN = (3,)
"""Left to `make test-full` where the shards' sizes do not matter to what a check is about: others have uneven ones."""


# The class


@check()
def only_the_module_s_class_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert ours.fully_shard(model) is model
    assert type(model).__name__ == "FSDPSequential"
    assert isinstance(model, nn.Sequential)
    assert isinstance(model, ours.FSDPModule)
    assert type(model[0]) is nn.Linear
    assert type(model[:2]) is nn.Sequential


@check()
def names_stay() -> None:
    plain, sharded = gpt(), shard_blocks(ours, gpt())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in sharded.named_parameters()]
    assert list(plain.state_dict()) == list(sharded.state_dict())
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in sharded.parameters())


@check()
def a_module_without_parameters_of_its_own() -> None:
    inner = nn.Linear(4, 4)
    outer = nn.Sequential(ours.fully_shard(inner), nn.ReLU())
    ours.fully_shard(outer)
    assert outer.unshard() is None
    outer.unshard(async_op=True).wait()
    outer(torch.ones(2, 4)).sum().backward()
    assert inner.weight.grad is not None


# Refusals


PLACED = {"shard_placement_fn": lambda p: Shard(1)}


@check()
def what_is_refused() -> None:
    class MixedPrecisionPolicy(ours.MixedPrecisionPolicy):
        param_dtype_override_fn = print  # a field of torch 2.15's

    world = dist.get_world_size()
    once = ours.fully_shard(nn.Linear(4, 4))
    noncontiguous = nn.Linear(4, 6)
    noncontiguous.weight = nn.Parameter(torch.ones(4, 6).t())
    wide = nn.Linear(4, 6, dtype=torch.bfloat16)
    wide.weight.grad_dtype = torch.float32
    scalar = nn.Module()
    scalar.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    unnamed = init_device_mesh("cpu", (1, world))
    cube = init_device_mesh("cpu", (1, 1, world), mesh_dim_names=("a", "b", "c"))
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (once, {}, ValueError, "applied to this FSDPLinear before"),
        (nn.ModuleList([nn.Linear(4, 4)]), {}, ValueError, "does not support containers"),
        (nn.ModuleDict({"a": nn.Linear(4, 4)}), {}, ValueError, "does not support containers"),
        (nn.Linear(4, 4), {"mesh": cube}, ValueError, "1D or 2D DeviceMesh"),
        (nn.Linear(4, 4), {"mesh": unnamed}, AssertionError, "mesh_dim_names"),
        (scalar, {}, ValueError, "scale to a 1D tensor"),
        (noncontiguous, {}, NotImplementedError, "non-contiguous parameters: weight"),
        (wide, {}, NotImplementedError, "weight has grad_dtype torch.float32"),
        (nn.Linear(4, 4), PLACED, ValueError, "bias, which has 1 dimension"),
        (
            nn.Linear(5, 4, bias=False),
            {"shard_placement_fn": lambda p: Shard(1)},
            NotImplementedError,
            "uneven sharding",
        ),
        (nn.Linear(4, 4), {"shard_placement_fn": lambda p: 0}, ValueError, "return Shard"),
        (nn.Linear(4, 4), {"mp_policy": MixedPrecisionPolicy()}, NotImplementedError, "override_fn"),
        (nn.Linear(4, 4), {"reshard_after_forward": 5}, ValueError, "should be a factor of"),
        (nn.Linear(4, 4), {"reshard_after_forward": "yes"}, TypeError, "give True, False, None or a number"),
    ]
    for module, options, error, text in refused:
        with pytest.raises(error, match=text):
            ours.fully_shard(module, **options)
        if module is not once:
            assert not any(isinstance(p, DTensor) for p in module.parameters()), text  # nothing has begun
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(once)
    with pytest.raises(ValueError, match="Expects FSDPModule but got Linear"):
        once.set_modules_to_forward_prefetch([nn.Linear(1, 1)])


@check()
def a_child_before_its_root() -> None:
    model = nn.Sequential(ours.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
    ours.fully_shard(model)
    model[0](torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
    with pytest.raises(RuntimeError, match="already been lazily initialized for FSDPLinear"):
        model(torch.ones(2, 4))


# Meta, dtypes, replaced parameters


@check(ranks=ANY)
def built_on_meta() -> None:
    with torch.device("meta"):
        model = gpt()
    shard_blocks(ours, model)
    assert all(p.device.type == "meta" for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"blocks\.0\.|embed.weight.*on meta"):
        model(*batch(0))
    model.to_empty(device="cpu")
    source = shard_blocks(ours, gpt())
    model.load_state_dict(source.state_dict())
    assert_same(train(model), train(source), 0.0)


@check(ranks=ANY)
def loaded_by_assignment() -> None:
    with torch.device("meta"):
        model = shard_blocks(ours, gpt())
    source = shard_blocks(ours, gpt())
    state = source.state_dict()
    first = {name: value for name, value in state.items() if name.startswith("blocks.0")}
    model.load_state_dict(first, strict=False, assign=True)
    model.load_state_dict(
        {name: value for name, value in state.items() if name not in first}, strict=False, assign=True
    )
    loss = model(*batch(0))
    assert loss == shard_blocks(ours, gpt())(*batch(0))


@check(ranks=ANY, slow=UNEVEN, dtype=(torch.float32, torch.bfloat16))
def cast_after_sharding(dtype: torch.dtype) -> None:
    mine, reference = (shard_blocks(lib, gpt()).to(dtype) for lib in (ours, theirs))
    assert_same(train(mine), train(reference), 0.0 if dist.get_world_size() == 2 else 0.1)
    mine.to(torch.float64)  # torch does not follow once it has run
    for p in mine.parameters():
        assert p.dtype == p.to_local().dtype == torch.float64
    mine(*batch(0)).backward()
    assert all(p.grad.dtype == torch.float64 for p in mine.parameters())


# By hand


@check(ranks=ANY)
def gathered_by_hand() -> None:
    model = shard_blocks(ours, gpt())
    block = model.blocks[0]
    whole_before = [whole(p) for p in block.parameters()]
    model.blocks[1].unshard(async_op=True)
    block.unshard()  # before any forward
    for p, before in zip(block.parameters(), whole_before, strict=True):
        assert not isinstance(p, DTensor)
        assert torch.equal(p, before)
    block.reshard()
    assert all(isinstance(p, DTensor) for p in block.parameters())
    handle = block.unshard(async_op=True)
    handle.wait()
    handle.wait()
    with comm.record() as log:
        model(*batch(0))
    assert sum(call.op == "all_gather" for call in log) == 2  # the root's and block 2's


@check(ranks=ANY, slow=UNEVEN)
def gathered_by_hand_after_a_step() -> None:
    """The values are those that the optimizer has written."""
    model = shard_blocks(ours, gpt())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(2):
        for block in model.blocks:
            block.unshard()
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference = shard_blocks(ours, gpt())
    assert_same(((n, local(p)) for n, p in model.named_parameters()), _trained(reference, 2), 0.0)


@check(before=(True, False))
def what_is_frozen_while_it_is_gathered_trains_on(before: bool) -> None:
    """The flag of a leaf ends with it: from the next forward on, that of the sharded parameter counts."""
    model: Any = nn.Sequential(ours.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
    ours.fully_shard(model)
    if not before:
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    model[0].unshard()
    model[0].weight.requires_grad_(False)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        assert all(p.requires_grad and p.grad is not None for p in model.parameters())
        model.zero_grad()


def _trained(model: Any, steps: int) -> Any:
    for _ in train(model, steps, optimizer=lambda params: torch.optim.SGD(params, 0.5)):
        pass
    return ((name, local(p)) for name, p in model.named_parameters())


@check(ranks=ANY, slow=UNEVEN)
def prefetched_by_lists() -> None:
    model, reference = shard_blocks(ours, gpt()), shard_blocks(ours, gpt())
    blocks = list(model.blocks)
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - 2) : number][::-1])
    with comm.record() as log:
        model(*batch(0)).backward()
    assert sum(call.op == "all_gather" for call in log) == 7
    model.zero_grad()
    assert_same(train(model), train(reference), 0.0)


@check()
def lists_are_followed() -> None:
    """Block 0 names block 2 in forward: it is gathered before block 0 computes."""
    model = shard_blocks(ours, gpt(layers=4))
    model(*batch(0)).backward()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    seen = []
    handle = model.blocks[0].register_forward_hook(
        lambda *_: seen.append([module._units(False)[0].state.name for module in model.blocks])
    )
    model(*batch(1)).backward()
    handle.remove()
    assert seen[0][2] in ("GATHERING", "UNSHARDED")


@check(ranks=ANY, slow=UNEVEN)
def methods_that_compute() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

        def encode(self, x: Tensor) -> Tensor:
            return 2 * x @ self.weight

    model = ours.fully_shard(Encoder())
    plain = Encoder()
    ours.register_fsdp_forward_method(model, "encode")
    ours.register_fsdp_forward_method(plain, "encode")
    x = torch.ones(2, 5)
    model.encode(x).sum().backward()
    plain.encode(x).sum().backward()
    assert torch.equal(whole(model.weight.grad), plain.weight.grad)
    assert isinstance(model.weight, DTensor)
    with pytest.raises(ValueError, match="does not have a method decode"):
        ours.register_fsdp_forward_method(model, "decode")


@check(ranks=ANY, slow=UNEVEN)
def no_gather_in_backward_if_told_so() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x)).sum()

    gathers, gradients = [], []
    for told in (True, False):
        model = Tokens()
        ours.fully_shard(model.embed).set_unshard_in_backward(told)
        ours.fully_shard(model)
        with comm.record() as log:
            model(torch.arange(5)).backward()
        gathers.append(sum(call.op == "all_gather" for call in log))
        gradients.append(whole(model.embed.weight.grad))
    assert gathers == [3, 2]
    assert torch.equal(*gradients)


@check(ranks=ANY, slow=UNEVEN)
def hooks_on_sharded_parameters() -> None:
    """Once a backward, with the mean; a step inside equals one outside, bit for bit."""
    model, reference = shard_blocks(ours, gpt()), shard_blocks(ours, gpt())
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    calls: list[Any] = []

    def step(p: Any) -> None:
        calls.append(p)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for number in range(2):
        model(*batch(number)).backward()
    assert len(calls) == 2 * len(optimizers)
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    for number in range(2):
        reference(*batch(number)).backward()
        plain.step()
        plain.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(local(p), local(q))


# State


@check(ranks=ANY)
def state_dicts_share_memory_and_show_shards() -> None:
    model = shard_blocks(ours, gpt(), reshard_after_forward=False)
    model(*batch(0))  # leaves parameters whole
    state = model.state_dict()
    for name, p in model.named_parameters():
        assert isinstance(state[name], DTensor)
        assert state[name].to_local().untyped_storage().data_ptr() == p.to_local().untyped_storage().data_ptr()
    before = {name: p.to_local().data_ptr() for name, p in model.named_parameters()}
    model.load_state_dict({name: value.clone() for name, value in state.items()})
    assert {name: p.to_local().data_ptr() for name, p in model.named_parameters()} == before


@check(ranks=ANY)
def saved_loaded_and_moved_to_torch_and_to_a_plain_model() -> None:
    model = shard_blocks(ours, gpt())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(2):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    others: list[Any] = [shard_blocks(lib, gpt()) for lib in (ours, theirs)]
    with shared_folder() as folder:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder)
        optimizers = [torch.optim.AdamW(other.parameters(), 1e-2) for other in others]
        for other, theirs_optimizer in zip(others, optimizers, strict=True):
            fresh = dict(zip(("model", "optimizer"), get_state_dict(other, theirs_optimizer), strict=True))
            dcp.load(fresh, checkpoint_id=folder)
            set_state_dict(
                other,
                theirs_optimizer,
                model_state_dict=fresh["model"],
                optim_state_dict=fresh["optimizer"],
            )
    losses = []
    for each, stepper in zip([model, *others], [optimizer, *optimizers], strict=True):
        each(*batch(5)).backward()
        stepper.step()
        losses.append(each(*batch(6)).item())
    assert losses[0] == losses[1]
    assert abs(losses[0] - losses[2]) < 1e-12
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        plain = gpt()
        plain.load_state_dict(full)
        assert abs(plain(*batch(6)).item() - losses[0]) < 1e-12
    target = shard_blocks(ours, gpt())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target, full if dist.get_rank() == 0 else {}, options=options)
    assert all(torch.equal(local(p), local(q)) for p, q in zip(model.parameters(), target.parameters(), strict=True))


# What torch's module can do


ABSENT = {  # named in docs/parity.md
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
}
OF_TORCH_215 = {"set_keep_unsharded_storage", "set_manual_backward_finalization", "finalize_backward"}  # as above


def test_methods_are_torch_s() -> None:
    names = {name for name in dir(theirs.FSDPModule) if not name.startswith("_")}
    assert names - {name for name in dir(ours.FSDPModule) if not name.startswith("_")} - ABSENT <= OF_TORCH_215


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_what_is_absent_says_so(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}: .*;"):
        getattr(ours.FSDPModule, name)(None, 1)


@check(ranks=ANY, slow=UNEVEN, how={"sum": 1, "factor": 2, "hook": 3})
def reductions_of_the_user_s(how: int) -> None:
    """A hook that halves, a sum instead of a mean, another divisor."""

    def apply(lib: Any, model: Any) -> Any:
        shard_blocks(lib, model)
        block = model.blocks[1]
        if how == 1:
            block.set_force_sum_reduction_for_comms(True)
        elif how == 2:
            block.set_gradient_divide_factor(3.0)
        else:
            block.set_all_reduce_hook(lambda gradients: gradients.mul_(0.5))
        return model

    compare(gpt, apply)


@check()
def a_hook_is_called_once_a_backward() -> None:
    model = shard_blocks(ours, gpt())
    seen: list[int] = []
    model.blocks[0].set_all_reduce_hook(lambda gradients: seen.append(gradients.numel()))
    for step in range(2):
        model(*batch(step)).backward()
    kept = sum(-(-p.shape[0] // 2) * p[0].numel() for p in gpt().blocks[0].parameters())
    assert seen == 2 * [kept + kept % 2]  # to 16 bytes


class OneBuffer:
    """A user's memory: the same for every collective of a size, if it `serves_again`; and a count."""

    def __init__(self, serves_again: bool) -> None:
        self.buffers: dict[Any, Tensor] = {}
        self.serves_again, self.calls = serves_again, 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = tuple(size), dtype
        if key not in self.buffers or not self.serves_again:
            self.buffers[key] = torch.empty(*size, dtype=dtype, device=device)
        return self.buffers[key]


class GathersByLists(OneBuffer):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        parts = list(output_tensor.view(group.size(), -1).unbind())
        return dist.all_gather(parts, input_tensor.clone(), group=group, async_op=async_op)


class ReducesByAllReduce(OneBuffer):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        dist.all_reduce(input_tensor, group=group)
        rows = input_tensor.view(group.size(), -1)
        output_tensor.copy_(rows[group.rank()])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


@check(ranks=ANY)
def collectives_of_the_user_s() -> None:
    used: dict[Any, list[OneBuffer]] = {ours: [], theirs: []}

    def apply(lib: Any, model: Any) -> Any:
        shard_blocks(lib, model)
        used[lib] = [GathersByLists(True), ReducesByAllReduce(lib is ours)]  # torch's gradients are views of it
        for module in (model, *model.blocks[1:]):
            module.set_custom_all_gather(used[lib][0])
            module.set_custom_reduce_scatter(used[lib][1])
        return model

    mine, _ = compare(lambda: gpt(torch.float32), apply, most=1e-6)
    assert [each.calls for each in used[ours]] == [each.calls for each in used[theirs]] == [10, 6]  # of two steps
    with comm.record() as log:
        mine(*batch(5)).backward()
    assert [call.op for call in log] == ["all_gather", "all_gather", "reduce_scatter"]  # of the block that has none


@check(ranks=ANY, slow=UNEVEN)
def reductions_by_a_communicator_of_their_own() -> None:
    def apply(lib: Any, model: Any) -> Any:
        shard_blocks(lib, model)
        if lib is ours:  # torch has it since 2.13
            model.set_separate_reduce_scatter_group()
        return model

    mine, _ = compare(gpt, apply)
    groups: list[dict[str, set[str]]] = []
    for enable in (True, False):
        mine.set_separate_reduce_scatter_group(enable)
        with comm.record() as log:
            mine(*batch(5)).backward()
        groups.append({op: {call.group for call in log if call.op == op} for op in ("all_gather", "reduce_scatter")})
    assert all(len(each) == 1 for found in groups for each in found.values())
    assert groups[0]["all_gather"] != groups[0]["reduce_scatter"]
    assert groups[1]["all_gather"] == groups[1]["reduce_scatter"] == groups[0]["all_gather"]


@check(most=(1, 2, 3))
def as_many_packed_gradients_as_allowed(most: int) -> None:
    """On a device with queues."""
    model = shard_blocks(ours, gpt())
    ours.use_schedule(model, ListedPrefetch)
    model.blocks[0].set_reduce_scatter_max_input_buffers(most)
    units, under_way = model._units(True), []
    model(*batch(0)).backward()
    for unit in units:
        issue = unit._reduce
        unit._reduce = lambda issue=issue: (issue(), under_way.append(1 + sum(each.is_reducing for each in units)))[0]
    model(*batch(1)).backward()
    assert max(under_way) == most
    with pytest.raises(ValueError, match="must be a positive int, got 0"):
        model.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(TypeError, match="must be an int, got bool"):
        model.set_reduce_scatter_max_input_buffers(True)


@check(on_device=(True, False), reshard=(True, False), change=("list", "limit"))
def a_change_inside_a_backward_loses_no_gradient(on_device: bool, reshard: bool, change: str) -> None:
    """Reductions are due and in progress then."""
    still, model = (shard_blocks(ours, gpt(), reshard_after_forward=reshard) for _ in range(2))
    changes = []

    def then(gradient: Tensor) -> None:
        changes.append(change)
        if change == "list":
            model.blocks[0].set_modules_to_backward_prefetch([])
        else:
            model.set_reduce_scatter_max_input_buffers(2)

    for each in (still, model):
        if on_device:
            ours.use_schedule(each, ListedPrefetch)
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: output.register_hook(then) and None)
    assert_same(train(model), train(still), 0.0)
    assert len(changes) == 2 * len(model.blocks)


@check()
def lists_keep_the_schedule() -> None:
    """With its streams: new ones would have memory of their own in the caching allocator."""
    model = shard_blocks(ours, gpt())
    model(*batch(0)).backward()
    schedule = state_of(model).engine.schedule
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    assert state_of(model).engine.schedule is schedule
    assert schedule.forward_lists == {state_of(model.blocks[0]).unit: [state_of(model.blocks[2]).unit]}


@check()
def gathers_wait_for_the_event_of_the_user_s() -> None:
    """In place of all that is queued; once."""
    model = shard_blocks(ours, gpt())
    model(*batch(0)).backward()
    event, seen = device.CpuEvent(), list[device.Command]()
    device.command_observers.append(seen.append)
    try:
        model.set_post_optim_event(event)
        model(*batch(1)).backward()
        waits = sum(each.verb == "wait" and each.subject is event for each in seen)
        model(*batch(1)).backward()
    finally:
        device.command_observers.pop()
    assert waits == 1 == sum(each.verb == "wait" and each.subject is event for each in seen)


class Raises(torch.autograd.Function):
    """A backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise ArithmeticError("in the middle")


@check(ranks=ANY, slow=UNEVEN)
def it_goes_on_after_an_exception() -> None:
    """In forward and in backward: as if the iteration had not been."""

    def raise_in_forward(*_: Any) -> None:
        raise ArithmeticError("in the middle")

    def raise_in_backward(module: Any, inputs: Any, output: Any) -> Any:
        return Raises.apply(output)

    mine, reference = shard_blocks(ours, gpt()), shard_blocks(ours, gpt())
    for hook in (raise_in_forward, raise_in_backward):
        handle = mine.blocks[1].norm1.register_forward_hook(hook)
        with pytest.raises(ArithmeticError, match="in the middle"):
            mine(*batch(0)).backward()
        handle.remove()
        with pytest.raises(RuntimeError, match="call it on the root"):
            mine.blocks[0].reset_iter_state()
        mine.reset_iter_state()
        assert all(isinstance(p, DTensor) and p.grad is None for p in mine.parameters())
    assert_same(train(mine), train(reference), 0.0)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
