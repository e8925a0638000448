"""The document of a verb, rendered as terminal text, JSON or a page; the style of pages and pictures; no torch."""
