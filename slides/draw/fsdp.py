"""Figures and numbers of deck 3: flat parameters and FSDP."""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from draw.canvas import INK, LINE, PALE, SOFT, Draw, canvas, in_units
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn
from torch.optim import AdamW

from minifsdp import comm, device
from minifsdp.course import closed_form
from minifsdp.course.closed_form import Setting
from minifsdp.course.launch import launch, rank_device
from minifsdp.course.ledger import Ledger
from minifsdp.course.measure import Settings, take_step
from minifsdp.course.model import GPT, Block
from minifsdp.course.plots.style import LANE_COLOURS, REDUCTION_COLOUR, SERIES_COLOURS, TAG_COLOURS
from minifsdp.course.reference.lab04 import assign_units, pad_and_chunk, shard_bounds
from minifsdp.course.rungs import sizes_of
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.fsdp import FullyShardedDataParallel, ShardingStrategy, SyncSchedule
from minifsdp.fsdp.unit import SHARDED, UNSHARDED, Unit
from minifsdp.fsdp.wrap import check_not_shared

GB, MB, KB, MIB = 10**9, 10**6, 10**3, 2**20
LARGE: dict[str, Any] = {"vocabulary": 50257, "width": 4096, "layers": 32, "heads": 32, "context": 2048}
LARGE_SETTING = Setting(ranks=64, itemsize=2)
SMALL = Settings(ranks=2, batch=2, layers=3, width=105, context=16)  # lab 05's model, with 4 units instead of 6
LAB = Settings(ranks=2, batch=2, layers=5, width=105, context=16)
BUDGET, ROWS = 16 * MIB, (2, 8, 9, 13, 18, 19, 22)
WIDTHS = [6, 10, 9, 12, 11, 8, 5]  # lab 04's six layers
UNIT_COLOURS = dict(zip(("root", "middle", "last"), SERIES_COLOURS, strict=False))
GATHER, REDUCE = LANE_COLOURS["communication"], REDUCTION_COLOUR


def numbers() -> dict[str, Any]:
    """What the deck's text says in numbers."""
    full, _ = ranks()[0]["steps"]
    groups = groupings()
    root, *blocks = groups["a block"]
    embedding, *rest = root  # of tokens; positions, a norm, and the head's weight and bias
    small_root = [rest[:-2], [embedding], rest[-2:], *blocks]
    peaks = {name: closed_form.fsdp(units, LARGE_SETTING).unsharded_peak for name, units in groups.items()}
    return {
        "billion": lambda size: f"{size / 1e9:.1f} billion",
        "gb": in_units("GB", GB, 1),
        "mb": in_units("MB", MB, 1),
        "mib": in_units("MiB", MIB, 1),
        "large": sum(map(sum, groups["a block"])),
        "whole": peaks,
        "root_in_blocks": sum(root) / sum(blocks[0]),
        "small_root": closed_form.fsdp(small_root, LARGE_SETTING).unsharded_peak,
        "padding": {orig: torch_padding([60, 10, 132, 11], 2, orig) for orig in (False, True)},
        "refusal": refusal(),
        "hook": whole_hook(),
        "ops": full["ops"],
        "norms": [full["total_norm"], *(rank["steps"][0]["own_norm"] for rank in ranks())],
        "optimizer": full["optimizer"],
        "rungs": rungs(),
        "ladder": ladder_units(),
        "fits": {name: most_rows(tried) for name, tried in ranks()[0]["rows"].items()},
        "shapes": full["shapes"],
    }


# What is shown: models, units and runs


@cache
def groupings() -> dict[str, list[list[int]]]:
    """Ways to group the parameters of a large GPT into units: elements of each parameter, the root's first."""
    with torch.device("meta"):
        model = GPT(**LARGE)
    root, *blocks = sizes_of(model).units
    layers = [[p.numel() for p in m.parameters()] for m in model.modules() if not list(m.children())]
    return {
        "the whole model": [[*root, *(size for block in blocks for size in block)]],
        "8 blocks": [root, *([n for each in blocks[i : i + 8] for n in each] for i in range(0, len(blocks), 8))],
        "a block": [root, *blocks],
        "a layer": [[], *(sizes for sizes in layers if sizes)],
        "a parameter": [[], *([p.numel()] for p in model.parameters())],
    }


