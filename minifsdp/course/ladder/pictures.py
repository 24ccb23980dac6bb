"""The ladder's pictures and its page, from its record and the ranks' results: half of them in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minifsdp.course.ladder.measure import Settings
from minifsdp.course.needs import PICTURES_NEED
from minifsdp.instruments import plots
from minifsdp.instruments.explore.page import explored, page
from minifsdp.instruments.launch.world import World
from minifsdp.instruments.warm.beside import beside
from minifsdp.instruments.warm.client import server
from minifsdp.instruments.watch.timeline import overlap
from minifsdp.mesh import Mesh
from minifsdp.pipeline.simulate import Simulation, replay

_ALONG = {"dp": "data parallel", "tp": "tensor parallel", "pp": "pipeline", "cp": "context parallel"}
_AXES = ("not divided", "one axis", "two axes", "three axes", "four axes")


def prepare() -> None:
    """Import what draws, here and in the server, if there is one: for the time in which no step is timed."""
    _ = plots.memory_figure  # here first: it stores where this machine's fonts are
    if server.runs:
        server.prepare(PICTURES_NEED)


def draw(
    settings: Settings, record: dict[str, Any], ranks: list[dict[str, dict[str, Any]]], folder: Path, world: World
) -> None:
    """Draw them, from the record and from the ranks' results by rung."""
    first = ranks[0]
    rungs = described(settings, record, ranks)
    about = f"emulated link: {record['link']}" if record["link"] else world.choice
    pipelines = replays(settings, ranks)
    predicted = {name: settings.bubble(name) for name in pipelines}
    timelines = [] if pipelines else _timelines(record, first)
    steps = (rungs, folder, timelines, about, pipelines, predicted)
    with beside("pictures", _draw_steps, *steps, needs=PICTURES_NEED):
        plots.memory_figure(rungs, folder / "memory.png")
        (folder / "explore.html").write_text(_explorer(settings, record, ranks, world))
        if all(rung["cuda"] for rung in rungs):
            plots.allocator_figure(rungs, folder / "allocator.png")


def described(
    settings: Settings, record: dict[str, Any], ranks: list[dict[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The rungs of the record as `plots.memory_figure` and `plots.memory_steps` take them."""
    found = []
    for rung in record["rungs"]:
        name = rung["name"]
        fullest = max((rank[name] for rank in ranks), key=lambda rank: rank["bytes"]["peak"])
        group = _group(settings.recipe(name).mesh)
        found.append(rung | {"adds": settings.rung(name).adds, "group": group, "curve": fullest["curve"]})
    return found


def _group(mesh: Mesh) -> str:
    """In words, on which axes the ranks divide a step."""
    return _ALONG[mesh.divided[0]] if len(mesh.divided) == 1 else _AXES[len(mesh.divided)]


def replays(settings: Settings, ranks: list[dict[str, dict[str, Any]]]) -> dict[str, Simulation]:
    """A step of each pipeline's first replica, if every action took the median time of its kind and stage.

    By the clock ranks also wait for cores that they share, which says nothing about the schedule.
    """
    found = {}
    for name in settings.rungs:
        rows = [ranks[peer][name]["actions"] for peer in settings.recipe(name).mesh.peers(0, "pp")]
        if rows[0]:
            found[name] = replay(rows)
    return found


def _draw_steps(
    rungs: list[dict[str, Any]],
    folder: Path,
    timelines: list[plots.Timeline],
    about: str,
    pipelines: dict[str, Simulation],
    predicted: dict[str, float],
) -> None:
    """The animation, and the lanes of the steps."""
    plots.memory_steps(rungs, folder / "memory.gif")
    if not pipelines:
        plots.timeline_figure(timelines, folder / "timeline.png", about)
        return
    first, least = next(iter(pipelines)), min(pipelines, key=lambda name: pipelines[name].bubble)
    idle = f"{pipelines[first].bubble:.0%} of their time with {first}, {pipelines[least].bubble:.0%} with {least}"
    lanes = {name: step.rows for name, step in pipelines.items()}
    plots.pipeline_figure(lanes, folder / "pipeline.png", f"Idle ranks: {idle}", predicted)


def _timelines(record: dict[str, Any], first: dict[str, dict[str, Any]]) -> list[plots.Timeline]:
    """The traced steps of the rungs that shard parameters; of all, if none does."""
    sharded = [name for name in first if name.startswith("fsdp")]
    steps = {name: first[name]["traced"] for name in sharded or first}
    return [
        plots.Timeline(name, each.spans, overlap(each.spans) if record["ranks"] > 1 else None, each.usual)
        for name, each in steps.items()
    ]


def _explorer(settings: Settings, record: dict[str, Any], ranks: list[dict[str, dict[str, Any]]], world: World) -> str:
    """The page to scrub through a step of each rung and of its variants."""
    rungs = []
    for name in (rung["name"] for rung in record["rungs"]):
        rung, logged = settings.rung(name), [rank[name] for rank in ranks]
        own, others = rung.own(record["limit"]), logged[0]["others"]
        steps = {own: logged, **{other: [rank["others"][other] for rank in logged] for other in others}}
        rungs.append(explored(name, dict(sorted(steps.items())), own, rung.adds, rung.varies))
    over = f"{world.choice}, emulated link {record['link']}" if record["link"] else world.choice
    model = f"GPT of {record['layers']} blocks and {record['parameters']:,} parameters"
    return page("Explore one training step", f"{model}; {over}.", rungs, first="fsdp")
