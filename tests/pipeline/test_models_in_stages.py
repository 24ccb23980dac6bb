"""The course's GPT, Llama and GPT-2 in stages train as on one process; tied weights; checkpoints on other stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from in_stages import InStages
from on_ranks import Checks, mesh_of, shared_folder
from torch import Tensor, nn
from transformers_models import MODELS, VOCABULARY, import_before_launch

from minifsdp import comm
from minifsdp.checkpoint import StateDictOptions, get_state_dict, set_state_dict
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp2 import fully_shard
from minifsdp.gpt import GPT
from minifsdp.losses import cross_entropy
from minifsdp.pipeline import divide, keep_transformers_stage, split_gpt
from minifsdp.pipeline.tied import TiedWeight
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

check = Checks(__name__)
MICROS, TOKENS, BLOCKS = 4, 6, 6
NAMES = ("1f1b", "interleaved", "zbv")


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (count, TOKENS + 1), generator=numbers)
    return ids[:, :-1], ids[:, 1:]


class Pipeline(InStages):
    """This rank's stages of a model, and their schedule."""

    def __init__(self, name: str, stage_of: Any, group: Any = None, wrap: Any = lambda module: module) -> None:
        super().__init__(name, MICROS, lambda count, stage: wrap(stage_of(count, stage)), cross_entropy, group)

    def step(self, tokens: Tensor, targets: Tensor, **kwargs: Any) -> list[Tensor]:
        losses: list[Tensor] = []
        given = [tokens] if self.is_first else []
        target = targets if self.is_last else None
        self.schedule.step(*given, target=target, losses=losses, return_outputs=False, **kwargs)
        return losses

    def tie(self, first: str, last: str) -> None:
        ends = {0: first, self.count - 1: last}
        copies = {stage: _parameter(self.modules[stage], name) for stage, name in ends.items() if stage in self.modules}
        self.schedule.tie(copies, [0, self.count - 1])

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.modules.values() for p in module.parameters()]

    def assert_gradients(self, whole: nn.Module, factor: float = 1.0) -> None:
        named = dict(whole.named_parameters(remove_duplicate=False))
        for module in self.modules.values():
            for name, p in module.named_parameters():
                q = named[name.removeprefix("module.")]
                gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(
                    gradient, factor * q.grad, rtol=0, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}"
                )


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    return inner.get_parameter(name)


def gpt(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(VOCABULARY, 12, BLOCKS, 2, TOKENS, tied).double()


@check(ranks=(2, 3), name=NAMES, tied=(False, True), wide="combinations")
def the_courses_gpt(name: str, tied: bool) -> None:
    """Also when gradients of several steps add up."""
    whole, (tokens, targets) = gpt(tied), rows(2 * MICROS)
    expected = whole(tokens, targets)
    expected.backward()
    mine = Pipeline(name, lambda stages, stage: split_gpt(gpt(tied), stages, stage, tied))
    if tied:
        mine.tie("embed.weight", "head.weight")
    for step in (1, 2):
        losses = mine.schedule.share_losses(mine.step(tokens, targets))
        torch.testing.assert_close(losses.mean(), expected, rtol=0, atol=1e-12)
        mine.assert_gradients(whole, step)


@check(ranks=4, how=("ddp", "fsdp2", "zero1"))
def a_tied_weight_under_data_parallelism(how: str) -> None:
    """Three steps on two replicas of two stages: the copies stay one weight. One all-reduce more in each step."""
    mesh = mesh_of((2, 2), "dp", "pp")
    dp = mesh["dp"].get_group()

    def wrap(module: nn.Module) -> Any:
        if how == "ddp":
            return DistributedDataParallel(module, process_group=dp)
        return fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False) if how == "fsdp2" else module

    mine = Pipeline(
        "1f1b", lambda stages, stage: split_gpt(gpt(True), stages, stage, True), mesh["pp"].get_group(), wrap
    )
    mine.tie("embed.weight", "head.weight")
    momentum: Any = {"lr": 0.1, "momentum": 0.9}
    kind = torch.optim.SGD
    own: Any = Zero1Optimizer(mine.parameters(), kind, dp, **momentum) if how == "zero1" else None
    own = own or kind(mine.parameters(), **momentum)
    whole = gpt(tied=True)
    optimizer = kind(whole.parameters(), **momentum)
    for step in range(3):
        batches = [rows(MICROS, seed=10 * step + replica) for replica in range(2)]
        with comm.record() as log:
            mine.step(*batches[dp.rank()])
        assert sum(call.op == "all_reduce" for call in log) == (2 if how == "ddp" else 1)
        torch.stack([whole(*batch) for batch in batches]).mean().backward()
        for each in (own, optimizer):
            each.step()
            each.zero_grad()
    named = dict(whole.named_parameters(remove_duplicate=False))
    for module in mine.modules.values():
        for name, p in module.named_parameters():
            value = p.full_tensor() if hasattr(p, "full_tensor") else p
            torch.testing.assert_close(value, named[name.removeprefix("module.")], rtol=0, atol=1e-12)


