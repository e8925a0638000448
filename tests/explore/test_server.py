"""Proves that the server keeps its limits, is closed to other sites, and answers any request without an error."""

import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest

from shardwright.cli.explore import serve_model
from shardwright.explore import server, worker
from shardwright.explore.page import Explorer
from shardwright.explore.server import HEADERS, LONGEST_ADDRESS, MOST_BODY_BYTES, OWN_HEADER, ExplorerServer
from shardwright.system.errors import InputError
from tests.explore.states import random_query
from tests.marks import prove, rest_prove

OWN = {OWN_HEADER: "1"}
SMALL = "model=debug&count=4&global_batch=16&seq_len=128"


@pytest.fixture(scope="module")
def running() -> Iterator[ExplorerServer]:
    with ExplorerServer(("127.0.0.1", 0), Explorer(), serve_model) as found:
        thread = Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()


def ask(
    running: ExplorerServer, path: str, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", running.server_address[1], timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/answers", "/serve", "/formulas", "/static/style.css", "/static/explorer.js"])
def test_every_page_is_there_with_the_headers_of_security(running: ExplorerServer, path: str):
    status, text, headers = ask(running, f"{path}?{SMALL}" if path != "/serve" else path)
    assert status == 200
    assert text
    assert headers.items() >= HEADERS.items()
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["Server"].strip() == "shardwright"
    assert " style=" not in text
    assert "<style" not in text
    assert "//" not in text.replace("// ", "").replace("http://www.w3.org", "") or path.startswith("/static")


def test_a_page_with_its_style_script_and_largest_answer_is_below_300_kib(running: ExplorerServer):
    large = "model=llama-3.1-405b&count=16384&tp=8&pp=16&pp_schedule=interleaved-1f1b&global_batch=2048"
    paths = (f"/?{large}", "/static/style.css", "/static/explorer.js")
    assert sum(len(ask(running, path)[1].encode()) for path in paths) < 300 * 1024


def test_a_page_of_learn_has_the_state_of_the_sliders(running: ExplorerServer):
    status, text, _ = ask(running, f"/learn?{SMALL}")
    assert status == 200
    assert "debug on h100:4" in text
    assert ask(running, "/learn/none")[0] == 404
    assert ask(running, "/learn?tp=3")[:2] == (400, ask(running, "/run.toml?tp=3")[1])


