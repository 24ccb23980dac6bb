"""`minifsdp lab`: labs for learners, marks for instructors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from minifsdp.course.cli.common import fail, new_app, new_console, progress_bar
from minifsdp.course.cli.output import was_written
from minifsdp.course.cli.signals import cleaning_up
from minifsdp.course.needs import CHECKS_NEED
from minifsdp.course.workshop import catalogue, copies, editions, progress
from minifsdp.instruments.warm.client import server

GIB = 2**30
HERE = Path()
HELP = """Copy one of the labs 00 to 15, check answers, get hints, see your progress.

Example: minifsdp lab start 00
"""
app = new_app(no_args_is_help=True, help=HELP)
APPS = {"lab": app}


def _labs(incomplete: str) -> list[str]:
    return [lab for lab in catalogue.all_labs() if lab.startswith(incomplete)]


def _exercises(incomplete: str) -> list[str]:
    return [each for each in catalogue.all_exercises() if each.startswith(incomplete)]


Lab = Annotated[str, typer.Argument(metavar="NN", help="Number of the lab, such as 05.", autocompletion=_labs)]
Exercise = Annotated[
    str, typer.Argument(metavar="ID", help="Lab and number of the exercise, such as 5.2.", autocompletion=_exercises)
]
Folder = Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of your notebooks; default: this one.")]


@contextmanager
def _refusing() -> Iterator[None]:
    """End an impossible request with one line and exit code 2."""
    try:
        yield
    except OSError as error:
        what = (error.strerror or "").lower() or str(error)
        fail(f"{error.filename}: {what}; name another path" if error.filename else what, code=2)
    except ValueError as error:
        fail(str(error), code=2)


@app.command("list")
def list_labs(
    lab: Annotated[
        str, typer.Argument(metavar="[NN]", help="Show the exercises of this lab.", autocompletion=_labs)
    ] = "",
) -> None:
    """List the labs and their durations, or the exercises of one lab.

    Example: minifsdp lab list 05
    """
    with _refusing():
        if lab:
            table = Table("exercise", "title", "you write", "minutes", "", box=box.SIMPLE_HEAD)
            for stub in catalogue.stubs_of(catalogue.as_named(lab)).values():
                table.add_row(stub.id, stub.title, stub.name, str(stub.minutes or ""), stub.difficulty)
        else:
            table = Table("lab", "title", "minutes", "exercises", box=box.SIMPLE_HEAD)
            for each in catalogue.all_labs():
                facts, count = catalogue.about(each), len(catalogue.stubs_of(each))
                table.add_row(each, str(facts.get("title", "")), str(facts.get("minutes", "")), str(count))
            table.caption = "minifsdp lab list 05 shows the exercises of lab 05"
    new_console().print(table)


@app.command()
def start(lab: Lab, folder: Folder = HERE) -> None:
    """Copy a lab's notebook here, without its outputs. An existing copy is never overwritten.

    Example: minifsdp lab start 05
    """
    with _refusing():
        copy = copies.start(catalogue.as_named(lab), folder)
    print(f"{copy}: continue with   jupyter lab {copy}")
    if find_spec("jupyterlab") is None:
        print("JupyterLab is not installed here:   pip install jupyterlab")


@app.command()
def update(lab: Lab, folder: Folder = HERE) -> None:
    """Write the newest edition of a lab next to your copy, with your answers and predictions.

    Example: minifsdp lab update 05
    """
    with _refusing():
        copy, remarks = editions.update(catalogue.as_named(lab), folder)
    print(f"{copy}: continue with   jupyter lab {copy}" if copy else "you have the newest edition")
    for remark in remarks:
        print(f"    {remark}")


@app.command()
def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="ID|NN|FILE",
            help="An exercise, such as 5.2; or a lab, such as 05, or your notebook of it, for all its exercises.",
            autocompletion=lambda incomplete: _labs(incomplete) + _exercises(incomplete),
        ),
    ],
    notebook: Annotated[Path | None, typer.Argument(help="Default: the notebook of that lab in this folder.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Then wait, and check each answer that you change and save; end by Ctrl-C.")
    ] = False,
) -> None:
    """Check the last saved version of answers, each in a fresh process, as their notebook does.

    The exit code is 1 if an answer does not pass, and 0 if all pass or are still blank.

    Example: minifsdp lab check 5.2
    """
    with _refusing():
        server.prepare(CHECKS_NEED)  # while this command reads the notebook
    from minifsdp.course.workshop.catalogue import lab_of
    from minifsdp.course.workshop.hints import stub_of
    from minifsdp.course.workshop.saved import check_saved, saves

    failures = 0
    with _refusing():
        named, notebook = copies.lab_and_copy(what, notebook)
        exercises = list(catalogue.stubs_of(named)) if named in catalogue.all_labs() else [stub_of(what).id]
        path = notebook or copies.find_copy(lab_of(exercises[0]), HERE)
        if watch:
            print(f"watching {path}; Ctrl-C ends this", flush=True)
        with cleaning_up():
            for exercise in saves(path, exercises) if watch else exercises:
                text, failed = check_saved(exercise, path)
                print(text, flush=True)
                failures += failed
    raise typer.Exit(int(failures > 0))


@app.command()
def hint(exercise: Exercise) -> None:
    """Show the next of the two hints to an exercise.

    Example: minifsdp lab hint 5.2
    """
    from minifsdp.course.workshop.hints import count_hint, next_hint
    from minifsdp.course.workshop.store import Store

    with _refusing():
        print(next_hint(exercise, Store(HERE)))
        if was_written():
            count_hint(exercise, Store(HERE))


@app.command()
def reveal(exercise: Exercise) -> None:
    """Show the reference answer to an exercise. A note next to your notebooks records that you have seen it.

    Example: minifsdp lab reveal 5.2
    """
    from minifsdp.course.workshop.references import find_reference
    from minifsdp.course.workshop.store import Store

    with _refusing():
        source = find_reference(exercise).source
    Store(HERE).write("reveals", exercise, True)
    print(source.rstrip())


@app.command("progress")
def show_progress(folder: Folder = HERE) -> None:
    """Show the state of each exercise, and the next exercise. This reads the saved notebooks and runs nothing.

    Example: minifsdp lab progress
    """
    table = Table("exercise", "state", "help used", "prediction", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    with _refusing():
        standings = progress.standings(folder)
    for lab, found in standings.items():
        if isinstance(found, str):
            table.add_row(f"lab {lab}", found)
            continue
        passed = sum(each.state == progress.PASSED for each in found)
        table.add_row(f"lab {lab}", f"{passed} of {len(found)} passed")
        for each in found:
            said = "" if each.prediction is None else f"{each.prediction:,}"
            hints = f"{each.hints} hint{'s' * (each.hints > 1)}" if each.hints else ""
            used = ", ".join(filter(None, [hints, "reference" if each.read else ""]))
            table.add_row(f"  {each.exercise} {each.name}", each.state, used, said)
    console = new_console()
    console.print(table)
    console.print(_summary(standings))


@app.command()
def score(
    lab: Annotated[
        str, typer.Argument(metavar="[NN]", help="Show only the schedules of this lab.", autocompletion=_labs)
    ] = "",
    folder: Folder = HERE,
) -> None:
    """Show your schedules for the open tasks of labs 08 and 14, the fastest first.

    Example: minifsdp lab score 14
    """
    from minifsdp.course.workshop import scores

    with _refusing():
        boards = scores.boards_of(catalogue.as_named(lab)) if lab else scores.BOARDS
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: name the folder with your notebooks")
        tables = [table for board in boards if (table := scores.table(folder, board)) is not None]
    if not tables:
        ends = " and ".join(f"lab {board.lab}" for board in boards)
        print(f"no schedule has been tried in this folder yet: see the end of {ends}")
    for table in tables:
        new_console().print(table)


def _summary(standings: dict[str, list[progress.Standing] | str]) -> str:
    """The number of exercises passed, and the next one."""
    states = {each.exercise: each.state for found in standings.values() if isinstance(found, list) for each in found}
    exercises = catalogue.all_exercises()
    passed = sum(states.get(each) == progress.PASSED for each in exercises)
    left = [each for each in exercises if states.get(each) != progress.PASSED]
    following = next((each for each in left if each in states), next(iter(left), None))  # of a lab that was started
    total = f"in the saved notebooks, {passed} of {len(exercises)} exercises passed"
    if following is None:
        return total
    lab = next(lab for lab in standings if following in catalogue.stubs_of(lab))
    stub = catalogue.stubs_of(lab)[following]
    start = "" if isinstance(standings[lab], list) else f": minifsdp lab start {lab}"
    return f"{total}; next: {stub.id} {stub.title}{start}"


@app.command()
def run(
    lab: Annotated[
        str,
        typer.Argument(
            metavar="NN|FILE", help="Number of the lab, such as 05, or your notebook of it.", autocompletion=_labs
        ),
    ],
    notebook: Annotated[Path | None, typer.Argument(help="Default: the notebook of that lab in this folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results of only this run.")] = Path("results/lab"),
    time_limit: Annotated[float, typer.Option(min=1, max=1e6, help="Time limit in seconds.")] = 600.0,
) -> None:
    """Run all cells of a saved notebook unattended, for example in a batch job.

    The notebook itself is not changed. Its outputs, figures, traces and a record are written to the output folder,
    even if a cell raises an exception, at the time limit, and on Ctrl-C. The exit code is 1 unless all cells have run.

    Example: minifsdp lab run 05 --out results/lab05 --time-limit 240
    """
    if missing := [name for name in ("nbclient", "ipykernel") if find_spec(name) is None]:
        fail(f"{missing[0]} is not installed here:   pip install jupyterlab", code=2)
    with _refusing():
        number, notebook = copies.lab_and_copy(lab, notebook)
        catalogue.shipped_notebook(number)
        from minifsdp.course.workshop import batch

        request = batch.check(number, notebook, out, time_limit)
    print(request.world, file=sys.stderr)
    with cleaning_up(), progress_bar() as bar:
        task = bar.add_task("starting", total=None)

        def show(cell: str, done: int, total: int) -> None:
            bar.update(task, description=cell, completed=done, total=total)

        try:
            record = batch.run(request, show)
        except OSError as error:
            fail(f"{error.filename or out}: {(error.strerror or str(error)).lower()}; the run was ended", code=1)
    ran = sum(cell["state"] == "ran" for cell in record["cells"])
    print(
        f"{out}: {ran} of {len(record['cells'])} cells ran in {record['seconds']:.0f} s, "
        f"yours {record['yours']}; figures: {len(record['figures'])}, traces: {len(record['traces'])}"
    )
    if why := record["error"]:
        fail(": ".join(filter(None, (request.notebook.name, why["cell"], why["reason"]))), code=1)


@app.command()
def mark(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with a subfolder of notebooks per learner.")],
    out: Annotated[Path, typer.Option(help="Table to write; the file must not exist yet.")],
    variants: Annotated[Path | None, typer.Option(help="TOML file with further settings for each exercise.")] = None,
    seconds: Annotated[float, typer.Option(min=5, max=1e6, help="Time limit of one check in seconds.")] = 60.0,
    memory: Annotated[
        float,
        typer.Option(min=0.5, max=2**20, help="Memory limit of one check's processes in GiB."),
    ] = 4.0,
) -> None:
    """Mark the notebooks of many learners, for instructors.

    Each answer is checked individually, with the set-up cells and checks of this installation. This is not a sandbox:
    see docs/teaching.md before you mark untrusted code.

    Example: minifsdp lab mark submissions --out marks.csv --variants ~/lab05.toml
    """
    from minifsdp.course.workshop import handed_in, marking
    from minifsdp.course.workshop.process import Limits

    with _refusing():
        tasks = handed_in.find_tasks(folder)
        further = marking.read_variants(variants) if variants else {}
        with cleaning_up(), progress_bar() as bar:
            task = bar.add_task("starting", total=len(tasks))

            def show(row: marking.Row) -> None:
                bar.update(task, advance=1, description=f"{row.submission[:20]} {row.exercise}")

            rows = marking.mark_all(tasks, out, further, Limits(seconds, int(memory * GIB)), show)
    states = Counter(row.state for row in rows)
    print(f"{out}: {', '.join(f'{number} {state}' for state, number in sorted(states.items()))}")
