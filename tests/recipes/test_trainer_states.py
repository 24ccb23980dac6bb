"""What a trainer of any recipe saves, one of any other loads: names, shapes and values are the plain model's.

Each piece of a value is compared with the same part of what one process has, after steps in float64.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import every_layout
from on_ranks import Checks, shared_folder
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.optim import AdamW

from minifsdp.build import LEARNING_RATE, build
from minifsdp.checkpoint import get_model_state_dict, get_trainer_state, set_trainer_state
from minifsdp.checkpoint.pieces import Pieces
from minifsdp.gpt import GPT
from minifsdp.losses import IGNORED, token_mean
from minifsdp.recipe import Recipe
from minifsdp.trainer import Trainer

check = Checks(__name__)

SIZES: dict[str, Any] = {"vocabulary": 61, "width": 16, "layers": 4, "heads": 8, "context": 16}
ROWS = 16
STEPS = 2


def model(**others: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**SIZES | others).double()


def batch(step: int, place: int = 0, share: int = ROWS) -> tuple[Tensor, Tensor]:
    """Rows from a place on: half of them have no targets that count, and beginnings have more than ends."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(SIZES["vocabulary"], (2, ROWS, SIZES["context"]), generator=generator)
    often = torch.linspace(-1, 1, ROWS)[:, None] * torch.linspace(1, 0.4, SIZES["context"])
    targets[torch.rand(targets.shape, generator=generator) > often] = IGNORED
    return tokens[place : place + share], targets[place : place + share]


def trained(recipe: Recipe, steps: int, **others: Any) -> Trainer:
    trainer = build(model(**others), recipe)
    for step in range(steps):
        take_step(trainer, recipe, step)
    return trainer


def take_step(trainer: Trainer, recipe: Recipe, step: int) -> Tensor:
    share = ROWS // recipe.mesh.dp
    loss = trainer.step(*batch(step, recipe.mesh.place(dist.get_rank(), "dp") * share, share)).reshape(1).clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def alone(steps: int, **others: Any) -> Trainer:
    whole = model(**others)
    one = Trainer(whole, AdamW(whole.parameters(), LEARNING_RATE), loss_of=token_mean)
    for step in range(steps):
        one.step(*batch(step))
    return one


def check_parts(state: dict[str, Any], whole: dict[str, Any]) -> set[str]:
    """That each piece is that part of a whole value; returns the names that are here."""
    for name, value in state["model"].items():
        check_part(value, whole["model"][name])
        for key, found in state["optimizer"]["state"][name].items():
            check_part(found, whole["optimizer"]["state"][name][key])
    return {*state["model"]}


def check_part(value: Tensor, whole: Tensor) -> None:
    assert value.shape == whole.shape
    pieces = value.pieces if isinstance(value, Pieces) else {(0,) * value.dim(): value}
    for begin, piece in pieces.items():
        place = tuple(slice(low, low + size) for low, size in zip(begin, piece.shape, strict=True))
        torch.testing.assert_close(piece, whole[place], rtol=1e-9, atol=1e-9)


ON_TWO = ("dp=2,zero=1", "tp=2,sequence", "pp=2,order=interleaved,stages=2", "dp=2,data=fsdp", "cp=2,zero=2", "dp=2")
ON_FOUR = (
    "dp=2,tp=2,zero=3",
    "pp=2,dp=2,zero=1",
    "pp=2,tp=2,axes=tp/pp",
    "dp=4,replicate=2,data=fsdp",
    "cp=2,tp=2,zero=3",
)
MORE_ON_FOUR = (
    *("dp=2,cp=2,zero=3,replicate=2", "dp=2,tp=2,zero=1,sequence", "pp=4", "pp=2,dp=2,zero=3", "dp=4,zero=2"),
)
ON_EIGHT = (
    *("pp=2,dp=2,tp=2,zero=1,sequence", "pp=4,dp=1,tp=2", "dp=8,zero=3", "pp=2,cp=2,tp=2,zero=3", "dp=4,tp=2"),
    *("pp=2,dp=2,tp=2,zero=3,axes=dp/tp/pp", "tp=8", "cp=8,zero=1", "pp=4,dp=2,data=fsdp", "dp=4,cp=2,replicate=2"),
)


A_PAIR_OF_AXES_EACH = (
    *("pp=2,dp=2,tp=2,zero=1", "pp=2,cp=2,tp=2,zero=3", "dp=2,cp=2,tp=2,zero=3", "pp=2,dp=2,cp=2,zero=1"),
)


