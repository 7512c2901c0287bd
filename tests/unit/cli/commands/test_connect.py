"""What `flashdraft connect` prints and writes, against a server that only lists a model."""

from __future__ import annotations

import ast
import json
import shlex
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flashdraft.cli import build_parser, clients
from flashdraft.cli.commands import connect
from flashdraft.errors import RequestError

MODEL = "a/model:with 'odd' \"signs\""


class ModelList(ThreadingHTTPServer):
    """Answers /v1/models and nothing else."""

    status = 200
    reply: Any = {"object": "list", "data": [{"id": MODEL, "max_model_len": 8192}]}
    key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: ModelList

    def do_GET(self) -> None:
        status = self.server.status if self.path == "/v1/models" else 404
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            status = 401
        body = json.dumps(self.server.reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ModelList]:
    with ModelList(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLASHDRAFT_API_KEY", raising=False)
    # this machine's own address must be asked without it
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")


def run(*argv: str) -> int:
    arguments = build_parser().parse_args(["connect", *argv])
    return arguments.run(arguments)


def test_without_a_client_every_client_is_described(
    server: ModelList, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--url", server.url) == 0
    out = capsys.readouterr().out
    for name, client in clients.CLIENTS.items():
        assert f"--client {name}" in out and client.path in out
    assert out.count(server.url) == len(clients.CLIENTS)


@pytest.mark.parametrize("name", clients.CLIENTS)
def test_settings_name_the_address_the_model_and_the_key(name: str) -> None:
    settings = clients.CLIENTS[name].settings(clients.Server("http://host:1", "some-model", "k3y"))
    assert "http://host:1" in settings and "k3y" in settings
    assert "some-model" in settings or name == "open-webui"  # it asks the server itself
    assert ("http://host:1/v1" in settings) == (name != "claude-code")  # which appends /v1 itself


def test_odd_names_stay_one_value() -> None:
    server = clients.Server("http://host:1", MODEL, "k3y")
    strings = [n.value for n in ast.walk(ast.parse(clients._openai(server))) if _is_string(n)]
    assert MODEL in strings
    words = shlex.split(clients._curl(server))
    assert json.loads(words[words.index("--data") + 1])["model"] == MODEL
    assert json.loads(clients._claude_code(server))["env"]["ANTHROPIC_MODEL"] == MODEL
    line = next(x for x in clients._continue(server).splitlines() if "    model:" in x)
    assert json.loads(line.split(":", 1)[1]) == MODEL


def _is_string(node: ast.AST) -> Any:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_without_a_key_curl_sends_none_and_sdks_get_a_stand_in() -> None:
    server = clients.Server("http://host:1", "m", clients.NO_KEY)
    assert "Authorization" not in clients._curl(server)
    assert 'api_key="none"' in clients._openai(server)


@pytest.mark.parametrize(
    "url",
    ["http://host:80", "http://host:80/", "host:80", "http://host:80/v1", "http://host:80/v1/"],
)
def test_an_address_may_come_with_or_without_its_ends(url: str) -> None:
    assert connect.base_address(url) == "http://host:80"


def test_a_path_prefix_is_kept() -> None:
    assert connect.base_address("https://host/llm/v1") == "https://host/llm"


@pytest.mark.parametrize(
    "url", ["", "ftp://host", "http://", "http://host:port", "http://a:b@host", "http://host?x=1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="must look like"):
        run("--url", url, "--model", "m")


def test_no_server_is_said_with_what_to_do(server: ModelList) -> None:
    url = server.url
    server.server_close()
    with pytest.raises(RequestError, match=rf"No server answers at {url}.*flashdraft serve"):
        run("--url", url)


def test_a_model_that_is_named_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--url", "http://127.0.0.1:1", "--model", "mine", "--client", "curl") == 0
    assert '"model": "mine"' in capsys.readouterr().out


def test_the_key_comes_from_the_flag_or_the_environment(
    server: ModelList, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "right"
    with pytest.raises(RequestError, match="another API key"):
        run("--url", server.url)
    monkeypatch.setenv("FLASHDRAFT_API_KEY", "wrong")
    with pytest.raises(RequestError, match="another API key"):
        run("--url", server.url)
    assert run("--url", server.url, "--api-key", "right", "--client", "curl") == 0
    assert "Bearer right" in capsys.readouterr().out


def test_a_key_that_no_server_takes_is_refused() -> None:
    with pytest.raises(RequestError, match="printable ASCII"):
        run("--model", "m", "--api-key", "two words")


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (503, {}, "still starting"),
        (404, {}, "status 404"),
        (200, {"data": []}, "lists no models"),
        (200, ["x"], "lists no models"),
        (200, {"data": [{"id": 7}]}, "lists no models"),
    ],
)
def test_other_answers_are_told_apart(
    server: ModelList, status: int, reply: Any, message: str
) -> None:
    server.status, server.reply = status, reply
    with pytest.raises(RequestError, match=message):
        run("--url", server.url)


def test_a_small_context_is_noted_for_claude_code(
    server: ModelList, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--url", server.url, "--client", "claude-code")
    assert "8,192 tokens" in capsys.readouterr().out
    server.reply = {"data": [{"id": "m", "max_model_len": 262144}]}
    run("--url", server.url, "--client", "claude-code")
    assert "Note" not in capsys.readouterr().out


# -- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", clients.CLIENTS)
def test_write_puts_the_settings_where_the_client_looks(server: ModelList, name: str) -> None:
    client = clients.CLIENTS[name]
    assert run("--url", server.url, "--client", name, "--write") == 0
    expected = client.settings(clients.Server(server.url, MODEL, clients.NO_KEY))
    assert Path(client.path).read_text() == expected
    assert run("--url", server.url, "--client", name, "--write") == 0  # the same again is no clash


def test_write_needs_one_client() -> None:
    with pytest.raises(RequestError, match="needs one --client"):
        run("--write")


def test_another_path_may_be_named(tmp_path: Path) -> None:
    run("--model", "m", "--client", "continue", "--write", "sub/folder/mine.yaml")
    assert "apiBase" in (tmp_path / "sub/folder/mine.yaml").read_text()


def test_a_file_that_says_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "open-webui.env").write_text("MINE=1\n")
    with pytest.raises(RequestError, match="says something else"):
        run("--model", "m", "--client", "open-webui", "--write")
    assert (tmp_path / "open-webui.env").read_text() == "MINE=1\n"


def test_settings_of_claude_code_are_merged(tmp_path: Path) -> None:
    path = tmp_path / ".claude/settings.local.json"
    path.parent.mkdir()
    path.write_text('{"permissions": {"allow": ["Bash"]}, "env": {"A": "1", "ANTHROPIC_MODEL": 2}}')
    run("--model", "m", "--client", "claude-code", "--write")
    content = json.loads(path.read_text())
    assert content["permissions"] == {"allow": ["Bash"]}
    assert content["env"]["A"] == "1" and content["env"]["ANTHROPIC_MODEL"] == "m"


@pytest.mark.parametrize("text", ["{broken", "[1]", '{"env": []}'])
def test_settings_that_cannot_be_merged_are_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(RequestError, match="mend or move it"):
        run("--model", "m", "--client", "claude-code", "--write", str(path))
    assert path.read_text() == text


def test_a_key_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    for name in ("claude-code", "open-webui"):
        run("--model", "m", "--client", name, "--api-key", "s3cret", "--write")
        path = tmp_path / clients.CLIENTS[name].path
        assert "s3cret" in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [other.name for other in path.parent.iterdir() if other.name.endswith(".part")] == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / ".claude").write_text("a file, not a folder")
    with pytest.raises(RequestError, match="cannot be made"):
        run("--model", "m", "--client", "claude-code", "--write")
