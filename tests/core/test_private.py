"""Torch's private interfaces: nobody but minifsdp.private uses them, and for each, what would break without it."""

from __future__ import annotations

import ast
import colorsys
import datetime
import inspect
import sched
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from minifsdp import private
from minifsdp.private import dtensor

check = Checks(__name__)

PRIVATE = Path(private.__file__).parent
PACKAGE = PRIVATE.parent


# Nobody else


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Private names of torch in a module: imported, or reached through its packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if is_private(name.name))
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from (path for name in node.names if is_private(path := f"{node.module}.{name.name}"))
        elif isinstance(node, ast.Attribute) and is_private(path := ast.unparse(node)):
            yield path


def is_private(path: str) -> bool:
    root, *names = path.split(".")
    return root in ("torch", "dist") and any(name.startswith("_") and not name.startswith("__") for name in names)


@cache
def attributes_of_private() -> set[str]:
    return set().union(*(attributes(ast.parse(path.read_text())) for path in PRIVATE.iterdir() if path.suffix == ".py"))


def attributes(tree: ast.AST) -> set[str]:
    """Private attributes that are asked of others."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    found = [node for node in found if node.attr.startswith("_") and not node.attr.startswith("__")]
    return {node.attr for node in found if ast.unparse(node.value) not in ("self", "cls")}


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PACKAGE.rglob("*.py")) if PRIVATE not in path.parents],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_a_module_leaves_torchs_private_names_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert list(private_uses(tree)) == []
    assert attributes(tree) & attributes_of_private() == set()


def test_such_names_are_found() -> None:
    text = "import torch._C\nfrom torch._utils import a\nfrom torch.x import _b\ntorch.cuda._sleep(1)\ndist.get_rank()"
    assert sorted(private_uses(ast.parse(text))) == ["torch._C", "torch._utils.a", "torch.cuda._sleep", "torch.x._b"]


def test_each_has_a_test_here_that_says_what_would_break() -> None:
    on_ranks = {name for _, name in (each.values for each in check.params)}
    for name in (*private.__all__, *dtensor.__all__):
        shown_by = TOGETHER.get(name, name)
        test = globals().get(shown_by) if shown_by in on_ranks else globals().get(f"test_{shown_by.lower()}")
        assert test is not None, name
        assert "Without it" in (test.__doc__ or ""), name


def test_asked_by_state_dict_functions() -> None:
    """Without it torch's functions save a rank's shard of an optimizer's state for the whole, in silence."""
    from torch.distributed.checkpoint import state_dict as functions

    class Asked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def __getattr__(self, name: str) -> object:
            if name == private.ASKED_BY_STATE_DICT_FUNCTIONS:
                raise InterruptedError
            return super().__getattr__(name)

    model = nn.Sequential(Asked())
    optim = torch.optim.SGD(model.parameters(), 0.1)
    for call in (
        lambda: functions.get_state_dict(model, optim),
        lambda: functions.get_model_state_dict(model),
        lambda: functions.get_optimizer_state_dict(model, optim),
        lambda: functions.set_state_dict(model, optim, model_state_dict={"a": 1}, optim_state_dict={"state": {}}),
        lambda: functions.set_model_state_dict(model, {"a": 1}),
        lambda: functions.set_optimizer_state_dict(model, optim, {"state": {}}),
    ):
        with pytest.raises(InterruptedError):
            call()


# Wrappers of torch's


