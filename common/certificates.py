"""When a certificate ends, for the metric that warns of it. Reads PEM; checks nothing else."""

from __future__ import annotations

import math
import ssl
from datetime import UTC, datetime
from pathlib import Path

_UTC_TIME, _GENERALIZED_TIME, _EXPLICIT_VERSION = 0x17, 0x18, 0xA0


def not_after(file: Path) -> float:
    """Unix time at which the file's first certificate ends; nan if there is none to be read."""
    try:
        text = file.read_text(encoding="ascii", errors="ignore")
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        pem = begin + text.split(begin, 1)[1].split(end, 1)[0] + end
        return _not_after(ssl.PEM_cert_to_DER_cert(pem))
    except (OSError, ValueError, IndexError):
        return math.nan


def _not_after(der: bytes) -> float:
    """RFC 5280: Certificate > tbsCertificate > version?, serial, algorithm, issuer, validity."""
    _, certificate, _ = _element(der)
    _, body, _ = _element(certificate)
    tag, _, rest = _element(body)
    for _ in range(3 if tag == _EXPLICIT_VERSION else 2):
        _, _, rest = _element(rest)
    _, validity, _ = _element(rest)
    _, _, ends = _element(validity)
    tag, value, _ = _element(ends)
    if tag not in (_UTC_TIME, _GENERALIZED_TIME):
        raise ValueError("no time where the validity ends")
    text = value.decode("ascii")
    if tag == _UTC_TIME:  # two digits: 1950 to 2049
        text = ("20" if int(text[:2]) < 50 else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag, content and what follows of the first DER element. Raises IndexError if cut short."""
    tag, length, start = data[0], data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise IndexError("an element is cut short")
    return tag, data[start : start + length], data[start + length :]
