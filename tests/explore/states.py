"""Random states of a page, reached from a start by moves of its own sliders, and random query strings."""

import random
from dataclasses import replace
from urllib.parse import urlencode

from shardwright.explore.page import MOVE, TO, Explorer
from shardwright.explore.sliders import sliders
from shardwright.explore.state import JOB_DEFAULTS, LAYOUT_KEYS, PageState, parse, query_of

STARTS = (
    "model=debug&count=4&global_batch=32&seq_len=256",
    "model=llama-3.1-8b&count=32&global_batch=256&tp=2",
    "model=llama-3.1-70b&chip=h200&count=128&global_batch=512&tp=8&pp=4&memory_margin=0.05",
    "model=mixtral-8x7b&count=64&ep=8&global_batch=256&seq_len=4096&budget_tokens=1e12&price=2.5",
    "model=deepseek-v2-lite&chip=a100-80gb&count=16&node_gbit=800&network=roce&global_batch=64&ep=4&seq_len=2048",
    "model=llama-3.2-1b&count=8&global_batch=64&seq_len=4096&document_tokens=700.5&memory_margin=0.1234567",
    "model=n_layers=8,d_model=1024,n_heads=8,d_ffn=4096,vocab_size=32000&count=16&optimizer=muon&compile=true",
)


def random_state(seed: int, moves: int = 4) -> PageState:
    """Return a state after moves of sliders; fails if a position that is offered breaks a rule."""
    draw = random.Random(seed)
    state = parse(draw.choice(STARTS)).state
    assert state is not None
    for _ in range(moves):
        offered = [slider for group in sliders(state).values() for slider in group]
        slider = draw.choice(offered)
        to = draw.choice(slider.positions)
        parsed = Explorer().read(f"{query_of(state)}&{urlencode({MOVE: slider.key, TO: to})}")
        assert parsed.state is not None, (query_of(state), slider.key, to, parsed.problems)
        state = parsed.state
    return replace(state, pinned=parse(draw.choice(STARTS)).state) if draw.random() < 0.3 else state


def random_query(draw: random.Random) -> str:
    """Return a query string of known and unknown keys, with valid, huge, negative, odd and binary values, or
    of a valid state with a move of one key."""
    keys = [*JOB_DEFAULTS, *LAYOUT_KEYS, MOVE, TO, "pin", "x", "", "<b>", "tp[]"]
    values = [
        *("", "0", "-1", "1", "2", "3", "8", "1e309", "nan", "true", "9" * 30, "1,2", "a=b", "20+21", "²", "\x00"),
        *("<script>alert(1)</script>", "%", "é", "../../etc/passwd", "cpu", "h100", "zb-h1", "full", "cpu", "debug"),
        *(draw.choice(STARTS), "n_layers=2", "tp", "x" * 500),
    ]
    pairs = [(draw.choice(keys), draw.choice(values)) for _ in range(draw.randrange(1, 7))]
    text = urlencode(pairs, errors="replace")
    if draw.random() < 0.3:
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(["%ff", "%", "&&", "==", ";", "%00", "+"]) + text[at:]
    if draw.random() < 0.3:
        move = {MOVE: draw.choice(LAYOUT_KEYS), TO: draw.choice(values)}
        return f"{draw.choice(STARTS)}&{urlencode(move, errors='replace')}"
    return text if draw.random() < 0.5 else f"{draw.choice(STARTS)}&{text}"
