# SPDX-License-Identifier: Apache-2.0
"""The package as people read it: signatures, docstrings, what notebooks show, and its errors in the documentation."""

from __future__ import annotations

import ast
import copy
import ctypes
import dataclasses
import functools
import graphlib
import html.parser
import inspect
import multiprocessing
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lossd
from lossd import _native, descriptions
from lossd.v1 import head_pb2, library, loss_pb2, server_pb2, types_pb2


# The package as people read it: signatures, docstrings, what notebooks show, what can be pickled.

D, V, N = 16, 40, 2000


def test_modules_import_each_other_in_no_circle() -> None:
    """Of those at the heads of files. A circle fails only where its first module is the wrong one."""
    source = Path(lossd.__file__).parents[1]

    def name_of(path: Path) -> str:
        return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")

    def used(path: Path) -> Iterator[str]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lossd"):
                for each in node.names:
                    yield f"{node.module}.{each.name}"
                    yield str(node.module)

    paths = {name_of(path): path for path in (source / "lossd").rglob("*.py") if "_pb2" not in path.name}
    # A package imports its modules, and they import it for what is in it by then.
    modules = {name: path for name, path in paths.items() if path.name != "__init__.py"}
    assert "lossd._native" in modules
    graphlib.TopologicalSorter({name: [each for each in used(path) if each in modules]
                                for name, path in modules.items()}).prepare()  # CycleError names them


def public(module: Any) -> Iterator[tuple[str, Any]]:
    for name in module.__all__:
        if not name.startswith("__"):
            yield name, getattr(module, name)


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            yield f"{kind.__name__}.{name}", method


# ---- Signatures and docstrings ----

def test_nothing_hides_its_arguments() -> None:
    """What editors and type checkers show is all that there is."""
    for name, member in public(lossd):
        for where, function in [(name, member), *(methods(member) if inspect.isclass(member) else ())]:
            kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD not in kinds, where


@pytest.mark.parametrize("blocking, starts", [("compute_loss", "compute_loss_async"), ("backward", "backward_async")])
def test_a_blocking_call_has_the_arguments_of_the_other(blocking: str, starts: str) -> None:
    one, other = (inspect.signature(getattr(lossd.Client, name)) for name in (blocking, starts))
    assert one.parameters == other.parameters


def test_what_is_imported_says_what_it_is() -> None:
    for name, member in public(lossd):
        documented = member.__dict__.get("__doc__") if inspect.isclass(member) else member.__doc__
        assert documented and not documented.startswith(f"{name}("), name  # the latter is made by dataclass
    for name, method in methods(lossd.Client):
        assert method.__doc__, name
    assert "lossd.Client(" in lossd.Client.__doc__ and "HeadCalls" not in lossd.Client.__doc__


def test_the_version_stands_in_one_place() -> None:
    """The package's is the server's, which the file VERSION has."""
    from importlib import metadata
    assert lossd.__version__ == metadata.version("lossd")
    assert (Path(__file__).parents[3] / "VERSION").read_text() == f"{lossd.__version__}\n"


# ---- What the server says ----

@pytest.mark.parametrize("kind, message", [
    (lossd.HeadSpec, head_pb2.HeadSpec), (lossd.HeadState, types_pb2.HeadState),
    (lossd.HeadDescription, head_pb2.HeadDescription), (lossd.HeadHistory, head_pb2.HeadHistory), (lossd.MemoryUsage, types_pb2.MemoryUsage),
    (lossd.RowRange, types_pb2.RowRange), (lossd.SliceLimits, loss_pb2.SliceLimits), (lossd.Choice, head_pb2.Choice),
    (lossd.HeadDevice, head_pb2.HeadDevice), (lossd.Paging, head_pb2.Paging),
    (lossd.ServerDescription, server_pb2.ServerDescription), (lossd.RankDescription, server_pb2.RankDescription),
    (lossd.StepResult, head_pb2.ApplyStepResponse),
    (lossd.AddedGradient, head_pb2.AddGradientResponse), (lossd.SaveProgress, head_pb2.SaveProgress),
    (lossd.SavedCheckpoint, head_pb2.SaveCheckpointResponse), (lossd.CheckpointInfo, head_pb2.CheckpointInfo),
    (lossd.TensorFile, head_pb2.TensorFile)])
