# SPDX-License-Identifier: Apache-2.0
"""Makes the packages once and installs each, also with the lines of the pages. LOSSD_BUILD: the build folder. Needs PyPI, for the tools that
make wheels and for what the client depends on."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))

from plan import all_commands, without_comment  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
OS = platform.freedesktop_os_release()
DISTRIBUTION = OS["ID"] + OS.get("VERSION_ID", "")
# What every system has: the C library, the loader, and the C++ runtime (scripts/bundle says why that is not brought).
FROM_HOST = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libresolv.so.2", "libutil.so.1", "libstdc++.so.6",
             "libgcc_s.so.1"}


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packages")
    run(ROOT / "scripts/packages", os.environ["LOSSD_BUILD"], out)
    return out


@pytest.fixture(scope="module")
def installed(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with both wheels; what they depend on is the system's."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--system-site-packages", folder)
    run(folder / "bin/pip", "install", "--no-index", "--no-deps", *sorted(packages.glob("*.whl")))
    return folder


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, (pattern, sorted(folder.iterdir()))
    return found[0]


def dynamic(program: Path) -> tuple[list[str], list[str]]:
    """Libraries that a program needs, and the folders of its RPATH."""
    text = run("readelf", "--dynamic", program)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text)
    return needed, [folder for path in paths for folder in path.split(":")]


def test_every_package_has_the_version(packages: Path) -> None:
    names = {path.name for path in packages.iterdir()}
    assert {f"lossd-{VERSION}-py3-none-any.whl", f"lossd-{VERSION}.tar.gz", "SHA256SUMS"} <= names
    assert re.fullmatch(rf"lossd_server-{re.escape(VERSION)}-py3-none-manylinux_2_\d+_\w+\.whl",
                        only(packages, "lossd_server-*.whl").name)
    assert only(packages, "*.deb").name.startswith(f"lossd_{VERSION}-1{DISTRIBUTION}_")
    assert len(names) == 5
    assert f"\nARG LOSSD_VERSION={VERSION}\n" in (ROOT / "Dockerfile").read_text()


def test_checksums(packages: Path) -> None:
    lines = (packages / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert sums.keys() == {path.name for path in packages.iterdir()} - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((packages / name).read_bytes()).hexdigest() == digest


def test_the_wheel_of_the_programs_has_all_libraries(installed: Path) -> None:
    folder = only(installed, "lib/python3*/site-packages/lossd_server")
    brought = {path.name for path in (folder / "lib").iterdir()}
    for program in (folder / "bin").iterdir():
        needed, path = dynamic(program)
        assert set(needed) - brought <= FROM_HOST | {name for name in needed if name.startswith("ld-linux")}, program
        assert path[0] == "$ORIGIN/../lib"
        # An empty element would be the folder that the program is started in.
        assert all(element.startswith("$ORIGIN/") for element in path), path
        for line in run("ldd", program, env={}).splitlines():
            assert "not found" not in line
            name = line.split()[0]
            if name in brought:
                assert str(folder) in line, line
    for library in (folder / "lib").iterdir():
        needed, _ = dynamic(library)
        assert set(needed) - brought <= FROM_HOST | {name for name in needed if name.startswith("ld-linux")}, library
    assert not brought & FROM_HOST


def test_the_wheel_of_the_programs_is_for_older_systems_too(installed: Path, packages: Path) -> None:
    """Its name says the oldest C library that all of its files run with, and Ubuntu 22.04's is among them where Debian 12 made it."""
    folder = only(installed, "lib/python3*/site-packages/lossd_server")
    needed = max(tuple(int(number) for number in version.split("."))
                 for file in [*(folder / "bin").iterdir(), *(folder / "lib").iterdir()]
                 for version in re.findall(r"\(GLIBC_([\d.]+)\)", run("objdump", "-T", file)))
    tag = re.search(r"manylinux_(\d+)_(\d+)_", only(packages, "lossd_server-*.whl").name)
    assert tag is not None and (int(tag[1]), int(tag[2])) >= needed
    if DISTRIBUTION == "debian12":
        assert (int(tag[1]), int(tag[2])) == (2, 35)


def lines_to_install(page: str) -> list[str]:
    """From the making of a virtual environment on; all are of Python's, and none needs root."""
    lines = [without_comment(command.text) for command in all_commands() if command.page == page]
    begin = lines.index("python3 -m venv venv && . venv/bin/activate")
    return [line for line in lines[begin:] if line.split()[0] in ("python3", "pip", "python") and "./client/python" not in line]


