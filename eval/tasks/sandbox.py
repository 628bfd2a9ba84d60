"""Run generated code so that it harms nothing and cannot pass by pretending: the metric of HumanEval and MBPP.

Each sample runs in a Python process of its own. Where the kernel allows, that process lives in new user, mount,
network, process and IPC namespaces, as nobody, without capabilities, in a file system of its own (`sandbox.sh`): Python
and system libraries, read-only, and a small temporary folder. Everywhere it has limits on CPU time, memory, file size,
open files and processes, an empty environment and no standard input, and what it started is killed with it after a
wall-clock limit.

A sample passes when its tests have run to their end: only then is a secret read, which the process sends back. What a
sample prints, and the status with which it exits, count for nothing. That stops what a language model writes, not
someone who has read this file: tests in Python share a process with the code they test.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tqdm import tqdm


PASSED = "passed"


@dataclass(frozen=True)
class Limits:
    """What one sample may use: seconds (of wall clock, and of CPU), MiB of memory a process, MiB of disk, processes."""

    seconds: int = 10
    memory: int = 1024
    disk: int = 16
    processes: int = 16


# The program of the sample's process. It has what it needs in local variables before the sample can touch a module.
CHILD = r"""
def main():
    import json, os, resource, sys, traceback
    read, write, leave, describe, run = os.read, os.write, os._exit, traceback.format_exception_only, exec
    report, secret = map(int, sys.argv[1:])
    task = json.loads(sys.stdin.buffer.read())
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    limits, mebi = task["limits"], 1 << 20
    for limit, most in (
        ("CPU", limits["seconds"]), ("AS", limits["memory"] * mebi), ("FSIZE", limits["disk"] * mebi),
        ("NPROC", limits["processes"]), ("NOFILE", 64), ("CORE", 0),
    ):
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
    sys.argv, sys.stdin = ["sample.py"], open(os.dup(nothing))
    names = {"__name__": "__main__"}
    try:
        for program in [compile(task[name], name + ".py", "exec") for name in ("code", "tests")]:
            run(program, names)
    except BaseException as error:
        write(report, ("failed: " + describe(type(error), error)[-1].strip()).encode(errors="replace"))
        leave(1)
    write(report, read(secret, 64))
    leave(0)
main()
"""


def run_sample(code: str, tests: str, limits: Limits = Limits()) -> str:
    """Run `code`, then `tests`, in a process of its own.

    Returns "passed", or why not: "failed: ERROR", "timed out after N s" or "ended early, exit status N".
    """
    return _run(_isolation(), code, tests, limits)


def run_samples(samples: list[tuple[str, str]], limits: Limits = Limits()) -> list[str]:
    """The outcome of each (code, tests), as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(lambda sample: run_sample(*sample, limits), samples)
        return list(tqdm(outcomes, desc="Running generated code", total=len(samples)))


def humaneval_outcomes(resps: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """The outcome of each completion of a HumanEval prompt."""
    return _outcomes(
        resps, docs, lambda doc, text: (doc["prompt"] + text, f"{doc['test']}\ncheck({doc['entry_point']})")
    )


def mbpp_outcomes(resps: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """The outcome of each program written for an MBPP problem."""
    return _outcomes(resps, docs, lambda doc, text: (text, "\n".join([doc["test_setup_code"], *doc["test_list"]])))


def mbpp_examples(dataset):
    """Problems 2, 3 and 4, which MBPP's authors showed, of the data set's split for prompts."""
    return dataset.filter(lambda doc: doc["task_id"] in (2, 3, 4))


def pass_at_1(references: list[str], predictions: list[str]) -> float:
    """1.0 for the outcome "passed", else 0.0."""
    return float(predictions[0] == PASSED)


def _outcomes(resps, docs, program) -> list[list[str]]:
    pairs = [program(doc, text) for texts, doc in zip(resps, docs) for text in texts]
    outcomes = iter(run_samples(pairs))
    return [[next(outcomes) for _ in texts] for texts in resps]


def _run(isolation: list[str], code: str, tests: str, limits: Limits) -> str:
    secret = secrets.token_hex(32).encode()
    report, report_end = os.pipe()
    secret_end, giving = os.pipe()
    os.write(giving, secret)
    os.close(giving)
    with tempfile.TemporaryDirectory(prefix="sample-", ignore_cleanup_errors=True) as folder:
        places = {"ROOT": folder, "DISK": str(limits.disk)}
        python = [os.path.realpath(sys.executable), "-I", "-S", "-c", CHILD, str(report_end), str(secret_end)]
        try:
            process = subprocess.Popen(
                [places.get(word, word) for word in isolation] + python,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                start_new_session=True,
                pass_fds=(report_end, secret_end),
            )
        except OSError:
            os.close(report)
            raise
        finally:
            os.close(report_end)
            os.close(secret_end)
        try:
            task = {"code": code, "tests": tests, "limits": asdict(limits)}
            process.communicate(json.dumps(task).encode(), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return f"timed out after {limits.seconds} s"
        finally:
            _kill(process)
            said = _read(report)
    if said == secret:
        return PASSED
    if said.startswith(b"failed: "):
        return said.decode(errors="replace").splitlines()[0][:500]
    return f"ended early, exit status {process.returncode}"


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # it, and what it started in its session, has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(pipe: int) -> bytes:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 4096)
    except BlockingIOError:
        return b""  # nothing was said, and something still holds the other end
    finally:
        os.close(pipe)


@cache
def _isolation() -> list[str]:
    """The command that gives its arguments namespaces of their own, or, with a warning, only a process between."""
    script, prefix = str(Path(__file__).with_name("sandbox.sh")), os.path.realpath(sys.base_prefix)
    new = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
    ways = [([*new, "--user", "--map-root-user"], drop)]
    if os.geteuid() == 0:  # the machine's own root needs no user namespace to begin with, and gives up being root
        ways.insert(0, (new, [*drop, "--reuid", "65534", "--regid", "65534", "--clear-groups"]))
    for unshare, setpriv in ways:
        # a user namespace within counts the processes of this sample alone
        command = [*unshare, "/bin/sh", script, "ROOT", "DISK", prefix, *setpriv, "unshare", "--user"]
        try:
            if _run(command, "", "", Limits(seconds=60)) == PASSED:
                return command
        except FileNotFoundError:
            break  # no util-linux
    warnings.warn(
        "This system allows no new namespaces (unshare of util-linux): generated code runs with limits on time and "
        "memory, but can read your files, use the network and end your processes. Use a container or virtual machine.",
        stacklevel=2,
    )
    return ["/bin/sh", "-c", '"$@"; exit $?', "sample"]
