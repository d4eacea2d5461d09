"""TLS: contexts for the router's own address and for its connections to workers."""

from __future__ import annotations

import ssl

from sglang_ext.errors import ConfigError


def server_context(cert_file: str, key_file: str | None) -> ssl.SSLContext:
    """For clients of the router: TLS 1.2 or later, HTTP/1.1.

    Raises:
        ConfigError: the files cannot be read or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert_file, key_file)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(
            f"no certificate and key can be read from {cert_file} and {key_file}: {error}",
            field="--tls-cert-file",
            hint="Give PEM files that belong together; the key without a pass phrase",
        ) from error
    return context


def worker_context(ca_file: str | None) -> ssl.SSLContext:
    """For workers with ``https`` URLs: their certificates are verified against ``ca_file``, or else against
    the system's trust store.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no certificates can be read from {ca_file}: {error}", field="--tls-worker-ca-file"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
