# ruff: noqa: E501, an attack is a line
"""Generated code runs, is judged by its tests alone, and harms nothing, whoever runs it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tqdm

from eval.tasks import sandbox
from eval.tasks.sandbox import CONFIRM, Limits, SandboxError, run_sample, run_samples


pytestmark = pytest.mark.xdist_group("sandbox")  # they look for what others of them left

QUICK = Limits(seconds=2, memory=512, disk=4, processes=8)
TESTS = "assert answer() == 42"
GOOD = "def answer(): return 42"
_, COLUMN = sandbox.MACHINES[os.uname().machine]  # of the tables of system calls

# Where nobody's path to Python and this project is closed (root's home), an ordinary user finds both in /mnt.
AS_A_USER = """
mount -t tmpfs none /mnt
mkdir /mnt/python /mnt/tasks /mnt/packages
mount --bind "$1" /mnt/python
mount --bind "$2" /mnt/tasks
mount --bind "$3" /mnt/packages
shift 3
cd /
exec "$@"
"""
ISOLATED = ["root", "root without CAP_SYS_ADMIN", "a user"]
NOT_ISOLATED = ["root, not isolated", "a user, not isolated"]
DRIVER = """
import json, os, sys, warnings
sys.path[:0] = sys.argv[1:3]
import sandbox
warnings.simplefilter("ignore")
samples, limits, isolated = json.load(sys.stdin)
if not isolated:
    os.defpath, os.environ[sandbox.CONFIRM] = "/nonexistent", "1"  # no unshare there
assert sandbox.choose_launcher().isolates == isolated
json.dump(sandbox.run_samples(samples, sandbox.Limits(*limits)), sys.stdout)
"""


@pytest.fixture(scope="module", autouse=True)
def temporary(tmp_path_factory):
    """A folder for temporary files in which nothing but these tests leaves any; everybody may write to it."""
    tmp_path_factory.getbasetemp()  # pytest's own, for all tests: made before this folder takes its place
    folder, before = tempfile.mkdtemp(prefix="sandbox-tests-"), tempfile.tempdir
    os.chmod(folder, 0o1777)
    tempfile.tempdir = folder
    yield
    tempfile.tempdir = before
    shutil.rmtree(folder, ignore_errors=True)


def start(who: str, samples: list[tuple[str, str]], limits: Limits = QUICK) -> subprocess.Popen:
    """A process of `who` that runs samples, and writes their outcomes as JSON."""
    tasks, packages, prefix = Path(sandbox.__file__).parent, Path(tqdm.__file__).parents[1], Path(sys.base_prefix)
    python = Path(os.path.realpath(sys.executable))
    command: list[str] = []
    isolated, user = who in ISOLATED, who.startswith("a user")
    if os.geteuid() != 0 and not user:
        pytest.skip("not root")
    if who == "root without CAP_SYS_ADMIN":
        command = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    elif os.geteuid() == 0 and who != "root":
        rights = ["--reuid", "12345", "--regid", "12345", "--clear-groups"] if user else []
        command = ["unshare", "--mount", "sh", "-euc", AS_A_USER, "sh", str(prefix), str(tasks), str(packages)]
        if subprocess.run([*command, "true"], stderr=subprocess.DEVNULL).returncode:
            pytest.skip("root may not mount here")
        command += ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", *rights]
        python, tasks, packages = "/mnt/python" / python.relative_to(prefix.resolve()), "/mnt/tasks", "/mnt/packages"
    process = subprocess.Popen(
        [*command, python, "-c", DRIVER, tasks, packages],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "TMPDIR": tempfile.gettempdir()},
        cwd="/",
    )
    process.stdin.write(json.dumps([samples, list(vars(limits).values()), isolated]))
    process.stdin.close()
    process.stdin = None
    return process


def outcomes(who: str, samples: list[tuple[str, str]], limits: Limits = QUICK) -> list[str]:
    process = start(who, samples, limits)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.fixture
def no_util_linux(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "defpath", str(tmp_path))  # no unshare there
    sandbox._isolation.cache_clear()
    yield
    sandbox._isolation.cache_clear()


def test_right_code_passes_and_wrong_code_says_why():
    assert run_sample(GOOD, TESTS) == "passed"
    assert run_sample("def answer(): return 41", TESTS) == "failed: AssertionError"
    assert run_sample("def answer(: return 42", TESTS).startswith("failed: SyntaxError")
    assert run_sample("import nothing_of_this_name", TESTS).startswith("failed: ModuleNotFoundError")
    assert run_sample("x = '\ud800'", "").startswith("failed: UnicodeEncodeError")
    assert run_sample("raise ValueError('\\ud800' * 10**6)", "").startswith("failed: ValueError: ")


CODE = """
import asyncio, concurrent.futures, dataclasses, decimal, hashlib, heapq, itertools, json, math, multiprocessing, random, re, sqlite3, statistics, sys, tempfile
def answer():
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * 1000)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        numbers = list(pool.map(abs, (-6, -7)))
    asyncio.run(asyncio.sleep(0))
    return math.prod(numbers)
