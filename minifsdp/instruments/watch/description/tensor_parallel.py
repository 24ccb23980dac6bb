"""A description of tensor parallelism alone: layers whose parameters are never whole."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.cost.data_parallel import Gradient, OptimizerState
from minifsdp.instruments.watch.description.report import Description, Prediction, UnitRow, dtype_name
from minifsdp.local_parts import cuts_of, local_of


def describe_layers(model: nn.Module, optimizer: OptimizerState) -> Description:
    """Describe the layers of a model that `parallelize_module` was applied to, those with parameters of their own.

    A tied parameter counts where it is first. The peaks are without the buffers of the layers' collectives.
    """
    seen: set[nn.Parameter] = set()
    rows, ranks = [], 1
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if p not in seen}
        seen.update(own.values())
        ranks = max([ranks, *(p.device_mesh.size() for p in own.values() if isinstance(p, DTensor))])
        if own:
            rows.append(_row(f"{name or 'root'} ({type(module).__name__})", own, optimizer))
    parameters, states = sum(row.rank for row in rows), sum(row.optimizer for row in rows)
    gradients = sum(row.gradient.kept for row in rows)
    predicted = Prediction(parameters, gradients, states, 0, gradients, parameters + gradients + states)
    return Description(rows, predicted, [], ranks, "layer")


def _row(name: str, own: dict[str, nn.Parameter], optimizer: OptimizerState) -> UnitRow:
    parts = [local_of(p.detach()) for p in own.values()]
    trained = [part for part, p in zip(parts, own.values(), strict=True) if p.requires_grad]
    gradient = sum(part.nbytes for part in trained)
    dtype = dtype_name(parts[0].dtype)
    return UnitRow(
        name=name,
        strategy=", ".join(f"{key} {_placed(p)}" for key, p in own.items()),
        parameters=len(own),
        numel=sum(p.numel() for p in own.values()),
        padding=0,
        frozen=sum(p.numel() for p in own.values() if not p.requires_grad),
        whole=sum(p.nbytes for p in own.values()),
        rank=sum(part.nbytes for part in parts),
        gradient=Gradient(gradient, 0, gradient),
        optimizer=optimizer.of_sizes(part.nbytes for part in trained),
        dtypes=(dtype, dtype, dtype),
        resharded=False,
        offloaded=False,
    )


def _placed(p: nn.Parameter) -> str:
    cuts = [*cuts_of(p).values()]
    return f"Shard({cuts[0].dim})" if cuts else "Replicate"
