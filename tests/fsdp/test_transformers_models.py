"""Architectures from `transformers` train, save and load as one process does.

They are built from tiny configs, with random weights, and nothing is downloaded. A launch on two ranks trains and saves
models, a second one on three ranks loads what the first has saved; each finding is a test of its own. A normal run
takes one architecture, the others are marked slow.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from transformers_models import MODELS, TIED, WITH_TEXT, batch, import_before_launch, plain

from minifsdp.checkpoint import get_state_dict, set_state_dict
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.fsdp import MixedPrecision, ModuleWrapPolicy, OptimStateKeyType
from minifsdp.fsdp.unit import SHARDED
from minifsdp.instruments.launch import launch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 5

summon = Fsdp.summon_full_params


def sharded(name: str, seed: int = 0, **options: Any) -> Fsdp:
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    blocks = MODELS[name]().blocks
    policies = [ModuleWrapPolicy(blocks), partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks)]
    return Fsdp(plain(name, seed), auto_wrap_policy=policies[list(MODELS).index(name) % 2], **options)


# Training


class Run(NamedTuple):
    """How a model is trained.

    Attributes:
        optimizer: AdamW or SGD.
        use_orig_params: what the optimizer sees.
        bf16: compute in bf16; float32 is for the reduction then, and the optimizer has float64 as ever.
        checkpointed: the model recomputes its blocks.
    """

    optimizer: str
    use_orig_params: bool
    bf16: bool = False
    checkpointed: bool = False

    def __str__(self) -> str:
        marks = ["original parameters" if self.use_orig_params else "flat"]
        marks += ["bf16"] * self.bf16 + ["checkpointed"] * self.checkpointed
        return f"{self.optimizer}, {', '.join(marks)}"


RUNS = [
    *(Run(*run) for run in product(("AdamW", "SGD"), (False, True))),
    Run("SGD", False, bf16=True),
    Run("AdamW", True, checkpointed=True),
]


def optimizer_of(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    if run.optimizer == "AdamW":
        return torch.optim.AdamW(model.parameters(), 1e-3)
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def make(name: str, run: Run, ranks: int, seed: int = 0) -> nn.Module:
    if ranks == 1:
        model = plain(name, seed)
    else:
        precision = MixedPrecision(torch.bfloat16, torch.float32) if run.bf16 else None
        model = sharded(name, seed, use_orig_params=run.use_orig_params, mixed_precision=precision)
    if run.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def train(
    name: str, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, ranks: int = 1
) -> list[Tensor]:
    """Each step's loss, of all ranks' rows."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        if run.bf16 and ranks == 1:
            loss = backward_in_bf16(model, [batch(name, step, r, 2) for r in range(2)])
        else:
            loss = model(**batch(name, step, rank, ranks)).loss
            loss.backward()
            loss = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss / ranks)
        optimizer.step()
    return losses


def backward_in_bf16(master: nn.Module, shares: list[dict[str, Tensor]]) -> Tensor:
    """What mixed precision means, in one process: a bf16 copy per rank, and the mean of their gradients in float32."""
    losses, gradients = [], []
    for share in shares:
        copy = deepcopy(master)
        for p in copy.parameters():
            p.data = p.data.bfloat16()
        losses.append(copy(**{k: v.bfloat16() if v.is_floating_point() else v for k, v in share.items()}).loss)
        losses[-1].backward()
        gradients.append([p.grad.float() for p in copy.parameters()])
    for p, *parts in zip(master.parameters(), *gradients, strict=True):
        p.grad = torch.stack(parts).mean(0).to(p.dtype)
    return torch.stack(losses).detach().mean(0)