def test_no_field_of_the_protocol_is_left_out(kind: Any, message: Any) -> None:
    assert [field.name for field in dataclasses.fields(kind)] == [
        field.name for field in sorted(message.DESCRIPTOR.fields, key=lambda field: field.index)]


def test_descriptions_have_the_comments_of_the_protocol() -> None:
    source = inspect.getsource(lossd.StepResult)
    assert lossd.StepResult.__doc__ == "What Client.apply_step did."
    assert 'skipped: bool = False\n    """grad_norm is not finite, and the step was closed without an update."""' in source
    assert lossd.MemoryUsage.__doc__ == "Bytes of memory in use, by purpose."
    assert '"""Where the values of a frozen head are kept. Unspecified: residency "device". InvalidArgument for' in inspect.getsource(lossd.HeadSpec)


STRUCTS = [kind for name, kind in vars(library).items() if name.startswith("lossd_")]


def test_structs_are_those_of_the_compiler(tmp_path: Path) -> None:
    """Where each field lies, and how large it is."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    assert len(STRUCTS) == 4 and all(issubclass(kind, ctypes.Structure) for kind in STRUCTS)
    fields = [(kind.__name__, name) for kind in STRUCTS for name, _ in kind._fields_]
    said = "".join(f'printf("%zu %zu\\n", offsetof({kind}, {name}), sizeof((({kind}*)0)->{name}));' for kind, name in fields)
    sizes = "".join(f'printf("%zu\\n", sizeof({kind.__name__}));' for kind in STRUCTS)
    (tmp_path / "sizes.c").write_text('#include <stdio.h>\n#include "client/library/lossd_client.h"\n#include "server/app/lossd.h"\n'
                                      f"int main(void) {{ {said} {sizes} }}")
    subprocess.run([compiler, f"-I{ROOT}", "-o", tmp_path / "sizes", tmp_path / "sizes.c"], check=True)
    found = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout.splitlines()
    expected = [getattr(getattr(library, kind), name) for kind, name in fields]
    assert found == [*(f"{each.offset} {each.size}" for each in expected), *(str(ctypes.sizeof(kind)) for kind in STRUCTS)]


def test_functions_are_those_of_the_library_and_of_its_headers() -> None:
    declared = {name for header in ("client/library/lossd_client.h", "server/app/lossd.h")
                for name in re.findall(r"\b(lossd_\w+)\((?!\d)", re.sub(r"/\*.*?\*/|//[^\n]*", "", (ROOT / header).read_text(), flags=re.DOTALL))}
    assert set(library.FUNCTIONS) == declared
    assert all(hasattr(_native.library(), name) for name in declared)


@pytest.mark.parametrize("declaration, words", [
    ("int lossd_f(long number);", "the type 'long'"), ("typedef struct lossd_s { int a; } lossd_s;\nint lossd_f(lossd_s whole);", "the type 'lossd_s'"), ("struct lossd_s lossd_f(void);", "the type 'struct lossd_s'"),
    ("int lossd_f(const double* const* rows);", r"the type 'const double\*const\*'")])
def test_a_header_that_ctypes_would_take_otherwise_is_refused(tmp_path: Path, declaration: str, words: str) -> None:
    (tmp_path / "header.h").write_text(declaration + "\n")
    done = subprocess.run([sys.executable, ROOT / "client/python/bind.py", tmp_path / "out.py", tmp_path / "header.h"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 1 and re.search(f"bind.py: {words} is none that it knows", done.stderr), done


def test_words_take_the_place_of_numbers(client: lossd.Client, make_head: Callable[..., str]) -> None:
    name = make_head(hidden_size=D, vocab_size=V, norm="rmsnorm", norm_epsilon=0.5, gradients="auto")
    head = client.describe_head(name)
    assert (head.spec.norm, head.spec.gradients, head.spec.logits) == ("rmsnorm", "auto", "stored")
    assert (head.spec.optimizer_state, head.compute_dtype, head.spec.norm_epsilon) == ("adam", "fp32", 0.5)
    assert head.memory.weights >= D * V * 4 and head.choices and head.choices[0].what
    assert head in client.list_heads()


def test_a_word_of_a_newer_server_is_a_number() -> None:
    assert descriptions.read(lossd.HeadSpec, head_pb2.HeadSpec(norm=77)).norm == "77"
    assert descriptions.read(lossd.HeadSpec, head_pb2.HeadSpec()).compute_dtype is None


class Text(html.parser.HTMLParser):
    """What a browser shows, and the tags it found."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags = "", set[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def test_what_notebooks_show_is_short(client: lossd.Client, make_head: Callable[..., str]) -> None:
    name = make_head(hidden_size=D, vocab_size=V)
    result = client.compute_loss(name, np.ones((N, D), np.float32), [1] * N, grad_hidden=True, rows=("lse", "argmax"),
                                 step=0, id=0, accumulate=True)
    applied = client.apply_step(name, 0, lossd.SGD(lr=0.0))
    saved = client.save_checkpoint(name)
    head = client.describe_head(name)
    shown = {"server": client.get_server(), "head": head, "result": result, "applied": applied, "saved": saved,
             "checkpoint": client.list_checkpoints(name)[0], "client": client, "spec": head.spec,
             "memory": head.memory, "options": lossd.LossOptions(),
             "pending": client.compute_loss_async(name, np.ones((1, D), np.float32), [1])}
    for what, value in shown.items():
        assert "\n" not in repr(value) and len(repr(value)) < 260, f"{what}: {value!r}"
    assert repr(head).startswith(f"HeadDescription('{name}', D=16, V=40, fp32, adam, step=1")
    assert f"grad_hidden=[{N}, {D}] float32" in repr(result) and "rows=(lse, argmax)" in repr(result)
    assert "rows=2000" in repr(applied)
    for value in (shown["server"], head, result, applied, saved, shown["checkpoint"], head.spec):
        page = Text(value._repr_html_())
        assert page.tags == {"table", "tr", "th", "td"} and len(page.text) < 2000
    assert name in Text(head._repr_html_()).text


