# ruff: noqa: E501, an attack is a line
"""Generated code runs, is judged by its tests alone, and harms nothing."""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from eval.tasks import sandbox
from eval.tasks.sandbox import Limits, run_sample, run_samples


QUICK = Limits(seconds=3, memory=512, disk=4, processes=8)
TESTS = "assert answer() == 42"
GOOD = "def answer(): return 42"


@pytest.fixture(params=["as root", "as a user"])
def isolated(request, monkeypatch):
    """Namespaces, made with root's rights where there are any, and in a user namespace of one's own."""
    if request.param == "as a user":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    elif os.geteuid() != 0:
        pytest.skip("not root")
    sandbox._isolation.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        command = sandbox._isolation()
    if command[0] != "unshare":
        pytest.skip("this kernel allows no new namespaces")
    yield
    sandbox._isolation.cache_clear()


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


def test_code_may_use_the_standard_library_files_and_processes():
    code = """
import dataclasses, decimal, hashlib, heapq, itertools, json, math, multiprocessing, random, re, sqlite3, statistics, subprocess, sys, tempfile
def answer():
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * 1000)
    assert subprocess.run([sys.executable, "-c", "print(6)"], capture_output=True).stdout == b"6\\n"
    return math.prod([6, 7])
"""
    assert run_sample(code, TESTS) == "passed"


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
    "fills a file": "open('/tmp/x', 'wb').write(b'0' * 10**9)",
    "fills the disk": "for i in range(99): open(f'/tmp/x{i}', 'wb').write(b'0' * 10**6)",
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
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_passes_and_the_run_goes_on(attack):
    start = time.monotonic()
    outcome = run_sample(ATTACKS[attack], TESTS, QUICK)
    assert outcome != "passed"
    assert outcome.startswith(("failed: ", "timed out after 3 s", "ended early, exit status "))
    assert time.monotonic() - start < 30
    assert run_sample(GOOD, TESTS) == "passed"


OUTSIDE = {
    "reads /etc/passwd": "open('/etc/passwd')",
    "reads its reader's home": f"import os; os.listdir({str(Path.home())!r} + '/.ssh')",
    "reads the project": f"open({str(Path(sandbox.__file__))!r})",
    "reads the environment": "import os; os.environ['PATH']",
    "reads another's environment": "open('/proc/2/environ')",
    "writes to a program": "open('/usr/bin/python3-new', 'w')",
    "writes to the root": "open('/new', 'w')",
    "opens a socket": "import socket; socket.create_connection(('127.0.0.1', 9), 2)",
    "sends a datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "mounts": "import ctypes, os\nif ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None): raise OSError('mount')",
    "becomes root": "import os; os.setuid(0)",
    "sees processes": "import os\nif len([p for p in os.listdir('/proc') if p.isdigit()]) < 5: raise OSError('few')",
    "kills all": "import os, signal; os.kill(-1, signal.SIGKILL)",
}


@pytest.mark.parametrize("attempt", OUTSIDE)
def test_nothing_outside_is_reached(attempt, isolated):
    outcome = run_sample(OUTSIDE[attempt], "", QUICK)
    assert outcome.startswith("failed: "), outcome


def test_what_a_sample_started_ends_with_it(isolated):
    marker = f"{os.getpid()}.25"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60 + {marker})'], start_new_session=True)"
    assert run_sample(code, "") == "passed"
    for _ in range(50):
        processes = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _readable(path)]
        if not any(marker.encode() in line for line in processes):
            return
        time.sleep(0.1)
    pytest.fail("a process lives on")


def _readable(path):
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def test_without_namespaces_there_is_a_warning_and_there_are_limits(no_util_linux):
    with pytest.warns(UserWarning, match="allows no new namespaces"):
        assert run_sample(GOOD, TESTS) == "passed"
    for attack in (
        "loops",
        "fills memory",
        "fills a file",
        "exits 0",
        "prints passed",
        "kills its parent",
        "patches exec",
    ):
        assert run_sample(ATTACKS[attack].replace("/tmp/x", "x"), TESTS, QUICK) != "passed", attack
    assert run_sample("import os; os.environ['HOME']", "").startswith("failed: KeyError")


@pytest.mark.parametrize("util_linux", [True, False])
def test_leaves_no_files_and_no_pipes(util_linux, tmp_path, monkeypatch, request):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if not util_linux:
        request.getfixturevalue("no_util_linux")
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
