"""Whether the Hugging Face hub can be reached, asked before anything is downloaded from it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit
from urllib.request import getproxies


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Context in which the Hugging Face hub's local cache is used if the hub cannot be reached.

    huggingface_hub tries each file six times with growing pauses, which takes most of a minute without a network.
    """
    try:
        from huggingface_hub import constants
    except ImportError:  # timm then takes the plain URLs
        yield
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers(endpoint: str, seconds: float = 10.0) -> bool:
    """Whether a host accepts a connection within `seconds`; True behind a proxy, which a socket would bypass."""
    if any(key != "no" for key in getproxies()):
        return True
    url = urlsplit(endpoint)
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    opened = threading.Event()

    def knock() -> None:
        with suppress(OSError, ValueError):
            socket.create_connection(address, timeout=3).close()
            opened.set()

    # A thread, because neither the name lookup nor a host with many dead addresses keeps to a socket's timeout.
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return opened.is_set()
