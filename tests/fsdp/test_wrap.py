"""Wrapping: which modules become units, by every policy, by hand and as torch does it, and with which arguments."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.fsdp import wrap as torchs_wrap

from minifsdp.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from minifsdp.fsdp import wrap as ours_wrap
from minifsdp.fsdp.torch_api.ignored import Ignored
from minifsdp.fsdp.torch_api.wrap import wrap_children
from minifsdp.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap

check = Checks(__name__)

Fsdp = FullyShardedDataParallel
CPU = torch.device("cpu")


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings inside, those of others than a model's builder aside."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if w.category is UserWarning and "c10d" not in str(w.message)]


def refused(text: str, kind: type[Exception] = ValueError) -> Any:
    return pytest.raises(kind, match=re.escape(text))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x, x, x, need_weights=False)[0])


class Model(nn.Module):
    """Blocks in a list, a layer in a dictionary, a module in two places, and batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3, bias=False)})
        self.again = nn.ModuleList([self.embed])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again[0](self.norm(self.embed(x)))
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x).sum() + self.heads["b"](x).sum()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.module, self.arguments = module, arguments


def wrapped(model: nn.Module, kind: Any = Wrapper) -> list[str]:
    """The names of the modules that have become units."""
    return [re.sub(r"(_fsdp_wrapped_)?module\.", "", name) for name, m in model.named_modules() if isinstance(m, kind)]


# Policies as functions, with torch's and with ours


SIZED = [
    {"min_num_params": 1},
    {"min_num_params": 20},
    {"min_num_params": 36},
    {"min_num_params": 100},
    {"min_num_params": 10_000},
    {},
    {"min_num_params": 10, "force_leaf_modules": {nn.Sequential}},
    {"min_num_params": 10, "force_leaf_modules": set(), "exclude_wrap_modules": set()},
    {"min_num_params": 10, "exclude_wrap_modules": [nn.Linear, nn.ModuleDict]},
]


def policies(module: Any) -> dict[str, Any]:
    """Each policy of a module, as users give it."""
    by_size = {
        f"size {i}": partial(module.size_based_auto_wrap_policy, **arguments) for i, arguments in enumerate(SIZED)
    }
    transformer = partial(module.transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Linear})
    by_lambda = partial(module.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Sequential))
    return by_size | {
        "always": module.always_wrap_policy,
        "transformer": transformer,
        "lambda": by_lambda,
        "or": partial(module._or_policy, policies=[transformer, by_lambda]),
        "classes": module.ModuleWrapPolicy({Block, nn.MultiheadAttention}),
    }


@pytest.mark.parametrize("name", policies(ours_wrap))
@pytest.mark.parametrize("ignore", [False, True])
def test_a_policy_names_what_torch_s_of_that_name_does(name: str, ignore: bool) -> None:
    theirs, ours, mixed = model(), model(), model()
    for each in (theirs, ours, mixed):
        each.again = None  # torch leaves the second place of a module as it was
    block = theirs.blocks[0]
    ignored = set(block.modules()) if ignore else set()
    torchs_wrap._recursive_wrap(
        theirs, policies(torchs_wrap)[name], Wrapper, ignored, {p for m in ignored for p in m.parameters()}, True
    )
    for each, source in ((ours, ours_wrap), (mixed, torchs_wrap)):
        inside = list(each.blocks[0].modules()) if ignore else []
        spared = Ignored(frozenset(inside), frozenset(p for m in inside for p in m.parameters()))
        wrap_children(each, policies(source)[name], Wrapper, spared)
        assert wrapped(each) == wrapped(theirs)


def test_a_module_in_two_places_is_wrapped_once_and_stands_in_both() -> None:
    each = model()
    wrap_children(each, ModuleWrapPolicy({nn.Linear}), Wrapper)
    assert isinstance(each.embed, Wrapper)
    assert each.again[0] is each.embed


def test_the_defaults_of_the_size_policy_are_attributes_that_users_may_add_to() -> None:
    ours, theirs = ours_wrap.size_based_auto_wrap_policy, torchs_wrap.size_based_auto_wrap_policy
    assert ours.FORCE_LEAF_MODULES == theirs.FORCE_LEAF_MODULES
    assert ours.EXCLUDE_WRAP_MODULES == theirs.EXCLUDE_WRAP_MODULES
    ask = partial(ours, module=nn.Linear(2, 2), nonwrapped_numel=6, min_num_params=6)
    assert ask(recurse=False)
    ours.EXCLUDE_WRAP_MODULES.add(nn.Linear)
    try:
        assert not ask(recurse=False)
        assert ask(recurse=True)
    finally:
        ours.EXCLUDE_WRAP_MODULES.remove(nn.Linear)


