"""Where launchers run: a Python environment, hosts that are network namespaces, a cluster of one machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tools import ROOT

SLURM = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPort=26817
SlurmdPort=26818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


class UnavailableError(Exception):
    """Something that a launcher needs is not here; the message says what."""


def environment(folder: Path) -> Path:
    """A new Python environment with minifsdp and the extra `launchers`; returns its `bin`."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pinned = ["--constraint", str(ROOT / "constraints.txt")]
    wanted = ["--quiet", "--disable-pip-version-check", *pinned, "--editable", f"{ROOT}[launchers]"]
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", *wanted], check=True)
    return folder / "bin"


def may_divide() -> str:
    """The reason why there can be no network namespaces here; "" if there can."""
    if shutil.which("ip") is None:
        return "no `ip` (Debian: iproute2)"
    if os.geteuid() != 0:
        return "not root"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return done.stderr.strip()


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Make `count` hosts, each a network namespace; yields their names. One alone has only its loopback.

    Their addresses are 10.99.0.1 and so on, of the interface eth0.
    """
    names = [f"minifsdp{os.getpid()}-{host}" for host in range(count)]
    switch = names[0]  # the first one has a bridge
    try:
        for host, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            if count > 1 and host == 0:
                ip("-n", name, "link", "add", "eth0", "type", "bridge")
            elif count > 1:
                ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"to{host}", "netns", switch)
                ip("-n", switch, "link", "set", f"to{host}", "master", "eth0", "up")
            if count > 1:
                ip("-n", name, "address", "add", f"10.99.0.{host + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in reversed(names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*words: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run Slurm for this machine alone, on its loopback; yields the variables that lead commands to it.

    Raises:
        UnavailableError: it is not installed, or does not start.
    """
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        raise UnavailableError("no slurmctld and slurmd (Debian: slurm-wlm)")
    if os.geteuid() != 0:
        raise UnavailableError("slurmd needs root")
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(SLURM.format(host=socket.gethostname(), folder=folder))
    environ = {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons = []
    try:
        for words in (["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            with (folder / f"{words[0]}.out").open("w") as out:
                daemons.append(subprocess.Popen(words, env=os.environ | environ, stdout=out, stderr=out))
        deadline = time.monotonic() + 120
        while not _idle(environ):
            if time.monotonic() > deadline:
                raise UnavailableError("Slurm did not start: see slurmctld.log")
            time.sleep(0.5)
        yield environ
    finally:
        for each in reversed(daemons):
            each.terminate()
            with suppress(subprocess.TimeoutExpired):
                each.wait(20)


def _idle(environ: dict[str, str]) -> bool:
    words = ["sinfo", "--noheader", "--format=%t"]
    return subprocess.run(words, env=os.environ | environ, capture_output=True, text=True).stdout.strip() == "idle"