def differences(values: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> list[str]:
    """What differs by more than `tolerance` times the tensor's greatest element."""
    assert list(values) == list(expected)
    found = []
    for name, reference in expected.items():
        difference, scale = (values[name] - reference).abs().max().item(), reference.abs().max().item()
        if not difference <= tolerance * scale:
            found.append(f"{name} differs by {difference:.1e} of {scale:.1e}")
    return found


def numbered(losses: list[Tensor]) -> dict[str, Tensor]:
    return {f"loss of step {step}": loss for step, loss in enumerate(losses)}


def loss_tolerance(losses: list[Tensor]) -> float:
    """Most models compute their loss in float32, whatever they are in themselves."""
    return 1e-9 if losses[0].dtype is torch.float64 else 1e-6


def trains_as_one_process(name: str, run: Run, folder: Path) -> None:
    """Afterwards one more thing: save what has been trained with AdamW, for those who will load it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reference = make(name, run, 1)
    reference_optimizer = optimizer_of(run, reference)
    expected = train(name, run, reference, reference_optimizer, range(STEPS))
    model = make(name, run, ranks)
    optimizer = optimizer_of(run, model)
    losses = train(name, run, model, optimizer, range(STEPS), rank, ranks)
    state = model.state_dict()
    wrong = differences(numbered(losses), numbered(expected), loss_tolerance(expected))
    wrong += differences(state, reference.state_dict(), 1e-6 if run.bf16 else 1e-9)
    assert not wrong, "\n".join(wrong[:5])
    for alias in TIED.get(name, ())[1:]:
        assert torch.equal(state[alias], state[TIED[name][0]]), f"{alias} is a parameter of its own"
    assert_freed(model)
    if run in SAVED:
        save(name, run, model, optimizer, folder)
        train(name, run, reference, reference_optimizer, MORE_STEPS)
        wrong = differences(into_the_plain_model(name, run, folder), reference.state_dict(), 1e-9)
        assert not wrong, "\n".join(wrong[:5])


def assert_same(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(values) == list(expected)
    for key, value in expected.items():
        assert values[key].dtype == value.dtype, key
        assert torch.equal(values[key], value), key


def assert_freed(model: nn.Module) -> None:
    for instance in Fsdp.fsdp_modules(model):
        if instance._unit is not None:
            assert instance._unit.state is SHARDED
            assert not instance._unit.flat.full.untyped_storage().nbytes()


# Saved on two ranks, loaded elsewhere

SAVED = [Run("AdamW", False), Run("AdamW", True)]
MORE_STEPS = range(STEPS, STEPS + 2)


def save(name: str, run: Run, model: Fsdp, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Whole and in shards, the optimizer too."""
    whole = {"model": model.state_dict(), "optimizer": Fsdp.optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"{name} {run}.pt")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"{name} {run}")


def loads_on_more_ranks(name: str, run: Run, in_shards: bool, folder: Path) -> None:
    """Model and optimizer go on from there as one process does."""
    saved = torch.load(folder / f"{name} {run}.pt")
    model = make(name, run, dist.get_world_size(), seed=1)
    optimizer = optimizer_of(run, model)
    if in_shards:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder / f"{name} {run}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(Fsdp.optim_state_dict_to_load(model, optimizer, saved["optimizer"]))
    assert_same(model.state_dict(), saved["model"])
    train(name, run, model, optimizer, MORE_STEPS, dist.get_rank(), dist.get_world_size())
    expected = torch.load(folder / f"{name} {run}, later.pt")
    wrong = differences(model.state_dict(), expected, 1e-5)  # the loss is a mean in float32, of a third of the rows
    assert not wrong, "\n".join(wrong[:5])


def into_the_plain_model(name: str, run: Run, folder: Path) -> dict[str, Tensor]:
    """What one process makes of the saved state in the next steps; kept for those who do so on more ranks."""
    saved = torch.load(folder / f"{name} {run}.pt")
    model = plain(name, seed=1)
    optimizer = optimizer_of(run, model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(Fsdp.rekey_optim_state_dict(saved["optimizer"], OptimStateKeyType.PARAM_ID, model))
    train(name, run, model, optimizer, MORE_STEPS)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / f"{name} {run}, later.pt")
    return model.state_dict()