# A page, and the folder of the packages as seen from where its lines are run.
@pytest.mark.parametrize(("page", "folder"), [("README.md", "dist/packages"), ("docs/operations.md", "dist/packages"),
                                              ("deploy/wheel/README.md", ".")])
def test_the_lines_of_the_pages_install(page: str, folder: str, packages: Path, tmp_path: Path) -> None:
    """In one shell, as they stand, but that extras do not bring cuBLAS and that training is short."""
    for package in packages.iterdir():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / package.name).symlink_to(package)
    lines = lines_to_install(page)
    assert lines[-1] == "python -m lossd.quickstart" and any(line.startswith("pip install ") for line in lines)
    lines = [line.replace("pip install", "pip install --no-deps") if "[cuda" in line else line for line in lines]
    lines[-1] += " --steps=120 --seconds=600"
    # Without what makes pip and python there: the system's python3 alone.
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    told = run("bash", "-euc", "\n".join([*lines, "lossd --version", "lossctl --version"]), cwd=tmp_path,
               env={**kept, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert "the model has learnt: yes" in told
    assert told.split()[-1] == VERSION


@pytest.mark.parametrize(("limit", "status"), [("3600", 0), ("0", 1)])
def test_the_packages_can_be_tried(limit: str, status: int, packages: Path) -> None:
    """scripts/try-packages, which scripts/check-fresh runs on a bare system, has a time limit that counts."""
    done = subprocess.run([ROOT / "scripts/try-packages", "--seconds", limit, packages, "--steps=120", "--seconds=600"], capture_output=True,
                          text=True, check=False)
    assert done.returncode == status, done
    assert "the model has learnt: yes" in done.stdout and f"lossd {VERSION}, lossctl {VERSION}: installed in" in done.stdout
    assert ("are more than 0 s" in done.stderr) == (status == 1)


def test_no_packages_are_said(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "scripts/try-packages", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"there are 0 wheels in {tmp_path}" in done.stderr


def test_the_client_is_installed_from_its_sources(tmp_path: Path) -> None:
    """`pip install ./client/python` of README.md, with what builds it and what it needs from PyPI. From a copy: it leaves files behind."""
    for name in ("client/python", "client/library", "server/app", "proto"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    shutil.copy(ROOT / "VERSION", tmp_path)
    run("bash", "-euc", "python3 -m venv venv && . venv/bin/activate && pip install --quiet ./client/python && "
        "python -c 'import lossd, lossd.v1.loss_pb2; print(lossd.__version__)' | grep -Fx " + VERSION, cwd=tmp_path,
        env={**{name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}, "PATH": "/usr/bin:/bin"})


def test_the_extras_bring_the_libraries_of_nvidia(installed: Path) -> None:
    told = run(installed / "bin/python", "-c", "from importlib import metadata; print(*metadata.requires('lossd-server'), sep='\\n')")
    wanted = {(extra, re.split(r"[<>=;, ]", line)[0]) for line in told.splitlines() for extra in re.findall(r'extra == "(.*?)"', line.replace("'", '"'))}
    assert wanted == {("cuda", "nvidia-cublas"), ("cuda-devices", "nvidia-cublas"), ("cuda-devices", "nvidia-nccl-cu13")}


def test_programs_run_as_themselves(installed: Path, tmp_path: Path) -> None:
    for name in ("lossd", "lossctl"):
        assert run(installed / "bin" / name, "--version", cwd=tmp_path, env={}).split()[-1] == VERSION
    refused = subprocess.run([installed / "bin/lossd", "--no_such_flag"], capture_output=True)
    assert refused.returncode == 2 and b"no_such_flag" in refused.stderr
    assert run(installed / "bin/python", "-c", "import lossd, lossd_server; print(lossd.__version__, lossd_server.__version__)"
               ).split() == [VERSION, VERSION]


def test_the_quickstart_learns(installed: Path, tmp_path: Path) -> None:
    told = run(installed / "bin/python", "-m", "lossd.quickstart", "--steps=120", "--seconds=600", cwd=tmp_path)
    assert "started a server in this process" in told
    found = run(installed / "bin/python", "-c", "from lossd import _native; print(_native._library_path())").strip()
    assert Path(found).resolve().is_relative_to(installed.resolve()) and Path(found).name == "liblossd.so"
    assert "the model has learnt: yes" in told
    assert "█" in told and "120 steps" in told


def test_the_source_distribution_makes_the_same_wheel(packages: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv")
    run(tmp_path / "venv/bin/pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path,
        only(packages, "lossd-*.tar.gz"))
    made, given = only(tmp_path, "*.whl"), only(packages, "lossd-*.whl")
    contents = [{name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name} for wheel in (made, given)]
    assert contents[0] == contents[1]
    assert {"lossd/v1/loss_pb2.py", "lossd/v1/loss_pb2.pyi", "lossd/quickstart/__main__.py", "lossd/py.typed"} <= contents[0]


def test_the_debian_package(packages: Path, tmp_path: Path) -> None:
    package = only(packages, "*.deb")
    run("dpkg-deb", "--extract", package, tmp_path)
    assert (tmp_path / "usr/lib/lossd/liblossd.so").is_file() and (tmp_path / "usr/include/lossd.h").is_file()
    for name in ("lossd", "lossctl"):
        program = tmp_path / "usr/bin" / name
        assert run(program, "--version", env={}).split()[-1] == VERSION
        assert "" not in dynamic(program)[1]
    assert run("dpkg-deb", "--field", package, "Version").strip() == f"{VERSION}-1{DISTRIBUTION}"
    depends = run("dpkg-deb", "--field", package, "Depends")
    for library in ("libgrpc++", "libprotobuf", "libmicrohttpd", "libopenblas", "libc6"):
        assert library in depends, depends
    unit = (tmp_path / "usr/lib/systemd/system/lossd.service").read_text()
    assert "/usr/local" not in unit
    start = re.search(r"^ExecStart=(\S+) --flagfile=(\S+)$", unit, re.MULTILINE)
    assert start is not None
    for path in start.groups():
        assert (tmp_path / path.lstrip("/")).is_file(), path
    assert "Type=notify" in unit.splitlines() and re.search(r"^WatchdogSec=\d+$", unit, re.MULTILINE)
    documentation = re.search(r"^Documentation=file:(\S+)$", unit, re.MULTILINE)
    assert documentation is not None and (tmp_path / documentation[1].lstrip("/")).is_file()
    run("dpkg-deb", "--control", package, tmp_path / "control")
    assert (tmp_path / "control/conffiles").read_text() == "/etc/lossd/lossd.flags\n"
    assert not list(tmp_path.glob("usr/local/**/*"))


def dpkg(root: Path, *words: str | Path, path: str | None = None) -> None:
    """dpkg in a folder of its own, so that nothing of this machine changes. Scripts of packages run, and are told where by DPKG_ROOT."""
    for folder in ("info", "updates", "triggers"):
        (root / "var/lib/dpkg" / folder).mkdir(parents=True, exist_ok=True)
    (root / "var/lib/dpkg/status").touch()
    run("dpkg", f"--root={root}", "--force-not-root", "--force-script-chrootless", "--force-depends", f"--log={root}/var/log", *words,
        env={"PATH": ":".join(filter(None, (path, "/usr/sbin:/usr/bin:/sbin:/bin")))})


def test_the_debian_package_comes_and_goes(packages: Path, tmp_path: Path) -> None:
    """Installed, upgraded, removed and purged; scripts/check-fresh does so with apt on a bare system."""
    package, root = only(packages, "*.deb"), tmp_path / "root"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(f"#!/bin/sh\necho $* >>{tmp_path}/told\n")
    (tmp_path / "bin/systemctl").chmod(0o755)
    dpkg(root, "--install", package, path=str(tmp_path / "bin"))
    flags = root / "etc/lossd/lossd.flags"
    assert run(root / "usr/bin/lossd", f"--flagfile={flags}", "--version").split()[-1] == VERSION
    assert run(root / "usr/bin/lossctl", "--version").split()[-1] == VERSION
    flags.write_text("--keep_checkpoints=7\n")
    dpkg(root, "--install", package, path=str(tmp_path / "bin"))
    assert flags.read_text() == "--keep_checkpoints=7\n"  # the operator's
    dpkg(root, "--remove", "lossd", path=str(tmp_path / "bin"))
    assert not (root / "usr/bin/lossd").exists() and flags.exists()
    dpkg(root, "--purge", "lossd", path=str(tmp_path / "bin"))
    assert [path for path in root.rglob("*") if not path.is_dir() and "var" not in path.relative_to(root).parts] == []
    assert not (tmp_path / "told").exists()  # systemd of this machine is not that of the folder


@pytest.mark.parametrize(("script", "word", "told"), [
    ("postinst", "configure", "daemon-reload\n"), ("postinst", "abort-remove", ""), ("prerm", "remove", "disable --now lossd.service\n"),
    ("prerm", "upgrade", ""), ("postrm", "remove", "daemon-reload\n"), ("postrm", "purge", "")])
def test_systemd_is_told(script: str, word: str, told: str, packages: Path, tmp_path: Path) -> None:
    """An upgrade leaves the server running; a removal stops it for good."""
    run("dpkg-deb", "--control", only(packages, "*.deb"), tmp_path / "control")
    text = (tmp_path / "control" / script).read_text()
    assert "/run/systemd/system" in text
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(f"#!/bin/sh\necho $* >>{tmp_path}/told\nexit 1\n")
    (tmp_path / "bin/systemctl").chmod(0o755)
    (tmp_path / "told").touch()
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    run("sh", "-c", text.replace("/run/systemd/system", str(tmp_path)), script, word, env={"PATH": path})  # where systemd runs
    assert (tmp_path / "told").read_text() == told
    run("sh", "-c", text.replace("/run/systemd/system", "/no/systemd"), script, word, env={"PATH": path})
    assert (tmp_path / "told").read_text() == told


def test_apt_finds_what_the_debian_package_needs(packages: Path) -> None:
    """Libraries by the names of this distribution; those of the build are installed here."""
    told = run("apt-get", "--simulate", "--no-install-recommends", "install", only(packages, "*.deb"))
    assert re.search(rf"^Inst lossd \({re.escape(VERSION)}-1{DISTRIBUTION} ", told, re.MULTILINE), told


def test_lintian_has_nothing_to_say(packages: Path) -> None:
    told = run("lintian", "--fail-on=error", only(packages, "*.deb"))
    if DISTRIBUTION == "debian12":  # other versions know other warnings
        assert told == ""


LOADER = r"""
#include <dlfcn.h>
#include <stdio.h>
/* Loaded into lossd, so that the search is that of lossd's own dlopen: by the RPATH of the program. */
__attribute__((constructor)) static void load(void) {
  const char* const names[] = {"libcublasLt.so.13", "libnccl.so.2"};
  for (int i = 0; i < 2; ++i) {
    void* const file = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    const char* (*where)(void) = file ? (const char* (*)(void))dlsym(file, "where") : NULL;
    fprintf(stderr, "%s: %s\n", names[i], where ? where() : "not the stub");
  }
}
"""


def test_the_programs_find_the_libraries_of_nvidia(installed: Path, tmp_path: Path) -> None:
    """Where the wheels nvidia-cublas and nvidia-nccl-cu13 put theirs, stubs lie; no variable of the environment names a folder."""
    packages = only(installed, "lib/python3*/site-packages")
    nvidia = packages / "nvidia"
    assert not nvidia.exists()
    (tmp_path / "loader.c").write_text(LOADER)
    run("cc", "-shared", "-fPIC", "-o", tmp_path / "loader.so", tmp_path / "loader.c")
    try:
        for name in ("cu13/lib/libcublasLt.so.13", "nccl/lib/libnccl.so.2"):
            (nvidia / name).parent.mkdir(parents=True)
            (tmp_path / "stub.c").write_text(f'const char* where(void) {{ return "{name}"; }}\n')
            run("cc", "-shared", "-fPIC", "-o", nvidia / name, tmp_path / "stub.c")
        done = subprocess.run([packages / "lossd_server/bin/lossd", "--version"], capture_output=True, text=True, check=False, cwd=tmp_path,
                              env={"LD_PRELOAD": str(tmp_path / "loader.so"), "LD_DEBUG": "libs"})
    finally:
        shutil.rmtree(nvidia)
    assert done.stdout.split()[-1] == VERSION
    assert "libcublasLt.so.13: cu13/lib/libcublasLt.so.13\n" in done.stderr, done.stderr
    assert "libnccl.so.2: nccl/lib/libnccl.so.2\n" in done.stderr, done.stderr
    # Searched for before the system's, which a host may have in another version.
    tried = re.findall(r"trying file=(\S*/libcublasLt\.so\.13)", done.stderr)
    assert tried and all(Path(path).resolve().is_relative_to(packages.resolve()) for path in tried), tried
