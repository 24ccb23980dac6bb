"""Layers divided among stages; a model that has lost the layers of other stages, and what it was refused for."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_models import MODELS

from minifsdp.gpt import GPT
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.pipeline import (
    balance,
    divide,
    keep_stage,
    keep_transformers_stage,
    materialize,
    parameters_of,
    parameters_on_meta,
    seconds_of,
)
from minifsdp.pipeline.gpt import split_gpt


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_has_a_cheaper_most_expensive_stage(seed: int) -> None:
    generator = random.Random(seed)
    layers = [f"layer {n}" for n in range(generator.randint(3, 8))]
    costs = [generator.choice((0.0, 1.0, 2.0, 7.0)) for _ in layers]
    for stages in range(1, len(layers) + 1):
        found = divide(layers, stages, costs)
        assert [name for stage in found for name in stage] == layers
        assert all(found)
        of = dict(zip(layers, costs, strict=True))
        cuts = itertools.combinations(range(1, len(layers)), stages - 1)
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(layers)))) for cut in cuts)
        assert max(sum(of[name] for name in stage) for stage in found) == best


def test_layers_of_one_cost_differ_by_one_in_number() -> None:
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            numbers = [len(each) for each in divide([str(n) for n in range(layers)], stages)]
            assert max(numbers) - min(numbers) <= 1, numbers
            assert numbers == sorted(numbers, reverse=True), "the last stage often has a head"


@pytest.mark.parametrize(
    ("layers", "stages", "costs", "words"),
    [
        (["a"], 2, None, "1 layers make no 2 stages"),
        (["a"], 0, None, "1 layers make no 0 stages"),
        (["a"], 1, [1, 2], "1 layers and 2 costs"),
    ],
)
def test_a_division_that_leaves_a_stage_empty_is_refused(layers: Any, stages: int, costs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        divide(layers, stages, costs)


def test_balance_by_parameters_and_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Takes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal now
            now += self.out_features
            return super().forward(x)

    model = nn.Sequential(Takes(2, 5), nn.Tanh(), Takes(5, 7, bias=False))
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert balance.time is time
    assert parameters_of(model, ["0", "1", "2"]) == [15, 0, 35]
    assert seconds_of(model, ["0", "1", "2"], lambda: model(torch.ones(1, 2))) == [5, 0, 7]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)


# Stages


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))


def test_stages_together_are_the_model_and_have_its_names() -> None:
    stages = [["0"], ["1", "2"], ["3", "4"]]
    whole, x = small(), torch.randn(5, 3)
    parts = [keep_stage(small(), stages, stage) for stage in range(3)]
    states = [part.state_dict() for part in parts]
    assert [sorted({name[0] for name in state}) for state in states] == [["0"], ["1", "2"], ["4"]]
    together = {name: value for state in states for name, value in state.items()}
    assert together.keys() == whole.state_dict().keys()
    small().load_state_dict(together)
    for part in parts:
        part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
    torch.testing.assert_close(parts[2](parts[1](parts[0](x))), whole(x))


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([["0", "1"], ["2"]], r"4\.weight is in no stage: name its module"),
        ([["0", "1"], ["2", "9"]], "stage 1 has '9', and the model has no module of this name"),
        ([["0", "1"], ["1", "2", "4"]], "1 of stage 1 and 1 of stage 0 overlap"),
    ],
)
def test_names_that_do_not_fit_are_refused(stages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        keep_stage(small(), stages, 0)


def test_names_inside_one_another_are_refused() -> None:
    model = nn.Sequential(small(), nn.Linear(2, 2))
    for stages in ([["0"], ["0.1", "1"]], [["0.1"], ["0", "1"]]):
        with pytest.raises(ValueError, match="overlap: name one"):
            keep_stage(model, stages, 0)


def test_a_tied_weight_in_two_stages_is_refused_unless_it_is_expected() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
        model[2].weight = model[0].weight
        return model

    with pytest.raises(ValueError, match=r"0\.weight \(stage 0\) and 2\.weight \(stage 1\) are one parameter"):
        keep_stage(tied(), [["0"], ["1", "2"]], 0)
    keep_stage(tied(), [["1"], ["0", "2"]], 1)
    assert set(keep_stage(tied(), [["0"], ["1", "2"]], 1, tied=True).state_dict()) == {
        *("1.weight", "1.bias", "2.weight")
    }
    with pytest.raises(ValueError, match="the head has the embedding's weight"):
        split_gpt(GPT(width=8, layers=2, tied=True), 2, 0)
    split_gpt(GPT(width=8, layers=2, tied=True), 1, 0)


# Memory


def test_only_a_stages_own_parameters_get_memory() -> None:
    example = MODELS["llama"]()
    stages = [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]]
    whole = example.build().state_dict()
    with Ledger() as ledger:
        with parameters_on_meta():
            model = example.build()
        assert all(p.is_meta for p in model.parameters())
        assert not any(b.is_meta for b in model.buffers()), "rotary frequencies are in no checkpoint"
        before = sum(ledger.mark("made").values())
        assert before == sum(b.nbytes for b in model.buffers())
        materialize(keep_stage(model, stages, 1), "cpu", whole)
        own = sum(p.nbytes for p in model.parameters())
        assert sum(ledger.mark("filled").values()) == before + own
        assert ledger.peak.total <= before + own + max(v.nbytes for v in whole.values())
    assert set(model.state_dict()) == {
        name for name in whole if name.startswith(("model.layers.1", "model.norm", "lm"))
    }
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole[name])


def test_a_stage_may_be_initialized_instead() -> None:
    with parameters_on_meta():
        model = keep_stage(small(), [["0", "1"], ["2", "4"]], 1)
    torch.manual_seed(3)
    materialize(model, "cpu", lambda module: module.reset_parameters())
    torch.manual_seed(3)
    assert torch.equal(model[2].weight, nn.Linear(4, 4).weight)


def test_a_state_dict_of_another_model_is_refused() -> None:
    with parameters_on_meta():
        model = keep_stage(small(), [["0", "1"], ["2", "4"]], 1)
    with pytest.raises(ValueError, match=r"the state dict lacks 4\.weight, 4\.bias"):
        materialize(model, "cpu", small()[:3].state_dict())


def test_tied_parameters_of_a_stage_stay_one() -> None:
    with parameters_on_meta():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
    materialize(model, "cpu", lambda module: module.reset_parameters())
    assert model[1].weight is model[0].weight


def stage_1_of(kind: str, dropouts: tuple[str, ...] = (), **config: Any) -> nn.Module:
    """The second of two stages; all layers by name, with a dropout in the first stage if there is one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=50, **sizes, **config))
    body = model.base_model
    [layers] = [name for name, child in body.named_children() if isinstance(child, nn.ModuleList)]
    names = [
        name for name, child in body.named_children() if name != layers and next(child.parameters(), None) is not None
    ]
    last, first = names[-1], names[:-1]
    prefix = model.base_model_prefix
    stages = [
        [f"{prefix}.{name}" for name in (*first, f"{layers}.0")],
        [f"{prefix}.{layers}.1", f"{prefix}.{last}", "lm_head"],
    ]
    stages[0] += dropouts
    added = [name for name in stages[0] if name.endswith("wpe")]
    return keep_transformers_stage(model, stages, 1, added=added, tied=True)


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("gpt2", {}, "changes activations outside its layers"),  # its dropout
        ("gemma2", {"head_dim": 8}, "changes activations outside its layers"),  # tanh of its logits
        ("granite", {"embedding_multiplier": 2.0}, "changes activations outside its layers"),
        ("cohere", {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}, "changes activations outside its layers"),
        ("gptj", {"rotary_dim": 4}, "does not pass activations from layer to layer"),  # from tuple to tuple
    ],
)
def test_a_model_that_computes_outside_its_layers_is_refused(kind: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stage_1_of(kind, **config)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt2", {"dropouts": ("transformer.drop",)}),
        ("granite", {}),
        ("qwen3", {"head_dim": 8, "num_key_value_heads": 2}),
    ],
)
def test_a_stream_of_layers_is_taken_as_it_is(kind: str, config: dict[str, Any]) -> None:
    model = stage_1_of(kind, **config).eval()
    assert model(torch.randn(2, 3, 16)).shape == (2, 3, 50)


def test_the_look_at_a_model_draws_no_random_numbers() -> None:
    """A dropout does, and the user's seed would give another training."""
    from transformers.models.gpt2 import modeling_gpt2 as m

    model = m.GPT2LMHeadModel(m.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50))
    before = torch.get_rng_state()
    stages = [
        ["transformer.wte", "transformer.wpe", "transformer.h.0"],
        ["transformer.h.1", "transformer.ln_f", "lm_head"],
    ]
    with pytest.raises(ValueError, match="changes activations"):
        keep_transformers_stage(model, stages, 1, added=("transformer.wpe",), tied=True)
    assert torch.equal(torch.get_rng_state(), before)