@pytest.mark.parametrize("classes", ["Block", nn.Linear, [nn.Linear, "Block"], [nn.Linear(1, 1)]])
def test_what_are_no_classes_is_refused_in_words(classes: Any) -> None:
    with refused("is not a policy: give a set of module classes"):
        ModuleWrapPolicy(classes)
    with refused("is not a policy: give a set of module classes"):
        wrap_children(model(), partial(ours_wrap.transformer_auto_wrap_policy, transformer_layer_cls=classes), Wrapper)


@pytest.mark.parametrize("module", [ours_wrap, torchs_wrap])
def test_wrap_by_hand_is_wrapping_only_where_it_is_enabled(module: Any) -> None:
    def inside(layer: nn.Module) -> None:
        with module.enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
            made = module.wrap(layer, b=3, c=4)
            assert made.module is layer
            assert made.arguments == {"a": 1, "b": 3, "c": 4}
            with module.enable_wrap(wrapper_cls=Wrapper):
                pass

    layer = nn.Linear(2, 2)
    assert module.wrap(layer) is layer
    with refused("You are already within an autowrap context and we currently do not supported", NotImplementedError):
        inside(layer)
    assert module.wrap(layer) is layer


def test_every_public_name_of_torch_s_wrap_is_here() -> None:
    assert set(torchs_wrap.__all__) <= set(vars(ours_wrap))


# With ranks


def units(model: nn.Module) -> list[tuple[str, list[str], int, ShardingStrategy, MixedPrecision]]:
    found = []
    for name, m in model.named_modules():
        if isinstance(m, Fsdp) and m._unit is not None:
            clean, flat = name.replace("_fsdp_wrapped_module.", ""), m._unit.flat
            found.append((clean, flat.names, flat.numel, m.sharding_strategy, m.mixed_precision))
    return found


def torchs_units(model: nn.Module) -> list[tuple[str, list[str], int]]:
    found = []
    for name, m in model.named_modules():
        if isinstance(m, torchs.FullyShardedDataParallel) and m._handle is not None:
            flat = m._handle.flat_param
            found.append(
                (name.replace("_fsdp_wrapped_module.", ""), list(flat._fqns), flat._unpadded_unsharded_size.numel())
            )
    return found


@check()
def torch_s_policies_give_the_units_that_they_give_in_torch() -> None:
    """Also with mixed precision, where batch normalization is a unit of its own."""
    of_torch = policies(torchs_wrap) | {"custom": torchs_wrap.CustomPolicy(lambda m: type(m) is Block)}
    of_ours = policies(ours_wrap) | {"custom": CustomPolicy(lambda m: type(m) is Block)}
    for name, precision in [(name, False) for name in of_torch] + [("size 1", True), ("classes", True)]:
        given = torchs.MixedPrecision(torch.bfloat16) if precision else None

        def make(kind: Any, policy: Any, given: Any = given) -> nn.Module:
            each = model()
            each.again = None
            return kind(each, auto_wrap_policy=policy, mixed_precision=given, device_id=CPU)

        theirs = make(torchs.FullyShardedDataParallel, of_torch[name])
        for policy in (of_torch[name], of_ours[name]):
            ours = make(Fsdp, policy)
            assert wrapped(ours, Fsdp) == wrapped(theirs, torchs.FullyShardedDataParallel), (name, precision)
            assert [unit[:3] for unit in units(ours)] == torchs_units(theirs), (name, precision)


@check()
def a_model_wrapped_by_hand_by_policy_or_by_annotation_has_the_same_units() -> None:
    options = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True}
    by_policy = Fsdp(model(), auto_wrap_policy={Block, nn.MultiheadAttention}, **options)

    by_hand = model()
    for i, block in enumerate(by_hand.blocks):
        block.attention = Fsdp(block.attention, **options)
        by_hand.blocks[i] = Fsdp(block, **options)
    by_hand = Fsdp(by_hand, **options)

    with enable_wrap(wrapper_cls=Fsdp, **options):
        annotated = model()
        for i, block in enumerate(annotated.blocks):
            block.attention = wrap(block.attention)
            annotated.blocks[i] = wrap(block)
        annotated = wrap(annotated)

    assert units(by_policy) == units(by_hand) == units(annotated)
    assert [name for name, *_ in units(by_policy)] == [
        "", "blocks.0", "blocks.0.attention", "blocks.1", "blocks.1.attention",
    ]  # fmt: skip
    losses = set()
    for each in (by_policy, by_hand, annotated):
        loss = each(torch.ones(3, 4))
        loss.backward()
        losses.add(loss.item())
        assert all(p.grad is not None for p in each.parameters() if p.numel())
    assert len(losses) == 1


