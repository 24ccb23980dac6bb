"""`minifsdp lab run`, and the batch scripts around it, as far as they go without Slurm and without a GPU."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import notebooks_in_forks
import psutil
import pytest
from commands_in_forks import start_fork
from jupyter_client.provisioning import local_provisioner

from minifsdp.course import cli
from minifsdp.course.cli import lab as command
from minifsdp.course.workshop import batch, copies, results
from minifsdp.course.workshop.references import find_reference
from minifsdp.instruments.system.housekeeping import TREE
from minifsdp.instruments.system.scratch import remove_abandoned
from minifsdp.instruments.system.versions import versions

SCRIPTS = Path(__file__).parents[2] / "scripts"
SECONDS = 120  # of patience, on a machine that is busy with much else

DRAW = "from IPython.display import Image, display\ndisplay(Image(bytes([137]) + b'PNG\\r\\n\\x1a\\n', format='png'))"
TRACE = "from minifsdp.instruments.watch.trace import record_trace\nwith record_trace('own.json'):\n    pass"
EXERCISE = "from minifsdp.course.workshop import exercise"
STUCK = """
import time
from minifsdp.instruments.launch import launch
def wait():
    time.sleep(600)
launch(wait, 2, timeout=600)
"""

Run = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.timeout(3 * SECONDS)


def cell(source: str, *tags: str, outputs: Any = ()) -> dict[str, Any]:
    name = f"cell-{uuid.uuid4().hex[:6]}"
    stale = {"output_type": "stream", "name": "stdout", "text": "from before"}
    return {
        "cell_type": "code",
        "id": name,
        "metadata": {"tags": [*tags]},
        "source": source,
        "outputs": [stale],
        "execution_count": 7,
    }


def save(path: Path, *sources: str | dict[str, Any], lab: str = "00") -> list[str]:
    """A learner's notebook with these cells; returns their ids."""
    cells = [each if isinstance(each, dict) else cell(each) for each in sources]
    metadata = {"minifsdp": {"lab": lab, "edition": "0123456789ab"}}
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}))
    return [each["id"] for each in cells]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run cells as the notebook of lab 00 in this process, in a kernel that is a fork; the record."""
    monkeypatch.setattr(local_provisioner, "launch_kernel", notebooks_in_forks.launch_kernel)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")

    def run_cells(*sources: str | dict[str, Any], seconds: float = SECONDS) -> dict[str, Any]:
        path = tmp_path / "lab00_memory.ipynb"
        save(path, *sources)
        before = path.read_bytes()
        record = batch.run(batch.check("00", None, tmp_path / "out", seconds), lambda *_: None)
        assert path.read_bytes() == before, "the learner's file is only read"
        assert json.loads((tmp_path / "out" / "record.json").read_text()) == record
        return record

    return run_cells


def states(record: dict[str, Any]) -> list[str]:
    return [each["state"] for each in record["cells"]]


def outputs(path: Path) -> list[list[dict[str, Any]]]:
    return [each.outputs for each in nbformat.read(path, as_version=4).cells if each.cell_type == "code"]


# What is brought back


def test_all_cells_run_and_what_comes_of_them_is_brought_back(run: Run, tmp_path: Path) -> None:
    answer = cell(f'@exercise("0.1")\n{find_reference("0.1").source}', "exercise-0.1")
    text = {**cell("words"), "cell_type": "markdown"}
    for key in ("outputs", "execution_count"):
        del text[key]
    cells = [
        cell(EXERCISE, "setup"),
        text,
        cell(f"{DRAW}\n{DRAW}"),
        cell(TRACE),
        cell(f"{TRACE}\nprint('kept')"),
        answer,
    ]
    record = run(*cells)

    assert (record["state"], record["error"]) == ("complete", None)
    assert states(record) == ["ran"] * 5
    assert all(each["seconds"] >= 0 for each in record["cells"])
    assert (record["lab"], record["edition"]) == ("00", "0123456789ab")
    assert record["world"] == "2 ranks over gloo on CPU: MINIFSDP_DEVICE=cpu forces it"
    assert (record["versions"], record["gpus"]) == (versions(), [])
    assert record["yours"] == "1/4"
    assert record["exercises"]["0.1"] == "passed"

    drawn, traced = cells[2]["id"], [each["id"] for each in cells[3:5]]
    assert record["figures"] == [f"{drawn}-2.png", f"{drawn}.png"]
    assert (tmp_path / "out" / "figures" / f"{drawn}.png").read_bytes().startswith(b"\x89PNG")
    assert record["traces"] == sorted(f"{each}-own-1.json" for each in traced)
    for name in record["traces"]:
        assert json.loads((tmp_path / "out" / "traces" / name).read_text())["traceEvents"]
    assert outputs(tmp_path / "out" / "lab00_memory.ipynb")[3][0]["text"] == "kept\n"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "record.json",
        "lab00_memory.ipynb",
        "figures",
        "traces",
    }


def test_it_stops_at_a_cell_that_raises_and_keeps_what_was_there(run: Run, tmp_path: Path) -> None:
    record = run(DRAW, "print('almost')\n1 / 0", "never = 1")
    assert record["state"] == "failed"
    assert states(record) == ["ran", "failed", "not run"]
    assert record["error"] == {"cell": record["cells"][1]["id"], "reason": "ZeroDivisionError: division by zero"}
    assert len(record["figures"]) == 1
    drew, raised, never = outputs(tmp_path / "out" / "lab00_memory.ipynb")
    assert drew
    assert [each["output_type"] for each in raised] == ["stream", "error"]
    assert never == [], "not what an earlier run had said"


def test_a_kernel_that_dies_is_told_with_the_cell(run: Run) -> None:
    record = run("kept = 1", "import os\nos._exit(3)")
    assert states(record) == ["ran", "failed"]
    assert record["error"] == {"cell": record["cells"][1]["id"], "reason": "its kernel died"}


def test_the_time_limit_ends_a_cell(run: Run) -> None:
    record = run("import time\ntime.sleep(600)", "never = 1", seconds=3)
    assert record["state"] == "stopped"
    assert record["error"]["reason"] == "not done within 3 s"
    assert states(record) in (["stopped", "not run"], ["not run", "not run"]), "the kernel may have taken that long"
    assert record["seconds"] < SECONDS


# Ended from outside


def end_by(number: signal.Signals, tmp_path: Path, scratch: Path) -> tuple[int | None, dict[str, Any]]:
    """Send a run that waits for its ranks a signal; its exit code and the record, when all its processes have ended."""
    save(tmp_path / "mine.ipynb", DRAW, STUCK, "never = 1")
    mark = uuid.uuid4().hex
    with (tmp_path / "said").open("w") as out, (tmp_path / "errors").open("w") as err:
        job = start_fork(
            notebooks_in_forks.run_command_with_kernel,
            *("minifsdp", "lab", "run", "00", "mine.ipynb", "--out=out"),
            out=out.fileno(),
            errors=err.fileno(),
            folder=tmp_path,
            environ={**os.environ, TREE: mark, "MINIFSDP_DEVICE": "cpu", "TMPDIR": str(scratch)},
        )
    try:
        await_that(lambda: job.poll() is not None or sum("rank" in each.name() for each in marked(mark)) == 2)
        on_disk = json.loads((tmp_path / "out" / "record.json").read_text())
        assert on_disk["state"] == "running", "what a kill that cannot be caught would leave"
        assert states(on_disk) == ["ran", "running", "not run"]
        with pytest.raises(BlockingIOError):
            results.was_killed(tmp_path / "out")
        os.kill(job.pid, number)
        code = job.wait(SECONDS)
    finally:
        job.kill()
        job.close()
    await_that(lambda: marked(mark) == [])
    return code, json.loads((tmp_path / "out" / "record.json").read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_kernel_and_ranks_and_the_record_is_written(
    tmp_path: Path, scratch: Path, number: signal.Signals
) -> None:
    code, record = end_by(number, tmp_path, scratch)
    assert code == 1
    stopped = record["cells"][1]["id"]
    assert states(record) == ["ran", "stopped", "not run"]
    assert record["error"] == {"cell": stopped, "reason": f"ended by {number.name}"}
    assert "1 of 3 cells ran" in (tmp_path / "said").read_text()
    said = (tmp_path / "errors").read_text().splitlines()[-1]
    assert said == f"minifsdp: mine.ipynb: {stopped}: ended by {number.name}"
    assert list(scratch.iterdir()) == []


def test_killed_it_leaves_no_process_and_no_file_that_the_next_command_does_not_remove(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where its orphans get another parent than process 1, which a kernel that is starting looks for."""
    code, record = end_by(signal.SIGKILL, tmp_path, scratch)
    assert (code, record["state"]) == (-signal.SIGKILL, "running")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    remove_abandoned()
    assert list(scratch.iterdir()) == []


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for the name of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(TREE) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def no_locks(*_: Any) -> None:
    """As on a file system without them."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_killed_run_s_folder_is_used_again_but_not_one_whose_run_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(DRAW)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"holds the record.json of another run: name another folder"):
        batch.check("00", None, out, SECONDS)
    record = json.loads((out / "record.json").read_text())
    (out / "record.json").write_text(json.dumps(record | {"state": "running"}))
    (out / "figures" / "old.png").write_text("of a cell that is no more")
    lock = os.open(out, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="out is in use by a run that goes on: name another folder"):
        batch.check("00", None, out, SECONDS)
    os.close(lock)  # as the end of its process does
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(ValueError, match=r"holds the record.json of another run: name another folder"):
            batch.check("00", None, out, SECONDS)
    record = run("1")
    assert (record["state"], record["figures"]) == ("complete", [])


def test_a_notebook_says_which_lab_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "mine.ipynb", lab="05")
    assert "mine.ipynb has no cell to run" in refusal(["mine.ipynb"], monkeypatch, capsys)
    (tmp_path / "other.ipynb").write_text('{"cells": []}')
    assert "other.ipynb does not say which lab it is: name the" in refusal(["other.ipynb"], monkeypatch, capsys)
    assert "there is no file none.ipynb" in refusal(["none.ipynb"], monkeypatch, capsys)
    assert copies.lab_and_copy("5", Path("mine.ipynb")) == ("05", Path("mine.ipynb"))


# Requests that cannot be met


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["77"], "there is no lab '77': choose from "),
        (["04"], "no notebook of lab 04 in this folder: minifsdp lab start 04"),
        (["00", "nowhere.ipynb"], "there is no file nowhere.ipynb"),
        (["00", "other.ipynb"], "other.ipynb is a notebook of lab 05, not of lab 00"),
        (["05", "other.ipynb", "--out=used"], "--out used holds the record.json of another run: name another folder"),
        (["05", "other.ipynb", "--out=other.ipynb"], "--out other.ipynb cannot be written"),
        (["05", "other.ipynb", "--out=."], "--out . is the notebook's own folder: name another"),
        (["05", "other.ipynb", "--out=by-link"], "--out by-link is the notebook's own folder: name another"),
        (["05", "links/other.ipynb", "--out=links"], "--out links is the notebook's own folder: name another"),
        (["05", "links/other.ipynb", "--out=."], "--out . is the notebook's own folder: name another"),
        (["05", "other.ipynb", "--out=kept"], "--out kept holds another other.ipynb: name another folder"),
        (["00", "half.ipynb"], "half.ipynb: cell 2 contains half a character, a lone surrogate: write it again"),
        (["00", "facts.ipynb"], "facts.ipynb has half a character, a lone surrogate, in its metadata"),
        (["05", "other.ipynb", "--time-limit=0"], "'--time-limit'"),
        (["00", "future.ipynb"], "future.ipynb is not a runnable notebook (NBFormatError): save it again"),
        (["00", "old.ipynb"], "old.ipynb has no cell to run as nbformat 3: save it again in Jupyter"),
        (["00", "empty.ipynb"], "empty.ipynb has no cell to run as nbformat 4: save it again in Jupyter"),
    ],
)
def test_bad_requests_end_in_one_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "other.ipynb", "never = 1", lab="05")
    (tmp_path / "future.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 99, "nbformat_minor": 0}')
    cells = [{"cell_type": "code", "metadata": {}, "source": "never = 1", "outputs": [], "execution_count": None}]
    old = {"cells": cells, "worksheets": [], "metadata": {}, "nbformat": 3, "nbformat_minor": 0}
    (tmp_path / "old.ipynb").write_text(json.dumps(old))
    (tmp_path / "empty.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "record.json").write_text("{}")
    (tmp_path / "by-link").symlink_to(tmp_path, target_is_directory=True)
    for folder in ("links", "kept"):
        (tmp_path / folder).mkdir()
    (tmp_path / "links" / "other.ipynb").symlink_to(tmp_path / "other.ipynb")
    (tmp_path / "kept" / "other.ipynb").write_text("the copy that was kept")
    save(tmp_path / "half.ipynb", "whole = 1", "half = '\ud800'")
    save(tmp_path / "facts.ipynb", "whole = 1", lab="\ud800")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert says in refusal(words, monkeypatch, capsys)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "results").exists()


def test_impossible_worlds_and_missing_packages_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "lab00_memory.ipynb", "never = 1")
    with monkeypatch.context() as patch:
        patch.setenv("MINIFSDP_DEVICE", "tpu")
        assert "MINIFSDP_DEVICE=tpu" in refusal(["00"], patch, capsys)
    with monkeypatch.context() as patch:
        patch.setattr(command, "find_spec", lambda name: None)
        assert "nbclient is not installed here:   pip install jupyterlab" in refusal(["00"], patch, capsys)
    assert {path.name for path in tmp_path.iterdir()} == {"lab00_memory.ipynb"}


def refusal(words: list[str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    patch.setattr(sys, "argv", ["minifsdp", "lab", "run", *words])
    patch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line


@pytest.mark.slow
@pytest.mark.parametrize(("lab", "traces"), [("00", 0), ("02", 18)])
def test_whole_labs(lab: str, traces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    copies.start(lab, tmp_path)
    record = batch.run(batch.check(lab, None, tmp_path / "out", 170), lambda *_: None)
    assert (record["state"], record["error"]) == ("complete", None)
    assert set(states(record)) == {"ran"}
    assert record["yours"].startswith("0/")
    assert record["figures"]
    assert len(record["traces"]) == traces


# The scripts


@pytest.fixture
def submit(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a batch script as sbatch would in `tmp_path`, with stand-ins for Slurm's own commands."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4242", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_SUBMIT_HOST": "login", "USER": "ada"}

    def start(script: str, *words: str, **environ: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
        return subprocess.Popen(
            ["bash", str(SCRIPTS / script), *words],
            cwd=tmp_path,
            env={**os.environ, **job, "PATH": path, "HOME": str(tmp_path), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


SRUN = """#!/bin/bash
# As many tasks as are asked for, of which the first two are said to be on one node.
for ((task = 0; task < 4; task++)); do
    while [[ $1 == --* ]]; do echo "$1" >>srun.options; shift; done
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) "$@" &
done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit $status
"""

Submit = Callable[..., "subprocess.Popen[str]"]


def test_rung_brings_a_run_of_the_saved_notebook_to_the_submission_folder(submit: Submit, tmp_path: Path) -> None:
    save(tmp_path / "lab00_memory.ipynb", "import os\nprint(os.environ['MINIFSDP_SHARE_GPU'])")
    job = submit("rung.sbatch", "00", MINIFSDP_DEVICE="cpu")
    said, errors = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, errors
    out = tmp_path / "results" / "batch" / "4242"
    assert json.loads((out / "record.json").read_text())["state"] == "complete"
    assert outputs(out / "lab00_memory.ipynb")[0][0]["text"] == "1\n"
    assert said.startswith("results/batch/4242: 1 of 1 cells ran")


def test_rung_without_a_lab_or_without_minifsdp_says_so(submit: Submit) -> None:
    for words, environ, says in [
        ((), {}, "name the lab"),
        (("00",), {"PATH": "/usr/bin:/bin"}, "no minifsdp in the PATH"),
    ]:
        job = submit("rung.sbatch", *words, **environ)
        assert says in job.communicate(timeout=SECONDS)[1]
        assert job.returncode == 2


def test_ladder_sbatch_starts_the_ranks_of_two_nodes(submit: Submit, tmp_path: Path) -> None:
    """What the ranks then make of these variables, tests/launch/test_two_nodes.py shows."""
    size = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    (tmp_path / "tools" / "minifsdp").write_text(RANK)
    (tmp_path / "tools" / "minifsdp").chmod(0o755)
    job = submit("ladder.sbatch", "--steps=1", **size, SLURM_CPUS_PER_TASK="3")
    said, errors = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, errors
    words = "ladder --out results/batch/4242 --steps=1"
    assert sorted(said.splitlines()) == [f"{rank} of 4, {rank % 2} of 2, 127.0.0.1:24242: {words}" for rank in range(4)]
    options = (tmp_path / "srun.options").read_text().splitlines()
    assert {"--ntasks=4", "--gpu-bind=none", "--kill-on-bad-exit=1", "--cpus-per-task=3"} <= {*options}


RANK = """#!/bin/bash
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR:$MASTER_PORT: $*"
"""


def test_jupyter_listens_on_loopback_and_shows_its_token_to_nobody(submit: Submit, tmp_path: Path) -> None:
    job = submit("jupyter.sbatch", *(["--allow-root"] if os.getuid() == 0 else []), JUPYTER_TOKEN="inherited")
    file = tmp_path / ".local" / "share" / "minifsdp" / "jupyter-4242.token"
    try:
        await_that(lambda: bool(listening(job)))
        assert {address for address, _ in listening(job)} == {"127.0.0.1"}
        (port,) = {port for _, port in listening(job)}
        token = file.read_text()
        assert len(token) > 30
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert answer(port, token) == 200
        assert answer(port, "wrong") == answer(port, "inherited") == 403
        seen = {}
        for process in tree(job):
            with suppress(psutil.Error):  # a helper of the server's may be gone already
                seen[process] = " ".join(process.cmdline()), " ".join(process.environ().values())
        assert not any(token in line or token in variables for line, variables in seen.values())
        server = next(process for process, (line, _) in seen.items() if "jupyterlab" in line)
        assert server.environ()["MINIFSDP_DEVICE"] == "cpu"
    finally:
        job.terminate()
        said, errors = job.communicate(timeout=SECONDS)
    assert f"ssh -N -L 8888:127.0.0.1:{port} -J ada@login " in said
    assert f"cat {file}" in said
    assert token not in said + errors
    assert not file.exists()
    assert not psutil.pid_exists(server.pid)


def tree(job: "subprocess.Popen[str]") -> list[psutil.Process]:
    root = psutil.Process(job.pid)
    return [root, *root.children(recursive=True)]


def listening(job: "subprocess.Popen[str]") -> list[tuple[str, int]]:
    """Addresses and ports on which the job can be reached."""
    found = []
    for process in tree(job):
        with suppress(psutil.Error):
            connections = process.net_connections(kind="inet")
            found += [(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN]
    return found


def answer(port: int, token: str) -> int:
    """How the server answers somebody with this token."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    request = Request(f"http://127.0.0.1:{port}/api/contents", headers={"Authorization": f"token {token}"})
    try:
        with urlopen(request, timeout=SECONDS) as reply:
            return int(reply.status)
    except HTTPError as error:
        return error.code