def six_layers() -> nn.Sequential:
    """Lab 04's model: layers 1 and 2 are in a module of their own, and so are 4 and 5."""
    layers = [nn.Linear(before, after) for before, after in pairwise(WIDTHS)]
    middle = nn.Sequential(OrderedDict(layer1=layers[1], layer2=layers[2]))
    last = nn.Sequential(OrderedDict(layer4=layers[4], layer5=layers[5]))
    return nn.Sequential(OrderedDict(layer0=layers[0], middle=middle, layer3=layers[3], last=last))


@cache
def layouts(ranks: int) -> dict[str, dict[str, int]]:
    """Elements by parameter, and last the padding, of the three units of the six layers."""
    model = six_layers()
    inner: list[nn.Module] = [model.get_submodule("middle"), model.get_submodule("last")]
    return dict(zip(UNIT_COLOURS, assign_units(model, inner, ranks), strict=True))


def torch_padding(sizes: list[int], ranks: int, use_orig_params: bool) -> int:
    """Elements of padding in torch's flat parameter of float32 (lab 04 compares it with torch's own)."""
    between = sum(-size % 4 for size in sizes[:-1]) if use_orig_params else 0
    return between + -(sum(sizes) + between) % ranks


def refusal() -> str:
    """What is said of a parameter that would be in two units."""
    model = six_layers()
    first, last = model.get_submodule("layer0"), model.get_submodule("last.layer5")
    last.weight = first.weight
    try:
        check_not_shared(model, model.get_submodule("last"))
    except ValueError as error:
        return str(error)
    raise AssertionError("a tie between two units was not refused")


