"""Run generated code so that it harms nothing and cannot pass by pretending: the metric of HumanEval and MBPP.

Each sample runs in a Python process of its own, in new user, mount, network, process and IPC namespaces, as nobody,
without capabilities, in a file system of its own (`sandbox.sh`): Python and system libraries, read-only, and a small
temporary folder. It has limits on CPU time, memory, file size, open files and processes, an empty environment, no
standard input, and a filter on system calls. It ends, with all that it started, after a wall-clock limit, and when the
process that evaluates it ends, however that may be.

Where the kernel allows no namespaces nothing runs, unless the environment variable ATTNRES_CONFIRM_NO_ISOLATION is set
(`--confirm-no-isolation`): then the limits and the filter remain, which lets a sample start threads but no processes,
signal none and open no network connection; it can read what its user can read. Root's samples are nobody's there, too.

A sample passes when its tests have run to their end: only then is a secret read, which the process sends back. What a
sample prints, and the status with which it exits, count for nothing. That stops what a language model writes, not
someone who has read this file: tests in Python share a process with the code they test.
"""

import contextlib
import errno
import json
import os
import secrets
import select
import signal
import struct
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
CONFIRM = "ATTNRES_CONFIRM_NO_ISOLATION"
NOBODY = 65534
START = 60  # seconds for the sandbox itself


class SandboxError(RuntimeError):
    """Samples cannot be run here, or not without a risk that has to be confirmed; the message says why, in a line."""


@dataclass(frozen=True)
class Limits:
    """What one sample may use: seconds (of wall clock, and of CPU), MiB of memory a process, MiB of disk, processes.

    All of a sample's memory is bounded by `memory` times `processes` and the disk.
    """

    seconds: int = 10
    memory: int = 512
    disk: int = 16
    processes: int = 8


@dataclass(frozen=True)
class Way:
    """How a sample's process is started: through a command, after becoming nobody or not."""

    command: tuple[str, ...]
    as_nobody: bool
    isolates: bool = True


# The program of the sample's process. It has what it needs in local variables before the sample can touch a module.
CHILD = r"""
def main():
    import ctypes, json, os, resource, sys, traceback
    read, write, leave, describe, run = os.read, os.write, os._exit, traceback.format_exception_only, exec
    report, secret = map(int, sys.argv[1:])
    task = json.loads(sys.stdin.buffer.read())
    limits, mebi, running = task["limits"], 1 << 20, 0
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if not task["isolated"]:
        prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        for process in filter(str.isdigit, os.listdir("/proc")):  # the limit counts all of a user's
            try:
                if os.stat("/proc/" + process).st_uid == os.getuid():
                    running += len(os.listdir("/proc/" + process + "/task"))
            except OSError:
                pass
    for limit, most in (
        ("CPU", limits["seconds"]), ("AS", limits["memory"] * mebi), ("FSIZE", limits["disk"] * mebi),
        ("NPROC", running + limits["processes"]), ("NOFILE", 64), ("CORE", 0), ("MSGQUEUE", 0),
    ):
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
    code = bytes.fromhex(task["filter"])
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
    program = Program(len(code) // 8, code)
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(program), 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "no filter on system calls")
    write(report, b"+")  # the sandbox stands; fails if who started it has gone, whose end would not be noticed before
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    sys.argv, sys.stdin = ["sample.py"], open(os.dup(nothing))
    names = {"__name__": "__main__"}
    try:
        for program in [compile(task[name], name + ".py", "exec") for name in ("code", "tests")]:
            run(program, names)
    except BaseException as error:
        write(report, ("failed: " + describe(type(error), error)[-1].strip()[:1000]).encode(errors="replace"))
        leave(1)
    write(report, read(secret, 64))
    leave(0)
main()
"""

# System calls that are refused, by their numbers on x86_64 and on aarch64.
REFUSED = {
    # memory that no limit counts
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    # ways around limits, namespaces and this filter
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
}
# Without namespaces, also what would outlive the sample or reach another process.
REFUSED_ALONE = {
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)
CLONE_THREAD, NEW_NAMESPACES, AF_UNIX = 0x10000, 0x7E020080, 1


def run_sample(code: str, tests: str, limits: Limits = Limits()) -> str:
    """Run `code`, then `tests`, in a process of its own.

    Returns "passed", or why not: "failed: ERROR", "timed out after N s" or "ended early, exit status N".

    Raises:
        SandboxError: it could not be run.
    """
    return _run(way(), code, tests, limits)


def run_samples(samples: list[tuple[str, str]], limits: Limits = Limits()) -> list[str]:
    """The outcome of each (code, tests), as many at a time as there are cores."""
    way()
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


def way() -> Way:
    """The way in which samples are run here: with namespaces, or, confirmed and with a warning, without.

    Raises:
        SandboxError: there is no way, or it has not been confirmed.
    """
    found, why = _isolation()
    if found:
        return found
    if not os.environ.get(CONFIRM):
        raise SandboxError(
            f"This system gives generated code no isolation ({why}). Run it in a container or virtual machine that "
            "does, or let it run without: --confirm-no-isolation."
        )
    return _without_isolation(why)


