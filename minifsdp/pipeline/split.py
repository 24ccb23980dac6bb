"""A model in stages: each keeps the layers that are its own, and the names of their parameters.

Names stay those of the whole model, so the state dicts of all stages, put together, are the whole one's, and each stage
loads from it, on any number of stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class Passing(nn.Module):
    """Takes the place of another stage's layer: returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


class Zero(nn.Module):
    """Takes the place of another stage's layer whose output is added to a stream: returns zero."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def keep_stage(
    model: M, stages: Sequence[Sequence[str]], stage: int, added: Collection[str] = (), tied: bool = False
) -> M:
    """Take all layers of other stages out of a model, in place. Its own forward then runs the stage.

    A layer that is not here passes its input on, so the model has to be a stream: the activations go from layer to
    layer, as each one's first argument. Modules without parameters that no stage names, such as rotary embeddings,
    stay in every stage.

    Args:
        model: whole; with parameters on "meta" it takes no memory.
        stages: the names of each one's layers.
        stage: the one to keep.
        added: names of layers whose output is added to the stream, such as learned positions: zero where they are not.
        tied: allow parameters that are in two stages, each with a copy; then see `tied.py`.

    Returns:
        the model.

    Raises:
        ValueError: names and parameters do not fit together; says which, and what to do.
    """
    homes = _homes(model, stages)
    _check_parameters(model, homes, tied)
    for name, home in homes.items():
        if home != stage:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Zero() if name in added else Passing())
    return model


def _homes(model: nn.Module, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """The stage of each layer."""
    homes: dict[str, int] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for stage, names in enumerate(stages):
        for name in names:
            if name not in modules or not name:
                raise ValueError(f"stage {stage} has {name!r}, and the model has no module of this name: correct it")
            around = next((other for other in homes if f"{name}.".startswith(f"{other}.")), None)
            around = around or next((other for other in homes if f"{other}.".startswith(f"{name}.")), None)
            if around is not None:
                raise ValueError(f"{name} of stage {stage} and {around} of stage {homes[around]} overlap: name one")
            homes[name] = stage
    return homes


def _check_parameters(model: nn.Module, homes: Mapping[str, int], tied: bool) -> None:
    places: dict[nn.Parameter, dict[int, str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        stage = next((stage for layer, stage in homes.items() if name.startswith(f"{layer}.")), None)
        if stage is None:
            raise ValueError(f"{name} is in no stage: name its module, or one around it, in one of them")
        places.setdefault(p, {})[stage] = name
    for found in places.values():
        if len(found) > 1 and not tied:
            names = " and ".join(f"{name} (stage {stage})" for stage, name in sorted(found.items()))
            raise ValueError(
                f"{names} are one parameter: put them into one stage, or pass tied=True and have the schedule add "
                "their gradients with tie()"
            )


def keep_transformers_stage(
    model: M, stages: Sequence[Sequence[str]], stage: int, added: Collection[str] = (), tied: bool = False
) -> M:
    """`keep_stage` for a decoder of the `transformers` library: a stage takes tokens or activations, returns a tensor.

    Position ids and masks are keyword arguments of every stage: each rank gives them to `step`.

    Args:
        model: such as LlamaForCausalLM, or GPT2LMHeadModel with "transformer.drop" in the first stage and
            added=("transformer.wpe",).
        stages, stage, added, tied: see `keep_stage`.

    Raises:
        ValueError: as `keep_stage`; or the model computes outside its layers, as Gemma 2 does with its logits.
    """
    keep_stage(model, stages, stage, added, tied)
    _check_is_stream(model, stages[stage], added)
    given = "inputs_embeds" if stage else "input_ids"
    whole: Callable[..., Any] = model.forward

    def forward(x: Tensor, **kwargs: Any) -> Tensor:
        return _tensor_in(whole(**{given: x}, use_cache=False, **kwargs))

    model.forward = forward
    return model


def _check_is_stream(model: Any, layers: Sequence[str], added: Collection[str]) -> None:
    """Run a copy of the model without any layers: what it does to activations then, it would do in every stage."""
    without = {id(model.get_submodule(name)): Zero() if name in added else Passing() for name in layers}
    bare: Any = copy.deepcopy(model, without).to_empty(device="cpu").train()
    width = model.config.get_text_config().hidden_size
    x = torch.linspace(-1, 1, 12 * width, dtype=model.dtype, device="cpu").view(2, 6, width)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            is_same = torch.equal(x, _tensor_in(bare(inputs_embeds=x, use_cache=False)))
            problem = "" if is_same else "changes activations outside its layers"
    except Exception as error:  # whatever a stranger's model raises
        problem = f"does not pass activations from layer to layer ({type(error).__name__}: {error})"
    if problem:
        raise ValueError(
            f"{type(model).__name__} {problem}, and would do so in every stage: put a dropout such as GPT-2's "
            "transformer.drop into the first stage; make stages of another model by hand, as modules for PipelineStage"
        )


def _tensor_in(output: Any) -> Tensor:
    found: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return found