"""
PROCESSES = """
import subprocess, sys
assert subprocess.run([sys.executable, "-c", "print(6)"], capture_output=True).stdout == b"6\\n"
"""


@pytest.mark.parametrize("who", ISOLATED + NOT_ISOLATED)
def test_code_may_use_the_standard_library_files_threads_and_processes(who):
    assert outcomes(who, [(CODE, TESTS)]) == ["passed"]
    (outcome,) = outcomes(who, [(PROCESSES, "")])
    assert outcome.startswith("passed" if who in ISOLATED else "failed: PermissionError")


def test_many_samples_keep_their_order():
    samples = [(f"def answer(): return {value}", TESTS) for value in (42, 1, 42, 2)]
    assert [outcome == "passed" for outcome in run_samples(samples)] == [True, False, True, False]


ATTACKS = {
    "loops": "while True: pass",
    "hangs in C": "sum(range(10**12))",
    "sleeps in C": "import time; time.sleep(1000)",
    "forks": "import os\nwhile True: os.fork()",
    "starts threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "leaves a process behind": "import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(60)\nos._exit(0)",
    "fills memory": "x = bytearray(10**10)",
    "fills memory in steps": "x = []\nwhile True: x.append(bytearray(10**7))",
    "fills a file": "open('x', 'wb').write(b'0' * 10**9)",
    "prints passed": "print('passed', flush=True)",
    "writes passed everywhere": "import os\nfor i in range(64):\n  try: os.write(i, b'passed')\n  except OSError: pass\nos._exit(0)",
    "exits 0": "import os; os._exit(0)",
    "exits 0 when asked": "import sys\ndef answer(): sys.exit(0)",
    "ends at exit": "import atexit, os; atexit.register(os._exit, 0); raise SystemExit(0)",
    "patches assert": "import builtins\nclass Mild(Exception): pass\nbuiltins.AssertionError = Mild\ndef answer(): return 1",
    "patches exec": "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\ndef answer(): return 1",
    "patches the writing": "import os, traceback\nos.write = os.read = traceback.format_exception_only = print\ndef answer(): return 1",
    "catches all": "import sys\nsys.excepthook = lambda *a: None\ndef answer(): raise KeyboardInterrupt",
    "reads what it is not given": "secret = input()",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); raise SystemExit(0)",
    "overflows the stack": "def f(): f()\nf()",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "fills its report": "import os\nfor i in range(64):\n  try: os.set_blocking(i, False); os.write(i, b'failed: ' * 10**6)\n  except OSError: pass\nos._exit(0)",
}


@pytest.mark.parametrize("who", ["a user", "a user, not isolated"])
def test_no_attack_passes_and_the_run_goes_on(who):
    found = outcomes(who, [*((code, TESTS) for code in ATTACKS.values()), (GOOD, TESTS)])
    assert found.pop() == "passed"
    for attack, outcome in zip(ATTACKS, found):
        assert outcome.startswith(("failed: ", "timed out after 2 s", "ended early, exit status ")), attack


OUTSIDE = {
    "reads /etc/passwd": "open('/etc/passwd')",
    "reads its reader's home": f"import os; os.listdir({str(Path.home())!r} + '/.ssh')",
    "reads the project": f"open({str(Path(sandbox.__file__))!r})",
    "reads the environment": "import os; os.environ['PATH']",
    "reads another's environment": "open('/proc/2/environ')",
    "writes to a program": "open('/usr/bin/python3-new', 'w')",
    "writes to the root": "open('/new', 'w')",
    "writes kernel settings": "import os\nif not any(os.access(os.path.join(folder, name), os.W_OK) for folder, _, names in os.walk('/proc/sys') for name in names): raise OSError",
    "writes to the kernel otherwise": "import os\nif not any(os.access(p, os.W_OK) for p in ('/proc/sysrq-trigger', '/proc/irq', '/proc/bus', '/proc/1/oom_score_adj')): raise OSError",
    "is spared when memory is short": "assert open('/proc/self/oom_score_adj').read() != '1000\\n'",
    "has rights": "import re; assert not re.search('CapEff:\\t0+\\n', open('/proc/self/status').read())",
    "may gain rights": "assert 'NoNewPrivs:\\t1' not in open('/proc/self/status').read()",
    "opens a socket": "import socket; socket.create_connection(('127.0.0.1', 9), 2)",
    "sends a datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "talks to the host": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "talks to the kernel": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "mounts": "import ctypes, os\nif ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None): raise OSError('mount')",
    "makes namespaces": f"import ctypes\nif ctypes.CDLL(None).syscall({sandbox.CLONE[COLUMN]}, 0x10000011, 0, 0, 0, 0) < 0: raise OSError",
    "becomes root": "import os; os.setuid(0)",
    "sees processes": "import os\nif len([p for p in os.listdir('/proc') if p.isdigit()]) < 5: raise OSError('few')",
    "kills all": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "fills the disk": "for i in range(99): open(f'/tmp/x{i}', 'wb').write(b'0' * 10**6)",
    "fills the disk with names": "for i in range(9999): open(f'/tmp/{i}', 'w')",
    "keeps messages": "import ctypes\nif ctypes.CDLL(None).mq_open(b'/x', 0o102, 0o600, None) < 0: raise OSError",
}
CLOSED_ALWAYS = [
    name for name in OUTSIDE if "socket" in name or "datagram" in name or "talks" in name or "gain" in name
]
CLOSED_ALWAYS += [
    "reads the environment",
    "has rights",
    "is spared when memory is short",
    "kills all",
    "keeps messages",
]


LIMITS_ITS_PARENT = "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (99, 99))"


@pytest.mark.parametrize("who", ISOLATED)
def test_nothing_outside_is_reached(who):
    found = dict(zip(OUTSIDE, outcomes(who, [(code, "") for code in OUTSIDE.values()])))
    assert {name: outcome for name, outcome in found.items() if not outcome.startswith("failed: ")} == {}


@pytest.mark.parametrize("who", NOT_ISOLATED)
def test_without_isolation_the_network_and_processes_are_closed(who):
    closed = {name: OUTSIDE[name] for name in CLOSED_ALWAYS} | {"limits its parent": LIMITS_ITS_PARENT}
    found = dict(zip(closed, outcomes(who, [(code, "") for code in closed.values()])))
    assert outcomes(who, [("import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))", "")]) == ["passed"]
    assert {name: outcome for name, outcome in found.items() if not outcome.startswith("failed: ")} == {}
    (user,) = outcomes(
        who, [("import os; raise OSError(str(os.getresuid() + os.getresgid() + tuple(os.getgroups())))", "")]
    )
    assert "(0," not in user
    assert ", 0" not in user


@pytest.mark.parametrize("who", ["a user", *NOT_ISOLATED])
def test_calls_that_hold_memory_or_make_namespaces_are_refused(who):
    refused = sandbox.REFUSED | ({} if who in ISOLATED else sandbox.REFUSED_ALONE)
    codes = [
        f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nassert libc.syscall({call[COLUMN]}, -1, -1, -1, -1, -1) == -1 and ctypes.get_errno() == 1"
        for call in refused.values()
        if call[COLUMN] is not None
    ]
    assert set(outcomes(who, [(code, "") for code in codes])) == {"passed"}


HOLD = """
import os
read, write = os.pipe()
for _ in range(20):
    try:
        started = os.fork()
    except OSError:
        break
    if started == 0:
        held = []
        try:
            while True:
                held.append(bytearray(8 << 20))
                os.write(write, b"x")
        except MemoryError:
            os.write(write, b".")
            import time
            time.sleep(60)
