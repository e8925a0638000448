"""A timeline as lines of text, for screens that are wide enough."""

from rich.text import Text

from shardwright.schedule.draw import ScheduleTimeline, ink_on, shades

IDLE = "\N{MIDDLE DOT}"


def timeline_text(timeline: ScheduleTimeline, width: int) -> Text | None:
    """Return a line for each rank: op and micro-batch at the start of an action, as long as the action lasts, and a dot
    where the rank is idle. None if the shortest action has no room for its name in `width` characters."""
    actions = [each for spans in timeline.spans for each in spans if each[2] > each[1]]
    if not actions:
        return None
    margin = len(f"rank {len(timeline.spans) - 1} ")
    longest_name = max(len(f"{action.op}{action.microbatch}") for action, _, _ in actions)
    scale = longest_name / min(end - start for _, start, end in actions)
    if margin + timeline.end * scale > width:
        return None
    shade_of = shades(timeline)
    text = Text(no_wrap=True)
    for rank, spans in enumerate(timeline.spans):
        text.append(f"rank {rank} ".ljust(margin), "dim")
        at = 0
        for action, start, end in spans:
            first, last = round(start * scale), round(end * scale)
            if last == first:
                continue
            text.append(IDLE * (first - at), "dim")
            colour = shade_of(rank, action)
            text.append(f"{action.op}{action.microbatch}".ljust(last - first), f"{ink_on(colour)} on {colour}")
            at = last
        text.append(IDLE * (round(timeline.end * scale) - at) + "\n", "dim")
    text.right_crop(1)
    return text