@check()
def closed_to_torchs_wrappers() -> None:
    """Without it torch's wrappers shard what ours has: `Invariant encountered: value was None`, or a wrong loss."""
    from torch.distributed._composable import checkpoint, replicate
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    private.close_to_torchs_wrappers(model[0], "ours")
    for wrap in (fully_shard, lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu"))):
        with pytest.raises(RuntimeError, match="ours"):
            wrap(model)
    for wrap in (fully_shard, replicate):
        with pytest.raises(RuntimeError, match="ours"):
            wrap(model[0])
    checkpoint(model[0])
    assert len(get_model_state_dict(model)) == 4


@check()
def known_torchs_wrappers() -> None:
    """Without it ours shard and average what torch's have, in silence."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    cpu = torch.device("cpu")
    for wrap in (fully_shard, lambda module: FullyShardedDataParallel(module, device_id=cpu)):
        model = nn.Sequential(nn.Linear(2, 2))
        assert not private.is_in_torchs_fsdp(model[0])
        wrap(model)
        assert private.is_in_torchs_fsdp(model[0])

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert private.active_ddp() is ddp
            return super().forward(x)

    ddp = nn.parallel.DistributedDataParallel(Asks(2, 2))
    ddp(torch.ones(1, 2))
    assert private.active_ddp() is None


# Autograd


def test_at_end_of_backward() -> None:
    """Without it nobody waits for DDP's last bucket, or FSDP's last reduction, before backward returns."""
    order = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: private.at_end_of_backward(lambda: order.append(x.grad is not None)))
    y.sum().backward()
    assert order == [True]


def test_run_backward() -> None:
    """Without it a pipeline's backward checks shapes twice, once in Python, which takes as long as a message."""
    x, other = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    private.run_backward([x * 2, (x * other.sum()).sum()], [torch.ones(2), torch.tensor(1.0)])
    assert [each.grad.tolist() for each in (x, other) if each.grad is not None] == [[5, 5], [2, 2, 2]]
    with pytest.raises(RuntimeError, match="invalid gradient"):
        private.run_backward([x * 2], [torch.ones(3)])


def test_in_backward() -> None:
    """Without it FSDP takes a recomputation around the whole model for a new forward, and frees what backward reads."""
    seen = []

    def noting(x: Tensor) -> Tensor:
        seen.append(private.in_backward())
        return x * x

    checkpoint(noting, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not private.in_backward()


def test_base_of() -> None:
    """Without it a unit's output that its caller changes in place no longer begins the unit's backward."""
    whole = torch.ones(4, requires_grad=True) * 2
    part = whole.view(2, 2)
    assert private.base_of(part) is whole
    assert private.base_of(whole) is None


def test_made_since() -> None:
    """Without it every loss that a module has ever left on itself would be taken for this call's."""
    before = torch.ones(2, requires_grad=True) * 2
    nodes = private.nodes_so_far()
    after = before + 1
    assert private.made_since(after, nodes)
    assert not private.made_since(before, nodes)
    assert not private.made_since(torch.ones(2, requires_grad=True), nodes)


def test_version_of() -> None:
    """Without it `zero_grad(set_to_none=False)` inside no_sync leaves what was reduced before."""
    x = torch.ones(2)
    before = private.version_of(x)
    x.zero_()
    assert private.version_of(x) == before + 1


def test_hooks_of() -> None:
    """Without it `register_hook` on a parameter of FSDP's does nothing, for autograd never reaches it."""
    p = nn.Parameter(torch.ones(2))
    assert not private.hooks_of(p)
    p.register_hook(torch.neg)
    assert list(private.hooks_of(p).values()) == [torch.neg]


def test_post_hooks_of() -> None:
    """Without it `register_post_accumulate_grad_hook` does nothing there either."""
    p = nn.Parameter(torch.ones(2))
    assert not private.post_hooks_of(p)
    p.register_post_accumulate_grad_hook(print)
    assert list(private.post_hooks_of(p).values()) == [print]


def test_current_backward() -> None:
    """Without it models beside each other in one graph could not tell that one backward goes through both."""
    x, seen = torch.ones(1, requires_grad=True), []

    def nested(gradient: Tensor) -> None:
        seen.append(private.current_backward())
        with torch.enable_grad():
            y = x.detach().requires_grad_() * 2
        y.register_hook(lambda gradient: seen.append(private.current_backward()))
        y.backward()
        seen.append(private.current_backward())

    for _ in range(2):
        y = x * 2
        y.register_hook(nested)
        y.backward()
    before, inside, after, *following = seen
    assert before == after != inside
    assert len({before, inside, *following}) == 4
    assert private.current_backward() == -1


def test_accumulates_in() -> None:
    """Without it DDP takes `autograd.grad` for the backward that it has to reduce."""
    weight, x = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen: list[list[bool]] = []
    y = weight * x
    leaves = {t: get_gradient_edge(t).node for t in (weight, x)}
    y.grad_fn.register_prehook(lambda _: seen.append([private.accumulates_in(leaves[t]) for t in (weight, x)]))
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.autograd.grad(y.sum(), [weight, x], retain_graph=True)
    y.sum().backward(inputs=[x])
    assert seen == [[True, True], [False, False], [False, False], [False, True]]


def test_hooked_in() -> None:
    """Without it a hook that writes to its parameter trains each rank by itself."""
    plain, before, after = (torch.ones(2, requires_grad=True) for _ in range(3))
    before.register_hook(torch.neg)
    after.register_post_accumulate_grad_hook(print)
    assert [p is q for p, q in zip(private.hooked_in([plain, before, after]), (before, after), strict=True)] == [
        True
    ] * 2


def test_pass_on_hooks() -> None:
    """Without it hooks from before `fully_shard` are lost with the parameter that had them."""
    p, shard = (torch.zeros(2, requires_grad=True) for _ in range(2))
    handles = [p.register_hook(torch.neg), p.register_post_accumulate_grad_hook(print)]
    private.pass_on_hooks(p, shard)
    assert list(private.hooks_of(shard).values()) == [torch.neg]
    assert list(private.post_hooks_of(shard).values()) == [print]
    for handle in handles:
        handle.remove()
    assert not private.hooks_of(shard)
    assert not private.post_hooks_of(shard)


def test_steps_in_backward() -> None:
    """Without it an optimizer that steps in backward does so before the mean is there, and nobody says a word."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    p = nn.Parameter(torch.ones(2))
    assert not private.steps_in_backward(p)
    _apply_optimizer_in_backward(torch.optim.SGD, [p], {"lr": 0.1})
    assert private.steps_in_backward(p)


# Tensors, modules and operators


def test_anybatchnorm() -> None:
    """Without it mixed precision does not spare the statistics of every kind of BatchNorm."""
    assert all(issubclass(kind, private.AnyBatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))


def test_anydropout() -> None:
    """Without it a dropout on a part of the sequence has the same mask on every rank."""
    assert all(issubclass(kind, private.AnyDropout) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


def test_foreach_copy() -> None:
    """Without it rung 2 of DDP copies its gradients one by one: on a GPU a kernel for each."""
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    private.foreach_copy(targets, sources)
    assert all(map(torch.equal, targets, sources))


def test_chunk_cat() -> None:
    """Without it FSDP2 packs its gradients one by one: on a GPU a kernel for each."""
    out = torch.empty(2, 5)
    private.chunk_cat([torch.arange(3.0), torch.arange(5.0, 8.0).view(3, 1), torch.zeros(2, 1)], 2, out)
    assert out.tolist() == [[0, 1, 5, 6, 0], [2, 0, 7, 0, 0]]


def test_split_copy() -> None:
    """Without it FSDP2 copies what it has gathered out parameter by parameter: on a GPU a kernel for each."""
    out = [torch.empty(2, 1), torch.empty(2, 2)]
    private.split_copy(torch.arange(6.0).view(2, 3), [1, 2], out)
    assert [each.tolist() for each in out] == [[[0], [3]], [[1, 2], [4, 5]]]


def test_has_storage() -> None:
    """Without it the ledger fails on a sparse tensor, which has no memory of its own to ask for."""
    assert private.has_storage(torch.ones(2))
    assert not private.has_storage(torch.eye(2).to_sparse())


def test_identity() -> None:
    """Without it the ledger counts a storage anew for each tensor that views it."""
    x = torch.ones(4)
    assert private.identity(x.untyped_storage()) == private.identity(x[2:].untyped_storage())
    assert private.identity(x.untyped_storage()) != private.identity(x.clone().untyped_storage())


def test_schema_of() -> None:
    """Without it the paper GPU cannot tell what an operator writes, and sees no missing wait."""
    first, *_ = private.schema_of(torch.ops.aten.add_.Tensor).arguments
    assert first.alias_info.is_write


def test_leave_uncompiled() -> None:
    """Without it `torch.compile` follows FSDP's gathers and frees into a graph, where memory comes and goes unseen."""
    from torch._dynamo import trace_rules

    with patch.object(trace_rules, "_recompile_re", wraps=trace_rules._recompile_re) as compiled:
        private.leave_uncompiled(["colorsys", "sched"])
    assert all(trace_rules.check_file(each.__file__).skipped for each in (colorsys, sched))
    assert compiled.call_count <= 1, "each time takes a millisecond of each rank"


def test_tree_leaves() -> None:
    """Without it a forward's tensors are not found in what it takes and returns."""
    assert private.tree_leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]


def test_tree_map() -> None:
    """Without it no default says how to cut the tensors in a pipeline's arguments."""
    assert private.tree_map(lambda n: n + 1, {"a": [1, (2,)], "b": 3}) == {"a": [2, (3,)], "b": 4}


def test_tree_flatten() -> None:
    """Without it a pipeline cannot cut what its arguments contain."""
    assert private.tree_flatten({"a": [1, (2,)], "b": 3})[0] == [1, 2, 3]


def test_tree_unflatten() -> None:
    """Without it the micro-batches of a pipeline lose the form of its arguments."""
    tree = {"a": [1, (2,)], "b": 3}
    assert private.tree_unflatten([4, 5, 6], private.tree_flatten(tree)[1]) == {"a": [4, (5,)], "b": 6}


def test_torchdispatchmode() -> None:
    """Without it there is no ledger: it sees each operator's results by being one."""
    seen = []

    class Noting(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Noting():
        torch.ones(2).add_(1)
    assert seen[-1] == "aten::add_.Tensor"


def test_unwatched() -> None:
    """Without it the ledger, which is a mode, counts the rank tables of meshes as activations."""
    seen: list[str] = []

    class Sees(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Sees():
        torch.ones(1)
        count = len(seen)
        with private.unwatched():
            torch.ones(1)
        assert len(seen) == count > 0
        torch.ones(1)
    assert len(seen) == 2 * count


def test_disabletorchfunctionsubclass() -> None:
    """Without it the ledger's own questions to a tensor with `__torch_function__` come back to the ledger."""

    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError("was asked")

    loud = torch.ones(2).as_subclass(Loud)
    with private.DisableTorchFunctionSubclass():
        assert loud.shape == (2,)


def test_is_traceable_wrapper_subclass() -> None:
    """Without it a DTensor's memory is counted for nothing: it has its elements in another tensor."""
    assert not private.is_traceable_wrapper_subclass(torch.ones(2))


def test_is_traceable_wrapper_subclass_type() -> None:
    """Without it the ledger cannot leave an operator of DTensors to the operators that it is made of."""
    from torch.distributed.tensor import DTensor

    assert private.is_traceable_wrapper_subclass_type(DTensor)
    assert not private.is_traceable_wrapper_subclass_type(Tensor)


def test_faketensormode() -> None:
    """Without it nothing is recorded on paper: a model of any size, in no memory."""
    with private.FakeTensorMode():
        assert torch.empty(2**60).numel() == 2**60


def test_faketensor() -> None:
    """Without it ZeRO on paper cannot leave out a comparison of values."""
    with private.FakeTensorMode():
        assert isinstance(torch.empty(2), private.FakeTensor)


def test_unset_fake_temporarily() -> None:
    """Without it a recording on paper cannot make its own small numbers."""
    with private.FakeTensorMode(), private.unset_fake_temporarily():
        assert torch.ones(2).tolist() == [1, 1]


# DTensors


@check()
def local_of() -> None:
    """Without it FSDP2 asks autograd for a view of each parameter's piece at each gather."""
    placed = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert dtensor.local_of(placed) is dtensor.local_of(placed)
    assert dtensor.local_of(placed).shape == (2,)


@check()
def put_local() -> None:
    """Without it the parameters of FSDP2 that are loaded by assignment are not in pinned memory."""
    placed = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    local = torch.zeros(2)
    dtensor.put_local(placed, local)
    assert dtensor.local_of(placed) is local
    assert placed.full_tensor().sum() == 0


@check()
def with_spec() -> None:
    """Without it FSDP2 computes each gradient's shape and placement anew, and cannot say that it is its parameter's."""
    placed = distribute_tensor(torch.ones(5), init_device_mesh("cpu", (2,)), [Shard(0)])
    gradient = dtensor.with_spec(torch.zeros_like(dtensor.local_of(placed)), dtensor.spec_of(placed))
    assert (gradient.shape, gradient.placements) == (placed.shape, placed.placements)


@check()
def place_of() -> None:
    """Without it whole tensors of a checkpoint cannot be cut as the parameters are that they belong to."""
    placed = distribute_tensor(torch.ones(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert dtensor.place_of(placed) == (((3, 3), (0, 0)) if dist.get_rank() == 0 else ((2, 3), (3, 0)))


@check()
def dtensor_handlers() -> None:
    """Without it shards in host memory are initialized with the same numbers on all ranks that have one seed."""
    placed = distribute_tensor(torch.ones(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    handlers = dtensor.dtensor_handlers()
    operator = next(each for each in handlers if str(each) == "aten.is_same_size.default")
    before, handlers[operator] = handlers[operator], lambda asked, args, kwargs: asked is operator and args[0] is placed
    try:
        assert operator(placed, placed.t())
    finally:
        handlers[operator] = before
    assert not operator(placed, placed.t())


@check()
def without_handler() -> None:
    """Without it a handler that asks torch for what it would have done is called again, without end."""
    placed = distribute_tensor(torch.ones(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)])

    def more(*asked: Any) -> Any:
        return 1 + dtensor.without_handler(more, *asked)

    with patch.dict(dtensor.dtensor_handlers(), {dtensor.read_number: more}):
        assert [placed.sum().item() for _ in range(2)] == [placed.to_local().sum() + 1] * 2


@check()
def read_number() -> None:
    """Without it an optimizer of one's own reads a rank's part of a norm, and updates with it."""
    number = distribute_tensor(torch.ones(()), init_device_mesh("cpu", (2,)), [Replicate()])
    with patch.dict(dtensor.dtensor_handlers(), {dtensor.read_number: lambda operator, args, kwargs: 3}):
        found = number.item(), float(number), torch.ones(()).add(1, alpha=number).item()
    assert found == (3, 3, 4)


@check()
def spec() -> None:
    """Without it a tensor-parallel layer's outputs are made by `from_local`, which computes what is known."""
    mesh = init_device_mesh("cpu", (2,))
    placed = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    made = dtensor.spec(mesh, Shard(0), placed.shape, placed.dtype)
    assert made == dtensor.spec_of(placed)
    assert made is dtensor.spec(mesh, Shard(0), placed.shape, placed.dtype)


@check()
def current_mesh() -> None:
    """Without it `parallelize_module` without a mesh does not know the one that surrounds it."""
    mesh = init_device_mesh("cpu", (2,))
    with mesh:
        assert dtensor.current_mesh() is mesh


@check(ranks=4)
def join_meshes() -> None:
    """Without it FSDP2 cannot cut what tensor parallelism has cut: the two meshes stay two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert dtensor.join_meshes([mesh["dp"], mesh["tp"]]).shape == (2, 2)
    assert dtensor.StridedShard(0, split_factor=2).split_factor == 2


# Process groups


@check()
def backend_of() -> None:
    """Without it gloo's collectives are torch's own again: twice the bytes of a reduction."""
    assert private.backend_of(dist.group.WORLD, torch.device("cpu")) == "gloo"


@check()
def device_types_of() -> None:
    """Without it a tensor on the wrong device ends in torch's error, which does not say which device would do."""
    assert private.device_types_of(dist.group.WORLD) >= {"cpu"}


@check()
def name_of() -> None:
    """Without it no group that is a class in Python carries anything: `group_name` raises there."""

    class InPython(dist.ProcessGroup):
        pass

    dist.Backend.register_backend("in_python", lambda store, rank, size, timeout: InPython(rank, size), devices=["cpu"])
    group = dist.new_group(backend="in_python")
    assert (private.name_of(group), private.name_of(dist.group.WORLD)) == (group_name(group), group_name(None))
    assert private.backend_of(group, torch.device("cpu")) == "in_python"
    assert private.device_types_of(group) == {"cpu"}


def group_name(group: dist.ProcessGroup | None) -> str:
    """By torch's own errors and logs."""
    return dist.distributed_c10d._get_process_group_name(group or dist.group.WORLD)


@check()
def group_named() -> None:
    """Without it an emulated link of several hosts cannot tell which of its messages cross."""
    assert private.group_named(dist.group.WORLD.group_name) is dist.group.WORLD


@check()
def base_store_of() -> None:
    """Without it ranks cannot compare what they are about to issue without issuing anything."""
    assert isinstance(private.base_store_of(dist.group.WORLD), dist.Store)


@check(ranks=3)
def gloo_group() -> None:
    """Without it ranks that are in different numbers of groups cannot connect once more: `new_group` hangs."""
    dist.new_group([1, 2])  # rank 0 is in one group fewer
    store = dist.PrefixStore("test", private.base_store_of(dist.group.WORLD))
    rank = dist.get_rank()
    group = private.gloo_group(store, rank, 3, datetime.timedelta(seconds=60))
    number = torch.tensor([rank])
    dist.broadcast(number, group=group, group_src=2)
    assert number.item() == 2


@check(ranks=3)
def new_group_named() -> None:
    """Without it a pipeline's ranks hang in its set-up if one is in more groups than another."""
    dist.new_group([1, 2], use_local_synchronization=True)  # rank 0 is in one group fewer
    group = private.new_group_named("of the test", [0, 1, 2], None)
    number = torch.tensor([dist.get_rank()])
    dist.broadcast(number, group=group, group_src=2)
    assert number.item() == 2
    assert private.name_of(group) == "of the test"


@check()
def timeout_of() -> None:
    """Without it a rank waits half an hour on the second connection for one that is gone."""
    brief = dist.new_group(timeout=datetime.timedelta(seconds=77))
    assert private.timeout_of(brief) == datetime.timedelta(seconds=77)


@check()
def tensor_of_shards() -> None:
    """Without it, and the five names that it takes, there are no sharded state dicts as torch's FSDP1 has them."""
    pieces = [private.ShardMetadata([2 * rank], [2], f"rank:{rank}/cpu") for rank in range(2)]
    metadata = private.ShardedTensorMetadata(pieces, torch.Size([4]), private.TensorProperties(torch.float32))
    mine = private.Shard(torch.ones(2), pieces[dist.get_rank()])
    sharded = private.tensor_of_shards([mine], metadata, dist.group.WORLD)
    assert isinstance(sharded, private.ShardedTensor)
    assert sharded.size() == (4,)


TOGETHER = dict.fromkeys(
    ("Shard", "ShardMetadata", "ShardedTensor", "ShardedTensorMetadata", "TensorProperties"), "tensor_of_shards"
) | {
    **dict.fromkeys(["ClosedToTorch", "close_to_torchs_wrappers"], "closed_to_torchs_wrappers"),
    **dict.fromkeys(["is_in_torchs_fsdp", "active_ddp"], "known_torchs_wrappers"),
    "nodes_so_far": "made_since",
    "StridedShard": "join_meshes",
    "spec_of": "with_spec",
    "DTensorSpec": "spec",
    "TensorMeta": "spec",
    "compute_local_shape_and_global_offset": "place_of",
}


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


def test_without_memory() -> None:
    """Without it a checkpoint cannot be given pieces of a value in the plain model's shape."""

    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any: ...

    found = dtensor.without_memory(Own, [1 << 40, 2], torch.float64, torch.device("cpu"))
    assert (found.shape, found.dtype) == ((1 << 40, 2), torch.float64)


def test_remote_device() -> None:
    """Without it a ShardedTensor does not know whose a shard is."""
    assert private.remote_device("rank:1/cpu").rank() == 1


def test_device_index() -> None:
    """Without it DDP does not take `device_ids` in all the forms that torch takes them in."""
    assert [private.device_index(each, True) for each in (1, "cuda:1", torch.device("cuda", 1))] == [1, 1, 1]


def test_fake_store() -> None:
    """Without it the host's time cannot be measured with communication free."""
    assert isinstance(private.fake_store(), dist.Store)


def test_set_timeout() -> None:
    """Without it each rank with NCCL warns of two timeouts that differ."""
    options = dist.ProcessGroupGloo._Options()
    private.set_timeout(options, datetime.timedelta(seconds=7))
    assert options._timeout == datetime.timedelta(seconds=7)


# CUDA: what can be asked without a GPU


def test_spin() -> None:
    """Without it a collective cannot be delayed on a GPU, and no overlap is proved there."""
    assert callable(torch.cuda._sleep)


def test_record_memory_history() -> None:
    """Without it there is no curve of a GPU's memory."""
    parameters = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "stacks"} <= set(parameters)


def test_memory_snapshot() -> None:
    """Without it, as without record_memory_history."""
    assert "device" in inspect.signature(torch.cuda.memory._snapshot).parameters