def test_markup_in_names_stays_text() -> None:
    evil = descriptions.read(lossd.HeadDescription, head_pb2.HeadDescription(
        spec=head_pb2.HeadSpec(name="<script>alert(1)</script>"), choices=[head_pb2.Choice(what="<img>")]))
    page = Text(evil._repr_html_())
    assert page.tags == {"table", "tr", "th", "td"} and "<script>" in page.text


# ---- Copies ----

def test_configuration_is_pickled(client: lossd.Client, make_head: Callable[..., str]) -> None:
    name = make_head(hidden_size=D, vocab_size=V)
    for value in (lossd.LossOptions(z_loss=0.1), lossd.RetryOptions(max_attempts=2), lossd.AdamW(lr=0.1),
                  lossd.SGD(lr=0.1), client.describe_head(name), client.get_server(),
                  lossd.TensorFile(path="a", weight="b")):
        assert pickle.loads(pickle.dumps(value)) == value and copy.deepcopy(value) == value
    result = client.compute_loss(name, np.ones((3, D), np.float32), [1, 2, 3], rows=("lse",))
    assert pickle.loads(pickle.dumps(result)).loss == result.loss


def test_errors_are_pickled(client: lossd.Client) -> None:
    """As worker processes send them to their parents."""
    with pytest.raises(lossd.InvalidArgument) as caught:
        client.create_head("x y", hidden_size=D, vocab_size=V)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is lossd.InvalidArgument and str(again) == str(caught.value)
    assert again.field == caught.value.field != "" and again.incarnation == caught.value.incarnation != 0


def describes(connect: Callable[[], lossd.Client], head: str) -> int:
    with connect() as client:
        return client.describe_head(head).spec.vocab_size


def test_processes_make_their_own_clients(server: Any, client: lossd.Client, make_head: Callable[..., str]) -> None:
    name = make_head(hidden_size=D, vocab_size=V)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        connect = functools.partial(lossd.Client, server.target, channels=1)
        assert pool.apply(describes, (connect, name)) == V
        with pytest.raises(TypeError, match="make one with lossd.Client"):
            pool.apply(describes, (client, name))


