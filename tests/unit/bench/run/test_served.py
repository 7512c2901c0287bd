"""Which server answers at a URL: found, refused, waited for while it loads."""

from __future__ import annotations

import pytest

from flashdraft.bench.run.served import find_served
from flashdraft.bench.run.stream import Endpoint
from flashdraft.errors import EngineLostError, RequestError
from tests.unit.bench.run.openai_server import OpenAIServer


def test_the_key_is_sent() -> None:
    with OpenAIServer() as server:
        find_served(Endpoint.parse(server.url + "/v1/", "secret"), None)
        assert set(server.keys) == {"Bearer secret"}


def test_an_unreachable_url_says_so() -> None:
    with OpenAIServer() as server:
        url = server.url
    with pytest.raises(EngineLostError, match=f"{url} cannot be reached .Connection refused"):
        find_served(Endpoint.parse(url), None)


def test_a_server_that_is_still_loading_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdraft.bench.run.served.POLL_S", 0.01)
    told: list[str] = []
    with OpenAIServer() as server:
        server.models_status = 503

        def tell(text: str) -> None:
            told.append(text)
            server.models_status = 200 if len(told) == 3 else 503

        assert find_served(Endpoint.parse(server.url), None, tell).model == "tiny"
    assert len(told) == 3
    assert (
        told[0] == f"{server.url} is still loading (HTTP 503): waiting, at most 600 s; 0 s so far"
    )


def test_a_server_that_never_ends_loading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdraft.bench.run.served.POLL_S", 0.01)
    monkeypatch.setattr("flashdraft.bench.run.served.LOADING_S", 0.05)
    with OpenAIServer() as server:
        server.models_status = 503
        with pytest.raises(EngineLostError, match="still loading after 0.05 s .HTTP 503.; try"):
            find_served(Endpoint.parse(server.url), None)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host:0"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="expected one like"):
        Endpoint.parse(url)


def test_urls_may_end_with_v1_and_lack_their_scheme() -> None:
    expected = "http://127.0.0.1:8000"
    for url in ("127.0.0.1:8000", expected, expected + "/", expected + "/v1", expected + "/v1/"):
        assert Endpoint.parse(url).url == expected


def test_a_server_that_has_no_such_model_or_no_models_is_refused() -> None:
    with OpenAIServer(models=["one", "two"]) as server:
        endpoint = Endpoint.parse(server.url)
        assert find_served(endpoint, None).model == "one"
        assert find_served(endpoint, "two").model == "two"
        with pytest.raises(RequestError, match="'three'; it has one, two"):
            find_served(endpoint, "three")
        server.models_status = 401
        with pytest.raises(RequestError, match="--api-key"):
            find_served(endpoint, None)
        server.models_status, server.models = 200, []
        with pytest.raises(RequestError, match="no OpenAI endpoint"):
            find_served(endpoint, None)
