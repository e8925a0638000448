"""The server of the explorer: the standard library's HTTP server within limits.

It answers GET for pages and POST for searches and for a pasted config.json. It holds no state except running searches.
Requests are bounded in size, in time and in number at once. A page of another site can neither read an answer (the
`Host` header is checked, because a name can be bound to a loopback address) nor start a search (POST needs a header of
our own, which no other site may send).
"""

import json
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any
from urllib.parse import unquote

from markupsafe import Markup

from shardwright.explore.fastest import find_fastest
from shardwright.explore.learn import TOPICS, learn_page
from shardwright.explore.page import Explorer, document, style, templates
from shardwright.explore.serving import serving_page
from shardwright.explore.state import PAGES
from shardwright.explore.worker import PageSearches
from shardwright.hugging_face.files import read_sizes
from shardwright.model.by_sizes import sizes_of_spec
from shardwright.system.errors import InputError, nearest
from shardwright.view.document import Picture
from shardwright.view.html import fragment, page

LONGEST_ADDRESS = 16_384
MOST_BODY_BYTES = 262_144
MOST_AT_ONCE = 16
WAIT_S = 30.0
SOCKET_S = 10.0
"""Limits of requests: characters of an address, bytes of a body, requests that are answered at once, seconds that
another waits for its turn, and seconds between two parts of a request."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PAGE_HEADERS = {**HEADERS, "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""Headers of plan.html, whose style is in the file; it has no script."""
OWN_HEADER = "X-Shardwright"
HTML, TEXT, JSON = "text/html; charset=utf-8", "text/plain; charset=utf-8", "application/json"


@dataclass(frozen=True)
class Answer:
    """The answer to a request. `file`: the name under which a browser saves it."""

    body: bytes
    kind: str = HTML
    status: HTTPStatus = HTTPStatus.OK
    file: str = ""
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)


class ExplorerServer(ThreadingHTTPServer):
    """The server of one explorer. `serve`: the search of `plan serve` for a query string, as HTML."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], explorer: Explorer, serve: Callable[..., str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.explorer, self.searches, self.serve = explorer, PageSearches(), serve
        self.pricing = Lock()
        self._given_name = address[0].lower()
        self._slots = BoundedSemaphore(MOST_AT_ONCE)
        super().__init__(address, ExplorerRequest)  # closes the server if the address cannot be used

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or with 503 if no thread is free for `WAIT_S`."""
        if self._slots.acquire(timeout=WAIT_S):
            super().process_request(request, client_address)
        else:
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\n\r\n")
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has gone; report any other error in one line."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)

    def server_close(self) -> None:
        super().server_close()
        self.searches.close()

    def serves(self, host: str) -> bool:
        """Return whether a request may have this `Host`: an address, `localhost`, the name given as
        the address to listen on, or a name of this machine."""
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        try:
            return bool(ip_address(name.strip("[]")))
        except ValueError:
            return name.lower() in self._names

    @cached_property
    def _names(self) -> set[str]:
        listening = str(self.server_address[0])
        names = {"localhost", listening.lower(), self._given_name} - {""}
        loopback = ip_address(listening).is_loopback
        return names if loopback else {*names, socket.gethostname().lower(), socket.getfqdn().lower()}