def whole_hook() -> dict[str, int]:
    """How many parameters have their gradient when the full backward hook of the whole model runs, and of how many."""
    model, seen = LAB.model(), []
    model.register_full_backward_hook(lambda *_: seen.append(sum(p.grad is not None for p in model.parameters())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so too
        model(*next(LAB.batches())).backward()
    return {"seen": seen[0], "parameters": len(list(model.parameters()))}


class LoggedSchedule(SyncSchedule):
    """The first schedule, which notes what it does to which unit."""

    log: list[tuple[str, Unit]]

    def begin_forward(self) -> None:
        self.log = []

    def gather(self, unit: Unit) -> None:
        if unit.state is SHARDED:
            self.log.append(("gather", unit))
        super().gather(unit)

    def free(self, unit: Unit) -> None:
        if unit.state is UNSHARDED:
            self.log.append(("free", unit))
        super().free(unit)

    def reduce(self, unit: Unit) -> None:
        self.log.append(("reduce", unit))
        super().reduce(unit)


def run(strategy: ShardingStrategy) -> dict[str, Any]:
    """The second step of a small GPT, on this rank: its log, its memory, its collectives."""
    shapes: dict[str, list[int]] = {}
    batch = [part[comm.world().rank() :][:1] for part in next(SMALL.batches())]
    with Ledger() as ledger:
        gpt = SMALL.model()
        early = AdamW(gpt.parameters())
        look = gpt.blocks[0].qkv.register_forward_pre_hook(
            lambda module, args: shapes.update(input=list(args[0].shape), weight=list(module.weight.shape))
        )
        model = FullyShardedDataParallel(gpt, None, strategy, auto_wrap_policy={Block}, schedule=LoggedSchedule)
        optimizer = AdamW(model.parameters())
        ledger.watch(model, optimizer)
        for step in range(2):
            if step:
                ledger.reset_peaks()
            with comm.record() as calls:
                loss = model(*batch)
                ledger.mark("forward")
                loss.backward()
                ledger.mark("backward")
            if not step:
                optimizer.step()
                optimizer.zero_grad()
        curve = ledger.curve()
    own_norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    look.remove()
    units = list(model._lazy_init().progress)
    held = [sum(p.nbytes for group in o.param_groups for p in group["params"]) for o in (early, optimizer)]
    return {
        "log": [(verb, units.index(unit)) for verb, unit in model._lazy_init().schedule.log],
        "ops": [call.op for call in calls],
        "of_ddp": sum(call.wire for call in calls) / held[0],  # of 2 ranks each sends 2 (N - 1) / N of it: all
        "curve": curve,
        "shapes": shapes,
        "own_norm": own_norm,
        "total_norm": model.clip_grad_norm_(1e9).item(),
        "optimizer": {"early": held[0], "late": held[1]},
    }


def weigh(rung: str) -> dict[int, int]:
    """Peak bytes of a step on this rank, by rows of its batch."""
    peaks = {}
    with Ledger() as ledger:
        trainee = LAB.build(rung, rank_device())
        ledger.watch(trainee.model, trainee.optimizer)
        for count in (1, *ROWS):
            tokens = torch.zeros(count, LAB.context, dtype=torch.long)
            ledger.reset_peaks()
            take_step(trainee, (tokens, tokens), rank_device())
            peaks[count] = ledger.peak.total
    return {count: peaks[count] for count in ROWS}  # the first step made the optimizer's state


@cache
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks has to report: a step of each strategy, and the peaks of DDP and FSDP by rows."""

    def measure() -> dict[str, Any]:
        steps = [run(strategy) for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)]
        return {"steps": steps, "rows": {name.upper(): weigh(name) for name in ("ddp", "fsdp")}}

    return launch(measure, 2, backend="gloo")


def most_rows(peaks: dict[int, int]) -> int:
    """The largest number of rows that fits; one more was tried, and does not."""
    return max(count for count, size in peaks.items() if size <= BUDGET)


@cache
def rungs() -> dict[str, dict[str, Any]]:
    """Of the ladder's run what is the same in every run: bytes and messages."""
    record = json.loads((Path(__file__).parents[1] / "measured.json").read_text())
    return {rung["name"]: rung for rung in record["rungs"]}


def ladder_units() -> dict[str, int]:
    """Bytes of the root and of a block on the ladder, which has 2 ranks."""
    root, block, *_ = sizes_of(Settings().model()).units
    return {"root": Setting(2).padded(sum(root)), "block": Setting(2).padded(sum(block))}


# What is drawn with


def box(axes: Axes, at: tuple[float, float], width: float, height: float, colour: str, **style: Any) -> None:
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 1.2}
    axes.add_patch(Rectangle(at, width, height, **look | style))


def padding_box(axes: Axes, at: tuple[float, float], width: float, height: float) -> None:
    box(axes, at, width, height, "white", edgecolor=SOFT, hatch="////", linewidth=0.8)


def say(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 13}
    axes.text(x, y, text, **look | style)


def readable(size: float) -> str:
    """Bytes in the largest unit of which there is about one."""
    unit, name, digits = next(each for each in ((GB, "GB", 1), (MB, "MB", 0), (KB, "kB", 0)) if size > 0.3 * each[0])
    return f"{size / unit:.{digits}f} {name}"


def bare(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.axis("off")


def named(axes: Axes, names: list[str]) -> None:
    """Rows of bars, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()


# The figures


def draw_trade() -> Figure:
    """What is gathered at once, and how many messages a step takes, by what a unit is made of."""
    figure = canvas(4.3)
    held, sent = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
    for place, units in enumerate(groupings().values()):
        size = closed_form.fsdp(units, LARGE_SETTING).unsharded_peak / GB
        held.barh(place, size, 0.62, color=TAG_COLOURS["unsharded"])
        held.text(size + 0.2, place, f"{size:.1f} GB", va="center")
        messages = 3 * len(units) - bool(units[0])
        middle = median(LARGE_SETTING.padded(sum(unit)) for unit in units if unit)
        sent.barh(place, messages, 0.62, color=GATHER)
        sent.text(messages + 18, place, f"{messages:,} of {readable(middle)}", va="center")
    named(held, list(groupings()))
    held.set_title("whole at the same time")
    sent.set_title("messages in a step, of median size")
    held.set_xlim(0, 16.5)
    sent.set_xlim(0, 1900)
    for axes in (held, sent):
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
    sent.tick_params(axis="y", length=0)
    held.set_title("a unit is", loc="right", x=-0.03)
    return figure


def draw_units() -> Figure:
    """Six layers as they run, and the three flat parameters that hold them."""
    figure = canvas(5.0)
    axes = figure.subplots()
    for number in range(6):
        unit = next(name for name, layout in layouts(4).items() if any(f"layer{number}." in each for each in layout))
        box(axes, (number * 40, 4.6), 32, 0.62, UNIT_COLOURS[unit])
        say(axes, number * 40 + 16, 4.91, f"layer {number}", color="white", fontsize=14)
        if number:
            arrow = {"arrowstyle": "->", "color": SOFT}
            axes.annotate("", (number * 40 - 0.5, 4.91), (number * 40 - 7.5, 4.91), arrowprops=arrow)
    say(axes, 240, 4.91, "every rank\nruns them all", ha="left", color=SOFT, fontsize=15)
    for row, (unit, layout) in enumerate(layouts(4).items()):
        bottom, left, whole = 3.0 - 1.4 * row, 0, sum(layout.values())
        for name, size in layout.items():
            if name == "padding":
                padding_box(axes, (left, bottom), size, 0.62)
            else:
                box(axes, (left, bottom), size, 0.62, UNIT_COLOURS[unit], alpha=0.45 if "bias" in name else 1.0)
                say(axes, left + size / 2, bottom + 0.76, name.partition("layer")[2], fontsize=12)
            left += size
        axes.vlines([whole * rank / 4 for rank in range(5)], bottom - 0.22, bottom + 0.62, color=INK, linewidth=1.4)
        for rank in range(4):
            say(axes, whole * (rank + 0.5) / 4, bottom - 0.17, f"rank {rank}", fontsize=12, color=SOFT)
        layers = " and ".join(name.partition("layer")[2][0] for name in layout if name.endswith("weight"))
        text = f"{unit}: layers {layers}\n{whole - layout['padding']} + {layout['padding']} = 4 × {whole // 4}"
        say(axes, 240, bottom + 0.31, text, ha="left", color=UNIT_COLOURS[unit], fontsize=15)
    bare(axes, (-1, 312), (-0.15, 5.3))
    return figure


def draw_whose() -> Figure:
    """Who computes what: FSDP, a pipeline, tensor parallelism, on three ranks and six layers."""
    figure = canvas(4.5)
    panels = {
        "FSDP, three units": "every layer, whole,\non each rank's own rows",
        "pipeline, three stages": "two layers each, whole,\non all rows in turn",
        "tensor parallelism": "a part of every layer,\non all rows",
    }
    columns = figure.subplots(1, 3, width_ratios=(7.6, 6.5, 6.5))
    owners = [list(UNIT_COLOURS.values())[unit] for unit in (0, 1, 1, 0, 2, 2)]
    for axes, (title, says) in zip(columns, panels.items(), strict=True):
        say(axes, 3, 3.95, title, fontsize=15, fontweight="bold")
        say(axes, 3, -0.2, says, va="top", fontsize=14)
        for layer in range(6):
            say(axes, layer + 0.5, 3.4, str(layer), color=SOFT)
        bare(axes, (-1.5 if axes is columns[0] else -0.4, 6.1), (-1.05, 4.2))
    for rank, bottom in enumerate((2.3, 1.15, 0.0)):
        say(columns[0], -0.15, bottom + 0.45, f"rank {rank}", ha="right")
        for layer in range(6):
            box(columns[0], (layer, bottom), 1, 0.9, owners[layer])
            box(columns[1], (layer, bottom), 1, 0.9, SOFT if layer // 2 == rank else PALE)
            box(columns[2], (layer, bottom), 1, 0.9, PALE)
            box(columns[2], (layer, bottom + 0.3 * (2 - rank)), 1, 0.3, SOFT)
    return figure


def draw_steps() -> Figure:
    """A linear layer's weight and bias on their way into 16 shards."""
    figure = canvas(4.7)
    axes = figure.subplots()
    colour = TAG_COLOURS["parameters"]
    shards = pad_and_chunk(torch.arange(15) + 1.0, 16)  # 0 is padding

    def cell(x: float, y: float, mark: float, width: float = 1.15) -> None:
        if mark:
            box(axes, (x, y), width, 0.62, colour, alpha=1.0 if mark <= 12 else 0.5)
            say(axes, x + width / 2, y + 0.31, f"{mark - 1:.0f}", color="white" if mark <= 12 else INK)
        else:
            padding_box(axes, (x, y), width, 0.62)

    for number, mark in enumerate(torch.cat(shards).tolist()):
        if mark:
            row, column = divmod(number, 4) if number < 12 else (number - 12, 7)
            cell(2.3 + 1.15 * column, 5.6 - 0.62 * row, mark)
            cell(1.15 * number, 3.2, mark)
        cell(1.15 * number, 2.05, mark)
        cell(1.15 * number + 0.08, 0.9, mark, 0.99)
        say(axes, 1.15 * (number + 0.5), 0.6, str(number), color=SOFT)
    say(axes, 4.6, 6.5, "weight [3, 4]")
    say(axes, 10.93, 6.5, "bias [3]")
    for name, y in {"": 5.3, "flatten, concatenate": 3.51, "pad": 2.36, "chunk": 1.21, "rank": 0.6}.items():
        say(axes, -0.4, y, name, ha="right", color=SOFT if name == "rank" else INK, fontsize=15)
    bare(axes, (-5.3, 18.6), (0.3, 6.8))
    return figure


def draw_offsets() -> Figure:
    """The unit of layers 0 and 3 over 16 ranks: where each parameter begins and ends, and which rank has what."""
    figure = canvas(3.6)
    axes = figure.subplots()
    sizes = {"layer0.weight": 60, "layer0.bias": 10, "layer3.weight": 132, "layer3.bias": 11}
    numels, length, ranks = list(sizes.values()), -(-sum(sizes.values()) // 16), 16
    colours = [SERIES_COLOURS[0], SERIES_COLOURS[0], SERIES_COLOURS[2], SERIES_COLOURS[2]]
    ends = list(accumulate(numels))
    names = [(30, 2.75), (65, 3.15), (136, 2.75), (196, 3.15)]

    def place(rank: int, low: int, high: int, **style: Any) -> None:
        """A part of a shard, drawn a little narrower."""
        scale = (length - 1.6) / length
        at = (rank * length + 0.8 + low * scale, 0.6)
        box(axes, at, (high - low) * scale, 0.62, "white", **{"linewidth": 0.8} | style)

    for index, (name, size, end) in enumerate(zip(sizes, numels, ends, strict=True)):
        alpha = 0.45 if "bias" in name else 1.0
        box(axes, (end - size, 1.9), size, 0.62, colours[index], alpha=alpha)
        say(axes, *names[index], f"{name} [{end - size}, {end})", color=colours[index], fontsize=14)
        if "bias" in name:
            axes.plot([end - size / 2] * 2, [2.52, 2.95], color=SOFT, linewidth=1)
        for rank in range(ranks):
            low, high = shard_bounds(numels, index, rank, ranks)
            if low < high:
                place(rank, low, high, facecolor=colours[index], alpha=alpha)
    padding_box(axes, (ends[-1], 1.9), ranks * length - ends[-1], 0.62)
    place(ranks - 1, ends[-1] % length, length, facecolor="white", edgecolor=SOFT, hatch="////", linewidth=0.8)
    say(axes, ranks * length, 1.62, f"padding [{ends[-1]}, {ranks * length})", ha="right", color=SOFT, fontsize=14)
    for rank in range(ranks):
        say(axes, (rank + 0.5) * length, 0.35, str(rank), color=SOFT)
    say(axes, -2, 2.21, "flat", ha="right")
    say(axes, -2, 0.91, f"shards\nof {length}", ha="right")
    say(axes, -2, 0.35, "rank", ha="right", color=SOFT)
    bare(axes, (-19, 228), (0.1, 3.35))
    return figure


def draw_storage() -> Figure:
    """Who refers to a unit's memory while it is whole, and while it is sharded."""
    figure = canvas(4.1)
    axes = figure.subplots()
    block = LAB.model().blocks[0]
    flat = FlatParameter(find_parameters(block), rank=0, ranks=2)
    device.allocate(flat.full)
    whole = flat.full.untyped_storage().nbytes()
    device.free(flat.full)
    freed, shape = flat.full.untyped_storage().nbytes(), list(flat.shapes[flat.names.index("qkv.weight")])
    for left, title, size in ((0, "while the unit computes", whole), (12.5, "in between: after free", freed)):
        gathered = size > 0
        module = f"module.qkv.weight\nits leaf, {shape}" if gathered else f"module.qkv.weight\nplaceholder, {shape}"
        holders = {
            module: 3.9,
            "leaves, and views of full\nkept by the unit": 2.75,
            "saved for backward\nkept by autograd": 1.6,
        }
        say(axes, left, 5.1, title, ha="left", fontsize=16, fontweight="bold")
        for text, y in holders.items():
            box(axes, (left, y - 0.45), 5.4, 0.9, PALE)
            say(axes, left + 2.7, y, text)
            if gathered or y < 3.9:
                arrow = {"arrowstyle": "->", "color": SOFT, "linewidth": 1.4}
                axes.annotate("", (left + 7.2, 2.75), (left + 5.5, y), arrowprops=arrow)
        style = {} if gathered else {"edgecolor": LINE, "linestyle": (0, (4, 3)), "linewidth": 1.6}
        box(axes, (left + 7.3, 1.2), 3.6, 3.1, TAG_COLOURS["unsharded"] if gathered else "white", **style)
        say(axes, left + 9.1, 2.75, f"one storage\n{size:,} bytes")
        box(axes, (left, -0.2), 5.4, 0.9, PALE)
        say(axes, left + 2.7, 0.25, "model.parameters()\nwhat the optimizer has")
        axes.annotate("", (left + 7.2, 0.25), (left + 5.5, 0.25), arrowprops={"arrowstyle": "->", "color": SOFT})
        box(axes, (left + 7.3, -0.2), 3.6, 0.9, TAG_COLOURS["parameters"])
        say(axes, left + 9.1, 0.25, f"shard\n{flat.shard.nbytes:,} bytes", color="white")
    bare(axes, (-0.1, 23.6), (-0.3, 5.4))
    return figure


def draw_life() -> Figure:
    """One unit over a step: its memory, and under it what computes and what travels."""
    figure = canvas(4.6)
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3.1, 1))
    shard, times = 0.25, [0.0, 0.6, 4.0, 6.1, 8.8, 10.9, 13.0, 14.4]
    _, first, freed, second, _, last, reduced, end = times
    layers = {
        "parameters": [shard] * 8,
        "mean": [0, 0, 0, 0, 0, shard, shard, shard],
        "unsharded": [0, 1, 0, 1, 1, 0, 0, 0],
        "gradients": [0, 0, 0, 0, 1, 1, 0, 0],
    }
    colours = [TAG_COLOURS["gradients" if name == "mean" else name] for name in layers]
    memory.stackplot(times, *layers.values(), colors=colours, step="post", linewidth=0)
    memory.step(
        times, [sum(values) for values in zip(*layers.values(), strict=True)], where="post", color="white", lw=1
    )
    say(memory, 5.05, shard / 2, "parameters: the shard, P / N", color="white")
    say(memory, 2.3, 0.75, "parameters whole: P")
    say(memory, 8.5, 0.75, "parameters whole: P")
    say(memory, 9.85, 1.75, "gradient\nwhole: P", color="white")
    memory.hlines(2 * shard, last, reduced, color="white", linewidth=1)
    say(memory, 13.7, 0.37, "its shard", color="white")
    for x, name in ((first, "pre-forward"), (freed, "post-forward"), (second, "pre-backward"), (last, "post-backward")):
        memory.axvline(x, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        lanes.axvline(x, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        memory.text(x + 0.08, 2.42, name, ha="left", va="center", fontsize=13, color=SOFT)
    memory.set_ylim(0, 2.6)
    memory.set_yticks([0, shard, 1 + shard, 2 + shard], ["0", "P / N", "P + P / N", "2P + P / N"])
    for start, stop, lane, colour, text in (
        (first, 2.1, 0, GATHER, "all-gather"),
        (2.1, freed, 1, LANE_COLOURS["compute"], "forward"),
        (second, 7.6, 0, GATHER, "all-gather"),
        (7.6, last, 1, LANE_COLOURS["compute"], "backward"),
        (last, reduced, 0, REDUCE, "reduce-scatter"),
    ):
        box(lanes, (start, lane), stop - start, 0.86, colour)
        say(lanes, (start + stop) / 2, lane + 0.42, text, color=INK if colour == GATHER else "white", fontsize=12)
    say(lanes, (freed + second) / 2, 1.42, "other units", color=SOFT, fontsize=12)
    lanes.set_yticks([0.43, 1.43], ["link", "compute"])
    lanes.tick_params(axis="y", length=0, labelcolor=INK)
    lanes.set_ylim(-0.1, 2.0)
    lanes.set_xlim(0, end)
    lanes.set_xticks([])
    for axes in (memory, lanes):
        axes.spines["bottom"].set_visible(axes is memory)
    lanes.spines["left"].set_visible(False)
    return figure


def draw_log() -> Figure:
    """What a step did to each of four units, in order, and how long each stayed whole."""
    figure = canvas(4.0)
    axes = figure.subplots()
    log = ranks()[0]["steps"][0]["log"]
    blue = TAG_COLOURS["unsharded"]
    looks: dict[str, dict[str, Any]] = {
        "gather": {"facecolor": GATHER},
        "free": {"edgecolor": blue, "linewidth": 2.4},
        "reduce": {"facecolor": REDUCE},
    }

    def event(x: float, y: float, verb: str) -> None:
        box(axes, (x + 0.08, y - 0.34), 0.84, 0.68, "white", **looks[verb])
        say(axes, x + 0.5, y, verb[0].upper(), color="white" if verb == "reduce" else INK, fontsize=15)

    since: dict[int, int] = {}
    for at, (verb, unit) in enumerate(log):
        if verb == "gather":
            since[unit] = at
        if verb == "free":
            box(axes, (since[unit] + 0.5, 3.28 - unit), at - since[unit], 0.24, blue)
            event(since[unit], 3.4 - unit, "gather")
        event(at, 3.4 - unit, verb)
    for unit, name in enumerate(("root", "block 0", "block 1", "block 2")):
        say(axes, -0.3, 3.4 - unit, name, ha="right", fontsize=15)
        axes.axhline(2.9 - unit, color=LINE, linewidth=0.8)
    turn = log.index(("free", 3)) + 1
    axes.vlines(turn, -0.1, 4.3, color=INK, linewidth=1.2, linestyle=(0, (3, 3)))
    say(axes, turn - 0.2, 4.2, "forward", ha="right", color=SOFT)
    say(axes, turn + 0.2, 4.2, "backward", ha="left", color=SOFT)
    for x, verb, text in ((0, "gather", "all-gather"), (5.2, "free", "free"), (9.2, "reduce", "reduce-scatter")):
        event(x, -0.71, verb)
        say(axes, x + 1.2, -0.71, text, ha="left")
    box(axes, (14.1, -0.83), 1.3, 0.24, blue)
    say(axes, 15.6, -0.71, "parameters whole", ha="left")
    bare(axes, (-2.4, len(log) + 1.2), (-1.1, 4.45))
    return figure


def draw_strategies() -> Figure:
    """Parameters on a rank over a step, under both strategies."""
    figure = canvas(4.4)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name, record in zip(panels, ("FULL_SHARD", "SHARD_GRAD_OP"), ranks()[0]["steps"], strict=True):
        curve = record["curve"]
        heights = [[value / MIB for value in curve["tags"][tag]] for tag in ("parameters", "unsharded")]
        colours = [TAG_COLOURS["parameters"], TAG_COLOURS["unsharded"]]
        axes.stackplot(range(len(heights[0])), *heights, colors=colours, step="post", linewidth=0)
        (turn, _), (end, _) = curve["marks"]
        axes.axvline(turn, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        axes.set_xticks([turn / 2, (turn + end) / 2], ["forward", "backward"])
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(0, end)
        ops = record["ops"]
        sent = f"{ops.count('all_gather')} gathers, {ops.count('reduce_scatter')} reductions: {record['of_ddp']:.2f}"
        axes.set_title(f"{name}\n{sent} of DDP's bytes", pad=12)
        say(axes, 0.02 * end, heights[0][0] / 2, "the shards", color="white", ha="left")
        kept = max(curve["tags"]["unsharded"]) / MIB
        say(axes, 0.98 * end, heights[0][0] + kept, f"{kept:.2f} MiB gathered at most", ha="right", va="bottom")
    panels[0].set_ylabel("parameters, MiB")
    panels[0].set_ylim(0, 2.95)
    return figure


def draw_rungs() -> Figure:
    """Bytes of each rung by what they are for: measured, and what the closed form says."""
    figure = canvas(4.0)
    shown = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp-grad-op": "SHARD_GRAD_OP", "fsdp": "FULL_SHARD"}
    columns = {
        "parameters": ("parameters", "at rest"),
        "unsharded_peak": ("unsharded", "gathered, at most"),
        "gradients_peak": ("gradients", "gradients, at most"),
        "optimizer": ("optimizer", "optimizer state"),
    }
    for axes, (key, (tag, title)) in zip(figure.subplots(1, 4, sharex=True, sharey=True), columns.items(), strict=True):
        for place, rung in enumerate(rungs()[name] for name in shown):
            size, predicted = rung["bytes"][key] / MB, rung["predicted"][key] / MB
            axes.barh(place, size, 0.6, color=TAG_COLOURS[tag])
            axes.plot(predicted, place, "D", color=INK, markerfacecolor="white", markersize=7, clip_on=False)
            axes.text(max(size, predicted) + 1.3, place, f"{size:.1f}", va="center", fontsize=14)
        axes.set_title({"at rest": "parameters at rest"}.get(title, title), fontsize=14)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_xlim(0, 25)
    named(axes, list(shown.values()))
    return figure


def draw_gradients() -> Figure:
    """Four ranks' own gradients of one linear layer, and the shards of their mean."""
    figure = canvas(4.15)
    axes = figure.subplots()
    torch.manual_seed(0)
    layer, own = nn.Linear(4, 3), []
    for rows_of_rank in torch.randn(4, 2, 4):
        layer.zero_grad()
        layer(rows_of_rank).square().mean().backward()
        own.append(torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None]))
    mean = torch.stack(own).mean(0)
    largest = max(float(each.abs().max()) for each in own)

    def strip(values: torch.Tensor, bottom: float, gap: float) -> None:
        shades = torch.cat([values, torch.zeros(1)]) / largest
        for number, shade in enumerate(shades.tolist()):
            at = (number + gap * (number // 4), bottom)
            if number == 15:
                padding_box(axes, at, 1, 0.62)
            else:
                colour = TAG_COLOURS["gradients"] if shade > 0 else TAG_COLOURS["parameters"]
                box(axes, at, 1, 0.62, PALE)
                box(axes, at, 1, 0.62, colour, alpha=min(1.0, 0.12 + 0.88 * abs(shade)))

    for rank, gradient in enumerate(own):
        strip(gradient, 4.4 - 0.78 * rank, 0.5)
        say(axes, -0.4, 4.71 - 0.78 * rank, f"rank {rank}'s own", ha="right", fontsize=15)
    strip(mean, 0.6, 0.5)
    say(axes, -0.4, 0.91, "mean", ha="right", fontsize=15)
    for rank in range(4):
        arrow = {"arrowstyle": "->", "color": REDUCE, "linewidth": 2}
        axes.annotate("", (4.5 * rank + 2, 1.3), (4.5 * rank + 2, 1.98), arrowprops=arrow)
        box(axes, (4.5 * rank, 0.6), 4, 0.62, "none", edgecolor=REDUCE, linewidth=2)
        say(axes, 4.5 * rank + 2, 0.28, f"rank {rank} keeps", color=REDUCE, fontsize=15)
    bare(axes, (-3.6, 17.7), (0, 5.1))
    return figure


def draw_batch() -> Figure:
    """Peak of a rank over the rows of its batch, and what fits into a budget."""
    figure = canvas(4.5)
    axes = figure.subplots()
    for (name, tried), colour in zip(ranks()[0]["rows"].items(), (SOFT, TAG_COLOURS["parameters"]), strict=True):
        axes.plot(list(tried), [size / MIB for size in tried.values()], "o-", color=colour)
        axes.text(ROWS[-1] + 0.4, tried[ROWS[-1]] / MIB, name, va="center", color=colour, fontsize=16)
        fits = most_rows(tried)
        axes.vlines(fits, 0, tried[fits] / MIB, color=colour, linewidth=1.4, linestyle=(0, (4, 3)))
        axes.text(fits + 0.2, 1.2, f"{fits} rows", color=colour, fontsize=16)
    axes.axhline(BUDGET / MIB, color=INK, linewidth=1.4, linestyle=(0, (4, 3)))
    axes.text(0.3, BUDGET / MIB + 0.4, f"budget: {BUDGET // MIB} MiB", va="bottom")
    axes.set_xlim(0, 24.5)
    axes.set_ylim(0, 26)
    axes.set_xlabel("rows per rank")
    axes.set_ylabel("peak of a rank, MiB")
    return figure


FIGURES: dict[str, Draw] = {
    "fsdp-trade": draw_trade,
    "fsdp-units": draw_units,
    "fsdp-whose": draw_whose,
    "fsdp-steps": draw_steps,
    "fsdp-offsets": draw_offsets,
    "fsdp-storage": draw_storage,
    "fsdp-life": draw_life,
    "fsdp-log": draw_log,
    "fsdp-strategies": draw_strategies,
    "fsdp-rungs": draw_rungs,
    "fsdp-gradients": draw_gradients,
    "fsdp-batch": draw_batch,
}