@check(ranks=3)
def gradients_of_a_tied_weight_add_up_in_fp32() -> None:
    """In three stages 256, 1 and 1: bf16 computes 256 + 1 = 256."""
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight = TiedWeight([p], [0, 1, 2], comm.world())
    p.grad = torch.full_like(p, 256.0 if dist.get_rank() == 1 else 1.0)
    kept = p.grad
    weight.add_gradients()
    assert p.grad is kept
    assert (p.grad == 258).all()
    weight.close()


@check(ranks=2)
def what_cannot_be_tied_is_refused() -> None:
    mine = Pipeline("1f1b", lambda stages, stage: split_gpt(gpt(True), stages, stage, True))
    with pytest.raises(ValueError, match=r"has stages \[\d\] of \[0, 1\], and copies for \[\]"):
        mine.schedule.tie({}, [0, 1])
    mine.tie("embed.weight", "head.weight")
    optimizer = Zero2Optimizer(mine.parameters(), torch.optim.SGD, dist.new_subgroups(1)[0], lr=0.1)
    with pytest.raises(RuntimeError, match=r"a tied weight \[50, 12\] has no gradient after the step.*Use ZeRO-1"):
        mine.step(*rows(MICROS))
    del optimizer


# Models of the transformers library


def layers_of(model: Any) -> list[str]:
    inner = "transformer.h" if hasattr(model, "transformer") else "model.layers"
    first, last = (
        (["transformer.wte"], ["transformer.ln_f"]) if "h" in inner else (["model.embed_tokens"], ["model.norm"])
    )
    blocks = [f"{inner}.{number}" for number in range(len(model.get_submodule(inner)))]
    return [*first, *blocks, *last, "lm_head"]


def build(name: str) -> Any:
    torch.manual_seed(0)
    example = MODELS[name]()
    model = example.build()
    config = {**model.config.to_dict(), "num_hidden_layers": 4, "n_layer": 4}
    return type(model)(type(model.config)(**config)).train().double()


def stage_of(name: str, stages: int, stage: int) -> Any:
    model: Any = build(name)
    layers = layers_of(model)
    parts = divide(layers, stages)
    added = ("transformer.wpe",) if name == "gpt2" else ()
    parts[0] += added
    return keep_transformers_stage(model, parts, stage, added=added, tied=name == "gpt2")


@check(ranks=(2, 3), name=("llama", "gpt2"), kind=("1f1b", "interleaved"), masked=(False, True), wide="combinations")
def models_of_transformers(name: str, kind: str, masked: bool) -> None:
    """With a mask of padding and position ids for every stage, which are cut with the batch."""
    whole, (tokens, targets) = build(name), rows(2 * MICROS)
    kwargs: dict[str, Tensor] = {}
    if masked:
        mask = torch.ones_like(tokens)
        mask[1::2, :2] = 0
        kwargs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    logits = whole(input_ids=tokens, use_cache=False, **kwargs).logits
    expected = cross_entropy(logits, targets)
    expected.backward()
    mine = Pipeline(kind, lambda stages, stage: stage_of(name, stages, stage))
    if name == "gpt2":
        mine.tie("transformer.wte.weight", "lm_head.weight")
    losses = mine.schedule.share_losses(mine.step(tokens, targets, **kwargs))
    torch.testing.assert_close(losses.mean(), expected, rtol=0, atol=1e-12)
    mine.assert_gradients(whole)


# Checkpoints


OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # every entry under its parameter's name


def with_adam(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return module, torch.optim.AdamW(module.parameters(), 0.01)


def state_of(parts: Any) -> dict[str, Any]:
    """Of several stages and their optimizers, under the names of the whole model."""
    states = [get_state_dict(*part, options=OPTIONS) for part in parts]
    model = {name: value for model, _ in states for name, value in model.items()}
    return {"model": model, "optim": {name: value for _, optim in states for name, value in optim.items()}}


@check(ranks=3, name=("1f1b", "interleaved"))
def a_checkpoint_of_stages_is_one_of_the_model(name: str) -> None:
    """Saved by three ranks, an optimizer for each stage; loaded by two stages and by one process, which train on."""
    tokens, targets = rows(2 * MICROS)
    mine = Pipeline(name, lambda stages, stage: split_gpt(gpt(), stages, stage))
    parts = [with_adam(module) for module in mine.modules.values()]
    mine.step(tokens, targets)
    for _, optimizer in parts:
        optimizer.step()
    whole = with_adam(gpt())
    whole[0](tokens, targets).backward()
    whole[1].step()
    with shared_folder() as path:
        dcp.save(state_of(parts), checkpoint_id=path)
        for others in ([with_adam(split_gpt(gpt(), 2, min(dist.get_rank(), 1)))], [with_adam(gpt())]):
            loaded = state_of(others)
            dcp.load(loaded, checkpoint_id=path)
            for module, optimizer in others:
                names = module.state_dict().keys()
                model = {name: loaded["model"][name] for name in names}
                set_state_dict(
                    module, optimizer, model_state_dict=model, optim_state_dict=loaded["optim"], options=OPTIONS
                )
                expected = state_of([whole])
                for kind, state in state_of([(module, optimizer)]).items():
                    for key, value in state.items():
                        torch.testing.assert_close(value, expected[kind][key], rtol=0, atol=1e-12)


@pytest.fixture(autouse=True, scope="module")
def _models_are_imported() -> None:
    import_before_launch()


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