@cache
def _isolation() -> tuple[Way | None, str]:
    """How to give samples namespaces of their own; or None, and what stands against it, in the commands' own words."""
    script = Path(__file__).with_name("sandbox.sh").read_text(encoding="utf-8")
    new = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid", "--ipc", "--uts"]
    new += ["--fork", "--kill-child"]
    inside = ["/bin/sh", "-c", script, "sandbox", "DISK", _prefix()]
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
    become = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    last = ["unshare", "--user"]  # a user namespace within counts the processes of this sample alone
    is_root = os.geteuid() == 0
    ways = [Way((*new, "--user", "--map-root-user", *inside, *drop, *last), as_nobody=is_root)]
    if is_root:  # the machine's own root, where it has all rights, needs no user namespace to begin with
        ways.insert(0, Way((*new, *inside, *drop, *become, *last), as_nobody=False))
    reasons = []
    for candidate in ways:
        try:
            reasons.append(_run(candidate, "", "", Limits()))
        except SandboxError as error:
            reasons.append(str(error))
        if reasons[-1] == PASSED:
            return candidate, ""
    return None, "; ".join(reasons)


@cache
def _without_isolation(why: str) -> Way:
    found = Way((), as_nobody=os.geteuid() == 0, isolates=False)
    _run(found, "", "", Limits())
    warnings.warn(
        f"Generated code runs without isolation ({why}): it has limits on time and memory, starts no processes and "
        "opens no connections, but can read and write the files of its user.",
        stacklevel=3,
    )
    return found


def _prefix() -> str:
    return os.path.realpath(sys.base_prefix)


def _outcomes(resps, docs, program) -> list[list[str]]:
    pairs = [program(doc, text) for texts, doc in zip(resps, docs) for text in texts]
    outcomes = iter(run_samples(pairs))
    return [[next(outcomes) for _ in texts] for texts in resps]


def _run(how: Way, code: str, tests: str, limits: Limits) -> str:
    secret = secrets.token_hex(32).encode()
    task = {"code": code, "tests": tests, "limits": asdict(limits), "isolated": how.isolates}
    task["filter"] = _filter(alone=not how.isolates).hex()
    with contextlib.ExitStack() as stack:
        given, words = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        given.write(json.dumps(task).encode())
        given.seek(0)
        report, report_end = map(stack.enter_context, _pipe())
        secret_end, giving = map(stack.enter_context, _pipe())
        os.write(giving.fileno(), secret)
        giving.close()
        ends = (report_end.fileno(), secret_end.fileno())
        command = [str(limits.disk) if word == "DISK" else word for word in how.command]
        command += [os.path.realpath(sys.executable), "-I", "-S", "-c", CHILD, *map(str, ends)]
        try:
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=words,
                cwd=_prefix() if how.isolates else stack.enter_context(_folder(how)),
                env={},
                start_new_session=True,
                pass_fds=ends,
                **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if how.as_nobody else {}),
            )
        except OSError as error:
            raise SandboxError(f"{'as nobody, ' * how.as_nobody}{command[0]}: {error.strerror}") from error
        report_end.close()
        secret_end.close()
        try:
            poll = select.poll()
            poll.register(report, select.POLLIN)
            if not poll.poll(START * 1000) or report.read(1) != b"+":
                raise SandboxError(_words(words) or f"no answer within {START} s")
            process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            return f"timed out after {limits.seconds} s"
        finally:
            _kill(process)
        os.set_blocking(report.fileno(), False)
        said = report.read(4096) or b""  # None: nothing was said, and something still holds the other end
    if said == secret:
        return PASSED
    if said.startswith(b"failed: "):
        return said.decode(errors="replace").splitlines()[0][:500]
    return f"ended early, exit status {process.returncode}"


def _pipe():
    return [open(end, mode, buffering=0) for end, mode in zip(os.pipe(), ("rb", "wb"))]


@contextlib.contextmanager
def _folder(how: Way):
    """A folder for the files of a sample that has no file system of its own. However deep and closed, it is removed."""
    folder = tempfile.mkdtemp(prefix="sample-")
    if how.as_nobody:
        os.chown(folder, NOBODY, NOBODY)
    try:
        yield folder
    finally:
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL)


def _words(file) -> str:
    """What a command has to say, in one line."""
    file.seek(0)
    return " ".join(file.read(2000).decode(errors="replace").split())


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # it, and what it started in its session, has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _filter(alone: bool) -> bytes:
    """A program of the kernel's (seccomp, classic BPF) that refuses system calls.

    Sockets are of this machine only. A sample with namespaces makes no further ones; one without makes no processes.
    """
    machines = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
    if (machine := os.uname().machine) not in machines:
        raise SandboxError(f"generated code runs on {' and '.join(machines)}, not on {machine}")
    architecture, column = machines[machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    number, argument = 0, 16  # where the kernel puts the call's number and its first argument
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000

    def step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_so, if_not, value)

    def when(call: tuple[int, int], *steps: bytes) -> list[bytes]:
        return [step(equal, call[column], 0, len(steps)), *steps]

    refused = REFUSED | REFUSED_ALONE if alone else REFUSED
    threads_only, no_namespaces = step(any_bit, CLONE_THREAD, 0, 1), step(any_bit, NEW_NAMESPACES, 1, 0)
    yes, no = step(answer, allow), step(answer, refuse | errno.EPERM)
    program = [step(load, 4), step(equal, architecture, 1, 0), step(answer, kill), step(load, number)]
    program += [step(at_least, 0x40000000, 0, 1), step(answer, kill)]  # x86_64's second set of numbers
    for call in refused.values():
        program += when(call, no) if call[column] is not None else []
    program += when(CLONE3, step(answer, refuse | errno.ENOSYS))  # flags lie in memory; libraries then use clone
    program += when(CLONE, step(load, argument), threads_only if alone else no_namespaces, yes, no)
    program += when(SOCKET, step(load, argument), step(equal, AF_UNIX, 0, 1), yes, no)
    return b"".join([*program, yes])