@check()
def a_custom_policy_gives_units_arguments_of_their_own() -> None:
    """With torch's enums and configurations, too."""
    bf16, strategy = torchs.MixedPrecision(torch.bfloat16), torchs.ShardingStrategy.SHARD_GRAD_OP
    for policy_class in (CustomPolicy, torchs_wrap.CustomPolicy):

        def answer(m: nn.Module) -> bool | dict[str, Any]:
            if isinstance(m, Block):
                return {"sharding_strategy": strategy, "mixed_precision": bf16}
            return isinstance(m, nn.Linear) and m.out_features == 2

        each = Fsdp(model(), auto_wrap_policy=policy_class(answer))
        by_name = {name: (s, p) for name, _, _, s, p in units(each)}
        assert by_name["blocks.1"] == (ShardingStrategy.SHARD_GRAD_OP, MixedPrecision(torch.bfloat16))
        assert by_name["heads.a"] == by_name[""] == (ShardingStrategy.FULL_SHARD, MixedPrecision())
        assert len(by_name) == 4
        text = "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned 1"
        with refused(text):
            Fsdp(model(), auto_wrap_policy=policy_class(lambda m: 1))
    with refused("but it returned None for blocks.1, a Block"):
        fails = model()
        Fsdp(fails, auto_wrap_policy=CustomPolicy(lambda m: None if m is fails.blocks[1] else False))


@check()
def containers_are_wrapped_with_torch_s_warning() -> None:
    texts = []
    for make in (Fsdp, partial(torchs.FullyShardedDataParallel, device_id=CPU)):
        with warned() as caught:
            make(model(), auto_wrap_policy=ours_wrap.always_wrap_policy)
        said = [re.sub(r"(FullyShardedDataParallel|_fsdp_wrapped_module|[\s()])+", "", text) for text in caught]
        texts.append([text[:60] for text in said if text.startswith("FSDPwillnotall-gather")])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3
    each = Fsdp(model(), auto_wrap_policy=ours_wrap.always_wrap_policy)
    containers = [m for m in Fsdp.fsdp_modules(each) if isinstance(m.module, nn.ModuleList | nn.ModuleDict)]
    assert [m.params for m in containers] == [[]] * 3  # nothing is left in them, and they can be looked through
    assert len(list(each.blocks)) == 2
    assert each.heads["a"](torch.ones(1, 4)).shape == (1, 2)


@check()
def what_is_no_policy_is_refused_in_words() -> None:
    for wrong in ("Block", nn.Linear, [Block, 3]):
        with refused("is not a policy: give a set of module classes"):
            Fsdp(model(), auto_wrap_policy=wrong)
    with warned() as texts:
        Fsdp(model(), auto_wrap_policy={nn.Conv2d})
    assert texts == [
        "the auto_wrap_policy ModuleWrapPolicy({Conv2d}) names no module inside Model: all of it is one unit, whole "
        "from its forward to the end of backward"
    ]
    inner = model()
    inner.blocks[1].mlp = Fsdp(inner.blocks[1].mlp)
    with refused("FSDP auto wrapping requires modules to not already have FSDP applied but found blocks.1.mlp in"):
        Fsdp(inner, auto_wrap_policy={Block})


def frozen() -> Model:
    each = model()
    each.blocks[1].mlp[0].bias.requires_grad_(False)
    return each