said = b""
while said.count(b".") < PROCESSES:
    said += os.read(read, 4096)
raise OSError(said.count(b"x") * 8)
"""


@pytest.mark.parametrize("who", ISOLATED)
def test_all_processes_together_hold_what_the_limits_say(who):
    limits = Limits(seconds=20, memory=128, disk=4, processes=3)
    (outcome,) = outcomes(who, [(HOLD.replace("PROCESSES", "2"), "")], limits)
    held = int(outcome.removeprefix("failed: OSError: "))
    assert 0 < held < limits.memory * limits.processes


DEEP = "import os\nfor _ in range(1500):\n  os.mkdir('xxx'); os.chdir('xxx')\nos.chmod('.', 0)"


@pytest.mark.parametrize("who", [*ISOLATED, *NOT_ISOLATED])
def test_folders_without_end_end_the_sample_alone(who):
    before = set(Path(tempfile.gettempdir()).glob("sample-*"))
    assert outcomes(who, [(DEEP, ""), (GOOD, TESTS)], Limits())[1] == "passed"
    assert set(Path(tempfile.gettempdir()).glob("sample-*")) <= before


def commands_of(name: str) -> set[str]:
    """The processes that are called so."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text().strip() == name:
                found.add(path.parent.name)
    return found


def wait_for(condition) -> bool:
    for _ in range(300):
        if condition():
            return True
        time.sleep(0.1)
    return False


