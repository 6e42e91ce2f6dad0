# SPDX-License-Identifier: Apache-2.0
"""Servers by name: the file that lossctl keeps, and what a client takes from it."""

import json
import os
from pathlib import Path

import pytest

import lossd
from lossd import _contexts

CASES = json.loads((Path(__file__).parents[1] / "contexts" / "cases.json").read_text())["cases"]


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("LOSSD_") and name not in ("LOSSD_BINARY",):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LOSSD_CONFIG", str(tmp_path / "contexts.json"))


def write(folder, contexts, **others):
    path = folder / "contexts.json"
    path.write_text(json.dumps({"contexts": contexts, **others}))
    path.chmod(0o600)


def token_file(folder, mode=0o600):
    path = folder / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(mode)


def resolve(target=None, context=None, ca=None, cert=None, key=None, token=None):
    return _contexts.resolve(target, context, ca, cert, key, token)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_files_are_read_as_lossctl_reads_them(case):
    if "gives" in case:
        current, contexts = _contexts.parse(case["file"].encode(), "FILE")
        assert current == case["gives"]["current"]
        assert contexts == {name: _contexts.NamedServer(**server) for name, server in case["gives"]["contexts"].items()}
        return
    with pytest.raises(lossd.InvalidArgument) as error:
        _contexts.parse(case["file"].encode(), "FILE")
    says = case["fails"] if case["fails"].startswith("FILE") else f"FILE: {case['fails']}"
    assert str(error.value).startswith(says) or says in str(error.value)


def test_a_context_has_a_server_and_its_credentials(tmp_path):
    write(tmp_path, {"lab": {"server": "lab:1", "ca": "ca.pem", "cert": "me.pem", "key": "/k/me.key", "token_file": "token"}})
    token_file(tmp_path)
    target, credentials = resolve(context="lab")
    assert target == "lab:1"
    assert credentials.ca == str(tmp_path / "ca.pem")
    assert (credentials.cert, credentials.key) == (str(tmp_path / "me.pem"), "/k/me.key")
    assert credentials.token == "0123456789abcdef"


def test_arguments_go_before_the_environment_and_that_before_contexts(tmp_path, monkeypatch):
    write(tmp_path, {"lab": {"server": "lab:1", "ca": "ca.pem"}, "other": {"server": "other:1"}}, current="lab")
    assert resolve()[0] == "127.0.0.1:7070", "the current context is lossctl's"
    monkeypatch.setenv("LOSSD_CONTEXT", "other")
    assert resolve()[0] == "other:1"
    monkeypatch.setenv("LOSSD_SERVER", "environment:1")
    assert resolve()[0] == "environment:1"
    assert resolve(context="lab")[0] == "lab:1"
    assert resolve("argument:1")[0] == "argument:1"
    assert resolve("argument:1")[1].ca == "", "what a context has goes to its server only"
    monkeypatch.setenv("LOSSD_CA", "variable.pem")
    assert resolve(context="lab")[1].ca == "variable.pem"
    assert resolve(context="lab", ca="argument.pem")[1].ca == "argument.pem"
    assert resolve(context="lab", ca="")[1].ca == ""
    with pytest.raises(lossd.InvalidArgument, match="give one of them"):
        resolve("argument:1", "lab")


def test_mistakes_name_the_file(tmp_path, monkeypatch):
    write(tmp_path, {"lab": {"server": "lab:1", "token_file": "token"}})
    with pytest.raises(lossd.NotFound, match='there is no context "lob" in .*contexts.json; it has lab'):
        resolve(context="lob")
    with pytest.raises(lossd.NotFound, match="token cannot be read"):
        resolve(context="lab")
    token_file(tmp_path, 0o644)
    with pytest.raises(lossd.PermissionDenied, match="token has the mode 0644, so others can read it; `chmod 600"):
        resolve(context="lab")
    monkeypatch.setenv("LOSSD_TOKEN", "fedcba9876543210")
    assert resolve(context="lab")[1].token == "fedcba9876543210"
    (tmp_path / "contexts.json").chmod(0o666)
    with pytest.raises(lossd.PermissionDenied, match="contexts.json has the mode 0666, so others can change it"):
        resolve(context="lab")
    monkeypatch.delenv("LOSSD_CONFIG")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    with pytest.raises(lossd.NotFound, match="in any file"):
        resolve(context="lab")


def test_a_client_connects_by_a_context_and_lists_streams(server, tmp_path):
    write(tmp_path, {"here": {"server": server.target}})
    with lossd.Client(context="here") as client:
        assert client.target == server.target
        found = client.list_streams()
        assert found.incarnation == client.get_server().incarnation
        assert found.streams == ()