@check(behaviour=3)
def a_unit_that_is_frozen_in_part_is_named_before_anything_is_wrapped() -> None:
    """In torch's words; with original parameters it works, and the warning says what it costs."""
    torch_class = partial(torchs.FullyShardedDataParallel, device_id=CPU)
    for policy in (torchs_wrap.ModuleWrapPolicy({Block}), CustomPolicy(lambda m: isinstance(m, Block))):
        texts = []
        for make in (Fsdp, torch_class) if isinstance(policy, torchs_wrap.ModuleWrapPolicy) else (Fsdp,):
            each = frozen()
            with refused("blocks.1 has both parameters with requires_grad=True and False.") as error:
                make(each, auto_wrap_policy=policy)
            texts.append(str(error.value))
            assert not wrapped(each, Fsdp)
            with warned() as caught:
                make(frozen(), auto_wrap_policy=policy, use_orig_params=True)
            texts.append(next(text for text in caught if "requires_grad=True" in text))
        assert "requires_grad=False:\n['blocks.1.mlp.0.bias']" in texts[0]
        assert texts[0].endswith("\nOr pass use_orig_params=True.")
        numels = re.search(r"\((\d+) numel instead of (\d+) numel", texts[1])
        assert numels is not None
        assert int(numels[1]) - int(numels[2]) == 8
        if len(texts) == 4:
            assert texts[1].split("\nThe following")[0] == texts[3].split("\nThe following")[0]
            for mine, theirs in zip(texts[:2], texts[2:], strict=True):  # the same names; torch's in another order
                found = [sorted(re.findall(r"'([\w.]+)'", text)) for text in (mine, theirs)]
                assert found[0] == found[1]
    each = frozen()  # what is ignored, or in a unit of its own, is no obstacle
    Fsdp(each, auto_wrap_policy={Block}, ignored_states=[each.blocks[1].mlp[0].bias])
    each = frozen()
    each.blocks[1].mlp[0].requires_grad_(False)
    Fsdp(each, auto_wrap_policy={Block, nn.Linear})


# Modules exempt from mixed precision


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.plain = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.inner(x))


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed()


@check(behaviour=36)
def batch_normalization_keeps_its_precision() -> None:
    """In a unit of its own, with any policy: its parameters, buffers and inputs are in fp32, its output is not."""
    low = torchs.MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    made = {
        "functions": partial(torchs_wrap.size_based_auto_wrap_policy, min_num_params=10_000),
        "classes": torchs_wrap.ModuleWrapPolicy({nn.Sequential}),
    }
    for policy in made.values():
        outputs, texts, states = [], [], []
        for make in (Fsdp, partial(torchs.FullyShardedDataParallel, device_id=CPU)):
            with warned() as caught:
                each = make(normed(), auto_wrap_policy=policy, mixed_precision=low)
            caught = [text.replace("instacnes", "instances") for text in caught]  # as older versions of torch have it
            texts.append([text for text in caught if text.startswith("Both mixed precision and an auto_wrap_policy")])
            seen: list[list[torch.dtype]] = []
            norm = each.inner[1].module
            norm.register_forward_hook(
                lambda m, args, output, seen=seen: seen.append([args[0].dtype, m.weight.dtype, m.running_mean.dtype])
            )
            norm.register_forward_hook(lambda m, args, output, seen=seen: seen.append([output.dtype]))
            outputs.append(each(torch.randn(8, 4, generator=torch.Generator().manual_seed(1))))
            assert seen == [[torch.float32] * 3, [torch.bfloat16]]
            outputs[-1].float().square().sum().backward()
            states.append({name: value.clone() for name, value in each.state_dict().items()})
        assert texts[0] == texts[1]
        assert len(texts[0]) == 1
        assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
        assert torch.equal(*outputs)
        assert list(states[0]) == list(states[1])
        for name, value in states[1].items():
            assert states[0][name].dtype == value.dtype, name
            assert torch.equal(states[0][name], value), name


@check(behaviour=36)
def exemption_is_the_user_s_to_choose() -> None:
    spared = MixedPrecision(torch.bfloat16, _module_classes_to_ignore=(nn.Linear,))
    each = Fsdp(normed(), auto_wrap_policy={nn.Sequential}, mixed_precision=spared)
    assert [name for name, *_, precision in units(each) if precision == MixedPrecision()] == ["inner.0", "inner.2"]
    none = MixedPrecision(torch.bfloat16, _module_classes_to_ignore=())
    with warned() as texts:
        each = Fsdp(normed(), auto_wrap_policy={nn.Sequential}, mixed_precision=none)
    assert texts == []
    assert [name for name, *_ in units(each)] == ["inner"]
    kept = normed()
    with warned() as texts:  # no policy, no exemption; and what is ignored is not touched
        Fsdp(normed(), mixed_precision=MixedPrecision(torch.bfloat16))
        Fsdp(
            kept,
            auto_wrap_policy={nn.Linear},
            mixed_precision=MixedPrecision(torch.bfloat16),
            ignored_modules=[kept.inner, kept.plain],
        )
    assert not [text for text in texts if "mixed precision" in text]
    assert not kept.inner[1]._forward_hooks


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
