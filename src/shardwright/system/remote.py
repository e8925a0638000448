"""File systems that fsspec reaches by URL: s3://, gs://, memory:// and the like."""

from typing import Any

from shardwright.system.errors import MASK

REMOTE = "://"


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL or local path, and the path in it. Raises ValueError with the reason for a
    URL scheme that fsspec does not know or that needs a package that is not installed."""
    import fsspec

    if MASK in url:
        raise ValueError(
            f"the secrets of this URL are masked as {MASK}, as the folder of a run has them; give the URL again with "
            f"--set, or leave secrets to the environment"
        )
    try:
        system, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"fsspec has no access to {url.partition(REMOTE)[0]}://: {error}") from None
    return system, path
