"""The command line: `minifsdp mesh`."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.links import Hosts, Link, Talk, talk
from minifsdp.cost.model import Model, gpt
from minifsdp.cost.step import step
from minifsdp.course.cli.common import fail, new_app, new_console
from minifsdp.instruments.plots.mesh_text import USUAL_HOST, coloured
from minifsdp.recipe import Recipe

MIB = 2**20
VOCABULARY, ROWS = 257, 16

app = new_app()
APPS = {"mesh": app}


@app.command()
def mesh(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Such as pp=2,dp=2,tp=2,zero=1,axes=dp/pp/tp (outermost first).")
    ],
    host: Annotated[int | None, typer.Option(help=f"Ranks of a host; default: the link's, or {USUAL_HOST}.")] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Also seconds, on links such as inside=5us@10GB/s,across=200us@1GB/s,host=4."),
    ] = None,
    layers: Annotated[int, typer.Option(help="Transformer blocks of the model whose messages are counted.")] = 4,
    width: Annotated[int, typer.Option(help="Size of its residual stream.")] = 96,
    heads: Annotated[int, typer.Option(help="Its attention heads.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 24,
    batch: Annotated[
        int | None, typer.Option(help=f"Sequences per step over all ranks; default: {ROWS}, or the next that fits.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the picture, mesh.png; default: none is drawn.")] = None,
) -> None:
    """Draw who is where, and say what a rank sends along each axis, inside hosts and across. Nothing is started.

    Example: minifsdp mesh pp=2,dp=2,tp=2,zero=1,axes=dp/pp/tp --host 4
    """
    try:
        parsed = Recipe.parse(recipe)
        hosts, timed = _hosts(host, link)
        model = gpt(VOCABULARY, width, layers, heads, context)
        share = parsed.mesh.dp * parsed.micro_batches
        setting = Setting(parsed.mesh.ranks, batch=batch or share * ceil(ROWS / share), context=context)
        lines = coloured(parsed.mesh, hosts.per_host)
        most = most_sent(model, parsed, setting, hosts)
        if out is not None:
            _picture(parsed, hosts, most, out)
    except (ValueError, OSError) as error:
        fail(str(error), code=2)
    console = new_console()
    for line in lines:
        console.print(line, soft_wrap=True)
    if most:
        sizes = f"a GPT of {layers} layers and width {width}, {setting.batch} sequences of {context} tokens"
        console.print("", f"A step of {sizes}; of each axis the rank that sends most:", table(most, timed), sep="\n")
    if timed:
        console.print(
            f"Messages take {_words(step(model, parsed, setting, hosts))} of a step that computes in no time."
        )
    if out is not None:
        print(f"{out}: mesh.png")


def _hosts(host: int | None, link: str | None) -> tuple[Hosts, bool]:
    """Hosts and their links, and whether there are any.

    Raises:
        ValueError: the link is none, or for other hosts.
    """
    if link is None:
        return Hosts(Link(0.0, 1.0), Link(0.0, 1.0), USUAL_HOST if host is None else host), False
    from minifsdp.instruments.link.emulated import HostLinks, parse_links

    found = parse_links(link)
    if not isinstance(found, HostLinks):
        one = Link(found.latency, found.bandwidth)
        return Hosts(one, one, USUAL_HOST if host is None else host), True
    if host not in (None, found.per_host):
        raise ValueError(f"--host {host} with a link for hosts of {found.per_host}: leave one of them out")
    inside, across = (Link(each.latency, each.bandwidth) for each in (found.inside, found.across))
    return Hosts(inside, across, found.per_host), True


def most_sent(model: Model, recipe: Recipe, setting: Setting, hosts: Hosts) -> dict[tuple[str, bool], Talk]:
    """By axis, and inside a host or across, the messages of the rank that sends most bytes there."""
    found: dict[tuple[str, bool], Talk] = {}
    for rank in range(recipe.mesh.ranks):
        for each in talk(model, recipe, rank, setting, hosts):
            key = each.axis, each.across
            found[key] = max(found.get(key, each), each, key=lambda said: said.sent)
    return found


def table(most: Mapping[tuple[str, bool], Talk], timed: bool) -> Table:
    """A row for each axis and link."""
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("axis", "link", "messages", "MiB sent", *(["seconds"] if timed else [])):
        shown.add_column(heading, justify="left" if heading in ("axis", "link") else "right", no_wrap=True)
    for each in most.values():
        where = "across hosts" if each.across else "inside a host"
        cells = [each.axis, where, str(each.messages), f"{each.sent / MIB:.3f}"]
        shown.add_row(*cells, *([_words(each.seconds)] if timed else []))
    return shown


def _words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _picture(recipe: Recipe, hosts: Hosts, most: Mapping[tuple[str, bool], Talk], out: Path) -> None:
    from minifsdp.instruments.plots.mesh import mesh_figure
    from minifsdp.instruments.system.resources import check_writable

    check_writable(out)
    says: dict[str, list[str]] = {}
    for (axis, _), each in most.items():
        says.setdefault(axis, []).append(f"{each.messages} messages, {each.sent / MIB:.2f} MiB")
    mesh_figure(recipe.mesh, hosts.per_host, out / "mesh.png", {axis: "; ".join(each) for axis, each in says.items()})
