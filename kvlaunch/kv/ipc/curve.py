"""The keys of a run's KV listeners and of those who command them, made from the run's secret.

Every node makes the same keys for itself, so no key is ever sent around. The server key of each role (roles.py) is its
own: a stage's listener cannot be taken for that of another stage, whatever the place says where its endpoint was looked
up. The run's id is part of them all, so two runs with one secret do not know each other. The epoch is not: whoever
survives from an older generation has the secret anyway, the epoch in each message keeps it out, and as it can still
talk, it learns the reason.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from kvlaunch.secret import Secret

_CONTEXT = b"kvlaunch kv curve 1"
"""Changes with the way that keys are made: two versions that differ in it do not understand each other."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CurveZMQ key pair, in Z85 as ZeroMQ's options take it."""

    public: bytes
    private: bytes = field(repr=False)


def server_keys(secret: Secret, run: str, role: str) -> KeyPair:
    """Of one who serves on the network: a role of roles.py."""
    return _keys(secret, run, role)


def client_keys(secret: Secret, run: str) -> KeyPair:
    """Of whoever may command the listeners and ranks of a run."""
    return _keys(secret, run, "requester")


def _keys(secret: Secret, run: str, role: str) -> KeyPair:
    # One block of HKDF-Expand (RFC 5869) over SHA-256: 32 bytes, and any 32 bytes are a private key of Curve25519.
    info = b"\0".join((_CONTEXT, role.encode(), run.encode()))
    private = z85.encode(hmac.digest(secret.text.encode(), info + b"\x01", "sha256"))
    return KeyPair(public=zmq.curve_public(private), private=private)
