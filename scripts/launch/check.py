#!/usr/bin/env python3
"""Shows that training under a launcher is training on one rank.

    python3 scripts/launch/check.py torchrun --learner target/release/learner --python DIR/bin/python
    sudo python3 scripts/launch/check.py slurm --learner target/release/learner
    python3 scripts/launch/check.py kubernetes --python DIR/bin/python

torchrun: needs a Python with torch. slurm: installs Debian's slurm-wlm and starts a cluster of this one
machine, for which it must be root; stops it at the end. kubernetes: validates the manifests against the
API's schemas, with the package kubernetes-validate (and PyYAML) of that Python.

Supervised and PPO updates on the vision demo's rows run on one rank, then under the launcher on two and three;
the adapters must differ by at most 1e-5. Then a rank is killed: the launcher starts all of them again, and
the adapter must be the one that two ranks without a mishap have, byte for byte.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BATCH = 12
LIMIT = 1e-5


def recipe(kind, where, ranks):
    """The demo's recipe with micro-batches for so many ranks that 12 rows make an update."""
    source = ROOT / "examples/frames" / ("sft.json" if kind == "sft" else "ppo.json")
    value = json.loads(source.read_text())

    def absolute(node):
        if isinstance(node, dict):
            if "sha256" in node and "path" in node:
                node["path"] = str((source.parent / node["path"]).resolve())
            for child in node.values():
                absolute(child)

    absolute(value)
    value.pop("valid", None)
    training = value["training"]
    training["per_device_train_batch_size"] = BATCH // ranks
    training["gradient_accumulation_steps"] = 1
    training["learning_rate"] = 1e-4
    training["save_steps"] = 5
    if kind == "sft":
        training["max_steps"] = 30
        training.pop("max_updates", None)
    elif kind == "rollouts":
        value["rollouts"] = {"rounds": 1, "rows_per_round": 48, "num_generations": 6}
    else:
        # The rows of a sampled round: what is sampled here depends on the recipe, micro-batches included.
        value.pop("rollouts")
        value.pop("rows")
    path = where / f"{kind}-{ranks}.json"
    path.write_text(json.dumps(value))
    return path


