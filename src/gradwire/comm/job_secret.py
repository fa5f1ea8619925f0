"""Job secret: a text that all ranks of a job have, and by which they refuse connections from outside."""

import ipaddress
import os
import secrets
import socket
from pathlib import Path

from gradwire.comm.rendezvous import Rendezvous

VARIABLE, FILE_VARIABLE = "GRADWIRE_SECRET", "GRADWIRE_SECRET_FILE"
LEAST_LENGTH = 16


def job_secret(rendezvous: Rendezvous, host: str) -> bytes:
    """The secret of the environment; on a loopback address without one, a secret that the rendezvous keeps.

    Raises:
        ValueError: There is none, and ``host`` can be reached from elsewhere.
    """
    text = _given()
    if not text and not ipaddress.ip_address(socket.gethostbyname(host)).is_loopback:
        raise ValueError(
            f"host={host!r} can be reached from other machines, and no secret protects it; give all ranks the "
            f"same {VARIABLE}, or {FILE_VARIABLE} with the path of a file that holds it, such as one made by "
            "`openssl rand -hex 32`"
        )
    return (text or rendezvous.set_default("secret", secrets.token_hex(32))).encode()


def secret_variable() -> dict[str, str]:
    """The variable by which a launcher hands the secret to its ranks: the one given here, or else a new one."""
    return {VARIABLE: _given() or secrets.token_hex(32)}


def _given() -> str:
    """The secret of the environment, or nothing."""
    text, path = os.environ.get(VARIABLE, "").strip(), os.environ.get(FILE_VARIABLE)
    if text or not path:
        name = VARIABLE
    else:
        text, name = Path(path).read_text().strip(), f"the file {path} of {FILE_VARIABLE}"
    if len(text) < LEAST_LENGTH and (text or path):
        raise ValueError(
            f"{name} has {len(text)} characters, which can be guessed; make one of at least {LEAST_LENGTH}, for "
            "example by `openssl rand -hex 32`"
        )
    return text
