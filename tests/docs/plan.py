# SPDX-License-Identifier: Apache-2.0
"""The commands that the pages tell people to run, as they stand there, and how each is tested."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


# The commands.

ROOT = Path(__file__).resolve().parents[2]
# Records of the past, and what nobody reads to run something.
LEFT_OUT = re.compile(r"docs/lab/|bench/results/|tests/|CHANGELOG\.md|docs/math\.md|\.github/")
PROGRAMS = {"make", "lossd", "lossctl", "pip", "python", "python3", "apt", "apt-get", "systemctl", "systemd-analyze", "cmake", "ctest",
            "source", "curl", "kubectl", "docker", "podman", "buildah", "helm", "sbatch", "srun", "torchrun", "git", "promtool", "export",
            "printf", "openssl", "journalctl", "mkdir", "cp"}


@dataclass
class Command:
    page: str  # from the root of the repository
    line: int
    text: str  # with its comment
    said: list[str] = field(default_factory=list)  # what the page shows below it, for a line that begins with "$ "

    @property
    def key(self) -> tuple[str, str]:
        """Page and command without the comment."""
        return self.page, without_comment(self.text)


def without_comment(text: str) -> str:
    return re.sub(r"\s+#(\s.*)?$", "", text).strip()


def is_command(line: str) -> bool:
    """Whether a line of an indented block is one: it begins with a program, after settings of variables."""
    words = line.split()
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words = words[1:]
    return bool(words) and (words[0] in PROGRAMS or re.match(r"^(scripts|build|bench|\.ci|\./[a-z])", words[0]) is not None)


def pages() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:  # an archive without its history
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md") if "build" not in path.parts and "dist" not in path.parts]
    return sorted(page for page in listed if not LEFT_OUT.match(page))


def commands_of(page: str, text: str) -> list[Command]:
    """Lines of blocks fenced as sh, bash or console; lines that begin with "$ " in other fenced blocks; and lines of indented blocks
    that begin with a program. Lines that end with a backslash are joined with the next."""
    found: list[Command] = []
    fence: str | None = None
    block: list[tuple[int, str]] = []
    previous = ""
    indented = False
    for number, line in enumerate(text.split("\n"), 1):
        opened = re.match(r"^\s*```(\w*)", line)
        if opened:
            if fence is None:
                fence, block = opened[1], []
            else:
                found += _of_fence(page, fence, block)
                fence = None
        elif fence is not None:
            block.append((number, line))
        else:
            indented = line.startswith("    ") and (indented or not previous.strip())
            if indented and is_command(line):
                found.append(Command(page, number, line.strip()))
        previous = line
    return found


def _of_fence(page: str, language: str, block: list[tuple[int, str]]) -> list[Command]:
    found: list[Command] = []
    transcript = any(line.startswith("$ ") for _, line in block)
    going_on = False
    for number, line in block:
        if transcript:
            if line.startswith("$ "):
                found.append(Command(page, number, line[2:].strip()))
            elif found:
                found[-1].said.append(line.rstrip())
        elif language in ("sh", "bash", "shell", "console") and line.strip() and not line.lstrip().startswith("#"):
            if going_on:
                found[-1].text += "\n" + line
            else:
                found.append(Command(page, number, line.rstrip()))
            going_on = line.endswith("\\")
    for command in found:
        while command.said and not command.said[-1]:
            command.said.pop()
    return found


def all_commands() -> list[Command]:
    return [command for page in pages() for command in commands_of(page, (ROOT / page).read_text())]


def shape(text: str) -> list[str]:
    """What stays the same from run to run of what a program has printed: numbers, identifiers, times and sizes become signs."""
    shaped = []
    for line in text.rstrip("\n").split("\n"):
        line = re.sub(r"\b[0-9a-f]{16}\b", "ID", line)
        line = re.sub(r"-?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", line)
        line = re.sub(r"# (ns|µs|ms|s)\b", "# TIME", line)
        line = re.sub(r"# ([KMGT]i)?B\b", "# SIZE", line)
        line = re.sub(r"\b(avx512|avx2|baseline)\b", "LOOPS", line)
        shaped.append(" ".join(line.split()))
    return shaped


# How each command of the pages is tested. A command that is not here fails the test, and so does an entry without a command.
#
# Commands of a page that are to `run` are run in the order of the page, by a shell in a folder of their own, with a server of their own
# at the address that LOSSD_SERVER names. What cannot be run within a test names the test or the step of CI that runs it, or says why
# none can.


@dataclass(frozen=True)
class Run:
    """Run here. `instead`: replacements in the text, such as smaller shapes; `says`: a pattern in what it prints."""

    instead: tuple[tuple[str, str], ...] = ()
    says: str = ""
    fails: int = 0  # exit status


@dataclass(frozen=True)
class Serve:
    """A server: it is started with the page's flags, says that it serves, and ends."""

    instead: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RunBy:
    """This test of ctest runs it, as it stands but for folders, versions and how long it trains."""

    name: str


