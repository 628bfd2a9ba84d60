"""Run generated code so that it harms nothing and cannot pass by pretending: the metric of HumanEval and MBPP.

Each sample runs in a Python process of its own, in new user, mount, network, process and IPC namespaces, as nobody,
without capabilities, in a file system of its own (`sandbox.sh`): Python and system libraries, read-only, and a small
temporary folder. It has limits on CPU time, memory, file size, open files and processes, an empty environment, no
standard input, and a filter on system calls. It ends, with all that it started, after a wall-clock limit, and when the
process that evaluates it ends, however that may be.

Where the kernel allows no namespaces nothing runs, unless the environment variable ATTNRES_CONFIRM_NO_ISOLATION is set
(`--confirm-no-isolation`): then the limits and the filter remain, which lets a sample start threads but no processes,
signal none and open no network connection; it can read what its user can read. Root's samples run as nobody there, too.

A sample passes when its tests have run to their end: only then is a secret read, which the process sends back. What a
sample prints, and the status with which it exits, count for nothing. That stops what a language model writes, not
someone who has read this file: tests in Python share a process with the code they test.
"""

import contextlib
import errno
import json
import os
import re
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
    """What one sample may use.

    All of a sample's memory is bounded by `memory` times `processes`, plus `disk`.

    Attributes:
        seconds: of wall clock, and of CPU.
        memory: MiB per process.
        disk: MiB of temporary files.
        processes: how many at the same time.
    """

    seconds: int = 10
    memory: int = 512
    disk: int = 16
    processes: int = 8


@dataclass(frozen=True)
class Launcher:
    """How a sample's process is started.

    Attributes:
        command: what starts Python, in the sample's namespaces; the word DISK stands for the limit on files.
        as_nobody: change to the user nobody before the command starts.
        isolates: the command makes namespaces.
    """

    command: tuple[str, ...]
    as_nobody: bool
    isolates: bool = True


# The program of the sample's process.
CHILD = r"""
def main():
    # Keep in local variables whatever is used after the sample has run: it can change any module.
    import ctypes, json, os, resource, sys, traceback
    read, write, leave, describe, run = os.read, os.write, os._exit, traceback.format_exception_only, exec

    # The ends of two pipes to the evaluator, and on standard input what to run.
    report, secret = map(int, sys.argv[1:])
    task = json.loads(sys.stdin.buffer.read())
    limits, mebi, running = task["limits"], 1 << 20, 0
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    # Without namespaces, do here what sandbox.sh and unshare do otherwise: end with the evaluator, be the first to go
    # when memory is short, and count what the user runs already.
    if not task["isolated"]:
        prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        for process in filter(str.isdigit, os.listdir("/proc")):  # RLIMIT_NPROC counts all threads of a user
            try:
                if os.stat("/proc/" + process).st_uid == os.getuid():
                    running += len(os.listdir("/proc/" + process + "/task"))
            except OSError:  # it has ended meanwhile
                pass

    # Hard limits, which the sample cannot raise again.
    for limit, most in (
        ("CPU", limits["seconds"]), ("AS", limits["memory"] * mebi), ("FSIZE", limits["disk"] * mebi),
        ("NPROC", running + limits["processes"]), ("NOFILE", 64), ("CORE", 0), ("MSGQUEUE", 0),
    ):
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))

    # Install the filter on system calls, as the kernel's struct sock_fprog; it holds for all that the sample starts.
    code = bytes.fromhex(task["filter"])
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
    program = Program(len(code) // 8, code)
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(program), 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "no filter on system calls")

    # Say that the sandbox stands. This fails if the evaluator has ended, which was not noticed up to here.
    write(report, b"+")

    # Close standard input, output and error, and forget the arguments: they name the pipes.
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    sys.argv, sys.stdin = ["sample.py"], open(os.dup(nothing))

    # Run the code, then its tests, in one namespace. Whatever is raised, SystemExit too, is a failure.
    names = {"__name__": "__main__"}
    try:
        for program in [compile(task[name], name + ".py", "exec") for name in ("code", "tests")]:
            run(program, names)
    except BaseException as error:
        write(report, ("failed: " + describe(type(error), error)[-1].strip()[:1000]).encode(errors="replace"))
        leave(1)

    # The tests have run to their end. Leave at once: what the sample registered for the exit does not run.
    write(report, read(secret, 64))
    leave(0)
main()
"""