class ExplorerRequest(BaseHTTPRequestHandler):
    """One request."""

    server: ExplorerServer
    timeout = SOCKET_S
    server_version, sys_version = "shardwright", ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the parser refuses."""
        self._send(_text(HTTPStatus(code), message or HTTPStatus(code).phrase))

    def _answer(self, act: Callable[[], Answer]) -> None:
        try:
            if not self.server.serves(self.headers.get("Host", "")):
                reply = _text(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name; open it by its address")
            elif len(self.path) > LONGEST_ADDRESS:
                reply = _text(HTTPStatus.REQUEST_URI_TOO_LONG, f"an address has at most {LONGEST_ADDRESS:,} characters")
            else:
                reply = act()
        except InputError as error:
            reply = _text(HTTPStatus.BAD_REQUEST, *error.problems)
        except (TimeoutError, ConnectionError):  # the client is slow or has gone: there is nobody to answer
            raise
        except Exception as error:  # a bug: the page says so, and the server goes on
            print(f"error: {self.path[:200]}: {type(error).__name__}: {error}", file=sys.stderr)
            reply = _text(HTTPStatus.INTERNAL_SERVER_ERROR, "this answer failed; the error is in the terminal")
        self._send(reply)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        if answer.file:
            self.send_header("Content-Disposition", f'attachment; filename="{answer.file}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _get(self) -> Answer:
        path, _, query = self.path.partition("?")
        explorer = self.server.explorer
        made: dict[str, Callable[[], Answer]] = {
            "/": lambda: _html(explorer.home(query)),
            "/answers": lambda: _html(explorer.answers(query)),
            "/serve": lambda: _html(serving_page(query, explorer.hardware)),
            "/formulas": partial(self._formulas, query),
            "/plan.json": partial(self._plan_json, query),
            "/plan.html": partial(self._plan_html, query),
            "/run.toml": partial(self._run_toml, query),
            "/static/style.css": lambda: Answer(style().encode(), "text/css; charset=utf-8"),
            "/static/learn.css": lambda: Answer((PAGES / "learn.css").read_bytes(), "text/css; charset=utf-8"),
            "/static/explorer.js": lambda: Answer((PAGES / "explorer.js").read_bytes(), "text/javascript"),
            "/favicon.ico": lambda: Answer(b"", status=HTTPStatus.NO_CONTENT),
        }
        if path in made:
            with self.server.pricing:  # numpy gains nothing from pricing two layouts at once
                return made[path]()
        if path.startswith("/learn"):
            return self._learn(path.removeprefix("/learn").strip("/"), query)
        if path.startswith("/search/"):
            result = self.server.searches.poll(path.removeprefix("/search/"))
            if result is not None:
                return Answer(json.dumps(result).encode(), JSON)
        return _text(HTTPStatus.NOT_FOUND, f"there is no page {unquote(path)[:200]}; open /")

    def _post(self) -> Answer:
        if self.headers.get(OWN_HEADER) is None:
            return _text(HTTPStatus.FORBIDDEN, "this request needs a header that only the page sends")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 10 and int(length) <= MOST_BODY_BYTES):
            return _text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MOST_BODY_BYTES:,} bytes")
        body = self.rfile.read(int(length)).decode("utf-8", "replace")
        searches, hardware = self.server.searches, self.server.explorer.hardware
        if self.path == "/config":
            return Answer(json.dumps({"model": _sizes(body)}).encode(), JSON)
        if self.path == "/search/fastest":
            return Answer(json.dumps({"id": searches.start(find_fastest, body, hardware)}).encode(), JSON)
        if self.path == "/search/serve":
            return Answer(json.dumps({"id": searches.start(self.server.serve, body, hardware)}).encode(), JSON)
        if self.path.startswith("/cancel/"):
            searches.cancel(self.path.removeprefix("/cancel/"))
            return Answer(b"{}", JSON)
        return _text(HTTPStatus.NOT_FOUND, "there is no such request")

    def _state(self, query: str) -> Any:
        parsed = self.server.explorer.read(query)
        if parsed.state is None:
            raise InputError(*parsed.problems)
        return parsed.state

    def _formulas(self, query: str) -> Answer:
        rendered = document(self._state(query))
        parts = [part for part in rendered.parts if not isinstance(part, Picture)]
        body = Markup('<h1>{}</h1><p><a href="/?{}">Back to the sliders</a></p>{}').format(
            rendered.title, query, Markup(fragment(parts))
        )
        return _page(rendered.title, body, query)

    def _plan_json(self, query: str) -> Answer:
        return Answer(json.dumps(document(self._state(query)).data, default=str).encode(), JSON)

    def _plan_html(self, query: str) -> Answer:
        return Answer(page(document(self._state(query))).encode(), file="plan.html", headers=PAGE_HEADERS)

    def _run_toml(self, query: str) -> Answer:
        text = self.server.explorer.run_toml(self._state(query))
        return Answer(text.encode(), "application/toml", file="run.toml")

    def _learn(self, topic: str, query: str) -> Answer:
        if topic and topic not in TOPICS:
            return _text(
                HTTPStatus.NOT_FOUND, f"{unquote(topic)[:200]}: there is no such page; {nearest(topic, TOPICS)}"
            )
        with self.server.pricing:
            state = self._state(query)
            topic = topic or next(iter(TOPICS))
            body = Markup(learn_page(topic, state, hardware=self.server.explorer.hardware))
            return _page(TOPICS[topic], body, query, here="learn", styles=("style.css", "learn.css"))


def _page(title: str, body: Markup, query: str, **values: Any) -> Answer:
    return _html(templates().get_template("page.html").render(values, title=title, body=body, query=query))


def _html(text: str) -> Answer:
    return Answer(text.encode("utf-8"))


def _text(status: HTTPStatus, *lines: str) -> Answer:
    return Answer(("\n".join(lines) + "\n").encode("utf-8", "replace"), TEXT, status)


def _sizes(config: str) -> str:
    """Return the sizes of a pasted config.json. Raises InputError for text that is no model that can be planned."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(config, encoding="utf-8")
        try:
            return sizes_of_spec(read_sizes(file))
        except InputError as error:
            raise InputError(*(problem.replace(str(file), "config.json") for problem in error.problems)) from None