@dataclass(frozen=True)
class Step:
    """This step of .ci/run runs it."""

    name: str


@dataclass(frozen=True)
class Known:
    """It takes too long or needs what a test has not: `make` knows the target, cmake the preset, and the files are there. Why."""

    why: str


SMALL = (("4096", "64"), ("128256", "512"), ("2304", "48"), ("256000", "500"))
# A file of contexts of the test's own, and its server for both.
CONTEXTS = (("lossctl ", 'env -u LOSSD_SERVER LOSSD_CONFIG="$PWD/contexts.json" lossctl '), ("gpu-7:7070", "$LOSSD_SERVER"),
            ("gpu-9:7070", "$LOSSD_SERVER"), (" --ca ca.pem", ""), (" --cert me.pem --key me.key", ""),
            ("~/.config/lossd/shared.token", "$(umask 77 && echo 0123456789abcdef > token && echo token)"))
BY_HAND = Known("takes minutes to hours; run by hand")
GPU = Known("needs a GPU")
CUBLAS = Known("half a gigabyte of cuBLAS; packages_test runs it without dependencies, and looks at what the extra asks for")

# (page, command without its comment, as a pattern of the whole): how.
PLAN: list[tuple[str, str, Run | Serve | RunBy | Step | Known]] = [
    (r"README\.md|docs/demo\.md", r"make demo.*", Known("under five minutes; scripts/check-fresh runs it")),
    (r"README\.md|CONTRIBUTING\.md", r"make (test|build)", Step("test")),
    (r"README\.md|CONTRIBUTING\.md", r"make packages", RunBy("packages_test")),
    (r"README\.md|docs/operations\.md|docs/python\.md", r"python3 -m venv venv && \. venv/bin/activate|pip install dist/packages/\*\.whl",
     RunBy("packages_test")),
    (r"README\.md|docs/operations\.md|deploy/wheel/README\.md", r"python -m lossd\.quickstart", RunBy("packages_test")),
    (r"CONTRIBUTING\.md", r"make test-nightly", Step("nightly")),
    (r"CONTRIBUTING\.md", r"make test-cuda", Step("cuda")),
    (r"CONTRIBUTING\.md", r"make test-sanitized", Step("sanitizers")),
    (r"CONTRIBUTING\.md", r"make fuzz", Step("fuzz")),
    (r"CONTRIBUTING\.md", r"make (test-all|test-integrations|test-threads|test-sanitizers|mutants|soak|lint|format|bench|figures|bundle).*", BY_HAND),
    (r"CONTRIBUTING\.md", r"make docs", RunBy("docs_site_test")),
    (r"CONTRIBUTING\.md", r"cmake .*|ctest .*|build/cpu-only/bin/ngram_lm_tests .*", Step("test")),
    (r"CONTRIBUTING\.md", r"LOSSD_SIMULATION_.*build/cpu-only/bin/simulation_tests", Known("minutes, and a seed that has failed")),
    (r"CONTRIBUTING\.md", r"LOSSD_BINARY=.* -m pytest tests/client/python", RunBy("python_client_test")),
    (r"CONTRIBUTING\.md", r"build/fuzz/bin/manifest_fuzzer.*", Known("needs an input that has failed")),
    (r"docs/lossctl\.md", r"source <\(lossctl completion bash\)", Run()),
    (r"docs/lossctl\.md", r"lossctl completion fish \| source", Run(instead=(("| source", "| grep -q complete"),))),
    (r"docs/lossctl\.md", r"lossctl (context (add|list|use) .*|context list|--context shared heads)", Run(instead=CONTEXTS)),
    (r"docs/lossctl\.md", r"lossctl context show", Run(instead=CONTEXTS, says=r"context +shared\n")),
    (r"docs/lossctl\.md", r"lossctl (health|create|grad-norm|step|save|heads).*|lossctl loss lm_head --random 4096.*", Run()),
    (r"docs/lossctl\.md", r"lossctl loss lm_head --random 10 --softcap -1", Run(fails=4)),
    (r"docs/lossctl\.md", r"lossctl -o json .* \| jq .*", RunBy("cli_lossctl_server_test")),  # the documents; jq is not everywhere
    (r"docs/operations\.md", r"lossd", Serve()),
    (r"docs/operations\.md", r"lossd --flagfile=/etc/lossd/lossd\.flags", Serve(instead=(("/etc/lossd/lossd.flags", "ROOT/deploy/lossd.flags"),))),
    (r"docs/operations\.md", r"pip install dist/packages/lossd-.*\[cuda\]\"", CUBLAS),
    (r"docs/operations\.md", r"make install PREFIX=/usr/local",
     Run(instead=(("make install PREFIX=/usr/local", 'cmake --install "$LOSSD_BUILD" --prefix here && here/bin/lossd --version'),), says="lossd")),
    (r"docs/operations\.md", r"apt install \./dist/packages/lossd_\*\.deb",
     Known("needs root; packages_test has apt resolve it and dpkg install and purge it in a folder, scripts/check-fresh has apt do both")),
    (r"docs/operations\.md", r"systemctl enable --now lossd", Known("needs systemd")),
    (r"docs/watching\.md", r"lossctl trace --seconds 2 > trace\.json", RunBy("cli_lossctl_server_test")),
    (r"docs/operations\.md", r"lossctl (save|checkpoints|load) lm_head.*", Run(instead=(("step-0000001000", "step-0000000000"),))),
    (r"docs/operations\.md", r"lossctl checkpoints rm lm_head.*",
     Run(instead=(("checkpoints rm", "checkpoints rm --yes"), ("step-0000000500 lm_head/mine", "step-0000000000")))),
    (r"docs/operations\.md", r"lossctl heads \| sed .*", Run(says=r"(saved \S+ .*\n){3}")),
    (r"docs/operations\.md", r"lossctl create (lm_head|tied) .*", Run(instead=(*SMALL, ("create lm_head", "create llama")))),
    (r"docs/operations\.md", r"docker .*", Known("needs Docker; scripts/check-image runs the steps of the image by hand")),
    (r"deploy/kubernetes/README\.md", r"docker .*", Known("needs Docker and a registry; scripts/check-image runs the steps of the image by hand")),
    (r"deploy/kubernetes/README\.md", r"kubectl apply .*",
     Known("needs a cluster; manifests_test renders what it applies and compares it with the schemas of Kubernetes")),
    (r"deploy/kubernetes/README\.md", r"(?s)kubectl port-forward .*|export LOSSD_SERVER=.*|lossctl heads", Known("needs a cluster")),
    (r"deploy/kubernetes/README\.md", r"kubectl create secret .*",
     Known("needs a cluster; manifests_test compares the files with those that the pods and the ServiceMonitor ask for")),
    (r"docs/mps\.md", r"lossctl server", Run()),
    (r"docs/mps\.md", r"(?s)(export|mkdir|echo|nvidia-cuda-mps-control) ?.*", GPU),
    (r"docs/plan\.md", r"(?s).*", RunBy("docs_plan_test")),
    (r"docs/training/colocated\.md", r"lossctl plan .*", Run(says=r"colocated, exact .* --shares [0-9,]+\n")),
    (r"docs/training/colocated\.md", r"lossd --devices=.*", GPU),
    (r"docs/training/colocated\.md", r"lossd --backend=cpu --cpu_devices=2 .*", Serve()),
    (r"docs/training/colocated\.md", r"sbatch deploy/slurm-colocated\.sbatch .*", RunBy("slurm_colocated_test")),
    (r"docs/training/colocated\.md", r"CUDA_MPS_CLIENT_PRIORITY=1 torchrun .*", GPU),
    (r"docs/training/colocated\.md", r"kubectl apply .*", Known("needs a cluster; manifests_test compares what it applies with the schemas of Kubernetes")),
    (r"docs/python\.md|client/python/README\.md", r"pip install \./client/python", RunBy("packages_test")),
    (r"docs/python\.md|client/python/README\.md", r"pip install --no-build-isolation .*", RunBy("python_package_test")),
    (r"docs/scaling\.md", r"lossd --devices=.*", GPU),
    (r"docs/scaling\.md", r"lossd --backend=cpu --cpu_devices=2", Serve()),
    (r"docs/scaling\.md", r"lossctl create lm .* --split vocabulary", Run(instead=SMALL)),
    (r"docs/scaling\.md", r"lossctl create lm .* --replicas 2 .*", RunBy("cli_lossctl_server_test")),
    (r"docs/scaling\.md", r"lossd --rank=[01] .*", RunBy("ranks_start_test")),
    (r"docs/scaling\.md", r"lossd --launcher=.* --devices=all .*", GPU),
    (r"docs/scaling\.md", r"lossd --backend=cpu --cpu_devices=2 --rank=.*", RunBy("ranks_devices_test")),
    (r"docs/security\.md", r"(?s).*", RunBy("docs_mutual_tls_test")),
    (r"deploy/wheel/README\.md|client/python/README\.md", r"python3 -m venv venv && \. venv/bin/activate", RunBy("packages_test")),
    (r"deploy/wheel/README\.md", r"pip install lossd-\*\.whl lossd_server-\*\.whl", RunBy("packages_test")),
    (r"deploy/wheel/README\.md", r"pip install lossd-\*\.whl \"\$\(ls lossd_server-\*\.whl\)\[cuda(-devices)?\]\"", CUBLAS),
]


def how(page: str, command: str) -> Run | Serve | RunBy | Step | Known | None:
    for where, what, plan in PLAN:
        if re.fullmatch(where, page) and re.fullmatch(what, command):
            return plan
    return None
