"""What ends an exchange without a response, and whose fault each error of the system is.

The rule this module keeps: errors are told apart by type and number, never by their text. What our
own machine lacks (descriptors, ports, memory) is ours and is never charged to a destination.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from typing import Final

import httpx

from service.domain.outcome import Fault, Phase

_OURS: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
)
_OURS_IN_LOOKUPS: Final = frozenset({socket.EAI_MEMORY, socket.EAI_SYSTEM})


class WireError(httpx.TransportError):
    """No complete response head arrived. `detail` is one short line without secrets."""

    def __init__(self, phase: Phase, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.phase = phase
        self.fault = fault
        self.detail = detail


def lookup_error(error: OSError) -> WireError:
    """The name could not be resolved."""
    ours = error.errno in _OURS_IN_LOOKUPS if isinstance(error, socket.gaierror) else error.errno in _OURS
    fault = Fault.INTERNAL if ours else Fault.DNS
    return WireError(Phase.NOT_SENT, fault, f"the name does not resolve: {_text(error)}")


def connect_error(error: OSError) -> WireError:
    """The TCP connection could not be made."""
    if error.errno in _OURS:
        return WireError(Phase.NOT_SENT, Fault.INTERNAL, f"no connection could be made: {_text(error)}")
    if isinstance(error, ConnectionRefusedError):
        return WireError(Phase.NOT_SENT, Fault.REFUSED, "the connection was refused")
    if isinstance(error, TimeoutError):
        return WireError(Phase.NOT_SENT, Fault.CONNECT_TIMEOUT, "the connection was not accepted in time")
    return WireError(Phase.NOT_SENT, Fault.CONNECT, f"no connection could be made: {_text(error)}")


def tls_error(error: OSError) -> WireError:
    """The TLS handshake failed; `ssl.SSLError` is an OSError."""
    if isinstance(error, ssl.SSLCertVerificationError):
        detail = f"the certificate is not valid: {error.verify_message}"
    elif isinstance(error, ssl.SSLError):
        detail = f"the TLS handshake failed: {error.reason or 'the connection ended'}"
    else:
        detail = "the connection ended in the TLS handshake"
    return WireError(Phase.NOT_SENT, Fault.TLS, detail)


def _text(error: OSError) -> str:
    # The event loop has its own text, with the address in it; a lookup's errors have numbers of their own.
    if error.errno is not None and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or type(error).__name__
