"""The rungs of the second ladder: layers cut over ranks, and on top of that the model state over groups of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from minifsdp.course.ladder import activations, closed_form, tensor
from minifsdp.course.ladder.activations import Cut
from minifsdp.course.ladder.closed_form import Bytes, Setting
from minifsdp.course.ladder.model import GPT
from minifsdp.course.ladder.rungs import LEARNING_RATE, RUNGS, Rung, Sizes, Trainer, one_by_one
from minifsdp.course.ladder.tensor import StepBytes
from minifsdp.tensor_parallel import parallelize_gpt, sum_gradients


def mesh_sizes(ranks: int) -> tuple[int, int]:
    """dp and tp of the mesh of `tp-fsdp2`: the smallest divisor of N above 1, and what is left."""
    dp = next((n for n in range(2, ranks + 1) if ranks % n == 0), 1)
    return dp, ranks // dp


def _tp(model: GPT, limit: int, sequence: bool = False, regather: bool = False) -> Trainer:
    mesh = init_device_mesh(model.norm.weight.device.type, (dist.get_world_size(),))
    parameters = list(parallelize_gpt(model, mesh, sequence, regather).parameters())
    return Trainer(model, AdamW(parameters, LEARNING_RATE), partial(sum_gradients, parameters))


def _tp_fsdp2(model: GPT, limit: int) -> Trainer:
    kind, sizes = model.norm.weight.device.type, mesh_sizes(dist.get_world_size())
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=("dp", "tp"))
    return one_by_one(parallelize_gpt(model, mesh["tp"], sequence=True), limit, mesh=mesh["dp"])


# The closed form


def _with_activations(held: Bytes, sizes: Sizes, setting: Setting, replicas: int, cut: Cut | None) -> StepBytes:
    """The bytes of a step on a rank that has 1/replicas of the batch."""
    model = activations.Sizes.of(sizes.shapes[0], sizes.heads, setting.batch // replicas, setting)
    if cut is not None:
        vocabulary, _ = tensor.rows((model.vocabulary, model.width), cut.ranks, setting.rank % cut.ranks)
        model = replace(model, vocabulary=vocabulary)
    return StepBytes(**asdict(held), activations=activations.kept(len(sizes.shapes) - 1, model, cut))


def _stream(sizes: Sizes, setting: Setting, replicas: int = 1) -> int:
    """Bytes of the activations between two layers, [batch / replicas, context, width]."""
    context, width = sizes.shapes[0][1]
    return setting.itemsize * setting.batch // replicas * context * width


def _predict_ddp(sizes: Sizes, setting: Setting, limit: int) -> StepBytes:
    return _with_activations(closed_form.ddp(sizes.parameters, setting), sizes, setting, setting.ranks, None)


def _predict_tp(sizes: Sizes, setting: Setting, limit: int) -> StepBytes:
    return _with_activations(tensor.tp(sizes.shapes, setting), sizes, setting, 1, Cut(setting.ranks))


def _predict_tp_sequence(sizes: Sizes, setting: Setting, limit: int, regather: bool = False) -> StepBytes:
    held = tensor.tp_sequence(sizes.shapes, setting, _stream(sizes, setting))
    return _with_activations(held, sizes, setting, 1, Cut(setting.ranks, True, regather))


def _predict_tp_fsdp2(sizes: Sizes, setting: Setting, limit: int) -> StepBytes:
    dp, tp = mesh_sizes(setting.ranks)
    held = tensor.tp_fsdp2(sizes.shapes, sizes.head, setting, tp, _stream(sizes, setting, dp), limit)
    return _with_activations(held, sizes, setting, dp, Cut(tp, True))


# What cannot be cut


def _heads_fault(sizes: Sizes, ranks: int) -> str:
    if sizes.heads % ranks:
        return f"{sizes.heads} heads cannot be shared by {ranks} ranks: choose --heads or --ranks so that they can"
    return ""


def _sequence_fault(sizes: Sizes, ranks: int) -> str:
    context = sizes.shapes[0][1][0]
    if context % ranks:
        return f"{context} tokens cannot be shared by {ranks} ranks: choose a multiple for --context"
    return _heads_fault(sizes, ranks)


def _mesh_fault(sizes: Sizes, ranks: int) -> str:
    dp, tp = mesh_sizes(ranks)
    if tp < 2 or dp < 2:
        return f"{ranks} ranks are no mesh of dp x tp with both above 1: choose 4 or 6"
    return _sequence_fault(sizes, tp)


TENSOR_RUNGS: dict[str, Rung] = {
    "ddp": RUNGS["ddp"]._replace(adds="rows divided, layers whole", predict=_predict_ddp),
    "tp": Rung(
        "layers cut over ranks, rows whole",
        _tp,
        _predict_tp,
        replicas=lambda ranks: 1,
        fault=_heads_fault,
    ),
    "tp-sp": Rung(
        "norms cut along the sequence",
        partial(_tp, sequence=True),
        _predict_tp_sequence,
        replicas=lambda ranks: 1,
        fault=_sequence_fault,
    ),
    "tp-sp-regather": Rung(
        "inputs kept as parts, gathered again",
        partial(_tp, sequence=True, regather=True),
        partial(_predict_tp_sequence, regather=True),
        replicas=lambda ranks: 1,
        fault=_sequence_fault,
    ),
    "tp-fsdp2": Rung(
        "FSDP2 outside, tp-sp inside",
        _tp_fsdp2,
        _predict_tp_fsdp2,
        replicas=lambda ranks: mesh_sizes(ranks)[0],
        fault=_mesh_fault,
    ),
}