NAMED = "import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'NAME', 0, 0, 0)\n"
DAEMON = "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(600)\n"


@pytest.mark.parametrize(
    ("who", "end"), [*((who, signal.SIGKILL) for who in ISOLATED + NOT_ISOLATED), ("a user", signal.SIGTERM)]
)
def test_samples_and_their_daemons_end_with_their_evaluator(who, end):
    name = f"s{os.getpid()}.{end.value}.{(ISOLATED + NOT_ISOLATED).index(who)}"
    code = NAMED.replace("NAME", name) + (DAEMON if who in ISOLATED else "") + "time.sleep(600)"
    folders = set(Path(tempfile.gettempdir()).glob("sample-*"))
    with start(who, [(code, "")], Limits(seconds=600)) as process:
        started = wait_for(lambda: len(commands_of(name)) >= (3 if who in ISOLATED else 1))
        users = {os.stat(f"/proc/{number}").st_uid for number in commands_of(name)}
        process.send_signal(end)
    assert started
    assert 0 not in users
    assert wait_for(lambda: not commands_of(name)), "a sample lives on"
    for folder in set(Path(tempfile.gettempdir()).glob("sample-*")) - folders:
        shutil.rmtree(folder)  # what only the evaluator could remove


@pytest.mark.parametrize("who", ISOLATED)
def test_what_a_sample_started_ends_with_it(who):
    name = f"d{os.getpid()}.{ISOLATED.index(who)}"
    assert outcomes(who, [(NAMED.replace("NAME", name) + DAEMON, "")]) == ["passed"]
    assert wait_for(lambda: not commands_of(name)), "a process lives on"


def test_without_namespaces_nothing_runs_unless_that_is_confirmed(no_util_linux, monkeypatch):
    monkeypatch.delenv(CONFIRM, raising=False)
    with pytest.raises(SandboxError, match=r"setpriv: No such file or directory.*--confirm-no-isolation") as raised:
        run_sample(GOOD, TESTS)
    assert "\n" not in str(raised.value)


def test_the_failing_command_is_quoted(no_util_linux, monkeypatch, tmp_path):
    fake = tmp_path / "setpriv"
    fake.write_text("#!/bin/sh\necho 'unshare: write failed /proc/self/uid_map: not today' >&2\nexit 1\n")
    fake.chmod(0o755)
    if os.geteuid() == 0:
        for folder in (tmp_path, *tmp_path.parents[:2]):  # nobody starts it, too
            folder.chmod(0o711)
    monkeypatch.delenv(CONFIRM, raising=False)
    with pytest.raises(SandboxError, match="unshare: write failed /proc/self/uid_map: not today"):
        run_sample(GOOD, TESTS)


def test_root_whose_python_nobody_can_start_runs_nothing_without_isolation(no_util_linux, monkeypatch, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("not root")
    python = tmp_path / "python"
    shutil.copy(os.path.realpath(sys.executable), python)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv(CONFIRM, "1")
    with pytest.raises(SandboxError, match=r"as nobody, \S+/python: Permission denied"):
        run_sample(GOOD, TESTS)


def test_leaves_no_files_and_no_pipes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.listdir("/proc/self/fd")
    run_sample("open('left', 'w').write('x')", "")
    run_sample("while True: pass", "", Limits(seconds=1))
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == before


def test_the_harness_loads_it_without_this_project(tmp_path):
    """`lm_eval --include_path eval/tasks` finds functions by file: nothing of the project may be imported."""
    code = (
        "import importlib.util as u, sys\n"
        f"spec = u.spec_from_file_location('x', {sandbox.__file__!r}); m = u.module_from_spec(spec); spec.loader.exec_module(m)\n"
        "assert m.run_sample('x = 1', 'assert x == 1') == 'passed' and 'eval' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