def test_what_is_alive_is_not_copied(client: lossd.Client, make_head: Callable[..., str]) -> None:
    head = make_head(hidden_size=D, vocab_size=V)
    pending = client.compute_loss_async(head, np.ones((1, D), np.float32), [1])
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="holds connections and threads"):
            attempt(client)
        with pytest.raises(TypeError, match=r"under way.*wait\(\)"):
            attempt(pending)
    pending.wait()


# ---- Heads that exist ----

def test_a_head_that_exists_otherwise(client: lossd.Client, make_head: Callable[..., str]) -> None:
    """Every field that differs is named, in the words of create_head."""
    name = make_head(hidden_size=D, vocab_size=V, norm="rmsnorm")
    with pytest.raises(lossd.AlreadyExists) as caught:
        client.create_head(name, hidden_size=D + 1, vocab_size=V, bias=True, norm="layernorm", compute_dtype="bf16",
                           optimizer_state="none", frozen=True, logits="recomputed", gradients="sampled", split="rows",
                           if_exists="keep")
    assert str(caught.value).startswith(
        f'head "{name}" exists with hidden_size 16 instead of 17, bias false instead of true, norm rmsnorm instead of '
        "layernorm, compute_dtype fp32 instead of bf16, optimizer_state adam instead of none, frozen false instead of "
        "true, gradients exact instead of sampled, logits stored instead of recomputed, split any instead of rows")
    assert caught.value.field == "spec.hidden_size" and caught.value.value == "17"


def test_a_head_that_exists_or_does_not(client: lossd.Client, make_head: Callable[..., str]) -> None:
    name = make_head(hidden_size=D, vocab_size=V)
    with pytest.raises(lossd.AlreadyExists, match=f'{name}.*if_exists="keep".*delete_head'):
        client.create_head(name, hidden_size=D, vocab_size=V)
    before = client.read_tensor(name)
    assert client.create_head(name, hidden_size=D, vocab_size=V, seed=5, if_exists="keep").spec.name == name
    assert (client.read_tensor(name) == before).all()


def test_a_dry_run_makes_nothing(client: lossd.Client, make_head: Callable[..., str]) -> None:
    before = client.get_server().memory
    planned = client.create_head("planned", hidden_size=D, vocab_size=V, norm="rmsnorm", dry_run=True)
    assert client.get_server().memory == before
    with pytest.raises(lossd.NotFound):
        client.describe_head("planned")
    name = make_head(hidden_size=D, vocab_size=V, norm="rmsnorm")
    made = client.describe_head(name)
    assert (planned.memory, planned.chunk_rows, planned.slice_limits, planned.choices) == \
        (made.memory, made.chunk_rows, made.slice_limits, made.choices)
    with pytest.raises(lossd.AlreadyExists):
        client.create_head(name, hidden_size=D, vocab_size=V, dry_run=True)
    with pytest.raises(lossd.InvalidArgument, match="vocab_size"):
        client.create_head("planned", hidden_size=D, vocab_size=0, dry_run=True)


def test_several_trainers_create_one_head(server: Any, client: lossd.Client) -> None:
    """All of them at once: one makes it, the others find it, and none sees it half made."""
    from concurrent.futures import ThreadPoolExecutor
    trainers = 6
    with ThreadPoolExecutor(trainers) as pool:
        clients = list(pool.map(lambda _: lossd.Client(server.target, channels=1), range(trainers)))
        for round_ in range(5):
            made = list(pool.map(lambda each: each.create_head("one", hidden_size=256, vocab_size=20000, seed=round_,
                                                               if_exists="keep"), clients))
            assert {each.spec for each in made} == {made[0].spec} and {each.state.step for each in made} == {0}
            values = list(pool.map(lambda each: each.read_tensor("one", rows=(19990, 20000)), clients))
            assert all((value == values[0]).all() for value in values) and values[0].any()
            client.delete_head("one")
        for each in clients:
            each.close()


# docs/troubleshooting.md: every error class of the client is there, and every message is one that a program can print. Those of the server
# are brought about by tests/docs/test_server_troubleshooting.py.