# The machines whose system calls are known: the kernel's name of each (AUDIT_ARCH), and its column in the tables below.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

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
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
}
SOCKET, CLONE, CLONE3, PRLIMIT = (41, 198), (56, 220), (435, 435), (302, 261)
CLONE_THREAD, NEW_NAMESPACES, AF_UNIX = 0x10000, 0x7E020080, 1


def run_sample(code: str, tests: str, limits: Limits = Limits()) -> str:
    """Run `code`, then `tests`, in a process of its own.

    Returns:
        "passed", or why not: "failed: ERROR", "timed out after N s" or "ended early, exit status N".

    Raises:
        SandboxError: it could not be run.
    """
    return _run(choose_launcher(), code, tests, limits)


def run_samples(samples: list[tuple[str, str]], limits: Limits = Limits()) -> list[str]:
    """Run each (code, tests), as many at a time as there are cores, and return their outcomes."""
    choose_launcher()  # find it once, before the threads ask for it
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(lambda sample: run_sample(*sample, limits), samples)
        return list(tqdm(outcomes, desc="Running generated code", total=len(samples)))


def humaneval_outcomes(resps: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """Run each completion of a HumanEval prompt, and return the outcomes."""
    return _outcomes(
        resps, docs, lambda doc, text: (doc["prompt"] + text, f"{doc['test']}\ncheck({doc['entry_point']})")
    )


def humaneval_chat_outcomes(resps: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """Run the program in each answer to a HumanEval prompt, and return the outcomes.

    It goes on from the prompt, which is a function that returns nothing: a fence with a whole function defines that one
    anew, with the prompt's imports and helpers there, and one with a body alone completes it.
    """
    return humaneval_outcomes([[fenced_code(text) for text in texts] for texts in resps], docs)


def fenced_code(text: str) -> str:
    """Return what the first fence of an answer holds, up to the end where it is not closed; all of it without one."""
    found = re.search(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", text, re.DOTALL | re.MULTILINE)
    return text if found is None else found[1]


def mbpp_outcomes(resps: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """Run each program written for an MBPP problem, and return the outcomes."""
    return _outcomes(resps, docs, lambda doc, text: (text, "\n".join([doc["test_setup_code"], *doc["test_list"]])))


def mbpp_examples(dataset):
    """Keep problems 2, 3 and 4, which MBPP's authors showed, of the data set's split for prompts."""
    return dataset.filter(lambda doc: doc["task_id"] in (2, 3, 4))


def pass_at_1(references: list[str], predictions: list[str]) -> float:
    """Return 1.0 for the outcome "passed", else 0.0."""
    return float(predictions[0] == PASSED)


def choose_launcher() -> Launcher:
    """Choose how samples are started here: with namespaces, or, confirmed and with a warning, without.

    Raises:
        SandboxError: samples cannot be started, or starting them without namespaces has not been confirmed.
    """
    isolating, why = _isolation()
    if isolating is not None:
        return isolating
    if not os.environ.get(CONFIRM):
        raise SandboxError(
            f"This system gives generated code no isolation ({why}). Run it in a container or virtual machine that "
            "does, or let it run without: --confirm-no-isolation."
        )
    return _without_isolation(why)


@cache
def _isolation() -> tuple[Launcher | None, str]:
    """Find how to give samples namespaces of their own; or None, and why that fails, in the commands' own words."""
    # From outside to inside: namespaces that end with the evaluator, their file system (sandbox.sh), no capabilities,
    # and for root another user.
    script = Path(__file__).with_name("sandbox.sh").read_text(encoding="utf-8")
    new = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid", "--ipc", "--uts"]
    new += ["--fork", "--kill-child"]
    inside = ["/bin/sh", "-c", script, "sandbox", "DISK", _prefix()]
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
    become = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    last = ["unshare", "--user"]  # a user namespace within counts the processes of this sample alone
    is_root = os.geteuid() == 0
    launchers = [Launcher((*new, "--user", "--map-root-user", *inside, *drop, *last), as_nobody=is_root)]
    if is_root:  # the machine's own root, where it has all rights, needs no user namespace to begin with
        launchers.insert(0, Launcher((*new, *inside, *drop, *become, *last), as_nobody=False))
    # What works is found by trying: kernels, containers and security modules forbid namespaces in many places.
    reasons = []
    for candidate in launchers:
        try:
            reasons.append(_run(candidate, "", "", Limits()))
        except SandboxError as error:
            reasons.append(str(error))
        if reasons[-1] == PASSED:
            return candidate, ""
    return None, "; ".join(reasons)


@cache
def _without_isolation(why: str) -> Launcher:
    """Start samples with limits and the filter alone, once that has been tried, and warn."""
    plain = Launcher((), as_nobody=os.geteuid() == 0, isolates=False)
    _run(plain, "", "", Limits())
    warnings.warn(
        f"Generated code runs without isolation ({why}): it has limits on time and memory, starts no processes and "
        "opens no connections, but can read and write the files of its user.",
        stacklevel=3,
    )
    return plain


def _prefix() -> str:
    """Return the folder that Python itself is installed in."""
    return os.path.realpath(sys.base_prefix)


def _outcomes(resps, docs, program) -> list[list[str]]:
    """Run `program(doc, text)`, a (code, tests), for each response to each document, as the harness nests them."""
    pairs = [program(doc, text) for texts, doc in zip(resps, docs) for text in texts]
    outcomes = iter(run_samples(pairs))
    return [[next(outcomes) for _ in texts] for texts in resps]


def _run(launcher: Launcher, code: str, tests: str, limits: Limits) -> str:
    """Run a sample through a launcher; see `run_sample`."""
    secret = secrets.token_hex(32).encode()
    task = {"code": code, "tests": tests, "limits": asdict(limits), "isolated": launcher.isolates}
    task["filter"] = _filter(alone=not launcher.isolates).hex()
    with contextlib.ExitStack() as stack:
        # What to run comes on standard input; what the launcher's commands complain of goes to a file.
        task_file, complaints = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        task_file.write(json.dumps(task).encode())
        task_file.seek(0)

        # One pipe brings the report back; the other holds the secret, ready to be read once, and no more.
        report, report_end = map(stack.enter_context, _pipe())
        secret_end, secret_source = map(stack.enter_context, _pipe())
        os.write(secret_source.fileno(), secret)
        secret_source.close()
        child_ends = (report_end.fileno(), secret_end.fileno())

        # Start it with an empty environment, and in a session of its own, so that all it starts can be killed with it.
        command = [str(limits.disk) if word == "DISK" else word for word in launcher.command]
        command += [os.path.realpath(sys.executable), "-I", "-S", "-c", CHILD, *map(str, child_ends)]
        folder = _prefix() if launcher.isolates else stack.enter_context(_folder(launcher))
        identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if launcher.as_nobody else {}
        try:
            process = subprocess.Popen(
                command,
                stdin=task_file,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                cwd=folder,
                env={},
                start_new_session=True,
                pass_fds=child_ends,
                **identity,
            )
        except OSError as error:
            who = "as nobody, " if launcher.as_nobody else ""
            raise SandboxError(f"{who}{command[0]}: {error.strerror}") from error
        # The child alone holds its ends now: if it dies early, the wait for its report ends.
        report_end.close()
        secret_end.close()

        # Building the sandbox does not count as the sample's time.
        try:
            poll = select.poll()
            poll.register(report, select.POLLIN)
            if not poll.poll(START * 1000) or report.read(1) != b"+":
                raise SandboxError(_words(complaints) or f"no answer within {START} s")
            process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            return f"timed out after {limits.seconds} s"
        finally:
            _kill(process)

        # Do not wait for an end of the report: what the sample started may still hold its pipe.
        os.set_blocking(report.fileno(), False)
        verdict = report.read(4096) or b""  # None where nothing was written
    if verdict == secret:
        return PASSED
    if verdict.startswith(b"failed: "):
        return verdict.decode(errors="replace").splitlines()[0][:500]
    return f"ended early, exit status {process.returncode}"


def _pipe():
    """Open a pipe, unbuffered: its end to read from, and its end to write to."""
    return [open(end, mode, buffering=0) for end, mode in zip(os.pipe(), ("rb", "wb"))]


@contextlib.contextmanager
def _folder(launcher: Launcher):
    """Make a folder for a sample that has no file system of its own, and remove it, however deep and closed it is."""
    folder = tempfile.mkdtemp(prefix="sample-")
    if launcher.as_nobody:
        os.chown(folder, NOBODY, NOBODY)
    try:
        yield folder
    finally:
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL)


def _words(file) -> str:
    """Read what a command wrote to a file, as one line."""
    file.seek(0)
    return " ".join(file.read(2000).decode(errors="replace").split())


def _kill(process: subprocess.Popen) -> None:
    """Kill a process and its session, and collect its exit status."""
    with contextlib.suppress(ProcessLookupError):  # all of the session has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _filter(alone: bool) -> bytes:
    """Write a program for the kernel's filter on system calls (seccomp, classic BPF).

    It refuses the calls in the tables above, and all sockets but those within the machine. A sample with namespaces
    makes no further namespaces; one without (`alone`) makes threads but no processes.

    Raises:
        SandboxError: the numbers of this machine's system calls are not known.
    """
    if (machine := os.uname().machine) not in MACHINES:
        raise SandboxError(f"generated code runs on {' and '.join(MACHINES)}, not on {machine}")
    architecture, column = MACHINES[machine]
    # The kernel's codes: of instructions, each with a value, of the places it loads from, and of answers.
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    number, machine_code, argument = 0, 4, 16  # offsets in struct seccomp_data; `argument`: low half of the first one
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000

    # One instruction (struct sock_filter): a jump skips that many of those after it, if its test holds or if not.
    def step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_so, if_not, value)

    # Steps for one call alone: for any other they are skipped.
    def when(call: tuple[int, int], *steps: bytes) -> list[bytes]:
        return [step(equal, call[column], 0, len(steps)), *steps]

    yes, no = step(answer, allow), step(answer, refuse | errno.EPERM)
    # Calls that are not by this machine's own numbers end the sample: 32-bit calls, and x86_64's second set of numbers.
    program = [step(load, machine_code), step(equal, architecture, 1, 0), step(answer, kill), step(load, number)]
    program += [step(at_least, 0x40000000, 0, 1), step(answer, kill)]
    # Refuse what is in the tables.
    for call in (REFUSED | REFUSED_ALONE if alone else REFUSED).values():
        if call[column] is not None:
            program += when(call, no)
    # clone3 has its flags in memory, where a filter cannot look: libraries use clone where the kernel lacks clone3.
    program += when(CLONE3, step(answer, refuse | errno.ENOSYS))
    # clone depends on its flags: alone, threads only; otherwise, no new namespaces. Wrong flags skip `yes`.
    check_flags = step(any_bit, CLONE_THREAD, 0, 1) if alone else step(any_bit, NEW_NAMESPACES, 1, 0)
    program += when(CLONE, step(load, argument), check_flags, yes, no)
    # socket depends on its family.
    program += when(SOCKET, step(load, argument), step(equal, AF_UNIX, 0, 1), yes, no)
    # prlimit sets another process's limits, a signal in effect, unless it names none.
    if alone:
        program += when(PRLIMIT, step(load, argument), step(equal, 0, 0, 1), yes, no)
    # All else is allowed.
    return b"".join([*program, yes])