def pairs(recipes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each with the one after it, which goes on from its checkpoint."""
    return [*zip(recipes, (*recipes[1:], recipes[0]), strict=True)]


@check(ranks=2, pair={" to ".join(pair): pair for pair in pairs(ON_TWO)})
@check(ranks=4, pair={" to ".join(pair): pair for pair in pairs(ON_FOUR)})
@check(ranks=4, pair={" to ".join(pair): pair for pair in pairs(MORE_ON_FOUR)}, slow=(4,))
@check(ranks=8, pair={" to ".join(pair): pair for pair in pairs(ON_EIGHT)}, slow=(8,))
def a_layout_goes_on_as_another(pair: tuple[str, str]) -> None:
    """Two steps, a checkpoint, and a third step on another layout are three steps of one process."""
    before, after = map(Recipe.parse, pair)
    one = alone(STEPS)
    whole = get_trainer_state(one.model, one.optimizer)
    with shared_folder() as folder:
        trainer = trained(before, STEPS)
        state = get_trainer_state(trainer.model, trainer.optimizer)
        check_parts(state, whole)
        save(state, storage_writer=FileSystemWriter(folder))
        again = build(model(), after)
        state = get_trainer_state(again.model, again.optimizer)
        load(state, storage_reader=FileSystemReader(folder))
        set_trainer_state(again.model, again.optimizer, state)
    state = get_trainer_state(again.model, again.optimizer)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, check_parts(state, whole))
    assert set().union(*names) == {*whole["model"]}, "together the ranks have all of it"
    torch.testing.assert_close(take_step(again, after, STEPS), one.step(*batch(STEPS)).reshape(1), rtol=1e-9, atol=0)


@check(ranks=8, recipe=A_PAIR_OF_AXES_EACH)
@check(ranks=8, recipe=[layout for layout in every_layout(8) if layout not in A_PAIR_OF_AXES_EACH], slow=(8,))
def every_layout_trains_what_one_process_trains(recipe: str) -> None:
    """Losses, parameters and the optimizer's states, from other numbers of tokens on every rank."""
    layout = Recipe.parse(recipe)
    layers = max(2, layout.mesh.pp)
    trainer, one = trained(layout, STEPS, layers=layers), alone(STEPS, layers=layers)
    check_parts(get_trainer_state(trainer.model, trainer.optimizer), get_trainer_state(one.model, one.optimizer))
    torch.testing.assert_close(take_step(trainer, layout, STEPS), one.step(*batch(STEPS)).reshape(1), rtol=1e-9, atol=0)


def test_any_two_axes_and_both_ways_to_shard_meet_in_the_short_tests():
    """Of eight ranks; with FSDP2 and with ZeRO-1, as far as ranks have different tokens."""
    met = [{word.partition("=")[0] for word in layout.split(",")} for layout in A_PAIR_OF_AXES_EACH]
    assert all(any({*pair} <= axes for axes in met) for pair in combinations(("pp", "dp", "cp", "tp"), 2))
    for zero in ("zero=1", "zero=3"):
        beside = [layout for layout in A_PAIR_OF_AXES_EACH if layout.endswith(zero)]
        assert all(any(axis in layout for layout in beside) for axis in ("pp", "dp", "cp", "tp"))
    assert {*A_PAIR_OF_AXES_EACH} <= {*every_layout(8)}
    assert len(every_layout(8)) == 36


@check(ranks=4)
def rows_that_two_axes_share_unevenly_have_their_place() -> None:
    """61 rows over two tensor-parallel ranks, 31 and 30, over two data-parallel ones each: 16, 15, 15 and 15."""
    recipe = Recipe.parse("dp=2,tp=2")
    trainer = build(model(), recipe)
    value = get_trainer_state(trainer.model, trainer.optimizer)["model"]["head.weight"]
    begins: list[Any] = [None] * 4
    dist.all_gather_object(begins, [(begin[0], len(piece)) for begin, piece in value.pieces.items()])
    assert sorted(begins) == [[(0, 16)], [(16, 15)], [(31, 15)], [(46, 15)]]


@check()
def a_fused_weight_is_one_value_in_three_pieces() -> None:
    """Of the plain model's shape, whose memory is the layer's."""
    trainer = build(model(), Recipe.parse("tp=2"))
    weight = get_trainer_state(trainer.model, trainer.optimizer)["model"]["blocks.0.qkv.weight"]
    low = 8 * dist.get_rank()
    assert weight.shape == (48, 16)
    assert {begin: [*piece.shape] for begin, piece in weight.pieces.items()} == {
        (low, 0): [8, 16],
        (16 + low, 0): [8, 16],
        (32 + low, 0): [8, 16],
    }
    live = get_model_state_dict(trainer.model)["blocks.0.qkv.weight"]._local_tensor
    assert {piece.untyped_storage().data_ptr() for piece in weight.pieces.values()} == {
        live.untyped_storage().data_ptr()
    }
    with pytest.raises(TypeError, match="a value in pieces has no operators"):
        weight.add(1)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks, name):
    check.assert_passed(ranks, name)