def test_another_name_of_the_host_is_refused(running: ExplorerServer):
    port = running.server_address[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert ask(running, "/static/style.css", Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", ""):
        assert ask(running, "/", Host=host)[0] == 421


def test_another_site_cannot_start_anything(running: ExplorerServer):
    assert ask(running, "/search/fastest", "POST", SMALL)[0] == 403
    assert ask(running, "/cancel/x", "POST", "")[0] == 403
    assert ask(running, "/search/fastest", "OPTIONS")[0] == 501


def test_requests_are_bounded_in_size(running: ExplorerServer):
    assert ask(running, "/?" + "x" * LONGEST_ADDRESS)[0] == 414
    assert ask(running, "/?" + "x" * 70_000)[0] == 414
    assert ask(running, "/config", "POST", "x" * (MOST_BODY_BYTES + 1), X_Shardwright="1")[0] == 413
    assert ask(running, "/config", "POST", None, X_Shardwright="1", Content_Length="-1")[0] == 413


def test_a_slow_request_is_given_up(running: ExplorerServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server.ExplorerRequest, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", running.server_address[1]), timeout=30) as slow:
        slow.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n")
        assert slow.recv(100) == b""


def test_a_pasted_config_json_becomes_sizes_or_problems(running: ExplorerServer):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    status, text, _ = ask(running, "/config", "POST", json.dumps(config), X_Shardwright="1")
    assert status == 200, text
    assert {"n_layers=2", "d_model=64", "n_kv_heads=2"} <= set(json.loads(text)["model"].split(","))
    for wrong in ("", "{", "[]", "{}", '{"model_type": "bert"}', "\x00"):
        status, text, _ = ask(running, "/config", "POST", wrong, X_Shardwright="1")
        assert status == 400
        assert text.startswith("config.json")


def test_a_body_that_does_not_come_is_given_up_in_silence(
    running: ExplorerServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(server.ExplorerRequest, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", running.server_address[1]), timeout=30) as slow:
        slow.sendall(b"POST /config HTTP/1.0\r\nHost: 127.0.0.1\r\nX-Shardwright: 1\r\nContent-Length: 9\r\n\r\n{")
        assert slow.recv(100) == b""
    assert capfd.readouterr().err == ""


def test_the_name_given_as_host_is_a_name_of_the_server():
    for given, name, served in (("127.1", "127.1:8200", True), ("127.1", "127.2", False), ("", "", False)):
        with ExplorerServer((given, 0), Explorer(), serve_model) as found:
            assert found.serves(name) == served


def test_a_page_of_learn_prices_a_cluster_of_the_hardware_file(tmp_path: Path):
    file = tmp_path / "mine.toml"
    rows = ["accelerator = 'h100'", "node_size = 8", "network = 'infiniband'", "gbit_per_s_per_node = 3200"]
    file.write_text("\n".join(["[clusters.mine]", *rows]), encoding="utf-8")
    with ExplorerServer(("127.0.0.1", 0), Explorer(file), serve_model) as found:
        Thread(target=found.serve_forever, daemon=True).start()
        path = "/learn/optimizers?model=llama-3.2-1b&chip=mine&count=8&global_batch=8&seq_len=1024"
        status, text, _ = ask(found, path)
        found.shutdown()
    assert status == 200, text
    assert "on mine:8" in text
    assert "not possible" not in text


@pytest.mark.parametrize("n", rest_prove([40, 2000], 40))
def test_any_query_string_is_answered(running: ExplorerServer, n: int, capfd: pytest.CaptureFixture[str]):
    draw = random.Random(n)
    paths = ["/", *["/answers"] * 3, "/run.toml", "/serve", "/x", "/search/1", "/learn/1"]
    for _ in range(n):
        path = draw.choice(paths)
        status, text, _ = ask(running, f"{path}?{random_query(draw)}")
        assert status in (200, 400, 404), (path, text)
        assert "Traceback" not in text
    assert capfd.readouterr().err == ""


def test_requests_at_once_are_all_answered(running: ExplorerServer):
    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(lambda at: ask(running, f"/answers?{SMALL}&seq_len={128 + at % 2}")[0], range(50)))
    assert found == [200] * 50


def finished(running: ExplorerServer, name: str) -> dict:
    while True:
        status, text, _ = ask(running, f"/search/{name}")
        assert status == 200, text
        state = json.loads(text)
        if state["result"] is not None or state["problems"]:
            return state
        time.sleep(0.05)


@prove
def test_a_search_has_progress_and_cards_that_are_states(running: ExplorerServer):
    status, text, _ = ask(running, "/search/fastest", "POST", SMALL, **{OWN_HEADER.replace("-", "_"): "1"})
    assert status == 200, text
    state = finished(running, json.loads(text)["id"])
    assert state["problems"] == []
    assert state["of"] == state["done"] == 3  # pp of 1, 2 and 4
    links = [each.split('"')[0] for each in state["result"].split('href="/?')[1:]]
    assert len(links) > 2
    for link in links:
        assert Explorer().read(link.replace("&amp;", "&")).state is not None
    assert ask(running, f"/search/{json.loads(text)['id']}")[0] == 404


@prove
def test_a_search_ends_when_it_is_cancelled_or_when_nobody_polls(
    running: ExplorerServer, monkeypatch: pytest.MonkeyPatch
):
    large = "model=deepseek-v3&count=2048&global_batch=15360&seq_len=4096"
    names = [running.searches.start(server.find_fastest, large, None) for _ in range(2)]
    first, second = (running.searches._searches[name].process for name in names)
    assert ask(running, "/search/fastest", "POST", SMALL, X_Shardwright="1")[0] == 400
    assert ask(running, f"/cancel/{names[0]}", "POST", "", X_Shardwright="1")[0] == 200
    assert not first.is_alive()
    monkeypatch.setattr(worker, "UNPOLLED_S", 0.0)
    running.searches._watch()
    assert not second.is_alive()
    assert running.searches.poll(names[1]) is None


@prove
def test_serving_is_searched_with_the_limits_drawn():
    query = "model=llama-3.1-8b&cluster=h100%3A1&input_len=512&output_len=64&tpot=20ms&ttft=50ms"
    result = serve_model(lambda done, of: None, query, None)
    assert 'class="limit"' in result
    assert "limit of a further token <strong>20 ms" in result


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("model=/etc/passwd", "a page reads no file"),
        ("model=" + "a" * 300, "--cluster is missing"),
        ("cluster=" + "a" * 401, "cluster: at most 400 characters"),
        ("model=" + "a" * 8001, "model: at most 8,000 characters"),
        ("model=llama-3.1-8b&cluster=h100:1&input_len=x", "input_len=x: a number is needed"),
        ("model=llama-3.1-8b&cluster=h100:1&hardware=/etc/passwd", "hardware: there is no such key"),
        ("model=llama-3.1-8b", "--cluster is missing"),
    ],
)
def test_a_wrong_question_about_serving_is_named(query: str, problem: str):
    with pytest.raises(InputError, match=problem):
        serve_model(lambda done, of: None, query, None)