# What else these models do


def what_a_model_is_asked_outside_forward(name: str) -> None:
    """Attributes, properties and methods of the wrapped model are found through the wrapper."""
    for use_orig_params in (False, True):
        model, one = sharded(name, use_orig_params=use_orig_params), plain(name)
        output = model(**batch(name, 0))
        assert type(output) is type(one(**batch(name, 0)))
        assert model.config.model_type == one.config.model_type == name
        assert (model.device, model.dtype) == (one.device, one.dtype)
        assert type(model.get_input_embeddings()) is type(one.get_input_embeddings())
        output.loss.backward()
        assert_freed(model)


def generation(name: str) -> None:
    """Outside forward it is refused in one sentence; with whole parameters it is the plain model's."""
    ids = batch(name, 0)["input_ids"][:2]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = plain(name).eval().generate(ids, **options)
    for use_orig_params, has_run in product((False, True), repeat=2):
        model = sharded(name, use_orig_params=use_orig_params).eval()
        if has_run:
            with torch.no_grad():  # with grad, the root stays whole for a backward
                model(**batch(name, 0))
            with pytest.raises(RuntimeError, match=r"sharded.*summon_full_params"):
                model.generate(ids, **options)
        for recurse in (True, False):
            with summon(model, recurse=recurse, writeback=False), torch.no_grad():
                assert torch.equal(model.generate(ids, **options), expected), f"{use_orig_params=}, {recurse=}"
            assert_freed(model)
        with torch.no_grad():
            logits = model(**batch(name, 0)).logits
        assert torch.allclose(logits, plain(name).eval()(**batch(name, 0)).logits, rtol=1e-9)


def saved_as_pretrained(name: str, folder: Path) -> None:
    """`save_pretrained` writes a full state dict, and `from_pretrained` reads it."""
    model = sharded(name)
    state, path = model.state_dict(), folder / f"{name}-pretrained"
    if dist.get_rank() == 0:
        model.save_pretrained(path, state_dict=dict(state))
        assert_same(type(model.module).from_pretrained(path, dtype=torch.float64).state_dict(), state)


def built_on_meta(name: str) -> None:
    """Few of these modules have `reset_parameters`: it is said which. With memory they can take rank 0's values."""
    example = MODELS[name]()
    with torch.device("meta"):
        nothing, hollow = example.build(), example.build()
    with pytest.raises(RuntimeError, match=r"Unable to call `reset_parameters\(\)` for module on meta.*param_init_fn"):
        Fsdp(nothing, auto_wrap_policy=example.blocks)
    one = plain(name)
    original = plain(name) if dist.get_rank() == 0 else hollow
    model = Fsdp(original, auto_wrap_policy=example.blocks, param_init_fn=give_memory, sync_module_states=True)
    assert_same(model.state_dict(), one.state_dict())
    buffers = dict(original.named_buffers())
    assert_same({key.replace("_fsdp_wrapped_module.", ""): b for key, b in buffers.items()}, dict(one.named_buffers()))
    assert sum(p.numel() for p in model.parameters()) < 0.6 * sum(p.numel() for p in one.parameters())
    model(**batch(name, 0)).loss.backward()


