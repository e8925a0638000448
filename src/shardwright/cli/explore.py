"""shardwright explore: plan a run in the browser, by moving sliders."""

import socket
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from shardwright.cli.common import argument, error_console, option, print_text, reading_verb
from shardwright.system.errors import InputError
from shardwright.system.files import problem_above
from shardwright.system.signals import interrupt_is_handled

if TYPE_CHECKING:
    from shardwright.cost.job import Job
    from shardwright.explore.state import PageState

PORT = 8200
MOST_PORT = 65535


@reading_verb
def explore(
    run: Path | None = argument(None, "a run file, whose model, batch and layout come first", "RUN.toml"),
    port: int = option(PORT, "the port; 0: any free one", "N"),
    host: str = option("127.0.0.1", "the address to listen on; others than loopback are open to others", "ADDRESS"),
    cluster: str | None = option(
        None, "the cluster of RUN.toml; as many h100 as it has ranks if not given", "NAME:COUNT"
    ),
    document_tokens: float | None = option(
        None, "the mean length of a token's document, as for `plan`; from the data of RUN.toml if not given", "N"
    ),
    hardware: Path | None = option(None, "your accelerators, as `shardwright measure` writes them", "FILE.toml"),
    browser: bool = option(True, "open the page in a browser"),
    static: Path | None = option(
        None, "write the pages of Learn and the plan as a static site, and start no server", "DIR"
    ),
) -> None:
    """Plan a run in the browser: move sliders, and see memory, time, schedule and messages at once.

    The page needs no GPU, no torch and no network. Its address holds every choice, so a link is a plan.

    shardwright explore

    shardwright explore examples/llama-3.1-8b.toml --cluster h100:32

    shardwright explore --static site

    Exit codes: 0 stopped by Ctrl-C or written, 2 the input cannot be used.
    """
    problems = [] if 0 <= port <= MOST_PORT else [f"--port {port}: a number from 0 to {MOST_PORT} is needed"]
    if cluster is not None and run is None:
        problems.append(f"--cluster {cluster} goes with RUN.toml; without it, choose the cluster on the page")
    if document_tokens is not None and run is None:
        problems.append(f"--document-tokens {document_tokens:g} goes with RUN.toml; without it, give them on the page")
    if static is not None and (problem := problem_above(static / "index.html")) is not None:
        problems.append(f"--static {problem}")
    if problems:
        raise InputError(*problems)
    from shardwright.explore.state import parse, query_of

    if run is not None:
        state = _state_of_run(run, cluster, hardware, document_tokens)
    else:
        parsed = parse("", hardware)
        if parsed.state is None:
            raise InputError(*parsed.problems)
        state = parsed.state
    if static is not None:
        from shardwright.explore.learn import write_static

        print_text(f"written to {write_static(static, [state], hardware)[0]}")
        return
    _serve((host, port), query_of(state) if run is not None else "", hardware, browser)


def _state_of_run(
    run: Path, cluster: str | None, hardware: Path | None, document_tokens: float | None = None
) -> "PageState":
    """Return the state of a run file. Raises InputError for a run file or a layout that the page cannot show."""
    from shardwright.cli.plan_asked import choice_of_run, read_request
    from shardwright.cli.plan_options import PlanOptions
    from shardwright.config import load
    from shardwright.explore.state import PageState, parse, query_of
    from shardwright.model.by_sizes import sizes_of_spec
    from shardwright.model.presets import PRESETS
    from shardwright.planner.search import MARGIN, limit_bytes

    if cluster is None:
        cluster = f"h100:{load(run).layout.layout().world_size}"
    options = PlanOptions(target=str(run), cluster=cluster, hardware=hardware, document_tokens=document_tokens)
    request = read_request(options)
    model = request.name if request.job.model == PRESETS.get(request.name) else sizes_of_spec(request.job.model)
    assert request.config is not None
    choice = choice_of_run(request.config, request.job, limit_bytes(request.job, MARGIN))
    job = replace(request.job, cluster=replace(request.job.cluster, name=cluster))
    parsed = parse(query_of(PageState(model, job, choice)), hardware)
    if parsed.state is None:
        raise InputError(*(f"{run}: {problem}" for problem in parsed.problems))
    left_out = _left_out(job, parsed.state.job)
    if request.given is not None and request.given.batch.stages:
        left_out.append("batch.stages except the stage that needs most memory")
    if left_out:
        error_console.print(f"{run}: the page leaves out {', '.join(left_out)}", markup=False, soft_wrap=True)
    return parsed.state


def _left_out(job: "Job", shown: "Job") -> list[str]:
    """Return the keys of a run file whose values the page does not hold. `job`: the job of the file; `shown`: the job
    of the page."""
    kept = shown.options_of_optimizer
    sizes = [
        field.name for field in fields(job.model) if getattr(job.model, field.name) != getattr(shown.model, field.name)
    ]
    options = [name for name, value in job.options_of_optimizer.items() if value != kept[name]]
    return [*(f"model.{name}" for name in sizes), *(f"optimizer.{name}" for name in options)]


def _serve(address: tuple[str, int], start: str, hardware: Path | None, browser: bool) -> None:
    """Serve the pages until Ctrl-C."""
    from shardwright.explore.page import Explorer
    from shardwright.explore.server import ExplorerServer

    host, port = address
    try:
        server = ExplorerServer(address, Explorer(hardware, start), serve_model)
    except (socket.gaierror, TypeError):  # a TypeError: the name cannot be encoded
        raise InputError(f"--host {host}: this machine has no such address; valid: 127.0.0.1, or ::1") from None
    except OSError as error:
        way_out = "choose another --port, or 0 for any free one"
        raise InputError(f"--host {host} --port {port}: {(error.strerror or str(error)).lower()}; {way_out}") from None
    shown = f"[{host}]" if ":" in host else host
    where = f"http://{shown}:{server.server_address[1]}/"
    print_text(f"explore at {where} (Ctrl-C ends it)")
    if browser:  # in a thread, because a browser of the terminal runs until the user ends it
        Thread(target=_open_browser, args=(where,), daemon=True).start()
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            interrupt_is_handled()


def _open_browser(where: str) -> None:
    opened = False
    with suppress(webbrowser.Error):
        opened = webbrowser.open(where)
    if not opened:
        error_console.print(f"no browser was found; open {where} in one", markup=False, soft_wrap=True)


def serve_model(progress: Callable[[int, int], None], query: str, hardware: Path | None) -> str:
    """Return the result of `plan serve` for the query string of a page. Raises InputError as the command does."""
    from shardwright.cli.plan_serve import PlanServeOptions, read_task
    from shardwright.explore.serving import served_html, serving_values
    from shardwright.serving.search import search, smaller_need
    from shardwright.serving.view import serving_document

    values, problems = serving_values(query)
    options: dict[str, Any] = dict(values)
    for key, kind in (("input_len", int), ("output_len", int), ("concurrency", int), ("price", float)):
        if key in options:
            try:
                options[key] = kind(options[key])
            except ValueError:
                problems.append(f"{key}={options[key]}: a number is needed")
    if problems:
        raise InputError(*problems)
    task, name = read_task(PlanServeOptions(**options, hardware=hardware))
    result = search(task)
    remedies = [] if result.options else list(smaller_need(task))
    return served_html(result, serving_document(result, name, None, False, remedies))