ROOT = Path(__file__).parents[3]
CLIENT = ROOT / "client" / "python" / "src" / "lossd"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Errors of the server\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| `")]


def error_classes() -> set[str]:
    """Classes of the client's sources that derive from an exception, at whatever distance; not those of the quickstart, which
    is a program."""
    bases: dict[str, set[str]] = {}
    for file in CLIENT.rglob("*.py"):
        if "quickstart" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}

    def is_error(name: str) -> bool:
        return name.endswith(("Error", "Exception", "Warning")) or any(map(is_error, bases.get(name, ())))
    return {name for name in bases if is_error(name)} - {"LossdError"}


def sources() -> str:
    """All text that client and server may print, with string literals that stand in several parts put together."""
    texts = []
    for folder, pattern in (("client/python/src/lossd", "*.py"), ("client/cpp", "*.cc"), ("client/cpp", "*.h"), ("client/cli", "*.cc"), ("server", "*.cc"), ("server", "*.h"),
                            ("kernels", "*.cc"), ("proto", "*.cc")):
        for file in sorted(ROOT.joinpath(folder).rglob(pattern)):
            texts.append(re.sub(r"[\"']\s*\n\s*f?[\"']", "", file.read_text()))
    return "\n".join(texts)


def test_every_error_class_is_in_the_table() -> None:
    described = {row[0].strip("`") for row in ROWS if len(row) == 4}
    assert described == error_classes()


def test_the_walk_over_the_sources_finds_what_the_package_has() -> None:
    def below(kind: type[lossd.LossdError]) -> set[str]:
        return {each.__name__ for each in kind.__subclasses__()} | {
            name for each in kind.__subclasses__() for name in below(each)}
    assert below(lossd.LossdError) <= error_classes()
    assert {"InvalidArgument", "Restarted", "ForkedClient"} <= error_classes()
    assert all(hasattr(lossd, name) for name in error_classes())


TEXT = sources()
MESSAGES = [message for row in ROWS for message in re.findall(r"`([^`]+)`", row[1 if len(row) == 4 else 0])]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_sources(message: str) -> None:
    parts = [part.strip() for part in message.split("…") if part.strip()]
    assert parts
    for part in parts:
        assert part in TEXT, part


def test_rows_are_complete() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        assert len(row) in (3, 4) and all(row), row


# The package's annotations, checked by mypy as strictly as it can.

_CONFIGURATION = Path(__file__).parents[3] / "client/python/pyproject.toml"
_WRONG_PROGRAM = """
import numpy as np
import lossd
from lossd.torch import HeadOptimizer, LossHead, ServedEmbedding

client = lossd.Client()
hidden = np.ones((1, 2), np.float32)
client.compute_loss("lm", hidden, [1], acumulate=True)
client.compute_loss("lm", hidden, [1], reduction="average")
client.backward("lm", 1, [1.0])
LossHead(client, "lm", label_smothing=0.1)
LossHead(client, "lm", gradients="precise")
HeadOptimizer(LossHead(client, "lm"), learning_rate=1.0)
client.create_head("lm", hidden_size=2, vocab_size=3, norm="batchnorm")
client.describe_head("lm").specification
client.apply_step("lm", 0, lossd.SGD(lr=1.0)).grad_norm.upper()
client.embed("lm", [1], dtype="fp64")
client.embed("lm", [1]).row_gradients
client.add_row_gradients("lm", [1], hidden, step=0)
ServedEmbedding(client, "lm", sparse=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "lossd").symlink_to(Path(lossd.__file__).parent)  # mypy refuses to check what lies among installed packages
    return tmp_path


def mypy(folder: Path, *what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={_CONFIGURATION}", f"--cache-dir={folder / 'cache'}", *what],
        cwd=folder, capture_output=True, text=True, check=False)


def test_mypy_finds_nothing(folder: Path) -> None:
    assert (folder / "lossd/py.typed").exists()
    checked = mypy(folder, "-p", "lossd")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_mypy_sees_what_users_do_wrong(folder: Path) -> None:
    """Every line of the program that uses the package wrongly, and no other."""
    (folder / "wrong.py").write_text(_WRONG_PROGRAM)
    checked = mypy(folder, "wrong.py")
    found = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    assert found == set(range(8, 21)), checked.stdout + checked.stderr
