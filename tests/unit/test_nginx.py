"""deployments/nginx.conf, run as it stands but for ports and paths, before a server of each protocol."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

CONF = Path(__file__).parents[2] / "deployments" / "nginx.conf"

pytestmark = pytest.mark.skipif(
    not shutil.which("nginx") or not shutil.which("openssl"), reason="nginx or openssl is not installed"
)


class Echo(BaseHTTPRequestHandler):
    """Answers with the headers that came."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


class Health(health_pb2_grpc.HealthServicer):
    """Serves whoever has the key."""

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        keyed = ("authorization", "Bearer a-key") in context.invocation_metadata()
        known = any(name == "x-forwarded-for" for name, _ in context.invocation_metadata())
        return health_pb2.HealthCheckResponse(status=1 if keyed and known else 2)


@dataclass(frozen=True)
class Front:
    http: int
    grpc: int
    tls: Path

    def context(self, certificate: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.tls / "clients.pem"))
        if certificate:
            context.load_cert_chain(self.tls / "client.pem", self.tls / "client.key")
        return context


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def make_certificates(tls: Path) -> None:
    """An authority, and what it signed for the server and one client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tls, check=True, capture_output=True)

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "clients.pem", "-subj", "/CN=authority")
    (tls / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name, key in (("certificate", "key.pem"), ("client", "client.key")):
        openssl("req", *new, "-keyout", key, "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signer = ["-CA", "clients.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.pem")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("nginx")
    make_certificates(folder)
    web = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    rpc = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(Health(), rpc)
    behind = rpc.add_insecure_port("127.0.0.1:0")
    rpc.start()
    ports = {"8443": free_port(), "9443": free_port(), "8000": web.server_port, "9000": behind}
    text = CONF.read_text().replace("/etc/dsde/tls", str(folder)).replace("/run/", f"{folder}/")
    text = re.sub(r"(listen |127\.0\.0\.1:)(\d{4})", lambda found: found[1] + str(ports[found[2]]), text)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(text.replace("http {", "http {" + temporary))
    process = subprocess.Popen(["nginx", "-c", folder / "nginx.conf", "-p", folder], stderr=subprocess.PIPE, text=True)
    try:
        for port in (ports["8443"], ports["9443"]):
            while process.poll() is None:
                with socket.socket() as one:
                    if one.connect_ex(("127.0.0.1", port)) == 0:
                        break
        assert process.poll() is None, process.stderr.read()
        yield Front(ports["8443"], ports["9443"], folder)
    finally:
        process.terminate()
        process.wait(10)
        web.shutdown()
        rpc.stop(0)


def post(front: Front, certificate: bool, content: bytes = b"{}") -> httpx.Response:
    with httpx.Client(verify=front.context(certificate), trust_env=False) as client:
        return client.post(
            f"https://localhost:{front.http}/v1/completions", content=content, headers={"authorization": "Bearer a-key"}
        )


def check(front: Front, certificate: bool) -> int:
    authority, key, own = ((front.tls / name).read_bytes() for name in ("clients.pem", "client.key", "client.pem"))
    credentials = grpc.ssl_channel_credentials(authority, *((key, own) if certificate else ()))
    with grpc.secure_channel(f"localhost:{front.grpc}", credentials, (("grpc.enable_http_proxy", 0),)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(
            health_pb2.HealthCheckRequest(), timeout=20, metadata=(("authorization", "Bearer a-key"),)
        ).status


def test_a_client_with_a_certificate_reaches_both_servers_with_its_key(front: Front) -> None:
    answer = post(front, certificate=True)
    assert answer.status_code == 200
    assert answer.json()["authorization"] == "Bearer a-key"
    # So that a server without keys knows that the caller is on another machine.
    assert answer.json()["x-forwarded-for"] == "127.0.0.1"
    assert check(front, certificate=True) == health_pb2.HealthCheckResponse.SERVING


def test_a_client_without_one_reaches_neither(front: Front) -> None:
    refused = post(front, certificate=False)
    assert (refused.status_code, "No required SSL certificate" in refused.text) == (400, True)
    with pytest.raises(grpc.RpcError) as error:
        check(front, certificate=False)
    assert error.value.code() is not grpc.StatusCode.OK


def test_neither_port_speaks_plain_text(front: Front) -> None:
    assert httpx.get(f"http://localhost:{front.http}/health", trust_env=False).status_code == 400
    plain = grpc.insecure_channel(f"localhost:{front.grpc}", (("grpc.enable_http_proxy", 0),))
    with plain as channel, pytest.raises(grpc.RpcError):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


def test_a_body_over_the_limit_is_refused(front: Front) -> None:
    assert post(front, certificate=True, content=b" " * (4 * 2**20 + 1)).status_code == 413
    assert post(front, certificate=True, content=b" " * (4 * 2**20)).status_code == 200
