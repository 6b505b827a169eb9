"""Certificates for tests, made with the openssl command: an authority, and what it has signed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from osrdyne.protocol.uri import TlsFiles


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a directory of its own."""

    directory: Path

    @classmethod
    def create(cls, directory: Path) -> Authority:
        directory.mkdir()
        authority = cls(directory)
        _openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN=authority {directory.name}",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
            "-keyout", authority.file("ca.key"), "-out", authority.file("ca.pem"),
        )  # fmt: skip
        return authority

    def file(self, name: str) -> str:
        return str(self.directory / name)

    def issue(self, name: str, *, hosts: str = "DNS:absent.example", not_after: str | None = None) -> TlsFiles:
        """A certificate for these `hosts` (`IP:127.0.0.1,DNS:localhost`), its key, and this authority.

        `not_after` as `20240101000000Z` makes one that has expired.
        """
        request, certificate, key = (self.file(f"{name}.{kind}") for kind in ("csr", "pem", "key"))
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={hosts}\n")
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        (self.directory / "index.txt").touch()
        config = self.directory / "ca.cnf"
        config.write_text(
            f"[ca]\ndefault_ca=d\n[d]\ndatabase={self.file('index.txt')}\nnew_certs_dir={self.directory}\n"
            "rand_serial=yes\ndefault_md=sha256\npolicy=p\nunique_subject=no\n[p]\ncommonName=supplied\n"
        )
        until = not_after or "20991231235959Z"
        _openssl(
            "ca", "-batch", "-notext", "-config", str(config), "-cert", self.file("ca.pem"),
            "-keyfile", self.file("ca.key"), "-in", request, "-out", certificate, "-extfile", str(extensions),
            "-startdate", "20200101000000Z", "-enddate", until,
        )  # fmt: skip
        return TlsFiles(self.file("ca.pem"), certificate, key)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