def give_memory(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def initialized_by_its_own_function(name: str) -> None:
    """`_init_weights` of the model is a `param_init_fn`, once the module has memory."""
    example = MODELS[name]()
    with torch.device("meta"):
        hollow = example.build()

    def init(module: nn.Module) -> None:
        give_memory(module)
        hollow._init_weights(module)

    model = Fsdp(hollow, auto_wrap_policy=example.blocks, param_init_fn=init)
    state, expected = model.state_dict(), example.build().state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        if value.std() == 0:
            assert torch.equal(state[key], value), key
        else:
            assert 0.3 < state[key].std() / value.std() < 3, key


def unused_experts() -> None:
    """Experts without a token on any rank: their gradients are zero, others' are means over all ranks."""
    model = sharded("mixtral", use_orig_params=True)
    model(**batch("mixtral", 0, dist.get_rank(), 2)).loss.backward()
    one = plain("mixtral")
    one(**batch("mixtral", 0)).loss.backward()
    used = one.model.layers[0].mlp.experts.gate_up_proj.grad.abs().amax((1, 2)) > 0
    assert 0 < used.sum() < len(used)
    norm = torch.sqrt(sum(p.grad.square().sum() for p in one.parameters()))
    assert torch.allclose(model.clip_grad_norm_(1e9), norm, rtol=1e-9)


Finding = str | None
Cases = Iterator[tuple[str, Callable[[], None]]]


def cases_on_two_ranks(folder: Path, names: Sequence[str]) -> Cases:
    for name in names:
        for run in RUNS:
            yield f"{name} trains, {run}", partial(trains_as_one_process, name, run, folder)
        yield f"{name} is asked", partial(what_a_model_is_asked_outside_forward, name)
        yield f"{name} as pretrained", partial(saved_as_pretrained, name, folder)
        yield f"{name} built on meta", partial(built_on_meta, name)
        if name in ("llama", "mixtral", "vit"):
            yield f"{name} initialized", partial(initialized_by_its_own_function, name)
        if name in WITH_TEXT:
            yield f"{name} generates", partial(generation, name)
        if name == "mixtral":
            yield "mixtral has unused experts", unused_experts


def cases_on_three_ranks(folder: Path, names: Sequence[str]) -> Cases:
    for name, run, in_shards in product(names, SAVED, (False, True)):
        title = f"{name} loaded, {run}, {'sharded' if in_shards else 'full'}"
        yield title, partial(loads_on_more_ranks, name, run, in_shards, folder)


def find(cases: Callable[[Path, Sequence[str]], Cases], folder: Path, names: Sequence[str]) -> dict[str, Finding]:
    """The end of the traceback of each case that fails. In float64, where nothing but a mistake makes 1e-9."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    found: dict[str, Finding] = {}
    for title, case in cases(folder, names):
        try:
            case()
            found[title] = None
        except (Exception, pytest.fail.Exception, CheckpointException):
            found[title] = traceback.format_exc(limit=-4)
    return found


CASES = {2: cases_on_two_ranks, 3: cases_on_three_ranks}
AT_ONCE, SLOWLY = ("t5",), tuple(name for name in MODELS if name != "t5")  # t5 uses one weight in most places

Findings = Callable[[int, Sequence[str]], dict[str, str]]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """What is wrong with these models on so many ranks, by title: one launch each. Three load what two have saved."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def find_on(ranks: int, names: Sequence[str]) -> dict[str, str]:
        if ranks == 3:
            find_on(2, names)
        import_before_launch()
        each_rank = launch(find, ranks, CASES[ranks], folder, names, timeout=150)
        return {
            title: "\n".join(
                f"rank {rank}: {finding[title]}" for rank, finding in enumerate(each_rank) if finding[title]
            )
            for title in each_rank[0]
        }

    return find_on


def params(ranks: int) -> list[Any]:
    at_once = pytest.mark.wide if ranks == 3 else ()
    return [
        pytest.param(names, title, id=title, marks=marks)
        for names, marks in ((AT_ONCE, at_once), (SLOWLY, pytest.mark.slow))
        for title, _ in CASES[ranks](Path(), names)
    ]


@pytest.mark.behaviour(4)
@pytest.mark.parametrize(("names", "title"), params(2))
def test_on_two_ranks(findings: Findings, names: Sequence[str], title: str) -> None:
    wrong = findings(2, names)[title]
    assert not wrong, wrong


@pytest.mark.behaviour(40, 41, 42)
@pytest.mark.parametrize(("names", "title"), params(3))
def test_loaded_on_three_ranks(findings: Findings, names: Sequence[str], title: str) -> None:
    wrong = findings(3, names)[title]
    assert not wrong, wrong