def tensors(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    for name in sorted(header):
        begin, end = header[name]["data_offsets"]
        assert header[name]["dtype"] == "F32", name
        body = data[8 + size + begin : 8 + size + end]
        yield from struct.unpack(f"<{len(body) // 4}f", body)


def weights(run):
    return run / "adapter/adapter_model.safetensors"


def difference(one, other):
    pairs = list(zip(tensors(weights(one)), tensors(weights(other)), strict=True))
    return max(abs(a - b) for a, b in pairs)


class Failed(Exception):
    pass


def run(command, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def ranks_of(learner):
    """Processes of this program that are ranks, oldest first."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if pathlib.Path(os.readlink(entry / "exe")) == learner:
                    found.append(int(entry.name))
            except OSError:
                pass
    return sorted(found)


def compare(launcher, learner, work):
    start = ["--adapter", str(work / "sft-1/adapter"), "--reference", str(work / "sft-1/adapter")]
    rows = ["--rows", str(work / "sampled/rounds/1/train.jsonl")]
    for kind, more in (("sft", []), ("ppo", [*start, *rows])):
        if kind == "ppo":
            run([learner, "ppo", recipe("rollouts", work, 1), "--output", work / "sampled", "--device", "cpu", *start])
        one = work / f"{kind}-1"
        run([learner, kind, recipe(kind, work, 1), "--output", one, "--device", "cpu", *more])
        for ranks in (2, 3):
            output = work / f"{kind}-{ranks}"
            arguments = [kind, str(recipe(kind, work, ranks)), "--output", str(output), "--device", "cpu", *more]
            launcher(ranks, arguments)
            off = difference(one, output)
            print(f"{kind} on {ranks} ranks: adapters differ by {off:.1e}", flush=True)
            if off > LIMIT:
                raise Failed(f"more than {LIMIT}")
    output = work / "killed"
    arguments = ["sft", str(recipe("sft", work, 2)), "--output", str(output), "--device", "cpu"]

    def kill():
        metrics = output / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if metrics.exists() and metrics.read_text().count("\n") >= 8:
                victim = ranks_of(learner)[-1]
                os.kill(victim, signal.SIGKILL)
                return
            time.sleep(0.005)
        raise Failed("no update was made")

    launcher(2, arguments, kill)
    lines = [json.loads(line).get("update") for line in (output / "metrics.jsonl").read_text().splitlines()]
    lines = [update for update in lines if update is not None]
    if lines != list(range(1, 31)):
        raise Failed(f"updates were lost or made twice: {lines}")
    if weights(output).read_bytes() != weights(work / "sft-2").read_bytes():
        raise Failed("the adapter is another one after a restart")
    print("sft on 2 ranks, one of them killed: started again, the same bytes", flush=True)


def torchrun(options, work):
    bin_dir = pathlib.Path(options.python).absolute().parent

    def launch(ranks, arguments, meanwhile=None):
        environment = dict(os.environ, PATH=f"{bin_dir}:{os.environ['PATH']}", GPUS=str(ranks), RESTARTS="1",
                           LEARNER=str(options.learner), RUN_ID=f"check-{os.getpid()}")
        command = [HERE / "torchrun.sh", *arguments]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            if meanwhile:
                meanwhile()
            text, _ = child.communicate(timeout=600)
        finally:
            child.kill()
        if child.returncode != 0:
            raise Failed(text)

    version = run([options.python, "-c", "import torch; print(torch.__version__)"]).strip()
    print(f"torchrun of PyTorch {version}", flush=True)
    compare(launch, options.learner, work)


SLURM = """
ClusterName=rollcall
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/spool
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/slurmd.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdLogFile={work}/slurmd.log
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
# More CPUs than the machine has: three ranks, wherever this runs.
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def slurm(options, work):
    if os.geteuid() != 0:
        raise Failed("slurm: must be root to start a cluster")
    if not shutil.which("slurmctld"):
        run(["apt-get", "update"])
        run(["apt-get", "install", "--yes", "--no-install-recommends", "slurm-wlm", "munge"],
            env=dict(os.environ, DEBIAN_FRONTEND="noninteractive"))
    host = os.uname().nodename.split(".")[0]
    for name in ("state", "spool"):
        (work / name).mkdir()
    config = work / "slurm.conf"
    config.write_text(SLURM.format(host=host, work=work))
    environment = dict(os.environ, SLURM_CONF=str(config), LEARNER=str(options.learner))
    pathlib.Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    daemons = []
    munged = subprocess.run(["pgrep", "-x", "munged"], stdout=subprocess.DEVNULL).returncode == 0
    try:
        if not munged:
            daemons.append(subprocess.Popen(["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--foreground"],
                                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(1)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
        daemons.append(subprocess.Popen(["slurmctld", "-D"], **quiet))
        daemons.append(subprocess.Popen(["slurmd", "-D", "-N", host], **quiet))
        deadline = time.monotonic() + 60
        while "idle" not in subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, text=True,
                                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout:
            if time.monotonic() > deadline:
                logs = "".join(log.read_text() for log in work.glob("slurm*.log"))
                raise Failed(f"the cluster does not come up:\n{logs[-4000:]}")
            time.sleep(0.5)
        print(run(["sinfo", "--version"], env=environment).strip(), flush=True)

        def launch(ranks, arguments, meanwhile=None):
            log = work / "job.log"
            log.unlink(missing_ok=True)
            command = ["sbatch", "--parsable", "--ntasks", str(ranks), "--cpus-per-task", "1", "--output", str(log),
                       str(HERE / "learner.sbatch"), *arguments]
            job = run(command, env=environment, cwd=work).strip()
            if meanwhile:
                meanwhile()
                # The step has failed and with it the job: what `sbatch --requeue` does when a node is lost.
                wait(job, environment, {"FAILED", "CANCELLED", "NODE_FAIL"})
                job = run(command, env=environment, cwd=work).strip()
            state = wait(job, environment, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})
            if state != "COMPLETED":
                raise Failed(f"job {job} ended {state}:\n{log.read_text() if log.exists() else ''}")

        compare(launch, options.learner, work)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def wait(job, environment, states):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        text = run(["scontrol", "show", "job", job], env=environment)
        state = text.split("JobState=")[1].split()[0]
        if state in states:
            return state
        time.sleep(0.2)
    raise Failed(f"job {job} does not end: {state}")


def kubernetes(options, _):
    code = """
import sys, yaml, kubernetes_validate as k
for path in sys.argv[1:]:
    for document in yaml.safe_load_all(open(path)):
        k.validate(document, k.latest_version(), strict=True)
        print(path.rsplit("/", 1)[1], document["kind"], "is valid for Kubernetes", k.latest_version())
"""
    print(run([options.python, "-c", code, *map(str, sorted(HERE.glob("*.yaml")))]), end="")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher", choices=["torchrun", "slurm", "kubernetes"])
    parser.add_argument("--learner", type=pathlib.Path, default=ROOT / "target/release/learner")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    options.learner = options.learner.resolve()
    with tempfile.TemporaryDirectory(prefix="rollcall-launch-") as work:
        try:
            globals()[options.launcher](options, pathlib.Path(work))
        except Failed as failure:
            print(f"error: {options.launcher}: {failure}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
